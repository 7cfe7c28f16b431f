//! A running sequence, and the spans that it adds to a step.
//!
//! Invariant: the positions of a span follow from the sequence's progress.

use crate::actors::meters::{Meters, Moments};
use crate::actors::sequence::{Key, Sequence};
use crate::decoding;
use crate::request::Token;
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{SampleRow, Span, SpanModel, SpanStack, SpanTable, SpanTokens, Want};

/// A sequence that holds a slot.
pub(super) struct Live {
    pub(super) key: Key,
    pub(super) slot: Slot,
    pub(super) sequence: Box<Sequence>,
    /// The prefill chunk for the next step.
    pub(super) piece: Option<Piece>,
    /// Whether the last chunk of its prompt has been scheduled.
    pub(super) handed_out: bool,
    /// Number of generated tokens; 0 during prefill.
    pub(super) generated: u32,
    /// The last generated token; 0 if there is none.
    pub(super) last_token: u32,
    /// Whether its end has been sent; it leaves at the end of the iteration.
    pub(super) over: bool,
    pub(super) moments: Moments,
    /// Log-probabilities of prompt tokens, until the first token is generated.
    pub(super) prompt: Vec<Token>,
}

/// A contiguous part of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) start: usize,
    /// Whether the prompt ends with this chunk.
    pub(super) len: usize,
    pub(super) last: bool,
}

impl Live {
    /// Creates the state of a sequence whose first chunk was just scheduled. It has no slot yet.
    pub(super) fn new(key: Key, sequence: Box<Sequence>, meters: &Meters) -> Live {
        Live {
            key,
            slot: Slot::MAX,
            piece: None,
            handed_out: false,
            generated: 0,
            last_token: 0,
            over: false,
            moments: meters.scheduled(sequence.arrived),
            prompt: Vec::new(),
            sequence,
        }
    }

    /// Returns the position of the next token.
    pub(super) fn next_position(&self) -> u32 {
        self.sequence.request.prompt.len() as u32 + self.generated
    }

    /// Returns the decoder span of `tokens` from position `start` on.
    pub(super) fn span(&self, start: u32, tokens: SpanTokens, want: Want) -> Span {
        Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: self.slot,
            start,
            tokens,
            table: SpanTable::Own,
            reserved: self.sequence.positions() as u32,
            source: self.source_len(),
            want,
        }
    }

    /// Returns the encoder span of the whole encoder input.
    pub(super) fn source_span(&self, tokens: SpanTokens, want: Want) -> Span {
        Span {
            stack: SpanStack::Encoder,
            table: SpanTable::Scratch,
            reserved: self.source_len(),
            ..self.span(0, tokens, want)
        }
    }

    fn source_len(&self) -> u32 {
        self.sequence.request.source.len() as u32
    }

    /// Returns the row that samples the next token, without logit biases.
    pub(super) fn row(&self) -> SampleRow {
        let request = &self.sequence.request;
        decoding::compile(&request.sampling, self.next_position(), request.logprobs)
    }
}
