//! Bodies of Ollama's requests, translated to those of the chat, the completions and the embeddings API.

use crate::server::dialects::dialect::{DialectContext, Inner};
use crate::server::dialects::native_body::{NativeBody, missing};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe};
use serde_json::{Value, json};

/// The paths of the native API.
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const EMBEDDINGS: &str = "/v1/embeddings";
const TOKENIZE: &str = "/v1/tokenize";

/// Parameters that are known and not supported. Those with any value only advise.
const UNSUPPORTED: UnsupportedParams = &[
    ("keep_alive", NoOpValue::Any),
    ("truncate", NoOpValue::Any),
    ("shift", NoOpValue::Any),
    ("template", NoOpValue::Empty),
    ("context", NoOpValue::Empty),
    ("images", NoOpValue::Empty),
    ("width", NoOpValue::AtMost(0.0)),
    ("height", NoOpValue::AtMost(0.0)),
    ("steps", NoOpValue::AtMost(0.0)),
];

/// Options that say how a model is loaded, which it is already, or how to cut a prompt, which no one is.
const UNSUPPORTED_OPTIONS: UnsupportedParams = &[
    ("num_ctx", NoOpValue::Any),
    ("num_batch", NoOpValue::Any),
    ("num_gpu", NoOpValue::Any),
    ("main_gpu", NoOpValue::Any),
    ("num_thread", NoOpValue::Any),
    ("num_keep", NoOpValue::Any),
    ("numa", NoOpValue::Any),
    ("low_vram", NoOpValue::Any),
    ("f16_kv", NoOpValue::Any),
    ("logits_all", NoOpValue::Any),
    ("vocab_only", NoOpValue::Any),
    ("use_mmap", NoOpValue::Any),
    ("use_mlock", NoOpValue::Any),
    ("embedding_only", NoOpValue::Any),
    ("penalize_newline", NoOpValue::Bool(false)),
];

/// The kind of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    Chat,
    Text,
    /// Nothing: the request asks whether the model is loaded.
    Load,
}

/// Parses a request of `/api/chat`.
pub fn parse_chat(mut fields: Fields) -> Result<(Task, Inner), ApiError> {
    let messages = match fields.take("messages") {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(other) => {
            let message = format!("'messages' must be a list, not {}", describe(&other));
            return Err(ApiError::invalid("messages", message));
        }
    };
    let mut body = NativeBody::default();
    let messages =
        messages.into_iter().enumerate().map(|(index, value)| parse_message(&fields, index, value));
    let messages = messages.collect::<Result<Vec<_>, _>>()?;
    let is_empty = messages.is_empty();
    body.set("messages", messages);
    body.take_same(&mut fields, ["tools", "logprobs", "top_logprobs"]);
    body.remove_if("tools", &json!([]));
    parse_common(&mut fields, &mut body, true)?;
    fields.finish(&[UNSUPPORTED])?;
    Ok(inner(Task::Chat, body, is_empty))
}

/// Parses a request of `/api/generate`. A prompt is a message for the chat template, unless it is raw, is
/// completed before a suffix, or the model has no template.
pub fn parse_generate(mut fields: Fields, context: &DialectContext<'_>) -> Result<(Task, Inner), ApiError> {
    let mut body = NativeBody::default();
    let mut text = |name: &str| fields.take_string(name).map(Option::unwrap_or_default);
    let (prompt, suffix, system) = (text("prompt")?, text("suffix")?, text("system")?);
    let is_raw = fields.take_bool("raw", false)? || !suffix.is_empty();
    let is_chat = !is_raw && context.parts.model.chat_template.is_some();
    parse_common(&mut fields, &mut body, is_chat)?;
    let is_empty = prompt.is_empty() && !is_raw;
    if is_chat {
        body.take_same(&mut fields, ["logprobs", "top_logprobs"]);
        let messages =
            [("system", system), ("user", prompt)].into_iter().filter(|(_, text)| !text.is_empty());
        body.set(
            "messages",
            messages.map(|(role, text)| json!({"role": role, "content": text})).collect::<Value>(),
        );
    } else {
        if !system.is_empty() {
            let message = "'system' needs a model with a chat template, and a prompt that is not raw";
            return Err(ApiError::unsupported("system", message));
        }
        parse_logprobs(&mut fields, &mut body)?;
        body.set("prompt", prompt);
        if !suffix.is_empty() {
            body.set("suffix", suffix);
        }
    }
    fields.finish(&[UNSUPPORTED])?;
    Ok(inner(if is_chat { Task::Chat } else { Task::Text }, body, is_empty))
}

/// Returns the native request. One without a prompt only asks whether the model is loaded.
fn inner(task: Task, body: NativeBody, is_empty: bool) -> (Task, Inner) {
    match task {
        _ if is_empty => (Task::Load, Inner { path: TOKENIZE, body: json!({"prompt": ""}) }),
        Task::Chat => (task, Inner { path: CHAT, body: body.into_value() }),
        Task::Text | Task::Load => (task, Inner { path: COMPLETIONS, body: body.into_value() }),
    }
}

