//! The KV cache's layout, writing to it, and out = softmax(q · kᵀ · scale) · v over it.
//!
//! K is (pages, kv_heads, blocks, k_dim, 32): 32 positions lie side by side, so that their scores are lanes
//! of a vector. V is (pages, kv_heads, positions, v_dim padded to 16), so that a position's values are.
//!
//! The softmax runs along: for each block of 32 positions, in ascending order, the largest score so far, the
//! weights relative to it, and the sums so far scaled to it. Several query vectors that share a KV head (heads
//! of a group, neighbouring rows of a span) pass over a block together, so that it is loaded and
//! converted once.
//!
//! Invariant: a query vector's arithmetic is the same in whichever tile it passes, and positions it does
//! not see enter nothing, be they NaN.

#![allow(unsafe_code)]

use super::pool::{Parts, Pool};
use super::simd::{Code, ForCode, Kernel, LANES, Level, Simd, exp, store_part, with_code};
use super::step::{Run, Step};
use crate::backend::{AttentionShape, DeviceError, KvLayer, KvLayout};
use crate::batch::{PageCopy, SINK_PAGE};
use crate::host::HostBuf;
use std::ops::Range;

const BLOCK: usize = KvLayout::BLOCK;
/// Query vectors of one work item.
const ITEM_QUERIES: usize = 32;

/// Where things lie in a layer's cache, in elements.
#[derive(Clone, Copy)]
struct Places {
    layout: KvLayout,
}

impl Places {
    fn v_padded(&self) -> usize {
        self.layout.v_dim.next_multiple_of(LANES)
    }

    /// Elements of one page of K, and of V, for one head.
    fn head_lens(&self) -> (usize, usize) {
        (self.layout.page_positions * self.layout.k_dim, self.layout.page_positions * self.v_padded())
    }

    /// K (k_dim, 32) of the block of `position`.
    fn k_block(&self, page: u32, head: usize, position: usize) -> Range<usize> {
        let block = position % self.layout.page_positions / BLOCK;
        let at = self.head(page, head) * self.head_lens().0 + block * BLOCK * self.layout.k_dim;
        at..at + BLOCK * self.layout.k_dim
    }

    /// V (n, v_padded) of `n` positions from `position` on, all in one page.
    fn v_run(&self, page: u32, head: usize, position: usize, n: usize) -> Range<usize> {
        let in_page = position % self.layout.page_positions;
        let at = self.head(page, head) * self.head_lens().1 + in_page * self.v_padded();
        at..at + n * self.v_padded()
    }

    fn head(&self, page: u32, head: usize) -> usize {
        assert!((page as usize) < self.layout.pages, "page {page} is outside the pool");
        page as usize * self.layout.kv_heads + head
    }
}

/// Allocates one layer's cache.
pub fn alloc_kv(layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
    assert!(layout.page_positions.is_multiple_of(BLOCK), "pages hold whole blocks");
    let (k_len, v_len) = Places { layout }.head_lens();
    let allocate = |len: usize| {
        let elements = layout.pages.checked_mul(layout.kv_heads).and_then(|heads| heads.checked_mul(len));
        let bytes = elements.and_then(|elements| layout.ty.bytes(elements));
        HostBuf::zeroed(bytes.ok_or_else(|| DeviceError::OutOfMemory {
            bytes: usize::MAX,
            reason: "the KV cache is larger than the address space".into(),
        })?)
    };
    Ok(KvLayer { k: allocate(k_len)?, v: allocate(v_len)?, layout })
}

/// F32 numbers of scratch that each thread needs for heads of `v_dim`.
pub fn scratch_len(v_dim: usize) -> usize {
    ITEM_QUERIES * v_dim.next_multiple_of(LANES)
}

/// Copies whole pages.
pub fn copy_pages(copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
    for buf in [&mut cache.k, &mut cache.v] {
        let page = buf.len() / cache.layout.pages;
        for copy in copies {
            let from = copy.from as usize * page;
            buf.bytes_mut().copy_within(from..from + page, copy.to as usize * page);
        }
    }
}

/// Writes k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) to their rows' positions.
pub fn store_kv(pool: &mut Pool, step: &Step, k: &[f32], v: &[f32], cache: &mut KvLayer<HostBuf>) {
    with_code(cache.layout.ty, Store { pool, step, k, v, cache });
}

