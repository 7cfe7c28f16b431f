//! Work items of an attention operation: tiles of query vectors, or splits of tiles if there are too few
//! tiles for the threads.
//!
//! Invariant: a plan decides which thread computes something, never what is computed. Item numbers ascend
//! with spans.

use super::{Attention, ITEM_QUERIES};
use crate::backend::{AttentionShape, KvLayout, KvTable, Mask, StepLimits};
use crate::batch::{RowSpan, SpanTable, StepState};
use crate::host::HostBuf;
use std::ops::Range;

/// Positions of a split, counted from a sequence's first: a whole number of blocks.
pub const SPLIT: usize = 16 * KvLayout::BLOCK_POSITIONS;
/// Largest number of partial results per thread.
const PARTIALS_PER_THREAD: usize = 512;

/// The work items of one span.
pub struct SpanItems {
    /// The span's query vectors for one KV head.
    queries: usize,
    /// Number of items up to and including the last one of this span, and the same if every item were a tile.
    end: usize,
    tiles_end: usize,
    /// Splits that are items of their own; empty if a tile is one item.
    splits: Range<usize>,
    /// Number of its first partial result. Each of its query vectors, by KV head, has one for each split.
    first_partial: usize,
}

/// The number of work items of an operation.
pub struct WorkPlan {
    pub items: usize,
    /// Items of the job that merges partial results: all tiles, or 0 if there are no such results.
    pub merges: usize,
}

/// A work item: query vectors of one span that share a KV head.
pub struct AttentionItem<'a> {
    pub span: &'a RowSpan,
    pub kv_head: usize,
    /// Numbers of the query vectors, counted by row and then by head of the group.
    pub queries: Range<usize>,
    /// Storage of the results of its splits, if these are separate items.
    pub split_results: Option<SplitResults>,
}

/// The partial results of a tile.
pub struct SplitResults {
    /// All splits of the span; for a work item, the one split to compute.
    pub splits: Range<usize>,
    /// Number of the first query vector's first result, and number of results of each vector.
    first: usize,
    stride: usize,
    /// The split of the first result.
    first_split: usize,
}

/// The division of the attention of a span's rows into work items.
#[derive(Clone, Copy, PartialEq)]
pub enum AttentionMethod {
    /// A hole sees only itself: the output is its own value.
    OwnValue,
    /// A hole sees no encoder input: the output is zero.
    Zero,
    /// Top-k sparse attention: the values of some positions only.
    TopK,
    /// Dense attention: the values of all visible positions.
    Dense,
}

impl AttentionMethod {
    /// Returns the method for the rows of `span`.
    pub fn for_span(limits: &StepLimits, table: KvTable, span: &RowSpan) -> AttentionMethod {
        match (span.table, table) {
            (SpanTable::Null, KvTable::Cross) => AttentionMethod::Zero,
            (SpanTable::Null, _) => AttentionMethod::OwnValue,
            (SpanTable::Own, KvTable::Own | KvTable::Window)
                if span.is_generated && !limits.attended_fraction.is_one() =>
            {
                AttentionMethod::TopK
            }
            _ => AttentionMethod::Dense,
        }
    }
}

/// Returns the number of partial results that a device with so many threads has memory for.
pub fn partial_capacity(limits: &StepLimits, threads: usize) -> usize {
    let splits = limits.positions.max(limits.encoder_positions).div_ceil(SPLIT);
    if splits < 2 || threads < 2 { 0 } else { threads * PARTIALS_PER_THREAD.min(ITEM_QUERIES * splits) }
}

/// Returns the positions that a row of `span` at `position` sees.
pub fn visible_positions(shape: &AttentionShape<HostBuf>, span: &RowSpan, position: usize) -> Range<usize> {
    let (before, end) = match (shape.mask, shape.table) {
        (Mask::Causal { window }, _) => (window.map(|window| window - 1), position + 1),
        (Mask::Chunked { chunk }, _) => (Some(position % chunk), position + 1),
        (Mask::Bidirectional { window }, table) => {
            let whole = if table == KvTable::Cross { span.encoder_len } else { span.len };
            (window, window.map_or(whole, |after| whole.min(position + after + 1)))
        }
    };
    let first = before.map_or(0, |before| position.saturating_sub(before));
    first.min(end)..end
}

