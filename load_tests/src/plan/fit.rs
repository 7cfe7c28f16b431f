//! How well drawn numbers fit the distribution that they are meant to have; for tests.
//!
//! Invariant: the distributions' CDFs come from a library that none of the drawing is done with.

/// The Kolmogorov-Smirnov distance at which a fit is refused with a wrong verdict once in 1000, times the root of
/// the number of values. Seeds are fixed, so a test with it passes always or never.
pub const CRITICAL: f64 = 1.9495;

/// The largest distance between the values' empirical distribution and a continuous one.
pub fn ks(values: &[f64], cdf: impl Fn(f64) -> f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    let distance = |(rank, &value): (usize, &f64)| {
        let expected = cdf(value);
        (expected - rank as f64 / n).abs().max(((rank + 1) as f64 / n - expected).abs())
    };
    sorted.iter().enumerate().map(distance).fold(0.0, f64::max)
}

/// The same of whole numbers; `cdf` is the probability of at most so many.
pub fn ks_whole(values: &[u32], cdf: impl Fn(u32) -> f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let n = sorted.len() as f64;
    let last_of_each = sorted.iter().enumerate().filter(|&(rank, value)| sorted.get(rank + 1) != Some(value));
    last_of_each.map(|(rank, &value)| ((rank + 1) as f64 / n - cdf(value)).abs()).fold(0.0, f64::max)
}
