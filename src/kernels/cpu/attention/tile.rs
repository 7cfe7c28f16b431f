//! Query vectors of one run that share a KV head, and their passes over the blocks of K and V.
//!
//! Invariant: how many pass together decides only when a block is loaded, never what is added to what.

use super::adjust::Adjust;
use super::cache::{BLOCK, Places};
use super::stored::Stored;
use super::{Attention, ITEM_QUERIES, groups, padded};
use crate::backend::KvTable;
use crate::cpu::simd::{Kernel, LANES, Simd, exp, store_part};
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
}

/// One query vector.
#[derive(Clone, Copy, Default)]
pub struct Query {
    pub head: usize,
    pub position: usize,
    /// Row and head as one index into (rows, heads).
    vector: usize,
    /// The positions it sees: from the first up to the second.
    pub from: usize,
    pub to: usize,
}

/// Which positions of a block a query vector sees.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Seen {
    pub from: usize,
    pub to: usize,
}

/// What a query vector has besides its sums: the largest score so far, and the sum of the weights, by lane.
struct Weights<S: Simd> {
    largest: [f32; ITEM_QUERIES],
    totals: [S::V; ITEM_QUERIES],
}

impl Query {
    /// The blocks of what it sees.
    #[inline(always)]
    pub fn blocks(&self) -> Range<usize> {
        self.from / BLOCK..self.to.div_ceil(BLOCK)
    }

    #[inline(always)]
    pub fn seen(&self, block: usize) -> Seen {
        let within = |position: usize| position.saturating_sub(block * BLOCK).min(BLOCK);
        Seen { from: within(self.from), to: within(self.to) }
    }
}

impl Seen {
    #[inline(always)]
    fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// The lanes of the positions seen; `rest` in the others.
    #[inline(always)]
    pub fn choose<S: Simd>(self, simd: S, [low, high]: [S::V; 2], rest: S::V) -> [S::V; 2] {
        let mut low = simd.first(self.to, low, rest);
        let mut high = simd.first(self.to.saturating_sub(LANES), high, rest);
        if self.from > 0 {
            low = simd.first(self.from, rest, low);
            high = simd.first(self.from.saturating_sub(LANES), rest, high);
        }
        [low, high]
    }
}

