//! Tests of lanes (steps in flight) with a real model: the tokens equal those without lanes, and
//! faults, disconnected clients and bugs in one lane are contained.

use crate::common::{
    all_home, complete, complete_all, engine, engine_with, greedy, outcome, prompt, sampled, submit,
};
use mainstem::actors::device::ExecutorFactory;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, Request, RequestError};
use mainstem_kernels::{DeviceError, HandoffPorts, SpanTable, StepBatch, StepOutput};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use toml::Value;

/// Called by the test device before each step.
type Mishap = fn(&StepBatch, &mut StepOutput) -> Result<(), DeviceError>;

/// A device that records each step and misbehaves at a given one.
struct Watched {
    inner: Box<dyn Executor>,
    steps: Arc<Mutex<Vec<StepBatch>>>,
    mishap: (usize, Mishap),
}

impl Executor for Watched {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let mut steps = self.steps.lock().expect("nobody panics with it");
        steps.push(batch.clone());
        let number = steps.len();
        drop(steps);
        self.inner.run(batch, flow, out)?;
        if number == self.mishap.0 { (self.mishap.1)(batch, out) } else { Ok(()) }
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

fn watched(
    mut factory: ExecutorFactory,
    steps: Arc<Mutex<Vec<StepBatch>>>,
    mishap: (usize, Mishap),
) -> ExecutorFactory {
    Box::new(move |stage| Ok(Box::new(Watched { inner: factory(stage)?, steps: steps.clone(), mishap })))
}

fn settings(lanes: i64, shuffle: &'static str) -> Vec<(&'static str, Value)> {
    vec![
        ("scheduler.slots", Value::from(6)),
        ("scheduler.lanes", Value::from(lanes)),
        ("scheduler.shuffle", Value::from(shuffle)),
        ("scheduler.token_budget", Value::from(16)),
    ]
}

/// Returns greedy and sampled requests of various lengths, some with prompt log-probabilities.
fn requests() -> Vec<Request> {
    let greedy = (0..7).map(|i| greedy(&prompt(i, 3 + 9 * i), 4 + 3 * i as u32));
    let sampled = (7..14).map(|i| sampled(&prompt(i, 2 + i), 18 - i as u32, 1000 + i as u64));
    let all = greedy.chain(sampled).enumerate();
    all.map(|(i, request)| Request {
        prompt_logprobs: (i % 3 == 0).then_some(2),
        logprobs: Some(0),
        ..request
    })
    .collect()
}

/// No mishap.
const NONE: (usize, Mishap) = (0, |_, _| Ok(()));

#[actix::test]
async fn lanes_change_no_token() {
    let one = engine("gqa", &settings(1, "on")).await;
    let expected = complete_all(&one, requests()).await;
    one.stop();
    for lanes in [2, 3, 6] {
        for shuffle in ["on", "off"] {
            let steps = Arc::new(Mutex::new(Vec::new()));
            let settings = settings(lanes, shuffle);
            let engine = engine_with("gqa", &settings, |factory| watched(factory, steps.clone(), NONE)).await;
            let outcomes = complete_all(&engine, requests()).await;
            for (number, (outcome, expected)) in outcomes.iter().zip(&expected).enumerate() {
                let what = format!("{lanes} lanes, shuffle {shuffle}, request {number}");
                assert_eq!(
                    (&outcome.tokens, &outcome.prompt),
                    (&expected.tokens, &expected.prompt),
                    "{what}"
                );
                assert_eq!(outcome.end, expected.end, "{what}");
            }
            // Which sequence ends before others of its lane depends on the times at which they arrive.
            let has_moves =
                || steps.lock().expect("nobody panics with it").iter().any(|it| !it.moves.is_empty());
            let mut rounds = 0;
            while (lanes, shuffle) == (2, "on") && !has_moves() && rounds < 50 {
                complete_all(&engine, requests()).await;
                rounds += 1;
            }
            all_home(&engine, 6).await;
            engine.stop();
            check(&steps.lock().expect("nobody panics with it"), lanes as u32, shuffle);
        }
    }
}

/// Checks that each step belongs to one lane and refers only to that lane's resources.
fn check(steps: &[StepBatch], lanes: u32, shuffle: &str) {
    let seen: BTreeSet<u32> = steps.iter().map(|step| step.lane).collect();
    assert_eq!(seen, (0..lanes).collect());
    let len = 6 / lanes;
    for step in steps {
        let own = step.lane * len..(step.lane + 1) * len;
        let moved = step.moves.iter().flat_map(|m| [m.from, m.to]);
        let written = step.table_updates.iter().map(|entry| entry.slot);
        let named = step.spans.iter().map(|span| span.slot).chain(moved).chain(written);
        assert!({ named }.all(|slot| own.contains(&slot)), "{step:?}");
        let holes = step.spans.iter().filter(|span| span.table == SpanTable::Null).count();
        assert!(shuffle == "off" || holes == 0);
        assert!(shuffle == "on" || step.moves.is_empty());
    }
    let moves: usize = steps.iter().map(|step| step.moves.len()).sum();
    assert_eq!(
        moves > 0,
        shuffle == "on" && lanes == 2,
        "{moves} moves with {lanes} lanes, shuffle {shuffle}"
    );
}

#[actix::test]
async fn a_fault_ends_what_is_in_slots_in_all_lanes_and_nothing_else() {
    for at_step in [1, 2, 5, 9] {
        let fail: Mishap = |_, _| Err(DeviceError::Fault("the test's device fails".into()));
        let steps = Arc::default();
        let settings = settings(3, "on");
        let engine = engine_with("gqa", &settings, |factory| watched(factory, steps, (at_step, fail))).await;
        let requests: Vec<Request> = (0..9).map(|i| greedy(&prompt(i, 5 + 4 * i), 12)).collect();
        let outcomes = complete_all(&engine, requests.clone()).await;
        let mut failed = 0;
        for (request, outcome) in requests.into_iter().zip(outcomes) {
            let alone = complete(&engine, request).await.ids();
            match outcome.end {
                Some(Ok(FinishReason::Length)) => assert_eq!(outcome.ids(), alone, "fault at {at_step}"),
                Some(Err(RequestError::DeviceFailed(ref why))) if why.contains("the test's device") => {
                    failed += 1;
                    assert!(alone.starts_with(&outcome.ids()), "fault at {at_step}");
                }
                ref end => panic!("fault at {at_step}: {end:?}"),
            }
        }
        assert!((1..=6).contains(&failed), "fault at {at_step}: {failed} of 6 slots' requests failed");
        all_home(&engine, 6).await;
        engine.stop();
    }
}

/// The loop of one lane panics, which only a bug could cause. Its requests end without a final event, those
/// of the other lanes continue, and the lane serves again.
#[actix::test]
async fn a_loop_that_panics_takes_no_other_lane_along() {
    let lose: Mishap = |_, out| {
        out.tokens.clear();
        Ok(())
    };
    let steps = Arc::default();
    let settings = settings(3, "on");
    let engine = engine_with("gqa", &settings, |factory| watched(factory, steps, (8, lose))).await;
    let requests: Vec<Request> = (0..6).map(|i| greedy(&prompt(i, 4), 12)).collect();
    let outcomes = complete_all(&engine, requests.clone()).await;
    let lost = outcomes.iter().filter(|outcome| outcome.end.is_none()).count();
    assert!((1..=2).contains(&lost), "{lost} of one lane's two");
    for (request, outcome) in requests.into_iter().zip(outcomes) {
        let alone = complete(&engine, request).await;
        assert_eq!(alone.end, Some(Ok(FinishReason::Length)));
        assert!(alone.ids().starts_with(&outcome.ids()));
        assert!(outcome.end.is_none() || outcome.ids().len() == 12);
    }
    assert!(!engine.status.has_failed());
    all_home(&engine, 6).await;
    engine.stop();
}

#[actix::test]
async fn who_hangs_up_makes_room_in_its_lane() {
    let engine = engine("gqa", &settings(3, "on")).await;
    for round in 0..4 {
        let mut streams = Vec::new();
        for number in 0..12 {
            streams.push(
                submit(&engine, greedy(&prompt(number, 3 + 6 * number), 30)).await.expect("there is room"),
            );
        }
        let mut staying = Vec::new();
        for (number, mut stream) in streams.into_iter().enumerate() {
            match (number + round) % 3 {
                0 => drop(stream),
                1 => drop(stream.next().await),
                _ => staying.push(outcome(stream)),
            }
        }
        for outcome in futures_util::future::join_all(staying).await {
            assert_eq!((outcome.tokens.len(), outcome.end), (30, Some(Ok(FinishReason::Length))));
        }
        all_home(&engine, 6).await;
    }
    engine.stop();
}

/// There cannot be more lanes than slots.
#[actix::test]
async fn there_are_no_more_lanes_than_slots() {
    let engine = engine("gqa", &settings(40, "on")).await;
    let outcomes = complete_all(&engine, requests()).await;
    assert!(outcomes.iter().all(|outcome| outcome.end == Some(Ok(FinishReason::Length))));
    all_home(&engine, 6).await;
    engine.stop();
}
