//! Prefill: schedules prompt chunks, and leases the pages of prompts when they start.
//!
//! Owns the admitted requests whose prompts are not complete, and preempted sequences, whose tokens are
//! computed again like a prompt. It issues no device work: the decode loops request chunks. A new sequence
//! goes to the lane with the fewest sequences, and stays there until it ends or is preempted.
//! Invariant: first in, first out, among waiting prompts and among the prompts that started in a lane. A
//! request without enough pages holds back those behind it, and so does an encoder input that exceeds the
//! step's budget: it is computed in one step. A prompt whose next page another one is computing waits for
//! that page and holds back nobody.

mod lanes;

use super::intake::Admit;
use super::kv::PagesChanged;
use super::prefix_rules::PrefixRules;
use super::sequence::{Sequence, SequenceKey};
use super::stream::EventSender;
use crate::config::Policy;
use crate::memory::{NoLease, PageDemand, PagePool, TokenChain};
use crate::telemetry;
use actix::{Actor, AsyncContext, Context, Handler, Message, MessageResult, ResponseFuture, SpawnHandle};
use lanes::LaneState;
use metrics::Counter;
use std::collections::VecDeque;
use std::time::Instant;
use tokio::sync::oneshot;

/// A prompt starts if one of so many pages is left for running sequences.
const MARGIN_DIVISOR: usize = 50;

/// Requests the prefill chunks of a lane's next step.
#[derive(Message)]
#[rtype(result = "Vec<ScheduledChunk>")]
pub struct NextChunks {
    pub lane: usize,
    /// Maximum tokens of all chunks, encoder inputs included. A longer encoder input is scheduled alone, with
    /// the first prompt token after it.
    pub budget: usize,
    /// Running sequences of the lane. With none, the reply is held back until there is work.
    pub running: usize,
    /// Free slots of the lane, without those that beams of running searches will take.
    pub free_slots: usize,
    /// Steps of [`ChunksAhead`] that the lane has in flight.
    pub steps_ahead: usize,
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
/// It keeps its place before sequences that arrived later.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Requeue(pub Box<Sequence>);

/// Replies to the pending requests, after all prompts that became ready at the same time are queued: with no
/// running sequences, requests that arrive together start together.
#[derive(Message)]
#[rtype(result = "()")]
struct ReplyToLanes;

/// A prompt and its progress.
struct QueuedPrompt {
    key: SequenceKey,
    /// The sequence, until the first chunk is scheduled.
    sequence: Option<Box<Sequence>>,
    /// Its tokens, until it has pages; `None` if these are not shared.
    chain: Option<TokenChain>,
    /// Number of slots that it needs.
    slots: usize,
    /// Tokens of the encoder input, until they are scheduled.
    encoder_tokens: usize,
    /// Tokens of the prompt, and those generated before a preemption.
    len: usize,
    /// Tokens of the prompt that are scheduled, or need not be because their K and V are in its pages.
    scheduled: usize,
    events: EventSender,
    ready_at: Instant,
    /// The number [`PagePool::releases`] when there were too few pages for it.
    short_at: Option<u64>,
}

/// The prefill actor.
pub struct Prefill {
    pool: PagePool,
    prefix_rules: PrefixRules,
    /// Pages that are left for running sequences when a prompt starts.
    margin: usize,
    /// Prompts that have not started, in the order of arrival.
    waiting: VecDeque<QueuedPrompt>,
    /// Under [`Policy::Window`], how many of the waiting prompts belong to the current batch; 0 under other
    /// policies.
    released_in_window: usize,
    lanes: Vec<LaneState>,
    policy: Policy,
    slots: usize,
    /// Set while a window is open.
    window_timer: Option<SpawnHandle>,
    queried_tokens: Counter,
    found_tokens: Counter,
}

impl Actor for Prefill {
    type Context = Context<Prefill>;
}

impl Handler<Admit> for Prefill {
    type Result = ();

    fn handle(&mut self, Admit(sequence): Admit, ctx: &mut Self::Context) {
        self.enqueue(sequence);
        ctx.notify(ReplyToLanes);
    }
}

impl Handler<Requeue> for Prefill {
    type Result = ();

