//! out = softmax(q · kᵀ · scale) · v over a paged cache, each row over the positions its mask lets it see.
//!
//! Rows of drawn tokens may take the values of some positions only; they go another way (`sparse.rs`). All others are dense:
//! the softmax runs along: for each block of 32 positions, in ascending order from the block of the first position
//! seen, the largest score so far, the weights relative to it, and the sums so far scaled to it. Several query vectors
//! that share a KV head (heads of a group, neighbouring rows of a span) pass over a block together, so that it is
//! loaded and converted once.
//!
//! That goes for each split of 512 positions by itself, and the results of splits are folded in ascending order
//! (`partial.rs`). A thread does both for its query vectors, unless that left other threads idle: then a split is a work item,
//! and folding another job. Which it is changes no result.
//!
//! Invariant: a query vector's arithmetic is the same in whichever tile it passes, and positions it does
//! not see enter nothing, be they NaN.

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

/// Query vectors of one work item.
const ITEM_QUERIES: usize = 32;

/// F32 numbers of scratch that each thread needs for a cache, whatever the sequences: for each query vector its sums of values,
/// those of its own numbers over groups, and what it has of the splits before.
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

/// F32 numbers of a partial result of a cache; [`partials`] says how many there may be.
pub fn partial_len(layout: &KvLayout) -> usize {
    partial::len(layout.v_dim)
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

/// out (rows, heads, v_dim). `scratch` holds `scratch_len` and `sparse_scratch_len` numbers per thread, and partial results as
/// far as it is longer.
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
    let thread_len = scratch_len(&layout) + sparse_scratch_len(&step.limits);
    let threads = pool.threads();
    let room = (scratch.len() - threads * thread_len) / partial_len(&layout);
    let plan = Plan::new(step, shape, layout.kv_heads, threads, room);
    let (out, scratch) = (Parts::new(out), Parts::new(scratch));
    let op = Attention { step, shape, group, layout, q, cache, out };
    assert!(op.is_reached(), "the bias reaches every distance");
    with_stored(layout.ty, Attend { pool, level, op: &op, plan, scratch, thread_len });
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
    plan: Plan,
    /// (threads, thread_len), and then partial results.
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
            let Item { run, kv_head, queries, apart } = op.tile(tile);
            if let Some(apart) = apart {
                level.run(Fold { op, run, kv_head, queries, apart, partials });
            }
        });
    }
}

/// Does one work item, with a thread's scratch.
fn attend<C: Stored>(
    level: Level,
    op: &Attention,
    places: Places,
    item: Item,
    (scratch, partials): (&mut [f32], Partials),
) {
    let (scratch, scores) = scratch.split_at_mut(scratch_len(&op.layout));
    let (sums, scratch) = scratch.split_at_mut(ITEM_QUERIES * padded(op.layout.v_dim));
    let (folded, q_sums) = scratch.split_at_mut(ITEM_QUERIES * partials.len);
    let Item { run, kv_head, queries, apart } = item;
    let kept = match apart {
        Some(apart) => Kept::Apart(apart, partials),
        None => Kept::Folded(folded),
    };
    let (k, v) = (C::of(&op.cache.k), C::of(&op.cache.v));
    let tile = Tile::<C> { op, places, k, v, run, kv_head, queries, sums, q_sums, kept };
    match Way::of(&op.step.limits, op.shape.table, run) {
        Way::Nothing => tile.see_nothing(),
        Way::OwnValue => tile.copy_own_value(),
        Way::Some => level.run(Sparse { tile, scores }),
        Way::All => level.run(tile),
    }
}

impl Attention<'_> {
    /// Whether the bias, if there is one, has an entry for every position that a row sees.
    fn is_reached(&self) -> bool {
        let Some(bias) = self.shape.bias else { return true };
        self.step.rows().iter().all(|row| {
            let seen = plan::seen(self.shape, self.step.run_of(row), row.position);
            seen.is_empty() || seen.end <= row.position + bias.reach && row.position < seen.start + bias.reach
        })
    }
}
