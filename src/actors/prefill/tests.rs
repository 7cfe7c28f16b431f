//! Tests of prefill alone, with the test in place of the other actors.
//!
//! Invariant: no request is held while a test adds prompts, unless the test says so.

use super::*;
use crate::actors::loop_metrics::SequenceTimes;
use crate::actors::sequence::{Progress, Sequence};
use crate::actors::status::Status;
use crate::actors::stream::TokenStream;
use crate::actors::testing::{LIMITS, recorder, request, sequence, with_timeout};
use crate::decoding::beams::EarlyStopping;
use crate::memory::split_slots;
use crate::model::rope::ReservedLengths;
use crate::request::client::{ClientId, ClientSettings};
use crate::request::{BeamOptions, Client, Pooling, Request, Task};
use actix::{Addr, MessageResult};
use mainstem_kernels::random::philox;
use std::pin::Pin;
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3600);
const POSITIONS: usize = 32;
/// More tokens than all prompts of a test have.
const UNLIMITED: usize = 1000;

/// Queries the number of prompts, the number of released ones, and whether a request is held.
#[derive(Message)]
#[rtype(result = "(usize, usize, bool)")]
struct Peek;

impl Handler<Peek> for Prefill {
    type Result = MessageResult<Peek>;

    fn handle(&mut self, _: Peek, _: &mut Self::Context) -> Self::Result {
        let begun = self.lanes.iter().map(|lane| lane.started.len()).sum::<usize>();
        let held = self.lanes.iter().any(|lane| lane.pending_reply.is_some());
        let queue = self.queue.lock();
        let may_begin = if self.only_released() { queue.released() } else { queue.len() };
        MessageResult((queue.len() + begun, begun + may_begin, held))
    }
}

/// A prefill with the test in place of all other actors.
struct Rig {
    prefill: Addr<Prefill>,
    queue: SharedQueue,
    pool: PagePool,
    slots: Vec<usize>,
}

impl Rig {
    fn new(policy: Policy, slots: usize) -> Rig {
        Rig::with_lanes(policy, slots, 1)
    }

    fn with_lanes(policy: Policy, slots: usize, lanes: usize) -> Rig {
        Rig::with_pages((policy, slots, lanes), 10_000, PrefixRules::default())
    }

    fn with_pages(sizes: (Policy, usize, usize), pages: usize, rules: PrefixRules) -> Rig {
        Rig::with_limits(sizes, pages, rules, 0)
    }

    fn with_openings(rows: usize) -> Rig {
        Rig::with_limits((Policy::Fused, 8, 1), 100, PrefixRules::default(), rows)
    }

    fn with_limits(
        (policy, slots, lanes): (Policy, usize, usize),
        pages: usize,
        rules: PrefixRules,
        opening_rows: usize,
    ) -> Rig {
        let limits = StepLimits { slots, opening_rows, ..LIMITS };
        let (permit_return, _) = recorder();
        let pool = PagePool::new(pages + 1, POSITIONS);
        let queue = SharedQueue::new(slots, 1000, Arc::new(Status::new(Duration::ZERO, lanes)));
        queue.lock().set_permit_return(permit_return);
        let prefill = Prefill::new(queue.clone(), pool.clone(), rules, policy, limits, lanes).start();
        let slots = split_slots(slots, lanes).map(|slots| slots.len()).collect();
        Rig { prefill, queue, pool, slots }
    }

    /// Admits a request for four tokens. A held request for chunks may take it at once.
    fn admit(&mut self, key: u64, request: Request) -> TokenStream {
        let (sequence, stream) = sequence(key, request);
        self.push(sequence);
        stream
    }

    fn push(&self, sequence: Box<Sequence>) {
        self.queue.lock().push(sequence, Instant::now());
        self.prefill.do_send(QueueChanged);
    }

    /// Admits a request and waits until prefill has queued it.
    async fn add_prompt(&mut self, key: u64, len: usize) -> TokenStream {
        self.add_request(key, request(len, 4)).await
    }

    async fn add_request(&mut self, key: u64, request: Request) -> TokenStream {
        let stream = self.admit(key, request);
        self.peek().await;
        stream
    }

    async fn peek(&self) -> (usize, usize, bool) {
        with_timeout(self.prefill.send(Peek)).await.expect("prefill replies")
    }

    /// Requests chunks; returns the future reply.
    fn request_chunks(
        &self,
        budget: usize,
        live: usize,
    ) -> impl Future<Output = Vec<ScheduledChunk>> + use<> {
        self.request_lane_chunks(0, budget, live)
    }

    fn request_lane_chunks(
        &self,
        lane: usize,
        budget: usize,
        live: usize,
    ) -> impl Future<Output = Vec<ScheduledChunk>> + use<> {
        let places = self.slots[lane].saturating_sub(live);
        let answer = self.prefill.send(NextChunks {
            lane,
            budget: budget.into(),
            running: live,
            free_slots: places,
            steps_ahead: 0,
            preemptible: Vec::new(),
        });
        async { with_timeout(answer).await.expect("prefill replies").chunks }
    }

    async fn chunks(&self, budget: usize, live: usize) -> Vec<ChunkTuple> {
        self.lane_chunks(0, budget, live).await
    }

    async fn lane_chunks(&self, lane: usize, budget: usize, live: usize) -> Vec<ChunkTuple> {
        to_tuples(&self.request_lane_chunks(lane, budget, live).await)
    }

