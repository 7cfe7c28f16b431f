//! The decode loop of a lane: each iteration generates one token for every running sequence of the lane, in
//! one fused step.
//!
//! Owns the lane's sequences from their first chunk to their end. The decode loops are the only actors that
//! issue device work. They never wait for a client, never see text, and do not assign slots.
//! A text for an encoder-only model is a sequence of one step: it takes a slot and no pages, and leaves with
//! its result.
//! Invariant: a sequence leaves between two iterations. Slots and pages that a step in flight refers to are
//! reused by later steps only, which every device runs after it.

mod live;

mod fill;

mod settle;

mod flight;

use super::group::{Devices, Epoch};
use super::kv::{Join, Plan, Reset, Turn};
use super::meters::Meters;
use super::prefill::{Ahead, Chunk, ForgetBegun, NextChunk};
use super::sequence::Key;
use super::status::Status;
use super::stream::EventSender;
use crate::config::Policy;
use crate::memory::divided;
use crate::request::{RequestError, TokenEvent};
use actix::{Actor, AsyncContext, Context, Recipient, WrapFuture};
use flight::{Flight, Load};
use futures_util::FutureExt;
use live::{Live, Piece};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{DeviceError, StepLimits};
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;
use tracing::error;

/// The actors and devices that a decode loop uses; shared by all lanes.
#[derive(Clone)]
pub struct Neighbours {
    pub prefill_next: Recipient<NextChunk>,
    pub prefill_ahead: Recipient<Ahead>,
    pub prefill_forget: Recipient<ForgetBegun>,
    pub kv_turn: Recipient<Turn>,
    pub kv_reset: Recipient<Reset>,
    pub devices: Arc<dyn Devices>,
    pub status: Arc<Status>,
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
}

/// The actor of one lane. It only keeps the loop running; the loop requests all its work itself.
pub struct Decode {
    lane: usize,
    neighbours: Neighbours,
    config: DecodeConfig,
}

impl Actor for Decode {
    type Context = Context<Decode>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let (lane, handles, config) = (self.lane, self.neighbours.clone(), self.config.clone());
        ctx.spawn(keep_turning(lane, handles, config).into_actor(self));
    }
}

impl Decode {
    /// Creates the actor of lane `lane`, counted from 0.
    pub fn new(lane: usize, handles: Neighbours, config: DecodeConfig) -> Decode {
        Decode { lane, neighbours: handles, config }
    }
}

/// Runs the loop, and restarts it if a bug makes it panic. The sequences of the lane are lost then (their
/// closed channels notify their clients), but the engine and the other lanes continue. If another actor is
/// gone, the loop cannot continue.
async fn keep_turning(lane: usize, handles: Neighbours, config: DecodeConfig) {
    loop {
        let decode_loop = MainStem::new(lane, handles.clone(), config.clone());
        match AssertUnwindSafe(decode_loop.turn_forever()).catch_unwind().await {
            Ok(()) => {
                if !handles.status.is_stopping() {
                    error!(
                        "an actor that the decode loop needs has stopped; this is a bug, and the engine serves no more requests"
                    );
                    handles.status.fail();
                }
                return;
            }
            Err(_) => {
                error!(lane, "the decode loop panicked; this is a bug. It restarts without its sequences")
            }
        }
        handles.prefill_forget.do_send(ForgetBegun { lane, but: Vec::new() });
        handles.kv_reset.do_send(Reset { lane });
    }
}

/// The state of a decode loop.
struct MainStem {
    lane: usize,
    neighbours: Neighbours,
    config: DecodeConfig,
    /// Number of slots of the lane.
    slots: usize,
    /// Running sequences in the order of their slots; new ones are at the end until the slot plan arrives.
    live: Vec<Live>,
    /// Changes to send to the KV manager with the next update.
    turn: Turn,
    /// Spans of the current iteration that are still to be sent.
    due: VecDeque<Work>,
    /// The slot plan of the current iteration; its changes are sent with the first step.
    plan: Option<Plan>,
    /// Steps in flight, in the order in which they were sent.
    flights: VecDeque<Flight>,
    /// The epoch of the devices' state that the running sequences belong to.
    epoch: Epoch,
    /// Events of the last processed step, sent while the next one runs.
    outbox: Vec<(EventSender, TokenEvent)>,
    /// When these events were produced.
    made_at: Instant,
    /// Buffers of steps that are not in flight.
    spare: Vec<Load>,
    meters: Meters,
}

