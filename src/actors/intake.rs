//! Intake: validates requests, and queues their sequences.
//!
//! A group of requests is accepted or refused as a whole; after that, its requests proceed independently. The
//! queue is bounded for new requests only: a continuation of an accepted request is always queued.
//! Intake gets the permits back (one per slot), and handles no tokens. The queue is counted in slots: a beam
//! search counts as many as it has beams.

use super::account::Account;
use super::limits::{IntakeLimits, invalid};
use super::queue::{QueueChanged, SharedQueue};
use super::sequence::{PermitReleased, Sequence, SequenceKey};
use super::status::Status;
use super::stream::{EventSender, Submit, SubmitKind, TokenStream, event_channel};
use crate::request::{FinishReason, Request, RequestError, Task, TokenEvent};
use actix::{Actor, AsyncContext, Context, Handler, Message, MessageResult, Recipient};
use std::sync::Arc;
use std::time::Instant;

/// Queries the number of permits that nobody holds and no queued sequence is about to get; for tests and
/// diagnostics.
#[derive(Message)]
#[rtype(result = "usize")]
pub struct GetFreePermits;

/// The intake actor.
pub struct Intake {
    limits: IntakeLimits,
    queue: SharedQueue,
    next_key: u64,
    groups: u64,
    prefill: Recipient<QueueChanged>,
    status: Arc<Status>,
}

impl Actor for Intake {
    type Context = Context<Intake>;

    fn started(&mut self, ctx: &mut Self::Context) {
        ctx.set_mailbox_capacity(self.limits.max_waiting + self.limits.slots + 16);
        self.queue.lock().set_permit_return(ctx.address().recipient());
    }
}

impl Handler<Submit> for Intake {
    type Result = Result<Vec<TokenStream>, RequestError>;

    fn handle(&mut self, Submit { requests, kind }: Submit, _: &mut Self::Context) -> Self::Result {
        let is_new = kind == SubmitKind::New;
        if is_new && self.status.is_draining() {
            return Err(RequestError::Draining);
        }
        for request in &requests {
            self.limits.check(request)?;
            check_client_limit(request)?;
        }
        if is_new {
            self.check_capacity(&requests)?;
        }
        self.groups += 1;
        let mut sequences = Vec::new();
        let streams = requests.into_iter().map(|request| self.begin(request, &mut sequences)).collect();
        let (mut queue, now) = (self.queue.lock(), Instant::now());
        sequences.into_iter().for_each(|sequence| queue.push(Box::new(sequence), now));
        queue.report();
        self.prefill.do_send(QueueChanged);
        Ok(streams)
    }
}

impl Handler<PermitReleased> for Intake {
    type Result = ();

    fn handle(&mut self, _: PermitReleased, _: &mut Self::Context) {
        let mut queue = self.queue.lock();
        queue.release_permit(Instant::now());
        queue.drop_cancelled();
        queue.report();
        // A client's sequence may have waited for another one's end.
        if !queue.is_empty() {
            self.prefill.do_send(QueueChanged);
        }
    }
}

impl Handler<GetFreePermits> for Intake {
    type Result = MessageResult<GetFreePermits>;

    fn handle(&mut self, _: GetFreePermits, _: &mut Self::Context) -> Self::Result {
        MessageResult(self.queue.lock().unclaimed_permits())
    }
}

impl Intake {
    /// Creates an intake that fills `queue`, of which it notifies `prefill`.
    pub fn new(
        limits: IntakeLimits,
        queue: SharedQueue,
        prefill: Recipient<QueueChanged>,
        status: Arc<Status>,
    ) -> Intake {
        Intake { limits, queue, next_key: 0, groups: 0, prefill, status }
    }

    /// Checks that free slots and the queue have capacity for all of the requests, and that their client has
    /// not reached its limits.
    fn check_capacity(&mut self, requests: &[Request]) -> Result<(), RequestError> {
        let IntakeLimits { slots, max_waiting: limit, .. } = self.limits;
        let coming = requests.iter().map(needed_slots).sum::<usize>();
        let capacity = slots + limit;
        if coming > capacity {
            let message = format!(
                "the request has {coming} sequences, but slots and queue hold only {capacity} together"
            );
            return Err(invalid(group_size_param(requests), message));
        }
        let Some(Request { client, class, .. }) = requests.first() else { return Ok(()) };
        self.queue.lock().admit(client, *class, coming, Instant::now())
    }