struct Store<'a> {
    pool: &'a mut Pool,
    step: &'a Step,
    k: &'a [f32],
    v: &'a [f32],
    cache: &'a mut KvLayer<HostBuf>,
}

impl ForCode for Store<'_> {
    type Out = ();

    /// An item is a KV head: rows may share a page (the sink), heads share nothing.
    fn run<C: Code>(self) {
        let layout = self.cache.layout;
        let places = Places { layout };
        let (k_cache, v_cache) =
            (Parts::new(C::of_mut(&mut self.cache.k)), Parts::new(C::of_mut(&mut self.cache.v)));
        let (step, k, v) = (self.step, self.k, self.v);
        self.pool.run(layout.kv_heads, |_, head| {
            for (r, row) in step.rows.iter().enumerate() {
                let page = step.page(&step.spans[row.span as usize], row.position);
                let (k_at, v_at) =
                    (places.k_block(page, head, row.position), places.v_run(page, head, row.position, 1));
                // SAFETY: both ranges lie in the part of this head, which is this item's alone.
                let (k_to, v_to) =
                    unsafe { (k_cache.part(k_at), v_cache.part(v_at.start..v_at.start + layout.v_dim)) };
                let from = r * layout.kv_heads + head;
                scatter::<C>(&k[from * layout.k_dim..][..layout.k_dim], row.position % BLOCK, k_to);
                C::encode(&v[from * layout.v_dim..][..layout.v_dim], v_to);
            }
        });
    }
}

/// Writes `values` (k_dim) to column `column` of a block (k_dim, 32).
fn scatter<C: Code>(values: &[f32], column: usize, block: &mut [C::Raw]) {
    let mut codes = [C::Raw::default(); 4 * LANES];
    let blocks = block.chunks_mut(codes.len() * BLOCK);
    for (values, block) in values.chunks(codes.len()).zip(blocks) {
        C::encode(values, &mut codes[..values.len()]);
        for (code, dim) in codes.iter().zip(block.chunks_exact_mut(BLOCK)) {
            dim[column] = *code;
        }
    }
}

/// What attention reads.
pub struct Inputs<'a> {
    pub shape: &'a AttentionShape,
    /// (rows, heads, k_dim).
    pub q: &'a [f32],
    pub cache: &'a KvLayer<HostBuf>,
}

/// out (rows, heads, v_dim). `scratch` holds `scratch_len` numbers per thread.
pub fn attention(
    pool: &mut Pool,
    level: Level,
    step: &mut Step,
    inputs: Inputs,
    out: &mut [f32],
    scratch: &mut [f32],
) {
    let Inputs { shape, q, cache } = inputs;
    let layout = cache.layout;
    assert!(shape.heads.is_multiple_of(layout.kv_heads), "query heads share KV heads evenly");
    assert_eq!(layout.page_positions, step.limits.page_positions, "pages of one size");
    let group = shape.heads / layout.kv_heads;
    let mut items = 0;
    step.item_ends.clear();
    for span in &step.spans {
        items += layout.kv_heads * (span.len * group).div_ceil(ITEM_QUERIES);
        step.item_ends.push(items);
    }
    let (out, scratch) = (Parts::new(out), Parts::new(scratch));
    let op = Attention { step, shape, group, places: Places { layout }, q, cache, out };
    with_code(layout.ty, Attend { pool, level, op: &op, items, scratch });
}

/// One attention operation, as the threads see it.
struct Attention<'a> {
    step: &'a Step,
    shape: &'a AttentionShape,
    /// Query heads of a KV head.
    group: usize,
    places: Places,
    q: &'a [f32],
    cache: &'a KvLayer<HostBuf>,
    out: Parts<'a, f32>,
}

struct Attend<'a, 'b> {
    pool: &'a mut Pool,
    level: Level,
    op: &'a Attention<'b>,
    items: usize,
    scratch: Parts<'a, f32>,
}

impl ForCode for Attend<'_, '_> {
    type Out = ();

    fn run<C: Code>(self) {
        let (op, layout) = (self.op, self.op.places.layout);
        let scratch_len = scratch_len(layout.v_dim);
        let (k, v) = (C::of(&op.cache.k), C::of(&op.cache.v));
        self.pool.run(self.items, |worker, item| {
            let (run, kv_head, queries) = op.item(item);
            // SAFETY: each worker has its own scratch and is in one item at a time.
            let sums = unsafe { self.scratch.part(worker * scratch_len..(worker + 1) * scratch_len) };
            let tile = Tile::<C> { op, k, v, run, kv_head, queries, sums };
            if run.is_sink {
                tile.copy_own_value();
            } else {
                self.level.run(tile);
            }
        });
    }
}

