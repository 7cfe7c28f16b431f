//! Builds a batch from the work of an iteration.
//!
//! Invariant: encoder spans come first, and sample rows are in the order of the spans, so that the results
//! come back in the order of the [`OutputRouting`].

use super::process_output::{DraftRef, HiddenRows, OutputRouting, RowTarget, RowUse};
use super::{DecodeLoop, SpanWork, beams};
use crate::actors::device::Step;
use crate::actors::kv::SlotPlan;
use crate::actors::loop_metrics::StepSize;
use crate::actors::prefill::PromptChunk;
use crate::decoding::HostSequence;
use crate::decoding::speculation::AcceptanceRule;
use crate::request::{self, Pooling, Request, Task};
use mainstem_kernels::batch::{Slot, typed_token};
use mainstem_kernels::{
    SampleMode, SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch,
    StepLimits,
};
use std::ops::Range;

/// The reusable buffers of a step that is not in flight, and the targets of its results.
pub(super) struct StepBuffers {
    pub(super) step: Box<Step>,
    pub(super) routing: OutputRouting,
}

impl StepBuffers {
    pub(super) fn with_capacity(limits: &StepLimits) -> StepBuffers {
        StepBuffers {
            step: Box::new(Step::with_capacity(limits)),
            routing: OutputRouting::with_capacity(limits),
        }
    }
}

impl DecodeLoop {
    /// Builds a batch of these spans, encoder spans first, and of the slot plan's changes.
    pub(super) fn build_batch(&self, buffers: &mut StepBuffers, plan: Option<SlotPlan>, spans: &[SpanWork]) {
        let StepBuffers { step, routing } = buffers;
        step.clear();
        routing.clear();
        let batch = &mut step.batch;
        batch.lane = self.lane as u32;
        if let Some(plan) = plan {
            self.metrics.record_moves(plan.moves.len());
            batch.moves.extend(plan.moves);
            batch.page_copies.extend(plan.copies);
            batch.table_updates.extend(plan.tables);
        }
        for span in spans {
            if let SpanWork::Prefill(at, PromptChunk { with_encoder_input: true, .. }) = *span {
                self.add_encoder_span(buffers, at);
            }
        }
        for span in spans {
            match *span {
                SpanWork::Decode(at) => self.add_decode_span(buffers, at),
                SpanWork::Draft(at) => self.add_drafts(buffers, at),
                // An encoder span may be all the work of a sequence.
                SpanWork::Prefill(_, PromptChunk { len: 0, .. }) => {}
                SpanWork::Prefill(at, chunk) => self.add_prefill_span(buffers, at, chunk),
                SpanWork::Hole(slot) => self.add_hole(buffers, slot, SpanOutput::Last),
                SpanWork::UpdatesOnly(slot) => self.add_hole(buffers, slot, SpanOutput::None),
            }
        }
        let (rows, samples) = (buffers.routing.targets.len(), buffers.step.batch.sampling.len());
        assert_eq!(rows, samples, "each sample row has a target");
    }

    /// Adds the encoder span of a sequence, and the outputs that its task needs.
    fn add_encoder_span(&self, StepBuffers { step, routing }: &mut StepBuffers, at: usize) {
        let (batch, running) = (&mut step.batch, &self.running[at]);
        let request = &running.sequence.request;
        let want = match &request.task {
            Task::Generate => SpanOutput::None,
            Task::Embed(_) | Task::EmbedTokens => SpanOutput::Hidden,
            Task::FillMask { positions, .. } => {
                let from = batch.selected_rows.len() as u32;
                batch.selected_rows.extend_from_slice(positions);
                SpanOutput::Selected { at: from, len: positions.len() as u32 }
            }
        };
        let second = request.second_text.map_or(usize::MAX, |second| second as usize);
        let types = (0..).map(|position: usize| u8::from(position >= second));
        let typed = request.encoder_input.iter().zip(types);
        let tokens = push_tokens(batch, typed.map(|(id, token_type)| typed_token(*id, token_type)));
        batch.spans.push(running.encoder_span(tokens, want));
        if let Task::FillMask { positions, top_k: top } = &request.task {
            // The token at the position is scored, not sampled: a slot's last token is the decoder's.
            let rows = positions.iter().map(|position| SamplingParams {
                mode: SampleMode::Score(request.encoder_input[*position as usize]),
                top_logprobs: *top,
                ..SamplingParams::GREEDY
            });
            batch.sampling.extend(rows);
            routing.targets.extend(
                positions.iter().map(|_| RowTarget::Sequence(self.sequence_ref(at), RowUse::MaskPrediction)),
            );
        }
        if request.task != Task::Generate {
            let returns_hidden = matches!(request.task, Task::Embed(_) | Task::EmbedTokens);
            let rows = if returns_hidden { request.encoder_input.len() } else { 0 };
            routing.hidden.push(HiddenRows { sequence: self.sequence_ref(at), rows, ends: true });
        }
    }

