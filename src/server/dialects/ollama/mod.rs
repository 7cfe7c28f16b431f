//! Ollama's API: `POST /api/generate`, `/api/chat`, `/api/embed` and `/api/embeddings`, and what describes
//! the model.
//!
//! Invariant: the last object of an answer is the only one that is done, and has the counts and times.

mod models;

mod request;

use super::dialect::{Dialect, DialectContext, Inner};
use super::frames::{Frames, Framing};
use super::token_text::TokenText;
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use crate::text::Tokenizer;
use jiff::Timestamp;
pub use models::{process_list, show, tags, version};
use request::{Task, parse_chat, parse_embed, parse_generate};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Instant;

/// A request of `/api/chat`.
pub struct Chat(Answer);

/// A request of `/api/generate`.
pub struct Generate(Answer);

impl Dialect for Chat {
    const FRAMING: Framing = Framing::Lines;

    fn open(fields: Fields, context: &DialectContext<'_>) -> Result<(Chat, Inner), ApiError> {
        let (task, inner) = parse_chat(fields)?;
        Ok((Chat(Answer::new(task, Place::Message, context)), inner))
    }

    fn response(&mut self, inner: Value) -> Value {
        self.0.whole(inner)
    }

    fn chunk(&mut self, inner: Value, out: &mut Frames) {
        self.0.chunk(inner, out);
    }

    fn end(&mut self, out: &mut Frames) {
        self.0.end(out);
    }

    fn error(error: ErrorParts<'_>) -> Value {
        error_body(error)
    }

    fn rename(error: ApiError) -> ApiError {
        rename(error)
    }
}

impl Dialect for Generate {
    const FRAMING: Framing = Framing::Lines;

    fn open(fields: Fields, context: &DialectContext<'_>) -> Result<(Generate, Inner), ApiError> {
        let (task, inner) = parse_generate(fields, context)?;
        Ok((Generate(Answer::new(task, Place::Response, context)), inner))
    }

    fn response(&mut self, inner: Value) -> Value {
        self.0.whole(inner)
    }

    fn chunk(&mut self, inner: Value, out: &mut Frames) {
        self.0.chunk(inner, out);
    }

    fn end(&mut self, out: &mut Frames) {
        self.0.end(out);
    }

    fn error(error: ErrorParts<'_>) -> Value {
        error_body(error)
    }

    fn rename(error: ApiError) -> ApiError {
        rename(error)
    }
}

/// Returns the body of an error response.
pub fn error_body(error: ErrorParts<'_>) -> Value {
    json!({"error": error.message})
}

fn rename(error: ApiError) -> ApiError {
    error.replace_in_names("n_predict", "num_predict").replace_in_names("response_format", "format")
}

/// The place of an answer's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In `message`, as in the chat API.
    Message,
    /// In `response`.
    Response,
}

/// An answer, whole or as a stream.
struct Answer {
    task: Task,
    place: Place,
    model: String,
    tokenizer: Arc<Tokenizer>,
    began: Instant,
    text: TokenText,
    /// Tool calls of a stream, whose arguments come in parts: their names and arguments.
    calls: Vec<(String, String)>,
    finish: Value,
    usage: Value,
    timings: Value,
}

impl Answer {
    fn new(task: Task, place: Place, context: &DialectContext<'_>) -> Answer {
        let parts = context.parts;
        Answer {
            task,
            place,
            model: parts.model.name.clone(),
            tokenizer: parts.tokenizer.clone(),
            began: Instant::now(),
            text: TokenText::default(),
            calls: Vec::new(),
            finish: Value::Null,
            usage: Value::Null,
            timings: Value::Null,
        }
    }

