//! The draw by noise (Gumbel-max), with formulas that every device can compute bit for bit.
//!
//! A token is drawn from candidates with scaled logits x as the one with the largest x + noise, where the
//! noise of each token is a function of seed, position and token id. This draws token i with probability
//! e^x_i / Σ e^x. It needs no order and no sum, a vocabulary that is split over devices is reduced by a
//! maximum, and two models that draw with the same numbers mostly draw the same token.
//!
//! Invariant: every operation here is one F32 or integer operation with IEEE 754 rounding to nearest, in the
//! order in which it is written; none may be fused or reordered. No function of a mathematical library is
//! called, because their last bits differ.

use crate::random::token_words;
use std::f32::consts::{LN_2, LOG2_E, SQRT_2};

/// Least and largest noise of a token. A candidate that is behind another by more than their difference is
/// never drawn.
pub const NOISE_BOUNDS: (f32, f32) = (-3.2, 22.2);

/// Weights are multiples of 2 to the minus this.
pub const WEIGHT_BITS: u32 = 30;

/// ln 2 as a sum of two numbers. The first has few digits, so that its product with a small integer is exact.
const LN_2_PARTS: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);

/// 1.5 * 2^23: adding and subtracting it rounds a number of magnitude below 2^22 to the nearest integer.
const ROUNDING: f32 = 12_582_912.0;

/// Exponents below this give 0.
const EXP_FLOOR: f32 = -87.0;

/// Returns e^x for x in [-87, 0] with a relative error of less than 3e-7; 0 for smaller x.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let limited = if x > EXP_FLOOR { x } else { EXP_FLOOR };
    let (n, n_bits) = nearest(limited * LOG2_E);
    let r = (limited - n * LN_2_PARTS.0) - n * LN_2_PARTS.1;
    // The Taylor series of e^r for |r| <= ln 2 / 2.
    let mut sum = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        sum = sum * r + coefficient;
    }
    let value = sum * f32::from_bits(((n_bits + 127) as u32) << 23);
    if x < EXP_FLOOR { 0.0 } else { value }
}

/// Returns the weight of a candidate for x <= 0: the integer nearest to e^x * 2^30. Sums of weights are exact
/// in any order, also as F64: those of 2^23 candidates are at most 2^53.
#[inline(always)]
pub fn weight(x: f32) -> u64 {
    // In two parts of 15 bits, because that vectorizes and a conversion with checks does not.
    let scaled = exp(x) * 32768.0;
    let (high, high_bits) = nearest(scaled);
    let (_, low_bits) = nearest((scaled - high) * 32768.0);
    (high_bits * 32768 + low_bits) as u64
}

/// Returns the integer nearest to a number of magnitude below 2^22, the even one on ties.
#[inline(always)]
pub(crate) fn nearest(x: f32) -> (f32, i32) {
    let shifted = x + ROUNDING;
    (shifted - ROUNDING, shifted.to_bits() as i32 - ROUNDING.to_bits() as i32)
}

/// Returns the natural logarithm of a positive normal number, with a relative error of less than 1e-6.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as i32 - 127;
    let mut m = f32::from_bits((bits & 0x007f_ffff) | 0x3f80_0000);
    if m > SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh f, with |f| < 0.172.
    let f = (m - 1.0) / (m + 1.0);
    let square = f * f;
    let mut sum = 1.0 / 9.0;
    for coefficient in [1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0] {
        sum = sum * square + coefficient;
    }
    let rest = (2.0 * f) * (square * sum);
    let e = exponent as f32;
    e * LN_2_PARTS.0 + (2.0 * f + (rest + e * LN_2_PARTS.1))
}

/// Returns the noise of a random word: -ln(-ln(1 - r)) with r = (word | 1) / 2^32, a standard Gumbel number
/// within [`NOISE_BOUNDS`].
pub fn gumbel(word: u32) -> f32 {
    const UNIT: f32 = 1.0 / (1u64 << 32) as f32;
    // r and 1 - r, each with its own rounding.
    let r = (word | 1) as f32 * UNIT;
    let rest = (!word | 1) as f32 * UNIT;
    let rounded = 1.0 - rest;
    // -ln(1 - r). The ratio undoes the rounding of 1 - r; if that rounds to 1, the logarithm is r.
    let exponential = if rounded > 0.0 { -ln(rest) * (r / rounded) } else { r };
    -ln(exponential)
}

/// Returns an upper bound of [`gumbel`] of a word, without a logarithm.
#[inline(always)]
pub fn gumbel_bound(word: u32) -> f32 {
    // -ln(1 - r) is above r, and r at least n / 2^31. The bits of n, as an integer, are 2^23 times a lower
    // bound of 127 + log2 n. The addend covers the rounding.
    let n = (word >> 1) as i32 as f32;
    (158.0 - n.to_bits() as i32 as f32 * (1.0 / (1 << 23) as f32)) * LN_2 + 0.001
}

/// Returns the noise of a token for a seed and a position.
pub fn noise(seed: u64, position: u64, token: u32) -> f32 {
    gumbel(token_words(seed, position, token / 4)[token as usize % 4])
}

