//! The decode loop of a lane: one turn makes one token for every sequence that lives there, in one fused pass.
//!
//! Owns the lane's sequences, from their first chunk to their end. The loops of all lanes, and nobody else, issue device
//! work. Never waits for a client, never sees text, never decides who gets a slot.
//! A text for a lone encoder is a sequence of one step: it takes a slot and no pages, and leaves with its answer.
//! Invariant: a sequence leaves between two turns. What a step in flight still names of it, slot or pages, goes to later
//! steps only, and no device runs those before.

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

/// What the loop works with: the same in all lanes.
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

/// What the loop is told.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    pub policy: Policy,
    pub limits: StepLimits,
    /// Tokens of one step, decoded ones and prompts' together.
    pub token_budget: usize,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
    /// How many lanes share the slots; no more than there are.
    pub lanes: usize,
}

/// The actor of one lane. It only keeps the loop alive; the loop pulls everything it needs.
pub struct Decode {
    lane: usize,
    neighbours: Neighbours,
    config: DecodeConfig,
}

impl Actor for Decode {
    type Context = Context<Decode>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let (lane, neighbours, config) = (self.lane, self.neighbours.clone(), self.config.clone());
        ctx.spawn(keep_turning(lane, neighbours, config).into_actor(self));
    }
}

impl Decode {
    /// The loop of lane `lane`, counted from 0.
    pub fn new(lane: usize, neighbours: Neighbours, config: DecodeConfig) -> Decode {
        Decode { lane, neighbours, config }
    }
}

/// Runs the loop, and runs it again if a bug of ours ends it: the sequences it had are lost (their closed
/// channels tell their clients), the service and the other lanes are not. Without its neighbours it cannot go on.
async fn keep_turning(lane: usize, neighbours: Neighbours, config: DecodeConfig) {
    loop {
        let main_stem = MainStem::new(lane, neighbours.clone(), config.clone());
        match AssertUnwindSafe(main_stem.turn_forever()).catch_unwind().await {
            Ok(()) => {
                if !neighbours.status.is_stopping() {
                    error!(
                        "an actor beside the decode loop is gone; this is a bug, and nothing is served any more"
                    );
                    neighbours.status.fail();
                }
                return;
            }
            Err(_) => error!(lane, "the decode loop panicked; this is a bug. It starts again, empty"),
        }
        neighbours.prefill_forget.do_send(ForgetBegun { lane, but: Vec::new() });
        neighbours.kv_reset.do_send(Reset { lane });
    }
}

/// The loop's state.
struct MainStem {
    lane: usize,
    neighbours: Neighbours,
    config: DecodeConfig,
    /// Slots of the lane.
    slots: usize,
    /// In the order of their slots; who joins this turn, at the end until the plan has told.
    live: Vec<Live>,
    /// What kv has to hear at the next turn.
    turn: Turn,
    /// Spans of the turn at hand that are still to be sent, and what changed its place, which goes with the first.
    due: VecDeque<Work>,
    plan: Option<Plan>,
    /// Steps on their way, in the order in which they were sent.
    flights: VecDeque<Flight>,
    /// What the devices remember of the live.
    epoch: Epoch,
    /// Events made by the step that landed last, sent while the next one runs.
    outbox: Vec<(EventSender, TokenEvent)>,
    /// When they were made.
    made_at: Instant,
    /// Steps that are not travelling.
    spare: Vec<Load>,
    meters: Meters,
}

/// One span of a step, or a prompt's with its source's. Sequences are named by their place among the live.
#[derive(Clone, Copy, Debug)]
enum Work {
    Next(usize),
    Chunk(usize, Piece),
    Hole(Slot),
    /// What makes a step of changes alone: its row leaves nothing behind, whoever has the slot.
    Nothing(Slot),
}

impl MainStem {
    fn new(lane: usize, neighbours: Neighbours, config: DecodeConfig) -> MainStem {
        let slots = divided(config.limits.slots, config.lanes).nth(lane);
        let slots = slots.expect("a lane is one of them, else this is a bug").len();
        MainStem {
            lane,
            slots,
            live: Vec::with_capacity(slots),
            turn: Turn { lane, ..Turn::default() },
            due: VecDeque::with_capacity(slots),
            plan: None,
            flights: VecDeque::with_capacity(config.lanes),
            epoch: neighbours.devices.epoch(),
            outbox: Vec::new(),
            made_at: Instant::now(),
            spare: vec![Load::with_capacity(&config.limits)],
            meters: Meters::new(),
            neighbours,
            config,
        }
    }

    /// Each pass: who left, what is new, where everything is, as soon as the turn before is through; then one step that
    /// lands, and what came of it. Ends when a neighbour is gone, which is when the engine stops.
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

    /// Makes the work of the next turn.
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

    /// Drops the sequences that are over, and those whose clients hung up: slots, pages and permits go home.
    fn drop_gone(&mut self) {
        self.live.retain(|live| {
            let stays = !live.over && !live.sequence.events.is_closed();
            if !stays {
                self.turn.finished.push(live.key);
            }
            stays
        });
    }

    /// Nobody lives here: what is in flight is nobody's, and slots must be free, and pages seen to be, before anything is
    /// waited for.
    async fn rest(&mut self) -> Option<()> {
        while !self.flights.is_empty() {
            if let Err(fault) = self.land().await {
                self.fail_all(&fault);
            }
        }
        self.flush();
        let plan = self.next_plan().await?;
        assert!(plan.moves.is_empty() && plan.tables.is_empty(), "without sequences nothing changes place");
        self.neighbours.status.rest(self.lane);
        Some(())
    }

