//! State of the slots, and the rows of the current step.
//!
//! Invariant: after [`StepState::new`] nothing here allocates. A batch beyond the limits is a bug and fails
//! an assertion.

use crate::backend::{KvLayout, KvTable, StepLimits};
use crate::batch::{NULL_PAGE, Page, SamplingParams, Span, SpanStack, SpanTable, SpanTokens, StepBatch};
use crate::cpu::attention::SpanItems;
use std::ops::Range;

/// The state of all slots, and the rows of the current step.
pub struct StepState {
    pub limits: StepLimits,
    /// The last token sampled in each slot.
    last_tokens: Vec<u32>,
    own_tables: PageTables,
    cross_tables: PageTables,
    /// The step's spans and their rows: first those of the encoder, then those of the decoder.
    spans: Vec<RowSpan>,
    rows: Vec<Row>,
    /// Rows whose logits are wanted, and how to sample each.
    wanted: Vec<u32>,
    samples: Vec<SamplingParams>,
    stack_ranges: [StackRanges; 2],
    /// The stack whose rows are selected.
    stack: SpanStack,
    /// Attention's map from work items to spans.
    pub span_items: Vec<SpanItems>,
}

/// One page table for each slot: (slots, len).
struct PageTables {
    entries: Vec<Page>,
    len: usize,
}

/// The ranges of a step's spans and rows that belong to one stack.
#[derive(Default)]
struct StackRanges {
    spans: Range<usize>,
    rows: Range<usize>,
    wanted: Range<usize>,
}

/// A span of the current step: consecutive rows of one sequence.
#[derive(Clone, Copy)]
pub struct RowSpan {
    pub slot: usize,
    /// Position of the first row.
    pub start: usize,
    /// Number of the first row among the rows of its stack.
    pub first_row: usize,
    pub len: usize,
    /// Whether its tokens were generated rather than given.
    pub is_generated: bool,
    pub table: SpanTable,
    pub reserved: usize,
    pub encoder_len: usize,
    /// Start of the span in the scratch cache, if it uses that.
    scratch_start: usize,
}

/// One row of the step.
#[derive(Clone, Copy)]
pub struct Row {
    pub token: u32,
    pub position: usize,
    /// Number of its span among the spans of its stack.
    pub span: u32,
}

impl StepState {
    /// Creates empty slots, with capacity for any step within `limits`.
    pub fn new(limits: &StepLimits) -> StepState {
        StepState {
            limits: *limits,
            last_tokens: vec![0; limits.slots],
            own_tables: PageTables::new(limits.slots, limits.table_len()),
            cross_tables: PageTables::new(limits.slots, limits.cross_table_len()),
            spans: Vec::with_capacity(limits.rows),
            rows: Vec::with_capacity(limits.rows),
            wanted: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            stack_ranges: Default::default(),
            stack: SpanStack::Decoder,
            span_items: Vec::with_capacity(limits.rows),
        }
    }

    /// Begins a step: applies slot moves and page table updates, and maps the rows.
    pub fn begin(&mut self, batch: &StepBatch) {
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        assert!(batch.spans.is_sorted_by_key(|span| span.stack), "encoder spans precede decoder spans");
        self.apply_moves(batch);
        for update in &batch.table_updates {
            match update.table {
                KvTable::Own => self.own_tables.set(update.slot as usize, update.index as usize, update.page),
                KvTable::Cross => {
                    self.cross_tables.set(update.slot as usize, update.index as usize, update.page)
                }
                KvTable::Scratch => panic!("the scratch cache has no page table to update; this is a bug"),
            }
        }
        self.map_rows(batch);
        assert_eq!(self.wanted.len(), batch.sampling.len(), "each wanted row has a sampling entry");
        self.samples.clear();
        self.samples.extend_from_slice(&batch.sampling);
        self.stack = SpanStack::Decoder;
    }

    /// Selects the rows of a stack; returns their number.
    pub fn select(&mut self, stack: SpanStack) -> usize {
        self.stack = stack;
        self.current_ranges().rows.len()
    }

    /// Copies the state of moved slots.
    fn apply_moves(&mut self, batch: &StepBatch) {
        for moved in &batch.moves {
            debug_assert!(batch.moves.iter().all(|other| other.from != moved.to), "moves overlap");
            let (from, to) = (moved.from as usize, moved.to as usize);
            assert!(from.max(to) < self.limits.slots, "{moved:?} is beyond the slots");
            self.last_tokens[to] = self.last_tokens[from];
            self.own_tables.copy(from, to);
            self.cross_tables.copy(from, to);
        }
    }

    /// Maps the spans of both stacks to rows.
    fn map_rows(&mut self, batch: &StepBatch) {
        self.spans.clear();
        self.rows.clear();
        self.wanted.clear();
        let (mut spans, mut scratch) = (batch.spans.iter().peekable(), 0);
        for stack in [SpanStack::Encoder, SpanStack::Decoder] {
            let (before, wanted) = ((self.spans.len(), self.rows.len()), self.wanted.len());
            while let Some(span) = spans.next_if(|span| span.stack == stack) {
                self.map_span(span, &batch.tokens, before, &mut scratch);
            }
            self.wanted.extend(batch.output_rows(stack).map(|row| row as u32));
            self.stack_ranges[stack as usize] = StackRanges {
                spans: before.0..self.spans.len(),
                rows: before.1..self.rows.len(),
                wanted: wanted..self.wanted.len(),
            };
        }
        assert!(scratch <= self.limits.scratch_positions(), "{scratch} positions exceed the scratch cache");
    }

