//! A running sequence, and the spans that it adds to a step.
//!
//! Invariant: the positions of a span follow from the steps that were sent, whether their results are back or
//! not.

use crate::actors::kv::{ComputedSequence, EndedSequence};
use crate::actors::loop_metrics::{LoopMetrics, SequenceTimes};
use crate::actors::prefill::PromptChunk;
use crate::actors::sequence::{Sequence, SequenceKey};
use crate::decoding::{HostPool, HostSequence};
use crate::request::{self, Request, Task, Token};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens};
use std::sync::Arc;

/// A sequence that holds a slot.
pub(super) struct RunningSequence {
    pub(super) key: SequenceKey,
    pub(super) slot: Slot,
    pub(super) sequence: Box<Sequence>,
    /// The prefill chunk for the next step.
    pub(super) chunk: Option<PromptChunk>,
    /// Whether the last chunk of its prompt has been scheduled.
    pub(super) prompt_scheduled: bool,
    /// Number of tokens that the next step continues from: those received, and with run-ahead the one that
    /// the step in flight samples.
    pub(super) scheduled: u32,
    /// Number of generated tokens whose results are back; 0 during prefill.
    pub(super) received: u32,
    /// These tokens, without the one that ends the sequence. There is room for all from the start.
    pub(super) generated: Vec<u32>,
    /// Whether its end has been sent; it leaves when the next iteration is scheduled.
    pub(super) finished: bool,
    pub(super) times: SequenceTimes,
    /// Log-probabilities of prompt tokens, until the first token is generated.
    pub(super) prompt_logprobs: Vec<Token>,
    /// Number of tokens that a grammar forced after the last sampled one.
    pub(super) forced: u32,
    /// The host's part in choosing its tokens, if it has one.
    pub(super) host: Option<HostSequence>,
}

impl RunningSequence {
    /// Creates the state of a sequence whose first chunk was just scheduled. It has no slot yet. `jump_limit`
    /// is the maximum number of tokens that a grammar may force at once.
    pub(super) fn new(
        key: SequenceKey,
        sequence: Box<Sequence>,
        meters: &LoopMetrics,
        pool: &Arc<HostPool>,
        jump_limit: usize,
    ) -> RunningSequence {
        let Request { plan, constraint, prompt, max_tokens, logprobs, .. } = &sequence.request;
        // Forced tokens have no rows, and so no log-probabilities.
        let limit = if logprobs.is_none() { jump_limit } else { 0 };
        let host = HostSequence::begin(pool, plan.as_ref(), constraint.as_ref(), prompt, *max_tokens, limit);
        RunningSequence {
            host,
            forced: 0,
            key,
            slot: Slot::MAX,
            chunk: None,
            prompt_scheduled: false,
            scheduled: 0,
            received: 0,
            generated: Vec::with_capacity(sequence.request.max_tokens.max(1) as usize),
            finished: false,
            times: meters.record_scheduled(sequence.arrived),
            prompt_logprobs: Vec::new(),
            sequence,
        }
    }

    /// Gives up the slot and the pages, when no later step has rows of the sequence. Its tokens and pages are
    /// handed over if it ends regularly.
    pub(super) fn release(&mut self) -> EndedSequence {
        let ends = self.finished || self.ends_with_scheduled();
        let Sequence { request, lease, .. } = &mut *self.sequence;
        let reusable = ends && request.task == Task::Generate && request.encoder_input.is_empty();
        let computed = lease.take().filter(|_| reusable).map(|lease| ComputedSequence {
            prompt: request.prompt.clone(),
            generated: std::mem::take(&mut self.generated),
            lease,
        });
        EndedSequence { key: self.key, computed }
    }

    /// Whether the sequence ends with the steps that were sent, whatever their results are.
    pub(super) fn ends_with_scheduled(&self) -> bool {
        let request = &self.sequence.request;
        match request.task {
            Task::Generate => self.scheduled >= request.max_tokens.max(1),
            Task::Embed(_) | Task::FillMask { .. } => self.prompt_scheduled,
        }
    }

    /// Whether the prompt is complete and tokens are generated.
    pub(super) fn is_decoding(&self) -> bool {
        self.scheduled > 0
    }

    /// Returns the number of generated tokens before the next one.
    pub(super) fn generated_count(&self) -> u32 {
        self.scheduled
    }

    /// Counts a generated token whose result is back; `continues` is whether it is the input of a later step.
    pub(super) fn receive(&mut self, token: u32, continues: bool) {
        self.received += 1;
        self.scheduled = self.scheduled.max(self.received);
        if continues {
            self.generated.push(token);
        }
    }

    /// Returns the tokens that the next decode step computes: the last sampled one and those forced after it.
    pub(super) fn next_input(&self) -> &[u32] {
        &self.generated[self.generated.len().saturating_sub(1 + self.forced as usize)..]
    }

    /// Returns the last token that was received; 0 if there is none.
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
        request::sample_row(&request.sampling, self.next_position(), request.logprobs)
    }
}
