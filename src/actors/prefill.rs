//! Prefill: describes the work on prompts, and obtains the pages for it.
//!
//! Owns the admitted requests whose prompts are not through. Never issues device work: decode pulls.
//! Invariant: first in, first out. A request short of pages holds back those behind it, and so does a source that the
//! step has no room for: it goes in one piece.

use super::intake::Admit;
use super::kv::{Reserve, Returned};
use super::sequence::{Key, Sequence};
use super::stream::EventSender;
use crate::config::Policy;
use actix::{
    Actor, ActorFutureExt, AsyncContext, Context, Handler, Message, Recipient, ResponseFuture, SpawnHandle,
    WrapFuture,
};
use std::collections::VecDeque;
use std::time::Instant;
use tokio::sync::oneshot;

/// Asks for the next step's prompt chunks.
#[derive(Message)]
#[rtype(result = "Vec<Chunk>")]
pub struct NextChunk {
    /// Tokens of all chunks together, sources included, at most; a source that is longer goes alone, with the
    /// first token after it.
    pub budget: usize,
    /// Sequences in decode's hands. With none, the answer is held until there is work.
    pub live: usize,
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

/// The device lost everything: chunks of sequences that had begun will not follow.
#[derive(Message)]
#[rtype(result = "()")]
pub struct ForgetBegun;

/// Answers the question at hand, once whoever is ready in the same moment is in the line too: with nothing live, what
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
    prompts: VecDeque<Prompt>,
    /// Leading prompts that may be computed; all of them but under [`Policy::Window`].
    released: usize,
    policy: Policy,
    slots: usize,
    /// A question waiting for work.
    held: Option<(NextChunk, oneshot::Sender<Vec<Chunk>>)>,
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
        self.answer_held(ctx);
    }
}

impl Handler<NextChunk> for Prefill {
    type Result = ResponseFuture<Vec<Chunk>>;

    fn handle(&mut self, msg: NextChunk, ctx: &mut Self::Context) -> Self::Result {
        let (tx, rx) = oneshot::channel();
        self.held = Some((msg, tx));
        self.answer_held(ctx);
        Box::pin(async { rx.await.unwrap_or_default() })
    }
}

impl Handler<ForgetBegun> for Prefill {
    type Result = ();

    fn handle(&mut self, _: ForgetBegun, _: &mut Self::Context) {
        self.keep(|prompt| prompt.sequence.is_some());
    }
}

impl Prefill {
    /// A prefill with nothing to do.
    pub fn new(
        kv: Recipient<Reserve>,
        returned: Recipient<Returned>,
        policy: Policy,
        slots: usize,
    ) -> Prefill {
        Prefill {
            kv,
            returned,
            prompts: VecDeque::new(),
            released: 0,
            policy,
            slots,
            held: None,
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
        let place = self.prompts.partition_point(|other| other.key < key);
        self.prompts.insert(place.max(self.released), prompt);
    }

    /// Answers the question at hand, unless nothing lives and nothing is to be done.
    fn answer_held(&mut self, ctx: &mut Context<Prefill>) {
        let Some((question, _)) = &self.held else { return };
        let (budget, live) = (question.budget, question.live);
        self.drop_gone();
        self.release(live, ctx);
        let chunks = self.chunks(budget);
        if (live > 0 || !chunks.is_empty())
            && let Some((_, reply)) = self.held.take()
        {
            // Decode waits for it; if it is gone, the sequences go home with the answer.
            let _ = reply.send(chunks);
        }
    }

    /// Chunks of the released prompts, oldest first, within the budget.
    fn chunks(&mut self, mut budget: usize) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        while budget > 0 && self.released > 0 {
            let prompt = &mut self.prompts[0];
            if prompt.least() > budget && !chunks.is_empty() {
                break;
            }
            let chunk = prompt.advance(&mut budget);
            if chunk.last {
                self.prompts.pop_front();
                self.released -= 1;
            }
            chunks.push(chunk);
        }
        chunks
    }

    /// Decides which prompts may be computed. Under [`Policy::Window`] that is a whole batch at a time:
    /// when the one before is through, and the window since the oldest arrival is over or no more fit.
    fn release(&mut self, live: usize, ctx: &mut Context<Prefill>) {
        let Policy::Window { window } = self.policy else {
            self.released = self.prompts.len();
            return;
        };
        let Some(oldest) = self.prompts.front() else { return };
        if live > 0 || self.released > 0 {
            return;
        }
        let waited = oldest.ready.elapsed();
        if waited >= window || self.prompts.len() >= self.slots {
            self.released = self.prompts.len();
        } else if self.timer.is_none() {
            self.timer = Some(ctx.run_later(window - waited, |act, ctx| {
                act.timer = None;
                act.answer_held(ctx);
            }));
        }
    }

    /// Whoever hung up is not computed any further.
    fn drop_gone(&mut self) {
        let before = self.prompts.len();
        self.keep(|prompt| !prompt.events.is_closed());
        if self.prompts.len() < before {
            self.returned.do_send(Returned);
        }
    }

    /// Drops the prompts that `wanted` does not want, and keeps count of the released.
    fn keep(&mut self, wanted: impl Fn(&Prompt) -> bool) {
        let dropped = self.prompts.iter().take(self.released).filter(|prompt| !wanted(prompt)).count();
        self.released -= dropped;
        self.prompts.retain(wanted);
    }
}

impl Prompt {
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