    /// Adds the span that decodes the next token of a running sequence. It computes the last sampled token,
    /// and those that a grammar forced after it.
    fn add_decode_span(&self, buffers: &mut StepBuffers, at: usize) {
        let depth = self.running[at].depth();
        if depth > 0 {
            return self.add_verification(buffers, at, depth);
        }
        self.add_catch_up(&mut buffers.step.batch, at);
        let (batch, running) = (&mut buffers.step.batch, &self.running[at]);
        let tokens = match running.forced {
            // The last token that the device sampled may be that of a draft which was not accepted.
            0 if !running.is_beam && running.speculator.is_none() => {
                self.decode_token(batch, running.last_token())
            }
            forced => {
                let at = batch.tokens.len() as u32;
                batch.tokens.extend_from_slice(running.next_input());
                SpanTokens::Generated { at, len: 1 + forced }
            }
        };
        let start = running.next_position() - 1 - running.forced;
        batch.spans.push(running.span(start, tokens, SpanOutput::Last));
        self.add_next_row(buffers, at);
    }

    /// The token source of a decode span. With one device, the device remembers the token it sampled; with
    /// several, only one of them sampled it, so the batch contains it.
    fn decode_token(&self, batch: &mut StepBatch, token: u32) -> SpanTokens {
        match self.handles.devices.count() {
            1 => SpanTokens::Last,
            _ => {
                let at = batch.tokens.len() as u32;
                batch.tokens.push(token);
                SpanTokens::Generated { at, len: 1 }
            }
        }
    }

    /// Returns whether the work is an opening ([`mainstem_kernels::Span::is_opening`]).
    pub(super) fn is_opening(&self, work: &SpanWork) -> bool {
        let SpanWork::Prefill(at, chunk) = work else { return false };
        let given = chunk.len.min(self.running[*at].sequence.request.prompt.len());
        chunk.start == 0 && self.config.limits.opens_with(given)
    }

    /// Adds the spans of a prefill chunk: of prompt tokens, and after a preemption of generated ones.
    fn add_prefill_span(&self, buffers: &mut StepBuffers, at: usize, chunk: PromptChunk) {
        let running = &self.running[at];
        let Request { prompt, task, .. } = &running.sequence.request;
        let end = chunk.start + chunk.len;
        if *task != Task::Generate {
            return self.add_embedded_span(buffers, at, chunk);
        }
        if chunk.start < prompt.len() {
            self.add_prompt_span(
                buffers,
                at,
                chunk.start..end.min(prompt.len()),
                chunk.last && end <= prompt.len(),
            );
        }
        if end > prompt.len() {
            let start = chunk.start.max(prompt.len());
            let batch = &mut buffers.step.batch;
            let from = batch.tokens.len() as u32;
            batch.tokens.extend_from_slice(&running.generated[start - prompt.len()..end - prompt.len()]);
            let tokens = SpanTokens::Generated { at: from, len: (end - start) as u32 };
            let want = if chunk.last { SpanOutput::Last } else { SpanOutput::None };
            batch.spans.push(running.span(start as u32, tokens, want));
        }
        self.add_prompt_draft(&mut buffers.step.batch, at, chunk);
        if chunk.last {
            self.replace_counts(&mut buffers.step.batch, at);
            self.add_next_row(buffers, at);
        }
    }

