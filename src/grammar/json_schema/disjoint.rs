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

/// Most work of examining a schema, in properties.
const WORK: usize = 200_000;

/// Renames every `oneOf` of a schema whose options are disjoint to `anyOf`, which means the same then.
pub fn resolve(schema: &mut Value) {
    let root = schema.clone();
    rename(schema, &mut Search { root: &root, work: 0 });
}

/// The schema that options refer to, and the work so far.
struct Search<'a> {
    root: &'a Value,
    work: usize,
}

/// An option with the names that it requires.
struct Object<'a> {
    keywords: &'a Map<String, Value>,
    required: HashSet<&'a str>,
}

fn rename(schema: &mut Value, search: &mut Search) {
    match schema {
        Value::Object(keywords) => {
            let disjoint =
                keywords.get("oneOf").and_then(Value::as_array).is_some_and(|all| exclusive(all, search));
            if disjoint && !keywords.contains_key("anyOf") {
                let renamed = std::mem::take(keywords).into_iter();
                let name = |name: String| if name == "oneOf" { "anyOf".to_owned() } else { name };
                *keywords = renamed.map(|(key, value)| (name(key), value)).collect();
            }
            let schemas = keywords.iter_mut().filter(|(name, _)| !matches!(name.as_str(), "const" | "enum"));
            schemas.for_each(|(_, value)| rename(value, search));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| rename(item, search)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns whether some property is required by all options, as a different constant string in each. Assumes
/// that none is if there is too much to compare.
fn exclusive(options: &[Value], search: &mut Search) -> bool {
    if options.len() > OPTIONS {
        return false;
    }
    let mut objects = Vec::new();
    for option in options {
        let Some(keywords) = object(option, search.root) else { return false };
        let required = keywords.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        search.work += CHAIN + required.len();
        if search.work > WORK {
            return false;
        }
        objects.push(Object { keywords, required: required.iter().filter_map(Value::as_str).collect() });
    }
    let first = objects.first().and_then(|first| first.keywords.get("required")?.as_array());
    first.into_iter().flatten().filter_map(Value::as_str).any(|name| {
        let mut seen = HashSet::new();
        objects.iter().all(|object| {
            search.work += 1;
            search.work <= WORK && constant(object, name).is_some_and(|value| seen.insert(value))
        })
    })
}

/// Returns the constant that a required property of an object must be.
fn constant<'a>(object: &Object<'a>, name: &str) -> Option<&'a str> {
    if !object.required.contains(name) {
        return None;
    }
    let property = object.keywords.get("properties")?.get(name)?;
    let only = match property.get("enum").and_then(Value::as_array).map(Vec::as_slice) {
        Some([only]) => Some(only),
        _ => property.get("const"),
    };
    only?.as_str()
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
