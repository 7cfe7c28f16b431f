//! Bodies of the Messages API, translated to those of the chat and the tokenize API.

use super::content::{parse_system, parse_turns};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe, shorten};
use serde_json::{Map, Value, json};

/// Parameters that are known and not supported. Those with any value only advise.
const UNSUPPORTED: UnsupportedParams = &[
    ("metadata", NoOpValue::Any),
    ("service_tier", NoOpValue::Any),
    ("inference_geo", NoOpValue::Any),
    ("diagnostics", NoOpValue::Any),
    ("user_profile_id", NoOpValue::Any),
    ("workspace_id", NoOpValue::Any),
    ("cache_control", NoOpValue::Any),
    ("speed", NoOpValue::Texts(&["standard"])),
    ("container", NoOpValue::OnlyNull),
    ("mcp_servers", NoOpValue::Empty),
    ("context_management", NoOpValue::Empty),
];

/// Largest number of tokens that a request may ask for.
const TOKENS_MAX: i64 = u32::MAX as i64;

/// Parameters that both APIs have by the same name.
const SAME: [&str; 3] = ["temperature", "top_p", "top_k"];

/// Translates the body of a request for a message.
pub fn parse_messages(mut fields: Fields) -> Result<Value, ApiError> {
    let max_tokens =
        fields.take_integer("max_tokens", 1, TOKENS_MAX)?.ok_or_else(|| missing("max_tokens"))?;
    let stream = fields.take_bool("stream", false)?;
    let mut body = Map::new();
    body.insert("max_tokens".into(), max_tokens.into());
    body.extend(fields.take_all(SAME.into_iter()).into_iter().map(|(name, value)| (name.to_owned(), value)));
    if let Some(stops) = parse_stops(&mut fields)? {
        body.insert("stop".into(), stops);
    }
    if stream {
        body.insert("stream".into(), true.into());
        // The event before the first token has the usage of the prompt.
        let options = json!({"include_usage": true, "continuous_usage_stats": true});
        body.insert("stream_options".into(), options);
    }
    if let Some(format) = parse_format(&mut fields)? {
        body.insert("response_format".into(), format);
    }
    let has_thinking = parse_prompt(&mut fields, &mut body)?;
    body.insert("include_reasoning".into(), has_thinking.into());
    fields.finish(&[UNSUPPORTED])?;
    Ok(body.into())
}

/// Translates the body of a request to count tokens.
pub fn parse_count(mut fields: Fields) -> Result<Value, ApiError> {
    let mut body = Map::new();
    parse_prompt(&mut fields, &mut body)?;
    parse_format(&mut fields)?;
    fields.finish(&[UNSUPPORTED])?;
    Ok(body.into())
}

/// Translates what the prompt is made of: messages, tools and thinking. Returns whether the model thinks.
fn parse_prompt(fields: &mut Fields, body: &mut Map<String, Value>) -> Result<bool, ApiError> {
    let has_thinking = parse_thinking(fields)?;
    body.insert("chat_template_kwargs".into(), json!({"enable_thinking": has_thinking}));
    let mut messages: Vec<Value> = parse_system(fields)?.into_iter().collect();
    let (turns, is_continued) = parse_turns(fields)?;
    messages.extend(turns);
    body.insert("messages".into(), messages.into());
    if is_continued {
        body.insert("continue_final_message".into(), true.into());
        body.insert("add_generation_prompt".into(), false.into());
    }
    let tools = parse_tools(fields)?;
    let choice = parse_choice(fields)?;
    if let Some(tools) = tools {
        body.insert("tools".into(), tools.into());
    }
    if let Some((choice, is_parallel)) = choice {
        body.insert("tool_choice".into(), choice);
        body.insert("parallel_tool_calls".into(), is_parallel.into());
    }
    Ok(has_thinking)
}

fn parse_stops(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let is_text_list = |value: &Value| {
        let list = value.as_array()?;
        list.iter().all(Value::is_string).then(|| value.clone())
    };
    fields.take_with("stop_sequences", "a list of strings", is_text_list)
}

/// Parses `thinking`. Without it, the model does not think. The budget only advises.
fn parse_thinking(fields: &mut Fields) -> Result<bool, ApiError> {
    let Some(members) = fields.take_object("thinking")? else { return Ok(false) };
    let mut thinking = fields.nested("thinking", members);
    let kind = thinking.take_string("type")?;
    thinking.take_integer("budget_tokens", 0, TOKENS_MAX)?;
    thinking.take_string("display")?;
    let path = thinking.path("type");
    thinking.finish(&[])?;
    match kind.as_deref() {
        Some("enabled" | "adaptive" | "between_tools") => Ok(true),
        Some("disabled") => Ok(false),
        _ => Err(ApiError::invalid(
            path.clone(),
            format!("'{path}' must be \"enabled\", \"adaptive\", \"between_tools\" or \"disabled\""),
        )),
    }
}

