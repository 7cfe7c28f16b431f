//! State of the slots, and the rows of the current step.
//!
//! Invariant: after [`StepState::new`] nothing here allocates. A batch beyond the limits is a bug and fails
//! an assertion.

use crate::backend::{KvLayout, KvTable, StepLimits};
use crate::batch::{Page, SINK_PAGE, SampleRow, Span, SpanStack, SpanTable, SpanTokens, StepBatch};
use crate::cpu::attention::RunItems;
use std::ops::Range;

/// The state of all slots, and the rows of the current step.
pub struct Step {
    pub limits: StepLimits,
    /// The last token sampled in each slot.
    last: Vec<u32>,
    own: Tables,
    cross: Tables,
    /// The step's spans and their rows: first those of the encoder, then those of the decoder.
    spans: Vec<Run>,
    rows: Vec<Row>,
    /// Rows whose logits are wanted, and how to sample each.
    wanted: Vec<u32>,
    samples: Vec<SampleRow>,
    pub biases: Vec<(u32, f32)>,
    parts: [Part; 2],
    /// The stack whose rows are selected.
    stack: SpanStack,
    /// Attention's map from work items to spans.
    pub run_items: Vec<RunItems>,
}

/// One page table for each slot: (slots, len).
struct Tables {
    entries: Vec<Page>,
    len: usize,
}

/// The ranges of a step's spans and rows that belong to one stack.
#[derive(Default)]
struct Part {
    runs: Range<usize>,
    rows: Range<usize>,
    wanted: Range<usize>,
}

/// A span of the current step: consecutive rows of one sequence.
#[derive(Clone, Copy)]
pub struct Run {
    pub slot: usize,
    /// Position of the first row.
    pub start: usize,
    /// Number of the first row among the rows of its stack.
    pub first_row: usize,
    pub len: usize,
    /// Whether its tokens were generated rather than given.
    pub drawn: bool,
    pub table: SpanTable,
    pub reserved: usize,
    pub source: usize,
    /// Start of the span in the scratch cache, if it uses that.
    scratch: usize,
}

/// One row of the step.
#[derive(Clone, Copy)]
pub struct Row {
    pub token: u32,
    pub position: usize,
    /// Number of its span among the spans of its stack.
    pub run: u32,
}

impl Step {
    /// Creates empty slots, with capacity for any step within `limits`.
    pub fn new(limits: &StepLimits) -> Step {
        Step {
            limits: *limits,
            last: vec![0; limits.slots],
            own: Tables::new(limits.slots, limits.table_len()),
            cross: Tables::new(limits.slots, limits.cross_table_len()),
            spans: Vec::with_capacity(limits.rows),
            rows: Vec::with_capacity(limits.rows),
            wanted: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            biases: Vec::with_capacity(limits.bias_room()),
            parts: Default::default(),
            stack: SpanStack::Decoder,
            run_items: Vec::with_capacity(limits.rows),
        }
    }

    /// Begins a step: applies slot moves and page table updates, and maps the rows.
    pub fn begin(&mut self, batch: &StepBatch) {
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        assert!(batch.spans.is_sorted_by_key(|span| span.stack), "encoder spans precede decoder spans");
        self.apply_moves(batch);
        for update in &batch.tables {
            match update.table {
                KvTable::Own => self.own.set(update.slot as usize, update.index as usize, update.page),
                KvTable::Cross => self.cross.set(update.slot as usize, update.index as usize, update.page),
                KvTable::Scratch => panic!("the scratch cache has no page table to update; this is a bug"),
            }
        }
        self.map_rows(batch);
        assert_eq!(self.wanted.len(), batch.samples.len(), "each wanted row has a sampling entry");
        self.samples.clear();
        self.samples.extend_from_slice(&batch.samples);
        let biases = batch.biases.len();
        assert!(biases <= self.limits.bias_room(), "{biases} biases exceed the limits");
        self.biases.clear();
        self.biases.extend_from_slice(&batch.biases);
        self.stack = SpanStack::Decoder;
    }

    /// Selects the rows of a stack; returns their number.
    pub fn select(&mut self, stack: SpanStack) -> usize {
        self.stack = stack;
        self.part().rows.len()
    }

