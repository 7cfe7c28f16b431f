//! Tests of OpenAI's Responses API, and of the responses that are kept.

use super::dialects::{CALL, begin, ended, ids, named_events, play, refused, server_with_tools, types};
use super::test_server::{Client, TestServer, answer, bare};
use crate::config::{ApiKeys, ServerConfig};
use crate::request::{RequestError, TokenEvent};
use crate::testing::Scratch;
use serde_json::{Value, json};
use std::time::Duration;

const RESPONSES: &str = "/v1/responses";

fn tool() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({"type": "function", "name": "weather", "parameters": schema, "strict": true})
}

/// Starts a server that keeps responses in a folder.
fn keeping(folder: &Scratch, configure: impl FnOnce(&mut ServerConfig)) -> TestServer {
    TestServer::with_config(None, |config| {
        config.batches.data_dir = Some(folder.path().join("data"));
        configure(config);
    })
}

#[actix_web::test]
async fn a_whole_answer_has_the_shape_of_the_api() {
    let mut server = TestServer::start();
    let body = json!({
        "model": "tiny", "instructions": "be", "input": "hi", "max_output_tokens": 5, "temperature": 0,
        "metadata": {"a": "b"}, "user": "me", "include": ["reasoning.encrypted_content"], "store": false,
    });
    let (request, response) = play(&mut server, RESPONSES, &body, answer("yo")).await;
    assert_eq!(request.prompt[..], ids("<s>system:be;user:hi;assistant:"));
    assert_eq!((request.max_tokens, request.sampling.temperature), (5, 0.0));
    let mut json = response.json();
    let id = json["id"].as_str().unwrap().strip_prefix("resp_").unwrap().to_owned();
    assert!(json["created_at"].take().as_u64() > Some(1_600_000_000));
    let expected = json!({
        "id": format!("resp_{id}"), "object": "response", "created_at": null, "status": "incomplete",
        "background": false, "error": null, "incomplete_details": {"reason": "max_output_tokens"},
        "instructions": "be", "model": "tiny",
        "output": [{
            "id": format!("msg_{id}_0"), "type": "message", "status": "incomplete", "role": "assistant",
            "content": [{"type": "output_text", "text": "yo", "annotations": [], "logprobs": []}],
        }],
        "previous_response_id": null,
        "usage": {"input_tokens": 29, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 2,
                  "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 31},
        "metadata": {"a": "b"}, "store": false, "truncation": "disabled", "max_output_tokens": 5,
        "temperature": 0, "top_p": null, "service_tier": null, "parallel_tool_calls": true,
        "reasoning": {"effort": null, "summary": null}, "text": {"format": {"type": "text"}},
        "tools": [], "tool_choice": "auto",
    });
    assert_eq!(json, expected);
    server.close().await;
}

/// The items of a stream are those of the whole answer, and its events are numbered.
#[actix_web::test]
async fn a_stream_has_the_events_of_its_items() {
    let mut server = server_with_tools();
    let mut body = json!({"input": [{"role": "user", "content": "hi"}], "tools": [tool()]});
    let whole = play(&mut server, RESPONSES, &body, ended(CALL)).await.1.json();
    body["stream"] = json!(true);
    let (_, response) = play(&mut server, RESPONSES, &body, ended(CALL)).await;
    let events = named_events(&response.body);
    let names = |names: &[&str]| names.iter().map(|name| format!("response.{name}")).collect::<Vec<_>>();
    let expected = names(&[
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]);
    assert_eq!(types(&events), expected);
    let numbers: Vec<_> = events.iter().map(|event| event["sequence_number"].as_u64()).collect();
    assert_eq!(numbers, (0..events.len() as u64).map(Some).collect::<Vec<_>>());

    let (mut items, mut text) = (Vec::new(), String::new());
    for event in &events {
        let kind = event["type"].as_str().unwrap();
        if let Some(part) = event["delta"].as_str() {
            text += part;
        } else if kind == "response.output_item.added" {
            assert_eq!(
                (&event["output_index"], &event["item"]["status"]),
                (&json!(items.len()), &json!("in_progress"))
            );
        } else if kind.ends_with("_text.done") {
            assert_eq!(event["text"], text);
        } else if kind.ends_with("arguments.done") {
            assert_eq!(event["arguments"], text);
        } else if kind == "response.output_item.done" {
            items.push(event["item"].clone());
            text.clear();
        }
    }
    let completed = &events.last().unwrap()["response"];
    assert_eq!(completed["output"], Value::from(items.clone()));
    assert_eq!((&completed["status"], &completed["usage"]), (&json!("completed"), &whole["usage"]));
    assert_eq!(items[2]["arguments"], "{\"city\": \"Ulm\"}");
    // Two answers differ in their ids only.
    let without_ids = |items: &[Value]| {
        let mut items = items.to_vec();
        for item in items.iter_mut().map(|item| item.as_object_mut().unwrap()) {
            item.shift_remove("id");
            item.shift_remove("call_id");
        }
        items
    };
    assert_eq!(without_ids(&items), without_ids(whole["output"].as_array().unwrap()));
    server.close().await;
}

#[actix_web::test]
async fn an_error_ends_a_stream_and_comments_keep_it_open() {
    let mut server =
        TestServer::with_config(None, |config| config.stream_comment_interval = Duration::from_millis(5));
    let mut client = begin(&server, RESPONSES, &json!({"input": "hi", "stream": true})).await;
    let (_, events) = server.next_request().await;
    client.read_until(": keep-alive\n\n").await;
    events.send(TokenEvent::Token(bare(97)));
    client.read_until("output_text.delta").await;
    events.send(TokenEvent::Failed(RequestError::DeviceFailed("smoke".into())));
    let body = client.response().await.body.replace(": keep-alive\n\n", "");
    let events = named_events(&body);
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    let response = &last["response"];
    assert_eq!(
        (&response["status"], &response["error"]["code"]),
        (&json!("failed"), &json!("device_failed"))
    );
    server.close().await;
}

#[actix_web::test]
async fn what_is_wrong_is_named() {
    let server = server_with_tools();
    let with = |name: &str, value: Value| {
        let mut body = json!({"input": "hi"});
        body[name] = value;
        body
    };
    let schemaless = json!([{"type": "function", "name": "f", "parameters": {"type": "string"}}]);
    for (body, param) in [
        (json!({}), "input"),
        (with("input", json!([])), "input"),
        (
            with("input", json!([{"role": "user", "content": [{"type": "input_image"}]}])),
            "input[0].content[0].type",
        ),
        (with("max_output_tokens", json!(0)), "max_output_tokens"),
        (with("background", json!(true)), "background"),
        (with("conversation", json!("c")), "conversation"),
        (with("truncation", json!("auto")), "truncation"),
        (with("include", json!(["message.output_text.logprobs"])), "include"),
        (with("top_logprobs", json!(2)), "top_logprobs"),
        (with("store", json!(true)), "store"),
        (with("store", json!("x")), "store"),
        (with("previous_response_id", json!("resp_x")), "previous_response_id"),
        (with("metadata", json!({"a": 1})), "metadata"),
        (with("tools", json!([{"type": "web_search"}])), "tools[0].type"),
        (with("tools", json!([{"type": "function"}])), "tools[0].name"),
        (with("tools", schemaless), "tools[0].parameters.type"),
        (with("tool_choice", json!({"type": "mcp"})), "tool_choice.type"),
        (with("tool_choice", json!({"type": "function", "name": "g"})), "tool_choice"),
        (with("text", json!({"format": {"type": "xml"}})), "text.format.type"),
        (with("temperature", json!(-1)), "temperature"),
        (with("input", json!([{"role": "user", "content": 7}])), "input[0].content"),
    ] {
        let (status, error) = refused(&server, RESPONSES, &body.to_string()).await;
        let error = &error["error"];
        assert_eq!((status, error["param"].as_str()), (400, Some(param)), "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(param) || param == "previous_response_id", "{message}");
    }
    for path in ["/v1/responses/resp_x", "/v1/responses/resp_x/input_items"] {
        assert_eq!(server.get(path).await.status, 501, "{path}");
    }
    server.close().await;
}

/// Conversations go on from responses that are kept, whether they streamed or not.
#[actix_web::test]
async fn a_response_is_kept_until_it_is_deleted() {
    let folder = Scratch::new();
    let mut server = keeping(&folder, |_| {});
    let body = json!({"input": "a", "instructions": "once"});
    let first = play(&mut server, RESPONSES, &body, ended("b")).await.1.json();
    let input = json!([{"role": "user", "content": "c"}]);
    let next = json!({"input": input, "stream": true, "previous_response_id": first["id"]});
    let (request, streamed) = play(&mut server, RESPONSES, &next, ended("d")).await;
    // The instructions are those of one response.
    assert_eq!(request.prompt[..], ids("<s>user:a;assistant:b;user:c;assistant:"));
    let second = named_events(&streamed.body).pop().unwrap()["response"].clone();
    assert_eq!(second["previous_response_id"], first["id"]);
    let unkept =
        json!({"input": "e", "instructions": "be", "store": false, "previous_response_id": second["id"]});
    let (request, third) = play(&mut server, RESPONSES, &unkept, ended("f")).await;
    assert_eq!(
        request.prompt[..],
        ids("<s>system:be;user:a;assistant:b;user:c;assistant:d;user:e;assistant:")
    );

    let path = |response: &Value| format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    assert_eq!(server.get(&path(&first)).await.json(), first);
    assert_eq!(server.get(&path(&second)).await.json(), second);
    assert_eq!(server.get(&path(&third.json())).await.status, 404);
    let items = server.get(&format!("{}/input_items", path(&first))).await.json();
    assert_eq!(items["data"][0]["content"], json!([{"type": "input_text", "text": "a"}]));
    assert_eq!((&items["data"][0]["type"], &items["has_more"]), (&json!("message"), &json!(false)));
    assert_eq!(items["first_id"], items["data"][0]["id"]);

    let delete =
        async |path: &str| Client::send(server.address, "DELETE", path, "", "").await.response().await;
    let deleted = delete(&path(&first)).await.json();
    assert_eq!(deleted, json!({"id": first["id"], "object": "response", "deleted": true}));
    assert_eq!(delete(&path(&first)).await.status, 404);
    assert_eq!(server.get(&path(&first)).await.status, 404);
    assert_eq!(server.get(&path(&second)).await.status, 200);
    server.close().await;
    // It is still there after a restart.
    let server = keeping(&folder, |_| {});
    assert_eq!(server.get(&path(&second)).await.json(), second);
    server.close().await;
}

#[actix_web::test]
async fn pages_of_input_items_are_in_both_orders() {
    let folder = Scratch::new();
    let mut server = keeping(&folder, |_| {});
    let input: Vec<_> = ["a", "b", "c"].map(|id| json!({"role": "user", "content": id, "id": id})).into();
    let made = play(&mut server, RESPONSES, &json!({"input": input}), ended("x")).await.1.json();
    let path = format!("{RESPONSES}/{}/input_items", made["id"].as_str().unwrap());
    for (query, expected, has_more) in [
        ("", vec!["c", "b", "a"], false),
        ("?order=asc&limit=2", vec!["a", "b"], true),
        ("?order=asc&after=b", vec!["c"], false),
        ("?after=a", vec![], false),
    ] {
        let page = server.get(&format!("{path}{query}")).await.json();
        let ids: Vec<_> = page["data"].as_array().unwrap().iter().map(|item| item["id"].clone()).collect();
        assert_eq!((Value::from(ids), &page["has_more"]), (json!(expected), &json!(has_more)), "{query}");
    }
    for query in ["?after=z", "?limit=0", "?order=up"] {
        assert_eq!(server.get(&format!("{path}{query}")).await.status, 400, "{query}");
    }
    server.close().await;
}

/// Responses of another owner are answered like those that do not exist, and nothing is kept beyond the
/// quota.
#[actix_web::test]
async fn responses_belong_to_their_key() {
    let folder = Scratch::new();
    let mut server = keeping(&folder, |config| {
        config.api_keys = ApiKeys(vec!["one".into(), "two".into()]);
        config.batches.responses_quota_bytes = 2000;
    });
    let [mine, other] = ["one", "two"].map(|key| format!("Authorization: Bearer {key}\r\n"));
    let post = async |server: &mut TestServer, headers: &str, body: Value, text: &str| {
        let client = Client::send(server.address, "POST", RESPONSES, headers, &body.to_string()).await;
        let (_, sender) = server.next_request().await;
        ended(text).into_iter().for_each(|event| sender.send(event));
        client.response().await
    };
    let made = post(&mut server, &mine, json!({"input": "a"}), "b").await.json();
    let path = format!("{RESPONSES}/{}", made["id"].as_str().unwrap());
    for (method, path) in
        [("GET", path.clone()), ("DELETE", path.clone()), ("GET", format!("{path}/input_items"))]
    {
        let response = Client::send(server.address, method, &path, &other, "").await.response().await;
        assert_eq!((response.status, response.error().0.as_str()), (404, "not_found"), "{method} {path}");
    }
    let next = json!({"input": "c", "previous_response_id": made["id"]}).to_string();
    let refused = Client::send(server.address, "POST", RESPONSES, &other, &next).await.response().await;
    assert_eq!((refused.status, refused.error().0.as_str()), (400, "previous_response_not_found"));
    let address = server.address;
    let get = async |path: &str| Client::send(address, "GET", path, &mine, "").await.response().await.status;
    assert_eq!(get(&path).await, 200);

    let text = "x".repeat(3000);
    let refused = post(&mut server, &mine, json!({"input": "a"}), &text).await;
    assert_eq!((refused.status, refused.error().0.as_str()), (403, "quota_exceeded"));
    let streamed = post(&mut server, &mine, json!({"input": "a", "stream": true}), &text).await;
    assert_eq!(named_events(&streamed.body).pop().unwrap()["type"], "response.failed");
    // What cannot be kept whatever the answer is does not reach the engine.
    let long = json!({"input": text}).to_string();
    let refused = Client::send(server.address, "POST", RESPONSES, &mine, &long).await.response().await;
    assert_eq!((refused.status, refused.error().0.as_str()), (403, "quota_exceeded"));
    let unkept = post(&mut server, &mine, json!({"input": "a", "store": false}), &text).await;
    assert_eq!(unkept.status, 200);
    assert_eq!(get(&path).await, 200);
    let later = post(&mut server, &mine, json!({"input": "d"}), "e").await;
    assert_eq!((later.status, get(&path).await), (200, 404), "the oldest makes room");
    server.close().await;
}

/// A conversation grows with each turn, until it is longer than requests may be.
#[actix_web::test]
async fn a_conversation_that_is_too_long_names_what_it_goes_on_from() {
    let folder = Scratch::new();
    let mut server = keeping(&folder, |config| config.body_limit_bytes = 130);
    let body = json!({"input": "x".repeat(30)});
    let first = play(&mut server, RESPONSES, &body, ended("b")).await.1.json();
    let then = json!({"input": "y".repeat(30), "previous_response_id": first["id"]});
    let second = play(&mut server, RESPONSES, &then, ended("c")).await.1.json();
    assert_eq!(second["status"], "completed", "{second}");
    let last = json!({"input": "y".repeat(30), "previous_response_id": second["id"]}).to_string();
    let refused = Client::send(server.address, "POST", RESPONSES, "", &last).await.response().await;
    let (code, text) = (refused.error().0, refused.body.clone());
    assert_eq!((refused.status, code.as_str()), (413, "body_too_large"));
    assert!(text.contains("previous_response_id") && text.contains("260"), "{text}");
    server.close().await;
}

#[actix_web::test]
async fn responses_expire() {
    let folder = Scratch::new();
    let mut server = keeping(&folder, |config| config.batches.responses_retention = Duration::ZERO);
    let made = play(&mut server, RESPONSES, &json!({"input": "a"}), ended("b")).await.1.json();
    let path = format!("{RESPONSES}/{}", made["id"].as_str().unwrap());
    assert_eq!(server.get(&path).await.status, 404);
    let next = json!({"input": "c", "previous_response_id": made["id"]});
    assert_eq!(refused(&server, RESPONSES, &next.to_string()).await.0, 400);
    server.close().await;
}