/// Draws one of the candidates (token id, scaled logit): the one with the largest sum of logit and noise, the
/// lowest id on ties. Returns `None` if no logit is above negative infinity.
pub fn draw(candidates: impl Iterator<Item = (u32, f32)>, seed: u64, position: u64) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (id, scaled) in candidates.filter(|(_, scaled)| *scaled > f32::NEG_INFINITY) {
        let score = scaled + noise(seed, position, id);
        if best.is_none_or(|(best_id, best)| score > best || (score == best && id < best_id)) {
            best = Some((id, score));
        }
    }
    best.map(|(id, _)| id)
}

/// The winner of a draw so far, for callers that offer the candidates one by one.
#[derive(Clone, Copy, Debug)]
pub struct Best {
    /// Token id.
    pub id: u32,
    score: f32,
}

impl Best {
    /// Begins a draw with a candidate, best the most likely one.
    pub fn new(id: u32, scaled: f32, seed: u64, position: u64) -> Best {
        Best { id, score: scaled + noise(seed, position, id) }
    }

    /// Returns whether a candidate with this scaled logit can win with any noise.
    #[inline(always)]
    pub fn may_lose_to(&self, scaled: f32) -> bool {
        scaled + NOISE_BOUNDS.1 >= self.score
    }

    /// Returns whether a candidate with this scaled logit and random word may win.
    #[inline(always)]
    pub fn may_lose_with(&self, scaled: f32, word: u32) -> bool {
        scaled + gumbel_bound(word) >= self.score
    }

    /// Takes a candidate with its random word if it wins.
    #[inline]
    pub fn offer(&mut self, id: u32, scaled: f32, word: u32) {
        if !self.may_lose_with(scaled, word) {
            return;
        }
        let score = scaled + gumbel(word);
        if score > self.score || (score == self.score && id < self.id) {
            *self = Best { id, score };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers from -limit to 0, dense near 0.
    fn negatives(limit: f32) -> impl Iterator<Item = f32> {
        (0..200_000).map(move |i| -limit * (i as f32 / 200_000.0).powi(2))
    }

    #[test]
    fn formulas_are_those_of_the_mathematical_functions() {
        for x in negatives(86.9) {
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) / want - 1.0).abs() < 3e-7, "exp {x}");
            let fixed = weight(x) as f64 / (1u64 << WEIGHT_BITS) as f64;
            assert!((fixed - want).abs() <= 3e-7 * want + 1e-9, "weight {x}: {fixed}");
            let y = -x + f32::MIN_POSITIVE;
            let want = f64::from(y).ln();
            assert!((f64::from(ln(y)) - want).abs() < 1e-6 * want.abs(), "ln {y}: {} {want}", ln(y));
        }
        assert_eq!((exp(0.0), weight(0.0)), (1.0, 1 << WEIGHT_BITS));
        assert_eq!((exp(f32::NEG_INFINITY), weight(f32::NEG_INFINITY)), (0.0, 0));
    }

    /// The bits are part of the definition: another device is right if it reproduces them.
    #[test]
    fn formulas_give_their_recorded_bits() {
        let words = [0, 1, 0x8000_0000, 0x7fff_ffff, 0xdead_beef, 0x0000_0100, u32::MAX, 0xffff_ff00];
        let bits = words.map(|word| gumbel(word).to_bits());
        assert_eq!(bits, BITS, "{bits:#x?}");
        let exps = [-0.25f32, -1.0, -10.5, -86.0].map(|x| exp(x).to_bits());
        assert_eq!(exps, EXP_BITS, "{exps:#x?}");
    }

    const BITS: [u32; 8] = [
        0x41b1_7218,
        0x41b1_7218,
        0x3ebb_a795,
        0x3ebb_a795,
        0xbf36_631e,
        0x4185_0d96,
        0xc046_59ab,
        0xc033_f424,
    ];
    const EXP_BITS: [u32; 4] = [0x3f47_5f7d, 0x3ebc_5ab2, 0x37e6_fe13, 0x0173_9362];

    #[test]
    fn noise_is_a_bounded_gumbel_number() {
        let mut counts = [0u32; 20];
        let n = 400_000u32;
        for id in 0..n {
            let noise = noise(5, 3, id);
            // The distribution function maps it to a uniform number.
            counts[(20.0 * (-(-f64::from(noise)).exp()).exp()) as usize] += 1;
        }
        let expected = f64::from(n) / 20.0;
        let statistic: f64 = counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum();
        assert!(statistic < 43.82, "{statistic} at 19 degrees of freedom");
        for word in (0..=u32::MAX).step_by(65_521).chain([0, 1, 2, 3, 255, 256, 257, u32::MAX - 1, u32::MAX])
        {
            let r = (f64::from(word | 1)) / 4_294_967_296.0;
            let want = -(-(-r).ln_1p()).ln();
            let got = gumbel(word);
            assert!((f64::from(got) - want).abs() < 4e-6, "{word}: {got} {want}");
            assert!(got >= NOISE_BOUNDS.0 && got <= NOISE_BOUNDS.1 && got <= gumbel_bound(word), "{word}");
        }
    }
}
