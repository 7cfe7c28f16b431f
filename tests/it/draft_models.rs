//! Tests of a model with a draft model in the program: start, refused pairs, requests, and what is reported.

use crate::common::{config, fixture, mainstem};
use crate::http::Server;
use mainstem::cli::start;
use serde_json::{Value, json};
use std::path::Path;

/// The text is the same however tokens are drafted, and each request can choose.
#[test]
fn the_program_serves_the_demo_with_its_draft_model() {
    let server = Server::with_model(Path::new("demo"), &["--draft", "demo-draft", "--max-context", "256"]);
    let answer = |speculation: &str, temperature: f64, acceptance: &str| {
        let (status, answer) = server.post(json!({
            "prompt": "Once upon a time", "max_tokens": 40,
            "temperature": temperature, "seed": 3, "speculation": speculation, "acceptance": acceptance,
        }));
        assert_eq!(status, 200, "{answer}");
        let details = answer["usage"]["completion_tokens_details"].clone();
        (answer["choices"][0]["text"].clone(), details)
    };
    let counts = |details: &Value| {
        let names = ["accepted_prediction_tokens", "rejected_prediction_tokens"];
        names.map(|name| details[name].as_u64().unwrap_or_else(|| panic!("{details}")))
    };
    // As long as no step's time is known, each has a draft.
    let (_, details) = answer("auto", 0.0, "coupled");
    assert!(counts(&details).iter().sum::<u64>() > 0, "{details}");
    for temperature in [0.0, 0.8] {
        let (text, details) = answer("off", temperature, "coupled");
        assert!(details.is_null(), "{details}");
        for method in ["auto", "draft", "prompt_lookup"] {
            let (same, details) = answer(method, temperature, "coupled");
            assert_eq!(same, text, "{method} at {temperature}");
            counts(&details);
        }
    }
    counts(&answer("auto", 0.8, "rejection").1);
    let (_, models) = server.ask("/v1/models", None);
    let models: Value = serde_json::from_str(&models).expect("JSON");
    assert_eq!(models["data"][0]["speculation"]["draft_model"], "mainstem-demo-draft");
}

#[test]
fn a_pair_with_different_tokens_is_refused_by_name() {
    let draft = fixture("gqa").display().to_string();
    for command in [&["serve", "demo", "--port", "0"][..], &["inspect", "demo"], &["run", "demo", "-p", "x"]]
    {
        let output = mainstem().args(command).args(["--draft", &draft]).output().expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command:?}: {error}");
        let names = ["the draft model has another tokenizer", "in mainstem-demo and ", " in gqa"];
        assert!(names.iter().all(|part| error.contains(part)), "{command:?}: {error}");
    }
    let output = mainstem().args(["serve", "demo", "--speculation", "draft"]).output().expect("it starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("requires speculation.draft"), "{error}");
}

/// The memory of the draft model is counted, by the engine and by `inspect` alike.
#[actix_web::test]
async fn the_draft_model_is_reported_with_its_memory() {
    let inspect = |flags: &[&str]| -> Value {
        let output = mainstem().args(["inspect", "demo", "--json", "--slots", "4"]).args(flags).output();
        let output = output.expect("the program starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let drafts = ["--draft", "demo-draft"];
    let (alone, pair) = (inspect(&[]), inspect(&drafts));
    let off = inspect(&[&drafts[..], &["--speculation", "off"]].concat());
    assert!(alone.get("speculation").is_none() && off.get("speculation").is_none());
    assert_eq!(
        alone["memory"]["weights"], off["memory"]["weights"],
        "a draft model that is off is not loaded"
    );
    let facts = &pair["speculation"];
    assert_eq!((&facts["method"], &facts["draft"]["name"]), (&json!("draft"), &json!("mainstem-demo-draft")));
    let bytes = |value: &Value| value.as_u64().expect("a number");
    let more = |key: &str| bytes(&pair["memory"][key]) - bytes(&alone["memory"][key]);
    assert!(more("weights") >= bytes(&facts["draft"]["weights"]), "{facts}");
    // Logits of 5 drafts in 4 slots.
    let logits = 4 * 5 * bytes(&pair["architecture"]["vocab"]) * 4;
    assert!(more("step_buffers") >= logits, "{} of {logits}", more("step_buffers"));

    let settings = [("speculation.draft", "demo-draft".into())];
    let engine = start::start_engine(&config(Path::new("demo"), &settings)).await.expect("the engine starts");
    let line = |begin: &str| engine.report().lines().find(|line| line.starts_with(begin)).map(str::to_owned);
    let expected = "speculation  draft, up to 5 drafts per step, acceptance coupled";
    assert_eq!(line("speculation").as_deref(), Some(expected));
    let draft = line("draft model").expect("the report has a line for the draft model");
    assert!(draft.starts_with("draft model  mainstem-demo-draft: "), "{draft}");
    engine.stop();
}
