//! More rows: a range of outputs, converted to F32 once, with all tiles of rows.
//!
//! Invariant: the sums of an output run over the columns in ascending order, whatever the slices.

use super::tile_product::add_products;
use super::weight_slice::WeightSlice;
use crate::cpu::simd::{self, FloatFormat, Kernel, LANES, Simd, prefetch_l2};
use std::ops::Range;

/// Vectors of columns in one slice.
const K_SLICE: usize = 32;

/// All rows with a range of outputs, by way of a converted F32 panel.
pub struct F32Panel<'a, W: FloatFormat> {
    pub(super) weights: &'a WeightSlice<'a, W>,
    pub(super) outputs: Range<usize>,
    /// The converted weights: (slices, tiles of outputs, steps, O, 16).
    pub(super) w: &'a mut [f32],
    /// (tiles of outputs, tile rows, O, 16).
    pub(super) sums: &'a mut [f32],
}

impl<W: FloatFormat> F32Panel<'_, W> {
    /// Multiplies all rows with the outputs and writes the results.
    pub fn run<S: Simd, const O: usize>(mut self, simd: S) {
        let out_tiles = self.outputs.len().div_ceil(O);
        for tile in 0..self.weights.input.tiles.count() {
            let tile_rows = self.weights.input.tiles.padded_rows_of(tile).len();
            self.sums[..out_tiles * tile_rows * O * LANES].fill(0.0);
            for cut in (0..self.weights.input.steps).step_by(K_SLICE) {
                let steps = cut..self.weights.input.steps.min(cut + K_SLICE);
                for out_tile in 0..out_tiles {
                    self.multiply::<S, O>(simd, tile, &steps, out_tile);
                }
            }
            simd.call(FinishTile::<W, O> { panel: &self, tile });
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
        let rows = self.weights.input.tiles.padded_rows_of(tile);
        let step_len = rows.len() * LANES;
        let x = &self.weights.input.values_of(&rows)[steps.start * step_len..steps.end * step_len];
        let tile_len = rows.len() * O * LANES;
        let sums = &mut self.sums[out_tile * tile_len..][..tile_len];
        match rows.len() {
            1 => simd.call(MicroKernel::<1, O> { x, w, sums }),
            2 if const { simd::contains(S::TILE_ROWS, 2) } => simd.call(MicroKernel::<2, O> { x, w, sums }),
            3 if const { simd::contains(S::TILE_ROWS, 3) } => simd.call(MicroKernel::<3, O> { x, w, sums }),
            4 if const { simd::contains(S::TILE_ROWS, 4) } => simd.call(MicroKernel::<4, O> { x, w, sums }),
            6 if const { simd::contains(S::TILE_ROWS, 6) } => simd.call(MicroKernel::<6, O> { x, w, sums }),
            8 if const { simd::contains(S::TILE_ROWS, 8) } => simd.call(MicroKernel::<8, O> { x, w, sums }),
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
    tile: usize,
}

impl<W: FloatFormat, const O: usize> Kernel for FinishTile<'_, '_, W, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (panel, tiles) = (self.panel, &self.panel.weights.input.tiles);
        let tile_rows = tiles.padded_rows_of(self.tile).len();
        let (sums, _) = panel.sums.as_chunks::<LANES>();
        for (r, row) in tiles.rows_of(self.tile).enumerate() {
            for first in (0..panel.outputs.len()).step_by(4) {
                let mut four = [simd.splat(0.0); 4];
                let count = four.len().min(panel.outputs.len() - first);
                for (i, v) in (first..).zip(&mut four[..count]) {
                    *v = simd.load(&sums[(i / O * tile_rows + r) * O + i % O]);
                }
                panel.weights.write(simd, row, panel.outputs.start + first, &four, count);
            }
        }
    }
}
