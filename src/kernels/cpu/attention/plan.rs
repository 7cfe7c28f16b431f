//! Which work items an operation has: tiles of query vectors, or the splits of tiles where those are too few for the threads.
//!
//! Invariant: a plan says who computes something, never what; numbers of items ascend with runs.

use super::{Attention, ITEM_QUERIES};
use crate::backend::{AttentionShape, KvLayout, KvTable, Mask, StepLimits};
use crate::batch::SpanTable;
use crate::cpu::step::{Run, Step};
use crate::host::HostBuf;
use std::ops::Range;

/// Positions of a split, counted from a sequence's first: whole blocks.
pub const SPLIT: usize = 16 * KvLayout::BLOCK;
/// Partial results that there is room for, by thread.
const THREAD_PARTIALS: usize = 512;

/// A run's share of the work items.
pub struct RunItems {
    /// Its query vectors for one KV head.
    queries: usize,
    /// Items up to its last one, those of the runs before it included; and the same if every item were a tile.
    end: usize,
    tiles_end: usize,
    /// The splits that are items of their own; none where a tile is one item.
    splits: Range<usize>,
    /// Number of its first partial result. Each of its query vectors, by KV head, has one of each split.
    partials: usize,
}

/// How many items there are.
pub struct Plan {
    pub items: usize,
    /// Items of the job that folds partial results: all tiles. None where there are no such results.
    pub folds: usize,
}

/// Query vectors of one run that share a KV head.
pub struct Item<'a> {
    pub run: &'a Run,
    pub kv_head: usize,
    /// Counted by row and then by head of the group.
    pub queries: Range<usize>,
    /// Where its splits' results are kept apart.
    pub apart: Option<Apart>,
}

/// The partial results of a tile.
pub struct Apart {
    /// Those splits that its run has; of an item, the one that is to be done.
    pub splits: Range<usize>,
    /// Number of the first query vector's first result, and results of each vector.
    first: usize,
    stride: usize,
    /// The split of the first result.
    from: usize,
}

/// What is to be done for the rows of a run.
#[derive(Clone, Copy, PartialEq)]
pub enum Way {
    /// A hole sees itself alone, or no source.
    OwnValue,
    Nothing,
    /// Some positions' values are taken.
    Some,
    All,
}

impl Way {
    pub fn of(limits: &StepLimits, table: KvTable, run: &Run) -> Way {
        match (run.table, table) {
            (SpanTable::Sink, KvTable::Cross) => Way::Nothing,
            (SpanTable::Sink, _) => Way::OwnValue,
            (SpanTable::Own, KvTable::Own) if run.drawn && !limits.attended.is_all() => Way::Some,
            _ => Way::All,
        }
    }
}

/// Partial results that a device of so many threads has room for.
pub fn partials(limits: &StepLimits, threads: usize) -> usize {
    let splits = limits.positions.max(limits.source_positions).div_ceil(SPLIT);
    if splits < 2 || threads < 2 { 0 } else { threads * THREAD_PARTIALS.min(ITEM_QUERIES * splits) }
}

/// The positions that a row of the run sees from `position`.
pub fn seen(shape: &AttentionShape<HostBuf>, run: &Run, position: usize) -> Range<usize> {
    let (before, end) = match (shape.mask, shape.table) {
        (Mask::Causal { window }, _) => (window.map(|window| window - 1), position + 1),
        (Mask::Whole { window }, table) => {
            let whole = if table == KvTable::Cross { run.source } else { run.len };
            (window, window.map_or(whole, |after| whole.min(position + after + 1)))
        }
    };
    let first = before.map_or(0, |before| position.saturating_sub(before));
    first.min(end)..end
}

/// The splits of a range of positions.
#[inline(always)]
pub fn splits(seen: &Range<usize>) -> Range<usize> {
    if seen.is_empty() { 0..0 } else { seen.start / SPLIT..seen.end.div_ceil(SPLIT) }
}

