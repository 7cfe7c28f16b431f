//! `oneOf` whose options exclude each other by a constant, as in discriminated unions, becomes `anyOf`.
//!
//! llguidance finds that itself unless the options are references.

use super::pointer::unescape_percent;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// Longest chain of references from an option to its object.
const CHAIN: usize = 8;

/// Most options of a `oneOf` that is examined.
const OPTIONS: usize = 1000;

/// Renames every `oneOf` of a schema whose options are disjoint to `anyOf`, which means the same then.
pub fn resolve(schema: &mut Value) {
    let root = schema.clone();
    rename(schema, &root);
}

fn rename(schema: &mut Value, root: &Value) {
    match schema {
        Value::Object(keywords) => {
            let disjoint =
                keywords.get("oneOf").and_then(Value::as_array).is_some_and(|all| exclusive(all, root));
            if disjoint && !keywords.contains_key("anyOf") {
                let renamed = std::mem::take(keywords).into_iter();
                let name = |name: String| if name == "oneOf" { "anyOf".to_owned() } else { name };
                *keywords = renamed.map(|(key, value)| (name(key), value)).collect();
            }
            let schemas = keywords.iter_mut().filter(|(name, _)| !matches!(name.as_str(), "const" | "enum"));
            schemas.for_each(|(_, value)| rename(value, root));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, root)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns whether some property is required by all options, as a different constant string in each.
fn exclusive(options: &[Value], root: &Value) -> bool {
    if options.len() > OPTIONS {
        return false;
    }
    let objects: Option<Vec<_>> = options.iter().map(|option| object(option, root)).collect();
    let Some(objects) = objects else { return false };
    let Some(first) = objects.first() else { return false };
    let required = first.get("required").and_then(Value::as_array).into_iter().flatten();
    required.filter_map(Value::as_str).any(|name| {
        let mut seen = HashSet::new();
        objects.iter().all(|object| constant(object, name).is_some_and(|value| seen.insert(value)))
    })
}

/// Returns the constant that a required property of an object must be.
fn constant<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    let required = object.get("required")?.as_array()?;
    let property = object.get("properties")?.get(name)?;
    let only = match property.get("enum").and_then(Value::as_array).map(Vec::as_slice) {
        Some([only]) => Some(only),
        _ => property.get("const"),
    };
    required.iter().any(|required| required == name).then_some(only?.as_str()?)
}

/// Returns the schema of type `object` that an option is or refers to.
fn object<'a>(option: &'a Value, root: &'a Value) -> Option<&'a Map<String, Value>> {
    let mut schema = option;
    for _ in 0..CHAIN {
        let Some(target) = schema.get("$ref").and_then(Value::as_str) else { break };
        schema = root.pointer(unescape_percent(target).strip_prefix('#')?)?;
    }
    schema.as_object().filter(|keywords| keywords.get("type").is_some_and(|kind| kind == "object"))
}
