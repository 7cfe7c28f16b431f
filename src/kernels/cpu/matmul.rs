//! F32 GEMM: x · wᵀ, for x (m, k) in F32 and w (n, k) in any number format.
//!
//! Each output element is one sum in 16 lanes: lane i adds the products of columns i, i + 16, i + 32, ... in
//! this order, each with a fused multiply-add; then the lanes are added as [`Simd::sum`] does. Columns beyond
//! the last are zero. Everything else is loop order and data layout, and departs from a plain loop for these
//! reasons:
//!
//! 1. x is packed in tiles of R rows; within a tile, 16 columns of one row are followed by 16 of the next. A
//!    tile is read contiguously, whatever the stride of its rows, and needs no special case at its end.
//! 2. For few rows, the weights stream from memory into the multiply-adds, several outputs at a time, so that
//!    there are enough independent sums and enough open memory streams. A second tile finds the weights in
//!    the cache, and converting them again costs less than storing them converted.
//! 3. For more rows, an F32 panel of outputs is converted to F32 once, packed like x, and kept in the
//!    second-level cache while all tiles of x are multiplied with it. R x O sums stay in registers.
//! 4. If SIMD loads cannot decode a format, a range of outputs is first dequantized to F32, row by row.
//! 5. The columns are split into slices such that one tile of x and O rows of the panel fit the first-level
//!    cache. Sums of a later slice continue from those of the earlier ones, so the slices do not change the
//!    result.
//!
//! Invariant: R, O, the panels and the slices decide only when a product is added, never in which order.

#![allow(unsafe_code)]

use super::pool::{Parts, Pool};
use super::products::{Packed, Product};
use super::simd::{Code, F32, ForCode, Kernel, LANES, Level, Simd, load_part, prefetch, with_code};
use super::source::{Rooms, Source, Tiles};
use crate::backend::{DeviceError, Weight};
use crate::host::HostBuf;
use std::ops::Range;

/// Vectors of columns in one slice.
const CUT: usize = 32;
/// F32 numbers of an F32 panel: half of a second-level cache of 2 MiB.
const PANEL: usize = 256 * 1024;
/// Outputs of an F32 panel.
const PANEL_OUTS: usize = 48;
/// Rows and outputs of the largest tile, which the scratch is sized for.
const TILE_ROWS_MAX: usize = 8;
const TILE_OUTS_MAX: usize = 3;
/// Bytes of weights that a streaming work item takes.
const STREAM_BYTES: usize = 128 * 1024;
/// The number of outputs of a streaming work item is a multiple of this, which the number of outputs of every
/// tile divides.
const STREAM_OUTS: usize = 24;
/// Largest number of rows for which the weights stream.
const STREAM_ROWS: usize = 16;

/// Buffers of the F32 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct MatmulScratch {
    /// The packed input (m, k).
    x: HostBuf,
    /// For each thread: the converted panel, then the sums of a tile of rows with all outputs of the panel,
    /// then the dequantized outputs, if there are any.
    panels: HostBuf,
    panel_len: usize,
    written_len: usize,
}

const SUMS: usize = TILE_ROWS_MAX * PANEL_OUTS * LANES;

impl MatmulScratch {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads. `written` is the largest number
    /// of columns of a weight that must be dequantized first, 0 without such weights.
    pub fn new(rows: usize, k: usize, written: usize, threads: usize) -> Result<MatmulScratch, DeviceError> {
        let padded = k.next_multiple_of(LANES);
        let panel_len = PANEL.max(TILE_OUTS_MAX * padded);
        let written_len = if written == 0 { 0 } else { PANEL.max(STREAM_OUTS * written) };
        let each = panel_len + SUMS + written_len;
        Ok(MatmulScratch {
            x: HostBuf::zeroed(rows * padded * size_of::<f32>())?,
            panels: HostBuf::zeroed(threads * each * size_of::<f32>())?,
            panel_len,
            written_len,
        })
    }

    /// Packs the input: for each tile (steps, tile rows, 16), zero beyond the last column.
    pub fn pack(&mut self, pool: &mut Pool, level: Level, input: &Source, buffers: &Rooms) -> Plain<'_> {
        let (tile_rows, tile_outs) = level.run(TileSize);
        let (tiles, steps) = (Tiles::new(input.rows, tile_rows), input.inp.div_ceil(LANES));
        let x = &mut self.x.f32_mut()[..input.rows * steps * LANES];
        let packed = Parts::new(&mut *x);
        input.for_each(pool, level, &tiles, buffers, |rows, r, values| {
            // SAFETY: each tile belongs to one item.
            let to = unsafe { packed.part(rows.start * steps * LANES..rows.end * steps * LANES) };
            pack_row(values, r, rows.len(), to);
        });
        let (panel_len, written_len) = (self.panel_len, self.written_len);
        let scratch = Parts::new(self.panels.f32_mut());
        Plain { level, tiles, tile_outs, steps, rows: input.rows, x, scratch, panel_len, written_len }
    }
}

