//! Tests of beam search through the API and the whole engine: the sequences and scores of Hugging Face
//! transformers (tests/oracle/make_beams.py), alone, beside other requests, and with few pages.

use crate::beams::{Recorded, Run, Search, TOLERANCE, recorded};
use crate::common::{all_home, config, counting, engine_with, within};
use futures_util::StreamExt;
use futures_util::future::join_all;
use mainstem::actors::engine::Engine;
use mainstem::cli::start;
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use mainstem_kernels::{Span, SpanTokens};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use toml::Value as Setting;

const COMPLETIONS: &str = "/v1/completions";
const SLOTS: usize = 16;

/// Token ids and score of a choice.
type Found = (Vec<u32>, Option<f64>);

impl Search {
    /// Returns the request for the results of a run.
    fn body(&self, run: &Run, stream: bool) -> Value {
        let mut body = json!({
            "prompt": if self.source.is_empty() { &self.prompt } else { &self.source },
            "use_beam_search": true, "beam_width": run.width, "n": run.sequences.len(),
            "length_penalty": run.length_penalty, "early_stopping": run.early_stopping,
            "max_tokens": self.max_tokens, "min_tokens": self.min_tokens,
            "stop_token_ids": self.end_tokens, "ignore_eos": true, "return_token_ids": true, "stream": stream,
        });
        match (self.source.is_empty(), self.forced) {
            (true, _) => {}
            (false, 0) => body["decoder_prompt"] = json!(self.prompt),
            (false, _) => body["forced_bos_token_id"] = json!(self.prompt[1]),
        }
        body
    }
}

