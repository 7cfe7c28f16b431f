//! A limit on log lines that strangers can cause.
//!
//! Invariant: of any number of lines, at most `LINES_MAX` are allowed in `INTERVAL`, and the others are
//! counted.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of lines in an interval.
const LINES_MAX: u64 = 20;

/// Time after which as many lines are allowed again.
const INTERVAL: Duration = Duration::from_secs(10);

/// Counts lines of one kind.
#[derive(Debug)]
pub struct LogLimit(Mutex<Option<Interval>>);

#[derive(Clone, Copy, Debug)]
struct Interval {
    began: Instant,
    lines: u64,
}

impl LogLimit {
    /// Creates a limit that no line has used up.
    pub const fn new() -> LogLimit {
        LogLimit(Mutex::new(None))
    }

    /// Returns whether a line at `now` is allowed. If it is the first one after others that were not,
    /// `report` gets their number.
    pub fn allows(&self, now: Instant, report: impl FnOnce(u64)) -> bool {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let interval = current.get_or_insert(Interval { began: now, lines: 0 });
        let omitted = interval.lines.saturating_sub(LINES_MAX);
        let is_new = now.duration_since(interval.began) >= INTERVAL;
        if is_new {
            *interval = Interval { began: now, lines: 0 };
        }
        interval.lines += 1;
        let is_allowed = interval.lines <= LINES_MAX;
        drop(current);
        if is_new && omitted > 0 {
            report(omitted);
        }
        is_allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_counted_and_reported_later() {
        let (limit, now) = (LogLimit::new(), Instant::now());
        let allowed = (0..50).filter(|_| limit.allows(now, |_| panic!("nothing is reported yet"))).count();
        assert_eq!(allowed as u64, LINES_MAX);
        let mut reported = 0;
        assert!(limit.allows(now + INTERVAL, |count| reported = count));
        assert_eq!(reported, 50 - LINES_MAX);
        assert!(limit.allows(now + 2 * INTERVAL, |_| panic!("all were allowed")));
    }
}