/// Kernel that returns the rows and outputs of the instruction set's largest tile.
struct TileSize;

impl Kernel for TileSize {
    type Out = (usize, usize);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::TILE_ROWS, S::TILE_OUTS)
    }
}

fn pack_row(x: &[f32], r: usize, rows: usize, to: &mut [f32]) {
    let (to, _) = to.as_chunks_mut::<LANES>();
    let (x, rest) = x.as_chunks::<LANES>();
    for (to, x) in to[r..].iter_mut().step_by(rows).zip(x) {
        *to = *x;
    }
    if !rest.is_empty() {
        let last = &mut to[x.len() * rows + r];
        *last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
    }
}

/// A packed F32 input, and the scratch of each thread.
pub struct Plain<'a> {
    level: Level,
    tiles: Tiles,
    tile_outs: usize,
    /// Number of vectors of columns.
    steps: usize,
    rows: usize,
    x: &'a [f32],
    scratch: Parts<'a, f32>,
    panel_len: usize,
    written_len: usize,
}

impl Plain<'_> {
    fn streams(&self) -> bool {
        self.rows <= STREAM_ROWS
    }

    /// Returns the number of outputs of `w` that fit the scratch.
    fn fits(&self, w: &Weight<HostBuf>) -> usize {
        let panel = self.panel_len / (self.steps * LANES) / self.tile_outs * self.tile_outs;
        match (w.ty.is_blocked(), self.streams()) {
            (false, true) => usize::MAX,
            (false, false) => panel,
            (true, true) => self.written_len / w.inp / STREAM_OUTS * STREAM_OUTS,
            (true, false) => panel.min(self.written_len / w.inp / self.tile_outs * self.tile_outs),
        }
    }
}

impl Packed for Plain<'_> {
    fn outs_each(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let tile = if self.streams() { STREAM_OUTS } else { self.tile_outs };
        let wanted = match !w.ty.is_blocked() && self.streams() {
            true => STREAM_BYTES / (w.buf.len() / w.out).clamp(1, STREAM_BYTES),
            false => PANEL_OUTS,
        };
        wanted.min(max).next_multiple_of(tile).min(self.fits(w))
    }

    fn multiply(&self, worker: usize, gemm: &Product, outputs: Range<usize>) {
        let each = self.panel_len + SUMS + self.written_len;
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let scratch = unsafe { self.scratch.part(worker * each..(worker + 1) * each) };
        self.level.run(Item { rows: self, product: gemm, outs: outputs, scratch });
    }
}

/// A work item: all rows with a range of outputs.
struct Item<'a> {
    rows: &'a Plain<'a>,
    product: &'a Product<'a>,
    outs: Range<usize>,
    scratch: &'a mut [f32],
}

impl Kernel for Item<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.product.w.ty.is_blocked() {
            false => with_code(self.product.w.ty, Typed { item: self, simd }),
            true => self.write_out(simd),
        }
    }
}

impl Item<'_> {
    /// Dequantizes the outputs to F32 and multiplies with these.
    fn write_out<S: Simd>(self, simd: S) {
        let Item { rows: input, product: gemm, outs: outputs, scratch } = self;
        let w = gemm.w;
        let (scratch, written) = scratch.split_at_mut(input.panel_len + SUMS);
        let (written, stored) = (&mut written[..outputs.len() * w.inp], w.buf.len() / w.out);
        w.ty.dequantize(&w.buf.bytes()[outputs.start * stored..outputs.end * stored], written);
        Outs::<F32> { w: written, first: outputs.start, rows: input, product: gemm }
            .multiply(simd, outputs, scratch);
    }
}

/// Runs a work item for the number format of its weight.
struct Typed<'a, S> {
    item: Item<'a>,
    simd: S,
}

impl<S: Simd> ForCode for Typed<'_, S> {
    type Out = ();

    fn run<W: Code>(self) {
        let Item { rows: input, product: gemm, outs: outputs, scratch } = self.item;
        let w = &W::of(&gemm.w.buf)[..gemm.w.out * gemm.w.inp];
        let scratch = &mut scratch[..input.panel_len + SUMS];
        Outs::<W> { w, first: 0, rows: input, product: gemm }.multiply(self.simd, outputs, scratch);
    }
}

