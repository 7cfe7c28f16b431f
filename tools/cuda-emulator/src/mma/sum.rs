//! Sums of products as tensor cores make them, after the published models (arXiv 2512.07004; Fasi, Higham,
//! Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021): products are exact; a group of
//! them and the accumulator are aligned to the largest exponent, cut off (not rounded) some bits below
//! single precision, and added exactly; the sum is cut off to single precision. Groups follow one another.

use super::Element;

/// A model of an architecture's tensor core.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    /// Products that are added at once.
    group: usize,
    /// Bits kept below the largest exponent.
    fraction: i32,
}

impl Model {
    /// The model of an architecture for a type of elements: 8.0 and 8.6 add 8 products (4 of TF32) with one
    /// bit more than single precision has, 8.9 and later 16 (8 of TF32) with two bits more.
    pub(super) fn of(arch: u32, element: Element) -> Model {
        let late = arch >= 89;
        let group = if late { 16 } else { 8 };
        let fraction = if late { 25 } else { 24 };
        Model { group: if element == Element::Tf32 { group / 2 } else { group }, fraction }
    }

    /// The sum of products of `a` and `b`, added to `start`.
    pub(super) fn dot(self, a: &[f32], b: &[f32], start: f32) -> f32 {
        let mut sum = start;
        for (a, b) in a.chunks(self.group).zip(b.chunks(self.group)) {
            sum = self.step(a, b, sum);
        }
        sum
    }

    fn step(self, a: &[f32], b: &[f32], start: f32) -> f32 {
        let mut terms = [0f64; 17];
        terms[0] = f64::from(start);
        for ((term, a), b) in terms[1..].iter_mut().zip(a).zip(b) {
            *term = f64::from(*a) * f64::from(*b);
        }
        let terms = &terms[..=a.len()];
        if terms.iter().any(|term| !term.is_finite()) {
            // Infinities and NaN follow the rules of addition.
            return terms.iter().sum::<f64>() as f32;
        }
        let largest = terms.iter().zip(0..).map(|(term, at)| self.exponent(*term, a, b, at)).max();
        let Some(largest) = largest.filter(|it| *it > i32::MIN) else {
            return terms.iter().sum::<f64>() as f32;
        };
        // In units of the last bit that is kept.
        let unit = self.fraction - largest;
        let sum: i64 = terms.iter().map(|term| scaled(*term, unit)).sum();
        truncated(sum, unit)
    }

    /// The exponent that a term is aligned by: a product's is the sum of its factors' exponents, before
    /// normalization.
    fn exponent(self, term: f64, a: &[f32], b: &[f32], at: usize) -> i32 {
        if term == 0.0 {
            return i32::MIN;
        }
        match at {
            0 => exponent_of(term as f32),
            _ => exponent_of(a[at - 1]) + exponent_of(b[at - 1]),
        }
    }
}

/// The exponent of a finite number that is not zero; subnormal ones have the smallest normal exponent of F32.
fn exponent_of(x: f32) -> i32 {
    ((x.to_bits() >> 23 & 0xff) as i32).max(1) - 127
}

/// `x * 2^unit`, cut off to an integer.
fn scaled(x: f64, unit: i32) -> i64 {
    // In two steps, because 2^unit may exceed the range.
    let half = unit / 2;
    (x * power(half) * power(unit - half)) as i64
}

fn power(exponent: i32) -> f64 {
    f64::from_bits(((exponent.clamp(-1022, 1023) + 1023) as u64) << 52)
}

/// `sum * 2^-unit`, cut off to single precision.
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

    #[test]
    fn bits_below_the_kept_ones_are_cut_off() {
        // 1 + 2^-24: one bit more than F32 has is kept while adding, and cut off at the end.
        let a = Model::of(80, Element::F16);
        let tiny = 2f32.powi(-12);
        assert_eq!(a.dot(&[tiny], &[tiny], 1.0), 1.0);
        // Two of them make a bit of F32 that an architecture with this extra bit keeps.
        assert_eq!(a.dot(&[tiny, tiny], &[tiny, tiny], 1.0), 1.0 + 2f32.powi(-23));
        // Two halves of that bit are cut off before the addition with one extra bit, and not with two.
        let smaller = 2f32.powi(-13);
        let four = [smaller; 4];
        let others = [tiny; 4];
        assert_eq!(a.dot(&four, &others, 1.0), 1.0);
        assert_eq!(Model::of(90, Element::F16).dot(&four, &others, 1.0), 1.0 + 2f32.powi(-23));
    }

    #[test]
    fn sums_are_truncated_toward_zero() {
        // 2^24 + 1.5: nearest would be 2^24 + 2.
        let model = Model::of(80, Element::F16);
        assert_eq!(model.dot(&[1.5], &[1.0], 16_777_216.0), 16_777_216.0);
        assert_eq!(model.dot(&[-1.5], &[1.0], -16_777_216.0), -16_777_216.0);
    }

    #[test]
    fn infinities_and_nan_pass_through() {
        let model = Model::of(80, Element::F16);
        assert_eq!(model.dot(&[f32::INFINITY], &[1.0], 1.0), f32::INFINITY);
        assert!(model.dot(&[f32::INFINITY, 1.0], &[0.0, 1.0], 1.0).is_nan());
    }
}