impl Plan {
    /// Notes each run's share. `room` counts partial results.
    pub fn new(
        step: &mut Step,
        shape: &AttentionShape<HostBuf>,
        kv_heads: usize,
        threads: usize,
        room: usize,
    ) -> Plan {
        let mut shares = std::mem::take(&mut step.run_items);
        shares.clear();
        shares.extend(step.runs().iter().map(|run| RunItems::of(&step.limits, shape, kv_heads, run)));
        if !pays(&shares, kv_heads, threads, room) {
            shares.iter_mut().for_each(|share| share.splits = 0..0);
        }
        let (mut plan, mut partials, mut is_apart) = (Plan { items: 0, folds: 0 }, 0, false);
        for share in &mut shares {
            plan.items += share.tiles(kv_heads) * share.splits.len().max(1);
            plan.folds += share.tiles(kv_heads);
            is_apart |= !share.splits.is_empty();
            (share.end, share.tiles_end, share.partials) = (plan.items, plan.folds, partials);
            partials += share.partials(kv_heads);
        }
        step.run_items = shares;
        Plan { folds: if is_apart { plan.folds } else { 0 }, ..plan }
    }
}

/// Whether splits are to be items: one tile is more than half of a thread's fair share of the work, and there is room.
fn pays(shares: &[RunItems], kv_heads: usize, threads: usize, room: usize) -> bool {
    let work = shares.iter().map(|share| share.tiles(kv_heads) * share.splits.len().max(1)).sum::<usize>();
    let longest = shares.iter().map(|share| share.splits.len()).max().unwrap_or(0);
    let partials = shares.iter().map(|share| share.partials(kv_heads)).sum::<usize>();
    threads > 1 && longest > 1 && work < 2 * threads * longest && partials <= room
}

impl RunItems {
    /// What follows from the run alone. It has splits where it sees more than one.
    fn of(limits: &StepLimits, shape: &AttentionShape<HostBuf>, kv_heads: usize, run: &Run) -> RunItems {
        // What rows see ascends.
        let (first, last) = (seen(shape, run, run.start), seen(shape, run, run.start + run.len - 1));
        let splits = match Way::of(limits, shape.table, run) {
            Way::All => splits(&(first.start..last.end)),
            _ => 0..0,
        };
        let splits = if splits.len() > 1 { splits } else { 0..0 };
        let queries = run.len * (shape.heads / kv_heads);
        RunItems { queries, end: 0, tiles_end: 0, splits, partials: 0 }
    }

    fn tiles(&self, kv_heads: usize) -> usize {
        kv_heads * self.queries.div_ceil(ITEM_QUERIES)
    }

    fn partials(&self, kv_heads: usize) -> usize {
        kv_heads * self.queries * self.splits.len()
    }
}

impl Apart {
    /// Where the results of query vector number `query` of the tile lie that are of these splits.
    #[inline(always)]
    pub fn of(&self, query: usize, splits: Range<usize>) -> Range<usize> {
        if splits.is_empty() {
            return 0..0;
        }
        let first = self.first + query * self.stride;
        first + splits.start - self.from..first + splits.end - self.from
    }
}

