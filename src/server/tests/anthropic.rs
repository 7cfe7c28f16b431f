//! Tests of Anthropic's Messages API.

use super::dialects::{CALL, begin, ended, ids, named_events, play, refused, server_with_tools, types};
use super::test_server::{Client, TestServer, answer, bare};
use crate::config::ApiKeys;
use crate::request::{RequestError, TokenEvent};
use serde_json::{Value, json};
use std::time::Duration;

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn tool() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"name": "weather", "description": "It says.", "input_schema": schema})
}

fn hello() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

#[actix_web::test]
async fn a_whole_answer_is_a_message() {
    let mut server = TestServer::start();
    let body = json!({
        "model": "tiny", "max_tokens": 7, "system": [{"type": "text", "text": "be", "cache_control": {}}],
        "messages": hello(), "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["!", "?"],
        "metadata": {"user_id": "me"},
    });
    let (request, response) = play(&mut server, MESSAGES, &body, answer("yo")).await;
    assert_eq!(request.prompt[..], ids("<s>system:be;user:hi;assistant:"));
    assert_eq!((request.max_tokens, request.sampling.top_k, request.sampling.top_p), (7, 3, 0.9));
    assert!(response.header("x-mainstem-ignored").is_none());
    let expected = json!({
        "id": format!("msg_{}", request.id), "type": "message", "role": "assistant", "model": "tiny",
        "content": [{"type": "text", "text": "yo"}], "stop_reason": "max_tokens", "stop_sequence": null,
        "usage": {"input_tokens": 29, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
                  "output_tokens": 2},
    });
    assert_eq!(response.json(), expected);
    let (_, response) = play(&mut server, MESSAGES, &body, answer("yo? no")).await;
    let json = response.json();
    assert_eq!((&json["stop_reason"], &json["stop_sequence"]), (&json!("stop_sequence"), &json!("?")));
    assert_eq!(json["content"][0]["text"], "yo");
    server.close().await;
}

