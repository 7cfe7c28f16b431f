//! Distributions with exact percentiles.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The distribution of one measure, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stats {
    pub mean: f64,
    pub median: f64,
    /// Of the whole population, not an estimate from a sample.
    pub std: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Stats {
    /// `None` when there are no values.
    pub fn of(values: impl IntoIterator<Item = Duration>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().map(|value| value.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let variance = sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / sorted.len() as f64;
        let [median, p90, p95, p99] = [50.0, 90.0, 95.0, 99.0].map(|percent| percentile(&sorted, percent));
        Some(Self { mean, median, std: variance.sqrt(), p90, p95, p99, max })
    }

    /// Each figure with its name in reports.
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

/// The percentile of ascending values, of which there is at least one. Between two ranks it is interpolated,
/// as most statistics libraries do by default.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    assert!(!sorted.is_empty() && (0.0..=100.0).contains(&percent), "no such percentile; this is a bug");
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    low + (high - low) * rank.fract()
}
