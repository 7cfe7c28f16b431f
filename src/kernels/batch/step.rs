//! State of the slots of a device, and the map of a step's rows to slots, tokens, positions and pages.
//!
//! Every backend keeps this state in host memory, whatever it copies to its device.
//! Invariant: after [`StepState::new`] nothing here allocates. A batch beyond the limits is a bug and fails
//! an assertion.

use super::{
    NULL_PAGE, Page, SamplingParams, Span, SpanModel, SpanStack, SpanTable, SpanTokens, StepBatch,
    split_typed_token,
};
use crate::backend::{KvLayout, KvTable, StepLimits};
use crate::late::HostRow;
use std::ops::Range;

/// The state of all slots, and the rows of the current step.
#[derive(Debug)]
pub struct StepState {
    /// The limits that all steps are within.
    pub limits: StepLimits,
    /// The last token sampled in each slot.
    last_tokens: Vec<u32>,
    /// The drafts made in this step, (slots, drafts), and their number in each slot.
    drafts: Vec<u32>,
    draft_counts: Vec<usize>,
    /// Whether the logits of drafts are kept.
    keeps_draft_logits: bool,
    own_tables: PageTables,
    window_tables: PageTables,
    cross_tables: PageTables,
    /// The step's spans and their rows: first those of the encoder, then those of the decoder.
    spans: Vec<RowSpan>,
    rows: Vec<StepRow>,
    /// Rows whose logits are wanted, numbered in each row batch, and how to sample each.
    wanted: Vec<u32>,
    samples: Vec<SamplingParams>,
    /// The row batches: first those of the encoder, then those of the decoder.
    batches: Vec<RowBatch>,
    stack_batches: [Range<usize>; 2],
    /// The selected row batch.
    selected: RowBatch,
}

/// One page table for each slot: (slots, len).
#[derive(Debug)]
struct PageTables {
    entries: Vec<Page>,
    len: usize,
}

/// The ranges of a step's spans and rows that are computed at once.
#[derive(Clone, Debug, Default)]
struct RowBatch {
    spans: Range<usize>,
    rows: Range<usize>,
    wanted: Range<usize>,
    /// Positions of the scratch cache in use.
    scratch: usize,
    /// Whether its spans are openings.
    has_openings: bool,
}

/// A span of the current step, or the part of one that is in a row batch: consecutive rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct RowSpan {
    /// Slot of the sequence.
    pub slot: usize,
    /// Position of the first row.
    pub start: usize,
    /// Number of the first row among the rows of its row batch.
    pub first_row: usize,
    /// Number of rows.
    pub len: usize,
    /// Rows of the whole span that are in earlier row batches, and in later ones.
    pub rows_before: usize,
    pub rows_after: usize,
    /// The model that processes it.
    pub model: SpanModel,
    /// Whether its tokens were generated rather than given.
    pub is_generated: bool,
    /// Whether its tokens after the first are drafts of this step.
    pub is_drafted: bool,
    /// Whether its token is the last one that the target model sampled in the slot.
    pub takes_last: bool,
    /// Destination of its K and V.
    pub table: SpanTable,
    /// Maximum number of tokens of the sequence.
    pub reserved: usize,
    /// Tokens of the encoder input of the sequence.
    pub encoder_len: usize,
    /// Start of the span in the scratch cache, if it uses that.
    scratch_start: usize,
}

/// One row of the step.
#[derive(Clone, Copy, Debug)]
pub struct StepRow {
    /// Token id.
    pub token: u32,
    /// Type of the token: the row of the token type embedding.
    pub token_type: u8,
    /// Position in its sequence.
    pub position: usize,
    /// Number of its span among the spans of its row batch.
    pub span: u32,
}

impl StepRow {
    /// Returns the row of the position embeddings to add, in a table whose row of position 0 is `offset`, and
    /// which has `type_rows` rows for each type of tokens.
    pub fn position_row(&self, offset: usize, type_rows: usize) -> usize {
        self.position + offset + usize::from(self.token_type) * type_rows
    }
}