    /// Requests the chunks of a step beside the iteration's, with `ahead` of them in flight.
    async fn chunks_ahead(&self, lane: usize, budget: usize, ahead: usize) -> Vec<ChunkTuple> {
        let answer = self.prefill.send(ChunksAhead { lane, budget, steps_ahead: ahead });
        to_tuples(&with_timeout(answer).await.expect("prefill replies"))
    }
}

/// A request to an encoder-decoder model.
fn translate(encoder_len: usize, len: usize) -> Request {
    Request { encoder_input: vec![5; encoder_len].into(), ..request(len, 4) }
}

/// A request to an encoder-only model.
fn embed(encoder_len: usize) -> Request {
    Request { task: Task::Embed(Pooling::Mean), max_tokens: 0, ..translate(encoder_len, 0) }
}

/// A chunk as (key, start, length, last).
type ChunkTuple = (u64, usize, usize, bool);

fn to_tuples(chunks: &[ScheduledChunk]) -> Vec<ChunkTuple> {
    let to_tuple = |ScheduledChunk { key, sequence, chunk }: &ScheduledChunk| {
        let mut is_first = chunk.start == 0;
        if let Some(sequence) = sequence {
            let lease = sequence.lease.as_ref().expect("a sequence that starts has its pages");
            is_first = chunk.start == lease.computed();
        }
        assert_eq!(sequence.is_some(), is_first, "a sequence comes with its first chunk");
        let encoder_input = sequence.as_ref().is_some_and(|it| !it.request.encoder_input.is_empty());
        assert_eq!(chunk.with_encoder_input, encoder_input, "and its encoder input too");
        (key.0, chunk.start, chunk.len, chunk.last)
    };
    chunks.iter().map(to_tuple).collect()
}

#[actix::test]
async fn prompts_share_the_budget_first_in_first_out() {
    let mut rig = Rig::new(Policy::Fused, 4);
    let _clients = [rig.add_prompt(1, 10).await, rig.add_prompt(2, 4).await, rig.add_prompt(3, 20).await];
    assert_eq!(rig.chunks(16, 0).await, [(1, 0, 10, true), (2, 0, 4, true), (3, 0, 2, false)]);
    assert_eq!(rig.chunks(0, 3).await, [], "no budget, no chunk");
    assert_eq!(rig.chunks(5, 3).await, [(3, 2, 5, false)]);
    assert_eq!(rig.chunks(UNLIMITED, 3).await, [(3, 7, 13, true)]);
    assert_eq!(rig.chunks(UNLIMITED, 3).await, []);
}

/// The rules under which all requests share pages.
fn shared() -> PrefixRules {
    PrefixRules { across_requests: true, ..PrefixRules::default() }
}

/// A request with these tokens.
fn prompt(tokens: impl IntoIterator<Item = u32>) -> Request {
    Request { prompt: tokens.into_iter().collect(), ..request(0, 4) }
}

/// Takes the sequences of the next chunks, as decode does.
async fn start(rig: &Rig, budget: usize) -> Vec<Box<Sequence>> {
    let chunks = rig.request_chunks(budget, 1).await;
    chunks.into_iter().filter_map(|chunk| chunk.sequence).collect()
}

/// The first chunk of a prompt starts behind the positions whose K and V are in its pages, to the token.
#[actix::test]
async fn a_prompt_starts_behind_its_computed_positions() {
    let mut rig = Rig::with_pages((Policy::Fused, 4, 1), 100, shared());
    let _first = rig.add_request(1, prompt(0..100)).await;
    let mut first = start(&rig, UNLIMITED).await.pop().expect("it starts");
    first.lease.as_mut().expect("it has pages").note_computed(100);
    for (key, tokens, starts_at) in [(2, 80, 79), (3, 100, 99), (4, 120, 100)] {
        let _client = rig.add_request(key, prompt(0..tokens)).await;
        assert_eq!(rig.chunks(UNLIMITED, 1).await, [(key, starts_at, tokens as usize - starts_at, true)]);
    }
    let salted = Request { cache_salt: Some("a".into()), ..prompt(0..100) };
    let _client = rig.add_request(5, salted).await;
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [(5, 0, 100, true)]);
    let adapted = Request { adapter: Some("a".into()), ..prompt(0..100) };
    let _client = rig.add_request(6, adapted).await;
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [(6, 0, 100, true)]);
    let scored = Request { prompt_logprobs: Some(0), ..prompt(0..100) };
    let _client = rig.add_request(7, scored).await;
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [(7, 0, 100, true)], "each row is needed");
}

/// The length of an opening follows from its prompt and the limits, whatever is left of the budget.
#[actix::test]
async fn openings_are_not_divided() {
    let mut rig = Rig::with_openings(40);
    let _clients = [(1, 20), (2, 36), (3, 90), (4, 31)].map(|(key, len)| rig.admit(key, prompt(0..len)));
    rig.peek().await;
    assert_eq!(rig.chunks(30, 0).await, [(1, 0, 20, true)]);
    assert_eq!(rig.chunks(30, 1).await, [(2, 0, 36, true)], "alone, with more than the budget");
    assert_eq!(rig.chunks(60, 2).await, [(3, 0, 40, false)], "one chunk in a step");
    assert_eq!(rig.chunks(60, 3).await, [(3, 40, 50, true), (4, 0, 10, false)]);
}

