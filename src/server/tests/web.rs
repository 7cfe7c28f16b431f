//! The web page's files, and the events of the sequences in flight.

use super::test_server::{Client, TestServer};
use crate::config::{ApiKeys, ServerConfig};
use crate::server::web_page;
use serde_json::{Value, json};

/// Returns the data of the events that a client has read.
fn data(client: &Client) -> Vec<Value> {
    let text = String::from_utf8_lossy(&client.read).into_owned();
    let events = text.split("data: ").skip(1).filter_map(|event| event.split_once("\n\n"));
    events.map(|(json, _)| serde_json::from_str(json).unwrap()).collect()
}

#[actix_web::test]
async fn the_page_needs_no_key_and_what_it_asks_for_does() {
    let keyed = |config: &mut ServerConfig| config.api_keys = ApiKeys(vec!["key".into()]);
    let server = TestServer::with_config(None, keyed);
    for path in web_page::paths() {
        let file = server.get(path).await;
        assert_eq!(file.status, 200, "{path}");
        let policy = file.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
    }
    for path in ["/v1/models", "/v1/inflight", "/web/", "/web/../v1/models", "/web/other.js"] {
        assert_eq!(server.get(path).await.status, 401, "{path}");
    }
    let post = Client::send(server.address, "POST", "/", "", "{}").await.response().await;
    assert_eq!(post.status, 401);
    server.close().await;
}

#[actix_web::test]
async fn the_page_can_be_switched_off() {
    let server = TestServer::with_config(None, |config| config.web = false);
    for path in web_page::paths().chain(["/v1/inflight", "/slots"]) {
        let status = if path == "/" { 200 } else { 404 };
        assert_eq!(server.get(path).await.status, status, "{path}");
    }
    server.close().await;
}

#[actix_web::test]
async fn watchers_get_the_facts_and_then_frames_until_the_server_drains() {
    let server = TestServer::start();
    let head = Client::send(server.address, "HEAD", "/v1/inflight", "", "").await;
    assert_eq!(head.response().await.status, 200, "without a body, which would never end");
    let mut watching = Client::send(server.address, "GET", "/v1/inflight?interval_ms=50", "", "").await;
    watching.read_until("inflight.frame").await;
    while data(&watching).len() < 3 {
        assert!(watching.read_more().await);
    }
    let events = data(&watching);
    let expected = json!({
        "object": "inflight.start", "model": "tiny", "lanes": [[0, 4]], "interval_ms": 50,
        "facts": [["model", "a fake"], ["slots", "4"]],
    });
    assert_eq!(events[0], expected);
    assert_eq!(events[1]["pages"], json!({"used": 0, "total": 8}));
    assert_eq!(events[1]["lanes"], json!([{"window": [0, 0], "sequences": []}]));
    assert!(events[2]["time_ms"].as_u64() > events[1]["time_ms"].as_u64());
    // Shutdown does not wait for clients that watch, and ends their streams properly.
    let mut slow = Client::send(server.address, "GET", "/v1/inflight?interval_ms=2000", "", "").await;
    slow.read_until("inflight.frame").await;
    server.close().await;
    for mut client in [watching, slow] {
        while client.read_more().await {}
        assert!(client.read.ends_with(b"\r\n0\r\n\r\n"), "{}", String::from_utf8_lossy(&client.read));
    }
}

#[actix_web::test]
async fn wrong_intervals_and_too_many_watchers_are_refused() {
    let server = TestServer::start();
    for query in ["interval_ms=1", "interval_ms=2001", "interval_ms=x", "interval_ms="] {
        let refused = server.get(&format!("/v1/inflight?{query}")).await;
        assert_eq!(refused.status, 400, "{query}");
        assert_eq!(refused.error().1, "interval_ms");
    }
    let mut watching = Vec::new();
    for _ in 0..32 {
        let mut client = Client::send(server.address, "GET", "/v1/inflight", "", "").await;
        client.read_until("inflight.start").await;
        watching.push(client);
    }
    let refused = server.get("/v1/inflight").await;
    assert_eq!((refused.status, refused.error().0), (429, "too_many_watchers".to_owned()));
    server.close().await;
}
