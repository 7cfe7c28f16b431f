//! Tests of the server with a fake intake: request bodies, responses, startup and shutdown.
//!
//! Invariant: no test sleeps; each wait is for an event, with a deadline.

mod anthropic;

mod beams;

mod bodies;

mod chat;

mod constraints;

mod dialects;

mod generation;

mod inferflow;

mod llama_server;

mod model_names;

mod ollama;

mod other_servers;

mod prompts;

mod response_memory;

mod responses;

mod sampling;

mod speculation;

pub mod test_server;

mod tgi;

mod tokenize;

mod web;

mod encoder_decoder;

mod encoder_server;

mod embeddings;

mod scoring;

mod fill_mask;

use super::ShutdownOutcome;
use crate::actors::ModelInfo;
use crate::actors::reply::{ReplySpec, ReplyStream};
use crate::actors::response_memory::ResponseMemory;
use crate::actors::stream::event_channel;
use crate::config::{ApiKeys, UnknownFieldsPolicy};
use crate::request::client::{ClientId, ClientSettings};
use crate::request::{Class, FinishReason, Request, RequestError, Sampling, TokenEvent};
use actix_web::rt::{net::TcpStream, time::timeout};
use futures_util::FutureExt;
use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use test_server::{
    BOS, COMPLETIONS, Client, DEADLINE, TestServer, answer, bare, joined, model, scored, tokenizer,
    tokenizer_with, wait_until,
};

#[actix_web::test]
async fn a_whole_answer_has_the_shape_of_the_api() {
    let mut server = TestServer::start();
    let body = json!({ "model": "tiny", "prompt": "ab", "max_tokens": 3, "temperature": 0, "user": "me" });
    let (request, response) = server.exchange(body, answer("xyz")).await;
    assert_eq!(request.prompt[..], [97, 98]);
    assert_eq!((request.max_tokens, request.ignore_eos, request.logprobs), (3, false, None));
    let Sampling { temperature, top_k, top_p, min_p, .. } = request.sampling;
    assert_eq!((temperature, top_k, top_p, min_p), (0.0, 0, 1.0, 0.0));

    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("application/json"));
    let mut json = response.json();
    assert!(json["created"].take().as_u64() > Some(1_600_000_000));
    assert_eq!(
        json,
        json!({
            "id": format!("cmpl-{}", request.id), "object": "text_completion",
            "created": null, "model": "tiny",
            "choices": [{ "index": 0, "text": "xyz", "logprobs": null, "finish_reason": "length" }],
            "usage": {
                "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
                "prompt_tokens_details": { "cached_tokens": 0 }
            }
        })
    );
    server.close().await;
}

#[actix_web::test]
async fn a_stream_has_the_shape_of_the_api() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": [1, 2], "stream": true, "stream_options": { "include_usage": true } });
    let (request, response) = server.exchange(body, answer("hi")).await;
    assert_eq!(request.prompt[..], [1, 2]);
    assert_eq!(request.max_tokens, 16);
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    assert_eq!(response.header("cache-control"), Some("no-cache"));
    assert_eq!(response.header("x-accel-buffering"), Some("no"));
    let events = response.events();
    let choice = |text: &str, reason: Value| {
        let index = 0;
        json!([{ "index": index, "text": text, "logprobs": null, "finish_reason": reason }])
    };
    let choices: Vec<_> = events.iter().map(|event| event["choices"].clone()).collect();
    let expected =
        [choice("h", Value::Null), choice("i", Value::Null), choice("", json!("length")), json!([])];
    assert_eq!(choices, expected);
    let usage: Vec<_> = events.iter().map(|event| event.get("usage").cloned()).collect();
    let last = json!({
        "prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4,
        "prompt_tokens_details": { "cached_tokens": 0 }
    });
    assert_eq!(usage, [None, None, None, Some(last)]);
    for event in &events {
        assert_eq!(event["id"], format!("cmpl-{}", request.id));
        assert_eq!((&event["object"], &event["model"]), (&json!("text_completion"), &json!("tiny")));
        assert_eq!(event["created"], events[0]["created"]);
    }
    server.close().await;
}

#[actix_web::test]
async fn half_characters_wait_for_their_other_half() {
    let mut server = TestServer::start();
    // The last two bytes begin a character that is never completed.
    let mut events = answer("aé🦀b");
    events.splice(events.len() - 1.., [0xe2, 0x82].map(|byte| TokenEvent::Token(bare(byte))));
    events.push(TokenEvent::Finished(FinishReason::Stop));
    let body = json!({ "prompt": "p", "stream": true, "return_token_ids": true });
    let (_, response) = server.exchange(body, events).await;
    let events = response.events();
    let texts: Vec<_> = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a", "é", "🦀", "b", "\u{fffd}"]);
    let counts = events.iter().map(|event| event["choices"][0]["token_ids"].as_array().unwrap().len());
    assert_eq!(counts.collect::<Vec<_>>(), [1, 2, 4, 1, 2]);
    assert_eq!(events[0]["choices"][0]["prompt_token_ids"], json!([b'p']));
    assert_eq!(events[1]["choices"][0].get("prompt_token_ids"), None);
    assert_eq!(events[4]["choices"][0]["finish_reason"], "stop");

    // A character that starts in the prompt belongs to the generated text once it is complete.
    let second_half = vec![TokenEvent::Token(bare(0xa9)), TokenEvent::Finished(FinishReason::Stop)];
    let (_, response) = server.exchange(json!({ "prompt": [0xc3] }), second_half).await;
    assert_eq!(response.json()["choices"][0]["text"], "é");
    server.close().await;
}

