//! Tests of what a request says about its prompt, and of what the response says about it.

use super::test_server::{COMPLETIONS, Client, TestServer, answer};
use crate::request::TokenEvent;
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
