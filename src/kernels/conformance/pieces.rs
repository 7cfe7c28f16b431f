//! Batches for the tests: spans, and the pages they lie on.
//!
//! Invariant: a row's token, reserved length and source follow from its sequence and position alone.

use super::inputs::*;
use crate::backend::KvTable;
use crate::batch::{
    Page, SampleRow, SlotMove, Span, SpanModel, SpanStack, SpanTable, SpanTokens, StepBatch, TableUpdate,
    Want,
};

/// The sequence that the rows of holes are counted to.
pub(super) const SINK_SEQUENCE: u32 = 90;

/// Added to a sequence, this is its source.
pub(super) const SOURCE: u32 = 200;

/// A span of a test's batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) sequence: u32,
    pub(super) slot: u32,
    pub(super) start: usize,
    pub(super) len: usize,
    pub(super) kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// Tokens given with the batch.
    Given,
    /// The same, whose keys and values are stored, and no more.
    Stored,
    /// The same, and these are NaN.
    Poison,
    /// The token drawn last in the slot.
    Last,
    /// A whole source, for the encoder. Pieces of this kind come first.
    Source,
    /// A hole: a row whose result nobody wants.
    Sink,
}

impl Piece {
    /// Tokens of the sequence that has this slot's number.
    pub(super) fn given(slot: u32, start: usize, len: usize) -> Piece {
        Piece { sequence: slot, slot, start, len, kind: Kind::Given }
    }

    pub(super) fn stored(slot: u32, start: usize, len: usize) -> Piece {
        Piece { kind: Kind::Stored, ..Piece::given(slot, start, len) }
    }

    pub(super) fn last(slot: u32, start: usize) -> Piece {
        Piece { sequence: slot, slot, start, len: 1, kind: Kind::Last }
    }

    pub(super) fn sink(slot: u32) -> Piece {
        Piece { sequence: SINK_SEQUENCE, slot, start: 0, len: 1, kind: Kind::Sink }
    }

    /// The source of the sequence that has this slot's number.
    pub(super) fn source(slot: u32) -> Piece {
        Piece { sequence: slot, slot, start: 0, len: source_len(slot), kind: Kind::Source }
    }

    pub(super) fn stack(&self) -> SpanStack {
        if self.kind == Kind::Source { SpanStack::Encoder } else { SpanStack::Decoder }
    }

    /// Sequence, or source, and position of each of its rows.
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

    fn span(&self, tokens: SpanTokens, want: Want) -> Span {
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
            want,
        }
    }
}

/// A prompt of `len` tokens of sequence 0, in chunks.
pub(super) fn chunks(len: usize, chunk: usize) -> Vec<Vec<Piece>> {
    (0..len).step_by(chunk).map(|start| vec![Piece::given(0, start, chunk.min(len - start))]).collect()
}

/// Who has which pages.
#[derive(Clone, Debug)]
pub(super) struct Book {
    pub(super) page_positions: usize,
    /// By slot.
    pub(super) held: Vec<Vec<Page>>,
    /// For the slot's source.
    pub(super) crossed: Vec<Vec<Page>>,
    /// Taken from the end.
    pub(super) free: Vec<Page>,
}

impl Book {
    pub(super) fn contiguous(page_positions: usize) -> Book {
        let none = vec![Vec::new(); 8];
        Book { page_positions, held: none.clone(), crossed: none, free: (1..POOL as Page).rev().collect() }
    }

    /// Every page once, neighbours far apart.
    pub(super) fn scattered(page_positions: usize) -> Book {
        let pages = POOL as Page - 1;
        Book {
            free: (0..pages).map(|i| 1 + (i * 37 + 11) % pages).collect(),
            ..Book::contiguous(page_positions)
        }
    }

    /// Gives the slot pages for its first `positions`, or those of its source.
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
            let page = self.free.pop().expect("the test's pool is large enough");
            tables.push(TableUpdate { slot, table, index: held.len() as u32, page });
            held.push(page);
        }
    }

    pub(super) fn apply(&mut self, moves: &[SlotMove]) {
        for moved in moves {
            for held in [&mut self.held, &mut self.crossed] {
                held[moved.to as usize] = std::mem::take(&mut held[moved.from as usize]);
            }
        }
    }
}

/// The pieces as a batch; with wanted rows, each is drawn greedily.
pub(super) fn batch_of(pieces: &[Piece], want: Want, book: &mut Book) -> StepBatch {
    let mut batch = StepBatch::default();
    for piece in pieces {
        let (at, len) = (batch.tokens.len() as u32, piece.len as u32);
        let tokens = match piece.kind {
            Kind::Last | Kind::Sink => SpanTokens::Last,
            _ => SpanTokens::Given { at, len },
        };
        if tokens != SpanTokens::Last {
            batch.tokens.extend(piece.rows().map(|(sequence, position)| text(sequence, position)));
        }
        match piece.table() {
            SpanTable::Own => {
                book.cover(piece.slot, KvTable::Own, piece.start + piece.len, &mut batch.tables);
            }
            SpanTable::Scratch => book.cover(piece.slot, KvTable::Cross, piece.len, &mut batch.tables),
            SpanTable::Sink => {}
        }
        batch.spans.push(piece.span(tokens, want));
    }
    draw_all(&mut batch);
    batch
}

/// Makes every wanted row of the batch a greedy draw.
pub(super) fn draw_all(batch: &mut StepBatch) {
    let stacks = [SpanStack::Encoder, SpanStack::Decoder];
    let wanted = stacks.map(|stack| batch.wanted_rows(stack).count()).iter().sum();
    batch.samples = vec![SampleRow::GREEDY; wanted];
}

/// Sequence and position of the rows of one stack.
pub(super) fn rows_of(pieces: &[Piece], stack: SpanStack) -> Vec<(u32, usize)> {
    pieces.iter().filter(|piece| piece.stack() == stack).flat_map(Piece::rows).collect()
}
