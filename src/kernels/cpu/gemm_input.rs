//! The input rows of GEMMs: stored rows, or rows that are computed while they are packed, so that they never
//! lie in memory.
//!
//! Invariant: a computed row equals, bit for bit, what the separate operations give, whichever thread packs
//! it.

#![allow(unsafe_code)]

use super::activation::activate_row;
use super::norm::norm_row;
use super::pool::{SharedSlice, Workers};
use super::simd::Level;
use crate::backend::{Activation, Norm};
use crate::host::HostBuf;
use std::ops::Range;

/// Number of input values that do not justify a second thread.
const SMALL_INPUT: usize = 16 * 1024;

/// Rows of the largest tile.
const TILE_ROWS_MAX: usize = 16;

/// Returns whether the rows should be computed in memory before they are packed: if there are too few tiles
/// of rows for all threads, and more than a little to compute.
pub fn should_materialize(rows: usize, k: usize, threads: usize) -> bool {
    threads > 1 && rows * k > SMALL_INPUT && rows < 2 * threads * TILE_ROWS_MAX
}

/// The input (m, k) of a GEMM.
pub struct GemmInput<'a> {
    pub rows: usize,
    pub k: usize,
    pub values: InputValues<'a>,
}

/// The values of a GEMM input: stored, or what they are computed from.
pub enum InputValues<'a> {
    Given(&'a [f32]),
    /// One head of rows (heads, k).
    Head {
        x: &'a [f32],
        heads: usize,
        head: usize,
    },
    Normed(&'a Norm<HostBuf>, &'a [f32]),
    Activated(Activation, &'a [f32], Option<&'a [f32]>),
}

impl GemmInput<'_> {
    /// Calls `put(padded rows of the worker's tile, number within the tile, values)` for each row: tiles on
    /// several threads if there is enough to do, a tile's rows in order. `buffers` holds a row for each
    /// thread.
    pub fn for_each(
        &self,
        workers: Workers,
        level: Level,
        tiles: &RowTiles,
        buffers: &RowBuffers,
        put: impl Fn(&Range<usize>, usize, &[f32]) + Sync,
    ) {
        assert!(self.row_buffer_len() <= buffers.row_len, "a row buffer holds a row; this is a bug");
        let is_small = self.rows * self.k <= SMALL_INPUT;
        workers.run(if is_small { 1 } else { tiles.count() }, |worker, item| {
            let start = worker * buffers.row_len;
            // SAFETY: each worker has its own buffer and is in one item at a time.
            let buffer = unsafe { buffers.values.slice_mut(start..start + self.row_buffer_len()) };
            for tile in if is_small { 0..tiles.count() } else { item..item + 1 } {
                let padded = tiles.padded_rows_of(tile);
                for (r, row) in tiles.rows_of(tile).enumerate() {
                    put(&padded, r, self.row(level, row, buffer));
                }
            }
        });
    }

    /// Returns the length of the buffer that computing a row takes.
    fn row_buffer_len(&self) -> usize {
        match self.values {
            InputValues::Given(_) | InputValues::Head { .. } => 0,
            InputValues::Normed(..) | InputValues::Activated(..) => self.k,
        }
    }

    /// Returns one row, which is stored or gets computed in `buffer`.
    fn row<'s>(&'s self, level: Level, row: usize, buffer: &'s mut [f32]) -> &'s [f32] {
        let range = row * self.k..(row + 1) * self.k;
        match self.values {
            InputValues::Given(x) => return &x[range],
            InputValues::Head { x, heads, head } => return &x[(row * heads + head) * self.k..][..self.k],
            InputValues::Normed(norm, x) => {
                assert_eq!(norm.width, self.k, "the norm has the width of the rows; this is a bug");
                buffer.copy_from_slice(&x[range]);
                norm_row(level, norm, row, buffer);
            }
            InputValues::Activated(act, gate, up) => {
                buffer.copy_from_slice(&gate[range.clone()]);
                activate_row(level, act, buffer, up.map(|up| &up[range]));
            }
        }
        buffer
    }
}

/// A row buffer for each thread.
pub struct RowBuffers<'a> {
    values: SharedSlice<'a, f32>,
    row_len: usize,
}

impl<'a> RowBuffers<'a> {
    /// Divides `values` into buffers of `row_len` numbers.
    pub fn new(values: &'a mut [f32], row_len: usize) -> RowBuffers<'a> {
        RowBuffers { values: SharedSlice::new(values), row_len }
    }
}

/// Most rows that a tile is padded with. Buffers of packed inputs and of their sums have space for as many
/// more rows.
pub const PADDING_ROWS_MAX: usize = 1;

/// Returns the rows of a buffer for packed inputs of up to `rows` rows, of which each of `threads` threads
/// may have an equal share with one row.
pub fn buffer_rows(rows: usize, threads: usize) -> usize {
    (rows + PADDING_ROWS_MAX).max(threads * (1 + PADDING_ROWS_MAX))
}

/// A share of a buffer: one of several that are as long.
#[derive(Clone, Copy)]
pub struct Share {
    pub number: usize,
    pub of: usize,
}

impl Share {
    /// The whole buffer.
    pub const WHOLE: Share = Share { number: 0, of: 1 };

