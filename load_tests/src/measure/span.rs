//! Time intervals of a run.
//!
//! Invariant: a span does not end before it begins.

use std::time::Duration;

use super::seconds;
use crate::sample::Sample;

/// A time interval of a run.
#[derive(Clone, Copy, Debug)]
pub struct TimeSpan {
    pub begin: Duration,
    pub end: Duration,
}

impl TimeSpan {
    /// Returns the span from the first send to the last token; it is empty if no token was received.
    pub fn from_samples(samples: &[Sample]) -> Self {
        let begin = samples.iter().map(|sample| sample.sent).min().unwrap_or_default();
        let last = samples.iter().filter_map(|sample| sample.deliveries.last()).max();
        Self { begin, end: last.map_or(begin, |last| last.at().max(begin)) }
    }

    /// Returns the length of the span.
    pub fn length(self) -> Duration {
        self.end - self.begin
    }

    /// Returns `amount` divided by the length in seconds, or 0 if the span is empty.
    pub fn per_second(self, amount: f64) -> f64 {
        if self.length().is_zero() { 0.0 } else { amount / seconds(self.length()) }
    }

    /// Splits the span into `count` intervals, equal to the nanosecond.
    pub fn split(self, count: usize) -> impl Iterator<Item = TimeSpan> {
        let nanos = self.length().as_nanos();
        let edge = move |i: usize| {
            self.begin + Duration::from_nanos((nanos * i as u128 / count as u128).min(u64::MAX.into()) as u64)
        };
        (0..count).map(move |i| TimeSpan { begin: edge(i), end: edge(i + 1) })
    }
}
