//! Top-k sparse attention for generated tokens (FlexGen: Sheng et al. 2023, section 5).
//!
//! Every visible position is scored and weighed, and the sum of weights covers all of them. V is read only at
//! the positions before the token's own that have the largest scores, and at its own. The score threshold is
//! found by selection, so the time is linear in the number of positions, without the comparisons of a sort.
//!
//! Invariant: which positions are selected, and the order of additions, depends only on the query vector and
//! the scores, so on nothing outside the sequence. V of other positions is not read, even if it is NaN.

use super::kv_format::KvFormat;
use super::query::{Query, VisibleRange};
use super::tile::QueryTile;
use super::{BLOCK, ITEM_QUERIES, padded_len};
use crate::cpu::simd::{Kernel, LANES, Simd, exp};

/// Kernel: a work item of one row, whose query vectors are processed one after another.
pub struct TopKAttention<'a, 'b, C: KvFormat> {
    pub tile: QueryTile<'a, 'b, C>,
    /// Scores of one query vector, from the block of the first visible position on, and space for a copy of
    /// them.
    pub scores: &'a mut [f32],
}

/// A threshold that selects a given number of scores.
#[derive(Clone, Copy)]
struct ScoreThreshold {
    /// Larger scores pass.
    score: f32,
    /// Number of scores equal to the threshold that pass too.
    equal_count: usize,
}

/// Returns the F32 numbers of scratch that each thread needs for sequences of up to `positions` positions.
pub fn scratch_len(positions: usize) -> usize {
    2 * positions.next_multiple_of(BLOCK)
}

/// Replaces NaN by negative infinity.
fn nan_to_lowest(score: f32) -> f32 {
    if score.is_nan() { f32::NEG_INFINITY } else { score }
}

impl ScoreThreshold {
    /// Returns the threshold that the `count` largest of `scores` pass; reorders `scores`.
    fn select(count: usize, scores: &mut [f32]) -> ScoreThreshold {
        let Some(last) = count.checked_sub(1) else {
            return ScoreThreshold { score: f32::INFINITY, equal_count: 0 };
        };
        let (_, score, _) = scores.select_nth_unstable_by(last, |a, b| b.total_cmp(a));
        let score = *score;
        let larger = scores.iter().filter(|other| **other > score).count();
        ScoreThreshold { score, equal_count: count - larger }
    }

    /// Returns whether a score passes; of equal ones, the first pass.
    fn admits(&mut self, score: f32) -> bool {
        let equals = score == self.score && self.equal_count > 0;
        self.equal_count -= usize::from(equals);
        equals || score > self.score
    }
}

impl<C: KvFormat> TopKAttention<'_, '_, C> {
    /// Computes the scores of the positions that the query vector sees; returns the largest.
    #[inline(always)]
    fn compute_scores<S: Simd>(&mut self, simd: S, query: &Query, number: usize) -> f32 {
        let mut largest = f32::NEG_INFINITY;
        let scores = self.scores.as_chunks_mut::<BLOCK>().0;
        for (block, to) in query.blocks().zip(scores) {
            let (k, _) = self.tile.block(block);
            let [products] = self.tile.scores::<S, 1>(simd, &[*query], number, k);
            let scores = self.tile.adjust_scores(simd, query, block, products);
            let scores = query.visible_in(block).select(simd, scores, simd.splat(f32::NEG_INFINITY));
            let (halves, _) = to.as_chunks_mut::<LANES>();
            simd.store(scores[0], &mut halves[0]);
            simd.store(scores[1], &mut halves[1]);
            largest = largest.max(simd.largest(simd.max(scores[0], scores[1])));
        }
        largest
    }

    /// Returns the weights of a block of scores.
    #[inline(always)]
    fn weights<S: Simd>(simd: S, scores: &[f32; BLOCK], largest: f32) -> [S::V; 2] {
        let (halves, _) = scores.as_chunks::<LANES>();
        let largest = simd.splat(largest);
        [
            exp(simd, simd.sub(simd.load(&halves[0]), largest)),
            exp(simd, simd.sub(simd.load(&halves[1]), largest)),
        ]
    }

    /// Returns the sum of all weights, added by lanes and then as a tree.
    #[inline(always)]
    fn total_weight<S: Simd>(&self, simd: S, blocks: usize, largest: f32) -> f32 {
        let mut totals = simd.splat(0.0);
        for scores in &self.scores.as_chunks::<BLOCK>().0[..blocks] {
            let [low, high] = Self::weights(simd, scores, largest);
            totals = simd.add(totals, simd.add(low, high));
        }
        simd.sum(totals)
    }

    /// Returns the threshold for the positions before the query vector's own.
    fn threshold(&mut self, query: &Query) -> ScoreThreshold {
        let first = query.from % BLOCK;
        let past = query.to - 1 - query.from;
        let (scores, copy) = self.scores.split_at_mut(self.scores.len() / 2);
        for (to, score) in copy.iter_mut().zip(&scores[first..first + past]) {
            *to = nan_to_lowest(*score);
        }
        ScoreThreshold::select(self.tile.op.step.limits.attended_fraction.floor_of(past), &mut copy[..past])
    }

    /// Adds the values of the selected positions, one contiguous range at a time.
    #[inline(always)]
    fn add_values<S: Simd>(
        &mut self,
        simd: S,
        query: &Query,
        number: usize,
        largest: f32,
        mut threshold: ScoreThreshold,
    ) {
        let width = padded_len(self.tile.op.layout.v_dim);
        let own = query.to - 1;
        for (block, scores) in query.blocks().zip(self.scores.as_chunks::<BLOCK>().0) {
            let seen = query.visible_in(block);
            let (mut p, mut from) = ([0.0; BLOCK], seen.from);
            let (halves, _) = p.as_chunks_mut::<LANES>();
            let [low, high] = Self::weights(simd, scores, largest);
            simd.store(low, &mut halves[0]);
            simd.store(high, &mut halves[1]);
            let (_, v) = self.tile.block(block);
            while from < seen.to {
                let mut to = from;
                while to < seen.to
                    && (block * BLOCK + to == own || threshold.admits(nan_to_lowest(scores[to])))
                {
                    to += 1;
                }
                if to > from {
                    let sums = &mut self.tile.sums[number * width..][..width];
                    C::add_values::<S, 1>(simd, VisibleRange { from, to }, &[p], v, sums);
                }
                // Position `to` was tested and did not pass.
                from = to + 1;
            }
        }
    }
}

impl<C: KvFormat> Kernel for TopKAttention<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let count = self.tile.queries.len();
        let queries = self.tile.load_queries();
        self.tile.clear_sums();
        let mut totals = [0.0; ITEM_QUERIES];
        for (number, query) in queries[..count].iter().enumerate() {
            let largest = self.compute_scores(simd, query, number);
            totals[number] = self.total_weight(simd, query.blocks().len(), largest);
            let threshold = self.threshold(query);
            self.add_values(simd, query, number, largest, threshold);
        }
        self.tile.write_outputs(simd, &queries[..count], &totals);
    }
}
