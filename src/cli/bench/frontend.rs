//! Everything but the model: a device that answers at once, a reader of long answers for each slot, and three
//! layers of what stands between the device and a client, each with the one before. The device waits for nobody:
//! it runs ahead of readers that are slower than the loop, by an answer at most.
//!
//! Consumers run on threads of their own, as the server's do; all of them share the machine's cores with the
//! loop, and in the last layer the clients do too.
//! Invariant: a token is counted where it arrives, and nowhere else.

use super::client::{Client, events_in};
use super::report::{Report, Row, Sample, What};
use crate::actors::device::Factory;
use crate::actors::engine::{BIASES, TOP_LOGPROBS};
use crate::actors::{Conventions, Engine, EngineSetup, IntakeHandle, ModelInfo, SamplingDefaults};
use crate::config::{ApiKeys, Config, Lanes, SchedulerConfig, ServerConfig};
use crate::model::executor::{ExecutorReport, KvPlan};
use crate::model::fake::FakeExecutor;
use crate::model::partition::{Member, Partition, Stage};
use crate::model::shard::ExpertSplit;
use crate::model::spec::Kind;
use crate::request::{Request, RequestError, TokenEvent};
use crate::server::{Answer, Local, ServeParts, Server};
use crate::text::Tokenizer;
use actix::Arbiter;
use actix_web::rt::{self, time};
use anyhow::{Result, anyhow, ensure};
use futures_util::StreamExt;
use indicatif::ProgressBar;
use mainstem_kernels::{Share, StepLimits};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

const NAME: &str = "fake";
const VOCAB: usize = 32_000;
const CONTEXT: usize = 4096;

/// The first tokens are bytes; those after them are whole words, so that each is an event.
const WORDS: std::ops::Range<u32> = 256..VOCAB as u32;

/// One token, and an answer as long as the context allows.
const PROMPT: u32 = 65;
const MAX_TOKENS: usize = CONTEXT - 1;

const PATH: &str = "/v1/completions";

/// Events of a streamed answer that carry no token: its end, and `[DONE]`. They are counted with the others,
/// one in two thousand.
const TOKENLESS_EVENTS: u64 = 2;

/// Measures the layers, each for `duration`, in `repeat` samples.
pub async fn measure(
    mut config: Config,
    duration: Duration,
    repeat: u32,
    report: &mut Report,
    progress: &ProgressBar,
) -> Result<()> {
    // Who leaves a layer may not have left when those of the next one come.
    config.scheduler.max_waiting = config.scheduler.max_waiting.max(config.scheduler.slots);
    let (engine, built) = start(&config).await?;
    report.built(&config, &built);
    let threads = config.server.workers;
    report.notes.push(format!(
        "device, control and {threads} consumer threads share this machine's cores; with HTTP {threads} \
         server threads do too"
    ));
    progress.set_length(3 * u64::from(repeat + 1));

    let mut layers = Layers { config: &config, window: duration / repeat, repeat, report, progress };
    let intake = engine.intake.clone();
    layers.measure(What::Loop, move |tally| drain_events(intake.clone(), tally)).await?;

    let local = Local::new(ServeParts::from(&engine), config.server.clone());
    layers.measure(What::Events, move |tally| drain_answers(local.clone(), tally)).await?;

    let server = Server::bind(ServeParts::from(&engine), listening(&config.server))?;
    let address = server.address();
    let (stop, stops) = unbounded_channel();
    let serving = rt::spawn(server.run(stops, config.scheduler.drain_timeout));
    layers.measure(What::Http, move |tally| drain_responses(address, tally)).await?;
    // The clients have hung up; the server sees it and stops.
    drop(stop);
    serving.await??;
    engine.stop();
    Ok(())
}

/// What the layers have in common.
struct Layers<'a> {
    config: &'a Config,
    /// Time of a sample.
    window: Duration,
    repeat: u32,
    report: &'a mut Report,
    progress: &'a ProgressBar,
}

