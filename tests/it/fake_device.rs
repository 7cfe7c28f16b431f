//! Tests of the fake device: everything except the model is real, and its answers are words.

use crate::common::{config, engine, fixture, mainstem};
use mainstem::cli::start::{self, forecast};
use mainstem::config::Config;
use mainstem::model::ModelRef;
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// Returns a configuration of the demo model on the fake device.
fn fake(settings: &[(&'static str, toml::Value)]) -> Config {
    let fake = ("device.kind", "fake".into());
    config(Path::new(""), &[&[fake], settings].concat())
}

async fn answer(config: &Config, body: Value) -> Value {
    let engine = start::start_engine(config).await.expect("the demo model opens");
    let local = LocalApi::new(ServeParts::from(&engine), config.server.clone());
    let answer = local.post("/v1/completions", &body).await.expect("the API takes it");
    engine.stop();
    match answer {
        ResponseBody::Json(bytes) => serde_json::from_slice(&bytes).expect("an answer is JSON"),
        ResponseBody::Events(_) => panic!("no stream was asked for"),
    }
}

/// Answers end only at their maximum length, because the fake device never samples end tokens.
#[actix::test]
async fn answers_are_words_and_run_to_their_length() {
    let body = json!({"prompt": "Once", "n": 3, "max_tokens": 200, "temperature": 1, "seed": 7});
    let answer = answer(&fake(&[]), body).await;
    let choices = answer["choices"].as_array().expect("a list");
    assert_eq!((choices.len(), &answer["usage"]["completion_tokens"]), (3, &json!(600)));
    for choice in choices {
        let text = choice["text"].as_str().expect("a text");
        assert_eq!(choice["finish_reason"], "length");
        assert!(text.chars().all(|c| c == ' ' || c.is_ascii_alphabetic()), "{text}");
        assert_eq!(text.split_whitespace().count(), 200, "{text}");
    }
    assert_ne!(choices[0]["text"], choices[1]["text"]);
}

#[actix::test]
async fn tokens_take_the_time_of_their_steps() {
    let config = fake(&[("device.fake_step", "3ms".into())]);
    let began = Instant::now();
    let answer = answer(&config, json!({"prompt": "Once", "max_tokens": 20})).await;
    assert_eq!(answer["usage"]["completion_tokens"], 20);
    assert!(began.elapsed() >= Duration::from_millis(60), "{:?}", began.elapsed());
}

/// The cache is counted in pages but takes no memory.
#[test]
fn no_memory_bounds_the_fake_device() {
    let source = start::open(&ModelRef::parse("synthetic:110M").expect("it is listed"), None);
    let (source, _) = source.expect("it is made up");
    let sizes = [("scheduler.slots", 65_536.into()), ("scheduler.token_budget", 65_537.into())];
    let setup = start::engine_setup(&fake(&sizes), &source).expect("nothing is too large");
    assert_eq!(setup.kv.pages, 65_536 * 2048 / 32 + 1);
    let forecast = &forecast(&fake(&sizes).device, &source, &setup).expect("it is only counted")[0][0];
    assert_eq!((forecast.weight_bytes, forecast.kv_bytes, forecast.step_bytes), (0, 0, 0));
    assert_eq!(forecast.device, "fake (answers at once)");
}

#[test]
fn inspect_reckons_no_memory_for_it() {
    let inspect = |flags: &[&str]| {
        let mut command = mainstem();
        command.arg("inspect").args(flags).env("MAINSTEM_DEVICE_KIND", "fake");
        String::from_utf8(command.output().expect("the program starts").stdout).expect("the answer is text")
    };
    let json: Value = serde_json::from_str(&inspect(&["--json"])).expect("the answer is JSON");
    assert_eq!((&json["memory"]["total"], &json["memory"]["longest_tokens"]), (&json!(0), &json!(1024)));
    let text = inspect(&[]);
    assert!(text.contains("fits") && !text.contains("smaller cache"), "{text}");
}

/// Prompts use the model's tokenizer and context length.
#[actix::test]
async fn limits_are_the_models() {
    let real = engine("gqa", &[]).await;
    let fake = start::start_engine(&config(&fixture("gqa"), &[("device.kind", "fake".into())])).await;
    let fake = fake.expect("the fixture opens");
    assert_eq!((fake.model.context, fake.model.vocab), (real.model.context, real.model.vocab));
    assert_eq!(fake.tokenizer.vocab_size(), real.tokenizer.vocab_size());
    assert_eq!(fake.model.chat_template.is_some(), real.model.chat_template.is_some());
    real.stop();
    fake.stop();
}
