//! out = softmax(q · kᵀ · scale) · v over a paged cache, each row over the positions its mask lets it see.
//!
//! Rows of drawn tokens may take the values of some positions only; they go another way (`sparse.rs`). All others are dense:
//! the softmax runs along: for each block of 32 positions, in ascending order from the block of the first position
//! seen, the largest score so far, the weights relative to it, and the sums so far scaled to it. Several query vectors
//! that share a KV head (heads of a group, neighbouring rows of a span) pass over a block together, so that it is
//! loaded and converted once.
//!
//! Invariant: a query vector's arithmetic is the same in whichever tile it passes, and positions it does
//! not see enter nothing, be they NaN.

#![allow(unsafe_code)]

mod cache;

mod grouped;
mod plain;
mod stored;

mod adjust;
mod sparse;
mod tile;

pub use cache::{alloc_kv, copy_pages, store_kv};

use super::pool::{Parts, Pool};
use super::simd::{LANES, Level};
use super::step::{Run, Step};
use crate::backend::{AttentionShape, KvLayer, KvLayout, KvTable, Mask, StepLimits};
use crate::batch::SpanTable;
use crate::host::HostBuf;
use cache::Places;
use sparse::Sparse;
use std::ops::Range;
use stored::{ForStored, Stored, with_stored};
use tile::Tile;

/// Query vectors of one work item.
const ITEM_QUERIES: usize = 32;

/// F32 numbers of scratch that each thread needs for a cache, whatever the sequences: for each query vector its sums of values, and those of its own
/// numbers over groups.
pub fn scratch_len(layout: &KvLayout) -> usize {
    struct Groups(usize);
    impl ForStored for Groups {
        type Out = usize;
        fn run<C: Stored>(self) -> usize {
            groups::<C>(self.0)
        }
    }
    ITEM_QUERIES * (padded(layout.v_dim) + with_stored(layout.ty, Groups(layout.k_dim)))
}

/// The same for positions of which not all are attended to, whatever the cache.
pub fn sparse_scratch_len(limits: &StepLimits) -> usize {
    if limits.attended.is_all() { 0 } else { sparse::scratch_len(limits.positions) }
}

/// A value's numbers, and those that fill its last vector.
fn padded(v_dim: usize) -> usize {
    v_dim.next_multiple_of(LANES)
}

/// Groups of a query vector of so many numbers whose sums are needed.
fn groups<C: Stored>(k_dim: usize) -> usize {
    k_dim.div_ceil(C::SUMMED.max(1)) * C::SUMMED.min(1)
}

/// What attention reads.
pub struct Inputs<'a> {
    pub shape: &'a AttentionShape<'a, HostBuf>,
    /// (rows, heads, k_dim).
    pub q: &'a [f32],
    pub cache: &'a KvLayer<HostBuf>,
}

/// out (rows, heads, v_dim). `scratch` holds `scratch_len` and `sparse_scratch_len` numbers per thread, or more.
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
    assert!(shape.mask.suits(shape.table), "{:?} has no meaning over {:?}", shape.mask, shape.table);
    assert!(shape.bias.is_none_or(|bias| bias.heads == shape.heads), "a bias for each head");
    let group = shape.heads / layout.kv_heads;
    let items = number_items(step, layout.kv_heads, group);
    let (out, scratch) = (Parts::new(out), Parts::new(scratch));
    let op = Attention { step, shape, group, layout, q, cache, out };
    assert!(op.is_reached(), "the bias reaches every distance");
    with_stored(layout.ty, Attend { pool, level, op: &op, items, scratch });
}

/// Notes each run's share of the work items; gives their number.
fn number_items(step: &mut Step, kv_heads: usize, group: usize) -> usize {
    let mut ends = std::mem::take(&mut step.item_ends);
    let mut items = 0;
    ends.clear();
    for run in step.runs() {
        items += kv_heads * (run.len * group).div_ceil(ITEM_QUERIES);
        ends.push(items);
    }
    step.item_ends = ends;
    items
}

/// One attention operation, as the threads see it.
struct Attention<'a> {
    step: &'a Step,
    shape: &'a AttentionShape<'a, HostBuf>,
    /// Query heads of a KV head.
    group: usize,
    layout: KvLayout,
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

impl ForStored for Attend<'_, '_> {
    type Out = ();

    fn run<C: Stored>(self) {
        let op = self.op;
        let places = Places::new::<C>(op.layout);
        let (tile_len, sparse_len) = (scratch_len(&op.layout), sparse_scratch_len(&op.step.limits));
        let len = tile_len + sparse_len;
        let (k, v) = (C::of(&op.cache.k), C::of(&op.cache.v));
        self.pool.run(self.items, |worker, item| {
            let (run, kv_head, queries) = op.item(item);
            // SAFETY: each worker has its own scratch and is in one item at a time.
            let scratch = unsafe { self.scratch.part(worker * len..(worker + 1) * len) };
            let (scratch, scores) = scratch.split_at_mut(tile_len);
            let (sums, q_sums) = scratch.split_at_mut(ITEM_QUERIES * padded(op.layout.v_dim));
            let tile = Tile::<C> { op, places, k, v, run, kv_head, queries, sums, q_sums };
            match (run.table, op.shape.table) {
                (SpanTable::Sink, KvTable::Cross) => tile.see_nothing(),
                (SpanTable::Sink, _) => tile.copy_own_value(),
                (SpanTable::Own, KvTable::Own) if run.drawn && sparse_len > 0 => {
                    self.level.run(Sparse { tile, scores });
                }
                _ => self.level.run(tile),
            }
        });
    }
}

impl<'a> Attention<'a> {
    /// What work item `item` is: a run, a KV head, and which of the run's query vectors for that head,
    /// counted by row and then by head of the group.
    fn item(&self, item: usize) -> (&'a Run, usize, Range<usize>) {
        let ends = &self.step.item_ends;
        let number = ends.partition_point(|&end| end <= item);
        let run = &self.step.runs()[number];
        let within = item - if number == 0 { 0 } else { ends[number - 1] };
        let kv_heads = self.layout.kv_heads;
        let first = within / kv_heads * ITEM_QUERIES;
        (run, within % kv_heads, first..(first + ITEM_QUERIES).min(run.len * self.group))
    }

    /// Whether the bias, if there is one, has an entry for every position that a row sees.
    fn is_reached(&self) -> bool {
        let Some(bias) = self.shape.bias else { return true };
        self.step.rows().iter().all(|row| {
            let seen = self.seen(self.step.run_of(row), row.position);
            seen.is_empty() || seen.end <= row.position + bias.reach && row.position < seen.start + bias.reach
        })
    }

    /// The positions that a row of the run sees from `position`.
    fn seen(&self, run: &Run, position: usize) -> Range<usize> {
        let (before, end) = match (self.shape.mask, self.shape.table) {
            (Mask::Causal { window }, _) => (window.map(|window| window - 1), position + 1),
            (Mask::Whole { window }, table) => {
                let whole = if table == KvTable::Cross { run.source } else { run.len };
                (window, window.map_or(whole, |after| whole.min(position + after + 1)))
            }
        };
        let first = before.map_or(0, |before| position.saturating_sub(before));
        first.min(end)..end
    }
}
