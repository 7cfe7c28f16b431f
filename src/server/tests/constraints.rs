//! Tests of constrained output with a fake intake: parameters, errors, and what reaches the engine.

use super::test_server::{
    COMPLETIONS, Client, DEADLINE, Response, TestServer, answer, bare, model, tokenizer_with,
};
use crate::actors::ModelInfo;
use crate::config::ServerConfig;
use crate::decoding::Constraint;
use crate::request::{FinishReason, RequestError, TokenEvent};
use crate::text::output::OutputFormats;
use mainstem_grammar::ConstraintStart;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const EOS: u32 = 257;

/// Starts a server for a model with a token per byte and an end token.
fn server() -> TestServer {
    server_with(|_| {})
}

fn server_with(configure: impl FnOnce(&mut ServerConfig)) -> TestServer {
    let model = ModelInfo { eos: vec![EOS], vocab: 258, ..model() };
    TestServer::for_model(model, tokenizer_with(&["<s>", "</s>"], Value::Null), None, configure, DEADLINE)
}

/// Adds the prompt of an endpoint to a body.
fn with_prompt(path: &str, mut body: Value) -> String {
    match path {
        CHAT => body["messages"] = json!([{ "role": "user", "content": "p" }]),
        _ => body["prompt"] = json!("p"),
    }
    body.to_string()
}

async fn send(server: &TestServer, path: &str, body: &Value) -> Client {
    Client::send(server.address, "POST", path, "", &with_prompt(path, body.clone())).await
}

/// Returns whether an answer may be this text.
fn allows(constraint: &Constraint, text: &str) -> bool {
    let mut matcher = constraint.grammar.matcher();
    text.bytes().all(|byte| matcher.accept(byte.into()).is_ok()) && matcher.accept(EOS).is_ok()
}

fn message(response: &Response) -> String {
    response.json()["error"]["message"].as_str().unwrap().to_owned()
}

fn schema() -> Value {
    json!({ "type": "object", "properties": { "b": { "type": "boolean" }, "a": { "const": 1 } },
            "required": ["b", "a"], "additionalProperties": false })
}

