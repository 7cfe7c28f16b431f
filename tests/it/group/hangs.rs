//! Tests of groups in which a device hangs in a step, a build or at the end: waiters get an error, and memory
//! stays bounded. The cases of a test wait at the same time.

use super::STEP_TIMEOUT;
use super::rank::{Failure, Fault, Moment, Script, Shape};
use super::steps::{LIMITS, config, run, send};
use crate::common::{PATIENCE, within};
use futures_util::future::join_all;
use mainstem::actors::Status;
use mainstem::actors::group::{Group, GroupConfig};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn stall(device: usize, at_step: u64, moment: Moment) -> Failure {
    Failure { device, at_step, fault: Fault::Stall, moment }
}

/// Of single steps, what comes of them until one is served.
async fn until_served(group: &Group) -> Vec<String> {
    let (began, mut failures) = (Instant::now(), Vec::new());
    while let Err(why) = run(group, 1).await.remove(0) {
        assert!(began.elapsed() < PATIENCE, "the group does not come back");
        failures.push(why);
    }
    failures
}

/// Clients get an error in time, and a step that ends soon after leaves no second model in memory.
#[actix::test]
async fn a_rank_that_is_only_slow_is_not_replaced() {
    join_all([Shape(1, 1), Shape(2, 2)].map(wait_for_a_slow_rank)).await;
}

async fn wait_for_a_slow_rank(shape: Shape) {
    let last = shape.0 * shape.1 - 1;
    let script = Script::new(shape, [stall(last, 2, Moment::Middle)]);
    // As much again is what the test has to let it go on.
    let config = GroupConfig { step_timeout: Some(2 * STEP_TIMEOUT), ..config(shape) };
    let (group, _) = Group::start(script.factories(LIMITS), config).await.expect("it starts");
    let outcomes = run(&group, 5).await;
    assert_eq!(outcomes[4], Err("device fault: no step result within 10s".to_owned()));
    // Who comes while it is seen who hangs had nothing on the devices, and loses nothing.
    let next = send(&group, 6);
    script.release();
    assert!(within(next).await.result.is_ok());
    assert!(run(&group, 20).await.iter().all(Result::is_ok));
    assert_eq!((script.threads(), script.builds[last].load(Ordering::SeqCst)), (last + 1, 2));
    group.stop();
    script.threads_end();
}

/// The replacement thread hangs too, while the first still does: no third model is loaded, and no client
/// waits.
#[actix::test]
async fn of_a_device_one_thread_hangs_beside_its_own() {
    join_all([Shape(1, 1), Shape(1, 2)].map(hang_twice)).await;
}

async fn hang_twice(shape: Shape) {
    let last = shape.1 - 1;
    let script = Script::new(shape, [2, 10].map(|step| stall(last, step, Moment::Middle)));
    let config = GroupConfig { step_timeout: Some(STEP_TIMEOUT), ..config(shape) };
    let (group, _) = Group::start(script.factories(LIMITS), config).await.expect("it starts");
    assert!(run(&group, 5).await[4].is_err());
    assert!(run(&group, 6).await.iter().all(Result::is_ok), "it is replaced once");
    assert!(run(&group, 5).await[4].is_err());
    for _ in 0..3 {
        let why = format!("device fault: t0:{last}: hangs, as does its previous thread");
        assert_eq!(run(&group, 1).await, [Err(why)]);
    }
    assert_eq!(script.threads(), last + 2);
    script.release();
    until_served(&group).await;
    assert!(run(&group, 20).await.iter().all(Result::is_ok));
    group.stop();
    script.threads_end();
}

/// Dropping a device may hang too, whether on request or at the end of its thread.
#[actix::test]
async fn a_rank_that_hangs_while_it_is_dropped_is_replaced() {
    let cases = [(Shape(1, 1), Fault::Kill), (Shape(2, 2), Fault::Kill), (Shape(1, 2), Fault::Error)];
    join_all(cases.map(hang_in_drop)).await;
}

