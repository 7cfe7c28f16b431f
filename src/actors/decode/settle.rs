//! From a step's results to events.
//!
//! Invariant: a result goes to who waited for it when the step was made; nothing here waits for a client.

use super::{MainStem, Wanted};
use crate::decoding;
use crate::request::{FinishReason, Task, Token, TokenEvent};
use mainstem_kernels::{SampledRow, StepOutput};

impl MainStem {
    /// Hands each result to who waits for it.
    pub(super) fn settle(&mut self, output: &StepOutput) {
        assert_eq!(output.rows.len(), self.wanted.len(), "a result for each wanted row");
        let wanted = std::mem::take(&mut self.wanted);
        for (row, wanted) in output.rows.iter().zip(&wanted) {
            match *wanted {
                Wanted::Nobody => {}
                Wanted::PromptToken(at) => self.live[at].prompt.push(reported(output, row)),
                Wanted::Next(at) => self.next_token(at, reported(output, row)),
                Wanted::Place(at) => self.filled(at, output.top_of(row)),
            }
        }
        self.wanted = wanted;
        self.answer_whole(&output.hidden);
    }

    fn next_token(&mut self, at: usize, token: Token) {
        let live = &mut self.live[at];
        let request = &live.sequence.request;
        let events = &live.sequence.events;
        live.generated += 1;
        if live.generated == 1 {
            self.meters.first_answer(&mut live.moments, request.given_tokens(), self.made_at);
            if request.prompt_logprobs {
                let first = Token { id: request.prompt[0], logprob: None, top: Vec::new() };
                let tokens = std::iter::once(first).chain(live.prompt.drain(..)).collect();
                self.outbox.push((events.clone(), TokenEvent::Prompt(tokens)));
            }
        }
        let end = decoding::finish(token.id, request, &self.config.eos, live.generated);
        let event = match end {
            Some(FinishReason::Stop | FinishReason::StopToken(_)) => TokenEvent::Last(token),
            Some(FinishReason::Length) | None => TokenEvent::Token(token),
        };
        if request.max_tokens > 0 {
            self.meters.token();
            self.outbox.push((events.clone(), event));
        }
        if let Some(reason) = end {
            self.outbox.push((events.clone(), TokenEvent::Finished(reason)));
            self.meters.over(live.moments, live.generated, self.made_at);
            live.over = true;
        }
    }

    /// Tells what fits at a place, likeliest first.
    fn filled(&mut self, at: usize, top: &[(u32, f32)]) {
        let (id, logprob) = *top.first().expect("one at least is asked for, else this is a bug");
        let token = Token { id, logprob: Some(logprob), top: top.to_vec() };
        self.outbox.push((self.live[at].sequence.events.clone(), TokenEvent::Filled(token)));
    }

    /// Ends the sequences that this step answers whole; `hidden` are the states of those that want them, in order.
    fn answer_whole(&mut self, mut hidden: &[f32]) {
        let width = self.config.limits.hidden;
        for at in self.whole.drain(..) {
            let live = &mut self.live[at];
            let (request, events) = (&live.sequence.request, &live.sequence.events);
            if let Task::Embed(pooling) = request.task {
                let (own, others) = hidden.split_at(request.source.len() * width);
                hidden = others;
                let vector = decoding::pool(pooling, own, width);
                self.outbox.push((events.clone(), TokenEvent::Embedding(vector)));
            }
            self.outbox.push((events.clone(), TokenEvent::Finished(FinishReason::Stop)));
            self.meters.first_answer(&mut live.moments, request.given_tokens(), self.made_at);
            self.meters.over(live.moments, 0, self.made_at);
            live.over = true;
        }
        assert!(hidden.is_empty(), "each hidden state has somebody who waits for it");
    }
}

/// A row's result with what was asked for beside it.
fn reported(output: &StepOutput, row: &SampledRow) -> Token {
    let logprob = (!row.logprob.is_nan()).then_some(row.logprob);
    Token { id: row.token, logprob, top: output.top_of(row).to_vec() }
}
