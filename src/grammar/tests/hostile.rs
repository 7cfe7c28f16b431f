//! Specifications made to take long, to take much memory, or to overflow the stack.
//!
//! What is asserted is that they are refused, or compiled within the limits of work, in a time that leaves a
//! slow or busy machine room: what they take is printed.

use super::vocabularies::{Dice, TOY, compile, schema};
use crate::{Call, Calls, Form, Grammar, GrammarError, Limits, Spec};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// Longest time of compiling a specification, and of one mask, in time of CPUs where that is known.
const LONGEST: (Duration, Duration) = if cfg!(debug_assertions) {
    (Duration::from_secs(5), Duration::from_secs(1))
} else {
    (Duration::from_millis(500), Duration::from_millis(50))
};

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

/// Returns the text of many parts.
fn many(count: usize, each: &dyn Fn(usize) -> String) -> String {
    (0..count).map(each).collect()
}

/// Schemas whose parts multiply.
fn multiplying_schemas() -> Vec<(&'static str, Form)> {
    let text = |text: String| Form::JsonSchema(text.into());
    let long = "n".repeat(900_000);
    let deep = |inner: &str| {
        let name = "\u{e0001}".repeat(60);
        format!("{}{inner}{}", format!("{{\"properties\":{{\"{name}\":").repeat(50), "}}".repeat(50))
    };
    let empty = |count: usize| format!("[{}{{}}]", "{},".repeat(count - 1));
    let keywords = many(60_000, &|at| format!("\"k{at}\":1,"));
    let consts = |count: usize, twice: &str| {
        let properties = many(count, &|at| format!("\"p{at}\":{{\"const\":\"c{twice}\"}},"));
        let required = many(count, &|at| format!("\"p{at}\","));
        format!(
            "{{\"type\":\"object\",\"properties\":{{{}}},\"required\":[{}]}}",
            properties.trim_end_matches(','),
            required.trim_end_matches(',')
        )
    };
    let pairs = |count: usize, required: usize| {
        let pair = "{\"oneOf\":[{\"$ref\":\"#/$defs/a\"},{\"$ref\":\"#/$defs/a\"}]},";
        let all = pair.repeat(count);
        format!(
            "{{\"$defs\":{{\"a\":{}}},\"x\":[{}],\"anyOf\":[{}]}}",
            consts(required, ""),
            all.trim_end_matches(','),
            all.trim_end_matches(',')
        )
    };
    let distinct = {
        let all = many(40, &|at| format!("{},", consts(400, &at.to_string())));
        format!("{{\"oneOf\":[{all}{}]}}", consts(400, "0"))
    };
    let matched = |pattern: &str, name: &str| {
        text(json!({ "patternProperties": { pattern: {} }, "required": [name] }).to_string())
    };
    let names: Vec<String> = (0..900).map(|at| format!("{}{at}", "ab".repeat(400))).collect();
    let patterns: Vec<(String, Value)> =
        (0..9).map(|at| (format!("^{at}(a|b)*a(a|b){{200}}{}$", "x".repeat(9_000)), json!({}))).collect();
    let patterns = Value::Object(patterns.into_iter().collect());
    vec![
        (
            "10,000 schemas under a name of 900 KB",
            text(format!("{{\"properties\":{{\"{long}\":{{\"anyOf\":{}}}}}}}", empty(9_900))),
        ),
        ("9,000 schemas under long names", text(deep(&format!("{{\"anyOf\":{}}}", empty(9_000))))),
        ("60,000 keywords under long names", text(deep(&format!("{{{keywords}\"type\":\"null\"}}")))),
        (
            "20,000 refused leaves under long names",
            text(deep(&format!(
                "{{\"anyOf\":[{}{{\"pattern\":\"(?=a)\"}}]}}",
                "{\"minimum\":1},".repeat(9_000)
            ))),
        ),
        ("a reference of 900 KB", text(format!("{{\"$ref\":\"#/{long}\"}}"))),
        ("10,000 oneOf of 10,000 constants", text(pairs(6_000, 10_000))),
        ("250 oneOf of 1,000 constants", text(pairs(249, 1_000))),
        ("oneOf of 41 times 400 constants", text(distinct)),
        (
            "oneOf of 9,000 constants",
            text(
                format!("{{\"oneOf\":[{}1]}}", many(9_000, &|at| format!("{{\"const\":{at}}},")))
                    .replace(",1]}", "]}"),
            ),
        ),
        ("a name of 900 KB and a pattern", matched("^(a|b)*a(a|b){200}$", &"ab".repeat(450_000))),
        ("a name of 990 bytes and a pattern", matched("^(a|b)*a(a|b){200}$", &"ab".repeat(495))),
        (
            "a name of 500 bytes and nested patterns",
            matched("^((a|b){0,50}a){0,50}(a|b){200}$", &"ab".repeat(250)),
        ),
        ("a name and a pattern of 12 KB", matched(&"(a|b)*a(a|b){20}".repeat(750), &"ab".repeat(450))),
        (
            "900 names and a pattern",
            schema(&json!({ "patternProperties": { "^(a|b)*a(a|b){200}$": {} }, "required": names })),
        ),
        (
            "900 short names and 9 patterns",
            schema(&json!({ "patternProperties": patterns,
                "required": (0..900).map(|at| format!("{at}ab")).collect::<Vec<_>>() })),
        ),
    ]
}

