//! Tests of TGI's API: requests, whole and streamed answers, and errors.

use super::encoder_server::{begin, play, post};
use super::test_server::{BOS, TestServer, answer, bare, scored};
use crate::request::{FinishReason, RequestError, TokenEvent};
use crate::server::tests::test_server::Response;
use serde_json::{Value, json};

/// Sends a request to `path`, and these events as the engine.
async fn ask(
    server: &mut TestServer,
    path: &str,
    body: Value,
    events: Vec<TokenEvent>,
) -> (crate::request::Request, Response) {
    let client = begin(server, path, &body).await;
    let (request, sender) = server.next_request().await;
    events.into_iter().for_each(|event| sender.send(event));
    (request, client.response().await)
}

/// The events of a stream, which have no names.
fn data(response: &Response) -> Vec<Value> {
    assert_eq!(
        (response.status, response.header("content-type")),
        (200, Some("text/event-stream; charset=utf-8"))
    );
    let events = response.body.strip_suffix("\n\n").unwrap().split("\n\n");
    events.map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

fn token(id: u32, text: &str, logprob: f64, special: bool) -> Value {
    json!({"id": id, "text": text, "logprob": logprob, "special": special})
}

/// Two tokens of one character, one more, and the end token.
fn events() -> Vec<TokenEvent> {
    vec![
        TokenEvent::Token(scored(0xc3, -1.0, &[(98, -0.5), (0xc3, -1.0)])),
        TokenEvent::Token(scored(0xa9, -0.25, &[(0xa9, -0.25), (98, -3.0)])),
        TokenEvent::Token(scored(98, -2.0, &[(97, -0.5), (99, -1.5)])),
        TokenEvent::EndToken(scored(BOS, -0.125, &[])),
        TokenEvent::Finished(FinishReason::Stop),
    ]
}

#[actix_web::test]
async fn the_answer_is_a_text_and_its_details_are_there_on_request() {
    let mut server = TestServer::start();
    let body = json!({"inputs": "pq", "parameters": {}});
    let (request, response) = ask(&mut server, "/generate", body, events()).await;
    assert_eq!((&request.prompt[..], request.max_tokens, request.logprobs), (&[112, 113][..], 100, None));
    assert_eq!(request.sampling.temperature, 0.0, "the default is the most likely token");
    assert_eq!(response.json(), json!({"generated_text": "éb"}));

    let parameters = json!({
        "details": true, "top_n_tokens": 2, "max_new_tokens": 7, "return_full_text": true, "temperature": 0.5,
        "top_k": 5, "top_p": 0.5, "seed": 9, "truncate": 1,
    });
    let body = json!({"inputs": "pq", "parameters": parameters});
    let (request, response) = ask(&mut server, "/generate", body.clone(), events()).await;
    assert_eq!((&request.prompt[..], request.max_tokens, request.logprobs), (&[113][..], 7, Some(2)));
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed), (0.5, 5, 0.5, 9));
    let half = "\u{fffd}";
    let details = json!({
        "finish_reason": "eos_token", "generated_tokens": 4, "seed": 9, "prefill": [],
        "tokens": [
            token(0xc3, "", -1.0, false), token(0xa9, "é", -0.25, false), token(98, "b", -2.0, false),
            token(BOS, "", -0.125, true),
        ],
        "top_tokens": [
            [token(98, "b", -0.5, false), token(0xc3, half, -1.0, false)],
            [token(0xa9, half, -0.25, false), token(98, "b", -3.0, false)],
            [token(97, "a", -0.5, false), token(99, "c", -1.5, false)],
            [token(BOS, "<s>", -0.125, true)],
        ],
    });
    assert_eq!(response.json(), json!({"generated_text": "pqéb", "details": details}));

    // Hugging Face's clients ask at the root, and get a list.
    let (_, response) = ask(&mut server, "/", body, events()).await;
    assert_eq!(response.json(), json!([{"generated_text": "pqéb", "details": details}]));
    server.close().await;
}

