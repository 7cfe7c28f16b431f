//! Tests of the embeddings API with a fake encoder-only engine.

use super::encoder_server::{
    EMBEDDINGS, FILL_MASK, LONGEST, MASK, around, begin, encoder, encoder_server, play, post, prompting,
    server_for, server_with_config,
};
use super::test_server::{COMPLETIONS, TestServer, wait_until};
use crate::actors::{EmbeddingDefaults, EventSender, ModelInfo};
use crate::formats::{PoolingConfig, UnsupportedSetting};
use crate::request::{FinishReason, Pooling, Request, RequestError, Task, TokenEvent};
use crate::server::ShutdownOutcome;
use serde_json::{Value, json};
use std::time::Duration;

fn vector(numbers: &[f32]) -> Vec<TokenEvent> {
    vec![TokenEvent::Embedding(numbers.to_vec())]
}

#[actix_web::test]
async fn a_text_becomes_a_normalized_vector() {
    let mut server = encoder_server();
    let body = json!({ "model": "tiny", "input": "ab", "encoding_format": "float", "user": "me" });
    let (requests, response) = play(&mut server, EMBEDDINGS, body, vec![vector(&[0.0, 3.0, -4.0])]).await;
    let Request { task, encoder_input, prompt, max_tokens, .. } = &requests[0];
    assert_eq!((task, &encoder_input[..]), (&Task::Embed(Pooling::Cls), &around("ab")[..]));
    assert_eq!((prompt.len(), *max_tokens), (0, 0));
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    let expected = json!({
        "object": "list", "data": [{ "object": "embedding", "index": 0, "embedding": [0.0, 0.6, -0.8] }],
        "model": "tiny", "usage": { "prompt_tokens": 4, "total_tokens": 4 }
    });
    let mut answer = response.json();
    let numbers = answer["data"][0]["embedding"].take();
    let close = |(ours, theirs): (&Value, f64)| (ours.as_f64().unwrap() - theirs).abs() < 1e-6;
    assert!(numbers.as_array().unwrap().iter().zip([0.0, 0.6, -0.8]).all(close), "{numbers}");
    answer["data"][0]["embedding"] = expected["data"][0]["embedding"].clone();
    assert_eq!(answer, expected);
    server.close().await;
}

/// Regression: 48 bytes were counted for each number, and answers that fitted were refused.
#[actix_web::test]
async fn a_response_counts_its_numbers_and_its_text() {
    let dimensions = 4096;
    let model = || encoder(EmbeddingDefaults { dimensions, ..prompting() });
    let numbers: Vec<f32> = (1..=dimensions).map(|number| 1.0 / number as f32).collect();
    // Of the memory, a client may hold half.
    for (encoding, bytes, status) in
        [("float", 4 + 16, 200), ("float", 4 + 8, 400), ("base64", 4 + 6, 200), ("base64", 4 + 5, 400)]
    {
        let mut server = server_with_config(model(), |config| {
            config.response_bytes = dimensions * bytes * 2 + 2000;
        });
        let body = json!({ "input": "ab", "normalize": false, "encoding_format": encoding });
        let (_, response) = play(&mut server, EMBEDDINGS, body, vec![vector(&numbers)]).await;
        assert_eq!(response.status, status, "{encoding} {bytes}: {}", response.body);
        server.close().await;
    }
}

#[actix_web::test]
async fn every_form_of_input_keeps_its_order() {
    let mut server = encoder_server();
    let long: Vec<u32> = (0..LONGEST as u32).collect();
    for (input, encoder_inputs) in [
        (json!(["a", "bc"]), vec![around("a"), around("bc")]),
        (json!([7, 8]), vec![vec![7, 8]]),
        (json!([[7], long, [MASK]]), vec![vec![7], long.clone(), vec![MASK]]),
    ] {
        let answers = (0..encoder_inputs.len()).map(|index| vector(&[index as f32, 0.0, 1.0])).collect();
        let body = json!({ "input": input, "normalize": false });
        let (requests, response) = play(&mut server, EMBEDDINGS, body, answers).await;
        assert!(
            requests.iter().map(|request| request.encoder_input.to_vec()).eq(encoder_inputs.iter().cloned()),
            "{input}"
        );
        let answer = response.json();
        for index in 0..encoder_inputs.len() {
            let one = json!({ "object": "embedding", "index": index, "embedding": [index as f32, 0.0, 1.0] });
            assert_eq!(answer["data"][index], one);
        }
        let tokens: usize = encoder_inputs.iter().map(Vec::len).sum();
        assert_eq!(answer["usage"], json!({ "prompt_tokens": tokens, "total_tokens": tokens }));
    }
    let body = json!({ "input": "a", "add_special_tokens": false });
    let (requests, _) = play(&mut server, EMBEDDINGS, body, vec![vector(&[1.0, 0.0, 0.0])]).await;
    assert_eq!(requests[0].encoder_input[..], [97]);
    server.close().await;
}

