//! Query vectors of one run that share a KV head, and their passes over the blocks of K and V.
//!
//! Invariant: how many pass together decides only when a block is loaded, never what is added to what.

use super::adjust::Adjust;
use super::cache::BLOCK;
use super::sums::add_values;
use super::{Attention, ITEM_QUERIES};
use crate::backend::KvTable;
use crate::cpu::simd::{Code, Kernel, LANES, Simd, exp, store_part};
use crate::cpu::step::Run;
use std::ops::Range;

/// One work item.
pub struct Tile<'a, 'b, C: Code> {
    pub op: &'a Attention<'b>,
    pub k: &'a [C::Raw],
    pub v: &'a [C::Raw],
    pub run: &'a Run,
    pub kv_head: usize,
    /// Numbers of the run's query vectors for that head.
    pub queries: Range<usize>,
    /// (queries, v_padded): the sums of weighted values.
    pub sums: &'a mut [f32],
}

/// One query vector.
#[derive(Clone, Copy, Default)]
pub struct Query {
    pub head: usize,
    pub position: usize,
    /// Row and head as one index into (rows, heads).
    vector: usize,
    /// The positions it sees: from the first up to the second.
    from: usize,
    to: usize,
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
    #[inline(always)]
    fn seen(&self, block: usize) -> Seen {
        let within = |position: usize| position.saturating_sub(block * BLOCK).min(BLOCK);
        Seen { from: within(self.from), to: within(self.to) }
    }
}

impl Seen {
    #[inline(always)]
    fn is_empty(self) -> bool {
        self.from >= self.to
    }
}

impl<C: Code> Tile<'_, '_, C> {
    fn query(&self, number: usize) -> Query {
        let (op, row) = (self.op, number / self.op.group);
        let (head, position) = (self.kv_head * op.group + number % op.group, self.run.start + row);
        let seen = op.seen(self.run, position);
        let vector = (self.run.first_row + row) * op.shape.heads + head;
        Query { head, position, vector, from: seen.start, to: seen.end }
    }

    /// Where a query vector's result goes.
    #[allow(clippy::mut_from_ref)] // nobody else writes there
    fn out(&self, query: &Query) -> &mut [f32] {
        let v_dim = self.op.places.layout.v_dim;
        // SAFETY: a query vector belongs to one item, and so does its place in `out`.
        unsafe { self.op.out.part(query.vector * v_dim..(query.vector + 1) * v_dim) }
    }

    /// A row that sees itself alone gets its own value, whatever the score.
    pub fn copy_own_value(&self) {
        let v_dim = self.op.places.layout.v_dim;
        for query in self.queries.clone().map(|number| self.query(number)) {
            let (page, position) = self.op.step.place(self.run, KvTable::Own, query.position);
            let v = self.op.places.v_run(page, self.kv_head, position, 1);
            C::decode(&self.v[v.start..v.start + v_dim], self.out(&query));
        }
    }

    /// A row that sees nothing gets zeros.
    pub fn see_nothing(&self) {
        self.queries.clone().for_each(|number| self.out(&self.query(number)).fill(0.0));
    }

    /// Lets queries `first..first + T` of the tile pass over a block; gives T.
    #[inline(always)]
    fn pass<S: Simd, const T: usize>(
        &mut self,
        simd: S,
        queries: &[Query; ITEM_QUERIES],
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
        let places = self.op.places;
        let (page, position) = self.op.step.place(self.run, self.op.shape.table, block * BLOCK);
        let k = &self.k[places.k_block(page, self.kv_head, position)];
        let v = &self.v[places.v_run(page, self.kv_head, position, BLOCK)];
        let scores = self.scores::<S, T>(simd, &queries[first..first + T], k);
        let mut p = [[0.0; BLOCK]; T];
        for t in 0..T {
            if !seen[t].is_empty() {
                let scores = self.adjusted(simd, &queries[first + t], block, scores[t]);
                p[t] = self.weigh(simd, first + t, seen[t], scores, weights);
            }
        }
        let sums = &mut self.sums[first * places.v_padded()..][..T * places.v_padded()];
        // What they see ascends, so between two alike all are alike.
        if seen[0] == seen[T - 1] {
            add_values::<S, C, T>(simd, seen[0], &p, v, sums);
        } else {
            for (t, sums) in sums.chunks_exact_mut(places.v_padded()).enumerate() {
                add_values::<S, C, 1>(simd, seen[t], &[p[t]], v, sums);
            }
        }
        T
    }

