//! Limits of a client per minute, and the forecast of when the queue has space again.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Maximum of the time after which a rejected client is told to retry.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(600);

const MINUTE: Duration = Duration::from_secs(60);

/// Number of ended sequences from which their rate is measured.
const ENDS: usize = 32;

/// A token bucket: it holds the limit of a minute, and is refilled at that rate. It may be overdrawn.
#[derive(Debug)]
pub(super) struct Bucket {
    /// What is left; negative if it is overdrawn. Full at first.
    level: f64,
    refilled_at: Instant,
}

impl Bucket {
    /// Creates a full bucket.
    pub(super) fn new(now: Instant) -> Bucket {
        Bucket { level: f64::INFINITY, refilled_at: now }
    }

    /// Takes `spent` out of the bucket of a limit, after refilling it. Without a limit, it is full.
    pub(super) fn spend(&mut self, spent: u64, limit: Option<u64>, now: Instant) {
        let Some(limit) = limit else { return *self = Bucket::new(now) };
        let since = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        let limit = limit as f64;
        let filled = (self.level + limit * since / MINUTE.as_secs_f64()).min(limit);
        (self.level, self.refilled_at) = (filled - spent as f64, now);
    }

    /// Returns how long it takes until `needed` of a limit is there; zero if it is.
    pub(super) fn wait(&self, needed: f64, limit: u64) -> Duration {
        let seconds = (needed - self.level).max(0.0) * MINUTE.as_secs_f64() / limit as f64;
        Duration::try_from_secs_f64(seconds).unwrap_or(RETRY_AFTER_MAX)
    }

    /// Whether nothing is missing.
    pub(super) fn is_full(&self, limit: Option<u64>) -> bool {
        limit.is_none_or(|limit| self.level >= limit as f64)
    }
}

/// The rate at which sequences end.
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
