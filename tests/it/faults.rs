//! Tests of devices that fail with an error or a panic at any step: requests in flight get an error, all
//! resources are released, and the next request is served normally.

use crate::common::{all_home, complete, complete_all, engine_with, greedy, outcome, prompt};
use mainstem::actors::device::ExecutorFactory;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, RequestError};
use mainstem_kernels::{DeviceError, HandoffPorts, StepBatch, StepOutput};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use toml::Value;

/// Failure of a device.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Error,
    Panic,
    /// The device fails, and its first rebuild fails too.
    ErrorTwice,
    /// The device reports success without results, which only a bug could cause.
    NoResults,
}

/// A device that fails once, at a given step.
struct Failing {
    inner: Box<dyn Executor>,
    steps_left: Arc<AtomicU64>,
    fault: Fault,
}

impl Executor for Failing {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        if self.steps_left.fetch_sub(1, Ordering::Relaxed) == 0 {
            match self.fault {
                Fault::Panic => panic!("the test's device panics"),
                Fault::Error | Fault::ErrorTwice => {
                    return Err(DeviceError::Fault("the test's device fails".into()));
                }
                Fault::NoResults => {
                    self.inner.run(batch, flow, out)?;
                    out.tokens.clear();
                    return Ok(());
                }
            }
        }
        self.inner.run(batch, flow, out)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

fn failing(mut factory: ExecutorFactory, at_step: u64, fault: Fault) -> ExecutorFactory {
    let steps_left = Arc::new(AtomicU64::new(at_step));
    let mut built = 0;
    Box::new(move |stage| {
        built += 1;
        if built == 2 && matches!(fault, Fault::ErrorTwice) {
            anyhow::bail!("the test's device stays away");
        }
        Ok(Box::new(Failing { inner: factory(stage)?, steps_left: steps_left.clone(), fault }))
    })
}

/// Runs six requests on four slots with a fault at step `at_step`: some fail, the others are unaffected, and
/// afterwards all resources are released.
async fn fail_and_recover(fault: Fault, at_step: u64, settings: &[(&'static str, Value)]) {
    let what = format!("{fault:?} at {at_step}, {settings:?}");
    let mut settings = settings.to_vec();
    settings.push(("scheduler.token_budget", 16.into()));
    let engine = engine_with("gqa", &settings, |factory| failing(factory, at_step, fault)).await;
    let requests = (0..6).map(|i| greedy(&prompt(i, 10 + 7 * i), 12));
    let outcomes = complete_all(&engine, requests.clone()).await;
    let failed = outcomes.iter().filter(|outcome| {
        let end = outcome.end.as_ref();
        matches!(end, Some(Err(RequestError::DeviceFailed(why))) if why.contains("the test's device"))
    });
    let failed = failed.count();
    assert!((1..=4).contains(&failed), "{what}: {failed} of 4 slots' requests failed");
    let through = outcomes.iter().filter(|outcome| outcome.end == Some(Ok(FinishReason::Length)));
    let through: Vec<usize> = through.map(|outcome| outcome.tokens.len()).collect();
    assert_eq!(through, vec![12; 6 - failed], "{what}: whoever did not fail is served whole");
    let again = complete_all(&engine, requests.clone()).await;
    for (request, outcome) in requests.zip(again) {
        let alone = complete(&engine, request).await;
        assert_eq!(outcome.end, Some(Ok(FinishReason::Length)), "{what}");
        assert_eq!(outcome.ids(), alone.ids(), "{what}");
    }
    all_home(&engine, 4).await;
    engine.stop();
}

#[actix::test]
async fn requests_in_flight_fail_and_the_next_succeeds() {
    for fault in [Fault::Error, Fault::Panic] {
        for at_step in [0, 1, 2, 5, 9] {
            fail_and_recover(fault, at_step, &[]).await;
        }
    }
}

#[actix::test]
async fn a_fault_under_the_other_policies_is_no_worse() {
    let concurrent = [("scheduler.policy", "concurrent".into())];
    let window = [("scheduler.policy", "window".into()), ("scheduler.window", "20ms".into())];
    for at_step in [0, 3, 7] {
        fail_and_recover(Fault::Error, at_step, &concurrent).await;
        fail_and_recover(Fault::Panic, at_step, &window).await;
    }
}

/// With a step for each sequence, the first ones of an iteration have ended when a later one fails: no
/// request gets two ends.
#[actix::test]
async fn who_is_over_when_a_later_step_of_the_iteration_fails_is_over() {
    let concurrent = [("scheduler.policy", "concurrent".into())];
    for at_step in [1, 2, 3] {
        let engine = engine_with("gqa", &concurrent, |factory| failing(factory, at_step, Fault::Error)).await;
        let streams = engine.intake.submit(vec![greedy(&prompt(0, 5), 1); 4]).await.expect("there is room");
        let outcomes = futures_util::future::join_all(streams.into_iter().map(outcome)).await;
        for (number, outcome) in outcomes.iter().enumerate() {
            match (&outcome.end, outcome.tokens.len()) {
                (Some(Ok(FinishReason::Length)), 1) => {}
                (Some(Err(RequestError::DeviceFailed(_))), 0) if number as u64 >= at_step => {}
                other => panic!("request {number}, fault at {at_step}: {other:?}"),
            }
        }
        assert!(outcomes.iter().any(|outcome| matches!(outcome.end, Some(Err(_)))), "fault at {at_step}");
        all_home(&engine, 4).await;
        engine.stop();
    }
}

/// The prompt takes eight steps and the fourth fails. The rest of it is not computed, and queued requests
/// that had not started are served.
#[actix::test]
async fn a_fault_amid_a_prompt_costs_that_request_alone() {
    let budget = [("scheduler.token_budget", 8.into())];
    let engine = engine_with("gqa", &budget, |factory| failing(factory, 3, Fault::Error)).await;
    let requests = [greedy(&prompt(0, 60), 5), greedy(&prompt(1, 20), 5), greedy(&prompt(2, 3), 5)];
    let outcomes = complete_all(&engine, requests.clone()).await;
    assert!(matches!(outcomes[0].end, Some(Err(RequestError::DeviceFailed(_)))), "{:?}", outcomes[0].end);
    for (request, outcome) in requests.iter().zip(&outcomes).skip(1) {
        assert_eq!(outcome.end, Some(Ok(FinishReason::Length)));
        assert_eq!(outcome.ids(), complete(&engine, request.clone()).await.ids());
    }
    assert_eq!(complete(&engine, requests[0].clone()).await.tokens.len(), 5);
    all_home(&engine, 4).await;
    engine.stop();
}

/// A bug ends the decode loop: its request ends without a final event, and the next request is served.
#[actix::test]
async fn the_decode_loop_starts_again_after_a_panic() {
    for at_step in [0, 1, 4] {
        let engine = engine_with("gqa", &[], |factory| failing(factory, at_step, Fault::NoResults)).await;
        let request = greedy(&prompt(0, 20), 8);
        let lost = complete(&engine, request.clone()).await;
        assert_eq!((&lost.end, lost.tokens.len()), (&None, at_step as usize), "at {at_step}");
        let next = complete(&engine, request.clone()).await;
        assert_eq!((&next.end, next.tokens.len()), (&Some(Ok(FinishReason::Length)), 8), "at {at_step}");
        assert_eq!(next.ids()[..at_step as usize], lost.ids());
        assert!(!engine.status.has_failed());
        all_home(&engine, 4).await;
        engine.stop();
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
        // The fault, and at most one request during the failing rebuild.
        assert!(failures <= 2, "the device does not come back");
    }
    assert!(failures >= 1);
    all_home(&engine, 4).await;
    engine.stop();
}
