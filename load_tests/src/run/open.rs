//! The open loop: each request is sent when it is due, whatever became of those before it.
//!
//! Invariant: while no limit is set on what is in flight, nothing here waits for an answer.

use std::{collections::VecDeque, iter::StepBy, ops::Range, rc::Rc, time::Duration};

use tokio::task::{JoinSet, yield_now};

use super::worker::{Worker, brought};
use crate::{
    client::{Outgoing, clock::Clock},
    sample::Sample,
};

/// Requests that lie ready before they are due: enough for a burst, few enough for the memory.
const AHEAD_MAX: usize = 64;

/// More time than a request takes to make; with less left, none is begun.
const SPARE_MIN: Duration = Duration::from_millis(2);

/// Less time than the alarm needs to wake somebody.
const ALARM_MIN: Duration = Duration::from_micros(60);

/// A worker's requests, made in the time left before they are due.
pub struct Ahead<'a> {
    worker: &'a Worker,
    dues: &'a [Duration],
    /// Those not made yet.
    indices: StepBy<Range<usize>>,
    ready: VecDeque<(Duration, Outgoing)>,
}

impl<'a> Ahead<'a> {
    /// The requests of `indices`, due at the `dues` of that index.
    pub fn new(worker: &'a Worker, dues: &'a [Duration], indices: StepBy<Range<usize>>) -> Self {
        Self { worker, dues, indices, ready: VecDeque::new() }
    }

    /// Makes as many as may lie ready.
    pub fn fill(&mut self) {
        while self.make_one() {}
    }

    fn make_one(&mut self) -> bool {
        if self.ready.len() == AHEAD_MAX {
            return false;
        }
        let Some(index) = self.indices.next() else { return false };
        self.ready.push_back((self.dues[index], self.worker.prepare(index)));
        true
    }

    /// The next request and when it is due.
    fn next(&mut self) -> Option<(Duration, Outgoing)> {
        if self.ready.is_empty() {
            self.make_one();
        }
        self.ready.pop_front()
    }

    /// Waits until `due`, and uses the time.
    async fn wait(&mut self, due: Duration, clock: Clock) {
        loop {
            let left = due.saturating_sub(clock.now());
            if left.is_zero() {
                return;
            }
            if left > SPARE_MIN && self.make_one() || left < ALARM_MIN {
                yield_now().await;
            } else {
                self.worker.job.alarm.sleep_until(clock.at(due)).await;
            }
        }
    }
}

/// Sends all of them and reads their answers.
pub async fn send_all(worker: &Rc<Worker>, mut ahead: Ahead<'_>, clock: Clock) -> Vec<Sample> {
    let (mut in_flight, mut samples) = (JoinSet::new(), Vec::new());
    while let Some((due, outgoing)) = ahead.next() {
        if clock.is_over(due) {
            break;
        }
        let turn = async {
            ahead.wait(due, clock).await;
            worker.permit().await
        };
        let Some(permit) = worker.unless_over(clock, turn).await else { break };
        let worker = Rc::clone(worker);
        in_flight.spawn_local(async move {
            let sample = worker.send(outgoing, due, clock).await;
            drop(permit);
            sample
        });
        while let Some(end) = in_flight.try_join_next() {
            samples.push(brought(end));
        }
        // Answers are read even while requests are late.
        yield_now().await;
    }
    while let Some(end) = in_flight.join_next().await {
        samples.push(brought(end));
    }
    samples
}
