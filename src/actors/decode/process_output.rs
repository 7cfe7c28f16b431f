//! Converts the results of a step to events.
//!
//! Invariant: a result is delivered to the sequence that the step was built for, unless it has ended; nothing
//! here waits for a client.

use super::DecodeLoop;
use super::running::RunningSequence;
use crate::actors::sequence::SequenceKey;
use crate::decoding::{self, HostSequence};
use crate::request::{self, FinishReason, Pooling, RequestError, Task, Token, TokenEvent};
use mainstem_kernels::{RowFailure, SampledToken, StepLimits, StepOutput};

/// The targets of a step's results.
pub(super) struct OutputRouting {
    /// The target of each sample row.
    pub(super) targets: Vec<RowTarget>,
    /// Sequences without tokens: those of encoder-only models, and embedded ones, in row order.
    pub(super) hidden: Vec<HiddenRows>,
    /// Sequences that the step makes drafts for, which a later step verifies, and their numbers of drafts.
    pub(super) drafts: Vec<(SequenceRef, usize)>,
}

/// The rows of a sequence whose hidden states are returned; none for one that fills masks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HiddenRows {
    pub(super) sequence: SequenceRef,
    pub(super) rows: usize,
    /// Whether the sequence ends with this step.
    pub(super) ends: bool,
}

/// The target of a row's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RowTarget {
    Sequence(SequenceRef, RowUse),
    /// None: the result of a hole is discarded.
    Discard,
}

/// The use that a sequence makes of a row's result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RowUse {
    /// As the next token.
    NextToken,
    /// As the next token after `number` drafts, if these were accepted. The next row verifies `draft`.
    Verified { number: u32, draft: Option<DraftRef> },
    /// As the candidates for the next token of a beam, or for the first ones of a search; `count` of them.
    BeamCandidates { count: u8 },
    /// As the log-probability of a prompt token.
    PromptLogprob,
    /// As the prediction at a masked position of the encoder input.
    MaskPrediction,
}

/// A draft that a step verifies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum DraftRef {
    /// A token that the batch contains.
    Given(u32),
    /// The draft with this number among those that the step makes.
    Made(u32),
}

/// Refers to a sequence, with its index among the running sequences when the step was built. Few sequences
/// leave or move while a step is in flight, so the index is usually still right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SequenceRef {
    key: SequenceKey,
    at: usize,
}

impl OutputRouting {
    pub(super) fn with_capacity(limits: &StepLimits) -> OutputRouting {
        OutputRouting {
            targets: Vec::with_capacity(limits.rows),
            hidden: Vec::with_capacity(limits.slots),
            drafts: Vec::new(),
        }
    }

    pub(super) fn clear(&mut self) {
        self.targets.clear();
        self.hidden.clear();
        self.drafts.clear();
    }

    /// Returns the index of the sequence of each result, while the step is being built.
    pub(super) fn sequences(&self) -> impl Iterator<Item = usize> {
        let rows = self.targets.iter().filter_map(|target| match target {
            RowTarget::Sequence(sequence, _) => Some(sequence.at),
            RowTarget::Discard => None,
        });
        rows.chain(self.hidden.iter().map(|hidden| hidden.sequence.at))
    }
}

impl DecodeLoop {
    /// Returns a sequence that runs or leaves; `None` if it ended while its step was in flight.
    pub(super) fn find(&mut self, sequence: SequenceRef) -> Option<&mut RunningSequence> {
        find(&mut self.running, &mut self.leaving, sequence)
    }

    /// Returns a reference to the running sequence at an index.
    pub(super) fn sequence_ref(&self, at: usize) -> SequenceRef {
        SequenceRef { key: self.running[at].key, at }
    }

