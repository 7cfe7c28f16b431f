//! Tests of sampling parameters: each reaches the engine as a plan, or as what the device can do itself, and
//! bad ones are refused by name.

use super::test_server::{
    COMPLETIONS, Client, DEADLINE, Response, TestServer, answer, model, tokenizer, tokenizer_with,
};
use crate::actors::ModelInfo;
use crate::request::{ParamList, Request, Sampling, SamplingDefaults};
use crate::text::output::OutputFormats;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Posts a prompt with `params`, and returns the engine's requests, one per choice.
async fn requests(server: &mut TestServer, params: Value, choices: usize) -> Vec<Request> {
    let mut body = json!({ "prompt": "p", "max_tokens": 8 });
    body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
    let client = server.send(&body.to_string()).await;
    let mut requests = Vec::new();
    for _ in 0..choices {
        let (request, sender) = server.next_request().await;
        answer("x").into_iter().for_each(|event| sender.send(event));
        requests.push(request);
    }
    let response = client.response().await;
    assert_eq!(response.status, 200, "{}", response.body);
    requests
}

async fn request(server: &mut TestServer, params: Value) -> Request {
    requests(server, params, 1).await.remove(0)
}

fn server_with(model: ModelInfo) -> TestServer {
    TestServer::for_model(model, tokenizer(), None, |_| {}, DEADLINE)
}

