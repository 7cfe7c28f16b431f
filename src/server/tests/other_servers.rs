//! Tests that concern the APIs of all other servers: long bodies, and bodies that are no requests.

use super::encoder_server::begin;
use super::test_server::{Client, DEADLINE, TestServer, answer, model, tokenizer};
use crate::actors::ModelInfo;
use serde_json::json;

const PATHS: [&str; 10] = [
    "/",
    "/generate",
    "/generate_stream",
    "/completion",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/v1/messages",
];

#[actix_web::test]
async fn a_body_that_is_no_request_is_refused_with_a_message() {
    let server = TestServer::start();
    let deep = format!("{{\"prompt\": {}{}}}", "[".repeat(200), "]".repeat(200));
    for path in PATHS {
        for body in ["", "{", "[]", "null", "5", "\"text\"", "{\"model\": 5}", "{\"model\": \"big\"}", &deep]
        {
            let response = Client::send(server.address, "POST", path, "", body).await.response().await;
            assert_eq!(response.status / 100, 4, "{path} {body}: {}", response.body);
            let error = response.json();
            let message = error["error"].as_str().or_else(|| error["error"]["message"].as_str());
            assert!(message.is_some_and(|message| !message.is_empty()), "{path} {body}: {error}");
        }
        let wrong = Client::send(server.address, "DELETE", path, "", "").await.response().await;
        assert_eq!((wrong.status, wrong.header("allow").is_some()), (405, true), "{path}");
    }
    server.close().await;
}

/// Bodies of more than 8 KiB are read and translated off the event loop.
#[actix_web::test]
async fn a_long_request_is_answered_like_a_short_one() {
    let long = ModelInfo { context: 30_000, max_sequence_tokens: 30_000, ..model() };
    let mut server = TestServer::for_model(long, tokenizer(), None, |_| {}, DEADLINE);
    let text = "long ".repeat(4000);
    let chat = json!([{"role": "user", "content": text}]);
    for (path, body) in [
        ("/", json!({"inputs": text})),
        ("/", json!({"text": text})),
        ("/generate", json!({"inputs": text})),
        ("/completion", json!({"prompt": text})),
        ("/api/chat", json!({"messages": chat})),
        ("/api/generate", json!({"prompt": text, "raw": true})),
    ] {
        let client = begin(&server, path, &body).await;
        let (request, sender) = server.next_request().await;
        assert!((20_000..20_100).contains(&request.prompt.len()), "{path}");
        answer("x").into_iter().for_each(|event| sender.send(event));
        assert_eq!(client.response().await.status, 200, "{path}");
    }
    server.close().await;
}
