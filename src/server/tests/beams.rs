//! Tests of beam search in requests: what reaches the engine, what is refused, and how results are returned.

use super::encoder_decoder::{DE, EN, translation_server};
use super::test_server::{
    COMPLETIONS, Client, DEADLINE, TestServer, answer, bare, joined, model, scored, tokenizer,
};
use crate::actors::{EventSender, ModelInfo};
use crate::decoding::EarlyStopping;
use crate::request::{
    BeamOptions, FinishReason, ParamList, Request, RequestError, Sampling, SamplingDefaults, TokenEvent,
};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn with(mut body: Value, params: &Value) -> Value {
    body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
    body
}

/// Returns the engine's requests of a body, with the senders of their events, and the client.
async fn send(server: &mut TestServer, body: &Value, n: usize) -> (Vec<(Request, EventSender)>, Client) {
    let client = server.send(&body.to_string()).await;
    let mut requests = Vec::new();
    for _ in 0..n {
        requests.push(server.next_request().await);
    }
    (requests, client)
}

/// Returns the searches that the engine is asked for. The rest of their requests is equal.
async fn searches(server: &mut TestServer, params: &Value, n: usize) -> Vec<Option<BeamOptions>> {
    let body = with(json!({ "prompt": "p", "max_tokens": 8 }), params);
    let (requests, client) = send(server, &body, n).await;
    for (request, sender) in &requests {
        answer("x").into_iter().for_each(|event| sender.send(event));
        let first = &requests[0].0;
        assert!(request.beams.is_none() || request.sampling == Sampling::GREEDY, "{:?}", request.sampling);
        assert_eq!(request.prompt, first.prompt);
        assert_eq!((request.min_tokens, request.logprobs), (first.min_tokens, first.logprobs));
    }
    let response = client.response().await;
    assert_eq!(response.status, 200, "{params}: {}", response.body);
    requests.into_iter().map(|(request, _)| request.beams).collect()
}

fn options(width: usize, length_penalty: f64, early_stopping: EarlyStopping, answer: usize) -> BeamOptions {
    BeamOptions { width, length_penalty, early_stopping, forced_tokens: 0, answer }
}

#[actix_web::test]
async fn every_spelling_of_a_search_reaches_the_engine() {
    use EarlyStopping::{Estimate, Immediate, Never};
    let mut server = TestServer::start();
    let plain = |width| Some((width, 1.0, Estimate));
    for (params, n, expected) in [
        (json!({ "use_beam_search": true }), 1, plain(1)),
        (json!({ "use_beam_search": true, "beam_width": 4 }), 1, plain(4)),
        (json!({ "use_beam_search": true, "n": 3 }), 3, plain(3)),
        (json!({ "use_beam_search": true, "best_of": 3, "n": 2 }), 2, plain(3)),
        (json!({ "use_beam_search": true, "best_of": 3, "n": 2, "stream": true }), 2, plain(3)),
        (json!({ "num_beams": 4, "n": 4 }), 4, plain(4)),
        (json!({ "beam_width": 2, "num_beams": 2, "best_of": 2 }), 1, plain(2)),
        (
            json!({ "num_beams": 2, "length_penalty": -0.5, "early_stopping": "never" }),
            1,
            Some((2, -0.5, Never)),
        ),
        (
            json!({ "num_beams": 2, "length_penalty": 0, "early_stopping": true }),
            1,
            Some((2, 0.0, Immediate)),
        ),
        (
            json!({ "num_beams": 2, "temperature": 0, "top_p": 0.5, "seed": 7, "logprobs": 0, "samplers": [],
                    "logit_bias": {}, "presence_penalty": 0, "stop": "x", "ignore_eos": true }),
            1,
            plain(2),
        ),
        (
            json!({ "num_beams": 2, "temperature": 1, "top_p": 1, "top_k": -1, "echo": true,
                    "response_format": { "type": "text" } }),
            1,
            plain(2),
        ),
        (
            json!({ "num_beams": 1, "use_beam_search": false, "length_penalty": 1, "early_stopping": false }),
            1,
            None,
        ),
        (json!({ "num_beams": null, "use_beam_search": null, "early_stopping": null, "n": 2 }), 2, None),
    ] {
        let found = searches(&mut server, &params, n).await;
        let expected = (0..n).map(|answer| {
            expected.map(|(width, penalty, stopping)| options(width, penalty, stopping, answer))
        });
        assert_eq!(found, expected.collect::<Vec<_>>(), "{params}");
    }
    server.close().await;
}

