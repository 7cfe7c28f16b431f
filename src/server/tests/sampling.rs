//! Tests of sampling parameters: each reaches the engine as a plan, or as what the device can do itself, and
//! bad ones are refused by name.

use super::test_server::{Client, DEADLINE, Response, TestServer, answer, model, tokenizer, tokenizer_with};
use crate::actors::ModelInfo;
use crate::request::{ParamList, Request, Sampling, SamplingDefaults};
use crate::text::output::OutputFormats;
use mainstem_kernels::Penalties;
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

/// The parameters of llama.cpp, vLLM and transformers, each with the strategies that it switches on, and with
/// the values that these get. All values differ from each other and from the defaults.
#[actix_web::test]
async fn every_spelling_reaches_the_plan() {
    let mut server = TestServer::start();
    let penalties = |values: &str, last_n: u32| format!("Penalties {{ {values} }}, last_n: {last_n} }}");
    for (params, active, values) in [
        (
            json!({ "repetition_penalty": 1.25, "repeat_last_n": 5 }),
            &["penalties"][..],
            &penalties("repetition: 1.25, presence: 0.0, frequency: 0.0", 5)[..],
        ),
        (
            json!({ "repeat_penalty": 1.25, "repeat_last_n": 64, "presence_penalty": 0.5,
                    "frequency_penalty": -0.75 }),
            &["penalties"],
            &penalties("repetition: 1.25, presence: 0.5, frequency: -0.75", 64),
        ),
        (
            json!({ "presence_penalty": 0.5, "penalty_last_n": 9 }),
            &["penalties"],
            &penalties("repetition: 1.0, presence: 0.5, frequency: 0.0", 9),
        ),
        (json!({ "no_repeat_ngram_size": 3 }), &["no_repeat_ngram"], "NoRepeatNgram(3)"),
        (json!({ "typical_p": 0.875 }), &["typical_p"], "Typical(0.875)"),
        (json!({ "typical": 0.875 }), &["typical_p"], "Typical(0.875)"),
        (json!({ "tfs_z": 0.75 }), &["tfs_z"], "TailFree(0.75)"),
        (
            json!({ "mirostat": 2, "mirostat_tau": 3, "mirostat_eta": 0.25 }),
            &["mirostat"],
            "Mirostat { first_version: false, tau: 3.0, eta: 0.25 }",
        ),
        (
            json!({ "mirostat": 1, "top_k": 40, "mirostat_eta": 0.25 }),
            &["mirostat"],
            "Mirostat { first_version: true, tau: 5.0, eta: 0.25 }",
        ),
        (json!({ "top_n_sigma": 1.5 }), &["top_n_sigma"], "TopNSigma(1.5)"),
        (json!({ "eta_cutoff": 0.125 }), &["eta_cutoff"], "Cutoff { least: 0.125, by_entropy: true }"),
        (json!({ "epsilon_cutoff": 0.25 }), &["epsilon_cutoff"], "Cutoff { least: 0.25, by_entropy: false }"),
        (
            json!({ "dry_multiplier": 0.875, "dry_base": 1.5, "dry_allowed_length": 3,
                    "dry_penalty_last_n": 9, "dry_sequence_breakers": ["\n", "x"] }),
            &["dry"],
            "Dry { multiplier: 0.875, base: 1.5, allowed_length: 3, last_n: 9, breakers: [10, 120] }",
        ),
        (
            json!({ "xtc_probability": 0.5, "xtc_threshold": 0.25 }),
            &["xtc"],
            "Xtc { probability: 0.5, threshold: 0.25 }",
        ),
        (
            json!({ "temperature": 2, "dynatemp_range": 0.5, "dynatemp_exponent": 3 }),
            &["temperature"],
            "Temperature { low: 1.5, high: 2.5, exponent: 3.0 }",
        ),
        (
            json!({ "strategy": "fsd", "strategy_params": { "pool_size": 70, "k": 4, "alpha": 0.25, "n": 5,
                                                            "beta": 0.75 } }),
            &["fsd"],
            "Fsd { pool_size: 70, k: 4, alpha: 0.25, n: 5, beta: 0.75 }",
        ),
        (
            json!({ "strategy": "random_fsd", "strategy_params": { "top_p": 0.5, "max_k": 9,
                                                                   "random_tokens": 7 } }),
            &["random_fsd"],
            "prefix: Prefix { top_p: 0.5, min_k: 1, max_k: 9 }, tokens: 7 }",
        ),
        (
            json!({ "strategy": "sample.std", "strategy_params": { "pool_size": 30, "top_p": 0.5, "max_k": 9,
                                                                   "min_k": 2, "eos_bypassing_max": 4 } }),
            &["sample.std"],
            "PoolOf { size: 30, chooser: DrawFrom { filter: Prefix { top_p: 0.5, min_k: 2, max_k: 9 }, \
             bypassing_max: 4.0,",
        ),
        (
            json!({ "strategy": "mirostat", "strategy_params": { "tau": 3, "eta": 0.25, "pool_size": 30 } }),
            &["sample.mirostat"],
            "PoolOf { size: 30, chooser: Mirostat { first_version: false, tau: 3.0, eta: 0.25 } }",
        ),
        (json!({ "strategy": "greedy" }), &["greedy"], "chooser: Some(Greedy)"),
        (
            json!({ "samplers": ["penalties", "top_p"], "top_p": 0.5, "top_k": 3 }),
            &["top_p"],
            "filters: [TopP(0.5)]",
        ),
        (
            json!({ "samplers": "top_k;temperature", "temp": 0.5, "top_k": 3 }),
            &["top_k", "temperature"],
            "filters: [TopK(3), Temperature { low: 0.5, high: 0.5, exponent: 1.0 }]",
        ),
        (json!({ "allowed_token_ids": [1, 2] }), &["allowed_token_ids"], "Allowed([1, 2])"),
        (
            json!({ "bad_words": ["ab", [4, 5]] }),
            &["bad_words"],
            "BadWords([[4, 5], [32, 97, 98], [97, 98]])",
        ),
        (
            json!({ "min_p": 0.125, "presence_penalty": 1, "logit_bias": { "a": -1 },
                    "suppress_tokens": [3], "repeat_last_n": 64 }),
            &["logit_bias", "suppress_tokens", "penalties", "min_p"],
            "[LogitBias([(97, -1.0)]), Suppressed([3]), ",
        ),
        (
            json!({ "logprobs_mode": "processed_logprobs", "logprobs": 1, "top_k": 3 }),
            &["top_k"],
            "mode: Processed",
        ),
        (
            json!({ "presence_penalty": 1, "repeat_last_n": 64, "min_tokens": 3, "temperature": 0 }),
            &["min_tokens", "penalties", "greedy"],
            "MinTokens { least: 3,",
        ),
    ] {
        let request = request(&mut server, params.clone()).await;
        let plan = request.plan.unwrap_or_else(|| panic!("{params} has no plan"));
        assert_eq!(plan.active(), active, "{params}");
        let printed = format!("{plan:?}");
        assert!(printed.contains(values), "{params}: {printed}");
        assert!(request.logit_bias.is_empty(), "{params}");
    }
    server.close().await;
}

