//! Benchmark of everything but the model: a fake device without delay, a consumer of long answers per slot,
//! and three configurations that add the layers between device and client one by one. The device does not
//! wait for consumers: if they are slower than the loop, it runs ahead by at most one answer.
//!
//! Consumers run on separate threads, as in the server. They share the machine's cores with the loop, and in
//! the last configuration with the clients.
//! Invariant: a token is counted once, where it arrives.

use super::client::{Client, events_in};
use super::report::{BenchReport, BenchRow};
use super::sample::{Sample, TestKind};
use crate::actors::device::ExecutorFactory;
use crate::actors::engine::TOP_LOGPROBS;
use crate::actors::{Engine, EngineSetup, IntakeHandle, ModelInfo, PrefixRules, PromptingDefaults};
use crate::config::{ApiKeys, BatchConfig, Config, LaneCount, SchedulerConfig, ServerConfig};
use crate::model::executor::{ExecutorReport, KvCacheConfig, PageBytes};
use crate::model::fake::FakeExecutor;
use crate::model::partition::{Partition, Stage, StageRank};
use crate::model::shard::ExpertSplit;
use crate::model::spec::Kind;
use crate::request::{Request, RequestError, TokenEvent};
use crate::server::{LocalApi, ResponseBody, ServeParts, Server};
use crate::text::Tokenizer;
use crate::text::output::OutputFormats;
use actix::Arbiter;
use actix_web::rt::{self, time};
use anyhow::{Result, anyhow, ensure};
use futures_util::StreamExt;
use indicatif::ProgressBar;
use mainstem_kernels::{Fraction, StepLimits};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

const NAME: &str = "fake";
const VOCAB: usize = 32_000;
const CONTEXT: usize = 4096;

/// Tokens that are whole words, so that each gives an event. The tokens before them are bytes.
const WORDS: std::ops::Range<u32> = 256..VOCAB as u32;

/// The single token of the prompt.
const PROMPT: u32 = 65;
/// Answer length: as long as the context allows.
const MAX_TOKENS: usize = CONTEXT - 1;

const PATH: &str = "/v1/completions";

/// Events of a streamed answer without a token: its end, and `[DONE]`. They are counted like tokens, which
/// adds one in two thousand.
const TOKENLESS_EVENTS: u64 = 2;

/// Measures each layer for `duration`, in `repeat` samples.
pub async fn measure(
    mut config: Config,
    duration: Duration,
    repeat: u32,
    report: &mut BenchReport,
    progress: &ProgressBar,
) -> Result<()> {
    // Requests of one layer may still be running when those of the next arrive.
    config.scheduler.max_waiting = config.scheduler.max_waiting.max(config.scheduler.slots);
    let (engine, built) = start_fake_engine(&config).await?;
    report.record_device(&config, &built);
    let threads = config.server.workers;
    report.notes.push(format!(
        "device, control and {threads} consumer threads share this machine's cores; with HTTP, so do \
         {threads} server \
         threads"
    ));
    progress.set_length(3 * u64::from(repeat + 1));

    let mut layers = FrontendBench { config: &config, window: duration / repeat, repeat, report, progress };
    let intake = engine.intake.clone();
    layers.measure(TestKind::Loop, move |tally| drain_events(intake.clone(), tally)).await?;

    let local = LocalApi::new(ServeParts::from(&engine), config.server.clone());
    layers.measure(TestKind::Events, move |tally| drain_answers(local.clone(), tally)).await?;

    let server = Server::bind(ServeParts::from(&engine), local_server_config(&config.server))?;
    let address = server.address();
    let (stop, stops) = unbounded_channel();
    let serving = rt::spawn(server.run(stops, config.scheduler.drain_timeout));
    layers.measure(TestKind::Http, move |tally| drain_responses(address, tally)).await?;
    // The clients have disconnected, so the server stops.
    drop(stop);
    serving.await??;
    engine.stop();
    Ok(())
}

/// Common parameters of the layers' measurements.
struct FrontendBench<'a> {
    config: &'a Config,
    /// Duration of a sample.
    window: Duration,
    repeat: u32,
    report: &'a mut BenchReport,
    progress: &'a ProgressBar,
}

