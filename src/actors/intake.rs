//! Intake: validates requests, queues them, and admits them to prefill when slots are free.
//!
//! A group of requests is accepted or refused as a whole; after that, its requests proceed independently. The
//! queue is bounded for new requests only: a continuation of an accepted request is always queued.
//! Intake owns the permits (one per slot) and the queue, and handles no tokens.
//! Invariant: permits held plus free permits equal the number of slots; a request is queued only while no
//! permit is free.

use super::limits::{IntakeLimits, invalid};
use super::sequence::{Key, Sequence};
use super::status::Status;
use super::stream::{EventSender, Standing, Submit, TokenStream, channel};
use crate::request::{FinishReason, Request, RequestError, Task, TokenEvent};
use crate::telemetry;
use actix::{Actor, Context, Handler, Message, MessageResult, Recipient};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The right to one slot. Dropping it returns it to intake.
pub struct Permit {
    home: Recipient<Released>,
}

impl Permit {
    /// Creates a permit that is returned to `intake`. The caller counts it as taken.
    pub(super) fn new(intake: Recipient<Released>) -> Permit {
        Permit { home: intake }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.home.do_send(Released);
    }
}

/// Returns a permit to intake.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Released;

/// Hands an admitted sequence to prefill.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Admit(pub Box<Sequence>);

/// Queries the number of free permits; for tests and diagnostics.
#[derive(Message)]
#[rtype(result = "usize")]
pub struct FreePermits;

/// A validated request that waits for a permit.
struct Waiting {
    request: Request,
    events: EventSender,
    arrived: Instant,
}

/// The intake actor.
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
    type Result = Result<Vec<TokenStream>, RequestError>;

    fn handle(
        &mut self,
        Submit { requests, standing: kind }: Submit,
        ctx: &mut Self::Context,
    ) -> Self::Result {
        let is_new = kind == Standing::New;
        if is_new && self.status.is_draining() {
            return Err(RequestError::Draining);
        }
        for request in &requests {
            self.limits.check(request)?;
        }
        if is_new {
            self.check_room(&requests)?;
        }
        let streams = requests.into_iter().map(|request| self.take_in(request)).collect();
        self.admit(ctx);
        Ok(streams)
    }
}

impl Handler<Released> for Intake {
    type Result = ();

