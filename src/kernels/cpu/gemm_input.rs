//! The input rows of GEMMs: stored rows, or rows that are computed while they are packed, so that they never
//! lie in memory.
//!
//! Invariant: a computed row equals, bit for bit, what the separate operations give, whichever thread packs
//! it.

#![allow(unsafe_code)]

use super::activation::activate_row;
use super::norm::norm_row;
use super::pool::{SharedSlice, ThreadPool};
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
    Normed(&'a Norm<HostBuf>, &'a [f32]),
    Activated(Activation, &'a [f32], Option<&'a [f32]>),
}

impl GemmInput<'_> {
    /// Calls `put(rows of the worker's tile, number within the tile, values)` for each row: tiles on several
    /// threads if there is enough to do, a tile's rows in order. `buffers` holds a row for each thread.
    pub fn for_each(
        &self,
        pool: &mut ThreadPool,
        level: Level,
        tiles: &RowTiles,
        buffers: &RowBuffers,
        put: impl Fn(&Range<usize>, usize, &[f32]) + Sync,
    ) {
        assert!(self.row_buffer_len() <= buffers.row_len, "a row buffer holds a row; this is a bug");
        let is_small = self.rows * self.k <= SMALL_INPUT;
        pool.run(if is_small { 1 } else { tiles.count() }, |worker, item| {
            let start = worker * buffers.row_len;
            // SAFETY: each worker has its own buffer and is in one item at a time.
            let buffer = unsafe { buffers.values.slice_mut(start..start + self.row_buffer_len()) };
            for tile in if is_small { 0..tiles.count() } else { item..item + 1 } {
                let rows = tiles.rows_of(tile);
                for (r, row) in rows.clone().enumerate() {
                    put(&rows, r, self.row(level, row, buffer));
                }
            }
        });
    }

    /// Returns the length of the buffer that computing a row takes.
    fn row_buffer_len(&self) -> usize {
        if let InputValues::Given(_) = self.values { 0 } else { self.k }
    }

    /// Returns one row, which is stored or gets computed in `buffer`.
    fn row<'s>(&'s self, level: Level, row: usize, buffer: &'s mut [f32]) -> &'s [f32] {
        let range = row * self.k..(row + 1) * self.k;
        match self.values {
            InputValues::Given(x) => return &x[range],
            InputValues::Normed(norm, x) => {
                assert_eq!(norm.width, self.k, "the norm has the width of the rows; this is a bug");
                buffer.copy_from_slice(&x[range]);
                norm_row(level, norm, buffer);
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

/// Rows divided into tiles of nearly equal size.
#[derive(Clone, Copy)]
pub struct RowTiles {
    count: usize,
    /// Rows of a tile; the first `longer` tiles have one more.
    rows: usize,
    longer_tiles: usize,
}

impl RowTiles {
    /// Divides `rows` rows into tiles of at most `rows_max` rows.
    pub fn new(rows: usize, rows_max: usize) -> RowTiles {
        let count = rows.div_ceil(rows_max).max(1);
        RowTiles { count, rows: rows / count, longer_tiles: rows % count }
    }

    /// Returns the number of tiles.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the rows of a tile.
    pub fn rows_of(&self, tile: usize) -> Range<usize> {
        let first = tile * self.rows + tile.min(self.longer_tiles);
        first..first + self.rows + usize::from(tile < self.longer_tiles)
    }
}
