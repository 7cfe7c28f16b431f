//! Tests of what a request says about its prompt, and of what the response says about it.

use super::test_server::{BOS, COMPLETIONS, Client, TestServer, answer, bare, scored};
use crate::request::{Token, TokenEvent};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

/// Returns the body of a request to `path`.
fn body(path: &str) -> Value {
    match path {
        CHAT => json!({ "messages": [{ "role": "user", "content": "hi" }] }),
        _ => json!({ "prompt": "hi" }),
    }
}

async fn begin(server: &TestServer, path: &str, body: &Value) -> Client {
    Client::send(server.address, "POST", path, "", &body.to_string()).await
}

#[actix_web::test]
async fn a_salt_reaches_the_engine() {
    let mut server = TestServer::start();
    let longest = "ü".repeat(1024);
    for path in [COMPLETIONS, CHAT] {
        for salt in [None, Some("pepper"), Some(&*longest)] {
            let mut body = body(path);
            body["cache_salt"] = json!(salt);
            let client = begin(&server, path, &body).await;
            let (request, events) = server.next_request().await;
            assert_eq!((request.cache_salt.as_deref(), request.adapter), (salt, None));
            answer("x").into_iter().for_each(|event| events.send(event));
            let response = client.response().await;
            assert_eq!((response.status, response.header("x-mainstem-ignored")), (200, None));
        }
        for salt in [json!(""), json!(3), json!(longest.clone() + "u")] {
            let mut body = body(path);
            body["cache_salt"] = salt;
            let refused = begin(&server, path, &body).await.response().await;
            assert_eq!((refused.status, refused.error().1), (400, json!("cache_salt")));
        }
    }
    server.close().await;
}

#[actix_web::test]
async fn cached_tokens_are_part_of_the_usage() {
    let mut server = TestServer::start();
    for (path, stream) in [(COMPLETIONS, false), (COMPLETIONS, true), (CHAT, false), (CHAT, true)] {
        let mut body = body(path);
        if stream {
            body["stream"] = json!(true);
            body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": true });
        }
        let client = begin(&server, path, &body).await;
        let (_, events) = server.next_request().await;
        events.send(TokenEvent::Started { cached_tokens: 2 });
        answer("xy").into_iter().for_each(|event| events.send(event));
        let response = client.response().await;
        let objects = if stream { response.events() } else { vec![response.json()] };
        for object in objects {
            assert_eq!(object["usage"]["prompt_tokens_details"], json!({ "cached_tokens": 2 }), "{object}");
        }
    }
    server.close().await;
}

fn ranked(id: u32, logprob: f32, rank: u32, top: &[(u32, f32)]) -> Token {
    Token { rank: Some(rank), ..scored(id, logprob, top) }
}

/// The scores of the prompt `[BOS, 97, 98]`, with two likely tokens for each token.
fn scores() -> TokenEvent {
    TokenEvent::Prompt(vec![
        bare(BOS),
        ranked(97, -1.5, 2, &[(99, -0.5), (97, -1.5)]),
        ranked(98, f32::NEG_INFINITY, 200, &[(100, -0.25), (101, -2.0)]),
    ])
}

/// Returns the response's list of these scores, with one likely token for each token.
fn listed() -> Value {
    let entry = |logprob: f32, rank: u32, text: &str| -> Value {
        json!({ "logprob": logprob, "rank": rank, "decoded_token": text })
    };
    json!([
        null,
        { "97": entry(-1.5, 2, "a"), "99": entry(-0.5, 1, "c") },
        { "98": entry(-9999.0, 200, "b"), "100": entry(-0.25, 1, "d") },
    ])
}

/// The first choice of a prompt computes the scores for all, and the text is that of the answer alone.
#[actix_web::test]
async fn completions_list_the_scores_of_the_prompt_in_each_choice() {
    let mut server = TestServer::start();
    let prompt = json!([BOS, 97, 98]);
    let body = json!({ "prompt": [prompt, prompt], "n": 2, "best_of": 3, "prompt_logprobs": 1 });
    let client = begin(&server, COMPLETIONS, &body).await;
    for choice in 0..6 {
        let (request, events) = server.next_request().await;
        assert_eq!(request.prompt_logprobs, (choice % 3 == 0).then_some(1));
        let texts = if choice % 3 == 0 { vec![scores()] } else { Vec::new() };
        texts.into_iter().chain(answer("xy")).for_each(|event| events.send(event));
    }
    let response = client.response().await;
    let json = response.json();
    assert_eq!(json.get("prompt_logprobs"), None);
    assert_eq!(json["choices"].as_array().unwrap().len(), 4);
    for choice in json["choices"].as_array().unwrap() {
        assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("xy"), &Value::Null));
        assert_eq!(choice["prompt_logprobs"], listed());
    }
    // The token itself comes first, then the most likely ones.
    let list = serde_json::to_string(&listed()).unwrap();
    assert!(response.body.contains(&list), "{} has no {list}", response.body);

    let (request, response) = server.exchange(json!({ "prompt": prompt }), answer("xy")).await;
    assert_eq!(request.prompt_logprobs, None);
    assert_eq!(response.json()["choices"][0].get("prompt_logprobs"), None);
    server.close().await;
}