/// The parameters of llama.cpp, vLLM and transformers, each with the strategies that it switches on.
#[actix_web::test]
async fn every_spelling_reaches_the_plan() {
    let mut server = TestServer::start();
    for (params, active) in [
        (json!({ "repetition_penalty": 1.1 }), &["penalties"][..]),
        (json!({ "repeat_penalty": 1.1, "repeat_last_n": 64 }), &["penalties"]),
        (json!({ "repeat_penalty": 1.1, "penalty_last_n": 64 }), &["penalties"]),
        (json!({ "presence_penalty": 0.5 }), &["penalties"]),
        (json!({ "frequency_penalty": -0.5 }), &["penalties"]),
        (json!({ "no_repeat_ngram_size": 3 }), &["no_repeat_ngram"]),
        (json!({ "typical_p": 0.9 }), &["typical_p"]),
        (json!({ "tfs_z": 0.9 }), &["tfs_z"]),
        (json!({ "mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.2 }), &["mirostat"]),
        (json!({ "mirostat": 1, "top_k": 40 }), &["mirostat"]),
        (json!({ "top_n_sigma": 1 }), &["top_n_sigma"]),
        (json!({ "eta_cutoff": 0.001 }), &["eta_cutoff"]),
        (json!({ "epsilon_cutoff": 0.001 }), &["epsilon_cutoff"]),
        (
            json!({ "dry_multiplier": 0.8, "dry_base": 1.7, "dry_allowed_length": 3, "dry_penalty_last_n": 9,
                    "dry_sequence_breakers": ["\n", "x"] }),
            &["dry"],
        ),
        (json!({ "xtc_probability": 0.5, "xtc_threshold": 0.2 }), &["xtc"]),
        (json!({ "dynatemp_range": 0.5, "dynatemp_exponent": 2 }), &["temperature"]),
        (json!({ "strategy": "fsd", "strategy_params": { "k": 4 } }), &["fsd"]),
        (json!({ "strategy": "random_fsd" }), &["random_fsd"]),
        (json!({ "strategy": "sample.std", "strategy_params": { "max_k": 9 } }), &["sample.std"]),
        (json!({ "strategy": "greedy" }), &["greedy"]),
        (json!({ "samplers": ["penalties", "top_p"], "top_p": 0.5, "top_k": 3 }), &["top_p"]),
        (json!({ "samplers": "top_k;temperature", "temp": 0.5, "top_k": 3 }), &["top_k", "temperature"]),
        (json!({ "allowed_token_ids": [1, 2] }), &["allowed_token_ids"]),
        (json!({ "bad_words": ["ab", [4, 5]] }), &["bad_words"]),
        (
            json!({ "min_p": 0.1, "presence_penalty": 1, "logit_bias": { "a": -1 } }),
            &["logit_bias", "penalties", "min_p"],
        ),
        (json!({ "logprobs_mode": "processed_logprobs", "logprobs": 1, "top_k": 3 }), &["top_k"]),
        (
            json!({ "presence_penalty": 1, "min_tokens": 3, "temperature": 0 }),
            &["min_tokens", "penalties", "temperature"],
        ),
    ] {
        let request = request(&mut server, params.clone()).await;
        let plan = request.plan.unwrap_or_else(|| panic!("{params} has no plan"));
        assert_eq!(plan.active(), active, "{params}");
        assert!(request.logit_bias.is_empty(), "{params}");
    }
    server.close().await;
}

/// Biases, temperature and the common filters stay on the device.
#[actix_web::test]
async fn the_device_gets_what_it_can_do() {
    let mut server = TestServer::start();
    let params = json!({ "temp": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "min_new_tokens": 2, "seed": 7,
        "logit_bias": [["ab", 1.5], [97, 0.5], [7, false], [8, -100]], "repeat_penalty": 1, "mirostat": 0,
        "presence_penalty": null, "strategy": "sample" });
    let request = request(&mut server, params).await;
    let sampling = Sampling { temperature: 0.5, top_k: 0, top_p: 0.9, min_p: 0.1, seed: 7 };
    assert!(request.plan.is_none());
    assert_eq!((request.sampling, request.min_tokens), (sampling, 2));
    let banned = f32::NEG_INFINITY;
    assert_eq!(request.logit_bias[..], [(7, banned), (8, banned), (97, 2.0), (98, 1.5)]);
    server.close().await;
}

#[actix_web::test]
async fn choices_share_a_plan_and_have_seeds_of_their_own() {
    let mut server = TestServer::start();
    let params = json!({ "mirostat": 2, "seed": 5, "n": 2, "min_tokens": 3 });
    let [first, second] = requests(&mut server, params, 2).await.try_into().unwrap();
    let plan = |request: &Request| std::sync::Arc::as_ptr(request.plan.as_ref().unwrap());
    assert_eq!(plan(&first), plan(&second));
    assert_eq!((first.sampling.seed, second.sampling.seed, first.min_tokens), (5, 6, 3));
    server.close().await;
}

/// A request overrides the server's defaults, and these those of the model. A default minimum length does not
/// apply to shorter requests.
#[actix_web::test]
async fn defaults_apply_where_a_request_says_nothing() {
    let list = |text: &str| ParamList::parse_text(text).unwrap();
    let sampling_defaults = SamplingDefaults {
        server: list("top_p=0.8,presence_penalty=1"),
        model: list("top_p=0.5,top_k=9,min_new_tokens=20"),
    };
    let mut server = server_with(ModelInfo { sampling_defaults, ..model() });
    let plain = request(&mut server, json!({})).await;
    assert_eq!(plain.plan.unwrap().active(), ["min_tokens", "penalties", "top_k", "top_p"]);
    assert_eq!(plain.min_tokens, 8);
    let params = json!({ "presence_penalty": 0, "top_p": 0.25, "top_k": null });
    let own = request(&mut server, params).await;
    assert_eq!((own.sampling.top_p, own.sampling.top_k, own.plan.is_none()), (0.25, 9, true));
    assert_eq!(request(&mut server, json!({ "strategy": "fsd", "min_tokens": 0 })).await.min_tokens, 0);
    server.close().await;
}

/// Returns the response to a prompt with `params`, and checks that it took less than 100 ms in a release
/// build.
async fn refused(server: &TestServer, params: &Value) -> Response {
    let mut body = json!({ "prompt": "p" });
    body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
    let began = Instant::now();
    let response = server.post(&body.to_string()).await;
    let limit = Duration::from_millis(if cfg!(debug_assertions) { 3000 } else { 100 });
    assert!(began.elapsed() < limit, "{:?}: {}", began.elapsed(), response.body);
    response
}

#[actix_web::test]
async fn nonsense_is_refused_by_name() {
    let server = TestServer::start();
    let words = |count: usize, length: usize| vec!["x".repeat(length); count];
    let biases = |count: usize| (0..count).map(|id| json!([id % 257, 1])).collect::<Value>();
    for (params, param, part) in [
        (json!({ "repeat_penalty": 0 }), "repeat_penalty", "'repeat_penalty' is 0 but must be"),
        (json!({ "presence_penalty": 3 }), "presence_penalty", "from -2 to 2"),
        (json!({ "mirostat": 3 }), "mirostat", "from 0 to 2"),
        (json!({ "strategy": "best" }), "strategy", "must be one of greedy, "),
        (json!({ "strategy": "x".repeat(1 << 20) }), "strategy", "..."),
        (json!({ "strategy": "fsd", "top_p": 0.5 }), "strategy", "replaces top_p"),
        (json!({ "strategy": "fsd", "mirostat": 1 }), "strategy", "replaces mirostat"),
        (json!({ "strategy": "fsd", "strategy_params": { "k": 0 } }), "strategy_params.k", "from 1 to 64"),
        (json!({ "strategy_params": { "k": 1 } }), "strategy_params", "needs strategy"),
        (json!({ "repetition_penalty": 1.1, "repeat_penalty": 1.2 }), "repeat_penalty", "given twice"),
        (json!({ "samplers": ["top_q"] }), "samplers", "the names are"),
        (json!({ "samplers": ["x".repeat(1 << 20)] }), "samplers", "..."),
        (json!({ "samplers": vec!["top_k"; 100_000] }), "samplers", "twice"),
        (json!({ "logprobs_mode": "x" }), "logprobs_mode", "raw_logprobs or"),
        (json!({ "thinking_token_budget": 3 }), "thinking_token_budget", "no tokens around its thinking"),
        (json!({ "allowed_token_ids": [257] }), "allowed_token_ids", "below 257"),
        (json!({ "allowed_token_ids": vec![1; 300] }), "allowed_token_ids", "300 entries, but at most 257"),
        (json!({ "logit_bias": biases(300) }), "logit_bias", "300 entries, but at most 257"),
        (json!({ "logit_bias": [["a", 101]] }), "logit_bias", "has 101 for \"a\""),
        (json!({ "logit_bias": { "é".repeat(200_000): 1 } }), "logit_bias", "at most 16384"),
        (json!({ "bad_words": [""] }), "bad_words", "list of texts"),
        (json!({ "bad_words": words(1, 1 << 21) }), "bad_words", "bytes in its texts"),
        (json!({ "bad_words": words(100_000, 2) }), "bad_words", "at most 1024"),
        (json!({ "bad_words": [vec![1; 100_000]] }), "bad_words", "token ids"),
        (
            json!({ "dry_multiplier": 1, "dry_sequence_breakers": words(65, 1) }),
            "dry_sequence_breakers",
            "64",
        ),
    ] {
        let response = refused(&server, &params).await;
        assert_eq!(response.error(), ("invalid_value".into(), json!(param)), "{}", response.body);
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(part) && message.len() < 400, "{message}");
    }
    server.close().await;
}

/// The largest lists that are accepted take little time.
#[actix_web::test]
async fn the_largest_lists_are_parsed_in_time() {
    let mut server = TestServer::start();
    let words: Vec<String> = (0..1024).map(|n| format!("{n:x}")).collect();
    let texts: Vec<String> = (0..64).map(|n| char::from(b'0' + n).to_string()).collect();
    let biases: Value =
        (0..257).map(|id| (id.to_string(), json!(-1))).collect::<serde_json::Map<_, _>>().into();
    let params = json!({ "bad_words": words, "dry_multiplier": 1, "dry_sequence_breakers": texts,
                         "logit_bias": biases, "allowed_token_ids": (0..257).collect::<Vec<u32>>() });
    let began = Instant::now();
    let plan = request(&mut server, params).await.plan.unwrap();
    assert_eq!(plan.active(), ["allowed_token_ids", "logit_bias", "bad_words", "dry"]);
    let limit = Duration::from_millis(if cfg!(debug_assertions) { 3000 } else { 100 });
    assert!(began.elapsed() < limit, "{:?}", began.elapsed());
    server.close().await;
}

/// A budget needs a model whose reasoning begins with a token.
#[actix_web::test]
async fn a_thinking_budget_is_served_by_models_that_think() {
    let output_formats = OutputFormats::select(("none", "deepseek_r1"), None).unwrap();
    let thinking = ModelInfo { output_formats, vocab: 259, ..model() };
    let words = tokenizer_with(&["<s>", "<think>", "</think>"], Value::Null);
    let mut server = TestServer::for_model(thinking, words, None, |_| {}, DEADLINE);
    let plan = request(&mut server, json!({ "thinking_token_budget": 3 })).await.plan.unwrap();
    assert_eq!(plan.active(), ["thinking_token_budget"]);
    server.close().await;
}

#[actix_web::test]
async fn the_chat_api_has_the_same_parameters() {
    let mut server = TestServer::start();
    let chat = |params: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "p" }] });
        body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        body.to_string()
    };
    let path = "/v1/chat/completions";
    let body = chat(json!({ "xtc_probability": 0.5 }));
    let client = Client::send(server.address, "POST", path, "", &body).await;
    let (request, sender) = server.next_request().await;
    answer("x").into_iter().for_each(|event| sender.send(event));
    assert_eq!(request.plan.unwrap().active(), ["xtc"]);
    assert_eq!(client.response().await.status, 200);
    let body = chat(json!({ "xtc_probability": 2 }));
    let refused = Client::send(server.address, "POST", path, "", &body).await.response().await;
    assert_eq!(refused.error().1, json!("xtc_probability"));
    assert_ne!(path, COMPLETIONS);
    server.close().await;
}
