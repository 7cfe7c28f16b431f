//! Regular expressions, choices, grammars and calls.

use super::vocabularies::{CALL, DEMO, Dice, EOS, TOY, compile, generate, schema, text_of};
use crate::{Call, Calls, Form, Grammar, Limits, Piece, Spec};
use serde_json::{Value, json};

fn answers(form: Form, count: usize) -> Vec<String> {
    let mut dice = Dice(count as u64 + 99);
    let mut found = Vec::new();
    for vocabulary in [&*TOY, &*DEMO] {
        let grammar = Grammar::compile(&Spec::new(form.clone()), vocabulary, &Limits::default()).unwrap();
        for _ in 0..count {
            found.extend(generate(&mut grammar.matcher(), vocabulary, &mut dice, 300));
        }
    }
    found.into_iter().map(|bytes| String::from_utf8(bytes).unwrap()).collect()
}

#[test]
fn answers_match_their_regular_expression() {
    let regexes = [
        "a",
        "[a-z]{3,8}",
        r"\d{4}-\d{2}-\d{2}",
        "(yes|no|maybe)!?",
        "^anchored$",
        "^a|b$",
        r"(?i)hello",
        r"[^\x00-\x1f]{0,20}",
        r"\w+\s\w+",
        r"/path/[a-z]+/\.x",
        "(é|日本|😀){2}",
        "a*b+c?",
        r"\p{Lu}{2}",
    ];
    for regex in regexes {
        let whole = regex::Regex::new(&format!(r"\A(?:{regex})\z")).unwrap();
        let answers = answers(Form::Regex(regex.into()), 8);
        assert!(answers.len() > 8, "{regex}: {}", answers.len());
        for answer in answers {
            assert!(whole.is_match(&answer), "{regex} {answer:?}");
        }
    }
}

