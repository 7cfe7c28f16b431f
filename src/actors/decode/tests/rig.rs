//! All actors of the control thread with simulated devices: a pipeline of stages whose steps take configured
//! times on a simulated clock, and a model whose state is in slots and page tables.
//!
//! Invariant: a token depends on every token before it as the devices' state has them, so that a write to a
//! wrong slot, page or position shows in the tokens.

use super::super::beams::beam_params;
use super::super::{Decode, DecodeConfig, LoopHandles};
use crate::actors::device::{Step, StepResult};
use crate::actors::group::{Devices, Epoch, SentStep};
use crate::actors::intake::{GetFreePermits, Intake};
use crate::actors::kv::{GetUsage, IterationUpdate, KvManager, SlotPlan};
use crate::actors::limits::IntakeLimits;
use crate::actors::live::LiveView;
use crate::actors::prefill::{NextChunks, Prefill, ScheduledWork};
use crate::actors::prefix_rules::PrefixRules;
use crate::actors::queue::SharedQueue;
use crate::actors::status::Status;
use crate::actors::stream::{Submit, SubmitKind, TokenStream};
use crate::actors::testing::with_timeout;
use crate::config::Policy;
use crate::decoding::HostPool;
use crate::decoding::beams::{BeamSearch, BeamStep, Hypothesis, NewBeam};
use crate::memory::{PagePool, split_slots};
use crate::model::spec::Kind;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use crate::telemetry;
use actix::{Actor, Addr, Handler, ResponseFuture};
use mainstem_kernels::batch::{DraftSpan, NULL_PAGE, Page, Slot, is_allowed};
use mainstem_kernels::random::philox;
use mainstem_kernels::{
    DeviceError, Fraction, KvTable, RowFailure, SampleMode, SampledToken, Span, SpanOutput, SpanTable,
    SpanTokens, StepBatch, StepLimits, StepOutput,
};
use metrics_exporter_prometheus::PrometheusRecorder;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

pub const PAGE: usize = 4;
pub const VOCAB: u32 = 97;
const POSITIONS: usize = 160;

/// The token that the model generates after `tokens`.
pub fn next_token_after<'a>(tokens: impl IntoIterator<Item = &'a u32>) -> u32 {
    tokens.into_iter().fold(17, |sum: u32, token| sum.wrapping_mul(31).wrapping_add(*token + 7) % 65_521)
        % VOCAB
}

/// The most likely tokens where the most likely one is `next`, with their log-probabilities.
fn candidates(next: u32) -> impl Iterator<Item = (u32, f32)> {
    // Different from place to place, so that searches change their minds.
    (0..VOCAB).map(move |rank| ((next + rank) % VOCAB, -0.3 - rank as f32 * (0.1 + (next % 7) as f32 * 0.05)))
}

/// The result of a search for `request`, computed from all tokens of each beam.
pub fn expected_beams(request: &Request) -> Vec<Hypothesis> {
    let params = beam_params(request, &[]).expect("it is a search");
    let mut search = BeamSearch::new(params).expect("its parameters are valid");
    let mut beams = vec![request.prompt.to_vec()];
    loop {
        let row = |beam: &Vec<u32>| candidates(next_token_after(beam)).take(20).collect::<Vec<_>>();
        let rows: Vec<_> = beams.iter().map(row).collect();
        match search.advance(rows.iter().map(Vec::as_slice)) {
            BeamStep::Done => return search.finish(),
            BeamStep::Continue(next) => {
                let grow = |beam: &NewBeam| [&beams[beam.parent as usize][..], &[beam.token]].concat();
                beams = next.iter().map(grow).collect();
            }
        }
    }
}

/// The token that is sampled in the place of `token` if some are banned: the next one that is not.
fn next_allowed(token: u32, is_banned: impl Fn(u32) -> bool) -> u32 {
    let mut others = (0..VOCAB).map(|offset| (token + offset) % VOCAB);
    others.find(|token| !is_banned(*token)).expect("not all tokens are banned")
}

