//! Tests of groups in which a device fails in every way and at every point: requests in flight get one error,
//! the group is rebuilt, later requests are correct, and no thread is left.

mod hangs;
mod late;
mod rank;
mod real;
mod steps;

use crate::common::{self, Outcome, all_home, complete_all, fixture, prompt, sampled};
use mainstem::actors::engine::{self, Engine};
use mainstem::cli::start::PreparedModel;
use mainstem::model::ModelRef;
use mainstem::model::partition::{Partition, Stage, StageRank};
use mainstem::model::shard::ExpertSplit;
use mainstem::request::{FinishReason, Request, RequestError};
use mainstem_kernels::random::philox;
use rank::{Failure, Fault, Moment, Script, Shape};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SHAPES: [Shape; 5] = [Shape(1, 1), Shape(2, 1), Shape(1, 2), Shape(2, 2), Shape(3, 1)];

/// Step timeout in tests with a hanging device; much longer than any step.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// Starts an engine on a group of test devices.
async fn engine(script: &Arc<Script>, step_timeout: Option<Duration>) -> Engine {
    let config = common::config(
        &fixture("gqa"),
        // The scripted devices know of no shared pages.
        &[("scheduler.token_budget", 16.into()), ("kv.prefix_cache", "off".into())],
    );
    let prepared = PreparedModel::open(&config, &ModelRef::Path(fixture("gqa"))).expect("the fixture opens");
    let PreparedModel { mut setup, tokenizer, .. } = prepared;
    setup.step_timeout = step_timeout;
    let factories = script.factories(setup.limits);
    setup.partition = named(factories.iter().map(Vec::len));
    setup.lanes = factories.len();
    engine::start(setup, tokenizer, factories).await.expect("the engine starts")
}

/// Returns stages with this number of devices, named by index.
fn named(stages: impl Iterator<Item = usize>) -> Partition {
    let mut names = (0..).map(|number| format!("device:{number}"));
    let stage = |ranks: usize| {
        let rank = |device| StageRank { device, share: 1 };
        Stage { encoder: 0..0, decoder: 0..0, ranks: names.by_ref().take(ranks).map(rank).collect() }
    };
    Partition { stages: stages.map(stage).collect(), experts: ExpertSplit::Column }
}

/// Returns six requests for four slots, with prompts in chunks.
fn requests() -> Vec<Request> {
    (0..6).map(|i| sampled(&prompt(i, 10 + 7 * i), 12, i as u64)).collect()
}

/// Returns the outcomes on one device without failures.
async fn expected() -> Vec<Vec<u32>> {
    let script = Script::new(Shape(1, 1), []);
    let engine = engine(&script, None).await;
    let outcomes = complete_all(&engine, requests()).await;
    engine.stop();
    outcomes.iter().map(Outcome::ids).collect()
}

/// Returns whether the request completed. Otherwise, checks its error and its partial answer.
fn served(outcome: &Outcome, right: &[u32], why: &[&str]) -> bool {
    match &outcome.end {
        Some(Ok(FinishReason::Length)) => {
            assert_eq!(outcome.ids(), right);
            true
        }
        Some(Err(RequestError::DeviceFailed(message))) => {
            assert!(why.iter().all(|why| message.contains(why)), "{message:?} says nothing of {why:?}");
            assert!(right.starts_with(&outcome.ids()));
            false
        }
        other => panic!("{other:?}"),
    }
}

/// Returns the error that clients get.
fn failure_messages(failure: Failure) -> [String; 2] {
    let why = match failure.fault {
        Fault::Error | Fault::Panic => "the test's device fails",
        Fault::Kill => "a panic without words",
        // Only the log names the device.
        Fault::Stall => return ["device fault: ", "no step result within 5s"].map(str::to_owned),
    };
    [format!("device:{}", failure.device), why.to_owned()]
}