/// Tokens are counted once per request, and not if requests share nothing.
#[actix::test]
async fn the_prefix_cache_counts_prompts_and_not_what_is_computed_again() {
    for (rules, expected) in [(shared(), [180, 79]), (PrefixRules::default(), [0, 0])] {
        let recorder = telemetry::recorder(None);
        let mut rig =
            metrics::with_local_recorder(&recorder, || Rig::with_pages((Policy::Fused, 4, 1), 100, rules));
        let _first = rig.add_request(1, prompt(0..100)).await;
        let mut first = start(&rig, UNLIMITED).await.pop().expect("it starts");
        first.lease.as_mut().expect("it has pages").note_computed(100);
        let _second = rig.add_request(2, prompt(0..80)).await;
        drop(start(&rig, UNLIMITED).await);
        // As if the first one was preempted.
        first.lease = None;
        first.progress = Some(Progress {
            generated: vec![5],
            host: None,
            times: SequenceTimes { scheduled: Instant::now(), first_token: Instant::now() },
            speculator: None,
        });
        rig.prefill.do_send(Requeue(first));
        drop(start(&rig, UNLIMITED).await);
        let text = recorder.handle().render();
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap_or_else(|| panic!("no {name} in {text}")).parse::<f64>().expect("a number")
        };
        let counted = [&telemetry::PREFIX_CACHE_QUERIES, &telemetry::PREFIX_CACHE_HITS];
        assert_eq!(counted.map(|metric| value(metric.name)), expected.map(f64::from));
    }
}

/// Of prompts with the same beginning that arrive together, one computes it and the others wait for it; a
/// prompt behind them does not.
#[actix::test]
async fn a_prompt_waits_for_tokens_that_another_one_computes() {
    let mut rig = Rig::with_pages((Policy::Fused, 8, 1), 100, shared());
    let mut clients = Vec::new();
    for (key, request) in [(1, prompt(0..70)), (2, prompt(0..70)), (3, prompt(500..510)), (4, prompt(0..64))]
    {
        clients.push(rig.add_request(key, request).await);
    }
    let mut started = start(&rig, UNLIMITED).await;
    assert_eq!(started.iter().map(|sequence| sequence.key.0).collect::<Vec<_>>(), [1, 3]);
    assert_eq!(rig.chunks(UNLIMITED, 2).await, []);
    started[0].lease.as_mut().expect("it has pages").note_computed(64);
    assert_eq!(rig.chunks(UNLIMITED, 2).await, [(4, 63, 1, true)]);
    drop(started);
    assert_eq!(
        rig.chunks(UNLIMITED, 2).await,
        [(2, 64, 6, true)],
        "it waits no longer than the other one runs"
    );
}

/// The answers of one request share its prompt even if requests share nothing.
#[actix::test]
async fn without_the_cache_only_answers_of_one_request_share() {
    let rig = Rig::with_pages((Policy::Fused, 4, 1), 100, PrefixRules::default());
    let group = |key, group, rig: &Rig| {
        let (mut sequence, stream) = sequence(key, prompt(0..100));
        sequence.group = group;
        rig.push(sequence);
        stream
    };
    let _first = group(1, 1, &rig);
    let mut first = start(&rig, UNLIMITED).await.pop().expect("it starts");
    first.lease.as_mut().expect("it has pages").note_computed(100);
    let _clients = [group(2, 1, &rig), group(3, 2, &rig)];
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [(2, 99, 1, true), (3, 0, 100, true)]);
}

/// The rotary table of a sequence depends on what it reserves, and generated tokens on what they attend to.
#[actix::test]
async fn only_equal_k_and_v_are_shared() {
    for (marks_generated, shares) in [(false, true), (true, false)] {
        let mut rig =
            Rig::with_pages((Policy::Fused, 4, 1), 100, PrefixRules { marks_generated, ..shared() });
        let mark = PrefixRules { marks_generated, ..shared() }.generated_mark();
        let _first = rig.add_request(1, prompt(0..40)).await;
        let mut first = start(&rig, UNLIMITED).await.pop().expect("it starts");
        let lease = first.lease.as_mut().expect("it has pages");
        assert!(lease.grow(64));
        lease.append_tokens((40..64).map(|token| token | mark));
        lease.note_computed(64);
        let _second = rig.add_request(2, prompt(0..70)).await;
        let start = if shares { 64 } else { 40 };
        assert_eq!(rig.chunks(UNLIMITED, 1).await, [(2, start, 70 - start, true)]);
    }
    let bounded = || ReservedLengths::new(vec![100, usize::MAX], None);
    let mut rig = Rig::with_pages((Policy::Fused, 4, 1), 100, PrefixRules { lengths: bounded(), ..shared() });
    let of_length = |max_tokens| Request { max_tokens, ..prompt(0..64) };
    let _first = rig.add_request(1, of_length(36)).await;
    let mut first = start(&rig, UNLIMITED).await.pop().expect("it starts");
    first.lease.as_mut().expect("it has pages").note_computed(64);
    let _clients = [rig.add_request(2, of_length(37)).await, rig.add_request(3, of_length(1)).await];
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [(2, 0, 64, true), (3, 63, 1, true)]);
}

