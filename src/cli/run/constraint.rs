//! Forms of answers that the user asks for, and tools that the model may call, as parameters of the API.

use serde_json::{Value, json};

/// Parser of the value of a form.
type ParseForm = fn(&str) -> Result<Value, String>;

/// Names of the forms in the chat's `/set`, each with its parameter and the parser of its value.
pub const FORMS: [(&str, &str, ParseForm); 3] = [
    ("json_schema", "response_format", json_schema),
    ("grammar", "grammar", grammar),
    ("tools", TOOLS, tools),
];

/// The parameter with the definitions of tools.
pub const TOOLS: &str = "tools";

/// Returns the `response_format` of a JSON schema, given as JSON text, or as the name of a file with it.
pub fn json_schema(text: &str) -> Result<Value, String> {
    let schema = if text.trim_start().starts_with('{') { text.to_owned() } else { read(text)? };
    let schema: Value = serde_json::from_str(&schema).map_err(|error| format!("not valid JSON: {error}"))?;
    Ok(json!({ "type": "json_schema", "json_schema": { "name": "answer", "schema": schema } }))
}

/// Returns the grammar in a file.
pub fn grammar(file: &str) -> Result<Value, String> {
    read(file).map(Value::String)
}

/// Returns the definitions of tools, given as a JSON list as the API takes it, or as the name of a file with
/// it.
pub fn tools(text: &str) -> Result<Value, String> {
    let list = if text.trim_start().starts_with('[') { text.to_owned() } else { read(text)? };
    let list: Value = serde_json::from_str(&list).map_err(|error| format!("not valid JSON: {error}"))?;
    let tools = list.as_array().filter(|tools| !tools.is_empty());
    let tools =
        tools.ok_or("a list of tools is required: [{\"type\": \"function\", \"function\": {...}}]")?;
    match tools.iter().position(|tool| !tool["function"]["name"].is_string()) {
        Some(at) => Err(format!("[{at}].function.name is required")),
        None => Ok(list),
    }
}

fn read(file: &str) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("cannot read {file}: {error}"))
}
