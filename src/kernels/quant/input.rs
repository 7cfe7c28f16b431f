//! Activations of GEMMs with quantized weights: blocks of 32 int8 quants with an F32 scale.
//!
//! `scale = max |x| / 127`, `quant = round(x * (127 / max |x|))`, ties to even. If an element of a block is
//! infinite or NaN, the scale is NaN, so that it shows in every result that uses the block.
//!
//! Invariant: fast kernels compute the same quants and scales, bit for bit.

/// The precision of the activations in GEMMs, by the format of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inputs {
    /// Int8 for weights of formats with int8 kernels, F32 otherwise. The fastest.
    #[default]
    Coded,
    /// As [`Self::Int8`], and BF16 for BF16 weights. For devices with BF16 dot products.
    CodedAndHalves,
    /// F32 always.
    Plain,
}

impl Inputs {
    /// Returns this precision with BF16 for BF16 weights, unless all activations stay F32.
    pub fn with_halves(self) -> Inputs {
        match self {
            Inputs::Plain => Inputs::Plain,
            Inputs::Coded | Inputs::CodedAndHalves => Inputs::CodedAndHalves,
        }
    }
}

/// The format of the activations in one GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// F32, unchanged.
    F32,
    /// Blocks of int8: [`Int8Block`].
    Codes,
    /// BF16, rounded to nearest, ties to even.
    Bf16,
}

/// Elements of a block.
pub const INPUT_BLOCK: usize = 32;

/// Rounding constant 1.5 * 2^23: added to a small number, it leaves the number rounded to an integer, ties to
/// even, in the low bits of the sum.
const ROUND: f32 = 12_582_912.0;

/// A block of int8 activations: element i is `quants[i] * scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputBlock {
    /// Integers from -127 to 127.
    pub codes: [i8; INPUT_BLOCK],
    /// Scale of the block.
    pub scale: f32,
}

impl InputBlock {
    /// Quantizes 32 elements.
    // `clamp` would preserve NaN.
    #[allow(clippy::manual_clamp)]
    #[inline(always)]
    pub fn of(x: &[f32; INPUT_BLOCK]) -> InputBlock {
        // Magnitudes compare as integers in the same order, with infinity and NaN above all finite ones.
        let mut largest = 0;
        for x in x {
            largest = largest.max(x.to_bits() & 0x7fff_ffff);
        }
        let largest = f32::from_bits(largest);
        // For smaller magnitudes the reciprocal overflows.
        let inverse = if largest < 127.0 / f32::MAX { 0.0 } else { 127.0 / largest };
        let mut codes = [0; INPUT_BLOCK];
        for (quant, x) in codes.iter_mut().zip(x) {
            // A float-to-byte conversion would not be vectorized; here the integer is in the low bits of the
            // sum. The clamping is for NaN.
            let rounded = (x * inverse).max(-127.0).min(127.0) + ROUND;
            *quant = rounded.to_bits() as i8;
        }
        let scale = if largest.is_finite() { largest / 127.0 } else { f32::NAN };
        InputBlock { codes, scale }
    }

    /// Dequantizes the block.
    pub fn values(&self) -> [f32; INPUT_BLOCK] {
        self.codes.map(|quant| f32::from(quant) * self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_127_and_halves_go_to_even() {
        let mut x = [0.0; INPUT_BLOCK];
        (x[0], x[1], x[2], x[3], x[4]) = (-254.0, 5.0, 3.0, 1.0, -1.0);
        let block = InputBlock::of(&x);
        assert_eq!((block.scale, &block.codes[..5]), (2.0, &[-127, 2, 2, 0, 0][..]));
        assert_eq!(InputBlock::of(&[0.0; 32]), InputBlock { codes: [0; 32], scale: 0.0 });
    }

    #[test]
    fn quants_of_the_smallest_numbers_are_in_range() {
        for largest in [1e-45, 1e-38, 2e-37, 4e-37, 1e-30] {
            let x = std::array::from_fn(|i| if i % 2 == 0 { largest } else { -largest / 3.0 });
            let block = InputBlock::of(&x);
            assert!(block.codes.iter().all(|quant| *quant >= -127), "{largest}: {block:?}");
            assert!(
                block.values().iter().zip(x).all(|(value, x)| (value - x).abs() <= 5e-37 + largest / 127.0)
            );
        }
    }

    #[test]
    fn non_finite_numbers_give_nan() {
        for strange in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; INPUT_BLOCK];
            x[17] = strange;
            let values = InputBlock::of(&x).values();
            assert!(values.iter().all(|value| value.is_nan()), "{strange}: {values:?}");
        }
    }
}