/// A range of outputs of a weight, and the input they are multiplied with.
struct Outs<'a, W: Code> {
    /// (outputs from `first` on, k).
    w: &'a [W::Raw],
    first: usize,
    rows: &'a Plain<'a>,
    product: &'a Product<'a>,
}

impl<W: Code> Outs<'_, W> {
    fn weight(&self) -> &Weight<HostBuf> {
        self.product.w
    }

    fn inp(&self) -> usize {
        self.product.w.inp
    }

    /// Returns the input of a tile's rows: (steps, tile rows, 16).
    fn tile(&self, rows: &Range<usize>) -> &[f32] {
        let row = self.rows.steps * LANES;
        &self.rows.x[rows.start * row..rows.end * row]
    }

    fn multiply<S: Simd>(&self, simd: S, outputs: Range<usize>, scratch: &mut [f32]) {
        if self.rows.streams() {
            let tiles = &self.rows.tiles;
            (0..tiles.count()).for_each(|tile| self.stream(simd, tiles.rows_of(tile), outputs.clone()));
            return;
        }
        let (w, sums) = scratch.split_at_mut(self.rows.panel_len);
        let panel = Panel { product: self, outs: outputs, w, sums };
        match S::TILE_OUTS {
            2 => panel.run::<S, 2>(simd),
            _ => panel.run::<S, 3>(simd),
        }
    }

    /// Multiplies one tile of rows with as many outputs at a time as leave registers for the sums.
    fn stream<S: Simd>(&self, simd: S, rows: Range<usize>, outputs: Range<usize>) {
        let weights = self;
        // The matches are nested so that only the sizes an instruction set uses are compiled for it.
        match S::TILE_OUTS {
            2 => match rows.len() {
                0 => {}
                1 => simd.call(Stream::<W, 1, 4> { product: weights, rows, outs: outputs }),
                2 => simd.call(Stream::<W, 2, 2> { product: weights, rows, outs: outputs }),
                3 => simd.call(Stream::<W, 3, 2> { product: weights, rows, outs: outputs }),
                rows => unreachable!("no tile has {rows} rows; this is a bug"),
            },
            _ => match rows.len() {
                0 => {}
                1 => simd.call(Stream::<W, 1, 8> { product: weights, rows, outs: outputs }),
                2 => simd.call(Stream::<W, 2, 8> { product: weights, rows, outs: outputs }),
                3 => simd.call(Stream::<W, 3, 6> { product: weights, rows, outs: outputs }),
                4 => simd.call(Stream::<W, 4, 6> { product: weights, rows, outs: outputs }),
                5 => simd.call(Stream::<W, 5, 4> { product: weights, rows, outs: outputs }),
                6 => simd.call(Stream::<W, 6, 4> { product: weights, rows, outs: outputs }),
                7 => simd.call(Stream::<W, 7, 3> { product: weights, rows, outs: outputs }),
                8 => simd.call(Stream::<W, 8, 3> { product: weights, rows, outs: outputs }),
                rows => unreachable!("no tile has {rows} rows; this is a bug"),
            },
        }
    }

    /// Returns the stored weights of one output.
    #[inline(always)]
    fn row(&self, output: usize) -> &[W::Raw] {
        &self.w[(output - self.first) * self.inp()..][..self.inp()]
    }

    /// Returns the last, incomplete vector of one output.
    #[inline(always)]
    fn rest<S: Simd>(&self, simd: S, output: usize) -> S::V {
        load_part::<S, W>(simd, &self.row(output)[self.inp() / LANES * LANES..])
    }

    /// Writes the sums of the first `count` of O outputs, starting with output `first`, of one row.
    #[inline(always)]
    fn put<S: Simd, const O: usize>(
        &self,
        simd: S,
        row: usize,
        first: usize,
        sums: &[S::V; O],
        count: usize,
    ) {
        for at in (0..count).step_by(4) {
            let mut four = [sums[at]; 4];
            let some = four.len().min(O - at);
            four[..some].copy_from_slice(&sums[at..at + some]);
            let four = simd.sum4(four);
            let four = &four[..four.len().min(count - at)];
            // SAFETY: an output belongs to one work item, so no other thread writes it.
            unsafe { self.product.put(row, first + at, four) };
        }
    }
}

/// Kernel: a tile of R rows with a range of outputs, O at a time, directly from the stored weights.
struct Stream<'a, W: Code, const R: usize, const O: usize> {
    product: &'a Outs<'a, W>,
    rows: Range<usize>,
    outs: Range<usize>,
}

