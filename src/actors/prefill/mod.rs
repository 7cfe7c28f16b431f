//! Prefill: schedules prompt chunks, and reserves the pages of sequences.
//!
//! Owns the admitted requests whose prompts are not complete. It issues no device work: the decode loops
//! request chunks. A new sequence goes to the lane with the fewest sequences, and stays there.
//! Invariant: first in, first out, among waiting prompts and among the prompts that started in a lane. A
//! request that waits for pages holds back those behind it, and so does an encoder input that exceeds the
//! step's budget: it is computed in one step.

mod lanes;

use super::intake::Admit;
use super::kv::{Reserve, Returned};
use super::sequence::{Key, Sequence};
use super::stream::EventSender;
use crate::config::Policy;
use actix::{
    Actor, ActorFutureExt, AsyncContext, Context, Handler, Message, MessageResult, Recipient, ResponseFuture,
    SpawnHandle, WrapFuture,
};
use lanes::Lane;
use std::collections::VecDeque;
use std::time::Instant;
use tokio::sync::oneshot;

/// Requests the prefill chunks of a lane's next step.
#[derive(Message)]
#[rtype(result = "Vec<Chunk>")]
pub struct NextChunk {
    pub lane: usize,
    /// Maximum tokens of all chunks, encoder inputs included. A longer encoder input is scheduled alone, with
    /// the first prompt token after it.
    pub budget: usize,
    /// Running sequences of the lane. With none, the reply is held back until there is work.
    pub live: usize,
    /// Free slots of the lane.
    pub places: usize,
    /// Steps of [`ChunksAhead`] that the lane has in flight.
    pub ahead: usize,
}

/// Requests the chunks of one more step of a lane, beside its iteration's step, because an idle lane leaves
/// the devices underused. The reply comes at once, with chunks of prompts that started in this lane, or none.
#[derive(Message)]
#[rtype(result = "Vec<Chunk>")]
pub struct Ahead {
    pub lane: usize,
    /// Maximum tokens, as in [`NextChunks`].
    pub budget: usize,
    /// Number of such steps that the lane has in flight.
    pub ahead: usize,
}

/// A contiguous part of a prompt, to be computed in the next step.
pub struct Chunk {
    pub key: Key,
    /// The sequence itself, with its first chunk only. Its encoder input, if it has one, is part of that
    /// chunk.
    pub sequence: Option<Box<Sequence>>,
    /// Position of the chunk's first token.
    pub start: usize,
    /// Number of tokens; 0 if the sequence has an encoder input only.
    pub len: usize,
    /// Whether the prompt ends with this chunk.
    pub last: bool,
}

/// Drops the started prompts of a lane that restarts, except those of the sequences in `except`.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ForgetBegun {
    pub lane: usize,
    pub but: Vec<Key>,
}

/// Replies to the pending requests, after all prompts that became ready at the same time are queued: with no
/// running sequences, requests that arrive together start together.
#[derive(Message)]
#[rtype(result = "()")]
struct Answer;

/// A prompt with its pages, and its progress.
struct Prompt {
    key: Key,
    /// The sequence, until the first chunk is scheduled.
    sequence: Option<Box<Sequence>>,
    /// Tokens of the encoder input, until they are scheduled.
    source: usize,
    /// Tokens of the prompt.
    /// Tokens of the prompt that are scheduled.
    len: usize,
    done: usize,
    events: EventSender,
    ready: Instant,
}

/// The prefill actor.
pub struct Prefill {
    kv: Recipient<Reserve>,
    returned: Recipient<Returned>,
    /// Prompts that have not started, in the order of arrival.
    line: VecDeque<Prompt>,
    /// Under [`Policy::Window`], how many of the waiting prompts belong to the current batch; 0 under other
    /// policies.
    batch: usize,
    lanes: Vec<Lane>,
    policy: Policy,
    slots: usize,
    /// Set while a window is open.
    timer: Option<SpawnHandle>,
}

