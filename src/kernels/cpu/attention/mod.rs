//! Attention: out = softmax(q · kᵀ · scale) · v over a paged KV cache, each row over the positions its mask
//! lets it see.
//!
//! Rows of generated tokens may use top-k sparse attention, which reads the values of some positions only
//! (`sparse.rs`). All other rows use dense attention with an online softmax: for each block of 32 positions,
//! in ascending order from the block of the first visible position, it updates the largest score, the weights
//! relative to it, and the sums, which are rescaled when the largest score changes. Query vectors that share
//! a KV head (heads of a group, neighbouring rows of a span) process a block together, so that it is loaded
//! and converted once.
//!
//! This is done separately for each split of 512 positions, and the results of the splits are merged in
//! ascending order (`partial.rs`). One thread does both for its query vectors, unless that would leave other
//! threads idle: then each split is a work item, and merging is a second job. The choice does not change any
//! result.
//!
//! Invariant: the arithmetic of a query vector is the same in whichever tile it is processed, and positions
//! that it does not see never enter it, even if they hold NaN.

#![allow(unsafe_code)]

mod cache;

mod dispatch;
mod float_blocks;
mod group_formats;
mod kv_format;
mod quantized_blocks;

mod plan;

mod adjust;
mod query;

mod partial;
mod pass;
mod sparse;
mod tile;

pub use cache::{copy_pages, kv_bytes, store_kv};
pub use plan::{SpanItems, partial_capacity};

use super::pool::{SharedSlice, ThreadPool};
use super::simd::{LANES, Level};
use crate::backend::{AttentionShape, KvLayer, KvLayout, StepLimits, ValueSource};
use crate::batch::StepState;
use crate::host::HostBuf;
use cache::CacheLayout;
use dispatch::{KvFormatOp, dispatch_kv_format};
use kv_format::KvFormat;
use partial::{MergeSplits, PartialResults};
use plan::{AttentionItem, AttentionMethod, WorkPlan};
use sparse::TopKAttention;
use tile::{QueryTile, SplitOutput};

/// Positions of a block.
const BLOCK: usize = KvLayout::BLOCK_POSITIONS;
/// Largest number of query vectors in one work item.
const ITEM_QUERIES: usize = 32;

/// Returns the F32 numbers of scratch that each thread needs for a cache, whatever the sequences: for each
/// query vector, the sums of values, the sums of its own numbers over groups, and the merged result of
/// earlier splits.
pub fn scratch_len(layout: &KvLayout) -> usize {
    struct Groups(usize);
    impl KvFormatOp for Groups {
        type Out = usize;
        fn run<C: KvFormat>(self) -> usize {
            summed_groups::<C>(self.0)
        }
    }
    let groups = dispatch_kv_format(layout.ty, Groups(layout.k_dim));
    ITEM_QUERIES * (padded_len(layout.v_dim) + groups + partial_len(layout))
}

/// Returns the F32 numbers of a partial result for a cache; [`partial_capacity`] returns the number of such
/// results.
pub fn partial_len(layout: &KvLayout) -> usize {
    partial::len(layout.v_dim)
}

/// Returns the F32 numbers of additional scratch that each thread needs for top-k sparse attention, whatever
/// the cache.
pub fn sparse_scratch_len(limits: &StepLimits) -> usize {
    if limits.attended_fraction.is_one() { 0 } else { sparse::scratch_len(limits.positions) }
}

/// Returns the length of a value vector, padded to whole SIMD vectors.
fn padded_len(v_dim: usize) -> usize {
    v_dim.next_multiple_of(LANES)
}

/// Returns the number of groups of a query vector whose sums are needed.
fn summed_groups<C: KvFormat>(k_dim: usize) -> usize {
    k_dim.div_ceil(C::SUMMED_GROUP.max(1)) * C::SUMMED_GROUP.min(1)
}

/// Inputs of an attention operation.
pub struct AttentionInputs<'a> {
    pub shape: &'a AttentionShape<'a, HostBuf>,
    /// (rows, heads, k_dim).
    pub q: &'a [f32],
    pub cache: &'a KvLayer<HostBuf>,
    /// The source of V on pages that the cache lacks; `None` if it has all.
    pub values: Option<&'a dyn ValueSource>,
}

