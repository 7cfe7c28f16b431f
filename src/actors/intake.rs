//! Intake: the door. Checks a request once, and lets it in when slots are free.
//!
//! Owns the permits (one for each slot) and the waiting room. Never sees a token being made.
//! Invariant: permits out + permits free = slots; who waits, waits because the permits were not enough.

use super::sequence::{Key, Sequence};
use super::status::Status;
use super::stream::{EventSender, Submit, TokenStream, channel};
use crate::request::{FinishReason, Request, RequestError, TokenEvent};
use crate::{decoding, telemetry};
use actix::{Actor, Context, Handler, Message, MessageResult, Recipient};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What a request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct IntakeLimits {
    /// Sequences that can be live at once.
    pub slots: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    /// Positions of a sequence, prompt and answer.
    pub context: usize,
    pub vocab: usize,
    /// Most likely tokens that can be reported beside each.
    pub top_logprobs: usize,
    /// Pages of the pool that can be leased, the sink not among them.
    pub pages: usize,
    pub page_positions: usize,
}

/// The right to a slot; comes home when dropped.
pub struct Permit {
    home: Recipient<Released>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.home.do_send(Released);
    }
}

/// A permit came home.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Released;

/// A request that intake let in, on its way to prefill.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Admit(pub Box<Sequence>);

/// Asks for the number of free permits: what tests and checks look at.
#[derive(Message)]
#[rtype(result = "usize")]
pub struct FreePermits;

/// A checked request without a permit.
struct Waiting {
    request: Request,
    events: EventSender,
    arrived: Instant,
}

/// The actor.
pub struct Intake {
    limits: IntakeLimits,
    free: usize,
    waiting: VecDeque<Waiting>,
    next_key: u64,
    prefill: Recipient<Admit>,
    status: Arc<Status>,
}

impl Actor for Intake {
    type Context = Context<Intake>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.limits.max_waiting + self.limits.slots + 16);
    }
}

impl Handler<Submit> for Intake {
    type Result = Result<TokenStream, RequestError>;

    fn handle(&mut self, Submit(request): Submit, ctx: &mut Self::Context) -> Self::Result {
        if self.status.is_draining() {
            return Err(RequestError::Draining);
        }
        self.check(&request)?;
        let (events, stream) = channel();
        if request.max_tokens == 0 && !request.prompt_logprobs {
            events.send(TokenEvent::Finished(FinishReason::Length));
            return Ok(stream);
        }
        self.wait(Waiting { request, events, arrived: Instant::now() })?;
        self.admit(ctx);
        Ok(stream)
    }
}

impl Handler<Released> for Intake {
    type Result = ();

    fn handle(&mut self, _: Released, ctx: &mut Self::Context) {
        self.free += 1;
        assert!(self.free <= self.limits.slots, "no permit comes home twice");
        self.admit(ctx);
    }
}

impl Handler<FreePermits> for Intake {
    type Result = MessageResult<FreePermits>;

    fn handle(&mut self, _: FreePermits, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.free)
    }
}

impl Intake {
    /// An intake with all permits at home.
    pub fn new(limits: IntakeLimits, prefill: Recipient<Admit>, status: Arc<Status>) -> Intake {
        Intake { limits, free: limits.slots, waiting: VecDeque::new(), next_key: 0, prefill, status }
    }

    fn check(&self, request: &Request) -> Result<(), RequestError> {
        let limits = &self.limits;
        decoding::validate(&request.sampling)
            .map_err(|(param, message)| RequestError::Invalid { param, message })?;
        if request.prompt.is_empty() {
            return Err(invalid("prompt", "the prompt has no tokens".to_owned()));
        }
        if let Some(id) = request.prompt.iter().find(|id| **id as usize >= limits.vocab) {
            let message = format!("token id {id} is not in the vocabulary of {}", limits.vocab);
            return Err(invalid("prompt", message));
        }
        if request.logprobs.is_some_and(|n| usize::from(n) > limits.top_logprobs) {
            let message = format!("logprobs can be {} at most", limits.top_logprobs);
            return Err(invalid("logprobs", message));
        }
        let (prompt_tokens, max_tokens) = (request.prompt.len(), request.max_tokens as usize);
        if prompt_tokens + max_tokens > limits.context {
            return Err(RequestError::TooLong { prompt_tokens, max_tokens, context: limits.context });
        }
        let needed = (prompt_tokens + max_tokens).div_ceil(limits.page_positions);
        if needed > limits.pages {
            return Err(RequestError::TooLarge { needed, pages: limits.pages });
        }
        Ok(())
    }

    /// Takes a place in the waiting room, which a request passes through even when nobody waits.
    fn wait(&mut self, request: Waiting) -> Result<(), RequestError> {
        self.forget_gone();
        let (waiting, limit) = (self.waiting.len(), self.limits.max_waiting);
        if self.free == 0 && waiting >= limit {
            return Err(RequestError::Busy { waiting, limit });
        }
        self.waiting.push_back(request);
        Ok(())
    }

    /// Lets in who can be let in, in the order of arrival.
    fn admit(&mut self, ctx: &mut Context<Intake>) {
        use actix::AsyncContext;
        self.forget_gone();
        while self.free > 0
            && let Some(Waiting { request, events, arrived }) = self.waiting.pop_front()
        {
            self.free -= 1;
            self.next_key += 1;
            let permit = Permit { home: ctx.address().recipient() };
            let key = Key(self.next_key);
            let sequence = Sequence { key, request, events, permit, lease: None, arrived };
            self.prefill.do_send(Admit(Box::new(sequence)));
        }
        self.status.waiting.store(self.waiting.len(), Ordering::Relaxed);
        self.status.running.store(self.limits.slots - self.free, Ordering::Relaxed);
        telemetry::REQUESTS_WAITING.set(self.waiting.len() as f64);
        telemetry::REQUESTS_RUNNING.set((self.limits.slots - self.free) as f64);
    }

    fn forget_gone(&mut self) {
        self.waiting.retain(|waiting| !waiting.events.is_closed());
    }
}

fn invalid(param: &'static str, message: String) -> RequestError {
    RequestError::Invalid { param, message }
}