    /// Returns a whole answer.
    fn whole(&mut self, mut inner: Value) -> Value {
        if self.task == Task::Load {
            let mut object = self.object("", "", Vec::new());
            object.insert("done".into(), true.into());
            object.insert("done_reason".into(), "load".into());
            return object.into();
        }
        (self.usage, self.timings) = (inner["usage"].take(), inner["timings"].take());
        let choice = inner["choices"][0].take();
        self.finish = choice["finish_reason"].clone();
        let message = &choice["message"];
        let text = message["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        let thinking = message["reasoning_content"].as_str().unwrap_or_default();
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        let calls =
            calls.map(|call| (string(&call["function"]["name"]), string(&call["function"]["arguments"])));
        let object = self.object(text, thinking, calls.collect());
        let object = self.with_logprobs(object, &choice);
        self.done(object)
    }

    /// Appends the objects of a chunk.
    fn chunk(&mut self, mut inner: Value, out: &mut Frames) {
        if inner["usage"].is_object() {
            (self.usage, self.timings) = (inner["usage"].take(), inner["timings"].take());
        }
        let Some(choice) = inner["choices"].get_mut(0).map(Value::take) else { return };
        let delta = &choice["delta"];
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            self.add_call(call);
        }
        let text = delta["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        let thinking = delta["reasoning_content"].as_str().unwrap_or_default();
        let mut calls = Vec::new();
        if choice["finish_reason"].is_string() {
            self.finish = choice["finish_reason"].clone();
            calls = std::mem::take(&mut self.calls);
        }
        let has_logprobs = choice["logprobs"].is_object();
        if text.is_empty() && thinking.is_empty() && calls.is_empty() && !has_logprobs {
            return;
        }
        let mut object = self.object(text, thinking, calls);
        object.insert("done".into(), false.into());
        let object = self.with_logprobs(object, &choice);
        out.push("", &object);
    }

    /// Appends the last object.
    fn end(&mut self, out: &mut Frames) {
        let object = self.object("", "", Vec::new());
        out.push("", &self.done(object));
    }

    fn add_call(&mut self, part: &Value) {
        let function = &part["function"];
        if let Some(name) = function["name"].as_str() {
            self.calls.push((name.to_owned(), String::new()));
        }
        if let Some((_, arguments)) = self.calls.last_mut() {
            *arguments += function["arguments"].as_str().unwrap_or_default();
        }
    }

    /// Returns an object with a part of the answer.
    fn object(&self, text: &str, thinking: &str, calls: Vec<(String, String)>) -> Map<String, Value> {
        let mut object = Map::new();
        object.insert("model".into(), self.model.clone().into());
        object.insert("created_at".into(), Timestamp::now().to_string().into());
        let mut content = Map::new();
        let name = match self.place {
            Place::Message => {
                content.insert("role".into(), "assistant".into());
                "content"
            }
            Place::Response => "response",
        };
        content.insert(name.into(), text.into());
        if !thinking.is_empty() {
            content.insert("thinking".into(), thinking.into());
        }
        // A call that was cut has no arguments that can be read.
        let calls: Vec<Value> = calls.iter().filter_map(|(name, arguments)| call(name, arguments)).collect();
        if !calls.is_empty() {
            content.insert("tool_calls".into(), calls.into());
        }
        match self.place {
            Place::Message => _ = object.insert("message".into(), content.into()),
            Place::Response => object.extend(content),
        }
        object
    }

    /// Adds the log-probabilities of a choice, if it has them.
    fn with_logprobs(&mut self, mut object: Map<String, Value>, choice: &Value) -> Map<String, Value> {
        let logprobs = match self.task {
            Task::Chat => choice["logprobs"]["content"].clone(),
            Task::Text | Task::Load if choice["logprobs"].is_object() => {
                let tokenizer = &self.tokenizer;
                let one = |id: u32, logprob: &Value| {
                    let (token, bytes) = (tokenizer.token_text(id), tokenizer.token_bytes(id));
                    json!({"token": token, "logprob": logprob, "bytes": bytes})
                };
                let mut listed = Vec::new();
                self.text.divide(choice, |token| {
                    let mut entry = one(token.id, token.logprob);
                    entry["top_logprobs"] = token.top(usize::MAX).map(|(id, top)| one(id, top)).collect();
                    listed.push(entry);
                });
                listed.into()
            }
            Task::Text | Task::Load => Value::Null,
        };
        if !logprobs.is_null() {
            object.insert("logprobs".into(), logprobs);
        }
        object
    }

    /// Completes the last object: why the answer ended, counts, and times in nanoseconds.
    fn done(&self, mut object: Map<String, Value>) -> Value {
        let reason = if self.finish == "length" { "length" } else { "stop" };
        let nanoseconds = |name: &str| (self.timings[name].as_f64().unwrap_or(0.0) * 1e6) as u64;
        let (prompt, generated) = (nanoseconds("prompt_ms"), nanoseconds("predicted_ms"));
        let Value::Object(end) = json!({
            "done": true, "done_reason": reason,
            "total_duration": (self.began.elapsed().as_nanos() as u64).max(prompt + generated),
            "load_duration": 0,
            "prompt_eval_count": self.usage["prompt_tokens"], "prompt_eval_duration": prompt,
            "eval_count": self.usage["completion_tokens"], "eval_duration": generated,
        }) else {
            unreachable!("it is an object; anything else is a bug")
        };
        object.extend(end);
        object.into()
    }
}

/// Returns a tool call; `None` if its arguments are not complete.
fn call(name: &str, arguments: &str) -> Option<Value> {
    let arguments: Map<String, Value> = match arguments.trim() {
        "" => Map::new(),
        text => serde_json::from_str(text).ok()?,
    };
    Some(json!({"function": {"name": name, "arguments": arguments}}))
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// A request of `/api/embed`.
pub struct Embed {
    model: String,
    began: Instant,
}

impl Dialect for Embed {
    const FRAMING: Framing = Framing::Lines;

    fn open(fields: Fields, context: &DialectContext<'_>) -> Result<(Embed, Inner), ApiError> {
        let inner = parse_embed(fields, "input", Some(true))?;
        Ok((Embed { model: context.parts.model.name.clone(), began: Instant::now() }, inner))
    }

    fn response(&mut self, mut inner: Value) -> Value {
        let duration = self.began.elapsed().as_nanos() as u64;
        json!({
            "model": self.model, "embeddings": vectors(&mut inner), "total_duration": duration,
            "load_duration": 0, "prompt_eval_count": inner["usage"]["prompt_tokens"],
        })
    }

    fn chunk(&mut self, _: Value, _: &mut Frames) {}

    fn end(&mut self, _: &mut Frames) {}

    fn error(error: ErrorParts<'_>) -> Value {
        error_body(error)
    }
}

/// A request of `/api/embeddings`, which `/api/embed` replaces.
pub struct Embeddings;

impl Dialect for Embeddings {
    const FRAMING: Framing = Framing::Lines;

    fn open(fields: Fields, _: &DialectContext<'_>) -> Result<(Embeddings, Inner), ApiError> {
        Ok((Embeddings, parse_embed(fields, "prompt", None)?))
    }

    fn response(&mut self, mut inner: Value) -> Value {
        json!({"embedding": vectors(&mut inner).into_iter().next().unwrap_or_default()})
    }

    fn chunk(&mut self, _: Value, _: &mut Frames) {}

    fn end(&mut self, _: &mut Frames) {}

    fn error(error: ErrorParts<'_>) -> Value {
        error_body(error)
    }

    fn rename(error: ApiError) -> ApiError {
        error.rename_param("input", "prompt").replace_in_names("'input'", "'prompt'")
    }
}

/// Takes the vectors out of a native response.
fn vectors(inner: &mut Value) -> Vec<Value> {
    let entries = inner["data"].as_array_mut().into_iter().flatten();
    entries.map(|entry| entry["embedding"].take()).collect()
}
