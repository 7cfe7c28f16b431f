//! Input and output items of the Responses API as chat messages.
//!
//! Invariant: reasoning, text and calls that follow each other are one message of the assistant.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe, shorten};
use serde_json::{Map, Value, json};

/// An item of a conversation.
pub enum Item {
    Message {
        role: &'static str,
        content: Value,
    },
    Reasoning(String),
    Call {
        id: String,
        name: String,
        arguments: String,
    },
    /// The result of a call.
    Result {
        id: String,
        content: Value,
    },
}

/// Chat messages that are made of items.
#[derive(Default)]
pub struct Messages {
    done: Vec<Value>,
    /// The message of the assistant that further items may extend.
    open: Map<String, Value>,
}

impl Messages {
    /// Adds the next item.
    pub fn push(&mut self, item: Item) {
        match item {
            Item::Message { role: "assistant", content } => {
                self.begin(&["content", "tool_calls"]);
                self.open.insert("content".into(), content);
            }
            Item::Message { role, content } => self.add(json!({"role": role, "content": content})),
            Item::Reasoning(text) => {
                self.begin(&["reasoning_content", "content", "tool_calls"]);
                self.open.insert("reasoning_content".into(), text.into());
            }
            Item::Call { id, name, arguments } => {
                let function = json!({"name": name, "arguments": arguments});
                let call = json!({"id": id, "type": "function", "function": function});
                let calls = self.open.entry("tool_calls").or_insert_with(|| json!([]));
                calls.as_array_mut().into_iter().for_each(|calls| calls.push(call.clone()));
            }
            Item::Result { id, content } => {
                self.add(json!({"role": "tool", "tool_call_id": id, "content": content}));
            }
        }
    }

    /// Returns the messages.
    pub fn finish(mut self) -> Vec<Value> {
        self.flush();
        self.done
    }

    fn add(&mut self, message: Value) {
        self.flush();
        self.done.push(message);
    }

    /// Begins another message of the assistant if the open one has any of these fields.
    fn begin(&mut self, fields: &[&str]) {
        if fields.iter().any(|field| self.open.contains_key(*field)) {
            self.flush();
        }
    }

    /// Completes the open message. Reasoning alone, of an answer that was cut, is none.
    fn flush(&mut self) {
        let mut open = std::mem::take(&mut self.open);
        if open.contains_key("content") || open.contains_key("tool_calls") {
            open.insert("role".into(), "assistant".into());
            self.done.push(open.into());
        }
    }
}

/// Joins the system messages with which a conversation begins to one, since most templates allow one only.
pub fn merge_system(messages: impl Iterator<Item = Value>) -> Vec<Value> {
    let mut merged: Vec<Value> = Vec::new();
    for message in messages {
        match &mut merged[..] {
            [first] if first["role"] == "system" && message["role"] == "system" => {
                let content = format!("{}\n\n{}", text_of(&first["content"]), text_of(&message["content"]));
                first["content"] = content.into();
            }
            _ => merged.push(message),
        }
    }
    merged
}

/// Returns the text of a message's content.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        parts => parts.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str()).collect(),
    }
}

/// Translates the input of a request. Returns the messages, and the items as they are kept: each with a type
/// and an id, which contain `name`.
pub fn parse_input(fields: &mut Fields, name: &str) -> Result<(Vec<Value>, Vec<Value>), ApiError> {
    let list = match fields.take("input") {
        None => return Err(missing("input")),
        Some(Value::String(text)) => vec![json!({"role": "user", "content": text})],
        Some(Value::Array(list)) => list,
        Some(other) => {
            let message = format!("'input' must be a string or a list, not {}", describe(&other));
            return Err(ApiError::invalid("input", message));
        }
    };
    let (mut messages, mut kept) = (Messages::default(), Vec::with_capacity(list.len()));
    for (index, value) in list.into_iter().enumerate() {
        let path = format!("input[{index}]");
        let Value::Object(members) = value else {
            return Err(ApiError::invalid(path.clone(), format!("'{path}' must be an object")));
        };
        kept.push(as_kept(&members, name, index));
        messages.push(parse_item(fields, &path, members)?);
    }
    Ok((messages.finish(), kept))
}

