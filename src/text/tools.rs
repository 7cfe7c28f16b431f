//! Tools of a chat request: functions that the model may call, and the calls in earlier messages.
//!
//! Invariant: a name matches `^[a-zA-Z0-9_-]{1,64}$`, so it needs no escaping in any call format.

use serde_json::{Map, Value as Json};

/// Maximum number of tools of a request.
const TOOLS_MAX: usize = 128;

/// Maximum length of a function's name in bytes.
const NAME_BYTES_MAX: usize = 64;

/// Maximum size of one definition, written as JSON, in bytes.
const TOOL_BYTES_MAX: usize = 64 << 10;

/// Maximum size of all definitions together, in bytes.
const TOOLS_BYTES_MAX: usize = 1 << 20;

/// Maximum number of calls in one message.
const CALLS_MAX: usize = 1024;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    pub name: String,
    /// JSON schema of the arguments; always of type `object`. A tool without one has no parameters.
    pub parameters: Json,
    /// The definition as the client sent it, for the chat template.
    pub source: Json,
}

/// Which tools the model may or must call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// No tool: the chat template does not show them, and the output is not searched for calls.
    None,
    /// Any number of tools, as the model decides.
    Auto,
    /// At least one tool.
    Required,
    /// One call of the tool with this name.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolSettings {
    /// At most 128, each name once.
    pub tools: Vec<Tool>,
    pub choice: ToolChoice,
    /// Whether one message may have several calls.
    pub parallel: bool,
}

/// Error in the tools of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ToolError {
    /// Path of the parameter, such as `tools[2].function.name`.
    pub path: String,
    /// The message, which names the path.
    pub message: String,
}

impl ToolError {
    fn new(path: impl Into<String>, problem: &str) -> ToolError {
        let path = path.into();
        let message = format!("'{path}' {problem}");
        ToolError { path, message }
    }
}

impl ToolSettings {
    /// Parses the parameters `tools`, `tool_choice` and `parallel_tool_calls`; null counts as absent. Without
    /// tools, only the choices `none` and `auto` are valid, and both mean none.
    pub fn parse(
        tools: Option<&Json>,
        tool_choice: Option<&Json>,
        parallel_tool_calls: Option<&Json>,
    ) -> Result<ToolSettings, ToolError> {
        let [tools, tool_choice, parallel] =
            [tools, tool_choice, parallel_tool_calls].map(|value| value.filter(|value| !value.is_null()));
        let tools = tools.map(parse_tools).transpose()?.unwrap_or_default();
        let parallel = match parallel {
            None => true,
            Some(Json::Bool(parallel)) => *parallel,
            Some(_) => return Err(ToolError::new("parallel_tool_calls", "must be true or false")),
        };
        let choice = match tool_choice {
            None if tools.is_empty() => ToolChoice::None,
            None => ToolChoice::Auto,
            Some(value) => parse_choice(value, &tools)?,
        };
        Ok(ToolSettings { tools, choice, parallel })
    }

    /// Returns the definitions that the chat template shows: none if the model must not call tools.
    pub fn shown(&self) -> Vec<Json> {
        match self.choice {
            ToolChoice::None => Vec::new(),
            _ => self.tools.iter().map(|tool| tool.source.clone()).collect(),
        }
    }

    /// Returns the maximum number of calls in the answer.
    pub fn max_calls(&self) -> usize {
        match (&self.choice, self.parallel) {
            (ToolChoice::None, _) => 0,
            (ToolChoice::Named(_), _) | (_, false) => 1,
            (_, true) => usize::MAX,
        }
    }
}

/// Returns whether a name is valid for a function.
pub fn is_function_name(name: &str) -> bool {
    let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(valid)
}

fn parse_tools(value: &Json) -> Result<Vec<Tool>, ToolError> {
    let Json::Array(list) = value else { return Err(ToolError::new("tools", "must be a list")) };
    if list.len() > TOOLS_MAX {
        return Err(ToolError::new("tools", &format!("must not have more than {TOOLS_MAX} entries")));
    }
    let mut tools: Vec<Tool> = Vec::with_capacity(list.len());
    let mut bytes = 0;
    for (index, value) in list.iter().enumerate() {
        let path = format!("tools[{index}]");
        let size = value.to_string().len();
        bytes += size;
        if size > TOOL_BYTES_MAX {
            return Err(ToolError::new(path, &format!("must not be larger than {TOOL_BYTES_MAX} bytes")));
        }
        if bytes > TOOLS_BYTES_MAX {
            return Err(ToolError::new(
                "tools",
                &format!("must not be larger than {TOOLS_BYTES_MAX} bytes together"),
            ));
        }
        let tool = parse_tool(&path, value)?;
        if tools.iter().any(|other| other.name == tool.name) {
            let problem = format!("is \"{}\", as that of an earlier tool", tool.name);
            return Err(ToolError::new(format!("{path}.function.name"), &problem));
        }
        tools.push(tool);
    }
    Ok(tools)
}

