//! Tests of Ollama's API: requests, whole and streamed answers, embeddings, and what describes the model.

use super::encoder_server::{begin, encoder_server, play, post};
use super::test_server::{DEADLINE, Response, TestServer, answer, model, scored, tokenizer};
use crate::actors::ModelInfo;
use crate::config::ApiKeys;
use crate::request::{FinishReason, Request, RequestError, TokenEvent};
use crate::text::output::OutputFormats;
use serde_json::{Value, json};

async fn ask(
    server: &mut TestServer,
    path: &str,
    body: Value,
    events: Vec<TokenEvent>,
) -> (Request, Response) {
    let client = begin(server, path, &body).await;
    let (request, sender) = server.next_request().await;
    events.into_iter().for_each(|event| sender.send(event));
    (request, client.response().await)
}

fn text_of(request: &Request) -> String {
    let bytes = request.prompt.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
    String::from_utf8(bytes).unwrap()
}

/// The objects of a stream, a line each.
fn objects(response: &Response) -> Vec<Value> {
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/x-ndjson")));
    let lines = response.body.strip_suffix('\n').unwrap().split('\n');
    lines.map(|json| serde_json::from_str(json).unwrap()).collect()
}

/// Removes and checks what is different each time: the time, and durations.
fn without_times(mut object: Value) -> Value {
    let fields = object.as_object_mut().unwrap();
    let created = fields.shift_remove("created_at").unwrap();
    assert!(created.as_str().unwrap().parse::<jiff::Timestamp>().is_ok(), "{created}");
    let durations = ["total_duration", "load_duration", "prompt_eval_duration", "eval_duration"];
    let times: Vec<_> = durations.iter().filter_map(|name| fields.shift_remove(*name)?.as_u64()).collect();
    if let [total, load, prompt, eval] = times[..] {
        assert!(total > 0 && load == 0 && prompt > 0 && total >= prompt + eval, "{times:?}");
    }
    object
}

fn hello() -> Value {
    json!([{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}])
}

#[actix_web::test]
async fn a_chat_is_a_stream_of_lines_unless_it_says_otherwise() {
    let mut server = TestServer::start();
    let options = json!({
        "num_predict": 5, "temperature": 0.5, "seed": 9, "top_k": 4, "top_p": 0.25, "stop": [],
        "num_ctx": 4096,
        "num_gpu": 1, "num_thread": 8, "use_mmap": true, "mood": "good",
    });
    let body = |stream: Value| {
        json!({
            "model": "tiny:latest", "messages": hello(), "options": options, "keep_alive": "5m",
            "stream": stream,
            "tools": [], "format": "",
        })
    };
    let (request, whole) = ask(&mut server, "/api/chat", body(json!(false)), answer("yo")).await;
    assert_eq!(text_of(&request), "system:be;user:hi;assistant:");
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.seed, sampling.top_k, sampling.top_p), (0.5, 9, 4, 0.25));
    assert_eq!((request.max_tokens, whole.header("x-mainstem-ignored")), (5, Some("options.mood")));
    let end = json!({"done": true, "done_reason": "length", "prompt_eval_count": 29, "eval_count": 2});
    let mut expected = json!({"model": "tiny", "message": {"role": "assistant", "content": "yo"}});
    expected.as_object_mut().unwrap().extend(end.as_object().unwrap().clone());
    assert_eq!(without_times(whole.json()), expected);

    let (_, stream) = ask(&mut server, "/api/chat", body(Value::Null), answer("yo")).await;
    let parts: Vec<_> = objects(&stream).into_iter().map(without_times).collect();
    let message = |text: &str| json!({"role": "assistant", "content": text});
    let part = |text: &str| json!({"model": "tiny", "message": message(text), "done": false});
    expected["message"]["content"] = json!("");
    assert_eq!(parts, [part("y"), part("o"), expected]);
    server.close().await;
}

