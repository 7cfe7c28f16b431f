//! Attention of drawn tokens that takes the values of some positions only (FlexGen: Sheng et al. 2023, section 5).
//!
//! Every position that is seen is scored and weighed, and the sum of weights is that of all; V is read of the positions before
//! the token's own with the largest scores, and of its own. The smallest score that is large enough is found by selection, so
//! that time grows with the number of positions, not with that of comparisons of a sort.
//!
//! Invariant: which positions are chosen, and in which order what is added, follows from the query vector and the scores, so
//! from nothing beside the sequence; V of others is not read, be it NaN.

use super::cache::BLOCK;
use super::query::{Query, Seen};
use super::stored::Stored;
use super::tile::Tile;
use super::{ITEM_QUERIES, padded};
use crate::cpu::simd::{Kernel, LANES, Simd, exp};

/// A work item of one row, whose query vectors go one after another.
pub struct Sparse<'a, 'b, C: Stored> {
    pub tile: Tile<'a, 'b, C>,
    /// Scores of one query vector, from the block of the first position seen on, and room for as many.
    pub scores: &'a mut [f32],
}

/// What makes a position's score large enough.
#[derive(Clone, Copy)]
struct Bar {
    /// Larger scores are.
    score: f32,
    /// So many that equal it are, too.
    equals: usize,
}

/// F32 numbers of scratch that each thread needs for sequences of so many positions.
pub fn scratch_len(positions: usize) -> usize {
    2 * positions.next_multiple_of(BLOCK)
}

/// A NaN is no score: it is as small as can be.
fn score_of(score: f32) -> f32 {
    if score.is_nan() { f32::NEG_INFINITY } else { score }
}

impl Bar {
    /// What the `count` largest of `scores` pass, whose order is lost.
    fn of(count: usize, scores: &mut [f32]) -> Bar {
        let Some(last) = count.checked_sub(1) else { return Bar { score: f32::INFINITY, equals: 0 } };
        let (_, score, _) = scores.select_nth_unstable_by(last, |a, b| b.total_cmp(a));
        let score = *score;
        let larger = scores.iter().filter(|other| **other > score).count();
        Bar { score, equals: count - larger }
    }

    /// Whether that score passes; equal ones pass first come, first served.
    fn admits(&mut self, score: f32) -> bool {
        let equals = score == self.score && self.equals > 0;
        self.equals -= usize::from(equals);
        equals || score > self.score
    }
}

impl<C: Stored> Sparse<'_, '_, C> {
    /// Fills in the scores of the positions that the query vector sees; gives the largest.
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

    /// The weights of a block of scores.
    #[inline(always)]
    fn weights<S: Simd>(simd: S, scores: &[f32; BLOCK], largest: f32) -> [S::V; 2] {
        let (halves, _) = scores.as_chunks::<LANES>();
        let largest = simd.splat(largest);
        [
            exp(simd, simd.sub(simd.load(&halves[0]), largest)),
            exp(simd, simd.sub(simd.load(&halves[1]), largest)),
        ]
    }

    /// The sum of all weights, by lanes and their tree.
    #[inline(always)]
    fn total<S: Simd>(&self, simd: S, blocks: usize, largest: f32) -> f32 {
        let mut totals = simd.splat(0.0);
        for scores in &self.scores.as_chunks::<BLOCK>().0[..blocks] {
            let [low, high] = Self::weights(simd, scores, largest);
            totals = simd.add(totals, simd.add(low, high));
        }
        simd.sum(totals)
    }

    /// What the chosen positions before the query vector's own pass.
    fn bar(&mut self, query: &Query) -> Bar {
        let first = query.from % BLOCK;
        let past = query.to - 1 - query.from;
        let (scores, room) = self.scores.split_at_mut(self.scores.len() / 2);
        for (to, score) in room.iter_mut().zip(&scores[first..first + past]) {
            *to = score_of(*score);
        }
        Bar::of(self.tile.op.step.limits.attended.of(past), &mut room[..past])
    }

    /// Adds the values of the chosen, run by run of neighbours.
    #[inline(always)]
    fn add<S: Simd>(&mut self, simd: S, query: &Query, number: usize, largest: f32, mut bar: Bar) {
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
                while to < seen.to && (block * BLOCK + to == own || bar.admits(score_of(scores[to]))) {
                    to += 1;
                }
                if to > from {
                    let sums = &mut self.tile.sums[number * width..][..width];
                    C::add_values::<S, 1>(simd, Seen { from, to }, &[p], v, sums);
                }
                // The one at `to` was asked, and is not among them.
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
            let bar = self.bar(query);
            self.add(simd, query, number, largest, bar);
        }
        self.tile.finish(simd, &queries[..count], &totals);
    }
}
