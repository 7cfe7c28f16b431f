//! Prefill: begins sequences when a lane's next step can, schedules prompt chunks, and leases the pages of
//! prompts when they start.
//!
//! Takes sequences out of the queue, and owns those whose prompts are not complete. The tokens of preempted
//! ones are computed again like a prompt. It issues no device work: the decode loops request chunks. A new
//! sequence goes to the lane with the fewest sequences, and stays there until it ends or is preempted. The
//! queue decides who is next, and a step's budget goes to the prompts in the same order, whether they have
//! started or not: a long prompt does not keep those of other clients waiting. For want of slots or pages,
//! the next sequence may take them from others, which go back into the queue.
//! Invariant: of one client, first in, first out, among waiting prompts and among the prompts that started in
//! a lane. The next sequence, if it lacks slots or pages, lets other clients pass for a while, and then holds
//! back those behind it, and so does an encoder input that exceeds the step's budget: it is computed in one
//! step, and so is an opening ([`mainstem_kernels::Span::is_opening`]). A prompt whose next page another one
//! is computing waits for that page and holds back nobody.

mod begin;
mod lanes;

use super::account::{Account, ChargedTokens};
use super::kv::PagesChanged;
use super::prefix_rules::PrefixRules;
use super::queue::{Candidate, FairQueue, Preemptible, QueueChanged, Reason, SharedQueue, Skipped, Turn};
use super::sequence::{Sequence, SequenceKey};
use super::stream::EventSender;
use crate::config::Policy;
use crate::memory::PagePool;
use crate::request::Class;
use crate::telemetry;
use actix::{Actor, AsyncContext, Context, Handler, Message, MessageResult, ResponseFuture, SpawnHandle};
use begin::{Begin, Victim};
use lanes::LaneState;
use mainstem_kernels::StepLimits;
use metrics::Counter;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// A prompt starts if one of so many pages is left for running sequences.
const MARGIN_DIVISOR: usize = 50;

/// Maximum number of clients whose next sequences are passed in a step, because they lack slots or pages.
const PASSED_MAX: usize = 8;

/// Requests the prefill chunks of a lane's next step.
#[derive(Message)]
#[rtype(result = "ScheduledWork")]
pub struct NextChunks {
    pub lane: usize,
    /// Maximum tokens of all chunks, encoder inputs included. A longer encoder input is scheduled alone, with
    /// the first prompt token after it.
    pub budget: Budget,
    /// Running sequences of the lane. With none, the reply is held back until there is work.
    pub running: usize,
    /// Free slots of the lane, without those that beams of running searches will take.
    pub free_slots: usize,
    /// Steps of [`ChunksAhead`] that the lane has in flight.
    pub steps_ahead: usize,
    /// Running sequences that may be preempted for others.
    pub preemptible: Vec<Preemptible>,
}

/// Maximum prompt tokens of a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Budget {
    /// For all prompts.
    pub all: usize,
    /// For interactive prompts, beside which others get what is left of `all`.
    pub interactive: usize,
}

impl Budget {
    /// Returns what is left for prompts of a class after `used` tokens.
    fn left(&self, class: Class, used: usize) -> usize {
        let budget = match class {
            Class::Interactive => self.interactive.max(self.all),
            Class::Batch => self.all,
        };
        budget.saturating_sub(used)
    }
}

impl From<usize> for Budget {
    fn from(tokens: usize) -> Budget {
        Budget { all: tokens, interactive: tokens }
    }
}

/// The prefill chunks of a lane's next step.
#[derive(Default)]
pub struct ScheduledWork {
    pub chunks: Vec<ScheduledChunk>,
    /// Running sequences that give up their slots and pages before the new ones get theirs.
    pub preempted: Vec<SequenceKey>,
}

/// Requests the chunks of one more step of a lane, beside its iteration's step, because an idle lane leaves
/// the devices underused. The reply comes at once, with chunks of prompts that started in this lane, or none.
#[derive(Message)]
#[rtype(result = "Vec<ScheduledChunk>")]
pub struct ChunksAhead {
    pub lane: usize,
    /// Maximum tokens, as in [`NextChunks`].
    pub budget: usize,
    /// Number of such steps that the lane has in flight.
    pub steps_ahead: usize,
}