    fn handle(&mut self, _: Released, ctx: &mut Self::Context) {
        self.free += 1;
        assert!(self.free <= self.limits.slots, "a permit is returned only once");
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
    /// An intake with all permits free.
    pub fn new(limits: IntakeLimits, prefill: Recipient<Admit>, status: Arc<Status>) -> Intake {
        Intake { free: limits.slots, limits, waiting: VecDeque::new(), next_key: 0, prefill, status }
    }

    /// Checks that free slots and the queue have capacity for all of the requests.
    fn check_room(&mut self, requests: &[Request]) -> Result<(), RequestError> {
        let IntakeLimits { slots, max_waiting: limit, .. } = self.limits;
        let coming = requests.iter().filter(|request| !asks_for_nothing(request)).count();
        let capacity = slots + limit;
        if coming > capacity {
            let message = format!(
                "{coming} sequences at once exceed the {capacity} that slots and queue hold together"
            );
            return Err(invalid(what_makes_many(requests), message));
        }
        self.forget_gone();
        let waiting = self.waiting.len();
        if waiting + coming > self.free + limit {
            return Err(RequestError::Busy { coming, waiting, limit });
        }
        Ok(())
    }

    /// Queues a request, even if a permit is free; [`Intake::admit`] takes it from there. A request without
    /// work is finished at once.
    fn take_in(&mut self, request: Request) -> TokenStream {
        let (events, stream) = channel();
        if asks_for_nothing(&request) {
            events.send(TokenEvent::Finished(FinishReason::Length));
        } else {
            let events = events.until(request.deadline());
            self.waiting.push_back(Waiting { request, events, arrived: Instant::now() });
        }
        stream
    }

    /// Admits queued requests in the order of arrival while permits are free, and updates the counts.
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

    /// Removes queued requests whose clients have disconnected or timed out.
    fn forget_gone(&mut self) {
        self.waiting.retain(|waiting| !waiting.events.is_closed());
    }
}

/// Whether a request asks for no tokens and no log-probabilities, so that it is finished at once.
fn asks_for_nothing(request: &Request) -> bool {
    request.task == Task::Generate && request.max_tokens == 0 && !request.prompt_logprobs
}

/// The parameter to blame for the size of a group: `n` if all requests share one prompt (the same allocation,
/// not merely equal tokens), else `prompt` or `input`.
fn what_makes_many(group: &[Request]) -> &'static str {
    let shared = |a: &Arc<[u32]>, b: &Arc<[u32]>| Arc::ptr_eq(a, b) || (a.is_empty() && b.is_empty());
    let same_prompt = |pair: &[Request]| {
        shared(&pair[0].prompt, &pair[1].prompt) && shared(&pair[0].source, &pair[1].source)
    };
    match group.first().map(|request| &request.task) {
        Some(Task::Embed(_) | Task::Fill { .. }) => "input",
        _ if group.windows(2).all(same_prompt) => "n",
        _ => "prompt",
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{ear, next, request, within};
    use super::*;
    use crate::model::spec::Kind;
    use crate::request::Pooling;
    use actix::Addr;
    use std::sync::atomic::Ordering;
    use tokio::sync::mpsc::UnboundedReceiver;

    /// An intake whose prefill is the test.
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
                biases: 4,
                eos: 1,
                pages: 1,
                page_positions: 32,
                kind: Kind::Decoder,
                source_context: 0,
                has_head: true,
                endpoints: vec!["/v1/completions"],
            };
            let (prefill, admitted) = ear();
            let status = Arc::new(Status::new(std::time::Duration::ZERO, 1));
            let intake = Intake::new(limits, prefill, status.clone()).start();
            Door { intake, admitted, status }
        }

        async fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<TokenStream>, RequestError> {
            self.hand_in(requests, Standing::New).await
        }

        async fn hand_in(
            &self,
            requests: Vec<Request>,
            kind: Standing,
        ) -> Result<Vec<TokenStream>, RequestError> {
            within(self.intake.send(Submit { requests, standing: kind })).await.expect("intake replies")
        }

        async fn submit(&self, request: Request) -> Result<TokenStream, RequestError> {
            let streams = self.submit_all(vec![request]).await?;
            let [stream] = streams.try_into().map_err(|_| "others").expect("one request has one stream");
            Ok(stream)
        }

        /// Submits a request with the id `id`.
        async fn enter(&self, id: &str) -> TokenStream {
            self.submit(named(id)).await.expect("the request is accepted")
        }

        /// The next admitted sequence, whose request must have the id `id`.
        async fn admitted(&mut self, id: &str) -> Box<Sequence> {
            let Admit(sequence) = next(&mut self.admitted).await;
            assert_eq!(&*sequence.request.id, id);
            sequence
        }

        async fn free(&self) -> usize {
            within(self.intake.send(FreePermits)).await.expect("intake replies")
        }

        fn nobody_is_admitted(&mut self) -> bool {
            self.admitted.try_recv().is_err()
        }
    }

    fn named(id: &str) -> Request {
        Request { id: id.into(), ..request(4, 4) }
    }

    #[actix::test]
    async fn permits_come_home_by_drop_and_let_in_the_next_in_order() {
        let mut rig = Door::new(1, 2);
        let mut streams = vec![rig.enter("a").await, rig.enter("b").await, rig.enter("c").await];
        let mut running = rig.admitted("a").await;
        assert!((rig.free().await, rig.status.pending()) == (0, 3) && rig.nobody_is_admitted());
        for id in ["b", "c"] {
            let key = running.key;
            drop(running);
            running = rig.admitted(id).await;
            assert!(running.key > key, "keys ascend in the order of arrival");
            assert_eq!(rig.free().await, 0);
        }
        streams.push(rig.enter("d").await);
        drop(running);
        drop(rig.admitted("d").await);
        assert_eq!((rig.free().await, rig.status.pending()), (1, 0));
    }

    #[actix::test]
    async fn without_a_waiting_room_every_slot_is_served_and_no_more() {
        let mut rig = Door::new(2, 0);
        let _streams = [rig.enter("a").await, rig.enter("b").await];
        let refused = rig.submit(request(4, 4)).await.map(drop);
        assert_eq!(refused, Err(RequestError::Busy { coming: 1, waiting: 0, limit: 0 }));
        drop(rig.admitted("a").await);
        assert_eq!(rig.free().await, 1);
        let _stream = rig.enter("c").await;
        let _running = [rig.admitted("b").await, rig.admitted("c").await];
        assert!(rig.submit(request(4, 4)).await.is_err());
    }

    #[actix::test]
    async fn who_left_the_waiting_room_is_never_let_in() {
        let mut rig = Door::new(1, 3);
        let _a = rig.enter("a").await;
        let running = rig.admitted("a").await;
        let leaving = rig.enter("b").await;
        let _c = rig.enter("c").await;
        drop(leaving);
        drop(running);
        drop(rig.admitted("c").await);
        assert_eq!((rig.free().await, rig.status.pending()), (1, 0));
        assert!(rig.nobody_is_admitted());
    }

    #[actix::test]
    async fn draining_refuses_who_comes_and_serves_who_waits() {
        let mut rig = Door::new(1, 2);
        let _streams = [rig.enter("a").await, rig.enter("b").await];
        rig.status.draining.store(true, Ordering::Relaxed);
        assert_eq!(rig.submit(request(4, 4)).await.map(drop), Err(RequestError::Draining));
        drop(rig.admitted("a").await);
        drop(rig.admitted("b").await);
        assert_eq!((rig.free().await, rig.status.pending()), (1, 0));
    }

    /// The slots of finished parts may be taken by other requests, and the server may be draining.
    #[actix::test]
    async fn what_continues_is_taken_in_though_nobody_new_is() {
        let mut rig = Door::new(1, 1);
        let _streams = [rig.enter("a").await, rig.enter("b").await];
        assert!(matches!(rig.submit(named("c")).await, Err(RequestError::Busy { .. })));
        let _second =
            rig.hand_in(vec![named("c")], Standing::Continued).await.expect("a continuation is accepted");
        rig.status.draining.store(true, Ordering::Relaxed);
        let _third =
            rig.hand_in(vec![named("d")], Standing::Continued).await.expect("a continuation is accepted");
        let wrong = rig.hand_in(vec![request(60, 5)], Standing::Continued).await.map(drop);
        assert!(matches!(wrong, Err(RequestError::TooLong { .. })), "{wrong:?}");
        for id in ["a", "b", "c", "d"] {
            drop(rig.admitted(id).await);
        }
        assert_eq!((rig.free().await, rig.status.pending()), (1, 0));
    }

    #[actix::test]
    async fn what_is_beyond_the_limits_is_refused_by_name() {
        let rig = Door::new(1, 0);
        let with_logprobs = |n| Request { logprobs: Some(n), ..request(4, 4) };
        let refused = rig.submit(with_logprobs(6)).await.map(drop);
        assert!(matches!(refused, Err(RequestError::Invalid { param: "logprobs", .. })), "{refused:?}");
        let too_large = RequestError::TooLarge {
            param: "max_tokens",
            what: "prompt and max_tokens",
            needed: 2,
            pages: 1,
        };
        assert_eq!(rig.submit(request(30, 3)).await.map(drop), Err(too_large));
        assert!(matches!(rig.submit(request(60, 5)).await, Err(RequestError::TooLong { context: 64, .. })));
        assert_eq!(rig.free().await, 1, "a refusal takes no permit");
        assert!(rig.submit(with_logprobs(5)).await.is_ok());
    }

    #[actix::test]
    async fn ends_and_biases_beyond_the_limits_are_refused_by_name() {
        let mut rig = Door::new(1, 0);
        let plain = || Request { ignore_eos: false, ..request(4, 4) };
        let biases = |biases: &[(u32, f32)]| Request { logit_bias: biases.into(), ..plain() };
        let stops = |ids: &[u32]| Request { stop_ids: ids.into(), ..plain() };
        // The model's end-of-sequence token counts as one of the four biases of a sequence.
        let accepted = [
            biases(&[(9, -100.0), (0, f32::NEG_INFINITY), (3, 1e9)]),
            stops(&[9, 9, 0]),
            Request { ignore_eos: true, ..stops(&[1, 2, 3, 4]) },
            Request { min_tokens: 4, ..plain() },
        ];
        let refused = [
            (biases(&[(10, 0.0)]), "logit_bias", "10"),
            (biases(&[(2, f32::NAN)]), "logit_bias", "2"),
            (biases(&[(7, 1.0), (3, 1.0), (7, -1.0)]), "logit_bias", "7 twice"),
            (biases(&[(0, 0.0), (1, 0.0), (2, 0.0), (3, 0.0)]), "logit_bias", "at most 3 tokens"),
            (stops(&[5, 10]), "stop_token_ids", "10"),
            (stops(&[1, 2, 3, 4]), "stop_token_ids", "at most 4"),
            (Request { min_tokens: 5, ..plain() }, "min_tokens", "is 5"),
        ];
        for request in accepted {
            let _stream = rig.submit(request).await.expect("it is within the limits");
            drop(next(&mut rig.admitted).await);
        }
        for (request, name, word) in refused {
            match rig.submit(request).await.map(drop) {
                Err(RequestError::Invalid { param, message }) if param == name => {
                    assert!(message.contains(word), "{message}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }

    #[actix::test]
    async fn a_group_is_taken_in_whole_and_in_order_or_not_at_all() {
        let mut rig = Door::new(2, 2);
        let group = |ids: &[&str]| ids.iter().map(|id| named(id)).collect::<Vec<_>>();
        for (too_many, name) in [(vec![named("a"); 5], "n"), (group(&["a"; 5]), "prompt")] {
            let refused = rig.submit_all(too_many).await.map(drop);
            assert!(
                matches!(&refused, Err(RequestError::Invalid { param, message })
                    if *param == name && message.contains("5 sequences") && message.contains("the 4")),
                "{refused:?}"
            );
        }
        let mut mixed = group(&["a", "b", "c"]);
        mixed[2].prompt = [].into();
        assert!(matches!(rig.submit_all(mixed).await, Err(RequestError::Invalid { param: "prompt", .. })));
        assert_eq!((rig.free().await, rig.nobody_is_admitted()), (2, true));

        let mut streams = rig.submit_all(group(&["a", "b", "c"])).await.expect("there is room");
        assert_eq!((streams.len(), rig.status.pending()), (3, 3));
        let running = [rig.admitted("a").await, rig.admitted("b").await];
        let busy = RequestError::Busy { coming: 2, waiting: 1, limit: 2 };
        assert_eq!(rig.submit_all(group(&["d", "e"])).await.map(drop), Err(busy));
        assert_eq!(rig.status.pending(), 3, "no request of a refused group is queued");
        // A request without work takes no place in the queue.
        let mut with_nothing = group(&["d", "e"]);
        with_nothing[1].max_tokens = 0;
        streams.extend(rig.submit_all(with_nothing).await.expect("there is capacity for one"));
        let nothing = streams.last_mut().expect("its stream is the last one");
        assert_eq!(within(nothing.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        drop(running);
        drop([rig.admitted("c").await, rig.admitted("d").await]);
        assert_eq!((rig.free().await, rig.status.pending()), (2, 0));
    }

    #[test]
    fn a_group_too_large_is_blamed_on_what_made_it_many() {
        let translation = Request { source: [1].into(), ..request(2, 4) };
        let other_source = Request { source: [1].into(), ..translation.clone() };
        let text = Request { task: Task::Embed(Pooling::Mean), ..request(0, 0) };
        let groups = [
            (vec![request(2, 4)], "n"),
            (vec![translation.clone(), translation.clone()], "n"),
            (vec![translation, other_source], "prompt"),
            (vec![request(2, 4), request(2, 4)], "prompt"),
            (vec![text.clone(), text], "input"),
        ];
        for (group, param) in groups {
            assert_eq!(what_makes_many(&group), param, "{group:?}");
        }
    }

    #[actix::test]
    async fn a_request_for_nothing_is_over_at_once() {
        let mut rig = Door::new(1, 0);
        let many = rig.submit_all(vec![request(4, 0); 9]).await.expect("they need no slot");
        for mut stream in many {
            assert_eq!(within(stream.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        }
        let mut stream = rig.submit(request(4, 0)).await.expect("the request is accepted");
        assert_eq!(within(stream.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        assert_eq!(within(stream.next()).await, None);
        assert!(rig.free().await == 1 && rig.nobody_is_admitted());
    }
}
