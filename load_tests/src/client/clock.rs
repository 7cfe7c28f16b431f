//! The run's time: when it began, when a request is given up, when the run is over.
//!
//! Invariant: every time of a run is a duration from one start, on one monotonic clock.

use std::time::{Duration, Instant};

use crate::sample::{Failure, FailureKind};

/// What no run lasts: a time beyond it is taken for it, so that sums with an instant stay within bounds.
const FAR: Duration = Duration::from_secs(10 * 365 * 86_400);

/// When a run began and how long its requests may take.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    request_timeout: Duration,
    run_limit: Duration,
}

/// When a request is given up, and as what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    pub at: Duration,
    pub kind: FailureKind,
}

impl Clock {
    /// Starts now.
    pub fn start(request_timeout: Duration, run_limit: Duration) -> Self {
        Self { start: Instant::now(), request_timeout, run_limit }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.time(Instant::now())
    }

    /// The time of the run at `instant`; zero before the start.
    pub fn time(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.start)
    }

    /// The instant of a time of the run.
    pub fn at(&self, time: Duration) -> Instant {
        self.start + time.min(FAR)
    }

    /// When the run's time is over.
    pub fn limit(&self) -> Instant {
        self.at(self.run_limit)
    }

    /// Whether the run's time is over at `time`.
    pub fn is_over(&self, time: Duration) -> bool {
        time >= self.run_limit
    }

    /// When a request sent at `sent` is given up.
    pub fn deadline(&self, sent: Duration) -> Deadline {
        let own = sent.saturating_add(self.request_timeout);
        if own <= self.run_limit {
            Deadline { at: own, kind: FailureKind::Timeout }
        } else {
            Deadline { at: self.run_limit, kind: FailureKind::TimeLimit }
        }
    }

    /// The failure of a request that met its deadline.
    pub fn given_up(&self, deadline: Deadline) -> Failure {
        match deadline.kind {
            FailureKind::TimeLimit => {
                deadline.kind.saying(format_args!("the run ended at {:?}", self.run_limit))
            }
            kind => kind.saying(format_args!("no end after {:?}", self.request_timeout)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearer_deadline_names_the_failure() {
        let seconds = Duration::from_secs;
        let clock = Clock::start(seconds(10), seconds(60));
        let own = Deadline { at: seconds(60), kind: FailureKind::Timeout };
        let run = Deadline { at: seconds(60), kind: FailureKind::TimeLimit };
        assert_eq!((clock.deadline(seconds(50)), clock.deadline(seconds(51))), (own, run));
        assert!(clock.is_over(seconds(60)) && !clock.is_over(seconds(59)));
        assert!(clock.given_up(own).message.contains("10s") && clock.given_up(run).message.contains("60s"));
    }

    #[test]
    fn limits_beyond_all_bounds_are_no_panic() {
        let clock = Clock::start(Duration::MAX, Duration::MAX);
        assert_eq!(clock.deadline(Duration::from_secs(1)).at, Duration::MAX);
        assert_eq!(clock.limit(), clock.at(Duration::MAX));
    }
}
