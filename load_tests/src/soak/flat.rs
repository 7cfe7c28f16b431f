//! Whether a series of measurements is flat or grows with the number of requests.
//!
//! The medians of the second and of the last quarter are compared, so that neither the warm-up nor single
//! peaks count. Invariant: what only goes up and down is flat, and a leak is found once it exceeds what is
//! allowed, which depends on the number of requests only if the caller says so.

use serde::Serialize;

/// Minimum number of measurements: each quarter needs two.
pub const SAMPLES_MIN: usize = 8;

/// A measurement of a resource that must not grow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// Number of requests that were sent before.
    pub requests: u64,
    pub value: f64,
}

/// The growth of a series between the medians of its second and last quarter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Growth {
    /// Median of the second quarter.
    pub early: f64,
    /// Median of the last quarter.
    pub late: f64,
    /// Number of requests between both.
    pub requests: u64,
    /// The growth up to which the series is flat.
    pub allowed: f64,
}

impl Growth {
    /// Compares the quarters of a series of at least [`SAMPLES_MIN`] measurements, oldest first. Growth by
    /// `noise`, which is how much the values differ without a leak, and by `per_request` with each request is
    /// allowed.
    pub fn of(series: &[Level], per_request: f64, noise: f64) -> Growth {
        assert!(series.len() >= SAMPLES_MIN, "a quarter needs at least two measurements");
        let quarter = |number: usize| {
            let levels = &series[series.len() * number / 4..series.len() * (number + 1) / 4];
            let requests = median(levels.iter().map(|level| level.requests as f64));
            (requests, median(levels.iter().map(|level| level.value)))
        };
        let ((first, early), (last, late)) = (quarter(1), quarter(3));
        let requests = last - first;
        let allowed = noise + per_request * requests;
        Growth { early, late, requests: requests as u64, allowed }
    }

    /// Returns whether the series does not grow.
    pub fn is_flat(&self) -> bool {
        self.late - self.early <= self.allowed
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let (low, high) = (values[(values.len() - 1) / 2], values[values.len() / 2]);
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `samples` measurements, one for every `step` requests.
    fn series(samples: usize, step: u64, value: impl Fn(u64) -> f64) -> Vec<Level> {
        let level = |requests| Level { requests, value: value(requests) };
        (0..samples as u64).map(|at| level(at * step)).collect()
    }

    /// A number in 0..1 that looks random.
    fn scattered(at: u64) -> f64 {
        (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11) as f64 / (1u64 << 53) as f64
    }

    #[test]
    fn a_leak_of_one_per_hundred_requests_is_found() {
        for (samples, step) in [(8, 100), (12, 100), (60, 1000)] {
            let leak = series(samples, step, |requests| 20.0 + (requests / 100) as f64);
            let growth = Growth::of(&leak, 0.005, 1.0);
            assert!(!growth.is_flat(), "{samples} of {step}: {growth:?}");
            let noisy = series(samples, step, |at| 20.0 + (at / 100) as f64 + scattered(at));
            assert!(!Growth::of(&noisy, 0.005, 1.0).is_flat(), "{samples} of {step}");
        }
    }

    #[test]
    fn what_goes_up_and_down_is_flat() {
        for period in [150, 300, 700, 900] {
            let sawtooth = series(60, 100, |requests| 20.0 + (requests % period) as f64 / 100.0);
            let growth = Growth::of(&sawtooth, 0.0, 1.0);
            assert!(growth.is_flat(), "period {period}: {growth:?}");
        }
        let peak = |at: u64| if at.is_multiple_of(1000) { 500.0 } else { 20.0 };
        assert!(Growth::of(&series(60, 100, |requests| peak(requests + 100)), 0.0, 1.0).is_flat());
        assert!(Growth::of(&series(60, 100, |at| 20.0 + 2.0 * scattered(at)), 0.0, 1.0).is_flat());
    }

    #[test]
    fn the_warm_up_does_not_count_but_a_late_step_does() {
        let warm = series(40, 10, |requests| (requests as f64).min(95.0));
        assert!(Growth::of(&warm, 0.0, 1.0).is_flat());
        let late = series(40, 10, |requests| if requests > 280 { 30.0 } else { 20.0 });
        assert!(!Growth::of(&late, 0.0, 1.0).is_flat());
        assert!(Growth::of(&series(8, 10, |requests| 50.0 - requests as f64), 0.0, 0.0).is_flat());
    }

    #[test]
    fn requests_allow_growth_only_if_the_caller_says_so() {
        let flat = series(8, 1000, |_| 3.0);
        let growth = Growth::of(&flat, 0.005, 2.0);
        assert_eq!(growth, Growth { early: 3.0, late: 3.0, requests: 4000, allowed: 22.0 });
        assert_eq!(Growth::of(&flat, 0.0, 2.0).allowed, 2.0);
    }
}
