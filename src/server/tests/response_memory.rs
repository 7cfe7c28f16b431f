//! Tests of the memory of responses: each client has a part of it.

use super::test_server::{COMPLETIONS, Client, TestServer, scored, wait_until};
use crate::actors::response_memory::token_bytes;
use crate::config::ApiKeys;
use crate::request::{FinishReason, TokenEvent};

/// Regression: from half of the memory on, every client was refused, however little it had.
#[actix_web::test]
async fn a_client_whose_answers_take_much_locks_out_no_other() {
    let mut server = TestServer::with_config(None, |config| {
        config.api_keys = ApiKeys(vec!["much".into(), "little".into()]);
        config.response_bytes = 64 << 10;
    });
    let address = server.address;
    let send = async |key: &str| {
        let headers = format!("Authorization: Bearer {key}\r\n");
        Client::send(address, "POST", COMPLETIONS, &headers, r#"{"prompt": "p", "logprobs": 5}"#).await
    };
    let first = send("much").await;
    let (request, much) = server.next_request().await;
    let token = scored(112, -1.0, &[(1, -1.0); 20]);
    // An answer is collected in buffers of twice its size; alone, it may take half of the memory.
    for _ in 0..25_000 / (2 * token_bytes(&token)) {
        much.send(TokenEvent::Token(token.clone()));
    }
    let responses = server.status.responses.clone();
    wait_until(|| responses.check_new(request.client.id).is_err()).await;
    let refused = send("much").await.response().await;
    assert_eq!((refused.status, refused.error().0.as_str()), (429, "server_busy"));

    let honest = send("little").await;
    let (_, events) = server.next_request().await;
    events.send(TokenEvent::Token(token.clone()));
    events.send(TokenEvent::Finished(FinishReason::Length));
    assert_eq!(honest.response().await.status, 200);
    // The others are in the channel, or in the answer.
    while !much.is_closed() {
        much.send(TokenEvent::Token(token.clone()));
        actix_web::rt::task::yield_now().await;
    }
    drop(much);
    assert_eq!(first.response().await.error().0, "server_busy");
    server.close().await;
}