    /// Makes the sequence of a request. A request without work is finished at once, and one for a further
    /// result of a beam search belongs to the sequence before it.
    fn begin(&mut self, request: Request, sequences: &mut Vec<Sequence>) -> TokenStream {
        let (events, stream) = event_channel(self.status.responses.hold(request.client.id));
        let is_further_result = request.beams.is_some_and(|beams| beams.answer > 0);
        if needs_no_work(&request) {
            events.send(TokenEvent::Finished(FinishReason::Length));
        } else if let Some(search) = sequences.last_mut().filter(|_| is_further_result) {
            search.followers.push(events);
        } else {
            sequences.push(self.sequence(request, events));
        }
        stream
    }

    fn sequence(&mut self, request: Request, events: EventSender) -> Sequence {
        // Each beam has a key of its own.
        let key = SequenceKey(self.next_key + 1);
        self.next_key += request.beams.map_or(1, |beams| beams.width as u64);
        Sequence {
            key,
            group: self.groups,
            events: events.with_deadline(request.deadline()),
            followers: Vec::new(),
            // The queue has that of its client.
            account: Arc::new(Account::new(request.client.id, Arc::default())),
            request,
            permits: Vec::new(),
            lease: None,
            arrived: Instant::now(),
            progress: None,
            charged: Default::default(),
        }
    }
}

/// Returns the number of slots that a request needs, apart from those of the requests before it.
fn needed_slots(request: &Request) -> usize {
    match request.beams {
        _ if needs_no_work(request) => 0,
        Some(beams) if beams.answer == 0 => beams.width,
        Some(_) => 0,
        None => 1,
    }
}

/// Checks that a search has not more beams than its client may have running sequences.
fn check_client_limit(request: &Request) -> Result<(), RequestError> {
    let limit = request.client.settings.max_sequences.unwrap_or(usize::MAX);
    match request.beams {
        Some(beams) if beams.width > limit => {
            let width = beams.width;
            let message = format!(
                "beam_width is {width}, but the limit of running sequences of this client is {limit}"
            );
            Err(invalid("beam_width", message))
        }
        _ => Ok(()),
    }
}

/// Whether a request asks for no tokens and no log-probabilities, so that it is finished at once.
fn needs_no_work(request: &Request) -> bool {
    request.task == Task::Generate && request.max_tokens == 0 && request.prompt_logprobs.is_none()
}

/// The parameter to blame for the size of a group: `n` if all requests share one prompt (the same allocation,
/// not merely equal tokens), else `prompt` or `input`.
fn group_size_param(group: &[Request]) -> &'static str {
    let shared = |a: &Arc<[u32]>, b: &Arc<[u32]>| Arc::ptr_eq(a, b) || (a.is_empty() && b.is_empty());
    let same_prompt = |pair: &[Request]| {
        shared(&pair[0].prompt, &pair[1].prompt) && shared(&pair[0].encoder_input, &pair[1].encoder_input)
    };
    match group.first().map(|request| &request.task) {
        Some(Task::Embed(_) | Task::EmbedTokens | Task::FillMask { .. }) => "input",
        _ if group.windows(2).all(same_prompt) => "n",
        _ => "prompt",
    }
}

#[cfg(test)]
mod tests {
    use super::super::queue::Skipped;
    use super::super::testing::{recorder, request, with_timeout};
    use super::*;
    use crate::decoding::EarlyStopping;
    use crate::model::spec::Kind;
    use crate::request::{BeamOptions, Pooling};
    use actix::Addr;
    use std::sync::atomic::Ordering;
    use tokio::task::yield_now;

    /// An intake whose prefill is the test.
    struct IntakeRig {
        intake: Addr<Intake>,
        queue: SharedQueue,
        status: Arc<Status>,
    }

    impl IntakeRig {
        fn new(slots: usize, max_waiting: usize) -> IntakeRig {
            let limits = IntakeLimits {
                slots,
                max_beams: slots,
                max_waiting,
                context: 64,
                vocab: 10,
                source_vocab: 10,
                eos: 0,
                top_logprobs: 5,
                pages: slots,
                window: None,
                page_positions: 32,
                kind: Kind::Decoder,
                encoder_context: 0,
                has_head: true,
                returns_hidden: false,
                endpoints: vec!["/v1/completions"],
            };
            let (prefill, _) = recorder();
            let status = Arc::new(Status::new(std::time::Duration::ZERO, 1));
            let queue = SharedQueue::new(slots, max_waiting, status.clone());
            let intake = Intake::new(limits, queue.clone(), prefill, status.clone()).start();
            IntakeRig { intake, queue, status }
        }

