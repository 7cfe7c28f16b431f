//! Tests of the API of llama.cpp's server, and of the further paths of vLLM's.

use super::encoder_server::{begin, post};
use super::test_server::{Client, Response, TestServer, answer, scored};
use crate::config::ApiKeys;
use crate::request::{FinishReason, Request, TokenEvent};
use serde_json::{Value, json};

async fn ask(server: &mut TestServer, body: Value, events: Vec<TokenEvent>) -> (Request, Response) {
    let client = begin(server, "/completion", &body).await;
    let (request, sender) = server.next_request().await;
    events.into_iter().for_each(|event| sender.send(event));
    (request, client.response().await)
}

fn data(response: &Response) -> Vec<Value> {
    let events = response.body.strip_suffix("\n\n").unwrap().split("\n\n");
    events.map(|event| serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap()).collect()
}

#[actix_web::test]
async fn a_whole_answer_has_the_shape_of_the_api() {
    let mut server = TestServer::start();
    let body = json!({
        "prompt": "pq", "cache_prompt": true, "id_slot": 1, "n_keep": 3, "top_k": 4, "temperature": 0.5,
    });
    let (request, response) = ask(&mut server, body, answer("hi")).await;
    assert_eq!((&request.prompt[..], request.max_tokens), (&[112, 113][..], 62));
    assert_eq!((request.sampling.top_k, response.header("x-mainstem-ignored")), (4, None));
    let mut answered = response.json();
    let timings = answered["timings"].take();
    assert_eq!((&timings["prompt_n"], &timings["predicted_n"]), (&json!(2), &json!(2)));
    let expected = json!({
        "index": 0, "content": "hi", "tokens": [], "id_slot": -1, "stop": true, "model": "tiny",
        "tokens_predicted": 2, "tokens_evaluated": 2,
        "generation_settings": {"n_ctx": 64, "n_predict": -1, "stream": false}, "truncated": false,
        "stop_type": "limit", "stopping_word": "", "tokens_cached": 4, "timings": null,
    });
    assert_eq!(answered, expected);

    let events = vec![
        TokenEvent::Token(scored(97, -0.5, &[(98, -0.25)])),
        TokenEvent::Token(scored(98, -0.5, &[])),
        TokenEvent::Token(scored(99, -0.5, &[])),
        TokenEvent::Finished(FinishReason::Stop),
    ];
    let body = json!({"prompt": [1, 2], "n_predict": 9, "n_probs": 1, "return_tokens": true, "stop": ["c"]});
    let (request, response) = ask(&mut server, body, events).await;
    assert_eq!((&request.prompt[..], request.max_tokens, request.logprobs), (&[1, 2][..], 9, Some(1)));
    let answered = response.json();
    assert_eq!((&answered["content"], &answered["tokens"]), (&json!("ab"), &json!([97, 98, 99])));
    assert_eq!((&answered["stop_type"], &answered["stopping_word"]), (&json!("word"), &json!("c")));
    let first = json!({
        "id": 97, "token": "a", "bytes": [97], "logprob": -0.5,
        "top_logprobs": [
            {"id": 98, "token": "b", "bytes": [98], "logprob": -0.25},
            {"id": 97, "token": "a", "bytes": [97], "logprob": -0.5},
        ],
    });
    assert_eq!(answered["completion_probabilities"][0], first);
    server.close().await;
}