/// Returns an item as it is kept.
fn as_kept(members: &Map<String, Value>, name: &str, index: usize) -> Value {
    let mut item = members.clone();
    let kind = item.get("type").and_then(Value::as_str).unwrap_or(MESSAGE).to_owned();
    if let (MESSAGE, Some(Value::String(text))) = (&*kind, item.get("content")) {
        let part = if item.get("role").is_some_and(|role| role == "assistant") {
            "output_text"
        } else {
            "input_text"
        };
        item.insert("content".into(), json!([{"type": part, "text": text}]));
    }
    let prefix = match &*kind {
        MESSAGE => "msg",
        "reasoning" => "rs",
        "function_call" => "fc",
        _ => "fco",
    };
    item.insert("type".into(), kind.into());
    if !item.get("id").is_some_and(Value::is_string) {
        item.insert("id".into(), format!("{prefix}_{name}_in_{index}").into());
    }
    item.into()
}

const MESSAGE: &str = "message";

/// Fields of items that only advise, or that clients send back as they were.
const ITEM_ADVICE: UnsupportedParams = &[
    ("id", NoOpValue::Any),
    ("status", NoOpValue::Any),
    ("phase", NoOpValue::Any),
    ("encrypted_content", NoOpValue::Any),
    ("annotations", NoOpValue::Any),
    ("logprobs", NoOpValue::Any),
    ("namespace", NoOpValue::OnlyNull),
    ("caller", NoOpValue::OnlyNull),
];

fn parse_item(body: &Fields, path: &str, members: Map<String, Value>) -> Result<Item, ApiError> {
    let mut item = body.nested(path, members);
    let kind = item.take_string("type")?;
    let parsed = match kind.as_deref().unwrap_or(MESSAGE) {
        MESSAGE => {
            let role = parse_role(&mut item)?;
            let content_path = item.path("content");
            let content = item.take("content").ok_or_else(|| missing(&content_path))?;
            Item::Message { role, content: parse_content(body, &content_path, content)? }
        }
        "reasoning" => {
            let mut text = String::new();
            for name in ["summary", "content"] {
                let path = item.path(name);
                let Some(value) = item.take(name) else { continue };
                let found = text_of(&parse_content(body, &path, value)?);
                // The whole reasoning, if there is more than a summary.
                if !found.is_empty() {
                    text = found;
                }
            }
            Item::Reasoning(text)
        }
        "function_call" => Item::Call {
            id: text(&mut item, "call_id")?,
            name: text(&mut item, "name")?,
            arguments: text(&mut item, "arguments")?,
        },
        "function_call_output" => {
            let id = text(&mut item, "call_id")?;
            let output_path = item.path("output");
            let output = item.take("output").ok_or_else(|| missing(&output_path))?;
            Item::Result { id, content: parse_content(body, &output_path, output)? }
        }
        other => {
            let path = item.path("type");
            let message = format!("'{path}' is \"{}\": such items are not supported", shorten(other));
            return Err(ApiError::unsupported(path, message));
        }
    };
    item.finish(&[ITEM_ADVICE])?;
    Ok(parsed)
}

fn parse_role(item: &mut Fields) -> Result<&'static str, ApiError> {
    let path = item.path("role");
    match item.take_string("role")?.as_deref() {
        Some("user") => Ok("user"),
        Some("assistant") => Ok("assistant"),
        // Templates know the developer's messages as those of the system.
        Some("system" | "developer") => Ok("system"),
        _ => {
            let message = format!("'{path}' must be \"user\", \"assistant\", \"system\" or \"developer\"");
            Err(ApiError::invalid(path, message))
        }
    }
}

