//! The state of the slots, and the rows of the step at hand.
//!
//! Invariant: after [`Step::new`] nothing here allocates; a batch beyond the limits is a bug and asserted.

use crate::backend::StepLimits;
use crate::batch::{Page, SINK_PAGE, SampleRow, Span, SpanTable, SpanTokens, StepBatch};

/// Slot state and row map.
pub struct Step {
    pub limits: StepLimits,
    /// The last token drawn in each slot.
    last: Vec<u32>,
    /// (slots, table_len).
    tables: Vec<Page>,
    /// The step's spans, as runs of rows.
    pub spans: Vec<Run>,
    pub rows: Vec<Row>,
    /// Rows whose results are wanted, and what to do with each.
    pub wanted: Vec<u32>,
    pub samples: Vec<SampleRow>,
    pub biases: Vec<(u32, f32)>,
    /// What attention needs to find a work item's span: the number of items up to each span's end.
    pub item_ends: Vec<usize>,
}

/// Consecutive rows of one sequence.
#[derive(Clone, Copy)]
pub struct Run {
    pub slot: usize,
    /// Position of the first row.
    pub start: usize,
    pub first_row: usize,
    pub len: usize,
    /// Computed only to be discarded.
    pub is_sink: bool,
}

/// One row of the step.
#[derive(Clone, Copy)]
pub struct Row {
    pub token: u32,
    pub position: usize,
    /// Index into `spans`.
    pub span: u32,
}

impl Step {
    /// Empty slots and room for any step within `limits`.
    pub fn new(limits: &StepLimits) -> Step {
        Step {
            limits: *limits,
            last: vec![0; limits.slots],
            tables: vec![SINK_PAGE; limits.slots * limits.table_len()],
            spans: Vec::with_capacity(limits.rows),
            rows: Vec::with_capacity(limits.rows),
            wanted: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            biases: Vec::with_capacity(limits.bias_room()),
            item_ends: Vec::with_capacity(limits.rows),
        }
    }

    /// Applies moves and table updates, and maps the rows.
    pub fn begin(&mut self, batch: &StepBatch) {
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        self.apply_moves(batch);
        let table_len = self.limits.table_len();
        for update in &batch.tables {
            assert!((update.index as usize) < table_len, "{update:?} is beyond the table");
            self.tables[update.slot as usize * table_len + update.index as usize] = update.page;
        }
        self.spans.clear();
        self.rows.clear();
        for span in &batch.spans {
            self.map_span(span, &batch.tokens);
        }
        self.wanted.clear();
        self.wanted.extend(batch.wanted_rows().map(|row| row as u32));
        assert_eq!(self.wanted.len(), batch.samples.len(), "each wanted row has its entry");
        self.samples.clear();
        self.samples.extend_from_slice(&batch.samples);
        assert!(
            batch.biases.len() <= self.limits.bias_room(),
            "{} biases exceed the limits",
            batch.biases.len()
        );
        self.biases.clear();
        self.biases.extend_from_slice(&batch.biases);
    }

    fn apply_moves(&mut self, batch: &StepBatch) {
        let table_len = self.limits.table_len();
        for moved in &batch.moves {
            debug_assert!(batch.moves.iter().all(|other| other.from != moved.to), "moves overlap");
            let (from, to) = (moved.from as usize, moved.to as usize);
            assert!(from.max(to) < self.limits.slots, "{moved:?} is beyond the slots");
            self.last[to] = self.last[from];
            self.tables.copy_within(from * table_len..(from + 1) * table_len, to * table_len);
        }
    }

    fn map_span(&mut self, span: &Span, tokens: &[u32]) {
        let (slot, start, len) = (span.slot as usize, span.start as usize, span.len());
        assert!(slot < self.limits.slots, "slot {slot} is beyond the slots");
        assert!(len > 0 && start + len <= self.limits.positions, "{span:?} is beyond the positions");
        assert!(matches!(span.table, SpanTable::Own | SpanTable::Sink), "no {:?} table here", span.table);
        let is_sink = span.table == SpanTable::Sink;
        let last = [self.last[slot]];
        let tokens = match span.tokens {
            SpanTokens::Given { at, .. } => &tokens[at as usize..][..len],
            SpanTokens::Last => &last,
        };
        let (number, first_row) = (self.spans.len() as u32, self.rows.len());
        self.rows.extend(tokens.iter().enumerate().map(|(i, &token)| Row {
            token,
            position: start + i,
            span: number,
        }));
        self.spans.push(Run { slot, start, first_row, len, is_sink });
    }

    /// The page that holds `position` of a run's sequence.
    pub fn page(&self, run: &Run, position: usize) -> Page {
        match run.is_sink {
            true => SINK_PAGE,
            false => self.table(run.slot)[position / self.limits.page_positions],
        }
    }

    /// A slot's page table.
    pub fn table(&self, slot: usize) -> &[Page] {
        let table_len = self.limits.table_len();
        &self.tables[slot * table_len..][..table_len]
    }

    /// The run that wanted row number `wanted` belongs to.
    fn run_of(&self, wanted: usize) -> Run {
        self.spans[self.rows[self.wanted[wanted] as usize].span as usize]
    }

    /// Remembers the token drawn for wanted row number `wanted`, unless its result is to be discarded.
    pub fn remember(&mut self, wanted: usize, token: u32) {
        let run = self.run_of(wanted);
        if !run.is_sink {
            self.last[run.slot] = token;
        }
    }
}