#[actix_web::test]
async fn the_tokens_of_a_stream_are_its_text() {
    let mut server = TestServer::start();
    let parameters = json!({"details": true, "top_n_tokens": 1, "do_sample": true, "seed": 3});
    let body = json!({"inputs": "pq", "parameters": parameters, "stream": true});
    for path in ["/generate_stream", "/"] {
        let (_, response) = ask(&mut server, path, body.clone(), events()).await;
        let events = data(&response);
        let token = |event: &Value| {
            (event["index"].clone(), event["token"]["id"].clone(), event["token"]["text"].clone())
        };
        let tokens: Vec<_> = events.iter().map(token).collect();
        let expected = [(1, 0xc3, ""), (2, 0xa9, "é"), (3, 98, "b"), (4, BOS, "")];
        assert_eq!(tokens, expected.map(|(index, id, text)| (json!(index), json!(id), json!(text))));
        assert_eq!(
            events[2]["top_tokens"],
            json!([{"id": 97, "text": "a", "logprob": -0.5, "special": false}])
        );
        for event in &events[..3] {
            assert_eq!((&event["generated_text"], &event["details"]), (&Value::Null, &Value::Null));
        }
        let details =
            json!({"finish_reason": "eos_token", "generated_tokens": 4, "seed": 3, "input_length": 2});
        assert_eq!((&events[3]["generated_text"], &events[3]["details"]), (&json!("éb"), &details));
    }
    // The last token has the text also if the answer is cut, and an answer without tokens has an event.
    let body = |most: u32| json!({"inputs": "p", "parameters": {"max_new_tokens": most}});
    let (_, response) = ask(&mut server, "/generate_stream", body(2), answer("hi")).await;
    let events = data(&response);
    assert_eq!((events.len(), &events[1]["token"]["text"]), (2, &json!("i")));
    assert_eq!((&events[1]["generated_text"], &events[1]["details"]), (&json!("hi"), &Value::Null));
    let (_, response) = ask(&mut server, "/generate_stream", body(3), answer("hi")).await;
    let events = data(&response);
    assert_eq!(
        (events.len(), &events[2]["token"]["special"], &events[2]["generated_text"]),
        (3, &json!(true), &json!("hi"))
    );
    server.close().await;
}

/// Text that may begin a stop string is held, and TGI's text includes the stop string.
#[actix_web::test]
async fn a_stop_string_ends_the_text_and_is_part_of_it() {
    let mut server = TestServer::start();
    let events = || "abXYcd".bytes().map(|byte| TokenEvent::Token(scored(byte.into(), -1.0, &[]))).collect();
    let parameters = json!({"stop": ["XY"], "details": true});
    let body = json!({"inputs": "p", "parameters": parameters});
    let (_, response) = ask(&mut server, "/generate", body.clone(), events()).await;
    let answer = response.json();
    assert_eq!(
        (&answer["generated_text"], &answer["details"]["finish_reason"]),
        (&json!("abXY"), &json!("stop_sequence"))
    );
    let (_, response) = ask(&mut server, "/generate_stream", body, events()).await;
    let texts: Vec<_> = data(&response).iter().map(|event| event["token"]["text"].clone()).collect();
    assert_eq!(texts, ["a", "b", "X", "Y"]);
    assert_eq!(data(&response)[3]["details"]["finish_reason"], "stop_sequence");
    server.close().await;
}

#[actix_web::test]
async fn the_prompt_is_scored_and_the_best_of_several_answers_is_chosen() {
    let mut server = TestServer::start();
    let prompt = vec![bare(BOS), crate::request::Token { rank: Some(1), ..scored(113, -0.75, &[]) }];
    let events = [vec![TokenEvent::Prompt(prompt)], events()].concat();
    let body = json!({"inputs": "q", "parameters": {"decoder_input_details": true}});
    let (request, response) = ask(&mut server, "/generate", body, events).await;
    assert_eq!(request.prompt_logprobs, Some(0));
    let prefill = &response.json()["details"]["prefill"];
    assert_eq!(prefill[0]["id"], 113, "{prefill}");

    let best = json!({"inputs": "q", "parameters": {"best_of": 2, "do_sample": true, "details": true}});
    let score = |byte: u8, logprob: f32| vec![TokenEvent::Token(scored(byte.into(), logprob, &[]))];
    let (requests, response) =
        play(&mut server, "/generate", best, vec![score(b'x', -2.0), score(b'y', -1.0)]).await;
    assert_eq!(requests[1].sampling.seed, requests[0].sampling.seed.wrapping_add(1));
    let answer = response.json();
    assert_eq!(answer["generated_text"], "y");
    let details = &answer["details"];
    assert_eq!(details["seed"], requests[1].sampling.seed);
    assert_eq!(details["best_of_sequences"][0]["generated_text"], "x");
    server.close().await;
}