#[actix_web::test]
async fn what_a_search_has_no_use_for_is_refused_by_name() {
    let server = TestServer::start();
    let schema = json!({ "type": "json_object" });
    let refusals = [
        (json!({ "use_beam_search": 1 }), "use_beam_search", "true or false"),
        (json!({ "beam_width": 0 }), "beam_width", "from 1 to 64"),
        (json!({ "num_beams": 65 }), "num_beams", "from 1 to 64"),
        (json!({ "num_beams": 4, "beam_width": 3 }), "num_beams", "only one"),
        (json!({ "num_beams": 4, "best_of": 3 }), "best_of", "only one"),
        (json!({ "num_beams": 4, "n": 5 }), "num_beams", "at least n, which is 5"),
        (json!({ "use_beam_search": true, "best_of": 2, "n": 3 }), "best_of", "at least n, which is 3"),
        (json!({ "use_beam_search": false, "num_beams": 2 }), "num_beams", "needs 'use_beam_search'"),
        (json!({ "length_penalty": 2 }), "length_penalty", "needs 'use_beam_search'"),
        (json!({ "early_stopping": true }), "early_stopping", "needs 'use_beam_search'"),
        (json!({ "num_beams": 2, "length_penalty": "1" }), "length_penalty", "a number"),
        (json!({ "num_beams": 2, "length_penalty": 1e9 }), "length_penalty", "32-bit"),
        (json!({ "num_beams": 2, "length_penalty": -60 }), "length_penalty", "32-bit"),
        (json!({ "num_beams": 2, "early_stopping": "maybe" }), "early_stopping", "\\\"never\\\""),
        (json!({ "num_beams": 2, "temperature": 0.7 }), "temperature", "beam search"),
        (json!({ "num_beams": 2, "seed": 5, "top_k": 5 }), "top_k", "beam search"),
        (json!({ "num_beams": 2, "min_tokens": 2, "typical": 0.5 }), "typical", "beam search"),
        (json!({ "num_beams": 2, "repeat_penalty": 1.5 }), "repeat_penalty", "beam search"),
        (json!({ "num_beams": 2, "logit_bias": { "5": 1 } }), "logit_bias", "beam search"),
        (json!({ "num_beams": 2, "bad_words": ["a"] }), "bad_words", "beam search"),
        (json!({ "num_beams": 2, "mirostat": 2 }), "mirostat", "beam search"),
        (
            json!({ "num_beams": 2, "strategy_params": { "k": 4 }, "strategy": "fsd" }),
            "strategy",
            "beam search",
        ),
        (json!({ "num_beams": 2, "logprobs_mode": "processed_logprobs" }), "logprobs_mode", "beam search"),
        (json!({ "num_beams": 2, "top_p": 2 }), "top_p", "must be"),
        (json!({ "num_beams": 2, "response_format": schema }), "response_format", "beam search"),
        (json!({ "num_beams": 2, "guided_regex": "a" }), "guided_regex", "beam search"),
        (json!({ "num_beams": 2, "prompt_logprobs": 0 }), "prompt_logprobs", "beam search"),
        (json!({ "num_beams": 2, "min_tokens": 9 }), "min_tokens", "is 9"),
    ];
    let of_completions = [
        (json!({ "num_beams": 2, "logprobs": 1 }), "logprobs", "must be 0"),
        (json!({ "num_beams": 2, "n_probs": 1 }), "n_probs", "must be 0"),
        (json!({ "num_beams": 2, "logprobs": 0, "echo": true }), "echo", "and 'logprobs'"),
        (json!({ "num_beams": 2, "max_tokens": 0, "echo": true }), "max_tokens", "at least 1"),
    ];
    let tool = json!([{ "type": "function", "function": { "name": "f" } }]);
    let of_chats = [
        (json!({ "num_beams": 2, "logprobs": true, "top_logprobs": 1 }), "top_logprobs", "must be 0"),
        (json!({ "num_beams": 2, "tools": tool, "tool_choice": "required" }), "tool_choice", "beam search"),
    ];
    let completion = json!({ "prompt": "p", "max_tokens": 8 });
    let chat = json!({ "messages": [{ "role": "user", "content": "p" }], "max_tokens": 8 });
    let common = refusals.iter().flat_map(|case| [(COMPLETIONS, &completion, case), (CHAT, &chat, case)]);
    let own = of_completions.iter().map(|case| (COMPLETIONS, &completion, case));
    let cases = common.chain(own).chain(of_chats.iter().map(|case| (CHAT, &chat, case)));
    for (path, body, (params, named, part)) in cases {
        let body = with(body.clone(), params).to_string();
        let response = Client::send(server.address, "POST", path, "", &body).await.response().await;
        assert_eq!(response.status, 400, "{path} {params}: {}", response.body);
        assert_eq!(response.error().1, json!(named), "{path} {params}: {}", response.body);
        assert!(response.body.contains(part), "{path} {params}: {}", response.body);
    }
    server.close().await;
}