    /// Returns the place of the first `len` elements of the share of a buffer of `all` elements, `unit` of
    /// which stay together.
    pub fn place(self, all: usize, unit: usize, len: usize) -> Range<usize> {
        let each = all / unit / self.of * unit;
        assert!(len <= each, "{len} elements exceed a share of {each}; this is a bug");
        self.number * each..self.number * each + len
    }

    /// Returns the number of rows of `row_len` elements, at most, of an input that is packed in such a share.
    pub fn rows(self, all: usize, unit: usize, row_len: usize) -> usize {
        (all / unit / self.of * unit / row_len.max(1)).saturating_sub(PADDING_ROWS_MAX)
    }
}

/// Rows divided into tiles.
#[derive(Clone, Copy)]
pub struct RowTiles {
    /// Rows of all tiles, without padding.
    rows: usize,
    count: usize,
    /// Rows of a tile; the first `longer_tiles` have one more, and the last may have fewer.
    tile_rows: usize,
    longer_tiles: usize,
    /// Rows of all tiles, with those that the last tile is padded with.
    padded_rows: usize,
}

impl RowTiles {
    /// Divides `rows` rows into tiles of nearly equal size, at most `rows_max` rows, without padding.
    pub fn equal(rows: usize, rows_max: usize) -> RowTiles {
        let count = rows.div_ceil(rows_max).max(1);
        RowTiles { rows, count, tile_rows: rows / count, longer_tiles: rows % count, padded_rows: rows }
    }

    /// Divides `rows` rows into tiles of the largest of the given sizes, which ascend. The last tile has the
    /// smallest size that suffices, and is padded with rows whose sums nobody reads: this way, kernels are
    /// compiled for few numbers of rows.
    pub fn of_sizes(rows: usize, sizes: &[usize]) -> RowTiles {
        let tile_rows = *sizes.last().expect("a kernel has a tile size; this is a bug");
        let count = rows.div_ceil(tile_rows).max(1);
        let last = rows - (count - 1) * tile_rows;
        let padded = sizes.iter().find(|size| last <= **size).filter(|_| last > 0).copied().unwrap_or(last);
        assert!(padded - last <= PADDING_ROWS_MAX, "buffers have space for the padding; this is a bug");
        RowTiles { rows, count, tile_rows, longer_tiles: 0, padded_rows: rows + padded - last }
    }

    /// Returns the number of tiles.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of rows of all tiles, with padding.
    pub fn padded_rows(&self) -> usize {
        self.padded_rows
    }

    /// Returns the rows of a tile, without padding.
    pub fn rows_of(&self, tile: usize) -> Range<usize> {
        let padded = self.padded_rows_of(tile);
        padded.start..padded.end.min(self.rows)
    }

    /// Returns the rows of a tile, with padding.
    pub fn padded_rows_of(&self, tile: usize) -> Range<usize> {
        let first = tile * self.tile_rows + tile.min(self.longer_tiles);
        let end = first + self.tile_rows + usize::from(tile < self.longer_tiles);
        first..end.min(self.padded_rows)
    }

    /// Sets the last tile to zero if it has padding, so that no kernel computes with the padding of an
    /// earlier input. `packed` holds all tiles.
    pub fn clear_padding<T: Default + Clone>(&self, packed: &mut [T]) {
        if self.padded_rows > self.rows {
            let row_len = packed.len() / self.padded_rows;
            packed[self.padded_rows_of(self.count - 1).start * row_len..].fill(T::default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_hold_every_row_once_and_only_the_last_one_is_padded() {
        for sizes in [&[1, 2][..], &[1, 3], &[1, 2, 4, 6], &[1, 2, 4, 6, 8]] {
            for rows in 0..40 {
                let tiles = RowTiles::of_sizes(rows, sizes);
                let mut next = 0;
                for tile in 0..tiles.count() {
                    let (own, padded) = (tiles.rows_of(tile), tiles.padded_rows_of(tile));
                    assert_eq!((own.start, padded.start), (next, next), "{rows} rows in {sizes:?}");
                    assert!(own == padded || tile + 1 == tiles.count());
                    assert!(rows == 0 || sizes.contains(&padded.len()), "{rows} rows in {sizes:?}");
                    next = own.end;
                }
                assert_eq!(next, rows);
                assert_eq!(tiles.padded_rows_of(tiles.count() - 1).end, tiles.padded_rows());
            }
        }
    }

    #[test]
    fn only_the_padded_tile_is_cleared() {
        let tiles = RowTiles::of_sizes(9, &[1, 2, 4, 6]);
        let mut packed = [1; 20];
        tiles.clear_padding(&mut packed);
        assert_eq!(packed, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut packed = [1; 8];
        RowTiles::of_sizes(8, &[1, 2, 4, 6]).clear_padding(&mut packed);
        assert_eq!(packed, [1; 8]);
    }
}
