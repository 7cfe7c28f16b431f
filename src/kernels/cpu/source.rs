//! The rows that products take: as they are, or computed where they are packed, so that they never lie in memory.
//!
//! Invariant: a row is what the operations by themselves make of it, bit for bit, whoever packs it.

#![allow(unsafe_code)]

use super::activation::activate_row;
use super::norm::norm_row;
use super::pool::{Parts, Pool};
use super::simd::Level;
use crate::backend::{Activation, Norm};
use crate::host::HostBuf;
use std::ops::Range;

/// Numbers that are not worth a second thread.
const SMALL: usize = 16 * 1024;

/// Rows of the largest tile.
const TILE_ROWS_MAX: usize = 16;

/// Whether rows are better made before they are packed: where there are too few tiles of them for all threads, and more than a
/// little to make.
pub fn is_made_apart(rows: usize, inp: usize, threads: usize) -> bool {
    threads > 1 && rows * inp > SMALL && rows < 2 * threads * TILE_ROWS_MAX
}

/// Rows (rows, inp).
pub struct Source<'a> {
    pub rows: usize,
    pub inp: usize,
    pub of: Of<'a>,
}

/// What makes them.
pub enum Of<'a> {
    Given(&'a [f32]),
    Normed(&'a Norm<HostBuf>, &'a [f32]),
    Activated(Activation, &'a [f32], Option<&'a [f32]>),
}

impl Source<'_> {
    /// Gives each row to `put(worker's tile, its number within the tile, numbers)`: tiles on several threads if that pays, a
    /// tile's rows in order. `rooms` has room for a row of each thread.
    pub fn for_each(
        &self,
        pool: &mut Pool,
        level: Level,
        tiles: &Tiles,
        rooms: &Rooms,
        put: impl Fn(&Range<usize>, usize, &[f32]) + Sync,
    ) {
        assert!(self.room() <= rooms.each, "a room has room for a row; this is a bug");
        let is_small = self.rows * self.inp <= SMALL;
        pool.run(if is_small { 1 } else { tiles.count() }, |worker, item| {
            // SAFETY: each worker has its own room and is in one item at a time.
            let room = unsafe { rooms.numbers.part(worker * rooms.each..worker * rooms.each + self.room()) };
            for tile in if is_small { 0..tiles.count() } else { item..item + 1 } {
                let rows = tiles.rows_of(tile);
                for (r, row) in rows.clone().enumerate() {
                    put(&rows, r, self.row(level, row, room));
                }
            }
        });
    }

    /// Numbers that making a row takes.
    fn room(&self) -> usize {
        if let Of::Given(_) = self.of { 0 } else { self.inp }
    }

    /// Row number `row`, which lies in memory or is made in `room`.
    fn row<'s>(&'s self, level: Level, row: usize, room: &'s mut [f32]) -> &'s [f32] {
        let numbers = row * self.inp..(row + 1) * self.inp;
        match self.of {
            Of::Given(x) => return &x[numbers],
            Of::Normed(norm, x) => {
                assert_eq!(norm.width, self.inp, "a norm is as wide as the rows; this is a bug");
                room.copy_from_slice(&x[numbers]);
                norm_row(level, norm, room);
            }
            Of::Activated(act, gate, up) => {
                room.copy_from_slice(&gate[numbers.clone()]);
                activate_row(level, act, room, up.map(|up| &up[numbers]));
            }
        }
        room
    }
}

/// Room for a row of each thread.
pub struct Rooms<'a> {
    numbers: Parts<'a, f32>,
    each: usize,
}

impl<'a> Rooms<'a> {
    /// Of `each` numbers.
    pub fn new(numbers: &'a mut [f32], each: usize) -> Rooms<'a> {
        Rooms { numbers: Parts::new(numbers), each }
    }
}

/// Rows cut into tiles of nearly equal size.
#[derive(Clone, Copy)]
pub struct Tiles {
    count: usize,
    /// Rows of a tile; the first `longer` tiles have one more.
    rows: usize,
    longer: usize,
}

impl Tiles {
    /// At most `rows_max` rows each.
    pub fn new(rows: usize, rows_max: usize) -> Tiles {
        let count = rows.div_ceil(rows_max).max(1);
        Tiles { count, rows: rows / count, longer: rows % count }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn rows_of(&self, tile: usize) -> Range<usize> {
        let first = tile * self.rows + tile.min(self.longer);
        first..first + self.rows + usize::from(tile < self.longer)
    }
}
