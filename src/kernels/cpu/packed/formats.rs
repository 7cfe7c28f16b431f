//! The number formats that are packed, and their layouts.
//!
//! Invariant: a format is packed if and only if its blocks can be split into quants and fields.

use super::PANEL_OUTPUTS;
use super::quants::{Base11Pairs, Int8Quants, Nibbles, QuantPacking};
use super::scales::{
    F16DivisorMinimum, F16MinimumScale, F16Scale, F16ScaleMinimum, KQuantScales, Q6KScales, ScaleLayout,
};
use crate::quant::{INT8_BLOCK_LEN, QuantType};
use std::marker::PhantomData;

/// A packed format: the layout of its quants and scales.
pub trait PackedFormat: 'static {
    type Quants: QuantPacking;
    type Scales: ScaleLayout;
    /// Numbers of a block.
    const BLOCK_LEN: usize;

    /// Bytes of the quants of one block of sixteen outputs.
    const QUANT_BYTES: usize = Self::BLOCK_LEN / Self::Quants::QUANTS * Self::Quants::BYTES;
    /// Bytes of the scales and other fields of one block of sixteen outputs.
    const SCALE_BYTES: usize = PANEL_OUTPUTS * sum(Self::Scales::FIELD_WIDTHS);
    /// Whether the panel may be read from memory rather than from a cache.
    const STREAMS_FROM_MEMORY: bool = true;
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
pub struct BlockFormat<C, F, const NUMBERS: usize>(PhantomData<(C, F)>);

impl<C: QuantPacking, F: ScaleLayout, const NUMBERS: usize> PackedFormat for BlockFormat<C, F, NUMBERS> {
    type Quants = C;
    type Scales = F;
    const BLOCK_LEN: usize = NUMBERS;
}

/// The unpacked form of a weight panel, used when a batch has many rows: int8 quants and F32 scales.
pub struct UnpackedPanel<F>(PhantomData<F>);

impl<F: ScaleLayout> PackedFormat for UnpackedPanel<F> {
    type Quants = Int8Quants;
    type Scales = F;
    const BLOCK_LEN: usize = INT8_BLOCK_LEN;
    const STREAMS_FROM_MEMORY: bool = false;
}

/// The format that `F` is unpacked to.
pub type UnpackedFormat<F> = UnpackedPanel<<<F as PackedFormat>::Scales as ScaleLayout>::Unpacked>;

/// An operation that is generic over the [`PackedFormat`], which is known only at run time.
pub trait PackedFormatOp {
    type Out;
    /// Runs the operation with one format.
    fn run<F: PackedFormat>(self) -> Self::Out;
}

/// Calls `op` with the [`PackedFormat`] of `ty`; returns `None` if `ty` is not packed.
pub fn dispatch_format<O: PackedFormatOp>(ty: QuantType, op: O) -> Option<O::Out> {
    use QuantType::*;
    Some(match ty {
        Q8_0 => op.run::<BlockFormat<Int8Quants, F16Scale<7>, 32>>(),
        Q4_0 => op.run::<BlockFormat<Nibbles<0>, F16Scale<3>, 32>>(),
        Q4_1 => op.run::<BlockFormat<Nibbles<0>, F16ScaleMinimum, 32>>(),
        Q4_K => op.run::<BlockFormat<Nibbles<0>, KQuantScales, 256>>(),
        Q5_K => op.run::<BlockFormat<Nibbles<1>, KQuantScales, 256>>(),
        Q6_K => op.run::<BlockFormat<Nibbles<2>, Q6KScales, 256>>(),
        Q6_B64T1 => op.run::<BlockFormat<Nibbles<2>, F16MinimumScale, 64>>(),
        Q5_B64T1 => op.run::<BlockFormat<Nibbles<1>, F16MinimumScale, 64>>(),
        Q4_B64T1 => op.run::<BlockFormat<Nibbles<0>, F16MinimumScale, 64>>(),
        Q4_B32T1A | Q4_B32T1B => op.run::<BlockFormat<Nibbles<0>, F16MinimumScale, 32>>(),
        Q3H_B64T1 => op.run::<BlockFormat<Base11Pairs, F16MinimumScale, 64>>(),
        G4_B64 => op.run::<BlockFormat<Nibbles<0>, F16DivisorMinimum, 64>>(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sizes;

    impl PackedFormatOp for Sizes {
        type Out = (usize, usize);
        fn run<F: PackedFormat>(self) -> (usize, usize) {
            (F::BLOCK_LEN, (F::QUANT_BYTES + F::SCALE_BYTES) / PANEL_OUTPUTS)
        }
    }

    #[test]
    fn every_format_with_parts_is_packed_in_the_same_number_of_bytes() {
        for ty in QuantType::all() {
            let sizes = ty.block_split().map(|_| (ty.row().block_elements, ty.row().block_bytes));
            assert_eq!(dispatch_format(ty, Sizes), sizes, "{ty}");
        }
    }
}