/// Grammars whose parts multiply.
fn multiplying_grammars() -> Vec<(&'static str, Form)> {
    let grammar = |text: String| Form::Grammar(text.into());
    let letter = |at: usize| char::from_u32(0x4e00 + 2 * at as u32).unwrap();
    let ideographs = many(10_000, &|at| letter(at).to_string());
    let big = |count: usize| {
        let rules = many(20, &|at| format!("b{at} ::= [a-y]{{95}} \"{}\"\n", "z".repeat(at + 1)));
        let all = many(20, &|at| format!("| b{at} "));
        let starts = many(count, &|at| format!("| big \"{}\" root ", letter(at)));
        format!("root ::= \"end\" {starts}\nbig ::= {}\n{rules}", &all[2..])
    };
    let indented = many(70_000, &|at| format!(" a{at:x}:a{:x}", at + 1));
    let tool = |at: usize, body: Form| Call {
        place: format!("tools[{at}]"),
        prefix: vec![crate::Piece::Text(format!("<{at}>"))],
        body,
        suffix: vec![crate::Piece::Text("</>".to_owned())],
    };
    let calls = |count: usize, body: &dyn Fn(usize) -> Form| {
        let calls = (0..count).map(|at| tool(at, body(at))).collect();
        Form::Calls(Calls { begin: vec![], calls, separator: vec![], end: vec![], min: 1, max: None }.into())
    };
    let wide = |count: usize| -> Value {
        Value::Object((0..count).map(|at| (format!("p{at}"), json!({ "type": "integer" }))).collect())
    };
    let references = |count: usize| {
        let links =
            (0..count).map(|at| (format!("a{at}"), json!({ "$ref": format!("#/$defs/a{}", at + 1) })));
        let mut links: Vec<(String, Value)> = links.collect();
        links.push((format!("a{count}"), json!({})));
        json!({ "$ref": "#/$defs/a0", "$defs": Value::Object(links.into_iter().collect()) })
    };
    let patterns = |at: usize, count: usize| {
        let one = |n: usize| (format!("p{n}"), json!({ "pattern": format!("^x{at}_{n}(a|b)*a(a|b){{9}}$") }));
        json!({ "properties": Value::Object((0..count).map(one).collect()) })
    };
    vec![
        (
            "gbnf of 10,000 lexemes",
            grammar(format!(
                "root ::= \"a\" {}\n",
                many(10_000, &|at| format!("| \"{}\" root ", letter(at)))
            )),
        ),
        ("gbnf of a large lexeme before 10 others", grammar(big(10))),
        ("gbnf of a large lexeme before 5,000 others", grammar(big(5_000))),
        (
            "gbnf of 10,000 uses of a large class",
            grammar(format!("root ::= {}[b] root?\nc ::= [{ideographs}]\n", "c ".repeat(10_000))),
        ),
        (
            "gbnf of 9,000 repetitions of recursion",
            grammar(format!("root ::= \"a\" | {}\n", "root{2000} ".repeat(9_000))),
        ),
        (
            "gbnf of groups within groups",
            grammar(format!(
                "root ::= {}{} root?{}\n",
                "(".repeat(39),
                "\"ab\" ".repeat(9_000),
                ")".repeat(39)
            )),
        ),
        ("gbnf with a name of 900 KB", grammar(format!("root ::= {}\n", "n".repeat(900_000)))),
        ("lark of 130,000 schemas", grammar(format!("start: {}\n", "%json{} ".repeat(130_000)))),
        ("lark of 199 schemas", grammar(format!("start: {}\n", "%json {} ".repeat(199)))),
        (
            "lark of 190 wide schemas",
            grammar(format!(
                "start: {}\n",
                format!("%json {} ", json!({ "properties": wide(70) })).repeat(190)
            )),
        ),
        (
            "lark of 70,000 indented rules",
            grammar(format!("start: a0\n{} :\"x\"\n", indented.replace(" a", "\n a"))),
        ),
        ("lark of 70,000 rules in a line", grammar(format!("start: a0\n{indented}: \"x\"\n"))),
        ("lark groups nested 400,000 deep", grammar(format!("start: {}\n", "(".repeat(400_000)))),
        ("lark of 200,000 names", grammar(format!("start: {}\n", "a ".repeat(200_000)))),
        (
            "lark substring of 16 KB",
            grammar(format!(
                "start: S\nS: %regex {{\"substring_chars\":\"{}\"}}\n",
                many(16_000, &|at| char::from(b'a' + (at * at / 7 % 26) as u8).to_string())
            )),
        ),
        (
            "lark substring of 900 KB",
            grammar(format!("start: S\nS: %regex {{\"substring_chars\":\"{}\"}}\n", "ab".repeat(450_000))),
        ),
        (
            "lark of 60 regular expressions of 15 KB",
            grammar(format!(
                "start: {}\n",
                many(60, &|at| format!("/{at}{}/ ", "(a|b)*a(a|b){20}".repeat(900)))
            )),
        ),
        ("128 tools of wide objects", calls(128, &|_| schema(&json!({ "properties": wide(200) })))),
        ("128 tools of 70 properties", calls(128, &|_| schema(&json!({ "properties": wide(70) })))),
        ("128 tools of 20 properties", calls(128, &|_| schema(&json!({ "properties": wide(20) })))),
        ("128 tools of 100 references", calls(128, &|_| schema(&references(100)))),
        ("10 tools of 90 references", calls(10, &|_| schema(&references(90)))),
        ("128 tools of 90 patterns", calls(128, &|at| schema(&patterns(at, 90)))),
        ("99 tools of a pattern", calls(99, &|at| schema(&patterns(at, 1)))),
        ("900 tools with grammars", calls(900, &|at| grammar(format!("start: \"a{at}\" start?\n")))),
    ]
}

