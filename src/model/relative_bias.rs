//! Position tables: sinusoids that are added to embeddings, and relative position biases that are added to
//! scores.
//!
//! Invariant: a table is a function of the specification and of the number of positions, in F32.

use super::spec::words::{SinusoidFrequencies, SinusoidLayout};
use std::ops::Range;

/// Longest wavelength of the sinusoids, in units of 2π positions.
const SINUSOID_BASE: f64 = 10_000.0;

/// Returns rows `offset..offset + positions` of the sinusoidal table (Vaswani et al. 2017, section 3.5),
/// `(positions, width)`.
pub fn sinusoids(
    (layout, frequencies): (SinusoidLayout, SinusoidFrequencies),
    width: usize,
    positions: usize,
    offset: usize,
    scale: f32,
) -> Vec<f32> {
    let half = width / 2;
    let mut table = vec![0.0; positions * width];
    for (position, row) in table.chunks_exact_mut(width).enumerate() {
        for pair in 0..half {
            let (sine, cosine) = match layout {
                SinusoidLayout::Concatenated => (pair, half + pair),
                SinusoidLayout::Interleaved => (2 * pair, 2 * pair + 1),
            };
            let exponent = match frequencies {
                SinusoidFrequencies::ToLast => pair as f64 / (half.max(2) - 1) as f64,
                SinusoidFrequencies::ByWidth => 2.0 * pair as f64 / width as f64,
            };
            let frequency = SINUSOID_BASE.powf(-exponent) as f32;
            let angle = f64::from((position + offset) as f32 * frequency);
            row[sine] = angle.sin() as f32 * scale;
            row[cosine] = angle.cos() as f32 * scale;
        }
    }
    table
}

/// Returns the ALiBi slopes of the heads, the steepest first (Press et al. 2022, section 3). If the number of
/// heads is not a power of two, these are the slopes for the next lower power, followed by every second slope
/// for the next higher one. The last slope of a power of two is 2 to the power of `-max`.
pub fn alibi_slopes(heads: usize, max: f32) -> Vec<f32> {
    let lower = 1 << heads.ilog2();
    let slope =
        |of: usize, number: usize| (2f64.powf(-f64::from(max) / of as f64 * (number + 1) as f64)) as f32;
    let of_lower = (0..lower).map(|head| slope(lower, head));
    of_lower.chain((0..heads - lower).map(|head| slope(2 * lower, 2 * head))).collect()
}

/// Returns the ALiBi biases of the heads `own`, from the slopes of all heads: `(own heads, 2 * reach - 1)`,
/// with the entry for key k and query q at `k - q + reach - 1`.
pub fn alibi_biases(slopes: &[f32], own: Range<usize>, scale: f32, reach: usize) -> Vec<f32> {
    let distances = || (0..2 * reach - 1).map(|at| at.abs_diff(reach - 1) as f32);
    slopes[own].iter().flat_map(|slope| distances().map(move |far| -slope * scale * far)).collect()
}

/// Returns learned relative position biases in the layout of [`alibi_biases`], from a table
/// `(buckets, heads)`.
pub fn learned_biases(
    learned: &[f32],
    (heads, own): (usize, Range<usize>),
    buckets: usize,
    farthest: usize,
    both_ways: bool,
    reach: usize,
) -> Vec<f32> {
    let bucket_at = |at: usize| bucket(at as i64 - (reach as i64 - 1), buckets, farthest, both_ways);
    let by_place: Vec<usize> = (0..2 * reach - 1).map(bucket_at).collect();
    own.flat_map(|head| by_place.iter().map(move |bucket| learned[bucket * heads + head])).collect()
}

