//! The closed loop: each user sends a request, reads the response, waits for the think time, and sends the
//! next.
//!
//! Invariant: no user has more than one request in flight.

use std::{rc::Rc, time::Duration};

use tokio::task::JoinSet;

use super::worker::{Worker, unwrap_join};
use crate::{
    client::{PreparedRequest, clock::Clock},
    sample::Sample,
};

/// Starts one user for each of `firsts`; users send requests until none is left. Returns the samples.
pub async fn send_all(
    worker: &Rc<Worker>,
    firsts: Vec<PreparedRequest>,
    think: Duration,
    clock: Clock,
) -> Vec<Sample> {
    let mut users = JoinSet::new();
    for first in firsts {
        users.spawn_local(run_user(Rc::clone(worker), first, think, clock));
    }
    let mut samples = Vec::new();
    while let Some(end) = users.join_next().await {
        samples.append(&mut unwrap_join(end));
    }
    samples
}

/// Runs one user. Returns the samples of its requests.
async fn run_user(worker: Rc<Worker>, first: PreparedRequest, think: Duration, clock: Clock) -> Vec<Sample> {
    let (mut samples, mut ready, mut next) = (Vec::new(), Duration::ZERO, Some(first));
    while let Some(outgoing) = next {
        let permit = async {
            worker.job.alarm.sleep_until(clock.instant(ready)).await;
            worker.permit().await
        };
        let Some(permit) = worker.unless_ended(clock, permit).await else { break };
        let sample = worker.send(outgoing, ready, clock).await;
        drop(permit);
        ready = sample.ended.saturating_add(think);
        samples.push(sample);
        next = worker.take_next();
    }
    samples
}