        async fn submit_all(&self, requests: Vec<Request>) -> Result<Vec<TokenStream>, RequestError> {
            self.submit_as(requests, SubmitKind::New).await
        }

        async fn submit_as(
            &self,
            requests: Vec<Request>,
            kind: SubmitKind,
        ) -> Result<Vec<TokenStream>, RequestError> {
            with_timeout(self.intake.send(Submit { requests, kind })).await.expect("intake replies")
        }

        async fn submit(&self, request: Request) -> Result<TokenStream, RequestError> {
            let streams = self.submit_all(vec![request]).await?;
            let [stream] = streams.try_into().map_err(|_| "others").expect("one request has one stream");
            Ok(stream)
        }

        /// Submits a request with the id `id`.
        async fn submit_id(&self, id: &str) -> TokenStream {
            self.submit(request_with_id(id)).await.expect("the request is accepted")
        }

        /// Takes the next sequence for which there are slots, as prefill does. It must have the id `id`.
        async fn admitted(&mut self, id: &str) -> Box<Sequence> {
            let sequence = self.next_sequence().await.expect("a sequence can begin");
            assert_eq!(&*sequence.request.id, id);
            sequence
        }

        async fn next_sequence(&self) -> Option<Box<Sequence>> {
            // Intake handles the permits that were dropped.
            for _ in 0..4 {
                yield_now().await;
            }
            let mut queue = self.queue.lock();
            let next = queue.first(&Skipped::default(), false)?;
            let sequence = (next.slots <= queue.free_permits()).then(|| queue.take(&next).sequence);
            queue.report();
            sequence
        }

        async fn free_permits(&self) -> usize {
            with_timeout(self.intake.send(GetFreePermits)).await.expect("intake replies")
        }

        async fn none_admitted(&self) -> bool {
            self.next_sequence().await.is_none()
        }
    }

    fn request_with_id(id: &str) -> Request {
        Request { id: id.into(), ..request(4, 4) }
    }

    #[actix::test]
    async fn dropped_permits_admit_queued_requests_in_order() {
        let mut rig = IntakeRig::new(1, 2);
        let mut streams = vec![rig.submit_id("a").await, rig.submit_id("b").await, rig.submit_id("c").await];
        let mut running = rig.admitted("a").await;
        assert!((rig.free_permits().await, rig.status.pending()) == (0, 3) && rig.none_admitted().await);
        for id in ["b", "c"] {
            let key = running.key;
            drop(running);
            running = rig.admitted(id).await;
            assert!(running.key > key, "keys ascend in the order of arrival");
            assert_eq!(rig.free_permits().await, 0);
        }
        streams.push(rig.submit_id("d").await);
        drop(running);
        drop(rig.admitted("d").await);
        assert_eq!((rig.free_permits().await, rig.status.pending()), (1, 0));
    }

    #[actix::test]
    async fn without_a_queue_every_slot_is_used_and_no_more() {
        let mut rig = IntakeRig::new(2, 0);
        let _streams = [rig.submit_id("a").await, rig.submit_id("b").await];
        let refused = rig.submit(request(4, 4)).await.map(drop);
        assert_eq!(refused, Err(RequestError::Busy { coming: 1, waiting: 0, limit: 0, retry_after_s: 0 }));
        drop(rig.admitted("a").await);
        assert_eq!(rig.free_permits().await, 1);
        let _stream = rig.submit_id("c").await;
        let _running = [rig.admitted("b").await, rig.admitted("c").await];
        assert!(rig.submit(request(4, 4)).await.is_err());
    }

    /// A search waits until all of its beams have slots, and counts as many sequences.
    #[actix::test]
    async fn a_search_is_queued_with_all_of_its_beams() {
        let mut rig = IntakeRig::new(4, 5);
        let _first = rig.submit_id("a").await;
        let running = rig.admitted("a").await;
        let early_stopping = EarlyStopping::Estimate;
        let (width, forced_tokens, answer) = (4, 0, 0);
        let beams = BeamOptions { width, length_penalty: 1.0, early_stopping, forced_tokens, answer };
        let search = Request { beams: Some(beams), max_tokens: 1, ..request_with_id("b") };
        let _search = rig.submit(search).await.expect("there is space in the queue");
        assert_eq!((rig.free_permits().await, rig.status.pending()), (3, 5));
        let busy = RequestError::Busy { coming: 5, waiting: 4, limit: 5, retry_after_s: 0 };
        let others = vec![request_with_id("c"); 5];
        assert_eq!(rig.submit_all(others).await.map(drop), Err(busy), "the error has the same unit");
        drop(running);
        let running = rig.admitted("b").await;
        assert_eq!(running.permits.len(), 4);
        assert_eq!((rig.free_permits().await, rig.status.pending()), (0, 4));
    }

