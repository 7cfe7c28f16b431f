//! The positions that each row of the current step attends to, and where these are stored.
//!
//! Invariant: both follow from the span of a row and the tables of its slot.

use super::Reference;
use crate::backend::{Fraction, KvLayout, KvTable, Mask};
use crate::batch::{RowSpan, SpanTable, StepState};
use std::ops::Range;

/// Returns the positions that the row of a span at `position` attends to.
pub(super) fn visible_positions(span: &RowSpan, position: usize, mask: Mask, table: KvTable) -> Range<usize> {
    let all = match (table, mask) {
        (KvTable::Cross, _) if span.table == SpanTable::Null => 0..0,
        (KvTable::Own | KvTable::Window, _) if span.table == SpanTable::Null => position..position + 1,
        (_, Mask::Causal { .. } | Mask::Chunked { .. }) => 0..position + 1,
        (KvTable::Scratch, Mask::Bidirectional { .. }) => 0..span.len,
        (_, Mask::Bidirectional { .. }) => 0..span.encoder_len,
    };
    let (before, after) = match mask {
        Mask::Causal { window } => (window.map(|window| window - 1), Some(0)),
        Mask::Chunked { chunk } => (Some(position % chunk), Some(0)),
        Mask::Bidirectional { window } => (window, window),
    };
    let first = before.map_or(0, |before| position.saturating_sub(before));
    let end = after.map_or(all.end, |after| all.end.min(position + after + 1));
    all.start.max(first)..end
}

impl Reference {
    /// Returns the state of the slots, and the rows of the current step.
    pub(super) fn step(&self) -> &StepState {
        self.step.as_ref().expect(NOT_PREPARED)
    }

    /// Returns the same for changing it.
    pub(super) fn step_mut(&mut self) -> &mut StepState {
        self.step.as_mut().expect(NOT_PREPARED)
    }

    /// Returns the fraction of the earlier positions whose values the rows of a span attend to.
    pub(super) fn attended_fraction(&self, span: &RowSpan, table: KvTable) -> Fraction {
        if span.is_generated && table.holds_sequence() {
            self.step().limits.attended_fraction
        } else {
            Fraction::ONE
        }
    }

    /// Returns the index of a position among all positions of the cache.
    pub(super) fn locate(&self, span: &RowSpan, table: KvTable, position: usize, layout: &KvLayout) -> usize {
        let (page, within) = self.step().locate(span, table, position);
        assert_eq!(
            layout.page_positions,
            self.step().limits.page_positions,
            "the cache and the step have the same page size"
        );
        assert!((page as usize) < layout.pages, "page {page} is outside the pool");
        page as usize * layout.page_positions + within
    }
}

pub(super) const NOT_PREPARED: &str = "prepare must be called before the first step; this is a bug";
