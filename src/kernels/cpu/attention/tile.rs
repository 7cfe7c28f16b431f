//! A tile: query vectors of one span that share a KV head, processed together over the splits that they see.
//!
//! Invariant: each split starts from empty sums, and a query vector that sees only one split is not merged.

use super::adjust::{AdjustScores, add_distances};
use super::cache::CacheLayout;
use super::kv_format::KvFormat;
use super::partial::{self, PartialResult, PartialResults};
use super::plan::{SPLIT, SplitResults, splits_of};
use super::query::Query;
use super::{Attention, BLOCK, ITEM_QUERIES, padded_len, summed_groups};
use crate::backend::KvTable;
use crate::batch::RowSpan;
use crate::cpu::simd::{Kernel, LANES, Simd};
use std::ops::Range;

/// A work item of attention.
pub struct QueryTile<'a, 'b, C: KvFormat> {
    pub op: &'a Attention<'b>,
    pub cache_layout: CacheLayout,
    pub k: &'a [C::Unit],
    pub v: &'a [C::Unit],
    pub span: &'a RowSpan,
    pub kv_head: usize,
    /// Numbers of the span's query vectors for this KV head.
    pub queries: Range<usize>,
    /// Sums of weighted values: (queries, v_padded).
    pub sums: &'a mut [f32],
    /// Sums of the query vectors' own numbers: (queries, groups).
    pub q_sums: &'a mut [f32],
    pub split_output: SplitOutput<'a>,
}