    /// Delivers each result to its target. The sequences that leave with this step have all of theirs then.
    pub(super) fn process_output(&mut self, output: &StepOutput, routing: &OutputRouting) {
        assert_eq!(output.tokens.len(), routing.targets.len(), "one result for each sample row");
        for (row, target) in output.tokens.iter().zip(&routing.targets) {
            let RowTarget::Sequence(sequence, usage) = *target else { continue };
            let Some(running) = find(&mut self.running, &mut self.leaving, sequence) else {
                self.metrics.count_wasted_row();
                continue;
            };
            running.awaited -= 1;
            if running.skips(usage) {
                continue;
            }
            if let Some(failure) = row.failure {
                if failure == RowFailure::NotFinite {
                    self.metrics.count_not_finite();
                }
                // What the host knows says more than the device does.
                let why = running.host.as_ref().and_then(HostSequence::error);
                let why = why.map_or_else(|| failure.to_string(), |error| error.to_string());
                self.fail_sequence(sequence, RequestError::SamplingFailed(why));
                continue;
            }
            match usage {
                RowUse::PromptLogprob => running.prompt_logprobs.push(token_of_row(output, row)),
                RowUse::NextToken => self.process_row(sequence, output, row),
                RowUse::Verified { number, draft } => {
                    let draft = draft.map(|draft| match draft {
                        DraftRef::Given(token) => token,
                        DraftRef::Made(index) => output.drafts[index as usize],
                    });
                    if number == 0 {
                        self.metrics.record_drafts(running.depth());
                    }
                    let is_accepted = running.verify(number, row.token, draft);
                    if is_accepted {
                        self.metrics.record_accepted(number);
                    }
                    if (is_accepted || number == 0)
                        && let Some(speculator) = &running.speculator
                    {
                        let (drafted, accepted) = speculator.counts();
                        let counts = TokenEvent::Speculated { drafted, accepted };
                        self.pending_events.push((running.sequence.events.clone(), counts));
                    }
                    self.process_row(sequence, output, row);
                }
                RowUse::BeamCandidates { .. } => {
                    self.beam_rows.push((running.key, output.top_logprobs_of(row).to_vec()));
                }
                RowUse::MaskPrediction => {
                    let event = mask_prediction(output.top_logprobs_of(row));
                    self.pending_events.push((running.sequence.events.clone(), event));
                }
            }
        }
        if !routing.drafts.is_empty() {
            self.keep_drafts(&output.drafts, routing);
        }
        self.process_hidden(&output.hidden, &routing.hidden);
        self.leaving.retain(|leaving| !leaving.finished);
        self.let_go();
    }

    /// Ends a sequence whose row failed.
    fn fail_sequence(&mut self, sequence: SequenceRef, error: RequestError) {
        let Some(running) = find(&mut self.running, &mut self.leaving, sequence) else { return };
        if running.is_beam {
            return self.fail_search(sequence.key, &error);
        }
        let failed =
            running.sequence.clients().map(|events| (events.clone(), TokenEvent::Failed(error.clone())));
        self.pending_events.extend(failed);
        running.finished = true;
    }

    /// Processes the token of a row.
    fn process_row(&mut self, sequence: SequenceRef, output: &StepOutput, row: &SampledToken) {
        let Some(running) = self.find(sequence) else { return };
        let mut token = token_of_row(output, row);
        if let Some(report) = running.host.as_ref().and_then(HostSequence::take_report) {
            (token.logprob, token.top) = (Some(report.logprob), report.top);
        }
        self.process_token(sequence, token);
    }

    /// Processes a sampled token, and those that a grammar forces after it.
    fn process_token(&mut self, sequence: SequenceRef, token: Token) {
        let id = token.id;
        let Some(running) = self.deliver_token(sequence, token, 0) else { return };
        let forced = running.host.as_ref().map_or_else(Vec::new, |host| host.accept(id));
        for (id, number) in forced.into_iter().zip(1..) {
            let token = Token { id, logprob: None, rank: None, top: Vec::new() };
            if self.deliver_token(sequence, token, number).is_none() {
                return;
            }
        }
    }

