//! What travels between the decode loop and a device: one forward pass, described without padding.
//!
//! Invariant: plain data of fixed capacity. A batch is built on the control side, read on the device,
//! and comes back to be used again; neither journey allocates.

use std::time::Duration;

/// A sequence's place in every per-sequence buffer of the device.
pub type Slot = u32;
/// The number of a KV page. Page 0 is the sink: never leased, written by rows whose result nobody wants.
pub type Page = u32;

/// The page that absorbs the K and V of rows computed only to be discarded.
pub const SINK_PAGE: Page = 0;

/// One forward pass. Applied in this order: moves, table updates, page copies, spans.
#[derive(Clone, Debug, Default)]
pub struct StepBatch {
    /// Consecutive number of the step within its group; a gap is a bug and asserted by the device.
    pub step: u64,
    /// The lane (window of slots) this step belongs to.
    pub lane: u32,
    /// Slot state to move before anything else. Sources and targets are disjoint.
    pub moves: Vec<SlotMove>,
    /// Entries of slots' page tables to write.
    pub tables: Vec<TableUpdate>,
    /// Pages to copy whole, in every layer.
    pub copies: Vec<PageCopy>,
    /// The ragged rows of the pass: span after span, row after row.
    pub spans: Vec<Span>,
    /// Token ids of the spans that give them.
    pub tokens: Vec<u32>,
    /// One entry for each wanted row, in row order.
    pub samples: Vec<SampleRow>,
    /// What is added to logits before a token is drawn, one row's after another's: (id, bias).
    pub biases: Vec<(u32, f32)>,
}

/// A run of tokens of one sequence within a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Whose weights it passes through.
    pub model: SpanModel,
    /// The sequence's slot: owner of the page table and of the last token.
    pub slot: Slot,
    /// Position of the span's first token within its sequence.
    pub start: u32,
    /// Where its tokens come from.
    pub tokens: SpanTokens,
    /// Which page table its K and V go through.
    pub table: SpanTable,
    /// Which rows' results are wanted.
    pub want: Want,
}

/// The model a span passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanModel {
    /// The model that is served.
    Target,
    /// The small model that proposes tokens in speculative decoding.
    Draft,
}

/// Where a span's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanTokens {
    /// `len` ids of `StepBatch::tokens` from `at` on.
    Given { at: u32, len: u32 },
    /// One token: the one last sampled in the span's slot.
    Last,
}

/// The page table a span reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanTable {
    /// The sequence's own: causal attention over its past.
    Own,
    /// The table over the encoder's K and V.
    Cross,
    /// One layer-sized buffer outside the pool (encoder self-attention).
    Scratch,
    /// The sink page: the row is computed and its result discarded (a hole of the window with the shuffle off).
    Sink,
}

/// Which rows of a span yield a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
    /// Every row's hidden state after the final norm, no logits.
    Hidden,
}

/// Moves a slot's state: last token and page table. K and V stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMove {
    pub from: Slot,
    pub to: Slot,
}

/// Writes one entry of a slot's page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableUpdate {
    pub slot: Slot,
    /// Index within the table: position / page positions.
    pub index: u32,
    pub page: Page,
}

/// Copies a page's K and V in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    pub from: Page,
    pub to: Page,
}

/// What to do with one wanted row's logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleRow {
    pub mode: SampleMode,
    /// Counter of the generator: the position the drawn token will have.
    pub position: u32,
    /// Key of the generator.
    pub seed: u64,
    /// Logits are divided by it; below [`SampleRow::GREEDY_BELOW`] the row is greedy.
    pub temperature: f32,
    /// Keep the k largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens that holds this share; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// The row's entries of `StepBatch::biases`: `bias_len` from `bias_at` on. A bias of negative infinity
    /// forbids its token.
    pub bias_at: u32,
    pub bias_len: u32,
    /// Whether the log-probability of the token is wanted (raw logits, before temperature).
    pub logprob: bool,
    /// How many most likely tokens are reported beside it.
    pub top_logprobs: u8,
}

/// How a wanted row's token comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SampleMode {
    /// Draw it and remember it as the slot's last token.
    Draw,
    /// It is given; only its log-probability is wanted.
    Score(u32),
}

