//! The open loop: each request is sent when it is due, regardless of earlier ones.
//!
//! Invariant: without a limit on requests in flight, sending never waits for a response.

use std::{collections::VecDeque, iter::StepBy, ops::Range, rc::Rc, time::Duration};

use tokio::task::{JoinSet, yield_now};

use super::worker::{Worker, unwrap_join};
use crate::{
    client::{PreparedRequest, clock::Clock},
    sample::Sample,
};

/// Maximum number of requests prepared ahead of time: enough for a burst, without using much memory.
const PREPARED_MAX: usize = 64;

/// Minimum time left before the next due time to prepare a request; preparing one takes less.
const IDLE_MIN: Duration = Duration::from_millis(2);

/// Wake-up latency of the alarm; shorter waits are spent yielding.
const ALARM_MIN: Duration = Duration::from_micros(60);

/// The requests of a worker, prepared in the idle time before they are due.
pub struct PreparedQueue<'a> {
    worker: &'a Worker,
    dues: &'a [Duration],
    /// Indices of the requests not prepared yet.
    indices: StepBy<Range<usize>>,
    ready: VecDeque<(Duration, PreparedRequest)>,
}

impl<'a> PreparedQueue<'a> {
    /// Creates the queue of the requests of `indices`, where `dues` holds the due times of all requests.
    pub fn new(worker: &'a Worker, dues: &'a [Duration], indices: StepBy<Range<usize>>) -> Self {
        Self { worker, dues, indices, ready: VecDeque::new() }
    }

    /// Prepares requests up to the limit.
    pub fn fill(&mut self) {
        while self.prepare_one() {}
    }

    fn prepare_one(&mut self) -> bool {
        if self.ready.len() == PREPARED_MAX {
            return false;
        }
        let Some(index) = self.indices.next() else { return false };
        self.ready.push_back((self.dues[index], self.worker.prepare(index)));
        true
    }

    /// Returns the next request and its due time.
    fn next(&mut self) -> Option<(Duration, PreparedRequest)> {
        if self.ready.is_empty() {
            self.prepare_one();
        }
        self.ready.pop_front()
    }

    /// Waits until `due`, preparing requests in the meantime.
    async fn wait(&mut self, due: Duration, clock: Clock) {
        loop {
            let left = due.saturating_sub(clock.now());
            if left.is_zero() {
                return;
            }
            if left > IDLE_MIN && self.prepare_one() || left < ALARM_MIN {
                yield_now().await;
            } else {
                self.worker.job.alarm.sleep_until(clock.instant(due)).await;
            }
        }
    }
}

/// Sends all requests of a worker and reads the responses. Returns the samples.
pub async fn send_all(worker: &Rc<Worker>, mut ahead: PreparedQueue<'_>, clock: Clock) -> Vec<Sample> {
    let (mut in_flight, mut samples) = (JoinSet::new(), Vec::new());
    while let Some((due, outgoing)) = ahead.next() {
        if clock.is_over(due) {
            break;
        }
        let permit = async {
            ahead.wait(due, clock).await;
            worker.permit().await
        };
        let Some(permit) = worker.unless_ended(clock, permit).await else { break };
        let worker = Rc::clone(worker);
        in_flight.spawn_local(async move {
            let sample = worker.send(outgoing, due, clock).await;
            drop(permit);
            sample
        });
        while let Some(end) = in_flight.try_join_next() {
            samples.push(unwrap_join(end));
        }
        // Responses are read even while sending is behind schedule.
        yield_now().await;
    }
    while let Some(end) = in_flight.join_next().await {
        samples.push(unwrap_join(end));
    }
    samples
}
