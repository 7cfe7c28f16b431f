//! The decode loop of a lane: each iteration generates one token for every running sequence of the lane, in
//! one fused step.
//!
//! Owns the lane's sequences from their first chunk to their end. The decode loops are the only actors that
//! issue device work. They never wait for a client, never see text, and do not assign slots.
//! A text for an encoder-only model is a sequence of one step: it takes a slot and no pages, and leaves with
//! its result.
//! With one lane on one device, the loop runs ahead: it schedules an iteration when the step before it has
//! passed its last layer, so that the device finds the next step when it completes this one. Rows of
//! sequences that turn out to have ended are wasted.
//! Invariant: slots and pages that a step in flight refers to are reused by later steps only, which every
//! device runs after it. At most one step is sent before the results of the step before it.

mod running;

mod build_batch;

mod process_output;

mod in_flight;

mod beams;

mod speculation;

mod pages;

mod pacing;

use super::group::{Devices, Epoch};
use super::kv::{IterationUpdate, JoiningSequence, ResetLane, SlotPlan};
use super::live::LiveView;
use super::loop_metrics::LoopMetrics;
use super::prefill::{ChunksAhead, DropStarted, NextChunks, PromptChunk, Requeue};
use super::prefill::{ScheduledChunk, ScheduledWork};
use super::queue::Preemptible;
use super::sequence::SequenceKey;
use super::status::Status;
use super::stream::EventSender;
use crate::config::Policy;
use crate::decoding::HostPool;
use crate::memory::split_slots;
use crate::model::offload::Transfers;
use crate::request::{RequestError, TokenEvent};
use actix::{Actor, AsyncContext, Context, Recipient, WrapFuture};
use beams::RunningSearch;
use build_batch::StepBuffers;
use futures_util::FutureExt;
use in_flight::{InFlightStep, StepKind};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{DeviceError, StepLimits};
use pacing::PromptPacing;
use running::{LeasedPages, RunningSequence};
use speculation::DraftPlanning;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::error;

/// The actors and devices that a decode loop uses; shared by all lanes.
#[derive(Clone)]
pub struct LoopHandles {
    pub next_chunks: Recipient<NextChunks>,
    pub chunks_ahead: Recipient<ChunksAhead>,
    pub drop_started: Recipient<DropStarted>,
    pub requeue: Recipient<Requeue>,
    pub update_slots: Recipient<IterationUpdate>,
    pub reset_lane: Recipient<ResetLane>,
    pub devices: Arc<dyn Devices>,
    pub status: Arc<Status>,
    pub host_pool: Arc<HostPool>,
    /// Counts of the bytes that the devices move between memory and disk.
    pub transfers: Arc<Transfers>,
    /// The view of those who watch.
    pub live: Arc<LiveView>,
}

/// Configuration of the decode loops.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    pub policy: Policy,
    pub limits: StepLimits,
    /// Maximum batched tokens of a step, decoded tokens and prompt tokens together.
    pub token_budget: usize,
    /// The model's end-of-sequence tokens.
    pub eos: Vec<u32>,
    /// Number of lanes that share the slots; at most the number of slots.
    pub lanes: usize,
    /// Whether a step may be sent before the results of the previous one are back. It takes effect with one
    /// lane on one device, which remembers the tokens that it sampled.
    pub run_ahead: bool,
    /// Maximum number of tokens of a sequence for which the draft model makes drafts; 0 without one.
    pub draft_context: usize,
    /// The time between two tokens of a stream that prompts in the same steps leave it; `None` is any time.
    pub itl_target: Option<Duration>,
}

/// The actor of one lane. It only keeps the loop running; the loop requests all its work itself.
pub struct Decode {
    lane: usize,
    handles: LoopHandles,
    config: DecodeConfig,
}

impl Actor for Decode {
    type Context = Context<Decode>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let (lane, handles, config) = (self.lane, self.handles.clone(), self.config.clone());
        ctx.spawn(run_with_restarts(lane, handles, config).into_actor(self));
    }
}