/// Every form of OpenAI, vLLM and llama.cpp reaches the engine, in both APIs.
#[actix_web::test]
async fn each_form_becomes_a_constraint() {
    let mut server = server();
    let gbnf = "root ::= (\"yes\" | \"no\") \"!\"";
    let wrapped = json!({ "name": "n", "strict": true, "description": "d", "schema": schema() });
    let json = r#"{"b":true,"a":1}"#;
    let spaced = r#"{ "b": true, "a": 1 }"#;
    for (body, allowed, refused) in [
        (json!({ "response_format": { "type": "json_object" } }), r#"{"x":[1]}"#, "[1]"),
        (json!({ "response_format": { "type": "json_object", "schema": schema() } }), json, "{}"),
        (json!({ "response_format": { "type": "json_schema", "json_schema": wrapped } }), json, "{}"),
        (json!({ "structured_outputs": { "json": schema() } }), json, spaced),
        (json!({ "structured_outputs": { "json": schema().to_string() } }), json, "{}"),
        (
            json!({ "structured_outputs": { "json": schema(), "disable_any_whitespace": false } }),
            spaced,
            "{}",
        ),
        (json!({ "structured_outputs": { "json_object": true, "regex": null } }), "{}", "1"),
        (json!({ "structured_outputs": { "regex": "a{2,3}" } }), "aaa", "a"),
        (json!({ "structured_outputs": { "choice": ["red", "green"] } }), "green", "gree"),
        (json!({ "structured_outputs": { "grammar": gbnf } }), "yes!", "yes"),
        (json!({ "guided_json": schema(), "guided_decoding_backend": "xgrammar" }), json, "{}"),
        (json!({ "guided_json": schema().to_string() }), json, "{}"),
        (json!({ "guided_regex": "[0-9]" }), "7", "77"),
        (json!({ "guided_choice": ["é", "x"] }), "é", "e"),
        (json!({ "guided_grammar": "start: \"a\" | \"b\"" }), "b", "c"),
        (json!({ "json_schema": schema(), "grammar": "" }), json, "{}"),
        (json!({ "grammar": gbnf, "response_format": { "type": "text" } }), "no!", "!"),
    ] {
        for path in [COMPLETIONS, CHAT] {
            let client = send(&server, path, &body).await;
            let (request, events) = server.next_request().await;
            let constraint = request.constraint.expect("there is a constraint");
            assert_eq!(constraint.start, ConstraintStart::Immediately);
            assert!(allows(&constraint, allowed) && !allows(&constraint, refused), "{body}");
            answer("x").into_iter().for_each(|event| events.send(event));
            let response = client.response().await;
            assert_eq!((response.status, response.header("x-mainstem-ignored")), (200, None), "{body}");
        }
    }
    let client = send(&server, COMPLETIONS, &json!({ "response_format": { "type": "text" } })).await;
    let (request, events) = server.next_request().await;
    assert!(request.constraint.is_none());
    answer("x").into_iter().for_each(|event| events.send(event));
    assert_eq!(client.response().await.status, 200);
    server.close().await;
}

/// All choices of a request share one grammar, which the next request finds in the cache.
#[actix_web::test]
async fn a_grammar_is_compiled_once() {
    let mut server = server();
    let mut grammars = Vec::new();
    for _ in 0..2 {
        let client = server.send(r#"{"prompt": ["p", "q"], "n": 2, "guided_regex": "a+"}"#).await;
        for _ in 0..4 {
            let (request, events) = server.next_request().await;
            grammars.push(request.constraint.expect("there is a constraint").grammar.clone());
            answer("a").into_iter().for_each(|event| events.send(event));
        }
        assert_eq!(client.response().await.status, 200);
    }
    assert!(grammars.iter().all(|grammar| Arc::ptr_eq(grammar, &grammars[0])));
    server.close().await;
}

/// A request does not wait for its grammar beyond its time limit, here for a compilation that never begins.
#[actix_web::test]
async fn waiting_for_a_grammar_counts_towards_the_time_limit() {
    let mut server = server_with(|config| {
        config.grammar.threads = 0;
        config.request_timeout = Some(Duration::from_millis(1));
    });
    for stream in [false, true] {
        let body = json!({ "guided_regex": "a", "stream": stream });
        let response = send(&server, COMPLETIONS, &body).await.response().await;
        assert_eq!(
            (response.status, response.error().0.as_str()),
            (504, "request_timeout"),
            "{}",
            response.body
        );
    }
    assert!(server.calls.try_recv().is_err(), "nothing was submitted");
    server.close().await;
}

/// Another stream goes on while a grammar is compiled, which takes many times as long as a token's way.
#[actix_web::test]
async fn a_hostile_schema_does_not_hold_up_a_stream() {
    let mut server = server();
    let mut stream = server.send(r#"{"prompt": "p", "stream": true}"#).await;
    let (_, events) = server.next_request().await;
    let link = |at: usize| {
        let next = json!({ "$ref": format!("#/$defs/a{}", at + 1) });
        let nested = (0..40).fold(next, |schema, at| match at % 2 {
            0 => json!({ "items": schema }),
            _ => json!({ "properties": { "p": schema } }),
        });
        (format!("a{at}"), nested)
    };
    let mut links: serde_json::Map<_, _> = (0..40).map(link).collect();
    links.insert("a40".to_owned(), json!({ "type": "null" }));
    let schema = json!({ "$ref": "#/$defs/a0", "$defs": links });
    let mut hostile = send(&server, COMPLETIONS, &json!({ "guided_json": schema })).await;
    let mut tokens = 0u32;
    let (request, hostile_events) = loop {
        if let Ok(submitted) = server.calls.try_recv() {
            break submitted;
        }
        assert!(!hostile.has_more(), "{}", String::from_utf8_lossy(&hostile.read));
        tokens += 1;
        let letter = b'a' + (tokens % 26) as u8;
        events.send(TokenEvent::Token(bare(letter.into())));
        let text = format!("\"text\":\"{}\"", char::from(letter));
        stream.read.clear();
        stream.read_until(&text).await;
    };
    assert!(tokens >= 5, "{tokens} tokens came before the schema was compiled");
    assert!(request.constraint.is_some());
    hostile_events.send(TokenEvent::Finished(FinishReason::Stop));
    assert_eq!(hostile.response().await.status, 200);
    events.send(TokenEvent::Finished(FinishReason::Stop));
    stream.read_until("[DONE]").await;
    server.close().await;
}

#[actix_web::test]
async fn refusals_name_the_parameter_and_the_part() {
    let server = server();
    let format = |schema: Value| {
        let wrapped = json!({ "name": "n", "schema": schema });
        json!({ "response_format": { "type": "json_schema", "json_schema": wrapped } })
    };
    let pattern = json!({ "properties": { "a": { "type": "string", "pattern": "(" } } });
    let outputs = |value: Value| json!({ "structured_outputs": value });
    let regex = |name: &str, value: Value| json!({ "guided_regex": "a", name: value });
    let gbnf = "root ::= \"a\"";
    for (body, param, part) in [
        (format(pattern), "response_format.json_schema.schema", ".schema: $.properties.a.pattern: "),
        (format(Value::Null), "response_format.json_schema.schema", "missing"),
        (format(json!([])), "response_format.json_schema.schema", "not a list"),
        (json!({ "response_format": { "type": "json_schema" } }), "response_format.json_schema", "missing"),
        (json!({ "response_format": { "type": "xml" } }), "response_format.type", "\"xml\", which is not"),
        (json!({ "response_format": {} }), "response_format.type", "missing"),
        (outputs(json!({})), "structured_outputs", "one of json, regex"),
        (outputs(json!({ "json": 1 })), "structured_outputs.json", "an object, or its JSON text"),
        (outputs(json!({ "json": "{" })), "structured_outputs.json", "$: "),
        (
            outputs(json!({ "json": {}, "regex": "a" })),
            "structured_outputs.regex",
            "'structured_outputs.json'",
        ),
        (outputs(json!({ "choice": [] })), "structured_outputs.choice", "structured_outputs.choice: "),
        (outputs(json!({ "choice": ["a", 1] })), "structured_outputs.choice", "a list of strings"),
        (
            outputs(json!({ "json": {}, "whitespace_pattern": " " })),
            "structured_outputs.whitespace_pattern",
            "not supported",
        ),
        (json!({ "guided_whitespace_pattern": "" }), "guided_whitespace_pattern", "not supported"),
        (json!({ "guided_regex": "(" }), "guided_regex", "guided_regex: "),
        (json!({ "grammar": "root ::= x" }), "grammar", "grammar: "),
        (json!({ "guided_choice": ["a"], "guided_regex": "a" }), "guided_choice", "'guided_regex'"),
        (
            json!({ "response_format": { "type": "json_object" }, "grammar": gbnf }),
            "grammar",
            "'response_format'",
        ),
        (regex("stop", json!("x")), "stop", "'guided_regex'"),
        (regex("stop", json!([7])), "stop", "'guided_regex'"),
        (regex("stop_token_ids", json!([7])), "stop_token_ids", "'guided_regex'"),
        (regex("ignore_eos", json!(true)), "ignore_eos", "'guided_regex'"),
    ] {
        for path in [COMPLETIONS, CHAT] {
            let response = send(&server, path, &body).await.response().await;
            let message = message(&response);
            assert_eq!((response.status, response.error().1), (400, json!(param)), "{body}: {message}");
            assert!(message.contains(part), "{body}: {message}");
        }
    }
    server.close().await;
}

/// Specifications made to take long are refused without asking the engine; what is too deep for the parser
/// of bodies says so.
#[actix_web::test]
async fn hostile_specifications_are_refused() {
    let server = server();
    let deep = format!("{}{}", "[".repeat(10_000), "]".repeat(10_000));
    let object = format!(r#"{{"prompt": "p", "json_schema": {{"const": {deep}}}}}"#);
    let option = |at: usize| json!({ "properties": { format!("k{at}"): { "type": "string" } } });
    let any_of = json!({ "anyOf": (0..100).map(option).collect::<Vec<_>>() });
    let body = |members: Value| with_prompt(COMPLETIONS, members);
    let gbnf = format!("root ::= {}\"a\"", "\"a\" | ".repeat(150_000));
    for (name, body, part) in [
        ("a deep body", object, "nested too deep"),
        ("a deep text", body(json!({ "guided_json": format!("{{\"const\":{deep}}}") })), "guided_json: $: "),
        ("1 MB regex", body(json!({ "guided_regex": "(a|b)?".repeat(170_000) })), "guided_regex: "),
        ("1 MB schema", body(json!({ "guided_json": { "enum": vec!["x"; 250_000] } })), "guided_json: "),
        ("2 MB schema", body(json!({ "guided_json": { "title": "x".repeat(2 << 20) } })), "guided_json: "),
        ("1 MB GBNF", body(json!({ "grammar": gbnf })), "grammar: "),
        ("exponential", body(json!({ "guided_json": { "allOf": vec![any_of; 5] } })), "guided_json: "),
    ] {
        let response = server.post(&body).await;
        assert_eq!(response.status, 400, "{name}: {}", response.body.chars().take(500).collect::<String>());
        let message = message(&response);
        assert!(message.contains(part) && message.len() < 500, "{name}: {message}");
    }
    server.close().await;
}

#[actix_web::test]
async fn models_without_an_end_token_have_no_constrained_output() {
    let server = TestServer::start();
    let response = server.post(r#"{"prompt": "p", "guided_regex": "a"}"#).await;
    let error = ("unsupported_parameter".to_owned(), json!("guided_regex"));
    assert_eq!((response.status, response.error()), (400, error));
    assert!(message(&response).contains("it has no end token"), "{}", response.body);
    server.close().await;
}

/// An answer that cannot go on is an error that says why.
#[actix_web::test]
async fn a_stuck_answer_says_why() {
    let mut server = server();
    let why = "the answer cannot be continued under its grammar: too complex";
    let events = vec![TokenEvent::Failed(RequestError::SamplingFailed(why.to_owned()))];
    let (_, response) = server.exchange(json!({ "prompt": "p", "guided_regex": "a" }), events).await;
    assert_eq!((response.status, response.error().0.as_str()), (500, "sampling_failed"));
    assert!(message(&response).contains(why), "{}", response.body);
    server.close().await;
}

/// A tool that answers about the weather of a city, and one without parameters.
fn tools() -> Value {
    let city = json!({ "type": "object", "properties": { "city": { "enum": ["Ulm", "Rom"] } },
                       "required": ["city"], "additionalProperties": false });
    let weather = json!({ "name": "weather", "parameters": city });
    let tool = |function: Value| json!({ "type": "function", "function": function });
    json!([tool(weather), tool(json!({ "name": "stop" }))])
}

/// Starts a server for a model that writes calls as Hermes does.
fn server_with_tools() -> TestServer {
    let output_formats = OutputFormats::select(("hermes", "deepseek_r1"), None).unwrap();
    let model = ModelInfo { eos: vec![EOS], vocab: 258, output_formats, ..model() };
    TestServer::for_model(model, tokenizer_with(&["<s>", "</s>"], Value::Null), None, |_| {}, DEADLINE)
}

const WEATHER: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\":\"Ulm\"}}\n</tool_call>";
const STOP: &str = "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";

/// Calls that are required are a constraint, and the answer has them whole and streamed. The reason for which
/// it ended is that of OpenAI and vLLM.
#[actix_web::test]
async fn required_calls_are_a_constraint() {
    let mut server = server_with_tools();
    let named = json!({ "type": "function", "function": { "name": "weather" } });
    for (choice, reason) in [(json!("required"), "tool_calls"), (named.clone(), "stop")] {
        for stream in [false, true] {
            let body = json!({ "tools": tools(), "tool_choice": choice, "stream": stream, "n": 2 });
            let client = send(&server, CHAT, &body).await;
            for _ in 0..2 {
                let (request, events) = server.next_request().await;
                let constraint = request.constraint.expect("there is a constraint");
                assert!(allows(&constraint, WEATHER) && !allows(&constraint, "Hello"));
                assert_eq!(allows(&constraint, STOP), choice != named);
                assert!(!allows(&constraint, &WEATHER.replace("Ulm", "Bonn")));
                WEATHER.bytes().for_each(|byte| events.send(TokenEvent::Token(bare(byte.into()))));
                events.send(TokenEvent::Finished(FinishReason::Stop));
            }
            let response = client.response().await;
            for index in 0..2 {
                let (calls, end) = calls_of(&response, stream, index);
                assert_eq!((calls.as_str(), end), ("weather {\"city\":\"Ulm\"}", json!(reason)), "{choice}");
            }
        }
    }
    server.close().await;
}

/// Returns the calls of a choice, each as name and arguments, and its finish reason.
fn calls_of(response: &Response, stream: bool, index: u64) -> (String, Value) {
    let chunks = if stream { response.events() } else { vec![response.json()] };
    let (mut calls, mut end) = (String::new(), Value::Null);
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    for choice in choices.filter(|choice| choice["index"] == index) {
        let message = &choice[if stream { "delta" } else { "message" }];
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            if let Some(name) = call["function"]["name"].as_str() {
                calls += &format!("{name} ");
            }
            calls += call["function"]["arguments"].as_str().unwrap();
        }
        end = choice["finish_reason"].clone();
    }
    (calls, end)
}

/// Beside tools that the model may call, the answer is one call or of the form.
#[actix_web::test]
async fn a_form_beside_tools_allows_both() {
    let mut server = server_with_tools();
    for (text, stream) in [(WEATHER, false), (WEATHER, true), ("{\"a\":1}", false), ("{\"a\":1}", true)] {
        let body =
            json!({ "tools": tools(), "response_format": { "type": "json_object" }, "stream": stream });
        let client = send(&server, CHAT, &body).await;
        let (request, events) = server.next_request().await;
        let constraint = request.constraint.expect("there is a constraint");
        for (text, is_allowed) in
            [(WEATHER, true), (STOP, true), ("{\"a\":1}", true), ("Hello", false), ("<tool_call>", false)]
        {
            assert_eq!(allows(&constraint, text), is_allowed, "{text}");
        }
        text.bytes().for_each(|byte| events.send(TokenEvent::Token(bare(byte.into()))));
        events.send(TokenEvent::Finished(FinishReason::Stop));
        let response = client.response().await;
        let (calls, end) = calls_of(&response, stream, 0);
        let expected =
            if text == WEATHER { ("weather {\"city\":\"Ulm\"}", "tool_calls") } else { ("", "stop") };
        assert_eq!((calls.as_str(), end), (expected.0, json!(expected.1)));
        assert_eq!(response.body.contains("content\":\"{"), text != WEATHER, "{}", response.body);
    }
    // A regular expression could begin as a call does, whose marker is no token here.
    let body = json!({ "tools": tools(), "guided_regex": "<a>" });
    let response = send(&server, CHAT, &body).await.response().await;
    assert_eq!((response.status, response.error().1), (400, json!("guided_regex")), "{}", response.body);
    server.close().await;
}

#[actix_web::test]
async fn tools_and_other_constraints_do_not_mix() {
    let mut server = server_with_tools();
    let body = |tool_choice: &str, name: &str, value: Value| {
        let mut body = json!({ "tools": tools(), "tool_choice": tool_choice });
        body[name] = value;
        body
    };
    let format = json!({ "type": "json_object" });
    let mut bad = tools();
    bad[0]["function"]["parameters"]["properties"]["city"] = json!({ "type": "string", "pattern": "(" });
    for (body, param, part) in [
        (body("required", "response_format", format.clone()), "response_format", "'tool_choice'"),
        (body("required", "stop", json!("}")), "stop", "'tool_choice'"),
        (body("required", "ignore_eos", json!(true)), "ignore_eos", "'tool_choice'"),
        (
            json!({ "tools": bad, "tool_choice": "required" }),
            "tools",
            "tools[0].function.parameters.properties.city.pattern: ",
        ),
    ] {
        let response = send(&server, CHAT, &body).await.response().await;
        let message = message(&response);
        assert_eq!((response.status, response.error().1), (400, json!(param)), "{body}: {message}");
        assert!(message.contains(part), "{body}: {message}");
    }
    // Without tools that the model may call, the constraint is that of the answer, and calls are not read.
    let client = send(&server, CHAT, &body("none", "response_format", format)).await;
    let (request, events) = server.next_request().await;
    assert!(allows(&request.constraint.expect("there is a constraint"), "{}"));
    answer("{}").into_iter().for_each(|event| events.send(event));
    assert_eq!(client.response().await.json()["choices"][0]["message"]["content"], "{}");
    server.close().await;
}

/// The answer of a model that reasons is constrained behind its reasoning.
#[actix_web::test]
async fn reasoning_is_not_constrained() {
    let mut server = server_with_tools();
    let message = json!({ "role": "assistant", "content": "<think>" });
    let body = json!({ "messages": [message], "add_generation_prompt": false, "continue_final_message": true,
                       "response_format": { "type": "json_object" } });
    let client = Client::send(server.address, "POST", CHAT, "", &body.to_string()).await;
    let (request, events) = server.next_request().await;
    assert_eq!(request.constraint.unwrap().start, ConstraintStart::After { marker: "</think>".into() });
    answer("Hm.</think>{\"a\":1}").into_iter().for_each(|event| events.send(event));
    let answer = client.response().await.json()["choices"][0]["message"].take();
    assert_eq!((&answer["reasoning_content"], &answer["content"]), (&json!("Hm."), &json!("{\"a\":1}")));
    server.close().await;
}
