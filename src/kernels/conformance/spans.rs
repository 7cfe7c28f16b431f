//! Batches for the tests: spans, and the pages that their slots use.
//!
//! Invariant: the token, reserved length and encoder input of a row depend on its sequence and position
//! alone.

use super::inputs::*;
use mainstem_kernels::backend::KvTable;
use mainstem_kernels::batch::{
    Page, SamplingParams, SlotMove, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch,
    TableUpdate,
};

/// The sequence number of the rows of holes.
pub(super) const HOLE_SEQUENCE: u32 = 90;

/// Offset from the number of a sequence to the number of its encoder input.
pub(super) const ENCODER_SEQUENCE_OFFSET: u32 = 200;

/// A span of a test batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct TestSpan {
    pub(super) sequence: u32,
    pub(super) slot: u32,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) kind: TestSpanKind,
}

/// The kind of a span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum TestSpanKind {
    /// Tokens that are given with the batch.
    Given,
    /// Generated tokens that are given with the batch.
    Generated,
    /// Given tokens whose K and V are stored, without attention.
    Stored,
    /// Given tokens whose stored K and V are NaN.
    Poison,
    /// The token that was sampled last in the slot.
    Last,
    /// A complete encoder input. These spans come first.
    EncoderInput,
    /// A hole: a row whose result is discarded.
    Hole,
}

impl TestSpan {
    /// Returns a span of given tokens, of the sequence with the number of the slot.
    pub(super) fn given(slot: u32, start: usize, len: usize) -> TestSpan {
        TestSpan { sequence: slot, slot, start, len, kind: TestSpanKind::Given }
    }

    /// Returns a span of generated tokens, for example drafts.
    pub(super) fn generated(slot: u32, start: usize, len: usize) -> TestSpan {
        TestSpan { kind: TestSpanKind::Generated, ..TestSpan::given(slot, start, len) }
    }

    /// Returns a span whose K and V are only stored.
    pub(super) fn stored(slot: u32, start: usize, len: usize) -> TestSpan {
        TestSpan { kind: TestSpanKind::Stored, ..TestSpan::given(slot, start, len) }
    }

    /// Returns a span of the last sampled token.
    pub(super) fn last(slot: u32, start: usize) -> TestSpan {
        TestSpan { sequence: slot, slot, start, len: 1, kind: TestSpanKind::Last }
    }

    /// Returns a hole.
    pub(super) fn hole(slot: u32) -> TestSpan {
        TestSpan { sequence: HOLE_SEQUENCE, slot, start: 0, len: 1, kind: TestSpanKind::Hole }
    }

    /// Returns the encoder input of the sequence with the number of the slot.
    pub(super) fn encoder_input(slot: u32) -> TestSpan {
        TestSpan { sequence: slot, slot, start: 0, len: encoder_len(slot), kind: TestSpanKind::EncoderInput }
    }

    /// Returns the stack of the span.
    pub(super) fn stack(&self) -> SpanStack {
        if self.kind == TestSpanKind::EncoderInput { SpanStack::Encoder } else { SpanStack::Decoder }
    }

    /// Returns the sequence (or encoder input) and the position of each row.
    pub(super) fn rows(&self) -> impl Iterator<Item = (u32, usize)> + use<> {
        let TestSpan { start, len, .. } = *self;
        let sequence = if self.kind == TestSpanKind::EncoderInput {
            self.sequence + ENCODER_SEQUENCE_OFFSET
        } else {
            self.sequence
        };
        (start..start + len).map(move |position| (sequence, position))
    }

    fn table(&self) -> SpanTable {
        match self.kind {
            TestSpanKind::Given
            | TestSpanKind::Generated
            | TestSpanKind::Stored
            | TestSpanKind::Poison
            | TestSpanKind::Last => SpanTable::Own,
            TestSpanKind::EncoderInput => SpanTable::Scratch,
            TestSpanKind::Hole => SpanTable::Null,
        }
    }

    fn to_span(self, tokens: SpanTokens, output: SpanOutput) -> Span {
        let is_hole = self.kind == TestSpanKind::Hole;
        Span {
            model: SpanModel::Target,
            stack: self.stack(),
            slot: self.slot,
            start: self.start as u32,
            tokens,
            table: self.table(),
            reserved: if is_hole { 0 } else { reserved(self.sequence) as u32 },
            encoder_len: if is_hole { 0 } else { encoder_len(self.sequence) as u32 },
            output,
        }
    }
}