/// The tokens that a greedy request must generate, including the stop token that ends it.
pub fn expected(request: &Request) -> Vec<u32> {
    let mut all = request.prompt.to_vec();
    for generated in 0..request.max_tokens {
        let stops = |token| request.stop_ids.contains(&token);
        let token =
            next_allowed(next_token_after(&all), |token| generated < request.min_tokens && stops(token));
        all.push(token);
        if stops(token) {
            break;
        }
    }
    all.split_off(request.prompt.len())
}

/// The state of the simulated devices.
pub struct FakeModel {
    /// Page table of each slot.
    tables: Vec<Vec<Page>>,
    /// Last sampled token of each slot.
    last_tokens: Vec<u32>,
    /// Token at each position of the pages.
    tokens: Vec<u32>,
    /// Token at each position of the draft model's pages.
    draft_tokens: Vec<u32>,
    /// One of so many drafts is wrong; none if it is 0.
    pub draft_errors: u32,
    /// The time of a pass of the draft model; a step takes about 1 ms.
    pub pass_time: Duration,
    draft_context: usize,
}

impl FakeModel {
    fn new(slots: usize, pages: usize, draft_context: usize) -> FakeModel {
        let tables = vec![vec![NULL_PAGE; POSITIONS / PAGE]; slots];
        let tokens = vec![0; pages * PAGE];
        FakeModel {
            tables,
            last_tokens: vec![0; slots],
            draft_tokens: tokens.clone(),
            tokens,
            draft_errors: 4,
            pass_time: Duration::from_micros(1),
            draft_context,
        }
    }

    fn run(&mut self, Step { batch, late, .. }: &Step) -> StepOutput {
        for m in &batch.moves {
            let (from, to) = (m.from as usize, m.to as usize);
            self.tables[to] = self.tables[from].clone();
            self.last_tokens[to] = self.last_tokens[from];
        }
        for entry in batch.table_updates.iter().filter(|entry| entry.table == KvTable::Own) {
            self.tables[entry.slot as usize][entry.index as usize] = entry.page;
        }
        for copy in &batch.page_copies {
            let from = copy.from as usize * PAGE;
            self.tokens.copy_within(from..from + PAGE, copy.to as usize * PAGE);
            self.draft_tokens.copy_within(from..from + PAGE, copy.to as usize * PAGE);
        }
        let mut output = StepOutput { step: batch.step, ..StepOutput::default() };
        let mut made: BTreeMap<Slot, Vec<u32>> = BTreeMap::new();
        for span in &batch.drafts {
            let drafts = self.make_drafts(span, batch);
            output.drafts.extend(&drafts);
            if span.count > 0 {
                assert!(made.insert(span.slot, drafts).is_none(), "a slot makes drafts once");
            }
        }
        // Rows and drafts cost little beside a step.
        let passes = batch.drafts.iter().map(|span| span.count).max().unwrap_or(0);
        output.times.draft = self.pass_time * passes;
        output.times.forward = Duration::from_micros(1000 + batch.rows() as u64) + output.times.draft;
        let mut samples = batch.sampling.iter().enumerate();
        for span in &batch.spans {
            self.write_tokens(span, batch, made.get(&span.slot));
            if span.output == SpanOutput::Hidden {
                let places =
                    (0..span.len()).map(|row| self.cache_index(span.slot, span.start as usize + row));
                output.hidden.extend(places.map(|place| self.tokens[place] as f32));
                continue;
            }
            let wanted = match span.output {
                SpanOutput::None => 0..0,
                SpanOutput::Last => span.len() - 1..span.len(),
                SpanOutput::All => 0..span.len(),
                SpanOutput::Selected { .. } | SpanOutput::Hidden => panic!("the model has no encoder"),
            };
            for row in wanted {
                let (number, sample) = samples.next().expect("there is a sample row for each output row");
                let next = self.next_token(span, row);
                let biases = &batch.logit_biases[sample.bias_at as usize..][..sample.bias_len as usize];
                let mut mask = [u32::MAX; VOCAB.div_ceil(32) as usize];
                if sample.masked {
                    assert_eq!(late.wait_mask(number, &mut mask), Ok(true), "a mask for each row");
                }
                let token = match sample.mode {
                    SampleMode::Sample | SampleMode::Host => next_allowed(next, |token| {
                        biases.contains(&(token, f32::NEG_INFINITY)) || !is_allowed(&mask, token)
                    }),
                    SampleMode::Score(token) => token,
                };
                if sample.mode == SampleMode::Sample {
                    self.last_tokens[span.slot as usize] = token;
                }
                let logprob = if sample.logprob { next as f32 } else { f32::NAN };
                let (top_at, top_len) = (output.top_logprobs.len() as u32, sample.top_logprobs.into());
                output.top_logprobs.extend(candidates(next).take(sample.top_logprobs.into()));
                output.tokens.push(SampledToken { logprob, top_at, top_len, ..SampledToken::new(token) });
            }
        }
        assert!(samples.next().is_none(), "there is an output row for each sample row");
        output
    }

