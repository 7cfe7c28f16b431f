//! The data that the decode loop and a device exchange: the input and the output of one step, without
//! padding; and the state that a device derives from the inputs.
//!
//! Invariant: plain data. The decode loop builds a batch, the device reads it, and the batch returns to be
//! reused. Only the decode loop may allocate, and only for more logit biases or counts of tokens than any
//! batch had before.

mod counts;
mod drafts;
mod handoff;
mod sampling;
mod step;

#[cfg(test)]
mod tests;

pub use counts::{CountChange, IN_PROMPT, Penalties, TokenCounts, with_generated};
pub use drafts::DraftSpan;
pub use handoff::{ActivationHandoff, HandoffPorts, LastLayerSignal};
pub use sampling::{
    RowFailure, SampleMode, SampledToken, SamplingParams, StepOutput, StepTimes, is_allowed, lowest_allowed,
};
pub use step::{RowSpan, StepRow, StepState};

use crate::backend::KvTable;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// The index of a sequence in all per-sequence buffers of a device.
pub type Slot = u32;
/// The index of a KV page. Page 0 is the null page [`NULL_PAGE`].
pub type Page = u32;

/// The null page: it is never leased to a sequence, and receives the K and V of rows whose results are
/// discarded.
pub const NULL_PAGE: Page = 0;

/// The input of one step: a forward pass over rows of several sequences, and changes of the slot state before
/// it.
///
/// A device applies the fields in this order: slot moves, changes of counts, page table updates, page copies,
/// drafts, spans. The rows of the step are the tokens of `spans`, one span after another; a list that belongs
/// to several rows or spans is flat, and each of them refers to its own range.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepBatch {
    /// Sequential number of the step in its group. A gap is a bug; the device asserts that there is none.
    pub step: u64,
    /// The lane of the step: the window of slots that it belongs to. Each lane has its own step in flight, so
    /// that several steps can pass through the pipeline stages.
    pub lane: u32,
    /// Slot moves. No slot is both the source of one and the target of another.
    pub moves: Vec<SlotMove>,
    /// Changes of the counts of tokens, at most one for a slot. Only for the device that samples, if its
    /// limits say that it counts tokens; others ignore them.
    pub count_changes: Vec<CountChange>,
    /// Tokens with their counts, one change after another.
    pub token_counts: Vec<(u32, u16)>,
    /// Changes of page table entries.
    pub table_updates: Vec<TableUpdate>,
    /// Pages to copy, in every layer.
    pub page_copies: Vec<PageCopy>,
    /// Spans of tokens to process. Spans of the encoder precede spans of the decoder, and openings
    /// ([`Span::is_opening`]) are the last ones.
    pub spans: Vec<Span>,
    /// Spans of the draft model, which makes drafts after them before `spans` are computed. Only the device
    /// that returns the results has a draft model; others ignore them.
    pub drafts: Vec<DraftSpan>,
    /// Token ids of the spans whose tokens are given with the batch. Those of an encoder input may have a
    /// token type ([`typed_token`]).
    pub tokens: Vec<u32>,
    /// Row indices of spans with [`SpanOutput::Selected`], counted from the first row of the span, ascending.
    pub selected_rows: Vec<u32>,
    /// Sampling parameters of every output row, in row order.
    pub sampling: Vec<SamplingParams>,
    /// Logit biases (token id, bias), added to the logits before sampling, one row after another.
    pub logit_biases: Vec<(u32, f32)>,
    /// Whether to return the raw logits of the output rows. Used for evaluation, never for serving.
    pub return_logits: bool,
    /// Whether to keep the logits of the drafts for the rows that the host draws
    /// ([`crate::late::HostRow::draft_logits`]).
    pub draft_logits: bool,
}

/// A run of consecutive tokens of one sequence within a step; each token is a row.
///
/// A prompt chunk, a generated token, a draft of speculative decoding and an encoder pass differ only in the
/// fields of their span.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The model that processes the span.
    pub model: SpanModel,
    /// The stack of that model.
    pub stack: SpanStack,
    /// The slot of the sequence, which holds its page tables and its last token.
    pub slot: Slot,
    /// Position of the first token in its sequence.
    pub start: u32,
    /// Source of the token ids.
    pub tokens: SpanTokens,
    /// Destination of the K and V of self-attention.
    pub table: SpanTable,
    /// Maximum number of tokens of the sequence, prompt and generated tokens. Length-dependent RoPE scaling
    /// uses it.
    pub reserved: u32,
    /// Tokens of the encoder input of the sequence, which cross-attention attends to; 0 without one.
    pub encoder_len: u32,
    /// The rows that return a result.
    pub output: SpanOutput,
}