    fn handle(&mut self, Requeue(sequence): Requeue, ctx: &mut Self::Context) {
        let key = sequence.key;
        self.lanes.iter_mut().for_each(|lane| lane.started.retain(|prompt| prompt.key != key));
        self.enqueue(sequence);
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
    type Result = ResponseFuture<Vec<ScheduledChunk>>;

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
        MessageResult(self.lanes[lane].continue_prompts(&mut budget))
    }
}

impl Handler<DropStarted> for Prefill {
    type Result = ();

    fn handle(&mut self, DropStarted { lane }: DropStarted, _: &mut Self::Context) {
        self.lanes[lane].reset();
    }
}

impl Prefill {
    /// Creates a prefill without prompts, for `lanes` lanes with `slots` slots in total.
    pub fn new(
        pool: PagePool,
        prefix_rules: PrefixRules,
        policy: Policy,
        (slots, lanes): (usize, usize),
    ) -> Prefill {
        Prefill {
            margin: (pool.total() / MARGIN_DIVISOR).max(1),
            pool,
            prefix_rules,
            waiting: VecDeque::new(),
            released_in_window: 0,
            lanes: (0..lanes).map(|_| LaneState::default()).collect(),
            policy,
            slots,
            window_timer: None,
            queried_tokens: telemetry::PREFIX_CACHE_QUERIES.counter(),
            found_tokens: telemetry::PREFIX_CACHE_HITS.counter(),
        }
    }

    /// Queues a sequence behind those that arrived before it.
    fn enqueue(&mut self, sequence: Box<Sequence>) {
        let (key, request) = (sequence.key, &sequence.request);
        let is_preempted = sequence.progress.is_some();
        let prompt = QueuedPrompt {
            key,
            chain: self.prefix_rules.chain(&sequence, self.pool.page_positions()),
            slots: sequence.slots(),
            encoder_tokens: request.encoder_input.len(),
            len: request.prompt.len() + sequence.generated().len(),
            scheduled: 0,
            events: sequence.events.clone(),
            ready_at: Instant::now(),
            short_at: None,
            sequence: Some(sequence),
        };
        let place = self.waiting.partition_point(|other| other.key < key);
        // A preempted sequence belongs to the batch that it began with.
        let continues = is_preempted && matches!(self.policy, Policy::Window { .. });
        let released = self.released_in_window;
        self.waiting.insert(if continues { place.min(released) } else { place.max(released) }, prompt);
        self.released_in_window += usize::from(continues);
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
        self.release_batch(ctx);
        let chunks = self.schedule_chunks(lane, budget);
        if (running > 0 || !chunks.is_empty())
            && let Some(reply) = self.lanes[lane].pending_reply.take()
        {
            // The decode loop waits for the reply. If it is gone, dropping the reply releases the sequences.
            let _ = reply.send(chunks);
        }
    }

    /// Schedules chunks for a lane within the budget: of prompts that started there, then of the lane's share
    /// of the waiting ones, oldest first.
    fn schedule_chunks(&mut self, lane: usize, mut budget: usize) -> Vec<ScheduledChunk> {
        let mut chunks = self.lanes[lane].continue_prompts(&mut budget);
        let mut share = lanes::lane_share(&self.lanes, lane, self.releasable());
        let mut at = 0;
        while budget > 0 && share > 0 && at < self.releasable() {
            let QueuedPrompt { slots, .. } = self.waiting[at];
            if slots > self.lanes[lane].free_slots
                || self.waiting[at].min_chunk() > budget && !chunks.is_empty()
            {
                break;
            }
            match self.lease_pages(at) {
                Ok(()) => {}
                Err(NoLease::Short) => break,
                Err(NoLease::Coming) => {
                    at += 1;
                    continue;
                }
            }
            let mut prompt = self.waiting.remove(at).expect("the index is within the queue, as seen above");
            chunks.push(prompt.next_chunk(&mut budget));
            self.released_in_window = self.released_in_window.saturating_sub(1);
            share -= 1;
            let lane = &mut self.lanes[lane];
            lane.add_sequence(slots);
            if prompt.remaining() > 0 {
                lane.started.push_back(prompt);
            }
        }
        chunks
    }

