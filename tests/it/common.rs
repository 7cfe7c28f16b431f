//! Shared test helpers: fixtures, engines, requests, and processes.

use actix::Addr;
use mainstem::actors::TokenStream;
use mainstem::actors::device::ExecutorFactory;
use mainstem::actors::engine::{self, Engine};
use mainstem::actors::intake::{GetFreePermits, Intake};
use mainstem::actors::kv::GetUsage;
use mainstem::cli::start::{self, PreparedModel};
use mainstem::config::{Config, Overrides};
use mainstem::model::ModelRef;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::{FinishReason, Request, RequestError, Sampling, Token, TokenEvent};
use mainstem_kernels::{DeviceError, HandoffPorts, Span, StepBatch, StepOutput};
use serde::Deserialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use toml::Value;

pub use crate::program::{alone, mainstem};

/// Timeout of every wait in tests; exceeding it means a hang.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the path of a fixture's directory or file.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Returns the trained model next to the checkout, if it is present.
pub fn stories() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/models/stories260K");
    let found = folder.join("expected_greedy.json").exists();
    if !found {
        skipped("no stories260K beside the checkout");
    }
    found.then_some(folder)
}

/// The recorded greedy texts of the trained model, as stored in their file.
#[derive(Deserialize)]
struct Stories {
    cases: Vec<Story>,
}

#[derive(Deserialize)]
pub struct Story {
    pub prompt: String,
    pub prompt_ids: Vec<u32>,
    pub new_ids: Vec<u32>,
    top1_minus_top2_logit: Vec<f32>,
    /// Prompt and answer.
    pub text: String,
}

impl Story {
    /// Reads the recorded texts of a model directory.
    pub fn all(folder: &Path) -> Vec<Story> {
        let text = std::fs::read(folder.join("expected_greedy.json")).expect("it was there");
        let stories: Stories = serde_json::from_slice(&text).expect("the recorded texts are in their form");
        stories.cases
    }

    /// The answer up to the point where the two best logits are so close that another summation order may
    /// differ.
    pub fn sure_ids(&self) -> &[u32] {
        let close = self.top1_minus_top2_logit.iter().position(|gap| *gap < 1e-3);
        &self.new_ids[..close.unwrap_or(self.new_ids.len())]
    }
}

/// A modifiable copy of a fixture, removed on drop.
pub struct Copied(pub PathBuf);

