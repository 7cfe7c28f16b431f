//! The packed input of the int8 GEMM, and the choice of how the weights are read for it.
//!
//! x (m, k) becomes int8 blocks of 32 columns, for tiles of rows. Each tile holds, for each block, the quants
//! of all rows, then their scales, their scaled sums, their sums, and the sums of their first halves. The two
//! unscaled sums are negated, ready to be multiplied by a zero point that must be subtracted.
//!
//! Invariant: quants and scales are those of [`Int8Block`].

#[cfg(target_arch = "x86_64")]
use crate::cpu::amx;
use crate::cpu::amx::Amx;
use crate::cpu::bf16::Bf16Isa;
use crate::cpu::gemm_input::{GemmInput, RowBuffers, RowTiles};
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::simd::{IntKernel, Ints, Level};
use crate::quant::{INT8_BLOCK_LEN, Int8Block};
use std::ops::Range;

/// Smallest number of tiles of rows for which panels are unpacked.
const UNPACK_MIN_TILES: usize = 3;
/// Smallest number of rows for which AMX is used; each of its tiles then has at least six rows.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS_MIN: usize = 12;

/// Bytes of one row's block.
pub const ROW_BLOCK_BYTES: usize = INT8_BLOCK_LEN + 4 * WORD_BYTES;
/// Bytes of a scale or a sum.
pub const WORD_BYTES: usize = 4;

/// The kernel path: how the weights are read and multiplied.
#[derive(Clone, Copy)]
pub enum WeightPath {
    /// Directly from the stored panels.
    Stored,
    /// From panels that are unpacked first.
    Unpacked,
    /// From unpacked panels, with AMX.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Amx(Amx),
}

impl WeightPath {
    /// Returns the path for `rows` rows, and the tiles of rows for it.
    pub fn for_rows(level: Level, bf16_isa: Option<Bf16Isa>, rows: usize) -> (WeightPath, RowTiles) {
        #[cfg(target_arch = "x86_64")]
        if let Some(Bf16Isa::Amx(amx)) = bf16_isa
            && rows >= AMX_ROWS_MIN
        {
            return (WeightPath::Amx(amx), RowTiles::equal(rows, amx::ROWS));
        }
        let _ = bf16_isa;
        let tiles = RowTiles::of_sizes(rows, level.run_ints(TileRows));
        (if tiles.count() < UNPACK_MIN_TILES { WeightPath::Stored } else { WeightPath::Unpacked }, tiles)
    }
}

/// Kernel that returns the numbers of rows of the instruction set's tiles.
struct TileRows;

impl IntKernel for TileRows {
    type Out = &'static [usize];

    #[inline(always)]
    fn run<S: Ints>(self, _: S) -> &'static [usize] {
        S::INT8_TILE_ROWS
    }
}

/// A packed int8 input, and the scratch of each thread.
pub struct PackedInt8<'a> {
    pub level: Level,
    pub threads: usize,
    pub path: WeightPath,
    pub tiles: RowTiles,
    pub rows: usize,
    pub input: &'a [u8],
    pub sums: SharedSlice<'a, f32>,
    pub sums_len: usize,
    pub quants: SharedSlice<'a, u8>,
    pub scales: SharedSlice<'a, f32>,
}

impl PackedInt8<'_> {
    /// Returns whether a weight is read only once, as it is stored.
    pub fn is_streaming(&self) -> bool {
        matches!(self.path, WeightPath::Stored) && self.tiles.count() == 1
    }

    /// Returns a tile's rows, with padding, and the address of their block number `block` of 32 columns.
    pub fn tile(&self, tile: usize, block: usize) -> (Range<usize>, *const u8) {
        let (rows, row) = (self.tiles.padded_rows_of(tile), self.input.len() / self.tiles.padded_rows());
        let input = &self.input[rows.start * row..rows.end * row];
        let at = input[block * rows.len() * ROW_BLOCK_BYTES..].as_ptr();
        (rows, at)
    }
}

/// Packs the rows of each tile. `to` holds [`ROW_BLOCK_BYTES`] for each block of each row.
pub fn pack(
    workers: Workers,
    level: Level,
    input: &GemmInput,
    tiles: &RowTiles,
    buffers: &RowBuffers,
    to: &mut [u8],
) {
    let row = input.k / INT8_BLOCK_LEN * ROW_BLOCK_BYTES;
    tiles.clear_padding(to);
    let to = SharedSlice::new(to);
    input.for_each(workers, level, tiles, buffers, |rows, r, x| {
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