#[actix_web::test]
async fn a_stream_has_the_text_in_parts_and_counts_at_the_end() {
    let mut server = TestServer::start();
    let body = json!({"prompt": "p", "stream": true, "n_predict": 3});
    let (_, response) = ask(&mut server, body, answer("aé")).await;
    let events = data(&response);
    let parts: Vec<_> =
        events.iter().map(|event| (event["content"].clone(), event["stop"].clone())).collect();
    assert_eq!(
        parts,
        [("a", false), ("é", false), ("", true)].map(|(text, stop)| (json!(text), json!(stop)))
    );
    assert_eq!((&events[0]["tokens_predicted"], &events[0]["timings"]), (&json!(1), &Value::Null));
    let last = &events[2];
    assert_eq!((&last["tokens_predicted"], &last["stop_type"]), (&json!(3), &json!("limit")));
    assert_eq!(last["timings"]["predicted_n"], 3);
    let body = json!({"prompt": "p", "stream": true, "timings_per_token": true});
    let (_, response) = ask(&mut server, body, answer("a")).await;
    assert_eq!(data(&response)[0]["timings"]["predicted_n"], 1);
    server.close().await;
}

#[actix_web::test]
async fn errors_have_the_shape_of_the_api() {
    let server = TestServer::start();
    for (body, part) in [
        (json!({}), "'prompt' is missing"),
        (json!({"prompt": ["a", "b"]}), "a request for each prompt"),
        (json!({"prompt": {"a": 1}}), "prompt"),
        (json!({"prompt": "p", "n_predict": "x"}), "n_predict"),
        (json!({"prompt": "p", "n_probs": 21}), "n_probs"),
        (json!({"prompt": "p", "n_probs": "x"}), "n_probs"),
        (json!({"prompt": "p", "lora": [{"id": 1}]}), "lora"),
        (json!({"prompt": "p", "t_max_predict_ms": 5}), "t_max_predict_ms"),
        (json!({"prompt": "p", "grammar": "root ::= "}), "grammar"),
        (json!({"prompt": "p", "stream": 1}), "stream"),
    ] {
        let response = post(&server, "/completion", &body).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["code"]), (400, &json!(400)), "{body}");
        assert!(error["message"].as_str().unwrap().contains(part), "{body}: {error}");
    }
    // Parameters of other APIs that would change the shape of the answer have no effect, and are named.
    let mut server = server;
    let (request, response) =
        ask(&mut server, json!({"prompt": "p", "n": 2, "echo": true}), answer("x")).await;
    assert_eq!(
        (response.header("x-mainstem-ignored"), &response.json()["content"]),
        (Some("echo, n"), &json!("x"))
    );
    assert_eq!(request.prompt.len(), 1);
    server.close().await;
}

#[actix_web::test]
async fn the_server_describes_its_slots_and_its_model() {
    let server = TestServer::start();
    let props = server.get("/props").await.json();
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(4), &json!("tiny")));
    assert_eq!(
        (&props["bos_token"], &props["default_generation_settings"]["n_ctx"]),
        (&json!("<s>"), &json!(64))
    );
    assert!(props["chat_template"].as_str().unwrap().contains("raise_exception('no robots')"));
    let slots = server.get("/slots").await.json();
    let ids: Vec<_> = slots.as_array().unwrap().iter().map(|slot| slot["id"].clone()).collect();
    assert_eq!(ids, [0, 1, 2, 3]);
    assert_eq!(slots[0], json!({"id": 0, "n_ctx": 64, "speculative": false, "is_processing": false}));
    server.close().await;
}

#[actix_web::test]
async fn vllms_paths_are_there() {
    let server = TestServer::with_config(None, |config| config.api_keys = ApiKeys(vec!["key".into()]));
    assert_eq!(server.get("/ping").await.status, 200, "load balancers have no key");
    let ping = Client::send(server.address, "POST", "/ping", "", "").await.response().await;
    assert_eq!(ping.status, 200);
    assert_eq!(server.get("/load").await.status, 401);
    let get = async |path| {
        Client::send(server.address, "GET", path, "Authorization: Bearer key\r\n", "").await.response().await
    };
    assert_eq!(get("/load").await.json(), json!({"server_load": 0}));
    let info = get("/server_info").await.json();
    assert_eq!(
        (&info["model"], &info["max_model_len"], &info["max_num_seqs"]),
        (&json!("tiny"), &json!(64), &json!(4))
    );
    server.close().await;
}