/// A client pays for what is computed for it, without what is in the prefix cache, and once.
#[actix::test]
async fn clients_are_charged_for_computed_tokens_once() {
    let mut rig = Rig::with_pages((Policy::Fused, 4, 1), 100, shared());
    let _first = rig.add_request(1, prompt(0..100)).await;
    let mut first = start(&rig, 60).await.pop().expect("it starts");
    let account = first.account.clone();
    assert_eq!((account.served() / account.cost(1), account.all_running()), (60, 1));
    let now = Instant::now();
    let times = SequenceTimes { scheduled: now, first_token: now };
    first.lease = None;
    first.progress = Some(Progress { generated: Vec::new(), host: None, times, speculator: None });
    rig.prefill.do_send(Requeue(first));
    let mut again = start(&rig, UNLIMITED).await.pop().expect("it starts again");
    assert_eq!((account.served() / account.cost(1), account.all_running()), (100, 1));
    again.lease.as_mut().expect("it has pages").note_computed(100);
    let _second = rig.add_request(2, prompt(0..120)).await;
    let second = start(&rig, UNLIMITED).await;
    assert_eq!((account.served() / account.cost(1), account.all_running()), (120, 2));
    drop((again, second));
    assert_eq!(account.all_running(), 0);
    // An encoder input is computed with the first tokens.
    let _translation = rig.add_request(3, translate(30, 4)).await;
    let mut translation = start(&rig, 32).await.pop().expect("it starts");
    assert_eq!(account.served() / account.cost(1), 152);
    translation.lease = None;
    translation.progress = Some(Progress { generated: Vec::new(), host: None, times, speculator: None });
    rig.prefill.do_send(Requeue(translation));
    start(&rig, UNLIMITED).await;
    assert_eq!(account.served() / account.cost(1), 154);
}

/// Regression: after a fault, the rest of a prompt was not charged for, and a text for an encoder twice.
#[actix::test]
async fn clients_are_charged_once_for_what_a_fault_interrupts() {
    for (request, budget, charged) in [(request(100, 4), 60, [60, 100]), (embed(8), 60, [8, 8])] {
        let mut rig = Rig::new(Policy::Fused, 4);
        let _client = rig.add_request(1, request).await;
        for (budget, charged) in [budget, UNLIMITED].into_iter().zip(charged) {
            let mut lost = start(&rig, budget).await.pop().expect("it starts");
            assert_eq!(lost.account.served() / lost.account.cost(1), charged);
            rig.prefill.do_send(DropStarted { lane: 0 });
            lost.lease = None;
            rig.prefill.do_send(Requeue(lost));
        }
    }
}

/// A preempted sequence is computed again before newcomers, with the tokens that were generated.
#[actix::test]
async fn a_preempted_sequence_keeps_its_place() {
    let mut rig = Rig::new(Policy::Fused, 4);
    let _clients = [rig.add_prompt(1, 20).await, rig.add_prompt(2, 20).await, rig.add_prompt(3, 20).await];
    let mut sequences: Vec<_> =
        rig.request_chunks(30, 1).await.into_iter().filter_map(|c| c.sequence).collect();
    assert_eq!(sequences.iter().map(|sequence| sequence.key.0).collect::<Vec<_>>(), [1, 2]);
    let mut preempted = sequences.pop().expect("there are two");
    preempted.lease = None;
    let now = Instant::now();
    let times = SequenceTimes { scheduled: now, first_token: now };
    preempted.progress = Some(Progress { generated: vec![7; 5], host: None, times, speculator: None });
    rig.prefill.do_send(Requeue(preempted));
    assert_eq!(rig.peek().await.0, 2, "the rest of its prompt is not computed for the slot that it left");
    let chunks = rig.request_chunks(30, 1).await;
    assert_eq!(to_tuples(&chunks), [(2, 0, 25, true), (3, 0, 5, false)]);
    assert_eq!(chunks[0].sequence.as_ref().map(|sequence| sequence.generated().len()), Some(5));
}

/// A prompt starts when its pages can be leased and some are left for others; those behind it wait, too.
#[actix::test]
async fn a_prompt_without_pages_holds_back_those_behind_it() {
    let mut rig = Rig::with_pages((Policy::Fused, 8, 1), 5, PrefixRules::default());
    let mut clients = Vec::new();
    for (key, len) in [(1, 70), (2, 40), (3, 5)] {
        clients.push(rig.add_request(key, request(len, 80)).await);
    }
    let first = start(&rig, UNLIMITED).await;
    assert_eq!((first.len(), rig.pool.used()), (1, 3), "a page must be left");
    assert_eq!(rig.chunks(UNLIMITED, 1).await, []);
    let answer = rig.request_chunks(UNLIMITED, 0);
    assert_eq!(rig.peek().await, (2, 2, true));
    drop(first);
    rig.prefill.do_send(PagesChanged);
    assert_eq!(to_tuples(&answer.await), [(2, 0, 40, true), (3, 0, 5, true)]);
}

