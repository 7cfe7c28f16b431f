//! All actors of the control thread, with devices in the test's hand: a line of stages whose steps take the time that the
//! test says, on a clock of its own, and a model that remembers through slots and page tables.
//!
//! Invariant: a token depends on every token before it as the devices' memory has them, so that whatever went to a wrong
//! slot, page or place in the order shows in the tokens.

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

/// The token after these.
pub fn after<'a>(tokens: impl IntoIterator<Item = &'a u32>) -> u32 {
    tokens.into_iter().fold(17, |sum: u32, token| sum.wrapping_mul(31).wrapping_add(*token + 7) % 65_521)
        % VOCAB
}

/// What must come of a greedy request.
pub fn expected(request: &Request) -> Vec<u32> {
    let mut all = request.prompt.to_vec();
    for _ in 0..request.max_tokens {
        all.push(after(&all));
    }
    all.split_off(request.prompt.len())
}

/// What the devices remember.
pub struct Memory {
    /// Of each slot, page by page.
    tables: Vec<Vec<Page>>,
    last: Vec<u32>,
    /// What is in the pages, position by position.
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
                Want::Picked { .. } | Want::Hidden => panic!("there is no encoder"),
            };
            for row in wanted {
                let sample = samples.next().expect("a sample for each wanted row");
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
        assert!(samples.next().is_none(), "a wanted row for each sample");
        output
    }

    /// Where a position of the span's sequence is kept.
    fn place(&self, span: &Span, position: usize) -> usize {
        let page = self.tables[span.slot as usize][position / PAGE];
        page as usize * PAGE + position % PAGE
    }

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

    fn next(&self, span: &Span, row: usize) -> u32 {
        if span.table == SpanTable::Sink {
            return 1;
        }
        let places = (0..=span.start as usize + row).map(|position| self.place(span, position));
        after(places.map(|place| &self.tokens[place]))
    }
}

/// A step in flight, and when it comes out of the last stage.
struct Flying {
    step: Box<Step>,
    reply: oneshot::Sender<Ran>,
    done: u64,
}

/// A step that was sent in that epoch.
type Sent = (Epoch, Box<Step>, oneshot::Sender<Ran>);

/// Where the lanes send their steps.
struct Door {
    devices: usize,
    sent: UnboundedSender<Sent>,
    faults: AtomicU64,
    /// They fail while the next question for chunks is answered.
    fails_at_question: AtomicBool,
    /// They fail while it is next told where everybody is.
    fails_at_turn: AtomicBool,
}