impl Attention<'_> {
    /// What work item `item` is: a span, a KV head, and which of the span's query vectors for that head,
    /// counted by row and then by head of the group.
    fn item(&self, item: usize) -> (Run, usize, Range<usize>) {
        let ends = &self.step.item_ends;
        let span = ends.partition_point(|&end| end <= item);
        let run = self.step.spans[span];
        let within = item - if span == 0 { 0 } else { ends[span - 1] };
        let kv_heads = self.places.layout.kv_heads;
        let first = within / kv_heads * ITEM_QUERIES;
        (run, within % kv_heads, first..(first + ITEM_QUERIES).min(run.len * self.group))
    }
}

/// Query vectors of one span that share a KV head.
struct Tile<'a, 'b, C: Code> {
    op: &'a Attention<'b>,
    k: &'a [C::Raw],
    v: &'a [C::Raw],
    run: Run,
    kv_head: usize,
    queries: Range<usize>,
    /// (queries, v_padded): the sums of weighted values.
    sums: &'a mut [f32],
}

/// What a query vector has besides its sums: the largest score so far, and the sum of the weights, by lane.
struct Weights<S: Simd> {
    largest: [f32; ITEM_QUERIES],
    totals: [S::V; ITEM_QUERIES],
}

impl<C: Code> Tile<'_, '_, C> {
    /// Row and head of query vector `query`, as one index into (rows, heads).
    #[inline(always)]
    fn vector(&self, query: usize) -> usize {
        let row = self.run.first_row + query / self.op.group;
        row * self.op.shape.heads + self.kv_head * self.op.group + query % self.op.group
    }

    /// The last position that a query vector sees.
    #[inline(always)]
    fn position(&self, query: usize) -> usize {
        self.run.start + query / self.op.group
    }

    /// How many of the block's positions a query vector sees.
    #[inline(always)]
    fn seen(&self, query: usize, block: usize) -> usize {
        (self.position(query) + 1).saturating_sub(block * BLOCK).min(BLOCK)
    }

    /// A row that sees itself alone gets its own value, whatever the score.
    fn copy_own_value(&self) {
        let v_dim = self.op.places.layout.v_dim;
        for query in self.queries.clone() {
            let v = self.op.places.v_run(SINK_PAGE, self.kv_head, self.position(query), 1);
            // SAFETY: a query vector belongs to one item, and so does its place in `out`.
            let out =
                unsafe { self.op.out.part(self.vector(query) * v_dim..(self.vector(query) + 1) * v_dim) };
            C::decode(&self.v[v.start..v.start + v_dim], out);
        }
    }

    /// Lets queries `first..first + T` pass over a block; gives T.
    #[inline(always)]
    fn pass<S: Simd, const T: usize>(
        &mut self,
        simd: S,
        first: usize,
        block: usize,
        weights: &mut Weights<S>,
    ) -> usize {
        let (places, at) = (self.op.places, block * BLOCK);
        let page = self.op.step.page(&self.run, at);
        let k = &self.k[places.k_block(page, self.kv_head, at)];
        let v = &self.v[places.v_run(page, self.kv_head, at, BLOCK)];
        let scores = self.scores::<S, T>(simd, first, k);
        let mut p = [[0.0; BLOCK]; T];
        let mut seen = [0; T];
        for t in 0..T {
            seen[t] = self.seen(first + t, block);
            if seen[t] > 0 {
                p[t] = self.weigh(simd, first + t - self.queries.start, seen[t], scores[t], weights);
            }
        }
        let at = (first - self.queries.start) * places.v_padded();
        let sums = &mut self.sums[at..][..T * places.v_padded()];
        if seen[0] == seen[T - 1] {
            add_values::<S, C, T>(simd, seen[0], &p, v, sums);
        } else {
            for (t, sums) in sums.chunks_exact_mut(places.v_padded()).enumerate() {
                add_values::<S, C, 1>(simd, seen[t], &[p[t]], v, sums);
            }
        }
        T
    }