/// Measures a time that other programs do not lengthen: the lesser of what passed and what the process spent
/// on CPUs, which has units of 10 ms.
struct Clock(Instant, Option<Duration>);

impl Clock {
    fn start() -> Clock {
        Clock(Instant::now(), Clock::spent())
    }

    fn spent() -> Option<Duration> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        let ticks = stat.rsplit(')').next()?.split(' ').skip(12).take(2);
        Some(Duration::from_millis(10 * ticks.map(|ticks| ticks.parse().unwrap_or(0u64)).sum::<u64>()))
    }

    /// Returns the time that passed, and the lesser one.
    fn elapsed(&self) -> (Duration, Duration) {
        let passed = self.0.elapsed();
        let spent = Clock::spent().zip(self.1).map(|(now, start)| now.saturating_sub(start));
        (passed, spent.map_or(passed, |spent| spent.min(passed)))
    }
}

#[test]
fn hostile_specifications_are_refused_or_stay_within_limits() {
    let mut dice = Dice(17);
    let mut late = String::new();
    for (name, form) in hostile().into_iter().chain(multiplying_schemas()).chain(multiplying_grammars()) {
        let begin = Clock::start();
        let compiled = compile(form);
        let (passed, compile_time) = begin.elapsed();
        let (mut worst_passed, mut worst_mask) = Default::default();
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
                    let begin = Clock::start();
                    let masked = matcher.mask(&mut mask);
                    let (passed, mask_time) = begin.elapsed();
                    (worst_passed, worst_mask) = (passed.max(worst_passed), mask_time.max(worst_mask));
                    if let Err(error) = masked {
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
                    "{} bytes, {steps} steps, masks in {worst_passed:?} at most, {stopped:?}",
                    grammar.bytes()
                )
            }
            Err(GrammarError::Refused { part, reason }) => {
                assert!(part.len() < 1000, "{name}: {} bytes", part.len());
                assert!(reason.len() < 1000 && !reason.contains('\n'));
                format!("{part}: {reason}")
            }
            Err(other) => panic!("{name}: {other}"),
        };
        println!("{name}: {passed:?} ({compile_time:?}): {outcome}");
        if compile_time > LONGEST.0 || worst_mask > LONGEST.1 {
            writeln!(late, "{name}: {compile_time:?}, masks {worst_mask:?}").unwrap();
        }
    }
    assert!(late.is_empty(), "{late}");
}

