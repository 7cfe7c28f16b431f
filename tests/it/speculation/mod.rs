//! Tests of speculative decoding in whole engines: what a request gets with drafts and without.

mod distributions;
mod preemption;

use crate::common::{Copied, config, fixture};
use crate::families::{decoders, family};
use futures_util::future::join_all;
use half::{bf16, f16};
use mainstem::actors::device::ExecutorFactory;
use mainstem::actors::engine::{self, Engine};
use mainstem::cli::start::{self, PreparedModel};
use mainstem::model::ModelRef;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use mainstem_kernels::batch::StepTimes;
use mainstem_kernels::random::noise;
use mainstem_kernels::{DeviceError, HandoffPorts, StepBatch, StepOutput};
use serde_json::{Value, json};
use std::iter::Sum;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A device whose steps seem to take the same time, whatever their rows. So drafts pay, and how many there
/// are does not depend on the machine.
struct Steady {
    inner: Box<dyn Executor>,
    /// Milliseconds that are added to steps with rows.
    pause: Arc<AtomicU64>,
}

impl Executor for Steady {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        if !batch.spans.is_empty() {
            std::thread::sleep(Duration::from_millis(self.pause.load(Ordering::Relaxed)));
        }
        self.inner.run(batch, flow, out)?;
        let forward = Duration::from_micros(1_000_000 + batch.rows() as u64);
        let draft = Duration::from_micros(u64::from(!batch.drafts.is_empty()));
        out.times = StepTimes { forward, draft, ..StepTimes::default() };
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

fn steady(mut factory: ExecutorFactory, pause: &Arc<AtomicU64>) -> ExecutorFactory {
    let pause = pause.clone();
    Box::new(move |collective| Ok(Box::new(Steady { inner: factory(collective)?, pause: pause.clone() })))
}

/// A pause that makes other times of a step of a fixture small.
const PAUSE: u64 = 6;

type Settings<'a> = &'a [(&'static str, toml::Value)];

/// An engine and its API.
struct Served {
    engine: Engine,
    api: LocalApi,
    pause: Arc<AtomicU64>,
}

impl Served {
    /// Serves a model with a draft model on steady devices.
    async fn start(model: &Path, draft: &Path, settings: Settings<'_>) -> Served {
        let room = [
            ("scheduler.slots", 8.into()),
            ("device.threads", 1.into()),
            ("speculation.draft", draft.display().to_string().into()),
            ("speculation.lookup_min", 1.into()),
        ];
        let config = config(model, &[&room, settings].concat());
        let model = ModelRef::parse(&config.model.path).expect("a model");
        let prepared = PreparedModel::open(&config, &model).expect("the models open");
        let PreparedModel { setup, source, tokenizer, device, .. } = prepared;
        let mut stages = start::factories(&device, &source, &tokenizer, &setup);
        let pause = Arc::default();
        for factories in &mut stages {
            *factories = factories.drain(..).map(|factory| steady(factory, &pause)).collect();
        }
        let engine = engine::start(setup, tokenizer, stages).await.expect("the engine starts");
        let api = LocalApi::new(ServeParts::from(&engine), config.server);
        Served { engine, api, pause }
    }

    /// Returns the answers to requests that are sent at once.
    async fn complete(&self, bodies: impl IntoIterator<Item = Value>) -> Vec<Answer> {
        join_all(bodies.into_iter().map(async |body| self.complete_one(&body).await)).await
    }

    async fn complete_one(&self, body: &Value) -> Answer {
        let answer = self.api.post("/v1/completions", body).await;
        let answer = answer.unwrap_or_else(|error| panic!("{body}: {error}"));
        let ResponseBody::Json(bytes) = answer else { panic!("no stream was asked for") };
        let mut answer: Value = serde_json::from_slice(&bytes).expect("it is JSON");
        let details = &answer["usage"]["completion_tokens_details"];
        let [accepted, rejected] = ["accepted_prediction_tokens", "rejected_prediction_tokens"]
            .map(|name| details[name].as_u64().unwrap_or(0));
        Answer { choices: answer["choices"].take(), drafts: Drafts { accepted, rejected } }
    }
}

/// The answer to a request.
struct Answer {
    choices: Value,
    drafts: Drafts,
}

/// Returns the request with another source of drafts.
fn with(body: &Value, speculation: &str) -> Value {
    let mut body = body.clone();
    body["speculation"] = speculation.into();
    body
}

/// Returns token ids that exist in every vocabulary, and repeat.
fn words(number: usize, len: usize) -> Vec<usize> {
    (0..len).map(|at| 8 + (number * 31 + (at % 5) * (at % 5 + 7)) % 88).collect()
}

/// Number of the first [`bodies`] whose tokens the device draws without biases.
const DRAWN_BY_DEVICE: usize = 4;

/// Returns requests with all kinds of draws, on the device and on the host, and with forms of the output if
/// the model's tokens allow them.
fn bodies(has_forms: bool) -> Vec<Value> {
    let mut draws = vec![
        json!({ "temperature": 0 }),
        json!({ "temperature": 0.7, "top_p": 0.9, "logprobs": 2 }),
        json!({ "temperature": 1 }),
        json!({ "temperature": 2, "top_k": 30, "logprobs": 0 }),
        json!({ "temperature": 1, "logit_bias": { "20": 3, "30": 3, "40": -9 }, "min_tokens": 9,
            "stop_token_ids": [8, 20, 33, 40, 50, 60, 70, 80, 90], "ignore_eos": false }),
        json!({ "temperature": 0, "repetition_penalty": 1.4, "logprobs": 1 }),
        json!({ "temperature": 1, "frequency_penalty": 0.6, "presence_penalty": 0.4 }),
        json!({ "mirostat": 2, "mirostat_tau": 4, "logprobs": 1, "logprobs_mode": "processed_logprobs" }),
    ];
    let forms = [
        json!({ "temperature": 1.2, "guided_regex": "[a-zA-Z ]{9,40}", "ignore_eos": false }),
        json!({ "temperature": 0.8, "guided_regex": "[a-z]{2,60}", "presence_penalty": 1, "logprobs": 1,
            "ignore_eos": false }),
        json!({ "temperature": 1, "guided_json": { "type": "array", "items": { "enum": ["up", "down"] },
            "minItems": 3, "maxItems": 9 }, "ignore_eos": false }),
    ];
    draws.extend(forms.into_iter().filter(|_| has_forms));
    let body = |(number, draw): (usize, &Value)| {
        let mut body = json!({ "prompt": words(number, 8 + number % 6), "max_tokens": 16 + number % 3,
            "seed": number, "ignore_eos": true, "return_token_ids": true });
        body.as_object_mut().expect("an object").extend(draw.as_object().expect("an object").clone());
        body
    };
    draws.iter().enumerate().map(body).collect()
}

/// Numbers of drafts.
#[derive(Clone, Copy, Debug, Default)]
struct Drafts {
    accepted: u64,
    rejected: u64,
}

impl Sum for Drafts {
    fn sum<I: Iterator<Item = Drafts>>(all: I) -> Drafts {
        all.fold(Drafts::default(), |sum, it| Drafts {
            accepted: sum.accepted + it.accepted,
            rejected: sum.rejected + it.rejected,
        })
    }
}

/// Returns what each request gets alone without drafts.
async fn alone(served: &Served, bodies: &[Value]) -> Vec<Value> {
    let pause = served.pause.swap(0, Ordering::Relaxed);
    let mut alone = Vec::new();
    for body in bodies {
        alone.push(served.complete_one(&with(body, "off")).await.choices);
    }
    served.pause.store(pause, Ordering::Relaxed);
    alone
}

/// Checks that each request gets the same alone without drafts, and with drafts from either source while the
/// others run. Returns the numbers of drafts of each: those of the draft model, and copied ones.
async fn check_coupled(what: &str, served: &Served, bodies: &[Value]) -> [Vec<Drafts>; 2] {
    let expected = alone(served, bodies).await;
    let sent = |body| ["draft", "off", "prompt_lookup"].map(|source| with(body, source));
    let answers = served.complete(bodies.iter().flat_map(sent)).await;
    let mut drafts = [Vec::new(), Vec::new()];
    for ((body, expected), answers) in bodies.iter().zip(&expected).zip(answers.chunks(3)) {
        for answer in answers {
            assert_eq!(answer.choices, *expected, "{what}: {body}");
        }
        drafts[0].push(answers[0].drafts);
        drafts[1].push(answers[2].drafts);
    }
    drafts
}

/// Two models with the same tokens, as folders or files.
struct Pair {
    name: String,
    model: PathBuf,
    draft: PathBuf,
    _copies: Vec<Copied>,
}

/// Returns each family with a copy of itself whose weights are a little different as its draft model.
fn families_with_changed_drafts() -> impl Iterator<Item = Pair> {
    decoders().iter().map(|name| {
        let (model, draft) = (family(name, "speculation"), family(name, "speculation-draft"));
        change_weights(&draft.file("model.safetensors"), 0.05);
        Pair {
            name: (*name).to_owned(),
            model: model.0.clone(),
            draft: draft.0.clone(),
            _copies: vec![model, draft],
        }
    })
}

/// Changes each weight of a file by up to this share of it.
fn change_weights(file: &Path, share: f32) {
    let mut bytes = std::fs::read(file).expect("the weights are there");
    let begin = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    let head: serde_json::Map<String, Value> =
        serde_json::from_slice(&bytes[8..begin]).expect("a head of JSON");
    for (tag, tensor) in (0..).zip(head.values().filter(|tensor| tensor.get("dtype").is_some())) {
        let offset = |end: usize| begin + tensor["data_offsets"][end].as_u64().expect("an offset") as usize;
        let data = &mut bytes[offset(0)..offset(1)];
        let factors = noise(tag, data.len()).into_iter().map(|noise| 1.0 + share * noise);
        match tensor["dtype"].as_str() {
            Some("F32") => data.as_chunks_mut().0.iter_mut().zip(factors).for_each(|(bytes, factor)| {
                *bytes = (f32::from_le_bytes(*bytes) * factor).to_le_bytes();
            }),
            Some("BF16") => data.as_chunks_mut().0.iter_mut().zip(factors).for_each(|(bytes, factor)| {
                *bytes = bf16::from_f32(bf16::from_le_bytes(*bytes).to_f32() * factor).to_le_bytes();
            }),
            Some("F16") => data.as_chunks_mut().0.iter_mut().zip(factors).for_each(|(bytes, factor)| {
                *bytes = f16::from_f32(f16::from_le_bytes(*bytes).to_f32() * factor).to_le_bytes();
            }),
            // Masks that the files of a family have.
            _ => {}
        }
    }
    std::fs::write(file, bytes).expect("it can be written");
}

/// Returns the other decoder-only fixtures, each with itself as the draft model.
fn fixtures_with_themselves() -> impl Iterator<Item = Pair> {
    const FIXTURES: &[&str] = &[
        "mha",
        "gqa",
        "mqa",
        "tied",
        "biased",
        "odd_head_dim",
        "rope_linear",
        "rope_llama3",
        "rope_parameters",
        "sharded",
        "f16",
        "bf16",
        "gguf/f32.gguf",
        "gguf/f16.gguf",
        "gguf/q8_0.gguf",
        "gguf/q4_0.gguf",
        "llama2c/v0.bin",
        "llama2c/v1.bin",
        "llama2c/v2.bin",
        "llama2c/v0_shared.bin",
        "llama2c/v1_shared.bin",
        "llama2c/v2_shared.bin",
    ];
    FIXTURES.iter().map(|name| {
        let model = fixture(name);
        Pair { name: (*name).to_owned(), model: model.clone(), draft: model, _copies: Vec::new() }
    })
}

/// Returns the GGUF files of families, each with itself as the draft model.
fn gguf_families_with_themselves() -> impl Iterator<Item = Pair> {
    ["bloom", "phi3", "falcon_40b", "mixtral"].into_iter().map(|name| {
        let folder = family(name, "speculation-gguf");
        let model = folder.file("model.gguf");
        let written = fixture("gguf").join(format!("{name}.gguf"));
        std::fs::copy(written, &model).expect("a file is copied");
        Pair { name: format!("{name}.gguf"), model: model.clone(), draft: model, _copies: vec![folder] }
    })
}

/// The drafts of families are not those of the target: at every temperature, some are accepted, and some not.
#[actix::test]
async fn coupled_drafts_change_no_answer_of_any_family() {
    let bodies = bodies(false);
    let mut copied = Drafts::default();
    for Pair { name, model, draft, .. } in families_with_changed_drafts() {
        let served = Served::start(&model, &draft, &[]).await;
        let [made, found] =
            check_coupled(&name, &served, &bodies).await.map(|drafts| drafts.into_iter().sum());
        served.engine.stop();
        let Drafts { accepted, rejected } = made;
        assert!(accepted >= 20 && rejected >= 20, "{name}: {made:?}");
        copied = [copied, found].into_iter().sum();
    }
    let Drafts { accepted, rejected } = copied;
    assert!(accepted >= 100 && rejected >= 100, "{copied:?}");
}

/// A draft model that is the target itself makes no wrong drafts where nothing but the device draws. Catches
/// drafts of other positions, or that are drawn with other numbers. The host's edits and grammars reject
/// some.
#[actix::test]
async fn coupled_drafts_change_no_answer_of_any_fixture() {
    let fixtures = fixtures_with_themselves().map(|pair| (pair, bodies(true)));
    let families = gguf_families_with_themselves().map(|pair| (pair, bodies(false)));
    for (Pair { name, model, draft, .. }, bodies) in fixtures.chain(families) {
        let served = Served::start(&model, &draft, &[]).await;
        let [made, _] = check_coupled(&name, &served, &bodies).await;
        served.engine.stop();
        for drafts in &made[..DRAWN_BY_DEVICE] {
            assert!(drafts.accepted > 8 && drafts.rejected == 0, "{name}: {made:?}");
        }
        let rejected: u64 = made.iter().map(|drafts| drafts.rejected).sum();
        assert!(rejected > 10, "{name}: {made:?}");
    }
}

/// Drafts are made in a step of their own here, prompts come in chunks, and other sequences run ahead.
/// Several devices are not steady: the loop measures their times itself, and few drafts pay in several lanes.
#[actix::test]
async fn coupled_drafts_change_no_answer_on_several_devices() {
    let mut divided = Drafts::default();
    for name in ["gemma2", "qwen2_moe", "gqa"] {
        let has_forms = name == "gqa";
        let copy = |test| if has_forms { Copied::of(name, test) } else { family(name, test) };
        let (model, draft) = (copy("speculation-parts"), copy("speculation-parts-draft"));
        change_weights(&draft.file("model.safetensors"), 0.05);
        let bodies = bodies(has_forms);
        for (groups, lanes) in [("0;1", 1), ("0;1", 2), ("0&1", 1), ("0&1;2", 2), ("", 2), ("", 1)] {
            let mut settings = vec![("scheduler.lanes", lanes.into()), ("scheduler.token_budget", 24.into())];
            match groups {
                "" => {
                    settings.push(("scheduler.run_ahead", "on".into()));
                    // Drafts of a sequence are in several row batches.
                    settings.push(("scheduler.batch_rows", 3.into()));
                }
                groups => settings.push(("device.groups", groups.into())),
            }
            let served = Served::start(&model.0, &draft.0, &settings).await;
            served.pause.store(if lanes == 1 && !groups.is_empty() { PAUSE } else { 0 }, Ordering::Relaxed);
            let what = format!("{name}, devices {groups:?}, {lanes} lanes");
            let [made, _] =
                check_coupled(&what, &served, &bodies).await.map(|drafts| drafts.into_iter().sum());
            served.engine.stop();
            let is_steady = groups.is_empty();
            let Drafts { accepted, rejected } = made;
            assert!(accepted > 0 && (!is_steady || accepted > 20 && rejected > 20), "{what}: {made:?}");
            divided = if is_steady { divided } else { [divided, made].into_iter().sum() };
        }
    }
    let Drafts { accepted, rejected } = divided;
    assert!(accepted > 40 && rejected > 20, "{divided:?}");
}
