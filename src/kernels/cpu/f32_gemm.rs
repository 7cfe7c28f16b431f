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

use super::gemm_input::{GemmInput, RowBuffers, RowTiles};
use super::gemms::{GemmTask, PackedInput};
use super::pool::{SharedSlice, ThreadPool};
use super::simd::{
    F32, FloatFormat, FloatFormatOp, Kernel, LANES, Level, Simd, dispatch_float_format, load_partial,
    prefetch_l2,
};
use crate::backend::{DeviceError, Weight};
use crate::host::{HostBuf, HostMemory};
use std::ops::Range;

/// Vectors of columns in one slice.
const K_SLICE: usize = 32;
/// F32 numbers of an F32 panel: half of a second-level cache of 2 MiB.
const F32_PANEL_LEN: usize = 256 * 1024;
/// Outputs of an F32 panel.
const F32_PANEL_OUTPUTS: usize = 48;
/// Rows and outputs of the largest tile, which the scratch is sized for.
const TILE_ROWS_MAX: usize = 8;
const TILE_OUTPUTS_MAX: usize = 3;
/// Bytes of weights that a streaming work item takes.
const STREAM_BYTES: usize = 128 * 1024;
/// The number of outputs of a streaming work item is a multiple of this, which the number of outputs of every
/// tile divides.
const STREAM_OUTPUTS: usize = 24;
/// Largest number of rows for which the weights stream.
const STREAM_ROWS: usize = 16;

/// Buffers of the F32 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct F32Scratch {
    /// The packed input (m, k).
    x: HostBuf,
    /// For each thread: the converted panel, then the sums of a tile of rows with all outputs of the panel,
    /// then the dequantized outputs, if there are any.
    panels: HostBuf,
    panel_len: usize,
    dequantized_len: usize,
}

const SUMS_LEN: usize = TILE_ROWS_MAX * F32_PANEL_OUTPUTS * LANES;

impl F32Scratch {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads. `written` is the largest number
    /// of columns of a weight that must be dequantized first, 0 without such weights.
    pub fn new(
        rows: usize,
        k: usize,
        written: usize,
        threads: usize,
        memory: &HostMemory,
    ) -> Result<F32Scratch, DeviceError> {
        let padded = k.next_multiple_of(LANES);
        let panel_len = F32_PANEL_LEN.max(TILE_OUTPUTS_MAX * padded);
        let written_len = if written == 0 { 0 } else { F32_PANEL_LEN.max(STREAM_OUTPUTS * written) };
        let each = panel_len + SUMS_LEN + written_len;
        Ok(F32Scratch {
            x: memory.zeroed(rows * padded * size_of::<f32>())?,
            panels: memory.zeroed(threads * each * size_of::<f32>())?,
            panel_len,
            dequantized_len: written_len,
        })
    }

    /// Packs the input: for each tile (steps, tile rows, 16), zero beyond the last column.
    pub fn pack(
        &mut self,
        pool: &mut ThreadPool,
        level: Level,
        input: &GemmInput,
        buffers: &RowBuffers,
    ) -> PackedF32<'_> {
        let (tile_rows, tile_outs) = level.run(TileSize);
        let (tiles, steps) = (RowTiles::new(input.rows, tile_rows), input.k.div_ceil(LANES));
        let x = &mut self.x.f32_mut()[..input.rows * steps * LANES];
        let packed = SharedSlice::new(&mut *x);
        input.for_each(pool, level, &tiles, buffers, |rows, r, values| {
            // SAFETY: each tile belongs to one item.
            let to = unsafe { packed.slice_mut(rows.start * steps * LANES..rows.end * steps * LANES) };
            pack_row(values, r, rows.len(), to);
        });
        let (panel_len, written_len) = (self.panel_len, self.dequantized_len);
        let scratch = SharedSlice::new(self.panels.f32_mut());
        PackedF32 {
            level,
            tiles,
            tile_outputs: tile_outs,
            steps,
            rows: input.rows,
            x,
            scratch,
            panel_len,
            dequantized_len: written_len,
        }
    }
}

