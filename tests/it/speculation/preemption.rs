//! Tests of speculating sequences that do not fit into the cache at once.

use super::{Drafts, PAUSE, Served, alone, change_weights, with};
use crate::common::again;
use crate::families::family;
use mainstem::telemetry;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

/// Set in the process of a test that reads metrics, which are those of the whole process.
const ALONE: &str = "MAINSTEM_TEST_ALONE";

/// Returns the value of a counter.
fn count(name: &str) -> u64 {
    let rendered = telemetry::install(None).render();
    let value = rendered.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("no counter {name}"))
}

/// Returns requests whose answers are as long as the context allows, or end earlier with a stop token.
fn bodies() -> Vec<Value> {
    let body = |number: usize| {
        let draw = match number % 4 {
            0 => json!({ "temperature": 0 }),
            1 => json!({ "temperature": 0.9, "logprobs": 1 }),
            2 => json!({ "temperature": 1, "frequency_penalty": 0.4, "logprobs": 1 }),
            _ => json!({ "temperature": 1.1, "mirostat": 2 }),
        };
        let prompt = super::words(number, 9 + 3 * number);
        let mut body = json!({ "prompt": prompt, "max_tokens": -1, "seed": number, "return_token_ids": true,
            "min_tokens": 30 + 8 * number });
        body.as_object_mut().expect("an object").extend(draw.as_object().expect("an object").clone());
        body
    };
    (0..8).map(body).collect()
}

/// Twice the sequences that fit: each reserves its context of 128 tokens, and the cache has 512.
#[actix::test]
async fn twice_the_sequences_that_fit_end_with_their_own_answers() {
    if std::env::var_os(ALONE).is_none() {
        return again(
            "speculation::preemption::twice_the_sequences_that_fit_end_with_their_own_answers",
            &[(ALONE, "1")],
        );
    }
    const PREEMPTIONS: &str = "mainstem_num_preemptions_total";
    telemetry::install(None);
    let bodies = bodies();
    for (name, groups) in [("qwen3", ""), ("gemma2", ""), ("qwen3", "0;1")] {
        let (model, draft) = (family(name, "preempted"), family(name, "preempted-draft"));
        change_weights(&draft.file("model.safetensors"), 0.05);
        let mut settings = vec![
            ("kv.size", "512 tokens".into()),
            ("kv.page_size", 32.into()),
            ("scheduler.token_budget", 64.into()),
        ];
        if !groups.is_empty() {
            settings.push(("device.groups", groups.into()));
        }
        let served = Served::start(&model.0, &draft.0, &settings).await;
        if !groups.is_empty() {
            served.pause.store(PAUSE, Ordering::Relaxed);
        }
        let before = count(PREEMPTIONS);
        let alone = alone(&served, &bodies).await;
        assert_eq!(count(PREEMPTIONS), before, "{name}");
        for source in ["off", "draft", "prompt_lookup"] {
            let before = count(PREEMPTIONS);
            let answers = served.complete(bodies.iter().map(|body| with(body, source))).await;
            for ((body, answer), alone) in bodies.iter().zip(&answers).zip(&alone) {
                assert_eq!(answer.choices, *alone, "{name} {groups:?}, {source}: {body}");
            }
            let preemptions = count(PREEMPTIONS) - before;
            let Drafts { accepted, rejected } = answers.iter().map(|answer| answer.drafts).sum();
            assert!(preemptions >= 2, "{name} {groups:?}, {source}: {preemptions}");
            assert!(source == "off" || accepted > 20 && rejected > 20, "{source}: {accepted}, {rejected}");
        }
        served.engine.stop();
    }
}
