//! Tests of the endpoints that need only the tokenizer: their responses count as those of others do.

use super::test_server::{Client, Response, TestServer, wait_until};
use crate::request::client::ClientId;
use crate::server::ShutdownOutcome;
use serde_json::{Value, json};
use tokio::net::TcpSocket;

async fn post(server: &TestServer, path: &str, body: Value) -> Response {
    Client::send(server.address, "POST", path, "", &body.to_string()).await.response().await
}

/// Regression: a few requests with long answers took any amount of memory.
#[actix_web::test]
async fn a_response_counts_in_the_memory_of_responses() {
    let server = TestServer::with_config(None, |config| config.response_bytes = 8000);
    // Inline and off the event loop.
    for tokens in [1000, 10_000] {
        let body = json!({ "tokens": vec![112; tokens] });
        assert_eq!(post(&server, "/detokenize", body).await.status, if tokens < 4000 { 200 } else { 400 });
        let refused = post(&server, "/v1/tokenize", json!({ "prompt": "p".repeat(tokens + 400) })).await;
        assert_eq!((refused.status, refused.error().0.as_str()), (400, "response_too_large"));
        assert!(refused.body.contains("server.response_memory"), "{}", refused.body);
    }
    // Nothing of that is still held.
    let most = post(&server, "/v1/tokenize", json!({ "prompt": "p".repeat(980) })).await;
    assert_eq!(most.json()["count"], 980);
    let other = server.status.responses.hold(ClientId::Local);
    wait_until(|| other.grow(4000).is_ok()).await;
    server.close().await;
}

/// Regression: shutdown did not know of these responses, and cut them.
#[actix_web::test]
async fn shutdown_waits_for_a_response_and_admits_no_other() {
    let server = TestServer::start();
    // A client that reads slowly, and more than the buffers between it and the server take.
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let stream = socket.connect(server.address).await.unwrap();
    let body = json!({ "tokens": vec![0; 1 << 20] }).to_string();
    let mut slow = Client::send_on(stream, "POST", "/v1/detokenize", "", &body).await;
    slow.read_until("HTTP/1.1 200").await;
    server.stops.send(()).unwrap();
    wait_until(|| server.status.is_draining()).await;
    for _ in 0..100 {
        let late = post(&server, "/tokenize", json!({ "prompt": "p" })).await;
        assert_eq!((late.status, late.error().0.as_str()), (503, "shutting_down"));
    }
    let response = slow.response().await;
    assert_eq!(response.json()["prompt"].as_str().map(str::len), Some(1 << 20));
    assert_eq!(server.ending().await, ShutdownOutcome::Drained);
}
