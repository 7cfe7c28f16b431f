//! A running sequence, and the spans that it adds to a step.
//!
//! Invariant: the positions of a span follow from the sequence's progress.

use crate::actors::kv::{ComputedSequence, EndedSequence};
use crate::actors::loop_metrics::{LoopMetrics, SequenceTimes};
use crate::actors::prefill::PromptChunk;
use crate::actors::sequence::{Sequence, SequenceKey};
use crate::decoding;
use crate::request::{Task, Token};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens};

/// A sequence that holds a slot.
pub(super) struct RunningSequence {
    pub(super) key: SequenceKey,
    pub(super) slot: Slot,
    pub(super) sequence: Box<Sequence>,
    /// The prefill chunk for the next step.
    pub(super) chunk: Option<PromptChunk>,
    /// Whether the last chunk of its prompt has been scheduled.
    pub(super) prompt_scheduled: bool,
    /// The generated tokens; none during prefill. There is room for all from the start.
    pub(super) generated: Vec<u32>,
    /// Whether its end has been sent; it leaves at the end of the iteration.
    pub(super) finished: bool,
    pub(super) times: SequenceTimes,
    /// Log-probabilities of prompt tokens, until the first token is generated.
    pub(super) prompt_logprobs: Vec<Token>,
}

impl RunningSequence {
    /// Creates the state of a sequence whose first chunk was just scheduled. It has no slot yet.
    pub(super) fn new(key: SequenceKey, sequence: Box<Sequence>, meters: &LoopMetrics) -> RunningSequence {
        RunningSequence {
            key,
            slot: Slot::MAX,
            chunk: None,
            prompt_scheduled: false,
            generated: Vec::with_capacity(sequence.request.max_tokens.max(1) as usize),
            finished: false,
            times: meters.record_scheduled(sequence.arrived),
            prompt_logprobs: Vec::new(),
            sequence,
        }
    }

    /// Ends the sequence. Its tokens and pages are handed over if it ended regularly.
    pub(super) fn into_ended(self) -> EndedSequence {
        let Sequence { request, lease, .. } = *self.sequence;
        let reusable = self.finished && request.task == Task::Generate && request.encoder_input.is_empty();
        let computed = lease.filter(|_| reusable).map(|lease| ComputedSequence {
            prompt: request.prompt,
            generated: self.generated,
            lease,
        });
        EndedSequence { key: self.key, computed }
    }

    /// Whether the prompt is complete and tokens are generated.
    pub(super) fn is_decoding(&self) -> bool {
        !self.generated.is_empty()
    }

    /// Returns the number of generated tokens.
    pub(super) fn generated_count(&self) -> u32 {
        self.generated.len() as u32
    }

    /// Returns the last generated token; 0 if there is none.
    pub(super) fn last_token(&self) -> u32 {
        self.generated.last().copied().unwrap_or_default()
    }

    /// Returns the position of the next token.
    pub(super) fn next_position(&self) -> u32 {
        self.sequence.request.prompt.len() as u32 + self.generated_count()
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
