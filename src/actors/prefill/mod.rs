//! Prefill: describes the work on prompts, and obtains the pages for it.
//!
//! Owns the admitted requests whose prompts are not through. Never issues device work: decode pulls.
//! Who begins goes to the lane with the fewest sequences, and stays there.
//! Invariant: first in, first out, among those that wait and among those that began in a lane. A request short of pages
//! holds back those behind it, and so does a source that the step has no room for: it goes in one piece.

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

/// Asks for the prompt chunks of a lane's next step.
#[derive(Message)]
#[rtype(result = "Vec<Chunk>")]
pub struct NextChunk {
    pub lane: usize,
    /// Tokens of all chunks together, sources included, at most; a source that is longer goes alone, with the
    /// first token after it.
    pub budget: usize,
    /// Sequences in the lane. With none, the answer is held until there is work.
    pub live: usize,
    /// Sequences that the lane has slots for beside them.
    pub places: usize,
    /// Steps that the lane has in flight by [`Ahead`].
    pub ahead: usize,
}

/// Asks for the chunks of one more step of a lane, beside its turn's, for a lane that rests leaves room for it on the
/// devices. Answered at once, with chunks of prompts that began in this lane, or none.
#[derive(Message)]
#[rtype(result = "Vec<Chunk>")]
pub struct Ahead {
    pub lane: usize,
    /// As in [`NextChunk`].
    pub budget: usize,
    /// Such steps that the lane has in flight.
    pub ahead: usize,
}

/// A run of a prompt's tokens to be computed in the next step.
pub struct Chunk {
    pub key: Key,
    /// The sequence itself comes with its first chunk, and its source, if it has one, is part of that.
    pub sequence: Option<Box<Sequence>>,
    /// Position of the first token.
    pub start: usize,
    /// 0 where the source is all there is.
    pub len: usize,
    /// The prompt ends with this chunk.
    pub last: bool,
}

/// A lane starts afresh: chunks of sequences that had begun in it will not follow, but of these.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ForgetBegun {
    pub lane: usize,
    pub but: Vec<Key>,
}

/// Answers the questions at hand, once whoever is ready in the same moment is in the line too: with nothing live, what
/// comes together starts together.
#[derive(Message)]
#[rtype(result = "()")]
struct Answer;

/// A prompt with its pages, and how far it has come.
struct Prompt {
    key: Key,
    /// Until the first chunk goes out.
    sequence: Option<Box<Sequence>>,
    /// Tokens of the source that are still to be computed.
    source: usize,
    /// Tokens of the prompt, and how many of them are done.
    len: usize,
    done: usize,
    events: EventSender,
    ready: Instant,
}

/// The actor.
pub struct Prefill {
    kv: Recipient<Reserve>,
    returned: Recipient<Returned>,
    /// Those that have not begun, in the order of arrival.
    line: VecDeque<Prompt>,
    /// Under [`Policy::Window`], how many of them are of the batch at hand. Else none are.
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
            // It may be the last of them, for which a window waited.
            true => self.answer_all(ctx),
            false => self.answer(lane, ctx),
        }
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<Ahead> for Prefill {
    type Result = MessageResult<Ahead>;

    fn handle(&mut self, Ahead { lane, mut budget, ahead }: Ahead, _: &mut Self::Context) -> Self::Result {
        self.drop_gone();
        self.lanes[lane].ahead = ahead;
        if !lanes::may_go_ahead(&self.lanes, lane) {
            return MessageResult(Vec::new());
        }
        self.lanes[lane].ahead += 1;
        MessageResult(self.lanes[lane].go_on(&mut budget))
    }
}

impl Handler<ForgetBegun> for Prefill {
    type Result = ();

    fn handle(&mut self, ForgetBegun { lane, but }: ForgetBegun, _: &mut Self::Context) {
        self.lanes[lane].forget(&but);
    }
}

impl Prefill {
    /// A prefill with nothing to do, for so many lanes with so many slots together.
    pub fn new(
        kv: Recipient<Reserve>,
        returned: Recipient<Returned>,
        policy: Policy,
        slots: usize,
        lanes: usize,
    ) -> Prefill {
        Prefill {
            kv,
            returned,
            line: VecDeque::new(),
            batch: 0,
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
            policy,
            slots,
            timer: None,
        }
    }

    /// Puts a sequence behind those that arrived before it.
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

    /// Answers whichever lanes wait for work.
    fn answer_all(&mut self, ctx: &mut Context<Prefill>) {
        for lane in 0..self.lanes.len() {
            self.answer(lane, ctx);
        }
    }

    /// Answers the lane's question, unless nothing lives there and nothing is to be done.
    fn answer(&mut self, lane: usize, ctx: &mut Context<Prefill>) {
        let Some((question, _)) = &self.lanes[lane].held else { return };
        let (budget, live) = (question.budget, question.live);
        self.drop_gone();
        self.release(ctx);
        let chunks = self.chunks(lane, budget);
        if (live > 0 || !chunks.is_empty())
            && let Some((_, reply)) = self.lanes[lane].held.take()
        {
            // Decode waits for it; if it is gone, the sequences go home with the answer.
            let _ = reply.send(chunks);
        }
    }

    /// Chunks for a lane within the budget: of prompts that began there, then of the lane's share of those that wait,
    /// oldest first.
    fn chunks(&mut self, lane: usize, mut budget: usize) -> Vec<Chunk> {
        let mut chunks = self.lanes[lane].go_on(&mut budget);
        let mut share = lanes::share(&self.lanes, lane, self.released());
        while budget > 0 && share > 0 {
            let prompt = &self.line[0];
            if prompt.least() > budget && !chunks.is_empty() {
                break;
            }
            let mut prompt = self.line.pop_front().expect("it was looked at above, else this is a bug");
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

    /// How many of those that wait may begin, from the first on.
    fn released(&self) -> usize {
        match self.policy {
            Policy::Window { .. } => self.batch,
            Policy::Fused | Policy::Concurrent => self.line.len(),
        }
    }

    /// Under [`Policy::Window`], decides when a batch begins: when the one before is through in all lanes, and the window
    /// since the oldest arrival is over or no more fit.
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

    /// Whoever hung up is not computed any further.
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

    /// Prompts that are not through.
    fn prompts(&self) -> usize {
        self.line.len() + self.lanes.iter().map(|lane| lane.begun.len()).sum::<usize>()
    }
}

impl Prompt {
    /// Tokens that are still to be computed, its source's too.
    fn left(&self) -> usize {
        self.source + self.len - self.done
    }

    /// Tokens of the smallest chunk that could come next: whatever is left of the source, and one more.
    fn least(&self) -> usize {
        self.source + (self.len - self.done).min(1)
    }

    /// The next chunk, and what is left of the budget after it.
    fn advance(&mut self, budget: &mut usize) -> Chunk {
        let (source, start, left) = (std::mem::take(&mut self.source), self.done, self.len - self.done);
        let len = left.min(budget.saturating_sub(source).max(1));
        self.done += len;
        *budget = budget.saturating_sub(source + len);
        Chunk { key: self.key, sequence: self.sequence.take(), start, len, last: len == left }
    }
}

#[cfg(test)]
mod tests;
