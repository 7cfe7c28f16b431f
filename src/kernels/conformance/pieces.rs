//! Batches for the tests: spans, and the pages that their slots use.
//!
//! Invariant: the token, reserved length and encoder input of a row depend on its sequence and position
//! alone.

use super::inputs::*;
use crate::backend::KvTable;
use crate::batch::{
    Page, SampleRow, SlotMove, Span, SpanModel, SpanStack, SpanTable, SpanTokens, StepBatch, TableUpdate,
    Want,
};

/// The sequence number of the rows of holes.
pub(super) const SINK_SEQUENCE: u32 = 90;

/// Offset from the number of a sequence to the number of its encoder input.
pub(super) const SOURCE: u32 = 200;

/// A span of a test batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) sequence: u32,
    pub(super) slot: u32,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) kind: Kind,
}

/// The kind of a span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Tokens that are given with the batch.
    Given,
    /// Given tokens whose K and V are stored, without attention.
    Stored,
    /// Given tokens whose stored K and V are NaN.
    Poison,
    /// The token that was sampled last in the slot.
    Last,
    /// A complete encoder input. These spans come first.
    Source,
    /// A hole: a row whose result is discarded.
    Sink,
}

impl Piece {
    /// Returns a span of given tokens, of the sequence with the number of the slot.
    pub(super) fn given(slot: u32, start: usize, len: usize) -> Piece {
        Piece { sequence: slot, slot, start, len, kind: Kind::Given }
    }

    /// Returns a span whose K and V are only stored.
    pub(super) fn stored(slot: u32, start: usize, len: usize) -> Piece {
        Piece { kind: Kind::Stored, ..Piece::given(slot, start, len) }
    }

    /// Returns a span of the last sampled token.
    pub(super) fn last(slot: u32, start: usize) -> Piece {
        Piece { sequence: slot, slot, start, len: 1, kind: Kind::Last }
    }

    /// Returns a hole.
    pub(super) fn sink(slot: u32) -> Piece {
        Piece { sequence: SINK_SEQUENCE, slot, start: 0, len: 1, kind: Kind::Sink }
    }

    /// Returns the encoder input of the sequence with the number of the slot.
    pub(super) fn source(slot: u32) -> Piece {
        Piece { sequence: slot, slot, start: 0, len: source_len(slot), kind: Kind::Source }
    }

    /// Returns the stack of the span.
    pub(super) fn stack(&self) -> SpanStack {
        if self.kind == Kind::Source { SpanStack::Encoder } else { SpanStack::Decoder }
    }

    /// Returns the sequence (or encoder input) and the position of each row.
    pub(super) fn rows(&self) -> impl Iterator<Item = (u32, usize)> + use<> {
        let Piece { start, len, .. } = *self;
        let sequence = if self.kind == Kind::Source { self.sequence + SOURCE } else { self.sequence };
        (start..start + len).map(move |position| (sequence, position))
    }

    fn table(&self) -> SpanTable {
        match self.kind {
            Kind::Given | Kind::Stored | Kind::Poison | Kind::Last => SpanTable::Own,
            Kind::Source => SpanTable::Scratch,
            Kind::Sink => SpanTable::Sink,
        }
    }

    fn span(&self, tokens: SpanTokens, output: Want) -> Span {
        let is_hole = self.kind == Kind::Sink;
        Span {
            model: SpanModel::Target,
            stack: self.stack(),
            slot: self.slot,
            start: self.start as u32,
            tokens,
            table: self.table(),
            reserved: if is_hole { 0 } else { reserved(self.sequence) as u32 },
            source: if is_hole { 0 } else { source_len(self.sequence) as u32 },
            want: output,
        }
    }
}

/// Returns a prompt of `len` tokens of sequence 0, divided into chunks.
pub(super) fn chunks(len: usize, chunk: usize) -> Vec<Vec<Piece>> {
    (0..len).step_by(chunk).map(|start| vec![Piece::given(0, start, chunk.min(len - start))]).collect()
}

/// A page allocator: the pages of each slot, and the free pages.
#[derive(Clone, Debug)]
pub(super) struct Book {
    pub(super) page_positions: usize,
    /// Pages of each slot.
    pub(super) held: Vec<Vec<Page>>,
    /// Cross-attention pages of each slot.
    pub(super) crossed: Vec<Vec<Page>>,
    /// Free pages, allocated from the end.
    pub(super) free: Vec<Page>,
}

impl Book {
    /// Allocates pages in ascending order.
    pub(super) fn contiguous(page_positions: usize) -> Book {
        let none = vec![Vec::new(); 8];
        Book { page_positions, held: none.clone(), crossed: none, free: (1..POOL as Page).rev().collect() }
    }

    /// Allocates every page once, with neighboring positions on distant pages.
    pub(super) fn scattered(page_positions: usize) -> Book {
        let pages = POOL as Page - 1;
        Book {
            free: (0..pages).map(|i| 1 + (i * 37 + 11) % pages).collect(),
            ..Book::contiguous(page_positions)
        }
    }

    /// Allocates pages for the first `positions` of a slot or of its encoder input, and appends the table
    /// updates.
    pub(super) fn cover(
        &mut self,
        slot: u32,
        table: KvTable,
        positions: usize,
        tables: &mut Vec<TableUpdate>,
    ) {
        let held = match table {
            KvTable::Cross => &mut self.crossed[slot as usize],
            _ => &mut self.held[slot as usize],
        };
        while held.len() * self.page_positions < positions {
            let page = self.free.pop().expect("the pool is large enough");
            tables.push(TableUpdate { slot, table, index: held.len() as u32, page });
            held.push(page);
        }
    }

    /// Applies slot moves.
    pub(super) fn apply(&mut self, moves: &[SlotMove]) {
        for moved in moves {
            for held in [&mut self.held, &mut self.crossed] {
                held[moved.to as usize] = std::mem::take(&mut held[moved.from as usize]);
            }
        }
    }
}

/// Builds a batch of the spans. Output rows are sampled greedily.
pub(super) fn batch_of(spans: &[Piece], output: Want, book: &mut Book) -> StepBatch {
    let mut batch = StepBatch::default();
    for span in spans {
        let (at, len) = (batch.tokens.len() as u32, span.len as u32);
        let tokens = match span.kind {
            Kind::Last | Kind::Sink => SpanTokens::Last,
            _ => SpanTokens::Given { at, len },
        };
        if tokens != SpanTokens::Last {
            batch.tokens.extend(span.rows().map(|(sequence, position)| text(sequence, position)));
        }
        match span.table() {
            SpanTable::Own => {
                book.cover(span.slot, KvTable::Own, span.start + span.len, &mut batch.tables);
            }
            SpanTable::Scratch => book.cover(span.slot, KvTable::Cross, span.len, &mut batch.tables),
            SpanTable::Sink => {}
        }
        batch.spans.push(span.span(tokens, output));
    }
    draw_all(&mut batch);
    batch
}

/// Sets greedy sampling for every output row of the batch.
pub(super) fn draw_all(batch: &mut StepBatch) {
    let stacks = [SpanStack::Encoder, SpanStack::Decoder];
    let outputs = stacks.map(|stack| batch.wanted_rows(stack).count()).iter().sum();
    batch.samples = vec![SampleRow::GREEDY; outputs];
}

/// Returns the sequence and position of each row of one stack.
pub(super) fn rows_of(spans: &[Piece], stack: SpanStack) -> Vec<(u32, usize)> {
    spans.iter().filter(|span| span.stack() == stack).flat_map(Piece::rows).collect()
}
