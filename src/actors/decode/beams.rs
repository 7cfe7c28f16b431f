//! Beam searches: each beam is a running sequence with a slot of its own, and the search decides after each
//! step which beams continue.
//!
//! A search begins as one sequence, which computes the prompt. When a search is preempted it begins anew: its
//! client has nothing yet, and the result is the same.
//! Invariant: all beams of a search have as many tokens, and a step computes all of them or none.

use super::DecodeLoop;
use super::running::RunningSequence;
use crate::actors::kv::BeamUpdate;
use crate::actors::loop_metrics::SequenceTimes;
use crate::actors::prefill::Requeue;
use crate::actors::queue::Preemptible;
use crate::actors::sequence::{Progress, Sequence, SequenceKey};
use crate::decoding::beams::{BeamParams, BeamSearch, BeamStep, Hypothesis};
use crate::request::{self, BeamOptions, FinishReason, Request, RequestError, Token, TokenEvent};
use std::mem::take;

/// A beam search whose prompt is computed.
pub(super) struct RunningSearch {
    /// The sequence that it began as, which has its permits and its clients.
    origin: Box<Sequence>,
    times: SequenceTimes,
    search: BeamSearch,
    /// Keys of the live beams, in the order of the search.
    beams: Vec<SequenceKey>,
    /// The most likely tokens of each live beam, as far as their results are back.
    rows: Vec<Option<Vec<(u32, f32)>>>,
}

/// Returns the parameters of the search that a request asks for, if it does.
pub(super) fn beam_params(request: &Request, eos: &[u32]) -> Option<BeamParams> {
    let BeamOptions { width, length_penalty, early_stopping, forced_tokens, .. } = request.beams?;
    let of_model = if request.ignore_eos { &[] } else { eos };
    Some(BeamParams {
        width,
        max_tokens: request.max_tokens,
        min_tokens: request.min_tokens,
        length_penalty,
        early_stopping,
        end_tokens: [of_model, &request.stop_ids[..]].concat(),
        forced_tokens,
    })
}

impl DecodeLoop {
    /// Whether a running sequence belongs to a beam search: its next token is not known to the device.
    pub(super) fn has_beams(&self) -> bool {
        self.running.iter().any(|running| running.sequence.request.beams.is_some())
    }

    /// Returns the number of slots that searches will need beside those of their running sequences.
    pub(super) fn reserved_slots(&self) -> usize {
        let width = |request: &Request| request.beams.map_or(0, |beams| beams.width);
        let starting = self.running.iter().filter(|running| !running.is_beam);
        let starting = starting.map(|running| width(&running.sequence.request).saturating_sub(1));
        let searching = self
            .searches
            .iter()
            .map(|search| width(&search.origin.request).saturating_sub(search.beams.len()));
        starting.chain(searching).sum()
    }

    /// Lets searches go on for which the results of all beams are back. It changes which sequences run, so it
    /// must not come between the steps of an iteration.
    pub(super) fn advance_searches(&mut self) {
        for (key, top) in take(&mut self.beam_rows) {
            if self.search_of(key).is_none() && !self.begin_search(key) {
                continue;
            }
            let at = self.search_of(key).expect("the search has begun, as seen above");
            let search = &mut self.searches[at];
            let beam = search.beams.iter().position(|beam| *beam == key);
            search.rows[beam.expect("the beam is one of the search's")] = Some(top);
            if search.rows.iter().all(Option::is_some) {
                self.advance_search(at);
            }
        }
    }

    /// Returns the running searches whose slots others may take.
    pub(super) fn preemptible_searches(&self) -> impl Iterator<Item = Preemptible> {
        self.searches.iter().filter_map(|search| {
            let beam = self.running.iter().find(|running| search.beams.contains(&running.key))?;
            Some(Preemptible { key: search.origin.key, ..beam.preemptible(search.origin.slots()) })
        })
    }

    /// Returns the index of the search that a beam belongs to.
    fn search_of(&self, beam: SequenceKey) -> Option<usize> {
        self.searches.iter().position(|search| search.beams.contains(&beam))
    }