    /// Adds the span of a chunk of a prompt that is embedded. The states of all tokens are returned for their
    /// mean, otherwise that of the last one, which is in a span of its own.
    fn add_embedded_span(
        &self,
        StepBuffers { step, routing }: &mut StepBuffers,
        at: usize,
        chunk: PromptChunk,
    ) {
        let running = &self.running[at];
        let is_mean = running.sequence.request.task == Task::Embed(Pooling::Mean);
        let rows = if is_mean { chunk.len } else { usize::from(chunk.last) };
        let middle = chunk.start + chunk.len - rows;
        for (range, want) in
            [(chunk.start..middle, SpanOutput::None), (middle..chunk.start + chunk.len, SpanOutput::Hidden)]
        {
            if !range.is_empty() {
                let prompt = running.sequence.request.prompt[range.clone()].iter().copied();
                let tokens = push_tokens(&mut step.batch, prompt);
                step.batch.spans.push(running.span(range.start as u32, tokens, want));
            }
        }
        if rows > 0 {
            routing.hidden.push(HiddenRows { sequence: self.sequence_ref(at), rows, ends: chunk.last });
        }
    }

    /// Replaces the counts of tokens in the slot of a sequence with penalties, before its first row that
    /// samples there. The device counts the tokens that it samples.
    fn replace_counts(&self, batch: &mut StepBatch, at: usize) {
        let running = &self.running[at];
        let request = &running.sequence.request;
        if !request.sampling.penalties.is_none() {
            let vocab = self.config.limits.vocab;
            batch.replace_counts(running.slot, (&request.prompt, &running.generated), vocab);
        }
    }

    /// Adds a span of prompt tokens, which end the prompt if it is the `last`.
    fn add_prompt_span(&self, buffers: &mut StepBuffers, at: usize, range: Range<usize>, last: bool) {
        let (batch, running) = (&mut buffers.step.batch, &self.running[at]);
        let request = &running.sequence.request;
        let tokens = push_tokens(batch, request.prompt[range.clone()].iter().copied());
        // Those of a preempted sequence were reported with its first token.
        let logprobs = request.prompt_logprobs.filter(|_| running.resumed == 0);
        let want = match (logprobs, last) {
            (Some(_), _) => SpanOutput::All,
            (None, true) => SpanOutput::Last,
            (None, false) => SpanOutput::None,
        };
        batch.spans.push(running.span(range.start as u32, tokens, want));
        if let Some(top_logprobs) = logprobs {
            // The logits of a row are those of the token after it.
            for token in request.prompt[range.start + 1..].iter().take(range.len()) {
                batch.sampling.push(SamplingParams {
                    mode: SampleMode::Score(*token),
                    logprob: true,
                    top_logprobs,
                    ..running.sample_row()
                });
                let target = RowTarget::Sequence(self.sequence_ref(at), RowUse::PromptLogprob);
                buffers.routing.targets.push(target);
            }
        }
    }

    /// Adds a row that samples a token of a sequence, with its logit biases, and the host's part in it. It is
    /// the next token, or the one after `ahead` drafts.
    pub(super) fn add_sample_row(
        &self,
        StepBuffers { step, routing }: &mut StepBuffers,
        at: usize,
        ahead: u32,
        usage: RowUse,
    ) {
        let (batch, running) = (&mut step.batch, &self.running[at]);
        let target = RowTarget::Sequence(self.sequence_ref(at), usage);
        routing.targets.push(target);
        if let RowUse::BeamCandidates { count } = usage {
            let params = SamplingParams { logprob: true, top_logprobs: count, ..SamplingParams::GREEDY };
            return batch.sampling.push(params);
        }
        let mut params = running.sample_row();
        params.position += ahead;
        let host = running.host.as_ref();
        // A plan of the host includes the biases.
        if !host.is_some_and(HostSequence::draws) {
            params.bias_at = batch.logit_biases.len() as u32;
            batch.logit_biases.extend(request::logit_biases(
                &running.sequence.request,
                &self.config.eos,
                running.generated_count() + ahead,
            ));
            params.bias_len = batch.logit_biases.len() as u32 - params.bias_at;
        }
        if let Some(host) = host {
            match (usage, &running.speculator) {
                (RowUse::Verified { number, draft }, Some(speculator)) => {
                    // Only drafts that the step makes have logits to compare.
                    let rule = match (draft, speculator.rule()) {
                        (None, _) | (Some(DraftRef::Given(_)), AcceptanceRule::Rejection) => {
                            AcceptanceRule::Coupled
                        }
                        (Some(_), rule) => rule,
                    };
                    let row = batch.sampling.len();
                    host.register_verified(&step.late, row, &mut params, rule, number as usize);
                }
                _ => host.register(&step.late, batch.sampling.len(), &mut params),
            }
        }
        batch.sampling.push(params);
    }