/// The blocks of a stream are those of the whole answer, and thinking is there only if it is enabled.
#[actix_web::test]
async fn a_stream_has_the_events_of_its_blocks() {
    let mut server = server_with_tools();
    let start = ["content_block_start", "content_block_delta", "content_block_stop"];
    for (thinking, blocks) in [("enabled", 3), ("disabled", 2)] {
        let mut body = json!({
            "max_tokens": 200, "messages": hello(), "tools": [tool()],
            "thinking": {"type": thinking, "budget_tokens": 1024},
        });
        let whole = play(&mut server, MESSAGES, &body, ended(CALL)).await.1.json();
        body["stream"] = json!(true);
        let (request, response) = play(&mut server, MESSAGES, &body, ended(CALL)).await;
        assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
        let events = named_events(&response.body);
        let mut expected = vec!["message_start"];
        (0..blocks).for_each(|_| expected.extend(start));
        expected.extend(["message_delta", "message_stop"]);
        assert_eq!(types(&events), expected);
        let message = &events[0]["message"];
        assert_eq!(
            (&message["id"], &message["content"]),
            (&json!(format!("msg_{}", request.id)), &json!([]))
        );
        assert_eq!(message["usage"]["input_tokens"], request.prompt.len());

        let mut content: Vec<Value> = Vec::new();
        for event in &events {
            let index = event["index"].as_u64().unwrap_or(0) as usize;
            match event["type"].as_str().unwrap() {
                "content_block_start" => {
                    assert_eq!(index, content.len());
                    content.push(event["content_block"].clone());
                    if content[index]["type"] == "tool_use" {
                        assert_eq!(content[index]["input"], json!({}));
                        content[index]["input"] = json!("");
                    }
                }
                "content_block_delta" => {
                    let delta = event["delta"].as_object().unwrap();
                    let (name, part) = delta.iter().find(|(name, _)| *name != "type").unwrap();
                    let name = if name == "partial_json" { "input" } else { name };
                    let text = content[index][name].as_str().unwrap().to_owned() + part.as_str().unwrap();
                    content[index][name] = text.into();
                }
                _ => {}
            }
        }
        let call = content.last_mut().unwrap();
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        call["id"] = whole["content"][blocks - 1]["id"].clone();
        call["input"] = serde_json::from_str(call["input"].as_str().unwrap()).unwrap();
        assert_eq!(whole["content"], Value::from(content));
        let delta = &events[events.len() - 2];
        assert_eq!(delta["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
        assert_eq!(whole["stop_reason"], "tool_use");
        assert_eq!(delta["usage"], whole["usage"]);
        assert_eq!(whole["usage"]["output_tokens"], CALL.len());
    }
    server.close().await;
}

#[actix_web::test]
async fn turns_become_messages() {
    let mut server = server_with_tools();
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Ulm"}});
    let result =
        |id: &str, content: Value| json!({"type": "tool_result", "tool_use_id": id, "content": content});
    let mut failed = result("b", json!([{"type": "text", "text": "no"}]));
    failed["is_error"] = json!(true);
    let body = json!({
        "max_tokens": 9, "tools": [tool()],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "look"}, call("a"), call("b")]},
            {"role": "user", "content": [result("a", json!("sun")), failed, {"type": "text", "text": "so"}]},
            {"role": "assistant", "content": "It"}
        ],
    });
    let (request, response) = play(&mut server, MESSAGES, &body, ended("!")).await;
    // The last message is the beginning of the answer, so the template does not close it.
    let expected = "<s>user:go;assistant:look;tool:sun;tool:Error: no;user:so;assistant:It";
    assert_eq!(request.prompt[..], ids(expected));
    assert_eq!(response.json()["content"], json!([{"type": "text", "text": "!"}]));
    let counted =
        begin(&server, COUNT, &json!({"messages": hello(), "system": "be", "tools": [tool()]})).await;
    let expected = json!({"input_tokens": ids("<s>system:be;user:hi;assistant:").len()});
    assert_eq!(counted.response().await.json(), expected);
    server.close().await;
}

#[actix_web::test]
async fn required_calls_are_the_reason_to_stop() {
    let mut server = server_with_tools();
    let text = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\":\"Ulm\"}}\n</tool_call>";
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "weather"})] {
        let body = json!({"max_tokens": 99, "messages": hello(), "tools": [tool()], "tool_choice": choice});
        let (request, response) = play(&mut server, MESSAGES, &body, ended(text)).await;
        assert!(request.constraint.is_some(), "{choice}");
        let json = response.json();
        assert_eq!(
            (&json["stop_reason"], &json["content"][0]["name"]),
            (&json!("tool_use"), &json!("weather"))
        );
    }
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    let body =
        json!({"max_tokens": 9, "messages": hello(), "output_config": {"format": format, "effort": "low"}});
    let (request, _) = play(&mut server, MESSAGES, &body, ended("{}")).await;
    assert!(request.constraint.is_some());
    server.close().await;
}