/// Parses the log-probabilities of a completion: a switch, and the number of most likely tokens.
fn parse_logprobs(fields: &mut Fields, body: &mut NativeBody) -> Result<(), ApiError> {
    let is_on = fields.take_bool("logprobs", false)?;
    let top = fields.take("top_logprobs");
    if is_on {
        body.set("logprobs", top.unwrap_or(json!(0)));
        body.set("return_tokens_as_token_ids", true);
    }
    Ok(())
}

/// Parses what both ways to generate have: the options, the form of the answer, thinking and streaming.
fn parse_common(fields: &mut Fields, body: &mut NativeBody, is_chat: bool) -> Result<(), ApiError> {
    parse_options(fields, body)?;
    parse_thinking(fields, body, is_chat)?;
    match fields.take("format") {
        None => {}
        Some(Value::String(format)) if format.is_empty() => {}
        Some(Value::String(format)) if format == "json" => {
            body.set("response_format", json!({"type": "json_object"}));
        }
        Some(Value::Object(schema)) => {
            let schema = json!({"type": "json_schema", "json_schema": {"name": "format", "schema": schema}});
            body.set("response_format", schema);
        }
        Some(other) => {
            let message = format!("'format' must be \"json\" or a JSON schema, not {}", describe(&other));
            return Err(ApiError::invalid("format", message));
        }
    }
    body.set("timings_per_token", true);
    if fields.take_bool("stream", true)? {
        body.stream();
    }
    Ok(())
}

/// Parses `options`: sampling parameters, and what advises Ollama how to load a model.
fn parse_options(fields: &mut Fields, body: &mut NativeBody) -> Result<(), ApiError> {
    let members = fields_of(fields, "options")?;
    let mut options = fields.nested("options", members);
    body.take_sampling(&mut options);
    body.take_same(&mut options, ["seed", "stop"]);
    body.remove_if("stop", &json!([]));
    // The rest of the context; -2 is Ollama's other word for it.
    body.take_as(&mut options, "num_predict", "n_predict");
    body.remove_if("n_predict", &json!(-2));
    body.set_default("n_predict", -1);
    options.finish(&[UNSUPPORTED_OPTIONS])
}

fn fields_of(fields: &mut Fields, name: &str) -> Result<serde_json::Map<String, Value>, ApiError> {
    Ok(fields.take_object(name)?.unwrap_or_default())
}

/// Parses `think`: a switch, or an effort. Without it, the chat template decides.
fn parse_thinking(fields: &mut Fields, body: &mut NativeBody, is_chat: bool) -> Result<(), ApiError> {
    let (think, effort) = match fields.take("think") {
        None => return Ok(()),
        Some(Value::Bool(think)) => (think, None),
        Some(Value::String(effort)) if ["low", "medium", "high"].contains(&effort.as_str()) => {
            (true, Some(effort))
        }
        Some(_) => {
            let message = "'think' must be true, false, \"low\", \"medium\" or \"high\"";
            return Err(ApiError::invalid("think", message));
        }
    };
    if is_chat {
        body.set("chat_template_kwargs", json!({"enable_thinking": think, "thinking": think}));
        effort.into_iter().for_each(|effort| body.set("reasoning_effort", effort));
    }
    Ok(())
}

/// Parses a message.
fn parse_message(body: &Fields, index: usize, value: Value) -> Result<Value, ApiError> {
    let path = format!("messages[{index}]");
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path.clone(), format!("'{path}' must be an object")));
    };
    let mut fields = body.nested(&path, members);
    let mut message = NativeBody::default();
    message.take_same(&mut fields, ["role", "content", "tool_calls", "tool_call_id"]);
    message.take_as(&mut fields, "thinking", "reasoning_content");
    if !message.take_as(&mut fields, "tool_name", "name") {
        message.take_same(&mut fields, ["name"]);
    }
    message.set_default("content", "");
    fields.finish(&[&[("images", NoOpValue::Empty)]])?;
    Ok(message.into_value())
}

/// Parses a request of `/api/embed`, or of `/api/embeddings` if its text is in `input`.
pub fn parse_embed(mut fields: Fields, input: &str, normalize: Option<bool>) -> Result<Inner, ApiError> {
    let mut body = NativeBody::default();
    if !body.take_as(&mut fields, input, "input") {
        return Err(missing(input));
    }
    body.take_same(&mut fields, ["dimensions"]);
    let options = fields_of(&mut fields, "options")?;
    fields.nested("options", options).finish(&[UNSUPPORTED_OPTIONS])?;
    fields.finish(&[UNSUPPORTED])?;
    normalize.into_iter().for_each(|normalize| body.set("normalize", normalize));
    Ok(Inner { path: EMBEDDINGS, body: body.into_value() })
}
