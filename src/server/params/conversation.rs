//! Messages of the chat and the tokenize API, and the options for rendering them.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe, shorten};
use crate::text::chat_template::{Content, Message};
use crate::text::tools::{ToolSettings, parse_message_calls};
use serde_json::{Map, Value};

/// Messages, and the options for rendering them with the chat template.
#[derive(Debug)]
pub struct Conversation {
    /// At least one.
    pub messages: Vec<Message>,
    pub tools: ToolSettings,
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
    pub template_kwargs: Map<String, Value>,
}

/// Unsupported fields of messages. Their empty values are accepted, since clients send responses back
/// unchanged.
const UNSUPPORTED_IN_MESSAGES: UnsupportedParams = &[
    ("function_call", NoOpValue::OnlyNull),
    ("refusal", NoOpValue::Empty),
    ("audio", NoOpValue::OnlyNull),
    ("annotations", NoOpValue::Empty),
];

/// Parses the messages and the template options of a body of the chat or the tokenize API.
pub fn parse_conversation(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let bad = |message: &str| ApiError::invalid("messages", message);
    let list = match fields.take("messages") {
        None => return Err(bad("'messages' is missing")),
        Some(Value::Array(list)) if list.is_empty() => return Err(bad("'messages' is empty")),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(bad("'messages' must be a list")),
    };
    let [tools, choice, parallel] =
        ["tools", "tool_choice", "parallel_tool_calls"].map(|name| fields.take(name));
    let conversation = Conversation {
        tools: ToolSettings::parse(tools.as_ref(), choice.as_ref(), parallel.as_ref())?,
        messages: list
            .into_iter()
            .enumerate()
            .map(|(i, value)| parse_message(fields, i, value))
            .collect::<Result<_, _>>()?,
        add_generation_prompt: fields.take_bool("add_generation_prompt", true)?,
        continue_final_message: fields.take_bool("continue_final_message", false)?,
        template_kwargs: fields.take_object("chat_template_kwargs")?.unwrap_or_default(),
    };
    if conversation.continue_final_message && conversation.add_generation_prompt {
        let message = "'continue_final_message' needs 'add_generation_prompt' to be false";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    Ok(conversation)
}

/// Parses a message, whose content is a string or a list of text parts.
fn parse_message(body: &Fields, index: usize, value: Value) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path.clone(), format!("'{path}' must be an object")));
    };
    let mut fields = body.nested(&path, members);
    let missing =
        |name: &str| ApiError::invalid(format!("{path}.{name}"), format!("'{path}.{name}' is missing"));
    let role = fields.take_string("role")?.filter(|role| !role.is_empty()).ok_or_else(|| missing("role"))?;
    let content = match fields.take("content") {
        Some(Value::String(text)) => Some(Content::Text(text)),
        Some(Value::Array(parts)) => Some(Content::Parts(
            parts
                .into_iter()
                .enumerate()
                .map(|(part, value)| parse_text_part(body, &format!("{path}.content[{part}]"), value))
                .collect::<Result<_, _>>()?,
        )),
        Some(other) => {
            let path = format!("{path}.content");
            let message = format!("'{path}' must be a string or a list of parts, not {}", describe(&other));
            return Err(ApiError::invalid(path, message));
        }
        None if role == "assistant" => None,
        None => return Err(missing("content")),
    };
    let extra = parse_extra_fields(&mut fields, &path)?;
    fields.finish(&[UNSUPPORTED_IN_MESSAGES])?;
    // A message without content and calls is an empty text.
    let content = match content {
        None if !extra.contains_key("tool_calls") => Some(Content::Text(String::new())),
        content => content,
    };
    Ok(Message { role, content, extra })
}

/// Parses the fields of a message besides role and content, as the chat template gets them.
fn parse_extra_fields(fields: &mut Fields, path: &str) -> Result<Map<String, Value>, ApiError> {
    let mut extra = Map::new();
    for name in ["name", "tool_call_id"] {
        extra.extend(fields.take_string(name)?.map(|text| (name.to_owned(), text.into())));
    }
    // Clients send responses back unchanged, and some servers call the field "reasoning".
    let other_name = fields.take_string("reasoning")?;
    let reasoning = fields.take_string("reasoning_content")?.or(other_name).filter(|text| !text.is_empty());
    extra.extend(reasoning.map(|text| ("reasoning_content".to_owned(), text.into())));
    let calls = fields.take("tool_calls").unwrap_or_default();
    extra.extend(parse_message_calls(path, &calls)?.map(|calls| ("tool_calls".to_owned(), calls)));
    Ok(extra)
}

/// Parses a part of a message's content, which must be text.
fn parse_text_part(body: &Fields, path: &str, value: Value) -> Result<String, ApiError> {
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path, format!("'{path}' must be an object")));
    };
    let mut fields = body.nested(path, members);
    match fields.take_string("type")?.as_deref() {
        Some("text") => {}
        other => {
            let path = fields.path("type");
            let found = other.map_or("missing".to_owned(), |found| format!("\"{}\"", shorten(found)));
            let message = format!("'{path}' is {found}: only parts of type \"text\" are supported");
            return Err(ApiError::unsupported(path, message));
        }
    }
    let text = fields.take_string("text")?;
    let path = fields.path("text");
    fields.finish(&[])?;
    text.ok_or_else(|| ApiError::invalid(path.clone(), format!("'{path}' is missing")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_absent_beside_calls_only() {
        let body = br#"{"messages": [
            {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "assistant", "content": null, "tool_calls": []},
            {"role": "assistant"}]}"#;
        let conversation = parse_conversation(&mut Fields::parse(body).unwrap()).unwrap();
        let contents: Vec<_> = conversation.messages.into_iter().map(|message| message.content).collect();
        let empty = || Some(Content::Text(String::new()));
        assert_eq!(contents, [None, empty(), empty(), empty()]);
    }
}
