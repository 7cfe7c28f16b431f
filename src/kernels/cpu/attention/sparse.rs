//! Top-k sparse attention for generated tokens (FlexGen: Sheng et al. 2023, section 5).
//!
//! Every visible position is scored and weighed, and the sum of weights covers all of them. V is read only at
//! the positions before the token's own that have the largest scores, and at its own. The score threshold is
//! found by selection, so the time is linear in the number of positions, without the comparisons of a sort.
//!
//! Invariant: which positions are selected, and the order of additions, depends only on the query vector and
//! the scores, so on nothing outside the sequence. V of other positions is not read, even if it is NaN.

use super::cache::BLOCK;
use super::query::{Query, Seen};
use super::stored::Stored;
use super::tile::Tile;
use super::{ITEM_QUERIES, padded};
use crate::cpu::simd::{Kernel, LANES, Simd, exp};

/// Kernel: a work item of one row, whose query vectors are processed one after another.
pub struct Sparse<'a, 'b, C: Stored> {
    pub tile: Tile<'a, 'b, C>,
    /// Scores of one query vector, from the block of the first visible position on, and space for a copy of
    /// them.
    pub scores: &'a mut [f32],
}

/// A threshold that selects a given number of scores.
#[derive(Clone, Copy)]
struct Bar {
    /// Larger scores pass.
    score: f32,
    /// Number of scores equal to the threshold that pass too.
    equals: usize,
}

/// Returns the F32 numbers of scratch that each thread needs for sequences of up to `positions` positions.
pub fn scratch_len(positions: usize) -> usize {
    2 * positions.next_multiple_of(BLOCK)
}

/// Replaces NaN by negative infinity.
fn score_of(score: f32) -> f32 {
    if score.is_nan() { f32::NEG_INFINITY } else { score }
}

impl Bar {
    /// Returns the threshold that the `count` largest of `scores` pass; reorders `scores`.
    fn of(count: usize, scores: &mut [f32]) -> Bar {
        let Some(last) = count.checked_sub(1) else { return Bar { score: f32::INFINITY, equals: 0 } };
        let (_, score, _) = scores.select_nth_unstable_by(last, |a, b| b.total_cmp(a));
        let score = *score;
        let larger = scores.iter().filter(|other| **other > score).count();
        Bar { score, equals: count - larger }
    }

    /// Returns whether a score passes; of equal ones, the first pass.
    fn admits(&mut self, score: f32) -> bool {
        let equals = score == self.score && self.equals > 0;
        self.equals -= usize::from(equals);
        equals || score > self.score
    }
}

impl<C: Stored> Sparse<'_, '_, C> {
    /// Computes the scores of the positions that the query vector sees; returns the largest.
    #[inline(always)]
    fn score<S: Simd>(&mut self, simd: S, query: &Query, number: usize) -> f32 {
        let mut largest = f32::NEG_INFINITY;
        let scores = self.scores.as_chunks_mut::<BLOCK>().0;
        for (block, to) in query.blocks().zip(scores) {
            let (k, _) = self.tile.block(block);
            let [products] = self.tile.scores::<S, 1>(simd, &[*query], number, k);
            let scores = self.tile.adjusted(simd, query, block, products);
            let scores = query.seen(block).choose(simd, scores, simd.splat(f32::NEG_INFINITY));
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
    fn total<S: Simd>(&self, simd: S, blocks: usize, largest: f32) -> f32 {
        let mut totals = simd.splat(0.0);
        for scores in &self.scores.as_chunks::<BLOCK>().0[..blocks] {
            let [low, high] = Self::weights(simd, scores, largest);
            totals = simd.add(totals, simd.add(low, high));
        }
        simd.sum(totals)
    }

    /// Returns the threshold for the positions before the query vector's own.
    fn bar(&mut self, query: &Query) -> Bar {
        let first = query.from % BLOCK;
        let past = query.to - 1 - query.from;
        let (scores, copy) = self.scores.split_at_mut(self.scores.len() / 2);
        for (to, score) in copy.iter_mut().zip(&scores[first..first + past]) {
            *to = score_of(*score);
        }
        Bar::of(self.tile.op.step.limits.attended.of(past), &mut copy[..past])
    }

    /// Adds the values of the selected positions, one contiguous range at a time.
    #[inline(always)]
    fn add<S: Simd>(&mut self, simd: S, query: &Query, number: usize, largest: f32, mut threshold: Bar) {
        let width = padded(self.tile.op.layout.v_dim);
        let own = query.to - 1;
        for (block, scores) in query.blocks().zip(self.scores.as_chunks::<BLOCK>().0) {
            let seen = query.seen(block);
            let (mut p, mut from) = ([0.0; BLOCK], seen.from);
            let (halves, _) = p.as_chunks_mut::<LANES>();
            let [low, high] = Self::weights(simd, scores, largest);
            simd.store(low, &mut halves[0]);
            simd.store(high, &mut halves[1]);
            let (_, v) = self.tile.block(block);
            while from < seen.to {
                let mut to = from;
                while to < seen.to && (block * BLOCK + to == own || threshold.admits(score_of(scores[to]))) {
                    to += 1;
                }
                if to > from {
                    let sums = &mut self.tile.sums[number * width..][..width];
                    C::add_values::<S, 1>(simd, Seen { from, to }, &[p], v, sums);
                }
                // Position `to` was tested and did not pass.
                from = to + 1;
            }
        }
    }
}

impl<C: Stored> Kernel for Sparse<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let count = self.tile.queries.len();
        let queries = self.tile.begin();
        self.tile.clear();
        let mut totals = [0.0; ITEM_QUERIES];
        for (number, query) in queries[..count].iter().enumerate() {
            let largest = self.score(simd, query, number);
            totals[number] = self.total(simd, query.blocks().len(), largest);
            let threshold = self.bar(query);
            self.add(simd, query, number, largest, threshold);
        }
        self.tile.finish(simd, &queries[..count], &totals);
    }
}
