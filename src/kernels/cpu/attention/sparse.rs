//! Top-k sparse attention for generated tokens (FlexGen: Sheng et al. 2023, section 5).
//!
//! Every visible position is scored and weighed, and the sum of weights covers all of them. V is read only at
//! the positions before the token's own that have the largest scores, and at its own. The score threshold is
//! found by selection, so the time is linear in the number of positions, without the comparisons of a sort.
//!
//! If V is not all there, the thresholds of all query vectors of a work item are found first. Then the
//! selected values of each block are fetched once for all of them. Scores are computed a second time for
//! that, because those of many query vectors would take much memory.
//!
//! Invariant: which positions are selected, and the order of additions, depends only on the query vector and
//! the scores, so on nothing outside the sequence. V of other positions is not read, even if it is NaN.

use super::kv_format::KvFormat;
use super::query::{Query, VisibleRange, softmax_base};
use super::tile::{QueryTile, SplitOutput};
use super::{BLOCK, ITEM_QUERIES, padded_len};
use crate::backend::ValueSource;
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
    /// No score passes.
    const NONE: ScoreThreshold = ScoreThreshold { score: f32::INFINITY, equal_count: 0 };

    /// Returns the threshold that the `count` largest of `scores` pass; reorders `scores`.
    fn select(count: usize, scores: &mut [f32]) -> ScoreThreshold {
        let Some(last) = count.checked_sub(1) else {
            return ScoreThreshold::NONE;
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

    /// Returns the positions of a block, as bits, that the query vector selects: those whose scores pass, and
    /// its own. Blocks must be given in order.
    #[inline(always)]
    fn select_in(&mut self, query: &Query, block: usize, scores: &[f32; BLOCK]) -> u32 {
        let (VisibleRange { from, to }, own) = (query.visible_in(block), query.to - 1);
        (from..to).fold(0, |selected, at| {
            let is_selected = block * BLOCK + at == own || self.admits(nan_to_lowest(scores[at]));
            selected | u32::from(is_selected) << at
        })
    }
}

/// A query vector whose scores are known.
#[derive(Clone, Copy)]
struct Scored {
    largest: f32,
    /// The sum of all weights.
    total: f32,
    threshold: ScoreThreshold,
}

impl<C: KvFormat> TopKAttention<'_, '_, C> {
    /// Returns the scores of a block's positions, those that the query vector does not see as negative
    /// infinity.
    #[inline(always)]
    fn block_scores<S: Simd>(&self, simd: S, query: &Query, number: usize, block: usize) -> [S::V; 2] {
        let (k, _) = self.tile.block(block);
        let [products] = self.tile.scores::<S, 1>(simd, &[*query], number, k);
        let scores = self.tile.adjust_scores(simd, query, block, products);
        query.visible_in(block).select(simd, scores, simd.splat(f32::NEG_INFINITY))
    }

    /// Computes the scores of the positions that the query vector sees; returns the largest.
    #[inline(always)]
    fn compute_scores<S: Simd>(&mut self, simd: S, query: &Query, number: usize) -> f32 {
        let mut largest = f32::NEG_INFINITY;
        for (at, block) in query.blocks().enumerate() {
            let scores = self.block_scores(simd, query, number, block);
            store(simd, scores, &mut self.scores.as_chunks_mut::<BLOCK>().0[at]);
            largest = largest.max(simd.largest(simd.max(scores[0], scores[1])));
        }
        largest
    }

    /// Returns the sum of all weights, added by lanes and then as a tree.
    #[inline(always)]
    fn total_weight<S: Simd>(&self, simd: S, blocks: usize, largest: f32) -> f32 {
        let mut totals = simd.splat(0.0);
        for scores in &self.scores.as_chunks::<BLOCK>().0[..blocks] {
            let [low, high] = weights(simd, scores, largest);
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

    /// Adds the values of a block's selected positions, one contiguous range at a time.
    #[inline(always)]
    fn add_values<S: Simd>(
        &mut self,
        simd: S,
        (number, largest): (usize, f32),
        (scores, selected): (&[f32; BLOCK], u32),
        v: &[C::Unit],
    ) {
        let width = padded_len(self.tile.op.layout.v_dim);
        let sums = &mut self.tile.sums[number * width..][..width];
        let v = (v, self.tile.op.value_width());
        let mut p = [0.0; BLOCK];
        store(simd, weights(simd, scores, largest), &mut p);
        for VisibleRange { from, to } in runs(selected) {
            C::add_values::<S, 1>(simd, VisibleRange { from, to }, &[p], v, sums);
        }
    }

    /// Adds the selected values of a query vector, whose scores were computed last.
    #[inline(always)]
    fn add_all_values<S: Simd>(&mut self, simd: S, query: &Query, number: usize, mut scored: Scored) {
        for (at, block) in query.blocks().enumerate() {
            let scores = self.scores.as_chunks::<BLOCK>().0[at];
            let selected = scored.threshold.select_in(query, block, &scores);
            if selected != 0 {
                let (_, v) = self.tile.block(block);
                self.add_values(simd, (number, scored.largest), (&scores, selected), v);
            }
        }
    }

    /// Adds the selected values of all query vectors, and fetches those that are not in the cache.
    #[inline(always)]
    fn add_fetched_values<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        scored: &mut [Scored; ITEM_QUERIES],
        source: &dyn ValueSource,
    ) {
        let SplitOutput::Merged(fetched) = &mut self.tile.split_output else {
            unreachable!("sparse attention has no splits; this is a bug")
        };
        let fetched = std::mem::take(fetched);
        let (mut scores, mut selected) = ([[0.0; BLOCK]; ITEM_QUERIES], [0; ITEM_QUERIES]);
        // Visible ranges ascend.
        for block in queries[0].blocks().start..queries[queries.len() - 1].blocks().end {
            for (number, query) in queries.iter().enumerate() {
                let halves = self.block_scores(simd, query, number, block);
                store(simd, halves, &mut scores[number]);
                selected[number] = scored[number].threshold.select_in(query, block, &scores[number]);
            }
            let wanted = selected.iter().fold(0, |all, selected| all | selected);
            if wanted == 0 {
                continue;
            }
            let v = self.values_of(block, wanted, source, fetched);
            for number in 0..queries.len() {
                let of_query = (number, scored[number].largest);
                self.add_values(simd, of_query, (&scores[number], selected[number]), v);
            }
        }
    }

    /// Returns a block of V that has the wanted positions: that of the cache, or `fetched`, into which they
    /// are read.
    fn values_of<'a>(
        &'_ self,
        block: usize,
        wanted: u32,
        source: &dyn ValueSource,
        fetched: &'a mut [f32],
    ) -> &'a [C::Unit]
    where
        Self: 'a,
    {
        let (op, places) = (self.tile.op, self.tile.cache_layout);
        let (page, position) = op.step.locate(self.tile.span, op.shape.table, block * BLOCK);
        if source.is_present(page) {
            return self.tile.block(block).1;
        }
        let at = places.v_block(page, self.tile.kv_head, position);
        let (start, len) = (at.start * size_of::<C::Unit>(), at.len());
        let bytes = bytes_of(fetched);
        let (shared, each) = C::v_parts(op.layout.v_dim);
        if shared > 0 {
            source.read(start, &mut bytes[..shared]);
        }
        for VisibleRange { from, to } in runs(wanted) {
            let part = shared + from * each..shared + to * each;
            source.read(start + part.start, &mut bytes[part]);
        }
        &units_of::<C::Unit>(fetched)[..len]
    }
}

/// Stores the two vectors of a block.
#[inline(always)]
fn store<S: Simd>(simd: S, [low, high]: [S::V; 2], to: &mut [f32; BLOCK]) {
    let (halves, _) = to.as_chunks_mut::<LANES>();
    simd.store(low, &mut halves[0]);
    simd.store(high, &mut halves[1]);
}

/// Returns the weights of a block of scores.
#[inline(always)]
fn weights<S: Simd>(simd: S, scores: &[f32; BLOCK], largest: f32) -> [S::V; 2] {
    let (halves, _) = scores.as_chunks::<LANES>();
    let largest = simd.splat(softmax_base(largest));
    [exp(simd, simd.sub(simd.load(&halves[0]), largest)), exp(simd, simd.sub(simd.load(&halves[1]), largest))]
}

/// Returns the ranges of contiguous positions among those of a block that are given as bits.
#[inline(always)]
fn runs(mut positions: u32) -> impl Iterator<Item = VisibleRange> {
    std::iter::from_fn(move || {
        (positions != 0).then(|| {
            let from = positions.trailing_zeros();
            let len = (!(positions >> from)).trailing_zeros();
            let to = from + len;
            positions = if to == u32::BITS { 0 } else { positions >> to << to };
            VisibleRange { from: from as usize, to: to as usize }
        })
    })
}

/// Returns the bytes of scratch numbers.
fn bytes_of(scratch: &mut [f32]) -> &mut [u8] {
    // SAFETY: every bit pattern is a valid byte, and a valid number.
    unsafe { scratch.align_to_mut::<u8>().1 }
}

/// Returns scratch numbers as units of a storage format, which are numbers of at most four bytes.
fn units_of<U>(scratch: &[f32]) -> &[U] {
    assert!(size_of::<U>() <= size_of::<f32>());
    // SAFETY: every bit pattern is a valid unit, and none needs a larger alignment than an f32.
    unsafe { scratch.align_to::<U>().1 }
}

impl<C: KvFormat> Kernel for TopKAttention<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let count = self.tile.queries.len();
        let queries = self.tile.load_queries();
        let source = self.tile.op.values;
        self.tile.clear_sums();
        let mut scored = [Scored { largest: 0.0, total: 0.0, threshold: ScoreThreshold::NONE }; ITEM_QUERIES];
        for (number, query) in queries[..count].iter().enumerate() {
            let largest = self.compute_scores(simd, query, number);
            let total = self.total_weight(simd, query.blocks().len(), largest);
            let threshold = self.threshold(query);
            scored[number] = Scored { largest, total, threshold };
            if source.is_none() {
                self.add_all_values(simd, query, number, scored[number]);
            }
        }
        if let Some(source) = source {
            self.add_fetched_values(simd, &queries[..count], &mut scored, source);
        }
        let (largest, totals) = (scored.map(|scored| scored.largest), scored.map(|scored| scored.total));
        self.tile.write_outputs(simd, &queries[..count], (&largest, &totals));
    }
}
