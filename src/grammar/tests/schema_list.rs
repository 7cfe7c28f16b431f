//! JSON schemas across the keywords that are served, with bounded values, as in the JSON-Schema-Test-Suite.

use serde_json::{Value, json};

/// Schemas written by hand, a few per keyword.
pub fn written() -> Vec<Value> {
    let text = include_str!("schemas.jsonl");
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}")))
        .collect()
}

/// Schemas made of parts: each scalar within each container.
pub fn combined() -> Vec<Value> {
    let scalars = [
        json!({ "type": "integer", "minimum": -20, "maximum": 300 }),
        json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 2.5 }),
        json!({ "type": "string", "minLength": 1, "maxLength": 5 }),
        json!({ "type": "string", "pattern": "^[a-f]{2}[0-9.]$" }),
        json!({ "enum": ["a", 1, null, true, 2.5, ["x"], { "k": "v" }] }),
        json!({ "type": ["boolean", "null"] }),
        json!({ "type": "string", "format": "date" }),
        json!({ "type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500 }),
        json!({ "anyOf": [{ "type": "integer", "minimum": 5, "maximum": 9 }, { "const": "none" }] }),
        json!({ "$ref": "#/$defs/word" }),
        json!({ "type": "string", "maxLength": 3, "pattern": r"\s" }),
        json!({ "type": "number", "minimum": -1.25, "exclusiveMaximum": 10, "multipleOf": 0.25 }),
    ];
    let word = json!({ "word": { "type": "string", "pattern": "^(foo|bar|日本)$" } });
    let containers = [
        |item: &Value| json!({ "type": "array", "items": item, "minItems": 1, "maxItems": 3 }),
        |item: &Value| json!({ "type": "array", "prefixItems": [item, { "type": "null" }], "items": false }),
        |item: &Value| {
            json!({ "type": "object", "properties": { "a": item, "b": item }, "required": ["b"],
                "additionalProperties": false })
        },
        |item: &Value| {
            json!({ "type": "object", "properties": { "a": { "type": "null" } }, "maxProperties": 2,
                "required": ["a"], "patternProperties": { "^x.?$": item }, "additionalProperties": false })
        },
        |item: &Value| {
            json!({ "type": "object", "additionalProperties": item, "minProperties": 1,
            "maxProperties": 2 })
        },
        |item: &Value| {
            json!({ "allOf": [{ "type": "object", "properties": { "k": item } },
            { "required": ["k"], "additionalProperties": false, "properties": { "k": {} } }] })
        },
        |item: &Value| {
            json!({ "anyOf": [{ "type": "boolean" },
            { "type": "array", "items": item, "maxItems": 2 }] })
        },
        |item: &Value| {
            json!({ "type": "object", "properties": { "deep": { "type": "object",
            "properties": { "er": { "type": "array", "items": item, "maxItems": 2 } }, "required": ["er"],
            "additionalProperties": false } }, "required": ["deep"], "additionalProperties": false })
        },
        |item: &Value| {
            json!({ "type": "array", "items": { "type": "object", "properties": { "v": item },
            "additionalProperties": false }, "maxItems": 2 })
        },
        |item: &Value| {
            json!({ "oneOf": [{ "type": "null" }, { "type": "object", "properties": { "x": item },
            "required": ["x"], "additionalProperties": false }] })
        },
        |item: &Value| {
            json!({ "items": item, "type": "array", "maxItems": 2, "uniqueItems": false,
            "deprecated": true, "title": "t" })
        },
    ];
    let with_definitions = |mut schema: Value| {
        schema["$defs"] = word.clone();
        schema
    };
    let pairs = containers.iter().flat_map(|container| scalars.iter().map(container));
    pairs.map(with_definitions).collect()
}
