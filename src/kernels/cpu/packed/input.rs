//! Packing of the input x (m, k) into int8 blocks of 32 columns, for tiles of rows. Each tile holds, for each
//! block, the quants of all rows, then their scales, their scaled sums, their sums, and the sums of their
//! first halves. The two unscaled sums are negated, ready to be multiplied by a zero point that must be
//! subtracted.
//!
//! Invariant: quants and scales are those of [`Int8Block`].

use crate::cpu::pool::{Parts, Pool};
use crate::cpu::simd::{IntKernel, Ints, Level};
use crate::cpu::source::{Rooms, Source, Tiles};
use crate::quant::{INPUT_BLOCK, InputBlock};

/// Bytes of one row's block.
pub const ROW_BYTES: usize = INPUT_BLOCK + 4 * WORD;
/// Bytes of a scale or a sum.
pub const WORD: usize = 4;

/// Packs the rows of each tile. `to` holds [`ROW_BLOCK_BYTES`] for each block of each row.
pub fn pack(pool: &mut Pool, level: Level, input: &Source, tiles: &Tiles, buffers: &Rooms, to: &mut [u8]) {
    let row = input.inp / INPUT_BLOCK * ROW_BYTES;
    let to = Parts::new(to);
    input.for_each(pool, level, tiles, buffers, |rows, r, x| {
        // SAFETY: each tile belongs to one item.
        let to = unsafe { to.part(rows.start * row..rows.end * row) };
        level.run_ints(Row { r, rows: rows.len(), x, to });
    });
}

/// Kernel that packs row number `r` of `rows` of a tile.
struct Row<'a> {
    r: usize,
    rows: usize,
    x: &'a [f32],
    to: &'a mut [u8],
}

impl IntKernel for Row<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, _: S) {
        let Row { r, rows, x, to } = self;
        let blocks = x.as_chunks::<INPUT_BLOCK>().0.iter().zip(to.chunks_exact_mut(rows * ROW_BYTES));
        for (x, to) in blocks {
            put(&InputBlock::of(x), r, rows, to);
        }
    }
}

/// Writes one block of row number `r` of `rows`.
#[inline(always)]
fn put(block: &InputBlock, r: usize, rows: usize, to: &mut [u8]) {
    let (mut first, mut second) = (0, 0);
    for i in 0..INPUT_BLOCK / 2 {
        first += i32::from(block.codes[i]);
        second += i32::from(block.codes[i + INPUT_BLOCK / 2]);
    }
    let (quants, words) = to.split_at_mut(rows * INPUT_BLOCK);
    for (to, quant) in quants[r * INPUT_BLOCK..].iter_mut().zip(block.codes) {
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
        words[(field * rows + r) * WORD..][..WORD].copy_from_slice(bytes);
    }
}
