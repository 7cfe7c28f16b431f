//! Token buckets: the limits of a client per minute.

use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// A token bucket: it holds the limit of a minute, and is refilled at that rate. It may be overdrawn.
#[derive(Debug)]
pub struct Bucket {
    /// The limit per minute; `None` for no limit.
    limit: Option<u64>,
    /// The rest in the bucket; negative if it is overdrawn.
    level: f64,
    refilled_at: Instant,
}

impl Bucket {
    /// Creates a full bucket.
    pub fn new(limit: Option<u64>, now: Instant) -> Bucket {
        Bucket { limit, level: limit.unwrap_or_default() as f64, refilled_at: now }
    }

    /// Changes the limit. What is in the bucket stays, as far as it has room.
    pub fn set_limit(&mut self, limit: Option<u64>, now: Instant) {
        match (self.limit, limit) {
            // The time since it was last used counts at the new rate.
            (Some(_), Some(_)) => self.limit = limit,
            _ => *self = Bucket::new(limit, now),
        }
        self.refill(now);
    }

    /// Takes `spent` out of the bucket. What was refilled before it was full is lost.
    pub fn spend(&mut self, spent: u64, now: Instant) {
        self.refill(now);
        self.level -= spent as f64;
    }

    /// Returns how long it takes until there is something in the bucket, and the limit; `None` if there is.
    pub fn wait(&mut self, now: Instant) -> Option<(Duration, u64)> {
        self.refill(now);
        let limit = self.limit?;
        let seconds = (1.0 - self.level).max(0.0) * MINUTE.as_secs_f64() / limit as f64;
        let wait = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        (wait > Duration::ZERO).then_some((wait, limit))
    }

    /// Whether nothing is missing.
    pub fn is_full(&mut self, now: Instant) -> bool {
        self.refill(now);
        self.limit.is_none_or(|limit| self.level >= limit as f64)
    }

    fn refill(&mut self, now: Instant) {
        let Some(limit) = self.limit else { return };
        let since = now.saturating_duration_since(self.refilled_at).as_secs_f64();
        self.level = (self.level + limit as f64 * since / MINUTE.as_secs_f64()).min(limit as f64);
        self.refilled_at = self.refilled_at.max(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens of a long answer are taken out as they are generated, so that what is refilled meanwhile is
    /// not lost; and a pause before many tokens gives no more than the limit.
    #[test]
    fn what_is_spent_evenly_at_the_limit_leaves_the_bucket_as_it_was() {
        let start = Instant::now();
        let mut bucket = Bucket::new(Some(600), start);
        let at = |second: u64| start + Duration::from_secs(second);
        (1..=600).for_each(|second| bucket.spend(10, at(second)));
        assert_eq!(bucket.wait(at(600)), None);
        assert!((bucket.level - 590.0).abs() < 1e-6, "{}", bucket.level);
        bucket.spend(900, at(4000));
        assert_eq!(bucket.wait(at(4000)), Some((Duration::from_millis(30_100), 600)));
        assert!(!bucket.is_full(at(4089)) && bucket.is_full(at(4090)));
    }
}
