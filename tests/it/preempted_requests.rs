//! Tests of sampled and constrained requests that are preempted, for pages or for requests of an earlier
//! class: they continue with the states of their strategies and the positions of their random numbers, so
//! their answers are those that they give alone.

use crate::common::{all_home, config, counting, engine_with, fixture, within};
use crate::families::family;
use futures_util::future::join_all;
use mainstem::actors::Engine;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use mainstem::telemetry;
use mainstem_kernels::{DeviceError, HandoffPorts, Span, SpanTokens, StepBatch, StepOutput};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use toml::Value as Setting;

const MODEL: &str = "mha";
const SLOTS: usize = 4;

/// Ways to choose tokens, on the device and on the host, with and without a state.
fn strategies() -> Vec<Value> {
    vec![
        json!({ "temperature": 1 }),
        json!({ "temperature": 0.9, "repetition_penalty": 1.3 }),
        json!({ "presence_penalty": 1, "frequency_penalty": 0.5, "repeat_last_n": 8 }),
        json!({ "dry_multiplier": 0.8, "dry_allowed_length": 1 }),
        json!({ "xtc_probability": 0.5, "xtc_threshold": 0.01 }),
        json!({ "mirostat": 1, "mirostat_tau": 3, "mirostat_eta": 0.3 }),
        json!({ "mirostat": 2, "mirostat_tau": 4 }),
        json!({ "strategy": "random_fsd", "strategy_params": { "random_tokens": 30 } }),
        json!({ "temperature": 1, "guided_regex": "([A-Z][a-z]{2,5} ){20}!" }),
        json!({ "mirostat": 2, "grammar": "root ::= (item \", \"){40}\nitem ::= [a-z] [a-z]? [0-9]" }),
        json!({ "repetition_penalty": 1.2, "response_format": { "type": "json_schema", "json_schema": {
            "name": "n", "schema": { "type": "array", "items": { "type": "string", "minLength": 3 },
                "minItems": 30 } } } }),
    ]
}

/// Returns requests with a strategy, whose answers take several pages.
fn bodies(strategy: &Value) -> Vec<Value> {
    let bodies = (0..SLOTS).map(|number| {
        let mut body = json!({
            "prompt": format!("{number} the "), "max_tokens": 80, "seed": number, "logprobs": 1,
            "return_token_ids": true
        });
        // A form ends where it is complete.
        let is_form = |name: &str| strategy.get(name).is_some();
        body["ignore_eos"] =
            (!["guided_regex", "grammar", "response_format"].into_iter().any(is_form)).into();
        for (name, value) in strategy.as_object().expect("an object") {
            body[name] = value.clone();
        }
        body
    });
    bodies.collect()
}

/// A device that computes, of each sequence, only positions before a limit, and waits at others.
struct Held {
    inner: Box<dyn Executor>,
    limit: Arc<Limit>,
}

/// The limit, and the position at which the device waits.
struct Limit {
    position: AtomicU32,
    waits_at: AtomicU32,
}

impl Limit {
    fn new() -> Arc<Limit> {
        Arc::new(Limit { position: AtomicU32::new(u32::MAX), waits_at: AtomicU32::new(0) })
    }

    fn set(&self, position: u32) {
        self.position.store(position, Ordering::SeqCst);
    }
}