impl Decode {
    /// Creates the actor of lane `lane`, counted from 0.
    pub fn new(lane: usize, handles: LoopHandles, config: DecodeConfig) -> Decode {
        Decode { lane, handles, config }
    }
}

/// Runs the loop, and restarts it if a bug makes it panic. The sequences of the lane are lost then (their
/// closed channels notify their clients), but the engine and the other lanes continue. If another actor is
/// gone, the loop cannot continue.
async fn run_with_restarts(lane: usize, handles: LoopHandles, config: DecodeConfig) {
    loop {
        let decode_loop = DecodeLoop::new(lane, handles.clone(), config.clone());
        match AssertUnwindSafe(decode_loop.run()).catch_unwind().await {
            Ok(()) => {
                if !handles.status.is_stopping() {
                    error!(
                        "an actor that the decode loop needs has stopped; this is a bug, and the engine \
                         serves no more requests"
                    );
                    handles.status.set_failed();
                }
                return;
            }
            Err(_) => {
                error!(lane, "the decode loop panicked; this is a bug. It restarts without its sequences")
            }
        }
        handles.drop_started.do_send(DropStarted { lane });
        handles.reset_lane.do_send(ResetLane { lane, epoch: handles.devices.epoch() });
    }
}

/// Maximum number of tokens that a grammar forces at once, whose masks delay the next one.
const FORCED_MAX: usize = 16;

/// The state of a decode loop.
struct DecodeLoop {
    lane: usize,
    handles: LoopHandles,
    config: DecodeConfig,
    /// Number of slots of the lane.
    slots: usize,
    /// Whether a step is sent before the results of the previous one.
    runs_ahead: bool,
    /// Maximum number of tokens that a grammar forces at once: what each slot can add to a step within the
    /// budget. None if the loop runs ahead, because the next step is sent before they are known.
    jump_limit: usize,
    /// Running sequences in the order of their slots; new ones are at the end until the slot plan arrives.
    running: Vec<RunningSequence>,
    /// Sequences that have given up slot and pages and wait for results in flight: those that end with them,
    /// and preempted ones.
    leaving: Vec<RunningSequence>,
    /// Beam searches whose prompts are computed.
    searches: Vec<RunningSearch>,
    /// The most likely tokens after beams, by the results since the last iteration.
    beam_rows: Vec<(SequenceKey, Vec<(u32, f32)>)>,
    draft_planning: DraftPlanning,
    pacing: PromptPacing,
    /// When the results of the last step came; `None` before the first one after an idle period.
    results_at: Option<Instant>,
    /// Changes to send to the KV manager with the next update.
    update: IterationUpdate,
    /// Spans of the current iteration that are still to be sent.
    pending_work: VecDeque<SpanWork>,
    /// The slot plan of the current iteration; its changes are sent with the first step.
    slot_plan: Option<SlotPlan>,
    /// Steps in flight, in the order in which they were sent.
    in_flight: VecDeque<InFlightStep>,
    /// The epoch of the devices' state that the running sequences belong to.
    epoch: Epoch,
    /// Events of the last processed step, sent while the next one runs.
    pending_events: Vec<(EventSender, TokenEvent)>,
    /// When these events were produced.
    produced_at: Instant,
    /// Buffers of steps that are not in flight.
    spare_buffers: Vec<StepBuffers>,
    metrics: LoopMetrics,
}

/// The work of one span of a step, or of a prompt's first chunk with its encoder span. Sequences are given by
/// their index among the running sequences.
#[derive(Clone, Copy, Debug)]
enum SpanWork {
    /// Decodes one token, or verifies drafts.
    Decode(usize),
    /// Makes drafts for a later step.
    Draft(usize),
    /// Prefills a chunk.
    Prefill(usize, PromptChunk),
    /// Computes a hole, whose result is discarded.
    Hole(Slot),
    /// A null row in a step that only carries the slot plan's changes. It leaves the slot's state unchanged.
    UpdatesOnly(Slot),
}