fn parse_tool(path: &str, value: &Json) -> Result<Tool, ToolError> {
    let fields = object(path, value)?;
    if fields.get("type").and_then(Json::as_str) != Some("function") {
        return Err(ToolError::new(format!("{path}.type"), "must be \"function\""));
    }
    let path = format!("{path}.function");
    let Some(function) = fields.get("function") else { return Err(ToolError::new(path, "is missing")) };
    let function = object(&path, function)?;
    let name = function_name(&path, function)?;
    if function.get("description").is_some_and(|text| !text.is_string() && !text.is_null()) {
        return Err(ToolError::new(format!("{path}.description"), "must be a string"));
    }
    // Required calls satisfy the schema anyway, and a call that the model chooses is not constrained. Some
    // clients set `strict` beside the function.
    if !matches!(function.get("strict").or(fields.get("strict")), None | Some(Json::Null | Json::Bool(_))) {
        return Err(ToolError::new(format!("{path}.strict"), "must be true or false"));
    }
    let parameters = parse_parameters(&format!("{path}.parameters"), function.get("parameters"))?;
    Ok(Tool { name, parameters, source: value.clone() })
}

/// Returns the schema of a function's arguments, which are always an object.
fn parse_parameters(path: &str, value: Option<&Json>) -> Result<Json, ToolError> {
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return Ok(serde_json::json!({"type": "object", "properties": {}, "additionalProperties": false}));
    };
    let mut schema = object(path, value)?.clone();
    match schema.get("type") {
        Some(Json::String(name)) if name == "object" => {}
        // The API requires an object, whether the schema says so or not.
        None => _ = schema.insert("type".to_owned(), "object".into()),
        Some(_) => return Err(ToolError::new(format!("{path}.type"), "must be \"object\"")),
    }
    Ok(Json::Object(schema))
}

fn parse_choice(value: &Json, tools: &[Tool]) -> Result<ToolChoice, ToolError> {
    let needs_tools = || match tools.is_empty() {
        true => Err(ToolError::new("tool_choice", "needs 'tools'")),
        false => Ok(()),
    };
    match value {
        Json::String(word) => match word.as_str() {
            "none" => Ok(ToolChoice::None),
            "auto" if tools.is_empty() => Ok(ToolChoice::None),
            "auto" => Ok(ToolChoice::Auto),
            "required" => needs_tools().map(|()| ToolChoice::Required),
            _ => Err(unknown_choice()),
        },
        Json::Object(fields) => {
            match fields.get("type").and_then(Json::as_str) {
                Some("function") => {}
                Some(kind @ ("allowed_tools" | "custom")) => {
                    let problem = format!("of type \"{kind}\" is not supported yet");
                    return Err(ToolError::new("tool_choice", &problem));
                }
                _ => return Err(ToolError::new("tool_choice.type", "must be \"function\"")),
            }
            needs_tools()?;
            let path = "tool_choice.function";
            let Some(function) = fields.get("function") else {
                return Err(ToolError::new(path, "is missing"));
            };
            let name = function_name(path, object(path, function)?)?;
            match tools.iter().any(|tool| tool.name == name) {
                true => Ok(ToolChoice::Named(name)),
                false => Err(ToolError::new(format!("{path}.name"), "is not the name of a tool")),
            }
        }
        _ => Err(unknown_choice()),
    }
}

fn unknown_choice() -> ToolError {
    let problem = "must be \"none\", \"auto\", \"required\" or an object that names a function";
    ToolError::new("tool_choice", problem)
}

/// Checks the `tool_calls` of a message, whose path is `path`, and returns them for the chat template: each
/// with the type `function`, a name and arguments. Arguments that are a JSON object written as a string, as
/// in the API, become an object; others stay as they are. `None` is a list without calls.
pub fn parse_message_calls(path: &str, value: &Json) -> Result<Option<Json>, ToolError> {
    let path = format!("{path}.tool_calls");
    let list = match value {
        Json::Null => return Ok(None),
        Json::Array(list) if list.is_empty() => return Ok(None),
        Json::Array(list) if list.len() > CALLS_MAX => {
            return Err(ToolError::new(path, &format!("must not have more than {CALLS_MAX} entries")));
        }
        Json::Array(list) => list,
        _ => return Err(ToolError::new(path, "must be a list")),
    };
    let parsed = |(index, value)| parse_message_call(&format!("{path}[{index}]"), value);
    list.iter().enumerate().map(parsed).collect::<Result<Vec<Json>, _>>().map(|list| Some(list.into()))
}

