//! Grammars in llguidance's dialect of Lark: those of users are checked, those of other forms are written.

use crate::{Calls, Form, GrammarError, Limits, Piece, gbnf, json_schema};
use serde_json::Value;

/// Attributes of rules that need control of sampling, or remove text that was generated.
const ATTRIBUTES: [&str; 4] = ["temperature", "max_tokens", "stop", "stop_capture"];

/// Statements with options of the engine.
const ENGINE_OPTIONS: &str = "%llguidance";

/// Returns the grammar of a regular expression that matches a whole text.
pub(crate) fn regex(regex: &str, limits: &Limits) -> Result<String, GrammarError> {
    if regex.len() > limits.regex_bytes {
        let reason = format!("{} bytes: at most {}", regex.len(), limits.regex_bytes);
        return Err(GrammarError::refused("regex", reason));
    }
    if regex.is_empty() {
        return Err(GrammarError::refused("regex", "matches only the empty text"));
    }
    Ok(format!("start: /{}/", llguidance::regex_to_lark(regex, "")))
}

/// Returns the grammar of one of several strings.
pub(crate) fn choice(choices: &[String], limits: &Limits) -> Result<String, GrammarError> {
    let refused = |reason: String| Err(GrammarError::refused("choice", reason));
    if choices.is_empty() || choices.len() > limits.choices {
        return refused(format!("{} strings: between 1 and {} are supported", choices.len(), limits.choices));
    }
    if let Some(at) = choices.iter().position(String::is_empty) {
        return refused(format!("string {at} is empty"));
    }
    let strings: Vec<String> = choices.iter().map(|choice| literal(choice)).collect();
    Ok(format!("start: CHOICE\nCHOICE: {}", strings.join(" | ")))
}

/// Returns the grammar of a form that is not JSON alone, and the schemas in it with their places.
pub(crate) fn form(
    form: &Form,
    spaces: bool,
    limits: &Limits,
) -> Result<(String, Vec<(String, Value)>), GrammarError> {
    let text = match form {
        Form::Calls(calls) => return self::calls(calls, spaces, limits),
        Form::Regex(text) => regex(text, limits)?,
        Form::Choice(choices) => choice(choices, limits)?,
        Form::Grammar(text) if gbnf::is_gbnf(text) => gbnf::to_lark(text, limits)?,
        Form::Grammar(text) => check(text, limits)?,
        Form::JsonObject => format!("start: %json {}", json_schema::any_object(spaces)),
        Form::JsonSchema(text) => format!("start: %json {}", json_schema::prepare(text, spaces, limits)?),
    };
    Ok((text, Vec::new()))
}

/// Returns the grammar of calls, and their schemas with their places.
fn calls(
    calls: &Calls,
    spaces: bool,
    limits: &Limits,
) -> Result<(String, Vec<(String, Value)>), GrammarError> {
    let refused = |reason: String| Err(GrammarError::refused("calls", reason));
    if calls.calls.is_empty() || calls.calls.len() > limits.choices.min(limits.rules) {
        return refused(format!(
            "{} functions: between 1 and {} are supported",
            calls.calls.len(),
            limits.rules
        ));
    }
    let max = calls.max.unwrap_or(u32::MAX);
    if calls.min == 0 || calls.min > max || calls.min > i32::MAX as u32 {
        return refused(format!("between {} and {max} calls is not a range", calls.min));
    }
    let more = match (calls.min - 1, calls.max.map(|max| (max - 1).min(i32::MAX as u32))) {
        (_, Some(0)) => String::new(),
        (0, None) => format!("({} call)*", pieces(&calls.separator)),
        (least, None) => format!("({} call){{{least},}}", pieces(&calls.separator)),
        (least, Some(most)) => format!("({} call){{{least},{most}}}", pieces(&calls.separator)),
    };
    let mut text = format!("start: {} call {more} {}\n", pieces(&calls.begin), pieces(&calls.end));
    let names: Vec<String> = (0..calls.calls.len()).map(|at| format!("call{at}")).collect();
    text += &format!("call: {}\n", names.join(" | "));
    let mut schemas = Vec::new();
    for (name, call) in names.iter().zip(&calls.calls) {
        let body = match &call.body {
            Form::JsonSchema(schema) => {
                let schema = json_schema::prepare(schema, spaces, limits);
                let schema = schema.map_err(|error| error.within(&call.place))?;
                let body = format!("%json {schema}");
                schemas.push((call.place.clone(), schema));
                body
            }
            Form::Calls(_) => return refused("calls within calls".to_owned()),
            body => format!("%lark {{\n{}\n}}", form(body, spaces, limits)?.0),
        };
        text += &format!("{name}: {} {body} {}\n", pieces(&call.prefix), pieces(&call.suffix));
    }
    Ok((text, schemas))
}

