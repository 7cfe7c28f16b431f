//! MXFP4 of stacked matrices, as in GPT-OSS: E2M1 numbers of 4 bits, with an exponent for every 32 columns.
//!
//! | tensor | content |
//! |---|---|
//! | NAME`_blocks` | U8 (matrices, out, in / 32, 16): two columns in a byte, the first in the low nibble |
//! | NAME`_scales` | U8 (matrices, out, in / 32): E8M0 exponents |
//!
//! They become the tensor NAME (matrices, out, in) in blocks of [`QuantType::MXFP4`], which have the same
//! content in another order: the exponent comes first, and the low nibbles are those of the first 16 columns.

use super::super::Checkpoint;
use super::{Encoded, Encoding};
use anyhow::{Result, ensure};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// Name of the encoding.
pub(super) const TYPE_NAME: &str = "mxfp4";

const BLOCK_LEN: usize = 32;
const BLOCK_BYTES: usize = BLOCK_LEN / 2;

/// Attaches the matrices in MXFP4.
pub(super) fn attach(checkpoint: &mut Checkpoint) -> Result<()> {
    checkpoint.attach_each(
        ["_blocks", ""],
        |_| true,
        |module| {
            let (quants, scales) = (module.take("_blocks")?, module.take("_scales")?);
            let [matrices, rows, blocks, bytes] = quants.dimensions()?;
            ensure!(
                bytes == BLOCK_BYTES,
                "its shape {:?} does not end with {BLOCK_BYTES} bytes of a block",
                quants.shape
            );
            quants.check(&["U8"], &[matrices, rows, blocks, bytes])?;
            scales.check(&["U8"], &[matrices, rows, blocks])?;
            let encoded = Encoded {
                parts: vec![quants, scales],
                rows: matrices * rows,
                columns: blocks * BLOCK_LEN,
                encoding: Encoding::Mxfp4,
                ty: QuantType::MXFP4,
                load_type: QuantType::MXFP4,
                has_zero_bias: false,
            };
            Ok((vec![matrices, rows, blocks * BLOCK_LEN], encoded))
        },
    )
}

/// Appends rows of matrices with so many columns, in blocks.
pub(super) fn decode(parts: &[&[u8]], (rows, columns): (Range<usize>, usize), out: &mut Vec<u8>) {
    let per_row = columns / BLOCK_LEN;
    let (quants, scales) = (parts[0].as_chunks::<BLOCK_BYTES>().0, parts[1]);
    let blocks = rows.start * per_row..rows.end * per_row;
    for (quants, exponent) in quants[blocks.clone()].iter().zip(&scales[blocks]) {
        out.push(*exponent);
        let quant = |column: usize| quants[column / 2] >> (column % 2 * 4) & 15;
        out.extend((0..BLOCK_LEN / 2).map(|column| quant(column) | quant(column + BLOCK_LEN / 2) << 4));
    }
}