/// Kernel that returns the rows and outputs of the instruction set's largest tile.
struct TileSize;

impl Kernel for TileSize {
    type Out = (usize, usize);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (usize, usize) {
        (S::TILE_ROWS, S::TILE_OUTPUTS)
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
pub struct PackedF32<'a> {
    level: Level,
    tiles: RowTiles,
    tile_outputs: usize,
    /// Number of vectors of columns.
    steps: usize,
    rows: usize,
    x: &'a [f32],
    scratch: SharedSlice<'a, f32>,
    panel_len: usize,
    dequantized_len: usize,
}

impl PackedF32<'_> {
    fn is_streaming(&self) -> bool {
        self.rows <= STREAM_ROWS
    }

    /// Returns the number of outputs of `w` that fit the scratch.
    fn max_outputs(&self, w: &Weight<HostBuf>) -> usize {
        let panel = self.panel_len / (self.steps * LANES) / self.tile_outputs * self.tile_outputs;
        match (w.ty.is_blocked(), self.is_streaming()) {
            (false, true) => usize::MAX,
            (false, false) => panel,
            (true, true) => self.dequantized_len / w.k / STREAM_OUTPUTS * STREAM_OUTPUTS,
            (true, false) => panel.min(self.dequantized_len / w.k / self.tile_outputs * self.tile_outputs),
        }
    }
}

impl PackedInput for PackedF32<'_> {
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let tile = if self.is_streaming() { STREAM_OUTPUTS } else { self.tile_outputs };
        let wanted = match !w.ty.is_blocked() && self.is_streaming() {
            true => STREAM_BYTES / (w.buf.len() / w.n).clamp(1, STREAM_BYTES),
            false => F32_PANEL_OUTPUTS,
        };
        wanted.min(max).next_multiple_of(tile).min(self.max_outputs(w))
    }

    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>) {
        let each = self.panel_len + SUMS_LEN + self.dequantized_len;
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let scratch = unsafe { self.scratch.slice_mut(worker * each..(worker + 1) * each) };
        self.level.run(F32Item { input: self, gemm, outputs, scratch });
    }
}

/// A work item: all rows with a range of outputs.
struct F32Item<'a> {
    input: &'a PackedF32<'a>,
    gemm: &'a GemmTask<'a>,
    outputs: Range<usize>,
    scratch: &'a mut [f32],
}

impl Kernel for F32Item<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.gemm.w.ty.is_blocked() {
            false => dispatch_float_format(self.gemm.w.ty, WithFormat { item: self, simd }),
            true => self.dequantize_and_multiply(simd),
        }
    }
}

impl F32Item<'_> {
    /// Dequantizes the outputs to F32 and multiplies with these.
    fn dequantize_and_multiply<S: Simd>(self, simd: S) {
        let F32Item { input, gemm, outputs, scratch } = self;
        let w = gemm.w;
        let (scratch, written) = scratch.split_at_mut(input.panel_len + SUMS_LEN);
        let (written, stored) = (&mut written[..outputs.len() * w.k], w.buf.len() / w.n);
        w.ty.dequantize(&w.buf.bytes()[outputs.start * stored..outputs.end * stored], written);
        WeightSlice::<F32> { w: written, first_output: outputs.start, input, gemm }
            .multiply(simd, outputs, scratch);
    }
}

/// Runs a work item for the number format of its weight.
struct WithFormat<'a, S> {
    item: F32Item<'a>,
    simd: S,
}

impl<S: Simd> FloatFormatOp for WithFormat<'_, S> {
    type Out = ();

    fn run<W: FloatFormat>(self) {
        let F32Item { input, gemm, outputs, scratch } = self.item;
        let w = &W::values(&gemm.w.buf)[..gemm.w.n * gemm.w.k];
        let scratch = &mut scratch[..input.panel_len + SUMS_LEN];
        WeightSlice::<W> { w, first_output: 0, input, gemm }.multiply(self.simd, outputs, scratch);
    }
}