    #[actix::test]
    async fn a_cancelled_request_is_never_admitted() {
        let mut rig = IntakeRig::new(1, 3);
        let _a = rig.submit_id("a").await;
        let running = rig.admitted("a").await;
        let leaving = rig.submit_id("b").await;
        let _c = rig.submit_id("c").await;
        drop(leaving);
        drop(running);
        drop(rig.admitted("c").await);
        assert_eq!((rig.free_permits().await, rig.status.pending()), (1, 0));
        assert!(rig.none_admitted().await);
    }

    #[actix::test]
    async fn draining_refuses_new_requests_and_serves_queued_ones() {
        let mut rig = IntakeRig::new(1, 2);
        let _streams = [rig.submit_id("a").await, rig.submit_id("b").await];
        rig.status.draining.store(true, Ordering::Relaxed);
        assert_eq!(rig.submit(request(4, 4)).await.map(drop), Err(RequestError::Draining));
        drop(rig.admitted("a").await);
        drop(rig.admitted("b").await);
        assert_eq!((rig.free_permits().await, rig.status.pending()), (1, 0));
    }

    /// The slots of finished parts may be taken by other requests, and the server may be draining.
    #[actix::test]
    async fn continuations_are_accepted_when_new_requests_are_not() {
        let mut rig = IntakeRig::new(1, 1);
        let _streams = [rig.submit_id("a").await, rig.submit_id("b").await];
        assert!(matches!(rig.submit(request_with_id("c")).await, Err(RequestError::Busy { .. })));
        let _second = rig
            .submit_as(vec![request_with_id("c")], SubmitKind::Continuation)
            .await
            .expect("a continuation is accepted");
        rig.status.draining.store(true, Ordering::Relaxed);
        let _third = rig
            .submit_as(vec![request_with_id("d")], SubmitKind::Continuation)
            .await
            .expect("a continuation is accepted");
        let wrong = rig.submit_as(vec![request(60, 5)], SubmitKind::Continuation).await.map(drop);
        assert!(matches!(wrong, Err(RequestError::TooLong { .. })), "{wrong:?}");
        for id in ["a", "b", "c", "d"] {
            drop(rig.admitted(id).await);
        }
        assert_eq!((rig.free_permits().await, rig.status.pending()), (1, 0));
    }

    #[actix::test]
    async fn requests_beyond_the_limits_are_refused_with_the_parameter() {
        let rig = IntakeRig::new(1, 0);
        let with_logprobs = |n| Request { logprobs: Some(n), ..request(4, 4) };
        let refused = rig.submit(with_logprobs(6)).await.map(drop);
        assert!(matches!(refused, Err(RequestError::Invalid { param: "logprobs", .. })), "{refused:?}");
        let of_the_prompt = Request { prompt_logprobs: Some(6), ..request(4, 4) };
        let refused = rig.submit(of_the_prompt).await.map(drop);
        assert!(
            matches!(refused, Err(RequestError::Invalid { param: "prompt_logprobs", .. })),
            "{refused:?}"
        );
        let too_large = RequestError::TooLarge {
            param: "max_tokens",
            what: "prompt and max_tokens",
            needed: 2,
            pages: 1,
        };
        assert_eq!(rig.submit(request(30, 3)).await.map(drop), Err(too_large));
        assert!(matches!(rig.submit(request(60, 5)).await, Err(RequestError::TooLong { context: 64, .. })));
        assert_eq!(rig.free_permits().await, 1, "a refusal takes no permit");
        assert!(rig.submit(with_logprobs(5)).await.is_ok());
    }

