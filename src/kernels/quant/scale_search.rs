//! The best scale of a run of numbers, and in some formats the best minimum, by weighted least squares.
//!
//! For several initial scales around the obvious one: round to quants, then solve for the scale that fits
//! these quants best. The smallest error wins. Without explicit weights, the error of a number counts by its
//! magnitude, because large weights contribute most to the result of a matrix product.
//!
//! Invariant: the error is never larger than that of the obvious scale.

use half::f16;

/// A scale and a minimum: x' = quant * scale - offset, with offset >= 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct AffineFit {
    pub scale: f32,
    pub offset: f32,
}

/// A scale without minimum: x' = quant * scale, with quants from -n to n - 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct SymmetricFit {
    pub scale: f32,
}

/// Weights of the squared errors of a run.
#[derive(Clone, Copy)]
pub(super) enum ErrorWeights<'a> {
    /// By the magnitude of each number.
    Magnitude,
    /// One given weight for each number.
    Given(&'a [f32]),
}

impl ErrorWeights<'_> {
    /// Returns the weights of a slice of the run.
    pub fn slice(&self, first: usize, len: usize) -> ErrorWeights<'_> {
        match self {
            ErrorWeights::Magnitude => ErrorWeights::Magnitude,
            ErrorWeights::Given(weights) => ErrorWeights::Given(&weights[first..][..len]),
        }
    }
}

/// Number of initial scales to either side of the obvious one, and their spacing in steps of its quants.
const CANDIDATES: i32 = 10;
const CANDIDATE_SPACING: f32 = 0.1;

/// Returns the quant from 0 to `highest` whose multiple of `unit` is nearest.
pub(super) fn nearest_quant(value: f32, unit: f32, highest: u8) -> u8 {
    round_clamped(value, reciprocal(unit), 0.0, f32::from(highest)) as u8
}

/// Returns the quant from -n to n - 1 whose multiple of `unit` is nearest.
pub(super) fn nearest_signed_quant(value: f32, unit: f32, n: i32) -> i32 {
    round_clamped(value, reciprocal(unit), -n as f32, (n - 1) as f32) as i32
}

/// Returns the reciprocal, or 0 for a subnormal unit.
pub(super) fn reciprocal(unit: f32) -> f32 {
    if unit.abs() < f32::MIN_POSITIVE { 0.0 } else { 1.0 / unit }
}

/// Rounds value * inverse to the nearest integer, ties to even, clamped to a range.
fn round_clamped(value: f32, inverse: f32, low: f32, high: f32) -> f32 {
    /// Rounding constant: added to a number below 2^22, it leaves no bits for a fraction.
    const WHOLE: f32 = 12_582_912.0;
    (value * inverse).clamp(low, high) + WHOLE - WHOLE
}

/// Rounds to F16.
pub(super) fn round_to_f16(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// Length of the longest run.
const MAX_RUN_LEN: usize = 32;

/// A run of numbers with the weights of their squared errors.
struct WeightedRun<'a> {
    numbers: &'a [f32],
    weights: [f32; MAX_RUN_LEN],
}

impl WeightedRun<'_> {
    fn new<'a>(numbers: &'a [f32], by: ErrorWeights) -> WeightedRun<'a> {
        let mut weights = [0.0; MAX_RUN_LEN];
        match by {
            ErrorWeights::Magnitude => {
                let mean = numbers.iter().map(|x| x * x).sum::<f32>() / numbers.len() as f32;
                for (weight, x) in weights.iter_mut().zip(numbers) {
                    *weight = mean.sqrt() + x.abs();
                }
            }
            ErrorWeights::Given(given) => weights[..given.len()].copy_from_slice(given),
        }
        WeightedRun { numbers, weights }
    }

    fn pairs(&self) -> impl Iterator<Item = (f32, f32)> {
        self.numbers.iter().copied().zip(self.weights)
    }

    /// Returns the weighted squared error of quants from `low` to `high` of x + offset.
    fn error(&self, scale: f32, offset: f32, (low, high): (f32, f32)) -> f32 {
        let inverse = reciprocal(scale);
        let lost = |x: f32| x - (round_clamped(x + offset, inverse, low, high) * scale - offset);
        self.pairs().map(|(x, weight)| weight * lost(x).powi(2)).sum()
    }

    /// Solves for the scale and offset that best fit the quants of the given ones.
    fn solve(&self, scale: f32, offset: f32, highest: f32) -> Option<AffineFit> {
        let (mut w, mut wc, mut wcc, mut wx, mut wcx) = (0f32, 0f32, 0f32, 0f32, 0f32);
        let inverse = reciprocal(scale);
        for (x, weight) in self.pairs() {
            let quant = round_clamped(x + offset, inverse, 0.0, highest);
            w += weight;
            wc += weight * quant;
            wcc += weight * quant * quant;
            wx += weight * x;
            wcx += weight * quant * x;
        }
        let determinant = w * wcc - wc * wc;
        if determinant <= 0.0 {
            return None;
        }
        let (scale, offset) = ((w * wcx - wc * wx) / determinant, (wc * wcx - wcc * wx) / determinant);
        if offset < 0.0 {
            // A positive minimum cannot be represented.
            return (wcc > 0.0 && wcx > 0.0).then(|| AffineFit { scale: wcx / wcc, offset: 0.0 });
        }
        (scale > 0.0).then_some(AffineFit { scale, offset })
    }

    /// Solves for the scale that best fits the quants from -n to n - 1 of the given one.
    fn solve_scale(&self, scale: f32, n: f32) -> Option<f32> {
        let (mut cx, mut cc) = (0f32, 0f32);
        let inverse = reciprocal(scale);
        for (x, weight) in self.pairs() {
            let quant = round_clamped(x, inverse, -n, n - 1.0);
            cx += weight * quant * x;
            cc += weight * quant * quant;
        }
        (cc > 0.0).then(|| cx / cc)
    }
}

