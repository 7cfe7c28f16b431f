//! Turns of a conversation in the Messages API, translated to chat messages.
//!
//! Invariant: a turn of the user with results of tools becomes one message for each of them, in order.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe, shorten};
use serde_json::{Map, Value, json};

/// Fields of blocks that only advise, or that clients send back as they were.
const BLOCK_ADVICE: UnsupportedParams = &[
    ("cache_control", NoOpValue::Any),
    ("citations", NoOpValue::Any),
    ("caller", NoOpValue::Any),
    ("signature", NoOpValue::Any),
    ("data", NoOpValue::Any),
];

/// Translates `system`, a text or a list of text blocks.
pub fn parse_system(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let Some(value) = fields.take("system") else { return Ok(None) };
    let content = parse_texts(fields, "system", value)?;
    Ok(Some(json!({"role": "system", "content": content})))
}

/// Translates `messages`. Returns them with whether the last one is the beginning of the answer.
pub fn parse_turns(fields: &mut Fields) -> Result<(Vec<Value>, bool), ApiError> {
    let bad = |message: &str| ApiError::invalid("messages", message);
    let list = match fields.take("messages") {
        None => return Err(bad("'messages' is missing")),
        Some(Value::Array(list)) if list.is_empty() => return Err(bad("'messages' is empty")),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(bad("'messages' must be a list")),
    };
    let mut messages = Vec::new();
    for (index, value) in list.into_iter().enumerate() {
        parse_turn(fields, index, value, &mut messages)?;
    }
    if messages.is_empty() {
        return Err(bad("'messages' has no content"));
    }
    let is_begun = |last: &Value| last["role"] == "assistant" && last.get("tool_calls").is_none();
    let is_continued = messages.last().is_some_and(is_begun);
    Ok((messages, is_continued))
}

/// Translates a turn, and appends its messages.
fn parse_turn(body: &Fields, index: usize, value: Value, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let path = format!("messages[{index}]");
    let mut turn = body.nested(&path, object(&path, value)?);
    let role = turn.take_string("role")?;
    let content_path = turn.path("content");
    let content = turn.take("content").ok_or_else(|| missing(&content_path))?;
    let role_path = turn.path("role");
    turn.finish(&[BLOCK_ADVICE])?;
    let blocks = match content {
        Value::String(text) => vec![Block::Text(text)],
        Value::Array(list) => parse_blocks(body, &content_path, list)?,
        other => {
            let message = format!("'{content_path}' must be a string or a list, not {}", describe(&other));
            return Err(ApiError::invalid(content_path, message));
        }
    };
    match role.as_deref() {
        Some("user") => add_user_turn(&content_path, blocks, messages),
        Some("assistant") => add_assistant_turn(&content_path, blocks, messages),
        _ => {
            let message = format!("'{role_path}' must be \"user\" or \"assistant\"");
            Err(ApiError::invalid(role_path, message))
        }
    }
}

/// A content block.
enum Block {
    Text(String),
    Thinking(String),
    /// Thinking that nobody can read.
    Hidden,
    /// A call, as in chat messages.
    Call(Value),
    /// The result of a call, as a chat message.
    Result(Value),
}

fn parse_blocks(body: &Fields, path: &str, list: Vec<Value>) -> Result<Vec<Block>, ApiError> {
    let parse = |(index, value)| parse_block(body, &format!("{path}[{index}]"), value);
    list.into_iter().enumerate().map(parse).collect()
}

fn parse_block(body: &Fields, path: &str, value: Value) -> Result<Block, ApiError> {
    let mut block = body.nested(path, object(path, value)?);
    let kind = block.take_string("type")?.ok_or_else(|| missing(&block.path("type")))?;
    let text = |block: &mut Fields, name: &str| {
        let path = block.path(name);
        block.take_string(name)?.ok_or_else(|| missing(&path))
    };
    let parsed = match kind.as_str() {
        "text" => Block::Text(text(&mut block, "text")?),
        "thinking" => Block::Thinking(text(&mut block, "thinking")?),
        "redacted_thinking" => Block::Hidden,
        "tool_use" => {
            let (id, name) = (text(&mut block, "id")?, text(&mut block, "name")?);
            if name.is_empty() {
                return Err(missing(&block.path("name")));
            }
            let arguments = Value::from(block.take_object("input")?.unwrap_or_default()).to_string();
            let function = json!({"name": name, "arguments": arguments});
            Block::Call(json!({"id": id, "type": "function", "function": function}))
        }
        "tool_result" => {
            let id = text(&mut block, "tool_use_id")?;
            let content = block.take("content").unwrap_or_else(|| "".into());
            let content = parse_texts(body, &block.path("content"), content)?;
            let content = match block.take_bool("is_error", false)? {
                true => marked_as_error(content),
                false => content,
            };
            Block::Result(json!({"role": "tool", "tool_call_id": id, "content": content}))
        }
        kind => {
            let path = block.path("type");
            let message = format!("'{path}' is \"{}\": such content is not supported", shorten(kind));
            return Err(ApiError::unsupported(path, message));
        }
    };
    block.finish(&[BLOCK_ADVICE])?;
    Ok(parsed)
}