/// The engine's errors name the parameter that gives the width.
#[actix_web::test]
async fn too_many_beams_are_refused_under_the_name_of_the_request() {
    let message = "beam_width is 4, and max_tokens 16".to_owned();
    for (param, cases) in [
        (
            "beam_width",
            [
                (json!({ "num_beams": 4 }), "num_beams", "num_beams is 4, and max_tokens 16"),
                (json!({ "use_beam_search": true, "n": 4 }), "n", "n is 4, and max_tokens 16"),
                (
                    json!({ "use_beam_search": true, "best_of": 4, "n_predict": 16 }),
                    "best_of",
                    "best_of is 4, and n_predict 16",
                ),
            ],
        ),
        (
            "stop_token_ids",
            [
                (json!({ "beam_width": 4, "stop": 7 }), "stop", &*message),
                (json!({ "beam_width": 4, "stop_token_ids": [7] }), "stop_token_ids", &*message),
                (json!({ "beam_width": 4 }), "stop_token_ids", &*message),
            ],
        ),
    ] {
        let refusal = RequestError::Invalid { param, message: message.clone() };
        let server = TestServer::with_config(Some(refusal), |_| {});
        for (params, named, says) in cases {
            let response = server.post(&with(json!({ "prompt": "p" }), &params).to_string()).await;
            assert_eq!((response.status, response.error().1), (400, json!(named)), "{params}");
            assert_eq!(response.json()["error"]["message"], says);
        }
        server.close().await;
    }
}

fn found(tokens: &[(u32, f32)], end: Option<(u32, f32)>, score: f32) -> Vec<TokenEvent> {
    let tokens = tokens.iter().map(|(id, logprob)| TokenEvent::Token(scored(*id, *logprob, &[])));
    let end = end.map(|(id, logprob)| TokenEvent::EndToken(scored(id, logprob, &[])));
    let reason = if end.is_some() { FinishReason::Stop } else { FinishReason::Length };
    let last = [TokenEvent::BeamScore(score), TokenEvent::Finished(reason)];
    tokens.chain(end).chain(last).collect()
}

#[actix_web::test]
async fn each_result_has_its_score() {
    let mut server = TestServer::start();
    for stream in [false, true] {
        let options = if stream { json!({ "include_usage": true }) } else { Value::Null };
        let body = json!({ "prompt": "p", "num_beams": 3, "n": 2, "logprobs": 0, "stream": stream,
                           "stream_options": options, "return_token_ids": true });
        let (requests, client) = send(&mut server, &body, 2).await;
        let results = [
            found(&[(97, -0.5)], Some((98, -0.25)), -0.375),
            found(&[(99, -0.5), (100, -1.0), (101, -1.5)], None, f32::NEG_INFINITY),
        ];
        for ((_, sender), events) in requests.iter().zip(results) {
            events.into_iter().for_each(|event| sender.send(event));
        }
        let response = client.response().await;
        let (choices, usage) = match stream {
            false => {
                let json = response.json();
                (json["choices"].as_array().unwrap().clone(), json["usage"].clone())
            }
            true => {
                let events = response.events();
                let of = |index: usize| {
                    let mine = events.iter().filter(|event| event["choices"][0]["index"] == index);
                    let mine: Vec<Value> = mine.cloned().collect();
                    let last = &mine.last().unwrap()["choices"][0];
                    let scores = mine.iter().filter(|event| event["choices"][0].get("beam_score").is_some());
                    assert_eq!(scores.count(), 1, "{mine:?}");
                    json!({ "beam_score": last["beam_score"], "finish_reason": last["finish_reason"],
                            "token_ids": joined(&mine, |choice| &choice["token_ids"]),
                            "logprobs": { "token_logprobs":
                                joined(&mine, |choice| &choice["logprobs"]["token_logprobs"]) } })
                };
                ([0, 1].map(of).to_vec(), events.last().unwrap()["usage"].clone())
            }
        };
        let results = choices.iter().map(|choice| {
            let logprobs = &choice["logprobs"]["token_logprobs"];
            (&choice["beam_score"], &choice["finish_reason"], &choice["token_ids"], logprobs)
        });
        let expected = [
            (&json!(-0.375), &json!("stop"), &json!([97, 98]), &json!([-0.5, -0.25])),
            // JSON has no infinity.
            (&json!(-3.4028235e38), &json!("length"), &json!([99, 100, 101]), &json!([-0.5, -1.0, -1.5])),
        ];
        assert_eq!(results.collect::<Vec<_>>(), expected);
        assert_eq!(usage["completion_tokens"], 5);
    }
    server.close().await;
}

