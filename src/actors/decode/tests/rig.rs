//! All actors of the control thread with simulated devices: a pipeline of stages whose steps take configured
//! times on a simulated clock, and a model whose state is in slots and page tables.
//!
//! Invariant: a token depends on every token before it as the devices' state has them, so that a write to a
//! wrong slot, page or position shows in the tokens.

use super::super::{Decode, DecodeConfig, Neighbours};
use crate::actors::device::{Ran, Step};
use crate::actors::group::{Devices, Epoch, Running};
use crate::actors::intake::{FreePermits, Intake};
use crate::actors::kv::{Held, Kv, Plan, Turn};
use crate::actors::limits::IntakeLimits;
use crate::actors::prefill::{Chunk, NextChunk, Prefill};
use crate::actors::status::Status;
use crate::actors::stream::{Standing, Submit, TokenStream};
use crate::actors::testing::within;
use crate::config::Policy;
use crate::memory::{PagePool, divided};
use crate::model::spec::Kind;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use actix::{Actor, Addr, Handler, ResponseFuture};
use mainstem_kernels::batch::{Page, SINK_PAGE};
use mainstem_kernels::{
    DeviceError, KvTable, SampleMode, SampledRow, Share, Span, SpanTable, SpanTokens, StepBatch, StepLimits,
    StepOutput, Want,
};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

pub const PAGE: usize = 4;
pub const VOCAB: u32 = 97;
const POSITIONS: usize = 160;

/// The token that the model generates after `tokens`.
pub fn after<'a>(tokens: impl IntoIterator<Item = &'a u32>) -> u32 {
    tokens.into_iter().fold(17, |sum: u32, token| sum.wrapping_mul(31).wrapping_add(*token + 7) % 65_521)
        % VOCAB
}

/// The tokens that a greedy request must generate.
pub fn expected(request: &Request) -> Vec<u32> {
    let mut all = request.prompt.to_vec();
    for _ in 0..request.max_tokens {
        all.push(after(&all));
    }
    all.split_off(request.prompt.len())
}

/// The state of the simulated devices.
pub struct Memory {
    /// Page table of each slot.
    /// Last sampled token of each slot.
    tables: Vec<Vec<Page>>,
    last: Vec<u32>,
    /// Token at each position of the pages.
    tokens: Vec<u32>,
}

impl Memory {
    fn new(slots: usize, pages: usize) -> Memory {
        let tables = vec![vec![SINK_PAGE; POSITIONS / PAGE]; slots];
        Memory { tables, last: vec![0; slots], tokens: vec![0; pages * PAGE] }
    }

    fn run(&mut self, batch: &StepBatch) -> StepOutput {
        for m in &batch.moves {
            let (from, to) = (m.from as usize, m.to as usize);
            self.tables[to] = self.tables[from].clone();
            self.last[to] = self.last[from];
        }
        for entry in batch.tables.iter().filter(|entry| entry.table == KvTable::Own) {
            self.tables[entry.slot as usize][entry.index as usize] = entry.page;
        }
        let mut output = StepOutput { step: batch.step, ..StepOutput::default() };
        let mut samples = batch.samples.iter();
        for span in &batch.spans {
            self.keep(span, batch);
            let wanted = match span.want {
                Want::None => 0..0,
                Want::Last => span.len() - 1..span.len(),
                Want::All => 0..span.len(),
                Want::Picked { .. } | Want::Hidden => panic!("the model has no encoder"),
            };
            for row in wanted {
                let sample = samples.next().expect("there is a sample row for each output row");
                let next = self.next(span, row);
                let token = match sample.mode {
                    SampleMode::Draw => next,
                    SampleMode::Score(token) => token,
                };
                if sample.mode == SampleMode::Draw {
                    self.last[span.slot as usize] = token;
                }
                let logprob = if sample.logprob { next as f32 } else { f32::NAN };
                output.rows.push(SampledRow { token, logprob, top_at: 0, top_len: 0 });
            }
        }
        assert!(samples.next().is_none(), "there is an output row for each sample row");
        output
    }

