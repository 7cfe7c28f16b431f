//! The number formats that are packed, and their layouts.
//!
//! Invariant: a format is packed if and only if its blocks can be split into quants and fields.

use super::STRIP;
use super::codes::{Bytes, Codes, Elevens, Nibbles};
use super::fields::{BaseScale, Divisor, Fields, Scale, ScaleBase, Sixes, Sixteens};
use crate::quant::{INPUT_BLOCK, QuantType};
use std::marker::PhantomData;

/// A packed format: the layout of its quants and scales.
pub trait Format: 'static {
    type Codes: Codes;
    type Fields: Fields;
    /// Numbers of a block.
    const NUMBERS: usize;

    /// Bytes of the quants of one block of sixteen outputs.
    const CODE_BYTES: usize = Self::NUMBERS / Self::Codes::NUMBERS * Self::Codes::BYTES;
    /// Bytes of the scales and other fields of one block of sixteen outputs.
    const FIELD_BYTES: usize = STRIP * sum(Self::Fields::WIDTHS);
    /// Whether the panel may be read from memory rather than from a cache.
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

/// The packed format of weights, given the layouts of its quants and scales and its block length.
pub struct Of<C, F, const NUMBERS: usize>(PhantomData<(C, F)>);

impl<C: Codes, F: Fields, const NUMBERS: usize> Format for Of<C, F, NUMBERS> {
    type Codes = C;
    type Fields = F;
    const NUMBERS: usize = NUMBERS;
}

/// The unpacked form of a weight panel, used when a batch has many rows: int8 quants and F32 scales.
pub struct Unpacked<F>(PhantomData<F>);

impl<F: Fields> Format for Unpacked<F> {
    type Codes = Bytes;
    type Fields = F;
    const NUMBERS: usize = INPUT_BLOCK;
    const STREAMS: bool = false;
}

/// The format that `F` is unpacked to.
pub type Wide<F> = Unpacked<<<F as Format>::Fields as Fields>::Unpacked>;

/// An operation that is generic over the [`PackedFormat`], which is known only at run time.
pub trait ForFormat {
    type Out;
    fn run<F: Format>(self) -> Self::Out;
}

/// Calls `op` with the [`PackedFormat`] of `ty`; returns `None` if `ty` is not packed.
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
    fn every_format_with_parts_is_packed_in_the_same_number_of_bytes() {
        for ty in QuantType::all() {
            let sizes = ty.parts().map(|_| (ty.row().block_elements, ty.row().block_bytes));
            assert_eq!(with_format(ty, Sizes), sizes, "{ty}");
        }
    }
}