#[actix_web::test]
async fn echo_with_logprobs_places_every_token() {
    let mut server = TestServer::start();
    let events = || {
        vec![
            TokenEvent::Prompt(vec![bare(BOS), scored(0xc3, -1.0, &[(0xc3, -1.0)])]),
            TokenEvent::Prompt(vec![scored(0xa9, -0.5, &[(97, -0.25)]), scored(98, f32::NEG_INFINITY, &[])]),
            TokenEvent::Token(scored(99, -2.0, &[(100, -1.5), (99, -2.0)])),
            TokenEvent::Finished(FinishReason::Length),
        ]
    };
    let body = |stream: bool| {
        let prompt = json!([BOS, 0xc3, 0xa9, 98]);
        json!({
            "prompt": prompt, "echo": true, "logprobs": 2, "max_tokens": 1,
            "stream": stream, "return_token_ids": true
        })
    };
    let (request, response) = server.exchange(body(false), events()).await;
    assert_eq!((request.prompt_logprobs, request.logprobs), (Some(2), Some(2)));
    let choice = &response.json()["choices"][0];
    assert_eq!(choice["text"], "ébc");
    let expected = json!({
        "tokens": ["<s>", "\u{fffd}", "\u{fffd}", "b", "c"],
        "token_logprobs": [null, -1.0, -0.5, -9999.0, -2.0],
        "top_logprobs": [
            null, { "\u{fffd}": -1.0 }, { "a": -0.25, "\u{fffd}": -0.5 }, { "b": -9999.0 },
            { "d": -1.5, "c": -2.0 }
        ],
        "text_offset": [0, 0, 0, 1, 2]
    });
    assert_eq!(choice["logprobs"], expected);
    assert_eq!(choice["token_ids"], json!([99]));
    assert_eq!(choice["prompt_token_ids"], json!([BOS, 0xc3, 0xa9, 98]));

    // The concatenated chunks of the stream are the same.
    let (_, response) = server.exchange(body(true), events()).await;
    let chunks = response.events();
    let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, "ébc");
    for (list, values) in expected.as_object().unwrap() {
        assert_eq!(
            joined(&chunks, |choice| &choice["logprobs"][list]),
            *values.as_array().unwrap(),
            "{list}"
        );
    }
    assert_eq!(joined(&chunks, |choice| &choice["token_ids"]), [json!(99)]);
    server.close().await;
}

#[actix_web::test]
async fn echo_alone_repeats_the_prompt_and_needs_no_answer() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": "héllo", "echo": true, "max_tokens": 0 });
    let (request, response) = server.exchange(body, vec![TokenEvent::Finished(FinishReason::Length)]).await;
    assert_eq!((request.max_tokens, request.prompt_logprobs), (0, None));
    assert_eq!(response.json()["choices"][0]["text"], "héllo");
    assert_eq!(response.json()["usage"]["completion_tokens"], 0);
    let (_, response) =
        server.exchange(json!({ "prompt": "hé", "echo": true, "stream": true }), answer("y")).await;
    let texts: Vec<_> = response.events().iter().map(|event| event["choices"][0]["text"].clone()).collect();
    assert_eq!(texts, ["hé", "y", ""]);
    server.close().await;
}

#[actix_web::test]
async fn logprobs_zero_is_the_token_alone() {
    let mut server = TestServer::start();
    let events = vec![TokenEvent::Token(scored(97, -0.5, &[])), TokenEvent::Finished(FinishReason::Stop)];
    let (_, response) = server.exchange(json!({ "prompt": "p", "logprobs": 0 }), events).await;
    assert_eq!(response.json()["choices"][0]["logprobs"]["top_logprobs"], json!([{ "a": -0.5 }]));
    server.close().await;
}

#[actix_web::test]
async fn an_empty_prompt_is_the_token_that_opens_a_text() {
    let mut server = TestServer::start();
    for prompt in [json!(""), json!([]), json!([""]), json!([[]])] {
        let (request, response) = server.exchange(json!({ "prompt": prompt }), answer("x")).await;
        assert_eq!((response.status, &request.prompt[..]), (200, &[BOS][..]), "{prompt}");
    }
    server.close().await;
}

#[actix_web::test]
async fn a_long_text_is_tokenised_like_a_short_one() {
    let model = ModelInfo { context: 30_000, max_sequence_tokens: 30_000, ..model() };
    let mut server = TestServer::for_model(model, tokenizer(), None, |_| {}, DEADLINE);
    let text = "long ".repeat(4000);
    let (request, _) = server.exchange(json!({ "prompt": [text] }), answer("x")).await;
    assert!(request.prompt.iter().copied().eq(text.bytes().map(u32::from)));
    server.close().await;
}

#[actix_web::test]
async fn seeds_are_the_clients_or_all_different() {
    let mut server = TestServer::start();
    let seeds = [json!(7), json!(-2), json!(u64::MAX), json!(null), json!(null)];
    let mut got = Vec::new();
    for seed in seeds {
        let (request, _) =
            server.exchange(json!({ "prompt": "p", "seed": seed, "top_k": -1 }), answer("x")).await;
        assert_eq!(request.sampling.top_k, 0);
        got.push(request.sampling.seed);
    }
    assert_eq!(got[..3], [7, u64::MAX - 1, u64::MAX]);
    assert_ne!(got[3], got[4]);
    server.close().await;
}