impl<'a> Attention<'a> {
    /// What work item `item` is.
    pub fn item(&self, item: usize) -> Item<'a> {
        let number = self.step.run_items.partition_point(|share| share.end <= item);
        let share = &self.step.run_items[number];
        let within = item - if number == 0 { 0 } else { self.step.run_items[number - 1].end };
        let splits = share.splits.len().max(1);
        let mut tile = self.tile_of(number, within / splits);
        if let Some(apart) = &mut tile.apart {
            let split = apart.from + within % splits;
            apart.splits = split..split + 1;
        }
        tile
    }

    /// What tile `tile` is.
    pub fn tile(&self, tile: usize) -> Item<'a> {
        let number = self.step.run_items.partition_point(|share| share.tiles_end <= tile);
        let before = if number == 0 { 0 } else { self.step.run_items[number - 1].tiles_end };
        self.tile_of(number, tile - before)
    }

    /// Tile `tile` of run `number`.
    fn tile_of(&self, number: usize, tile: usize) -> Item<'a> {
        let (share, run) = (&self.step.run_items[number], &self.step.runs()[number]);
        let (kv_head, first) = (tile % self.layout.kv_heads, tile / self.layout.kv_heads * ITEM_QUERIES);
        let stride = share.splits.len();
        let apart = (stride > 0).then(|| Apart {
            splits: share.splits.clone(),
            first: share.partials + (kv_head * share.queries + first) * stride,
            stride,
            from: share.splits.start,
        });
        Item { run, kv_head, queries: first..(first + ITEM_QUERIES).min(share.queries), apart }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Share;
    use crate::batch::{Span, SpanModel, SpanStack, SpanTokens, StepBatch, Want};

    /// A step of these runs of sequences: (start, rows). Every second one's only token was drawn.
    fn step(runs: &[(u32, u32)], attended: Share) -> Step {
        let mut step = Step::new(&StepLimits {
            slots: runs.len(),
            rows: 100,
            logit_rows: 1,
            positions: 4096,
            source_positions: 0,
            page_positions: 32,
            top_logprobs: 0,
            biases: 0,
            vocab: 1,
            hidden: 0,
            attended,
        });
        let span = |(slot, &(start, len)): (usize, &(u32, u32))| Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: slot as u32,
            start,
            tokens: if slot % 2 == 1 { SpanTokens::Last } else { SpanTokens::Given { at: 0, len } },
            table: SpanTable::Own,
            reserved: 4096,
            source: 0,
            want: Want::None,
        };
        let spans = runs.iter().enumerate().map(span).collect();
        step.begin(&StepBatch { spans, tokens: vec![0; 100], ..StepBatch::default() });
        step
    }

    fn shape(window: Option<usize>) -> AttentionShape<'static, HostBuf> {
        let (mask, table) = (Mask::Causal { window }, KvTable::Own);
        AttentionShape { heads: 4, scale: 1.0, softcap: None, mask, table, bias: None }
    }

    /// Items and folds, for 2 KV heads.
    fn plan(runs: &[(u32, u32)], window: Option<usize>, threads: usize, room: usize) -> (usize, usize) {
        let plan = Plan::new(&mut step(runs, Share::ALL), &shape(window), 2, threads, room);
        (plan.items, plan.folds)
    }

    #[test]
    fn tiles_are_cut_where_threads_would_be_idle_and_there_is_room() {
        let long = [(2599, 1)];
        // Six splits of four query vectors.
        assert_eq!(plan(&long, None, 4, 24), (12, 2));
        assert_eq!(plan(&long, None, 4, 23), (2, 0), "no room");
        assert_eq!(plan(&long, None, 1, 24), (2, 0), "nobody idle");
        assert_eq!(plan(&long, Some(300), 4, 24), (4, 2), "from 2300 on: two splits");
        assert_eq!(plan(&long, Some(40), 4, 24), (2, 0), "one split");
        assert_eq!(plan(&[(2599, 1); 4], None, 4, 1000), (8, 0), "two tiles for each thread");
        // One long sequence among many short ones, which stay whole.
        let mut uneven = [(40, 1); 9];
        uneven[4] = (2599, 1);
        assert_eq!(plan(&uneven, None, 4, 24), (16 + 12, 18));
        // 60 query vectors are two tiles of each KV head.
        assert_eq!(plan(&[(1000, 30)], None, 8, 1000), (12, 4));
    }

    #[test]
    fn drawn_tokens_that_take_some_positions_stay_whole() {
        let some = Share::new(0.5).unwrap();
        let plan = Plan::new(&mut step(&[(2599, 1), (2599, 1)], some), &shape(None), 2, 8, 1000);
        assert_eq!((plan.items, plan.folds), (12 + 2, 4));
    }
}