async fn fail_and_recover(shape: Shape, failure: Failure, right: &[Vec<u32>]) {
    let what = format!("{shape:?}, {failure:?}");
    let script = Script::new(shape, [failure]);
    let timeout = (failure.fault == Fault::Stall).then_some(STEP_TIMEOUT);
    let engine = engine(&script, timeout).await;
    let why = failure_messages(failure);
    let outcomes = complete_all(&engine, requests()).await;
    let served = outcomes
        .iter()
        .zip(right)
        .filter(|(outcome, right)| served(outcome, right, &[why[0].as_str(), why[1].as_str()]));
    let failed = 6 - served.count();
    assert!((1..=4).contains(&failed), "{what}: {failed} of 4 slots' requests failed");
    // The hanging device is released either while the group is serving or after its end.
    if failure.at_step.is_multiple_of(2) {
        script.release();
    }
    let again = complete_all(&engine, requests()).await;
    for (outcome, right) in again.iter().zip(right) {
        assert_eq!((&outcome.end, &outcome.ids()), (&Some(Ok(FinishReason::Length)), right), "{what}");
    }
    all_home(&engine, 4).await;
    assert!(script.builds.iter().all(|builds| builds.load(Ordering::SeqCst) == 2), "{what}: all anew, once");
    engine.stop();
    script.release();
    script.threads_end();
}

fn devices(shape: Shape) -> impl Iterator<Item = usize> {
    0..shape.0 * shape.1
}

#[actix::test]
async fn whatever_rank_fails_the_group_comes_back() {
    let right = expected().await;
    for shape in SHAPES {
        for device in devices(shape) {
            for (at_step, moment) in
                [(0, Moment::Begin), (1, Moment::End), (4, Moment::Middle), (9, Moment::End)]
            {
                for fault in [Fault::Error, Fault::Panic, Fault::Kill] {
                    fail_and_recover(shape, Failure { device, at_step, fault, moment }, &right).await;
                }
            }
        }
    }
}

#[actix::test]
async fn a_rank_that_hangs_is_left_behind() {
    let right = expected().await;
    let mut trials = Vec::new();
    for shape in SHAPES {
        for device in devices(shape) {
            for (at_step, moment) in [(0, Moment::Begin), (3, Moment::Middle)] {
                let failure = Failure { device, at_step, fault: Fault::Stall, moment };
                trials.push(fail_and_recover(shape, failure, &right));
            }
        }
    }
    // Each of them is idle most of the time.
    futures_util::future::join_all(trials).await;
}

/// Several failures of any kind except hanging, at random points.
#[actix::test]
async fn failures_by_chance_cost_nothing_but_what_was_in_flight() {
    let right = expected().await;
    for seed in 0..60 {
        let mut rolls = (0..).map(|at| philox([at, 0, 0, 0], [seed, 0])[0] as usize);
        let mut below = |end: usize| rolls.next().expect("they never end") % end;
        let shape = SHAPES[below(SHAPES.len())];
        let failures: Vec<Failure> = (0..1 + below(3))
            .map(|_| {
                let moment = [Moment::Build, Moment::Begin, Moment::Middle, Moment::End][below(4)];
                // The first build is the group's start.
                let at_step = if moment == Moment::Build { 1 + below(2) } else { below(60) };
                Failure {
                    device: below(shape.0 * shape.1),
                    at_step: at_step as u64,
                    fault: [Fault::Error, Fault::Panic, Fault::Kill][below(3)],
                    moment,
                }
            })
            .collect();
        let script = Script::new(shape, failures.clone());
        let engine = engine(&script, None).await;
        for _ in 0..3 {
            for (outcome, right) in complete_all(&engine, requests()).await.iter().zip(&right) {
                served(outcome, right, &["device:"]);
            }
        }
        all_home(&engine, 4).await;
        engine.stop();
        script.threads_end();
        let most = 1 + failures.len() as u64;
        assert!(script.builds.iter().all(|builds| builds.load(Ordering::SeqCst) <= most), "{failures:?}");
    }
}