impl<W: Code, const R: usize, const O: usize> Kernel for Stream<'_, W, R, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let weights = self.product;
        let x = weights.tile(&self.rows);
        let (x, _) = x.as_chunks::<LANES>().0.as_chunks::<R>();
        let (whole, last) = x.split_at(weights.inp() / LANES);
        for first in self.outs.clone().step_by(O) {
            // Outputs beyond the last repeat it; their sums are not stored.
            let mut outputs = [0; O];
            let mut w = [weights.w.as_ptr(); O];
            for o in 0..O {
                outputs[o] = (first + o).min(weights.weight().out - 1);
                w[o] = w[o].wrapping_add((outputs[o] - weights.first) * weights.inp());
            }
            let mut sums = [[simd.splat(0.0); O]; R];
            for (step, x) in whole.iter().enumerate() {
                let mut ws = [simd.splat(0.0); O];
                for o in 0..O {
                    prefetch(w[o].wrapping_add(step * LANES + O * weights.inp()));
                    // SAFETY: `w[o]` is the output's row of `weights.w`, and whole vectors lie within it.
                    ws[o] = W::load(simd, unsafe { &*w[o].add(step * LANES).cast() });
                }
                add_products(simd, x, &ws, &mut sums);
            }
            for x in last {
                let mut ws = [simd.splat(0.0); O];
                for o in 0..O {
                    ws[o] = weights.rest(simd, outputs[o]);
                }
                add_products(simd, x, &ws, &mut sums);
            }
            let count = O.min(self.outs.end - first);
            for (r, sums) in sums.iter().enumerate() {
                weights.put(simd, self.rows.start + r, first, sums, count);
            }
        }
    }
}

/// Adds the products of one vector of each row and one of each output to sums (R, O).
#[inline(always)]
fn add_products<S: Simd, const R: usize, const O: usize>(
    simd: S,
    x: &[[f32; LANES]; R],
    ws: &[S::V; O],
    sums: &mut [[S::V; O]; R],
) {
    for r in 0..R {
        let x = simd.load(&x[r]);
        for o in 0..O {
            sums[r][o] = simd.mul_add(x, ws[o], sums[r][o]);
        }
    }
}

/// All rows with a range of outputs, by way of a converted F32 panel.
struct Panel<'a, W: Code> {
    product: &'a Outs<'a, W>,
    outs: Range<usize>,
    /// The converted weights: (slices, tiles of outputs, steps, O, 16).
    w: &'a mut [f32],
    /// (tiles of outputs, tile rows, O, 16).
    sums: &'a mut [f32],
}

impl<W: Code> Panel<'_, W> {
    fn run<S: Simd, const O: usize>(mut self, simd: S) {
        let out_tiles = self.outs.len().div_ceil(O);
        for tile in 0..self.product.rows.tiles.count() {
            let rows = self.product.rows.tiles.rows_of(tile);
            self.sums[..out_tiles * rows.len() * O * LANES].fill(0.0);
            for cut in (0..self.product.rows.steps).step_by(CUT) {
                let steps = cut..self.product.rows.steps.min(cut + CUT);
                for out_tile in 0..out_tiles {
                    self.multiply::<S, O>(simd, tile, &steps, out_tile);
                }
            }
            simd.call(Finish::<W, O> { panel: &self, rows });
        }
    }

    /// Multiplies one tile of rows with one tile of outputs, over the columns of `steps`.
    fn multiply<S: Simd, const O: usize>(
        &mut self,
        simd: S,
        tile: usize,
        steps: &Range<usize>,
        out_tile: usize,
    ) {
        let out_tiles = self.outs.len().div_ceil(O);
        let at = (steps.start * out_tiles + out_tile * steps.len()) * O * LANES;
        let w = &mut self.w[at..][..steps.len() * O * LANES];
        if tile == 0 {
            let first = self.outs.start + out_tile * O;
            simd.call(Convert::<W, O> { product: self.product, first, panel: out_tiles * O, steps, w });
        }
        let rows = self.product.rows.tiles.rows_of(tile);
        let step_len = rows.len() * LANES;
        let x = &self.product.tile(&rows)[steps.start * step_len..steps.end * step_len];
        let tile_len = rows.len() * O * LANES;
        let sums = &mut self.sums[out_tile * tile_len..][..tile_len];
        match rows.len() {
            1 => simd.call(Micro::<1, O> { x, w, sums }),
            2 => simd.call(Micro::<2, O> { x, w, sums }),
            3 => simd.call(Micro::<3, O> { x, w, sums }),
            4 if const { S::TILE_ROWS >= 4 } => simd.call(Micro::<4, O> { x, w, sums }),
            5 if const { S::TILE_ROWS >= 5 } => simd.call(Micro::<5, O> { x, w, sums }),
            6 if const { S::TILE_ROWS >= 6 } => simd.call(Micro::<6, O> { x, w, sums }),
            7 if const { S::TILE_ROWS >= 7 } => simd.call(Micro::<7, O> { x, w, sums }),
            8 if const { S::TILE_ROWS >= 8 } => simd.call(Micro::<8, O> { x, w, sums }),
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        }
    }
}