fn pieces(all: &[Piece]) -> String {
    let piece = |piece: &Piece| match piece {
        Piece::Text(text) => literal(text),
        Piece::Token(id) => format!("<[{id}]>"),
        Piece::AnyText => "/(?s:.)+/".to_owned(),
        Piece::Optional(some) => format!("({})?", pieces(some)),
    };
    all.iter().map(piece).collect::<Vec<_>>().join(" ")
}

/// Returns a string in Lark's syntax, which is JSON's without DEL.
pub(crate) fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Checks a user's grammar. Returns it with its JSON schemas rewritten as other schemas are, so that JSON is
/// compact in grammars too.
pub(crate) fn check(text: &str, limits: &Limits) -> Result<String, GrammarError> {
    let rules =
        text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_alphabetic() || "_!?".contains(c)));
    if rules.count() > limits.rules {
        return Err(GrammarError::refused("grammar", format!("more than {} rules", limits.rules)));
    }
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let at = || place(text, rest);
        let taken = match first {
            '"' => quoted(rest, '"'),
            '/' if rest.starts_with("//") => line(rest),
            '#' => line(rest),
            '/' => {
                let regex = quoted(rest, '/');
                if regex > limits.regex_bytes {
                    let reason =
                        format!("a regular expression of {regex} bytes: at most {}", limits.regex_bytes);
                    return Err(GrammarError::refused(at(), reason));
                }
                regex
            }
            '%' if rest.starts_with("%json") => {
                let (schema, taken) = embedded(&rest["%json".len()..], limits, &at())?;
                out += &format!("%json {schema}");
                rest = &rest["%json".len() + taken..];
                continue;
            }
            '%' if rest.starts_with(ENGINE_OPTIONS) => {
                let options = rest[ENGINE_OPTIONS.len()..].trim_start();
                if !options.starts_with("{}") {
                    return Err(GrammarError::refused(at(), "options of the engine are not supported"));
                }
                ENGINE_OPTIONS.len()
            }
            first if first.is_ascii_alphabetic() || first == '_' => {
                let name: usize =
                    rest.bytes().take_while(|b| b.is_ascii_alphanumeric() || b"_-".contains(b)).count();
                if ATTRIBUTES.contains(&&rest[..name]) && rest[name..].trim_start().starts_with('=') {
                    let reason = format!("the attribute '{}' is not supported", &rest[..name]);
                    return Err(GrammarError::refused(at(), reason));
                }
                name
            }
            first => first.len_utf8(),
        };
        out += &rest[..taken];
        rest = &rest[taken..];
    }
    Ok(out)
}

/// Reads the JSON schema at the beginning of `rest`. Returns it prepared, and its length in bytes.
fn embedded(rest: &str, limits: &Limits, at: &str) -> Result<(serde_json::Value, usize), GrammarError> {
    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<serde_json::Value>();
    let refused = |reason: String| GrammarError::refused(at, reason);
    let schema = values.next().ok_or_else(|| refused("'%json' needs a schema".to_owned()))?;
    let schema = schema.map_err(|error| refused(error.to_string()))?;
    let taken = values.byte_offset();
    let prepared = json_schema::prepare(&schema.to_string(), false, limits).map_err(|error| match error {
        GrammarError::Refused { part, reason } => refused(format!("{part}: {reason}")),
        other => other,
    })?;
    Ok((prepared, taken))
}

/// Returns the length of what is quoted at the beginning of `text`, quotes included; a quote behind a
/// backslash does not end it.
fn quoted(text: &str, quote: char) -> usize {
    let mut escaped = false;
    let end = text.char_indices().skip(1).find(|(_, c)| {
        let ends = !escaped && (*c == quote || *c == '\n');
        escaped = !escaped && *c == '\\';
        ends
    });
    end.map_or(text.len(), |(at, c)| at + c.len_utf8())
}

/// Returns the length of the first line without its end.
fn line(text: &str) -> usize {
    text.find('\n').unwrap_or(text.len())
}

/// Names the place of `rest`, which is the end of `text`.
pub(crate) fn place(text: &str, rest: &str) -> String {
    let before = &text[..text.len() - rest.len()];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    format!("grammar, line {line}, column {column}")
}