/// Parses the format of the answer: `output_config.format`, or `output_format` as it was called before.
fn parse_format(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let mut found = fields.take_object("output_format")?.map(|members| ("output_format", members));
    if let Some(members) = fields.take_object("output_config")? {
        let mut config = fields.nested("output_config", members);
        config.take_string("effort")?;
        if let Some(members) = config.take_object("format")? {
            found = Some(("output_config.format", members));
        }
        config.finish(&[])?;
    }
    let Some((path, members)) = found else { return Ok(None) };
    let mut format = fields.nested(path, members);
    let kind = format.take_string("type")?;
    let schema = format.take_object("schema")?;
    format.finish(&[])?;
    match (kind.as_deref(), schema) {
        (Some("json_schema"), Some(schema)) => Ok(Some(json!({
            "type": "json_schema", "json_schema": {"name": "output", "strict": true, "schema": schema},
        }))),
        (Some("json_schema"), None) => Err(missing(&format!("{path}.schema"))),
        _ => Err(ApiError::invalid(format!("{path}.type"), format!("'{path}.type' must be \"json_schema\""))),
    }
}

fn parse_tools(fields: &mut Fields) -> Result<Option<Vec<Value>>, ApiError> {
    let list = match fields.take("tools") {
        None => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(other) => {
            let message = format!("'tools' must be a list, not {}", describe(&other));
            return Err(ApiError::invalid("tools", message));
        }
    };
    let tools = list.into_iter().enumerate().map(|(index, value)| parse_tool(fields, index, value));
    tools.collect::<Result<Vec<_>, _>>().map(Some)
}

fn parse_tool(body: &Fields, index: usize, value: Value) -> Result<Value, ApiError> {
    let path = format!("tools[{index}]");
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path.clone(), format!("'{path}' must be an object")));
    };
    let mut tool = body.nested(&path, members);
    match tool.take_string("type")?.as_deref() {
        None | Some("custom") => {}
        Some(kind) => {
            let path = tool.path("type");
            let message =
                format!("'{path}' is \"{}\": only tools of type \"custom\" are supported", shorten(kind));
            return Err(ApiError::unsupported(path, message));
        }
    }
    let mut function = Map::new();
    for (name, native) in [("name", "name"), ("description", "description"), ("input_schema", "parameters")] {
        function.extend(tool.take(name).map(|value| (native.to_owned(), value)));
    }
    if tool.take_bool("strict", false)? {
        function.insert("strict".into(), true.into());
    }
    tool.finish(&[TOOL_ADVICE])?;
    Ok(json!({"type": "function", "function": function}))
}

/// Parameters of tools that only advise.
const TOOL_ADVICE: UnsupportedParams = &[
    ("cache_control", NoOpValue::Any),
    ("eager_input_streaming", NoOpValue::Any),
    ("input_examples", NoOpValue::Any),
    ("defer_loading", NoOpValue::Bool(false)),
    ("allowed_callers", NoOpValue::Texts(&["direct"])),
];

/// Parses `tool_choice`. Returns it with whether there may be several calls.
fn parse_choice(fields: &mut Fields) -> Result<Option<(Value, bool)>, ApiError> {
    let Some(members) = fields.take_object("tool_choice")? else { return Ok(None) };
    let mut choice = fields.nested("tool_choice", members);
    let kind = choice.take_string("type")?;
    let name = choice.take_string("name")?;
    let is_parallel = !choice.take_bool("disable_parallel_tool_use", false)?;
    choice.finish(&[])?;
    let choice = match kind.as_deref() {
        Some("auto") => "auto".into(),
        Some("any") => "required".into(),
        Some("none") => "none".into(),
        Some("tool") => {
            let name = name.ok_or_else(|| missing("tool_choice.name"))?;
            json!({"type": "function", "function": {"name": name}})
        }
        _ => {
            let message = "'tool_choice.type' must be \"auto\", \"any\", \"tool\" or \"none\"";
            return Err(ApiError::invalid("tool_choice.type", message));
        }
    };
    Ok(Some((choice, is_parallel)))
}

fn missing(path: &str) -> ApiError {
    ApiError::invalid(path, format!("'{path}' is missing"))
}
