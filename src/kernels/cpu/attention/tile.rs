//! Query vectors of one run that share a KV head, and their way over the splits of what they see.
//!
//! Invariant: each split begins with nothing, and a query vector that sees one only is not folded.

use super::adjust::Adjust;
use super::cache::{BLOCK, Places};
use super::partial::{self, Part, Partials};
use super::pass::Weights;
use super::plan::{Apart, SPLIT, splits};
use super::query::Query;
use super::stored::Stored;
use super::{Attention, ITEM_QUERIES, groups, padded};
use crate::backend::KvTable;
use crate::cpu::simd::{Kernel, LANES, Simd};
use crate::cpu::step::Run;
use std::ops::Range;

/// One work item.
pub struct Tile<'a, 'b, C: Stored> {
    pub op: &'a Attention<'b>,
    pub places: Places,
    pub k: &'a [C::Unit],
    pub v: &'a [C::Unit],
    pub run: &'a Run,
    pub kv_head: usize,
    /// Numbers of the run's query vectors for that head.
    pub queries: Range<usize>,
    /// (queries, v_padded): the sums of weighted values.
    pub sums: &'a mut [f32],
    /// (queries, groups): the sums of their own numbers.
    pub q_sums: &'a mut [f32],
    pub kept: Kept<'a>,
}

