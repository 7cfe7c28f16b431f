//! Tests of the whole engine against the recorded answers of Hugging Face transformers (tests/oracle): the
//! same greedy tokens, and log-probabilities within 1e-3, on both backends.

use crate::common::{Copied, Story, all_home, complete_all, config, fixture, greedy, stories};
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::request::{FinishReason, Request};
use serde::Deserialize;
use std::path::Path;
use toml::Value;

const LOGPROB_TOLERANCE: f32 = 1e-3;

#[derive(Deserialize)]
struct Recorded {
    eos_token_ids: Vec<u32>,
    answers: Vec<Answer>,
    #[serde(default)]
    encodings: Vec<Encoding>,
}

#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    source: Vec<u32>,
    prompt: Vec<u32>,
    prompt_logprobs: Vec<f32>,
    ignore_eos: bool,
    answer: Vec<u32>,
    finish: String,
    answer_logprobs: Vec<f32>,
    top5_ids: Vec<Vec<u32>>,
    top5_logprobs: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct Encoding {
    text: String,
    ids: Vec<u32>,
}

/// Model and answers of every fixture.
const FIXTURES: [(&str, &str); 18] = [
    ("mha", "mha/answers.json"),
    ("gqa", "gqa/answers.json"),
    ("mqa", "mqa/answers.json"),
    ("tied", "tied/answers.json"),
    ("biased", "biased/answers.json"),
    ("odd_head_dim", "odd_head_dim/answers.json"),
    ("rope_linear", "rope_linear/answers.json"),
    ("rope_llama3", "rope_llama3/answers.json"),
    ("rope_parameters", "rope_parameters/answers.json"),
    ("sharded", "sharded/answers.json"),
    ("f16", "f16/answers.json"),
    ("bf16", "bf16/answers.json"),
    ("llama2c/v0.bin", "llama2c/answers.json"),
    ("llama2c/v1.bin", "llama2c/answers.json"),
    ("llama2c/v0_shared.bin", "llama2c/answers_shared.json"),
    ("llama2c/v1_shared.bin", "llama2c/answers_shared.json"),
    ("llama2c/v2.bin", "llama2c/answers_v2.json"),
    ("llama2c/v2_shared.bin", "llama2c/answers_v2_shared.json"),
];

/// Returns the folders of all fixtures.
pub fn fixtures() -> impl Iterator<Item = &'static str> {
    FIXTURES.iter().map(|(model, _)| model.split('/').next().expect("a first part"))
}

impl Answer {
    /// llama2.c's programs also stop at BOS; the recorded answers of its fixtures continue.
    fn request(&self, eos: &[u32]) -> Request {
        Request {
            ignore_eos: self.ignore_eos || eos.contains(&1),
            logprobs: Some(5),
            prompt_logprobs: Some(5),
            encoder_input: self.source.as_slice().into(),
            ..greedy(&self.prompt, self.requested_answer_len())
        }
    }

    /// Returns the requested answer length; an answer that stopped could have been longer.
    fn requested_answer_len(&self) -> u32 {
        self.answer.len() as u32 + u32::from(self.finish == "stop")
    }
}

fn recorded(file: &str) -> Recorded {
    let text = std::fs::read(fixture(file)).expect("the fixture's answers are there");
    serde_json::from_slice(&text).expect("the fixture's answers are in their form")
}

async fn start(model: &Path, kind: &str, slots: i64) -> Engine {
    start_under(model, kind, slots, &[]).await
}