    /// The products of T query vectors with the 32 positions of k (k_dim, 32).
    #[inline(always)]
    fn scores<S: Simd, const T: usize>(&self, simd: S, queries: &[Query], k: &[C::Raw]) -> [[S::V; 2]; T] {
        let k_dim = self.op.places.layout.k_dim;
        let mut q = [&self.op.q[..0]; T];
        for (q, query) in q.iter_mut().zip(queries) {
            *q = &self.op.q[query.vector * k_dim..][..k_dim];
        }
        let mut scores = [[simd.splat(0.0); 2]; T];
        for (d, k) in k.as_chunks::<LANES>().0.as_chunks::<2>().0.iter().enumerate() {
            let k = [C::load(simd, &k[0]), C::load(simd, &k[1])];
            for t in 0..T {
                // SAFETY: k has k_dim pairs of vectors, and q[t] k_dim elements.
                let q = simd.splat(unsafe { *q[t].get_unchecked(d) });
                scores[t][0] = simd.mul_add(q, k[0], scores[t][0]);
                scores[t][1] = simd.mul_add(q, k[1], scores[t][1]);
            }
        }
        scores
    }

    /// Scores of products. What is rare is a call of its own, to keep the usual pass small.
    #[inline(always)]
    fn adjusted<S: Simd>(&self, simd: S, query: &Query, block: usize, products: [S::V; 2]) -> [S::V; 2] {
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
        let unseen = simd.splat(f32::NEG_INFINITY);
        let mut low = simd.first(seen.to, scores[0], unseen);
        let mut high = simd.first(seen.to.saturating_sub(LANES), scores[1], unseen);
        if seen.from > 0 {
            low = simd.first(seen.from, unseen, low);
            high = simd.first(seen.from.saturating_sub(LANES), unseen, high);
        }
        let before = weights.largest[query];
        let largest = before.max(simd.largest(simd.max(low, high)));
        if largest > before {
            let factor = exp(simd, simd.sub(simd.splat(before), simd.splat(largest)));
            weights.largest[query] = largest;
            weights.totals[query] = simd.mul(weights.totals[query], factor);
            let padded = self.op.places.v_padded();
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
    fn finish<S: Simd>(&self, simd: S, queries: &[Query], weights: &Weights<S>) {
        let padded = self.op.places.v_padded();
        for (i, (query, sums)) in queries.iter().zip(self.sums.chunks_exact(padded)).enumerate() {
            let total = simd.sum(weights.totals[i]);
            let total = simd.splat(if total == 0.0 { 1.0 } else { total });
            let out = self.out(query);
            for (sums, out) in sums.as_chunks::<LANES>().0.iter().zip(out.chunks_mut(LANES)) {
                store_part(simd, simd.div(simd.load(sums), total), out);
            }
        }
    }
}

impl<C: Code> Kernel for Tile<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let count = self.queries.len();
        let mut queries = [Query::default(); ITEM_QUERIES];
        for (query, number) in queries.iter_mut().zip(self.queries.clone()) {
            *query = self.query(number);
        }
        let mut weights =
            Weights { largest: [f32::NEG_INFINITY; ITEM_QUERIES], totals: [simd.splat(0.0); ITEM_QUERIES] };
        self.sums[..count * self.op.places.v_padded()].fill(0.0);
        for block in queries[0].from / BLOCK..queries[count - 1].to.div_ceil(BLOCK) {
            let mut first = 0;
            while first < count {
                first += match (count - first).min(S::TILE_QUERIES) {
                    8.. => self.pass::<S, 8>(simd, &queries, first, block, &mut weights),
                    4.. => self.pass::<S, 4>(simd, &queries, first, block, &mut weights),
                    2.. => self.pass::<S, 2>(simd, &queries, first, block, &mut weights),
                    _ => self.pass::<S, 1>(simd, &queries, first, block, &mut weights),
                };
            }
        }
        self.finish(simd, &queries[..count], &weights);
    }
}
