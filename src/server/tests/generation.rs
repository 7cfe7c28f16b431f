//! Tests of completions: several choices, stop conditions, limits, and every way in which a completion ends.

use super::test_server::{BOS, COMPLETIONS, Client, TestServer, answer, bare, scored, wait_until};
use crate::request::{FinishReason, RequestError, TokenEvent};
use serde_json::{Value, json};
use std::time::Duration;

/// Posts `body` while the fake engine sends one list of events per choice. Returns the requests and the
/// response.
async fn play_all(
    server: &mut TestServer,
    body: Value,
    answers: Vec<Vec<TokenEvent>>,
) -> (Vec<crate::request::Request>, super::test_server::Response) {
    let client = server.send(&body.to_string()).await;
    let mut requests = Vec::new();
    for events in answers {
        let (request, sender) = server.next_request().await;
        requests.push(request);
        events.into_iter().for_each(|event| sender.send(event));
    }
    (requests, client.response().await)
}

fn text_of(events: &[Value], index: u64) -> String {
    let choices = events.iter().filter_map(|event| event["choices"].get(0));
    let mine = choices.filter(|choice| choice["index"] == index);
    mine.map(|choice| choice["text"].as_str().unwrap()).collect()
}

#[actix_web::test]
async fn each_prompt_gets_its_choices_with_seeds_of_their_own() {
    let mut server = TestServer::start();
    // The second choice of a prompt finds the pages of the first, which counts as one prompt all the same.
    let cached = [0, 1, 1, 2].map(|cached_tokens| TokenEvent::Started { cached_tokens });
    let texts = ["one", "two", "three", "four"].map(answer);
    let answers = || {
        let started = cached.clone().into_iter().zip(texts.clone());
        started.map(|(event, answer)| [vec![event], answer].concat()).collect::<Vec<_>>()
    };
    for stream in [false, true] {
        let body = json!({
            "prompt": ["a", "bc"], "n": 2, "seed": 9, "stream": stream, "return_token_ids": true,
            "stream_options": if stream { json!({ "include_usage": true }) } else { Value::Null },
        });
        let (requests, response) = play_all(&mut server, body, answers()).await;
        let requested: Vec<_> = requests.iter().map(|r| (r.prompt.to_vec(), r.sampling.seed)).collect();
        assert_eq!(requested, [(vec![97], 9), (vec![97], 10), (vec![98, 99], 9), (vec![98, 99], 10)]);
        let usage = json!({
            "prompt_tokens": 3, "completion_tokens": 15, "total_tokens": 18,
            "prompt_tokens_details": { "cached_tokens": 1 }
        });
        let ids = |text: &str| json!(text.bytes().collect::<Vec<_>>());
        if stream {
            let events = response.events();
            assert_eq!(events.last().unwrap()["usage"], usage);
            for (index, (text, prompt)) in
                [("one", "a"), ("two", "a"), ("three", "bc"), ("four", "bc")].iter().enumerate()
            {
                assert_eq!(text_of(&events, index as u64), *text);
                let first = events.iter().find(|event| event["choices"][0]["index"] == index).unwrap();
                assert_eq!(first["choices"][0]["prompt_token_ids"], ids(prompt));
                let ends = events.iter().filter(|event| {
                    event["choices"][0]["index"] == index && !event["choices"][0]["finish_reason"].is_null()
                });
                assert_eq!(ends.count(), 1);
            }
        } else {
            let json = response.json();
            assert_eq!(json["usage"], usage);
            for (index, text) in ["one", "two", "three", "four"].into_iter().enumerate() {
                let choice = &json["choices"][index];
                assert_eq!((&choice["index"], &choice["text"]), (&json!(index), &json!(text)));
                assert_eq!(choice["token_ids"], ids(text));
            }
        }
    }
    server.close().await;
}

