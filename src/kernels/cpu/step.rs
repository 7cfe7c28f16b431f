//! The state of the slots, and the rows of the step at hand.
//!
//! Invariant: after [`Step::new`] nothing here allocates; a batch beyond the limits is a bug and asserted.

use crate::backend::{KvLayout, KvTable, StepLimits};
use crate::batch::{Page, SINK_PAGE, SampleRow, Span, SpanStack, SpanTable, SpanTokens, StepBatch};
use crate::cpu::attention::RunItems;
use std::ops::Range;

/// Slot state and row map.
pub struct Step {
    pub limits: StepLimits,
    /// The last token drawn in each slot.
    last: Vec<u32>,
    own: Tables,
    cross: Tables,
    /// The step's spans, as runs of rows, and their rows: the encoder's, then the decoder's.
    runs: Vec<Run>,
    rows: Vec<Row>,
    /// Rows whose logits are wanted, and what to do with each.
    wanted: Vec<u32>,
    samples: Vec<SampleRow>,
    pub biases: Vec<(u32, f32)>,
    parts: [Part; 2],
    /// The stack whose rows are the current ones.
    stack: SpanStack,
    /// What attention needs to find a work item's run.
    pub run_items: Vec<RunItems>,
}

/// One page table for each slot, (slots, len).
struct Tables {
    entries: Vec<Page>,
    len: usize,
}

/// Where a stack's share of a step lies.
#[derive(Default)]
struct Part {
    runs: Range<usize>,
    rows: Range<usize>,
    wanted: Range<usize>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy)]
pub struct Run {
    pub slot: usize,
    /// Position of the first row.
    pub start: usize,
    /// Its number among the rows of its stack.
    pub first_row: usize,
    pub len: usize,
    /// Whether its token was drawn, not given.
    pub drawn: bool,
    pub table: SpanTable,
    pub reserved: usize,
    pub source: usize,
    /// Of a scratch run: where its position 0 lies in the scratch cache.
    scratch: usize,
}

/// One row of the step.
#[derive(Clone, Copy)]
pub struct Row {
    pub token: u32,
    pub position: usize,
    /// Number among the runs of its stack.
    pub run: u32,
}

impl Step {
    /// Empty slots and room for any step within `limits`.
    pub fn new(limits: &StepLimits) -> Step {
        Step {
            limits: *limits,
            last: vec![0; limits.slots],
            own: Tables::new(limits.slots, limits.table_len()),
            cross: Tables::new(limits.slots, limits.cross_table_len()),
            runs: Vec::with_capacity(limits.rows),
            rows: Vec::with_capacity(limits.rows),
            wanted: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            biases: Vec::with_capacity(limits.bias_room()),
            parts: Default::default(),
            stack: SpanStack::Decoder,
            run_items: Vec::with_capacity(limits.rows),
        }
    }

    /// Applies moves and table updates, and maps the rows.
    pub fn begin(&mut self, batch: &StepBatch) {
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        assert!(batch.spans.is_sorted_by_key(|span| span.stack), "spans of the encoder come first");
        self.apply_moves(batch);
        for update in &batch.tables {
            match update.table {
                KvTable::Own => self.own.set(update.slot as usize, update.index as usize, update.page),
                KvTable::Cross => self.cross.set(update.slot as usize, update.index as usize, update.page),
                KvTable::Scratch => panic!("there is no scratch table to write; this is a bug"),
            }
        }
        self.map_rows(batch);
        assert_eq!(self.wanted.len(), batch.samples.len(), "each wanted row has its entry");
        self.samples.clear();
        self.samples.extend_from_slice(&batch.samples);
        let biases = batch.biases.len();
        assert!(biases <= self.limits.bias_room(), "{biases} biases exceed the limits");
        self.biases.clear();
        self.biases.extend_from_slice(&batch.biases);
        self.stack = SpanStack::Decoder;
    }

    /// Makes the rows of a stack the current ones; gives their number.
    pub fn select(&mut self, stack: SpanStack) -> usize {
        self.stack = stack;
        self.part().rows.len()
    }

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

