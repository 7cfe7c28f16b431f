//! Tests of Inferflow's API at `POST /`.

use super::encoder_server::{begin, post};
use super::test_server::{Client, DEADLINE, Response, TestServer, answer, bare, model, tokenizer};
use crate::actors::ModelInfo;
use crate::request::{FinishReason, Request, RequestError, TokenEvent};
use serde_json::{Value, json};

async fn ask(server: &mut TestServer, body: Value, events: Vec<TokenEvent>) -> (Request, Response) {
    let client = begin(server, "/", &body).await;
    let (request, sender) = server.next_request().await;
    events.into_iter().for_each(|event| sender.send(event));
    (request, client.response().await)
}

fn text_of(request: &Request) -> String {
    let bytes = request.prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
    String::from_utf8(bytes).unwrap()
}

/// The objects of a stream.
fn objects(response: &Response) -> Vec<Value> {
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    let objects = response.body.strip_suffix("\n\n").unwrap().split("\n\n");
    objects.map(|json| serde_json::from_str(json).unwrap()).collect()
}

#[actix_web::test]
async fn every_field_of_a_request_has_its_effect() {
    let mut server = TestServer::start();
    let body = json!({
        "header": {"fn": "process_query"}, "text": "hi", "system_prompt": "be", "res_prefix": "",
        "decoding_alg": "", "max_output_len": 7, "random_seed": 9, "temperature": 0.5,
        "is_streaming_mode": 0, "encoder_input_template": "", "decoder_input_template": "",
    });
    let (request, response) = ask(&mut server, body, answer("yo")).await;
    assert_eq!(text_of(&request), "system:be;user:hi;assistant:");
    assert_eq!((request.max_tokens, request.sampling.seed, request.sampling.temperature), (7, 9, 0.5));
    let mut answered = response.json();
    assert!(answered["time_cost"].take().is_f64());
    assert_eq!(answered, json!({"text": "yo", "ret_code": "succ", "time_cost": null}));

    let whole = |more: Value| {
        let mut body = json!({"text": "hi", "is_streaming_mode": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    // The defaults: a seed of its own, temperature 1, and as many tokens as there is room for.
    let (first, _) = ask(&mut server, whole(json!({"random_seed": 0})), answer("x")).await;
    let (second, _) = ask(&mut server, whole(json!({})), answer("x")).await;
    assert_ne!(first.sampling.seed, second.sampling.seed);
    assert_eq!((second.sampling.temperature, second.max_tokens as usize), (1.0, 64 - second.prompt.len()));
    let (request, _) = ask(&mut server, whole(json!({"max_new_tokens": 5})), answer("x")).await;
    assert_eq!(request.max_tokens, 5);
    // An answer that has begun goes on; a template of the request is refused.
    let (request, _) = ask(&mut server, whole(json!({"res_prefix": "yes"})), answer("x")).await;
    assert_eq!(text_of(&request), "user:hi;assistant:yes");
    let refused = post(&server, "/", &whole(json!({"encoder_input_template": "{query}"}))).await;
    assert_eq!(refused.status, 400);
    for algorithm in [
        json!("sample.top_k"),
        json!("{\"name\": \"sample.top_k\"}"),
        json!({"name": "sample.top_k", "max_k": 3}),
    ] {
        let (request, response) =
            ask(&mut server, whole(json!({"decoding_alg": algorithm})), answer("x")).await;
        assert_eq!(response.status, 200, "{}", response.body);
        assert!(request.plan.is_some(), "{algorithm}");
    }
    let chat = json!({
        "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        "max_tokens": 3, "model": "tiny",
    });
    let (request, response) = ask(&mut server, chat, answer("yo")).await;
    assert_eq!((text_of(&request).as_str(), request.max_tokens), ("user:a;assistant:b;user:c;assistant:", 3));
    assert_eq!(response.json()["text"], "yo");
    server.close().await;
}

#[actix_web::test]
async fn long_answers_are_cut_where_the_context_has_room_for_more() {
    let long = ModelInfo { context: 9000, max_sequence_tokens: 9000, ..model() };
    let mut server = TestServer::for_model(long, tokenizer(), None, |_| {}, DEADLINE);
    let (request, _) = ask(&mut server, json!({"text": "hi", "is_streaming_mode": 0}), answer("x")).await;
    assert_eq!(request.max_tokens, 1024);
    server.close().await;
}

/// Without a chat template, the text itself is continued.
#[actix_web::test]
async fn a_model_without_a_template_continues_the_text() {
    let bare = ModelInfo { chat_template: None, ..model() };
    let mut server = TestServer::for_model(bare, tokenizer(), None, |_| {}, DEADLINE);
    let body = json!({"text": "once ", "res_prefix": "upon", "is_streaming_mode": 0});
    let (request, _) = ask(&mut server, body, answer("x")).await;
    assert_eq!(text_of(&request), "once upon");
    let refused = post(&server, "/", &json!({"text": "a", "system_prompt": "b"})).await;
    assert_eq!((refused.status, &refused.json()["ret_code"]), (400, &json!("error.invalid_request_format")));
    server.close().await;
}

/// Characters of several bytes are not divided, wherever their tokens end, and no text is lost at the end,
/// also not that of a character that is never completed.
#[actix_web::test]
async fn the_texts_of_a_stream_are_that_of_the_whole_answer() {
    let mut server = TestServer::start();
    let texts: [&[u8]; 4] = ["aé🦀b".as_bytes(), "🦀".as_bytes(), b"end", &[b'a', 0xf0, 0x9f]];
    for bytes in texts {
        for streaming in [json!(true), json!(1), Value::Null] {
            let events: Vec<_> = bytes
                .iter()
                .map(|byte| TokenEvent::Token(bare((*byte).into())))
                .chain([TokenEvent::Finished(FinishReason::Stop)])
                .collect();
            let (_, whole) =
                ask(&mut server, json!({"text": "p", "is_streaming_mode": false}), events.clone()).await;
            let (_, stream) =
                ask(&mut server, json!({"text": "p", "is_streaming_mode": streaming}), events).await;
            let objects = objects(&stream);
            let text: String = objects.iter().map(|object| object["text"].as_str().unwrap()).collect();
            assert_eq!(whole.json()["text"], text);
            assert_eq!(text, String::from_utf8_lossy(bytes));
            let (last, others) = objects.split_last().unwrap();
            assert_eq!((&last["is_end"], &last["ret_code"]), (&json!(1), &json!("succ")));
            assert!(
                others.iter().all(|object| object.get("is_end").is_none() && object["time_cost"].is_f64())
            );
        }
    }
    server.close().await;
}

#[actix_web::test]
async fn every_failure_has_its_code_and_status() {
    let server = TestServer::with_config(None, |config| config.body_limit_bytes = 2000);
    let long = "x".repeat(3000);
    for (body, status, code) in [
        ("{}".to_owned(), 400, "error.empty_request"),
        (json!({"text": ""}).to_string(), 400, "error.empty_request"),
        ("".to_owned(), 400, "error.invalid_request_format"),
        ("{".to_owned(), 400, "error.invalid_request_format"),
        ("[]".to_owned(), 400, "error.invalid_request_format"),
        (json!({"text": 5}).to_string(), 400, "error.invalid_request_format"),
        (json!({"text": "a", "temperature": "hot"}).to_string(), 400, "error.invalid_request_format"),
        (json!({"text": "a", "is_streaming_mode": "no"}).to_string(), 400, "error.invalid_request_format"),
        (json!({"text": "a", "decoding_alg": "none.such"}).to_string(), 400, "error.invalid_request_format"),
        (json!({"text": "a", "header": {"fn": "get_stat"}}).to_string(), 400, "error.invalid_request_format"),
        (json!({"text": "x".repeat(1500)}).to_string(), 400, "error.too_long_request"),
        (json!({"text": long}).to_string(), 413, "error.too_long_request"),
    ] {
        let response = Client::send(server.address, "POST", "/", "", &body).await.response().await;
        let error = response.json();
        assert_eq!((response.status, &error["ret_code"]), (status, &json!(code)), "{body:.60}: {error}");
        assert_eq!(
            (&error["text"], &error["error_text"], &error["is_end"]),
            (&json!(""), &error["error"], &json!(1))
        );
        assert!(!error["error_text"].as_str().unwrap().is_empty());
    }
    server.close().await;
    let busy = RequestError::Busy { coming: 1, waiting: 4, limit: 4, retry_after_s: 0 };
    let too_long = RequestError::TooLong { prompt: "prompt", prompt_tokens: 60, max_tokens: 10, context: 64 };
    for (refusal, status, code) in [
        (too_long, 400, "error.too_long_request"),
        (busy, 429, "error.busy"),
        (RequestError::Draining, 503, "error.busy"),
        (RequestError::DeviceFailed("smoke".into()), 500, "error.processing"),
    ] {
        let server = TestServer::with_config(Some(refusal), |_| {});
        let response = post(&server, "/", &json!({"text": "a"})).await;
        assert_eq!((response.status, &response.json()["ret_code"]), (status, &json!(code)));
        server.close().await;
    }
}

#[actix_web::test]
async fn a_failure_within_a_stream_is_its_last_object() {
    let mut server = TestServer::start();
    let failure = TokenEvent::Failed(RequestError::DeviceFailed("smoke".into()));
    let (_, response) =
        ask(&mut server, json!({"text": "p"}), vec![TokenEvent::Token(bare(97)), failure]).await;
    let objects = objects(&response);
    assert_eq!((objects.len(), &objects[0]["text"]), (2, &json!("a")));
    assert_eq!((&objects[1]["ret_code"], &objects[1]["is_end"]), (&json!("error.processing"), &json!(1)));
    server.close().await;
}