/// Errors have Anthropic's shape and name the parameters of this API.
#[actix_web::test]
async fn what_is_wrong_is_named() {
    let server = server_with_tools();
    let with = |name: &str, value: Value| {
        let mut body = json!({"max_tokens": 9, "messages": hello()});
        body[name] = value;
        body
    };
    let block = |block: Value| with("messages", json!([{"role": "user", "content": [block]}]));
    let schemaless = json!([{"name": "a", "input_schema": {"type": "string"}}]);
    for (body, named) in [
        (json!({"messages": hello()}), "'max_tokens' is missing"),
        (with("max_tokens", json!(0)), "'max_tokens' must be"),
        (with("messages", json!([])), "'messages' is empty"),
        (with("messages", json!([{"role": "system", "content": "x"}])), "'messages[0].role' must be"),
        (with("messages", json!([{"role": "user"}])), "'messages[0].content' is missing"),
        (with("messages", json!([{"role": "user", "content": []}])), "'messages' has no content"),
        (block(json!({"type": "image", "source": {}})), "'messages[0].content[0].type' is \"image\""),
        (block(json!({"type": "document"})), "'messages[0].content[0].type' is \"document\""),
        (block(json!({"type": "tool_use", "id": "a", "name": "f"})), "'messages[0].content[0].type': only"),
        (block(json!({"type": "tool_result"})), "'messages[0].content[0].tool_use_id' is missing"),
        (block(json!(null)), "'messages[0].content[0]' must be an object"),
        (with("system", json!(7)), "'system' must be a string or a list, not 7"),
        (with("stop_sequences", json!([1])), "'stop_sequences' must be a list of strings"),
        (with("stop_sequences", json!([""])), "'stop_sequences"),
        (with("top_k", json!("x")), "'top_k' is"),
        (
            with("tools", json!([{"type": "bash_20250124", "name": "bash"}])),
            "'tools[0].type' is \"bash_20250124\"",
        ),
        (with("tools", json!([{"input_schema": {}}])), "'tools[0].name' is missing"),
        (with("tools", schemaless), "'tools[0].input_schema.type' must be"),
        (with("tool_choice", json!({"type": "some"})), "'tool_choice.type' must be"),
        (with("thinking", json!({"type": "deep"})), "'thinking.type' must be"),
        (with("mcp_servers", json!([{}])), "'mcp_servers' is not supported"),
    ] {
        let (status, error) = refused(&server, MESSAGES, &body.to_string()).await;
        let message = error["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(named), "{message}, not {named}");
        let kind = json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}});
        assert_eq!((status, error), (400, kind));
    }
    let wrong = Client::send(server.address, "GET", MESSAGES, "", "").await.response().await;
    assert_eq!((wrong.status, &wrong.json()["type"]), (405, &json!("error")));
    server.close().await;
}

#[actix_web::test]
async fn the_key_may_be_in_its_own_header() {
    let keys = ApiKeys(vec!["secret".into()]);
    let server = TestServer::with_config(None, |config| config.api_keys = keys);
    let body = json!({"messages": hello()}).to_string();
    for (header, status) in [
        ("x-api-key: secret\r\nanthropic-version: 2023-06-01\r\n", 200),
        ("Authorization: Bearer secret\r\n", 200),
        ("x-api-key: other\r\n", 401),
        ("", 401),
    ] {
        let response = Client::send(server.address, "POST", COUNT, header, &body).await.response().await;
        assert_eq!(response.status, status, "{header}");
        if status == 401 {
            let json = response.json();
            assert_eq!(
                (&json["type"], &json["error"]["type"]),
                (&json!("error"), &json!("authentication_error"))
            );
        }
    }
    server.close().await;
}

#[actix_web::test]
async fn a_stream_ends_with_its_error_and_pings_while_it_is_silent() {
    let pinging = |config: &mut crate::config::ServerConfig| {
        config.stream_comment_interval = Duration::from_millis(5);
    };
    let mut server = TestServer::with_config(None, pinging);
    let body = json!({"max_tokens": 9, "messages": hello(), "stream": true});
    let mut client = begin(&server, MESSAGES, &body).await;
    let (_, events) = server.next_request().await;
    client.read_until("event: ping\ndata: {\"type\":\"ping\"}\n\n").await;
    events.send(TokenEvent::Token(bare(97)));
    client.read_until("text_delta").await;
    events.send(TokenEvent::Failed(RequestError::DeviceFailed("smoke".into())));
    let events = named_events(&client.response().await.body);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert!(!types(&events).contains(&"message_stop"));
    server.close().await;

    let busy = RequestError::Busy { coming: 1, waiting: 4, limit: 4, retry_after_s: 0 };
    let server = TestServer::with_config(Some(busy), |_| {});
    let (status, error) = refused(&server, MESSAGES, &body.to_string()).await;
    assert_eq!((status, &error["error"]["type"]), (429, &json!("rate_limit_error")));
    server.close().await;
}
