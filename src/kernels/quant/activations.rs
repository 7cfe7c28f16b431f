//! Activations of GEMMs with quantized weights: blocks of 32 int8 quants with an F32 scale.
//!
//! `scale = max |x| / 127`, `quant = round(x * (127 / max |x|))`, ties to even. If an element of a block is
//! infinite or NaN, the scale is NaN, so that it shows in every result that uses the block.
//!
//! Invariant: fast kernels compute the same quants and scales, bit for bit.

/// The precision of the activations in GEMMs, by the format of the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ActivationPrecision {
    /// Int8 for weights of formats with int8 kernels, F32 otherwise. The fastest.
    #[default]
    Int8,
    /// As [`Self::Int8`], and BF16 for BF16 weights. For devices with BF16 dot products.
    Int8AndBf16,
    /// As [`Self::Int8AndBf16`], and pairs of BF16 for F16 weights. For devices with products of BF16 tiles.
    Int8AndBf16Pairs,
    /// F32 always.
    F32,
}

impl ActivationPrecision {
    /// Returns this precision with BF16 for BF16 weights, unless all activations stay F32.
    pub fn with_bf16(self) -> ActivationPrecision {
        match self {
            ActivationPrecision::F32 => ActivationPrecision::F32,
            _ => ActivationPrecision::Int8AndBf16,
        }
    }

    /// Returns this precision with BF16 for BF16 weights and pairs of BF16 for F16 weights, unless all
    /// activations stay F32.
    pub fn with_bf16_pairs(self) -> ActivationPrecision {
        match self {
            ActivationPrecision::F32 => ActivationPrecision::F32,
            _ => ActivationPrecision::Int8AndBf16Pairs,
        }
    }
}

/// The format of the activations in one GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandFormat {
    /// F32, unchanged.
    F32,
    /// Blocks of int8: [`Int8Block`].
    Int8,
    /// BF16, rounded to nearest, ties to even.
    Bf16,
    /// The sum of two BF16: products with weights are within 2^-15.
    Bf16Pair,
}

/// Elements of a block.
pub const INT8_BLOCK_LEN: usize = 32;

/// Rounding constant 1.5 * 2^23: added to a small number, it leaves the number rounded to an integer, ties to
/// even, in the low bits of the sum.
const ROUNDING_CONSTANT: f32 = 12_582_912.0;

/// A block of int8 activations: element i is `quants[i] * scale`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Int8Block {
    /// Integers from -127 to 127.
    pub quants: [i8; INT8_BLOCK_LEN],
    /// Scale of the block.
    pub scale: f32,
}

impl Int8Block {
    /// Quantizes 32 elements.
    // `clamp` would preserve NaN.
    #[allow(clippy::manual_clamp)]
    #[inline(always)]
    pub fn quantize(x: &[f32; INT8_BLOCK_LEN]) -> Int8Block {
        // Magnitudes compare as integers in the same order, with infinity and NaN above all finite ones.
        let mut largest = 0;
        for x in x {
            largest = largest.max(x.to_bits() & 0x7fff_ffff);
        }
        let largest = f32::from_bits(largest);
        // For smaller magnitudes the reciprocal overflows.
        let inverse = if largest < 127.0 / f32::MAX { 0.0 } else { 127.0 / largest };
        let mut quants = [0; INT8_BLOCK_LEN];
        for (quant, x) in quants.iter_mut().zip(x) {
            // A float-to-byte conversion would not be vectorized; here the integer is in the low bits of the
            // sum. The clamping is for NaN.
            let rounded = (x * inverse).max(-127.0).min(127.0) + ROUNDING_CONSTANT;
            *quant = rounded.to_bits() as i8;
        }
        let scale = if largest.is_finite() { largest / 127.0 } else { f32::NAN };
        Int8Block { quants, scale }
    }

    /// Dequantizes the block.
    pub fn dequantize(&self) -> [f32; INT8_BLOCK_LEN] {
        self.quants.map(|quant| f32::from(quant) * self.scale)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_127_and_halves_go_to_even() {
        let mut x = [0.0; INT8_BLOCK_LEN];
        (x[0], x[1], x[2], x[3], x[4]) = (-254.0, 5.0, 3.0, 1.0, -1.0);
        let block = Int8Block::quantize(&x);
        assert_eq!((block.scale, &block.quants[..5]), (2.0, &[-127, 2, 2, 0, 0][..]));
        assert_eq!(Int8Block::quantize(&[0.0; 32]), Int8Block { quants: [0; 32], scale: 0.0 });
    }

    #[test]
    fn quants_of_the_smallest_numbers_are_in_range() {
        for largest in [1e-45, 1e-38, 2e-37, 4e-37, 1e-30] {
            let x = std::array::from_fn(|i| if i % 2 == 0 { largest } else { -largest / 3.0 });
            let block = Int8Block::quantize(&x);
            assert!(block.quants.iter().all(|quant| *quant >= -127), "{largest}: {block:?}");
            assert!(
                block
                    .dequantize()
                    .iter()
                    .zip(x)
                    .all(|(value, x)| (value - x).abs() <= 5e-37 + largest / 127.0)
            );
        }
    }

    #[test]
    fn non_finite_numbers_give_nan() {
        for strange in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; INT8_BLOCK_LEN];
            x[17] = strange;
            let values = Int8Block::quantize(&x).dequantize();
            assert!(values.iter().all(|value| value.is_nan()), "{strange}: {values:?}");
        }
    }
}
