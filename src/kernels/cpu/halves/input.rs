//! x (rows, inp) as BF16, packed for tiles of rows: for each tile, and within it for each block of 32 columns, the block's
//! numbers of each row. Zero beyond the last column.
//!
//! Invariant: a number becomes the BF16 nearest to it, halves to even.

use super::{BLOCK, BLOCK_BYTES};
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::simd::Level;
use crate::cpu::source::{Rooms, Source, Tiles};
use half::bf16;
use half::slice::HalfFloatSliceExt;

/// Bytes of a row of `inp` numbers.
pub fn row_bytes(inp: usize) -> usize {
    inp.div_ceil(BLOCK) * BLOCK_BYTES
}

/// Packs the rows of each tile. `to` holds [`row_bytes`] for each row.
pub fn pack(pool: &mut Pool, level: Level, source: &Source, tiles: &Tiles, rooms: &Rooms, to: &mut [u8]) {
    let each = row_bytes(source.inp);
    let to = Parts::new(to);
    source.for_each(pool, level, tiles, rooms, |rows, r, x| {
        // SAFETY: each tile belongs to one item.
        let to = unsafe { to.part(rows.start * each..rows.end * each) };
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