    /// Begins the search of a sequence whose prompt is computed. Returns false if it cannot.
    fn begin_search(&mut self, key: SequenceKey) -> bool {
        let at = self.running.iter().position(|running| running.key == key && !running.finished);
        let Some(at) = at else { return false };
        let running = &mut self.running[at];
        let params = beam_params(&running.sequence.request, &self.config.eos);
        let params = params.expect("only searches have rows of beams; anything else is a bug");
        let search = match BeamSearch::new(params) {
            Ok(search) => search,
            Err(error) => {
                let why = RequestError::SamplingFailed(error.to_string());
                let failed = running
                    .sequence
                    .clients()
                    .map(|events| (events.clone(), TokenEvent::Failed(why.clone())));
                self.pending_events.extend(failed);
                running.finished = true;
                return false;
            }
        };
        self.metrics.record_first_output(
            &mut running.times,
            running.sequence.request.input_tokens(),
            self.produced_at,
        );
        // What is in the pages of the prompt must be known before its lease passes to other beams.
        self.update.computed.push(running.report());
        let beam = running.as_beam(key);
        let first = std::mem::replace(running, beam);
        let (beams, rows) = (vec![key], vec![None]);
        let (origin, times) = (first.sequence, first.times);
        self.searches.push(RunningSearch { origin, times, search, beams, rows });
        true
    }

    /// Takes a step of a search: its beams are replaced by those that continue, or its results are sent.
    fn advance_search(&mut self, at: usize) {
        let RunningSearch { search, beams, rows, origin, .. } = &mut self.searches[at];
        let rows = take(rows);
        let BeamStep::Continue(next) = search.advance(rows.iter().flatten().map(Vec::as_slice)) else {
            return self.finish_search(at);
        };
        let width = origin.request.beams.map_or(1, |beams| beams.width) as u64;
        let parents = take(beams);
        let mut free: Vec<SequenceKey> =
            (0..width).map(|number| SequenceKey(origin.key.0 + number)).collect();
        // The first beam that continues another one keeps its key, and so its slot.
        let mut keys: Vec<Option<SequenceKey>> = Vec::with_capacity(next.len());
        for beam in next {
            let parent = parents[beam.parent as usize];
            let own = free.iter().position(|key| *key == parent).map(|at| free.swap_remove(at));
            keys.push(own);
        }
        let all = keys.iter_mut().zip(next).map(|(key, beam)| {
            let key = key.or_else(|| free.pop()).expect("there are as many keys as beams");
            (key, parents[beam.parent as usize], beam.token)
        });
        let all: Vec<(SequenceKey, SequenceKey, u32)> = all.collect();
        *beams = all.iter().map(|(key, ..)| *key).collect();
        self.searches[at].rows = vec![None; all.len()];
        self.replace_beams(at, &parents, &all);
    }

    /// Replaces the running sequences `before` of a search by its beams (key, parent, last token).
    fn replace_beams(
        &mut self,
        at: usize,
        before: &[SequenceKey],
        beams: &[(SequenceKey, SequenceKey, u32)],
    ) {
        let search = self.searches[at].origin.key;
        let of_search = self.running.extract_if(.., |running| before.contains(&running.key));
        let mut old: Vec<RunningSequence> = of_search.collect();
        let Some(model) = old.first().map(|beam| beam.as_beam(beam.key)) else { return };
        let positions = model.next_position() as usize;
        let Sequence { account, charged, request, .. } = &*model.sequence;
        // A step that is computed again after a preemption was charged for.
        let charged_by = request.encoder_input.len() + positions;
        account.charge_generated(charged.raise(charged_by, charged_by + 1) * beams.len());
        for &(key, _, token) in beams {
            let own = old.iter().position(|running| running.key == key).map(|at| old.swap_remove(at));
            let mut running = own.unwrap_or_else(|| model.as_beam(key));
            running.continue_beam(token, positions / self.config.limits.page_positions);
            self.running.push(running);
        }
        let beams = beams.iter().map(|(key, parent, _)| (*key, *parent)).collect();
        self.update.beams.push(BeamUpdate { search, beams, positions });
    }

