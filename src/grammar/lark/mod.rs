//! Grammars in llguidance's dialect of Lark: those of users are checked, those of other forms are written.

mod tokens;

use crate::limits::Budget;
use crate::{Calls, Form, GrammarError, Limits, Piece, gbnf, json_schema};
use serde_json::Value;
use tokens::Token;

/// Attributes of rules that need control of sampling, or remove text that was generated.
const ATTRIBUTES: [&str; 4] = ["temperature", "max_tokens", "stop", "stop_capture"];

/// Returns the grammar of a regular expression that matches a whole text.
pub(crate) fn regex(regex: &str, limits: &Limits) -> Result<String, GrammarError> {
    if regex.len() > limits.regex_bytes {
        let reason = format!("{} bytes: at most {}", regex.len(), limits.regex_bytes);
        return Err(GrammarError::refused("regex", reason));
    }
    if regex.is_empty() {
        return Err(GrammarError::refused("regex", "matches only the empty text"));
    }
    if regex.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1 {
        // llguidance would drop it.
        return Err(GrammarError::refused("regex", "ends with a backslash"));
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
    budget: &mut Budget,
) -> Result<(String, Vec<(String, Value)>), GrammarError> {
    let text = match form {
        Form::Calls(calls) => return self::calls(calls, spaces, budget),
        Form::Regex(text) => regex(text, budget.limits)?,
        Form::Choice(choices) => choice(choices, budget.limits)?,
        Form::Grammar(text) if gbnf::is_gbnf(text) => gbnf::to_lark(text, budget)?,
        Form::Grammar(text) => check(text, budget)?,
        Form::JsonObject => format!("start: %json {}", json_schema::any_object(spaces)),
        Form::JsonSchema(text) => format!("start: %json {}", json_schema::prepare(text, spaces, budget)?),
    };
    Ok((text, Vec::new()))
}

/// Returns the grammar of calls, and their schemas with their places.
fn calls(
    calls: &Calls,
    spaces: bool,
    budget: &mut Budget,
) -> Result<(String, Vec<(String, Value)>), GrammarError> {
    let limits = budget.limits;
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
                let schema = json_schema::prepare(schema, spaces, budget);
                let schema = schema.map_err(|error| error.within(&call.place))?;
                let body = format!("%json {schema}");
                schemas.push((call.place.clone(), schema));
                body
            }
            Form::Calls(_) => return refused("calls within calls".to_owned()),
            body => format!("%lark {{\n{}\n}}", form(body, spaces, budget)?.0),
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
pub(crate) fn check(text: &str, budget: &mut Budget) -> Result<String, GrammarError> {
    let limits = budget.limits;
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    // The last token that is not blank.
    let mut last = "";
    while !rest.is_empty() {
        let refused = |reason: String| Err(GrammarError::refused(place(text, rest), reason));
        let Some((token, mut taken)) = tokens::first(rest) else {
            return refused("no name, string, regular expression or sign that is known".to_owned());
        };
        budget.tokens += 1;
        if budget.tokens > limits.tokens {
            return refused(format!("more than {} tokens", limits.tokens));
        }
        let all = &rest[..taken];
        match token {
            Token::Colon => {
                budget.rules += 1;
                if budget.rules > limits.rules {
                    return Err(GrammarError::refused(
                        "grammar",
                        format!("more than {} rules", limits.rules),
                    ));
                }
            }
            Token::Regex if taken > limits.regex_bytes => {
                let most = limits.regex_bytes;
                return refused(format!("a regular expression of {taken} bytes: at most {most}"));
            }
            Token::Regex => {
                budget.all_regex_bytes += taken;
                if budget.all_regex_bytes > limits.all_regex_bytes {
                    return refused("too many long regular expressions".to_owned());
                }
            }
            Token::Other if all == "=" && ATTRIBUTES.contains(&last) => {
                return refused(format!("the attribute '{last}' is not supported"));
            }
            Token::Json | Token::Substring | Token::Options => {
                let (json, len) = match json(&rest[taken..]) {
                    Ok(found) => found,
                    Err(reason) => return refused(format!("'{all}' needs JSON: {reason}")),
                };
                taken += len;
                // What llguidance reads after JSON depends on what separates it from the word before it.
                out += &format!("{all} {}", embedded(token, json, budget).or_else(refused)?);
            }
            Token::Blank | Token::Name | Token::Other => {}
        }
        if !matches!(token, Token::Json | Token::Substring | Token::Options) {
            out += all;
        }
        if token != Token::Blank {
            last = all;
        }
        rest = &rest[taken..];
    }
    Ok(out)
}

/// Reads the JSON at the beginning of a text. Returns it, and its length with the blanks before it.
fn json(text: &str) -> Result<(&str, usize), String> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    match values.next() {
        Some(Ok(_)) => Ok((text[..values.byte_offset()].trim_start(), values.byte_offset())),
        Some(Err(error)) => Err(error.to_string()),
        None => Err("the grammar ends".to_owned()),
    }
}

/// Checks the JSON behind a token. Returns it as it is served, or why it is refused.
fn embedded(token: Token, json: &str, budget: &mut Budget) -> Result<String, String> {
    let limits = budget.limits;
    budget.embedded += 1;
    if budget.embedded > limits.embedded {
        return Err(format!("more than {} schemas", limits.embedded));
    }
    match token {
        Token::Json => match json_schema::prepare(json, false, budget) {
            Ok(schema) => Ok(schema.to_string()),
            Err(GrammarError::Refused { part, reason }) => Err(format!("{part}: {reason}")),
            Err(other) => Err(other.to_string()),
        },
        Token::Options if json != "{}" => Err("options of the engine are not supported".to_owned()),
        _ if json.len() > limits.regex_bytes => {
            Err(format!("an expression of {} bytes: at most {}", json.len(), limits.regex_bytes))
        }
        _ => Ok(json.to_owned()),
    }
}

/// Names the place of `rest`, which is the end of `text`.
pub(crate) fn place(text: &str, rest: &str) -> String {
    let before = &text[..text.len() - rest.len()];
    let line = before.matches('\n').count() + 1;
    let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
    format!("grammar, line {line}, column {column}")
}