impl StepState {
    /// Creates empty slots, with capacity for any step within `limits`.
    pub fn new(limits: &StepLimits) -> StepState {
        StepState {
            limits: *limits,
            last_tokens: vec![0; limits.slots],
            drafts: vec![0; limits.all_drafts()],
            draft_counts: vec![0; limits.slots],
            keeps_draft_logits: false,
            own_tables: PageTables::new(limits.slots, limits.table_len()),
            window_tables: PageTables::new(limits.slots, limits.window_table_len()),
            cross_tables: PageTables::new(limits.slots, limits.cross_table_len()),
            spans: Vec::with_capacity(limits.rows),
            rows: Vec::with_capacity(limits.rows),
            wanted: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            batches: Vec::with_capacity(limits.encoder_batches() + limits.decoder_batches()),
            stack_batches: Default::default(),
            selected: RowBatch::default(),
        }
    }

    /// Begins a step: applies slot moves and page table updates, and maps the rows. If drafts of the step are
    /// among the rows, there are none until [`StepState::map`] maps them.
    pub fn begin(&mut self, batch: &StepBatch) {
        self.apply_moves(batch);
        for update in &batch.table_updates {
            let tables = match update.table {
                KvTable::Own => &mut self.own_tables,
                KvTable::Window => &mut self.window_tables,
                KvTable::Cross => &mut self.cross_tables,
                KvTable::Scratch => panic!("the scratch cache has no page table to update; this is a bug"),
            };
            tables.set(update.slot as usize, update.index as usize, update.page);
        }
        self.draft_counts.fill(0);
        match batch.has_drafted_tokens() {
            true => self.map(&StepBatch::default()),
            false => self.map(batch),
        }
    }

    /// Maps the rows of a batch, in place of those that were mapped before in the same step.
    pub fn map(&mut self, batch: &StepBatch) {
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        assert!(batch.spans.is_sorted_by_key(|span| span.stack), "encoder spans precede decoder spans");
        assert!(!batch.draft_logits || self.limits.draft_logits, "there is no memory for logits of drafts");
        self.keeps_draft_logits = batch.draft_logits;
        self.map_rows(batch);
        assert_eq!(self.wanted.len(), batch.sampling.len(), "each wanted row has a sampling entry");
        self.samples.clear();
        self.samples.extend_from_slice(&batch.sampling);
        self.select(SpanStack::Decoder, 0);
    }

    /// Returns the number of row batches of a stack.
    pub fn row_batches(&self, stack: SpanStack) -> usize {
        self.stack_batches[stack as usize].len()
    }

    /// Selects a row batch of a stack, and returns the range of its rows among those of the stack. The first
    /// one of a stack without rows is empty.
    pub fn select(&mut self, stack: SpanStack, batch: usize) -> Range<usize> {
        let batches = &self.batches[self.stack_batches[stack as usize].clone()];
        assert!(batch < batches.len().max(1), "the {stack:?} has no row batch {batch}");
        self.selected = batches.get(batch).cloned().unwrap_or_default();
        let before = batches.first().map_or(0, |first| first.rows.start);
        self.selected.rows.start - before..self.selected.rows.end - before
    }

    /// Copies the state of moved slots.
    fn apply_moves(&mut self, batch: &StepBatch) {
        for moved in &batch.moves {
            assert!(batch.moves.iter().all(|other| other.from != moved.to), "moves overlap");
            let (from, to) = (moved.from as usize, moved.to as usize);
            assert!(from.max(to) < self.limits.slots, "{moved:?} is beyond the slots");
            self.last_tokens[to] = self.last_tokens[from];
            self.own_tables.copy(from, to);
            self.window_tables.copy(from, to);
            self.cross_tables.copy(from, to);
        }
    }