#[actix_web::test]
async fn a_grammar_limits_the_answer() {
    let server = TestServer::start();
    // The tests' model has no end token, which a form needs.
    for (grammar, part) in [
        (json!({"type": "regex", "value": "a+"}), "end token"),
        (json!({"type": "json", "value": {"type": "object"}}), "end token"),
        (json!({"type": "json_schema", "value": {"name": "x", "schema": {"type": "object"}}}), "end token"),
        (json!({"type": "json", "value": {"pattern": 5}}), "grammar.value"),
        (json!({"type": "json_schema", "value": {}}), "grammar.value.schema"),
        (json!({"type": "xml", "value": ""}), "grammar.type"),
        (json!({"type": "regex"}), "grammar.value"),
        (json!("a+"), "an object"),
    ] {
        let response =
            post(&server, "/generate", &json!({"inputs": "p", "parameters": {"grammar": grammar}})).await;
        assert_eq!(response.status, 400, "{grammar}");
        assert!(response.body.contains(part), "{grammar}: {}", response.body);
    }
    server.close().await;
}

#[actix_web::test]
async fn errors_have_the_shape_of_the_api_and_name_its_parameters() {
    let server = TestServer::start();
    for (body, part) in [
        (json!({}), "'inputs' is missing"),
        (json!({"inputs": ["a"]}), "'inputs' must be a string"),
        (json!({"inputs": "p", "parameters": 5}), "'parameters' must be an object"),
        (json!({"inputs": "p", "parameters": {"max_new_tokens": 0}}), "parameters.max_new_tokens"),
        (json!({"inputs": "p", "parameters": {"truncate": 0}}), "'truncate'"),
        (json!({"inputs": "p", "parameters": {"top_n_tokens": 21}}), "top_n_tokens"),
        (json!({"inputs": "p", "parameters": {"watermark": true}}), "watermark"),
        (json!({"inputs": "p", "parameters": {"adapter_id": "a"}}), "adapter_id"),
        (json!({"inputs": "p", "parameters": {"best_of": 2}}), "best_of"),
        (json!({"inputs": "p", "parameters": {"seed": -1}}), "seed"),
        (json!({"inputs": "p", "parameters": {"temperature": "hot"}}), "temperature"),
        (json!({"inputs": "p", "parameters": {"stop": [{}]}}), "stop"),
        (json!({"inputs": "p", "model": "big"}), "big"),
    ] {
        for path in ["/generate", "/generate_stream"] {
            let response = post(&server, path, &body).await;
            let error = response.json();
            assert_eq!(response.status / 100, 4, "{body}");
            assert!(error["error"].as_str().unwrap().contains(part), "{body}: {error}");
            assert!(error["error_type"].is_string() && error.as_object().unwrap().len() == 2, "{error}");
        }
    }
    for (body, part) in [
        (json!({"inputs": "p", "parameters": {"decoder_input_details": true}}), "decoder_input_details"),
        (json!({"inputs": "p", "parameters": {"best_of": 2, "do_sample": true}}), "best_of"),
    ] {
        assert!(post(&server, "/generate_stream", &body).await.body.contains(part));
    }
    assert_eq!(server.get("/generate").await.json()["error_type"], "validation");
    let too_long = RequestError::TooLong { prompt: "prompt", prompt_tokens: 60, max_tokens: 10, context: 64 };
    let refusing = TestServer::with_config(Some(too_long), |_| {});
    let refused = post(&refusing, "/generate", &json!({"inputs": "p"})).await.body;
    assert!(refused.contains("max_new_tokens") && !refused.contains("max_tokens"), "{refused}");
    refusing.close().await;
    server.close().await;
}

#[actix_web::test]
async fn an_error_within_a_stream_is_its_last_event() {
    let mut server = TestServer::start();
    let failure = RequestError::DeviceFailed("smoke".into());
    let events = vec![TokenEvent::Token(scored(97, -1.0, &[])), TokenEvent::Failed(failure)];
    let (_, response) = ask(&mut server, "/generate_stream", json!({"inputs": "p"}), events).await;
    let events = data(&response);
    assert_eq!(
        (events.len(), &events[0]["token"]["text"], &events[1]["error_type"]),
        (2, &json!("a"), &json!("generation"))
    );
    let busy = RequestError::Busy { coming: 1, waiting: 4, limit: 4, retry_after_s: 0 };
    let refusing = TestServer::with_config(Some(busy), |_| {});
    let refused = post(&refusing, "/generate", &json!({"inputs": "p"})).await;
    assert_eq!((refused.status, &refused.json()["error_type"]), (429, &json!("overloaded")));
    assert!(refused.header("retry-after").is_some());
    refusing.close().await;
    server.close().await;
}

#[actix_web::test]
async fn what_the_server_is_names_the_model_and_its_limits() {
    let server = TestServer::start();
    let info = server.get("/info").await.json();
    assert_eq!(
        (&info["model_id"], &info["max_total_tokens"], &info["max_input_tokens"]),
        (&json!("tiny"), &json!(64), &json!(63))
    );
    server.close().await;
}