/// The model that processes a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanModel {
    /// The model that is served.
    Target,
    /// The draft model, which proposes tokens in speculative decoding. Such spans are in the batches of its
    /// passes only, which a device derives from [`StepBatch::drafts`]: a sampled token becomes the next draft
    /// of the slot, and [`SpanTokens::Last`] is its last draft.
    Draft,
}

/// The stack of layers that processes a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SpanStack {
    /// The encoder. The span is a complete encoder input, from position 0 on, and each row attends to all of
    /// it. If the model has a decoder, the K and V of every cross-attention layer are stored through the
    /// cross table of the slot.
    Encoder,
    /// The decoder.
    Decoder,
}

/// The source of the token ids of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanTokens {
    /// Prompt tokens: `len` ids of [`StepBatch::tokens`], from index `at` on.
    Given { at: u32, len: u32 },
    /// One generated token: the last one that this device sampled for the slot, which is that of the last
    /// sampled row in row order. After a step that verified drafts and rejected some, it is a wrong one, so
    /// the next span is [`SpanTokens::Generated`].
    Last,
    /// Generated tokens, given as `len` ids of [`StepBatch::tokens`], from index `at` on: for a device that
    /// did not sample them, to verify drafts, or to compute their K and V again.
    Generated { at: u32, len: u32 },
    /// Generated tokens to verify: the last known token, which is number `at` of [`StepBatch::tokens`], and
    /// the first `len - 1` drafts that this device makes for the slot in the same step. Only for a device
    /// that has the whole model and the draft model.
    Drafted { at: u32, len: u32 },
}

impl SpanTokens {
    /// Returns the number of tokens.
    #[allow(clippy::len_without_is_empty)] // There is at least one token.
    pub fn len(self) -> usize {
        match self {
            SpanTokens::Given { len, .. }
            | SpanTokens::Generated { len, .. }
            | SpanTokens::Drafted { len, .. } => len as usize,
            SpanTokens::Last => 1,
        }
    }

    /// Returns whether the tokens were generated rather than part of a prompt, wherever their ids come from.
    pub fn is_generated(self) -> bool {
        !matches!(self, SpanTokens::Given { .. })
    }
}

/// The destination of the K and V of the self-attention of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanTable {
    /// The pages of the sequence, through its own page table: causal attention over the cached positions.
    Own,
    /// The scratch cache outside of the page pool, reused by every layer (encoder self-attention).
    Scratch,
    /// The null page: the row is computed and its result is discarded. Fills an empty slot in the window when
    /// the slot shuffle is off.
    Null,
}

/// The rows of a span that return a result. A row whose logits are computed is called an output row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanOutput {
    /// No row: a prompt chunk that is not the last.
    None,
    /// Logits of the last row.
    Last,
    /// Logits of every row. To verify drafts, each row samples the token after it, as separate steps would.
    All,
    /// Logits of `len` rows, whose indices are in [`StepBatch::selected_rows`] from index `at` on.
    Selected { at: u32, len: u32 },
    /// The hidden state of every row after the final norm, but no logits.
    Hidden,
}

/// Number of bits of a token id in [`StepBatch::tokens`]; the bits above are the type of the token.
const TOKEN_BITS: u32 = 24;

/// Returns a token of an encoder input with its type, which selects the row of the token type embedding.
pub fn typed_token(id: u32, token_type: u8) -> u32 {
    debug_assert!(id >> TOKEN_BITS == 0, "token id {id} has more than {TOKEN_BITS} bits");
    id | u32::from(token_type) << TOKEN_BITS
}

/// Returns id and type of a token of [`StepBatch::tokens`].
pub fn split_typed_token(token: u32) -> (u32, u8) {
    (token & ((1 << TOKEN_BITS) - 1), (token >> TOKEN_BITS) as u8)
}

/// Moves the state of a slot, its last token, counts of tokens and page tables, to another slot. K and V stay
/// where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotMove {
    /// Slot to move from.
    pub from: Slot,
    /// Slot to move to.
    pub to: Slot,
}

/// Writes one entry of a page table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableUpdate {
    /// Slot that the table belongs to.
    pub slot: Slot,
    /// The own, window or cross table of the slot.
    pub table: KvTable,
    /// Index in the table: position / page size.
    pub index: u32,
    /// New page of the entry.
    pub page: Page,
}

/// Copies the K and V of a page, in every layer of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageCopy {
    /// [`KvTable::Own`] for the pages of own and cross tables, which share their numbers, or
    /// [`KvTable::Window`].
    pub table: KvTable,
    /// Page to copy from.
    pub from: Page,
    /// Page to copy to.
    pub to: Page,
}