impl FrontendBench<'_> {
    /// Runs a consumer created by `consumer` for each slot, and samples the tokens that they count.
    async fn measure<F, W>(&mut self, what: TestKind, consumer: F) -> Result<()>
    where
        F: Fn(TokenCounter) -> W + Clone + Send + 'static,
        W: Future<Output = Result<()>> + 'static,
    {
        let sequences = self.config.scheduler.slots;
        self.report.rows.push(BenchRow {
            kind: what,
            sequences,
            tokens: MAX_TOKENS,
            weight_bytes: None,
            work: None,
            offload: None,
            samples: Vec::new(),
        });
        self.progress.set_message(format!("{} of {sequences}", what.name()));
        let mut consumers = Consumers::start(self.config.server.workers, sequences, consumer);
        // The first one warms up.
        for number in 0..=self.repeat {
            let sample = consumers.sample(self.window, sequences as u64).await?;
            let row = self.report.rows.last_mut().expect("it was pushed above; anything else is a bug");
            row.samples.extend((number > 0).then_some(sample));
            self.progress.inc(1);
        }
        consumers.stop();
        Ok(())
    }
}

/// Counter of the tokens that arrived at the consumers of one thread.
#[derive(Clone, Default)]
pub(super) struct TokenCounter(Arc<AtomicU64>);

impl TokenCounter {
    fn add(&self, tokens: u64) {
        self.0.fetch_add(tokens, Ordering::Relaxed);
    }
}

/// Threads that run one consumer per sequence, evenly distributed.
pub(super) struct Consumers {
    threads: Vec<Arbiter>,
    tallies: Vec<TokenCounter>,
    failures: UnboundedReceiver<anyhow::Error>,
}

impl Consumers {
    pub(super) fn start<F, W>(threads: usize, sequences: usize, consumer: F) -> Consumers
    where
        F: Fn(TokenCounter) -> W + Clone + Send + 'static,
        W: Future<Output = Result<()>> + 'static,
    {
        let (failed, failures) = unbounded_channel();
        let tallies = (0..threads).map(|_| TokenCounter::default()).collect::<Vec<_>>();
        let start = |(number, tally): (usize, &TokenCounter)| {
            let count = (sequences + number) / threads;
            let (consumer, tally, failed) = (consumer.clone(), tally.clone(), failed.clone());
            let thread = Arbiter::new();
            thread.spawn_fn(move || {
                for _ in 0..count {
                    rt::spawn(run_repeatedly(consumer.clone(), tally.clone(), failed.clone()));
                }
            });
            thread
        };
        Consumers { threads: tallies.iter().enumerate().map(start).collect(), tallies, failures }
    }

    fn tokens(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.0.load(Ordering::Relaxed)).sum()
    }

    /// Counts the tokens that arrive within `window`, or within several windows if fewer than `sequences`
    /// tokens arrive. One token per sequence counts as a step; if consumers are slower than the loop, its own
    /// steps are not full.
    async fn sample(&mut self, window: Duration, sequences: u64) -> Result<Sample> {
        let (began, before) = (Instant::now(), self.tokens());
        loop {
            if let Ok(Some(failure)) = time::timeout(window, self.failures.recv()).await {
                return Err(failure);
            }
            let tokens = self.tokens() - before;
            if tokens >= sequences {
                let seconds = began.elapsed().as_secs_f64();
                return Ok(Sample { tokens, steps: tokens / sequences, seconds, roofline: None });
            }
        }
    }

    /// Stops the consumers, which closes their connections.
    pub(super) fn stop(self) {
        for thread in &self.threads {
            thread.stop();
        }
        for thread in self.threads {
            // A panic of a consumer has already been printed.
            let _ = thread.join();
        }
    }
}

/// Runs consumers one after the other. Reports the first failure and stops.
async fn run_repeatedly<F, W>(consumer: F, tally: TokenCounter, failed: UnboundedSender<anyhow::Error>)
where
    F: Fn(TokenCounter) -> W,
    W: Future<Output = Result<()>>,
{
    loop {
        if let Err(failure) = consumer(tally.clone()).await {
            // The receiver is dropped when the layer is finished.
            let _ = failed.send(failure);
            return;
        }
    }
}

/// Consumes the events of one answer.
pub(super) async fn drain_events(intake: IntakeHandle, tally: TokenCounter) -> Result<()> {
    let request = Request { ignore_eos: true, ..Request::greedy(NAME, [PROMPT], MAX_TOKENS as u32) };
    for mut stream in intake.submit(vec![request]).await? {
        loop {
            match stream.next().await {
                Some(TokenEvent::Token(_) | TokenEvent::EndToken(_)) => tally.add(1),
                Some(
                    TokenEvent::Started { .. }
                    | TokenEvent::Prompt(_)
                    | TokenEvent::BeamScore(_)
                    | TokenEvent::Speculated { .. },
                ) => {}
                Some(TokenEvent::Embedding(_) | TokenEvent::MaskFilled(_)) => {}
                Some(TokenEvent::Finished(_)) => break,
                Some(TokenEvent::Failed(error)) => return Err(error.into()),
                None => return Err(RequestError::EngineStopped.into()),
            }
        }
    }
    Ok(())
}

