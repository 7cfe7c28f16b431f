//! Constrained output in requests: the forms of OpenAI, vLLM and llama.cpp as one specification.
//!
//! Invariant: a request has at most one constraint, and no parameter beside it could cut the answer out of
//! the form that it demands.

use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams, describe, shorten};
use crate::text::output::{CallFormat, ConstraintContext, OutputGrammar};
use crate::text::tools::{ToolChoice, ToolSettings};
use mainstem_grammar::{ConstraintStart, Form, Spec};
use serde_json::Value;

/// The constraint of a request's output.
#[derive(Clone, Debug, PartialEq)]
pub struct ConstraintParams {
    /// Path of the parameter that asks for it, for errors.
    pub param: String,
    /// Label of its form in metrics.
    pub kind: &'static str,
    pub spec: Spec,
    pub start: ConstraintStart,
}

impl ConstraintParams {
    fn new(param: String, spec: Spec) -> ConstraintParams {
        let kind = match spec.form() {
            Form::JsonObject => "json_object",
            Form::JsonSchema(_) => "json_schema",
            Form::Regex(_) => "regex",
            Form::Choice(_) => "choice",
            Form::Grammar(_) => "grammar",
            Form::Calls(_) => "tools",
        };
        ConstraintParams { param, kind, spec, start: ConstraintStart::Immediately }
    }

    /// Creates the constraint of calls that `tool_choice` requires.
    pub fn of_calls(calls: OutputGrammar) -> ConstraintParams {
        ConstraintParams::new("tool_choice".to_owned(), calls.spec.clone()).with(calls)
    }

    /// Returns the constraint as it applies to the answer of a chat, which may begin with reasoning.
    pub fn in_context(self, context: &ConstraintContext) -> ConstraintParams {
        let in_context = context.answer(self.spec.clone());
        self.with(in_context)
    }

    /// Returns the constraint of an answer that may be a call of a tool instead, and the format of calls.
    /// Fails for models whose calls cannot be told from answers.
    pub fn or_call(
        self,
        tools: &ToolSettings,
        context: &ConstraintContext,
    ) -> Result<(ConstraintParams, &'static CallFormat), ApiError> {
        let Some((either, format)) = context.call_or_answer(tools, &self.spec) else {
            let param = &self.param;
            let message = format!(
                "'{param}' is not supported together with 'tools' that the model may call, because calls of \
                 this model could not be told from such an answer: set 'tool_choice' to \"none\", or leave \
                 '{param}' out"
            );
            return Err(ApiError::unsupported(param, message));
        };
        Ok((self.with(either), format))
    }

    fn with(self, OutputGrammar { spec, start }: OutputGrammar) -> ConstraintParams {
        ConstraintParams { spec, start, ..self }
    }
}

/// Parameters that name a form of constrained output, by what their values are.
#[derive(Clone, Copy)]
enum ValueKind {
    /// A JSON schema, as an object or as JSON text.
    Schema,
    Regex,
    Choice,
    Grammar,
    /// True for any JSON object.
    JsonObject,
}

/// Parameters of vLLM and llama.cpp in the body itself.
const FORMS: [(&str, ValueKind); 7] = [
    ("guided_json", ValueKind::Schema),
    ("guided_regex", ValueKind::Regex),
    ("guided_choice", ValueKind::Choice),
    ("guided_grammar", ValueKind::Grammar),
    ("guided_json_object", ValueKind::JsonObject),
    ("json_schema", ValueKind::Schema),
    ("grammar", ValueKind::Grammar),
];

/// Parameters of vLLM within `structured_outputs`.
const STRUCTURED_OUTPUTS: [(&str, ValueKind); 5] = [
    ("json", ValueKind::Schema),
    ("regex", ValueKind::Regex),
    ("choice", ValueKind::Choice),
    ("grammar", ValueKind::Grammar),
    ("json_object", ValueKind::JsonObject),
];

/// Parameters beside the forms that are not supported or have no effect.
pub(super) const UNSUPPORTED_CONSTRAINTS: UnsupportedParams = &[
    ("guided_decoding_backend", NoOpValue::Any),
    ("guided_whitespace_pattern", NoOpValue::OnlyNull),
    ("structural_tag", NoOpValue::OnlyNull),
    ("grammar_lazy", NoOpValue::Bool(false)),
    ("grammar_triggers", NoOpValue::Empty),
];