#[test]
fn a_regular_expression_does_not_lose_its_end() {
    let compiled = |regex: &str| compile(Form::Regex(regex.into())).is_ok();
    assert!(!compiled(r"abc\") && !compiled(r"abc\\\") && compiled(r"abc\\"));
}

#[test]
fn answers_are_members_of_their_choice() {
    let choices = ["yes", "yes, no", "no", "a \"quoted\"\n\u{7f}/\\", "日本", "aaa", "aa"];
    let choices = choices.map(str::to_owned);
    let answers = answers(Form::Choice(choices.clone().into()), 100);
    assert_eq!(answers.len(), 200);
    assert!(answers.iter().all(|answer| choices.contains(answer)));
    assert!(choices.iter().all(|choice| answers.contains(choice)), "each is reached");
}

#[test]
fn a_lark_grammar_is_followed_and_its_json_is_compact() {
    let grammar = r#"
        start: greeting " " thing  // a comment with "quotes
        greeting: "hello" | "yes"
        thing: /x{1,3}/ | %json { "type": "object", "properties": { "a": { "type": "null" } },
            "required": ["a"], "additionalProperties": false }
    "#;
    let grammar = grammar.lines().map(str::trim_start).collect::<Vec<_>>().join("\n");
    let expected = regex::Regex::new(r#"\A(hello|yes) (x{1,3}|\{"a":null\})\z"#).unwrap();
    let answers = answers(Form::Grammar(grammar.into()), 30);
    assert_eq!(answers.len(), 60);
    assert!(answers.iter().all(|answer| expected.is_match(answer)), "{answers:?}");
}

fn calls() -> Calls {
    let call = |name: &str, schema: Value| Call {
        prefix: vec![Piece::Token(CALL), Piece::Text(format!("{{\"name\":\"{name}\",\"arguments\":"))],
        body: Form::JsonSchema(schema.to_string().into()),
        place: format!("tools.{name}"),
        suffix: vec![Piece::Text("}</call>".to_owned())],
    };
    let city = json!({ "type": "object", "properties": { "city": { "enum": ["Rome", "Oslo"] } },
        "required": ["city"], "additionalProperties": false });
    let none = json!({ "type": "object", "additionalProperties": false });
    Calls {
        begin: vec![],
        calls: vec![call("weather", city), call("time", none)],
        separator: vec![Piece::Text("\n".to_owned())],
        end: vec![],
        min: 1,
        max: Some(3),
    }
}

#[test]
fn calls_have_their_marks_and_arguments() {
    let one =
        r#"<call>\{"name":("weather","arguments":\{"city":"(Rome|Oslo)"\}|"time","arguments":\{\})\}</call>"#;
    let expected = regex::bytes::Regex::new(&format!(r"(?-u)\A\xff{one}(\n\xff{one}){{0,2}}\z")).unwrap();
    let grammar = compile(Form::Calls(calls().into())).unwrap();
    let mut dice = Dice(5);
    let mut lengths = Vec::new();
    for _ in 0..40 {
        let answer = generate(&mut grammar.matcher(), &TOY, &mut dice, 500).unwrap();
        assert!(expected.is_match(&answer), "{}", String::from_utf8_lossy(&answer));
        lengths.push(answer.iter().filter(|byte| **byte == 0xff).count());
    }
    assert!((1..=3).all(|calls| lengths.contains(&calls)), "{lengths:?}");
}

#[test]
fn ranges_of_calls_are_checked() {
    let compiled = |change: fn(&mut Calls)| {
        let mut calls = calls();
        change(&mut calls);
        compile(Form::Calls(calls.into()))
    };
    assert!(compiled(|calls| calls.max = None).is_ok());
    assert!(compiled(|calls| (calls.min, calls.max) = (2, None)).is_ok());
    assert!(compiled(|calls| calls.max = Some(1)).is_ok());
    assert!(compiled(|calls| calls.min = 0).is_err());
    assert!(compiled(|calls| (calls.min, calls.max) = (4, Some(3))).is_err());
    assert!(compiled(|calls| calls.calls.clear()).is_err());
    assert!(compiled(|calls| calls.calls[0].body = Form::Calls(calls.clone().into())).is_err());
}

#[test]
fn errors_of_calls_name_the_schema() {
    for (schema, expected) in [
        (json!({ "not": {} }), "tools.time.not"),
        // Refused by llguidance, not by the check before it.
        (
            json!({ "properties": { "a": { "type": "string", "pattern": "(" } } }),
            "tools.time.properties.a.pattern",
        ),
    ] {
        let mut calls = calls();
        calls.calls[1].body = Form::JsonSchema(schema.to_string().into());
        let error = compile(Form::Calls(calls.into())).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}

#[test]
fn any_form_can_have_text_before_it_that_may_be_left_out() {
    let lark = "start: greeting \" \" NAME\ngreeting: \"hi\" | \"yo\"\nNAME: /[a-c]{2}/\n";
    let gbnf = "root ::= greeting \" \" [a-c] [a-c]\ngreeting ::= \"hi\" | \"yo\"\n";
    for (body, pattern) in [
        (Form::Regex("(?:hi|yo) [a-c]{2}".into()), "(?:hi|yo) [a-c]{2}"),
        (Form::Choice(["yes".to_owned(), "no".to_owned()].into()), "yes|no"),
        (Form::Grammar(lark.into()), "(?:hi|yo) [a-c]{2}"),
        (Form::Grammar(gbnf.into()), "(?:hi|yo) [a-c]{2}"),
        (schema(&json!({ "enum": [1, "a"] })), "1|\"a\""),
    ] {
        let note = vec![Piece::Text("note".to_owned()), Piece::AnyText, Piece::Token(CALL)];
        let prefix = vec![Piece::Text("final:".to_owned())];
        let call = Call { place: "$".to_owned(), prefix, body, suffix: vec![] };
        let calls = Calls {
            begin: vec![Piece::Token(CALL), Piece::Optional(note)],
            calls: vec![call],
            separator: vec![],
            end: vec![],
            min: 1,
            max: Some(1),
        };
        let expected = format!(r"(?s-u)\A\xff<call>(note[^\xff]+\xff<call>)?final:({pattern})\z");
        let expected = regex::bytes::Regex::new(&expected).unwrap();
        let grammar = compile(Form::Calls(calls.into())).unwrap();
        let mut dice = Dice(6);
        let (mut long, mut short) = (0, 0);
        for _ in 0..60 {
            let Some(answer) = generate(&mut grammar.matcher(), &TOY, &mut dice, 1000) else { continue };
            assert!(expected.is_match(&answer), "{}", String::from_utf8_lossy(&answer));
            let has_note = answer.iter().filter(|byte| **byte == 0xff).count() == 2;
            *(if has_note { &mut long } else { &mut short }) += 1;
        }
        assert!(long > 3 && short > 3, "{pattern}: {long} and {short}");
    }
}

#[test]
fn special_tokens_are_not_text() {
    // The text "<call>" may be written, but not with the special token of that name.
    let mut matcher = compile(Form::Regex("<call>x".into())).unwrap().matcher();
    assert!(matcher.accept(CALL).is_err());
    let word = (0..TOY.size() as u32).find(|id| text_of(&TOY, *id) == b"<call>").unwrap();
    matcher.accept(word).unwrap();
    matcher.accept(b'x'.into()).unwrap();
    assert_eq!(matcher.accept(EOS), Ok(()));
}

#[test]
fn spaces_in_json_are_allowed_on_request_only() {
    let form = schema(&json!({ "type": "array", "items": { "type": "null" }, "minItems": 2, "maxItems": 2 }));
    let texts = |json_spaces| {
        let spec = Spec::with_spaces(form.clone(), json_spaces);
        let mut matcher = Grammar::compile(&spec, &TOY, &Limits::default()).unwrap().matcher();
        "[ null, null]".bytes().try_for_each(|byte| matcher.accept(byte.into()))
    };
    assert!(texts(true).is_ok());
    assert!(texts(false).is_err());
}