/// Destination of the results of splits, if there is more than one.
pub enum SplitOutput<'a> {
    /// The tile processes all splits in order, and merges each into its result: (queries, a partial result).
    Merged(&'a mut [f32]),
    /// Each split is a separate work item that stores its result.
    Separate(SplitResults, PartialResults<'a>),
}

/// Online softmax state of the query vectors of a tile, besides their sums: the largest score so far, and the
/// sum of the weights, by lane.
pub struct SoftmaxState<S: Simd> {
    pub largest: [f32; ITEM_QUERIES],
    pub totals: [S::V; ITEM_QUERIES],
}

impl<'a, C: KvFormat> QueryTile<'a, '_, C> {
    /// Returns the query vectors, and computes their sums over groups if the cache format needs them.
    pub fn load_queries(&mut self) -> [Query; ITEM_QUERIES] {
        let mut queries = [Query::default(); ITEM_QUERIES];
        for (query, number) in queries.iter_mut().zip(self.queries.clone()) {
            *query = self.op.query(self.span, self.kv_head, number);
        }
        let count = self.queries.len();
        if C::SUMMED_GROUP > 0 {
            self.sum_groups(&queries[..count]);
        }
        queries
    }

    /// Clears the sums of weighted values.
    #[inline(always)]
    pub fn clear_sums(&mut self) {
        let count = self.queries.len();
        self.sums[..count * padded_len(self.op.layout.v_dim)].fill(0.0);
    }

    /// Writes the own value of rows that see only themselves, whatever the score.
    pub fn copy_own_value(&self) {
        for number in self.queries.clone() {
            let query = self.op.query(self.span, self.kv_head, number);
            let (page, position) = self.op.step.locate(self.span, KvTable::Own, query.position);
            let v = &self.v[self.cache_layout.v_block(page, self.kv_head, position)];
            C::read_value(v, position % BLOCK, self.op.value_width(), self.op.output(&query));
        }
    }

    /// Writes zeros for rows that see nothing.
    pub fn write_zeros(&self) {
        for number in self.queries.clone() {
            self.op.output(&self.op.query(self.span, self.kv_head, number)).fill(0.0);
        }
    }

    /// Returns K and V of a block of positions.
    #[inline(always)]
    pub fn block(&self, block: usize) -> (&'a [C::Unit], &'a [C::Unit]) {
        let (k, v) = (self.k, self.v);
        let (page, position) = self.op.step.locate(self.span, self.op.shape.table, block * BLOCK);
        let k = &k[self.cache_layout.k_block(page, self.kv_head, position)];
        (k, &v[self.cache_layout.v_block(page, self.kv_head, position)])
    }

    /// Returns the dot products of T query vectors, numbers `first..first + T` of the tile, with the 32 keys
    /// of a block.
    #[inline(always)]
    pub fn scores<S: Simd, const T: usize>(
        &self,
        simd: S,
        queries: &[Query],
        first: usize,
        k: &[C::Unit],
    ) -> [[S::V; 2]; T] {
        let k_dim = self.op.layout.k_dim;
        let groups = summed_groups::<C>(k_dim);
        let (mut q, mut sums) = ([&self.op.q[..0]; T], [&self.op.q[..0]; T]);
        for t in 0..T {
            q[t] = &self.op.q[queries[t].vector * k_dim..][..k_dim];
            sums[t] = &self.q_sums[(first + t) * groups..][..groups];
        }
        match self.op.layout.v_in_k {
            true => C::row_scores::<S, T>(simd, q, sums, k),
            false => C::scores::<S, T>(simd, q, sums, k),
        }
    }

    /// Computes each query vector's sums over groups of its numbers, in order.
    fn sum_groups(&mut self, queries: &[Query]) {
        let k_dim = self.op.layout.k_dim;
        let sums = self.q_sums.chunks_exact_mut(summed_groups::<C>(k_dim).max(1));
        for (query, sums) in queries.iter().zip(sums) {
            let q = &self.op.q[query.vector * k_dim..][..k_dim];
            for (numbers, sum) in q.chunks(C::SUMMED_GROUP.max(1)).zip(sums) {
                *sum = numbers.iter().fold(0.0, |sum, q| sum + q);
            }
        }
    }

    /// Turns dot products into scores. Rare adjustments are a separate call, to keep the usual pass small.
    #[inline(always)]
    pub fn adjust_scores<S: Simd>(
        &self,
        simd: S,
        query: &Query,
        block: usize,
        products: [S::V; 2],
    ) -> [S::V; 2] {
        let shape = self.op.shape;
        if shape.softcap.is_none() && shape.bias.is_none() && shape.distances.is_none() {
            let scale = simd.splat(shape.scale);
            return [simd.mul(products[0], scale), simd.mul(products[1], scale)];
        }
        let mut scores = [0.0; BLOCK];
        let (halves, _) = scores.as_chunks_mut::<LANES>();
        simd.store(products[0], &mut halves[0]);
        simd.store(products[1], &mut halves[1]);
        add_distances(self.op, query, block, &mut scores);
        simd.call(AdjustScores::new(self.op, query, block * BLOCK, &mut scores));
        let (halves, _) = scores.as_chunks::<LANES>();
        [simd.load(&halves[0]), simd.load(&halves[1])]
    }

    /// Writes the sums divided by their total weights, which are relative to the largest scores.
    #[inline(always)]
    pub fn write_outputs<S: Simd>(
        &self,
        simd: S,
        queries: &[Query],
        (largest, totals): (&[f32; ITEM_QUERIES], &[f32; ITEM_QUERIES]),
    ) {
        let padded = padded_len(self.op.layout.v_dim);
        for (i, (query, sums)) in queries.iter().zip(self.sums.chunks_exact(padded)).enumerate() {
            self.op.write(simd, query, sums, (largest[i], totals[i]));
        }
    }

    /// Returns the splits to process, in order. Without any visible position, returns one split that no query
    /// sees.
    #[inline(always)]
    fn splits(&self, queries: &[Query]) -> Range<usize> {
        if let SplitOutput::Separate(results, _) = &self.split_output {
            return results.splits.clone();
        }
        // Visible ranges ascend.
        let seen = splits_of(&(queries[0].from..queries[queries.len() - 1].to));
        seen.start..seen.end.max(seen.start + 1)
    }

    /// Computes the attention of all queries over the visible positions of a split; returns their largest
    /// scores and their total weights.
    #[inline(always)]
    fn pass_split<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        split: usize,
    ) -> ([f32; ITEM_QUERIES], [f32; ITEM_QUERIES]) {
        let mut weights = SoftmaxState {
            largest: [f32::NEG_INFINITY; ITEM_QUERIES],
            totals: [simd.splat(0.0); ITEM_QUERIES],
        };
        let (blocks, last) = (SPLIT / BLOCK, queries[queries.len() - 1].blocks().end);
        self.clear_sums();
        for block in queries[0].blocks().start.max(split * blocks)..last.min((split + 1) * blocks) {
            let mut first = 0;
            while first < queries.len() {
                first += self.pass_queries(simd, queries, first, block, &mut weights);
            }
        }
        let mut totals = [0.0; ITEM_QUERIES];
        for (total, lanes) in totals[..queries.len()].iter_mut().zip(&weights.totals) {
            *total = simd.sum(*lanes);
        }
        (weights.largest, totals)
    }

    /// Stores or merges a split's results for the query vectors that see it.
    #[inline(always)]
    fn store_split<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        split: usize,
        largest: &[f32; ITEM_QUERIES],
        totals: &[f32; ITEM_QUERIES],
    ) {
        let padded = padded_len(self.op.layout.v_dim);
        let len = partial::len(self.op.layout.v_dim);
        for (i, (query, sums)) in queries.iter().zip(self.sums.chunks_exact(padded)).enumerate() {
            let splits = query.splits();
            if split < splits.start || split >= splits.end {
                continue;
            }
            let part = PartialResult::new(sums, largest[i], totals[i]);
            match &mut self.split_output {
                SplitOutput::Merged(merged) if split > splits.start => {
                    part.merge_into(simd, &mut merged[i * len..][..len])
                }
                SplitOutput::Merged(merged) => part.store(&mut merged[i * len..][..len]),
                // SAFETY: a query vector's split belongs to one item.
                SplitOutput::Separate(results, to) => {
                    part.store(unsafe { to.results_mut(results.range(i, split..split + 1)) })
                }
            }
        }
    }

    /// Writes the merged results.
    #[inline(always)]
    fn write_merged<S: Simd>(&self, simd: S, queries: &[Query]) {
        let SplitOutput::Merged(merged) = &self.split_output else { return };
        let merged = merged.chunks_exact(partial::len(self.op.layout.v_dim));
        for (query, result) in queries.iter().zip(merged) {
            match query.splits().is_empty() {
                true => self.op.output(query).fill(0.0),
                false => partial::write_output(simd, self.op, query, result),
            }
        }
    }
}

impl<C: KvFormat> Kernel for QueryTile<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let queries = self.load_queries();
        let queries = &queries[..self.queries.len()];
        let splits = self.splits(queries);
        let is_only_split = splits.len() == 1 && matches!(self.split_output, SplitOutput::Merged(_));
        for split in splits {
            let (largest, totals) = self.pass_split(simd, queries, split);
            if is_only_split {
                return self.write_outputs(simd, queries, (&largest, &totals));
            }
            self.store_split(simd, queries, split, &largest, &totals);
        }
        self.write_merged(simd, queries);
    }
}