    /// The index in `tokens` of a position of the span's sequence.
    fn place(&self, span: &Span, position: usize) -> usize {
        let page = self.tables[span.slot as usize][position / PAGE];
        page as usize * PAGE + position % PAGE
    }

    /// Writes the tokens of a span to the pages.
    fn keep(&mut self, span: &Span, batch: &StepBatch) {
        if span.table == SpanTable::Sink {
            return;
        }
        let given = match span.tokens {
            SpanTokens::Given { at, len } => batch.tokens[at as usize..][..len as usize].to_vec(),
            SpanTokens::Drawn { at } => vec![batch.tokens[at as usize]],
            SpanTokens::Last => vec![self.last[span.slot as usize]],
        };
        for (position, token) in (span.start as usize..).zip(given) {
            let place = self.place(span, position);
            self.tokens[place] = token;
        }
    }

    /// The token after a row of a span.
    fn next(&self, span: &Span, row: usize) -> u32 {
        if span.table == SpanTable::Sink {
            return 1;
        }
        let places = (0..=span.start as usize + row).map(|position| self.place(span, position));
        after(places.map(|place| &self.tokens[place]))
    }
}

/// A step in flight, and the time when it leaves the last stage.
struct Flying {
    step: Box<Step>,
    reply: oneshot::Sender<Ran>,
    done: u64,
}

/// A step sent in an epoch, and its reply channel.
type Sent = (Epoch, Box<Step>, oneshot::Sender<Ran>);

/// The devices as the lanes see them.
struct Door {
    devices: usize,
    sent: UnboundedSender<Sent>,
    faults: AtomicU64,
    /// Whether the devices fail while the next request for chunks is answered.
    fails_at_question: AtomicBool,
    /// Whether the devices fail during the next slot update.
    fails_at_turn: AtomicBool,
}