/// Other clients pass a prompt that lacks pages, until as many tokens were computed for them as it has.
#[actix::test]
async fn others_pass_a_prompt_without_pages_for_a_while() {
    let mut rig = Rig::with_pages((Policy::Fused, 8, 1), 5, PrefixRules::default());
    let client = |number| {
        let (id, settings) = (ClientId::Key(number), ClientSettings::default());
        Arc::new(Client { id, name: "test".into(), settings })
    };
    let of = |number, len| Request { client: client(number), ..request(len, 80) };
    let mut clients = vec![rig.add_request(1, of(1, 70)).await, rig.add_request(2, of(1, 40)).await];
    let first = start(&rig, UNLIMITED).await;
    for key in 3..20 {
        clients.push(rig.add_request(key, of(2, 5)).await);
    }
    for key in 3..11 {
        let passing = start(&rig, UNLIMITED).await;
        assert_eq!(passing.iter().map(|it| it.key.0).collect::<Vec<_>>(), [key], "one leaves a page");
    }
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [], "40 tokens have passed");
    drop(first);
    assert_eq!(start(&rig, UNLIMITED).await[0].key.0, 2);
}

#[actix::test]
async fn encoder_inputs_are_not_split_and_share_the_budget() {
    let mut rig = Rig::new(Policy::Fused, 8);
    let mut clients = Vec::new();
    for (key, encoder_len, len) in [(1, 10, 2), (2, 5, 1), (3, 30, 3), (4, 2, 9), (5, 19, 4), (6, 20, 1)] {
        clients.push(rig.add_request(key, translate(encoder_len, len)).await);
    }
    assert_eq!(rig.chunks(20, 0).await, [(1, 0, 2, true), (2, 0, 1, true)], "the third input does not fit");
    assert_eq!(rig.chunks(20, 2).await, [(3, 0, 1, false)], "an input that never fits is scheduled alone");
    assert_eq!(rig.chunks(12, 3).await, [(3, 1, 2, true), (4, 0, 8, false)]);
    assert_eq!(
        rig.chunks(20, 4).await,
        [(4, 8, 1, true)],
        "an encoder input needs budget for a token after it"
    );
    assert_eq!(rig.chunks(20, 4).await, [(5, 0, 1, false)], "it fits exactly");
    assert_eq!(rig.chunks(23, 5).await, [(5, 1, 3, true)]);
    assert_eq!(rig.chunks(UNLIMITED, 5).await, [(6, 0, 1, true)]);
    assert_eq!(rig.peek().await.0, 0);
}

#[actix::test]
async fn encoder_only_texts_share_a_step() {
    let mut rig = Rig::new(Policy::Fused, 8);
    let mut clients = Vec::new();
    for (key, encoder_len) in [(1, 8), (2, 8), (3, 1), (4, 50), (5, 2)] {
        clients.push(rig.add_request(key, embed(encoder_len)).await);
    }
    assert_eq!(rig.pool.used(), 0);
    assert_eq!(rig.chunks(16, 0).await, [(1, 0, 0, true), (2, 0, 0, true)]);
    assert_eq!(rig.chunks(16, 0).await, [(3, 0, 0, true)]);
    assert_eq!(rig.chunks(16, 0).await, [(4, 0, 0, true)]);
    assert_eq!(rig.chunks(16, 0).await, [(5, 0, 0, true)]);
}

/// Without running sequences a request is held until there is work, and prompts that arrive together must
/// start together.
#[actix::test]
async fn prompts_ready_at_the_same_time_start_together() {
    let mut rig = Rig::new(Policy::Fused, 4);
    let answer = rig.request_chunks(UNLIMITED, 0);
    let _clients: Vec<_> = (1..4).map(|key| rig.admit(key, embed(5))).collect();
    assert_eq!(to_tuples(&answer.await), [(1, 0, 0, true), (2, 0, 0, true), (3, 0, 0, true)]);
}

#[actix::test]
async fn a_request_is_held_until_there_is_work_unless_sequences_run() {
    let mut rig = Rig::new(Policy::Fused, 4);
    assert_eq!(rig.chunks(UNLIMITED, 1).await, []);
    let answer = rig.request_chunks(UNLIMITED, 0);
    assert_eq!(rig.peek().await, (0, 0, true));
    let _client = rig.admit(1, request(5, 4));
    assert_eq!(to_tuples(&answer.await), [(1, 0, 5, true)]);
}

#[actix::test]
async fn cancelled_prompts_are_dropped() {
    let mut rig = Rig::new(Policy::Fused, 4);
    let _first = rig.add_prompt(1, 10).await;
    let second = rig.add_prompt(2, 10).await;
    let _third = rig.add_prompt(3, 10).await;
    drop(second);
    assert_eq!(rig.chunks(UNLIMITED, 0).await, [(1, 0, 10, true), (3, 0, 10, true)]);
    // Likewise for a prompt that has started: decode has its sequence, and its remaining chunks are dropped.
    let begun = rig.add_prompt(4, 10).await;
    let _last = rig.add_prompt(5, 3).await;
    assert_eq!(rig.chunks(4, 2).await, [(4, 0, 4, false)]);
    drop(begun);
    assert_eq!(rig.chunks(UNLIMITED, 2).await, [(5, 0, 3, true)]);
    assert_eq!(rig.pool.used(), 0, "decode has dropped the others, and this one its prompt");
}

