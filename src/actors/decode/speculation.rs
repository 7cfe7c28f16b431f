//! Speculative decoding in the loop: how many drafts each sequence verifies in the next step, the spans for
//! them, and which of them are accepted.
//!
//! A verification has a row for the last known token and for each draft. Row by row, the token that a row
//! gives is the sequence's next one; the row after it counts only if its draft is that token.
//! Invariant: what a sequence knows are the tokens that were delivered. Drafts leave K and V behind the known
//! positions only, which the next step overwrites.

use super::build_batch::StepBuffers;
use super::in_flight::StepKind;
use super::process_output::{DraftRef, OutputRouting, RowUse};
use super::running::RunningSequence;
use super::{DecodeLoop, SpanWork};
use crate::actors::prefill::PromptChunk;
use crate::actors::speculator::Speculator;
use crate::decoding::speculation::{
    AcceptanceRule, DepthPlanner, Speculating, StepCosts, StepWork, draft_row,
};
use crate::decoding::strategies::DeviceSampling;
use crate::request::{self, Sampling};
use mainstem_kernels::batch::{DraftSpan, StepTimes};
use mainstem_kernels::{DeviceError, Span, SpanOutput, SpanTokens, StepBatch};
use std::ops::Range;
use std::time::Duration;

/// The choice of the number of drafts.
#[derive(Default)]
pub(super) struct DraftPlanning {
    planner: DepthPlanner,
    costs: StepCosts,
    /// The last step that only made drafts, and its time.
    made: Option<(StepWork, Duration)>,
    /// The rate at which drafts of sequences that have ended were accepted.
    rate: Option<f64>,
}

/// Maximum number of prompt tokens that are indexed between two steps (prompt lookup). Longer prompts are
/// indexed during several, because other sequences, lanes and requests wait for it.
const INDEXED_MAX: usize = 1024;

/// The rate at which drafts are expected to be accepted before any was.
const FIRST_RATE: f64 = 0.6;

impl DraftPlanning {
    /// Returns the rate at which the drafts of a new sequence are expected to be accepted.
    pub(super) fn prior(&self) -> f64 {
        self.rate.unwrap_or(FIRST_RATE)
    }

    /// Takes note of the rate of a sequence that has ended, for whatever reason.
    pub(super) fn observe_end(&mut self, ended: &Speculator) {
        if ended.counts().0 > 0 {
            let rate = ended.stats().rate();
            self.rate = Some(self.rate.map_or(rate, |old| 0.8 * old + 0.2 * rate));
        }
    }
}

impl DecodeLoop {
    /// Whether a running sequence speculates: how many tokens a step gives it is known with its results.
    pub(super) fn speculates(&self) -> bool {
        self.running.iter().any(|running| running.speculator.is_some())
    }

    /// Chooses how many drafts each decoding sequence verifies in the next step: as many as are worth their
    /// time.
    pub(super) fn choose_depths(&mut self) {
        if !self.speculates() {
            return;
        }
        let decoding = self.running.iter().filter(|running| running.is_decoding());
        let decoding: usize = decoding.map(|running| 1 + running.forced as usize).sum();
        let mut left = self.config.token_budget.saturating_sub(decoding) / 2;
        let mut to_index = INDEXED_MAX;
        let draft_context = self.config.draft_context;
        for running in &mut self.running {
            let limit = if running.is_decoding() { running.draft_limit(draft_context) } else { 0 };
            let known = running.next_position() as usize;
            if let Some(speculator) = &mut running.speculator {
                to_index -= speculator.index_prompt(to_index);
                speculator.begin_plan(known, limit, left);
            }
        }
        let planned = self.running.iter().filter_map(|running| running.speculator.as_ref());
        let planned = planned.map(|speculator| Speculating {
            stats: speculator.stats(),
            limit: speculator.depth(),
            has_model: speculator.uses_model(),
            missing: speculator.missing_before_drafts(),
        });
        let DraftPlanning { planner, costs, .. } = &mut self.draft_planning;
        let depths = planner.plan(planned, costs.estimate(), decoding, left);
        let planned = self.running.iter_mut().filter_map(|running| running.speculator.as_mut());
        for (speculator, &depth) in planned.zip(depths) {
            speculator.set_depth(depth);
            left -= speculator.fit_rows(left);
        }
    }

    /// Returns the work of a step that is about to be sent, if its time can be compared with that of others:
    /// a step with prompt rows has too many, as has one in which the draft model computes what it has missed.
    /// A step that only makes drafts has no rows.
    pub(super) fn comparable_work(&self, batch: &StepBatch) -> Option<StepWork> {
        let is_prompt = |span: &Span| matches!(span.tokens, SpanTokens::Given { .. });
        let catches_up = |span: &DraftSpan| span.count == 0;
        if !self.speculates() || batch.spans.iter().any(is_prompt) || batch.drafts.iter().any(catches_up) {
            return None;
        }
        let makes_drafts = || batch.drafts.iter().filter(|span| span.count > 0);
        let draft_rows = makes_drafts().map(|span| span.tokens.len() + span.count as usize - 1).sum();
        let passes = makes_drafts().map(|span| span.count as usize).max().unwrap_or(0);
        Some(StepWork { rows: batch.rows(), passes, draft_rows })
    }