/// Translates the content of an item: a text, or a list of parts with text.
fn parse_content(body: &Fields, path: &str, value: Value) -> Result<Value, ApiError> {
    let list = match value {
        Value::String(text) => return Ok(text.into()),
        Value::Array(list) => list,
        other => {
            let message = format!("'{path}' must be a string or a list, not {}", describe(&other));
            return Err(ApiError::invalid(path, message));
        }
    };
    let mut parts = Vec::with_capacity(list.len());
    for (index, value) in list.into_iter().enumerate() {
        parts.push(parse_part(body, &format!("{path}[{index}]"), value)?);
    }
    Ok(match parts.len() {
        0 => "".into(),
        1 => parts.remove(0).into(),
        _ => parts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
    })
}

fn parse_part(body: &Fields, path: &str, value: Value) -> Result<String, ApiError> {
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path, format!("'{path}' must be an object")));
    };
    let mut part = body.nested(path, members);
    let kind = text(&mut part, "type")?;
    let name = match &*kind {
        "input_text" | "output_text" | "summary_text" | "reasoning_text" | "text" => "text",
        "refusal" => "refusal",
        _ => {
            let path = part.path("type");
            let message = format!("'{path}' is \"{}\": such content is not supported", shorten(&kind));
            return Err(ApiError::unsupported(path, message));
        }
    };
    let text = text(&mut part, name)?;
    part.finish(&[ITEM_ADVICE])?;
    Ok(text)
}

/// Takes out a string that must be there.
fn text(fields: &mut Fields, name: &str) -> Result<String, ApiError> {
    let path = fields.path(name);
    fields.take_string(name)?.ok_or_else(|| missing(&path))
}

fn missing(path: &str) -> ApiError {
    ApiError::invalid(path, format!("'{path}' is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(input: Value) -> Result<Vec<Value>, String> {
        let body = json!({"input": input}).to_string();
        let mut fields = Fields::parse(body.as_bytes()).unwrap();
        parse_input(&mut fields, "x").map(|(messages, _)| messages).map_err(|error| error.to_string())
    }

    #[test]
    fn items_of_the_assistant_that_follow_each_other_are_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"});
        let said =
            |text: &str| json!({"role": "assistant", "content": [{"type": "output_text", "text": text}]});
        let thought = json!({"type": "reasoning", "id": "rs",
                             "summary": [{"type": "summary_text", "text": "s"}],
                             "content": [{"type": "reasoning_text", "text": "hm"}]});
        let input = json!([
            {"role": "user", "content": "go"}, thought, said("I look."), call("a"), call("b"),
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
            said("one"), said("two"), thought
        ]);
        let native =
            |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}});
        let expected = json!([
            {"role": "user", "content": "go"},
            {"reasoning_content": "hm", "content": "I look.", "tool_calls": [native("a"), native("b")],
             "role": "assistant"},
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"content": "one", "role": "assistant"}, {"content": "two", "role": "assistant"},
        ]);
        assert_eq!(Value::from(messages(input).unwrap()), expected);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (input, named) in [
            (json!([{"type": "item_reference", "id": "x"}]), "'input[0].type' is \"item_reference\""),
            (json!([{"role": "user", "content": [{"type": "input_image"}]}]), "'input[0].content[0].type'"),
            (json!([{"role": "robot", "content": ""}]), "'input[0].role' must be"),
            (json!([1]), "'input[0]' must be an object"),
            (
                json!([{"type": "function_call", "call_id": "x", "name": "f"}]),
                "'input[0].arguments' is missing",
            ),
            (json!(7), "'input' must be a string or a list, not 7"),
            (Value::Null, "'input' is missing"),
        ] {
            let refused = messages(input).unwrap_err();
            assert!(refused.starts_with(named), "{refused}");
        }
    }

    #[test]
    fn leading_system_messages_are_one() {
        let system = |text: &str| json!({"role": "system", "content": text});
        let user = json!({"role": "user", "content": "hi"});
        let [b, c] = ["b", "c"].map(|text| json!({"type": "text", "text": text}));
        let parts = json!({"role": "system", "content": [b, c]});
        let merged = merge_system([system("a"), parts, user.clone(), system("d")].into_iter());
        assert_eq!(merged, [system("a\n\nbc"), user, system("d")]);
    }
}