/// Excessive numbers of choices are rejected before anything is allocated per choice.
#[actix_web::test]
async fn too_many_choices_are_refused_before_they_are_made() {
    let server = TestServer::start();
    let prompts = vec![json!([5]); 50_000];
    for (body, param) in [
        (json!({ "prompt": prompts, "n": 128 }), "n"),
        (json!({ "prompt": prompts }), "prompt"),
        (json!({ "prompt": vec!["a"; 17], "n": 128 }), "n"),
    ] {
        let response = server.post(&body.to_string()).await;
        assert_eq!(response.error(), ("invalid_value".into(), json!(param)));
        assert!(response.json()["error"]["message"].as_str().unwrap().contains("2048"), "{}", response.body);
    }
    server.close().await;
}

#[actix_web::test]
async fn one_choice_that_fails_ends_them_all() {
    let mut server = TestServer::start();
    let client = server.send(r#"{"prompt": "p", "n": 2, "stream": true}"#).await;
    let (_, first) = server.next_request().await;
    let (_, second) = server.next_request().await;
    second.send(TokenEvent::Failed(RequestError::DeviceFailed("smoke".into())));
    let events = client.response().await.events();
    assert_eq!(events.last().unwrap()["error"]["code"], "device_failed");
    wait_until(|| first.is_closed()).await;
    server.close().await;
}

/// A stop string is removed from the text, also if it spans several tokens or deltas, and the request is
/// cancelled in the engine.
#[actix_web::test]
async fn a_stop_string_ends_the_answer_before_it() {
    let mut server = TestServer::start();
    for stream in [false, true] {
        for (stop, kept, keeps, reason) in [
            (json!("lo w"), "hel", false, json!("lo w")),
            (json!(["zzz", " wo"]), "hello", false, json!(" wo")),
            (json!(["\u{e9}"]), "hello world ", false, json!("\u{e9}")),
            (json!(["world"]), "hello world", true, json!("world")),
        ] {
            let body = json!({
                "prompt": "p", "stop": stop, "include_stop_str_in_output": keeps, "stream": stream,
                "logprobs": 0,
            });
            let client = server.send(&body.to_string()).await;
            let (_, sender) = server.next_request().await;
            for byte in "hello world \u{e9} and on".bytes() {
                sender.send(TokenEvent::Token(scored(byte.into(), -1.0, &[])));
            }
            // The engine sends no end; the stop matcher ends the reply.
            let response = client.response().await;
            wait_until(|| sender.is_closed()).await;
            let choices: Vec<Value> = match stream {
                true => response.events().iter().map(|event| event["choices"][0].clone()).collect(),
                false => vec![response.json()["choices"][0].clone()],
            };
            let text: String = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
            assert_eq!(text, kept, "{stop}");
            let last = choices.last().unwrap();
            assert_eq!((&last["finish_reason"], &last["stop_reason"]), (&json!("stop"), &reason), "{stop}");
            // Log-probabilities in a stream never precede their text.
            let mut chars = 0;
            for choice in &choices {
                let offsets = choice["logprobs"]["text_offset"].as_array().cloned().unwrap_or_default();
                for offset in offsets {
                    assert!(offset.as_u64().unwrap() >= chars, "{stop}: {choices:?}");
                }
                chars += choice["text"].as_str().unwrap().chars().count() as u64;
            }
        }
    }
    server.close().await;
}

#[actix_web::test]
async fn a_partial_stop_string_is_not_lost() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": "p", "stop": "abcd", "stream": true });
    let (_, response) = server.exchange(body, answer("xabc")).await;
    let events = response.events();
    assert_eq!(text_of(&events, 0), "xabc");
    let last = &events.last().unwrap()["choices"][0];
    assert_eq!((&last["text"], &last["finish_reason"]), (&json!("abc"), &json!("length")));
    assert!(last.get("stop_reason").is_none());
    server.close().await;
}

