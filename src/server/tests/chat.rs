//! Tests of the chat API: rendering of messages, and responses as messages and as deltas.

use super::test_server::{
    Client, DEADLINE, Response, TestServer, answer, bare, model, scored, tokenizer, tokenizer_with,
};
use crate::actors::ModelInfo;
use crate::request::{FinishReason, TokenEvent};
use crate::text::output::OutputFormats;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

async fn begin(server: &TestServer, body: &Value) -> Client {
    Client::send(server.address, "POST", CHAT, "", &body.to_string()).await
}

async fn play(
    server: &mut TestServer,
    body: Value,
    events: Vec<TokenEvent>,
) -> (crate::request::Request, Response) {
    let client = begin(server, &body).await;
    let (request, sender) = server.next_request().await;
    events.into_iter().for_each(|event| sender.send(event));
    (request, client.response().await)
}

fn hello() -> Value {
    json!([{ "role": "system", "content": "be" }, { "role": "user", "content": "hi" }])
}

fn ids(text: &str) -> Vec<u32> {
    let bos = text.starts_with("<s>").then_some(256);
    bos.into_iter().chain(text.trim_start_matches("<s>").bytes().map(u32::from)).collect()
}

#[actix_web::test]
async fn a_whole_answer_is_a_message() {
    let mut server = TestServer::start();
    let (request, response) = play(&mut server, json!({ "messages": hello() }), answer("yo")).await;
    assert_eq!(request.prompt[..], ids("<s>system:be;user:hi;assistant:"));
    // The default limit is the rest of the context.
    assert_eq!(request.max_tokens as usize, 64 - request.prompt.len());
    let mut json = response.json();
    assert!(json["created"].take().is_u64());
    assert_eq!(
        json,
        json!({
            "id": format!("chatcmpl-{}", request.id), "object": "chat.completion", "created": null,
            "model": "tiny",
            "choices": [{
                "index": 0, "message": { "role": "assistant", "content": "yo", "refusal": null },
                "logprobs": null, "finish_reason": "length"
            }],
            "usage": {
                "prompt_tokens": 29, "completion_tokens": 2, "total_tokens": 31,
                "prompt_tokens_details": { "cached_tokens": 0 }
            }
        })
    );
    server.close().await;
}

#[actix_web::test]
async fn a_stream_opens_with_the_role_and_closes_with_the_reason() {
    let mut server = TestServer::start();
    let body = json!({
        "messages": hello(), "stream": true, "n": 2, "stream_options": { "include_usage": true },
        "return_token_ids": true, "max_completion_tokens": 5,
    });
    let client = begin(&server, &body).await;
    for text in ["ab", ""] {
        let (request, sender) = server.next_request().await;
        assert_eq!(request.max_tokens, 5);
        answer(text).into_iter().for_each(|event| sender.send(event));
    }
    let events = client.response().await.events();
    let of = |index: u64| -> Vec<Value> {
        let choices = events.iter().filter_map(|event| event["choices"].get(0).cloned());
        choices.filter(|choice| choice["index"] == index).collect()
    };
    let deltas = |index| of(index).into_iter().map(|choice| choice["delta"].clone()).collect::<Vec<_>>();
    let role = json!({ "role": "assistant", "content": "" });
    assert_eq!(deltas(0), [role.clone(), json!({ "content": "a" }), json!({ "content": "b" }), json!({})]);
    assert_eq!(deltas(1), [role, json!({})], "an empty answer opens and closes");
    for index in [0, 1] {
        let choices = of(index);
        let reasons: Vec<_> = choices.iter().map(|choice| choice["finish_reason"].clone()).collect();
        assert_eq!(reasons.iter().filter(|reason| !reason.is_null()).count(), 1);
        assert_eq!(reasons.last().unwrap(), "length");
        assert_eq!(choices[0]["prompt_token_ids"].as_array().unwrap().len(), 29);
        assert!(choices[1..].iter().all(|choice| choice.get("prompt_token_ids").is_none()));
    }
    let last = events.last().unwrap();
    let usage = json!({
        "prompt_tokens": 29, "completion_tokens": 2, "total_tokens": 31,
        "prompt_tokens_details": { "cached_tokens": 0 }
    });
    assert_eq!(last["usage"], usage);
    assert!(events.iter().all(|event| event["object"] == "chat.completion.chunk"));
    server.close().await;
}