impl Door {
    fn fail_if(&self, flag: &AtomicBool) {
        if flag.swap(false, Ordering::Relaxed) {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Devices for Door {
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<Running, DeviceError> {
        self.lasts(epoch)?;
        let (reply, ran) = oneshot::channel();
        let _ = self.sent.send((epoch, step, reply));
        Ok(Box::pin(async { ran.await.expect("the test completes each step") }))
    }

    fn epoch(&self) -> Epoch {
        Epoch(self.faults.load(Ordering::Relaxed))
    }

    fn lasts(&self, epoch: Epoch) -> Result<(), DeviceError> {
        if epoch == self.epoch() { Ok(()) } else { Err(fault()) }
    }

    fn count(&self) -> usize {
        self.devices
    }
}

fn fault() -> DeviceError {
    DeviceError::Fault("the test's fault".to_owned())
}

/// Stands between the lanes and the actors they make requests to, to inject faults.
struct Gate {
    prefill: Addr<Prefill>,
    kv: Addr<Kv>,
    door: Arc<Door>,
}

impl Actor for Gate {
    type Context = actix::Context<Gate>;
}

impl Handler<NextChunk> for Gate {
    type Result = ResponseFuture<Vec<Chunk>>;

    fn handle(&mut self, request: NextChunk, _: &mut Self::Context) -> Self::Result {
        let (answer, devices) = (self.prefill.send(request), self.door.clone());
        Box::pin(async move {
            let chunks = answer.await.unwrap_or_default();
            devices.fail_if(&devices.fails_at_question);
            chunks
        })
    }
}

impl Handler<Turn> for Gate {
    type Result = ResponseFuture<Plan>;

    fn handle(&mut self, turn: Turn, _: &mut Self::Context) -> Self::Result {
        let (answer, devices) = (self.kv.send(turn), self.door.clone());
        Box::pin(async move {
            let plan = answer.await.expect("kv replies");
            devices.fail_if(&devices.fails_at_turn);
            plan
        })
    }
}

/// Configuration of a test.
#[derive(Clone, Debug)]
pub struct Wish {
    pub slots: usize,
    pub lanes: usize,
    pub stages: usize,
    pub budget: usize,
    pub policy: Policy,
    pub shuffle: bool,
    /// Cost of a step on each stage, without its rows.
    pub step: u64,
    pub row: u64,
}

impl Wish {
    pub fn new(slots: usize, lanes: usize) -> Wish {
        let policy = Policy::Fused;
        Wish { slots, lanes, stages: lanes, budget: 24, policy, shuffle: true, step: 10, row: 0 }
    }
}

/// Whether a fault is reported before or after the results of the steps before it.
#[derive(Clone, Copy, PartialEq)]
pub enum Heard {
    First,
    Last,
}

/// A client: its request, and the events it has received.
pub struct Told {
    pub request: Request,
    stream: Option<TokenStream>,
    pub prompt: Vec<Token>,
    pub ids: Vec<u32>,
    /// Time of each token, on the simulated clock.
    pub at: Vec<u64>,
    pub end: Option<Result<FinishReason, RequestError>>,
    /// Whether the stream is closed, after an end event or without one.
    pub silent: bool,
}

/// The actors, the devices and the clock.
pub struct Rig {
    pub wish: Wish,
    pub intake: Addr<Intake>,
    pub kv: Addr<Kv>,
    pub status: Arc<Status>,
    door: Arc<Door>,
    sent: UnboundedReceiver<Sent>,
    flying: VecDeque<Flying>,
    memory: Memory,
    /// The epoch of the devices' state.
    lost: Epoch,
    number: u64,
    pub clock: u64,
    /// The time when each stage is free.
    free: Vec<u64>,
    pub told: Vec<Told>,
}

impl Rig {
    pub fn new(rig_config: Wish) -> Rig {
        let (sent_tx, sent) = unbounded_channel();
        let limits = StepLimits {
            slots: rig_config.slots,
            rows: rig_config.budget + rig_config.slots,
            logit_rows: rig_config.slots,
            positions: POSITIONS,
            source_positions: 0,
            page_positions: PAGE,
            top_logprobs: 0,
            biases: 4,
            vocab: VOCAB as usize,
            hidden: 0,
            attended: Share::ALL,
        };
        let Wish { slots, lanes, stages, policy, shuffle, budget, .. } = rig_config;
        let status = Arc::new(Status::new(Duration::ZERO, lanes));
        let pages = 1 + slots * POSITIONS / PAGE;
        let kv = Kv::new(slots, lanes, shuffle, PagePool::new(pages, PAGE)).start();
        let prefill =
            Prefill::new(kv.clone().recipient(), kv.clone().recipient(), policy, slots, lanes).start();
        let (faults, fails_at_chunk_request, fails_at_slot_update) = Default::default();
        let devices = Arc::new(Door {
            devices: stages,
            sent: sent_tx,
            faults,
            fails_at_question: fails_at_chunk_request,
            fails_at_turn: fails_at_slot_update,
        });
        let gate = Gate { prefill: prefill.clone(), kv: kv.clone(), door: devices.clone() }.start();
        let handles = Neighbours {
            prefill_next: gate.clone().recipient(),
            prefill_ahead: prefill.clone().recipient(),
            prefill_forget: prefill.clone().recipient(),
            kv_turn: gate.recipient(),
            kv_reset: kv.clone().recipient(),
            devices: devices.clone(),
            status: status.clone(),
        };
        let config = DecodeConfig { policy, limits, token_budget: budget, eos: Vec::new(), lanes };
        for lane in 0..lanes {
            Decode::new(lane, handles.clone(), config.clone()).start();
        }
        let intake = Intake::new(intake_limits(slots, pages), prefill.recipient(), status.clone()).start();
        Rig {
            intake,
            kv,
            status,
            lost: devices.epoch(),
            door: devices,
            sent,
            flying: VecDeque::new(),
            memory: Memory::new(slots, pages),
            number: 0,
            clock: 0,
            free: vec![0; stages],
            told: Vec::new(),
            wish: rig_config,
        }
    }

    /// Submits a request; returns its index in `clients`.
    pub async fn submit(&mut self, request: Request) -> usize {
        let message = Submit { requests: vec![request.clone()], standing: Standing::New };
        let streams = within(self.intake.send(message)).await.expect("intake replies");
        let stream = streams.expect("the request is accepted").pop();
        let (prompt_tokens, ids, token_times, end, closed) =
            (Vec::new(), Vec::new(), Vec::new(), None, false);
        self.told.push(Told {
            request,
            stream,
            prompt: prompt_tokens,
            ids,
            at: token_times,
            end,
            silent: closed,
        });
        self.told.len() - 1
    }

    pub fn hang_up(&mut self, number: usize) {
        self.told[number].stream = None;
    }

    /// Runs the actors until they wait for a step in flight, and reads the events sent meanwhile.
    pub async fn calm(&mut self) {
        let mut quiet = 0;
        while quiet < 25 {
            tokio::task::yield_now().await;
            quiet += 1;
            if self.depart_all() {
                quiet = 0;
            }
        }
        let clock = self.clock;
        self.told.iter_mut().for_each(|told| told.listen(clock));
    }

    /// Receives the steps sent by the lanes, and applies faults. Returns whether there were any.
    fn depart_all(&mut self) -> bool {
        let mut any = self.lost != self.door.epoch();
        if any {
            self.lost = self.door.epoch();
            self.memory = Memory::new(self.wish.slots, self.memory.tokens.len() / PAGE);
            for Flying { step, reply, .. } in self.flying.drain(..) {
                let _ = reply.send(Ran { step, result: Err(fault()) });
            }
        }
        while let Ok((epoch, step, reply)) = self.sent.try_recv() {
            any = true;
            match self.door.lasts(epoch) {
                Ok(()) => self.depart(step, reply),
                result => _ = reply.send(Ran { step, result }),
            }
        }
        any
    }

    /// Schedules a step through the pipeline: it enters each stage when it has left the previous one and the
    /// stage is free.
    fn depart(&mut self, mut step: Box<Step>, reply: oneshot::Sender<Ran>) {
        self.number += 1;
        step.batch.step = self.number;
        self.check(&step.batch);
        let cost = self.wish.step + self.wish.row * step.batch.rows() as u64;
        let mut now = self.clock;
        for free in &mut self.free {
            now = now.max(*free) + cost;
            *free = now;
        }
        self.flying.push_back(Flying { step, reply, done: now });
    }

    /// Asserts that a step refers to slots of its lane only, and contains its tokens if there are several
    /// devices.
    fn check(&self, batch: &StepBatch) {
        let own =
            divided(self.wish.slots, self.wish.lanes).nth(batch.lane as usize).expect("the lane exists");
        assert!(batch.spans.iter().all(|span| own.contains(&span.slot)), "{batch:?} is not all in {own:?}");
        assert!(batch.rows() <= self.wish.budget + self.wish.slots);
        let single = self.wish.stages == 1;
        assert!(single || batch.spans.iter().all(|span| span.tokens != SpanTokens::Last), "{batch:?}");
    }

    /// The steps in flight, in order.
    pub fn flying(&self) -> Vec<&StepBatch> {
        self.flying.iter().map(|flying| &flying.step.batch).collect()
    }

    /// Completes the oldest step in flight once all actors wait. Returns whether there was one.
    pub async fn land(&mut self) -> bool {
        self.calm().await;
        let Some(Flying { mut step, reply, done }) = self.flying.pop_front() else { return false };
        self.clock = done;
        step.output = self.memory.run(&step.batch);
        let _ = reply.send(Ran { step, result: Ok(()) });
        true
    }

    /// Completes the oldest step in flight without results, which makes its lane panic.
    pub fn land_without_results(&mut self) {
        let Some(Flying { mut step, reply, done }) = self.flying.pop_front() else { return };
        self.clock = done;
        step.output = StepOutput::default();
        let _ = reply.send(Ran { step, result: Ok(()) });
    }

    /// Makes the devices fail after the first `through` steps in flight. The others fail together, and their
    /// lanes receive the fault before or after the other lanes receive their results, as `order` says.
    pub fn fail(&mut self, through: usize, order: Heard) {
        self.depart_all();
        let mut replies: Vec<(oneshot::Sender<Ran>, Ran)> = Vec::new();
        for (number, Flying { mut step, reply, .. }) in self.flying.drain(..).enumerate() {
            let result = if number < through { Ok(()) } else { Err(fault()) };
            if result.is_ok() {
                step.output = self.memory.run(&step.batch);
            }
            replies.push((reply, Ran { step, result }));
        }
        self.door.faults.fetch_add(1, Ordering::Relaxed);
        if order == Heard::First {
            replies.rotate_left(through);
        }
        for (reply, ran) in replies {
            let _ = reply.send(ran);
        }
    }

    /// Makes the devices fail while the next request for chunks is answered.
    pub fn fail_at_question(&self) {
        self.door.fails_at_question.store(true, Ordering::Relaxed);
    }

    /// Makes the devices fail during the next slot update.
    pub fn fail_at_turn(&self) {
        self.door.fails_at_turn.store(true, Ordering::Relaxed);
    }

    /// Completes all steps until nothing is left.
    pub async fn run(&mut self) {
        while self.land().await {}
    }

    /// Asserts that all slots, pages and permits are released.
    pub async fn all_home(&self) {
        let held = within(self.kv.send(Held)).await.expect("kv replies");
        let permits = within(self.intake.send(FreePermits)).await.expect("intake replies");
        assert_eq!((held, permits), ((0, 0), self.wish.slots));
    }
}

impl Told {
    fn listen(&mut self, clock: u64) {
        let mut context = Context::from_waker(Waker::noop());
        while let Some(stream) = &mut self.stream {
            match stream.poll_next(&mut context) {
                Poll::Pending => return,
                Poll::Ready(None) => {
                    self.silent = true;
                    self.stream = None;
                }
                Poll::Ready(Some(event)) => self.hear(event, clock),
            }
        }
    }

    fn hear(&mut self, event: TokenEvent, clock: u64) {
        assert!(self.end.is_none(), "{event:?} after the end");
        match event {
            TokenEvent::Prompt(tokens) => self.prompt = tokens,
            TokenEvent::Token(token) => {
                self.ids.push(token.id);
                self.at.push(clock);
            }
            TokenEvent::Finished(reason) => self.end = Some(Ok(reason)),
            TokenEvent::Failed(error) => self.end = Some(Err(error)),
            event => panic!("unexpected {event:?}"),
        }
    }

    /// Asserts that the request ended with the right tokens, and with the prompt's log-probabilities if
    /// requested.
    pub fn assert_whole(&self) {
        assert_eq!(self.end, Some(Ok(FinishReason::Length)));
        assert_eq!(self.ids, expected(&self.request));
        if self.request.prompt_logprobs {
            let reported = |token: &Token| (token.id, token.logprob);
            let likely = |at: usize| (at > 0).then(|| after(&self.request.prompt[..at]) as f32);
            let given = self.request.prompt.iter().enumerate().map(|(at, id)| (*id, likely(at)));
            assert!(self.prompt.iter().map(reported).eq(given), "{:?}", self.prompt);
        }
    }
}

fn intake_limits(slots: usize, pages: usize) -> IntakeLimits {
    IntakeLimits {
        slots,
        max_waiting: 1000,
        context: POSITIONS,
        source_context: 0,
        vocab: VOCAB as usize,
        top_logprobs: 0,
        biases: 4,
        eos: 0,
        pages: pages - 1,
        page_positions: PAGE,
        kind: Kind::Decoder,
        has_head: true,
        endpoints: vec!["/v1/completions"],
    }
}
