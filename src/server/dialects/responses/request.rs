//! Bodies of the Responses API, translated to those of the chat API.

use super::items::parse_input;
use crate::server::access::RequestId;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe, shorten};
use serde_json::{Map, Value, json};

/// Parameters that are known and not supported. Those with any value only advise.
const UNSUPPORTED: UnsupportedParams = &[
    ("user", NoOpValue::Any),
    ("safety_identifier", NoOpValue::Any),
    ("prompt_cache_key", NoOpValue::Any),
    ("prompt_cache_retention", NoOpValue::Any),
    ("max_tool_calls", NoOpValue::Any),
    ("background", NoOpValue::Bool(false)),
    ("conversation", NoOpValue::OnlyNull),
    ("prompt", NoOpValue::OnlyNull),
    ("context_management", NoOpValue::Empty),
    ("top_logprobs", NoOpValue::AtMost(0.0)),
    ("truncation", NoOpValue::Texts(&["disabled"])),
    // Reasoning is returned as text, which clients can send back.
    ("include", NoOpValue::Texts(&["reasoning.encrypted_content"])),
];

/// Parameters that both APIs have by the same name.
const SAME: [&str; 5] = ["temperature", "top_p", "service_tier", "priority", "parallel_tool_calls"];

/// Maximum number of entries of `metadata`, and of the characters of a key and a value, as in OpenAI's API.
const METADATA_ENTRIES: usize = 16;
const METADATA_CHARS: [usize; 2] = [64, 512];

/// A request, translated.
pub struct Parsed {
    /// The chat request, whose messages are those of the input.
    pub body: Value,
    /// Fields of the response that repeat the request.
    pub repeated: Map<String, Value>,
    pub instructions: Option<Value>,
    pub previous: Option<String>,
    /// The input items as they are kept.
    pub input: Vec<Value>,
    pub is_kept: bool,
}

/// Translates a body. `keeps_responses` is whether the server can keep responses.
pub fn parse_response(mut fields: Fields, keeps_responses: bool) -> Result<Parsed, ApiError> {
    let is_kept = parse_store(&mut fields, keeps_responses)?;
    let mut body = Map::new();
    let mut repeated = parse_metadata(&mut fields)?;
    repeated.insert("store".into(), is_kept.into());
    repeated.insert("truncation".into(), "disabled".into());
    let max_tokens = fields.take_integer("max_output_tokens", 1, i64::from(u32::MAX))?;
    repeated.insert("max_output_tokens".into(), max_tokens.into());
    body.extend(max_tokens.map(|count| ("max_completion_tokens".to_owned(), count.into())));
    for name in SAME {
        let value = fields.take(name);
        repeated.insert(name.into(), value.clone().unwrap_or_default());
        body.extend(value.map(|value| (name.to_owned(), value)));
    }
    if repeated["parallel_tool_calls"].is_null() {
        repeated.insert("parallel_tool_calls".into(), true.into());
    }
    repeated.shift_remove("priority");
    if parse_stream(&mut fields)? {
        body.insert("stream".into(), true.into());
        body.insert("stream_options".into(), json!({"include_usage": true}));
    }
    parse_reasoning(&mut fields, &mut body, &mut repeated)?;
    parse_text(&mut fields, &mut body, &mut repeated)?;
    parse_tools(&mut fields, &mut body, &mut repeated)?;
    let instructions = fields.take_string("instructions")?.map(Value::from);
    let previous = fields.take_string("previous_response_id")?;
    let (messages, input) = parse_input(&mut fields, &RequestId::generate().0)?;
    if messages.is_empty() && previous.is_none() && instructions.is_none() {
        return Err(ApiError::invalid("input", "'input' has no messages"));
    }
    body.insert("messages".into(), messages.into());
    fields.finish(&[UNSUPPORTED])?;
    Ok(Parsed { body: body.into(), repeated, instructions, previous, input, is_kept })
}

/// Parses `store`. Responses are kept if they can be, unless the request says no.
fn parse_store(fields: &mut Fields, keeps_responses: bool) -> Result<bool, ApiError> {
    match fields.take_with("store", "true or false", Value::as_bool)? {
        Some(true) if !keeps_responses => {
            let message =
                "'store' must be false: this server keeps no responses (batches.data_dir is not set)";
            Err(ApiError::unsupported("store", message))
        }
        given => Ok(given.unwrap_or(keeps_responses)),
    }
}

fn parse_stream(fields: &mut Fields) -> Result<bool, ApiError> {
    let stream = fields.take_bool("stream", false)?;
    if let Some(members) = fields.take_object("stream_options")? {
        let mut options = fields.nested("stream_options", members);
        // Padding that hides the lengths of tokens, which this server never adds.
        options.take_bool("include_obfuscation", false)?;
        options.finish(&[])?;
    }
    Ok(stream)
}

