//! The forecast of when the queue has space again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum of the time after which a rejected client is told to retry.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

/// Number of ended sequences from which their rate is measured.
const ENDS: usize = 32;

/// The rate at which sequences end while others wait.
#[derive(Debug, Default)]
pub(super) struct EndRate(VecDeque<Instant>);

impl EndRate {
    /// Counts a sequence that ended.
    pub(super) fn count(&mut self, now: Instant) {
        if self.0.len() == ENDS {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// Forgets the sequences so far, because nobody waits.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the time in which so many sequences end; zero if none has ended yet.
    pub(super) fn time_of(&self, ends: usize, now: Instant) -> Duration {
        let Some(first) = self.0.front() else { return Duration::ZERO };
        let each = now.saturating_duration_since(*first) / self.0.len() as u32;
        each.saturating_mul(u32::try_from(ends).unwrap_or(u32::MAX))
    }
}

/// Returns a time to wait in whole seconds, within bounds.
pub(super) fn retry_seconds(wait: Duration) -> u64 {
    wait.min(RETRY_AFTER_MAX).as_secs_f64().ceil() as u64
}