#[actix_web::test]
async fn text_within_min_tokens_is_not_searched_for_stops() {
    let mut server = TestServer::start();
    let body = json!({ "prompt": "p", "stop": "b", "min_tokens": 4 });
    let (request, response) = server.exchange(body, answer("abab_ab")).await;
    assert_eq!(request.min_tokens, 4);
    assert_eq!(response.json()["choices"][0]["text"], "abab_a");
    server.close().await;
}

#[actix_web::test]
async fn stop_tokens_and_biases_reach_the_engine() {
    let mut server = TestServer::start();
    let body = json!({
        "prompt": "p", "stop": ["x", 5], "stop_token_ids": [9, 5], "logit_bias": {"7": -100, "8": 2.5},
        "min_tokens": 2, "max_completion_tokens": 6, "top_k": 3,
    });
    let events = vec![TokenEvent::Token(bare(97)), TokenEvent::Finished(FinishReason::StopToken(9))];
    let (request, response) = server.exchange(body, events).await;
    assert_eq!((&request.stop_ids[..], request.min_tokens, request.max_tokens), (&[5, 9][..], 2, 6));
    assert_eq!(request.logit_bias[..], [(7, f32::NEG_INFINITY), (8, 2.5)]);
    let choice = &response.json()["choices"][0];
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!(9)));
    server.close().await;
}

/// The token that ends a generation is counted and listed, streamed or not, but is part of the text only if
/// stops are included.
#[actix_web::test]
async fn the_last_token_is_counted_and_listed() {
    let mut server = TestServer::start();
    let events = || {
        let scores = [(97, -0.5), (122, -0.25)].map(|(id, logprob)| scored(id, logprob, &[]));
        let [token, last] = scores;
        vec![
            TokenEvent::Token(token),
            TokenEvent::EndToken(last),
            TokenEvent::Finished(FinishReason::StopToken(122)),
        ]
    };
    for (stream, keeps, text) in
        [(false, false, "a"), (true, false, "a"), (false, true, "az"), (true, true, "az")]
    {
        let options = if stream { json!({ "include_usage": true }) } else { Value::Null };
        let body = json!({
            "prompt": "p", "logprobs": 0, "return_token_ids": true, "include_stop_str_in_output": keeps,
            "stream": stream, "stream_options": options,
        });
        let (_, response) = server.exchange(body, events()).await;
        let answers = if stream { response.events() } else { vec![response.json()] };
        let choices: Vec<&Value> = answers.iter().filter_map(|answer| answer["choices"].get(0)).collect();
        let all = |list: &dyn Fn(&Value) -> Value| -> Vec<Value> {
            choices.iter().flat_map(|choice| list(choice).as_array().cloned().unwrap_or_default()).collect()
        };
        assert_eq!(text_of(&answers, 0), text);
        assert_eq!(all(&|choice| choice["token_ids"].clone()), [97, 122], "{stream} {keeps}");
        assert_eq!(all(&|choice| choice["logprobs"]["token_logprobs"].clone()), [-0.5, -0.25]);
        assert_eq!(answers.last().unwrap()["usage"]["completion_tokens"], 2);
    }
    server.close().await;
}

#[actix_web::test]
async fn special_tokens_show_on_request() {
    let mut server = TestServer::start();
    let events = || vec![TokenEvent::Token(bare(256)), TokenEvent::Finished(FinishReason::Stop)];
    for (skip, text) in [(true, ""), (false, "<s>")] {
        let (_, response) =
            server.exchange(json!({ "prompt": "p", "skip_special_tokens": skip }), events()).await;
        assert_eq!(response.json()["choices"][0]["text"], text);
    }
    server.close().await;
}

