//! The clock of a run: its start, the deadline of a request, and the end of the run.
//!
//! Invariant: every time of a run is a duration since the same start, on one monotonic clock.

use std::time::{Duration, Instant};

use crate::sample::{Failure, FailureKind};

/// Upper bound of times added to an instant, so that the sum cannot overflow.
const TIME_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The clock of a run, with the timeouts of the run and its requests.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    request_timeout: Duration,
    run_limit: Duration,
}

/// The time at which a request is aborted, and the kind of failure it is reported as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    pub at: Duration,
    pub kind: FailureKind,
}

impl Clock {
    /// Creates a clock that starts now.
    pub fn start(request_timeout: Duration, run_limit: Duration) -> Self {
        Self { start: Instant::now(), request_timeout, run_limit }
    }

    /// Returns the time since the start.
    pub fn now(&self) -> Duration {
        self.time(Instant::now())
    }

    /// Converts an instant to a time of the run; zero before the start.
    pub fn time(&self, instant: Instant) -> Duration {
        instant.saturating_duration_since(self.start)
    }

    /// Converts a time of the run to an instant.
    pub fn instant(&self, time: Duration) -> Instant {
        self.start + time.min(TIME_MAX)
    }

    /// Returns the instant of the run's time limit.
    pub fn end(&self) -> Instant {
        self.instant(self.run_limit)
    }

    /// Returns whether the run's time limit is reached at `time`.
    pub fn is_over(&self, time: Duration) -> bool {
        time >= self.run_limit
    }

    /// Returns the deadline of a request sent at `sent`.
    pub fn deadline(&self, sent: Duration) -> Deadline {
        let own = sent.saturating_add(self.request_timeout);
        if own <= self.run_limit {
            Deadline { at: own, kind: FailureKind::Timeout }
        } else {
            Deadline { at: self.run_limit, kind: FailureKind::TimeLimit }
        }
    }

    /// Returns the failure of a request that reached its deadline.
    pub fn deadline_failure(&self, deadline: Deadline) -> Failure {
        match deadline.kind {
            FailureKind::TimeLimit => {
                deadline.kind.with_message(format_args!("the run ended at {:?}", self.run_limit))
            }
            kind => kind.with_message(format_args!("incomplete after {:?}", self.request_timeout)),
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
        assert!(
            clock.deadline_failure(own).message.contains("10s")
                && clock.deadline_failure(run).message.contains("60s")
        );
    }

    #[test]
    fn limits_beyond_all_bounds_are_no_panic() {
        let clock = Clock::start(Duration::MAX, Duration::MAX);
        assert_eq!(clock.deadline(Duration::from_secs(1)).at, Duration::MAX);
        assert_eq!(clock.end(), clock.instant(Duration::MAX));
    }
}