/// The default of the official client.
#[actix_web::test]
async fn base64_is_of_single_precision_little_endian() {
    let mut server = encoder_server();
    let body = json!({ "input": "a", "encoding_format": "base64", "normalize": false, "dimensions": 2 });
    let (_, response) = play(&mut server, EMBEDDINGS, body, vec![vector(&[1.0, -2.0, 9.0])]).await;
    assert_eq!(response.json()["data"][0]["embedding"], "AACAPwAAAMA=");
    server.close().await;
}

#[actix_web::test]
async fn a_vector_is_truncated_then_normalized() {
    let mut server = encoder_server();
    for (params, made, expected) in [
        (json!({ "dimensions": 2 }), [0.0, 2.0, 9.0], vec![0.0, 1.0]),
        (json!({ "dimensions": 1 }), [-2.0, 2.0, 9.0], vec![-1.0]),
        (json!({ "dimensions": 2, "normalize": false }), [0.0, 2.0, 9.0], vec![0.0, 2.0]),
        (json!({}), [0.0, 0.0, 0.0], vec![0.0, 0.0, 0.0]),
        (json!({ "dimensions": 3 }), [0.0, 0.0, 1e-30], vec![0.0, 0.0, 1.0]),
        (json!({}), [0.0, 3e38, 0.0], vec![0.0, 1.0, 0.0]),
    ] {
        let mut body = params.clone();
        body["input"] = "a".into();
        let (_, response) = play(&mut server, EMBEDDINGS, body, vec![vector(&made)]).await;
        assert_eq!(response.json()["data"][0]["embedding"], json!(expected), "{params}");
    }
    server.close().await;
}

#[actix_web::test]
async fn a_request_overrides_pooling_and_normalization() {
    let own = EmbeddingDefaults {
        normalize: false,
        pooling: PoolingConfig::Supported(Pooling::Last),
        ..prompting()
    };
    let mut server = server_for(encoder(own));
    for (params, pooling, length) in [
        (json!({ "input": "a" }), Pooling::Last, 2.0),
        (json!({ "input": "a", "pooling": "mean", "normalize": true }), Pooling::Mean, 1.0),
        (json!({ "input": "a", "pooling": "cls" }), Pooling::Cls, 2.0),
    ] {
        let (requests, response) =
            play(&mut server, EMBEDDINGS, params, vec![vector(&[0.0, 2.0, 0.0])]).await;
        assert_eq!(requests[0].task, Task::Embed(pooling));
        assert_eq!(response.json()["data"][0]["embedding"][1], length);
    }
    server.close().await;
}

/// Some tokenizers have more tokens than the model's vocabulary.
#[actix_web::test]
async fn a_token_outside_the_models_vocabulary_is_named_with_its_text() {
    let server = server_for(ModelInfo { vocab: 258, ..encoder(prompting()) });
    let response = post(&server, EMBEDDINGS, &json!({ "input": ["a", "b<mask>"] })).await;
    assert_eq!((response.status, response.error().1), (400, json!("input")));
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("'input[1]' has the token '<mask>', whose id 258 is not"), "{message}");
    server.close().await;
}

/// A request can set the pooling; without it the error gives the reason.
#[actix_web::test]
async fn an_unsupported_pooling_is_rejected_unless_the_request_sets_one() {
    let unserved =
        UnsupportedSetting { file: "/secret/place".into(), reason: "the pooling mode is max".into() };
    let own = EmbeddingDefaults { pooling: PoolingConfig::Unsupported(unserved), ..prompting() };
    let mut server = server_for(encoder(own));
    let response = post(&server, EMBEDDINGS, &json!({ "input": "a" })).await;
    assert_eq!((response.status, response.error().1), (400, json!("pooling")));
    assert!(response.body.contains("mode is max") && !response.body.contains("secret"), "{}", response.body);
    let body = json!({ "input": "a", "pooling": "last" });
    let (requests, response) = play(&mut server, EMBEDDINGS, body, vec![vector(&[0.0, 2.0, 0.0])]).await;
    assert_eq!((&requests[0].task, response.status), (&Task::Embed(Pooling::Last), 200));
    server.close().await;
}

