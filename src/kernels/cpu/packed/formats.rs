//! Which number formats are packed, and how.
//!
//! Invariant: a format that is packed can be taken apart.

use super::STRIP;
use super::codes::{Bytes, Codes, Elevens, Nibbles};
use super::fields::{BaseScale, Divisor, Fields, Scale, ScaleBase, Sixes, Sixteens};
use crate::quant::{INPUT_BLOCK, QuantType};
use std::marker::PhantomData;

/// How a format is packed.
pub trait Format: 'static {
    type Codes: Codes;
    type Fields: Fields;
    /// Numbers of a block.
    const NUMBERS: usize;

    /// Bytes of a block's codes, of sixteen outs.
    const CODE_BYTES: usize = Self::NUMBERS / Self::Codes::NUMBERS * Self::Codes::BYTES;
    /// Bytes of a block's fields, of sixteen outs.
    const FIELD_BYTES: usize = STRIP * sum(Self::Fields::WIDTHS);
    /// Whether it may come from memory.
    const STREAMS: bool = true;
}

const fn sum(widths: &[usize]) -> usize {
    let (mut sum, mut i) = (0, 0);
    while i < widths.len() {
        sum += widths[i];
        i += 1;
    }
    sum
}

/// The format of these parts.
pub struct Of<C, F, const NUMBERS: usize>(PhantomData<(C, F)>);

impl<C: Codes, F: Fields, const NUMBERS: usize> Format for Of<C, F, NUMBERS> {
    type Codes = C;
    type Fields = F;
    const NUMBERS: usize = NUMBERS;
}

/// Bytes and F32, to which a format is unpacked that many rows are multiplied with.
pub struct Unpacked<F>(PhantomData<F>);

impl<F: Fields> Format for Unpacked<F> {
    type Codes = Bytes;
    type Fields = F;
    const NUMBERS: usize = INPUT_BLOCK;
    const STREAMS: bool = false;
}

/// What a format is unpacked to.
pub type Wide<F> = Unpacked<<<F as Format>::Fields as Fields>::Unpacked>;

/// Something to be done for the [`Format`] that belongs to a type known at run time.
pub trait ForFormat {
    type Out;
    fn run<F: Format>(self) -> Self::Out;
}

/// Calls `op` with how `ty` is packed; `None` if it is not.
pub fn with_format<O: ForFormat>(ty: QuantType, op: O) -> Option<O::Out> {
    use QuantType::*;
    Some(match ty {
        Q8_0 => op.run::<Of<Bytes, Scale<7>, 32>>(),
        Q4_0 => op.run::<Of<Nibbles<0>, Scale<3>, 32>>(),
        Q4_1 => op.run::<Of<Nibbles<0>, ScaleBase, 32>>(),
        Q4_K => op.run::<Of<Nibbles<0>, Sixes, 256>>(),
        Q5_K => op.run::<Of<Nibbles<1>, Sixes, 256>>(),
        Q6_K => op.run::<Of<Nibbles<2>, Sixteens, 256>>(),
        Q6_B64T1 => op.run::<Of<Nibbles<2>, BaseScale, 64>>(),
        Q5_B64T1 => op.run::<Of<Nibbles<1>, BaseScale, 64>>(),
        Q4_B64T1 => op.run::<Of<Nibbles<0>, BaseScale, 64>>(),
        Q4_B32T1A | Q4_B32T1B => op.run::<Of<Nibbles<0>, BaseScale, 32>>(),
        Q3H_B64T1 => op.run::<Of<Elevens, BaseScale, 64>>(),
        G4_B64 => op.run::<Of<Nibbles<0>, Divisor, 64>>(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sizes;

    impl ForFormat for Sizes {
        type Out = (usize, usize);
        fn run<F: Format>(self) -> (usize, usize) {
            (F::NUMBERS, (F::CODE_BYTES + F::FIELD_BYTES) / STRIP)
        }
    }

    #[test]
    fn what_can_be_taken_apart_is_packed_in_as_many_bytes() {
        for ty in QuantType::all() {
            let sizes = ty.parts().map(|_| (ty.row().block_elements, ty.row().block_bytes));
            assert_eq!(with_format(ty, Sizes), sizes, "{ty}");
        }
    }
}