impl DecodeLoop {
    fn new(lane: usize, handles: LoopHandles, config: DecodeConfig) -> DecodeLoop {
        let slots = split_slots(config.limits.slots, config.lanes).nth(lane);
        let slots =
            slots.expect("the lane's index is below the number of lanes; anything else is a bug").len();
        let runs_ahead = config.run_ahead
            && config.lanes == 1
            && config.policy != Policy::Concurrent
            && handles.devices.count() == 1;
        let buffers = if runs_ahead { 2 } else { 1 };
        let jump_limit = config.token_budget.saturating_sub(slots) / slots;
        DecodeLoop {
            lane,
            slots,
            runs_ahead,
            jump_limit: if runs_ahead { 0 } else { jump_limit.min(FORCED_MAX) },
            running: Vec::with_capacity(slots),
            leaving: Vec::with_capacity(slots),
            searches: Vec::new(),
            beam_rows: Vec::new(),
            draft_planning: DraftPlanning::default(),
            pacing: PromptPacing::new(config.itl_target),
            results_at: None,
            update: IterationUpdate { lane, ..IterationUpdate::default() },
            pending_work: VecDeque::with_capacity(slots),
            slot_plan: None,
            in_flight: VecDeque::with_capacity(config.lanes.max(buffers)),
            epoch: handles.devices.epoch(),
            pending_events: Vec::new(),
            produced_at: Instant::now(),
            spare_buffers: (0..buffers).map(|_| StepBuffers::with_capacity(&config.limits)).collect(),
            metrics: LoopMetrics::new(handles.transfers.clone(), handles.live.lane(lane)),
            handles,
            config,
        }
    }

    /// Runs until another actor is gone, which is when the engine stops. Each pass schedules the next
    /// iteration once the previous one is complete or has passed its last layer, sends steps, and processes
    /// the oldest step in flight.
    async fn run(mut self) {
        loop {
            if self.iteration_is_complete() && self.schedule_iteration().await.is_none() {
                return;
            }
            if let Err(fault) = self.send_steps().await {
                self.fail_all(&fault);
                continue;
            }
            if self.may_run_ahead().await && self.schedule_ahead().await.is_none() {
                return;
            }
            if let Err(fault) = self.send_ahead_and_process().await {
                self.fail_all(&fault);
            }
        }
    }

    /// Schedules the next iteration: removes finished sequences, adds new ones, and plans the spans.
    async fn schedule_iteration(&mut self) -> Option<()> {
        self.advance_searches();
        self.remove_finished();
        if self.running.is_empty() {
            self.go_idle().await?;
        }
        self.plan_iteration().await
    }

    /// Schedules the next iteration while a step is in flight. Sequences that end with that step leave now.
    /// If no others are left, nothing is scheduled, because the lane may be idle after the step.
    async fn schedule_ahead(&mut self) -> Option<()> {
        self.metrics.resume_clock();
        let ending =
            self.running.extract_if(.., |running| !running.finished && running.ends_with_scheduled());
        for mut running in ending {
            self.update.finished.push(running.release());
            self.leaving.push(running);
        }
        self.remove_finished();
        if self.running.is_empty() {
            return Some(());
        }
        self.plan_iteration().await
    }

    /// Adds new sequences and plans the spans of the next iteration.
    async fn plan_iteration(&mut self) -> Option<()> {
        self.choose_depths();
        let ScheduledWork { chunks, preempted } = self.request_chunks().await?;
        self.update.give_up = preempted;
        let chunks = self.fail_lost_sequences(chunks).await;
        self.admit_chunks(chunks);
        self.report_sequences();
        let plan = self.update_slots().await?;
        self.apply_plan(&plan);
        self.pending_work = self.plan_work(&plan);
        self.slot_plan = Some(plan);
        Some(())
    }

    /// Removes finished sequences and those of disconnected clients, which releases their permits. The KV
    /// manager gets their slots and pages back with the next update.
    fn remove_finished(&mut self) {
        let ended = |running: &mut RunningSequence| running.finished || running.sequence.events.is_closed();
        for mut running in self.running.extract_if(.., ended) {
            if let Some(speculator) = &running.speculator {
                self.draft_planning.observe_end(speculator);
            }
            self.update.finished.push(running.release());
        }
        self.drop_ended_searches();
    }