impl Actor for Prefill {
    type Context = Context<Prefill>;
}

impl Handler<Admit> for Prefill {
    type Result = ();

    fn handle(&mut self, Admit(mut sequence): Admit, ctx: &mut Self::Context) {
        let reserve = Reserve {
            positions: sequence.positions(),
            source: sequence.source_positions(),
            client: sequence.events.clone(),
        };
        let reply = self.kv.send(reserve).into_actor(self).map(move |lease, act, ctx| {
            if let Ok(Some(lease)) = lease {
                sequence.lease = Some(lease);
                act.enqueue(sequence);
                ctx.notify(Answer);
            }
        });
        ctx.spawn(reply);
    }
}

impl Handler<Answer> for Prefill {
    type Result = ();

    fn handle(&mut self, _: Answer, ctx: &mut Self::Context) {
        self.answer_all(ctx);
    }
}

impl Handler<NextChunk> for Prefill {
    type Result = ResponseFuture<Vec<Chunk>>;

    fn handle(&mut self, msg: NextChunk, ctx: &mut Self::Context) -> Self::Result {
        let (tx, rx) = oneshot::channel();
        let lane = msg.lane;
        self.lanes[lane].hold(msg, tx);
        match self.lanes[lane].rests() {
            // This may be the last lane that an open window waited for.
            true => self.answer_all(ctx),
            false => self.answer(lane, ctx),
        }
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<Ahead> for Prefill {
    type Result = MessageResult<Ahead>;

    fn handle(
        &mut self,
        Ahead { lane, mut budget, ahead: steps_ahead }: Ahead,
        _: &mut Self::Context,
    ) -> Self::Result {
        self.drop_gone();
        self.lanes[lane].ahead = steps_ahead;
        if !lanes::may_go_ahead(&self.lanes, lane) {
            return MessageResult(Vec::new());
        }
        self.lanes[lane].ahead += 1;
        MessageResult(self.lanes[lane].go_on(&mut budget))
    }
}

impl Handler<ForgetBegun> for Prefill {
    type Result = ();

    fn handle(&mut self, ForgetBegun { lane, but: except }: ForgetBegun, _: &mut Self::Context) {
        self.lanes[lane].forget(&except);
    }
}

impl Prefill {
    /// Creates a prefill without prompts, for `lanes` lanes with `slots` slots in total.
    pub fn new(
        kv_reserve: Recipient<Reserve>,
        kv_returned: Recipient<Returned>,
        policy: Policy,
        slots: usize,
        lanes: usize,
    ) -> Prefill {
        Prefill {
            kv: kv_reserve,
            returned: kv_returned,
            line: VecDeque::new(),
            batch: 0,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            policy,
            slots,
            timer: None,
        }
    }

    /// Queues a sequence behind those that arrived before it.
    fn enqueue(&mut self, sequence: Box<Sequence>) {
        let key = sequence.key;
        let prompt = Prompt {
            key,
            source: sequence.request.source.len(),
            len: sequence.request.prompt.len(),
            done: 0,
            events: sequence.events.clone(),
            ready: Instant::now(),
            sequence: Some(sequence),
        };
        let place = self.line.partition_point(|other| other.key < key);
        self.line.insert(place.max(self.batch), prompt);
    }

    /// Replies to every lane that waits for work.
    fn answer_all(&mut self, ctx: &mut Context<Prefill>) {
        for lane in 0..self.lanes.len() {
            self.answer(lane, ctx);
        }
    }

    /// Replies to the lane's request, unless the lane has no sequences and there is no work.
    fn answer(&mut self, lane: usize, ctx: &mut Context<Prefill>) {
        let Some((request, _)) = &self.lanes[lane].held else { return };
        let (budget, running) = (request.budget, request.live);
        self.drop_gone();
        self.release(ctx);
        let chunks = self.chunks(lane, budget);
        if (running > 0 || !chunks.is_empty())
            && let Some((_, reply)) = self.lanes[lane].held.take()
        {
            // The decode loop waits for the reply. If it is gone, dropping the reply releases the sequences.
            let _ = reply.send(chunks);
        }
    }

    /// Schedules chunks for a lane within the budget: of prompts that started there, then of the lane's share
    /// of the waiting ones, oldest first.
    fn chunks(&mut self, lane: usize, mut budget: usize) -> Vec<Chunk> {
        let mut chunks = self.lanes[lane].go_on(&mut budget);
        let mut share = lanes::share(&self.lanes, lane, self.released());
        while budget > 0 && share > 0 {
            let prompt = &self.line[0];
            if prompt.least() > budget && !chunks.is_empty() {
                break;
            }
            let mut prompt = self.line.pop_front().expect("the queue is not empty, as seen above");
            chunks.push(prompt.advance(&mut budget));
            self.batch = self.batch.saturating_sub(1);
            share -= 1;
            let lane = &mut self.lanes[lane];
            lane.begin();
            if prompt.left() > 0 {
                lane.begun.push_back(prompt);
            }
        }
        chunks
    }

    /// Returns how many of the waiting prompts may start, from the first on.
    fn released(&self) -> usize {
        match self.policy {
            Policy::Window { .. } => self.batch,
            Policy::Fused | Policy::Concurrent => self.line.len(),
        }
    }

    /// Under [`Policy::Window`], decides whether a batch starts: when all lanes are idle, and the window
    /// since the oldest arrival is over or as many prompts wait as there are slots.
    fn release(&mut self, ctx: &mut Context<Prefill>) {
        let Policy::Window { window } = self.policy else { return };
        let Some(oldest) = self.line.front() else { return };
        if self.batch > 0 || !self.lanes.iter().all(Lane::rests) {
            return;
        }
        let waited = oldest.ready.elapsed();
        if waited >= window || self.line.len() >= self.slots {
            self.batch = self.line.len();
        } else if self.timer.is_none() {
            self.timer = Some(ctx.run_later(window - waited, |act, ctx| {
                act.timer = None;
                act.answer_all(ctx);
            }));
        }
    }

    /// Drops the prompts of disconnected clients.
    fn drop_gone(&mut self) {
        let gone = |prompt: &Prompt| prompt.events.is_closed();
        let before = self.prompts();
        self.batch -= self.line.iter().take(self.batch).filter(|prompt| gone(prompt)).count();
        self.line.retain(|prompt| !gone(prompt));
        self.lanes.iter_mut().for_each(|lane| lane.begun.retain(|prompt| !gone(prompt)));
        if self.prompts() < before {
            self.returned.do_send(Returned);
        }
    }

    /// Returns the number of prompts that are not complete.
    fn prompts(&self) -> usize {
        self.line.len() + self.lanes.iter().map(|lane| lane.begun.len()).sum::<usize>()
    }
}

impl Prompt {
    /// Returns the number of tokens to compute, of the encoder input and of the prompt.
    fn left(&self) -> usize {
        self.source + self.len - self.done
    }

    /// Returns the size of the smallest possible next chunk: the rest of the encoder input, and one token.
    fn least(&self) -> usize {
        self.source + (self.len - self.done).min(1)
    }

    /// Returns the next chunk, and deducts its tokens from the budget.
    fn advance(&mut self, budget: &mut usize) -> Chunk {
        let encoder_tokens = std::mem::take(&mut self.source);
        let (start, left) = (self.done, self.len - self.done);
        let len = left.min(budget.saturating_sub(encoder_tokens).max(1));
        self.done += len;
        *budget = budget.saturating_sub(encoder_tokens + len);
        Chunk { key: self.key, sequence: self.sequence.take(), start, len, last: len == left }
    }
}

#[cfg(test)]
mod tests;
