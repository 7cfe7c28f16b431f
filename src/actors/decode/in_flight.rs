//! Steps in flight: sends the steps of an iteration and those ahead of it, and processes them as they
//! complete.
//!
//! Invariant: the steps of a lane complete in the order in which they were sent. An iteration has at most one
//! step in flight, and with run-ahead the next iteration one more; the steps ahead of it contain prefill
//! chunks only, which do not depend on the results of the steps before them.

use super::build_batch::{StepBuffers, step_size};
use super::pacing::PacedWork;
use super::process_output::OutputRouting;
use super::{DecodeLoop, SpanWork};
use crate::actors::device::StepResult;
use crate::actors::group::SentStep;
use crate::actors::kv::SlotPlan;
use crate::actors::loop_metrics::StepSize;
use crate::actors::prefill::{ChunksAhead, ScheduledChunk};
use crate::config::Policy;
use crate::decoding::speculation::StepWork;
use mainstem_kernels::{DeviceError, SpanStack, StepBatch};
use std::time::Instant;

/// A step in flight.
pub(super) struct InFlightStep {
    sent: SentStep,
    routing: OutputRouting,
    kind: StepKind,
    sent_at: Instant,
    size: StepSize,
    /// The work of the step, if its time tells what drafts cost.
    work: Option<StepWork>,
    /// The work of the step, if streams get their next tokens from it.
    paced: Option<PacedWork>,
}

/// The reason for which a step was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepKind {
    /// A step of the current iteration: the next iteration depends on its results, unless the loop runs
    /// ahead.
    Iteration,
    /// A step of prefill chunks only.
    Ahead,
    /// A step that makes drafts for the iteration's step.
    Drafts,
}

impl DecodeLoop {
    /// Whether all steps of the current iteration have been processed.
    pub(super) fn iteration_is_complete(&self) -> bool {
        self.pending_work.is_empty() && self.count_in_flight(StepKind::Iteration) == 0
    }

    /// Sends what can be sent without running ahead.
    pub(super) async fn send_steps(&mut self) -> Result<(), DeviceError> {
        if self.count_in_flight(StepKind::Iteration) == 0 {
            self.make_drafts_before().await?;
            self.send_pending()?;
        }
        self.send_chunks_ahead().await
    }

    /// Waits until the only step in flight has passed its last layer, and returns whether the next iteration
    /// may be scheduled before its results. Returns false at once if the loop does not run ahead.
    pub(super) async fn may_run_ahead(&mut self) -> bool {
        if !self.runs_ahead || self.has_beams() || self.speculates() {
            return false;
        }
        self.flush_events();
        match self.in_flight.front_mut() {
            Some(oldest) => (&mut oldest.sent.last_layer).await.is_ok(),
            None => false,
        }
    }

    /// Sends the step that was scheduled ahead, if there is one, and processes the oldest step in flight:
    /// what completed before a fault still counts. Returns at once if nothing is in flight.
    pub(super) async fn send_ahead_and_process(&mut self) -> Result<(), DeviceError> {
        let sent = if self.runs_ahead { self.send_pending() } else { Ok(()) };
        self.process_oldest().await?;
        sent
    }

    /// Sends the iteration's step, if there is work left. Under [`Policy::Concurrent`] there is one step per
    /// sequence, sent one after the other.
    fn send_pending(&mut self) -> Result<(), DeviceError> {
        if self.pending_work.is_empty() {
            return Ok(());
        }
        let spans = match self.config.policy {
            Policy::Concurrent => 1,
            Policy::Fused | Policy::Window { .. } => self.pending_work.len(),
        };
        let work: Vec<SpanWork> = self.pending_work.drain(..spans).collect();
        let plan = self.slot_plan.take();
        self.send_step(plan, &work, StepKind::Iteration)
    }

    /// Sends steps of prefill chunks only, as many as there are idle lanes, which leave the devices idle. The
    /// papers' baseline, one step per request, does not do this.
    async fn send_chunks_ahead(&mut self) -> Result<(), DeviceError> {
        let may_send = self.config.lanes > 1 && self.config.policy != Policy::Concurrent;
        while may_send && self.running.iter().any(|running| !running.prompt_scheduled) {
            let steps_ahead = self.count_in_flight(StepKind::Ahead);
            let request = ChunksAhead { lane: self.lane, budget: self.config.token_budget, steps_ahead };
            let chunks = self.handles.chunks_ahead.send(request).await.unwrap_or_default();
            let work: Vec<SpanWork> = chunks.into_iter().filter_map(|chunk| self.chunk_work(chunk)).collect();
            if work.is_empty() {
                return Ok(());
            }
            self.send_step(None, &work, StepKind::Ahead)?;
        }
        Ok(())
    }