/// Parameters within `structured_outputs` that are not supported or have no effect.
const UNSUPPORTED_STRUCTURED_OUTPUTS: UnsupportedParams = &[
    ("disable_fallback", NoOpValue::Any),
    ("disable_additional_properties", NoOpValue::Bool(false)),
    ("whitespace_pattern", NoOpValue::OnlyNull),
    ("structural_tag", NoOpValue::OnlyNull),
];

/// A form with the path of its parameter.
type NamedForm = (String, Form);

/// Parses all parameters of constrained output. It must be called before the stop conditions are parsed.
pub(super) fn parse_constraint(fields: &mut Fields) -> Result<Option<ConstraintParams>, ApiError> {
    let mut forms = Vec::new();
    forms.extend(parse_response_format(fields)?);
    let json_spaces = parse_structured_outputs(fields, &mut forms)?;
    take_forms(fields, &FORMS, &mut forms)?;
    let mut forms = forms.into_iter();
    let Some((param, form)) = forms.next() else { return Ok(None) };
    if let Some((other, _)) = forms.next() {
        return Err(conflict(&other, &param));
    }
    if let Some(cut) = find_cut(fields) {
        return Err(cut_error(cut, &param));
    }
    Ok(Some(ConstraintParams::new(param, Spec::with_spaces(form, json_spaces))))
}

/// Checks a request's tools against its other parameters: calls that are required are a constraint of their
/// own. `cut` is the parameter that could cut the answer.
pub(super) fn check_tools(
    tools: &ToolSettings,
    constraint: Option<&ConstraintParams>,
    cut: Option<&'static str>,
) -> Result<(), ApiError> {
    match (&tools.choice, constraint) {
        // Beside tools that the model may call, the answer is a call or of the form.
        (ToolChoice::None | ToolChoice::Auto, _) => Ok(()),
        (ToolChoice::Required | ToolChoice::Named(_), Some(constraint)) => {
            Err(conflict(&constraint.param, "tool_choice"))
        }
        (ToolChoice::Required | ToolChoice::Named(_), None) => {
            cut.map_or(Ok(()), |cut| Err(cut_error(cut, "tool_choice")))
        }
    }
}

/// Returns the parameter that could cut an answer short of its form, if the request has one. The stop
/// conditions must not have been parsed yet.
pub(super) fn find_cut(fields: &Fields) -> Option<&'static str> {
    let is_stop = |value: &Value| match value {
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Null => false,
        _ => true,
    };
    let stop = ["stop", "stop_token_ids"].into_iter().find(|name| fields.get(name).is_some_and(is_stop));
    let ignores_eos = fields.get("ignore_eos") == Some(&Value::Bool(true));
    stop.or(ignores_eos.then_some("ignore_eos"))
}

fn conflict(param: &str, other: &str) -> ApiError {
    let message = format!("'{param}' and '{other}' both constrain the answer: give only one of them");
    ApiError::invalid(param, message)
}

fn cut_error(cut: &str, param: &str) -> ApiError {
    let reason = match cut {
        "ignore_eos" => "the answer ends where its form is complete",
        _ => "it could cut the answer before its form is complete",
    };
    ApiError::invalid(cut, format!("'{cut}' cannot be given together with '{param}': {reason}"))
}