/// Consumes the bytes of one streamed answer.
async fn drain_answers(local: LocalApi, tally: TokenCounter) -> Result<()> {
    let answer =
        local.post(PATH, &body()).await.map_err(|error| anyhow!("the API rejected the request: {error}"))?;
    let ResponseBody::Events(mut events) = answer else {
        unreachable!("the request asks for a stream; anything else is a bug")
    };
    let mut total = 0;
    while let Some(bytes) = events.next().await {
        let events = events_in(&bytes);
        tally.add(events);
        total += events;
    }
    check_event_count(total)
}

/// Consumes streamed answers over HTTP, one after the other on one connection.
async fn drain_responses(address: std::net::SocketAddr, tally: TokenCounter) -> Result<()> {
    let mut client = Client::connect(address).await?;
    let body = body().to_string();
    loop {
        client.post(PATH, &body).await?;
        let mut total = 0;
        while let Some(events) = client.read_events().await? {
            tally.add(events);
            total += events;
        }
        check_event_count(total)?;
    }
}

/// Checks an answer's number of events. Fails if events are missing, as in an error response.
fn check_event_count(events: u64) -> Result<()> {
    let expected = MAX_TOKENS as u64 + TOKENLESS_EVENTS;
    ensure!(events >= expected, "an answer has {events} events instead of {expected}");
    Ok(())
}

fn body() -> Value {
    json!({
        "prompt": [PROMPT], "max_tokens": MAX_TOKENS, "stream": true, "ignore_eos": true, "temperature": 0,
    })
}

/// Starts an engine with the fake device.
pub(super) async fn start_fake_engine(config: &Config) -> Result<(Engine, ExecutorReport)> {
    let scheduler = SchedulerConfig { lanes: LaneCount::Number(1), ..config.scheduler.clone() };
    let limits = StepLimits {
        slots: scheduler.slots,
        rows: scheduler.token_budget + scheduler.slots,
        batch_rows: usize::MAX,
        logit_rows: scheduler.slots,
        positions: CONTEXT,
        encoder_positions: 0,
        page_positions: config.kv.page_size,
        window: None,
        top_logprobs: TOP_LOGPROBS,
        vocab: VOCAB,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    };
    let kv =
        KvCacheConfig { ty: config.kv.ty, pages: limits.slots * limits.table_len() + 1, window_pages: 0 };
    let model = ModelInfo {
        name: NAME.to_owned(),
        kind: Kind::Decoder,
        endpoints: vec!["/v1/chat/completions", "/v1/completions"],
        has_head: true,
        context: CONTEXT,
        max_sequence_tokens: CONTEXT,
        encoder_context: 0,
        max_choices: scheduler.slots + scheduler.max_waiting,
        vocab: VOCAB,
        source_vocab: VOCAB,
        eos: Vec::new(),
        sampling_defaults: Default::default(),
        prompting: PromptingDefaults::Decoder(None),
        classifier: None,
        pair_template: None,
        chat_template: None,
        output_formats: OutputFormats::default(),
        speculation: None,
        created: 0,
    };
    let factory: ExecutorFactory =
        Box::new(move |_| Ok(Box::new(FakeExecutor::new(WORDS.collect(), limits))));
    let setup = EngineSetup {
        prefix_rules: PrefixRules::default(),
        scheduler,
        limits,
        row_bytes: 0,
        lanes: 1,
        step_timeout: None,
        response_bytes: usize::MAX,
        kv,
        page: PageBytes::default(),
        model,
        partition: empty_partition(),
        assignments: Vec::new(),
        unsupported_keys: Vec::new(),
        embedding_warning: None,
        transfers: Arc::default(),
    };
    super::start_engine(setup, Arc::new(Tokenizer::bytes(VOCAB)?), vec![vec![factory]]).await
}

/// Returns a partition of no layers on one device.
fn empty_partition() -> Partition {
    let ranks = vec![StageRank { device: "fake:0".to_owned(), share: 1 }];
    Partition { stages: vec![Stage { encoder: 0..0, decoder: 0..0, ranks }], experts: ExpertSplit::Column }
}

/// Returns the server configuration for a free local port, without API keys and TLS.
pub(super) fn local_server_config(config: &ServerConfig) -> ServerConfig {
    ServerConfig {
        host: "127.0.0.1".to_owned(),
        port: 0,
        request_timeout: None,
        api_keys: ApiKeys(Vec::new()),
        api_key_file: None,
        tls: None,
        web: true,
        inflight_log: None,
        batches: BatchConfig { data_dir: None, ..config.batches.clone() },
        ..config.clone()
    }
}
