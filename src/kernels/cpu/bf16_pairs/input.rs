//! Packing of the input x (m, k) as pairs of BF16, for tiles of rows. Each tile holds, for each block of 32
//! columns, the first halves of the pairs of each row, then the rests. Numbers beyond the last column are
//! zero.
//!
//! Invariant: the bytes of a row in its tile do not depend on the other rows.

use super::split::{self, NUMBERS};
use crate::cpu::gemm_input::{GemmInput, RowBuffers, RowTiles};
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::simd::Level;

/// Bytes of one row's half of a block.
pub const HALF_BYTES: usize = 2 * NUMBERS;

/// Returns the bytes of a packed row of `k` numbers.
pub fn row_bytes(k: usize) -> usize {
    k.div_ceil(NUMBERS) * 2 * HALF_BYTES
}

/// Packs the rows of each tile. `to` holds [`row_bytes`] for each row.
///
/// # Safety
/// * The CPU has AVX-512 with BF16.
#[cfg(target_arch = "x86_64")]
pub unsafe fn pack(
    workers: Workers,
    level: Level,
    input: &GemmInput,
    tiles: &RowTiles,
    buffers: &RowBuffers,
    to: &mut [u8],
) {
    let row = row_bytes(input.k);
    let to = SharedSlice::new(to);
    input.for_each(workers, level, tiles, buffers, |rows, r, x| {
        // SAFETY: each tile belongs to one item.
        let to = unsafe { to.slice_mut(rows.start * row..rows.end * row) };
        let blocks = to.chunks_exact_mut(rows.len() * 2 * HALF_BYTES);
        for (x, block) in x.chunks(NUMBERS).zip(blocks) {
            let (first, rest) = block.split_at_mut(rows.len() * HALF_BYTES);
            let [first, rest] = [first, rest].map(|half| &mut half[r * HALF_BYTES..][..HALF_BYTES]);
            let mut padded = [0.0; NUMBERS];
            let whole = x.first_chunk::<NUMBERS>().unwrap_or_else(|| {
                padded[..x.len()].copy_from_slice(x);
                &padded
            });
            // SAFETY: the caller's promise; the slices have the lengths that are read and written.
            unsafe { split::split_f32(whole.as_ptr(), first.as_mut_ptr(), rest.as_mut_ptr()) };
        }
    });
}