/// A range of outputs of a weight, and the input they are multiplied with.
struct WeightSlice<'a, W: FloatFormat> {
    /// (outputs from `first` on, k).
    w: &'a [W::Raw],
    first_output: usize,
    input: &'a PackedF32<'a>,
    gemm: &'a GemmTask<'a>,
}

impl<W: FloatFormat> WeightSlice<'_, W> {
    fn weight(&self) -> &Weight<HostBuf> {
        self.gemm.w
    }

    fn k(&self) -> usize {
        self.gemm.w.k
    }

    /// Returns the input of a tile's rows: (steps, tile rows, 16).
    fn tile(&self, rows: &Range<usize>) -> &[f32] {
        let row = self.input.steps * LANES;
        &self.input.x[rows.start * row..rows.end * row]
    }

    fn multiply<S: Simd>(&self, simd: S, outputs: Range<usize>, scratch: &mut [f32]) {
        if self.input.is_streaming() {
            let tiles = &self.input.tiles;
            (0..tiles.count()).for_each(|tile| self.stream(simd, tiles.rows_of(tile), outputs.clone()));
            return;
        }
        let (w, sums) = scratch.split_at_mut(self.input.panel_len);
        let panel = F32Panel { weights: self, outputs, w, sums };
        match S::TILE_OUTPUTS {
            2 => panel.run::<S, 2>(simd),
            _ => panel.run::<S, 3>(simd),
        }
    }

    /// Multiplies one tile of rows with as many outputs at a time as leave registers for the sums.
    fn stream<S: Simd>(&self, simd: S, rows: Range<usize>, outputs: Range<usize>) {
        let weights = self;
        // The matches are nested so that only the sizes an instruction set uses are compiled for it.
        match S::TILE_OUTPUTS {
            2 => match rows.len() {
                0 => {}
                1 => simd.call(StreamTile::<W, 1, 4> { weights, rows, outputs }),
                2 => simd.call(StreamTile::<W, 2, 2> { weights, rows, outputs }),
                3 => simd.call(StreamTile::<W, 3, 2> { weights, rows, outputs }),
                rows => unreachable!("no tile has {rows} rows; this is a bug"),
            },
            _ => match rows.len() {
                0 => {}
                1 => simd.call(StreamTile::<W, 1, 8> { weights, rows, outputs }),
                2 => simd.call(StreamTile::<W, 2, 8> { weights, rows, outputs }),
                3 => simd.call(StreamTile::<W, 3, 6> { weights, rows, outputs }),
                4 => simd.call(StreamTile::<W, 4, 6> { weights, rows, outputs }),
                5 => simd.call(StreamTile::<W, 5, 4> { weights, rows, outputs }),
                6 => simd.call(StreamTile::<W, 6, 4> { weights, rows, outputs }),
                7 => simd.call(StreamTile::<W, 7, 3> { weights, rows, outputs }),
                8 => simd.call(StreamTile::<W, 8, 3> { weights, rows, outputs }),
                rows => unreachable!("no tile has {rows} rows; this is a bug"),
            },
        }
    }

    /// Returns the stored weights of one output.
    #[inline(always)]
    fn row(&self, output: usize) -> &[W::Raw] {
        &self.w[(output - self.first_output) * self.k()..][..self.k()]
    }

    /// Returns the last, incomplete vector of one output.
    #[inline(always)]
    fn last_vector<S: Simd>(&self, simd: S, output: usize) -> S::V {
        load_partial::<S, W>(simd, &self.row(output)[self.k() / LANES * LANES..])
    }

    /// Writes the sums of the first `count` of O outputs, starting with output `first`, of one row.
    #[inline(always)]
    fn write<S: Simd, const O: usize>(
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
            unsafe { self.gemm.write(row, first + at, four) };
        }
    }
}