    /// Maps the spans of both stacks to rows, in row batches.
    fn map_rows(&mut self, batch: &StepBatch) {
        self.spans.clear();
        self.rows.clear();
        self.wanted.clear();
        self.batches.clear();
        let mut spans = batch.spans.iter().peekable();
        for stack in [SpanStack::Encoder, SpanStack::Decoder] {
            let first = self.batches.len();
            while let Some(span) = spans.next_if(|span| span.stack == stack) {
                self.check_span(span);
                let (len, mut mapped) = (span.len(), 0);
                while mapped < len {
                    // Each row of an encoder input attends to all of them, and openings to the scratch cache.
                    let is_opening = span.is_opening(&self.limits);
                    let least = if stack == SpanStack::Encoder || is_opening { len } else { 1 };
                    let end = len.min(mapped + self.space_in_batch(first, least, is_opening));
                    self.map_span(span, &batch.tokens, mapped..end);
                    mapped = end;
                }
            }
            self.map_wanted(first, batch.output_rows(stack));
            self.stack_batches[stack as usize] = first..self.batches.len();
        }
    }

    /// Returns how many rows, of openings or others, fit into the last row batch of a stack, whose first one
    /// has the number `first`. Adds one if these are fewer than `least`.
    fn space_in_batch(&mut self, first: usize, least: usize, has_openings: bool) -> usize {
        let most = self.limits.rows_at_once();
        if let Some(last) = self.batches[first..].last() {
            assert!(has_openings || !last.has_openings, "openings are the last spans of a batch");
            if last.has_openings == has_openings && last.rows.len() + least <= most {
                return most - last.rows.len();
            }
        }
        let (spans, rows) = (self.spans.len(), self.rows.len());
        let empty = RowBatch { spans: spans..spans, rows: rows..rows, ..RowBatch::default() };
        self.batches.push(RowBatch { has_openings, ..empty });
        most
    }

    /// Divides the wanted rows of a stack, which are numbered in the stack, among its row batches, whose
    /// first one has the number `first`.
    fn map_wanted(&mut self, first: usize, wanted: impl Iterator<Item = usize>) {
        let before = self.batches.get(first).map_or(0, |batch| batch.rows.start);
        let mut wanted = wanted.map(|row| before + row).peekable();
        for batch in &mut self.batches[first..] {
            let start = self.wanted.len();
            while let Some(row) = wanted.next_if(|row| *row < batch.rows.end) {
                self.wanted.push((row - batch.rows.start) as u32);
            }
            batch.wanted = start..self.wanted.len();
        }
    }

