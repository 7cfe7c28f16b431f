//! Matrix instructions of a warp.

use super::access::Touch;
use super::launch::Engine;
use super::run::thread;
use super::warp::Warp;
use crate::arith::Plane;
use crate::findings::Kind;
use crate::mma::{self, Mma};
use crate::program::{MatrixMove, Order, Place};

impl Engine<'_> {
    /// Whether all lanes of the warp take part, as `.aligned` demands.
    fn whole(&mut self, warp: &Warp, mask: u32, line: u32) -> bool {
        if mask != u32::MAX {
            let what = format!("only lanes {mask:#x} take part; all 32 must");
            self.note(Kind::Divergence, line, thread(warp, mask), 0, what);
            self.fatal = true;
        }
        mask == u32::MAX
    }

    /// The place of a row of a matrix: lane `8 matrix + row` has its address.
    fn row(&mut self, warp: &Warp, addresses: &[u64; 32], at: usize, line: u32) -> Option<u64> {
        let address = addresses[at];
        if !address.is_multiple_of(16) {
            let thread = (warp.index * 32 + at) as u32;
            self.note(Kind::Misaligned, line, thread, address, "a row of a matrix is not a multiple of 16");
            self.fatal = true;
            return None;
        }
        Some(address)
    }

    /// `ldmatrix`: lane `l` gets row `l / 4`, columns `2 (l % 4)` and the next, of each matrix; transposed,
    /// the same of the columns (PTX ISA, 9.7.14.5.15).
    pub(super) fn load_matrix(&mut self, warp: &mut Warp, matrix: &MatrixMove, mask: u32, line: u32) {
        if !self.whole(warp, mask, line) {
            return;
        }
        let addresses = self.addresses(warp, &matrix.address);
        let mut planes = Vec::new();
        for at in 0..matrix.planes.len() {
            let mut out: Plane = [0; 32];
            for (lane, value) in out.iter_mut().enumerate() {
                for half in 0..2 {
                    let (row, column) = position(lane, half, matrix.transposed);
                    let Some(start) = self.row(warp, &addresses, 8 * at + row, line) else { return };
                    let touch = element(start, column, lane, line, matrix.address.place);
                    *value |= (self.read(warp, touch) as u32) << (16 * half);
                    if self.fatal {
                        return;
                    }
                }
            }
            planes.push(out);
        }
        for (plane, values) in matrix.planes.iter().zip(&planes) {
            warp.put(*plane, mask, values);
        }
    }

    /// `stmatrix`: the other way.
    pub(super) fn store_matrix(&mut self, warp: &mut Warp, matrix: &MatrixMove, mask: u32, line: u32) {
        if !self.whole(warp, mask, line) {
            return;
        }
        let addresses = self.addresses(warp, &matrix.address);
        for (at, plane) in matrix.planes.iter().enumerate() {
            let values = *warp.plane(&self.program.pool, *plane);
            for (lane, value) in values.iter().enumerate() {
                for half in 0..2 {
                    let (row, column) = position(lane, half, matrix.transposed);
                    let Some(start) = self.row(warp, &addresses, 8 * at + row, line) else { return };
                    let touch = element(start, column, lane, line, matrix.address.place);
                    self.write(warp, touch, u64::from(value >> (16 * half) & 0xffff));
                    if self.fatal {
                        return;
                    }
                }
            }
        }
    }

    /// `mma.sync`.
    pub(super) fn mma(&mut self, warp: &mut Warp, mma: &Mma, mask: u32, line: u32) {
        if !self.whole(warp, mask, line) {
            return;
        }
        let pool = &self.program.pool;
        let planes = |list: &[u32]| list.iter().map(|it| warp.plane(pool, *it)).collect::<Vec<_>>();
        let mut out = [[0; 32]; 4];
        let used = mma.shape.accumulators();
        let (a, b, c) = (planes(&mma.a), planes(&mma.b), planes(&mma.c));
        mma::multiply(mma.shape, self.config.arch, &a, &b, &c, &mut out[..used]);
        for (plane, values) in mma.d.iter().zip(&out) {
            warp.put(*plane, mask, values);
        }
    }
}

/// Row and column of an element that a lane holds.
fn position(lane: usize, half: usize, transposed: bool) -> (usize, usize) {
    let (row, column) = (lane / 4, lane % 4 * 2 + half);
    if transposed { (column, row) } else { (row, column) }
}

fn element(start: u64, column: usize, lane: usize, line: u32, place: Place) -> Touch {
    Touch {
        place,
        address: start + 2 * column as u64,
        bytes: 2,
        lane: lane as u32,
        line,
        order: Order::default(),
    }
}
