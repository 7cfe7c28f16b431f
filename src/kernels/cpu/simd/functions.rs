//! Exponential, hyperbolic tangent, sigmoid and the tail of the normal distribution, in every lane.
//!
//! Invariant: errors stated here are in units in the last place of the result, and hold for every instruction
//! set.

use super::Simd;

/// Adding this (1.5 * 2^23) to a small number leaves the nearest integer in the low bits of the sum.
pub const SHIFT: f32 = 12_582_912.0;

/// Returns e^x in each lane, within 2 units in the last place; 1 at 0, 0 at -inf, inf on overflow, NaN at
/// NaN.
///
/// Uses x = n ln 2 + r with |r| <= ln 2 / 2, and e^x = 2^n e^r; the series of e^r up to r^7 / 7! has an error
/// under 6e-9, a tenth of a unit.
#[inline(always)]
pub fn exp<S: Simd>(simd: S, x: S::V) -> S::V {
    const SERIES: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    // ln 2 in two parts; the products of n and the first part are exact.
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = (std::f64::consts::LN_2 - LN_2_HIGH as f64) as f32;
    // Beyond these bounds the result is 0 or infinity.
    let x = simd.max(simd.splat(-104.0), simd.min(simd.splat(89.0), x));
    let shifted = simd.mul_add(x, simd.splat(std::f32::consts::LOG2_E), simd.splat(SHIFT));
    let n = simd.sub(shifted, simd.splat(SHIFT));
    let r = simd.mul_add(n, simd.splat(-LN_2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN_2_LOW), r);
    simd.scale(polynomial(simd, r, &SERIES), shifted)
}

/// Returns e^x - 1 - x for x <= 0, within 8 units; NaN at NaN.
///
/// Near zero, where the terms cancel, uses x² P(x), the series of which up to x⁸ / 10! has an error under
/// 1e-9.
#[inline(always)]
pub fn exp_excess<S: Simd>(simd: S, x: S::V) -> S::V {
    const NEAR: f32 = -0.7;
    const P: [f32; 9] = [
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
    ];
    let near = simd.mul(simd.mul(x, x), polynomial(simd, x, &P));
    let far = simd.sub(simd.sub(exp(simd, x), simd.splat(1.0)), x);
    simd.where_less(x, simd.splat(NEAR), far, near)
}

/// Returns 1 / (1 + e^-x), within 4 units; 0 where e^-x overflows.
#[inline(always)]
pub fn sigmoid<S: Simd>(simd: S, x: S::V) -> S::V {
    let one = simd.splat(1.0);
    simd.div(one, simd.add(one, exp(simd, simd.sub(simd.splat(0.0), x))))
}

/// Returns tanh x, within 4 units; 1 and -1 at the infinities, NaN at NaN.
///
/// Near zero, where 1 - 2 / (e^2x + 1) would cancel, uses x + x³ P(x²), with P fitted to the least relative
/// error, 1e-9, on |x| < 0.55.
#[inline(always)]
pub fn tanh<S: Simd>(simd: S, x: S::V) -> S::V {
    const NEAR: f32 = 0.55;
    const P: [f32; 5] = [-6.282_473_6e-3, 2.107_776e-2, -5.385_386e-2, 1.333_260_2e-1, -3.333_332e-1];
    let negative = simd.sub(simd.splat(0.0), x);
    let magnitude = simd.max(x, negative);
    let square = simd.mul(x, x);
    let near = simd.mul_add(simd.mul(x, square), polynomial(simd, square, &P), x);
    let (one, two) = (simd.splat(1.0), simd.splat(2.0));
    let power = exp(simd, simd.add(magnitude, magnitude));
    let far = simd.sub(one, simd.div(two, simd.add(power, one)));
    let far = simd.where_less(x, negative, simd.sub(simd.splat(0.0), far), far);
    simd.where_less(magnitude, simd.splat(NEAR), near, far)
}

/// Returns the probability that a normal variable exceeds its mean by more than x >= 0 standard deviations.
/// The relative error is within 4 units plus that of e^(-x² / 2), where x² / 2 is rounded. NaN at NaN.
///
/// The tail times e^(x² / 2) is P(t) for t = 1 / (1 + x / 4), fitted to the least relative error, 9e-9, up to
/// where the tail is zero in F32.
#[inline(always)]
pub fn normal_tail<S: Simd>(simd: S, x: S::V) -> S::V {
    const P: [f32; 10] = [
        1.695_147_5e-2,
        -6.486_587e-2,
        5.667_333_4e-2,
        2.152_068e-2,
        1.867_120_3e-2,
        8.333_041e-2,
        7.319_999e-2,
        9.524_601e-2,
        9.952_673e-2,
        9.974_604e-2,
    ];
    let t = simd.div(simd.splat(1.0), simd.mul_add(x, simd.splat(0.25), simd.splat(1.0)));
    let power = exp(simd, simd.mul(simd.mul(x, simd.splat(-0.5)), x));
    simd.mul(simd.mul(polynomial(simd, t, &P), t), power)
}

/// Evaluates the polynomial of x with these coefficients, the highest power's first.
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(simd: S, x: S::V, coefficients: &[f32; N]) -> S::V {
    let mut sum = simd.splat(coefficients[0]);
    for coefficient in &coefficients[1..] {
        sum = simd.mul_add(sum, x, simd.splat(*coefficient));
    }
    sum
}