    /// Asks prefill for prompt chunks. With nothing live this waits until there is work. It is asked
    /// between two steps and not during one, so that who arrives during a step joins the very next.
    async fn next_chunks(&mut self) -> Option<Vec<Chunk>> {
        let decoding = self.live.iter().filter(|live| live.generated > 0).count();
        let (lane, live, ahead) = (self.lane, self.live.len(), self.flights.len());
        let (budget, places) = (self.config.token_budget - decoding, self.slots - live);
        let question = NextChunk { lane, budget, live, places, ahead };
        let chunks = self.neighbours.prefill_next.send(question).await.ok();
        self.neighbours.status.beat(lane);
        if live == 0 {
            self.meters.woke();
        }
        chunks
    }

    /// Who lives here may have been lost with what the devices remembered, be it only now. Who has just come has not: a
    /// sequence is in an epoch from the turn on in which it gets its slot.
    fn begin_in_epoch(&mut self, newcomers: &[Chunk]) {
        if let Err(fault) = self.neighbours.devices.lasts(self.epoch) {
            let come = newcomers.iter().filter(|chunk| chunk.sequence.is_some());
            self.fail_all_but(&fault, come.map(|chunk| chunk.key).collect());
        }
    }

    /// A sequence comes with its first chunk, and needs a slot. Chunks of those who left meanwhile are void.
    fn take_in(&mut self, chunks: Vec<Chunk>) {
        for Chunk { key, sequence, start, len, last } in chunks {
            if let Some(sequence) = sequence {
                let lease = sequence.lease.as_ref().expect("prefill obtained its pages, else this is a bug");
                self.turn.joins.push(Join { key, own: lease.own().to_vec(), cross: lease.cross().to_vec() });
                self.live.push(Live::new(key, sequence, &self.meters));
            }
            // Who has just come is the last.
            if let Some(live) = self.live.iter_mut().rfind(|live| live.key == key) {
                live.piece = Some(Piece { start, len, last });
                live.handed_out = last;
            }
        }
    }

    /// Tells kv who left and who joins; hears where everybody is.
    async fn next_plan(&mut self) -> Option<Plan> {
        let next = Turn { lane: self.lane, ..Turn::default() };
        self.neighbours.kv_turn.send(std::mem::replace(&mut self.turn, next)).await.ok()
    }

    /// Brings the live into the order of their slots, given by slot.
    fn place(&mut self, slots: &[(Slot, Key)]) {
        assert_eq!(slots.len(), self.live.len(), "whoever lives holds a slot, and nobody else");
        for (at, &(slot, key)) in slots.iter().enumerate() {
            let found = self.live[at..].iter().position(|live| live.key == key);
            let found = found.expect("whoever holds a slot lives, else this is a bug");
            // From one turn to the next most of them stand as they stood.
            self.live[at..=at + found].rotate_right(1);
            self.live[at].slot = slot;
        }
    }

    /// The spans of this turn: every slot of the window by number, then the chunks.
    fn work(&mut self, plan: &Plan) -> VecDeque<Work> {
        let mut work = VecDeque::with_capacity(plan.window.len() + self.live.len());
        let mut next = plan.window.start;
        for (at, live) in self.live.iter().enumerate() {
            // With the shuffle off, holes are computed and their results dropped: the papers' baseline.
            work.extend((next..live.slot).map(Work::Hole));
            next = live.slot + 1;
            if live.generated > 0 {
                work.push_back(Work::Next(at));
            }
        }
        for (at, live) in self.live.iter_mut().enumerate() {
            work.extend(live.piece.take().map(|piece| Work::Chunk(at, piece)));
        }
        let real = work.iter().any(|span| !matches!(span, Work::Hole(_)));
        if !real {
            work.clear();
            // The plan's changes must reach the device even when there is nothing to compute.
            if !(plan.moves.is_empty() && plan.tables.is_empty() && plan.copies.is_empty()) {
                work.push_back(Work::Nothing(plan.window.start));
            }
        }
        work
    }

    /// Sends what the step that landed last made.
    fn flush(&mut self) {
        if self.outbox.is_empty() {
            return;
        }
        for (events, event) in self.outbox.drain(..) {
            events.send_made(event, self.made_at);
        }
        self.meters.delivered();
    }

    /// The devices lost their memory: whoever of this lane was in it is told, and the lane starts afresh.
    fn fail_all(&mut self, fault: &DeviceError) {
        self.fail_all_but(fault, Vec::new());
    }

    /// The same; those are about to be taken in.
    fn fail_all_but(&mut self, fault: &DeviceError, but: Vec<Key>) {
        self.flush();
        // Who is over has been told so.
        for live in self.live.drain(..).filter(|live| !live.over) {
            let failure = RequestError::DeviceFailed(fault.to_string());
            live.sequence.events.send(TokenEvent::Failed(failure));
        }
        let lane = self.lane;
        self.turn = Turn { lane, ..Turn::default() };
        self.due.clear();
        self.plan = None;
        self.flights.clear();
        self.epoch = self.neighbours.devices.epoch();
        self.neighbours.prefill_forget.do_send(ForgetBegun { lane, but });
        self.neighbours.kv_reset.do_send(Reset { lane });
    }
}

#[cfg(test)]
mod tests;
