//! Sums of products as tensor cores make them, after the published models (arXiv 2512.07004 and
//! 2511.10909): products are exact; a group of them and the accumulator are aligned to the largest
//! exponent, cut off (not rounded) some bits below single precision, and added exactly; the sum is cut off
//! to single precision. Groups follow one another.

use super::Element;
use crate::arith::rounding::{F16, Rounding, encode};

/// A number taken apart: `mantissa * 2^(exponent - bits)`, with the bits of its format. Its exponent is
/// that of the format, so that of subnormal numbers is the smallest normal one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Number {
    pub(super) mantissa: i32,
    exponent: i32,
    /// The value, if it is not finite.
    special: f32,
}

impl Number {
    /// The number of a code with so many bits of exponent and mantissa, behind its sign.
    pub(super) fn decode(code: u32, exponent_bits: u32, bits: u32) -> Number {
        let top = (1 << exponent_bits) - 1;
        let (exponent, fraction) = (code >> bits & top, code & ((1 << bits) - 1));
        let negative = code >> (exponent_bits + bits) & 1 == 1;
        if exponent == top {
            let infinity = if negative { f32::NEG_INFINITY } else { f32::INFINITY };
            let special = if fraction == 0 { infinity } else { f32::NAN };
            return Number { special, ..Number::default() };
        }
        let mantissa = (fraction | u32::from(exponent != 0) << bits) as i32;
        Number {
            mantissa: if negative { -mantissa } else { mantissa },
            exponent: exponent.max(1) as i32 - (top / 2) as i32,
            special: 0.0,
        }
    }

    /// The value as far as its sign and being finite are concerned.
    fn rough(self) -> f32 {
        if self.special == 0.0 { self.mantissa as f32 } else { self.special }
    }
}

/// A row of A or a column of B.
#[derive(Clone, Copy, Debug)]
pub(super) struct Line {
    mantissas: [i32; 16],
    /// Exponents; that of a zero is so small that its products are.
    exponents: [i32; 16],
    /// The values, as far as sign and being finite are concerned, if one is not finite.
    specials: Option<[f32; 16]>,
}

/// The exponent of a zero.
const NONE: i32 = -10_000;

impl Line {
    /// A line of zeros.
    pub(super) fn new() -> Line {
        Line { mantissas: [0; 16], exponents: [NONE; 16], specials: None }
    }

    /// Sets an element.
    pub(super) fn set(&mut self, at: usize, number: Number) {
        self.mantissas[at] = number.mantissa;
        self.exponents[at] = if number.mantissa == 0 { NONE } else { number.exponent };
        if number.special != 0.0 {
            let finite = self.mantissas.map(|it| it as f32);
            self.specials.get_or_insert(finite)[at] = number.special;
        } else if let Some(specials) = &mut self.specials {
            specials[at] = number.mantissa as f32;
        }
    }

    fn rough(&self, at: usize) -> f32 {
        self.specials.map_or(self.mantissas[at] as f32, |it| it[at])
    }
}

/// A model of an architecture's tensor core.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    /// Products that are added at once.
    group: usize,
    /// Bits kept below the largest exponent.
    fraction: i32,
    /// Bits of the elements' mantissa.
    bits: i32,
}

impl Model {
    /// The model of an architecture for a type of elements: up to 8.9, 8 products (4 of TF32) are added at
    /// once, with one bit more than single precision has; from 9.0 on 16 (8 of TF32), with two bits more.
    pub(super) fn of(arch: u32, element: Element) -> Model {
        let (group, fraction) = if arch >= 90 { (16, 25) } else { (8, 24) };
        Model {
            group: if element == Element::Tf32 { group / 2 } else { group },
            fraction,
            bits: if element == Element::Bf16 { 7 } else { 10 },
        }
    }

    /// The sum of the first `k` products of `a` and `b`, added to `start`, in single precision.
    pub(super) fn dot(self, a: &Line, b: &Line, k: usize, start: f32) -> f32 {
        let mut sum = start;
        for from in (0..k).step_by(self.group) {
            let first = Number::decode(sum.to_bits(), 8, 23);
            sum = match self.step(a, b, from, (k - from).min(self.group), first, 23) {
                Sum::Exact(sum, unit) => truncated(sum, unit),
                Sum::Special(special) => special,
            };
        }
        sum
    }

    /// As [`Model::dot`], in half precision: each group's sum is rounded to nearest.
    pub(super) fn dot_half(self, a: &Line, b: &Line, k: usize, start: u32) -> u32 {
        let mut sum = start;
        for from in (0..k).step_by(self.group) {
            let first = Number::decode(sum, 5, 10);
            let value = match self.step(a, b, from, (k - from).min(self.group), first, 10) {
                // Fewer than 53 bits, and an exponent within the range of doubles.
                Sum::Exact(sum, unit) => sum as f64 * power(-unit),
                Sum::Special(special) => f64::from(special),
            };
            sum = encode(value, F16, Rounding::Nearest);
        }
        sum
    }