/// Returns the splits that a range of positions covers.
#[inline(always)]
pub fn splits_of(seen: &Range<usize>) -> Range<usize> {
    if seen.is_empty() { 0..0 } else { seen.start / SPLIT..seen.end.div_ceil(SPLIT) }
}

impl WorkPlan {
    /// Plans the work items, and replaces the contents of `span_items` by those of each span. `capacity` is
    /// the number of partial results that fit the scratch.
    pub fn new(
        (step, span_items): (&StepState, &mut Vec<SpanItems>),
        shape: &AttentionShape<HostBuf>,
        kv_heads: usize,
        threads: usize,
        capacity: usize,
    ) -> WorkPlan {
        span_items.clear();
        span_items
            .extend(step.spans().iter().map(|span| SpanItems::new(&step.limits, shape, kv_heads, span)));
        if !should_split(span_items, kv_heads, threads, capacity) {
            span_items.iter_mut().for_each(|items| items.splits = 0..0);
        }
        let (mut plan, mut partials, mut is_split) = (WorkPlan { items: 0, merges: 0 }, 0, false);
        for items in span_items {
            plan.items += items.tiles(kv_heads) * items.splits.len().max(1);
            plan.merges += items.tiles(kv_heads);
            is_split |= !items.splits.is_empty();
            (items.end, items.tiles_end, items.first_partial) = (plan.items, plan.merges, partials);
            partials += items.partials(kv_heads);
        }
        WorkPlan { merges: if is_split { plan.merges } else { 0 }, ..plan }
    }
}

/// Returns whether splits should be work items: one tile is more than half of a thread's fair share of the
/// work, and the partial results fit.
fn should_split(span_items: &[SpanItems], kv_heads: usize, threads: usize, capacity: usize) -> bool {
    let work =
        span_items.iter().map(|items| items.tiles(kv_heads) * items.splits.len().max(1)).sum::<usize>();
    let longest = span_items.iter().map(|items| items.splits.len()).max().unwrap_or(0);
    let partials = span_items.iter().map(|items| items.partials(kv_heads)).sum::<usize>();
    threads > 1 && longest > 1 && work < 2 * threads * longest && partials <= capacity
}

impl SpanItems {
    /// Computes what depends on the span alone. It has splits only if it sees more than one.
    fn new(
        limits: &StepLimits,
        shape: &AttentionShape<HostBuf>,
        kv_heads: usize,
        span: &RowSpan,
    ) -> SpanItems {
        // The visible ranges of rows ascend.
        let (first, last) = (
            visible_positions(shape, span, span.start),
            visible_positions(shape, span, span.start + span.len - 1),
        );
        let splits = match AttentionMethod::for_span(limits, shape.table, span) {
            AttentionMethod::Dense => splits_of(&(first.start..last.end)),
            _ => 0..0,
        };
        let splits = if splits.len() > 1 { splits } else { 0..0 };
        let queries = span.len * (shape.heads / kv_heads);
        SpanItems { queries, end: 0, tiles_end: 0, splits, first_partial: 0 }
    }

    /// Returns the number of tiles.
    fn tiles(&self, kv_heads: usize) -> usize {
        kv_heads * self.queries.div_ceil(ITEM_QUERIES)
    }

    /// Returns the number of partial results.
    fn partials(&self, kv_heads: usize) -> usize {
        kv_heads * self.queries * self.splits.len()
    }
}

impl SplitResults {
    /// Returns the numbers of the results of query vector number `query` of the tile for the given splits.
    #[inline(always)]
    pub fn range(&self, query: usize, splits: Range<usize>) -> Range<usize> {
        if splits.is_empty() {
            return 0..0;
        }
        let first = self.first + query * self.stride;
        first + splits.start - self.first_split..first + splits.end - self.first_split
    }
}