/// Finds scale and offset for quants from 0 to `highest`.
pub(super) fn fit_affine(numbers: &[f32], by: ErrorWeights, highest: u8) -> AffineFit {
    let low = numbers.iter().copied().fold(0f32, f32::min);
    let high = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if high <= low {
        // All numbers are equal and at most 0, so the offset alone represents them.
        return AffineFit { scale: 0.0, offset: -low };
    }
    let (run, highest) = (WeightedRun::new(numbers, by), f32::from(highest));
    let error = |fit: AffineFit| run.error(fit.scale, fit.offset, (0.0, highest));
    let obvious = AffineFit { scale: (high - low) / highest, offset: -low };
    let tries = (-CANDIDATES..=CANDIDATES)
        .filter_map(|n| run.solve((high - low) / (highest + n as f32 * CANDIDATE_SPACING), -low, highest));
    tries.fold((obvious, error(obvious)), |best, fit| lower_error(best, (fit, error(fit)))).0
}

fn lower_error<T>(best: (T, f32), other: (T, f32)) -> (T, f32) {
    if other.1 < best.1 { other } else { best }
}

/// Finds the scale for quants from `-n` to `n - 1`.
pub(super) fn fit_symmetric(numbers: &[f32], by: ErrorWeights, n: i32) -> SymmetricFit {
    let larger = |extreme: f32, x: &f32| if extreme.abs() < x.abs() { *x } else { extreme };
    let extreme = numbers.iter().fold(0f32, larger);
    if extreme == 0.0 {
        return SymmetricFit::default();
    }
    let (run, n) = (WeightedRun::new(numbers, by), n as f32);
    let error = |scale: f32| run.error(scale, 0.0, (-n, n - 1.0));
    let tries = (-CANDIDATES..=CANDIDATES).map(|step| extreme / -(n + step as f32 * CANDIDATE_SPACING));
    let solved = tries.filter_map(|scale| run.solve_scale(scale, n));
    let obvious = extreme / -n;
    let best = solved.fold((obvious, error(obvious)), |best, scale| lower_error(best, (scale, error(scale))));
    SymmetricFit { scale: best.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::noise;

    /// A run on an exact grid is recovered, wherever the grid lies.
    #[test]
    fn an_exact_grid_is_recovered() {
        for (scale, offset) in [(0.25, 1.0), (0.5, 0.0), (3.0, 12.0)] {
            let run: Vec<f32> = (0..32).map(|n| (n * 7 % 16) as f32 * scale - offset).collect();
            let fit = fit_affine(&run, ErrorWeights::Magnitude, 15);
            assert!((fit.scale - scale).abs() < 1e-5 && (fit.offset - offset).abs() < 1e-4, "{fit:?}");
        }
        let run: Vec<f32> = (0..16).map(|n| (n - 8) as f32 * -0.5).collect();
        assert!((fit_symmetric(&run, ErrorWeights::Magnitude, 8).scale + 0.5).abs() < 1e-6);
    }

    #[test]
    fn the_search_is_never_worse_than_the_obvious_scale_and_usually_better() {
        let numbers = noise(3, 32 * 64);
        let mut better = 0;
        for run in numbers.chunks(32) {
            let (low, high) = run.iter().fold((0f32, 0f32), |(low, high), x| (low.min(*x), high.max(*x)));
            let obvious = AffineFit { scale: (high - low) / 15.0, offset: -low };
            let mean = run.iter().map(|x| x * x).sum::<f32>() / 32.0;
            let error = |fit: AffineFit| -> f32 {
                let off = |x: f32| {
                    x - (f32::from(nearest_quant(x + fit.offset, fit.scale, 15)) * fit.scale - fit.offset)
                };
                run.iter().map(|x| (mean.sqrt() + x.abs()) * off(*x).powi(2)).sum()
            };
            let (ours, theirs) = (error(fit_affine(run, ErrorWeights::Magnitude, 15)), error(obvious));
            assert!(ours <= theirs);
            better += usize::from(ours < 0.99 * theirs);
        }
        assert!(better > 48, "{better} of 64");
    }

    #[test]
    fn runs_of_one_number_are_exact() {
        for x in [0.0, -3.5, 2.25] {
            let fit = fit_affine(&[x; 32], ErrorWeights::Magnitude, 15);
            assert_eq!(f32::from(nearest_quant(x + fit.offset, fit.scale, 15)) * fit.scale - fit.offset, x);
            let SymmetricFit { scale } = fit_symmetric(&[x; 16], ErrorWeights::Magnitude, 32);
            assert_eq!(nearest_signed_quant(x, scale, 32) as f32 * scale, x);
        }
    }
}