    /// One group, of `count` products; `first` is the accumulator, with so many bits of mantissa.
    #[inline]
    fn step(self, a: &Line, b: &Line, from: usize, count: usize, first: Number, first_bits: i32) -> Sum {
        if a.specials.is_some() || b.specials.is_some() || first.special != 0.0 {
            let products = (from..from + count).map(|at| a.rough(at) * b.rough(at));
            let sum = products.fold(first.rough(), |sum, product| sum + product);
            // Infinities and NaN follow the rules of addition; finite groups of such a line do not.
            if !sum.is_finite() {
                return Sum::Special(sum);
            }
        }
        let (am, bm) = (&a.mantissas[from..from + count], &b.mantissas[from..from + count]);
        let (ae, be) = (&a.exponents[from..from + count], &b.exponents[from..from + count]);
        let mut largest = if first.mantissa == 0 { 2 * NONE } else { first.exponent };
        for (a, b) in ae.iter().zip(be) {
            largest = largest.max(a + b);
        }
        if largest < NONE / 2 {
            return Sum::Exact(0, 0);
        }
        // In units of the last bit that is kept. A product has at most 22 bits, and a few are kept below.
        let mut sum =
            shifted(i64::from(first.mantissa), self.fraction - first_bits - (largest - first.exponent));
        let below = self.fraction - 2 * self.bits;
        for ((a, b), (ae, be)) in am.iter().zip(bm).zip(ae.iter().zip(be)) {
            let product = a * b;
            let magnitude = (product.unsigned_abs() << below) >> (largest - ae - be).min(31);
            let sign = product >> 31;
            sum += i64::from((magnitude as i32 ^ sign) - sign);
        }
        Sum::Exact(sum, self.fraction - largest)
    }
}

/// The sum of a group.
enum Sum {
    /// The first number times two to the power of minus the second.
    Exact(i64, i32),
    /// An infinity or NaN.
    Special(f32),
}

/// `x * 2^by`, cut off to an integer.
#[inline(always)]
fn shifted(x: i64, by: i32) -> i64 {
    if by >= 0 {
        return x << by;
    }
    let magnitude = (x.unsigned_abs() >> (-by).min(63)) as i64;
    if x < 0 { -magnitude } else { magnitude }
}

fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent.clamp(-1022, 1023) + 1023) as u64) << 52)
}

/// `sum * 2^-unit`, cut off to single precision.
#[inline]
fn truncated(sum: i64, unit: i32) -> f32 {
    let magnitude = sum.unsigned_abs();
    let surplus = (64 - magnitude.leading_zeros() as i32 - 24).max(0);
    // Subnormal results keep fewer bits.
    let surplus = surplus.max(unit - 149).min(63);
    let kept = (magnitude >> surplus << surplus) as f64;
    let half = unit / 2;
    let value = (kept * power(-half) * power(half - unit)) as f32;
    if sum < 0 { -value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line_of(values: &[f32]) -> Line {
        let mut line = Line::new();
        for (at, value) in values.iter().enumerate() {
            line.set(at, Number::decode(u32::from(half::f16::from_f32(*value).to_bits()), 5, 10));
        }
        line
    }

    fn dot(arch: u32, a: &[f32], b: &[f32], start: f32) -> f32 {
        Model::of(arch, Element::F16).dot(&line_of(a), &line_of(b), a.len(), start)
    }

    #[test]
    fn bits_below_the_kept_ones_are_cut_off() {
        // 1 + 2^-24: one bit more than F32 has is kept while adding, and cut off at the end.
        let tiny = 2f32.powi(-12);
        assert_eq!(dot(80, &[tiny], &[tiny], 1.0), 1.0);
        // Two of them make a bit of F32 that an architecture with this extra bit keeps.
        assert_eq!(dot(80, &[tiny; 2], &[tiny; 2], 1.0), 1.0 + 2f32.powi(-23));
        // Quarters of a bit are cut off before the addition with one extra bit, and not with two.
        let smaller = [2f32.powi(-13); 4];
        assert_eq!(dot(80, &smaller, &[tiny; 4], 1.0), 1.0);
        assert_eq!(dot(90, &smaller, &[tiny; 4], 1.0), 1.0 + 2f32.powi(-23));
    }

    #[test]
    fn sums_are_truncated_toward_zero() {
        // 2^24 + 1.5: nearest would be 2^24 + 2.
        assert_eq!(dot(80, &[1.5], &[1.0], 16_777_216.0), 16_777_216.0);
        assert_eq!(dot(80, &[-1.5], &[1.0], -16_777_216.0), -16_777_216.0);
    }

    #[test]
    fn groups_follow_one_another() {
        // On 8.0 the second group of 8 is added to a sum that has lost the first's small parts; 9.0 adds 16
        // at once.
        let mut a = [2f32.powi(-12); 16];
        a[8] = 1.0;
        let mut b = [2f32.powi(-12); 16];
        b[8] = 1.0;
        assert_eq!(dot(80, &a, &b, 0.0), 1.0 + 2f32.powi(-21) + 2f32.powi(-22) + 2f32.powi(-23));
        assert_eq!(dot(90, &a, &b, 0.0), dot(80, &a, &b, 0.0));
    }

    #[test]
    fn half_sums_are_rounded_after_each_group() {
        let model = Model::of(80, Element::F16);
        // 2048 + 1 is a tie to even in each of two groups; both at once would be 2050.
        let mut a = [0.0; 16];
        (a[0], a[8]) = (1.0, 1.0);
        let ones = [1.0; 16];
        assert_eq!(model.dot_half(&line_of(&a), &line_of(&ones), 16, 0x6800), 0x6800);
        assert_eq!(Model::of(90, Element::F16).dot_half(&line_of(&a), &line_of(&ones), 16, 0x6800), 0x6801);
        assert_eq!(model.dot_half(&line_of(&[f32::NAN]), &line_of(&[1.0]), 1, 0), 0x7fff);
    }

    #[test]
    fn infinities_and_nan_pass_through() {
        assert_eq!(dot(80, &[f32::INFINITY], &[1.0], 1.0), f32::INFINITY);
        assert!(dot(80, &[f32::INFINITY, 1.0], &[0.0, 1.0], 1.0).is_nan());
        assert_eq!(dot(80, &[1.0], &[1.0], f32::NEG_INFINITY), f32::NEG_INFINITY);
    }
}