#[actix_web::test]
async fn errors_name_the_parameter() {
    let server = encoder_server();
    let many = vec!["a"; 2049];
    for (body, code, param, part) in [
        (json!({}), "invalid_value", "input", "missing"),
        (json!({ "input": 5 }), "invalid_value", "input", "not 5"),
        (json!({ "input": "" }), "invalid_value", "input", "'input' is empty"),
        (json!({ "input": [] }), "invalid_value", "input", "'input' is empty"),
        (json!({ "input": ["a", ""] }), "invalid_value", "input", "'input[1]' is empty"),
        (json!({ "input": [[1], []] }), "invalid_value", "input", "'input[1]' is empty"),
        (json!({ "input": "", "pooling": 5, "model": "big" }), "model_not_found", "model", "'big'"),
        (json!({ "input": [1, 259] }), "invalid_value", "input", "token id 259"),
        (json!({ "input": ["a", 1] }), "invalid_value", "input", "differs from the first element"),
        (json!({ "input": many }), "invalid_value", "input", "2049 elements; the maximum is 2048"),
        (
            json!({ "input": ["a", "x".repeat(15)] }),
            "context_length_exceeded",
            "input",
            "'input[1]' has 17 tokens, more than the 16",
        ),
        (json!({ "input": vec![1; 17] }), "context_length_exceeded", "input", "'input' has 17 tokens"),
        (json!({ "input": "a", "encoding_format": "f16" }), "invalid_value", "encoding_format", "base64"),
        (json!({ "input": "a", "dimensions": 4 }), "invalid_value", "dimensions", "from 1 to 3, not 4"),
        (json!({ "input": "a", "dimensions": 0 }), "invalid_value", "dimensions", "not 0"),
        (json!({ "input": "a", "pooling": "max" }), "invalid_value", "pooling", "\"max\""),
        (
            json!({ "input": "a", "truncate_prompt_tokens": 5 }),
            "unsupported_parameter",
            "truncate_prompt_tokens",
            "not supported",
        ),
        // All parameters are checked before anything is tokenized.
        (
            json!({ "input": "x".repeat(99), "truncate_prompt_tokens": 5 }),
            "unsupported_parameter",
            "truncate_prompt_tokens",
            "not supported",
        ),
        (json!({ "input": "a", "model": "big" }), "model_not_found", "model", "'big'"),
    ] {
        let response = post(&server, EMBEDDINGS, &body).await;
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(response.error(), (code.to_owned(), json!(param)), "{message}");
        assert!(message.contains(part), "{message}");
    }
    server.close().await;
}

/// An unsupported endpoint is rejected, and the error names the supported ones.
#[actix_web::test]
async fn the_wrong_endpoint_names_the_right_ones() {
    let encoders = encoder_server();
    let headless = server_for(ModelInfo { endpoints: vec![EMBEDDINGS], ..encoder(prompting()) });
    let decoders = TestServer::start();
    let both = "/v1/embeddings and /v1/fill-mask";
    for (server, path, kind, right) in [
        (&encoders, COMPLETIONS, "an encoder", both),
        (&encoders, "/v1/chat/completions", "an encoder", both),
        (&headless, FILL_MASK, "an encoder", EMBEDDINGS),
        (&decoders, EMBEDDINGS, "a decoder", "/v1/chat/completions and /v1/completions"),
        (&decoders, FILL_MASK, "a decoder", "/v1/chat/completions and /v1/completions"),
    ] {
        let response = post(server, path, &json!({ "input": "a", "prompt": "a" })).await;
        assert_eq!((response.status, response.error()), (400, ("wrong_endpoint".into(), json!("model"))));
        let error = &response.json()["error"];
        let message = format!("{path} is not supported by the model 'tiny', which is {kind}: use {right}");
        assert_eq!((&error["type"], &error["message"]), (&json!("invalid_request_error"), &json!(message)));
    }
    for server in [encoders, headless, decoders] {
        server.close().await;
    }
}

fn through(sender: &EventSender) {
    sender.send(TokenEvent::Embedding(vec![1.0, 0.0, 0.0]));
    sender.send(TokenEvent::Finished(FinishReason::Stop));
}

/// At most half of the capacity is used at a time; further texts are submitted as others finish, in any
/// order.
#[actix_web::test]
async fn many_texts_leave_capacity_for_others() {
    let mut server = server_for(ModelInfo { max_choices: 6, ..encoder(prompting()) });
    let client = begin(&server, EMBEDDINGS, &json!({ "input": ["a", "b", "c", "d", "e"] })).await;
    let mut senders = Vec::new();
    for (text, ends) in [("a", None), ("b", None), ("c", Some(1)), ("d", Some(0)), ("e", None)] {
        let (request, sender) = server.next_request().await;
        assert_eq!(request.encoder_input[..], around(text));
        senders.push(sender);
        if let Some(ends) = ends {
            assert!(server.calls.try_recv().is_err(), "three are submitted, and the next waits");
            through(&senders.remove(ends));
        }
    }
    senders.iter().for_each(through);
    let answer = client.response().await.json();
    assert_eq!(answer["data"].as_array().unwrap().len(), 5);
    server.close().await;
}

