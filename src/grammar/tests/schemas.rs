//! Answers under JSON schemas, checked by an independent validator, and schemas that are refused.

use super::schema_list::{combined, written};
use super::vocabularies::{DEMO, Dice, TOY, compile, generate, schema};
use crate::{Form, Grammar, GrammarError, Limits, Spec};
use serde_json::{Value, json};

/// Validates an answer with the crate `jsonschema`, formats included.
fn validate(schema: &Value, answer: &[u8]) -> Result<(), String> {
    let value: Value = match serde_json::from_slice(answer) {
        // A number may have any exponent unless the schema bounds it.
        Err(error) if error.to_string().contains("out of range") => return Ok(()),
        value => value.map_err(|error| error.to_string())?,
    };
    let validator = jsonschema::options().should_validate_formats(true).build(schema);
    validator
        .unwrap_or_else(|error| panic!("{schema}: {error}"))
        .validate(&value)
        .map_err(|error| error.to_string())
}

#[test]
fn answers_that_end_satisfy_their_schema() {
    let mut dice = Dice(2024);
    let schemas: Vec<Value> = written().into_iter().chain(combined()).collect();
    assert!(schemas.len() >= 200, "{}", schemas.len());
    let (mut ended, mut cut) = (0, 0);
    for (at, text) in schemas.iter().enumerate() {
        let vocabulary = if at % 2 == 0 { &*TOY } else { &*DEMO };
        let spec = Spec::with_spaces(schema(text), at % 5 == 0);
        let grammar = Grammar::compile(&spec, vocabulary, &Limits::default());
        let grammar = grammar.unwrap_or_else(|error| panic!("{text}\n{error}"));
        for _ in 0..6 {
            let Some(answer) = generate(&mut grammar.matcher(), vocabulary, &mut dice, 400) else {
                cut += 1;
                continue;
            };
            ended += 1;
            if let Err(error) = validate(text, &answer) {
                panic!("{text}\n{}\n{error}", String::from_utf8_lossy(&answer));
            }
        }
    }
    assert!(ended >= 1000, "{ended} ended, {cut} were cut");
}

#[test]
fn any_object_is_a_json_object() {
    let mut dice = Dice(8);
    let grammar = compile(Form::JsonObject).unwrap();
    let mut ended = 0;
    for _ in 0..60 {
        let Some(answer) = generate(&mut grammar.matcher(), &TOY, &mut dice, 600) else { continue };
        match serde_json::from_slice::<Value>(&answer) {
            Ok(value) => assert!(value.is_object()),
            Err(error) => assert!(error.to_string().contains("out of range"), "{error}"),
        }
        ended += 1;
    }
    assert!(ended > 5, "{ended}");
}

#[test]
fn a_property_cannot_be_written_again_in_another_spelling() {
    let form = json!({ "type": "object", "properties": { "a": { "const": 1 } }, "required": ["a"] });
    let mut matcher = compile(schema(&form)).unwrap().matcher();
    for byte in *br#"{"a":1,""# {
        matcher.accept(byte.into()).unwrap();
    }
    assert!(matcher.fork().accept(b'b'.into()).is_ok());
    matcher.accept(b'\\'.into()).unwrap();
    assert!(matcher.accept(b'u'.into()).is_err(), "\\u0061 would be 'a'");
}

