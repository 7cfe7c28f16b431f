//! Builds a batch from the work of an iteration.
//!
//! Invariant: encoder spans come first, and sample rows are in the order of the spans, so that the results
//! come back in the order of the [`OutputRouting`].

use super::flight::Load;
use super::live::Piece;
use super::settle::{Wanted, What};
use super::{MainStem, Work};
use crate::actors::kv::Plan;
use crate::actors::meters::StepSize;
use crate::decoding;
use crate::request::Task;
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{
    SampleMode, SampleRow, Span, SpanModel, SpanStack, SpanTable, SpanTokens, StepBatch, Want,
};

impl MainStem {
    /// Builds a batch of these spans, encoder spans first, and of the slot plan's changes.
    pub(super) fn fill(&self, buffers: &mut Load, plan: Option<Plan>, spans: &[Work]) {
        let Load { step, waiting: routing } = buffers;
        let batch = &mut step.batch;
        batch.clear();
        routing.clear();
        batch.lane = self.lane as u32;
        if let Some(plan) = plan {
            self.meters.moved(plan.moves.len());
            batch.moves.extend(plan.moves);
            batch.copies.extend(plan.copies);
            batch.tables.extend(plan.tables);
        }
        for span in spans {
            if let Work::Chunk(at, Piece { start: 0, .. }) = *span {
                self.add_source(buffers, at);
            }
        }
        for span in spans {
            match *span {
                Work::Next(at) => self.add_next(buffers, at),
                // An encoder span may be all the work of a sequence.
                Work::Chunk(_, Piece { len: 0, .. }) => {}
                Work::Chunk(at, chunk) => self.add_chunk(buffers, at, chunk),
                Work::Hole(slot) => self.add_hole(buffers, slot, Want::Last),
                Work::Nothing(slot) => self.add_hole(buffers, slot, Want::None),
            }
        }
        let (rows, samples) = (buffers.waiting.wanted.len(), buffers.step.batch.samples.len());
        assert_eq!(rows, samples, "each sample row has a target");
    }

    /// Adds the encoder span of a sequence that starts, if it has an encoder input, and the outputs that its
    /// task needs.
    fn add_source(&self, Load { step, waiting: routing }: &mut Load, at: usize) {
        let (batch, running) = (&mut step.batch, &self.live[at]);
        let request = &running.sequence.request;
        if request.source.is_empty() {
            return;
        }
        let want = match &request.task {
            Task::Generate => Want::None,
            Task::Embed(_) => Want::Hidden,
            Task::Fill { at: positions, .. } => {
                let from = batch.picks.len() as u32;
                batch.picks.extend_from_slice(positions);
                Want::Picked { at: from, len: positions.len() as u32 }
            }
        };
        let tokens = given(batch, &request.source);
        batch.spans.push(running.source_span(tokens, want));
        if let Task::Fill { at: positions, top } = &request.task {
            // The token at the position is scored, not sampled: a slot's last token is the decoder's.
            let rows = positions.iter().map(|position| SampleRow {
                mode: SampleMode::Score(request.source[*position as usize]),
                top_logprobs: *top,
                ..SampleRow::GREEDY
            });
            batch.samples.extend(rows);
            routing.wanted.extend(positions.iter().map(|_| Wanted::By(self.seat(at), What::Place)));
        }
        if request.task != Task::Generate {
            routing.whole.push(self.seat(at));
        }
    }

    /// Adds the span that decodes the next token of a running sequence.
    fn add_next(&self, buffers: &mut Load, at: usize) {
        let (batch, running) = (&mut buffers.step.batch, &self.live[at]);
        let tokens = self.last_token(batch, running.last_token);
        batch.spans.push(running.span(running.next_position() - 1, tokens, Want::Last));
        self.add_draw(buffers, at);
    }

    /// The token source of a decode span. With one device, the device remembers the token it sampled; with
    /// several, only one of them sampled it, so the batch contains it.
    fn last_token(&self, batch: &mut StepBatch, token: u32) -> SpanTokens {
        match self.neighbours.devices.count() {
            1 => SpanTokens::Last,
            _ => {
                let at = batch.tokens.len() as u32;
                batch.tokens.push(token);
                SpanTokens::Drawn { at }
            }
        }
    }