/// Kernel: a tile of R rows with a range of outputs, O at a time, directly from the stored weights.
struct StreamTile<'a, W: FloatFormat, const R: usize, const O: usize> {
    weights: &'a WeightSlice<'a, W>,
    rows: Range<usize>,
    outputs: Range<usize>,
}

impl<W: FloatFormat, const R: usize, const O: usize> Kernel for StreamTile<'_, W, R, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let weights = self.weights;
        let x = weights.tile(&self.rows);
        let (x, _) = x.as_chunks::<LANES>().0.as_chunks::<R>();
        let (whole, last) = x.split_at(weights.k() / LANES);
        for first in self.outputs.clone().step_by(O) {
            // Outputs beyond the last repeat it; their sums are not stored.
            let mut outputs = [0; O];
            let mut w = [weights.w.as_ptr(); O];
            for o in 0..O {
                outputs[o] = (first + o).min(weights.weight().n - 1);
                w[o] = w[o].wrapping_add((outputs[o] - weights.first_output) * weights.k());
            }
            let mut sums = [[simd.splat(0.0); O]; R];
            for (step, x) in whole.iter().enumerate() {
                let mut ws = [simd.splat(0.0); O];
                for o in 0..O {
                    prefetch_l2(w[o].wrapping_add(step * LANES + O * weights.k()));
                    // SAFETY: `w[o]` is the output's row of `weights.w`, and whole vectors lie within it.
                    ws[o] = W::load(simd, unsafe { &*w[o].add(step * LANES).cast() });
                }
                add_products(simd, x, &ws, &mut sums);
            }
            for x in last {
                let mut ws = [simd.splat(0.0); O];
                for o in 0..O {
                    ws[o] = weights.last_vector(simd, outputs[o]);
                }
                add_products(simd, x, &ws, &mut sums);
            }
            let count = O.min(self.outputs.end - first);
            for (r, sums) in sums.iter().enumerate() {
                weights.write(simd, self.rows.start + r, first, sums, count);
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
struct F32Panel<'a, W: FloatFormat> {
    weights: &'a WeightSlice<'a, W>,
    outputs: Range<usize>,
    /// The converted weights: (slices, tiles of outputs, steps, O, 16).
    w: &'a mut [f32],
    /// (tiles of outputs, tile rows, O, 16).
    sums: &'a mut [f32],
}

impl<W: FloatFormat> F32Panel<'_, W> {
    fn run<S: Simd, const O: usize>(mut self, simd: S) {
        let out_tiles = self.outputs.len().div_ceil(O);
        for tile in 0..self.weights.input.tiles.count() {
            let rows = self.weights.input.tiles.rows_of(tile);
            self.sums[..out_tiles * rows.len() * O * LANES].fill(0.0);
            for cut in (0..self.weights.input.steps).step_by(K_SLICE) {
                let steps = cut..self.weights.input.steps.min(cut + K_SLICE);
                for out_tile in 0..out_tiles {
                    self.multiply::<S, O>(simd, tile, &steps, out_tile);
                }
            }
            simd.call(FinishTile::<W, O> { panel: &self, rows });
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
        let out_tiles = self.outputs.len().div_ceil(O);
        let at = (steps.start * out_tiles + out_tile * steps.len()) * O * LANES;
        let w = &mut self.w[at..][..steps.len() * O * LANES];
        if tile == 0 {
            let first = self.outputs.start + out_tile * O;
            simd.call(ConvertPanel::<W, O> {
                weights: self.weights,
                first,
                panel_outputs: out_tiles * O,
                steps,
                w,
            });
        }
        let rows = self.weights.input.tiles.rows_of(tile);
        let step_len = rows.len() * LANES;
        let x = &self.weights.tile(&rows)[steps.start * step_len..steps.end * step_len];
        let tile_len = rows.len() * O * LANES;
        let sums = &mut self.sums[out_tile * tile_len..][..tile_len];
        match rows.len() {
            1 => simd.call(MicroKernel::<1, O> { x, w, sums }),
            2 => simd.call(MicroKernel::<2, O> { x, w, sums }),
            3 => simd.call(MicroKernel::<3, O> { x, w, sums }),
            4 if const { S::TILE_ROWS >= 4 } => simd.call(MicroKernel::<4, O> { x, w, sums }),
            5 if const { S::TILE_ROWS >= 5 } => simd.call(MicroKernel::<5, O> { x, w, sums }),
            6 if const { S::TILE_ROWS >= 6 } => simd.call(MicroKernel::<6, O> { x, w, sums }),
            7 if const { S::TILE_ROWS >= 7 } => simd.call(MicroKernel::<7, O> { x, w, sums }),
            8 if const { S::TILE_ROWS >= 8 } => simd.call(MicroKernel::<8, O> { x, w, sums }),
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        }
    }
}

/// Kernel: converts O outputs from `first` on, for the columns of `steps`, to (steps, O, 16); zero beyond the
/// last output.
struct ConvertPanel<'a, W: FloatFormat, const O: usize> {
    weights: &'a WeightSlice<'a, W>,
    first: usize,
    /// Number of outputs of the panel, which is the distance to the next panel.
    panel_outputs: usize,
    steps: &'a Range<usize>,
    w: &'a mut [f32],
}