    /// Returns the work of a chunk of a prompt that started in an earlier iteration; `None` if its sequence
    /// has left.
    fn chunk_work(&mut self, ScheduledChunk { key, chunk, .. }: ScheduledChunk) -> Option<SpanWork> {
        let at = self.running.iter().position(|running| running.key == key)?;
        self.running[at].prompt_scheduled = chunk.last;
        Some(SpanWork::Prefill(at, chunk))
    }

    /// Builds and sends a step of these spans and the slot plan's changes; then sends the events of the
    /// previous step.
    pub(super) fn send_step(
        &mut self,
        plan: Option<SlotPlan>,
        work: &[SpanWork],
        kind: StepKind,
    ) -> Result<(), DeviceError> {
        let spare = self.spare_buffers.pop();
        let mut buffers = spare.unwrap_or_else(|| StepBuffers::with_capacity(&self.config.limits));
        self.build_batch(&mut buffers, plan, work);
        let StepBuffers { step, routing } = buffers;
        let size = step_size(&step.batch);
        let step_work = self.comparable_work(&step.batch);
        let paced = (kind == StepKind::Iteration).then(|| paced_work(work, &step.batch));
        self.count_sent(work, &routing);
        let sent = self.handles.devices.send(step, self.epoch)?;
        let sent_at = self.metrics.record_sent();
        self.in_flight.push_back(InFlightStep { sent, routing, kind, sent_at, size, work: step_work, paced });
        if self.runs_ahead {
            self.count_scheduled(work);
        }
        self.flush_events();
        Ok(())
    }

    /// Counts the positions that a step computes and the results that it has.
    fn count_sent(&mut self, work: &[SpanWork], routing: &OutputRouting) {
        for span in work {
            match *span {
                SpanWork::Decode(at) => {
                    let running = &mut self.running[at];
                    running.sent_positions = running.next_position() as usize;
                    if let (Some(missing), Some(speculator)) = (running.catch_up(), &mut running.speculator) {
                        speculator.note_prompt(missing.end);
                    }
                }
                SpanWork::Prefill(at, chunk) => {
                    self.running[at].sent_positions = chunk.start + chunk.len;
                    if let Some(speculator) = &mut self.running[at].speculator {
                        speculator.note_prompt(chunk.start + chunk.len);
                    }
                }
                SpanWork::Draft(_) | SpanWork::Hole(_) | SpanWork::UpdatesOnly(_) => {}
            }
        }
        routing.sequences().for_each(|at| self.running[at].awaited += 1);
    }

    /// Counts the tokens that a step samples as scheduled.
    fn count_scheduled(&mut self, work: &[SpanWork]) {
        for span in work {
            match *span {
                SpanWork::Decode(at) => self.running[at].scheduled += 1,
                SpanWork::Prefill(at, chunk) if chunk.last => self.running[at].scheduled += 1,
                SpanWork::Prefill(..) | SpanWork::Draft(_) | SpanWork::Hole(_) | SpanWork::UpdatesOnly(_) => {
                }
            }
        }
    }

    /// Waits for the oldest step in flight, and processes its results.
    pub(super) async fn process_oldest(&mut self) -> Result<(), DeviceError> {
        self.flush_events();
        let Some(InFlightStep { sent, routing, sent_at, size, work, paced, .. }) = self.in_flight.pop_front()
        else {
            return Ok(());
        };
        let StepResult { step, result } = sent.await;
        self.handles.status.heartbeat(self.lane);
        result?;
        // A step that was sent ahead begins when the one before it completes.
        let began = if self.runs_ahead { sent_at.max(self.produced_at) } else { sent_at };
        self.produced_at = self.metrics.record_completed(began, step.output.times, size, step.gap);
        if let Some(work) = work {
            self.observe_cost(work, &step.output.times, self.produced_at.saturating_duration_since(began));
        }
        self.observe_pace(paced, began, self.produced_at);
        self.process_output(&step.output, &routing);
        self.metrics.record_processed();
        self.spare_buffers.push(StepBuffers { step, routing });
        Ok(())
    }

    /// Returns the number of steps of a kind in flight.
    pub(super) fn count_in_flight(&self, kind: StepKind) -> usize {
        self.in_flight.iter().filter(|step| step.kind == kind).count()
    }
}

/// Returns the work of a step, as far as its time depends on it.
fn paced_work(work: &[SpanWork], batch: &StepBatch) -> PacedWork {
    let mut paced = PacedWork::default();
    for span in work {
        if let SpanWork::Prefill(_, chunk) = span {
            paced.add_chunk(chunk.start, chunk.len);
        }
    }
    for span in batch.spans.iter().filter(|span| span.stack == SpanStack::Encoder) {
        paced.add_chunk(0, span.len());
    }
    PacedWork { decoding: batch.rows() - paced.prompt, ..paced }
}
