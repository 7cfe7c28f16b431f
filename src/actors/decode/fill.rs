//! From a turn's work to a batch.
//!
//! Invariant: spans of the encoder come first, and rows are wanted in the order of the spans, so that the results come
//! back in the order in which somebody waits for them.

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
    /// Makes a batch of these spans, the sources first, and of what changed its place.
    pub(super) fn fill(&self, load: &mut Load, plan: Option<Plan>, spans: &[Work]) {
        let Load { step, waiting } = load;
        let batch = &mut step.batch;
        batch.clear();
        waiting.clear();
        batch.lane = self.lane as u32;
        if let Some(plan) = plan {
            self.meters.moved(plan.moves.len());
            batch.moves.extend(plan.moves);
            batch.copies.extend(plan.copies);
            batch.tables.extend(plan.tables);
        }
        for span in spans {
            if let Work::Chunk(at, Piece { start: 0, .. }) = *span {
                self.add_source(load, at);
            }
        }
        for span in spans {
            match *span {
                Work::Next(at) => self.add_next(load, at),
                // A source may be all there is.
                Work::Chunk(_, Piece { len: 0, .. }) => {}
                Work::Chunk(at, piece) => self.add_chunk(load, at, piece),
                Work::Hole(slot) => self.add_hole(load, slot, Want::Last),
                Work::Nothing(slot) => self.add_hole(load, slot, Want::None),
            }
        }
        let (rows, samples) = (load.waiting.wanted.len(), load.step.batch.samples.len());
        assert_eq!(rows, samples, "each wanted row has somebody who waits for it");
    }

    /// Adds the source of a sequence that begins, if it has one, and what its task wants of it.
    fn add_source(&self, Load { step, waiting }: &mut Load, at: usize) {
        let (batch, live) = (&mut step.batch, &self.live[at]);
        let request = &live.sequence.request;
        if request.source.is_empty() {
            return;
        }
        let want = match &request.task {
            Task::Generate => Want::None,
            Task::Embed(_) => Want::Hidden,
            Task::Fill { at: places, .. } => {
                let from = batch.picks.len() as u32;
                batch.picks.extend_from_slice(places);
                Want::Picked { at: from, len: places.len() as u32 }
            }
        };
        let tokens = given(batch, &request.source);
        batch.spans.push(live.source_span(tokens, want));
        if let Task::Fill { at: places, top } = &request.task {
            // The token that stands there is scored, not drawn: a slot's last token is a decoder's.
            let rows = places.iter().map(|place| SampleRow {
                mode: SampleMode::Score(request.source[*place as usize]),
                top_logprobs: *top,
                ..SampleRow::GREEDY
            });
            batch.samples.extend(rows);
            waiting.wanted.extend(places.iter().map(|_| Wanted::By(self.seat(at), What::Place)));
        }
        if request.task != Task::Generate {
            waiting.whole.push(self.seat(at));
        }
    }

    fn add_next(&self, load: &mut Load, at: usize) {
        let (batch, live) = (&mut load.step.batch, &self.live[at]);
        let tokens = self.last_token(batch, live.last_token);
        batch.spans.push(live.span(live.next_position() - 1, tokens, Want::Last));
        self.add_draw(load, at);
    }

    /// Where a decoded token comes from. It was drawn on one device: that one remembers it, others have to be told.
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

    fn add_chunk(&self, load: &mut Load, at: usize, piece: Piece) {
        let Piece { start, len, last } = piece;
        let (batch, live) = (&mut load.step.batch, &self.live[at]);
        let request = &live.sequence.request;
        let tokens = given(batch, &request.prompt[start..start + len]);
        let want = match (request.prompt_logprobs, last) {
            (true, _) => Want::All,
            (false, true) => Want::Last,
            (false, false) => Want::None,
        };
        batch.spans.push(live.span(start as u32, tokens, want));
        if request.prompt_logprobs {
            // A row's logits tell of the token after it.
            for token in request.prompt[start + 1..].iter().take(len) {
                batch.samples.push(SampleRow {
                    mode: SampleMode::Score(*token),
                    logprob: true,
                    ..live.row()
                });
                load.waiting.wanted.push(Wanted::By(self.seat(at), What::PromptToken));
            }
        }
        if last {
            self.add_draw(load, at);
        }
    }

    /// Adds the row that draws a sequence's next token, with its biases.
    fn add_draw(&self, Load { step, waiting }: &mut Load, at: usize) {
        let (batch, live) = (&mut step.batch, &self.live[at]);
        let bias_at = batch.biases.len();
        batch.biases.extend(decoding::biases(&live.sequence.request, &self.config.eos, live.generated));
        let bias_len = (batch.biases.len() - bias_at) as u32;
        batch.samples.push(SampleRow { bias_at: bias_at as u32, bias_len, ..live.row() });
        waiting.wanted.push(Wanted::By(self.seat(at), What::Next));
    }

    fn add_hole(&self, Load { step, waiting }: &mut Load, slot: Slot, want: Want) {
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
            waiting.wanted.push(Wanted::Nobody);
        }
    }
}

/// Rows, holes and sequences of a step.
pub(super) fn size(batch: &StepBatch) -> StepSize {
    let holes = batch.spans.iter().filter(|span| span.table == SpanTable::Sink).count();
    let spans_of = |stack| batch.spans.iter().filter(|span| span.stack == stack).count();
    // Where there is a decoder, a source comes with a span of its own sequence's.
    let sequences = spans_of(SpanStack::Decoder).max(spans_of(SpanStack::Encoder)) - holes;
    StepSize { rows: batch.rows(), holes, slots: sequences }
}

/// Lays these tokens into the batch.
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