/// A chunk of a sequence's prompt, to be computed in the next step.
pub struct ScheduledChunk {
    pub key: SequenceKey,
    /// The sequence itself, with its first chunk only.
    pub sequence: Option<Box<Sequence>>,
    pub chunk: PromptChunk,
}

/// A contiguous part of a prompt; of a preempted sequence, of its prompt and generated tokens.
#[derive(Clone, Copy, Debug)]
pub struct PromptChunk {
    /// Position of the chunk's first token.
    pub start: usize,
    /// Number of tokens; 0 if the sequence has an encoder input only.
    pub len: usize,
    /// Whether the prompt ends with this chunk.
    pub last: bool,
    /// Whether the sequence's encoder input is computed in the same step, before the chunk.
    pub with_encoder_input: bool,
}

/// Drops the started prompts of a lane that restarts.
#[derive(Message)]
#[rtype(result = "()")]
pub struct DropStarted {
    pub lane: usize,
}

/// Hands back a sequence that was preempted, or that had not begun when a fault lost what its pages shared.
/// It keeps its place before sequences of its client that arrived later.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Requeue(pub Box<Sequence>);

/// Replies to the pending requests, after all prompts that became ready at the same time are queued: with no
/// running sequences, requests that arrive together start together.
#[derive(Message)]
#[rtype(result = "()")]
struct ReplyToLanes;

/// A prompt that has started, and its progress.
struct StartedPrompt {
    key: SequenceKey,
    class: Class,
    priority: i32,
    account: Arc<Account>,
    /// Tokens of the encoder input, until they are scheduled.
    encoder_tokens: usize,
    /// Tokens of the opening, which is the first chunk; 0 without one.
    opening: usize,
    /// Tokens of the encoder input.
    encoder_len: usize,
    /// Tokens of the prompt, and those generated before a preemption.
    len: usize,
    /// Tokens of the prompt that are scheduled, or need not be because their K and V are in its pages.
    scheduled: usize,
    /// The tokens that its client was charged for.
    charged: ChargedTokens,
    /// Whether it gives up its slot, and comes back through the queue.
    is_leaving: bool,
    events: EventSender,
}

/// The prefill actor.
pub struct Prefill {
    pool: PagePool,
    prefix_rules: PrefixRules,
    /// Pages that are left for running sequences when a prompt starts.
    margin: usize,
    /// Sequences that have not begun.
    queue: SharedQueue,
    lanes: Vec<LaneState>,
    policy: Policy,
    limits: StepLimits,
    /// Set while a window is open.
    window_timer: Option<SpawnHandle>,
    queried_tokens: Counter,
    found_tokens: Counter,
    /// Preemptions, for a class and for a share.
    preemptions: [Counter; 2],
    /// Sequences that give up their pages for the next one when their lanes request work.
    yielding: Vec<Victim>,
    /// The sequence that they give them up for.
    yields_for: Option<Candidate>,
}

impl Actor for Prefill {
    type Context = Context<Prefill>;
}

impl Handler<QueueChanged> for Prefill {
    type Result = ();

    fn handle(&mut self, _: QueueChanged, ctx: &mut Self::Context) {
        ctx.notify(ReplyToLanes);
    }
}

impl Handler<Requeue> for Prefill {
    type Result = ();

    fn handle(&mut self, Requeue(sequence): Requeue, ctx: &mut Self::Context) {
        let key = sequence.key;
        self.lanes.iter_mut().for_each(|lane| lane.started.retain(|prompt| prompt.key != key));
        let Sequence { request, charged, .. } = &*sequence;
        if !sequence.generated().is_empty() {
            // They were charged for as they were generated.
            charged.raise(0, request.input_tokens() + sequence.generated().len());
        }
        let mut queue = self.queue.lock();
        queue.push_again(sequence, Instant::now());
        queue.report();
        ctx.notify(ReplyToLanes);
    }
}

impl Handler<PagesChanged> for Prefill {
    type Result = ();

    fn handle(&mut self, _: PagesChanged, ctx: &mut Self::Context) {
        self.reply_to_all(ctx);
    }
}

impl Handler<ReplyToLanes> for Prefill {
    type Result = ();

    fn handle(&mut self, _: ReplyToLanes, ctx: &mut Self::Context) {
        self.reply_to_all(ctx);
    }
}

impl Handler<NextChunks> for Prefill {
    type Result = ResponseFuture<ScheduledWork>;