    /// Sends the events of a token, which is the `forced`-th that a grammar forces after a sampled one, or
    /// that one. Returns the sequence if it continues; otherwise marks it as finished.
    fn deliver_token(
        &mut self,
        sequence: SequenceRef,
        token: Token,
        forced: u32,
    ) -> Option<&mut RunningSequence> {
        let running = find(&mut self.running, &mut self.leaving, sequence)?;
        running.forced = forced;
        let generated = running.received + 1;
        let end = request::finish_reason(token.id, &running.sequence.request, &self.config.eos, generated);
        running.receive(token.id, end.is_none());
        let request = &running.sequence.request;
        let events = &running.sequence.events;
        if generated == 1 {
            self.metrics.record_first_output(&mut running.times, request.input_tokens(), self.produced_at);
            if request.prompt_logprobs.is_some() {
                let first = Token { id: request.prompt[0], logprob: None, rank: None, top: Vec::new() };
                let tokens = std::iter::once(first).chain(running.prompt_logprobs.drain(..)).collect();
                self.pending_events.push((events.clone(), TokenEvent::Prompt(tokens)));
            }
        }
        let event = match end {
            Some(FinishReason::Stop | FinishReason::StopToken(_)) => TokenEvent::EndToken(token),
            Some(FinishReason::Length) | None => TokenEvent::Token(token),
        };
        if request.max_tokens > 0 {
            self.metrics.count_generated();
            self.pending_events.push((events.clone(), event));
        }
        if let Some(reason) = end {
            self.pending_events.push((events.clone(), TokenEvent::Finished(reason)));
            self.metrics.record_finished(running.times, generated, self.produced_at);
            running.finished = true;
        }
        end.is_none().then_some(running)
    }

    /// Delivers `hidden`, the states of the rows of sequences that get no tokens, in order, (tokens, width),
    /// and ends those of which these are the last.
    fn process_hidden(&mut self, mut hidden: &[f32], targets: &[HiddenRows]) {
        let width = self.config.limits.hidden;
        for HiddenRows { sequence, rows, ends } in targets {
            let (own, others) = hidden.split_at(rows * width);
            hidden = others;
            // A sequence whose row failed, or whose client is gone, has ended.
            let Some(running) = find(&mut self.running, &mut self.leaving, *sequence) else { continue };
            let (request, events) = (&running.sequence.request, &running.sequence.events);
            running.awaited -= 1;
            if request.task == Task::Embed(Pooling::Mean) {
                running.mean.add(own, width);
            }
            if !ends {
                continue;
            }
            if let Task::Embed(_) | Task::EmbedTokens = request.task {
                let vector = match request.task {
                    Task::Embed(Pooling::Mean) => running.mean.take(),
                    Task::Embed(pooling) => decoding::pool(pooling, own, width),
                    _ => own.to_vec(),
                };
                if vector.iter().any(|number| !number.is_finite()) {
                    self.metrics.count_not_finite();
                    let error = RequestError::SamplingFailed(RowFailure::NotFinite.to_string());
                    self.pending_events.push((events.clone(), TokenEvent::Failed(error)));
                    running.finished = true;
                    continue;
                }
                self.pending_events.push((events.clone(), TokenEvent::Embedding(vector)));
            }
            self.pending_events.push((events.clone(), TokenEvent::Finished(FinishReason::Stop)));
            self.metrics.record_first_output(&mut running.times, request.input_tokens(), self.produced_at);
            self.metrics.record_finished(running.times, 0, self.produced_at);
            running.finished = true;
        }
        assert!(hidden.is_empty(), "each hidden state belongs to a sequence");
    }
}

/// Returns a sequence that runs or leaves; `None` if it ended while its step was in flight.
fn find<'a>(
    running: &'a mut [RunningSequence],
    leaving: &'a mut [RunningSequence],
    sequence: SequenceRef,
) -> Option<&'a mut RunningSequence> {
    let is_wanted = |other: &RunningSequence| other.key == sequence.key;
    let found = match running.get(sequence.at).is_some_and(is_wanted) {
        true => Some(&mut running[sequence.at]),
        false => running.iter_mut().chain(leaving).find(|other| is_wanted(other)),
    };
    found.filter(|found| !found.finished)
}

/// Returns the event with the most likely tokens at a masked position.
fn mask_prediction(top: &[(u32, f32)]) -> TokenEvent {
    let (id, logprob) = *top.first().expect("intake checked that at least one token is requested");
    TokenEvent::MaskFilled(Token { id, logprob: Some(logprob), rank: None, top: top.to_vec() })
}

/// Returns a row's token with its reported log-probabilities.
fn token_of_row(output: &StepOutput, row: &SampledToken) -> Token {
    let logprob = (!row.logprob.is_nan()).then_some(row.logprob);
    let rank = (row.rank > 0).then_some(row.rank);
    Token { id: row.token, logprob, rank, top: output.top_logprobs_of(row).to_vec() }
}
