//! The decode loop: one turn makes one token for every live sequence, in one fused pass.
//!
//! Owns the live sequences, from their first chunk to their end, and is the only one to issue device work.
//! Never waits for a client, never sees text, never decides who gets a slot.
//! A text for a lone encoder is a sequence of one step: it takes a slot and no pages, and leaves with its answer.
//! Invariant: a sequence is dropped only between two steps, so no step in flight names its slot or pages.

mod live;

mod fill;

mod settle;

use super::device::Step;
use super::group::Group;
use super::kv::{Join, Plan, Reset, Turn};
use super::meters::Meters;
use super::prefill::{Chunk, ForgetBegun, NextChunk};
use super::sequence::Key;
use super::status::Status;
use super::stream::EventSender;
use crate::config::Policy;
use crate::request::{RequestError, TokenEvent};
use actix::{Actor, AsyncContext, Context, Recipient, WrapFuture};
use futures_util::FutureExt;
use live::{Live, Piece};
use mainstem_kernels::batch::Slot;
use mainstem_kernels::{DeviceError, StepLimits};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;
use tracing::error;

/// What the loop works with.
#[derive(Clone)]
pub struct Neighbours {
    pub prefill_next: Recipient<NextChunk>,
    pub prefill_forget: Recipient<ForgetBegun>,
    pub kv_turn: Recipient<Turn>,
    pub kv_reset: Recipient<Reset>,
    pub group: Arc<Group>,
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
}

/// The actor. It only keeps the loop alive; the loop pulls everything it needs.
pub struct Decode {
    neighbours: Neighbours,
    config: DecodeConfig,
}

impl Actor for Decode {
    type Context = Context<Decode>;

    fn started(&mut self, ctx: &mut Self::Context) {
        let (neighbours, config) = (self.neighbours.clone(), self.config.clone());
        ctx.spawn(keep_turning(neighbours, config).into_actor(self));
    }
}

impl Decode {
    pub fn new(neighbours: Neighbours, config: DecodeConfig) -> Decode {
        Decode { neighbours, config }
    }
}

/// Runs the loop, and runs it again if a bug of ours ends it: the sequences it had are lost (their closed
/// channels tell their clients), the service is not. Without its neighbours it cannot go on.
async fn keep_turning(neighbours: Neighbours, config: DecodeConfig) {
    loop {
        let main_stem = MainStem::new(neighbours.clone(), config.clone());
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
            Err(_) => error!("the decode loop panicked; this is a bug. It starts again, empty"),
        }
        neighbours.prefill_forget.do_send(ForgetBegun);
        neighbours.kv_reset.do_send(Reset);
    }
}

/// The loop's state.
struct MainStem {
    neighbours: Neighbours,
    config: DecodeConfig,
    /// In the order of their slots; who joins this turn, at the end until the plan has told.
    live: Vec<Live>,
    /// What kv has to hear at the next turn.
    turn: Turn,
    /// Events made by the last step, sent while the next one runs.
    outbox: Vec<(EventSender, TokenEvent)>,
    /// When they were made.
    made_at: Instant,
    /// Who waits for the wanted rows of the step being built or run, row by row.
    wanted: Vec<Wanted>,
    /// Who is answered whole by that step: lone encoders' sequences, by their places among the live, in row order.
    whole: Vec<usize>,
    /// The step that is not travelling.
    spare: Option<Box<Step>>,
    meters: Meters,
}

/// What a wanted row's result is for. Sequences are named by their place among the live.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wanted {
    /// The next token of a sequence.
    Next(usize),
    /// The log-probability of a prompt token.
    PromptToken(usize),
    /// What fits at a place of a sequence's source.
    Place(usize),
    /// Nobody: a hole of the window.
    Nobody,
}

/// One span of a step, or a prompt's with its source's; sequences as in [`Wanted`].
#[derive(Clone, Copy, Debug)]
enum Work {
    Next(usize),
    Chunk(usize, Piece),
    Hole(Slot),
}

impl MainStem {
    fn new(neighbours: Neighbours, config: DecodeConfig) -> MainStem {
        MainStem {
            neighbours,
            live: Vec::with_capacity(config.limits.slots),
            turn: Turn::default(),
            outbox: Vec::new(),
            made_at: Instant::now(),
            wanted: Vec::with_capacity(config.limits.rows),
            whole: Vec::with_capacity(config.limits.slots),
            spare: Some(Box::new(Step::with_capacity(&config.limits))),
            meters: Meters::new(),
            config,
        }
    }