    /// Maps some rows of a span to the last row batch.
    fn map_span(&mut self, span: &Span, tokens: &[u32], part: Range<usize>) {
        let (slot, len) = (span.slot as usize, span.len());
        let start = span.start as usize + part.start;
        let drafts = &self.drafts[slot * self.limits.drafts..][..self.draft_counts[slot]];
        let last = match span.model {
            SpanModel::Target => Some(&self.last_tokens[slot]),
            SpanModel::Draft => drafts.last(),
        };
        let (known, drafted): (&[u32], &[u32]) = match span.tokens {
            SpanTokens::Given { at, .. } | SpanTokens::Generated { at, .. } => {
                (&tokens[at as usize..][..len], &[])
            }
            SpanTokens::Last => (std::slice::from_ref(last.expect("the slot has a draft")), &[]),
            SpanTokens::Drafted { at, .. } => (&tokens[at as usize..][..1], &drafts[..len - 1]),
        };
        let batch = self.batches.last_mut().expect("a row batch has been added; this is a bug");
        let (number, first_row) = (batch.spans.len() as u32, batch.rows.len());
        let row = |(i, &token): (usize, &u32)| {
            let (token, token_type) = split_typed_token(token);
            StepRow { token, token_type, position: start + i, span: number }
        };
        let tokens = known.iter().chain(drafted).skip(part.start).take(part.len());
        self.rows.extend(tokens.enumerate().map(row));
        self.spans.push(RowSpan {
            slot,
            start,
            first_row,
            len: part.len(),
            rows_before: part.start,
            rows_after: len - part.end,
            model: span.model,
            is_generated: span.tokens.is_generated(),
            is_drafted: matches!(span.tokens, SpanTokens::Drafted { .. }),
            takes_last: span.tokens == SpanTokens::Last && span.model == SpanModel::Target,
            table: span.table,
            reserved: span.reserved as usize,
            encoder_len: span.encoder_len as usize,
            scratch_start: batch.scratch,
        });
        (batch.spans.end, batch.rows.end) = (self.spans.len(), self.rows.len());
        if span.table == SpanTable::Scratch || batch.has_openings {
            batch.scratch += len.next_multiple_of(KvLayout::BLOCK_POSITIONS);
            let most = self.limits.scratch_positions();
            assert!(batch.scratch <= most, "{} positions exceed the scratch cache", batch.scratch);
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

    /// Returns the selected rows.
    pub fn rows(&self) -> &[StepRow] {
        &self.rows[self.selected.rows.clone()]
    }

    /// Returns the spans of the selected rows.
    pub fn spans(&self) -> &[RowSpan] {
        &self.spans[self.selected.spans.clone()]
    }

    /// Returns the numbers of the selected rows whose logits are wanted.
    pub fn wanted(&self) -> &[u32] {
        &self.wanted[self.selected.wanted.clone()]
    }

    /// Returns how to sample each wanted row.
    pub fn samples(&self) -> &[SamplingParams] {
        &self.samples[self.selected.wanted.clone()]
    }

    /// Returns the number of the first wanted row of the selected row batch among those of the batch.
    pub fn first_sample(&self) -> usize {
        self.selected.wanted.start
    }

    /// Returns the span of a row.
    pub fn span_of(&self, row: &StepRow) -> &RowSpan {
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
            (KvTable::Window, _) => self.window_tables.table(span.slot)[position / size],
            (KvTable::Cross, _) => self.cross_tables.table(span.slot)[position / size],
        };
        (page, position % size)
    }

    /// Returns one of a slot's page tables.
    pub fn table(&self, slot: usize, table: KvTable) -> &[Page] {
        match table {
            KvTable::Own => self.own_tables.table(slot),
            KvTable::Window => self.window_tables.table(slot),
            KvTable::Cross => self.cross_tables.table(slot),
            KvTable::Scratch => &[],
        }
    }

    /// Returns the slot whose last token becomes the one that wanted row number `wanted` samples; `None` if
    /// that is discarded, or is a draft.
    pub fn token_slot(&self, wanted: usize) -> Option<usize> {
        let span = self.wanted_span(wanted);
        let is_kept = span.model == SpanModel::Target && span.table != SpanTable::Null;
        is_kept.then_some(span.slot)
    }

    /// Stores the token sampled for wanted row number `wanted`: as its slot's last token, unless the result
    /// is to be discarded, or as the next draft of the slot.
    pub fn store_token(&mut self, wanted: usize, token: u32) {
        let span = *self.wanted_span(wanted);
        match span.model {
            SpanModel::Target if span.table == SpanTable::Null => {}
            SpanModel::Target => self.last_tokens[span.slot] = token,
            SpanModel::Draft => {
                let count = &mut self.draft_counts[span.slot];
                assert!(*count < self.limits.drafts, "the drafts of slot {} exceed the limits", span.slot);
                self.drafts[span.slot * self.limits.drafts + *count] = token;
                *count += 1;
            }
        }
    }

    /// Returns the number of the row of kept logits for the draft that wanted row number `wanted` samples;
    /// `None` if it samples none, or logits are not kept.
    pub fn kept_row(&self, wanted: usize) -> Option<usize> {
        let span = self.wanted_span(wanted);
        let is_kept = self.keeps_draft_logits && span.model == SpanModel::Draft;
        is_kept.then(|| span.slot * self.limits.drafts + self.draft_counts[span.slot])
    }

    /// Returns what the host gets for the draw of wanted row number `wanted`. `kept` holds the logits of
    /// drafts (slots, drafts, vocabulary), if they are kept.
    pub fn host_row<'a>(&self, wanted: usize, logits: &'a [f32], kept: &'a [f32]) -> HostRow<'a> {
        let number = self.wanted()[wanted] as usize;
        let (row, span) = (&self.rows()[number], self.wanted_span(wanted));
        let after = span.rows_before + number + 1 - span.first_row;
        // It may be in the next row batch.
        let is_last = after == span.rows_before + span.len + span.rows_after;
        let next_token = (!is_last).then(|| self.rows[self.selected.rows.start + number + 1].token);
        let is_kept = self.keeps_draft_logits && span.is_drafted && next_token.is_some();
        let at = (span.slot * self.limits.drafts + after - 1) * self.limits.vocab;
        let draft_logits = is_kept.then(|| &kept[at..][..self.limits.vocab]);
        HostRow { logits, input_token: row.token, next_token, draft_logits }
    }

    fn wanted_span(&self, wanted: usize) -> &RowSpan {
        self.span_of(&self.rows()[self.wanted()[wanted] as usize])
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::Fraction;
    use crate::batch::{DraftSpan, SlotMove, SpanModel, SpanOutput, TableUpdate};

    /// Own tables have 3 entries, cross tables 2.
    const LIMITS: StepLimits = StepLimits {
        slots: 4,
        rows: 80,
        batch_rows: usize::MAX,
        logit_rows: 4,
        positions: 96,
        encoder_positions: 40,
        page_positions: 32,
        window: None,
        top_logprobs: 0,
        vocab: 100,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    };

    fn span(slot: u32, start: u32, tokens: SpanTokens, output: SpanOutput) -> Span {
        Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot,
            start,
            tokens,
            table: SpanTable::Own,
            reserved: 90,
            encoder_len: 33,
            output,
        }
    }

    fn encoder_span(slot: u32, at: u32, len: u32) -> Span {
        Span {
            stack: SpanStack::Encoder,
            table: SpanTable::Scratch,
            ..span(slot, 0, SpanTokens::Given { at, len }, SpanOutput::None)
        }
    }

    fn entry((slot, table, index, page): (u32, KvTable, u32, Page)) -> TableUpdate {
        TableUpdate { slot, table, index, page }
    }

    /// Returns (slot, token, position) of each selected row.
    fn rows(step: &StepState) -> Vec<(usize, u32, usize)> {
        step.rows().iter().map(|row| (step.span_of(row).slot, row.token, row.position)).collect()
    }

    /// Two encoder inputs, a chunk of three tokens, a hole and a generated token.
    fn mixed() -> StepBatch {
        let hole = Span { table: SpanTable::Null, ..span(0, 0, SpanTokens::Last, SpanOutput::None) };
        StepBatch {
            table_updates: [
                (3, KvTable::Own, 1, 7),
                (3, KvTable::Own, 2, 5),
                (1, KvTable::Own, 0, 6),
                (1, KvTable::Cross, 0, 9),
                (1, KvTable::Cross, 1, 4),
            ]
            .map(entry)
            .to_vec(),
            spans: vec![
                encoder_span(1, 0, 33),
                Span { output: SpanOutput::All, ..encoder_span(2, 33, 2) },
                span(3, 63, SpanTokens::Given { at: 35, len: 3 }, SpanOutput::All),
                hole,
                span(1, 5, SpanTokens::Last, SpanOutput::Last),
            ],
            tokens: (0..38).collect(),
            sampling: (0..6).map(|seed| SamplingParams { seed, ..SamplingParams::GREEDY }).collect(),
            ..StepBatch::default()
        }
    }

    #[test]
    fn rows_have_the_slots_tokens_and_positions_of_their_spans() {
        let mut step = StepState::new(&LIMITS);
        step.begin(&mixed());
        assert_eq!(rows(&step), [(3, 35, 63), (3, 36, 64), (3, 37, 65), (0, 0, 0), (1, 0, 5)]);
        assert_eq!(step.wanted(), [0, 1, 2, 4]);
        let seeds = |step: &StepState| step.samples().iter().map(|row| row.seed).collect::<Vec<_>>();
        assert_eq!(seeds(&step), [2, 3, 4, 5]);
        let spans = step.spans().iter().map(|span| (span.first_row, span.len, span.is_generated));
        assert_eq!(spans.collect::<Vec<_>>(), [(0, 3, false), (3, 1, true), (4, 1, true)]);
        assert_eq!(step.select(SpanStack::Encoder, 0), 0..35);
        assert_eq!(rows(&step)[31..], [(1, 31, 31), (1, 32, 32), (2, 33, 0), (2, 34, 1)]);
        assert_eq!((step.wanted(), seeds(&step)), (&[33, 34][..], vec![0, 1]));
        step.begin(&StepBatch::default());
        assert!(step.rows().is_empty() && step.wanted().is_empty(), "a step begins with no rows of another");
    }

    /// Encoder inputs stay whole; a chunk of the decoder begins in one row batch and ends in the next, whose
    /// rows, wanted rows and scratch positions are numbered anew.
    #[test]
    fn rows_are_divided_into_batches() {
        let limits = StepLimits { batch_rows: 2, encoder_positions: 33, ..LIMITS };
        let mut step = StepState::new(&StepLimits { batch_rows: 34, ..limits });
        step.begin(&mixed());
        let found = [SpanStack::Encoder, SpanStack::Decoder].map(|stack| step.row_batches(stack));
        assert_eq!((found, limits.encoder_batches()), ([2, 1], 5));
        assert_eq!([0, 1].map(|batch| step.select(SpanStack::Encoder, batch)), [0..33, 33..35]);
        let scratch = step.locate(&step.spans()[0], KvTable::Scratch, 1);
        assert_eq!(
            (rows(&step), step.wanted(), scratch),
            (vec![(2, 33, 0), (2, 34, 1)], &[0, 1][..], (0, 1))
        );

        let mut step = StepState::new(&StepLimits { batch_rows: 2, encoder_positions: 0, ..LIMITS });
        let mut batch = mixed();
        batch.spans.drain(..2);
        batch.spans.iter_mut().for_each(|span| span.encoder_len = 0);
        batch.sampling.drain(..2);
        batch.table_updates.retain(|update| update.table == KvTable::Own);
        step.begin(&batch);
        assert_eq!((rows(&step), step.wanted()), (vec![(3, 35, 63), (3, 36, 64)], &[0, 1][..]));
        assert_eq!(step.host_row(1, &[], &[]).next_token, Some(37), "it is in the next row batch");
        assert_eq!(step.select(SpanStack::Decoder, 1), 2..4);
        assert_eq!((rows(&step), step.wanted()), (vec![(3, 37, 65), (0, 0, 0)], &[0][..]));
        assert_eq!((step.first_sample(), step.samples()[0].seed), (2, 4));
        assert_eq!(step.host_row(0, &[], &[]).next_token, None);
        assert_eq!((step.select(SpanStack::Decoder, 2), step.wanted()), (4..5, &[0][..]));
        assert_eq!((step.row_batches(SpanStack::Decoder), step.row_batches(SpanStack::Encoder)), (3, 0));
        assert_eq!(step.select(SpanStack::Encoder, 0), 0..0);
    }

    /// Returns a prompt chunk.
    fn chunk(slot: u32, start: u32, len: u32) -> Span {
        Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot,
            start,
            tokens: SpanTokens::Given { at: 0, len },
            table: SpanTable::Own,
            reserved: 96,
            encoder_len: 0,
            output: SpanOutput::None,
        }
    }