impl<W: FloatFormat, const O: usize> Kernel for ConvertPanel<'_, W, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let weights = self.weights;
        let (w, _) = self.w.as_chunks_mut::<LANES>();
        let whole = self.steps.start..self.steps.end.min(weights.k() / LANES);
        // Distance to the weights of the same output that this thread reads next: the columns after this
        // slice or, at the end of the row, the first columns of the next panel. Prefetched a vector at a
        // time.
        let ahead = match self.steps.end < weights.input.steps {
            true => K_SLICE * LANES,
            false => self.panel_outputs * weights.k() - self.steps.start * LANES,
        };
        for o in 0..O {
            let output = self.first + o;
            if output >= weights.weight().n {
                for i in 0..self.steps.len() {
                    w[i * O + o] = [0.0; LANES];
                }
                continue;
            }
            let row = weights.row(output).as_ptr();
            for step in whole.clone() {
                prefetch_l2(row.wrapping_add(step * LANES + ahead));
                // SAFETY: `row` is a whole row, and whole vectors lie within it.
                let vector = W::load(simd, unsafe { &*row.add(step * LANES).cast() });
                simd.store(vector, &mut w[(step - whole.start) * O + o]);
            }
            if whole.end < self.steps.end {
                simd.store(weights.last_vector(simd, output), &mut w[(whole.end - whole.start) * O + o]);
            }
        }
    }
}

/// Micro-kernel: adds the products of x (steps, R, 16) and w (steps, O, 16) to sums (R, O, 16).
struct MicroKernel<'a, const R: usize, const O: usize> {
    x: &'a [f32],
    w: &'a [f32],
    sums: &'a mut [f32],
}

impl<const R: usize, const O: usize> Kernel for MicroKernel<'_, R, O> {
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
struct FinishTile<'a, 'b, W: FloatFormat, const O: usize> {
    panel: &'a F32Panel<'b, W>,
    rows: Range<usize>,
}

impl<W: FloatFormat, const O: usize> Kernel for FinishTile<'_, '_, W, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (panel, rows) = (self.panel, self.rows.len());
        let (sums, _) = panel.sums.as_chunks::<LANES>();
        for r in 0..rows {
            for first in (0..panel.outputs.len()).step_by(4) {
                let mut four = [simd.splat(0.0); 4];
                let count = four.len().min(panel.outputs.len() - first);
                for (i, v) in (first..).zip(&mut four[..count]) {
                    *v = simd.load(&sums[(i / O * rows + r) * O + i % O]);
                }
                panel.weights.write(simd, self.rows.start + r, panel.outputs.start + first, &four, count);
            }
        }
    }
}