impl<'a> Attention<'a> {
    /// Returns work item number `item`.
    pub fn item(&self, item: usize) -> AttentionItem<'a> {
        let number = self.span_items.partition_point(|items| items.end <= item);
        let items = &self.span_items[number];
        let within = item - if number == 0 { 0 } else { self.span_items[number - 1].end };
        let splits = items.splits.len().max(1);
        let mut tile = self.tile_of(number, within / splits);
        if let Some(results) = &mut tile.split_results {
            let split = results.first_split + within % splits;
            results.splits = split..split + 1;
        }
        tile
    }

    /// Returns tile number `tile`.
    pub fn tile(&self, tile: usize) -> AttentionItem<'a> {
        let number = self.span_items.partition_point(|items| items.tiles_end <= tile);
        let before = if number == 0 { 0 } else { self.span_items[number - 1].tiles_end };
        self.tile_of(number, tile - before)
    }

    /// Returns tile number `tile` of span number `number`.
    fn tile_of(&self, number: usize, tile: usize) -> AttentionItem<'a> {
        let (items, span) = (&self.span_items[number], &self.step.spans()[number]);
        let (kv_head, first) = (tile % self.layout.kv_heads, tile / self.layout.kv_heads * ITEM_QUERIES);
        let stride = items.splits.len();
        let results = (stride > 0).then(|| SplitResults {
            splits: items.splits.clone(),
            first: items.first_partial + (kv_head * items.queries + first) * stride,
            stride,
            first_split: items.splits.start,
        });
        AttentionItem {
            span,
            kv_head,
            queries: first..(first + ITEM_QUERIES).min(items.queries),
            split_results: results,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Fraction;
    use crate::batch::{Span, SpanModel, SpanOutput, SpanStack, SpanTokens, StepBatch};

    /// Returns a step of these spans: (start, rows). The only token of every second one was generated.
    fn step(spans: &[(u32, u32)], attended: Fraction) -> StepState {
        let mut step = StepState::new(&StepLimits {
            slots: spans.len(),
            rows: 100,
            batch_rows: usize::MAX,
            logit_rows: 1,
            positions: 4096,
            encoder_positions: 0,
            page_positions: 32,
            window: None,
            top_logprobs: 0,
            vocab: 1,
            hidden: 0,
            drafts: 0,
            draft_logits: false,
            counts_tokens: false,
            opening_rows: 0,
            attended_fraction: attended,
        });
        let span = |(slot, &(start, len)): (usize, &(u32, u32))| Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: slot as u32,
            start,
            tokens: if slot % 2 == 1 { SpanTokens::Last } else { SpanTokens::Given { at: 0, len } },
            table: SpanTable::Own,
            reserved: 4096,
            encoder_len: 0,
            output: SpanOutput::None,
        };
        let spans = spans.iter().enumerate().map(span).collect();
        step.begin(&StepBatch { spans, tokens: vec![0; 100], ..StepBatch::default() });
        step
    }

    fn shape(window: Option<usize>) -> AttentionShape<'static, HostBuf> {
        let (mask, table) = (Mask::Causal { window }, KvTable::Own);
        AttentionShape::plain(4, 1.0, mask, table)
    }

    /// Returns the numbers of items and of merged tiles, for 2 KV heads.
    fn plan(spans: &[(u32, u32)], window: Option<usize>, threads: usize, capacity: usize) -> (usize, usize) {
        let step = step(spans, Fraction::ONE);
        let plan = WorkPlan::new((&step, &mut Vec::new()), &shape(window), 2, threads, capacity);
        (plan.items, plan.merges)
    }

    #[test]
    fn tiles_are_cut_where_threads_would_be_idle_and_there_is_room() {
        let long = [(2599, 1)];
        // Six splits of four query vectors.
        assert_eq!(plan(&long, None, 4, 24), (12, 2));
        assert_eq!(plan(&long, None, 4, 23), (2, 0), "too little capacity");
        assert_eq!(plan(&long, None, 1, 24), (2, 0), "no idle thread");
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
    fn rows_with_sparse_attention_are_not_split() {
        let some = Fraction::new(0.5).unwrap();
        let step = step(&[(2599, 1), (2599, 1)], some);
        let plan = WorkPlan::new((&step, &mut Vec::new()), &shape(None), 2, 8, 1000);
        assert_eq!((plan.items, plan.merges), (12 + 2, 4));
    }
}
