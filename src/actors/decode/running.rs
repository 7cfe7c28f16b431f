//! A running sequence, and the spans that it adds to a step.
//!
//! Invariant: the positions of a span follow from the sequence's progress.

use crate::actors::loop_metrics::{LoopMetrics, SequenceTimes};
use crate::actors::sequence::{Sequence, SequenceKey};
use crate::decoding;
use crate::request::Token;
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens};

/// A sequence that holds a slot.
pub(super) struct RunningSequence {
    pub(super) key: SequenceKey,
    pub(super) slot: Slot,
    pub(super) sequence: Box<Sequence>,
    /// The prefill chunk for the next step.
    pub(super) chunk: Option<PrefillChunk>,
    /// Whether the last chunk of its prompt has been scheduled.
    pub(super) prompt_scheduled: bool,
    /// Number of generated tokens; 0 during prefill.
    pub(super) generated: u32,
    /// The last generated token; 0 if there is none.
    pub(super) last_token: u32,
    /// Whether its end has been sent; it leaves at the end of the iteration.
    pub(super) finished: bool,
    pub(super) times: SequenceTimes,
    /// Log-probabilities of prompt tokens, until the first token is generated.
    pub(super) prompt_logprobs: Vec<Token>,
}

/// A contiguous part of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrefillChunk {
    pub(super) start: usize,
    /// Whether the prompt ends with this chunk.
    pub(super) len: usize,
    pub(super) last: bool,
}

impl RunningSequence {
    /// Creates the state of a sequence whose first chunk was just scheduled. It has no slot yet.
    pub(super) fn new(key: SequenceKey, sequence: Box<Sequence>, meters: &LoopMetrics) -> RunningSequence {
        RunningSequence {
            key,
            slot: Slot::MAX,
            chunk: None,
            prompt_scheduled: false,
            generated: 0,
            last_token: 0,
            finished: false,
            times: meters.record_scheduled(sequence.arrived),
            prompt_logprobs: Vec::new(),
            sequence,
        }
    }

    /// Returns the position of the next token.
    pub(super) fn next_position(&self) -> u32 {
        self.sequence.request.prompt.len() as u32 + self.generated
    }

    /// Returns the decoder span of `tokens` from position `start` on.
    pub(super) fn span(&self, start: u32, tokens: SpanTokens, want: SpanOutput) -> Span {
        Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: self.slot,
            start,
            tokens,
            table: SpanTable::Own,
            reserved: self.sequence.positions() as u32,
            encoder_len: self.encoder_len(),
            output: want,
        }
    }

    /// Returns the encoder span of the whole encoder input.
    pub(super) fn encoder_span(&self, tokens: SpanTokens, want: SpanOutput) -> Span {
        Span {
            stack: SpanStack::Encoder,
            table: SpanTable::Scratch,
            reserved: self.encoder_len(),
            ..self.span(0, tokens, want)
        }
    }

    fn encoder_len(&self) -> u32 {
        self.sequence.request.encoder_input.len() as u32
    }

    /// Returns the row that samples the next token, without logit biases.
    pub(super) fn sample_row(&self) -> SamplingParams {
        let request = &self.sequence.request;
        decoding::sample_row(&request.sampling, self.next_position(), request.logprobs)
    }
}