#[actix::test]
async fn a_fault_drops_started_prompts_and_keeps_waiting_ones() {
    for policy in [Policy::Fused, Policy::Window { window: HOUR }] {
        let mut rig = Rig::new(policy, 3);
        let _clients =
            [rig.add_prompt(1, 20).await, rig.add_prompt(2, 10).await, rig.add_prompt(3, 10).await];
        assert_eq!(rig.chunks(8, 0).await, [(1, 0, 8, false)]);
        rig.prefill.do_send(DropStarted { lane: 0 });
        assert_eq!(rig.peek().await, (2, 2, false), "{policy:?}");
        assert_eq!(rig.chunks(UNLIMITED, 0).await, [(2, 0, 10, true), (3, 0, 10, true)], "{policy:?}");
    }
}

#[actix::test]
async fn a_window_stays_open_until_every_slot_has_a_prompt() {
    let mut rig = Rig::new(Policy::Window { window: HOUR }, 3);
    let mut clients = vec![rig.add_prompt(1, 10).await, rig.add_prompt(2, 10).await];
    let answer = rig.request_chunks(12, 0);
    assert_eq!(rig.peek().await, (2, 0, true), "the window is open");
    clients.push(rig.admit(3, request(10, 4)));
    assert_eq!(to_tuples(&answer.await), [(1, 0, 10, true), (2, 0, 2, false)]);
    // No prompt joins while a released prompt is pending or a sequence runs.
    for key in 4..7 {
        clients.push(rig.add_prompt(key, 5).await);
    }
    assert_eq!(rig.chunks(UNLIMITED, 2).await, [(2, 2, 8, true), (3, 0, 10, true)]);
    assert_eq!(rig.chunks(UNLIMITED, 1).await, []);
    assert_eq!(rig.peek().await, (3, 0, false));
    assert_eq!(rig.chunks(UNLIMITED, 0).await, [(4, 0, 5, true), (5, 0, 5, true), (6, 0, 5, true)]);
}

#[actix::test]
async fn a_cancelled_released_prompt_is_not_replaced() {
    let mut rig = Rig::new(Policy::Window { window: HOUR }, 3);
    let _first = rig.add_prompt(1, 10).await;
    let second = rig.add_prompt(2, 10).await;
    let _third = rig.add_prompt(3, 10).await;
    assert_eq!(rig.chunks(4, 0).await, [(1, 0, 4, false)]);
    drop(second);
    let _fourth = rig.add_prompt(4, 10).await;
    assert_eq!(rig.chunks(UNLIMITED, 1).await, [(1, 4, 6, true), (3, 0, 10, true)]);
    assert_eq!(rig.peek().await, (1, 0, false));
}

#[actix::test]
async fn a_window_ends_by_time_but_not_while_sequences_run() {
    let mut rig = Rig::new(Policy::Window { window: Duration::from_millis(1) }, 3);
    let answer = rig.request_chunks(UNLIMITED, 0);
    let _client = rig.admit(1, request(10, 4));
    assert_eq!(to_tuples(&answer.await), [(1, 0, 10, true)]);
    let mut rig = Rig::new(Policy::Window { window: Duration::ZERO }, 3);
    let _first = rig.add_prompt(1, 10).await;
    assert_eq!(rig.chunks(UNLIMITED, 1).await, []);
    assert_eq!(rig.chunks(UNLIMITED, 0).await, [(1, 0, 10, true)]);
}

/// A reply that is still to come.
type PendingReply = Pin<Box<dyn Future<Output = Vec<ScheduledChunk>>>>;

/// Requests of idle lanes.
async fn request_as_idle(rig: &Rig, lanes: impl IntoIterator<Item = usize>) -> Vec<PendingReply> {
    let ask = |lane| Box::pin(rig.request_lane_chunks(lane, UNLIMITED, 0)) as PendingReply;
    let answers = lanes.into_iter().map(ask).collect();
    rig.peek().await;
    answers
}

/// Makes a request for each lane, with one running sequence of its own, so that prefill knows all lanes.
async fn register_all_lanes(rig: &Rig) {
    for lane in 0..rig.slots.len() {
        assert_eq!(rig.lane_chunks(lane, 16, 1).await, []);
    }
}

#[actix::test]
async fn prompts_are_distributed_over_idle_lanes() {
    let mut rig = Rig::with_lanes(Policy::Fused, 9, 3);
    let answers = request_as_idle(&rig, 0..3).await;
    let _clients: Vec<_> = (1..6).map(|key| rig.admit(key, request(5, 4))).collect();
    let begun = futures_util::future::join_all(answers).await;
    let keys: Vec<Vec<u64>> =
        begun.iter().map(|chunks| to_tuples(chunks).iter().map(|c| c.0).collect()).collect();
    assert_eq!(keys, [vec![1, 2], vec![3, 4], vec![5]]);
}

#[actix::test]
async fn a_lane_takes_only_its_share() {
    let mut rig = Rig::with_lanes(Policy::Fused, 20, 2);
    assert_eq!(rig.lane_chunks(0, UNLIMITED, 3).await, []);
    assert_eq!(rig.lane_chunks(1, UNLIMITED, 1).await, []);
    let mut clients = Vec::new();
    for key in 1..7 {
        clients.push(rig.add_prompt(key, 5).await);
    }
    assert_eq!(rig.lane_chunks(0, UNLIMITED, 3).await, [(1, 0, 5, true), (2, 0, 5, true)]);
    let rest: Vec<ChunkTuple> = (3..7).map(|key| (key, 0, 5, true)).collect();
    assert_eq!(rig.lane_chunks(1, UNLIMITED, 1).await, rest);
}

