//! Goodness-of-fit tests of random numbers, for tests.
//!
//! Invariant: the CDFs come from a different library than the random numbers.

/// Critical Kolmogorov-Smirnov distance at significance level 0.001, times the square root of the number of
/// values. Seeds are fixed, so a test that uses it is deterministic.
pub const KS_CRITICAL: f64 = 1.9495;

/// Returns the Kolmogorov-Smirnov distance between the empirical distribution of `values` and a continuous
/// one.
pub fn ks_distance(values: &[f64], cdf: impl Fn(f64) -> f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    let distance = |(rank, &value): (usize, &f64)| {
        let expected = cdf(value);
        (expected - rank as f64 / n).abs().max(((rank + 1) as f64 / n - expected).abs())
    };
    sorted.iter().enumerate().map(distance).fold(0.0, f64::max)
}

/// Returns the Kolmogorov-Smirnov distance for a discrete distribution; `cdf` is the probability of a value
/// of at most its argument.
pub fn ks_distance_discrete(values: &[u32], cdf: impl Fn(u32) -> f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let n = sorted.len() as f64;
    let last_of_each = sorted.iter().enumerate().filter(|&(rank, value)| sorted.get(rank + 1) != Some(value));
    last_of_each.map(|(rank, &value)| ((rank + 1) as f64 / n - cdf(value)).abs()).fold(0.0, f64::max)
}