    #[actix::test]
    async fn stop_tokens_and_biases_beyond_the_limits_are_refused_with_the_parameter() {
        let rig = IntakeRig::new(1, 0);
        let plain = || Request { ignore_eos: false, ..request(4, 4) };
        let biases = |biases: &[(u32, f32)]| Request { logit_bias: biases.into(), ..plain() };
        let stops = |ids: &[u32]| Request { stop_ids: ids.into(), ..plain() };
        let every_token: Vec<(u32, f32)> = (0..10).map(|id| (id, -1.0)).collect();
        let accepted = [
            biases(&[(9, -100.0), (0, f32::NEG_INFINITY), (3, 1e9)]),
            Request { stop_ids: [1, 2, 3, 4].into(), ..biases(&every_token) },
            stops(&[9, 9, 0]),
            stops(&[1; 10]),
            Request { min_tokens: 4, ..plain() },
        ];
        let refused = [
            (biases(&[(10, 0.0)]), "logit_bias", "10"),
            (biases(&[(2, f32::NAN)]), "logit_bias", "2"),
            (biases(&[(7, 1.0), (3, 1.0), (7, -1.0)]), "logit_bias", "7 twice"),
            (stops(&[5, 10]), "stop_token_ids", "10"),
            (stops(&[1; 11]), "stop_token_ids", "at most 10"),
            (Request { min_tokens: 5, ..plain() }, "min_tokens", "is 5"),
        ];
        for request in accepted {
            let _stream = rig.submit(request).await.expect("it is within the limits");
            drop(rig.next_sequence().await.expect("it can begin"));
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
    async fn a_group_is_accepted_whole_and_in_order_or_not_at_all() {
        let mut rig = IntakeRig::new(2, 2);
        let group = |ids: &[&str]| ids.iter().map(|id| request_with_id(id)).collect::<Vec<_>>();
        for (too_many, name) in [(vec![request_with_id("a"); 5], "n"), (group(&["a"; 5]), "prompt")] {
            let refused = rig.submit_all(too_many).await.map(drop);
            assert!(
                matches!(&refused, Err(RequestError::Invalid { param, message })
                    if *param == name && message.contains("5 sequences") && message.contains("only 4")),
                "{refused:?}"
            );
        }
        let mut mixed = group(&["a", "b", "c"]);
        mixed[2].prompt = [].into();
        assert!(matches!(rig.submit_all(mixed).await, Err(RequestError::Invalid { param: "prompt", .. })));
        assert_eq!((rig.free_permits().await, rig.none_admitted().await), (2, true));

        let mut streams = rig.submit_all(group(&["a", "b", "c"])).await.expect("there is room");
        assert_eq!((streams.len(), rig.status.pending()), (3, 3));
        let running = [rig.admitted("a").await, rig.admitted("b").await];
        let busy = RequestError::Busy { coming: 2, waiting: 1, limit: 2, retry_after_s: 0 };
        assert_eq!(rig.submit_all(group(&["d", "e"])).await.map(drop), Err(busy));
        assert_eq!(rig.status.pending(), 3, "no request of a refused group is queued");
        // A request without work takes no place in the queue.
        let mut with_nothing = group(&["d", "e"]);
        with_nothing[1].max_tokens = 0;
        streams.extend(rig.submit_all(with_nothing).await.expect("there is capacity for one"));
        let nothing = streams.last_mut().expect("its stream is the last one");
        assert_eq!(with_timeout(nothing.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        drop(running);
        drop([rig.admitted("c").await, rig.admitted("d").await]);
        assert_eq!((rig.free_permits().await, rig.status.pending()), (2, 0));
    }

    #[test]
    fn a_group_too_large_names_the_parameter_that_made_it_so() {
        let translation = Request { encoder_input: [1].into(), ..request(2, 4) };
        let other_input = Request { encoder_input: [1].into(), ..translation.clone() };
        let text = Request { task: Task::Embed(Pooling::Mean), ..request(0, 0) };
        let groups = [
            (vec![request(2, 4)], "n"),
            (vec![translation.clone(), translation.clone()], "n"),
            (vec![translation, other_input], "prompt"),
            (vec![request(2, 4), request(2, 4)], "prompt"),
            (vec![text.clone(), text], "input"),
        ];
        for (group, param) in groups {
            assert_eq!(group_size_param(&group), param, "{group:?}");
        }
    }

    #[actix::test]
    async fn a_request_without_work_is_finished_at_once() {
        let rig = IntakeRig::new(1, 0);
        let many = rig.submit_all(vec![request(4, 0); 9]).await.expect("they need no slot");
        for mut stream in many {
            assert_eq!(with_timeout(stream.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        }
        let mut stream = rig.submit(request(4, 0)).await.expect("the request is accepted");
        assert_eq!(with_timeout(stream.next()).await, Some(TokenEvent::Finished(FinishReason::Length)));
        assert_eq!(with_timeout(stream.next()).await, None);
        assert!(rig.free_permits().await == 1 && rig.none_admitted().await);
    }
}