/// A request that exceeds its time limit ends with an error, streamed or not, and is cancelled in the engine.
#[actix_web::test]
async fn a_request_ends_at_its_time_limit() {
    let limit = Duration::from_millis(30);
    let mut server = TestServer::with_config(None, |config| config.request_timeout = Some(limit));
    for stream in [false, true] {
        let client = server.send(&json!({ "prompt": "p", "stream": stream }).to_string()).await;
        let (_, sender) = server.next_request().await;
        sender.send(TokenEvent::Token(bare(97)));
        let response = client.response().await;
        wait_until(|| sender.is_closed()).await;
        if stream {
            let events = response.events();
            assert_eq!(events.last().unwrap()["error"]["code"], "request_timeout");
        } else {
            assert_eq!((response.status, response.error().0.as_str()), (504, "request_timeout"));
        }
    }
    server.close().await;
}

/// Events that are ready at the same time are sent in one write, each as an event of its own.
#[actix_web::test]
async fn tokens_that_are_ready_leave_together() {
    let mut server = TestServer::start();
    // All events are queued before the response is read.
    let client = server.send(&json!({ "prompt": "p", "stream": true }).to_string()).await;
    let (_, sender) = server.next_request().await;
    answer(&"a".repeat(500)).into_iter().for_each(|event| sender.send(event));
    let response = client.response().await;
    assert_eq!(response.events().len(), 501);
    assert!(response.chunks < 100, "{} writes for 501 events", response.chunks);
    server.close().await;
}

