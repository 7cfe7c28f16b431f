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

impl Permit {
    /// A permit out of `home`'s hands. Whoever makes it counts it.
    pub(super) fn new(home: Recipient<Released>) -> Permit {
        Permit { home }
    }
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
            let permit = Permit::new(ctx.address().recipient());
            let key = Key(self.next_key);
            let sequence = Sequence { key, request, events, permit, lease: None, arrived };
            self.prefill.do_send(Admit(Box::new(sequence)));
        }
        self.status.count(self.waiting.len(), self.limits.slots - self.free);
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

#[cfg(test)]
mod tests {
    use super::super::testing::{ear, next, request, within};
    use super::*;
    use actix::Addr;
    use std::sync::atomic::Ordering;
    use tokio::sync::mpsc::UnboundedReceiver;

    /// An intake with the test in the place of prefill.
    struct Door {
        intake: Addr<Intake>,
        admitted: UnboundedReceiver<Admit>,
        status: Arc<Status>,
    }

    impl Door {
        fn new(slots: usize, max_waiting: usize) -> Door {
            let limits = IntakeLimits {
                slots,
                max_waiting,
                context: 64,
                vocab: 10,
                top_logprobs: 5,
                pages: 1,
                page_positions: 32,
            };
            let (prefill, admitted) = ear();
            let status = Arc::new(Status::new(std::time::Duration::ZERO));
            let intake = Intake::new(limits, prefill, status.clone()).start();
            Door { intake, admitted, status }
        }

        async fn submit(&self, request: Request) -> Result<TokenStream, RequestError> {
            within(self.intake.send(Submit(request))).await.expect("intake answers")
        }

        /// Submits a request that goes by the name of `id`.
        async fn enter(&self, id: &str) -> TokenStream {
            self.submit(Request { id: id.into(), ..request(4, 4) }).await.expect("it is taken in")
        }

        /// The next sequence let in, by its request's name.
        async fn admitted(&mut self, id: &str) -> Box<Sequence> {
            let Admit(sequence) = next(&mut self.admitted).await;
            assert_eq!(&*sequence.request.id, id);
            sequence
        }

        async fn free(&self) -> usize {
            within(self.intake.send(FreePermits)).await.expect("intake answers")
        }

        fn nobody_is_admitted(&mut self) -> bool {
            self.admitted.try_recv().is_err()
        }
    }

    #[actix::test]
    async fn permits_come_home_by_drop_and_let_in_the_next_in_order() {
        let mut door = Door::new(1, 2);
        let mut streams = vec![door.enter("a").await, door.enter("b").await, door.enter("c").await];
        let mut running = door.admitted("a").await;
        assert!((door.free().await, door.status.pending()) == (0, 3) && door.nobody_is_admitted());
        for id in ["b", "c"] {
            let key = running.key;
            drop(running);
            running = door.admitted(id).await;
            assert!(running.key > key, "keys ascend in the order of arrival");
            assert_eq!(door.free().await, 0);
        }
        streams.push(door.enter("d").await);
        drop(running);
        drop(door.admitted("d").await);
        assert_eq!((door.free().await, door.status.pending()), (1, 0));
    }

    #[actix::test]
    async fn without_a_waiting_room_every_slot_is_served_and_no_more() {
        let mut door = Door::new(2, 0);
        let _streams = [door.enter("a").await, door.enter("b").await];
        let refused = door.submit(request(4, 4)).await.map(drop);
        assert_eq!(refused, Err(RequestError::Busy { waiting: 0, limit: 0 }));
        drop(door.admitted("a").await);
        assert_eq!(door.free().await, 1);
        let _stream = door.enter("c").await;
        let _running = [door.admitted("b").await, door.admitted("c").await];
        assert!(door.submit(request(4, 4)).await.is_err());
    }

    #[actix::test]
    async fn who_left_the_waiting_room_is_never_let_in() {
        let mut door = Door::new(1, 3);
        let _a = door.enter("a").await;
        let running = door.admitted("a").await;
        let leaving = door.enter("b").await;
        let _c = door.enter("c").await;
        drop(leaving);
        drop(running);
        drop(door.admitted("c").await);
        assert_eq!((door.free().await, door.status.pending()), (1, 0));
        assert!(door.nobody_is_admitted());
    }

    #[actix::test]
    async fn draining_refuses_who_comes_and_serves_who_waits() {
        let mut door = Door::new(1, 2);
        let _streams = [door.enter("a").await, door.enter("b").await];
        door.status.draining.store(true, Ordering::Relaxed);
        assert_eq!(door.submit(request(4, 4)).await.map(drop), Err(RequestError::Draining));
        drop(door.admitted("a").await);
        drop(door.admitted("b").await);
        assert_eq!((door.free().await, door.status.pending()), (1, 0));
    }

    #[actix::test]
    async fn what_is_beyond_the_limits_is_refused_by_name() {
        let door = Door::new(1, 0);
        let with_logprobs = |n| Request { logprobs: Some(n), ..request(4, 4) };
        let refused = door.submit(with_logprobs(6)).await.map(drop);
        assert!(matches!(refused, Err(RequestError::Invalid { param: "logprobs", .. })), "{refused:?}");
        let too_large = RequestError::TooLarge { needed: 2, pages: 1 };
        assert_eq!(door.submit(request(30, 3)).await.map(drop), Err(too_large));
        assert!(matches!(door.submit(request(60, 5)).await, Err(RequestError::TooLong { context: 64, .. })));
        assert_eq!(door.free().await, 1, "a refusal costs no permit");
        assert!(door.submit(with_logprobs(5)).await.is_ok());
    }

    #[actix::test]
    async fn a_request_for_nothing_is_over_at_once() {
        let mut door = Door::new(1, 0);
        let mut stream = door.submit(request(4, 0)).await.expect("it is taken in");
        assert_eq!(within(stream.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        assert_eq!(within(stream.next()).await, None);
        assert!(door.free().await == 1 && door.nobody_is_admitted());
    }
}