#[test]
fn refused_schemas_name_the_part_and_the_reason() {
    let cases = [
        (json!({ "properties": { "a": { "not": {} } } }), "$.properties.a.not"),
        (json!({ "items": { "if": {}, "then": {} } }), "$.items.if"),
        (json!({ "type": "string", "pattern": "^a{,5}$" }), "$.pattern"),
        (json!({ "properties": { "a": {} }, "allOf": [{ "$ref": "#/properties" }] }), "$.allOf[0].$ref"),
        (json!({ "anyOf": [{}, { "$ref": "#/anyOf/00" }] }), "$.anyOf[1].$ref"),
        (json!({ "anyOf": [{}, { "contains": {} }] }), "$.anyOf[1].contains"),
        (json!({ "uniqueItems": true, "type": "array" }), "$.uniqueItems"),
        (json!({ "$defs": { "x": { "propertyNames": {} } } }), "$.$defs.x.propertyNames"),
        (json!({ "dependentRequired": {} }), "$.dependentRequired"),
        (json!({ "unevaluatedProperties": false }), "$.unevaluatedProperties"),
        (json!({ "x-guidance": { "lenient": true } }), "$.x-guidance"),
        (
            json!({ "properties": { "a b": { "type": "string", "pattern": "(" } } }),
            "$.properties[\"a b\"].pattern",
        ),
        (json!({ "type": "string", "pattern": "(?=a)b" }), "$.pattern"),
        (json!({ "type": "string", "pattern": r"a\b" }), "$.pattern"),
        (json!({ "type": "string", "pattern": "(?i)a" }), "$.pattern"),
        (json!({ "type": "string", "format": "shoe-size" }), "$.format"),
        (json!({ "type": "string", "maxLength": -1 }), "$.maxLength"),
        (json!({ "type": "string", "minLength": "2" }), "$.minLength"),
        (json!({ "type": "string", "minLength": 1_000_000_000_000u64 }), "$.minLength"),
        (json!({ "type": "integer", "minimum": 1e300 }), "$.minimum"),
        (json!({ "type": "integer", "maximum": "x" }), "$.maximum"),
        (json!({ "const": 9007199254740993u64 }), "$.const"),
        (json!({ "enum": ["\u{1}"] }), "$.enum"),
        (json!({ "type": "number", "multipleOf": 0 }), "$.multipleOf"),
        (json!({ "type": "number", "multipleOf": 1e-9 }), "$.multipleOf"),
        (json!({ "allOf": [{ "multipleOf": 65521 }, { "multipleOf": 65519 }] }), "$.allOf[1].multipleOf"),
        (json!({ "type": "object", "minProperties": 2 }), "$.minProperties"),
        (json!({ "$ref": "https://example.com/schema" }), "$.$ref"),
        (json!({ "$ref": "#/$defs/missing" }), "$.$ref"),
        (json!({ "properties": { "a": { "$id": "b" } } }), "$.properties.a.$id"),
        (json!({ "properties": { "a": 1 } }), "$.properties.a"),
        (json!({ "oneOf": [{ "type": "object" }, { "type": "object" }] }), "$"),
        (json!({ "type": "shoe" }), "$"),
        (json!({ "type": "integer", "minimum": 3, "maximum": 2 }), "$"),
        (json!({ "allOf": [{ "type": "string" }, { "type": "null" }] }), "$"),
        (json!(false), "$"),
        (json!([]), "$"),
    ];
    for (text, place) in cases {
        match compile(schema(&text)) {
            Err(GrammarError::Refused { part, reason }) => {
                assert_eq!(part, place, "{text}: {reason}");
                assert!(!reason.contains('\n') && reason.len() < 400, "{reason}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    assert!(compile(Form::JsonSchema("{".into())).is_err());
    assert!(compile(schema(&json!(true))).is_ok());
}

#[test]
fn patterns_have_the_meaning_of_json_schema() {
    // Text that the syntax of the crate `regex` would match, but ECMAScript's does not.
    for (pattern, text) in
        [("^.$", "\r"), (r"^\s$", "\u{85}"), (r"^\d$", "٣"), (r"^\w$", "é"), ("^[a&&b]$", "c")]
    {
        let grammar = compile(schema(&json!({ "type": "string", "pattern": pattern }))).unwrap();
        let mut matcher = grammar.matcher();
        let written = Value::from(text).to_string();
        let refused = written.bytes().any(|byte| matcher.accept(byte.into()).is_err());
        assert!(refused, "{pattern} {text:?}");
    }
    let mut matcher = compile(schema(&json!({ "type": "string", "pattern": "^[a&&b]$" }))).unwrap().matcher();
    assert!("\"&\"".bytes().all(|byte| matcher.accept(byte.into()).is_ok()), "a literal character");
}