impl Layers<'_> {
    /// Keeps a consumer of `consumer`'s making at work for each slot, and takes samples of what they tally.
    async fn measure<F, W>(&mut self, what: What, consumer: F) -> Result<()>
    where
        F: Fn(Tally) -> W + Clone + Send + 'static,
        W: Future<Output = Result<()>> + 'static,
    {
        let sequences = self.config.scheduler.slots;
        self.report.rows.push(Row {
            what,
            sequences,
            tokens: MAX_TOKENS,
            weight_bytes: None,
            work: None,
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

/// Tokens that arrived at the consumers of one thread.
#[derive(Clone, Default)]
struct Tally(Arc<AtomicU64>);

impl Tally {
    fn add(&self, tokens: u64) {
        self.0.fetch_add(tokens, Ordering::Relaxed);
    }
}

/// Threads with a consumer for each sequence, evenly spread.
struct Consumers {
    threads: Vec<Arbiter>,
    tallies: Vec<Tally>,
    failures: UnboundedReceiver<anyhow::Error>,
}

impl Consumers {
    fn start<F, W>(threads: usize, sequences: usize, consumer: F) -> Consumers
    where
        F: Fn(Tally) -> W + Clone + Send + 'static,
        W: Future<Output = Result<()>> + 'static,
    {
        let (failed, failures) = unbounded_channel();
        let tallies = (0..threads).map(|_| Tally::default()).collect::<Vec<_>>();
        let start = |(number, tally): (usize, &Tally)| {
            let share = (sequences + number) / threads;
            let (consumer, tally, failed) = (consumer.clone(), tally.clone(), failed.clone());
            let thread = Arbiter::new();
            thread.spawn_fn(move || {
                for _ in 0..share {
                    rt::spawn(again_and_again(consumer.clone(), tally.clone(), failed.clone()));
                }
            });
            thread
        };
        Consumers { threads: tallies.iter().enumerate().map(start).collect(), tallies, failures }
    }

    fn tokens(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.0.load(Ordering::Relaxed)).sum()
    }

    /// What arrives within `window`, or within as many of them as it takes for a token to each of `sequences`,
    /// which is what counts as a step: where consumers are slower than the loop, its own steps are not full.
    async fn sample(&mut self, window: Duration, sequences: u64) -> Result<Sample> {
        let (began, before) = (Instant::now(), self.tokens());
        loop {
            if let Ok(Some(failure)) = time::timeout(window, self.failures.recv()).await {
                return Err(failure);
            }
            let tokens = self.tokens() - before;
            if tokens >= sequences {
                let seconds = began.elapsed().as_secs_f64();
                return Ok(Sample { tokens, steps: tokens / sequences, seconds, ceilings: None });
            }
        }
    }

    /// Ends the consumers, who thereby hang up.
    fn stop(self) {
        for thread in &self.threads {
            thread.stop();
        }
        for thread in self.threads {
            // A consumer that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// Lets a consumer follow its predecessor; one that fails is told of.
async fn again_and_again<F, W>(consumer: F, tally: Tally, failed: UnboundedSender<anyhow::Error>)
where
    F: Fn(Tally) -> W,
    W: Future<Output = Result<()>>,
{
    loop {
        if let Err(failure) = consumer(tally.clone()).await {
            // Nobody listens when the layer is over.
            let _ = failed.send(failure);
            return;
        }
    }
}

/// Reads one answer's events.
async fn drain_events(intake: IntakeHandle, tally: Tally) -> Result<()> {
    let request = Request { ignore_eos: true, ..Request::greedy(NAME, [PROMPT], MAX_TOKENS as u32) };
    for mut stream in intake.submit(vec![request]).await? {
        loop {
            match stream.next().await {
                Some(TokenEvent::Token(_) | TokenEvent::Last(_)) => tally.add(1),
                Some(TokenEvent::Prompt(_) | TokenEvent::Embedding(_) | TokenEvent::Filled(_)) => {}
                Some(TokenEvent::Finished(_)) => break,
                Some(TokenEvent::Failed(error)) => return Err(error.into()),
                None => return Err(RequestError::EngineGone.into()),
            }
        }
    }
    Ok(())
}

/// Reads one streamed answer's bytes.
async fn drain_answers(local: Local, tally: Tally) -> Result<()> {
    let answer = local.post(PATH, &body()).await.map_err(|error| anyhow!("the API refuses: {error}"))?;
    let Answer::Events(mut events) = answer else {
        unreachable!("a stream was asked for, else this is a bug")
    };
    let mut total = 0;
    while let Some(bytes) = events.next().await {
        let events = events_in(&bytes);
        tally.add(events);
        total += events;
    }
    whole(total)
}

/// Reads one streamed answer over HTTP after the other, on one connection.
async fn drain_responses(address: std::net::SocketAddr, tally: Tally) -> Result<()> {
    let mut client = Client::connect(address).await?;
    let body = body().to_string();
    loop {
        client.post(PATH, &body).await?;
        let mut total = 0;
        while let Some(events) = client.read_on().await? {
            tally.add(events);
            total += events;
        }
        whole(total)?;
    }
}

/// Checks an answer's number of events: nothing was lost, and it was no error.
fn whole(events: u64) -> Result<()> {
    let expected = MAX_TOKENS as u64 + TOKENLESS_EVENTS;
    ensure!(events >= expected, "an answer came in {events} events instead of {expected}");
    Ok(())
}

fn body() -> Value {
    json!({
        "prompt": [PROMPT], "max_tokens": MAX_TOKENS, "stream": true, "ignore_eos": true, "temperature": 0,
    })
}

/// An engine around the fake device.
async fn start(config: &Config) -> Result<(Engine, ExecutorReport)> {
    let scheduler = SchedulerConfig { lanes: Lanes::Number(1), ..config.scheduler.clone() };
    let limits = StepLimits {
        slots: scheduler.slots,
        rows: scheduler.token_budget + scheduler.slots,
        logit_rows: scheduler.slots,
        positions: CONTEXT,
        source_positions: 0,
        page_positions: config.kv.page_positions,
        top_logprobs: TOP_LOGPROBS,
        biases: BIASES,
        vocab: VOCAB,
        hidden: 0,
        attended: Share::ALL,
    };
    let kv = KvPlan { ty: config.kv.ty, pages: limits.slots * limits.table_len() + 1 };
    let model = ModelInfo {
        name: NAME.to_owned(),
        kind: Kind::Decoder,
        endpoints: vec!["/v1/chat/completions", "/v1/completions"],
        has_head: true,
        context: CONTEXT,
        longest: CONTEXT,
        source_context: 0,
        choices_max: scheduler.slots + scheduler.max_waiting,
        vocab: VOCAB,
        eos: Vec::new(),
        defaults: SamplingDefaults::default(),
        conventions: Conventions::Decoder,
        chat: None,
        created: 0,
    };
    let factory: Factory = Box::new(move |_| Ok(Box::new(FakeExecutor::new(WORDS.collect(), limits))));
    let setup = EngineSetup {
        scheduler,
        limits,
        width: 0,
        lanes: 1,
        step_timeout: None,
        kv,
        model,
        partition: no_layers(),
        assigned: Vec::new(),
        unserved: Vec::new(),
        caution: None,
    };
    super::start(setup, Arc::new(Tokenizer::bytes(VOCAB)?), vec![vec![factory]]).await
}

/// One device that holds nothing.
fn no_layers() -> Partition {
    let members = vec![Member { device: "fake:0".to_owned(), share: 1 }];
    Partition { stages: vec![Stage { encoder: 0..0, decoder: 0..0, members }], experts: ExpertSplit::Column }
}

/// Any free port of this machine, without keys and TLS.
fn listening(config: &ServerConfig) -> ServerConfig {
    ServerConfig {
        host: "127.0.0.1".to_owned(),
        port: 0,
        request_timeout: None,
        api_keys: ApiKeys(Vec::new()),
        api_key_file: None,
        tls: None,
        ..config.clone()
    }
}