impl Door {
    fn fail_if(&self, wanted: &AtomicBool) {
        if wanted.swap(false, Ordering::Relaxed) {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Devices for Door {
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<Running, DeviceError> {
        self.lasts(epoch)?;
        let (reply, ran) = oneshot::channel();
        let _ = self.sent.send((epoch, step, reply));
        Ok(Box::pin(async { ran.await.expect("the test answers each step") }))
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

/// Stands between the lanes and those whom they ask.
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

    fn handle(&mut self, question: NextChunk, _: &mut Self::Context) -> Self::Result {
        let (answer, door) = (self.prefill.send(question), self.door.clone());
        Box::pin(async move {
            let chunks = answer.await.unwrap_or_default();
            door.fail_if(&door.fails_at_question);
            chunks
        })
    }
}

impl Handler<Turn> for Gate {
    type Result = ResponseFuture<Plan>;

    fn handle(&mut self, turn: Turn, _: &mut Self::Context) -> Self::Result {
        let (answer, door) = (self.kv.send(turn), self.door.clone());
        Box::pin(async move {
            let plan = answer.await.expect("kv answers");
            door.fail_if(&door.fails_at_turn);
            plan
        })
    }
}

/// How a test wants it.
#[derive(Clone, Debug)]
pub struct Wish {
    pub slots: usize,
    pub lanes: usize,
    pub stages: usize,
    pub budget: usize,
    pub policy: Policy,
    pub shuffle: bool,
    /// What a step costs each stage, before its rows.
    pub step: u64,
    pub row: u64,
}

impl Wish {
    pub fn new(slots: usize, lanes: usize) -> Wish {
        let policy = Policy::Fused;
        Wish { slots, lanes, stages: lanes, budget: 24, policy, shuffle: true, step: 10, row: 0 }
    }
}

/// When a fault is heard of, beside what the steps before it gave.
#[derive(Clone, Copy, PartialEq)]
pub enum Heard {
    First,
    Last,
}

/// What came of a request so far.
pub struct Told {
    pub request: Request,
    stream: Option<TokenStream>,
    pub prompt: Vec<Token>,
    pub ids: Vec<u32>,
    /// When each token came, on the test's clock.
    pub at: Vec<u64>,
    pub end: Option<Result<FinishReason, RequestError>>,
    /// The stream ended, with a word or without.
    pub silent: bool,
}

/// The actors, the devices, the clock.
pub struct Rig {
    pub wish: Wish,
    pub intake: Addr<Intake>,
    pub kv: Addr<Kv>,
    pub status: Arc<Status>,
    door: Arc<Door>,
    sent: UnboundedReceiver<Sent>,
    flying: VecDeque<Flying>,
    memory: Memory,
    /// How often the devices lost it.
    lost: Epoch,
    number: u64,
    pub clock: u64,
    /// When each stage is free.
    free: Vec<u64>,
    pub told: Vec<Told>,
}

impl Rig {
    pub fn new(wish: Wish) -> Rig {
        let (sent_tx, sent) = unbounded_channel();
        let limits = StepLimits {
            slots: wish.slots,
            rows: wish.budget + wish.slots,
            logit_rows: wish.slots,
            positions: POSITIONS,
            source_positions: 0,
            page_positions: PAGE,
            top_logprobs: 0,
            biases: 4,
            vocab: VOCAB as usize,
            hidden: 0,
            attended: Share::ALL,
        };
        let Wish { slots, lanes, stages, policy, shuffle, budget, .. } = wish;
        let status = Arc::new(Status::new(Duration::ZERO, lanes));
        let pages = 1 + slots * POSITIONS / PAGE;
        let kv = Kv::new(slots, lanes, shuffle, PagePool::new(pages, PAGE)).start();
        let prefill =
            Prefill::new(kv.clone().recipient(), kv.clone().recipient(), policy, slots, lanes).start();
        let (faults, fails_at_question, fails_at_turn) = Default::default();
        let door =
            Arc::new(Door { devices: stages, sent: sent_tx, faults, fails_at_question, fails_at_turn });
        let gate = Gate { prefill: prefill.clone(), kv: kv.clone(), door: door.clone() }.start();
        let neighbours = Neighbours {
            prefill_next: gate.clone().recipient(),
            prefill_ahead: prefill.clone().recipient(),
            prefill_forget: prefill.clone().recipient(),
            kv_turn: gate.recipient(),
            kv_reset: kv.clone().recipient(),
            devices: door.clone(),
            status: status.clone(),
        };
        let config = DecodeConfig { policy, limits, token_budget: budget, eos: Vec::new(), lanes };
        for lane in 0..lanes {
            Decode::new(lane, neighbours.clone(), config.clone()).start();
        }
        let intake = Intake::new(intake_limits(slots, pages), prefill.recipient(), status.clone()).start();
        Rig {
            intake,
            kv,
            status,
            lost: door.epoch(),
            door,
            sent,
            flying: VecDeque::new(),
            memory: Memory::new(slots, pages),
            number: 0,
            clock: 0,
            free: vec![0; stages],
            told: Vec::new(),
            wish,
        }
    }

    /// Hands a request in; its place in `told`.
    pub async fn submit(&mut self, request: Request) -> usize {
        let message = Submit { requests: vec![request.clone()], standing: Standing::New };
        let streams = within(self.intake.send(message)).await.expect("intake answers");
        let stream = streams.expect("it is taken in").pop();
        let (prompt, ids, at, end, silent) = (Vec::new(), Vec::new(), Vec::new(), None, false);
        self.told.push(Told { request, stream, prompt, ids, at, end, silent });
        self.told.len() - 1
    }

    pub fn hang_up(&mut self, number: usize) {
        self.told[number].stream = None;
    }

    /// Waits until nothing moves but what a step in flight would move, and reads what was told meanwhile.
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

    /// Whether anything was sent, or lost.
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

    /// A step enters the first stage, and each further one when it is through the one before and that one is free.
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

    /// A step names slots of its lane alone, and says its tokens where there are many devices.
    fn check(&self, batch: &StepBatch) {
        let own =
            divided(self.wish.slots, self.wish.lanes).nth(batch.lane as usize).expect("there is such a lane");
        assert!(batch.spans.iter().all(|span| own.contains(&span.slot)), "{batch:?} is not all in {own:?}");
        assert!(batch.rows() <= self.wish.budget + self.wish.slots);
        let single = self.wish.stages == 1;
        assert!(single || batch.spans.iter().all(|span| span.tokens != SpanTokens::Last), "{batch:?}");
    }

    /// The steps in flight, in order.
    pub fn flying(&self) -> Vec<&StepBatch> {
        self.flying.iter().map(|flying| &flying.step.batch).collect()
    }

    /// Lets the first step land that is in flight when all is calm. Whether there was one.
    pub async fn land(&mut self) -> bool {
        self.calm().await;
        let Some(Flying { mut step, reply, done }) = self.flying.pop_front() else { return false };
        self.clock = done;
        step.output = self.memory.run(&step.batch);
        let _ = reply.send(Ran { step, result: Ok(()) });
        true
    }

    /// The first step in flight comes back without results: what only a bug could do.
    pub fn land_without_results(&mut self) {
        let Some(Flying { mut step, reply, done }) = self.flying.pop_front() else { return };
        self.clock = done;
        step.output = StepOutput::default();
        let _ = reply.send(Ran { step, result: Ok(()) });
    }

    /// The devices fail when that many of the steps in flight are through. The others fail together, and their lanes hear
    /// of it before or after the lanes of those that are through hear of these.
    pub fn fail(&mut self, through: usize, heard: Heard) {
        self.depart_all();
        let mut told: Vec<(oneshot::Sender<Ran>, Ran)> = Vec::new();
        for (number, Flying { mut step, reply, .. }) in self.flying.drain(..).enumerate() {
            let result = if number < through { Ok(()) } else { Err(fault()) };
            if result.is_ok() {
                step.output = self.memory.run(&step.batch);
            }
            told.push((reply, Ran { step, result }));
        }
        self.door.faults.fetch_add(1, Ordering::Relaxed);
        if heard == Heard::First {
            told.rotate_left(through);
        }
        for (reply, ran) in told {
            let _ = reply.send(ran);
        }
    }

    /// The devices fail while the next question for chunks is answered.
    pub fn fail_at_question(&self) {
        self.door.fails_at_question.store(true, Ordering::Relaxed);
    }

    /// The devices fail while it is next told where everybody is.
    pub fn fail_at_turn(&self) {
        self.door.fails_at_turn.store(true, Ordering::Relaxed);
    }

    /// Lets everything land.
    pub async fn run(&mut self) {
        while self.land().await {}
    }

    /// Slots, pages and permits are where they belong when nobody is left.
    pub async fn all_home(&self) {
        let held = within(self.kv.send(Held)).await.expect("kv answers");
        let permits = within(self.intake.send(FreePermits)).await.expect("intake answers");
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
        assert!(self.end.is_none(), "nothing comes after the end, but {event:?} did");
        match event {
            TokenEvent::Prompt(tokens) => self.prompt = tokens,
            TokenEvent::Token(token) => {
                self.ids.push(token.id);
                self.at.push(clock);
            }
            TokenEvent::Finished(reason) => self.end = Some(Ok(reason)),
            TokenEvent::Failed(error) => self.end = Some(Err(error)),
            event => panic!("nobody asked for {event:?}"),
        }
    }

    /// It came to its end with the right tokens, and was told of its prompt if it asked.
    pub fn assert_whole(&self) {
        assert_eq!(self.end, Some(Ok(FinishReason::Length)));
        assert_eq!(self.ids, expected(&self.request));
        if self.request.prompt_logprobs {
            let told = |token: &Token| (token.id, token.logprob);
            let likely = |at: usize| (at > 0).then(|| after(&self.request.prompt[..at]) as f32);
            let given = self.request.prompt.iter().enumerate().map(|(at, id)| (*id, likely(at)));
            assert!(self.prompt.iter().map(told).eq(given), "{:?}", self.prompt);
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