impl Executor for Held {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let last = batch.spans.iter().map(|span| span.start).max().unwrap_or(0);
        while last >= self.limit.position.load(Ordering::SeqCst) {
            self.limit.waits_at.store(last, Ordering::SeqCst);
            std::thread::yield_now();
        }
        self.limit.waits_at.store(0, Ordering::SeqCst);
        self.inner.run(batch, flow, out)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// Starts an engine that counts the prompts that are begun.
async fn start(size: &str, begun: &Arc<AtomicUsize>, limit: &Arc<Limit>) -> (Engine, LocalApi) {
    start_model(&fixture(MODEL), "absorbed", size, begun, limit).await
}

async fn start_model(
    model: &Path,
    attention: &str,
    size: &str,
    begun: &Arc<AtomicUsize>,
    limit: &Arc<Limit>,
) -> (Engine, LocalApi) {
    let settings: [(&'static str, Setting); 5] = [
        ("attention.mla", attention.into()),
        ("device.kind", "cpu".into()),
        ("scheduler.slots", (SLOTS as i64).into()),
        ("kv.prefix_cache", "off".into()),
        ("kv.size", size.into()),
    ];
    let begins =
        |span: &Span| usize::from(span.start == 0 && matches!(span.tokens, SpanTokens::Given { .. }));
    let path = model.to_str().expect("it is text");
    let engine = engine_with(path, &settings, |device| {
        let (mut counted, limit) = (counting(device, begins, begun.clone()), limit.clone());
        Box::new(move |stage| Ok(Box::new(Held { inner: counted(stage)?, limit: limit.clone() })))
    })
    .await;
    let local = LocalApi::new(ServeParts::from(&engine), config(model, &settings).server);
    (engine, local)
}

async fn post(local: &LocalApi, body: &Value) -> Value {
    match within(local.post("/v1/completions", body)).await.unwrap_or_else(|error| panic!("{body}: {error}"))
    {
        ResponseBody::Json(bytes) => {
            let mut response: Value = serde_json::from_slice(&bytes).expect("it is JSON");
            response["choices"].take()
        }
        ResponseBody::Events(_) => panic!("no stream was asked for"),
    }
}

/// Prompts begin with an arithmetic of their own, by their lengths alone.
#[actix::test]
async fn openings_are_the_same_after_preemptions() {
    let model = family("deepseek_v2", "preempted");
    let [undisturbed, preempted] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let never = Limit::new();
    let (roomy, alone) = start_model(&model.0, "fast", "auto", &undisturbed, &never).await;
    let (scarce, together) = start_model(&model.0, "fast", "192 tokens", &preempted, &never).await;
    let bodies: Vec<Value> = (0..SLOTS)
        .map(|number| {
            let prompt: Vec<usize> = (0..33 + 7 * number).map(|at| 8 + (at * 7 + number) % 80).collect();
            json!({ "prompt": prompt, "max_tokens": 60, "ignore_eos": true, "logprobs": 1,
                "temperature": 1, "seed": number, "return_token_ids": true })
        })
        .collect();
    let mut expected = Vec::new();
    for body in &bodies {
        expected.push(post(&alone, body).await);
    }
    let mut begun = 0;
    for _ in 0..10 {
        let found = join_all(bodies.iter().map(|body| post(&together, body))).await;
        assert!(found == expected, "{found:?}\n{expected:?}");
        begun += SLOTS;
        if preempted.load(Ordering::SeqCst) > begun {
            break;
        }
    }
    assert!(preempted.load(Ordering::SeqCst) > begun, "requests are preempted");
    assert_eq!(undisturbed.load(Ordering::SeqCst), SLOTS);
    [roomy, scarce].into_iter().for_each(Engine::stop);
}

/// The pages are enough for one of the requests, so others are preempted.
#[actix::test]
async fn answers_of_preempted_requests_are_those_of_each_alone() {
    let [undisturbed, preempted] = [(); 2].map(|()| Arc::new(AtomicUsize::new(0)));
    let never = Limit::new();
    let (roomy, alone) = start("auto", &undisturbed, &never).await;
    let (scarce, together) = start("128 tokens", &preempted, &never).await;
    for strategy in strategies() {
        let bodies = bodies(&strategy);
        let mut expected = Vec::new();
        for body in &bodies {
            expected.push(post(&alone, body).await);
        }
        // On a busy machine, some requests may end before others begin.
        let was_preempted = async {
            for _ in 0..10 {
                let found = join_all(bodies.iter().map(|body| post(&together, body))).await;
                for (body, (found, expected)) in bodies.iter().zip(found.iter().zip(&expected)) {
                    assert!(found == expected, "{body}\n{found}\n{expected}");
                }
                if preempted.swap(0, Ordering::SeqCst) > SLOTS {
                    return true;
                }
            }
            false
        };
        assert!(was_preempted.await, "{strategy}: nobody was preempted");
        assert_eq!(undisturbed.swap(0, Ordering::SeqCst), SLOTS);
    }
    for engine in [roomy, scarce] {
        all_home(&engine, SLOTS).await;
        engine.stop();
    }
}

/// Returns the number of sequences that were preempted for requests of an earlier class, in all engines of
/// the process; no other test has any.
fn count_preemptions() -> u64 {
    let text = telemetry::install(None).render();
    let counter = "mainstem_num_preemptions_total{reason=\"class\"} ";
    let value = text.lines().find_map(|line| line.strip_prefix(counter)?.parse().ok());
    value.expect("the counter is there from the start")
}

/// Waits until a condition holds that another thread brings about.
async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

/// Batch requests have all slots when interactive ones come, which take theirs.
#[actix::test]
async fn answers_of_batch_requests_that_make_way_are_those_of_each_alone() {
    telemetry::install(None);
    let (limit, mut before) = (Limit::new(), count_preemptions());
    let (engine, local) = start("auto", &Arc::default(), &limit).await;
    for strategy in strategies() {
        let mut all = bodies(&strategy);
        let mut expected = Vec::new();
        for body in &all {
            expected.push(post(&local, body).await);
        }
        all.iter_mut().for_each(|body| body["service_tier"] = "flex".into());
        limit.set(0);
        let interactive = async {
            until(|| limit.waits_at.load(Ordering::SeqCst) >= 30).await;
            let short = json!({ "prompt": "go", "max_tokens": 2, "ignore_eos": true });
            join_all((0..SLOTS).map(|_| post(&local, &short))).await;
        };
        let release = async {
            // All batch requests begin together, and none ends before the interactive ones are there.
            until(|| engine.status.pending() == SLOTS).await;
            limit.set(30);
            until(|| engine.status.pending() == 2 * SLOTS).await;
            limit.set(u32::MAX);
        };
        let batch = join_all(all.iter().map(|body| post(&local, body)));
        let (found, ..) = within(async { tokio::join!(batch, interactive, release) }).await;
        for (body, (found, expected)) in all.iter().zip(found.iter().zip(&expected)) {
            assert!(found == expected, "{body}\n{found}\n{expected}");
        }
        let count = std::mem::replace(&mut before, count_preemptions());
        assert!(before > count, "{strategy}: nobody was preempted");
    }
    all_home(&engine, SLOTS).await;
    engine.stop();
}
