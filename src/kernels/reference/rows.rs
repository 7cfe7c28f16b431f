//! The slots of the reference backend, and the rows of the current step.
//!
//! Invariant: which positions a row attends to, and where they are stored, follows from its span and the
//! tables of its slot.

use super::Reference;
use crate::backend::{Fraction, KvLayout, KvTable, Mask, StepLimits};
use crate::batch::{NULL_PAGE, Page, Span, SpanStack, SpanTable, SpanTokens, StepBatch};
use std::ops::Range;

/// The rows of one stack.
#[derive(Clone, Debug, Default)]
pub(super) struct StackRows {
    pub(super) rows: Vec<Row>,
    /// Indices of the output rows among them, in order.
    pub(super) output_rows: Vec<usize>,
    /// Index of their first entry among the sampling parameters of the step.
    pub(super) first_sample: usize,
}

/// The state of a slot.
#[derive(Clone, Debug)]
pub(super) struct SlotState {
    pub(super) last_token: u32,
    pub(super) own_table: Vec<Page>,
    pub(super) cross_table: Vec<Page>,
}

/// A row of the current step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) slot: usize,
    pub(super) position: usize,
    pub(super) token: u32,
    /// Whether the token was generated rather than given.
    pub(super) is_generated: bool,
    pub(super) table: SpanTable,
    pub(super) reserved: usize,
    encoder_len: usize,
    /// Length of the span, and its first position in the scratch cache.
    span_len: usize,
    scratch_start: usize,
}

impl SlotState {
    pub(super) fn new(limits: &StepLimits) -> SlotState {
        SlotState {
            last_token: 0,
            own_table: vec![NULL_PAGE; limits.table_len()],
            cross_table: vec![NULL_PAGE; limits.cross_table_len()],
        }
    }
}

/// Returns the positions that a row attends to.
pub(super) fn visible_positions(row: &Row, mask: Mask, table: KvTable) -> Range<usize> {
    let position = row.position;
    let all = match (table, mask) {
        (KvTable::Cross, _) if row.table == SpanTable::Null => 0..0,
        (KvTable::Own, _) if row.table == SpanTable::Null => position..position + 1,
        (_, Mask::Causal { .. }) => 0..position + 1,
        (KvTable::Scratch, Mask::Bidirectional { .. }) => 0..row.span_len,
        (_, Mask::Bidirectional { .. }) => 0..row.encoder_len,
    };
    let (before, after) = match mask {
        Mask::Causal { window } => (window.map(|window| window - 1), Some(0)),
        Mask::Bidirectional { window } => (window, window),
    };
    let first = before.map_or(0, |before| position.saturating_sub(before));
    let end = after.map_or(all.end, |after| all.end.min(position + after + 1));
    all.start.max(first)..end
}

impl Reference {
    /// Returns the limits of a step.
    pub(super) fn limits(&self) -> &StepLimits {
        self.limits.as_ref().expect("prepare must be called before the first step; this is a bug")
    }

    /// Returns the fraction of the earlier positions whose values a row attends to.
    pub(super) fn attended_fraction(&self, row: &Row, table: KvTable) -> Fraction {
        if row.is_generated && table == KvTable::Own {
            self.limits().attended_fraction
        } else {
            Fraction::ONE
        }
    }

    /// Returns the current rows.
    pub(super) fn rows(&self) -> &[Row] {
        &self.stack_rows[self.current_stack].rows
    }

    /// Applies slot moves.
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

    /// Applies page table updates.
    pub(super) fn update_tables(&mut self, batch: &StepBatch) {
        for update in &batch.table_updates {
            let slot = &mut self.slots[update.slot as usize];
            let table = match update.table {
                KvTable::Own => &mut slot.own_table,
                KvTable::Cross => &mut slot.cross_table,
                KvTable::Scratch => panic!("the scratch cache has no page table to update; this is a bug"),
            };
            table[update.index as usize] = update.page;
        }
    }

    /// Maps the spans of a batch to rows.
    pub(super) fn map_rows(&mut self, batch: &StepBatch) {
        assert!(batch.spans.is_sorted_by_key(|span| span.stack), "encoder spans precede decoder spans");
        assert!(batch.rows() <= self.limits().rows, "{} rows exceed the limits", batch.rows());
        self.stack_rows = Default::default();
        let mut scratch = 0;
        for span in &batch.spans {
            self.map_span(span, &batch.tokens, scratch);
            if span.table == SpanTable::Scratch {
                scratch += span.len().next_multiple_of(KvLayout::BLOCK_POSITIONS);
            }
        }
        assert!(scratch <= self.limits().scratch_positions(), "{scratch} positions exceed the scratch cache");
        let [encoder, decoder] = &mut self.stack_rows;
        encoder.output_rows = batch.output_rows(SpanStack::Encoder).collect();
        decoder.output_rows = batch.output_rows(SpanStack::Decoder).collect();
        decoder.first_sample = encoder.output_rows.len();
        let outputs = encoder.output_rows.len() + decoder.output_rows.len();
        assert_eq!(outputs, batch.sampling.len(), "each output row has sampling parameters");
    }

    /// Maps one span; `scratch` is its first position in the scratch cache.
    fn map_span(&mut self, span: &Span, tokens: &[u32], scratch: usize) {
        let is_encoder = span.stack == SpanStack::Encoder;
        assert_eq!(
            is_encoder,
            span.table == SpanTable::Scratch,
            "encoder spans, and only those, use the scratch cache"
        );
        let (start, len) = (span.start as usize, span.len());
        let end = if is_encoder { self.limits().encoder_positions } else { self.limits().positions };
        assert!(start + len <= end && !(is_encoder && start > 0), "{span:?} is beyond the limits");
        let last = [self.slots[span.slot as usize].last_token];
        let tokens = match span.tokens {
            SpanTokens::Given { at, .. } | SpanTokens::Generated { at, .. } => &tokens[at as usize..][..len],
            SpanTokens::Last => &last,
        };
        self.stack_rows[span.stack as usize].rows.extend(tokens.iter().enumerate().map(|(i, &token)| Row {
            slot: span.slot as usize,
            position: start + i,
            token,
            is_generated: span.tokens.is_generated(),
            table: span.table,
            reserved: span.reserved as usize,
            encoder_len: span.encoder_len as usize,
            span_len: len,
            scratch_start: scratch,
        }));
    }

    /// Returns the index of a position among all positions of the cache.
    pub(super) fn locate(&self, row: &Row, table: KvTable, position: usize, layout: &KvLayout) -> usize {
        let (slot, index) = (&self.slots[row.slot], position / layout.page_positions);
        let page = match (row.table, table) {
            (_, KvTable::Scratch) => return row.scratch_start + position,
            (SpanTable::Null, _) => NULL_PAGE,
            (_, KvTable::Own) => slot.own_table[index],
            (_, KvTable::Cross) => slot.cross_table[index],
        };
        assert!((page as usize) < layout.pages, "page {page} is outside the pool");
        page as usize * layout.page_positions + position % layout.page_positions
    }
}
