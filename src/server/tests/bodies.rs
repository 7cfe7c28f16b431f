//! Tests of long request bodies: hopeless prompts, slow uploads, and clients that send many.

use super::test_server::{COMPLETIONS, Client, TestServer, tokenizer};
use crate::request::{FinishReason, TokenEvent};
use crate::text::Encoded;
use actix_web::rt::net::TcpStream;
use futures_util::future::select_all;
use serde_json::json;
use std::num::NonZero;

/// A body of about `bytes` bytes with a short prompt.
fn padded(bytes: usize) -> String {
    json!({ "prompt": "pp", "user": "u".repeat(bytes) }).to_string()
}

/// Sends the head of a request and the beginning of its body.
async fn begin(server: &TestServer, headers: &str, body: &str) -> Client {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let head =
        format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}\r\n{body}");
    assert_eq!(stream.try_write(head.as_bytes()).unwrap(), head.len());
    Client { stream, read: Vec::new() }
}

/// Regression: 4 MB of text against a context of 1,024 took 1.4 s and 670 MB.
#[actix_web::test]
async fn a_hopeless_prompt_is_refused_by_its_parameter() {
    // The context is 64 tokens. No token of this tokenizer has more than 4 bytes.
    let text = "p".repeat(4000);
    let tokenizer = tokenizer();
    assert_eq!(tokenizer.encode_at_most(&text, false, 64).unwrap(), Encoded::TooMany(1000));
    let server = TestServer::start();
    let chat = json!({ "messages": [{ "role": "user", "content": text.clone() }] });
    for (path, body, param) in [
        (COMPLETIONS, json!({ "prompt": text }), "prompt"),
        (COMPLETIONS, json!({ "prompt": ["p", text] }), "prompt"),
        ("/v1/chat/completions", chat, "messages"),
    ] {
        let response =
            Client::send(server.address, "POST", path, "", &body.to_string()).await.response().await;
        assert_eq!(response.error(), ("context_length_exceeded".into(), json!(param)));
        let least = format!("the {param} has at least 10");
        assert!(response.body.contains(&least) && response.body.contains("64 tokens"), "{}", response.body);
    }
    // Nobody limits the number of tokens here.
    let body = json!({ "prompt": text }).to_string();
    let response = Client::send(server.address, "POST", "/tokenize", "", &body).await.response().await;
    assert_eq!(response.json()["count"], 4000);
    server.close().await;
}

/// Uploads that announce much and send nothing leave memory and turns to others, even of the same client.
#[actix_web::test]
async fn slow_uploads_hold_up_no_one() {
    let mut server = TestServer::with_config(None, |config| config.request_memory_bytes = 16 << 20);
    let mut slow = Vec::new();
    for _ in 0..40 {
        slow.push(begin(&server, "Content-Length: 4000000\r\n", "{").await);
    }
    for bytes in [10_000, 60_000, 300_000] {
        let client = server.send(&padded(bytes)).await;
        let (_, events) = server.next_request().await;
        events.send(TokenEvent::Finished(FinishReason::Stop));
        assert_eq!(client.response().await.status, 200);
    }
    // A line is bounded: some are refused.
    let reads = slow.iter_mut().map(|client| Box::pin(client.read_until("server_busy")));
    select_all(reads).await;
    // When they are gone, their places are free.
    drop(slow);
    let client = server.send(&padded(3_000_000)).await;
    let (_, events) = server.next_request().await;
    events.send(TokenEvent::Finished(FinishReason::Stop));
    assert_eq!(client.response().await.status, 200);
    server.close().await;
}

/// Regression: one that takes more than all of the memory was refused, even by an idle server.
#[actix_web::test]
async fn a_chunked_body_takes_memory_as_it_grows_and_alone_what_it_needs() {
    let mut server = TestServer::with_config(None, |config| config.request_memory_bytes = 1 << 20);
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    // Of 256 KiB, a buffer of twice the length takes a part, or more than all.
    for bytes in [20_000, 500_000] {
        let mut client = begin(&server, "Transfer-Encoding: chunked\r\n", "").await;
        client.write(&(chunk(&padded(bytes)) + &chunk(""))).await;
        let (_, events) = server.next_request().await;
        events.send(TokenEvent::Finished(FinishReason::Stop));
        assert_eq!(client.response().await.status, 200);
    }
    // One whose length is announced waits for what there is.
    let client = server.send(&padded(500_000)).await;
    let (_, events) = server.next_request().await;
    events.send(TokenEvent::Finished(FinishReason::Stop));
    assert_eq!(client.response().await.status, 200);
    server.close().await;
}

/// One that is sent in chunks is read on for a while, so that its client sees the response.
#[actix_web::test]
async fn a_chunked_body_beyond_the_limit_gets_413() {
    let server = TestServer::with_config(None, |config| config.body_limit_bytes = 1 << 20);
    let mut client = begin(&server, "Transfer-Encoding: chunked\r\n", "").await;
    let chunk = "u".repeat(64 << 10);
    for _ in 0..40 {
        client.write(&format!("{:x}\r\n{chunk}\r\n", chunk.len())).await;
    }
    client.write("0\r\n\r\n").await;
    let response = client.response().await;
    assert_eq!((response.status, response.error().0.as_str()), (413, "body_too_large"));
    server.close().await;
}

/// Regression: the socket was closed with the request unread, so clients saw a reset in the place of the 503.
#[actix_web::test]
async fn a_client_that_is_not_accepted_sees_why() {
    let server = TestServer::with_config(None, |config| config.max_connections_per_address = NonZero::new(1));
    let mut one = begin(&server, "Content-Length: 9\r\n", "").await;
    for _ in 0..10 {
        let refused = begin(&server, "Content-Length: 9\r\n", "{}       ").await.response().await;
        assert_eq!(refused.status, 503);
    }
    one.write("not json.").await;
    assert_eq!(one.response().await.status, 400);
    server.close().await;
}
