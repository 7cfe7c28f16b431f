//! Packing of the input x (m, k) into int8 blocks of 32 columns, for tiles of rows. Each tile holds, for each
//! block, the quants of all rows, then their scales, their scaled sums, their sums, and the sums of their
//! first halves. The two unscaled sums are negated, ready to be multiplied by a zero point that must be
//! subtracted.
//!
//! Invariant: quants and scales are those of [`Int8Block`].

use crate::cpu::gemm_input::{GemmInput, RowBuffers, RowTiles};
use crate::cpu::pool::{SharedSlice, ThreadPool};
use crate::cpu::simd::{IntKernel, Ints, Level};
use crate::quant::{INT8_BLOCK_LEN, Int8Block};

/// Bytes of one row's block.
pub const ROW_BLOCK_BYTES: usize = INT8_BLOCK_LEN + 4 * WORD_BYTES;
/// Bytes of a scale or a sum.
pub const WORD_BYTES: usize = 4;

/// Packs the rows of each tile. `to` holds [`ROW_BLOCK_BYTES`] for each block of each row.
pub fn pack(
    pool: &mut ThreadPool,
    level: Level,
    input: &GemmInput,
    tiles: &RowTiles,
    buffers: &RowBuffers,
    to: &mut [u8],
) {
    let row = input.k / INT8_BLOCK_LEN * ROW_BLOCK_BYTES;
    tiles.clear_padding(to);
    let to = SharedSlice::new(to);
    input.for_each(pool, level, tiles, buffers, |rows, r, x| {
        // SAFETY: each tile belongs to one item.
        let to = unsafe { to.slice_mut(rows.start * row..rows.end * row) };
        level.run_ints(PackRow { r, rows: rows.len(), x, to });
    });
}

/// Kernel that packs row number `r` of `rows` of a tile.
struct PackRow<'a> {
    r: usize,
    rows: usize,
    x: &'a [f32],
    to: &'a mut [u8],
}

impl IntKernel for PackRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, _: S) {
        let PackRow { r, rows, x, to } = self;
        let blocks =
            x.as_chunks::<INT8_BLOCK_LEN>().0.iter().zip(to.chunks_exact_mut(rows * ROW_BLOCK_BYTES));
        for (x, to) in blocks {
            write_block(&Int8Block::quantize(x), r, rows, to);
        }
    }
}

/// Writes one block of row number `r` of `rows`.
#[inline(always)]
fn write_block(block: &Int8Block, r: usize, rows: usize, to: &mut [u8]) {
    let (mut first, mut second) = (0, 0);
    for i in 0..INT8_BLOCK_LEN / 2 {
        first += i32::from(block.quants[i]);
        second += i32::from(block.quants[i + INT8_BLOCK_LEN / 2]);
    }
    let (quants, words) = to.split_at_mut(rows * INT8_BLOCK_LEN);
    for (to, quant) in quants[r * INT8_BLOCK_LEN..].iter_mut().zip(block.quants) {
        *to = quant as u8;
    }
    let scaled = (first + second) as f32 * block.scale;
    let all = [
        block.scale.to_le_bytes(),
        scaled.to_le_bytes(),
        (-first - second).to_le_bytes(),
        (-first).to_le_bytes(),
    ];
    for (field, bytes) in all.iter().enumerate() {
        words[(field * rows + r) * WORD_BYTES..][..WORD_BYTES].copy_from_slice(bytes);
    }
}