fn parse_message_call(path: &str, value: &Json) -> Result<Json, ToolError> {
    let mut call = object(path, value)?.clone();
    if call.get("id").is_some_and(|id| !id.is_string() && !id.is_null()) {
        return Err(ToolError::new(format!("{path}.id"), "must be a string"));
    }
    match call.get("type") {
        None | Some(Json::Null) => _ = call.insert("type".to_owned(), "function".into()),
        Some(Json::String(kind)) if kind == "function" => {}
        Some(_) => return Err(ToolError::new(format!("{path}.type"), "must be \"function\"")),
    }
    let path = format!("{path}.function");
    let Some(function) = call.get("function") else { return Err(ToolError::new(path, "is missing")) };
    let mut function = object(&path, function)?.clone();
    if function.get("name").and_then(Json::as_str).is_none_or(str::is_empty) {
        return Err(ToolError::new(format!("{path}.name"), "must be a string that is not empty"));
    }
    let arguments = match function.get("arguments") {
        None | Some(Json::Null) => Json::Object(Map::new()),
        Some(Json::String(text)) if text.trim().is_empty() => Json::Object(Map::new()),
        Some(Json::String(text)) => match serde_json::from_str(text) {
            Ok(Json::Object(fields)) => Json::Object(fields),
            _ => Json::String(text.clone()),
        },
        Some(Json::Object(fields)) => Json::Object(fields.clone()),
        Some(_) => return Err(ToolError::new(format!("{path}.arguments"), "must be a string")),
    };
    function.insert("arguments".to_owned(), arguments);
    call.insert("function".to_owned(), Json::Object(function));
    Ok(Json::Object(call))
}

fn object<'a>(path: &str, value: &'a Json) -> Result<&'a Map<String, Json>, ToolError> {
    value.as_object().ok_or_else(|| ToolError::new(path, "must be an object"))
}

