//! Tests of models without files: the embedded one, and random weights of a given shape.

use crate::common::{all_home, complete, config, greedy};
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::config::{Config, Overrides};
use mainstem::model::ModelRef;
use mainstem::model::synthetic::{SHAPES, SyntheticShape};
use mainstem::request::FinishReason;
use std::path::Path;

const TOKENS: u32 = 8;

/// Checks that a prompt is answered with exactly the requested number of tokens.
async fn answers(engine: &Engine, prompt: &str) {
    let ids = engine.tokenizer.encode(prompt, true).expect("a prompt is text");
    let outcome = complete(engine, greedy(&ids, TOKENS)).await;
    assert_eq!(outcome.end, Some(Ok(FinishReason::Length)));
    assert_eq!(outcome.ids().len(), TOKENS as usize);
    assert!(!engine.tokenizer.decode(&outcome.ids(), false).expect("its tokens are text").is_empty());
    all_home(engine, 4).await;
}

#[actix::test]
async fn without_a_model_the_embedded_one_answers() {
    let engine = start::start_engine(&config(Path::new(""), &[])).await.expect("the demo starts");
    assert_eq!(engine.model.name, "mainstem-demo");
    answers(&engine, "Once upon a time").await;
    engine.stop();
}

/// A shape small enough for a test, once in each number format.
#[actix::test]
async fn random_weights_answer_in_every_number_format() {
    for named in ["110M:f32", "110M:f16", "110M:bf16"] {
        let named = SyntheticShape::parse(named).expect("it is listed");
        let tiny =
            SyntheticShape { hidden: 48, layers: 2, heads: 4, kv_heads: 2, ffn: 80, context: 64, ..named };
        let engine = start::PreparedModel::open(&config(Path::new(""), &[]), &ModelRef::Synthetic(tiny));
        let engine = engine.expect("random weights open").start().await.expect("random weights start");
        assert_eq!(engine.model.name, format!("synthetic:{}:{}", tiny.name, tiny.ty));
        answers(&engine, "Once upon a time").await;
        engine.stop();
    }
}

#[actix::test]
async fn an_unknown_shape_is_refused_with_those_there_are() {
    let refused = start::start_engine(&config(Path::new("synthetic:2B"), &[])).await;
    let error = format!("{:#}", refused.err().expect("there is none of that name"));
    assert!(SHAPES.iter().all(|shape| error.contains(shape.name)), "{error}");
}

/// The example configurations are valid for the demo model.
#[test]
fn the_example_configurations_fit_the_demo() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/examples");
    let files = std::fs::read_dir(folder).expect("the examples are there").flatten();
    let files: Vec<_> = files.map(|entry| entry.path()).collect();
    assert!(!files.is_empty());
    for file in files {
        let config = Config::load(Some(&file), Overrides::default()).expect("the example is valid");
        let prepared = start::PreparedModel::open(&config, &ModelRef::Demo);
        prepared.unwrap_or_else(|error| panic!("{}: {error:#}", file.display()));
    }
}