/// Parses `response_format`, of OpenAI, and of llama.cpp, where a `json_object` may have a schema.
fn parse_response_format(fields: &mut Fields) -> Result<Option<NamedForm>, ApiError> {
    let Some(members) = fields.take_object("response_format")? else { return Ok(None) };
    let mut format = fields.nested("response_format", members);
    let path = format.path("type");
    let kind = format.take_string("type")?;
    let kind = kind.ok_or_else(|| ApiError::invalid(&*path, format!("'{path}' is missing")))?;
    let form = match kind.as_str() {
        "text" => None,
        "json_object" => {
            let schema = take_form(&mut format, "schema", ValueKind::Schema)?;
            Some(schema.unwrap_or(("response_format".to_owned(), Form::JsonObject)))
        }
        "json_schema" => {
            let path = format.path("json_schema");
            let missing = |path: &str| ApiError::invalid(path, format!("'{path}' is missing"));
            let members = format.take_object("json_schema")?.ok_or_else(|| missing(&path))?;
            let mut wrapper = format.nested(&path, members);
            wrapper.take_string("name")?;
            wrapper.take_bool("strict", true)?;
            let schema = take_form(&mut wrapper, "schema", ValueKind::Schema)?;
            let schema = schema.ok_or_else(|| missing(&wrapper.path("schema")))?;
            wrapper.finish(&[&[("description", NoOpValue::Any)]])?;
            Some(schema)
        }
        other => {
            let message = format!(
                "'{path}' is \"{}\", which is not supported: use \"text\", \"json_object\" or \
                 \"json_schema\"",
                shorten(other)
            );
            return Err(ApiError::unsupported(path, message));
        }
    };
    format.finish(&[])?;
    Ok(form)
}

/// Parses vLLM's `structured_outputs`. Returns whether JSON may have spaces.
fn parse_structured_outputs(fields: &mut Fields, forms: &mut Vec<NamedForm>) -> Result<bool, ApiError> {
    const PARAM: &str = "structured_outputs";
    let Some(members) = fields.take_object(PARAM)? else { return Ok(false) };
    let mut outputs = fields.nested(PARAM, members);
    let before = forms.len();
    take_forms(&mut outputs, &STRUCTURED_OUTPUTS, forms)?;
    let is_compact = outputs.take_bool("disable_any_whitespace", true)?;
    outputs.finish(&[UNSUPPORTED_STRUCTURED_OUTPUTS])?;
    if forms.len() == before {
        let names = STRUCTURED_OUTPUTS.map(|(name, _)| name).join(", ");
        return Err(ApiError::invalid(PARAM, format!("'{PARAM}' must have one of {names}")));
    }
    Ok(!is_compact)
}

fn take_forms(
    fields: &mut Fields,
    names: &[(&str, ValueKind)],
    forms: &mut Vec<NamedForm>,
) -> Result<(), ApiError> {
    for (name, kind) in names {
        forms.extend(take_form(fields, name, *kind)?);
    }
    Ok(())
}

/// Takes out a parameter that names a form. Empty grammars and a false `json_object` ask for nothing.
fn take_form(fields: &mut Fields, name: &str, kind: ValueKind) -> Result<Option<NamedForm>, ApiError> {
    let Some(value) = fields.take(name) else { return Ok(None) };
    let path = fields.path(name);
    let shown = describe(&value);
    let form = match (kind, value) {
        (ValueKind::Schema, Value::String(text)) => Ok(Form::JsonSchema(text.into())),
        (ValueKind::Schema, value @ (Value::Object(_) | Value::Bool(_))) => {
            Ok(Form::JsonSchema(value.to_string().into()))
        }
        (ValueKind::Schema, _) => Err("a JSON schema: an object, or its JSON text"),
        (ValueKind::Regex, Value::String(text)) => Ok(Form::Regex(text.into())),
        (ValueKind::Grammar, Value::String(text)) if text.trim().is_empty() => return Ok(None),
        (ValueKind::Grammar, Value::String(text)) => Ok(Form::Grammar(text.into())),
        (ValueKind::Regex | ValueKind::Grammar, _) => Err("a string"),
        (ValueKind::Choice, Value::Array(list)) => {
            let text = |value| if let Value::String(text) = value { Some(text) } else { None };
            let choices: Option<Vec<String>> = list.into_iter().map(text).collect();
            choices.map(|choices| Form::Choice(choices.into())).ok_or("a list of strings")
        }
        (ValueKind::Choice, _) => Err("a list of strings"),
        (ValueKind::JsonObject, Value::Bool(true)) => Ok(Form::JsonObject),
        (ValueKind::JsonObject, Value::Bool(false)) => return Ok(None),
        (ValueKind::JsonObject, _) => Err("true or false"),
    };
    match form {
        Ok(form) => Ok(Some((path, form))),
        Err(expected) => {
            let message = format!("'{path}' must be {expected}, not {shown}");
            Err(ApiError::invalid(path, message))
        }
    }
}