    /// Goes idle, as the lane has no sequences: processes the steps in flight, whose results nobody needs,
    /// and releases slots and pages before the loop waits for work.
    async fn go_idle(&mut self) -> Option<()> {
        while !self.in_flight.is_empty() {
            if let Err(fault) = self.process_oldest().await {
                self.fail_all(&fault);
            }
        }
        self.flush_events();
        self.results_at = None;
        let plan = self.update_slots().await?;
        assert!(plan.moves.is_empty() && plan.tables.is_empty(), "the plan of an empty lane has no changes");
        self.show_sequences(&plan);
        self.handles.status.idle(self.lane);
        Some(())
    }

    /// Requests prefill chunks. Without running sequences, this waits for work. The request is made between
    /// two steps, or at the end of one, so that a request that arrives during a step joins the very next one.
    async fn request_chunks(&mut self) -> Option<ScheduledWork> {
        let decoding = self.running.iter().filter(|running| running.is_decoding());
        let decoding: usize =
            decoding.map(|running| 1 + running.forced as usize + running.draft_rows()).sum();
        let (lane, running) = (self.lane, self.running.len());
        let steps_ahead = self.count_in_flight(StepKind::Ahead);
        let free_slots = self.slots - running - self.reserved_slots();
        let budget = self.prompt_budget(decoding);
        let preemptible = self.preemptible();
        let request = NextChunks { lane, budget, running, free_slots, steps_ahead, preemptible };
        let chunks = self.handles.next_chunks.send(request).await.ok();
        self.handles.status.heartbeat(lane);
        if running == 0 {
            self.metrics.restart_clock();
        }
        chunks
    }

    /// Returns the running sequences whose slots and pages others may take.
    fn preemptible(&self) -> Vec<Preemptible> {
        let alone = self.running.iter().filter(|running| running.may_make_way());
        let alone = alone.map(|running| running.preemptible(running.sequence.slots()));
        alone.chain(self.preemptible_searches()).collect()
    }

    /// Fails the running sequences if a fault has ended their epoch; results from before the fault still
    /// count. New sequences go back to prefill, because what their pages share is lost. Returns the chunks
    /// that are left.
    async fn fail_lost_sequences(&mut self, chunks: Vec<ScheduledChunk>) -> Vec<ScheduledChunk> {
        let Err(fault) = self.handles.devices.check_epoch(self.epoch) else { return chunks };
        while !self.in_flight.is_empty() && self.process_oldest().await.is_ok() {}
        self.fail_all(&fault);
        for mut sequence in chunks.into_iter().filter_map(|chunk| chunk.sequence) {
            sequence.lease = None;
            self.handles.requeue.do_send(Requeue(sequence));
        }
        Vec::new()
    }

    /// Adds the sequences that come with their first chunks, and assigns chunks to their sequences. Chunks of
    /// sequences that have left are dropped.
    fn admit_chunks(&mut self, chunks: Vec<ScheduledChunk>) {
        for ScheduledChunk { key, sequence, chunk } in chunks {
            if let Some(mut sequence) = sequence {
                let lease = sequence.lease.take().expect("prefill leased its pages; anything else is a bug");
                if sequence.progress.is_none() {
                    sequence.events.send(TokenEvent::Started { cached_tokens: lease.computed() });
                }
                let (pages, pool) = (LeasedPages::of(&lease), &self.handles.host_pool);
                let (class, account) = (sequence.request.class, sequence.account.clone());
                self.update.joins.push(JoiningSequence { key, class, account, lease });
                let (config, choices) = (&self.config, (self.jump_limit, self.draft_planning.prior()));
                let mut running = RunningSequence::new(sequence, pages, &self.metrics, pool, config, choices);
                if let Some(speculator) = &mut running.speculator {
                    let others = self.running.iter().filter_map(|other| other.speculator.as_ref());
                    others.for_each(|other| speculator.share_prompt(other));
                }
                self.running.push(running);
            }
            // A sequence that was just added is the last one.
            if let Some(running) = self.running.iter_mut().rfind(|running| running.key == key) {
                running.chunk = Some(chunk);
                running.prompt_scheduled = chunk.last;
            }
        }
    }