    /// No step has more row batches, or more rows in one, than there are buffers for; and some need all.
    #[test]
    fn row_batches_of_random_steps_are_within_the_limits() {
        let mut state = 1u64;
        let mut random = |from: usize, to: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            from + (state >> 33) as usize % (to + 1 - from)
        };
        let (mut most, mut longest) = (0, 0);
        for _ in 0..2000 {
            let batch_rows = random(33, 70);
            let opening_rows = random(32, batch_rows);
            let rows = batch_rows + random(0, 200);
            let limits = StepLimits { batch_rows, rows, opening_rows, positions: 96, ..LIMITS };
            let limits = StepLimits { encoder_positions: 0, slots: 16, ..limits };
            let (mut spans, mut left) = (Vec::new(), rows);
            let others = random(1, rows);
            let others = random(0, others);
            while left > rows - others && spans.len() < 8 {
                let len = random(1, (left + others - rows).min(90));
                spans.push(chunk(spans.len() as u32, 1, len as u32));
                left -= len;
            }
            // Short ones alternate with long ones, so that row batches are as empty as they can be.
            while left >= 32 && spans.len() < 16 {
                let long = if spans.len() % 2 == 0 { 32 } else { opening_rows };
                let len = if random(0, 3) == 0 { random(32, opening_rows) } else { long }.min(left);
                spans.push(chunk(spans.len() as u32, 0, len as u32));
                left -= len;
            }
            let batch = StepBatch { spans, tokens: vec![7; 96], ..StepBatch::default() };
            let mut step = StepState::new(&limits);
            step.begin(&batch);
            let count = step.row_batches(SpanStack::Decoder);
            assert!(count <= limits.decoder_batches(), "{count} row batches of {limits:?}: {batch:?}");
            for number in 0..count {
                let len = step.select(SpanStack::Decoder, number).len();
                let room = limits.rows_of_decoder_batch(number);
                assert!(len <= room, "{len} rows of batch {number} of {limits:?}: {batch:?}");
                longest += usize::from(len == room);
            }
            most += usize::from(count == limits.decoder_batches());
        }
        assert!(most > 0 && longest > 100, "{most} have the most row batches, {longest} are full");
    }

    /// Openings stay whole, in row batches after those of other spans, with scratch positions of their own.
    #[test]
    fn openings_have_row_batches_of_their_own() {
        let limits = StepLimits { batch_rows: 80, rows: 200, opening_rows: 60, positions: 96, ..LIMITS };
        let limits = StepLimits { encoder_positions: 0, slots: 6, ..limits };
        let mut step = StepState::new(&limits);
        let span = chunk;
        let spans = vec![span(0, 0, 31), span(1, 5, 33), span(2, 0, 61), span(3, 0, 33), span(4, 0, 40)];
        let mut batch = StepBatch { spans, tokens: vec![7; 61], ..StepBatch::default() };
        assert_eq!(batch.rows_before_openings(&limits), 125);
        step.begin(&batch);
        assert_eq!((step.row_batches(SpanStack::Decoder), limits.decoder_batches()), (3, 6));
        let found = [0, 1, 2].map(|batch| step.select(SpanStack::Decoder, batch));
        assert_eq!(found, [0..80, 80..125, 125..198]);
        let at = |span: usize| step.locate(&step.spans()[span], KvTable::Scratch, 3);
        assert_eq!([at(0), at(1)], [(0, 3), (2, 3)]);
        assert!(limits.scratch_positions() >= 64 + 40);
        batch.spans.remove(2);
        batch.spans[1] = span(1, 0, 60);
        batch.spans.remove(0);
        step.begin(&batch);
        let found = [0, 1].map(|batch| step.select(SpanStack::Decoder, batch));
        assert_eq!(
            (found, step.row_batches(SpanStack::Decoder)),
            ([0..60, 60..133], 2),
            "60 and 33 exceed 80"
        );
    }

    /// Position 63 is the last one of the second page. Encoder inputs begin at multiples of 32 positions of
    /// the scratch cache.
    #[test]
    fn positions_are_found_through_the_tables_of_their_slot() {
        let mut step = StepState::new(&LIMITS);
        step.begin(&mixed());
        let [chunk, hole, generated] = [0, 1, 2].map(|number| step.spans()[number]);
        let own = |span, position| step.locate(span, KvTable::Own, position);
        assert_eq!([own(&chunk, 63), own(&chunk, 64), own(&generated, 5)], [(7, 31), (5, 0), (6, 5)]);
        assert_eq!(own(&hole, 33), (NULL_PAGE, 1));
        let cross = |span, position| step.locate(span, KvTable::Cross, position);
        assert_eq!([cross(&generated, 0), cross(&generated, 32), cross(&hole, 3)], [(9, 0), (4, 0), (0, 3)]);
        step.select(SpanStack::Encoder, 0);
        let [first, second] = [0, 1].map(|number| step.spans()[number]);
        let scratch = |span, position| step.locate(span, KvTable::Scratch, position);
        assert_eq!(
            [scratch(&first, 31), scratch(&first, 32), scratch(&second, 1)],
            [(0, 31), (1, 0), (2, 1)]
        );
    }

    /// Drafts of a slot follow each other in passes, do not change its last token, and are rows of the step
    /// that is mapped after them. The step after has none of them.
    #[test]
    fn drafts_are_rows_of_later_passes_and_of_the_step() {
        let mut step = StepState::new(&StepLimits { drafts: 2, ..LIMITS });
        let draft = DraftSpan {
            slot: 1,
            start: 4,
            tokens: SpanTokens::Generated { at: 0, len: 2 },
            reserved: 9,
            count: 2,
            sampling: SamplingParams::GREEDY,
        };
        let pass = |number| StepBatch {
            spans: vec![draft.pass_span(number)],
            tokens: vec![40, 41],
            sampling: vec![SamplingParams::GREEDY],
            ..StepBatch::default()
        };
        let batch = StepBatch {
            spans: vec![span(1, 5, SpanTokens::Drafted { at: 1, len: 3 }, SpanOutput::Last)],
            ..pass(0)
        };
        step.begin(&batch);
        assert!(step.rows().is_empty() && step.spans().is_empty());
        step.map(&pass(0));
        assert_eq!((rows(&step), step.wanted()), (vec![(1, 40, 4), (1, 41, 5)], &[1][..]));
        step.store_token(0, 50);
        step.map(&pass(1));
        assert_eq!(rows(&step), [(1, 50, 6)]);
        step.store_token(0, 51);
        step.map(&batch);
        assert_eq!(rows(&step), [(1, 41, 5), (1, 50, 6), (1, 51, 7)]);
        assert_eq!(step.host_row(0, &[], &[]), HostRow { input_token: 51, ..HostRow::of_logits(&[]) });
        step.store_token(0, 60);
        step.begin(&StepBatch { spans: vec![span(1, 8, SpanTokens::Last, SpanOutput::Last)], ..pass(0) });
        assert_eq!((rows(&step), step.draft_counts[1]), (vec![(1, 60, 8)], 0));
    }

    /// A move takes the last token and both tables along; updates of the same step apply after it.
    #[test]
    fn the_state_of_a_slot_follows_sampling_and_moves() {
        let mut step = StepState::new(&LIMITS);
        step.begin(&mixed());
        // The last output row is the generated token of slot 1, the one before it a token of slot 3.
        step.store_token(3, 77);
        step.store_token(2, 55);
        let last = |slot| span(slot, 6, SpanTokens::Last, SpanOutput::None);
        let hole = Span { table: SpanTable::Null, ..span(1, 0, SpanTokens::Last, SpanOutput::Last) };
        step.begin(&StepBatch {
            moves: vec![SlotMove { from: 1, to: 2 }],
            table_updates: [(2, KvTable::Own, 1, 8)].map(entry).to_vec(),
            spans: vec![last(2), last(3), last(0), hole],
            sampling: vec![SamplingParams::GREEDY],
            ..StepBatch::default()
        });
        assert_eq!(rows(&step), [(2, 77, 6), (3, 55, 6), (0, 0, 6), (1, 77, 0)]);
        assert_eq!(step.table(2, KvTable::Own), [6, 8, 0]);
        assert_eq!(step.table(2, KvTable::Cross), [9, 4]);
        assert_eq!(step.table(1, KvTable::Own), [6, 0, 0], "the slot that was left is unchanged");
        // The result of a hole is discarded.
        step.store_token(0, 99);
        step.begin(&StepBatch { spans: vec![last(1)], ..StepBatch::default() });
        assert_eq!(rows(&step), [(1, 77, 6)]);
    }
}
