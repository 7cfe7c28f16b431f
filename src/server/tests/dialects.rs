//! Tests of what all translated APIs have in common, and helpers of their tests.

use super::test_server::{Client, DEADLINE, Response, TestServer, answer, model, tokenizer_with};
use crate::actors::ModelInfo;
use crate::request::{FinishReason, Request, TokenEvent};
use crate::text::output::OutputFormats;
use serde_json::{Value, json};

/// Reasoning, text and a call, as a model writes them.
pub const CALL: &str = "<think>Hm.</think>I look.\
                        <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}</tool_call>";

/// Starts a server for a model that writes calls as Hermes does, and reasons in `<think>`.
pub fn server_with_tools() -> TestServer {
    let output_formats = OutputFormats::select(("hermes", "deepseek_r1"), None).unwrap();
    let model = ModelInfo { output_formats, eos: vec![257], vocab: 258, ..model() };
    TestServer::for_model(model, tokenizer_with(&["<s>", "</s>"], Value::Null), None, |_| {}, DEADLINE)
}

/// Returns the events of an answer that the model ends.
pub fn ended(text: &str) -> Vec<TokenEvent> {
    let mut events = answer(text);
    events.pop();
    events.push(TokenEvent::Finished(FinishReason::Stop));
    events
}

pub async fn begin(server: &TestServer, path: &str, body: &Value) -> Client {
    Client::send(server.address, "POST", path, "", &body.to_string()).await
}

/// Posts a body and plays the events of the engine.
pub async fn play(
    server: &mut TestServer,
    path: &str,
    body: &Value,
    events: Vec<TokenEvent>,
) -> (Request, Response) {
    let client = begin(server, path, body).await;
    let (request, sender) = server.next_request().await;
    events.into_iter().for_each(|event| sender.send(event));
    (request, client.response().await)
}

/// Posts a body that is refused. Returns the status and the body of the response.
pub async fn refused(server: &TestServer, path: &str, body: &str) -> (u16, Value) {
    let response = Client::send(server.address, "POST", path, "", body).await.response().await;
    (response.status, response.json())
}

/// Returns the named events of a stream. Each has its name as its type.
pub fn named_events(body: &str) -> Vec<Value> {
    let frames = body.strip_suffix("\n\n").expect("the last event is closed").split("\n\n");
    let event = |frame: &str| {
        let (name, data) = frame.split_once("\ndata: ").unwrap_or_else(|| panic!("{frame}"));
        let value: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), value["type"].as_str(), "{frame}");
        value
    };
    frames.map(event).collect()
}

/// Returns the types of events, those of equal neighbours once.
pub fn types(events: &[Value]) -> Vec<&str> {
    let mut types: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    types.dedup();
    types
}

pub fn ids(text: &str) -> Vec<u32> {
    let bos = text.starts_with("<s>").then_some(256);
    bos.into_iter().chain(text.trim_start_matches("<s>").bytes().map(u32::from)).collect()
}

/// Bodies that no API accepts, whatever their fields are.
#[actix_web::test]
async fn bodies_that_are_no_objects_are_refused_and_the_server_goes_on() {
    let server = TestServer::start();
    for path in ["/v1/messages", "/v1/messages/count_tokens", "/v1/responses"] {
        for body in ["", "[]", "{", "7", "\"\\ud800\"", &"[".repeat(9000), "{\"model\": 7}", "{}"] {
            let (status, error) = refused(&server, path, body).await;
            assert_eq!(status, 400, "{path} {body}");
            assert!(error["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        }
        let (status, _) = refused(&server, path, r#"{"model": "other"}"#).await;
        assert_eq!(status, 404);
    }
    assert_eq!(server.get("/health").await.status, 200);
    server.close().await;
}

/// A body that is parsed off the event loop is translated and answered like a short one.
#[actix_web::test]
async fn long_bodies_and_their_answers_are_translated() {
    let mut server = server_with_tools();
    let text = "x".repeat(20_000);
    for (path, body) in [
        ("/v1/messages", json!({"max_tokens": 9, "messages": [{"role": "user", "content": text}]})),
        ("/v1/responses", json!({"input": text})),
    ] {
        let (status, error) = refused(&server, path, &body.to_string()).await;
        assert_eq!(status, 400, "the context is short: {error}");
        let short = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "input": "a"});
        let (_, response) = play(&mut server, path, &short, ended(&text)).await;
        assert_eq!(response.status, 200);
        assert!(response.body.contains(&text));
    }
    server.close().await;
}

#[actix_web::test]
async fn a_client_that_disconnects_cancels_its_request() {
    let mut server = TestServer::start();
    for (path, stream) in [("/v1/messages", true), ("/v1/messages", false), ("/v1/responses", true)] {
        let body = json!({
            "max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "input": "a", "stream": stream,
        });
        let mut client = begin(&server, path, &body).await;
        let (_, events) = server.next_request().await;
        if stream {
            events.send(answer("a").remove(0));
            client.read_until("data: ").await;
        }
        assert!(!events.is_closed());
        drop(client);
        super::wait_until(|| events.is_closed()).await;
    }
    server.close().await;
}