/// Regression: a search was left to a lane that had fewer sequences, but not enough slots for it.
#[actix::test]
async fn a_search_waits_for_no_lane_without_slots_for_it() {
    let mut rig = Rig::with_lanes(Policy::Fused, 16, 2);
    let ask = |lane, running, free_slots| NextChunks {
        lane,
        budget: UNLIMITED.into(),
        running,
        free_slots,
        steps_ahead: 0,
        preemptible: Vec::new(),
    };
    // The first lane runs a search whose other beams do not run yet.
    for (lane, running, free_slots) in [(0, 1, 1), (1, 3, 5)] {
        with_timeout(rig.prefill.send(ask(lane, running, free_slots))).await.expect("prefill replies");
    }
    let (early_stopping, forced_tokens) = (EarlyStopping::Estimate, 0);
    let beams = BeamOptions { width: 4, length_penalty: 1.0, early_stopping, forced_tokens, answer: 0 };
    let _client = rig.add_request(1, Request { beams: Some(beams), ..request(5, 4) }).await;
    let work = with_timeout(rig.prefill.send(ask(1, 3, 5))).await.expect("prefill replies");
    assert_eq!(to_tuples(&work.chunks), [(1, 0, 5, true)]);
}

#[actix::test]
async fn no_prompt_waits_for_a_busy_lane() {
    let mut rig = Rig::with_lanes(Policy::Fused, 8, 2);
    register_all_lanes(&rig).await;
    let _long = rig.add_prompt(1, 900).await;
    assert_eq!(
        rig.lane_chunks(0, 100, 1).await,
        [(1, 0, 100, false)],
        "the requesting lane goes first among equals"
    );
    let mut clients = Vec::new();
    for key in 2..5 {
        clients.push(rig.add_prompt(key, 5).await);
    }
    let all: Vec<ChunkTuple> = (2..5).map(|key| (key, 0, 5, true)).collect();
    assert_eq!(rig.lane_chunks(1, 100, 1).await, all, "the first lane is busy with its own prompt");
    let _last = rig.add_prompt(5, 5).await;
    assert_eq!(rig.lane_chunks(1, 100, 4).await, [], "the lane is full");
    assert_eq!(rig.lane_chunks(0, 100, 2).await, [(1, 100, 100, false)]);
    assert_eq!(rig.lane_chunks(0, 701, 2).await, [(1, 200, 700, true), (5, 0, 1, false)]);
    assert_eq!(rig.lane_chunks(1, 100, 1).await, [], "a prompt stays in its lane");
    assert_eq!(rig.lane_chunks(0, 100, 3).await, [(5, 1, 4, true)]);
}

#[actix::test]
async fn a_lane_reset_drops_its_own_prompts_only() {
    let mut rig = Rig::with_lanes(Policy::Fused, 6, 2);
    register_all_lanes(&rig).await;
    let _clients = [rig.add_prompt(1, 20).await, rig.add_prompt(2, 20).await, rig.add_prompt(3, 20).await];
    assert_eq!(rig.lane_chunks(0, 8, 1).await, [(1, 0, 8, false)]);
    assert_eq!(rig.lane_chunks(1, 8, 1).await, [(2, 0, 8, false)]);
    rig.prefill.do_send(DropStarted { lane: 0 });
    assert_eq!(rig.lane_chunks(1, 8, 2).await, [(2, 8, 8, false)]);
    assert_eq!(rig.lane_chunks(0, 8, 0).await, [(3, 0, 8, false)]);
}

#[actix::test]
async fn a_window_ends_when_all_lanes_are_idle_and_its_batch_is_distributed() {
    let mut rig = Rig::with_lanes(Policy::Window { window: HOUR }, 4, 2);
    let answers = request_as_idle(&rig, 0..2).await;
    let mut clients = Vec::new();
    for key in 1..4 {
        clients.push(rig.add_prompt(key, 5).await);
    }
    clients.push(rig.admit(4, request(5, 4)));
    let of = |keys: [u64; 2]| keys.map(|key| (key, 0, 5, true)).to_vec();
    let begun = futures_util::future::join_all(answers).await;
    assert_eq!(begun.iter().map(|chunks| to_tuples(chunks)).collect::<Vec<_>>(), [of([1, 2]), of([3, 4])]);
    for key in 5..9 {
        clients.push(rig.add_prompt(key, 5).await);
    }
    let first = request_as_idle(&rig, [0]).await.pop().expect("there is one reply");
    assert_eq!(rig.peek().await, (4, 0, true), "the other lane still runs its part of the previous batch");
    assert_eq!(rig.lane_chunks(1, UNLIMITED, 0).await, of([7, 8]));
    assert_eq!(to_tuples(&first.await), of([5, 6]));
}