/// Kernel: converts O outputs from `first` on, for the columns of `steps`, to (steps, O, 16); zero beyond the
/// last output.
struct Convert<'a, W: Code, const O: usize> {
    product: &'a Outs<'a, W>,
    first: usize,
    /// Number of outputs of the panel, which is the distance to the next panel.
    panel: usize,
    steps: &'a Range<usize>,
    w: &'a mut [f32],
}

impl<W: Code, const O: usize> Kernel for Convert<'_, W, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let weights = self.product;
        let (w, _) = self.w.as_chunks_mut::<LANES>();
        let whole = self.steps.start..self.steps.end.min(weights.inp() / LANES);
        // Distance to the weights of the same output that this thread reads next: the columns after this
        // slice or, at the end of the row, the first columns of the next panel. Prefetched a vector at a
        // time.
        let ahead = match self.steps.end < weights.rows.steps {
            true => CUT * LANES,
            false => self.panel * weights.inp() - self.steps.start * LANES,
        };
        for o in 0..O {
            let output = self.first + o;
            if output >= weights.weight().out {
                for i in 0..self.steps.len() {
                    w[i * O + o] = [0.0; LANES];
                }
                continue;
            }
            let row = weights.row(output).as_ptr();
            for step in whole.clone() {
                prefetch(row.wrapping_add(step * LANES + ahead));
                // SAFETY: `row` is a whole row, and whole vectors lie within it.
                let vector = W::load(simd, unsafe { &*row.add(step * LANES).cast() });
                simd.store(vector, &mut w[(step - whole.start) * O + o]);
            }
            if whole.end < self.steps.end {
                simd.store(weights.rest(simd, output), &mut w[(whole.end - whole.start) * O + o]);
            }
        }
    }
}

/// Micro-kernel: adds the products of x (steps, R, 16) and w (steps, O, 16) to sums (R, O, 16).
struct Micro<'a, const R: usize, const O: usize> {
    x: &'a [f32],
    w: &'a [f32],
    sums: &'a mut [f32],
}

impl<const R: usize, const O: usize> Kernel for Micro<'_, R, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (x, w) = (self.x.as_chunks::<LANES>().0, self.w.as_chunks::<LANES>().0);
        let (totals, _) = self.sums.as_chunks_mut::<LANES>();
        assert!(totals.len() == R * O && x.len().is_multiple_of(R) && x.len() / R * O == w.len());
        let mut sums = [[simd.splat(0.0); O]; R];
        for r in 0..R {
            for o in 0..O {
                sums[r][o] = simd.load(&totals[r * O + o]);
            }
        }
        for (x, w) in x.as_chunks::<R>().0.iter().zip(w.as_chunks::<O>().0) {
            let mut ws = [simd.splat(0.0); O];
            for o in 0..O {
                ws[o] = simd.load(&w[o]);
            }
            add_products(simd, x, &ws, &mut sums);
        }
        for r in 0..R {
            for o in 0..O {
                simd.store(sums[r][o], &mut totals[r * O + o]);
            }
        }
    }
}

/// Kernel: reduces the lanes of the sums of a tile of rows with all outputs of the panel, and writes y.
struct Finish<'a, 'b, W: Code, const O: usize> {
    panel: &'a Panel<'b, W>,
    rows: Range<usize>,
}

impl<W: Code, const O: usize> Kernel for Finish<'_, '_, W, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (panel, rows) = (self.panel, self.rows.len());
        let (sums, _) = panel.sums.as_chunks::<LANES>();
        for r in 0..rows {
            for first in (0..panel.outs.len()).step_by(4) {
                let mut four = [simd.splat(0.0); 4];
                let count = four.len().min(panel.outs.len() - first);
                for (i, v) in (first..).zip(&mut four[..count]) {
                    *v = simd.load(&sums[(i / O * rows + r) * O + i % O]);
                }
                panel.product.put(simd, self.rows.start + r, panel.outs.start + first, &four, count);
            }
        }
    }
}
