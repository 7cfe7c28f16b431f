//! Groups of devices in which one fails, in every way and at every point: requests in flight are told once, the group is
//! built again, the next requests are right, and no thread is left over.

mod hangs;
mod member;
mod real;
mod steps;

use crate::common::{self, Outcome, all_home, complete_all, drawn, fixture, prompt};
use mainstem::actors::engine::{self, Engine};
use mainstem::cli::start::Prepared;
use mainstem::model::ModelRef;
use mainstem::model::partition::{Member, Partition, Stage};
use mainstem::model::shard::ExpertSplit;
use mainstem::request::{FinishReason, Request, RequestError};
use mainstem_kernels::random::philox;
use member::{Failure, Fault, Moment, Script, Shape};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const SHAPES: [Shape; 5] = [Shape(1, 1), Shape(2, 1), Shape(1, 2), Shape(2, 2), Shape(3, 1)];

/// What a device may take where one hangs on purpose; far more than any step takes.
const STEP_TIMEOUT: Duration = Duration::from_secs(5);

/// An engine over such a group.
async fn engine(script: &Arc<Script>, step_timeout: Option<Duration>) -> Engine {
    let config = common::config(&fixture("gqa"), &[("scheduler.token_budget", 16.into())]);
    let prepared = Prepared::of(&config, &ModelRef::Path(fixture("gqa"))).expect("the fixture opens");
    let Prepared { mut setup, tokenizer, .. } = prepared;
    setup.step_timeout = step_timeout;
    let factories = script.factories(setup.limits);
    setup.partition = named(factories.iter().map(Vec::len));
    setup.lanes = factories.len();
    engine::start(setup, tokenizer, factories).await.expect("the engine starts")
}

/// Stages of that many devices, named by number.
fn named(stages: impl Iterator<Item = usize>) -> Partition {
    let mut names = (0..).map(|number| format!("device:{number}"));
    let stage = |members: usize| {
        let member = |device| Member { device, share: 1 };
        Stage { encoder: 0..0, decoder: 0..0, members: names.by_ref().take(members).map(member).collect() }
    };
    Partition { stages: stages.map(stage).collect(), experts: ExpertSplit::Column }
}

/// Six requests for four slots, whose prompts come in chunks.
fn requests() -> Vec<Request> {
    (0..6).map(|i| drawn(&prompt(i, 10 + 7 * i), 12, i as u64)).collect()
}

/// What comes of them when nothing fails, on one device.
async fn expected() -> Vec<Vec<u32>> {
    let script = Script::new(Shape(1, 1), []);
    let engine = engine(&script, None).await;
    let outcomes = complete_all(&engine, requests()).await;
    engine.stop();
    outcomes.iter().map(Outcome::ids).collect()
}

/// Whether the request was served whole. If not, it was told why, and what it got until then is right.
fn served(outcome: &Outcome, right: &[u32], why: &[&str]) -> bool {
    match &outcome.end {
        Some(Ok(FinishReason::Length)) => {
            assert_eq!(outcome.ids(), right);
            true
        }
        Some(Err(RequestError::DeviceFailed(told))) => {
            assert!(why.iter().all(|why| told.contains(why)), "{told:?} says nothing of {why:?}");
            assert!(right.starts_with(&outcome.ids()));
            false
        }
        other => panic!("{other:?}"),
    }
}

/// What clients are told of it.
fn told_of(failure: Failure) -> [String; 2] {
    let why = match failure.fault {
        Fault::Error | Fault::Panic => "the test's device fails",
        Fault::Kill => "a panic without words",
        // Whose silence it is, the log says.
        Fault::Stall => return ["device fault: ", "no answer within 5s"].map(str::to_owned),
    };
    [format!("device:{}", failure.device), why.to_owned()]
}

async fn fail_and_recover(shape: Shape, failure: Failure, right: &[Vec<u32>]) {
    let what = format!("{shape:?}, {failure:?}");
    let script = Script::new(shape, [failure]);
    let timeout = (failure.fault == Fault::Stall).then_some(STEP_TIMEOUT);
    let engine = engine(&script, timeout).await;
    let why = told_of(failure);
    let outcomes = complete_all(&engine, requests()).await;
    let served = outcomes
        .iter()
        .zip(right)
        .filter(|(outcome, right)| served(outcome, right, &[why[0].as_str(), why[1].as_str()]));
    let failed = 6 - served.count();
    assert!((1..=4).contains(&failed), "{what}: {failed} of 4 slots' requests failed");
    // Sometimes who hung wakes while the group serves on, sometimes when it is no more.
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
async fn whatever_member_fails_the_group_comes_back() {
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
async fn a_member_that_hangs_is_left_behind() {
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
    // Each of them waits for most of its time.
    futures_util::future::join_all(trials).await;
}

/// Several failures of any kind but silence, wherever chance puts them.
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