/// Parses `metadata`, which the response repeats.
fn parse_metadata(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let metadata = fields.take_object("metadata")?.unwrap_or_default();
    let fits = |text: &str, chars: usize| text.chars().nth(chars).is_none();
    let [key_chars, value_chars] = METADATA_CHARS;
    let is_valid = |(key, value): (&String, &Value)| {
        fits(key, key_chars) && value.as_str().is_some_and(|text| fits(text, value_chars))
    };
    if metadata.len() > METADATA_ENTRIES || !metadata.iter().all(is_valid) {
        let message = format!(
            "'metadata' must have at most {METADATA_ENTRIES} entries, with keys of at most {key_chars} \
             characters and strings of at most {value_chars}"
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(Map::from_iter([("metadata".to_owned(), metadata.into())]))
}

/// Parses `reasoning`, of which only the effort has an effect.
fn parse_reasoning(
    fields: &mut Fields,
    body: &mut Map<String, Value>,
    repeated: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let mut effort = None;
    if let Some(members) = fields.take_object("reasoning")? {
        let mut reasoning = fields.nested("reasoning", members);
        effort = reasoning.take_string("effort")?;
        for advice in ["summary", "generate_summary", "context", "mode"] {
            reasoning.take_string(advice)?;
        }
        reasoning.finish(&[])?;
    }
    repeated.insert("reasoning".into(), json!({"effort": effort, "summary": null}));
    match effort {
        Some(effort) if effort == "none" => {
            body.insert("chat_template_kwargs".into(), json!({"enable_thinking": false}));
        }
        Some(effort) => _ = body.insert("reasoning_effort".into(), effort.into()),
        None => {}
    }
    Ok(())
}

/// Parses `text`: the format of the answer.
fn parse_text(
    fields: &mut Fields,
    body: &mut Map<String, Value>,
    repeated: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let mut shown = json!({"type": "text"});
    if let Some(members) = fields.take_object("text")? {
        let mut text = fields.nested("text", members);
        text.take_string("verbosity")?;
        if let Some(members) = text.take_object("format")? {
            shown = members.clone().into();
            let mut format = text.nested("text.format", members);
            let kind = format.take_string("type")?;
            let parts = ["name", "schema", "strict", "description"];
            let schema = format.take_all(parts.into_iter());
            format.finish(&[])?;
            let native = match kind.as_deref() {
                Some("text") => None,
                Some("json_object") => Some(json!({"type": "json_object"})),
                Some("json_schema") => {
                    let schema = schema.into_iter().map(|(name, value)| (name.to_owned(), value));
                    let schema: Map<String, Value> = schema.collect();
                    Some(json!({"type": "json_schema", "json_schema": schema}))
                }
                _ => {
                    let message = "'text.format.type' must be \"text\", \"json_object\" or \"json_schema\"";
                    return Err(ApiError::invalid("text.format.type", message));
                }
            };
            body.extend(native.map(|native| ("response_format".to_owned(), native)));
        }
        text.finish(&[])?;
    }
    repeated.insert("text".into(), json!({"format": shown}));
    Ok(())
}

fn parse_tools(
    fields: &mut Fields,
    body: &mut Map<String, Value>,
    repeated: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    let list = match fields.take("tools") {
        None => Vec::new(),
        Some(Value::Array(list)) => list,
        Some(other) => {
            let message = format!("'tools' must be a list, not {}", describe(&other));
            return Err(ApiError::invalid("tools", message));
        }
    };
    repeated.insert("tools".into(), list.clone().into());
    let tools = list.into_iter().enumerate().map(|(index, value)| parse_tool(fields, index, value));
    let tools = tools.collect::<Result<Vec<_>, _>>()?;
    if !tools.is_empty() {
        body.insert("tools".into(), tools.into());
    }
    let choice = fields.take("tool_choice");
    repeated.insert("tool_choice".into(), choice.clone().unwrap_or_else(|| "auto".into()));
    let native = match choice {
        Some(Value::Object(choice)) if choice.get("type").is_some_and(|kind| kind == "function") => {
            let name = choice.get("name").cloned();
            let function: Map<String, Value> =
                name.map(|name| ("name".to_owned(), name)).into_iter().collect();
            Some(json!({"type": "function", "function": function}))
        }
        Some(Value::Object(choice)) => {
            let kind = choice.get("type").map_or_else(|| "missing".to_owned(), describe);
            let message = format!("'tool_choice.type' is {kind}: only \"function\" is supported");
            return Err(ApiError::unsupported("tool_choice.type", message));
        }
        other => other,
    };
    body.extend(native.map(|choice| ("tool_choice".to_owned(), choice)));
    Ok(())
}

fn parse_tool(body: &Fields, index: usize, value: Value) -> Result<Value, ApiError> {
    let path = format!("tools[{index}]");
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path.clone(), format!("'{path}' must be an object")));
    };
    let mut tool = body.nested(&path, members);
    let kind = tool.take_string("type")?.unwrap_or_default();
    if kind != "function" {
        let path = tool.path("type");
        let message =
            format!("'{path}' is \"{}\": only tools of type \"function\" are supported", shorten(&kind));
        return Err(ApiError::unsupported(path, message));
    }
    let parts = tool.take_all(["name", "description", "parameters", "strict"].into_iter());
    tool.finish(&[&[("defer_loading", NoOpValue::Bool(false))]])?;
    let function: Map<String, Value> =
        parts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Ok(json!({"type": "function", "function": function}))
}