    /// Takes note of the time of a step, which took `elapsed` from the time when it was sent. With several
    /// devices that is what counts, because each measures only its own part; the drafts then come from the
    /// step before.
    pub(super) fn observe_cost(&mut self, work: StepWork, times: &StepTimes, elapsed: Duration) {
        let DraftPlanning { costs, made, .. } = &mut self.draft_planning;
        if self.handles.devices.count() == 1 {
            return costs.observe(&work, times.forward + times.sample, times.draft);
        }
        if work.rows == 0 {
            *made = Some((work, elapsed));
            return;
        }
        let (drafts, time) = made.take().unwrap_or_default();
        costs.observe(&StepWork { rows: work.rows, ..drafts }, elapsed + time, time);
    }

    /// Makes the drafts of the next step in a step before it, if there are several devices: the draft model
    /// is on the one that returns results, and all of them need the drafts.
    pub(super) async fn make_drafts_before(&mut self) -> Result<(), DeviceError> {
        if self.handles.devices.count() == 1 || self.slot_plan.is_none() {
            return Ok(());
        }
        let draft_of = |work: &SpanWork| match *work {
            SpanWork::Decode(at) if self.running[at].uses_draft_model() && self.running[at].depth() > 0 => {
                Some(SpanWork::Draft(at))
            }
            _ => None,
        };
        let work: Vec<SpanWork> = self.pending_work.iter().filter_map(draft_of).collect();
        if work.is_empty() {
            return Ok(());
        }
        let plan = self.slot_plan.take();
        self.send_step(plan, &work, StepKind::Drafts)?;
        while self.count_in_flight(StepKind::Drafts) > 0 {
            self.process_oldest().await?;
        }
        Ok(())
    }

    /// Adds the span that makes the drafts of a sequence for a later step.
    pub(super) fn add_drafts(&self, StepBuffers { step, routing }: &mut StepBuffers, at: usize) {
        let running = &self.running[at];
        let Some(speculator) = &running.speculator else { return };
        let positions = speculator.draft_positions()..running.next_position() as usize;
        self.add_draft_span(&mut step.batch, running, positions, speculator.depth());
        routing.drafts.push((self.sequence_ref(at), speculator.depth()));
    }

    /// Keeps the drafts that a step made for the next one.
    pub(super) fn keep_drafts(&mut self, drafts: &[u32], routing: &OutputRouting) {
        let mut rest = drafts;
        for (sequence, count) in &routing.drafts {
            let (own, others) = rest.split_at(*count);
            rest = others;
            if let Some(speculator) = self.find(*sequence).and_then(|running| running.speculator.as_mut()) {
                speculator.keep_drafts(own.iter().copied());
            }
        }
    }

    /// Adds the spans that make and verify drafts of a sequence.
    pub(super) fn add_verification(&self, buffers: &mut StepBuffers, at: usize, depth: usize) {
        let running = &self.running[at];
        let batch = &mut buffers.step.batch;
        let first_draft = batch.draft_count() as u32;
        let last = running.next_position() as usize - 1;
        let Some(speculator) = &running.speculator else { return };
        let is_made_now = speculator.uses_model() && self.handles.devices.count() == 1;
        if is_made_now {
            self.add_draft_span(batch, running, speculator.draft_positions()..last + 1, depth);
        }
        let known = push_known(batch, running, last..last + 1);
        let len = 1 + depth as u32;
        let tokens = if is_made_now {
            SpanTokens::Drafted { at: known, len }
        } else {
            batch.tokens.extend_from_slice(speculator.given());
            SpanTokens::Generated { at: known, len }
        };
        batch.spans.push(running.span(last as u32, tokens, SpanOutput::All));
        for number in 0..=depth {
            let draft = (number < depth).then(|| match is_made_now {
                true => DraftRef::Made(first_draft + number as u32),
                false => DraftRef::Given(speculator.given()[number]),
            });
            let usage = RowUse::Verified { number: number as u32, draft };
            self.add_sample_row(buffers, at, number as u32, usage);
        }
    }

    /// Adds the span of the draft model for a chunk of a prompt, if the sequence uses the draft model.
    pub(super) fn add_prompt_draft(&self, batch: &mut StepBatch, at: usize, chunk: PromptChunk) {
        let running = &self.running[at];
        let end = (chunk.start + chunk.len).min(self.config.draft_context);
        if running.uses_draft_model() && chunk.start < end {
            self.add_draft_span(batch, running, chunk.start..end, 0);
        }
    }

    /// Adds the span in which the draft model computes what it has missed of a sequence without drafts.
    pub(super) fn add_catch_up(&self, batch: &mut StepBatch, at: usize) {
        let running = &self.running[at];
        if let Some(missing) = running.catch_up() {
            self.add_draft_span(batch, running, missing, 0);
        }
    }

