//! Converts the results of a step to events.
//!
//! Invariant: a result is delivered to the sequence that the step was built for, if it still runs; nothing
//! here waits for a client.

use super::MainStem;
use crate::actors::sequence::Key;
use crate::decoding;
use crate::request::{FinishReason, Task, Token, TokenEvent};
use mainstem_kernels::{SampledRow, StepLimits, StepOutput};

/// The targets of a step's results.
pub(super) struct Waiting {
    /// The target of each sample row.
    pub(super) wanted: Vec<Wanted>,
    /// Sequences that end with this step: those of encoder-only models, in row order.
    pub(super) whole: Vec<Seat>,
}

/// The target of a row's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Wanted {
    By(Seat, What),
    /// None: the result of a hole is discarded.
    Nobody,
}

/// How a sequence uses a row's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum What {
    /// As the next token.
    Next,
    /// As the log-probability of a prompt token.
    PromptToken,
    /// As the prediction at a masked position of the encoder input.
    Place,
}

/// Refers to a sequence, with its index among the running sequences when the step was built. Nothing leaves
/// before the next iteration, so the index is usually still right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seat {
    key: Key,
    at: usize,
}

impl Waiting {
    pub(super) fn with_capacity(limits: &StepLimits) -> Waiting {
        Waiting { wanted: Vec::with_capacity(limits.rows), whole: Vec::with_capacity(limits.slots) }
    }

    pub(super) fn clear(&mut self) {
        self.wanted.clear();
        self.whole.clear();
    }
}

impl MainStem {
    /// Returns a reference to the running sequence at an index.
    pub(super) fn seat(&self, at: usize) -> Seat {
        Seat { key: self.live[at].key, at }
    }

    /// Returns the sequence's current index; `None` if it left while its step was in flight.
    fn seated(&self, sequence: Seat) -> Option<usize> {
        let stayed = self.live.get(sequence.at).is_some_and(|running| running.key == sequence.key);
        if stayed {
            Some(sequence.at)
        } else {
            self.live.iter().position(|running| running.key == sequence.key)
        }
    }

    /// Delivers each result to its target.
    pub(super) fn settle(&mut self, output: &StepOutput, routing: &Waiting) {
        assert_eq!(output.rows.len(), routing.wanted.len(), "one result for each sample row");
        for (row, target) in output.rows.iter().zip(&routing.wanted) {
            let Wanted::By(sequence, usage) = *target else { continue };
            let Some(at) = self.seated(sequence) else { continue };
            match usage {
                What::PromptToken => self.live[at].prompt.push(reported(output, row)),
                What::Next => self.next_token(at, reported(output, row)),
                What::Place => self.filled(at, output.top_of(row)),
            }
        }
        self.answer_whole(&output.hidden, &routing.whole);
    }

    /// Processes a sampled token: sends its events, and marks the sequence as finished if it ends.
    fn next_token(&mut self, at: usize, token: Token) {
        let running = &mut self.live[at];
        let request = &running.sequence.request;
        let events = &running.sequence.events;
        running.generated += 1;
        running.last_token = token.id;
        if running.generated == 1 {
            self.meters.first_answer(&mut running.moments, request.given_tokens(), self.made_at);
            if request.prompt_logprobs {
                let first = Token { id: request.prompt[0], logprob: None, top: Vec::new() };
                let tokens = std::iter::once(first).chain(running.prompt.drain(..)).collect();
                self.outbox.push((events.clone(), TokenEvent::Prompt(tokens)));
            }
        }
        let end = decoding::finish(token.id, request, &self.config.eos, running.generated);
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
            self.meters.over(running.moments, running.generated, self.made_at);
            running.over = true;
        }
    }

    /// Sends the most likely tokens at a masked position.
    fn filled(&mut self, at: usize, top: &[(u32, f32)]) {
        let (id, logprob) = *top.first().expect("intake checked that at least one token is requested");
        let token = Token { id, logprob: Some(logprob), top: top.to_vec() };
        self.outbox.push((self.live[at].sequence.events.clone(), TokenEvent::Filled(token)));
    }

    /// Ends the encoder-only sequences of this step. `hidden` are the states of those that are embedded, in
    /// order, (tokens, width).
    fn answer_whole(&mut self, mut hidden: &[f32], whole: &[Seat]) {
        let width = self.config.limits.hidden;
        for sequence in whole {
            let at = self
                .seated(*sequence)
                .expect("no sequence leaves during an iteration; anything else is a bug");
            let running = &mut self.live[at];
            let (request, events) = (&running.sequence.request, &running.sequence.events);
            if let Task::Embed(pooling) = request.task {
                let (own, others) = hidden.split_at(request.source.len() * width);
                hidden = others;
                let vector = decoding::pool(pooling, own, width);
                self.outbox.push((events.clone(), TokenEvent::Embedding(vector)));
            }
            self.outbox.push((events.clone(), TokenEvent::Finished(FinishReason::Stop)));
            self.meters.first_answer(&mut running.moments, request.given_tokens(), self.made_at);
            self.meters.over(running.moments, 0, self.made_at);
            running.over = true;
        }
        assert!(hidden.is_empty(), "each hidden state belongs to a sequence");
    }
}

/// Returns a row's token with its reported log-probabilities.
fn reported(output: &StepOutput, row: &SampledRow) -> Token {
    let logprob = (!row.logprob.is_nan()).then_some(row.logprob);
    Token { id: row.token, logprob, top: output.top_of(row).to_vec() }
}
