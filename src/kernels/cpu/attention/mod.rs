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

mod grouped;
mod plain;
mod stored;

mod plan;

mod adjust;
mod query;

mod partial;
mod pass;
mod sparse;
mod tile;

pub use cache::{alloc_kv, copy_pages, store_kv};
pub use plan::{RunItems, partials};

use super::pool::{Parts, Pool};
use super::simd::{LANES, Level};
use super::step::Step;
use crate::backend::{AttentionShape, KvLayer, KvLayout, StepLimits};
use crate::host::HostBuf;
use cache::{BLOCK, Places};
use partial::{Fold, Partials};
use plan::{Item, Plan, Way};
use sparse::Sparse;
use stored::{ForStored, Stored, with_stored};
use tile::{Kept, Tile};

/// Largest number of query vectors in one work item.
const ITEM_QUERIES: usize = 32;

/// Returns the F32 numbers of scratch that each thread needs for a cache, whatever the sequences: for each
/// query vector, the sums of values, the sums of its own numbers over groups, and the merged result of
/// earlier splits.
pub fn scratch_len(layout: &KvLayout) -> usize {
    struct Groups(usize);
    impl ForStored for Groups {
        type Out = usize;
        fn run<C: Stored>(self) -> usize {
            groups::<C>(self.0)
        }
    }
    let groups = with_stored(layout.ty, Groups(layout.k_dim));
    ITEM_QUERIES * (padded(layout.v_dim) + groups + partial_len(layout))
}

/// Returns the F32 numbers of a partial result for a cache; [`partial_capacity`] returns the number of such
/// results.
pub fn partial_len(layout: &KvLayout) -> usize {
    partial::len(layout.v_dim)
}

/// Returns the F32 numbers of additional scratch that each thread needs for top-k sparse attention, whatever
/// the cache.
pub fn sparse_scratch_len(limits: &StepLimits) -> usize {
    if limits.attended.is_all() { 0 } else { sparse::scratch_len(limits.positions) }
}

/// Returns the length of a value vector, padded to whole SIMD vectors.
fn padded(v_dim: usize) -> usize {
    v_dim.next_multiple_of(LANES)
}

/// Returns the number of groups of a query vector whose sums are needed.
fn groups<C: Stored>(k_dim: usize) -> usize {
    k_dim.div_ceil(C::SUMMED.max(1)) * C::SUMMED.min(1)
}

/// Inputs of an attention operation.
pub struct Inputs<'a> {
    pub shape: &'a AttentionShape<'a, HostBuf>,
    /// (rows, heads, k_dim).
    pub q: &'a [f32],
    pub cache: &'a KvLayer<HostBuf>,
}

/// Computes attention to `out` (rows, heads, v_dim). `scratch` holds `scratch_len` and `sparse_scratch_len`
/// numbers per thread; the remainder is used for partial results.
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
    assert!(
        shape.heads.is_multiple_of(layout.kv_heads),
        "the number of query heads is a multiple of the number of KV heads"
    );
    assert_eq!(
        layout.page_positions, step.limits.page_positions,
        "the cache and the step have the same page size"
    );
    assert!(
        shape.mask.suits(shape.table),
        "mask {:?} cannot be used with page table {:?}",
        shape.mask,
        shape.table
    );
    assert!(
        shape.bias.is_none_or(|bias| bias.heads == shape.heads),
        "the relative position bias has one row per head"
    );
    let group = shape.heads / layout.kv_heads;
    let thread_len = scratch_len(&layout) + sparse_scratch_len(&step.limits);
    let threads = pool.threads();
    let capacity = (scratch.len() - threads * thread_len) / partial_len(&layout);
    let plan = Plan::new(step, shape, layout.kv_heads, threads, capacity);
    let (out, scratch) = (Parts::new(out), Parts::new(scratch));
    let op = Attention { step, shape, group, layout, q, cache, out };
    assert!(op.is_reached(), "the relative position bias covers every distance");
    with_stored(layout.ty, Attend { pool, level, op: &op, plan, scratch, thread_len });
}

/// An attention operation, shared by the threads.
struct Attention<'a> {
    step: &'a Step,
    shape: &'a AttentionShape<'a, HostBuf>,
    /// Query heads per KV head.
    group: usize,
    layout: KvLayout,
    q: &'a [f32],
    cache: &'a KvLayer<HostBuf>,
    out: Parts<'a, f32>,
}

/// Runs an attention operation for the storage format of its cache.
struct Attend<'a, 'b> {
    pool: &'a mut Pool,
    level: Level,
    op: &'a Attention<'b>,
    plan: Plan,
    /// Scratch of each thread (threads, thread_len), followed by the partial results.
    scratch: Parts<'a, f32>,
    thread_len: usize,
}

impl ForStored for Attend<'_, '_> {
    type Out = ();

    fn run<C: Stored>(self) {
        let Attend { pool, level, op, plan, scratch, thread_len } = self;
        let places = Places::new::<C>(op.layout);
        let start = pool.threads() * thread_len;
        let partials = Partials { numbers: &scratch, start, len: partial_len(&op.layout) };
        pool.run(plan.items, |worker, item| {
            // SAFETY: each worker has its own scratch and is in one item at a time.
            let scratch = unsafe { scratch.part(worker * thread_len..(worker + 1) * thread_len) };
            attend::<C>(level, op, places, op.item(item), (scratch, partials));
        });
        pool.run(plan.folds, |_, tile| {
            let Item { run: span, kv_head, queries, apart: results } = op.tile(tile);
            if let Some(results) = results {
                level.run(Fold { op, span, kv_head, queries, apart: results, partials });
            }
        });
    }
}

/// Computes one work item, with a thread's scratch.
fn attend<C: Stored>(
    level: Level,
    op: &Attention,
    places: Places,
    item: Item,
    (scratch, partials): (&mut [f32], Partials),
) {
    let (scratch, scores) = scratch.split_at_mut(scratch_len(&op.layout));
    let (sums, scratch) = scratch.split_at_mut(ITEM_QUERIES * padded(op.layout.v_dim));
    let (merged, q_sums) = scratch.split_at_mut(ITEM_QUERIES * partials.len);
    let Item { run: span, kv_head, queries, apart: results } = item;
    let output = match results {
        Some(results) => Kept::Apart(results, partials),
        None => Kept::Folded(merged),
    };
    let (k, v) = (C::of(&op.cache.k), C::of(&op.cache.v));
    let tile = Tile::<C> { op, places, k, v, span, kv_head, queries, sums, q_sums, kept: output };
    match Way::of(&op.step.limits, op.shape.table, span) {
        Way::Nothing => tile.see_nothing(),
        Way::OwnValue => tile.copy_own_value(),
        Way::Some => level.run(Sparse { tile, scores }),
        Way::All => level.run(tile),
    }
}

impl Attention<'_> {
    /// Returns whether the relative position bias, if there is one, has an entry for every position that a
    /// row sees.
    fn is_reached(&self) -> bool {
        let Some(bias) = self.shape.bias else { return true };
        self.step.rows().iter().all(|row| {
            let seen = plan::seen(self.shape, self.step.run_of(row), row.position);
            seen.is_empty() || seen.end <= row.position + bias.reach && row.position < seen.start + bias.reach
        })
    }
}
