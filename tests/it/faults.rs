//! Tests of devices that fail with an error or a panic, hang or compute NaN at any step: requests in flight
//! get an error, all resources are released, and the next request is served normally.

use crate::common::{
    all_home, complete, complete_all, config, engine, engine_with, fixture, greedy, outcome, prompt,
};
use mainstem::actors::Engine;
use mainstem::actors::device::ExecutorFactory;
use mainstem::cli::start;
use mainstem::config::Config;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, RequestError};
use mainstem_kernels::{DeviceError, HandoffPorts, StepBatch, StepOutput};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use toml::Value;

/// A device that reports success without results at one step, which only a bug could cause.
struct WithoutResults {
    inner: Box<dyn Executor>,
    steps_left: Arc<AtomicU64>,
}

impl Executor for WithoutResults {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        self.inner.run(batch, flow, out)?;
        if self.steps_left.fetch_sub(1, Ordering::Relaxed) == 0 {
            out.tokens.clear();
        }
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

fn without_results(mut factory: ExecutorFactory, at_step: u64) -> ExecutorFactory {
    let steps_left = Arc::new(AtomicU64::new(at_step));
    Box::new(move |stage| {
        Ok(Box::new(WithoutResults { inner: factory(stage)?, steps_left: steps_left.clone() }))
    })
}

/// Makes the first rebuild of a device fail.
fn away_once(mut factory: ExecutorFactory) -> ExecutorFactory {
    let mut built = 0;
    Box::new(move |stage| {
        built += 1;
        if built == 2 {
            anyhow::bail!("the injected device stays away");
        }
        factory(stage)
    })
}

fn injected(faults: &str, settings: &[(&'static str, Value)]) -> Vec<(&'static str, Value)> {
    let inject = [("faults.enabled", true.into()), ("faults.inject", faults.into())];
    [settings, &inject].concat()
}

/// Wraps the only device of an engine.
fn with_faults(factory: ExecutorFactory, settings: &Config) -> ExecutorFactory {
    let factories = start::inject_faults(vec![vec![factory]], &settings.device.groups, &settings.faults);
    factories.into_iter().flatten().next().expect("there is a device")
}

async fn faulty(faults: &str, settings: &[(&'static str, Value)]) -> Engine {
    engine("gqa", &injected(faults, settings)).await
}

/// Runs six requests on four slots with a fault: some fail, the others are unaffected, and afterwards all
/// resources are released.
async fn fail_and_recover(fault: &str, settings: &[(&'static str, Value)]) {
    let what = format!("{fault}, {settings:?}");
    let mut settings = settings.to_vec();
    settings.push(("scheduler.token_budget", 16.into()));
    let engine = faulty(fault, &settings).await;
    let requests = (0..6).map(|i| greedy(&prompt(i, 10 + 7 * i), 12));
    let outcomes = complete_all(&engine, requests.clone()).await;
    let words = if fault.starts_with("hang") { "no step" } else { "injected" };
    let failed = outcomes.iter().filter(|outcome| {
        let end = outcome.end.as_ref();
        matches!(end, Some(Err(RequestError::DeviceFailed(why))) if why.contains(words))
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
    for fault in ["fail", "panic"] {
        for step in [1, 2, 3, 6, 10] {
            fail_and_recover(&format!("{fault}@{step}"), &[]).await;
        }
    }
}

/// The timeout ends the step. The thread hangs for longer, while the device is rebuilt on another.
#[actix::test]
async fn a_device_that_hangs_is_one_that_fails() {
    let timeout = [("device.step_timeout", "2s".into())];
    fail_and_recover("hang@2:6s", &timeout).await;
}

/// Only the request of the row that is not finite fails, and no device is rebuilt.
#[actix::test]
async fn a_row_that_is_not_finite_costs_its_request_alone() {
    let requests = || (0..4).map(|i| greedy(&prompt(i, 10 + 7 * i), 12));
    let alone = engine("gqa", &[]).await;
    let right: Vec<_> = complete_all(&alone, requests()).await.iter().map(|outcome| outcome.ids()).collect();
    alone.stop();
    for step in [1, 4] {
        let engine = faulty(&format!("nan@{step}"), &[]).await;
        let mut failed = 0;
        for (outcome, right) in complete_all(&engine, requests()).await.iter().zip(&right) {
            match &outcome.end {
                Some(Ok(FinishReason::Length)) => assert_eq!(&outcome.ids(), right),
                Some(Err(RequestError::SamplingFailed(why))) if why.contains("no finite logits") => {
                    assert_eq!(outcome.ids()[..], right[..outcome.ids().len()]);
                    failed += 1;
                }
                other => panic!("nan@{step}: {other:?}"),
            }
        }
        assert_eq!(failed, 1, "nan@{step}");
        all_home(&engine, 4).await;
        engine.stop();
    }
}

/// Without a device, the fault is that of the device that returns the results.
#[actix::test]
async fn faults_may_be_those_of_any_device_of_a_group() {
    let groups = [("device.groups", "0&1;2".into())];
    for fault in ["fail@3", "fail/0@3", "panic/cpu:1@4", "nan@2"] {
        let engine = faulty(fault, &groups).await;
        let request = greedy(&prompt(0, 9), 8);
        let outcome = complete(&engine, request.clone()).await;
        assert!(matches!(outcome.end, Some(Err(_))), "{fault}: {:?}", outcome.end);
        let again = complete(&engine, request).await;
        assert_eq!((&again.end, again.tokens.len()), (&Some(Ok(FinishReason::Length)), 8), "{fault}");
        all_home(&engine, 4).await;
        engine.stop();
    }
}

#[actix::test]
async fn a_fault_under_the_other_policies_is_no_worse() {
    let concurrent = [("scheduler.policy", "concurrent".into())];
    let window = [("scheduler.policy", "window".into()), ("scheduler.window", "20ms".into())];
    for step in [1, 4, 8] {
        fail_and_recover(&format!("fail@{step}"), &concurrent).await;
        fail_and_recover(&format!("panic@{step}"), &window).await;
    }
}

/// With a step for each sequence, the first ones of an iteration have ended when a later one fails: no
/// request gets two ends.
#[actix::test]
async fn who_is_over_when_a_later_step_of_the_iteration_fails_is_over() {
    let concurrent = [("scheduler.policy", "concurrent".into())];
    for at_step in [1, 2, 3] {
        let engine = faulty(&format!("fail@{}", at_step + 1), &concurrent).await;
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
    let engine = faulty("fail@4", &budget).await;
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
        let engine = engine_with("gqa", &[], |factory| without_results(factory, at_step)).await;
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
    let settings = injected("fail@2", &[]);
    let config = config(&fixture("gqa"), &settings);
    let wrap = |factory| away_once(with_faults(factory, &config));
    let engine = engine_with("gqa", &settings, wrap).await;
    let mut failures = 0;
    loop {
        let outcome = complete(&engine, greedy(&prompt(0, 5), 4)).await;
        match outcome.end {
            Some(Err(RequestError::DeviceFailed(why))) => {
                assert!(why.contains("injected"), "{why}");
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