/// The work of one span of a step, or of a prompt's first chunk with its encoder span. Sequences are given by
/// their index among the running sequences.
#[derive(Clone, Copy, Debug)]
/// Decodes one token.
enum Work {
    Next(usize),
    /// Prefills a chunk.
    Chunk(usize, Piece),
    /// Computes a hole, whose result is discarded.
    Hole(Slot),
    /// A null row in a step that only carries the slot plan's changes. It leaves the slot's state unchanged.
    Nothing(Slot),
}

impl MainStem {
    fn new(lane: usize, handles: Neighbours, config: DecodeConfig) -> MainStem {
        let slots = divided(config.limits.slots, config.lanes).nth(lane);
        let slots =
            slots.expect("the lane's index is below the number of lanes; anything else is a bug").len();
        MainStem {
            lane,
            slots,
            live: Vec::with_capacity(slots),
            turn: Turn { lane, ..Turn::default() },
            due: VecDeque::with_capacity(slots),
            plan: None,
            flights: VecDeque::with_capacity(config.lanes),
            epoch: handles.devices.epoch(),
            outbox: Vec::new(),
            made_at: Instant::now(),
            spare: vec![Load::with_capacity(&config.limits)],
            meters: Meters::new(),
            neighbours: handles,
            config,
        }
    }

    /// Runs until another actor is gone, which is when the engine stops. Each pass schedules the next
    /// iteration once the previous one is complete, sends steps, and processes the oldest step in flight.
    async fn turn_forever(mut self) {
        loop {
            if self.turn_is_through() && self.next_turn().await.is_none() {
                return;
            }
            if let Err(fault) = self.fly().await {
                self.fail_all(&fault);
            }
        }
    }

    /// Schedules the next iteration: removes finished sequences, adds new ones, and plans the spans.
    async fn next_turn(&mut self) -> Option<()> {
        self.drop_gone();
        if self.live.is_empty() {
            self.rest().await?;
        }
        let chunks = self.next_chunks().await?;
        self.begin_in_epoch(&chunks);
        self.take_in(chunks);
        let plan = self.next_plan().await?;
        self.place(&plan.slots);
        self.due = self.work(&plan);
        self.plan = Some(plan);
        Some(())
    }

    /// Removes finished sequences and those of disconnected clients, which releases their slots, pages and
    /// permits.
    fn drop_gone(&mut self) {
        self.live.retain(|running| {
            let stays = !running.over && !running.sequence.events.is_closed();
            if !stays {
                self.turn.finished.push(running.key);
            }
            stays
        });
    }

    /// Goes idle, as the lane has no sequences: processes the steps in flight, whose results nobody needs,
    /// and releases slots and pages before the loop waits for work.
    async fn rest(&mut self) -> Option<()> {
        while !self.flights.is_empty() {
            if let Err(fault) = self.land().await {
                self.fail_all(&fault);
            }
        }
        self.flush();
        let plan = self.next_plan().await?;
        assert!(plan.moves.is_empty() && plan.tables.is_empty(), "the plan of an empty lane has no changes");
        self.neighbours.status.rest(self.lane);
        Some(())
    }

    /// Requests prefill chunks. Without running sequences, this waits for work. The request is made between
    /// two steps and not during one, so that a request that arrives during a step joins the very next one.
    async fn next_chunks(&mut self) -> Option<Vec<Chunk>> {
        let decoding = self.live.iter().filter(|running| running.generated > 0).count();
        let (lane, running, steps_ahead) = (self.lane, self.live.len(), self.flights.len());
        let (budget, free_slots) = (self.config.token_budget - decoding, self.slots - running);
        let request = NextChunk { lane, budget, live: running, places: free_slots, ahead: steps_ahead };
        let chunks = self.neighbours.prefill_next.send(request).await.ok();
        self.neighbours.status.beat(lane);
        if running == 0 {
            self.meters.woke();
        }
        chunks
    }

    /// Fails the running sequences if a fault has ended their epoch. New sequences are not affected: a
    /// sequence belongs to an epoch from the iteration on in which it gets its slot.
    fn begin_in_epoch(&mut self, chunks: &[Chunk]) {
        if let Err(fault) = self.neighbours.devices.lasts(self.epoch) {
            let new = chunks.iter().filter(|chunk| chunk.sequence.is_some());
            self.fail_all_but(&fault, new.map(|chunk| chunk.key).collect());
        }
    }

