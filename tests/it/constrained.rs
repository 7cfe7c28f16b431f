//! Constrained output in the whole program: answers that end are in the form that was asked for, and do not
//! depend on what else runs.

use crate::common::{config, fixture};
use futures_util::future::join_all;
use mainstem::cli::start;
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde_json::{Value, json};
use std::path::Path;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// Starts the API of a model, with room for many requests at once.
async fn start(model: &Path, settings: &[(&'static str, toml::Value)]) -> LocalApi {
    let room = [("scheduler.slots", 32.into()), ("scheduler.max_waiting", 4096.into())];
    let config = config(model, &[&room, settings].concat());
    let engine = start::start_engine(&config).await.expect("the model starts");
    LocalApi::new(ServeParts::from(&engine), config.server)
}

async fn post(local: &LocalApi, path: &str, body: &Value) -> Value {
    let answer = local.post(path, body).await.unwrap_or_else(|error| panic!("{body}: {error}"));
    match answer {
        ResponseBody::Json(bytes) => serde_json::from_slice(&bytes).expect("it is JSON"),
        ResponseBody::Events(_) => panic!("no stream was asked for"),
    }
}

/// Returns the text and the finish reason of each choice.
fn choices(answer: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().expect("it is a text").to_owned();
    let choices = answer["choices"].as_array().expect("a list").iter();
    choices.map(|choice| (text(&choice["text"]), text(&choice["finish_reason"]))).collect()
}

/// Returns about 250 bounded schemas: those of the grammar's tests, and the same within arrays and objects.
fn schemas() -> Vec<Value> {
    let written = include_str!("../../src/grammar/tests/schemas.jsonl").lines();
    let written: Vec<Value> = written.map(|line| serde_json::from_str(line).expect("it is JSON")).collect();
    let whole = |schema: &&Value| {
        ["$ref", "$defs", "$schema", "definitions"].iter().all(|key| schema.get(key).is_none())
    };
    let is_alone = |schema: &&Value| whole(schema) && !schema.to_string().contains("\"$ref\"");
    let array = |schema: &Value| json!({ "type": "array", "items": schema, "minItems": 1, "maxItems": 2 });
    let object = |schema: &Value| {
        json!({ "type": "object", "properties": { "v": schema, "w": { "type": "boolean" } },
                "required": ["v"], "additionalProperties": false })
    };
    let arrays: Vec<Value> = written.iter().filter(is_alone).map(array).collect();
    let objects: Vec<Value> = written.iter().filter(is_alone).map(object).collect();
    [written, arrays, objects].concat()
}

/// Random weights write any text that the schema allows.
#[actix::test]
async fn answers_that_end_satisfy_their_schema() {
    let schemas = schemas();
    assert!(schemas.len() >= 200, "{}", schemas.len());
    let local = start(&fixture("mha"), &[]).await;
    let bodies: Vec<Value> = schemas
        .iter()
        .zip(1..)
        .map(|(schema, seed)| {
            json!({ "prompt": "a", "guided_json": schema, "n": 5, "seed": 9 * seed, "temperature": 1,
                "max_tokens": 100 })
        })
        .collect();
    let mut answers = Vec::new();
    // Fewer at once than may wait for their grammars to be compiled.
    for bodies in bodies.chunks(100) {
        answers.extend(join_all(bodies.iter().map(|body| post(&local, COMPLETIONS, body))).await);
    }
    let (mut ended, mut cut) = (0, 0);
    for (schema, answer) in schemas.iter().zip(&answers) {
        let validator = jsonschema::options().should_validate_formats(true).build(schema);
        let validator = validator.unwrap_or_else(|error| panic!("{schema}: {error}"));
        for (text, reason) in choices(answer) {
            if reason == "length" {
                cut += 1;
                continue;
            }
            assert_eq!(reason, "stop");
            ended += 1;
            let value = match serde_json::from_str(&text) {
                // A number may have any exponent unless the schema bounds it.
                Err(error) if error.to_string().contains("out of range") => continue,
                value => value.unwrap_or_else(|error| panic!("{schema}\n{text}\n{error}")),
            };
            if let Err(error) = validator.validate(&value) {
                panic!("{schema}\n{text}\n{error}");
            }
        }
    }
    println!("{} schemas, {ended} answers ended, {cut} were cut", schemas.len());
    assert!(ended >= 1000, "{ended} ended, {cut} were cut");
}

/// Bodies with every form, drawn on the device and on the host.
fn bodies() -> Vec<Value> {
    let schema = json!({ "type": "object", "properties": { "name": { "type": "string", "maxLength": 9 },
        "age": { "type": "integer", "minimum": 0, "maximum": 130 } }, "required": ["name", "age"],
        "additionalProperties": false });
    let wrapped = json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": schema } });
    let gbnf = "root ::= item (\", \" item){2}\nitem ::= [a-z] [a-z]? [0-9]";
    let forms = [
        ("response_format", wrapped),
        ("json_schema", schema),
        ("guided_regex", json!("[A-Z][a-z]{2,8} (Lane|Road) [1-9][0-9]?")),
        ("guided_choice", json!(["red", "green", "blue", "über"])),
        ("grammar", json!(gbnf)),
    ];
    let draws = [
        json!({ "temperature": 0 }),
        json!({ "temperature": 1, "seed": 4 }),
        json!({ "temperature": 1, "top_p": 0.9, "seed": 3, "logprobs": 2 }),
        json!({ "temperature": 0.9, "repetition_penalty": 1.3, "seed": 5 }),
        json!({ "mirostat": 2, "seed": 8, "min_tokens": 30 }),
    ];
    let body = |(form, draw): (&(&str, Value), &Value)| {
        let mut body = json!({ "prompt": "the ", "max_tokens": 80, form.0: form.1 });
        for (name, value) in draw.as_object().expect("an object") {
            body[name] = value.clone();
        }
        body
    };
    forms.iter().flat_map(|form| draws.iter().map(move |draw| (form, draw))).map(body).collect()
}

/// Tokens depend neither on other sequences nor on the partition, and each form is kept.
#[actix::test]
async fn an_answer_is_the_same_alone_in_company_and_on_two_devices() {
    let bodies = bodies();
    let divided = |groups: &str| vec![("device.groups", groups.into()), ("device.threads", 1.into())];
    // With run-ahead, no token is forced, and rows are registered before the token before them is known.
    let settings = [divided("0;1"), divided("0&1"), vec![("scheduler.run_ahead", "on".into())]];
    let local = start(&fixture("mha"), &[]).await;
    let mut alone = Vec::new();
    for body in &bodies {
        alone.push(post(&local, COMPLETIONS, body).await["choices"].take());
    }
    let mut engines = vec![local];
    for settings in &settings {
        engines.push(start(&fixture("mha"), settings).await);
    }
    for local in &engines {
        let together = join_all(bodies.iter().map(|body| post(local, COMPLETIONS, body))).await;
        for ((body, alone), together) in bodies.iter().zip(&alone).zip(together) {
            // Sums over ranks have another order, which only log-probabilities show.
            let (alone, together) = (&alone[0], &together["choices"][0]);
            assert_eq!(together["text"], alone["text"], "{body}");
            assert_eq!(together["finish_reason"], alone["finish_reason"], "{body}");
        }
    }
    for (body, answer) in bodies.iter().zip(&alone) {
        let text = answer[0]["text"].as_str().expect("it is a text");
        assert_eq!(answer[0]["finish_reason"], "stop", "{body} {text}");
        let is_kept = match body {
            _ if body.get("guided_regex").is_some() => text.contains(" Lane ") || text.contains(" Road "),
            _ if body.get("guided_choice").is_some() => ["red", "green", "blue", "über"].contains(&text),
            _ if body.get("grammar").is_some() => text.split(", ").count() == 3,
            _ => serde_json::from_str::<Value>(text).is_ok_and(|value| value["age"].is_u64()),
        };
        assert!(is_kept, "{body} {text}");
    }
}

/// The built-in model calls a function if it must, and takes its result.
#[actix::test]
async fn the_built_in_model_calls_a_function() {
    let local = start(Path::new(""), &[]).await;
    let parameters = json!({ "type": "object", "properties": { "city": { "enum": ["Rome", "Oslo"] } },
                             "required": ["city"], "additionalProperties": false });
    let tools = json!([{ "type": "function", "function": { "name": "weather", "parameters": parameters } }]);
    let user = json!({ "role": "user", "content": "What is the weather in Rome?" });
    let body = json!({ "messages": [user], "tools": tools, "tool_choice": "required", "n": 2,
                       "parallel_tool_calls": false });
    let answer = post(&local, CHAT, &body).await;
    for choice in answer["choices"].as_array().expect("a list") {
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let function = &choice["message"]["tool_calls"][0]["function"];
        let arguments = function["arguments"].as_str().expect("it is a text");
        let arguments: Value = serde_json::from_str(arguments).expect("it is JSON");
        assert!(function["name"] == "weather" && arguments["city"].is_string(), "{answer}");
    }
    let call = &answer["choices"][0]["message"];
    let result = json!({ "role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "sunny" });
    let body = json!({ "messages": [user, call, result], "tools": tools, "max_tokens": 8 });
    assert_eq!(post(&local, CHAT, &body).await["choices"][0]["message"]["role"], "assistant");
}