    /// The index in `tokens` of a position of a slot's sequence.
    fn cache_index(&self, slot: Slot, position: usize) -> usize {
        let page = self.tables[slot as usize][position / PAGE];
        page as usize * PAGE + position % PAGE
    }

    /// Writes the known tokens of a draft span, and returns the drafts after them.
    fn make_drafts(&mut self, span: &DraftSpan, batch: &StepBatch) -> Vec<u32> {
        let (SpanTokens::Given { at, len } | SpanTokens::Generated { at, len }) = span.tokens else {
            panic!("{span:?}")
        };
        assert!((span.start + len + span.count) as usize <= self.draft_context, "{span:?}");
        let mut all = batch.tokens[at as usize..][..len as usize].to_vec();
        for number in 0..len + span.count {
            let position = (span.start + number) as usize;
            let place = self.cache_index(span.slot, position);
            if number >= len {
                let before = (0..position).map(|before| self.cache_index(span.slot, before));
                let next = next_token_after(before.map(|place| &self.draft_tokens[place]));
                let errs =
                    self.draft_errors > 0 && (position as u32 * 7 + next).is_multiple_of(self.draft_errors);
                all.push((next + u32::from(errs)) % VOCAB);
            }
            if number + 1 < len + span.count || span.count == 0 {
                self.draft_tokens[place] = all[number as usize];
            }
        }
        all.split_off(len as usize)
    }

    /// Writes the tokens of a span to the pages.
    fn write_tokens(&mut self, span: &Span, batch: &StepBatch, drafts: Option<&Vec<u32>>) {
        if span.table == SpanTable::Null {
            return;
        }
        let given = match span.tokens {
            SpanTokens::Given { at, len } | SpanTokens::Generated { at, len } => {
                batch.tokens[at as usize..][..len as usize].to_vec()
            }
            SpanTokens::Last => vec![self.last_tokens[span.slot as usize]],
            SpanTokens::Drafted { at, len } => {
                let drafts = drafts.expect("the step makes drafts for the slot");
                [&[batch.tokens[at as usize]], &drafts[..len as usize - 1]].concat()
            }
        };
        for (position, token) in (span.start as usize..).zip(given) {
            let place = self.cache_index(span.slot, position);
            self.tokens[place] = token;
        }
    }

    /// The token after a row of a span.
    fn next_token(&self, span: &Span, row: usize) -> u32 {
        if span.table == SpanTable::Null {
            return 1;
        }
        let places = (0..=span.start as usize + row).map(|position| self.cache_index(span.slot, position));
        next_token_after(places.map(|place| &self.tokens[place]))
    }
}

/// A step in flight, and the time when it leaves the last stage.
struct InFlight {
    step: Box<Step>,
    reply: oneshot::Sender<StepResult>,
    /// The signal after the last layer, until it is sent.
    last_layer: Option<oneshot::Sender<()>>,
    done_at: u64,
}

/// A step as the devices receive it: sent in an epoch, with the channels of its result and of its signal.
type ReceivedStep = (Epoch, Box<Step>, oneshot::Sender<StepResult>, oneshot::Sender<()>);

/// The devices as the lanes see them.
struct FakeDevices {
    device_count: usize,
    sent: UnboundedSender<ReceivedStep>,
    faults: AtomicU64,
    /// Whether the devices fail while the next request for chunks is answered.
    fails_at_chunk_request: AtomicBool,
    /// Whether the devices fail during the next slot update.
    fails_at_slot_update: AtomicBool,
    /// Number of slot plans that the lanes got.
    plans: AtomicUsize,
}

