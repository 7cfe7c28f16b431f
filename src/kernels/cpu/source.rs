//! The input rows of GEMMs: stored rows, or rows that are computed while they are packed, so that they never
//! lie in memory.
//!
//! Invariant: a computed row equals, bit for bit, what the separate operations give, whichever thread packs
//! it.

#![allow(unsafe_code)]

use super::activation::activate_row;
use super::norm::norm_row;
use super::pool::{Parts, Pool};
use super::simd::Level;
use crate::backend::{Activation, Norm};
use crate::host::HostBuf;
use std::ops::Range;

/// Number of input values that do not justify a second thread.
const SMALL: usize = 16 * 1024;

/// Rows of the largest tile.
const TILE_ROWS_MAX: usize = 16;

/// Returns whether the rows should be computed in memory before they are packed: if there are too few tiles
/// of rows for all threads, and more than a little to compute.
pub fn is_made_apart(rows: usize, k: usize, threads: usize) -> bool {
    threads > 1 && rows * k > SMALL && rows < 2 * threads * TILE_ROWS_MAX
}

/// The input (m, k) of a GEMM.
pub struct Source<'a> {
    pub rows: usize,
    pub inp: usize,
    pub of: Of<'a>,
}

/// The values of a GEMM input: stored, or what they are computed from.
pub enum Of<'a> {
    Given(&'a [f32]),
    Normed(&'a Norm<HostBuf>, &'a [f32]),
    Activated(Activation, &'a [f32], Option<&'a [f32]>),
}

impl Source<'_> {
    /// Calls `put(rows of the worker's tile, number within the tile, values)` for each row: tiles on several
    /// threads if there is enough to do, a tile's rows in order. `buffers` holds a row for each thread.
    pub fn for_each(
        &self,
        pool: &mut Pool,
        level: Level,
        tiles: &Tiles,
        buffers: &Rooms,
        put: impl Fn(&Range<usize>, usize, &[f32]) + Sync,
    ) {
        assert!(self.room() <= buffers.each, "a row buffer holds a row; this is a bug");
        let is_small = self.rows * self.inp <= SMALL;
        pool.run(if is_small { 1 } else { tiles.count() }, |worker, item| {
            let start = worker * buffers.each;
            // SAFETY: each worker has its own buffer and is in one item at a time.
            let buffer = unsafe { buffers.numbers.part(start..start + self.room()) };
            for tile in if is_small { 0..tiles.count() } else { item..item + 1 } {
                let rows = tiles.rows_of(tile);
                for (r, row) in rows.clone().enumerate() {
                    put(&rows, r, self.row(level, row, buffer));
                }
            }
        });
    }

    /// Returns the length of the buffer that computing a row takes.
    fn room(&self) -> usize {
        if let Of::Given(_) = self.of { 0 } else { self.inp }
    }

    /// Returns one row, which is stored or gets computed in `buffer`.
    fn row<'s>(&'s self, level: Level, row: usize, buffer: &'s mut [f32]) -> &'s [f32] {
        let range = row * self.inp..(row + 1) * self.inp;
        match self.of {
            Of::Given(x) => return &x[range],
            Of::Normed(norm, x) => {
                assert_eq!(norm.width, self.inp, "the norm has the width of the rows; this is a bug");
                buffer.copy_from_slice(&x[range]);
                norm_row(level, norm, buffer);
            }
            Of::Activated(act, gate, up) => {
                buffer.copy_from_slice(&gate[range.clone()]);
                activate_row(level, act, buffer, up.map(|up| &up[range]));
            }
        }
        buffer
    }
}

/// A row buffer for each thread.
pub struct Rooms<'a> {
    numbers: Parts<'a, f32>,
    each: usize,
}

impl<'a> Rooms<'a> {
    /// Divides `values` into buffers of `row_len` numbers.
    pub fn new(values: &'a mut [f32], row_len: usize) -> Rooms<'a> {
        Rooms { numbers: Parts::new(values), each: row_len }
    }
}

/// Rows divided into tiles of nearly equal size.
#[derive(Clone, Copy)]
pub struct Tiles {
    count: usize,
    /// Rows of a tile; the first `longer` tiles have one more.
    rows: usize,
    longer: usize,
}

impl Tiles {
    /// Divides `rows` rows into tiles of at most `rows_max` rows.
    pub fn new(rows: usize, rows_max: usize) -> Tiles {
        let count = rows.div_ceil(rows_max).max(1);
        Tiles { count, rows: rows / count, longer: rows % count }
    }

    /// Returns the number of tiles.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the rows of a tile.
    pub fn rows_of(&self, tile: usize) -> Range<usize> {
        let first = tile * self.rows + tile.min(self.longer);
        first..first + self.rows + usize::from(tile < self.longer)
    }
}