impl SampleRow {
    /// Temperatures below this are greedy: dividing by them would only overflow.
    pub const GREEDY_BELOW: f32 = 1e-5;

    /// Greedy choice, nothing reported.
    pub const GREEDY: SampleRow = SampleRow {
        mode: SampleMode::Draw,
        position: 0,
        seed: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        bias_at: 0,
        bias_len: 0,
        logprob: false,
        top_logprobs: 0,
    };

    /// Whether the largest logit is taken as it is.
    pub fn is_greedy(&self) -> bool {
        self.temperature < SampleRow::GREEDY_BELOW || self.top_k == 1
    }

    /// Its entries of the batch's `biases`.
    pub fn biases<'a>(&self, biases: &'a [(u32, f32)]) -> &'a [(u32, f32)] {
        &biases[self.bias_at as usize..][..self.bias_len as usize]
    }
}

/// The results of a step, one row for each entry of `StepBatch::samples`.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// The step these results belong to.
    pub step: u64,
    pub rows: Vec<SampledRow>,
    /// The most likely tokens of all rows, one row's after another's: (id, log-probability).
    pub top: Vec<(u32, f32)>,
    pub times: StepTimes,
}

/// What a step took on its device. The parts do not overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// From the batch to the last logits.
    pub forward: Duration,
    /// From logits to tokens and what is reported of them.
    pub sample: Duration,
}

/// One wanted row's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledRow {
    /// The token drawn, or the one that was scored.
    pub token: u32,
    /// Its log-probability; NaN when it was not asked for.
    pub logprob: f32,
    /// The row's entries of `StepOutput::top`: `top_len` from `top_at` on, most likely first.
    pub top_at: u32,
    pub top_len: u32,
}

impl StepBatch {
    /// An empty batch whose lists never grow beyond what `limits` allow.
    pub fn with_capacity(limits: &crate::StepLimits) -> StepBatch {
        StepBatch {
            step: 0,
            lane: 0,
            moves: Vec::with_capacity(limits.slots),
            tables: Vec::with_capacity(limits.slots * limits.table_len()),
            copies: Vec::with_capacity(limits.slots),
            spans: Vec::with_capacity(limits.rows),
            tokens: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            biases: Vec::with_capacity(limits.bias_room()),
        }
    }

    /// Empties every list and keeps their room.
    pub fn clear(&mut self) {
        self.moves.clear();
        self.tables.clear();
        self.copies.clear();
        self.spans.clear();
        self.tokens.clear();
        self.samples.clear();
        self.biases.clear();
    }

    /// Rows of the pass.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|span| span.len()).sum()
    }

    /// Rows whose results are wanted, in order: indices into 0..rows().
    pub fn wanted_rows(&self) -> impl Iterator<Item = usize> + '_ {
        let mut first = 0;
        self.spans.iter().flat_map(move |span| {
            let rows = first..first + span.len();
            first = rows.end;
            match span.want {
                Want::None => rows.end..rows.end,
                Want::Last => rows.end - 1..rows.end,
                Want::All | Want::Hidden => rows,
            }
        })
    }
}

impl Span {
    /// Tokens in the span.
    #[allow(clippy::len_without_is_empty)] // a span always has a token
    pub fn len(&self) -> usize {
        match self.tokens {
            SpanTokens::Given { len, .. } => len as usize,
            SpanTokens::Last => 1,
        }
    }
}

impl StepOutput {
    /// Room for the results of any batch within `limits`.
    pub fn with_capacity(limits: &crate::StepLimits) -> StepOutput {
        StepOutput {
            step: 0,
            rows: Vec::with_capacity(limits.rows),
            top: Vec::with_capacity(limits.rows * limits.top_logprobs),
            times: StepTimes::default(),
        }
    }

    /// Empties both lists and keeps their room.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.top.clear();
        self.times = StepTimes::default();
    }

    /// The most likely tokens of one row.
    pub fn top_of(&self, row: &SampledRow) -> &[(u32, f32)] {
        &self.top[row.top_at as usize..][..row.top_len as usize]
    }
}