impl StepBatch {
    /// Creates an empty batch whose lists, except for biases and counts of tokens, never grow for steps
    /// within `limits`.
    pub fn with_capacity(limits: &crate::StepLimits) -> StepBatch {
        let draft_rows = if limits.drafts > 0 { limits.rows } else { 0 };
        StepBatch {
            step: 0,
            lane: 0,
            moves: Vec::with_capacity(limits.slots),
            count_changes: Vec::with_capacity(if limits.counts_tokens { limits.slots } else { 0 }),
            token_counts: Vec::new(),
            table_updates: Vec::with_capacity(
                limits.slots * (limits.table_len() + limits.window_table_len() + limits.cross_table_len()),
            ),
            page_copies: Vec::with_capacity(limits.slots * (1 + usize::from(limits.window.is_some()))),
            spans: Vec::with_capacity(limits.rows),
            drafts: Vec::with_capacity(draft_rows),
            tokens: Vec::with_capacity(limits.rows + draft_rows),
            selected_rows: Vec::with_capacity(limits.rows),
            sampling: Vec::with_capacity(limits.rows),
            logit_biases: Vec::new(),
            return_logits: false,
            draft_logits: false,
        }
    }

    /// Clears every list and keeps its capacity.
    pub fn clear(&mut self) {
        self.moves.clear();
        self.count_changes.clear();
        self.token_counts.clear();
        self.table_updates.clear();
        self.page_copies.clear();
        self.spans.clear();
        self.drafts.clear();
        self.tokens.clear();
        self.selected_rows.clear();
        self.sampling.clear();
        self.logit_biases.clear();
        self.return_logits = false;
        self.draft_logits = false;
    }

    /// Returns whether a span verifies drafts that are made in the same step.
    pub fn has_drafted_tokens(&self) -> bool {
        self.spans.iter().any(|span| matches!(span.tokens, SpanTokens::Drafted { .. }))
    }

    /// Returns the number of drafts to make.
    pub fn draft_count(&self) -> usize {
        self.drafts.iter().map(|span| span.count as usize).sum()
    }

    /// Returns the number of rows of the step.
    pub fn rows(&self) -> usize {
        self.spans.iter().map(|span| span.len()).sum()
    }

    /// Returns the number of rows of one stack.
    pub fn rows_of(&self, stack: SpanStack) -> usize {
        self.spans.iter().filter(|span| span.stack == stack).map(Span::len).sum()
    }

    /// Returns the number of decoder rows before the first opening, which all others follow.
    pub fn rows_before_openings(&self, limits: &crate::StepLimits) -> usize {
        let decoded = self.spans.iter().filter(|span| span.stack == SpanStack::Decoder);
        decoded.take_while(|span| !span.is_opening(limits)).map(Span::len).sum()
    }

    /// Returns the output rows of one stack, in order, as indices into `0..rows_of(stack)`.
    pub fn output_rows(&self, stack: SpanStack) -> impl Iterator<Item = usize> + '_ {
        let mut first = 0;
        self.spans.iter().filter(move |span| span.stack == stack).flat_map(move |span| {
            let rows = first..first + span.len();
            first = rows.end;
            let selected = match span.output {
                SpanOutput::Selected { at, len } => &self.selected_rows[at as usize..][..len as usize],
                _ => &[],
            };
            let run = match span.output {
                SpanOutput::None | SpanOutput::Selected { .. } | SpanOutput::Hidden => rows.end..rows.end,
                SpanOutput::Last => rows.end - 1..rows.end,
                SpanOutput::All => rows.clone(),
            };
            run.chain(selected.iter().map(move |row| rows.start + *row as usize))
        })
    }

    /// Returns the runs of rows of one stack whose hidden states are returned, in order.
    pub fn hidden_rows(&self, stack: SpanStack) -> impl Iterator<Item = Range<usize>> + '_ {
        let mut first = 0;
        self.spans.iter().filter(move |span| span.stack == stack).filter_map(move |span| {
            let rows = first..first + span.len();
            first = rows.end;
            (span.output == SpanOutput::Hidden).then_some(rows)
        })
    }
}

impl Span {
    /// Returns whether the span is an opening: a chunk that begins a prompt, whose length is within the
    /// limits of openings.
    pub fn is_opening(&self, limits: &crate::StepLimits) -> bool {
        (self.model, self.stack, self.table) == (SpanModel::Target, SpanStack::Decoder, SpanTable::Own)
            && self.start == 0
            && !self.tokens.is_generated()
            && limits.opens_with(self.len())
    }

    /// Returns the number of tokens of the span, which is its number of rows.
    #[allow(clippy::len_without_is_empty)] // A span is never empty.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }
}