    /// Each pass: who left, what is new, where everything is, one step, what came of it. Ends when a
    /// neighbour is gone, which is when the engine stops.
    async fn turn_forever(mut self) {
        loop {
            self.drop_gone();
            let Some(chunks) = self.next_chunks().await else { return };
            self.take_in(chunks);
            let Some(plan) = self.next_plan().await else { return };
            if let Err(fault) = self.run(plan).await {
                self.fail_all(&fault);
            }
        }
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

    /// Asks prefill for prompt chunks. With nothing live this waits until there is work. It is asked
    /// between two steps and not during one, so that who arrives during a step joins the very next.
    async fn next_chunks(&mut self) -> Option<Vec<Chunk>> {
        if self.live.is_empty() {
            self.flush();
            // Slots must be free, and pages seen to be, before anything is waited for.
            let plan = self.next_plan().await?;
            assert!(
                plan.moves.is_empty() && plan.tables.is_empty(),
                "without sequences nothing changes place"
            );
        }
        let decoding = self.live.iter().filter(|live| live.generated > 0).count();
        let (budget, live) = (self.config.token_budget - decoding, self.live.len());
        let chunks = self.neighbours.prefill_next.send(NextChunk { budget, live }).await.ok();
        self.neighbours.status.beat();
        if live == 0 {
            self.meters.woke();
        }
        chunks
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
            }
        }
    }

    /// Tells kv who left and who joins; hears where everybody is.
    async fn next_plan(&mut self) -> Option<Plan> {
        self.neighbours.kv_turn.send(std::mem::take(&mut self.turn)).await.ok()
    }

    /// Runs the turn's step (under [`Policy::Concurrent`] one for each sequence) and settles its results.
    async fn run(&mut self, plan: Plan) -> Result<(), DeviceError> {
        self.place(&plan.slots);
        let work = self.work(&plan);
        let per_step = match self.config.policy {
            Policy::Concurrent => 1,
            Policy::Fused | Policy::Window { .. } => work.len().max(1),
        };
        let mut plan = Some(plan);
        for spans in work.chunks(per_step) {
            let mut step =
                self.spare.take().unwrap_or_else(|| Box::new(Step::with_capacity(&self.config.limits)));
            self.fill(&mut step.batch, plan.take(), spans);
            let size = fill::size(&step.batch);
            let running = self.neighbours.group.send(step);
            let sent = self.meters.sent();
            self.flush();
            self.meters.delivered();
            let ran = running.await;
            ran.result?;
            self.made_at = self.meters.ran(sent, ran.step.output.times, size);
            self.settle(&ran.step.output);
            self.meters.settled();
            self.spare = Some(ran.step);
        }
        Ok(())
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
    fn work(&mut self, plan: &Plan) -> Vec<Work> {
        let mut work = Vec::with_capacity(plan.window.len() + self.live.len());
        let mut next = plan.window.start;
        for (at, live) in self.live.iter().enumerate() {
            // With the shuffle off, holes are computed and their results dropped: the papers' baseline.
            work.extend((next..live.slot).map(Work::Hole));
            next = live.slot + 1;
            if live.generated > 0 {
                work.push(Work::Next(at));
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
                work.push(Work::Hole(plan.window.start));
            }
        }
        work
    }

    /// Sends what the last step made.
    fn flush(&mut self) {
        for (events, event) in self.outbox.drain(..) {
            events.send_made(event, self.made_at);
        }
    }

    /// The device lost its memory: whoever was in it is told, and everybody starts afresh.
    fn fail_all(&mut self, fault: &DeviceError) {
        self.flush();
        // Who is over has been told so.
        for live in self.live.drain(..).filter(|live| !live.over) {
            let failure = RequestError::DeviceFailed(fault.to_string());
            live.sequence.events.send(TokenEvent::Failed(failure));
        }
        self.turn = Turn::default();
        self.wanted.clear();
        self.whole.clear();
        self.neighbours.prefill_forget.do_send(ForgetBegun);
        self.neighbours.kv_reset.do_send(Reset);
    }
}