async fn hang_in_drop((shape, fault): (Shape, Fault)) {
    let last = shape.0 * shape.1 - 1;
    let failure = Failure { device: last, at_step: 2, fault, moment: Moment::Begin };
    let script = Script::new(shape, [failure, stall(last, 0, Moment::Drop)]);
    let config = GroupConfig { step_timeout: Some(STEP_TIMEOUT), ..config(shape) };
    let (group, _) = Group::start(script.factories(LIMITS), config).await.expect("it starts");
    assert!(run(&group, 5).await.iter().any(Result::is_err));
    assert!(run(&group, 20).await.iter().all(Result::is_ok), "it is replaced");
    assert_eq!(script.threads(), last + 2);
    group.stop();
    script.release();
    script.threads_end();
}

/// Clients do not wait for a device that may never come back; when it does, it is used.
#[actix::test]
async fn steps_do_not_wait_for_a_build_that_hangs() {
    join_all([(Shape(1, 1), "t0:0"), (Shape(2, 2), "t1:1")].map(hang_in_build)).await;
}

async fn hang_in_build((shape, name): (Shape, &str)) {
    let last = shape.0 * shape.1 - 1;
    let fault = Failure { device: 0, at_step: 2, fault: Fault::Error, moment: Moment::Begin };
    let script = Script::new(shape, [fault, stall(last, 1, Moment::Build)]);
    let config = GroupConfig { step_timeout: Some(STEP_TIMEOUT), ..config(shape) };
    let (group, _) = Group::start(script.factories(LIMITS), config).await.expect("it starts");
    assert!(run(&group, 5).await.iter().any(Result::is_err));
    let outcomes = run(&group, 3).await;
    let why = format!("device fault: {name}: is still being built and exceeds its time limit");
    assert_eq!(outcomes, [(); 3].map(|()| Err(why.clone())));
    assert_eq!(run(&group, 1).await, [Err(why)]);
    script.release();
    until_served(&group).await;
    assert_eq!((script.threads(), script.builds[last].load(Ordering::SeqCst)), (last + 1, 2));
    group.stop();
    script.threads_end();
}

/// The status used by `/health`.
#[actix::test]
async fn a_build_that_hangs_shows_in_the_status() {
    let fault = Failure { device: 0, at_step: 0, fault: Fault::Error, moment: Moment::Begin };
    let script = Script::new(Shape(1, 1), [fault, stall(0, 1, Moment::Build)]);
    let status = Arc::new(Status::new(Duration::ZERO, 0));
    let config = GroupConfig { status: status.clone(), ..config(Shape(1, 1)) };
    let (group, _) = Group::start(script.factories(LIMITS), config).await.expect("it starts");
    assert!(run(&group, 1).await[0].is_err());
    let began = Instant::now();
    while status.stalled_for().is_zero() {
        assert!(began.elapsed() < PATIENCE, "nothing is noticed");
        tokio::task::yield_now().await;
    }
    script.release();
    until_served(&group).await;
    while !status.stalled_for().is_zero() {
        assert!(began.elapsed() < PATIENCE, "it is back, but not for the status");
        tokio::task::yield_now().await;
    }
    group.stop();
    script.threads_end();
}

/// Also without a step timeout.
#[actix::test]
async fn the_end_does_not_wait_for_who_hangs() {
    let script = Script::new(Shape(2, 1), [stall(1, 2, Moment::Begin)]);
    let (group, _) = Group::start(script.factories(LIMITS), config(Shape(2, 1))).await.expect("it starts");
    let running: Vec<_> = (0..5).map(|number| send(&group, number)).collect();
    let mut results = Vec::new();
    group.stop();
    for ran in running {
        results.push(within(ran).await.result.is_ok());
    }
    assert!(!results[4], "{results:?}");
    script.release();
    script.threads_end();
}