    /// Adds the sequences that come with their first chunks, and assigns chunks to their sequences. Chunks of
    /// sequences that have left are dropped.
    fn take_in(&mut self, chunks: Vec<Chunk>) {
        for Chunk { key, sequence, start, len, last } in chunks {
            if let Some(sequence) = sequence {
                let lease =
                    sequence.lease.as_ref().expect("prefill reserved its pages; anything else is a bug");
                self.turn.joins.push(Join { key, own: lease.own().to_vec(), cross: lease.cross().to_vec() });
                self.live.push(Live::new(key, sequence, &self.meters));
            }
            // A sequence that was just added is the last one.
            if let Some(running) = self.live.iter_mut().rfind(|running| running.key == key) {
                running.piece = Some(Piece { start, len, last });
                running.handed_out = last;
            }
        }
    }

    /// Sends the changes to the KV manager, and returns the new slot plan.
    async fn next_plan(&mut self) -> Option<Plan> {
        let next = Turn { lane: self.lane, ..Turn::default() };
        self.neighbours.kv_turn.send(std::mem::replace(&mut self.turn, next)).await.ok()
    }

    /// Reorders the running sequences by slot. `slots` is sorted by slot.
    fn place(&mut self, slots: &[(Slot, Key)]) {
        assert_eq!(slots.len(), self.live.len(), "exactly the running sequences hold slots");
        for (at, &(slot, key)) in slots.iter().enumerate() {
            let found = self.live[at..].iter().position(|running| running.key == key);
            let found = found.expect("the holder of a slot runs; anything else is a bug");
            // Most sequences keep their place from one iteration to the next.
            self.live[at..=at + found].rotate_right(1);
            self.live[at].slot = slot;
        }
    }

    /// Returns the spans of the iteration: every slot of the window in order, then the prefill chunks.
    fn work(&mut self, plan: &Plan) -> VecDeque<Work> {
        let mut work = VecDeque::with_capacity(plan.window.len() + self.live.len());
        let mut next = plan.window.start;
        for (at, running) in self.live.iter().enumerate() {
            // With the shuffle off, holes are computed and their results discarded: the papers' baseline.
            work.extend((next..running.slot).map(Work::Hole));
            next = running.slot + 1;
            if running.generated > 0 {
                work.push_back(Work::Next(at));
            }
        }
        for (at, running) in self.live.iter_mut().enumerate() {
            work.extend(running.piece.take().map(|chunk| Work::Chunk(at, chunk)));
        }
        let real = work.iter().any(|span| !matches!(span, Work::Hole(_)));
        if !real {
            work.clear();
            // The plan's changes must reach the devices even when there is nothing to compute.
            if !(plan.moves.is_empty() && plan.tables.is_empty() && plan.copies.is_empty()) {
                work.push_back(Work::Nothing(plan.window.start));
            }
        }
        work
    }

    /// Sends the events of the last processed step.
    fn flush(&mut self) {
        if self.outbox.is_empty() {
            return;
        }
        for (events, event) in self.outbox.drain(..) {
            events.send_made(event, self.made_at);
        }
        self.meters.delivered();
    }

    /// Fails all sequences of the lane, because the devices lost their state, and restarts the lane empty.
    fn fail_all(&mut self, fault: &DeviceError) {
        self.fail_all_but(fault, Vec::new());
    }

    /// Fails all sequences of the lane, and restarts the lane empty. Prefill keeps those in `kept`, which are
    /// about to be added.
    fn fail_all_but(&mut self, fault: &DeviceError, kept: Vec<Key>) {
        self.flush();
        // Clients of finished sequences have already received their end.
        for running in self.live.drain(..).filter(|running| !running.over) {
            let failure = RequestError::DeviceFailed(fault.to_string());
            running.sequence.events.send(TokenEvent::Failed(failure));
        }
        let lane = self.lane;
        self.turn = Turn { lane, ..Turn::default() };
        self.due.clear();
        self.plan = None;
        self.flights.clear();
        self.epoch = self.neighbours.devices.epoch();
        self.neighbours.prefill_forget.do_send(ForgetBegun { lane, but: kept });
        self.neighbours.kv_reset.do_send(Reset { lane });
    }
}

#[cfg(test)]
mod tests;