#[actix_web::test]
async fn context_errors_name_the_parameter_of_the_request() {
    let too_long = RequestError::TooLong { prompt: "prompt", prompt_tokens: 20, max_tokens: 60, context: 64 };
    let server = TestServer::with_config(Some(too_long), |_| {});
    let chat = async |more: Value| {
        let mut body = json!({ "messages": [{ "role": "user", "content": "p" }] });
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        let path = "/v1/chat/completions";
        Client::send(server.address, "POST", path, "", &body.to_string()).await.response().await
    };
    let limited = json!({ "max_completion_tokens": 60 });
    assert_eq!(chat(limited).await.error().1, json!("max_completion_tokens"));
    assert_eq!(chat(json!({ "max_tokens": 60 })).await.error().1, json!("max_tokens"));
    server.close().await;
    let server = TestServer::with_config(
        Some(RequestError::PromptTooLong { prompt: "prompt", prompt_tokens: 70, context: 64 }),
        |_| {},
    );
    let prompt = server.post(r#"{"prompt": "p"}"#).await;
    assert_eq!(prompt.error(), ("context_length_exceeded".into(), json!("prompt")));
    let message = prompt.json()["error"]["message"].to_string();
    assert!(message.contains("70") && message.contains("64"), "{message}");
    let body = r#"{"messages": [{"role": "user", "content": "p"}]}"#;
    let chat = Client::send(server.address, "POST", "/v1/chat/completions", "", body).await.response().await;
    assert_eq!(chat.error(), ("context_length_exceeded".into(), json!("messages")));
    server.close().await;
}

#[actix_web::test]
async fn tokens_and_texts_go_both_ways() {
    let server = TestServer::start();
    let post = async |path: &str, body: Value| {
        Client::send(server.address, "POST", path, "", &body.to_string()).await.response().await
    };
    for prefix in ["/v1", ""] {
        let path = format!("{prefix}/tokenize");
        let tokens = post(&path, json!({ "prompt": "hé", "return_token_strs": true })).await.json();
        let strings = ["h", "\u{fffd}", "\u{fffd}"];
        let all =
            json!({ "count": 3, "max_model_len": 64, "tokens": [104, 195, 169], "token_strs": strings });
        assert_eq!(tokens, all);
        let path = format!("{prefix}/detokenize");
        let text = post(&path, json!({ "tokens": [256, 104, 195, 169], "model": "tiny" })).await.json();
        assert_eq!(text, json!({ "prompt": "<s>hé" }));
    }
    let messages =
        json!({ "messages": [{ "role": "user", "content": "x" }], "add_generation_prompt": false });
    let tokens = post("/v1/tokenize", messages).await.json();
    assert_eq!(tokens["tokens"], json!([256, 117, 115, 101, 114, 58, 120, 59]));
    for (path, body, param) in [
        ("/v1/tokenize", json!({}), "messages"),
        ("/v1/tokenize", json!({ "prompt": "a", "return_token_strs": 1 }), "return_token_strs"),
        ("/v1/detokenize", json!({ "tokens": [257] }), "tokens"),
        ("/v1/detokenize", json!({ "tokens": "a" }), "tokens"),
        ("/v1/detokenize", json!({}), "tokens"),
    ] {
        let response = post(path, body).await;
        assert_eq!((response.status, response.error().1), (400, json!(param)), "{path}");
    }
    assert_eq!(post("/v1/tokenize", json!({ "prompt": "a", "model": "big" })).await.status, 404);
    let known = server.get("/v1/models/tiny").await;
    assert_eq!((known.status, &known.json()["id"]), (200, &json!("tiny")));
    assert_eq!(server.get("/v1/models/owner/other").await.error().0, "model_not_found");
    assert_eq!(server.get(COMPLETIONS).await.status, 405);
    server.close().await;
}

#[actix_web::test]
async fn long_prompts_are_cut_at_their_beginning_if_the_request_says_so() {
    let mut server = TestServer::start();
    let long = format!("{}abc", "x".repeat(5000));
    for (prompt, most, kept) in [
        (json!("abcdef"), 4, &b"cdef"[..]),
        (json!("abc"), 4, b"abc"),
        (json!([1, 2, 3]), 2, &[2, 3]),
        (json!(long), 4, b"xabc"),
    ] {
        let body = json!({ "prompt": prompt, "truncate_prompt_tokens": most, "max_tokens": 1 });
        let (request, _) = server.exchange(body, answer("x")).await;
        assert!(request.prompt.iter().copied().eq(kept.iter().map(|byte| u32::from(*byte))), "{prompt}");
    }
    let body = json!({ "prompt": [BOS, 1, 2, 3], "truncate_prompt_tokens": 2 });
    let (request, _) = server.exchange(body, answer("x")).await;
    assert_eq!(request.prompt[..], [BOS, 3], "the token that begins a text stays");
    for most in [json!(0), json!(-1), json!("2")] {
        let refused =
            server.post(&json!({ "prompt": "p", "truncate_prompt_tokens": most }).to_string()).await;
        assert_eq!((refused.status, refused.error().1), (400, json!("truncate_prompt_tokens")));
    }
    server.close().await;
}

#[actix_web::test]
async fn times_and_ids_in_place_of_texts_are_there_if_asked_for() {
    let mut server = TestServer::start();
    let events = || {
        vec![TokenEvent::Token(scored(97, -0.5, &[(98, -0.25)])), TokenEvent::Finished(FinishReason::Stop)]
    };
    for stream in [false, true] {
        let body = json!({
            "prompt": "pq", "logprobs": 1, "return_tokens_as_token_ids": true, "timings_per_token": true,
            "stream": stream,
        });
        let (_, response) = server.exchange(body, events()).await;
        let first = if stream { response.events()[0].clone() } else { response.json() };
        let logprobs = &first["choices"][0]["logprobs"];
        assert_eq!(logprobs["tokens"], json!(["token_id:97"]));
        assert_eq!(logprobs["top_logprobs"], json!([{ "token_id:98": -0.25, "token_id:97": -0.5 }]));
        let timings = &first["timings"];
        assert_eq!(
            (&timings["prompt_n"], &timings["predicted_n"], &timings["cache_n"]),
            (&json!(2), &json!(1), &json!(0))
        );
        assert!(
            timings["prompt_ms"].as_f64().unwrap() > 0.0 && timings["predicted_ms"].is_f64(),
            "{timings}"
        );
    }
    let (_, response) = server.exchange(json!({ "prompt": "p" }), answer("x")).await;
    assert_eq!(response.json().get("timings"), None);
    server.close().await;
}