    /// The scores of T query vectors with the 32 positions of k (k_dim, 32), before scaling.
    #[inline(always)]
    fn scores<S: Simd, const T: usize>(&self, simd: S, first: usize, k: &[C::Raw]) -> [[S::V; 2]; T] {
        let k_dim = self.op.places.layout.k_dim;
        let mut q = [&self.op.q[..0]; T];
        for (t, q) in q.iter_mut().enumerate() {
            *q = &self.op.q[self.vector(first + t) * k_dim..][..k_dim];
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

    /// Weights of the `seen` first positions of a block for query number `query` of the tile, relative to
    /// the largest score so far; what was summed relative to an earlier one is scaled to it.
    #[inline(always)]
    fn weigh<S: Simd>(
        &mut self,
        simd: S,
        query: usize,
        seen: usize,
        scores: [S::V; 2],
        weights: &mut Weights<S>,
    ) -> [f32; BLOCK] {
        let (scale, unseen) = (simd.splat(self.op.shape.scale), simd.splat(f32::NEG_INFINITY));
        let low = simd.first(seen, simd.mul(scores[0], scale), unseen);
        let high = simd.first(seen.saturating_sub(LANES), simd.mul(scores[1], scale), unseen);
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
}

impl<C: Code> Kernel for Tile<'_, '_, C> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, simd: S) {
        let (v_dim, padded) = (self.op.places.layout.v_dim, self.op.places.v_padded());
        let mut weights =
            Weights { largest: [f32::NEG_INFINITY; ITEM_QUERIES], totals: [simd.splat(0.0); ITEM_QUERIES] };
        self.sums[..self.queries.len() * padded].fill(0.0);
        for block in 0..=self.position(self.queries.end - 1) / BLOCK {
            let mut first = self.queries.start;
            while first < self.queries.end {
                let left = (self.queries.end - first).min(S::TILE_QUERIES);
                first += match left {
                    8.. => self.pass::<S, 8>(simd, first, block, &mut weights),
                    4.. => self.pass::<S, 4>(simd, first, block, &mut weights),
                    2.. => self.pass::<S, 2>(simd, first, block, &mut weights),
                    _ => self.pass::<S, 1>(simd, first, block, &mut weights),
                };
            }
        }
        for (i, sums) in self.sums.chunks_exact(padded).take(self.queries.len()).enumerate() {
            let total = simd.splat(simd.sum(weights.totals[i]));
            let at = self.vector(self.queries.start + i) * v_dim;
            // SAFETY: a query vector belongs to one item, and so does its place in `out`.
            let out = unsafe { self.op.out.part(at..at + v_dim) };
            for (sums, out) in sums.as_chunks::<LANES>().0.iter().zip(out.chunks_mut(LANES)) {
                store_part(simd, simd.div(simd.load(sums), total), out);
            }
        }
    }
}

/// sums (T, v_padded) += p (T, n of 32) · v (n of 32, v_padded).
#[inline(always)]
fn add_values<S: Simd, C: Code, const T: usize>(
    simd: S,
    n: usize,
    p: &[[f32; BLOCK]; T],
    v: &[C::Raw],
    sums: &mut [f32],
) {
    let vectors = sums.len() / T / LANES;
    let mut at = 0;
    while at + 2 <= vectors {
        at += add_columns::<S, C, T, 2>(simd, n, p, v, sums, at);
    }
    if at < vectors {
        add_columns::<S, C, T, 1>(simd, n, p, v, sums, at);
    }
}

/// The W vectors of columns from `at` on; gives W.
#[inline(always)]
fn add_columns<S: Simd, C: Code, const T: usize, const W: usize>(
    simd: S,
    n: usize,
    p: &[[f32; BLOCK]; T],
    v: &[C::Raw],
    sums: &mut [f32],
    at: usize,
) -> usize {
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let vectors = sums.len() / T;
    let mut totals = [[simd.splat(0.0); W]; T];
    for t in 0..T {
        for w in 0..W {
            totals[t][w] = simd.load(&sums[t * vectors + at + w]);
        }
    }
    let (v, _) = v.as_chunks::<LANES>();
    for j in 0..n {
        let mut values = [simd.splat(0.0); W];
        for w in 0..W {
            values[w] = C::load(simd, &v[j * vectors + at + w]);
        }
        for t in 0..T {
            let p = simd.splat(p[t][j]);
            for w in 0..W {
                totals[t][w] = simd.mul_add(p, values[w], totals[t][w]);
            }
        }
    }
    for t in 0..T {
        for w in 0..W {
            simd.store(totals[t][w], &mut sums[t * vectors + at + w]);
        }
    }
    W
}
