//! What travels between the decode loop and a device: one forward pass, described without padding.
//!
//! Invariant: plain data of fixed capacity. A batch is built on the control side, read on the device,
//! and comes back to be used again; neither journey allocates.

mod carried;
mod sampling;

#[cfg(test)]
mod tests;

pub use carried::{Carried, Flow};
pub use sampling::{SampleMode, SampleRow, SampledRow, StepOutput, StepTimes};

use crate::backend::KvTable;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A sequence's place in every per-sequence buffer of the device.
pub type Slot = u32;
/// The number of a KV page. Page 0 is the sink: never leased, written by rows whose result nobody wants.
pub type Page = u32;

/// The page that absorbs the K and V of rows computed only to be discarded.
pub const SINK_PAGE: Page = 0;

/// One forward pass. Applied in this order: moves, table updates, page copies, spans.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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
    /// The ragged rows of the pass: span after span, row after row. Spans of the encoder come first.
    pub spans: Vec<Span>,
    /// Token ids of the spans that give them.
    pub tokens: Vec<u32>,
    /// Rows of spans that want some of theirs, counted from the span's first, ascending.
    pub picks: Vec<u32>,
    /// One entry for each row whose logits are wanted, in row order.
    pub samples: Vec<SampleRow>,
    /// What is added to logits before a token is drawn, one row's after another's: (id, bias).
    pub biases: Vec<(u32, f32)>,
    /// Whether the wanted rows' raw logits are wanted too: what measures quality asks, and serving never does.
    pub logits: bool,
}

/// A run of tokens of one sequence within a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// Whose weights it passes through.
    pub model: SpanModel,
    /// Which stack of that model.
    pub stack: SpanStack,
    /// The sequence's slot: owner of the page table and of the last token.
    pub slot: Slot,
    /// Position of the span's first token within its sequence.
    pub start: u32,
    /// Where its tokens come from.
    pub tokens: SpanTokens,
    /// Where its K and V go.
    pub table: SpanTable,
    /// Tokens that its sequence has room for, prompt and answer: what length-dependent rotary scalings go by.
    pub reserved: u32,
    /// Tokens of its sequence's source, which cross-attention sees; 0 without one.
    pub source: u32,
    /// Which rows' results are wanted.
    pub want: Want,
}

/// The model a span passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanModel {
    /// The model that is served.
    Target,
    /// The small model that proposes tokens in speculative decoding.
    Draft,
}

/// The stack a span passes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SpanStack {
    /// A whole source at once, from position 0 on: each row sees all of it. With a decoder behind it, its K and V for
    /// every decoder layer go through the slot's cross table.
    Encoder,
    Decoder,
}

/// Where a span's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanTokens {
    /// `len` ids of `StepBatch::tokens` from `at` on.
    Given { at: u32, len: u32 },
    /// One token: the one last sampled in the span's slot.
    Last,
    /// The same, told: the id of `StepBatch::tokens` at `at`, for a device that did not sample it.
    Drawn { at: u32 },
}

impl SpanTokens {
    /// Whether it is a token that the model has drawn, not one of a prompt.
    pub fn is_drawn(self) -> bool {
        match self {
            SpanTokens::Given { .. } => false,
            SpanTokens::Last | SpanTokens::Drawn { .. } => true,
        }
    }
}

/// Where the K and V of a span's self-attention go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanTable {
    /// Through the sequence's own table: causal attention over its past.
    Own,
    /// One layer-sized buffer outside the pool (encoder self-attention).
    Scratch,
    /// The sink page: the row is computed and its result discarded (a hole of the window with the shuffle off).
    Sink,
}

/// Which rows of a span yield a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last row.
    Last,
    /// Every row.
    All,
    /// `len` rows: those that `StepBatch::picks` names from `at` on.
    Picked { at: u32, len: u32 },
    /// Every row's hidden state after the final norm, no logits.
    Hidden,
}

/// Moves a slot's state: last token and page table. K and V stay where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotMove {
    pub from: Slot,
    pub to: Slot,
}

/// Writes one entry of one of a slot's page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableUpdate {
    pub slot: Slot,
    /// Its own or the cross table.
    pub table: KvTable,
    /// Index within the table: position / page positions.
    pub index: u32,
    pub page: Page,
}

/// Copies a page's K and V in every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCopy {
    pub from: Page,
    pub to: Page,
}

impl StepBatch {
    /// An empty batch whose lists never grow beyond what `limits` allow.
    pub fn with_capacity(limits: &crate::StepLimits) -> StepBatch {
        StepBatch {
            step: 0,
            lane: 0,
            moves: Vec::with_capacity(limits.slots),
            tables: Vec::with_capacity(limits.slots * (limits.table_len() + limits.cross_table_len())),
            copies: Vec::with_capacity(limits.slots),
            spans: Vec::with_capacity(limits.rows),
            tokens: Vec::with_capacity(limits.rows),
            picks: Vec::with_capacity(limits.rows),
            samples: Vec::with_capacity(limits.rows),
            biases: Vec::with_capacity(limits.bias_room()),
            logits: false,
        }
    }

    /// Empties every list and keeps their room.
    pub fn clear(&mut self) {
        self.moves.clear();
        self.tables.clear();
        self.copies.clear();
        self.spans.clear();
        self.tokens.clear();
        self.picks.clear();
        self.samples.clear();
        self.biases.clear();
        self.logits = false;
    }

    /// Rows of the pass.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|span| span.len()).sum()
    }

    /// Rows of one stack's spans.
    pub fn rows_of(&self, stack: SpanStack) -> usize {
        self.spans.iter().filter(|span| span.stack == stack).map(Span::len).sum()
    }

    /// Rows of one stack whose logits are wanted, in order: indices into `0..rows_of(stack)`.
    pub fn wanted_rows(&self, stack: SpanStack) -> impl Iterator<Item = usize> + '_ {
        let mut first = 0;
        self.spans.iter().filter(move |span| span.stack == stack).flat_map(move |span| {
            let rows = first..first + span.len();
            first = rows.end;
            let picks = match span.want {
                Want::Picked { at, len } => &self.picks[at as usize..][..len as usize],
                _ => &[],
            };
            let run = match span.want {
                Want::None | Want::Picked { .. } | Want::Hidden => rows.end..rows.end,
                Want::Last => rows.end - 1..rows.end,
                Want::All => rows.clone(),
            };
            run.chain(picks.iter().map(move |pick| rows.start + *pick as usize))
        })
    }

    /// Runs of one stack's rows whose hidden states are wanted, in order.
    pub fn hidden_rows(&self, stack: SpanStack) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut first = 0;
        self.spans.iter().filter(move |span| span.stack == stack).filter_map(move |span| {
            let rows = first..first + span.len();
            first = rows.end;
            (span.want == Want::Hidden).then_some(rows)
        })
    }
}

impl Span {
    /// Tokens in the span.
    #[allow(clippy::len_without_is_empty)] // a span always has a token
    pub fn len(&self) -> usize {
        match self.tokens {
            SpanTokens::Given { len, .. } => len as usize,
            SpanTokens::Last | SpanTokens::Drawn { .. } => 1,
        }
    }
}