#[actix_web::test]
async fn every_refusal_has_its_status_and_object() {
    let busy = RequestError::Busy { coming: 1, waiting: 4, limit: 4, retry_after_s: 0 };
    let too_long = RequestError::TooLong { prompt: "prompt", prompt_tokens: 60, max_tokens: 10, context: 64 };
    let invalid = RequestError::Invalid { param: "top_p", message: "top_p is 2".into() };
    for (refusal, status, code, param, retry) in [
        (invalid, 400, "invalid_value", json!("top_p"), None),
        (too_long, 400, "context_length_exceeded", json!("max_tokens"), None),
        (
            RequestError::TooLarge { param: "prompt", what: "prompt and max_tokens", needed: 9, pages: 8 },
            400,
            "kv_cache_exceeded",
            json!("prompt"),
            None,
        ),
        (busy, 429, "server_busy", Value::Null, Some("3")),
        (
            RequestError::RateLimited { what: "tokens", limit: 5, retry_after_s: 12 },
            429,
            "rate_limit_exceeded",
            Value::Null,
            Some("12"),
        ),
        (RequestError::Draining, 503, "shutting_down", Value::Null, Some("3")),
        (RequestError::DeviceFailed("smoke".into()), 500, "device_failed", Value::Null, None),
        (RequestError::SamplingFailed("no mask".into()), 500, "sampling_failed", Value::Null, None),
    ] {
        let message = refusal.to_string();
        let server =
            TestServer::with_config(Some(refusal), |config| config.retry_after = Duration::from_secs(3));
        let response = server.post(r#"{"prompt": "p", "stream": true}"#).await;
        assert_eq!(response.status, status, "{message}");
        assert_eq!(response.error(), (code.to_string(), param));
        assert_eq!(response.json()["error"]["message"], message);
        assert_eq!(response.header("retry-after"), retry, "{message}");
        server.close().await;
    }
}

#[actix_web::test]
async fn errors_in_bodies_name_the_parameter() {
    let server = TestServer::with_config(None, |config| config.unknown_fields = UnknownFieldsPolicy::Reject);
    let ids = "token id 257 is not in the vocabulary of 257";
    for (body, code, param, part) in [
        ("{", "malformed_body", Value::Null, "JSON"),
        ("[1]", "malformed_body", Value::Null, "not a JSON object"),
        ("{}", "invalid_value", json!("prompt"), "missing"),
        (r#"{"prompt": 5}"#, "invalid_value", json!("prompt"), "not 5"),
        (r#"{"prompt": ["a", 1]}"#, "invalid_value", json!("prompt"), "1 differs from the first element"),
        (r#"{"prompt": [[1], "b"]}"#, "invalid_value", json!("prompt"), "\"b\" differs from the first"),
        (r#"{"prompt": [[1], [257]]}"#, "invalid_value", json!("prompt"), ids),
        (r#"{"prompt": [1, "b"]}"#, "invalid_value", json!("prompt"), "\"b\" is not a token id"),
        (r#"{"prompt": [1, -2]}"#, "invalid_value", json!("prompt"), "-2 is not a token id"),
        (r#"{"prompt": [1, 257]}"#, "invalid_value", json!("prompt"), ids),
        (r#"{"prompt": "p", "max_tokens": "9"}"#, "invalid_value", json!("max_tokens"), "not \"9\""),
        (r#"{"prompt": "p", "max_tokens": -2}"#, "invalid_value", json!("max_tokens"), "not -2"),
        (r#"{"prompt": "p", "max_tokens": 0}"#, "invalid_value", json!("max_tokens"), "echo"),
        (r#"{"prompt": "p", "temperature": "hot"}"#, "invalid_value", json!("temperature"), "a number"),
        (
            r#"{"prompt": "p", "top_p": []}"#,
            "invalid_value",
            json!("top_p"),
            "'top_p' is [] but must be a number",
        ),
        (
            r#"{"prompt": "p", "min_p": {}}"#,
            "invalid_value",
            json!("min_p"),
            "'min_p' is {} but must be a number",
        ),
        (
            r#"{"prompt": "p", "top_k": 1.5}"#,
            "invalid_value",
            json!("top_k"),
            "is 1.5 but must be a whole number",
        ),
        (r#"{"prompt": "p", "top_k": -2}"#, "invalid_value", json!("top_k"), "-2"),
        (r#"{"prompt": "p", "seed": 1.5}"#, "invalid_value", json!("seed"), "integer"),
        (r#"{"prompt": "p", "logprobs": 21}"#, "invalid_value", json!("logprobs"), "20"),
        (r#"{"prompt": "p", "logprobs": true}"#, "invalid_value", json!("logprobs"), "true"),
        (r#"{"prompt": "p", "echo": 1}"#, "invalid_value", json!("echo"), "true or false"),
        (r#"{"prompt": "p", "stream": "yes"}"#, "invalid_value", json!("stream"), "true or false"),
        (r#"{"prompt": "p", "ignore_eos": 0}"#, "invalid_value", json!("ignore_eos"), "true or false"),
        (r#"{"prompt": "p", "model": 1}"#, "invalid_value", json!("model"), "a string"),
        (r#"{"prompt": "p", "stream_options": {}}"#, "invalid_value", json!("stream_options"), "stream"),
        (r#"{"prompt": "p", "model": "big"}"#, "model_not_found", json!("model"), "'big'"),
        (r#"{"prompt": 5, "model": "big"}"#, "model_not_found", json!("model"), "'big'"),
        (r#"{"prompt": "p", "n": 0}"#, "invalid_value", json!("n"), "from 1 to 128"),
        (r#"{"prompt": "p", "n": 129}"#, "invalid_value", json!("n"), "from 1 to 128"),
        (r#"{"prompt": "p", "n": 3, "best_of": 2}"#, "invalid_value", json!("best_of"), "at least n"),
        (r#"{"prompt": "p", "stream": true, "best_of": 2}"#, "invalid_value", json!("best_of"), "stream"),
        (r#"{"prompt": "p", "stop": [""]}"#, "invalid_value", json!("stop"), "empty string"),
        (r#"{"prompt": "p", "stop": [true]}"#, "invalid_value", json!("stop"), "must not contain true"),
        (r#"{"prompt": "p", "stop": [257]}"#, "invalid_value", json!("stop"), ids),
        (r#"{"prompt": "p", "stop_token_ids": ["x"]}"#, "invalid_value", json!("stop_token_ids"), "\"x\""),
        (r#"{"prompt": "p", "min_tokens": -1}"#, "invalid_value", json!("min_tokens"), "is -1"),
        (r#"{"prompt": "p", "logit_bias": {"257": 1}}"#, "invalid_value", json!("logit_bias"), "\"257\""),
        (
            r#"{"prompt": "p", "logit_bias": {"1": 101}}"#,
            "invalid_value",
            json!("logit_bias"),
            "has 101 for \"1\"",
        ),
        (
            r#"{"prompt": "p", "max_tokens": 1, "max_completion_tokens": 2}"#,
            "invalid_value",
            json!("max_completion_tokens"),
            "only one",
        ),
        (
            r#"{"prompt": "p", "max_tokens": 1, "n_predict": 2}"#,
            "invalid_value",
            json!("n_predict"),
            "only one",
        ),
        (r#"{"prompt": "p", "logprobs": 1, "n_probs": 2}"#, "invalid_value", json!("n_probs"), "only one"),
        (r#"{"prompt": "p", "suffix": "x"}"#, "unsupported_parameter", json!("suffix"), "not supported"),
        (r#"{"prompt": "p", "suffix": "x", "echo": true}"#, "invalid_value", json!("suffix"), "echo"),
        (r#"{"prompt": "p", "bogus": 1}"#, "unknown_parameter", json!("bogus"), "unknown parameter 'bogus'"),
    ] {
        let response = server.post(body).await;
        assert_eq!(response.status, if code == "model_not_found" { 404 } else { 400 }, "{body}");
        assert_eq!(response.error(), (code.to_string(), param), "{body}");
        let message = response.json()["error"]["message"].to_string().replace("\\\"", "\"");
        assert!(message.contains(part), "{body}: {message}");
    }
    server.close().await;
}

#[actix_web::test]
async fn parameters_without_effect_are_accepted() {
    let mut server = TestServer::start();
    let body = json!({
        "prompt": "p", "n": 1, "best_of": 1, "stop": [], "suffix": null, "presence_penalty": 0.0,
        "max_tokens": -1, "store": true, "cache_prompt": true, "reasoning_effort": "low", "verbosity": "low",
        "frequency_penalty": 0, "repetition_penalty": 1.0, "logit_bias": {}, "logprobs": null,
        "unheard_of": null
    });
    let (_, response) = server.exchange(body, answer("x")).await;
    assert_eq!(response.status, 200, "{}", response.body);
    server.close().await;
}

/// Fields of other servers are known: with a value that changes nothing they are accepted, and otherwise
/// refused rather than ignored.
#[actix_web::test]
async fn fields_of_other_servers_are_accepted_or_refused() {
    let mut server = TestServer::start();
    let neutral = json!({ "min_keep": 0, "logits_processors": [], "post_sampling_probs": false, "lora": [],
        "t_max_predict_ms": -1, "return_tokens_as_token_ids": false, "prompt_embeds": null, "n_keep": 5,
        "beam_width": 1, "length_penalty": 1.0, "kv_transfer_params": {}, "adaptive_target": -1.0,
        "regex": null, "n_probs": 0 });
    let prompts = [
        (COMPLETIONS, json!({ "prompt": "p" })),
        ("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": "p" }] })),
    ];
    for (path, prompt) in &prompts {
        let with = |fields: &Value| {
            let mut body = prompt.clone();
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            body.to_string()
        };
        let mut fields = neutral.clone();
        if *path != COMPLETIONS {
            fields["modalities"] = json!(["text"]);
            fields["prediction"] = json!({ "type": "content", "content": "x" });
            fields["reasoning_format"] = json!("auto");
        }
        let client = Client::send(server.address, "POST", path, "", &with(&fields)).await;
        let (_, events) = server.next_request().await;
        answer("x").into_iter().for_each(|event| events.send(event));
        let response = client.response().await;
        assert_eq!(
            (response.status, response.header("x-mainstem-ignored")),
            (200, None),
            "{}",
            response.body
        );
        for (name, value) in [
            ("min_keep", json!(5)),
            ("logits_processors", json!(["x"])),
            ("post_sampling_probs", json!(true)),
            ("t_max_predict_ms", json!(100)),
            ("lora", json!([{ "id": 0, "scale": 0.5 }])),
            ("prompt_embeds", json!("AAAA")),
            ("length_penalty", json!(2)),
            ("adaptive_target", json!(0.5)),
            ("regex", json!("a+")),
        ] {
            let response =
                Client::send(server.address, "POST", path, "", &with(&json!({ name: value }))).await;
            let response = response.response().await;
            assert_eq!((response.status, response.error().1), (400, json!(name)), "{}", response.body);
        }
    }
    for body in
        [r#"{"modalities": ["text", "audio"]}"#, r#"{"n_probs": 3}"#, r#"{"reasoning_format": "none"}"#]
    {
        let mut fields: Value = serde_json::from_str(body).unwrap();
        fields["messages"] = prompts[1].1["messages"].clone();
        let client = Client::send(server.address, "POST", prompts[1].0, "", &fields.to_string()).await;
        assert_eq!(client.response().await.status, 400, "{body}");
    }
    server.close().await;
}

/// llama.cpp's names of OpenAI's parameters mean the same.
#[actix_web::test]
async fn other_names_of_limits_and_log_probabilities() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": "p", "n_predict": 7, "max_tokens": 7, "n_probs": 2 });
    let (request, _) = server.exchange(body, answer("x")).await;
    assert_eq!((request.max_tokens, request.logprobs), (7, Some(2)));
    let (request, _) = server.exchange(json!({ "prompt": "p", "n_predict": -1 }), answer("x")).await;
    assert_eq!((request.max_tokens, request.logprobs), (63, None));
    server.close().await;
}

/// An unknown field changes nothing, but the client can see that it was ignored, whatever its name is.
#[actix_web::test]
async fn unknown_fields_are_ignored_and_named() {
    let mut server = TestServer::start();
    let (_, known) = server.exchange(json!({ "prompt": "p" }), answer("x")).await;
    assert_eq!(known.header("x-mainstem-ignored"), None);
    let body = json!({ "prompt": "p", "bogus": 1, "line\nbreak, é": {}, "stream": true,
                       "stream_options": { "x": [] } });
    let (_, response) = server.exchange(body, answer("x")).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let ignored = response.header("x-mainstem-ignored").unwrap();
    let mut names: Vec<_> = ignored.split(", ").collect();
    names.sort_unstable();
    assert_eq!(names, ["bogus", "line?break???", "stream_options.x"]);
    let many: Value = (0..50).map(|i| (format!("field{i}"), json!(i))).collect();
    let mut body = json!({ "prompt": "p" });
    body.as_object_mut().unwrap().extend(many.as_object().unwrap().clone());
    let (_, response) = server.exchange(body, answer("x")).await;
    assert_eq!(response.header("x-mainstem-ignored").unwrap().split(", ").count(), 16);
    server.close().await;
}

/// With `best_of`, the choice with the highest mean log-probability per token is returned.
#[actix_web::test]
async fn the_best_of_the_computed_choices_are_returned() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": "p", "n": 2, "best_of": 3 });
    let client = server.send(&body.to_string()).await;
    let answers = [("ab", -2.0), ("c", -3.0), ("d", -1.0)];
    for (text, logprob) in answers {
        let (request, events) = server.next_request().await;
        assert_eq!(request.logprobs, Some(0));
        for byte in text.bytes() {
            events.send(TokenEvent::Token(scored(byte.into(), logprob, &[])));
        }
        events.send(TokenEvent::Finished(FinishReason::Length));
    }
    let response = client.response().await.json();
    let choices = response["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| (&choice["index"], &choice["text"])).collect();
    assert_eq!(texts, [(&json!(0), &json!("d")), (&json!(1), &json!("ab"))]);
    assert!(choices.iter().all(|choice| choice["logprobs"].is_null()), "{response}");
    assert_eq!(response["usage"]["completion_tokens"], 4);
    server.close().await;
}

/// The parts of a prompt with a suffix are in the order of the model's family, marked by its tokens.
#[actix_web::test]
async fn a_suffix_becomes_a_prompt_for_filling_in_the_middle() {
    const SPM: &[&str] = &["<s>", "[SUFFIX]", "[PREFIX]"];
    const PSM: &[&str] = &["<s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
    const EOT: &[&str] = &["<s>", "▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"];
    let (a, z) = (u32::from(b'a'), u32::from(b'z'));
    for (special, prompt, stop) in [
        (PSM, vec![BOS + 1, a, BOS + 2, z, BOS + 3], None),
        (SPM, vec![BOS + 1, z, BOS + 2, a], None),
        (EOT, vec![BOS + 1, a, BOS + 2, z, BOS + 3], Some(BOS + 4)),
    ] {
        let tokenizer = tokenizer_with(special, Value::Null);
        let model = ModelInfo { vocab: 300, ..model() };
        let mut server = TestServer::for_model(model, tokenizer, None, |_| {}, DEADLINE);
        let (request, response) = server.exchange(json!({ "prompt": "a", "suffix": "z" }), answer("x")).await;
        assert_eq!(response.status, 200, "{}", response.body);
        assert_eq!(request.prompt[..], prompt);
        assert_eq!(request.stop_ids.iter().copied().next(), stop);
        let ids = server.post(r#"{"prompt": [1], "suffix": "z"}"#).await;
        assert_eq!(ids.error(), ("invalid_value".to_owned(), json!("suffix")));
        server.close().await;
    }
}

/// -1 is the rest of the context, not the default of the API.
#[actix_web::test]
async fn a_negative_limit_is_the_rest_of_the_context() {
    let mut server = TestServer::start();
    for (limit, tokens) in [(json!(-1), 63), (Value::Null, 16)] {
        let (request, _) = server.exchange(json!({ "prompt": "p", "max_tokens": limit }), answer("x")).await;
        assert_eq!(request.max_tokens, tokens, "{limit}");
    }
    server.close().await;
}

#[actix_web::test]
async fn continuous_usage_is_in_every_chunk() {
    let mut server = TestServer::start();
    let options = json!({ "include_usage": true, "continuous_usage_stats": true });
    let body = json!({ "prompt": "p", "stream": true, "stream_options": options });
    let (_, response) = server.exchange(body, answer("hi")).await;
    let counts = response.events().into_iter().map(|event| event["usage"]["completion_tokens"].clone());
    let counts: Vec<_> = counts.collect();
    assert_eq!(counts.len(), 4);
    assert!(counts.iter().all(Value::is_u64), "{counts:?}");
    assert_eq!(counts.last(), Some(&json!(2)));
    server.close().await;
}

#[actix_web::test]
async fn wrong_paths_methods_and_sizes_have_error_objects() {
    let server = TestServer::with_config(None, |config| config.body_limit_bytes = 1024);
    let nowhere = server.get("/v2/nothing").await;
    assert_eq!((nowhere.status, nowhere.error().0.as_str()), (404, "not_found"));
    assert!(nowhere.body.contains(COMPLETIONS) && nowhere.body.contains("/health"), "{}", nowhere.body);
    let method = server.get(COMPLETIONS).await;
    assert_eq!((method.status, method.error().0.as_str()), (405, "method_not_allowed"));
    assert_eq!(method.header("allow"), Some("post"));
    let large = server.post(&json!({ "prompt": "x".repeat(2000) }).to_string()).await;
    assert_eq!((large.status, large.error().0.as_str()), (413, "body_too_large"));
    server.close().await;
}

#[actix_web::test]
async fn a_failure_amid_a_stream_is_an_event_before_the_end() {
    let mut server = TestServer::start();
    let failed = TokenEvent::Failed(RequestError::DeviceFailed("smoke".into()));
    let body = |stream: bool| {
        let options = if stream { json!({ "include_usage": true }) } else { Value::Null };
        json!({ "prompt": "p", "stream": stream, "stream_options": options })
    };
    let (_, response) = server.exchange(body(true), vec![TokenEvent::Token(bare(97)), failed.clone()]).await;
    let events = response.events();
    assert_eq!(events.len(), 2);
    assert_eq!(events[0]["choices"][0]["text"], "a");
    assert_eq!(events[1]["error"]["code"], "device_failed");
    // A channel closed without an event is a failure too. A JSON response becomes a 500.
    let (_, response) = server.exchange(body(true), vec![]).await;
    assert_eq!(response.events()[0]["error"]["code"], "internal_error");
    let (_, response) = server.exchange(body(false), vec![TokenEvent::Token(bare(97)), failed]).await;
    assert_eq!((response.status, response.error().0.as_str()), (500, "device_failed"));
    server.close().await;
}

#[actix_web::test]
async fn a_client_that_hangs_up_drops_its_stream() {
    let mut server = TestServer::start();
    let mut client = server.send(r#"{"prompt": "p", "stream": true}"#).await;
    let (_, events) = server.next_request().await;
    events.send(TokenEvent::Token(bare(97)));
    client.read_until("\"text\":\"a\"").await;
    assert!(!events.is_closed());
    drop(client);
    wait_until(|| events.is_closed()).await;

    let client = server.send(r#"{"prompt": "p"}"#).await;
    let (_, events) = server.next_request().await;
    events.send(TokenEvent::Token(bare(97)));
    assert!(!events.is_closed());
    drop(client);
    wait_until(|| events.is_closed()).await;
    server.close().await;
}

#[actix_web::test]
async fn a_silent_stream_sends_comments() {
    let mut server =
        TestServer::with_config(None, |config| config.stream_comment_interval = Duration::from_millis(5));
    let mut client = server.send(r#"{"prompt": "p", "stream": true}"#).await;
    let (_, events) = server.next_request().await;
    client.read_until(": keep-alive\n\n").await;
    events.send(TokenEvent::Token(bare(97)));
    events.send(TokenEvent::Finished(FinishReason::Stop));
    let response = client.response().await;
    let data: Vec<_> =
        response.body.split_inclusive("\n\n").filter(|frame| *frame != ": keep-alive\n\n").collect();
    assert_eq!(data.len(), 3, "{}", response.body);
    assert!(data[0].contains("\"text\":\"a\"") && data[2] == "data: [DONE]\n\n", "{data:?}");
    server.close().await;
}

#[actix_web::test]
async fn request_ids_go_both_ways() {
    let server = TestServer::with_config(Some(RequestError::Draining), |_| {});
    let id_for = async |header: String| {
        let client = Client::send(server.address, "POST", COMPLETIONS, &header, r#"{"prompt": "p"}"#).await;
        client.response().await.header("x-request-id").expect("there is always one").to_string()
    };
    assert_eq!(id_for("X-Request-Id: trace-1.b:2_c\r\n".into()).await, "trace-1.b:2_c");
    assert_eq!(id_for("X-Request-Id: a b\"<c>+/=\t~\r\n".into()).await, "ab\"<c>+/=~");
    assert_eq!(id_for(format!("X-Request-Id: {}\r\n", "x".repeat(500))).await, "x".repeat(128));
    let (first, second) = (id_for(String::new()).await, id_for("X-Request-Id: \u{e9}\r\n".into()).await);
    assert_eq!((first.len(), second.len()), (32, 32));
    assert_ne!(first, second);
    assert_eq!(server.get("/nowhere").await.header("x-request-id").map(str::len), Some(32));
    server.close().await;
}

#[actix_web::test]
async fn models_version_and_metrics_are_reported() {
    let mut server = TestServer::start();
    let models = server.get("/v1/models").await.json();
    assert_eq!(models["object"], "list");
    let card = json!({
        "id": "tiny", "object": "model", "created": 1, "owned_by": "mainstem", "max_model_len": 64,
        "kind": "decoder", "endpoints": ["/v1/chat/completions", "/v1/completions"], "context": 64
    });
    assert_eq!(models["data"], json!([card]));
    assert_eq!(server.get("/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    server.exchange(json!({ "prompt": "p" }), answer("x")).await;
    let metrics = server.get("/metrics").await;
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    let answered = r#"mainstem_http_requests_total{method="POST",path="/v1/completions",status="200"}"#;
    assert!(metrics.body.contains(answered), "{}", metrics.body);
    server.close().await;
}

#[actix_web::test]
async fn health_follows_the_decode_loop() {
    let server = TestServer::with_config(None, |config| config.stalled_after = Duration::from_nanos(1));
    let healthy = server.get("/health").await;
    assert_eq!((healthy.status, healthy.json()), (200, json!({ "status": "ok" })));
    server.status.running.store(1, Ordering::Relaxed);
    let stalled = server.get("/health").await;
    assert_eq!((stalled.status, stalled.json()), (503, json!({ "status": "stalled" })));
    server.status.running.store(0, Ordering::Relaxed);
    assert_eq!(server.get("/health").await.status, 200, "without requests a silent decode loop is healthy");
    server.status.set_failed();
    let failed = server.get("/health").await;
    assert_eq!((failed.status, failed.json()), (503, json!({ "status": "failed" })));
    server.close().await;
    let server = TestServer::with_config(None, |_| {});
    server.status.draining.store(true, Ordering::Relaxed);
    let draining = server.get("/health").await;
    assert_eq!((draining.status, draining.json()), (503, json!({ "status": "draining" })));
    assert_eq!(draining.header("retry-after"), Some("1"));
    server.close().await;
}

/// Tokens without text, such as ignored end tokens, are also sent as they are generated.
#[actix_web::test]
async fn tokens_without_text_are_not_held_back() {
    let mut server = TestServer::start();
    let body =
        json!({ "prompt": "p", "stream": true, "ignore_eos": true, "return_token_ids": true }).to_string();
    let mut client = server.send(&body).await;
    let (_, events) = server.next_request().await;
    for made in 1..=3 {
        events.send(TokenEvent::Token(bare(BOS)));
        let ids = format!("\"token_ids\":[{BOS}]");
        while String::from_utf8_lossy(&client.read).matches(&ids).count() < made {
            assert!(client.read_more().await, "the stream goes on");
        }
    }
    events.send(TokenEvent::Finished(FinishReason::Length));
    assert_eq!(client.response().await.status, 200);
    server.close().await;
}

/// Shutdown waits for responses, but not for an upload that never ends.
#[actix_web::test]
async fn an_unfinished_upload_holds_nothing_up() {
    let server = TestServer::start();
    let mut client = Client { stream: TcpStream::connect(server.address).await.unwrap(), read: Vec::new() };
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nExpect: 100-continue\r\nContent-Length: 99\r\n\r\n{";
    assert_eq!(client.stream.try_write(head.as_bytes()).unwrap(), head.len());
    // The handler has started to read the body.
    client.read_until("100 Continue").await;
    server.close().await;
}

#[actix_web::test]
async fn long_bodies_take_turns_and_all_are_served() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": "pp", "user": "u".repeat(20_000) }).to_string();
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(server.send(&body).await);
    }
    for _ in 0..8 {
        let (request, events) = server.next_request().await;
        assert_eq!(request.prompt.len(), 2);
        events.send(TokenEvent::Finished(FinishReason::Stop));
    }
    for client in clients {
        assert_eq!(client.response().await.status, 200);
    }
    server.close().await;
}

#[actix_web::test]
async fn excess_waiters_for_grammars_are_rejected_and_cancelled_ones_no_longer_counted() {
    let semaphore = super::BoundedSemaphore::new(1, |limit| RequestError::TooManyGrammars { limit });
    let held = semaphore.acquire().await.unwrap();
    let mut waiting: Vec<_> =
        (0..super::BoundedSemaphore::WAITERS_MAX).map(|_| Box::pin(semaphore.acquire())).collect();
    for wait in &mut waiting {
        assert!(wait.as_mut().now_or_never().is_none());
    }
    let limit = super::BoundedSemaphore::WAITERS_MAX;
    let full = Err(RequestError::TooManyGrammars { limit });
    assert_eq!(semaphore.acquire().await.map(drop), full);
    waiting.pop();
    let mut last = Box::pin(semaphore.acquire());
    assert!(last.as_mut().now_or_never().is_none());
    drop(held);
    drop(timeout(DEADLINE, waiting.remove(0)).await.expect("the permit becomes free").unwrap());
}

#[actix_web::test]
async fn the_first_stop_lets_requests_finish_and_takes_no_new_ones() {
    let mut server = TestServer::start();
    let mut client = server.send(r#"{"prompt": "p", "stream": true}"#).await;
    let (_, events) = server.next_request().await;
    events.send(TokenEvent::Token(bare(97)));
    client.read_until("\"text\":\"a\"").await;
    server.stops.send(()).unwrap();
    wait_until(|| server.status.is_draining()).await;
    let refused = server.post(r#"{"prompt": "p"}"#).await;
    assert_eq!((refused.status, refused.error().0.as_str()), (503, "shutting_down"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(server.get("/health").await.status, 503);
    events.send(TokenEvent::Token(bare(98)));
    events.send(TokenEvent::Finished(FinishReason::Stop));
    assert_eq!(client.response().await.events().len(), 3);
    assert_eq!(server.ending().await, ShutdownOutcome::Drained);
}

#[actix_web::test]
async fn the_second_stop_and_the_drain_timeout_abort_requests() {
    let mut server = TestServer::start();
    let _client = server.send(r#"{"prompt": "p", "stream": true}"#).await;
    let (_, events) = server.next_request().await;
    server.stops.send(()).unwrap();
    wait_until(|| server.status.is_draining()).await;
    server.stops.send(()).unwrap();
    assert_eq!(server.ending().await, ShutdownOutcome::Aborted);
    wait_until(|| events.is_closed()).await;

    let mut server = TestServer::with_drain_timeout(None, |_| {}, Duration::from_millis(1));
    let _client = server.send(r#"{"prompt": "p"}"#).await;
    let (_, events) = server.next_request().await;
    server.stops.send(()).unwrap();
    assert_eq!(server.ending().await, ShutdownOutcome::TimedOut);
    wait_until(|| events.is_closed()).await;
}

#[actix_web::test]
async fn aborted_requests_end_with_an_error() {
    let mut server = TestServer::start();
    let mut stream = server.send(r#"{"prompt": "p", "stream": true}"#).await;
    let (_, events) = server.next_request().await;
    let whole = server.send(r#"{"prompt": "p"}"#).await;
    let _engine_never_answers = server.next_request().await;
    events.send(TokenEvent::Token(bare(97)));
    stream.read_until("\"text\":\"a\"").await;
    server.stops.send(()).unwrap();
    server.stops.send(()).unwrap();
    let (stream, whole) = (stream.response().await.events(), whole.response().await);
    assert_eq!(stream.last().unwrap()["error"]["code"], "shut_down");
    assert_eq!((whole.status, whole.error().0.as_str()), (503, "shut_down"));
    assert_eq!(server.ending().await, ShutdownOutcome::Aborted);
}

/// Returns the metrics of a reply to `events` that is polled `pieces` times and then dropped.
fn measured(events: Vec<TokenEvent>, pieces: usize) -> String {
    let recorder = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&recorder, || {
        let (sender, stream) = event_channel(ResponseMemory::new(usize::MAX).hold(ClientId::Local));
        events.into_iter().for_each(|event| sender.send(event));
        let request = Request::greedy("r", [1, 2, 3], 9);
        let mut reply = ReplyStream::new(stream, Arc::new(tokenizer()), &request, &ReplySpec::default());
        let read = async {
            for _ in 0..pieces {
                reply.next().await.unwrap().unwrap();
            }
        };
        actix_web::rt::System::new().block_on(read);
        drop(reply);
    });
    recorder.handle().render()
}

#[test]
fn a_reply_measures_its_request() {
    let whole = measured(answer("abc"), 4);
    for line in [
        "mainstem_request_success_total{finished_reason=\"length\"} 1",
        "mainstem_time_to_first_token_seconds_count 1",
        "mainstem_inter_token_latency_seconds_count 2",
        "mainstem_e2e_request_latency_seconds_count 1",
        "mainstem_request_generation_tokens_sum 3",
    ] {
        assert!(whole.contains(line), "no {line} in\n{whole}");
    }
    assert!(!whole.contains("clients_gone"), "{whole}");

    let dropped = measured(answer("abc"), 2);
    for line in
        ["mainstem_request_success_total{finished_reason=\"abort\"} 1", "mainstem_clients_gone_total 1"]
    {
        assert!(dropped.contains(line), "no {line} in\n{dropped}");
    }
}

/// The engine shares its time between the clients of requests: their keys, or else their addresses.
#[actix_web::test]
async fn a_request_has_the_client_of_its_key_or_else_of_its_address() {
    let key = "Authorization: Bearer secret\r\n";
    for (keys, headers, name) in
        [(&["other", "secret"][..], key, "key 2"), (&[], key, "127.0.0.1"), (&[], "", "127.0.0.1")]
    {
        let keys = ApiKeys(keys.iter().map(|key| key.to_string()).collect());
        let mut server = TestServer::with_config(None, |config| {
            (config.api_keys, config.clients.class) = (keys, Class::Batch);
        });
        let _client = Client::send(server.address, "POST", COMPLETIONS, headers, r#"{"prompt": "a"}"#).await;
        let (request, _) = server.next_request().await;
        assert_eq!((&*request.client.name, request.client.settings.class), (name, Class::Batch));
        assert_eq!(request.class, Class::Batch);
    }
}

#[actix_web::test]
async fn requests_say_how_urgent_they_are() {
    let plain = ClientSettings::default();
    let batch = ClientSettings { class: Class::Batch, ..plain };
    let urgent = ClientSettings { may_prioritize: true, ..plain };
    for (settings, fields, class, priority) in [
        (plain, json!({ "service_tier": "auto", "priority": 0 }), Class::Interactive, 0),
        (plain, json!({ "service_tier": "flex", "priority": 7 }), Class::Batch, 7),
        (plain, json!({ "service_tier": "batch" }), Class::Batch, 0),
        (batch, json!({ "service_tier": "default" }), Class::Batch, 0),
        (urgent, json!({ "priority": -3 }), Class::Interactive, -3),
    ] {
        let mut server = TestServer::with_config(None, |config| config.clients = settings);
        let mut body = json!({ "prompt": "p" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let _client = server.send(&body.to_string()).await;
        let (request, _) = server.next_request().await;
        assert_eq!((request.class, request.priority), (class, priority), "{fields}");
    }
    let server = TestServer::start();
    let response = server.post(r#"{"prompt": "p", "priority": -1}"#).await;
    assert_eq!((response.status, response.error().1), (400, json!("priority")));
}