    /// Adds the span in which the draft model computes the tokens at these positions and makes `count`
    /// drafts.
    fn add_draft_span(
        &self,
        batch: &mut StepBatch,
        running: &RunningSequence,
        positions: Range<usize>,
        count: usize,
    ) {
        let (start, len) = (positions.start as u32, positions.len() as u32);
        let is_prompt = positions.end <= running.sequence.request.prompt.len();
        let at = push_known(batch, running, positions);
        let rule = running.speculator.as_ref().map_or(AcceptanceRule::Coupled, Speculator::rule);
        let request = &running.sequence.request;
        let sampling = match &request.plan {
            Some(plan) => plan.draft(),
            None => {
                let Sampling { temperature, top_k, top_p, min_p, .. } = request.sampling;
                DeviceSampling { temperature, top_k, top_p, min_p, ..DeviceSampling::GREEDY }
            }
        };
        let mut sampling = draft_row(rule, &sampling, request.sampling.seed, running.next_position());
        if count > 0 && rule == AcceptanceRule::Coupled {
            sampling.bias_at = batch.logit_biases.len() as u32;
            batch.logit_biases.extend(request::logit_biases(
                request,
                &self.config.eos,
                running.generated_count(),
            ));
            sampling.bias_len = batch.logit_biases.len() as u32 - sampling.bias_at;
        }
        batch.draft_logits |= count > 0 && rule == AcceptanceRule::Rejection;
        batch.drafts.push(DraftSpan {
            slot: running.slot,
            start,
            // Sparse attention distinguishes them.
            tokens: if is_prompt { SpanTokens::Given { at, len } } else { SpanTokens::Generated { at, len } },
            reserved: running.sequence.positions() as u32,
            count: count as u32,
            sampling,
        });
    }
}

impl RunningSequence {
    /// Whether drafts of the sequence come from the draft model.
    pub(super) fn uses_draft_model(&self) -> bool {
        self.speculator.as_ref().is_some_and(Speculator::uses_model)
    }

    /// Returns the number of drafts in the next step.
    pub(super) fn depth(&self) -> usize {
        self.speculator.as_ref().map_or(0, Speculator::depth)
    }

    /// Returns the number of rows that speculation adds to the next step, or to the draft model's part of it.
    pub(super) fn draft_rows(&self) -> usize {
        self.speculator.as_ref().map_or(0, Speculator::rows)
    }

    /// Returns how many drafts are possible: with all of them accepted, the sequence does not exceed its
    /// maximum length; those of the draft model end with its context.
    fn draft_limit(&self, draft_context: usize) -> usize {
        let known = self.next_position() as usize;
        let max_tokens = self.sequence.request.max_tokens as usize;
        let limit = max_tokens.saturating_sub(self.generated_count() as usize + 1);
        match self.uses_draft_model() {
            true => limit.min(draft_context.saturating_sub(known)),
            false => limit,
        }
    }

    /// Limits the number of drafts in the next step to `most`.
    pub(super) fn limit_drafts(&mut self, most: usize) {
        if let Some(speculator) = &mut self.speculator {
            speculator.set_depth(speculator.depth().min(most));
        }
    }

    /// Returns the positions that the draft model has missed and computes in the next step without making
    /// drafts.
    pub(super) fn catch_up(&self) -> Option<Range<usize>> {
        let speculator = self.speculator.as_ref().filter(|speculator| speculator.catch_up() > 0)?;
        let first = speculator.draft_positions();
        Some(first..first + speculator.catch_up())
    }

    /// Whether a row of a verification does not count, because a draft before it was not accepted.
    pub(super) fn skips(&self, usage: RowUse) -> bool {
        let is_open = || self.speculator.as_ref().is_some_and(Speculator::is_open);
        matches!(usage, RowUse::Verified { number: 1.., .. }) && !is_open()
    }

    /// Takes note of the token that a row of a verification gives, and of the draft that the next row
    /// verifies, if there is one. Returns whether it was accepted.
    pub(super) fn verify(&mut self, number: u32, token: u32, draft: Option<u32>) -> bool {
        let known = self.next_known_position() - number as usize;
        let speculator = self.speculator.as_mut();
        let is_accepted = speculator.is_some_and(|it| it.verify(number, token, draft, known));
        self.sent_positions += usize::from(is_accepted);
        is_accepted
    }
}

/// Appends known tokens of a sequence at these positions to a batch. Returns the index of the first one.
fn push_known(batch: &mut StepBatch, running: &RunningSequence, positions: Range<usize>) -> u32 {
    let at = batch.tokens.len() as u32;
    let prompt = &running.sequence.request.prompt;
    let len = prompt.len();
    batch.tokens.extend_from_slice(&prompt[positions.start.min(len)..positions.end.min(len)]);
    let generated = positions.start.saturating_sub(len)..positions.end.saturating_sub(len);
    batch.tokens.extend_from_slice(&running.generated[generated]);
    at
}