/// Returns the name in the object at `path`.
fn function_name(path: &str, fields: &Map<String, Json>) -> Result<String, ToolError> {
    let path = format!("{path}.name");
    let problem = "must be a string of 1 to 64 letters, digits, underscores and hyphens";
    match fields.get("name") {
        None => Err(ToolError::new(path, "is missing")),
        Some(Json::String(name)) if is_function_name(name) => Ok(name.clone()),
        Some(_) => Err(ToolError::new(path, problem)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tool(name: &str) -> Json {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    fn parse(tools: Json, choice: Json) -> Result<ToolSettings, ToolError> {
        ToolSettings::parse(Some(&tools), Some(&choice), None)
    }

    /// Returns the path of the error.
    fn fault(tools: Json, choice: Json) -> String {
        let error = parse(tools, choice).unwrap_err();
        assert!(error.message.starts_with(&format!("'{}' ", error.path)), "{error}");
        error.path
    }

    #[test]
    fn definitions_keep_their_source_and_get_a_schema() {
        let bare = json!({"type": "function", "function": {"name": "stop", "strict": true}});
        let settings = parse(json!([tool("get_weather"), bare]), Json::Null).unwrap();
        assert_eq!(settings.choice, ToolChoice::Auto);
        assert_eq!(settings.shown(), [tool("get_weather"), bare]);
        let [weather, stop] = &settings.tools[..] else { panic!("two tools") };
        assert_eq!((weather.name.as_str(), stop.name.as_str()), ("get_weather", "stop"));
        assert_eq!(stop.parameters["additionalProperties"], false);
        let open = json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}]);
        assert_eq!(parse(open, Json::Null).unwrap().tools[0].parameters["type"], "object");
    }

    #[test]
    fn absent_tools_are_no_tools() {
        for (tools, choice) in [
            (Json::Null, Json::Null),
            (json!([]), Json::Null),
            (Json::Null, json!("none")),
            (json!([]), json!("auto")),
            (json!([tool("f")]), json!("none")),
        ] {
            let settings = parse(tools, choice).unwrap();
            assert_eq!((settings.choice.clone(), settings.max_calls()), (ToolChoice::None, 0));
            assert_eq!(settings.shown(), Vec::<Json>::new());
        }
        assert_eq!(ToolSettings::parse(None, None, None).unwrap().tools, []);
    }

    #[test]
    fn choices_decide_how_many_calls_there_may_be() {
        let named = json!({"type": "function", "function": {"name": "f"}});
        for (choice, expected, most) in [
            (json!("auto"), ToolChoice::Auto, usize::MAX),
            (json!("required"), ToolChoice::Required, usize::MAX),
            (named, ToolChoice::Named("f".into()), 1),
        ] {
            let settings = parse(json!([tool("f"), tool("g")]), choice).unwrap();
            assert_eq!((settings.choice.clone(), settings.max_calls()), (expected, most));
        }
        let [tools, no] = [json!([tool("f")]), json!(false)];
        assert_eq!(ToolSettings::parse(Some(&tools), None, Some(&no)).unwrap().max_calls(), 1);
        let error = ToolSettings::parse(Some(&tools), None, Some(&json!(1))).unwrap_err();
        assert_eq!(error.message, "'parallel_tool_calls' must be true or false");
    }

    #[test]
    fn errors_name_the_path() {
        let function = |function: Json| json!([tool("a"), {"type": "function", "function": function}]);
        let big = json!({"name": "f", "description": "x".repeat(TOOL_BYTES_MAX)});
        let typed = |kind: Json| json!({"name": "f", "parameters": {"type": kind}});
        for (tools, path) in [
            (json!({}), "tools"),
            (json!(vec![tool("f"); 129]), "tools"),
            (json!([1]), "tools[0]"),
            (json!([{"type": "retrieval"}]), "tools[0].type"),
            (json!([{"type": "function"}]), "tools[0].function"),
            (function(json!("f")), "tools[1].function"),
            (function(json!({})), "tools[1].function.name"),
            (function(json!({"name": "a b"})), "tools[1].function.name"),
            (function(json!({"name": "x".repeat(65)})), "tools[1].function.name"),
            (function(json!({"name": "a"})), "tools[1].function.name"),
            (function(json!({"name": "f", "description": 1})), "tools[1].function.description"),
            (function(json!({"name": "f", "strict": "yes"})), "tools[1].function.strict"),
            (function(json!({"name": "f", "parameters": []})), "tools[1].function.parameters"),
            (function(typed(json!("array"))), "tools[1].function.parameters.type"),
            (function(typed(json!(["object", "null"]))), "tools[1].function.parameters.type"),
            (function(big), "tools[1]"),
        ] {
            assert_eq!(fault(tools, Json::Null), path);
        }
        let big = |i| json!({"name": format!("f{i}"), "description": "x".repeat(20_000)});
        let many: Vec<Json> = (0..100).map(|i| json!({"type": "function", "function": big(i)})).collect();
        assert_eq!(fault(many.into(), Json::Null), "tools");
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        for (tools, choice, path) in [
            (Json::Null, json!("required"), "tool_choice"),
            (Json::Null, named("f"), "tool_choice"),
            (json!([tool("f")]), json!("any"), "tool_choice"),
            (json!([tool("f")]), json!(1), "tool_choice"),
            (json!([tool("f")]), json!({"type": "allowed_tools"}), "tool_choice"),
            (json!([tool("f")]), json!({"name": "f"}), "tool_choice.type"),
            (json!([tool("f")]), json!({"type": "function"}), "tool_choice.function"),
            (json!([tool("f")]), named("g"), "tool_choice.function.name"),
        ] {
            assert_eq!(fault(tools, choice), path);
        }
    }

    #[test]
    fn calls_of_messages_get_arguments_as_an_object() {
        let read = |value: Json| parse_message_calls("messages[3]", &value);
        let call = |arguments: Json| json!([{"id": "c1", "function": {"name": "f", "arguments": arguments}}]);
        for (given, expected) in [
            (json!(r#"{"b": 1, "a": [2]}"#), json!({"b": 1, "a": [2]})),
            (json!({"x": 1}), json!({"x": 1})),
            (json!(" "), json!({})),
            (Json::Null, json!({})),
            (json!(r#"{"cut": "#), json!(r#"{"cut": "#)),
        ] {
            let calls = read(call(given)).unwrap().unwrap();
            assert_eq!(
                calls[0],
                json!({"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}})
            );
        }
        assert_eq!((read(json!([])), read(Json::Null)), (Ok(None), Ok(None)));
        for (value, path) in [
            (json!("x"), "messages[3].tool_calls"),
            (json!([[]]), "messages[3].tool_calls[0]"),
            (json!([{"id": 1}]), "messages[3].tool_calls[0].id"),
            (json!([{"type": "custom"}]), "messages[3].tool_calls[0].type"),
            (json!([{"id": "a"}]), "messages[3].tool_calls[0].function"),
            (json!([{"function": {"name": ""}}]), "messages[3].tool_calls[0].function.name"),
            (call(json!(1)), "messages[3].tool_calls[0].function.arguments"),
        ] {
            assert_eq!(read(value).unwrap_err().path, path);
        }
    }
}
