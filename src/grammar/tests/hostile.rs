//! Specifications made to take long, to take much memory, or to overflow the stack.
//!
//! What is asserted is that they are refused, or compiled within the limits of work: time is not asserted.

use super::vocabularies::{Dice, TOY, compile, schema};
use crate::{Form, Grammar, GrammarError, Limits, Spec};
use serde_json::{Value, json};
use std::time::Instant;

fn nested(open: &str, close: &str, depth: usize) -> String {
    format!("{}1{}", open.repeat(depth), close.repeat(depth))
}

fn hostile() -> Vec<(&'static str, Form)> {
    let text = |text: String| Form::JsonSchema(text.into());
    let object = |members: Vec<(String, Value)>| Value::Object(members.into_iter().collect());
    let chain = |count: usize| {
        let link = |at: usize| {
            (format!("a{at}"), json!({ "properties": { "x": { "$ref": format!("#/$defs/a{}", at + 1) } } }))
        };
        let mut links: Vec<_> = (0..count).map(link).collect();
        links.push((format!("a{count}"), json!({ "type": "null" })));
        json!({ "$ref": "#/$defs/a0", "$defs": object(links) })
    };
    let deep_chain = |count: usize, depth: usize| {
        let link = |at: usize| {
            let inner = json!({ "$ref": format!("#/$defs/a{}", at + 1) });
            let nested = (0..depth).fold(inner, |schema, at| match at % 3 {
                0 => json!({ "items": schema }),
                1 => json!({ "allOf": [schema] }),
                _ => json!({ "properties": { "p": schema } }),
            });
            (format!("a{at}"), nested)
        };
        let mut links: Vec<_> = (0..count).map(link).collect();
        links.push((format!("a{count}"), json!({ "type": "null" })));
        json!({ "$ref": "#/$defs/a0", "$defs": object(links) })
    };
    let wide = |count: usize| {
        object((0..count).map(|at| (format!("p{at}"), json!({ "type": "integer" }))).collect())
    };
    let any_of = |count: usize| -> Value {
        (0..count).map(|at| json!({ "properties": { format!("k{at}"): { "type": "string" } } })).collect()
    };
    let many = |count: usize, each: &dyn Fn(usize) -> String| (0..count).map(each).collect::<String>();
    vec![
        ("arrays nested 10,000 deep", text(nested("{\"items\":", "}", 10_000))),
        ("objects nested 10,000 deep", text(nested("{\"properties\":{\"a\":", "}}", 10_000))),
        ("allOf nested 120 deep", text(nested("{\"allOf\":[", "]}", 55).replace('1', "{}"))),
        ("a constant nested 10,000 deep", text(format!("{{\"const\":{}}}", nested("[", "]", 10_000)))),
        ("2 MB", text(format!("{{\"title\":\"{}\"}}", "x".repeat(2 << 20)))),
        ("1 MB of title", text(format!("{{\"title\":\"{}\"}}", "x".repeat((1 << 20) - 20)))),
        ("a chain of 900 references", schema(&chain(900))),
        ("a chain of 490 references", schema(&chain(490))),
        ("a chain of 490 references in nested schemas", schema(&deep_chain(490, 18))),
        ("a chain of 40 references in nested schemas", schema(&deep_chain(40, 40))),
        ("a chain of 20,000 references", schema(&chain(20_000))),
        ("990 properties", schema(&json!({ "properties": wide(990) }))),
        (
            "990 properties in each of 9 objects",
            schema(&json!({ "prefixItems": vec![json!({ "properties": wide(990) }); 9] })),
        ),
        ("990 required properties", schema(&json!({ "properties": wide(990), "minProperties": 1 }))),
        ("30,000 properties", schema(&json!({ "properties": wide(30_000) }))),
        (
            "30,000 required names",
            schema(&json!({ "required": (0..30_000).map(|at| format!("r{at}")).collect::<Vec<_>>() })),
        ),
        ("2^20 combinations", schema(&json!({ "allOf": vec![json!({ "anyOf": any_of(2) }); 20] }))),
        ("100^5 combinations", schema(&json!({ "allOf": vec![json!({ "anyOf": any_of(100) }); 5] }))),
        ("oneOf of 1000 objects", schema(&json!({ "oneOf": any_of(1000) }))),
        (
            "anyOf of 5000 patterns",
            schema(&json!({ "anyOf": (0..5000).map(|at| json!({ "pattern": format!("^a{at}.*b$") }))
                    .collect::<Value>() })),
        ),
        ("enum of 100,000", schema(&json!({ "enum": (0..100_000).collect::<Vec<_>>() }))),
        (
            "enum of 9,000 strings",
            schema(&json!({ "enum": (0..9000).map(|at| format!("value {at}")).collect::<Vec<_>>() })),
        ),
        (
            "900 patterns of properties",
            schema(&json!({ "patternProperties":
            object((0..900).map(|at| (format!("^k{at}$"), json!({}))).collect()) })),
        ),
        (
            "minItems 10^9",
            schema(&json!({ "type": "array", "items": { "type": "null" }, "minItems": 1_000_000_000 })),
        ),
        ("maxItems 10^15", schema(&json!({ "type": "array", "maxItems": 1_000_000_000_000_000u64 }))),
        ("minLength 10^9", schema(&json!({ "type": "string", "minLength": 1_000_000_000 }))),
        ("minLength 10^15", schema(&json!({ "type": "string", "minLength": 1_000_000_000_000_000u64 }))),
        (
            "maxLength 10^6 with a pattern",
            schema(&json!({ "type": "string", "maxLength": 1_000_000, "pattern": "a.*b.*c" })),
        ),
        ("a reference to itself", schema(&json!({ "$ref": "#" }))),
        (
            "references in a circle",
            schema(&json!({ "$ref": "#/$defs/a",
                    "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } })),
        ),
        (
            "an endless object",
            schema(&json!({ "type": "object", "properties": { "a": { "$ref": "#" } }, "required": ["a"] })),
        ),
        (
            "intersection of endless trees",
            schema(&json!({ "allOf": [{ "$ref": "#/$defs/a" }, { "$ref": "#/$defs/b" }], "$defs": {
            "a": { "properties": { "c": { "$ref": "#/$defs/a" } } },
            "b": { "properties": { "c": { "$ref": "#/$defs/b" } } } } })),
        ),
        ("pattern (a+)+$", schema(&json!({ "type": "string", "pattern": "^(a+)+$" }))),
        (
            "pattern of 12 KB",
            schema(&json!({ "type": "string", "pattern": format!("^{}$", "(a|b)*c".repeat(1700)) })),
        ),
        ("200 characters of difference", Form::Regex("(a|b)*a(a|b){200}".into())),
        ("nested repetition", Form::Regex("((a{1000}){1000}){1000}".into())),
        ("nested repetition of classes", Form::Regex(r"((\w{1,100}\s?){1,100}!){1,100}".into())),
        ("groups nested 5,000 deep", Form::Regex(nested("(", ")", 5000).into())),
        ("groups nested 200 deep", Form::Regex(nested("(", "?)*", 200).into())),
        ("regex of 1 MB", Form::Regex("a|b".repeat(300_000).into())),
        ("regex of 15 KB alternatives", Form::Regex(many(2000, &|at| format!("{at}.*|")).into())),
        ("(.*x){60}", Form::Regex("(.*x){60}.*".into())),
        ("unicode classes", Form::Regex(r"(\p{L}\p{N}\p{P}){50}".into())),
        ("choice of 9,000", Form::Choice((0..9000).map(|at| format!("choice number {at}")).collect())),
        ("choice of 1 MB", Form::Choice([("ab".repeat(1 << 19))].into())),
        (
            "choice of 1 MB in 1000",
            Form::Choice((0..1000).map(|at| format!("{at}{}", "x".repeat(1000))).collect()),
        ),
        ("choice of nothing", Form::Choice([].into())),
        (
            "lark groups nested 10,000 deep",
            Form::Grammar(format!("start: {}\n", nested("(", ")", 10_000).replace('1', "\"a\"")).into()),
        ),
        (
            "lark chain of 900 rules",
            Form::Grammar(
                format!("start: r0\n{}r900: \"a\"\n", many(900, &|at| format!("r{at}: r{}\n", at + 1)))
                    .into(),
            ),
        ),
        (
            "lark chain of 900 terminals",
            Form::Grammar(
                format!(
                    "start: R0\n{}R900: \"a\"\n",
                    many(900, &|at| format!("R{at}: R{} \"x\"?\n", at + 1))
                )
                .into(),
            ),
        ),
        (
            "lark chain of 30,000 rules",
            Form::Grammar(
                format!("start: r0\n{}r30000: \"a\"\n", many(30_000, &|at| format!("r{at}: r{}\n", at + 1)))
                    .into(),
            ),
        ),
        (
            "lark doubling 60 times",
            Form::Grammar(
                format!(
                    "start: r0\n{}r60: \"a\"\n",
                    many(60, &|at| format!("r{at}: r{} r{}\n", at + 1, at + 1))
                )
                .into(),
            ),
        ),
        (
            "lark doubling of terminals",
            Form::Grammar(
                format!(
                    "start: R0\n{}R60: \"a\" | \"b\"\n",
                    many(60, &|at| format!("R{at}: R{} R{}\n", at + 1, at + 1))
                )
                .into(),
            ),
        ),
        ("lark ambiguity", Form::Grammar("start: e\ne: e e | e e e | \"a\" | \"a\" \"a\" |\n".into())),
        ("lark without an end", Form::Grammar("start: start \"a\"\n".into())),
        ("lark repeated 10^9 times", Form::Grammar("start: (\"a\" | \"b\" start){1000000000}\n".into())),
        (
            "gbnf groups nested 10,000 deep",
            Form::Grammar(format!("root ::= {}\n", nested("(", ")", 10_000).replace('1', "\"a\"")).into()),
        ),
        (
            "gbnf chain of 30,000 rules",
            Form::Grammar(
                format!(
                    "root ::= r0\n{}r30000 ::= \"a\"\n",
                    many(30_000, &|at| format!("r{at} ::= r{}\n", at + 1))
                )
                .into(),
            ),
        ),
        (
            "gbnf chain of 900 rules",
            Form::Grammar(
                format!(
                    "root ::= r0\n{}r900 ::= \"a\" root?\n",
                    many(900, &|at| format!("r{at} ::= r{}\n", at + 1))
                )
                .into(),
            ),
        ),
        ("gbnf repeated 10^9 times", Form::Grammar("root ::= (\"a\" | \"b\" root){1000000000}\n".into())),
        (
            "gbnf nested repetition",
            Form::Grammar("root ::= ((([a-z]{1,99} root?){1,99} \".\"){1,99}){1,99}\n".into()),
        ),
        ("gbnf class of 1 MB", Form::Grammar(format!("root ::= [{}]\n", "a-z".repeat(300_000)).into())),
        ("gbnf ambiguity", Form::Grammar("root ::= root root | root root root | \"a\" | \n".into())),
    ]
}

#[test]
fn hostile_specifications_are_refused_or_stay_within_limits() {
    let mut dice = Dice(17);
    for (name, form) in hostile() {
        let begin = Instant::now();
        let compiled = compile(form);
        let compile_time = begin.elapsed();
        let outcome = match &compiled {
            Ok(grammar) => {
                // Some tokens: a limit ends the sequence with an error, never with a panic.
                let mut matcher = grammar.matcher();
                let mut mask = vec![0; TOY.mask_words()];
                let mut steps = 0;
                let stopped = loop {
                    if steps == 10 || matcher.is_complete() {
                        break None;
                    }
                    if let Err(error) = matcher.mask(&mut mask) {
                        break Some(error);
                    }
                    let allowed = super::vocabularies::bits(&mask);
                    if let Err(error) = matcher.accept(allowed[dice.below(allowed.len())]) {
                        break Some(error);
                    }
                    steps += 1;
                };
                assert!(!matches!(stopped, Some(GrammarError::Refused { .. } | GrammarError::Token(_))));
                format!(
                    "{} bytes, {steps} steps {:?}, {stopped:?}",
                    grammar.bytes(),
                    begin.elapsed() - compile_time
                )
            }
            Err(GrammarError::Refused { part, reason }) => {
                assert!(reason.len() < 1000 && !reason.contains('\n'));
                format!("{part}: {reason}")
            }
            Err(other) => panic!("{name}: {other}"),
        };
        println!("{name}: {compile_time:?}: {outcome}");
    }
}

#[test]
fn a_sequence_that_exceeds_a_limit_ends_with_an_error() {
    let limits = Limits { mask_items: 20, ..Limits::default() };
    let form = Form::Grammar("start: e\ne: e e | \"a\" | \"b\" | \"(\" e \")\"\n".into());
    let spec = Spec::new(form);
    match Grammar::compile(&spec, &TOY, &limits) {
        Err(GrammarError::Refused { reason, .. }) => assert_eq!(reason, "too complex"),
        Ok(grammar) => {
            let mut matcher = grammar.matcher();
            let mut mask = vec![0; TOY.mask_words()];
            let error = (0..200).find_map(|_| {
                matcher.accept(b'a'.into()).and_then(|()| matcher.mask(&mut mask).map(|_| ())).err()
            });
            assert!(matches!(error, Some(GrammarError::Stuck(_))), "{error:?}");
            assert!(matches!(matcher.mask(&mut mask), Err(GrammarError::Stuck(_))), "and stays so");
            assert!(!matcher.is_complete());
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_sequence_does_not_use_up_the_limits_of_another() {
    let limits = Limits { lexer_states: 700, ..Limits::default() };
    let spec = Spec::new(Form::Regex("(a|b)*a(a|b){12}c".into()));
    let grammar = Grammar::compile(&spec, &TOY, &limits).unwrap();
    let mut mask = vec![0; TOY.mask_words()];
    for seed in 1..30 {
        let (mut matcher, mut dice) = (grammar.matcher(), Dice(seed));
        for _ in 0..40 {
            matcher.mask(&mut mask).unwrap();
            matcher.accept(u32::from(b'a') + dice.below(2) as u32).unwrap();
        }
    }
}