/// Forms whose masks are as much work as possible, with the characters of their text.
fn slow_masks() -> Vec<(&'static str, Form, &'static str)> {
    let grammar = |text: &str| Form::Grammar(text.into());
    vec![
        ("ambiguous rules", grammar("start: e\ne: e e | e e e | \"a\" | \"b\" | \"(\" e \")\"\n"), "ab"),
        (
            "ambiguous rules that may be empty",
            grammar("start: e\ne: e e | e e e | f | \ng.1: e\nf: \"a\" g | g \"a\"\n"),
            "a",
        ),
        ("ambiguous nesting", grammar("start: e\ne: \"(\" e | \"(\" e \")\" | e e | \"(\"\n"), "(((("),
        ("200 characters of difference", Form::Regex("(a|b)*a(a|b){200}c".into()), "ab"),
        ("nested repetition", Form::Regex("((a|b){0,50}a){0,50}(a|b){0,200}c".into()), "ab"),
        (
            "many alternatives",
            Form::Regex(format!("({})c", vec!["(a|b)*a(a|b){30}b"; 400].join("|x?")).into()),
            "ab",
        ),
        ("(.*x){60}", Form::Regex("(.*x){60}.*".into()), "xay"),
        (
            "intersections",
            schema(&json!({ "type": "string", "minLength": 300, "pattern": "^(a|b)*a(a|b){100}$" })),
            "ab",
        ),
        (
            "many patterns",
            schema(&json!({ "anyOf": (0..90).map(|at| json!({ "type": "string",
                "pattern": format!("^(a|b)*a(a|b){{{}}}$", 20 + at) })).collect::<Value>() })),
            "ab",
        ),
        (
            "rules of terminals",
            grammar("start: (X | Y | Z)*\nX: /(a|b)*a(a|b){60}/\nY: /(a|b)*b(a|b){70}/\nZ: \"a\" | \"b\"\n"),
            "ab",
        ),
    ]
}

#[test]
fn no_mask_takes_long() {
    let mut late = String::new();
    for (name, form, characters) in slow_masks() {
        let grammar = match compile(form) {
            Ok(grammar) => grammar,
            Err(error) => {
                println!("{name}: {error}");
                continue;
            }
        };
        let (mut matcher, mut dice) = (grammar.matcher(), Dice(3));
        if matcher.accept(b'"'.into()).is_err() {
            matcher = grammar.matcher();
        }
        let mut mask = vec![0; TOY.mask_words()];
        let (mut worst, mut worst_at, mut stopped) = ((Duration::ZERO, Duration::ZERO), 0, None);
        let all = Clock::start();
        for step in 0..400 {
            // Enough, where every mask is slow.
            if all.elapsed().1 > LONGEST.0 / 4 {
                break;
            }
            let begin = Clock::start();
            let masked = matcher.mask(&mut mask);
            let taken = begin.elapsed();
            if taken.0 > worst.0 {
                worst_at = step;
            }
            worst = (worst.0.max(taken.0), worst.1.max(taken.1));
            let byte = characters.as_bytes()[dice.below(characters.len())];
            if let Err(error) = masked.and_then(|_| matcher.accept(byte.into())) {
                stopped = Some((step, error));
                break;
            }
        }
        println!("{name}: masks in {:?} ({:?}) at most, step {worst_at}: {stopped:?}", worst.0, worst.1);
        if worst.1 > LONGEST.1 {
            writeln!(late, "{name}: {worst:?}").unwrap();
        }
    }
    assert!(late.is_empty(), "{late}");
}

/// Returns why a form is refused.
fn reason(form: Form) -> String {
    match compile(form) {
        Err(GrammarError::Refused { reason, .. }) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_hides_a_schema_or_an_attribute_from_the_check() {
    let hidden = [
        // Names of tokens with quotes, slashes and comment signs in them.
        "start: <x\"> | %json {\"not\":{}} // \"",
        "start: <x/y> | %json {\"not\":{}} /b/",
        "start: <x#> | %json {\"not\":{}}",
        "start: <x//> | %json {\"not\":{}}",
        // A regular expression of two lines, or with a quote in it.
        "start: /a\nb/ | %json {\"not\":{}} | /c/",
        "start: /\"/ | %json {\"not\":{}} | \"b\"",
        // Escapes, and a comment with a quote in it.
        "start: \"\\\\\" | %json {\"not\":{}} | \"b\"",
        "start: \"a\" # \"\n | %json {\"not\":{}}",
        // JSON with the signs of other things in it.
        "start: %json {\"const\":\"/\"} | %json {\"not\":{}} | /b/",
        "start: S | %json {\"not\":{}}\nS: %regex {\"substring_chars\":\"a\\\" /b #\"}",
        "start: %json{\"not\":{}}",
        "start: %lark { start: %json {\"not\":{}} }",
    ];
    for text in hidden {
        assert_eq!(reason(Form::Grammar(text.into())), "$.not: this keyword is not supported", "{text}");
    }
    for text in ["start: a\na[temperature =1]: \"a\"", "start: a\n a[capture, max_tokens=1]: \"a\""] {
        assert!(reason(Form::Grammar(text.into())).starts_with("the attribute"), "{text}");
    }
    assert!(reason(Form::Grammar("start: \"a\"\n%llguidance {\"x\":1}".into())).contains("options"));
    assert!(compile(Form::Grammar("%llguidance\n{}\nstart: \"a\" %json{}".into())).is_ok());
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
