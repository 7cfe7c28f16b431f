//! A device that fails, by error or by panic, at any step: who was in flight is told, nothing is kept, and
//! the next request is served as if nothing had been.

use crate::common::{all_home, complete, complete_all, engine_with, greedy, prompt};
use mainstem::actors::device::Factory;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, RequestError};
use mainstem_kernels::{DeviceError, StepBatch, StepOutput};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a device fails.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Error,
    Panic,
    /// It fails, and cannot be rebuilt the first time.
    ErrorTwice,
}

/// A device that fails once, at its k-th step.
struct Failing {
    inner: Box<dyn Executor>,
    steps_left: Arc<AtomicU64>,
    fault: Fault,
}

impl Executor for Failing {
    fn run(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError> {
        if self.steps_left.fetch_sub(1, Ordering::Relaxed) == 0 {
            match self.fault {
                Fault::Panic => panic!("the test's device panics"),
                Fault::Error | Fault::ErrorTwice => {
                    return Err(DeviceError::Fault("the test's device fails".into()));
                }
            }
        }
        self.inner.run(batch, out)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

fn failing(mut factory: Factory, at_step: u64, fault: Fault) -> Factory {
    let steps_left = Arc::new(AtomicU64::new(at_step));
    let mut built = 0;
    Box::new(move || {
        built += 1;
        if built == 2 && matches!(fault, Fault::ErrorTwice) {
            anyhow::bail!("the test's device stays away");
        }
        Ok(Box::new(Failing { inner: factory()?, steps_left: steps_left.clone(), fault }))
    })
}

#[actix::test]
async fn requests_in_flight_are_told_and_the_next_succeeds() {
    for fault in [Fault::Error, Fault::Panic] {
        for at_step in [0, 1, 2, 5, 9] {
            let budget = [("scheduler.token_budget", 16.into())];
            let engine = engine_with("gqa", &budget, |factory| failing(factory, at_step, fault)).await;
            let requests = (0..6).map(|i| greedy(&prompt(i, 10 + 7 * i), 12));
            let outcomes = complete_all(&engine, requests.clone()).await;
            let failed = outcomes.iter().filter(|outcome| {
                matches!(&outcome.end, Some(Err(RequestError::DeviceFailed(why))) if why.contains("the test's device"))
            });
            let failed = failed.count();
            assert!(
                (1..=4).contains(&failed),
                "{fault:?} at {at_step}: {failed} of 4 slots' requests failed"
            );
            for outcome in outcomes.iter().filter(|outcome| outcome.end == Some(Ok(FinishReason::Length))) {
                assert_eq!(outcome.tokens.len(), 12);
            }
            let again = complete_all(&engine, requests.clone()).await;
            for (request, outcome) in requests.zip(again) {
                let alone = complete(&engine, request).await;
                assert_eq!(outcome.end, Some(Ok(FinishReason::Length)), "{fault:?} at {at_step}");
                assert_eq!(outcome.ids(), alone.ids(), "{fault:?} at {at_step}");
            }
            all_home(&engine, 4).await;
            engine.stop();
        }
    }
}

#[actix::test]
async fn a_device_that_cannot_be_rebuilt_is_tried_again() {
    let engine = engine_with("gqa", &[], |factory| failing(factory, 1, Fault::ErrorTwice)).await;
    let mut failures = 0;
    loop {
        let outcome = complete(&engine, greedy(&prompt(0, 5), 4)).await;
        match outcome.end {
            Some(Err(RequestError::DeviceFailed(why))) => {
                assert!(why.contains("the test's device"), "{why}");
                failures += 1;
            }
            end => {
                assert_eq!(end, Some(Ok(FinishReason::Length)));
                break;
            }
        }
        // The fault, and at most one request that met the failing rebuild.
        assert!(failures <= 2, "the device does not come back");
    }
    assert!(failures >= 1);
    all_home(&engine, 4).await;
    engine.stop();
}