/// Returns a prompt of `len` tokens of sequence 0, divided into chunks.
pub(super) fn chunks(len: usize, chunk: usize) -> Vec<Vec<TestSpan>> {
    (0..len).step_by(chunk).map(|start| vec![TestSpan::given(0, start, chunk.min(len - start))]).collect()
}

/// A page allocator: the pages of each slot, and the free pages.
#[derive(Clone, Debug)]
pub(super) struct PageBook {
    pub(super) page_positions: usize,
    /// Pages of each slot.
    pub(super) own_pages: Vec<Vec<Page>>,
    /// Cross-attention pages of each slot.
    pub(super) cross_pages: Vec<Vec<Page>>,
    /// Free pages, allocated from the end.
    pub(super) free: Vec<Page>,
}

impl PageBook {
    /// Allocates pages in ascending order.
    pub(super) fn contiguous(page_positions: usize) -> PageBook {
        let none = vec![Vec::new(); 8];
        PageBook {
            page_positions,
            own_pages: none.clone(),
            cross_pages: none,
            free: (1..POOL_PAGES as Page).rev().collect(),
        }
    }

    /// Allocates every page once, with neighboring positions on distant pages.
    pub(super) fn scattered(page_positions: usize) -> PageBook {
        let pages = POOL_PAGES as Page - 1;
        PageBook {
            free: (0..pages).map(|i| 1 + (i * 37 + 11) % pages).collect(),
            ..PageBook::contiguous(page_positions)
        }
    }

    /// Allocates pages for the first `positions` of a slot or of its encoder input, and appends the table
    /// updates.
    pub(super) fn allocate(
        &mut self,
        slot: u32,
        table: KvTable,
        positions: usize,
        tables: &mut Vec<TableUpdate>,
    ) {
        let held = match table {
            KvTable::Cross => &mut self.cross_pages[slot as usize],
            _ => &mut self.own_pages[slot as usize],
        };
        while held.len() * self.page_positions < positions {
            let page = self.free.pop().expect("the pool is large enough");
            tables.push(TableUpdate { slot, table, index: held.len() as u32, page });
            held.push(page);
        }
    }

    /// Applies slot moves.
    pub(super) fn apply_moves(&mut self, moves: &[SlotMove]) {
        for moved in moves {
            for held in [&mut self.own_pages, &mut self.cross_pages] {
                held[moved.to as usize] = std::mem::take(&mut held[moved.from as usize]);
            }
        }
    }
}

/// Builds a batch of the spans. Output rows are sampled greedily.
pub(super) fn build_batch(spans: &[TestSpan], output: SpanOutput, book: &mut PageBook) -> StepBatch {
    let mut batch = StepBatch::default();
    for span in spans {
        let (at, len) = (batch.tokens.len() as u32, span.len as u32);
        let tokens = match span.kind {
            TestSpanKind::Last | TestSpanKind::Hole => SpanTokens::Last,
            TestSpanKind::Generated => SpanTokens::Generated { at, len },
            _ => SpanTokens::Given { at, len },
        };
        if tokens != SpanTokens::Last {
            batch.tokens.extend(span.rows().map(|(sequence, position)| token_at(sequence, position)));
        }
        match span.table() {
            SpanTable::Own => {
                book.allocate(span.slot, KvTable::Own, span.start + span.len, &mut batch.table_updates);
            }
            SpanTable::Scratch => {
                book.allocate(span.slot, KvTable::Cross, span.len, &mut batch.table_updates)
            }
            SpanTable::Null => {}
        }
        batch.spans.push(span.to_span(tokens, output));
    }
    sample_all_greedily(&mut batch);
    batch
}

/// Sets greedy sampling for every output row of the batch.
pub(super) fn sample_all_greedily(batch: &mut StepBatch) {
    let stacks = [SpanStack::Encoder, SpanStack::Decoder];
    let outputs = stacks.map(|stack| batch.output_rows(stack).count()).iter().sum();
    batch.sampling = vec![SamplingParams::GREEDY; outputs];
}

/// Returns the sequence and position of each row of one stack.
pub(super) fn stack_rows(spans: &[TestSpan], stack: SpanStack) -> Vec<(u32, usize)> {
    spans.iter().filter(|span| span.stack() == stack).flat_map(TestSpan::rows).collect()
}