impl<'a, C: Stored> Tile<'a, '_, C> {
    fn query(&self, number: usize) -> Query {
        let (op, row) = (self.op, number / self.op.group);
        let (head, position) = (self.kv_head * op.group + number % op.group, self.run.start + row);
        let seen = op.seen(self.run, position);
        let vector = (self.run.first_row + row) * op.shape.heads + head;
        Query { head, position, vector, from: seen.start, to: seen.end }
    }

    /// The query vectors, whose sums are none yet.
    pub fn begin(&mut self) -> [Query; ITEM_QUERIES] {
        let mut queries = [Query::default(); ITEM_QUERIES];
        for (query, number) in queries.iter_mut().zip(self.queries.clone()) {
            *query = self.query(number);
        }
        let count = self.queries.len();
        self.sums[..count * padded(self.op.layout.v_dim)].fill(0.0);
        if C::SUMMED > 0 {
            self.sum_groups(&queries[..count]);
        }
        queries
    }

    /// Where a query vector's result goes.
    #[allow(clippy::mut_from_ref)] // nobody else writes there
    fn out(&self, query: &Query) -> &mut [f32] {
        let v_dim = self.op.layout.v_dim;
        // SAFETY: a query vector belongs to one item, and so does its place in `out`.
        unsafe { self.op.out.part(query.vector * v_dim..(query.vector + 1) * v_dim) }
    }

    /// A row that sees itself alone gets its own value, whatever the score.
    pub fn copy_own_value(&self) {
        for query in self.queries.clone().map(|number| self.query(number)) {
            let (page, position) = self.op.step.place(self.run, KvTable::Own, query.position);
            let v = &self.v[self.places.v_block(page, self.kv_head, position)];
            C::value(v, position % BLOCK, self.out(&query));
        }
    }

    /// A row that sees nothing gets zeros.
    pub fn see_nothing(&self) {
        self.queries.clone().for_each(|number| self.out(&self.query(number)).fill(0.0));
    }

    /// Lets queries from `first` on pass over a block, as many as the instruction set has room for; gives their number. What it
    /// has none for is not even compiled.
    #[inline(always)]
    fn pass_some<S: Simd>(
        &mut self,
        simd: S,
        queries: &[Query],
        first: usize,
        block: usize,
        weights: &mut Weights<S>,
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

    /// Lets queries `first..first + T` of the tile pass over a block; gives T.
    #[inline(always)]
    fn pass<S: Simd, const T: usize>(
        &mut self,
        simd: S,
        queries: &[Query],
        first: usize,
        block: usize,
        weights: &mut Weights<S>,
    ) -> usize {
        let (mut seen, mut none) = ([Seen::default(); T], true);
        for t in 0..T {
            seen[t] = queries[first + t].seen(block);
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
                let scores = self.adjusted(simd, &queries[first + t], block, scores[t]);
                p[t] = self.weigh(simd, first + t, seen[t], scores, weights);
            }
        }
        let padded = padded(self.op.layout.v_dim);
        let sums = &mut self.sums[first * padded..][..T * padded];
        // What they see ascends, so between two alike all are alike.
        if seen[0] == seen[T - 1] {
            C::add_values::<S, T>(simd, seen[0], &p, v, sums);
        } else {
            for (t, sums) in sums.chunks_exact_mut(padded).enumerate() {
                C::add_values::<S, 1>(simd, seen[t], &[p[t]], v, sums);
            }
        }
        T
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

    /// Weights of the positions that query number `query` of the tile sees of a block, relative to
    /// the largest score so far; what was summed relative to an earlier one is scaled to it.
    #[inline(always)]
    fn weigh<S: Simd>(
        &mut self,
        simd: S,
        query: usize,
        seen: Seen,
        scores: [S::V; 2],
        weights: &mut Weights<S>,
    ) -> [f32; BLOCK] {
        let [low, high] = seen.choose(simd, scores, simd.splat(f32::NEG_INFINITY));
        let before = weights.largest[query];
        let largest = before.max(simd.largest(simd.max(low, high)));
        if largest > before {
            let factor = exp(simd, simd.sub(simd.splat(before), simd.splat(largest)));
            weights.largest[query] = largest;
            weights.totals[query] = simd.mul(weights.totals[query], factor);
            let padded = padded(self.op.layout.v_dim);
            for sums in self.sums[query * padded..][..padded].as_chunks_mut::<LANES>().0 {
                simd.store(simd.mul(simd.load(sums), factor), sums);
            }
        }
        let low = exp(simd, simd.sub(low, simd.splat(largest)));
        let high = exp(simd, simd.sub(high, simd.splat(largest)));
        weights.totals[query] = simd.add(weights.totals[query], simd.add(low, high));
        let mut p = [0.0; BLOCK];
        let (lanes, _) = p.as_chunks_mut::<LANES>();
        simd.store(low, &mut lanes[0]);
        simd.store(high, &mut lanes[1]);
        p
    }

    /// The sums over the totals; zeros where nothing was seen, since the largest weight is 1.
    #[inline(always)]
    pub fn finish<S: Simd>(&self, simd: S, queries: &[Query], totals: &[f32; ITEM_QUERIES]) {
        let padded = padded(self.op.layout.v_dim);
        for (i, (query, sums)) in queries.iter().zip(self.sums.chunks_exact(padded)).enumerate() {
            let total = simd.splat(if totals[i] == 0.0 { 1.0 } else { totals[i] });
            let out = self.out(query);
            for (sums, out) in sums.as_chunks::<LANES>().0.iter().zip(out.chunks_mut(LANES)) {
                store_part(simd, simd.div(simd.load(sums), total), out);
            }
        }
    }
}

impl<C: Stored> Kernel for Tile<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let count = self.queries.len();
        let queries = self.begin();
        let mut weights =
            Weights { largest: [f32::NEG_INFINITY; ITEM_QUERIES], totals: [simd.splat(0.0); ITEM_QUERIES] };
        for block in queries[0].blocks().start..queries[count - 1].blocks().end {
            let mut first = 0;
            while first < count {
                first += self.pass_some(simd, &queries[..count], first, block, &mut weights);
            }
        }
        let mut totals = [0.0; ITEM_QUERIES];
        for (total, lanes) in totals[..count].iter_mut().zip(&weights.totals) {
            *total = simd.sum(*lanes);
        }
        self.finish(simd, &queries[..count], &totals);
    }
}