async fn engine(recorded: &Recorded, settings: &[(&'static str, Setting)]) -> (Engine, LocalApi) {
    let own = [("device.kind", "cpu".into()), ("device.activations", "f32".into())];
    let slots = [("scheduler.slots", (SLOTS as i64).into())];
    let config = config(&recorded.folder, &[&own, &slots[..], settings].concat());
    let engine = start::start_engine(&config).await.expect("the fixture loads");
    let local = LocalApi::new(ServeParts::from(&engine), config.server);
    (engine, local)
}

/// Posts a body and returns the choices, whether they are streamed or not.
async fn post(local: &LocalApi, body: &Value) -> Vec<Found> {
    let response = within(local.post(COMPLETIONS, body)).await;
    let mut found: Vec<Found> = Vec::new();
    let mut add = |choice: &Value| {
        let index = choice["index"].as_u64().expect("an index") as usize;
        found.resize(found.len().max(index + 1), Found::default());
        let ids = choice["token_ids"].as_array().into_iter().flatten();
        found[index].0.extend(ids.map(|id| id.as_u64().expect("an id") as u32));
        found[index].1 = choice["beam_score"].as_f64();
    };
    match response.unwrap_or_else(|error| panic!("{body}: {error}")) {
        ResponseBody::Json(bytes) => {
            let response: Value = serde_json::from_slice(&bytes).expect("it is JSON");
            let choices = response["choices"].as_array().expect("a list");
            choices.iter().for_each(&mut add);
            let tokens: usize = found.iter().map(|(ids, _)| ids.len()).sum();
            assert_eq!(response["usage"]["completion_tokens"], tokens);
        }
        ResponseBody::Events(mut events) => {
            let mut text = String::new();
            while let Some(bytes) = within(events.next()).await {
                text.push_str(std::str::from_utf8(&bytes).expect("it is text"));
            }
            let data = text.lines().filter_map(|line| line.strip_prefix("data: "));
            for data in data.filter(|data| *data != "[DONE]") {
                let chunk: Value = serde_json::from_str(data).expect("it is JSON");
                add(&chunk["choices"][0]);
            }
        }
    }
    found
}

/// Asserts that the choices are the recorded results.
fn check(found: &[Found], search: &Search, run: &Run, what: &str) {
    let what = format!("{what}: {}", search.body(run, false));
    let ids: Vec<&[u32]> = found.iter().map(|(ids, _)| ids.as_slice()).collect();
    assert_eq!(ids, run.sequences, "{what}");
    for ((_, score), recorded) in found.iter().zip(&run.scores) {
        let score = score.expect("results have scores") as f32;
        assert!((score - recorded).abs() <= TOLERANCE, "{what}: {score} {recorded}");
    }
}

/// Returns every `each`-th run of the searches.
fn runs(recorded: &Recorded, each: usize) -> impl Iterator<Item = (&Search, &Run)> {
    let all = recorded.searches.iter().flat_map(|search| search.runs.iter().map(move |run| (search, run)));
    all.step_by(each)
}

async fn check_alone(files: &[&str]) {
    for file in files {
        let recorded = recorded(file, "beams-alone");
        let (engine, local) = engine(&recorded, &[]).await;
        for (number, (search, run)) in runs(&recorded, 1).enumerate() {
            let found = post(&local, &search.body(run, number % 2 == 1)).await;
            check(&found, search, run, file);
        }
        all_home(&engine, SLOTS).await;
        engine.stop();
    }
}

#[actix::test]
async fn results_of_decoders_are_those_of_transformers() {
    check_alone(&["mha.json", "gqa.json", "tied.json", "gpt2.json", "qwen3.json", "bloom.json"]).await;
}

#[actix::test]
async fn results_of_encoder_decoders_are_those_of_transformers() {
    check_alone(&["t5.json", "bart.json", "m2m100.json"]).await;
}

/// Each prompt of a request has a search of its own.
#[actix::test]
async fn several_prompts_have_a_search_each() {
    let recorded = recorded("gqa.json", "");
    let (engine, local) = engine(&recorded, &[]).await;
    let body = |prompt: Value| {
        json!({
            "prompt": prompt, "num_beams": 3, "n": 2, "max_tokens": 9, "ignore_eos": true,
            "return_token_ids": true
        })
    };
    let prompts: Vec<&[u32]> = recorded.searches.iter().map(|search| search.prompt.as_slice()).collect();
    let together = post(&local, &body(json!(prompts))).await;
    let alone =
        post_each(&local, &prompts.iter().map(|prompt| body(json!(prompt))).collect::<Vec<_>>()).await;
    assert_eq!(together, alone.concat());
    engine.stop();
}

/// Returns ordinary requests for the prompts of the searches.
fn ordinary(recorded: &Recorded) -> Vec<Value> {
    let bodies = recorded.searches.iter().enumerate().map(|(number, search)| {
        let mut body = search.body(&search.runs[0], number % 2 == 0);
        for name in ["use_beam_search", "beam_width", "length_penalty", "early_stopping"] {
            body.as_object_mut().expect("an object").remove(name);
        }
        (body["n"], body["temperature"], body["seed"]) = (2.into(), 0.8.into(), 7.into());
        body
    });
    bodies.collect()
}

/// Posts searches and ordinary requests at once. The results are those recorded, and those of each request
/// alone.
async fn check_together(
    local: &LocalApi,
    recorded: &Recorded,
    alone: &[Vec<Found>],
    each: usize,
    what: &str,
) {
    let searches: Vec<_> = runs(recorded, each).collect();
    let bodies = searches.iter().enumerate().map(|(number, (search, run))| search.body(run, number % 2 == 0));
    let bodies: Vec<Value> = bodies.chain(ordinary(recorded)).collect();
    let found = join_all(bodies.iter().map(|body| post(local, body))).await;
    for ((search, run), found) in searches.iter().zip(&found) {
        check(found, search, run, what);
    }
    assert_eq!(found[searches.len()..], *alone, "{what}");
}

async fn post_each(local: &LocalApi, bodies: &[Value]) -> Vec<Vec<Found>> {
    let mut found = Vec::new();
    for body in bodies {
        found.push(post(local, body).await);
    }
    found
}

/// Pages are just enough for one of the largest searches.
#[actix::test]
async fn searches_at_once_beside_other_requests_find_the_same() {
    for file in ["gqa.json", "m2m100.json"] {
        let recorded = recorded(file, "beams-together");
        let mut alone = None;
        for (cache, size, lanes, in_memory) in [
            ("on", "auto", 1, "all"),
            ("off", "544 tokens", 1, "all"),
            ("on", "544 tokens", 1, "0%"),
            ("on", "auto", 2, "50%"),
        ] {
            let settings = [
                ("tiers.kv", in_memory.into()),
                ("tiers.disk_path", std::env::temp_dir().display().to_string().into()),
                ("kv.prefix_cache", cache.into()),
                ("kv.size", size.into()),
                ("scheduler.lanes", lanes.into()),
                ("scheduler.token_budget", 48.into()),
            ];
            let (engine, local) = engine(&recorded, &settings).await;
            let alone = match &alone {
                Some(alone) => alone,
                None => alone.insert(post_each(&local, &ordinary(&recorded)).await),
            };
            let what = format!("{file}, {settings:?}");
            check_together(&local, &recorded, alone, 3, &what).await;
            all_home(&engine, SLOTS).await;
            engine.stop();
        }
    }
}

/// Two searches that fit only one after the other: the younger one is preempted and begins anew.
#[actix::test]
async fn a_preempted_search_finds_the_same() {
    let recorded = recorded("gqa.json", "");
    let begun = Arc::new(AtomicUsize::new(0));
    let settings = [
        ("device.kind", "cpu".into()),
        ("device.activations", "f32".into()),
        ("scheduler.slots", (SLOTS as i64).into()),
        ("kv.prefix_cache", "off".into()),
        ("kv.size", "544 tokens".into()),
    ];
    let begins =
        |span: &Span| usize::from(span.start == 0 && matches!(span.tokens, SpanTokens::Given { .. }));
    let engine = engine_with("gqa", &settings, |device| counting(device, begins, begun.clone())).await;
    let config = config(&recorded.folder, &settings);
    let local = LocalApi::new(ServeParts::from(&engine), config.server);
    let search = &recorded.searches[1];
    let wide: Vec<&Run> = search.runs.iter().filter(|run| run.width == 8).collect();
    let bodies: Vec<Value> = wide.iter().map(|run| search.body(run, false)).collect();
    let found = join_all(bodies.iter().map(|body| post(&local, body))).await;
    for (run, found) in wide.iter().zip(&found) {
        check(found, search, run, "preempted");
    }
    assert!(begun.load(Ordering::SeqCst) > wide.len(), "{begun:?} prompts of {} requests", wide.len());
    all_home(&engine, SLOTS).await;
    engine.stop();
}

#[actix::test]
async fn a_search_with_more_beams_than_slots_is_refused() {
    let recorded = recorded("gqa.json", "");
    for (lanes, most) in [(1, 6), (2, 3)] {
        let settings = [("scheduler.slots", 6.into()), ("scheduler.lanes", lanes.into())];
        let (engine, local) = engine(&recorded, &settings).await;
        let refusal = async |params: Value| {
            let mut body = json!({ "prompt": [5, 6], "max_tokens": 4 });
            body.as_object_mut().expect("an object").extend(params.as_object().expect("an object").clone());
            let error = local.post(COMPLETIONS, &body).await.err()?;
            let error = serde_json::to_value(error.body()).expect("plain data")["error"].take();
            assert!(
                error["message"].as_str().expect("a text").contains(&format!("at most {most}")),
                "{error}"
            );
            Some(error["param"].as_str().expect("a text").to_owned())
        };
        assert_eq!(refusal(json!({ "num_beams": most })).await, None);
        for name in ["num_beams", "beam_width"] {
            assert_eq!(refusal(json!({ name: most + 1 })).await.as_deref(), Some(name));
        }
        let all = json!({ "use_beam_search": true, "n": most + 1 });
        assert_eq!(refusal(all).await.as_deref(), Some("n"));
        engine.stop();
    }
}

/// A client that hangs up during its search frees all slots and pages, and nobody else notices.
#[actix::test]
async fn a_search_without_a_client_ends() {
    let recorded = recorded("gqa.json", "");
    let (engine, local) = engine(&recorded, &[]).await;
    let (search, run) = (&recorded.searches[0], &recorded.searches[0].runs[0]);
    let max_tokens = engine.model.context - search.prompt.len();
    for stream in [false, true] {
        let long = json!({
            "prompt": search.prompt, "num_beams": 8, "n": 8, "max_tokens": max_tokens, "ignore_eos": true,
            "stream": stream
        });
        let long = async {
            // As a stream, the response begins before the search ends.
            let response = local.post(COMPLETIONS, &long).await.unwrap_or_else(|error| panic!("{error}"));
            assert!(stream, "the short search ends first");
            let ResponseBody::Events(mut events) = response else { panic!("it is a stream") };
            assert_eq!(events.next().await, None, "the short search ends first");
        };
        let short = async {
            check(&post(&local, &search.body(run, stream)).await, search, run, "beside a long search");
        };
        tokio::select! {
            () = long => {}
            () = short => {}
        }
        all_home(&engine, SLOTS).await;
    }
    engine.stop();
}
