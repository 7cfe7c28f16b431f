//! JSON schemas: checked and rewritten before llguidance compiles them, so that errors name the place and
//! nothing is silently ignored.
//!
//! Invariant: text that the compiled schema accepts satisfies the schema as its author wrote it.

mod check;

mod disjoint;

mod formats;

mod names;

mod pattern;

mod pointer;

use crate::GrammarError;
use crate::limits::Budget;
use serde_json::{Map, Value, json};

/// Escapes that strings may have. Without `\u`, each string has exactly one spelling, so a property's name
/// cannot be written a second time in another spelling; characters are written as they are.
const ESCAPES: &str = "nrbtf\\\"";

/// Most blanks between two tokens of JSON, if there may be any.
const SPACES: &str = r"[\x20\x0A\x0D\x09]{1,40}";

/// Reads a schema from JSON text and returns it as llguidance compiles it, with the options of its dialect.
pub(crate) fn prepare(text: &str, spaces: bool, budget: &mut Budget) -> Result<Value, GrammarError> {
    let schema = serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        let deep = reason.starts_with("recursion limit");
        GrammarError::refused("$", if deep { "nested too deeply".to_owned() } else { reason })
    })?;
    let schema = match schema {
        Value::Bool(true) => json!({}),
        Value::Bool(false) => return Err(GrammarError::refused("$", "the schema allows no value")),
        schema => schema,
    };
    let mut schema = check::check(schema, budget)?;
    if let Value::Object(keywords) = &mut schema {
        keywords.insert("x-guidance".to_owned(), options(spaces));
    }
    Ok(schema)
}

/// Returns the schema of any JSON object.
pub(crate) fn any_object(spaces: bool) -> Value {
    json!({ "type": "object", "x-guidance": options(spaces) })
}

fn options(spaces: bool) -> Value {
    json!({
        "whitespace_flexible": spaces,
        "whitespace_pattern": spaces.then_some(SPACES),
        "json_allowed_escapes": ESCAPES,
    })
}

/// Most schemas that are tried alone.
const LEAVES: usize = 100;

/// Returns the first schemas within the one at `place` that have a value of their own to check (a string or a
/// number), with their paths, to find the one that llguidance refuses.
pub(crate) fn leaves(place: &str, schema: &Value) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    collect_leaves(schema, place, &mut found);
    found
}

/// Keywords of strings and numbers that llguidance may refuse. Each is tried alone, with the type.
const LEAF_KEYWORDS: [&str; 9] = [
    "pattern",
    "format",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

fn collect_leaves(schema: &Value, path: &str, found: &mut Vec<(String, Value)>) {
    match schema {
        _ if found.len() >= LEAVES => {}
        Value::Object(keywords) => {
            for (name, value) in keywords {
                let path = child_path(path, name);
                if LEAF_KEYWORDS.contains(&name.as_str()) && !value.is_object() {
                    let mut alone = Map::new();
                    let types = keywords.get("type");
                    alone.extend(types.map(|types| ("type".to_owned(), types.clone())));
                    alone.insert(name.clone(), value.clone());
                    found.push((path, Value::Object(alone)));
                } else {
                    collect_leaves(value, &path, found);
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect_leaves(item, &format!("{path}[{index}]"), found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns the path of a member of an object, in the manner of JSONPath. Long paths end early.
fn child_path(path: &str, name: &str) -> String {
    const LONGEST: usize = 60;
    const LONGEST_PATH: usize = 500;
    if path.len() > LONGEST_PATH {
        return if path.ends_with("...") { path.to_owned() } else { format!("{path}...") };
    }
    let plain = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "_$-".contains(c));
    match name.char_indices().nth(LONGEST) {
        Some((cut, _)) => format!("{path}[{:?}...]", &name[..cut]),
        None if plain(name) && !name.is_empty() => format!("{path}.{name}"),
        None => format!("{path}[{name:?}]"),
    }
}