impl FakeDevices {
    fn fail_once_if(&self, flag: &AtomicBool) {
        if flag.swap(false, Ordering::Relaxed) {
            self.faults.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Devices for FakeDevices {
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<SentStep, DeviceError> {
        self.check_epoch(epoch)?;
        let (reply, ran) = oneshot::channel();
        let (signal, last_layer) = oneshot::channel();
        let _ = self.sent.send((epoch, step, reply, signal));
        let result = Box::pin(async { ran.await.expect("the test completes each step") });
        Ok(SentStep { result, last_layer })
    }

    fn epoch(&self) -> Epoch {
        Epoch(self.faults.load(Ordering::Relaxed))
    }

    fn check_epoch(&self, epoch: Epoch) -> Result<(), DeviceError> {
        if epoch == self.epoch() { Ok(()) } else { Err(fault()) }
    }

    fn count(&self) -> usize {
        self.device_count
    }
}

fn fault() -> DeviceError {
    DeviceError::Fault("the test's fault".to_owned())
}

/// Stands between the lanes and the actors they make requests to, to inject faults.
struct FaultInjector {
    prefill: Addr<Prefill>,
    kv: Addr<KvManager>,
    devices: Arc<FakeDevices>,
}

impl Actor for FaultInjector {
    type Context = actix::Context<FaultInjector>;
}

impl Handler<NextChunks> for FaultInjector {
    type Result = ResponseFuture<ScheduledWork>;

    fn handle(&mut self, request: NextChunks, _: &mut Self::Context) -> Self::Result {
        let (answer, devices) = (self.prefill.send(request), self.devices.clone());
        Box::pin(async move {
            let chunks = answer.await.unwrap_or_default();
            devices.fail_once_if(&devices.fails_at_chunk_request);
            chunks
        })
    }
}

impl Handler<IterationUpdate> for FaultInjector {
    type Result = ResponseFuture<SlotPlan>;

    fn handle(&mut self, update: IterationUpdate, _: &mut Self::Context) -> Self::Result {
        let (answer, devices) = (self.kv.send(update), self.devices.clone());
        Box::pin(async move {
            let plan = answer.await.expect("kv replies");
            devices.plans.fetch_add(1, Ordering::Relaxed);
            devices.fail_once_if(&devices.fails_at_slot_update);
            plan
        })
    }
}

/// Configuration of a test.
#[derive(Clone, Debug)]
pub struct RigConfig {
    pub slots: usize,
    pub lanes: usize,
    pub stages: usize,
    pub budget: usize,
    pub policy: Policy,
    pub shuffle: bool,
    pub run_ahead: bool,
    pub signals: Signals,
    /// Cost of a step on each stage, without its rows.
    pub step_cost: u64,
    pub row_cost: u64,
    /// Number of pages; enough for all slots if `None`.
    pub pages: Option<usize>,
    pub prefix_cache: bool,
    /// Number of positions that the draft model can compute.
    pub draft_context: usize,
    pub max_waiting: usize,
}

impl RigConfig {
    pub fn new(slots: usize, lanes: usize) -> RigConfig {
        let policy = Policy::Fused;
        RigConfig {
            slots,
            lanes,
            stages: lanes,
            budget: 24,
            policy,
            shuffle: true,
            run_ahead: true,
            signals: Signals::Always,
            step_cost: 10,
            row_cost: 0,
            pages: None,
            prefix_cache: true,
            draft_context: POSITIONS,
            max_waiting: 1000,
        }
    }
}

/// Which steps the lanes are told have passed their last layer, before they get the results.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Signals {
    Never,
    Always,
    /// Random ones, from a seed.
    Sometimes(u32),
}

/// Whether a fault is reported before or after the results of the steps before it.
#[derive(Clone, Copy, PartialEq)]
pub enum FaultOrder {
    First,
    Last,
}

/// A client: its request, and the events it has received.
pub struct Client {
    pub request: Request,
    stream: Option<TokenStream>,
    /// Number of cached prompt tokens, once it has started.
    pub cached: Option<usize>,
    pub prompt_tokens: Vec<Token>,
    /// Score of a beam search's result.
    pub score: Option<f32>,
    /// Numbers of drafts that were made and accepted.
    pub speculated: Option<(usize, usize)>,
    pub ids: Vec<u32>,
    /// The vector of a text.
    pub vector: Option<Vec<f32>>,
    /// Time of each token, on the simulated clock.
    pub token_times: Vec<u64>,
    pub end: Option<Result<FinishReason, RequestError>>,
    /// Whether the stream is closed, after an end event or without one.
    pub closed: bool,
}

/// The actors, the devices and the clock.
pub struct Rig {
    pub config: RigConfig,
    pub intake: Addr<Intake>,
    pub kv: Addr<KvManager>,
    pub status: Arc<Status>,
    pub queue: SharedQueue,
    devices: Arc<FakeDevices>,
    recorder: PrometheusRecorder,
    sent: UnboundedReceiver<ReceivedStep>,
    in_flight: VecDeque<InFlight>,
    pub model: FakeModel,
    /// The epoch of the devices' state.
    epoch: Epoch,
    steps_sent: u64,
    pub clock: u64,
    /// The time when each stage is free.
    stage_free_at: Vec<u64>,
    pub clients: Vec<Client>,
}

impl Rig {
    pub fn new(rig_config: RigConfig) -> Rig {
        let (sent_tx, sent) = unbounded_channel();
        let limits = StepLimits {
            slots: rig_config.slots,
            rows: rig_config.budget + rig_config.slots,
            batch_rows: usize::MAX,
            logit_rows: rig_config.slots,
            positions: POSITIONS,
            encoder_positions: 0,
            page_positions: PAGE,
            window: None,
            top_logprobs: 0,
            vocab: VOCAB as usize,
            hidden: 1,
            drafts: 0,
            draft_logits: false,
            counts_tokens: false,
            opening_rows: 0,
            attended_fraction: Fraction::ONE,
        };
        let RigConfig { slots, lanes, stages, policy, shuffle, budget, run_ahead, .. } = rig_config;
        let status = Arc::new(Status::new(Duration::ZERO, lanes));
        let pages = 1 + rig_config.pages.unwrap_or(slots * POSITIONS / PAGE);
        let pool = PagePool::new(pages, PAGE);
        let rules = PrefixRules { across_requests: rig_config.prefix_cache, ..PrefixRules::default() };
        let recorder = telemetry::recorder(None);
        let queue = SharedQueue::new(slots, rig_config.max_waiting, status.clone());
        let (prefill, kv) = metrics::with_local_recorder(&recorder, || {
            let prefill = Prefill::new(queue.clone(), pool.clone(), rules, policy, limits, lanes).start();
            let changed = prefill.clone().recipient();
            (prefill, KvManager::new((slots, lanes, shuffle), pool.clone(), 0, changed).start())
        });
        let (faults, fails_at_chunk_request, fails_at_slot_update, plans) = Default::default();
        let devices = Arc::new(FakeDevices {
            device_count: stages,
            sent: sent_tx,
            faults,
            fails_at_chunk_request,
            fails_at_slot_update,
            plans,
        });
        let gate = FaultInjector { prefill: prefill.clone(), kv: kv.clone(), devices: devices.clone() };
        let gate = gate.start();
        let host_pool = Arc::new(HostPool::new(1, slots, VOCAB as usize, |_, _| ()).unwrap());
        let handles = LoopHandles {
            next_chunks: gate.clone().recipient(),
            chunks_ahead: prefill.clone().recipient(),
            drop_started: prefill.clone().recipient(),
            requeue: prefill.clone().recipient(),
            update_slots: gate.recipient(),
            reset_lane: kv.clone().recipient(),
            devices: devices.clone(),
            status: status.clone(),
            host_pool,
            transfers: Arc::default(),
            live: Arc::new(LiveView::new(split_slots(slots, lanes), pool)),
        };
        let (eos, token_budget, draft_context) = (Vec::new(), budget, rig_config.draft_context);
        let config = DecodeConfig {
            policy,
            limits,
            token_budget,
            eos,
            lanes,
            run_ahead,
            draft_context,
            itl_target: None,
        };
        for lane in 0..lanes {
            Decode::new(lane, handles.clone(), config.clone()).start();
        }
        let limits = IntakeLimits { max_waiting: rig_config.max_waiting, ..intake_limits(slots, pages) };
        let intake = Intake::new(limits, queue.clone(), prefill.recipient(), status.clone()).start();
        Rig {
            intake,
            kv,
            status,
            queue,
            epoch: devices.epoch(),
            devices,
            recorder,
            sent,
            in_flight: VecDeque::new(),
            model: FakeModel::new(slots, pages, rig_config.draft_context),
            steps_sent: 0,
            clock: 0,
            stage_free_at: vec![0; stages],
            clients: Vec::new(),
            config: rig_config,
        }
    }

    /// Submits a request; returns its index in `clients`.
    pub async fn submit(&mut self, request: Request) -> usize {
        self.submit_all(vec![request]).await
    }

    /// Submits a group of requests; returns the index of the last one in `clients`.
    pub async fn submit_all(&mut self, requests: Vec<Request>) -> usize {
        let message = Submit { requests: requests.clone(), kind: SubmitKind::New };
        let streams = with_timeout(self.intake.send(message)).await.expect("intake replies");
        for (request, stream) in requests.into_iter().zip(streams.expect("the requests are accepted")) {
            let (prompt_tokens, ids, token_times, end, closed) =
                (Vec::new(), Vec::new(), Vec::new(), None, false);
            let (stream, cached, score) = (Some(stream), None, None);
            self.clients.push(Client {
                request,
                stream,
                cached,
                prompt_tokens,
                score,
                speculated: None,
                ids,
                vector: None,
                token_times,
                end,
                closed,
            });
        }
        self.clients.len() - 1
    }

    /// Returns the value of a counter of prefill or the KV manager.
    pub fn count(&self, metric: &telemetry::Metric) -> u64 {
        let rendered = self.recorder.handle().render();
        let series = rendered.lines().filter_map(|line| line.strip_prefix(metric.name));
        let values =
            series.filter(|rest| rest.starts_with([' ', '{'])).filter_map(|rest| rest.rsplit(' ').next());
        values.map(|value| value.parse::<u64>().expect("it is a whole number")).sum()
    }

    pub fn disconnect(&mut self, number: usize) {
        self.clients[number].stream = None;
    }

    /// Runs the actors until they wait for a step in flight, and reads the events sent meanwhile.
    pub async fn run_until_idle(&mut self) {
        let (mut quiet, mut plans) = (0, 0);
        while quiet < 25 {
            let before = self.devices.plans.load(Ordering::Relaxed);
            tokio::task::yield_now().await;
            plans += self.devices.plans.load(Ordering::Relaxed) - before;
            quiet += 1;
            if self.receive_steps() {
                (quiet, plans) = (0, 0);
            }
        }
        assert!(plans <= 2 * self.config.lanes, "a lane gets {plans} plans and sends no step");
        let clock = self.clock;
        self.clients.iter_mut().for_each(|client| client.poll_events(clock));
    }

    /// Receives the steps sent by the lanes, and applies faults. Returns whether there were any.
    fn receive_steps(&mut self) -> bool {
        let mut any = self.epoch != self.devices.epoch();
        if any {
            self.epoch = self.devices.epoch();
            let FakeModel { draft_errors, pass_time, draft_context, ref tokens, .. } = self.model;
            let lost = FakeModel::new(self.config.slots, tokens.len() / PAGE, draft_context);
            self.model = FakeModel { draft_errors, pass_time, ..lost };
            for InFlight { step, reply, .. } in self.in_flight.drain(..) {
                let _ = reply.send(StepResult { step, result: Err(fault()) });
            }
        }
        while let Ok((epoch, step, reply, signal)) = self.sent.try_recv() {
            any = true;
            match self.devices.check_epoch(epoch) {
                Ok(()) => self.enter_pipeline(step, reply, signal),
                result => _ = reply.send(StepResult { step, result }),
            }
        }
        any
    }

    /// Schedules a step through the pipeline: it enters each stage when it has left the previous one and the
    /// stage is free.
    fn enter_pipeline(
        &mut self,
        mut step: Box<Step>,
        reply: oneshot::Sender<StepResult>,
        signal: oneshot::Sender<()>,
    ) {
        self.steps_sent += 1;
        step.batch.step = self.steps_sent;
        self.check(&step.batch);
        let cost = self.config.step_cost + self.config.row_cost * step.batch.rows() as u64;
        let mut now = self.clock;
        for free in &mut self.stage_free_at {
            now = now.max(*free) + cost;
            *free = now;
        }
        self.in_flight.push_back(InFlight { step, reply, last_layer: Some(signal), done_at: now });
    }

    /// Asserts that a step refers to slots of its lane only, and contains its tokens if there are several
    /// devices.
    fn check(&self, batch: &StepBatch) {
        let own = split_slots(self.config.slots, self.config.lanes)
            .nth(batch.lane as usize)
            .expect("the lane exists");
        assert!(batch.spans.iter().all(|span| own.contains(&span.slot)), "{batch:?} is not all in {own:?}");
        assert!(batch.rows() <= self.config.budget + self.config.slots);
        let single = self.config.stages == 1;
        assert!(single || batch.spans.iter().all(|span| span.tokens != SpanTokens::Last), "{batch:?}");
    }

    /// The steps in flight, in order.
    pub fn in_flight(&self) -> Vec<&StepBatch> {
        self.in_flight.iter().map(|flying| &flying.step.batch).collect()
    }

    /// Sends the signal of the oldest step in flight, that it has passed its last layer, and runs the actors
    /// until they wait.
    pub async fn signal_last_layer(&mut self) {
        self.run_until_idle().await;
        if let Some(signal) = self.in_flight.front_mut().and_then(|oldest| oldest.last_layer.take()) {
            let _ = signal.send(());
            self.run_until_idle().await;
        }
    }

    /// Completes the oldest step in flight once all actors wait, after its signal if it has one. Returns
    /// whether there was one.
    pub async fn complete_step(&mut self) -> bool {
        self.run_until_idle().await;
        let signals = match self.config.signals {
            Signals::Never => false,
            Signals::Always => true,
            Signals::Sometimes(seed) => {
                !philox([self.steps_sent as u32, 0, 0, 0], [seed, 1])[0].is_multiple_of(3)
            }
        };
        if signals {
            self.signal_last_layer().await;
        }
        let Some(InFlight { mut step, reply, done_at: done, .. }) = self.in_flight.pop_front() else {
            return false;
        };
        self.clock = done;
        step.output = self.model.run(&step);
        let _ = reply.send(StepResult { step, result: Ok(()) });
        true
    }

    /// Completes the oldest step in flight, with a failure of this row.
    pub async fn complete_step_failing_row(&mut self, row: usize) {
        self.signal_last_layer().await;
        self.run_until_idle().await;
        let oldest = self.in_flight.pop_front().expect("a step is in flight");
        let InFlight { mut step, reply, done_at, .. } = oldest;
        self.clock = done_at;
        step.output = self.model.run(&step);
        step.output.tokens[row] = SampledToken::failed(RowFailure::NoLateInput);
        let _ = reply.send(StepResult { step, result: Ok(()) });
    }

    /// Completes the oldest step in flight without results, which makes its lane panic.
    pub fn complete_without_results(&mut self) {
        let Some(InFlight { mut step, reply, done_at: done, .. }) = self.in_flight.pop_front() else {
            return;
        };
        self.clock = done;
        step.output = StepOutput::default();
        let _ = reply.send(StepResult { step, result: Ok(()) });
    }

    /// Makes the devices fail after the first `through` steps in flight. The others fail together, and their
    /// lanes receive the fault before or after the other lanes receive their results, as `order` says.
    pub fn fail(&mut self, through: usize, order: FaultOrder) {
        self.receive_steps();
        let mut replies: Vec<(oneshot::Sender<StepResult>, StepResult)> = Vec::new();
        for (number, InFlight { mut step, reply, .. }) in self.in_flight.drain(..).enumerate() {
            let result = if number < through { Ok(()) } else { Err(fault()) };
            if result.is_ok() {
                step.output = self.model.run(&step);
            }
            replies.push((reply, StepResult { step, result }));
        }
        self.devices.faults.fetch_add(1, Ordering::Relaxed);
        if order == FaultOrder::First {
            replies.rotate_left(through);
        }
        for (reply, ran) in replies {
            let _ = reply.send(ran);
        }
    }

    /// Makes the devices fail while the next request for chunks is answered.
    pub fn fail_at_chunk_request(&self) {
        self.devices.fails_at_chunk_request.store(true, Ordering::Relaxed);
    }

    /// Makes the devices fail during the next slot update.
    pub fn fail_at_slot_update(&self) {
        self.devices.fails_at_slot_update.store(true, Ordering::Relaxed);
    }

    /// Completes all steps until nothing is left.
    pub async fn run_to_end(&mut self) {
        while self.complete_step().await {}
    }

    /// Asserts that all slots, pages and permits are released.
    pub async fn assert_all_released(&self) {
        let held = with_timeout(self.kv.send(GetUsage)).await.expect("kv replies");
        let permits = with_timeout(self.intake.send(GetFreePermits)).await.expect("intake replies");
        assert_eq!((held, permits), ((0, 0), self.config.slots));
    }
}

impl Client {
    fn poll_events(&mut self, clock: u64) {
        let mut context = Context::from_waker(Waker::noop());
        while let Some(stream) = &mut self.stream {
            match stream.poll_next(&mut context) {
                Poll::Pending => return,
                Poll::Ready(None) => {
                    self.closed = true;
                    self.stream = None;
                }
                Poll::Ready(Some(event)) => self.record(event, clock),
            }
        }
    }

    fn record(&mut self, event: TokenEvent, clock: u64) {
        assert!(self.end.is_none(), "{event:?} after the end");
        match event {
            TokenEvent::Started { cached_tokens } => {
                assert!(self.cached.replace(cached_tokens).is_none(), "a sequence starts once");
            }
            TokenEvent::Prompt(tokens) => self.prompt_tokens = tokens,
            TokenEvent::Speculated { drafted, accepted } => {
                assert!(accepted <= self.ids.len(), "they come with their tokens");
                self.speculated = Some((drafted, accepted));
            }
            TokenEvent::BeamScore(score) => self.score = Some(score),
            TokenEvent::Embedding(vector) => self.vector = Some(vector),
            TokenEvent::Token(token) | TokenEvent::EndToken(token) => {
                self.ids.push(token.id);
                self.token_times.push(clock);
            }
            TokenEvent::Finished(reason) => self.end = Some(Ok(reason)),
            TokenEvent::Failed(error) => self.end = Some(Err(error)),
            event => panic!("unexpected {event:?}"),
        }
    }

    /// Asserts that the request ended with the right tokens, and with the prompt's log-probabilities if
    /// requested.
    pub fn assert_complete(&self) {
        if let Some(beams) = self.request.beams {
            let expected = &expected_beams(&self.request)[beams.answer];
            assert_eq!((&self.ids, self.score), (&expected.tokens, Some(expected.score)));
            return assert!(matches!(self.end, Some(Ok(_))), "{:?}", self.end);
        }
        assert_eq!(self.ids, expected(&self.request));
        let stop = self.ids.last().filter(|last| self.request.stop_ids.contains(last));
        let reason = stop.map_or(FinishReason::Length, |stop| FinishReason::StopToken(*stop));
        assert_eq!(self.end, Some(Ok(reason)));
        if self.request.prompt_logprobs.is_some() {
            let reported = |token: &Token| (token.id, token.logprob);
            let likely = |at: usize| (at > 0).then(|| next_token_after(&self.request.prompt[..at]) as f32);
            let given = self.request.prompt.iter().enumerate().map(|(at, id)| (*id, likely(at)));
            assert!(self.prompt_tokens.iter().map(reported).eq(given), "{:?}", self.prompt_tokens);
        }
    }
}

fn intake_limits(slots: usize, pages: usize) -> IntakeLimits {
    IntakeLimits {
        slots,
        max_beams: slots,
        max_waiting: 1000,
        context: POSITIONS,
        encoder_context: 0,
        vocab: VOCAB as usize,
        source_vocab: VOCAB as usize,
        eos: 0,
        top_logprobs: 0,
        pages: pages - 1,
        window: None,
        page_positions: PAGE,
        kind: Kind::Decoder,
        has_head: true,
        returns_hidden: true,
        endpoints: vec!["/v1/completions"],
    }
}