    /// Adds the row after the last known token of a sequence.
    fn add_next_row(&self, buffers: &mut StepBuffers, at: usize) {
        let search = beams::beam_params(&self.running[at].sequence.request, &self.config.eos);
        let usage = match search {
            Some(search) => RowUse::BeamCandidates { count: (search.width + search.end_tokens.len()) as u8 },
            None => RowUse::NextToken,
        };
        self.add_sample_row(buffers, at, 0, usage);
    }

    /// Adds a span that writes to the null page and whose result is discarded.
    fn add_hole(&self, StepBuffers { step, routing }: &mut StepBuffers, slot: Slot, want: SpanOutput) {
        let tokens = self.decode_token(&mut step.batch, 0);
        step.batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot,
            start: 0,
            tokens,
            table: SpanTable::Null,
            reserved: 1,
            encoder_len: 0,
            output: want,
        });
        if want == SpanOutput::Last {
            step.batch.sampling.push(SamplingParams::GREEDY);
            routing.targets.push(RowTarget::Discard);
        }
    }
}

/// Returns the numbers of rows, holes and sequences of a step.
pub(super) fn step_size(batch: &StepBatch) -> StepSize {
    let holes = batch.spans.iter().filter(|span| span.table == SpanTable::Null).count();
    let spans_of = |stack| batch.spans.iter().filter(|span| span.stack == stack).count();
    // In an encoder-decoder model, an encoder span comes with a decoder span of the same sequence.
    let sequences = spans_of(SpanStack::Decoder).max(spans_of(SpanStack::Encoder)) - holes;
    StepSize { rows: batch.rows(), holes, slots: sequences }
}

/// Appends tokens to the batch, and returns their location.
fn push_tokens(batch: &mut StepBatch, tokens: impl Iterator<Item = u32>) -> SpanTokens {
    let at = batch.tokens.len() as u32;
    batch.tokens.extend(tokens);
    SpanTokens::Given { at, len: batch.tokens.len() as u32 - at }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(stack: SpanStack, table: SpanTable, len: u32) -> Span {
        let (model, tokens) = (SpanModel::Target, SpanTokens::Given { at: 0, len });
        Span {
            model,
            stack,
            slot: 0,
            start: 0,
            tokens,
            table,
            reserved: 9,
            encoder_len: 0,
            output: SpanOutput::None,
        }
    }

    #[test]
    fn sequences_with_spans_in_both_stacks_are_counted_once() {
        let encoder_span = span(SpanStack::Encoder, SpanTable::Scratch, 5);
        let (own, hole) =
            (span(SpanStack::Decoder, SpanTable::Own, 2), span(SpanStack::Decoder, SpanTable::Null, 1));
        for (spans, expected) in [
            (vec![encoder_span, encoder_span], (10, 0, 2)),
            (vec![encoder_span, encoder_span, own, own, own, hole], (17, 1, 3)),
            (vec![own, hole, hole, own], (6, 2, 2)),
        ] {
            let StepSize { rows, holes, slots } = step_size(&StepBatch { spans, ..StepBatch::default() });
            assert_eq!((rows, holes, slots), expected);
        }
    }
}