    /// Adds the span of a prefill chunk.
    fn add_chunk(&self, buffers: &mut Load, at: usize, chunk: Piece) {
        let Piece { start, len, last } = chunk;
        let (batch, running) = (&mut buffers.step.batch, &self.live[at]);
        let request = &running.sequence.request;
        let tokens = given(batch, &request.prompt[start..start + len]);
        let want = match (request.prompt_logprobs, last) {
            (true, _) => Want::All,
            (false, true) => Want::Last,
            (false, false) => Want::None,
        };
        batch.spans.push(running.span(start as u32, tokens, want));
        if request.prompt_logprobs {
            // The logits of a row are those of the token after it.
            for token in request.prompt[start + 1..].iter().take(len) {
                batch.samples.push(SampleRow {
                    mode: SampleMode::Score(*token),
                    logprob: true,
                    ..running.row()
                });
                buffers.waiting.wanted.push(Wanted::By(self.seat(at), What::PromptToken));
            }
        }
        if last {
            self.add_draw(buffers, at);
        }
    }

    /// Adds the row that samples a sequence's next token, with its logit biases.
    fn add_draw(&self, Load { step, waiting: routing }: &mut Load, at: usize) {
        let (batch, running) = (&mut step.batch, &self.live[at]);
        let bias_at = batch.biases.len();
        batch.biases.extend(decoding::biases(&running.sequence.request, &self.config.eos, running.generated));
        let bias_len = (batch.biases.len() - bias_at) as u32;
        batch.samples.push(SampleRow { bias_at: bias_at as u32, bias_len, ..running.row() });
        routing.wanted.push(Wanted::By(self.seat(at), What::Next));
    }

    /// Adds a span that writes to the null page and whose result is discarded.
    fn add_hole(&self, Load { step, waiting: routing }: &mut Load, slot: Slot, want: Want) {
        let tokens = self.last_token(&mut step.batch, 0);
        step.batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot,
            start: 0,
            tokens,
            table: SpanTable::Sink,
            reserved: 1,
            source: 0,
            want,
        });
        if want == Want::Last {
            step.batch.samples.push(SampleRow::GREEDY);
            routing.wanted.push(Wanted::Nobody);
        }
    }
}

/// Returns the numbers of rows, holes and sequences of a step.
pub(super) fn size(batch: &StepBatch) -> StepSize {
    let holes = batch.spans.iter().filter(|span| span.table == SpanTable::Sink).count();
    let spans_of = |stack| batch.spans.iter().filter(|span| span.stack == stack).count();
    // In an encoder-decoder model, an encoder span comes with a decoder span of the same sequence.
    let sequences = spans_of(SpanStack::Decoder).max(spans_of(SpanStack::Encoder)) - holes;
    StepSize { rows: batch.rows(), holes, slots: sequences }
}

/// Appends tokens to the batch, and returns their location.
fn given(batch: &mut StepBatch, tokens: &[u32]) -> SpanTokens {
    let at = batch.tokens.len() as u32;
    batch.tokens.extend_from_slice(tokens);
    SpanTokens::Given { at, len: tokens.len() as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(stack: SpanStack, table: SpanTable, len: u32) -> Span {
        let (model, tokens) = (SpanModel::Target, SpanTokens::Given { at: 0, len });
        Span { model, stack, slot: 0, start: 0, tokens, table, reserved: 9, source: 0, want: Want::None }
    }

    #[test]
    fn sequences_are_counted_once_though_they_have_a_span_in_either_stack() {
        let source = span(SpanStack::Encoder, SpanTable::Scratch, 5);
        let (own, hole) =
            (span(SpanStack::Decoder, SpanTable::Own, 2), span(SpanStack::Decoder, SpanTable::Sink, 1));
        for (spans, expected) in [
            (vec![source, source], (10, 0, 2)),
            (vec![source, source, own, own, own, hole], (17, 1, 3)),
            (vec![own, hole, hole, own], (6, 2, 2)),
        ] {
            let StepSize { rows, holes, slots } = size(&StepBatch { spans, ..StepBatch::default() });
            assert_eq!((rows, holes, slots), expected);
        }
    }
}