    fn handle(&mut self, msg: NextChunks, ctx: &mut Self::Context) -> Self::Result {
        let (tx, rx) = oneshot::channel();
        let lane = msg.lane;
        self.lanes[lane].set_request(msg, tx);
        match self.lanes[lane].is_idle() {
            // This may be the last lane that an open window waited for.
            true => self.reply_to_all(ctx),
            false => self.reply_to_lane(lane, ctx),
        }
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<ChunksAhead> for Prefill {
    type Result = MessageResult<ChunksAhead>;

    fn handle(
        &mut self,
        ChunksAhead { lane, mut budget, steps_ahead }: ChunksAhead,
        _: &mut Self::Context,
    ) -> Self::Result {
        self.drop_cancelled();
        self.lanes[lane].steps_ahead = steps_ahead;
        if !lanes::may_send_ahead(&self.lanes, lane) {
            return MessageResult(Vec::new());
        }
        self.lanes[lane].steps_ahead += 1;
        let mut chunks = Vec::new();
        while budget > 0
            && let Some((at, _)) = self.lanes[lane].first_started()
        {
            chunks.push(self.lanes[lane].continue_prompt(at, &mut budget));
        }
        MessageResult(chunks)
    }
}

impl Handler<DropStarted> for Prefill {
    type Result = ();

    fn handle(&mut self, DropStarted { lane }: DropStarted, _: &mut Self::Context) {
        self.lanes[lane].reset();
    }
}

impl Prefill {
    /// Creates a prefill that takes sequences from `queue`, for `lanes` lanes with the slots of the limits in
    /// total.
    pub fn new(
        queue: SharedQueue,
        pool: PagePool,
        prefix_rules: PrefixRules,
        policy: Policy,
        limits: StepLimits,
        lanes: usize,
    ) -> Prefill {
        Prefill {
            margin: (pool.total() / MARGIN_DIVISOR).max(1),
            pool,
            prefix_rules,
            queue,
            lanes: (0..lanes).map(|_| LaneState::default()).collect(),
            policy,
            limits,
            window_timer: None,
            queried_tokens: telemetry::PREFIX_CACHE_QUERIES.counter(),
            found_tokens: telemetry::PREFIX_CACHE_HITS.counter(),
            yielding: Vec::new(),
            yields_for: None,
            preemptions: [Reason::Class, Reason::Share]
                .map(|reason| telemetry::PREEMPTIONS.counter_with([reason.name()])),
        }
    }

    /// Replies to every lane that waits for work.
    fn reply_to_all(&mut self, ctx: &mut Context<Prefill>) {
        for lane in 0..self.lanes.len() {
            self.reply_to_lane(lane, ctx);
        }
    }

    /// Replies to the lane's request, unless the lane has no sequences and there is no work.
    fn reply_to_lane(&mut self, lane: usize, ctx: &mut Context<Prefill>) {
        let LaneState { budget, running, pending_reply: Some(_), .. } = self.lanes[lane] else { return };
        self.drop_cancelled();
        let shared = self.queue.clone();
        let mut queue = shared.lock();
        self.release_batch(&mut queue, ctx);
        let work = self.schedule(&mut queue, lane, budget);
        if (running > 0 || !work.chunks.is_empty())
            && let Some(reply) = self.lanes[lane].pending_reply.take()
        {
            // The decode loop waits for the reply. If it is gone, dropping the reply releases the sequences.
            let _ = reply.send(work);
        }
        queue.report();
    }

    /// Schedules chunks for a lane within the budget: of prompts that started there, and of the lane's share
    /// of the waiting ones, those whose turn comes first. Started ones precede waiting ones of the same turn.
    fn schedule(&mut self, queue: &mut FairQueue, lane: usize, budget: Budget) -> ScheduledWork {
        let only_released = self.only_released();
        let waiting = if only_released { queue.released() } else { queue.ready() };
        let first_slots = queue.first(&Skipped::default(), only_released).map_or(1, |next| next.slots);
        let mut share = lanes::lane_share(&self.lanes, lane, waiting, first_slots);
        let (mut work, mut used) = (ScheduledWork::default(), 0);
        self.take_yielding(queue, lane, &mut work);
        // What lacks slots or pages holds back those of other classes and priorities.
        let (mut skipped, mut may_begin, mut passed) = (Skipped::default(), true, None);
        loop {
            let started = self.lanes[lane].first_started();
            let next = if may_begin { queue.first(&skipped, only_released) } else { None };
            let next = next.filter(|next| {
                started.is_none_or(|(_, turn)| next.turn < turn)
                    && passed.is_none_or(|rank| rank == next.turn.rank())
            });
            let turn = next.map(|next| next.turn).or(started.map(|(_, turn)| turn));
            let Some(turn) = turn else { break };
            let mut left = budget.left(turn.class, used);
            if left == 0 {
                break;
            }
            let before = left;
            match (next, started) {
                (Some(next), _) => match self.begin(queue, (lane, &mut share), &next, &mut left, &mut work) {
                    Begin::Begun => {}
                    Begin::AwaitsPage => _ = skipped.sequences.insert(next.place.key),
                    Begin::Lacks => {
                        may_begin = !only_released
                            && skipped.clients.len() < PASSED_MAX
                            && queue.may_be_passed(&next);
                        skipped.clients.insert(next.client);
                        passed = Some(next.turn.rank());
                    }
                    Begin::NotHere => may_begin = false,
                },
                (None, Some((at, _))) => {
                    let chunk = self.lanes[lane].continue_prompt(at, &mut left);
                    work.chunks.push(chunk);
                }
                (None, None) => break,
            }
            used += before - left;
        }
        work
    }

    /// Whether only sequences of the current batch may begin.
    fn only_released(&self) -> bool {
        match self.policy {
            Policy::Window { .. } => true,
            Policy::Fused | Policy::Concurrent => false,
        }
    }

    /// Under [`Policy::Window`], decides whether a batch starts: when all lanes are idle, and the window
    /// since the oldest arrival is over or as many prompts wait as there are slots.
    fn release_batch(&mut self, queue: &mut FairQueue, ctx: &mut Context<Prefill>) {
        let Policy::Window { window } = self.policy else { return };
        let Some(oldest) = queue.oldest() else { return };
        if queue.released() > 0 || !self.lanes.iter().all(LaneState::is_idle) {
            return;
        }
        let waited = oldest.elapsed();
        if waited >= window || queue.len() >= self.limits.slots {
            queue.release_batch();
        } else if self.window_timer.is_none() {
            self.window_timer = Some(ctx.run_later(window - waited, |act, ctx| {
                act.window_timer = None;
                act.reply_to_all(ctx);
            }));
        }
    }

    /// Drops the prompts of disconnected clients.
    fn drop_cancelled(&mut self) {
        let is_cancelled = |prompt: &StartedPrompt| prompt.events.is_closed();
        self.lanes.iter_mut().for_each(|lane| lane.started.retain(|prompt| !is_cancelled(prompt)));
    }
}

impl StartedPrompt {
    /// Returns the number of tokens to compute, of the encoder input and of the prompt.
    fn remaining(&self) -> usize {
        self.encoder_tokens + self.len - self.scheduled
    }

    fn turn(&self) -> Turn {
        Turn { class: self.class, priority: self.priority, served: self.account.served() }
    }

    /// Returns the next chunk, deducts its tokens from the budget, and charges the client for those that it
    /// was not charged for.
    fn next_chunk(&mut self, budget: &mut usize) -> ScheduledChunk {
        let encoder_tokens = std::mem::take(&mut self.encoder_tokens);
        let (start, left) = (self.scheduled, self.len - self.scheduled);
        let len = match start {
            // Its length follows from the prompt alone, because its rows have an arithmetic of their own.
            0 if self.opening > 0 => self.opening,
            _ => left.min(budget.saturating_sub(encoder_tokens).max(1)),
        };
        self.scheduled += len;
        // A prompt has one chunk in a step.
        let is_cut = start == 0 && self.opening > 0 && len < left;
        *budget = if is_cut { 0 } else { budget.saturating_sub(encoder_tokens + len) };
        let end = self.encoder_len + self.scheduled;
        self.account.charge_prompt(self.charged.raise(end - len - encoder_tokens, end));
        let chunk = PromptChunk { start, len, last: len == left, with_encoder_input: encoder_tokens > 0 };
        ScheduledChunk { key: self.key, sequence: None, chunk }
    }
}

#[cfg(test)]
mod tests;
