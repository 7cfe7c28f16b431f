//! One pass of query vectors over a block of K and V.
//!
//! Invariant: the number of query vectors in a pass decides only when a block is loaded, never the order of
//! additions.

use super::kv_format::KvFormat;
use super::query::{Query, VisibleRange, softmax_base};
use super::tile::{QueryTile, SoftmaxState};
use super::{BLOCK, padded_len};
use crate::cpu::simd::{LANES, Simd, exp};

impl<C: KvFormat> QueryTile<'_, '_, C> {
    /// Processes a block for queries from `first` on, as many as the instruction set has registers for;
    /// returns their number. Larger passes are not even compiled for it.
    #[inline(always)]
    pub fn pass_queries<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        first: usize,
        block: usize,
        weights: &mut SoftmaxState<S>,
    ) -> usize {
        let left = queries.len() - first;
        if const { S::TILE_QUERIES >= 8 } && left >= 8 {
            return self.pass::<S, 8>(simd, queries, first, block, weights);
        }
        if const { S::TILE_QUERIES >= 4 } && left >= 4 {
            return self.pass::<S, 4>(simd, queries, first, block, weights);
        }
        if const { S::TILE_QUERIES >= 2 } && left >= 2 {
            return self.pass::<S, 2>(simd, queries, first, block, weights);
        }
        self.pass::<S, 1>(simd, queries, first, block, weights)
    }

    /// Processes a block for queries `first..first + T` of the tile; returns T.
    #[inline(always)]
    fn pass<S: Simd, const T: usize>(
        &mut self,
        simd: S,
        queries: &[Query],
        first: usize,
        block: usize,
        weights: &mut SoftmaxState<S>,
    ) -> usize {
        let (mut seen, mut none) = ([VisibleRange::default(); T], true);
        for t in 0..T {
            seen[t] = queries[first + t].visible_in(block);
            none &= seen[t].is_empty();
        }
        if none {
            return T;
        }
        let (k, v) = self.block(block);
        let scores = self.scores::<S, T>(simd, &queries[first..first + T], first, k);
        let mut p = [[0.0; BLOCK]; T];
        for t in 0..T {
            if !seen[t].is_empty() {
                let scores = self.adjust_scores(simd, &queries[first + t], block, scores[t]);
                p[t] = self.update_weights(simd, first + t, seen[t], scores, weights);
            }
        }
        let padded = padded_len(self.op.layout.v_dim);
        let (v, sums) = ((v, self.op.value_width()), &mut self.sums[first * padded..][..T * padded]);
        // Visible ranges ascend, so if the first and the last are equal, all are.
        if seen[0] == seen[T - 1] {
            C::add_values::<S, T>(simd, seen[0], &p, v, sums);
        } else {
            for (t, sums) in sums.chunks_exact_mut(padded).enumerate() {
                C::add_values::<S, 1>(simd, seen[t], &[p[t]], v, sums);
            }
        }
        T
    }

    /// Returns the weights of the positions of a block that query number `query` of the tile sees, relative
    /// to the largest score so far. If this block raises the largest score, rescales the earlier sums to it.
    #[inline(always)]
    fn update_weights<S: Simd>(
        &mut self,
        simd: S,
        query: usize,
        seen: VisibleRange,
        scores: [S::V; 2],
        weights: &mut SoftmaxState<S>,
    ) -> [f32; BLOCK] {
        let [low, high] = seen.select(simd, scores, simd.splat(f32::NEG_INFINITY));
        let before = weights.largest[query];
        let largest = before.max(simd.largest(simd.max(low, high)));
        if largest > before {
            let factor = exp(simd, simd.sub(simd.splat(before), simd.splat(largest)));
            weights.largest[query] = largest;
            weights.totals[query] = simd.mul(weights.totals[query], factor);
            let padded = padded_len(self.op.layout.v_dim);
            for sums in self.sums[query * padded..][..padded].as_chunks_mut::<LANES>().0 {
                simd.store(simd.mul(simd.load(sums), factor), sums);
            }
        }
        let largest = simd.splat(softmax_base(largest));
        let low = exp(simd, simd.sub(low, largest));
        let high = exp(simd, simd.sub(high, largest));
        weights.totals[query] = simd.add(weights.totals[query], simd.add(low, high));
        let mut p = [0.0; BLOCK];
        let (lanes, _) = p.as_chunks_mut::<LANES>();
        simd.store(low, &mut lanes[0]);
        simd.store(high, &mut lanes[1]);
        p
    }
}