/// Returns the bucket of a distance, the key's position minus the query's. Short distances have buckets of
/// their own, longer ones share logarithmically growing buckets (Raffel et al. 2020, section 2.1). With
/// `both_ways`, keys before the query use one half of the buckets and keys after it the other.
fn bucket(ahead: i64, buckets: usize, farthest: usize, both_ways: bool) -> usize {
    let half = if both_ways { buckets / 2 } else { buckets };
    let (base, far) = match both_ways {
        true if ahead > 0 => (half, ahead),
        true => (0, -ahead),
        false => (0, (-ahead).max(0)),
    };
    let (far, exact) = (far as usize, half / 2);
    if far < exact {
        return base + far;
    }
    // In F32, as in the reference implementation: bucket boundaries depend on it.
    let logs = (far as f32 / exact as f32).ln() / (farthest as f64 / exact as f64).ln() as f32;
    base + (exact + (logs * (half - exact) as f32) as usize).min(half - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_of_a_power_of_two_are_geometric_and_others_are_between() {
        assert_eq!(
            alibi_slopes(8, 8.0),
            [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
        );
        let six = alibi_slopes(6, 8.0);
        assert_eq!(&six[..4], [0.25, 0.0625, 0.015625, 0.00390625]);
        assert_eq!(&six[4..], [0.5, 0.125]);
        assert_eq!(alibi_slopes(1, 8.0), [0.00390625]);
        assert_eq!(alibi_slopes(2, 4.0), [0.25, 0.0625]);
    }

    #[test]
    fn biases_lie_by_relative_position() {
        let slopes = alibi_slopes(2, 8.0);
        let table = alibi_biases(&slopes, 0..2, 2.0, 3);
        assert_eq!(table.len(), 2 * 5);
        // Slope 1/16, times the scale 2.
        assert_eq!(&table[..5], [-0.25, -0.125, 0.0, -0.125, -0.25]);
        assert_eq!(alibi_biases(&slopes, 1..2, 2.0, 3), table[5..]);
        let learned: Vec<f32> = (0..8).flat_map(|bucket| [bucket as f32, 100.0 + bucket as f32]).collect();
        let table = learned_biases(&learned, (2, 0..2), 8, 16, false, 4);
        assert_eq!(&table[..7], [3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(&table[7..], [103.0, 102.0, 101.0, 100.0, 100.0, 100.0, 100.0]);
        let table = learned_biases(&learned, (2, 0..2), 8, 16, true, 4);
        assert_eq!(&table[..7], [2.0, 2.0, 1.0, 0.0, 5.0, 6.0, 6.0]);
        assert_eq!(learned_biases(&learned, (2, 1..2), 8, 16, true, 4), table[7..]);
    }

    /// The boundaries of T5's 32 buckets up to distance 128 in both directions: 16 each, 8 of them exact.
    #[test]
    fn far_buckets_grow_and_the_last_has_all_the_rest() {
        let behind = |far: i64| bucket(-far, 32, 128, true);
        let borders: Vec<i64> = (1..200).filter(|far| behind(*far) != behind(*far - 1)).collect();
        assert_eq!(borders, [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]);
        assert_eq!((behind(10_000), bucket(10_000, 32, 128, true)), (15, 31));
        assert_eq!(bucket(5, 32, 128, false), 0);
    }

    #[test]
    fn sinusoids_begin_at_the_offset_in_either_layout() {
        use {SinusoidFrequencies::*, SinusoidLayout::*};
        let table = sinusoids((Concatenated, ToLast), 4, 2, 1, 1.0);
        let expected = [1f64.sin(), 1e-4f64.sin(), 1f64.cos(), 1e-4f64.cos(), 2f64.sin(), 2e-4f64.sin()];
        for (ours, expected) in table.iter().zip(expected) {
            assert!((f64::from(*ours) - expected).abs() < 1e-7, "{table:?}");
        }
        let table = sinusoids((Concatenated, ByWidth), 4, 1, 1, 1.0);
        let expected = [1f64.sin(), 1e-2f64.sin(), 1f64.cos(), 1e-2f64.cos()];
        for (ours, expected) in table.iter().zip(expected) {
            assert!((f64::from(*ours) - expected).abs() < 1e-7, "{table:?}");
        }
        let table = sinusoids((Interleaved, ByWidth), 4, 1, 1, 2.0);
        let expected = [1f64.sin(), 1f64.cos(), 1e-2f64.sin(), 1e-2f64.cos()];
        for (ours, expected) in table.iter().zip(expected) {
            assert!((f64::from(*ours) - 2.0 * expected).abs() < 1e-6, "{table:?}");
        }
    }
}