    /// Copies the state of moved slots.
    fn apply_moves(&mut self, batch: &StepBatch) {
        for moved in &batch.moves {
            debug_assert!(batch.moves.iter().all(|other| other.from != moved.to), "moves overlap");
            let (from, to) = (moved.from as usize, moved.to as usize);
            assert!(from.max(to) < self.limits.slots, "{moved:?} is beyond the slots");
            self.last[to] = self.last[from];
            self.own.copy(from, to);
            self.cross.copy(from, to);
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
            self.wanted.extend(batch.wanted_rows(stack).map(|row| row as u32));
            self.parts[stack as usize] = Part {
                runs: before.0..self.spans.len(),
                rows: before.1..self.rows.len(),
                wanted: wanted..self.wanted.len(),
            };
        }
        assert!(scratch <= self.limits.scratch_positions(), "{scratch} positions exceed the scratch cache");
    }

    /// Maps one span. `before` holds the numbers of spans and rows of earlier stacks, `scratch` the number of
    /// scratch positions in use.
    fn map_span(&mut self, span: &Span, tokens: &[u32], before: (usize, usize), scratch: &mut usize) {
        self.check(span);
        let (slot, start, len) = (span.slot as usize, span.start as usize, span.len());
        let last = [self.last[slot]];
        let tokens = match span.tokens {
            SpanTokens::Given { at, .. } | SpanTokens::Drawn { at } => &tokens[at as usize..][..len],
            SpanTokens::Last => &last,
        };
        let (number, first_row) = ((self.spans.len() - before.0) as u32, self.rows.len() - before.1);
        let row = |(i, &token): (usize, &u32)| Row { token, position: start + i, run: number };
        self.rows.extend(tokens.iter().enumerate().map(row));
        self.spans.push(Run {
            slot,
            start,
            first_row,
            len,
            drawn: span.tokens.is_drawn(),
            table: span.table,
            reserved: span.reserved as usize,
            source: span.source as usize,
            scratch: *scratch,
        });
        if span.table == SpanTable::Scratch {
            *scratch += len.next_multiple_of(KvLayout::BLOCK);
        }
    }

    /// Asserts that a span is within the limits.
    fn check(&self, span: &Span) {
        let is_encoder = span.stack == SpanStack::Encoder;
        let (start, len) = (span.start as usize, span.len());
        let positions = if is_encoder { self.limits.source_positions } else { self.limits.positions };
        assert!((span.slot as usize) < self.limits.slots, "slot {} is beyond the slots", span.slot);
        assert!(len > 0 && start + len <= positions, "{span:?} is beyond the positions");
        assert!(
            span.source as usize <= self.limits.source_positions,
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
    fn part(&self) -> &Part {
        &self.parts[self.stack as usize]
    }

    /// Returns the selected rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows[self.part().rows.clone()]
    }

    /// Returns the spans of the selected rows.
    pub fn runs(&self) -> &[Run] {
        &self.spans[self.part().runs.clone()]
    }

    /// Returns the numbers of the selected rows whose logits are wanted.
    pub fn wanted(&self) -> &[u32] {
        &self.wanted[self.part().wanted.clone()]
    }

    /// Returns how to sample each wanted row.
    pub fn samples(&self) -> &[SampleRow] {
        &self.samples[self.part().wanted.clone()]
    }

    /// Returns the span of a row.
    pub fn run_of(&self, row: &Row) -> &Run {
        &self.runs()[row.run as usize]
    }

    /// Returns the page that holds `position` of a span's sequence, or of its encoder input, and the position
    /// within that page.
    #[inline(always)]
    pub fn place(&self, span: &Run, table: KvTable, position: usize) -> (Page, usize) {
        let size = self.limits.page_positions;
        let page = match (table, span.table) {
            (KvTable::Scratch, _) => {
                let at = span.scratch + position;
                return ((at / size) as Page, at % size);
            }
            (_, SpanTable::Sink) => SINK_PAGE,
            (KvTable::Own, _) => self.own.of(span.slot)[position / size],
            (KvTable::Cross, _) => self.cross.of(span.slot)[position / size],
        };
        (page, position % size)
    }

    /// Returns one of a slot's page tables.
    pub fn table(&self, slot: usize, table: KvTable) -> &[Page] {
        match table {
            KvTable::Own => self.own.of(slot),
            KvTable::Cross => self.cross.of(slot),
            KvTable::Scratch => &[],
        }
    }

    /// Stores the token sampled for wanted row number `wanted` as its slot's last token, unless the result is
    /// to be discarded.
    pub fn remember(&mut self, wanted: usize, token: u32) {
        let span = *self.run_of(&self.rows()[self.wanted()[wanted] as usize]);
        if span.table != SpanTable::Sink {
            self.last[span.slot] = token;
        }
    }
}

impl Tables {
    fn new(slots: usize, len: usize) -> Tables {
        Tables { entries: vec![SINK_PAGE; slots * len], len }
    }

    fn of(&self, slot: usize) -> &[Page] {
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
