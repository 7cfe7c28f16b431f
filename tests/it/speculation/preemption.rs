//! Tests of speculating sequences that do not fit into the cache at once.

use super::{Drafts, PAUSE, Served, alone, change_weights, with};
use crate::common::{Copied, again};
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

/// Returns requests whose answers are as long as the context allows, or end earlier with an end token; some
/// have a form, if the model's tokens allow that.
fn bodies(has_forms: bool) -> Vec<Value> {
    let body = |number: usize| {
        let draw = match number % 4 {
            0 => json!({ "temperature": 0 }),
            1 => json!({ "temperature": 0.9, "logprobs": 1 }),
            2 => json!({ "temperature": 1, "frequency_penalty": 0.4, "logprobs": 1 }),
            3 if has_forms => json!({ "temperature": 0.8, "guided_regex": "([a-f]{2,9} )*" }),
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
    const PREEMPTIONS: &str = "mainstem_num_preemptions_total{reason=\"pages\"}";
    telemetry::install(None);
    for (name, groups) in [("qwen3", ""), ("gemma2", ""), ("qwen3", "0;1"), ("gqa", "")] {
        let has_forms = name == "gqa";
        let bodies = bodies(has_forms);
        let copy = |test| if has_forms { Copied::of(name, test) } else { family(name, test) };
        let (model, draft) = (copy("preempted"), copy("preempted-draft"));
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
        let before = count(PREEMPTIONS);
        let alone = alone(&served, &bodies).await;
        assert_eq!(count(PREEMPTIONS), before, "{name}");
        for source in ["off", "draft", "prompt_lookup"] {
            let before = count(PREEMPTIONS);
            let is_measured = !groups.is_empty() && source == "draft";
            served.pause.store(if is_measured { PAUSE } else { 0 }, Ordering::Relaxed);
            let answers = served.complete(bodies.iter().map(|body| with(body, source))).await;
            for ((body, answer), alone) in bodies.iter().zip(&answers).zip(&alone) {
                assert_eq!(answer.choices, *alone, "{name} {groups:?}, {source}: {body}");
            }
            let preemptions = count(PREEMPTIONS) - before;
            let Drafts { accepted, rejected } = answers.iter().map(|answer| answer.drafts).sum();
            assert!(preemptions >= 2, "{name} {groups:?}, {source}: {preemptions}");
            let is_mixed = accepted > 20 && rejected > 20;
            assert!(source == "off" || is_mixed, "{name} {groups:?}, {source}: {accepted}, {rejected}");
        }
        served.engine.stop();
    }
}