/// Returns the result of a call that failed: chat messages have no field for that.
fn marked_as_error(content: Value) -> Value {
    const MARK: &str = "Error: ";
    match content {
        Value::String(text) => format!("{MARK}{text}").into(),
        Value::Array(mut parts) => {
            parts.insert(0, text_part(MARK.to_owned()));
            parts.into()
        }
        other => other,
    }
}

/// Translates a text or a list of text blocks to the content of a message.
fn parse_texts(body: &Fields, path: &str, value: Value) -> Result<Value, ApiError> {
    let list = match value {
        Value::String(text) => return Ok(text.into()),
        Value::Array(list) => list,
        other => {
            let message = format!("'{path}' must be a string or a list, not {}", describe(&other));
            return Err(ApiError::invalid(path, message));
        }
    };
    let blocks = parse_blocks(body, path, list)?;
    let texts = blocks.into_iter().enumerate().map(|(index, block)| match block {
        Block::Text(text) => Ok(text),
        _ => Err(misplaced(path, index, "only text can be here")),
    });
    Ok(content(texts.collect::<Result<_, _>>()?))
}

/// Returns the content of a message: a text, or the parts of several.
fn content(mut texts: Vec<String>) -> Value {
    match texts.len() {
        0 => "".into(),
        1 => texts.remove(0).into(),
        _ => texts.into_iter().map(text_part).collect(),
    }
}

fn text_part(text: String) -> Value {
    json!({"type": "text", "text": text})
}

/// Appends the messages of a turn of the user: one for the texts between the results of tools.
fn add_user_turn(path: &str, blocks: Vec<Block>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let mut texts = Vec::new();
    let add_texts = |texts: &mut Vec<String>, messages: &mut Vec<Value>| {
        if !texts.is_empty() {
            messages.push(json!({"role": "user", "content": content(std::mem::take(texts))}));
        }
    };
    for (index, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Text(text) => texts.push(text),
            Block::Result(message) => {
                add_texts(&mut texts, messages);
                messages.push(message);
            }
            Block::Thinking(_) | Block::Hidden | Block::Call(_) => {
                return Err(misplaced(path, index, "only the assistant's messages have such content"));
            }
        }
    }
    add_texts(&mut texts, messages);
    Ok(())
}

fn add_assistant_turn(path: &str, blocks: Vec<Block>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let (mut texts, mut calls, mut thinking) = (Vec::new(), Vec::new(), String::new());
    for (index, block) in blocks.into_iter().enumerate() {
        match block {
            Block::Text(text) => texts.push(text),
            Block::Thinking(text) => thinking += &text,
            Block::Hidden => {}
            Block::Call(call) => calls.push(call),
            Block::Result(_) => {
                return Err(misplaced(path, index, "only the user's messages have results of tools"));
            }
        }
    }
    if texts.is_empty() && calls.is_empty() {
        // Thinking alone, of an answer that was cut.
        return Ok(());
    }
    let mut message = Map::from_iter([("role".to_owned(), "assistant".into())]);
    if !texts.is_empty() {
        message.insert("content".into(), content(texts));
    }
    if !thinking.is_empty() {
        message.insert("reasoning_content".into(), thinking.into());
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), calls.into());
    }
    messages.push(message.into());
    Ok(())
}

fn misplaced(path: &str, index: usize, reason: &str) -> ApiError {
    let path = format!("{path}[{index}].type");
    ApiError::invalid(path.clone(), format!("'{path}': {reason}"))
}

fn missing(path: &str) -> ApiError {
    ApiError::invalid(path, format!("'{path}' is missing"))
}

fn object(path: &str, value: Value) -> Result<Map<String, Value>, ApiError> {
    match value {
        Value::Object(members) => Ok(members),
        _ => Err(ApiError::invalid(path, format!("'{path}' must be an object"))),
    }
}
