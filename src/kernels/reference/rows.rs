//! The oracle's slots, and the rows of the step at hand.
//!
//! Invariant: what a row sees, and where it lies, follows from its span and its slot's tables.

use super::Reference;
use crate::backend::{KvLayout, KvTable, Mask, Share, StepLimits};
use crate::batch::{Page, SINK_PAGE, Span, SpanStack, SpanTable, SpanTokens, StepBatch};
use std::ops::Range;

/// Rows of one stack.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    pub(super) rows: Vec<Row>,
    /// Of those, the rows whose logits are wanted, in order.
    pub(super) wanted: Vec<usize>,
    /// Where their entries begin among the step's samples.
    pub(super) first_sample: usize,
}

#[derive(Clone, Debug)]
pub(super) struct SlotState {
    pub(super) last: u32,
    pub(super) own: Vec<Page>,
    pub(super) cross: Vec<Page>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) slot: usize,
    pub(super) position: usize,
    pub(super) token: u32,
    /// Whether the token was drawn, not given.
    pub(super) drawn: bool,
    pub(super) table: SpanTable,
    pub(super) reserved: usize,
    source: usize,
    /// Of a scratch span: its length, and the place of its first position.
    span_len: usize,
    scratch: usize,
}

impl SlotState {
    pub(super) fn new(limits: &StepLimits) -> SlotState {
        SlotState {
            last: 0,
            own: vec![SINK_PAGE; limits.table_len()],
            cross: vec![SINK_PAGE; limits.cross_table_len()],
        }
    }
}

/// The positions a row attends to.
pub(super) fn visible(row: &Row, mask: Mask, table: KvTable) -> Range<usize> {
    let position = row.position;
    let all = match (table, mask) {
        (KvTable::Cross, _) if row.table == SpanTable::Sink => 0..0,
        (KvTable::Own, _) if row.table == SpanTable::Sink => position..position + 1,
        (_, Mask::Causal { .. }) => 0..position + 1,
        (KvTable::Scratch, Mask::Whole { .. }) => 0..row.span_len,
        (_, Mask::Whole { .. }) => 0..row.source,
    };
    let (before, after) = match mask {
        Mask::Causal { window } => (window.map(|window| window - 1), Some(0)),
        Mask::Whole { window } => (window, window),
    };
    let first = before.map_or(0, |before| position.saturating_sub(before));
    let end = after.map_or(all.end, |after| all.end.min(position + after + 1));
    all.start.max(first)..end
}

impl Reference {
    pub(super) fn limits(&self) -> &StepLimits {
        self.limits.as_ref().expect("prepare comes before the first step; this is a bug")
    }

    /// Of how large a share of its past a row takes the values.
    pub(super) fn share(&self, row: &Row, table: KvTable) -> Share {
        if row.drawn && table == KvTable::Own { self.limits().attended } else { Share::ALL }
    }

    pub(super) fn rows(&self) -> &[Row] {
        &self.parts[self.part].rows
    }

    pub(super) fn move_slots(&mut self, batch: &StepBatch) {
        for moved in &batch.moves {
            assert!(
                batch.moves.iter().all(|other| other.from != moved.to),
                "moves overlap: {:?}",
                batch.moves
            );
            self.slots[moved.to as usize] = self.slots[moved.from as usize].clone();
        }
    }

    pub(super) fn update_tables(&mut self, batch: &StepBatch) {
        for update in &batch.tables {
            let slot = &mut self.slots[update.slot as usize];
            let table = match update.table {
                KvTable::Own => &mut slot.own,
                KvTable::Cross => &mut slot.cross,
                KvTable::Scratch => panic!("there is no scratch table to write; this is a bug"),
            };
            table[update.index as usize] = update.page;
        }
    }

    pub(super) fn map_rows(&mut self, batch: &StepBatch) {
        assert!(batch.spans.is_sorted_by_key(|span| span.stack), "spans of the encoder come first");
        assert!(batch.rows() <= self.limits().rows, "{} rows exceed the limits", batch.rows());
        self.parts = Default::default();
        let mut scratch = 0;
        for span in &batch.spans {
            self.map_span(span, &batch.tokens, scratch);
            if span.table == SpanTable::Scratch {
                scratch += span.len().next_multiple_of(KvLayout::BLOCK);
            }
        }
        assert!(scratch <= self.limits().scratch_positions(), "{scratch} positions exceed the scratch cache");
        let [encoder, decoder] = &mut self.parts;
        encoder.wanted = batch.wanted_rows(SpanStack::Encoder).collect();
        decoder.wanted = batch.wanted_rows(SpanStack::Decoder).collect();
        decoder.first_sample = encoder.wanted.len();
        let wanted = encoder.wanted.len() + decoder.wanted.len();
        assert_eq!(wanted, batch.samples.len(), "each wanted row has its entry");
    }

    fn map_span(&mut self, span: &Span, tokens: &[u32], scratch: usize) {
        let is_encoder = span.stack == SpanStack::Encoder;
        assert_eq!(
            is_encoder,
            span.table == SpanTable::Scratch,
            "an encoder's spans, and no others, are scratch"
        );
        let (start, len) = (span.start as usize, span.len());
        let end = if is_encoder { self.limits().source_positions } else { self.limits().positions };
        assert!(start + len <= end && !(is_encoder && start > 0), "{span:?} is beyond the limits");
        let last = [self.slots[span.slot as usize].last];
        let tokens = match span.tokens {
            SpanTokens::Given { at, .. } | SpanTokens::Drawn { at } => &tokens[at as usize..][..len],
            SpanTokens::Last => &last,
        };
        self.parts[span.stack as usize].rows.extend(tokens.iter().enumerate().map(|(i, &token)| Row {
            slot: span.slot as usize,
            position: start + i,
            token,
            drawn: span.tokens.is_drawn(),
            table: span.table,
            reserved: span.reserved as usize,
            source: span.source as usize,
            span_len: len,
            scratch,
        }));
    }

    /// Where a position lies: its number among all positions of the cache.
    pub(super) fn place(&self, row: &Row, table: KvTable, position: usize, layout: &KvLayout) -> usize {
        let (slot, index) = (&self.slots[row.slot], position / layout.page_positions);
        let page = match (row.table, table) {
            (_, KvTable::Scratch) => return row.scratch + position,
            (SpanTable::Sink, _) => SINK_PAGE,
            (_, KvTable::Own) => slot.own[index],
            (_, KvTable::Cross) => slot.cross[index],
        };
        assert!((page as usize) < layout.pages, "page {page} is outside the pool");
        page as usize * layout.page_positions + position % layout.page_positions
    }
}