#[actix_web::test]
async fn chats_have_scores_too_and_other_answers_have_none() {
    let mut server = TestServer::start();
    for (params, score) in [(json!({ "num_beams": 2 }), Some(json!(-1.5))), (json!({}), None)] {
        for stream in [false, true] {
            let messages = json!([{ "role": "user", "content": "p" }]);
            let body = with(json!({ "messages": messages, "max_tokens": 2, "stream": stream }), &params);
            let client = Client::send(server.address, "POST", CHAT, "", &body.to_string()).await;
            let (request, sender) = server.next_request().await;
            assert_eq!(request.beams.is_some(), score.is_some());
            sender.send(TokenEvent::Token(bare(97)));
            score.iter().for_each(|_| sender.send(TokenEvent::BeamScore(-1.5)));
            sender.send(TokenEvent::Finished(FinishReason::Stop));
            let response = client.response().await;
            let last = if stream { response.events().pop().unwrap() } else { response.json() };
            assert_eq!(last["choices"][0].get("beam_score"), score.as_ref(), "{last}");
        }
    }
    server.close().await;
}

/// A stop string cuts the text of a result. Its score is that of the whole, so it is left out.
#[actix_web::test]
async fn a_stop_string_cuts_a_result() {
    let mut server = TestServer::start();
    for (stop, text, score) in [("c", "ab", None), ("x", "abcd", Some(json!(-2.0))), ("d", "abc", None)] {
        let tokens = [(97, -0.5), (98, -0.5), (99, -0.5), (100, -0.5)];
        let body = json!({ "prompt": "p", "num_beams": 2, "stop": stop });
        let (_, response) = server.exchange(body, found(&tokens, None, -2.0)).await;
        let choice = &response.json()["choices"][0];
        assert_eq!((&choice["text"], choice.get("beam_score")), (&json!(text), score.as_ref()), "{stop}");
    }
    server.close().await;
}

/// Default parameters change nothing, except the minimum length where it is not longer than the maximum.
#[actix_web::test]
async fn of_the_defaults_only_the_minimum_length_applies() {
    let list = |text: &str| ParamList::parse_text(text).unwrap();
    let sampling_defaults = SamplingDefaults {
        server: list("repetition_penalty=1.5,temperature=0.5"),
        model: list("min_tokens=3,no_repeat_ngram_size=3,logit_bias={\"5\":1}"),
    };
    let model = ModelInfo { sampling_defaults, ..model() };
    let mut server = TestServer::for_model(model, tokenizer(), None, |_| {}, DEADLINE);
    for (max_tokens, min_tokens) in [(8, 3), (2, 0)] {
        let body = json!({ "prompt": "p", "num_beams": 2, "max_tokens": max_tokens });
        let (request, _) = server.exchange(body, answer("x")).await;
        assert!(request.plan.is_none() && request.logit_bias.is_empty());
        assert_eq!((request.sampling, request.min_tokens), (Sampling::GREEDY, min_tokens));
    }
    let (request, _) = server.exchange(json!({ "prompt": "p" }), answer("x")).await;
    assert!(request.plan.is_some(), "other requests have the defaults");
    server.close().await;
}

/// A forced token that the server adds at the end counts in the length, as in transformers.
#[actix_web::test]
async fn forced_tokens_count_unless_the_client_gives_the_start() {
    let mut server = translation_server(Some(DE));
    for (params, forced_tokens) in [
        (json!({}), 1),
        (json!({ "forced_bos_token": "en" }), 1),
        (json!({ "forced_bos_token_id": EN }), 1),
        (json!({ "decoder_prompt": "" }), 1),
        (json!({ "decoder_prompt": "hi" }), 0),
        (json!({ "decoder_prompt": [EN, DE] }), 0),
    ] {
        let body = with(json!({ "prompt": "a", "num_beams": 2 }), &params);
        let (request, response) = server.exchange(body, answer("x")).await;
        let beams = request.beams.unwrap_or_else(|| panic!("{params}: {}", response.body));
        assert_eq!(beams.forced_tokens, forced_tokens, "{params}");
    }
    server.close().await;
    let mut server = translation_server(None);
    let (request, _) = server.exchange(json!({ "prompt": "a", "num_beams": 2 }), answer("x")).await;
    assert_eq!(request.beams.map(|beams| beams.forced_tokens), Some(0));
    server.close().await;
}