    /// Sends the changes to the KV manager, and returns the new slot plan.
    async fn update_slots(&mut self) -> Option<SlotPlan> {
        let next = self.empty_update();
        self.handles.update_slots.send(std::mem::replace(&mut self.update, next)).await.ok()
    }

    /// Returns an update without changes.
    fn empty_update(&self) -> IterationUpdate {
        IterationUpdate { lane: self.lane, epoch: self.epoch, ..IterationUpdate::default() }
    }

    /// Reorders the running sequences by slot. `slots` is sorted by slot.
    fn reorder(&mut self, slots: &[(Slot, SequenceKey)]) {
        assert_eq!(slots.len(), self.running.len(), "exactly the running sequences hold slots");
        for (at, &(slot, key)) in slots.iter().enumerate() {
            let found = self.running[at..].iter().position(|running| running.key == key);
            let found = found.expect("the holder of a slot runs; anything else is a bug");
            // Most sequences keep their place from one iteration to the next.
            self.running[at..=at + found].rotate_right(1);
            self.running[at].move_to(slot);
        }
    }

    /// Returns the spans of the iteration: slots of the window in order, then prefill chunks, openings last.
    fn plan_work(&mut self, plan: &SlotPlan) -> VecDeque<SpanWork> {
        let mut work = VecDeque::with_capacity(plan.window.len() + self.running.len());
        let mut next = plan.window.start;
        for (at, running) in self.running.iter().enumerate() {
            // With the shuffle off, holes are computed and their results discarded: the papers' baseline.
            work.extend((next..running.slot).map(SpanWork::Hole));
            next = running.slot + 1;
            if running.is_decoding() && !running.is_stalled {
                work.push_back(SpanWork::Decode(at));
            }
        }
        for (at, running) in self.running.iter_mut().enumerate() {
            work.extend(running.chunk.take().map(|chunk| SpanWork::Prefill(at, chunk)));
        }
        work.make_contiguous().sort_by_key(|span| self.is_opening(span));
        if work.iter().all(|span| matches!(span, SpanWork::Hole(_))) {
            work.clear();
            // The plan's changes must reach the devices even when there is nothing to compute.
            if !(plan.moves.is_empty() && plan.tables.is_empty() && plan.copies.is_empty()) {
                work.push_back(SpanWork::UpdatesOnly(plan.window.start));
            }
        }
        work
    }

    /// Sends the events of the last processed step.
    fn flush_events(&mut self) {
        if self.pending_events.is_empty() {
            return;
        }
        for (events, event) in self.pending_events.drain(..) {
            events.send_produced_at(event, self.produced_at);
        }
        self.metrics.record_delivery();
    }

    /// Fails all sequences of the lane, because the devices lost their state, and restarts the lane empty.
    fn fail_all(&mut self, fault: &DeviceError) {
        self.flush_events();
        let failure = RequestError::DeviceFailed(fault.to_string());
        // The host may have drawn from rows in flight, so that its state is ahead of the tokens.
        let is_lost = |leaving: &RunningSequence| {
            leaving.finished || leaving.ends_with_scheduled() || leaving.host.is_some()
        };
        let (ending, preempted): (Vec<_>, Vec<_>) = self.leaving.drain(..).partition(is_lost);
        // Clients of finished sequences have already received their end.
        let lost = self.running.drain(..).chain(ending);
        for running in lost.filter(|running| !running.finished && !running.is_beam) {
            running.sequence.fail(&failure);
        }
        // These have lost nothing but the results in flight.
        for preempted in preempted {
            self.handles.requeue.do_send(Requeue(preempted.suspend()));
        }
        self.fail_all_searches(&failure);
        self.beam_rows.clear();
        let lane = self.lane;
        self.pending_work.clear();
        self.slot_plan = None;
        self.in_flight.clear();
        self.epoch = self.handles.devices.epoch();
        self.update = self.empty_update();
        self.handles.drop_started.do_send(DropStarted { lane });
        self.handles.reset_lane.do_send(ResetLane { lane, epoch: self.epoch });
    }
}

#[cfg(test)]
mod tests;