/// A request whose first texts were accepted is in flight, including its remaining texts.
#[actix_web::test]
async fn draining_still_submits_the_remaining_texts() {
    let mut server = server_for(ModelInfo { max_choices: 6, ..encoder(prompting()) });
    let client = begin(&server, EMBEDDINGS, &json!({ "input": ["a", "b", "c", "d", "e"] })).await;
    let mut senders = Vec::new();
    for _ in 0..3 {
        senders.push(server.next_request().await.1);
    }
    server.stops.send(()).unwrap();
    wait_until(|| server.status.is_draining()).await;
    senders.iter().for_each(through);
    for _ in 0..2 {
        through(&server.next_request().await.1);
    }
    let response = client.response().await;
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(response.json()["data"].as_array().unwrap().len(), 5);
    assert_eq!(server.ending().await, ShutdownOutcome::Drained);
}

#[actix_web::test]
async fn one_failed_text_fails_the_request() {
    let mut server = encoder_server();
    let client = begin(&server, EMBEDDINGS, &json!({ "input": ["a", "b"] })).await;
    let (_, first) = server.next_request().await;
    let (_, second) = server.next_request().await;
    first.send(TokenEvent::Failed(RequestError::DeviceFailed("smoke".into())));
    let response = client.response().await;
    assert_eq!((response.status, response.error().0.as_str()), (500, "device_failed"));
    wait_until(|| second.is_closed()).await;

    // A channel closed without an event is a failure too, and so is an end without an embedding.
    for events in [vec![], vec![TokenEvent::Finished(FinishReason::Stop)]] {
        let client = begin(&server, EMBEDDINGS, &json!({ "input": "a" })).await;
        let (_, sender) = server.next_request().await;
        events.into_iter().for_each(|event| sender.send(event));
        drop(sender);
        let response = client.response().await;
        assert_eq!((response.status, response.error().0.as_str()), (500, "internal_error"));
    }
    server.close().await;
}

#[actix_web::test]
async fn the_time_limit_ends_a_request() {
    let mut server = server_with_config(encoder(prompting()), |config| {
        config.request_timeout = Some(Duration::from_millis(1));
    });
    let client = begin(&server, EMBEDDINGS, &json!({ "input": "a" })).await;
    let (request, sender) = server.next_request().await;
    assert_eq!(request.time_limit, Some(Duration::from_millis(1)));
    let response = client.response().await;
    assert_eq!((response.status, response.error().0.as_str()), (504, "request_timeout"));
    wait_until(|| sender.is_closed()).await;
    server.close().await;
}

#[actix_web::test]
async fn a_disconnect_cancels_and_a_second_stop_aborts() {
    let mut server = encoder_server();
    let client = begin(&server, EMBEDDINGS, &json!({ "input": ["a", "b"] })).await;
    let (_, first) = server.next_request().await;
    let (_, second) = server.next_request().await;
    drop(client);
    wait_until(|| first.is_closed() && second.is_closed()).await;

    let client = begin(&server, EMBEDDINGS, &json!({ "input": "a" })).await;
    let _engine_never_answers = server.next_request().await;
    server.stops.send(()).unwrap();
    wait_until(|| server.status.is_draining()).await;
    let late = post(&server, EMBEDDINGS, &json!({ "input": "a" })).await;
    assert_eq!((late.status, late.error().0.as_str()), (503, "shutting_down"));
    server.stops.send(()).unwrap();
    let response = client.response().await;
    assert_eq!((response.status, response.error().0.as_str()), (503, "shut_down"));
    assert_eq!(server.ending().await, ShutdownOutcome::Aborted);
}

#[actix_web::test]
async fn the_model_card_describes_an_encoder() {
    let server = encoder_server();
    let card = json!({
        "id": "tiny", "object": "model", "created": 1, "owned_by": "mainstem", "max_model_len": 16,
        "kind": "encoder", "endpoints": [EMBEDDINGS, FILL_MASK], "context": 16, "source_context": 16,
        "dimensions": 3
    });
    assert_eq!(server.get("/v1/models/tiny").await.json(), card);
    server.close().await;
}