/// Computes attention to `out` (rows, heads, v_dim). `span_items` is overwritten, and has capacity for all
/// spans of a step. `scratch` holds `scratch_len` and `sparse_scratch_len` numbers per thread; the remainder
/// is used for partial results.
pub fn attention(
    pool: &mut ThreadPool,
    level: Level,
    step: &StepState,
    inputs: AttentionInputs,
    out: &mut [f32],
    (span_items, scratch): (&mut Vec<SpanItems>, &mut [f32]),
) {
    let AttentionInputs { shape, q, cache, values } = inputs;
    let layout = cache.layout;
    assert!(
        shape.heads.is_multiple_of(layout.kv_heads),
        "the number of query heads is a multiple of the number of KV heads"
    );
    assert_eq!(
        layout.page_positions, step.limits.page_positions,
        "the cache and the step have the same page size"
    );
    shape.assert_valid();
    assert!(
        shape.bias.is_none_or(|bias| bias.heads == shape.heads),
        "the relative position bias has one row per head"
    );
    let group = shape.heads / layout.kv_heads;
    let thread_len = scratch_len(&layout) + sparse_scratch_len(&step.limits);
    let threads = pool.threads();
    let capacity = (scratch.len() - threads * thread_len) / partial_len(&layout);
    let plan = WorkPlan::new((step, span_items), shape, layout.kv_heads, threads, capacity);
    let (out, scratch) = (SharedSlice::new(out), SharedSlice::new(scratch));
    let op = Attention { step, span_items, shape, group, layout, q, cache, values, out };
    let covers = |reach: Option<usize>| reach.is_none_or(|reach| op.covers_relative_positions(reach));
    assert!(covers(shape.bias.map(|bias| bias.reach)), "the relative position bias covers every distance");
    if let Some(distances) = &shape.distances {
        assert!(covers(Some(distances.buckets.reach)), "there is a bucket for every distance");
    }
    dispatch_kv_format(layout.ty, RunAttention { pool, level, op: &op, plan, scratch, thread_len });
}

/// An attention operation, shared by the threads.
struct Attention<'a> {
    step: &'a StepState,
    /// The work items of each span.
    span_items: &'a [SpanItems],
    shape: &'a AttentionShape<'a, HostBuf>,
    /// Query heads per KV head.
    group: usize,
    layout: KvLayout,
    q: &'a [f32],
    cache: &'a KvLayer<HostBuf>,
    values: Option<&'a dyn ValueSource>,
    out: SharedSlice<'a, f32>,
}

/// Runs an attention operation for the storage format of its cache.
struct RunAttention<'a, 'b> {
    pool: &'a mut ThreadPool,
    level: Level,
    op: &'a Attention<'b>,
    plan: WorkPlan,
    /// Scratch of each thread (threads, thread_len), followed by the partial results.
    scratch: SharedSlice<'a, f32>,
    thread_len: usize,
}

impl KvFormatOp for RunAttention<'_, '_> {
    type Out = ();

    fn run<C: KvFormat>(self) {
        let RunAttention { pool, level, op, plan, scratch, thread_len } = self;
        let places = CacheLayout::new::<C>(op.layout);
        let start = pool.threads() * thread_len;
        let partials = PartialResults { numbers: &scratch, start, len: partial_len(&op.layout) };
        pool.run(plan.items, |worker, item| {
            // SAFETY: each worker has its own scratch and is in one item at a time.
            let scratch = unsafe { scratch.slice_mut(worker * thread_len..(worker + 1) * thread_len) };
            attend::<C>(level, op, places, op.item(item), (scratch, partials));
        });
        pool.run(plan.merges, |_, tile| {
            let AttentionItem { span, kv_head, queries, split_results: results } = op.tile(tile);
            if let Some(results) = results {
                level.run(MergeSplits { op, span, kv_head, queries, results, partials });
            }
        });
    }
}

/// Computes one work item, with a thread's scratch.
fn attend<C: KvFormat>(
    level: Level,
    op: &Attention,
    places: CacheLayout,
    item: AttentionItem,
    (scratch, partials): (&mut [f32], PartialResults),
) {
    let (scratch, scores) = scratch.split_at_mut(scratch_len(&op.layout));
    let (sums, scratch) = scratch.split_at_mut(ITEM_QUERIES * padded_len(op.layout.v_dim));
    let (merged, q_sums) = scratch.split_at_mut(ITEM_QUERIES * partials.len);
    let AttentionItem { span, kv_head, queries, split_results: results } = item;
    let output = match results {
        Some(results) => SplitOutput::Separate(results, partials),
        None => SplitOutput::Merged(merged),
    };
    let k = C::units(&op.cache.k);
    let v = if op.layout.v_in_k { k } else { C::units(&op.cache.v) };
    let tile = QueryTile::<C> {
        op,
        cache_layout: places,
        k,
        v,
        span,
        kv_head,
        queries,
        sums,
        q_sums,
        split_output: output,
    };
    match AttentionMethod::for_span(&op.step.limits, op.shape.table, span) {
        AttentionMethod::Zero => tile.write_zeros(),
        AttentionMethod::OwnValue => tile.copy_own_value(),
        AttentionMethod::TopK => level.run(TopKAttention { tile, scores }),
        AttentionMethod::Dense => level.run(tile),
    }
}

impl Attention<'_> {
    /// Returns how many numbers are stored of a value.
    fn value_width(&self) -> usize {
        if self.layout.v_in_k { self.layout.k_dim } else { self.layout.v_dim }
    }

    /// Returns whether every position that a row sees is nearer than `reach`.
    fn covers_relative_positions(&self, reach: usize) -> bool {
        self.step.rows().iter().all(|row| {
            let seen = plan::visible_positions(self.shape, self.step.span_of(row), row.position);
            seen.is_empty() || seen.end <= row.position + reach && row.position < seen.start + reach
        })
    }
}