/// Parameters that the device has are left to it.
#[actix_web::test]
async fn the_device_gets_what_it_can_do() {
    let mut server = TestServer::start();
    let params = json!({ "temp": 0.5, "top_k": -1, "top_p": 0.9, "min_p": 0.1, "min_new_tokens": 2, "seed": 7,
        "logit_bias": [["ab", 1.5], [97, 0.5], [7, false], [8, -100]], "repeat_penalty": 1, "mirostat": 0,
        "presence_penalty": null, "strategy": "sample" });
    let request = request(&mut server, params).await;
    let sampling = Sampling { temperature: 0.5, top_p: 0.9, min_p: 0.1, seed: 7, ..Sampling::GREEDY };
    assert!(request.plan.is_none());
    assert_eq!((request.sampling, request.min_tokens), (sampling, 2));
    let banned = f32::NEG_INFINITY;
    assert_eq!(request.logit_bias[..], [(7, banned), (8, banned), (97, 2.0), (98, 1.5)]);
    let params =
        json!({ "repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -1, "temp": 0 });
    let penalized = self::request(&mut server, params).await;
    let penalties = Penalties { repetition: 1.5, presence: 0.5, frequency: -1.0 };
    assert_eq!((penalized.sampling.penalties, penalized.plan.is_none()), (penalties, true));
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

/// The seed -1 is a random one, as for llama.cpp and vLLM; other numbers are seeds.
#[actix_web::test]
async fn a_seed_of_minus_one_is_random() {
    let mut server = TestServer::start();
    let mut seeds = Vec::new();
    for seed in [json!(-1), json!(-1), json!(u64::MAX), json!(-2)] {
        seeds.push(request(&mut server, json!({ "seed": seed })).await.sampling.seed);
    }
    assert_ne!(seeds[0], seeds[1]);
    assert!(!seeds[..2].contains(&u64::MAX));
    assert_eq!(seeds[2..], [u64::MAX, u64::MAX - 1]);
    server.close().await;
}

/// A request overrides the server's defaults, and these those of the model. A default minimum length does not
/// apply to shorter requests.
#[actix_web::test]
async fn defaults_apply_where_a_request_says_nothing() {
    let list = |text: &str| ParamList::parse_text(text).unwrap();
    let sampling_defaults = SamplingDefaults {
        server: list("top_p=0.8,presence_penalty=1,repeat_last_n=64"),
        model: list("top_p=0.5,top_k=9,min_new_tokens=20"),
    };
    let mut server = server_with(ModelInfo { sampling_defaults, ..model() });
    let plain = request(&mut server, json!({ "max_tokens": 20 })).await;
    assert_eq!(plain.plan.unwrap().active(), ["min_tokens", "penalties", "top_k", "top_p"]);
    assert_eq!(plain.min_tokens, 20);
    for max_tokens in [json!(19), json!(null)] {
        let short = request(&mut server, json!({ "max_tokens": max_tokens })).await;
        assert!(short.max_tokens < 20 && short.min_tokens == 0, "{max_tokens}");
        assert_eq!(short.plan.unwrap().active(), ["penalties", "top_k", "top_p"]);
    }
    let params = json!({ "min_tokens": 19, "max_tokens": 19 });
    assert_eq!(request(&mut server, params).await.min_tokens, 19);
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
        (
            json!({ "strategy": "std", "strategy_params": { "min_k": 9 } }),
            "strategy_params.min_k",
            "'strategy_params.min_k' is 9 but must be at most max_k, 8",
        ),
        (json!({ "strategy": "fsd", "samplers": ["top_k"] }), "samplers", "which replaces it"),
        (
            json!({ "max_tokens": 5, "min_new_tokens": 6 }),
            "min_new_tokens",
            "'min_new_tokens' is 6 but 'max_tokens' is 5",
        ),
        (
            json!({ "max_completion_tokens": 5, "min_tokens": 6 }),
            "min_tokens",
            "'min_tokens' is 6 but 'max_completion_tokens' is 5",
        ),
        (json!({ "repetition_penalty": 1e-50 }), "repetition_penalty", "as a 32-bit number"),
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
            json!({ "dry_multiplier": 1, "dry_sequence_breakers": words(17, 1) }),
            "dry_sequence_breakers",
            "17 entries, but at most 16",
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
    let texts: Vec<String> = (0..16).map(|n| char::from(b'0' + n).to_string()).collect();
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
    server.close().await;
}