    /// Leases the pages of a waiting prompt, with those that hold its first tokens already.
    fn lease_pages(&mut self, at: usize) -> Result<(), NoLease> {
        let prompt = &mut self.waiting[at];
        // Asked before, so that what is released meanwhile counts.
        let releases = self.pool.releases();
        if prompt.short_at == Some(releases) {
            return Err(NoLease::Short);
        }
        let sequence =
            prompt.sequence.as_mut().expect("a waiting prompt has not started; anything else is a bug");
        // All rows of a prompt are scored, once. Otherwise, the last one gives the next token.
        let is_scored = sequence.request.prompt_logprobs.is_some() && sequence.generated().is_empty();
        let reusable = if is_scored { 0 } else { prompt.len.saturating_sub(1) };
        let demand = PageDemand {
            positions: if sequence.positions() == 0 { 0 } else { prompt.len },
            max_positions: sequence.positions(),
            encoder_positions: sequence.encoder_positions(),
            reusable,
            margin: self.margin,
        };
        // What is computed again after a preemption was not asked for again.
        let is_counted = self.prefix_rules.across_requests
            && prompt.chain.is_some()
            && reusable > 0
            && sequence.progress.is_none();
        match self.pool.begin(demand, prompt.chain.take()) {
            Ok(lease) => {
                prompt.scheduled = lease.computed();
                if is_counted {
                    self.queried_tokens.increment(prompt.len as u64);
                    self.found_tokens.increment(lease.computed() as u64);
                }
                sequence.lease = Some(lease);
                Ok(())
            }
            Err((why, chain)) => {
                prompt.chain = chain;
                prompt.short_at = Some(releases).filter(|_| why == NoLease::Short);
                Err(why)
            }
        }
    }

    /// Returns how many of the waiting prompts may start, from the first on.
    fn releasable(&self) -> usize {
        match self.policy {
            Policy::Window { .. } => self.released_in_window,
            Policy::Fused | Policy::Concurrent => self.waiting.len(),
        }
    }

    /// Under [`Policy::Window`], decides whether a batch starts: when all lanes are idle, and the window
    /// since the oldest arrival is over or as many prompts wait as there are slots.
    fn release_batch(&mut self, ctx: &mut Context<Prefill>) {
        let Policy::Window { window } = self.policy else { return };
        let Some(oldest) = self.waiting.front() else { return };
        if self.released_in_window > 0 || !self.lanes.iter().all(LaneState::is_idle) {
            return;
        }
        let waited = oldest.ready_at.elapsed();
        if waited >= window || self.waiting.len() >= self.slots {
            self.released_in_window = self.waiting.len();
        } else if self.window_timer.is_none() {
            self.window_timer = Some(ctx.run_later(window - waited, |act, ctx| {
                act.window_timer = None;
                act.reply_to_all(ctx);
            }));
        }
    }

    /// Drops the prompts of disconnected clients.
    fn drop_cancelled(&mut self) {
        let is_cancelled = |prompt: &QueuedPrompt| prompt.events.is_closed();
        self.released_in_window -=
            self.waiting.iter().take(self.released_in_window).filter(|prompt| is_cancelled(prompt)).count();
        self.waiting.retain(|prompt| !is_cancelled(prompt));
        self.lanes.iter_mut().for_each(|lane| lane.started.retain(|prompt| !is_cancelled(prompt)));
    }
}

impl QueuedPrompt {
    /// Returns the number of tokens to compute, of the encoder input and of the prompt.
    fn remaining(&self) -> usize {
        self.encoder_tokens + self.len - self.scheduled
    }

    /// Returns the size of the smallest possible next chunk: the rest of the encoder input, and one token.
    fn min_chunk(&self) -> usize {
        self.encoder_tokens + (self.len - self.scheduled).min(1)
    }

    /// Returns the next chunk, and deducts its tokens from the budget.
    fn next_chunk(&mut self, budget: &mut usize) -> ScheduledChunk {
        let encoder_tokens = std::mem::take(&mut self.encoder_tokens);
        let (start, left) = (self.scheduled, self.len - self.scheduled);
        let len = left.min(budget.saturating_sub(encoder_tokens).max(1));
        self.scheduled += len;
        *budget = budget.saturating_sub(encoder_tokens + len);
        let chunk = PromptChunk { start, len, last: len == left, with_encoder_input: encoder_tokens > 0 };
        ScheduledChunk { key: self.key, sequence: self.sequence.take(), chunk }
    }
}

#[cfg(test)]
mod tests;
