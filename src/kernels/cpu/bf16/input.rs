//! Packing of the input x (m, k) as BF16, for tiles of rows. Each tile holds, for each block of 32 columns,
//! the block's numbers of each row. Numbers beyond the last column are zero.
//!
//! Invariant: a number is rounded to the nearest BF16, ties to even.

use super::{BLOCK, BLOCK_BYTES};
use crate::cpu::gemm_input::{GemmInput, RowBuffers, RowTiles};
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::simd::Level;
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Returns the bytes of a packed row of `k` numbers.
pub fn row_bytes(k: usize) -> usize {
    k.div_ceil(BLOCK) * BLOCK_BYTES
}

/// Packs the rows of each tile. `to` holds [`row_bytes`] for each row.
pub fn pack(
    workers: Workers,
    level: Level,
    input: &GemmInput,
    tiles: &RowTiles,
    buffers: &RowBuffers,
    to: &mut [u8],
) {
    let row = row_bytes(input.k);
    tiles.clear_padding(to);
    let to = SharedSlice::new(to);
    input.for_each(workers, level, tiles, buffers, |rows, r, x| {
        // SAFETY: each tile belongs to one item.
        let to = unsafe { to.slice_mut(rows.start * row..rows.end * row) };
        let blocks = to[r * BLOCK_BYTES..].chunks_mut(rows.len() * BLOCK_BYTES);
        for (x, to) in x.chunks(BLOCK).zip(blocks) {
            put(x, &mut to[..BLOCK_BYTES]);
        }
    });
}

fn put(x: &[f32], to: &mut [u8]) {
    let mut halves = [bf16::ZERO; BLOCK];
    halves[..x.len()].convert_from_f32_slice(x);
    for (half, to) in halves.iter().zip(to.as_chunks_mut().0) {
        *to = half.to_le_bytes();
    }
}