async fn start_under(model: &Path, kind: &str, slots: i64, others: &[(&'static str, Value)]) -> Engine {
    let settings = [
        ("device.kind", Value::from(kind)),
        ("scheduler.slots", slots.into()),
        ("scheduler.token_budget", 48.into()),
        // The recorded answers are for activations that are not rounded.
        ("device.activations", "f32".into()),
    ];
    let settings = [&settings[..], others].concat();
    start::start_engine(&config(model, &settings)).await.expect("the fixture loads")
}

async fn check(model: &str, answers: &str, kind: &str) {
    check_at(&fixture(model), answers, kind).await;
}

/// Checks the model at `path` against recorded answers, with all requests at once.
pub async fn check_at(path: &Path, answers: &str, kind: &str) {
    check_with(path, answers, (kind, 4), LOGPROB_TOLERANCE).await;
}

/// Checks the model against recorded answers, with one request at a time.
pub async fn check_alone(path: &Path, answers: &str, kind: &str) {
    check_with(path, answers, (kind, 1), LOGPROB_TOLERANCE).await;
}

/// Checks the model with all requests at once and a given tolerance of log-probabilities.
pub async fn check_within(path: &Path, answers: &str, kind: &str, tolerance: f32) {
    check_with(path, answers, (kind, 4), tolerance).await;
}

async fn check_with(path: &Path, answers: &str, (kind, slots): (&str, i64), tolerance: f32) {
    let engine = start(path, kind, slots).await;
    check_engine(engine, answers, (kind, slots), tolerance).await;
}

async fn check_engine(engine: Engine, answers: &str, (kind, slots): (&str, i64), tolerance: f32) {
    let recorded = recorded(answers);
    let model = &engine.model.name.clone();
    let close = |ours: Option<f32>, theirs: f32, what: &str| {
        let ours = ours.unwrap_or(f32::NAN);
        assert!((ours - theirs).abs() <= tolerance, "{what}: {ours}, recorded {theirs}");
    };
    for id in &recorded.eos_token_ids {
        assert!(engine.model.eos.contains(id), "{model}: {id} ends a sequence");
    }
    // All requests at once: batching must not change the answers.
    let outcomes =
        complete_all(&engine, recorded.answers.iter().map(|answer| answer.request(&engine.model.eos))).await;
    for (answer, outcome) in recorded.answers.iter().zip(outcomes) {
        let what = format!("{model} on {kind}, prompt of {}", answer.prompt.len());
        let (ids, reason) = match answer.finish.as_str() {
            "stop" => (&answer.answer[..answer.answer.len() - 1], FinishReason::Stop),
            _ => (&answer.answer[..], FinishReason::Length),
        };
        assert_eq!(outcome.end, Some(Ok(reason)), "{what}");
        assert_eq!(outcome.ids(), ids, "{what}");
        for (at, token) in outcome.tokens.iter().enumerate() {
            close(token.logprob, answer.answer_logprobs[at], &format!("{what}, token {at}"));
            assert_eq!(token.top[0].0, answer.top5_ids[at][0], "{what}, token {at}");
            assert_eq!((token.top.len(), answer.top5_logprobs[at].len()), (5, 5), "{what}, token {at}");
            for ((_, ours), theirs) in token.top.iter().zip(&answer.top5_logprobs[at]) {
                close(Some(*ours), *theirs, &format!("{what}, token {at}, most likely ones"));
            }
        }
        assert_eq!(outcome.prompt.len(), answer.prompt.len(), "{what}");
        assert_eq!(outcome.prompt[0].logprob, None, "{what}");
        for (at, (token, expected)) in outcome.prompt[1..].iter().zip(&answer.prompt_logprobs).enumerate() {
            assert_eq!((token.id, token.top.len()), (answer.prompt[at + 1], 5), "{what}");
            close(token.logprob, *expected, &format!("{what}, prompt token {}", at + 1));
        }
        assert_eq!(answer.prompt_logprobs.len(), answer.prompt.len() - 1, "{what}");
    }
    for Encoding { text, ids } in &recorded.encodings {
        assert_eq!(
            &engine.tokenizer.encode(text, true).expect("text can be encoded"),
            ids,
            "{model}: {text:?}"
        );
    }
    all_home(&engine, slots as usize).await;
    engine.stop();
}

/// Checks the model under these settings, with all requests at once and one at a time.
pub async fn check_under(path: &Path, answers: &str, kind: &str, settings: &[(&'static str, Value)]) {
    for slots in [4, 1] {
        let engine = start_under(path, kind, slots, settings).await;
        check_engine(engine, answers, (kind, slots), LOGPROB_TOLERANCE).await;
    }
}

/// Checks prompt log-probabilities, which do not depend on generated tokens, with a larger tolerance.
pub async fn check_prompts(path: &Path, answers: &str, settings: &[(&'static str, Value)], tolerance: f32) {
    let recorded = recorded(answers);
    let engine = start::start_engine(&config(path, settings)).await.expect("the fixture loads");
    let requests = recorded
        .answers
        .iter()
        // Positions may depend on the reserved length.
        .map(|answer| Request {
            max_tokens: answer.requested_answer_len(),
            ..answer.request(&engine.model.eos)
        });
    let outcomes = complete_all(&engine, requests).await;
    for (answer, outcome) in recorded.answers.iter().zip(outcomes) {
        for (token, expected) in outcome.prompt[1..].iter().zip(&answer.prompt_logprobs) {
            let ours = token.logprob.unwrap_or(f32::NAN);
            let what = format_args!("{answers}, prompt of {}", answer.prompt.len());
            assert!((ours - expected).abs() <= tolerance, "{what}: {ours}, recorded {expected}");
        }
    }
    engine.stop();
}

#[actix::test]
async fn the_fast_backend_gives_the_recorded_answers() {
    for (model, answers) in FIXTURES {
        check(model, answers, "cpu").await;
    }
}

#[actix::test]
async fn the_reference_backend_gives_the_recorded_answers() {
    for (model, answers) in FIXTURES {
        check(model, answers, "reference").await;
    }
}

/// A model of an unknown type with a specification in its directory gives the same answers.
#[actix::test]
async fn a_new_model_is_a_specification_file() {
    let model = Copied::of("gqa", "new-model");
    model.configure("model_type", "unheard_of".into());
    let spec = include_str!("../../specs/llama.toml").replace("[\"llama\"]", "[\"unheard_of\"]");
    std::fs::write(model.file("spec.toml"), spec).expect("it can be written");
    check_at(&model.0, "gqa/answers.json", "cpu").await;
}

/// The trained model next to the checkout, if present, generates its recorded texts.
#[actix::test]
async fn stories260k_gives_its_recorded_texts_where_it_is_at_hand() {
    let Some(folder) = stories() else { return };
    let stories = Story::all(&folder);
    for model in ["hf", "stories260K.bin"] {
        let engine = start(&folder.join(model), "cpu", 4).await;
        let requests = stories.iter().map(|story| greedy(&story.prompt_ids, story.new_ids.len() as u32));
        for (story, outcome) in stories.iter().zip(complete_all(&engine, requests).await) {
            let sure = story.sure_ids();
            assert_eq!(&outcome.ids()[..sure.len()], sure, "{model}: {:?}", story.prompt);
        }
        engine.stop();
    }
}
