//! Few rows: a tile of rows directly with the stored weights.
//!
//! Invariant: the sums of an output run over the columns in ascending order.

use super::tile_product::add_products;
use super::weight_slice::WeightSlice;
use crate::cpu::simd::{FloatFormat, Kernel, LANES, Simd, prefetch_l2};
use std::ops::Range;

/// Kernel: a tile of R rows with a range of outputs, O at a time, directly from the stored weights. `rows`
/// are those that are no padding.
pub struct StreamTile<'a, W: FloatFormat, const R: usize, const O: usize> {
    pub(super) weights: &'a WeightSlice<'a, W>,
    pub(super) rows: Range<usize>,
    pub(super) outputs: Range<usize>,
}

impl<W: FloatFormat, const R: usize, const O: usize> Kernel for StreamTile<'_, W, R, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let weights = self.weights;
        let x = weights.input.values_of(&(self.rows.start..self.rows.start + R));
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
            for (row, sums) in self.rows.clone().zip(&sums) {
                weights.write(simd, row, first, sums, count);
            }
        }
    }
}