    /// Maps one span. `before` holds the numbers of spans and rows of earlier stacks, `scratch` the number of
    /// scratch positions in use.
    fn map_span(&mut self, span: &Span, tokens: &[u32], before: (usize, usize), scratch: &mut usize) {
        self.check_span(span);
        let (slot, start, len) = (span.slot as usize, span.start as usize, span.len());
        let last = [self.last_tokens[slot]];
        let tokens = match span.tokens {
            SpanTokens::Given { at, .. } | SpanTokens::Generated { at, .. } => &tokens[at as usize..][..len],
            SpanTokens::Last => &last,
        };
        let (number, first_row) = ((self.spans.len() - before.0) as u32, self.rows.len() - before.1);
        let row = |(i, &token): (usize, &u32)| Row { token, position: start + i, span: number };
        self.rows.extend(tokens.iter().enumerate().map(row));
        self.spans.push(RowSpan {
            slot,
            start,
            first_row,
            len,
            is_generated: span.tokens.is_generated(),
            table: span.table,
            reserved: span.reserved as usize,
            encoder_len: span.encoder_len as usize,
            scratch_start: *scratch,
        });
        if span.table == SpanTable::Scratch {
            *scratch += len.next_multiple_of(KvLayout::BLOCK_POSITIONS);
        }
    }

    /// Asserts that a span is within the limits.
    fn check_span(&self, span: &Span) {
        let is_encoder = span.stack == SpanStack::Encoder;
        let (start, len) = (span.start as usize, span.len());
        let positions = if is_encoder { self.limits.encoder_positions } else { self.limits.positions };
        assert!((span.slot as usize) < self.limits.slots, "slot {} is beyond the slots", span.slot);
        assert!(len > 0 && start + len <= positions, "{span:?} is beyond the positions");
        assert!(
            span.encoder_len as usize <= self.limits.encoder_positions,
            "the encoder input of {span:?} is too long"
        );
        assert_eq!(
            is_encoder,
            span.table == SpanTable::Scratch,
            "encoder spans, and only those, use the scratch cache"
        );
        assert!(!is_encoder || start == 0, "{span:?} is not a complete encoder input");
    }

    /// Returns the ranges of the selected stack.
    fn current_ranges(&self) -> &StackRanges {
        &self.stack_ranges[self.stack as usize]
    }

    /// Returns the selected rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows[self.current_ranges().rows.clone()]
    }

    /// Returns the spans of the selected rows.
    pub fn spans(&self) -> &[RowSpan] {
        &self.spans[self.current_ranges().spans.clone()]
    }

    /// Returns the numbers of the selected rows whose logits are wanted.
    pub fn wanted(&self) -> &[u32] {
        &self.wanted[self.current_ranges().wanted.clone()]
    }

    /// Returns how to sample each wanted row.
    pub fn samples(&self) -> &[SamplingParams] {
        &self.samples[self.current_ranges().wanted.clone()]
    }

    /// Returns the number of the first wanted row of the selected stack among those of the batch.
    pub fn first_sample(&self) -> usize {
        self.current_ranges().wanted.start
    }

    /// Returns the span of a row.
    pub fn span_of(&self, row: &Row) -> &RowSpan {
        &self.spans()[row.span as usize]
    }

    /// Returns the page that holds `position` of a span's sequence, or of its encoder input, and the position
    /// within that page.
    #[inline(always)]
    pub fn locate(&self, span: &RowSpan, table: KvTable, position: usize) -> (Page, usize) {
        let size = self.limits.page_positions;
        let page = match (table, span.table) {
            (KvTable::Scratch, _) => {
                let at = span.scratch_start + position;
                return ((at / size) as Page, at % size);
            }
            (_, SpanTable::Null) => NULL_PAGE,
            (KvTable::Own, _) => self.own_tables.table(span.slot)[position / size],
            (KvTable::Cross, _) => self.cross_tables.table(span.slot)[position / size],
        };
        (page, position % size)
    }

    /// Returns one of a slot's page tables.
    pub fn table(&self, slot: usize, table: KvTable) -> &[Page] {
        match table {
            KvTable::Own => self.own_tables.table(slot),
            KvTable::Cross => self.cross_tables.table(slot),
            KvTable::Scratch => &[],
        }
    }

    /// Stores the token sampled for wanted row number `wanted` as its slot's last token, unless the result is
    /// to be discarded.
    pub fn store_last_token(&mut self, wanted: usize, token: u32) {
        let span = *self.span_of(&self.rows()[self.wanted()[wanted] as usize]);
        if span.table != SpanTable::Null {
            self.last_tokens[span.slot] = token;
        }
    }
}

impl PageTables {
    fn new(slots: usize, len: usize) -> PageTables {
        PageTables { entries: vec![NULL_PAGE; slots * len], len }
    }

    fn table(&self, slot: usize) -> &[Page] {
        &self.entries[slot * self.len..][..self.len]
    }

    fn set(&mut self, slot: usize, index: usize, page: Page) {
        assert!(index < self.len, "entry {index} is beyond the table");
        self.entries[slot * self.len + index] = page;
    }

    fn copy(&mut self, from: usize, to: usize) {
        self.entries.copy_within(from * self.len..(from + 1) * self.len, to * self.len);
    }
}