    fn map_rows(&mut self, batch: &StepBatch) {
        self.runs.clear();
        self.rows.clear();
        self.wanted.clear();
        let (mut spans, mut scratch) = (batch.spans.iter().peekable(), 0);
        for stack in [SpanStack::Encoder, SpanStack::Decoder] {
            let (from, wanted) = ((self.runs.len(), self.rows.len()), self.wanted.len());
            while let Some(span) = spans.next_if(|span| span.stack == stack) {
                self.map_span(span, &batch.tokens, from, &mut scratch);
            }
            self.wanted.extend(batch.wanted_rows(stack).map(|row| row as u32));
            self.parts[stack as usize] = Part {
                runs: from.0..self.runs.len(),
                rows: from.1..self.rows.len(),
                wanted: wanted..self.wanted.len(),
            };
        }
        assert!(scratch <= self.limits.scratch_positions(), "{scratch} positions exceed the scratch cache");
    }

    /// `before` counts the runs and the rows of the stacks before this one, `scratch` the places taken.
    fn map_span(&mut self, span: &Span, tokens: &[u32], before: (usize, usize), scratch: &mut usize) {
        self.check(span);
        let (slot, start, len) = (span.slot as usize, span.start as usize, span.len());
        let last = [self.last[slot]];
        let tokens = match span.tokens {
            SpanTokens::Given { at, .. } | SpanTokens::Drawn { at } => &tokens[at as usize..][..len],
            SpanTokens::Last => &last,
        };
        let (run, first_row) = ((self.runs.len() - before.0) as u32, self.rows.len() - before.1);
        let row = |(i, &token): (usize, &u32)| Row { token, position: start + i, run };
        self.rows.extend(tokens.iter().enumerate().map(row));
        self.runs.push(Run {
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

    fn check(&self, span: &Span) {
        let is_encoder = span.stack == SpanStack::Encoder;
        let (start, len) = (span.start as usize, span.len());
        let positions = if is_encoder { self.limits.source_positions } else { self.limits.positions };
        assert!((span.slot as usize) < self.limits.slots, "slot {} is beyond the slots", span.slot);
        assert!(len > 0 && start + len <= positions, "{span:?} is beyond the positions");
        assert!(span.source as usize <= self.limits.source_positions, "{span:?} has too long a source");
        assert_eq!(
            is_encoder,
            span.table == SpanTable::Scratch,
            "an encoder's spans, and no others, are scratch"
        );
        assert!(!is_encoder || start == 0, "{span:?} is not a whole source");
    }

    fn part(&self) -> &Part {
        &self.parts[self.stack as usize]
    }

    /// The current rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows[self.part().rows.clone()]
    }

    /// The runs of the current rows.
    pub fn runs(&self) -> &[Run] {
        &self.runs[self.part().runs.clone()]
    }

    /// The current rows whose logits are wanted, and what to do with each.
    pub fn wanted(&self) -> &[u32] {
        &self.wanted[self.part().wanted.clone()]
    }

    pub fn samples(&self) -> &[SampleRow] {
        &self.samples[self.part().wanted.clone()]
    }

    /// The run of a row.
    pub fn run_of(&self, row: &Row) -> &Run {
        &self.runs()[row.run as usize]
    }

    /// Where `position` of a run's sequence, or of its source, lies: the page, and the position within it.
    #[inline(always)]
    pub fn place(&self, run: &Run, table: KvTable, position: usize) -> (Page, usize) {
        let size = self.limits.page_positions;
        let page = match (table, run.table) {
            (KvTable::Scratch, _) => {
                let at = run.scratch + position;
                return ((at / size) as Page, at % size);
            }
            (_, SpanTable::Sink) => SINK_PAGE,
            (KvTable::Own, _) => self.own.of(run.slot)[position / size],
            (KvTable::Cross, _) => self.cross.of(run.slot)[position / size],
        };
        (page, position % size)
    }

    /// One of a slot's page tables.
    pub fn table(&self, slot: usize, table: KvTable) -> &[Page] {
        match table {
            KvTable::Own => self.own.of(slot),
            KvTable::Cross => self.cross.of(slot),
            KvTable::Scratch => &[],
        }
    }

    /// Remembers the token drawn for wanted row number `wanted`, unless its result is to be discarded.
    pub fn remember(&mut self, wanted: usize, token: u32) {
        let run = *self.run_of(&self.rows()[self.wanted()[wanted] as usize]);
        if run.table != SpanTable::Sink {
            self.last[run.slot] = token;
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