#[actix::test]
async fn the_oldest_prompt_is_sent_ahead_while_lanes_are_idle() {
    let mut rig = Rig::with_lanes(Policy::Fused, 8, 4);
    for lane in 0..2 {
        assert_eq!(rig.lane_chunks(lane, 10, 1).await, []);
    }
    let _clients = [rig.add_prompt(1, 100).await, rig.add_prompt(2, 100).await];
    assert_eq!(rig.lane_chunks(0, 10, 1).await, [(1, 0, 10, false)]);
    assert_eq!(rig.lane_chunks(1, 10, 1).await, [(2, 0, 10, false)]);
    assert_eq!(rig.chunks_ahead(0, 10, 0).await, [], "no lane is idle");
    let mut answers = request_as_idle(&rig, [2, 3]).await;
    assert_eq!(rig.chunks_ahead(0, 10, 0).await, [(1, 10, 10, false)]);
    assert_eq!(rig.chunks_ahead(1, 10, 0).await, [], "the other prompt started first");
    assert_eq!(rig.chunks_ahead(0, 10, 1).await, [(1, 20, 10, false)]);
    assert_eq!(rig.chunks_ahead(0, 10, 2).await, [], "two lanes are idle");
    assert_eq!(rig.chunks_ahead(0, 100, 1).await, [(1, 30, 70, true)], "one step has completed");
    assert_eq!(rig.chunks_ahead(1, 10, 0).await, [], "the steps are still in flight");
    assert_eq!(rig.lane_chunks(0, 10, 1).await, []);
    assert_eq!(rig.chunks_ahead(1, 10, 0).await, [(2, 10, 10, false)]);
    // A lane that starts to work takes back its share of the devices.
    let _client = rig.admit(3, request(5, 4));
    assert_eq!(to_tuples(&answers.remove(0).await), [(3, 0, 5, true)]);
    assert_eq!(rig.chunks_ahead(1, 10, 1).await, []);
    assert_eq!(rig.chunks_ahead(1, 10, 0).await, [(2, 20, 10, false)]);
}

/// Random prompts that arrive together, requested in random order. No sequence leaves, so the counts show how
/// they were distributed.
#[actix::test]
async fn prompts_are_distributed_evenly_in_any_order_of_requests() {
    for round in 0..40u32 {
        let dice = |throw: u32, sides: usize| philox([throw, round, 0, 0], [5, 0])[0] as usize % sides;
        let lanes = 2 + dice(0, 3);
        let count = 1 + dice(1, 4 * lanes);
        let mut rig = Rig::with_lanes(Policy::Fused, 8 * lanes, lanes);
        register_all_lanes(&rig).await;
        let mut live = vec![1; lanes];
        let mut clients = Vec::new();
        for key in 0..count as u64 {
            clients.push(rig.add_prompt(key, 1 + dice(100 + key as u32, 12)).await);
        }
        let mut order = Vec::new();
        for ask in 0..20 * lanes as u32 {
            let lane = dice(200 + ask, lanes);
            let begun = rig.lane_chunks(lane, 16, live[lane]).await;
            let new: Vec<u64> = begun.iter().filter(|chunk| chunk.1 == 0).map(|chunk| chunk.0).collect();
            live[lane] += new.len();
            order.extend(new);
        }
        assert_eq!(order, (0..count as u64).collect::<Vec<_>>(), "first in, first out");
        let (minimum, most) = (live.iter().min().unwrap(), live.iter().max().unwrap());
        assert!(most - minimum <= 1, "round {round}: {live:?} of {count}");
    }
}

/// Prompts of random lengths arrive and sequences leave at random. The first waiting prompt must start before
/// the lanes have made as many requests as their own prompts may take, if there was a free slot at all.
#[actix::test]
async fn no_prompt_starves() {
    const SLOTS: usize = 3;
    for round in 0..20u32 {
        let dice = |throw: u32, sides: usize| philox([throw, round, 1, 0], [5, 0])[0] as usize % sides;
        let lanes = 1 + dice(0, 4);
        let mut rig = Rig::with_lanes(Policy::Fused, SLOTS * lanes, lanes);
        register_all_lanes(&rig).await;
        // (key, prompt complete) of the sequences in each lane. The first of each lane never leaves.
        let mut live: Vec<Vec<(u64, bool)>> =
            (0..lanes).map(|lane| vec![(1000 + lane as u64, true)]).collect();
        let (mut next, mut begun, mut waited, mut clients) = (0, 0, 0, Vec::new());
        for iteration in 0..200u32 {
            let lane = iteration as usize % lanes;
            let held = live.iter().map(Vec::len).sum::<usize>() + (next - begun) as usize;
            if held < SLOTS * lanes && dice(1000 + iteration, 2) == 0 {
                clients.push(rig.add_prompt(next, [3, 9, 60][dice(2000 + iteration, 3)]).await);
                next += 1;
            }
            let leaves = |key: u64| key < 1000 && dice(3000 + iteration * 1000 + key as u32, 3) == 0;
            live[lane].retain(|(key, through)| !(*through && leaves(*key)));
            let free = live.iter().any(|lane| lane.len() < SLOTS);
            for (key, start, _, last) in rig.lane_chunks(lane, 16, live[lane].len()).await {
                if start == 0 {
                    assert_eq!(key, begun, "first in, first out");
                    (begun, waited) = (begun + 1, 0);
                    live[lane].push((key, false));
                }
                let own =
                    live[lane].iter_mut().find(|own| own.0 == key).expect("a sequence stays in its lane");
                own.1 = last;
            }
            assert!(live[lane].len() <= SLOTS);
            waited = if begun < next && free { waited + 1 } else { 0 };
            assert!(waited <= 10 * lanes, "round {round}: {begun} still waits after {waited} requests");
        }
        assert!(begun > 10, "round {round}: {begun}");
    }
}