    /// Sends the results of a search, and ends its beams.
    fn finish_search(&mut self, at: usize) {
        let RunningSearch { origin, times, search, beams, .. } = self.searches.swap_remove(at);
        let mut found = search.finish().into_iter();
        for events in origin.clients() {
            let Some(Hypothesis { tokens, logprobs, score }) = found.next() else {
                let why = "the search found fewer sequences than requested".to_owned();
                let failed = TokenEvent::Failed(RequestError::SamplingFailed(why));
                self.pending_events.push((events.clone(), failed));
                continue;
            };
            let mut reason = FinishReason::Length;
            for (number, (id, logprob)) in (1..).zip(tokens.into_iter().zip(logprobs)) {
                let logprob = origin.request.logprobs.map(|_| logprob);
                let token = Token { id, logprob, rank: None, top: Vec::new() };
                let end = request::finish_reason(id, &origin.request, &self.config.eos, number);
                let event = match end {
                    Some(FinishReason::Stop | FinishReason::StopToken(_)) => TokenEvent::EndToken(token),
                    Some(FinishReason::Length) | None => TokenEvent::Token(token),
                };
                reason = end.unwrap_or(reason);
                self.metrics.count_generated();
                self.pending_events.push((events.clone(), event));
            }
            self.pending_events.push((events.clone(), TokenEvent::BeamScore(score)));
            self.pending_events.push((events.clone(), TokenEvent::Finished(reason)));
        }
        let of_search = self.running.iter_mut().filter(|running| beams.contains(&running.key));
        let generated = of_search.map(|running| {
            running.finished = true;
            running.received + 1
        });
        self.metrics.record_finished(times, generated.max().unwrap_or_default(), self.produced_at);
    }

    /// Ends the search of a beam, or of a sequence that would have begun one, with an error.
    pub(super) fn fail_search(&mut self, key: SequenceKey, error: &RequestError) {
        let Some(at) = self.search_of(key) else { return };
        let RunningSearch { origin, beams, .. } = self.searches.swap_remove(at);
        let failed = origin.clients().map(|events| (events.clone(), TokenEvent::Failed(error.clone())));
        self.pending_events.extend(failed);
        let of_search = self.running.iter_mut().filter(|running| beams.contains(&running.key));
        of_search.for_each(|running| running.finished = true);
    }

    /// Ends all searches with an error; their beams are gone.
    pub(super) fn fail_all_searches(&mut self, error: &RequestError) {
        self.searches.drain(..).for_each(|search| search.origin.fail(error));
    }

    /// Forgets searches whose beams are gone, because they ended or their clients disconnected.
    pub(super) fn drop_ended_searches(&mut self) {
        self.searches.retain(|search| self.running.iter().any(|running| search.beams.contains(&running.key)));
    }

    /// Hands the search that a preempted beam belongs to back to prefill, to begin anew.
    pub(super) fn requeue_search(&mut self, beam: SequenceKey) {
        // The other beams are preempted with it; the first one takes the search along.
        if let Some(at) = self.search_of(beam) {
            let RunningSearch { mut origin, times, .. } = self.searches.swap_remove(at);
            origin.progress = Some(Progress { generated: Vec::new(), host: None, times, speculator: None });
            self.handles.requeue.do_send(Requeue(origin));
        }
    }

    /// Stalls all beams of a search if one is stalled: they are computed together.
    pub(super) fn stall_whole_searches(&mut self) {
        for search in &self.searches {
            let is_stalled =
                |running: &RunningSequence| running.is_stalled && search.beams.contains(&running.key);
            if self.running.iter().any(is_stalled) {
                let of_search = self.running.iter_mut().filter(|running| search.beams.contains(&running.key));
                of_search.for_each(|running| running.is_stalled = true);
            }
        }
    }
}
