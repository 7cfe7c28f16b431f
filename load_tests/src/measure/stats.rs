//! Distributions: exact statistics of all values, and a histogram for plots.
//!
//! Invariant: percentiles are computed from all values, never from a histogram or a subset.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::report::Distribution;

/// Statistics of one measure, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    pub mean: f64,
    pub median: f64,
    /// Population standard deviation.
    pub std: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Stats {
    /// Computes the statistics of `values`, or returns `None` if there are none.
    pub fn from_values(values: impl IntoIterator<Item = Duration>) -> Option<Self> {
        Self::from_sorted(&sorted_ms(values))
    }

    fn from_sorted(sorted: &[f64]) -> Option<Self> {
        let max = *sorted.last()?;
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let variance = sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / sorted.len() as f64;
        let [median, p90, p95, p99] = [50.0, 90.0, 95.0, 99.0].map(|percent| percentile(sorted, percent));
        Some(Self { mean, median, std: variance.sqrt(), p90, p95, p99, max })
    }

    /// Returns each statistic with its name in reports.
    pub fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("mean", self.mean),
            ("median", self.median),
            ("std", self.std),
            ("p90", self.p90),
            ("p95", self.p95),
            ("p99", self.p99),
            ("max", self.max),
        ]
    }
}

impl Distribution {
    /// Computes the statistics of `values`, or returns `None` if there are none.
    pub fn from_values(values: impl IntoIterator<Item = Duration>) -> Option<Self> {
        let sorted = sorted_ms(values);
        Some(Self { stats: Stats::from_sorted(&sorted)?, histogram: histogram(&sorted) })
    }
}

/// Returns a percentile of ascending values, linearly interpolated between ranks, as numpy does by default.
///
/// # Panics
///
/// Panics if `sorted` is empty or `percent` is not within 0 and 100.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    assert!(
        !sorted.is_empty() && (0.0..=100.0).contains(&percent),
        "percentile {percent} of {} values",
        sorted.len()
    );
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    low + (high - low) * rank.fract()
}

/// Converts to milliseconds and sorts ascending. There may be tens of millions of values, so the sort is in
/// place.
fn sorted_ms(values: impl IntoIterator<Item = Duration>) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.into_iter().map(milliseconds).collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted
}

/// Converts a duration to milliseconds. Up to 104 days, rounding the result recovers the exact nanoseconds.
pub fn milliseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e6
}

/// Converts a duration to seconds.
pub fn seconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e9
}

/// Returns the non-empty buckets of ascending values in milliseconds, of which there must be at least one:
/// the upper bound and count of each.
fn histogram(sorted: &[f64]) -> Vec<(f64, u64)> {
    let nanos = |ms: f64| (ms * 1e6).round() as u64;
    let high = nanos(*sorted.last().expect("there is at least one value"));
    let mut histogram =
        Histogram::<u64>::new_with_max(high.max(2), 2).expect("2 significant digits are valid");
    sorted.iter().for_each(|&ms| histogram.saturating_record(nanos(ms)));
    histogram
        .iter_recorded()
        .map(|bucket| (bucket.value_iterated_to() as f64 / 1e6, bucket.count_since_last_iteration()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::random::{Purpose, RandomStream};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns the k-th smallest value by counting, without sorting.
    fn kth_smallest(values: &[f64], k: usize) -> f64 {
        let is_kth = |&&x: &&f64| {
            let below = values.iter().filter(|&&v| v < x).count();
            let not_above = values.iter().filter(|&&v| v <= x).count();
            (below..not_above).contains(&k)
        };
        *values.iter().find(is_kth).unwrap()
    }

    #[test]
    fn percentiles_agree_with_brute_force() {
        let mut draws = RandomStream::new(1, Purpose::Request(0));
        for count in 1..60u32 {
            // Few distinct values cause ties.
            let values: Vec<f64> = (0..count).map(|_| f64::from(draws.between(0, 20))).collect();
            let stats = Stats::from_values(values.iter().map(|&value| ms(value as u64))).unwrap();
            for (percent, got) in [(50, stats.median), (90, stats.p90), (95, stats.p95), (99, stats.p99)] {
                // Integer arithmetic: rank = hundredths / 100 exactly.
                let hundredths = percent * (count as usize - 1);
                let (low, part) = (hundredths / 100, hundredths % 100);
                let next = kth_smallest(&values, (low + 1).min(values.len() - 1));
                let low = kth_smallest(&values, low);
                let expected = low + (next - low) * part as f64 / 100.0;
                assert!((got - expected).abs() < 1e-9, "p{percent} of {values:?}: {got}, not {expected}");
            }
            assert_eq!(stats.max, kth_smallest(&values, values.len() - 1));
        }
    }

    #[test]
    fn the_ends_are_percentiles_too() {
        let values = [1.0, 5.0, 9.0];
        assert_eq!([0.0, 25.0, 100.0].map(|percent| percentile(&values, percent)), [1.0, 3.0, 9.0]);
    }

    #[test]
    fn stats_of_known_values() {
        let stats = Stats::from_values([4, 1, 3, 2].map(ms)).unwrap();
        assert_eq!((stats.mean, stats.median, stats.max), (2.5, 2.5, 4.0));
        assert!((stats.std - 1.25f64.sqrt()).abs() < 1e-12);
        assert!((stats.p90 - 3.7).abs() < 1e-9);
        assert_eq!(Stats::from_values([]), None);
        assert_eq!(Distribution::from_values([]), None);
    }

    #[test]
    fn every_value_lies_within_one_percent_below_the_end_of_its_bucket() {
        let mut draws = RandomStream::new(2, Purpose::Request(0));
        // Log-uniform from nanoseconds to hours.
        let mut nanos: Vec<u64> = (0..5000).map(|_| 10f64.powf(draws.unit() * 13.0) as u64).collect();
        nanos.extend([0, 0, 1, 1, 127, 128]);
        let distribution =
            Distribution::from_values(nanos.iter().map(|&nanos| Duration::from_nanos(nanos))).unwrap();
        nanos.sort();
        let mut rest = nanos.as_slice();
        for &(end_ms, count) in &distribution.histogram {
            assert!(count > 0, "the bucket up to {end_ms} ms is empty");
            let (bucket, after) = rest.split_at(count as usize);
            rest = after;
            for &value in bucket {
                let value_ms = value as f64 / 1e6;
                assert!(
                    value_ms <= end_ms && end_ms <= value_ms * 1.01,
                    "{value_ms} in the bucket to {end_ms}"
                );
            }
        }
        assert!(rest.is_empty(), "{} values are in no bucket", rest.len());
        assert!(distribution.histogram.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn times_of_days_keep_their_nanoseconds() {
        let time = Duration::new(3 * 86_400, 123_456_789);
        assert_eq!(seconds(time).to_string(), "259200.123456789");
        assert_eq!(milliseconds(time).to_string(), "259200123.456789");
    }
}