/// The engine is asked for the larger number, and each list has its own.
#[actix_web::test]
async fn echoed_and_listed_scores_have_numbers_of_their_own() {
    let mut server = TestServer::start();
    for (logprobs, asked) in
        [(json!(2), [Some(2), None]), (json!(0), [Some(1), None]), (Value::Null, [Some(1), None])]
    {
        let prompt = [BOS, 97, 98];
        let body = json!({
            "prompt": prompt, "max_tokens": 0, "echo": true, "n": 2, "logprobs": logprobs,
            "prompt_logprobs": 1
        });
        let client = begin(&server, COMPLETIONS, &body).await;
        for asked in asked {
            let (request, events) = server.next_request().await;
            assert_eq!((request.prompt_logprobs, request.max_tokens), (asked, 0));
            asked.map(|_| scores()).into_iter().chain(answer("")).for_each(|event| events.send(event));
        }
        let json = client.response().await.json();
        for choice in json["choices"].as_array().unwrap() {
            assert_eq!((&choice["text"], &choice["prompt_logprobs"]), (&json!("ab"), &listed()));
            let top = match logprobs.as_u64() {
                Some(2) => json!([null, { "c": -0.5, "a": -1.5 }, { "d": -0.25, "e": -2.0, "b": -9999.0 }]),
                Some(_) => json!([null, { "a": -1.5 }, { "b": -9999.0 }]),
                None => Value::Null,
            };
            assert_eq!(choice["logprobs"]["top_logprobs"], top);
        }
    }
    server.close().await;
}

/// All choices echo the scores that the first one computes, also if they have their own text before.
#[actix_web::test]
async fn the_choices_of_a_prompt_echo_the_same_scores() {
    let mut server = TestServer::start();
    for stream in [false, true] {
        let prompt = json!([BOS, 97, 98]);
        let body = json!({
            "prompt": [prompt, prompt], "n": 3, "echo": true, "logprobs": 2, "max_tokens": 2, "stream": stream
        });
        let client = begin(&server, COMPLETIONS, &body).await;
        let mut first = Vec::new();
        for number in 0..6 {
            let (request, events) = server.next_request().await;
            assert_eq!(request.prompt_logprobs, (number % 3 == 0).then_some(2));
            match request.prompt_logprobs {
                Some(_) => first.push(events),
                None => answer("xy").into_iter().for_each(|event| events.send(event)),
            }
        }
        for events in first {
            [scores()].into_iter().chain(answer("xy")).for_each(|event| events.send(event));
        }
        let response = client.response().await;
        let objects = if stream { response.events() } else { vec![response.json()] };
        let choices = || objects.iter().flat_map(|object| object["choices"].as_array().unwrap());
        for index in 0..6 {
            let own = || choices().filter(|choice| choice["index"] == index);
            let text: String = own().map(|choice| choice["text"].as_str().unwrap()).collect();
            assert_eq!(text, "abxy", "choice {index}");
            let scores = own().find(|choice| choice["logprobs"].is_object()).unwrap();
            let scores = &scores["logprobs"]["token_logprobs"].as_array().unwrap()[..3];
            assert_eq!(scores, [Value::Null, json!(-1.5), json!(-9999.0)], "choice {index}");
        }
    }
    server.close().await;
}

/// Further choices without text cost the engine nothing, so the size of the response is limited.
#[actix_web::test]
async fn a_response_has_a_limited_number_of_prompt_tokens() {
    let mut server = TestServer::start();
    // The first number of tokens is above the limit, with 4 * 128 choices and 20 scores more for each; the
    // second is not.
    let body = |tokens: usize, params: &Value| {
        let mut body = json!({ "prompt": vec![vec![97; tokens]; 4], "n": 128 });
        body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        body
    };
    for (params, lengths, param) in [
        (json!({ "max_tokens": 0, "prompt_logprobs": 20 }), [98, 97], "prompt_logprobs"),
        (json!({ "max_tokens": 0, "echo": true, "logprobs": 20 }), [98, 97], "echo"),
        (json!({ "max_tokens": 0, "echo": true }), [2049, 2048], "echo"),
    ] {
        let [above, below] = lengths.map(|length| body(length, &params));
        let refused = begin(&server, COMPLETIONS, &above).await.response().await;
        assert_eq!((refused.status, refused.error().1), (400, json!(param)), "{}", refused.body);
        let client = begin(&server, COMPLETIONS, &below).await;
        for _ in 0..4 * 128 {
            server.next_request().await;
        }
        drop(client);
    }
    server.close().await;
}

#[actix_web::test]
async fn a_chat_lists_the_scores_of_its_prompt_once() {
    let mut server = TestServer::start();
    let mut body = body(CHAT);
    body["prompt_logprobs"] = json!(1);
    body["n"] = json!(2);
    let client = begin(&server, CHAT, &body).await;
    for asked in [Some(1), None] {
        let (request, events) = server.next_request().await;
        assert_eq!(request.prompt_logprobs, asked);
        asked.map(|_| scores()).into_iter().chain(answer("xy")).for_each(|event| events.send(event));
    }
    let json = client.response().await.json();
    assert_eq!(json["prompt_logprobs"], listed());
    for choice in json["choices"].as_array().unwrap() {
        assert_eq!((&choice["message"]["content"], choice.get("prompt_logprobs")), (&json!("xy"), None));
    }
    server.close().await;
}

#[actix_web::test]
async fn numbers_out_of_bounds_and_streams_have_no_scores_of_the_prompt() {
    let server = TestServer::start();
    for path in [COMPLETIONS, CHAT] {
        for (prompt_logprobs, stream) in
            [(json!(-1), false), (json!(21), false), (json!("1"), false), (json!(0), true)]
        {
            let mut body = body(path);
            body["prompt_logprobs"] = prompt_logprobs;
            body["stream"] = json!(stream);
            let refused = begin(&server, path, &body).await.response().await;
            assert_eq!((refused.status, refused.error().1), (400, json!("prompt_logprobs")), "{body}");
        }
    }
    server.close().await;
}