#[actix_web::test]
async fn logprobs_are_listed_per_token() {
    let mut server = TestServer::start();
    let events = || {
        vec![
            TokenEvent::Token(scored(0xc3, -0.5, &[(0xc3, -0.5), (98, f32::NEG_INFINITY)])),
            TokenEvent::Token(scored(0xa9, -0.25, &[(97, -0.125), (0xa9, -0.25)])),
            TokenEvent::Finished(FinishReason::Stop),
        ]
    };
    let body =
        |stream: bool| json!({ "messages": hello(), "logprobs": true, "top_logprobs": 2, "stream": stream });
    let (request, response) = play(&mut server, body(false), events()).await;
    assert_eq!(request.logprobs, Some(2));
    let logprobs = response.json()["choices"][0]["logprobs"].clone();
    let one = |text: &str, p: f32, bytes: &[u8]| json!({ "token": text, "logprob": p, "bytes": bytes });
    let expected = json!([
        {
            "token": "\u{fffd}", "logprob": -0.5, "bytes": [0xc3],
            "top_logprobs": [one("\u{fffd}", -0.5, &[0xc3]), one("b", -9999.0, b"b")]
        },
        {
            "token": "\u{fffd}", "logprob": -0.25, "bytes": [0xa9],
            "top_logprobs": [one("a", -0.125, b"a"), one("\u{fffd}", -0.25, &[0xa9])]
        }
    ]);
    assert_eq!(logprobs["content"], expected);
    let (_, response) = play(&mut server, body(true), events()).await;
    let streamed: Vec<Value> = response
        .events()
        .iter()
        .filter_map(|event| event["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(json!(streamed), expected);
    server.close().await;
}

#[actix_web::test]
async fn messages_may_come_in_parts_and_as_clients_send_them_back() {
    let mut server = TestServer::start();
    let messages = json!([
        { "role": "user", "content": [{ "type": "text", "text": "one" }, { "type": "text", "text": "two" }] },
        { "role": "assistant", "content": null, "refusal": null, "tool_calls": [], "annotations": [] },
        { "role": "user", "content": "é", "name": "ada" },
    ]);
    let body = json!({
        "messages": messages, "tools": [], "tool_choice": "none", "response_format": { "type": "text" },
        "parallel_tool_calls": true, "metadata": { "a": "b" }, "store": false, "frequency_penalty": 0,
    });
    let (request, response) = play(&mut server, body, answer("x")).await;
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(request.prompt[..], ids("<s>user:one\ntwo;assistant:;user:é;assistant:"));
    let open = json!({
        "messages": [{ "role": "user", "content": "a" }, { "role": "assistant", "content": "Sure" }],
        "add_generation_prompt": false, "continue_final_message": true,
    });
    let (request, _) = play(&mut server, open, answer("x")).await;
    assert_eq!(request.prompt[..], ids("<s>user:a;assistant:Sure"));
    server.close().await;
}

#[actix_web::test]
async fn errors_in_messages_name_their_position() {
    let server = TestServer::start();
    let user = |content: Value| json!([{ "role": "user", "content": content }]);
    for (body, param, part) in [
        (json!({}), "messages", "missing"),
        (json!({ "messages": [] }), "messages", "empty"),
        (json!({ "messages": "hi" }), "messages", "a list"),
        (json!({ "messages": ["hi"] }), "messages[0]", "an object"),
        (json!({ "messages": [{ "content": "x" }] }), "messages[0].role", "missing"),
        (json!({ "messages": [{ "role": "user" }] }), "messages[0].content", "missing"),
        (json!({ "messages": user(json!(5)) }), "messages[0].content", "not 5"),
        (
            json!({ "messages": user(json!([{ "type": "image_url" }])) }),
            "messages[0].content[0].type",
            "image_url",
        ),
        (json!({ "messages": user(json!([{ "type": "text" }])) }), "messages[0].content[0].text", "missing"),
        (
            json!({ "messages": [{ "role": "user", "content": "x", "tool_calls": [1] }] }),
            "messages[0].tool_calls[0]",
            "an object",
        ),
        (json!({ "messages": [{ "role": "robot", "content": "x" }] }), "messages", "no robots"),
        (json!({ "messages": hello(), "tools": [1] }), "tools[0]", "an object"),
        (json!({ "messages": hello(), "tools": [tool()] }), "tools", "does not show tools"),
        (json!({ "messages": hello(), "tool_choice": "auto!" }), "tool_choice", "\"auto\""),
        (json!({ "messages": hello(), "top_logprobs": 2 }), "top_logprobs", "'logprobs'"),
        (json!({ "messages": hello(), "max_tokens": 0 }), "max_tokens", "at least 1"),
        (json!({ "messages": hello(), "response_format": "json" }), "response_format", "an object"),
        (json!({ "messages": hello(), "continue_final_message": true }), "continue_final_message", "false"),
    ] {
        let response = begin(&server, &body).await.response().await;
        let message = response.json()["error"]["message"].to_string();
        assert_eq!((response.status, response.error().1), (400, json!(param)), "{body}: {message}");
        assert!(message.replace("\\\"", "\"").contains(part), "{body}: {message}");
    }
    server.close().await;
}

/// A tool for requests.
fn tool() -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    json!({ "type": "function", "function": { "name": "weather", "parameters": parameters } })
}

/// Starts a server for a model that writes calls as Hermes does, and reasons in `<think>`.
fn server_with_tools() -> TestServer {
    let formats = OutputFormats::select(("hermes", "deepseek_r1"), None).unwrap();
    let model = ModelInfo { output_formats: formats, ..model() };
    TestServer::for_model(model, tokenizer(), None, |_| {}, DEADLINE)
}

const CALL: &str = "<think>Hm.</think>I look.\
                    <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}</tool_call>";

/// The output is divided into reasoning, content and calls, and a stream has the same parts as a whole
/// response.
#[actix_web::test]
async fn calls_and_reasoning_are_fields_of_their_own() {
    let mut server = server_with_tools();
    let mut events = answer(CALL);
    events.pop();
    events.push(TokenEvent::Finished(FinishReason::Stop));
    for (tools, include_reasoning) in [(json!([tool()]), true), (json!([tool()]), false), (Value::Null, true)]
    {
        let body = json!({ "messages": hello(), "tools": tools, "include_reasoning": include_reasoning });
        let whole = play(&mut server, body.clone(), events.clone()).await.1.json();
        let mut body = body;
        body["stream"] = json!(true);
        let (_, stream) = play(&mut server, body, events.clone()).await;
        let (mut content, mut reasoning, mut arguments) = (String::new(), String::new(), String::new());
        let (mut heads, mut reason) = (Vec::new(), Value::Null);
        for event in stream.events() {
            let choice = &event["choices"][0];
            let delta = &choice["delta"];
            content += delta["content"].as_str().unwrap_or_default();
            reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                assert_eq!(call["index"], 0);
                heads.extend(call["function"].get("name").cloned());
                arguments += call["function"]["arguments"].as_str().unwrap();
            }
            reason = choice["finish_reason"].clone();
        }
        let message = &whole["choices"][0]["message"];
        assert_eq!(whole["choices"][0]["finish_reason"], reason);
        assert_eq!(message["content"], content);
        let shown = message.get("reasoning_content").map_or("", |text| text.as_str().unwrap());
        assert_eq!((shown, &*reasoning), if include_reasoning { ("Hm.", "Hm.") } else { ("", "") });
        if tools.is_null() {
            assert_eq!((reason, message.get("tool_calls")), (json!("stop"), None));
            assert_eq!(content, &CALL["<think>Hm.</think>".len()..]);
        } else {
            assert_eq!((reason, content.as_str()), (json!("tool_calls"), "I look."));
            let function = &message["tool_calls"][0]["function"];
            assert_eq!((&function["name"], &function["arguments"]), (&heads[0], &json!(arguments)));
            assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({ "city": "Ulm" }));
            assert!(message["tool_calls"][0]["id"].as_str().unwrap().starts_with("call_"));
        }
    }
    server.close().await;
}