impl Copied {
    /// Copies a fixture. `name` must be unique among the tests.
    pub fn of(model: &str, name: &str) -> Copied {
        let folder = std::env::temp_dir().join(format!("mainstem-{}-{name}", std::process::id()));
        copy_all(&fixture(model), &folder);
        Copied(folder)
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Sets a key of the copy's config.json.
    pub fn configure(&self, key: &str, value: serde_json::Value) {
        let file = self.file("config.json");
        let text = std::fs::read(&file).expect("the copy is there");
        let mut config: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
        config[key] = value;
        std::fs::write(&file, config.to_string()).expect("it can be written");
    }
}

/// Copies a directory recursively.
fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a temporary folder");
    for entry in std::fs::read_dir(from).expect("the folder is there").flatten() {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_all(&entry.path(), &target),
            false => _ = std::fs::copy(entry.path(), target).expect("a file is copied"),
        }
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a small, exact configuration for a model: two threads, F32 cache, a few slots.
pub fn config(model: &Path, settings: &[(&'static str, Value)]) -> Config {
    let mut overrides = Overrides::default();
    overrides.set("model.path", Some(model.display().to_string()));
    overrides.set("server.port", Some(0));
    overrides.set("kv.type", Some("f32"));
    overrides.set("device.threads", Some(2));
    overrides.set("scheduler.slots", Some(4));
    for (key, value) in settings {
        overrides.set(key, Some(value.clone()));
    }
    Config::load(None, overrides).expect("the test's settings are valid")
}

/// Starts an engine for a fixture.
pub async fn engine(model: &str, settings: &[(&'static str, Value)]) -> Engine {
    start::start_engine(&config(&fixture(model), settings)).await.expect("the fixture loads")
}

/// Starts an engine for a fixture, or a model at an absolute path, whose device factory is wrapped by `wrap`.
pub async fn engine_with(
    model: &str,
    settings: &[(&'static str, Value)],
    wrap: impl FnOnce(ExecutorFactory) -> ExecutorFactory,
) -> Engine {
    let config = config(&fixture(model), settings);
    let prepared = PreparedModel::open(&config, &ModelRef::Path(fixture(model))).expect("the fixture opens");
    let PreparedModel { setup, source, tokenizer, device, .. } = prepared;
    let mut factories = start::factories(&device, &source, &tokenizer, &setup);
    let only = factories.pop().and_then(|mut stage| stage.pop()).expect("there is a device");
    engine::start(setup, tokenizer, vec![vec![wrap(only)]]).await.expect("the engine starts")
}

/// A device that counts something in the spans of its steps.
struct Counting {
    inner: Box<dyn Executor>,
    count: fn(&Span) -> usize,
    total: Arc<AtomicUsize>,
}

impl Executor for Counting {
    fn run(
        &mut self,
        batch: &StepBatch,
        ports: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        self.total.fetch_add(batch.spans.iter().map(self.count).sum(), Ordering::SeqCst);
        self.inner.run(batch, ports, out)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// Returns a factory of devices that add `count` of each span of their steps to `total`.
pub fn counting(
    mut factory: ExecutorFactory,
    count: fn(&Span) -> usize,
    total: Arc<AtomicUsize>,
) -> ExecutorFactory {
    Box::new(move |stage| Ok(Box::new(Counting { inner: factory(stage)?, count, total: total.clone() })))
}

/// Reports a skipped test on standard error, bypassing the output capture of the test harness.
pub fn skipped(what: &str) {
    let _ = writeln!(std::io::stderr(), "skipped: {what}");
}

/// Returns a greedy request.
pub fn greedy(prompt: &[u32], max_tokens: u32) -> Request {
    Request { ignore_eos: true, ..Request::greedy("test", prompt, max_tokens) }
}

/// Returns a request that samples at random with `seed`.
pub fn sampled(prompt: &[u32], max_tokens: u32, seed: u64) -> Request {
    let sampling = Sampling { temperature: 0.9, top_k: 40, top_p: 0.95, seed, ..Sampling::GREEDY };
    Request { sampling, ..greedy(prompt, max_tokens) }
}

/// Returns a prompt of length `len` over a small vocabulary.
pub fn prompt(number: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| 3 + ((number * 31 + i * 7 + i * i) % 200) as u32).collect()
}

/// The collected events of a request.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Number of prompt tokens that were in the prefix cache.
    pub cached_tokens: usize,
    pub prompt: Vec<Token>,
    pub tokens: Vec<Token>,
    /// The stop token that ended the sequence, if any.
    pub last: Option<Token>,
    pub embedding: Option<Vec<f32>>,
    pub filled: Vec<Token>,
    /// Score of a beam search's result.
    pub beam_score: Option<f32>,
    /// Numbers of drafts that were made and accepted.
    pub speculated: Option<(usize, usize)>,
    pub end: Option<Result<FinishReason, RequestError>>,
}

impl Outcome {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }
}

/// Reads a stream to its end, and checks that no event follows the end.
pub async fn outcome(mut stream: TokenStream) -> Outcome {
    let mut outcome = Outcome::default();
    while let Some(event) = within(stream.next()).await {
        assert!(outcome.end.is_none(), "nothing comes after the end, but {event:?} did");
        match event {
            TokenEvent::Started { cached_tokens } => outcome.cached_tokens = cached_tokens,
            TokenEvent::Prompt(tokens) => outcome.prompt = tokens,
            TokenEvent::Token(token) => outcome.tokens.push(token),
            TokenEvent::EndToken(token) => outcome.last = Some(token),
            TokenEvent::Embedding(vector) => outcome.embedding = Some(vector),
            TokenEvent::MaskFilled(token) => outcome.filled.push(token),
            TokenEvent::BeamScore(score) => outcome.beam_score = Some(score),
            TokenEvent::Speculated { drafted, accepted } => outcome.speculated = Some((drafted, accepted)),
            TokenEvent::Finished(reason) => outcome.end = Some(Ok(reason)),
            TokenEvent::Failed(error) => outcome.end = Some(Err(error)),
        }
    }
    outcome
}

/// Submits a single request.
pub async fn submit(engine: &Engine, request: Request) -> Result<TokenStream, RequestError> {
    Ok(engine.intake.submit(vec![request]).await?.pop().expect("one request has one stream"))
}

/// Submits a request and reads it to its end.
pub async fn complete(engine: &Engine, request: Request) -> Outcome {
    outcome(submit(engine, request).await.expect("the request is taken in")).await
}

/// Submits all requests at once and reads them all.
pub async fn complete_all(engine: &Engine, requests: impl IntoIterator<Item = Request>) -> Vec<Outcome> {
    let mut streams = Vec::new();
    for request in requests {
        streams.push(submit(engine, request).await.expect("the request is taken in"));
    }
    futures_util::future::join_all(streams.into_iter().map(outcome)).await
}

/// Waits until every slot, page and permit is released. Fails the test if that never happens.
pub async fn all_home(engine: &Engine, slots: usize) {
    within(async {
        loop {
            let held = engine.actors.kv.send(GetUsage).await.expect("kv answers");
            if held == (0, 0) && free_permits(&engine.actors.intake).await == slots {
                return;
            }
            // Yields instead of sleeping, because the actors have messages to process.
            tokio::task::yield_now().await;
        }
    })
    .await;
}

pub async fn free_permits(intake: &Addr<Intake>) -> usize {
    intake.send(GetFreePermits).await.expect("intake answers")
}

/// Awaits the future; fails the test if it hangs.
pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("something hangs")
}

/// Runs a test of this binary, named with its module path, in a separate process with these environment
/// variables.
pub fn again(test: &str, variables: &[(&str, &str)]) {
    let mut command = Command::new(std::env::current_exe().expect("this binary has a path"));
    command.args([test, "--exact"]).envs(variables.iter().copied());
    let output = command.output().expect("this binary starts");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
}

/// Waits until a program ends.
pub fn wait_for_exit(child: &mut Child) -> ExitStatus {
    let began = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("the child can be waited for") {
            return status;
        }
        assert!(began.elapsed() < PATIENCE, "the program does not end");
        std::thread::yield_now();
    }
}

/// Sends a signal, such as `INT`.
pub fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status();
    assert!(sent.expect("there is kill").success());
}