/// Where the results of splits go, if there is more than one.
pub enum Kept<'a> {
    /// The tile passes over all, one after another, and folds each into what it has: (queries, a partial result).
    Folded(&'a mut [f32]),
    /// Others do those of other splits.
    Apart(Apart, Partials<'a>),
}

impl<'a, C: Stored> Tile<'a, '_, C> {
    /// The query vectors.
    pub fn begin(&mut self) -> [Query; ITEM_QUERIES] {
        let mut queries = [Query::default(); ITEM_QUERIES];
        for (query, number) in queries.iter_mut().zip(self.queries.clone()) {
            *query = self.op.query(self.run, self.kv_head, number);
        }
        let count = self.queries.len();
        if C::SUMMED > 0 {
            self.sum_groups(&queries[..count]);
        }
        queries
    }

    /// Makes their sums none.
    #[inline(always)]
    pub fn clear(&mut self) {
        let count = self.queries.len();
        self.sums[..count * padded(self.op.layout.v_dim)].fill(0.0);
    }

    /// A row that sees itself alone gets its own value, whatever the score.
    pub fn copy_own_value(&self) {
        for number in self.queries.clone() {
            let query = self.op.query(self.run, self.kv_head, number);
            let (page, position) = self.op.step.place(self.run, KvTable::Own, query.position);
            let v = &self.v[self.places.v_block(page, self.kv_head, position)];
            C::value(v, position % BLOCK, self.op.out(&query));
        }
    }

    /// A row that sees nothing gets zeros.
    pub fn see_nothing(&self) {
        for number in self.queries.clone() {
            self.op.out(&self.op.query(self.run, self.kv_head, number)).fill(0.0);
        }
    }

    /// K and V of a block of positions.
    #[inline(always)]
    pub fn block(&self, block: usize) -> (&'a [C::Unit], &'a [C::Unit]) {
        let (k, v) = (self.k, self.v);
        let (page, position) = self.op.step.place(self.run, self.op.shape.table, block * BLOCK);
        let k = &k[self.places.k_block(page, self.kv_head, position)];
        (k, &v[self.places.v_block(page, self.kv_head, position)])
    }

    /// The products of T query vectors, numbers `first..first + T` of the tile, with the 32 keys of a block.
    #[inline(always)]
    pub fn scores<S: Simd, const T: usize>(
        &self,
        simd: S,
        queries: &[Query],
        first: usize,
        k: &[C::Unit],
    ) -> [[S::V; 2]; T] {
        let k_dim = self.op.layout.k_dim;
        let groups = groups::<C>(k_dim);
        let (mut q, mut sums) = ([&self.op.q[..0]; T], [&self.op.q[..0]; T]);
        for t in 0..T {
            q[t] = &self.op.q[queries[t].vector * k_dim..][..k_dim];
            sums[t] = &self.q_sums[(first + t) * groups..][..groups];
        }
        C::scores::<S, T>(simd, q, sums, k)
    }

    /// Each query vector's sums over groups of its numbers, in order.
    fn sum_groups(&mut self, queries: &[Query]) {
        let k_dim = self.op.layout.k_dim;
        let sums = self.q_sums.chunks_exact_mut(groups::<C>(k_dim).max(1));
        for (query, sums) in queries.iter().zip(sums) {
            let q = &self.op.q[query.vector * k_dim..][..k_dim];
            for (numbers, sum) in q.chunks(C::SUMMED.max(1)).zip(sums) {
                *sum = numbers.iter().fold(0.0, |sum, q| sum + q);
            }
        }
    }

    /// Scores of products. What is rare is a call of its own, to keep the usual pass small.
    #[inline(always)]
    pub fn adjusted<S: Simd>(&self, simd: S, query: &Query, block: usize, products: [S::V; 2]) -> [S::V; 2] {
        let shape = self.op.shape;
        if shape.softcap.is_none() && shape.bias.is_none() {
            let scale = simd.splat(shape.scale);
            return [simd.mul(products[0], scale), simd.mul(products[1], scale)];
        }
        let mut scores = [0.0; BLOCK];
        let (halves, _) = scores.as_chunks_mut::<LANES>();
        simd.store(products[0], &mut halves[0]);
        simd.store(products[1], &mut halves[1]);
        simd.call(Adjust::new(self.op, query, block * BLOCK, &mut scores));
        let (halves, _) = scores.as_chunks::<LANES>();
        [simd.load(&halves[0]), simd.load(&halves[1])]
    }

    /// Writes the sums over their totals.
    #[inline(always)]
    pub fn finish<S: Simd>(&self, simd: S, queries: &[Query], totals: &[f32; ITEM_QUERIES]) {
        let padded = padded(self.op.layout.v_dim);
        for (i, (query, sums)) in queries.iter().zip(self.sums.chunks_exact(padded)).enumerate() {
            self.op.write(simd, query, sums, totals[i]);
        }
    }

    /// The splits to pass over, in order; one that is not seen where there is none.
    #[inline(always)]
    fn splits(&self, queries: &[Query]) -> Range<usize> {
        if let Kept::Apart(apart, _) = &self.kept {
            return apart.splits.clone();
        }
        // What they see ascends.
        let seen = splits(&(queries[0].from..queries[queries.len() - 1].to));
        seen.start..seen.end.max(seen.start + 1)
    }

    /// Lets all queries pass over what they see of a split; gives their largest scores and their totals.
    #[inline(always)]
    fn pass_split<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        split: usize,
    ) -> ([f32; ITEM_QUERIES], [f32; ITEM_QUERIES]) {
        let mut weights =
            Weights { largest: [f32::NEG_INFINITY; ITEM_QUERIES], totals: [simd.splat(0.0); ITEM_QUERIES] };
        let (blocks, last) = (SPLIT / BLOCK, queries[queries.len() - 1].blocks().end);
        self.clear();
        for block in queries[0].blocks().start.max(split * blocks)..last.min((split + 1) * blocks) {
            let mut first = 0;
            while first < queries.len() {
                first += self.pass_some(simd, queries, first, block, &mut weights);
            }
        }
        let mut totals = [0.0; ITEM_QUERIES];
        for (total, lanes) in totals[..queries.len()].iter_mut().zip(&weights.totals) {
            *total = simd.sum(*lanes);
        }
        (weights.largest, totals)
    }

    /// Keeps the split's results of the query vectors that see it.
    #[inline(always)]
    fn keep<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        split: usize,
        largest: &[f32; ITEM_QUERIES],
        totals: &[f32; ITEM_QUERIES],
    ) {
        let padded = padded(self.op.layout.v_dim);
        let len = partial::len(self.op.layout.v_dim);
        for (i, (query, sums)) in queries.iter().zip(self.sums.chunks_exact(padded)).enumerate() {
            let splits = query.splits();
            if split < splits.start || split >= splits.end {
                continue;
            }
            let part = Part::new(sums, largest[i], totals[i]);
            match &mut self.kept {
                Kept::Folded(wholes) if split > splits.start => {
                    part.fold(simd, &mut wholes[i * len..][..len])
                }
                Kept::Folded(wholes) => part.keep(&mut wholes[i * len..][..len]),
                // SAFETY: a query vector's split is one item's.
                Kept::Apart(apart, to) => part.keep(unsafe { to.part(apart.of(i, split..split + 1)) }),
            }
        }
    }

    /// Writes what has been folded.
    #[inline(always)]
    fn finish_folded<S: Simd>(&self, simd: S, queries: &[Query]) {
        let Kept::Folded(wholes) = &self.kept else { return };
        let wholes = wholes.chunks_exact(partial::len(self.op.layout.v_dim));
        for (query, whole) in queries.iter().zip(wholes) {
            match query.splits().is_empty() {
                true => self.op.out(query).fill(0.0),
                false => partial::write(simd, self.op, query, whole),
            }
        }
    }
}

impl<C: Stored> Kernel for Tile<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let queries = self.begin();
        let queries = &queries[..self.queries.len()];
        let splits = self.splits(queries);
        let is_alone = splits.len() == 1 && matches!(self.kept, Kept::Folded(_));
        for split in splits {
            let (largest, totals) = self.pass_split(simd, queries, split);
            if is_alone {
                return self.finish(simd, queries, &totals);
            }
            self.keep(simd, queries, split, &largest, &totals);
        }
        self.finish_folded(simd, queries);
    }
}