/// A marker of calls or of reasoning is shown to the parser that reads it, and to nobody else.
#[actix_web::test]
async fn markers_that_no_parser_reads_are_hidden() {
    let tokenizer = tokenizer_with(&["<s>", "<tool_call>", "<think>"], Value::Null);
    let formats = OutputFormats::select(("hermes", "none"), None).unwrap();
    let model = ModelInfo { output_formats: formats, vocab: 300, ..model() };
    let mut server = TestServer::for_model(model, tokenizer, None, |_| {}, DEADLINE);
    let events: Vec<TokenEvent> = [97, 257, 258, 98].map(|id| TokenEvent::Token(bare(id))).into();
    for (tools, content) in [(Value::Null, "ab"), (json!([tool()]), "a<tool_call>b")] {
        let mut events = events.clone();
        events.push(TokenEvent::Finished(FinishReason::Stop));
        let body = json!({ "messages": hello(), "tools": tools });
        let response = play(&mut server, body, events).await.1.json();
        assert_eq!(response["choices"][0]["message"]["content"], content, "{tools}");
        assert_eq!(response["choices"][0]["finish_reason"], "stop");
    }
    server.close().await;
}

/// A call that turns out to be malformed is not the reason for which an answer ended.
#[actix_web::test]
async fn a_malformed_call_is_no_reason_to_end() {
    let mut server = server_with_tools();
    let text = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": nothing";
    let mut events = answer(text);
    events.pop();
    events.push(TokenEvent::Finished(FinishReason::Stop));
    for stream in [false, true] {
        let body = json!({ "messages": hello(), "tools": [tool()], "stream": stream });
        let (_, response) = play(&mut server, body, events.clone()).await;
        let last = match stream {
            true => response.events().pop().unwrap(),
            false => response.json(),
        };
        assert_eq!(last["choices"][0]["finish_reason"], "stop", "{last}");
    }
    server.close().await;
}
