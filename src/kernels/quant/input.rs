//! Inputs of products with coded weights: 32 numbers of a row share a scale, as in Q8_0, which stays an F32.
//!
//! `scale = max |x| / 127`, `code = x * (127 / max |x|)` rounded, halves to even. Of numbers of which one is infinite or none the scale is
//! NaN, so that it shows in every product of their block.
//!
//! Invariant: fast kernels give these codes and scales bit for bit.

/// What products take the operand beside the weights as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Inputs {
    /// Codes of 8 bits, where the weights' format has kernels for it: the fastest.
    #[default]
    Coded,
    /// The same, and BF16 beside weights of BF16: for a device with instructions for this.
    CodedAndHalves,
    /// F32, as it is.
    Plain,
}

impl Inputs {
    /// With BF16 beside weights of BF16, unless all stays F32.
    pub fn with_halves(self) -> Inputs {
        match self {
            Inputs::Plain => Inputs::Plain,
            Inputs::Coded | Inputs::CodedAndHalves => Inputs::CodedAndHalves,
        }
    }
}

/// What a product takes its input as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    F32,
    /// [`InputBlock`]s.
    Codes,
    /// BF16, rounded to nearest, halves to even.
    Bf16,
}

/// Numbers of a block.
pub const INPUT_BLOCK: usize = 32;

/// Added to a small number it leaves it rounded, halves to even, in the lower bits: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;

/// A block of an input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InputBlock {
    /// From -127 to 127.
    pub codes: [i8; INPUT_BLOCK],
    pub scale: f32,
}

impl InputBlock {
    /// The block of these numbers.
    // A clamped number that is none would stay so.
    #[allow(clippy::manual_clamp)]
    #[inline(always)]
    pub fn of(x: &[f32; INPUT_BLOCK]) -> InputBlock {
        // As whole numbers the magnitudes are ordered as they are, and whatever is none is above them all.
        let mut largest = 0;
        for x in x {
            largest = largest.max(x.to_bits() & 0x7fff_ffff);
        }
        let largest = f32::from_bits(largest);
        // Below that the inverse is too large to be said.
        let inverse = if largest < 127.0 / f32::MAX { 0.0 } else { 127.0 / largest };
        let mut codes = [0; INPUT_BLOCK];
        for (code, x) in codes.iter_mut().zip(x) {
            // A conversion to a byte would be one by one; of this sum the lower bits are the whole number. The bounds are for
            // what is no number.
            let rounded = (x * inverse).max(-127.0).min(127.0) + ROUND;
            *code = rounded.to_bits() as i8;
        }
        let scale = if largest.is_finite() { largest / 127.0 } else { f32::NAN };
        InputBlock { codes, scale }
    }

    /// What its numbers became.
    pub fn values(&self) -> [f32; INPUT_BLOCK] {
        self.codes.map(|code| f32::from(code) * self.scale)
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
    fn codes_of_the_smallest_numbers_are_in_bounds() {
        for largest in [1e-45, 1e-38, 2e-37, 4e-37, 1e-30] {
            let x = std::array::from_fn(|i| if i % 2 == 0 { largest } else { -largest / 3.0 });
            let block = InputBlock::of(&x);
            assert!(block.codes.iter().all(|code| *code >= -127), "{largest}: {block:?}");
            assert!(
                block.values().iter().zip(x).all(|(value, x)| (value - x).abs() <= 5e-37 + largest / 127.0)
            );
        }
    }

    #[test]
    fn numbers_that_are_none_show() {
        for strange in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; INPUT_BLOCK];
            x[17] = strange;
            let values = InputBlock::of(&x).values();
            assert!(values.iter().all(|value| value.is_nan()), "{strange}: {values:?}");
        }
    }
}