#[actix_web::test]
async fn a_prompt_is_a_message_unless_it_is_raw() {
    let mut server = TestServer::start();
    let body = |more: Value| {
        let mut body = json!({"prompt": "hi", "stream": false});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (more, prompt) in [
        (json!({"system": "be"}), "system:be;user:hi;assistant:"),
        (json!({}), "user:hi;assistant:"),
        (json!({"raw": true}), "hi"),
    ] {
        let (request, response) = ask(&mut server, "/api/generate", body(more), answer("yo")).await;
        assert_eq!(text_of(&request), prompt);
        assert_eq!(request.max_tokens as usize, 64 - request.prompt.len(), "the rest of the context");
        let answered = without_times(response.json());
        assert_eq!(
            (&answered["response"], &answered["done"], &answered["eval_count"]),
            (&json!("yo"), &json!(true), &json!(2))
        );
        assert_eq!(answered.get("message"), None);
    }
    let (_, stream) =
        ask(&mut server, "/api/generate", json!({"prompt": "hi", "raw": true}), answer("é")).await;
    let texts: Vec<_> = objects(&stream).iter().map(|object| object["response"].clone()).collect();
    assert_eq!(texts, ["é", ""]);
    let events = || {
        vec![TokenEvent::Token(scored(97, -0.5, &[(98, -0.25)])), TokenEvent::Finished(FinishReason::Stop)]
    };
    for raw in [false, true] {
        let more = json!({"raw": raw, "logprobs": true, "top_logprobs": 1});
        let (_, response) = ask(&mut server, "/api/generate", body(more), events()).await;
        let entry = &response.json()["logprobs"][0];
        assert_eq!(
            (&entry["token"], &entry["logprob"], &entry["bytes"]),
            (&json!("a"), &json!(-0.5), &json!([97]))
        );
        assert_eq!(
            (&entry["top_logprobs"][0]["token"], &entry["top_logprobs"][0]["logprob"]),
            (&json!("b"), &json!(-0.25))
        );
    }
    // A request without a prompt loads the model, which is there.
    for (path, body) in
        [("/api/generate", json!({})), ("/api/chat", json!({"messages": []})), ("/api/chat", json!({}))]
    {
        let loaded = post(&server, path, &body).await.json();
        assert_eq!(
            (&loaded["done"], &loaded["done_reason"]),
            (&json!(true), &json!("load")),
            "{path} {body}"
        );
    }
    server.close().await;
}

/// A model without a chat template gets the prompt as it is.
#[actix_web::test]
async fn a_model_without_a_template_continues_the_prompt() {
    let bare = ModelInfo { chat_template: None, ..model() };
    let mut server = TestServer::for_model(bare, tokenizer(), None, |_| {}, DEADLINE);
    let (request, _) = ask(&mut server, "/api/generate", json!({"prompt": "once"}), answer("x")).await;
    assert_eq!(text_of(&request), "once");
    let refused = post(&server, "/api/generate", &json!({"prompt": "once", "system": "be"})).await;
    assert!(refused.status == 400 && refused.json()["error"].as_str().unwrap().contains("'system'"));
    let refused = post(&server, "/api/chat", &json!({"messages": hello()})).await;
    assert!(refused.status == 400 && refused.json()["error"].as_str().unwrap().contains("chat template"));
    server.close().await;
}

#[actix_web::test]
async fn thinking_and_calls_are_fields_of_their_own() {
    let formats = OutputFormats::select(("hermes", "deepseek_r1"), None).unwrap();
    let model = ModelInfo { output_formats: formats, ..model() };
    let mut server = TestServer::for_model(model, tokenizer(), None, |_| {}, DEADLINE);
    let text = "<think>Hm.</think>I look.\
                <tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Ulm\"}}</tool_call>";
    let mut events = answer(text);
    events.pop();
    events.push(TokenEvent::Finished(FinishReason::Stop));
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": parameters}});
    let messages = json!([
        {"role": "user", "content": "?", "images": []},
        {"role": "assistant", "content": "", "thinking": "T",
         "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}]},
        {"role": "tool", "content": "sun", "tool_name": "weather"},
    ]);
    let body = |stream: bool| json!({"messages": messages, "tools": [tool], "think": true, "stream": stream});
    let (_, whole) = ask(&mut server, "/api/chat", body(false), events.clone()).await;
    let calls = json!([{"function": {"name": "weather", "arguments": {"city": "Ulm"}}}]);
    let expected = json!({"role": "assistant", "content": "I look.", "thinking": "Hm.", "tool_calls": calls});
    let whole = without_times(whole.json());
    assert_eq!((&whole["message"], &whole["done_reason"]), (&expected, &json!("stop")));
    let (_, stream) = ask(&mut server, "/api/chat", body(true), events).await;
    let (mut content, mut thinking, mut called) = (String::new(), String::new(), Vec::new());
    for object in objects(&stream) {
        let message = &object["message"];
        content += message["content"].as_str().unwrap();
        thinking += message["thinking"].as_str().unwrap_or_default();
        called.extend(message["tool_calls"].as_array().cloned().unwrap_or_default());
    }
    assert_eq!((content.as_str(), thinking.as_str(), json!(called)), ("I look.", "Hm.", calls));
    server.close().await;
}

#[actix_web::test]
async fn errors_are_texts_and_name_the_parameters_of_the_api() {
    let server = TestServer::start();
    let chat = |more: Value| {
        let mut body = json!({"messages": hello()});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ("/api/chat", body)
    };
    for ((path, body), status, part) in [
        (chat(json!({"model": "big"})), 404, "big"),
        (chat(json!({"options": 5})), 400, "'options' must be an object"),
        (chat(json!({"options": {"num_predict": "x"}})), 400, "num_predict"),
        (chat(json!({"options": {"temperature": "hot"}})), 400, "temperature"),
        (chat(json!({"options": {"stop": [{}]}})), 400, "stop"),
        (chat(json!({"format": "xml"})), 400, "'format'"),
        (chat(json!({"format": {"pattern": 5}})), 400, "format"),
        (chat(json!({"think": "much"})), 400, "'think'"),
        (chat(json!({"stream": "no"})), 400, "stream"),
        (chat(json!({"messages": "hi"})), 400, "'messages' must be a list"),
        (chat(json!({"messages": ["hi"]})), 400, "'messages[0]' must be an object"),
        (
            chat(json!({"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]})),
            400,
            "messages[0].images",
        ),
        (chat(json!({"messages": [{"content": "a"}]})), 400, "messages[0].role"),
        (("/api/generate", json!({"prompt": 5})), 400, "prompt"),
        (("/api/generate", json!({"prompt": "a", "images": ["eA=="]})), 400, "images"),
        (("/api/generate", json!({"prompt": "a", "template": "{{ .Prompt }}"})), 400, "template"),
        (("/api/generate", json!({"prompt": "a", "context": [1]})), 400, "context"),
        (("/api/generate", json!({"prompt": "a", "suffix": "b"})), 400, "suffix"),
        (("/api/embed", json!({"input": "a"})), 400, "/v1/embeddings"),
        (("/api/embed", json!({})), 400, "'input' is missing"),
        (("/api/show", json!({"model": "big"})), 404, "big"),
        (("/api/show", json!([])), 400, "not a JSON object"),
        (("/api/none", json!({})), 404, "does not exist"),
    ] {
        let response = post(&server, path, &body).await;
        let error = response.json();
        assert_eq!(
            (response.status, error.as_object().unwrap().len()),
            (status, 1),
            "{path} {body}: {error}"
        );
        assert!(error["error"].as_str().unwrap().contains(part), "{path} {body}: {error}");
    }
    server.close().await;
    let too_long = RequestError::TooLong { prompt: "prompt", prompt_tokens: 60, max_tokens: 10, context: 64 };
    let refusing = TestServer::with_config(Some(too_long), |_| {});
    let body = json!({"messages": hello(), "options": {"num_predict": 10}});
    let refused = post(&refusing, "/api/chat", &body).await.body;
    assert!(refused.contains("num_predict") && !refused.contains("max_tokens"), "{refused}");
    refusing.close().await;
    let keyed = TestServer::with_config(None, |config| config.api_keys = ApiKeys(vec!["key".into()]));
    let refused = post(&keyed, "/api/chat", &json!({"messages": hello()})).await;
    assert!(refused.status == 401 && refused.json()["error"].is_string());
    keyed.close().await;
}

#[actix_web::test]
async fn an_error_within_a_stream_is_its_last_line() {
    let mut server = TestServer::start();
    let failure = TokenEvent::Failed(RequestError::DeviceFailed("smoke".into()));
    let events = vec![TokenEvent::Token(scored(97, -1.0, &[])), failure];
    let (_, response) = ask(&mut server, "/api/chat", json!({"messages": hello()}), events).await;
    let objects = objects(&response);
    assert_eq!((objects.len(), &objects[0]["message"]["content"]), (2, &json!("a")));
    assert!(objects[1]["error"].as_str().unwrap().contains("smoke"));
    server.close().await;
}

/// A client that goes away cancels the native request.
#[actix_web::test]
async fn a_disconnect_ends_the_request_in_the_engine() {
    let server = &mut TestServer::start();
    let mut client = begin(server, "/api/chat", &json!({"messages": hello()})).await;
    let (_, sender) = server.next_request().await;
    sender.send(TokenEvent::Token(scored(97, -1.0, &[])));
    client.read_until("\"a\"").await;
    drop(client);
    super::test_server::wait_until(|| sender.is_closed()).await;
}

#[actix_web::test]
async fn texts_become_vectors() {
    let mut server = encoder_server();
    let vector = |numbers: &[f32]| vec![TokenEvent::Embedding(numbers.to_vec())];
    let body = json!({
        "model": "tiny", "input": ["ab", "cd"], "truncate": true, "options": {"num_ctx": 9}, "keep_alive": 0,
    });
    let vectors = vec![vector(&[0.0, 3.0, -4.0]), vector(&[1.0, 0.0, 0.0])];
    let (_, response) = play(&mut server, "/api/embed", body, vectors).await;
    let answered = response.json();
    let numbers = |value: &Value| {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&answered["embeddings"][0]), [0.0, 0.6, -0.8]);
    assert_eq!(
        (numbers(&answered["embeddings"][1]), &answered["prompt_eval_count"]),
        (vec![1.0, 0.0, 0.0], &json!(8))
    );
    assert!(answered["total_duration"].as_u64() > Some(0));
    let body = json!({"prompt": "ab"});
    let (_, response) = play(&mut server, "/api/embeddings", body, vec![vector(&[0.0, 3.0, -4.0])]).await;
    assert_eq!(numbers(&response.json()["embedding"]), [0.0, 0.6, -0.8]);
    for (path, body, part) in [
        ("/api/embeddings", json!({}), "'prompt' is missing"),
        ("/api/embeddings", json!({"prompt": {}}), "'prompt'"),
        ("/api/embed", json!({"input": "a", "dimensions": 0}), "dimensions"),
        ("/api/embed", json!({"input": []}), "input"),
        ("/api/chat", json!({"messages": hello()}), "/v1/embeddings"),
    ] {
        let response = post(&server, path, &body).await;
        assert!(response.status == 400 && response.body.contains(part), "{path} {body}: {}", response.body);
    }
    assert_eq!(post(&server, "/api/show", &json!({})).await.json()["capabilities"], json!(["embedding"]));
    server.close().await;
}

#[actix_web::test]
async fn the_model_is_listed_by_its_names_and_described() {
    let server = TestServer::with_config(None, |config| config.model_names = vec!["other".into()]);
    for path in ["/api/tags", "/api/ps"] {
        let models = server.get(path).await.json();
        let names: Vec<_> =
            models["models"].as_array().unwrap().iter().map(|card| card["name"].clone()).collect();
        assert_eq!(names, ["tiny", "other"]);
        assert_eq!(models["models"][0]["digest"].as_str().unwrap().len(), 64);
        assert_eq!(models["models"][0]["modified_at"], "1970-01-01T00:00:01Z");
    }
    for body in [json!({"model": "other"}), json!({"name": "tiny:latest", "verbose": true})] {
        let shown = post(&server, "/api/show", &body).await.json();
        assert_eq!(shown["capabilities"], json!(["completion"]));
        assert_eq!(shown["model_info"]["mainstem.context_length"], 64);
    }
    assert!(server.get("/api/version").await.json()["version"].is_string());
    server.close().await;
}
