//! GBNF: its syntax, and that masks allow exactly what a grammar describes.

use super::vocabularies::{DEMO, Dice, TOY, compile, generate};
use crate::{Form, Grammar, GrammarError, Limits, Spec};
use std::collections::BTreeSet;

fn form(text: &str) -> Form {
    Form::Grammar(text.into())
}

/// Returns whether a grammar accepts a text that is written byte by byte.
fn accepts(grammar: &Grammar, text: &str) -> bool {
    let mut matcher = grammar.matcher();
    text.bytes().all(|byte| matcher.accept(byte.into()).is_ok()) && matcher.is_accepting().unwrap()
}

#[test]
fn every_construct_means_what_it_means_in_gbnf() {
    let cases: [(&str, &[&str], &[&str]); 20] = [
        ("root ::= \"yes\" | \"no\"", &["yes", "no"], &["", "ye", "yesno"]),
        ("root ::= a b\na ::= \"x\"\nb ::= \"y\" | a", &["xy", "xx"], &["x", "yx"]),
        ("root ::= [a-cX]", &["a", "b", "c", "X"], &["d", "x", "-", "aa"]),
        ("root ::= [^a-c\\]]", &["d", "é", "\n", "["], &["a", "]"]),
        ("root ::= [-a]", &["-", "a"], &["b"]),
        ("root ::= [a-]", &["-", "a"], &["b"]),
        (
            "root ::= [\\x41\\u0042\\U0001F600\\n\\t\\\\\\\"\\[]",
            &["A", "B", "😀", "\n", "\t", "\\", "\"", "["],
            &["x", "n"],
        ),
        ("root ::= \"\\x41\\u00e9\\U0001F600\\n\\\"\\\\\"", &["Aé😀\n\"\\"], &["A"]),
        ("root ::= .", &["a", "\n", "日"], &["", "ab"]),
        ("root ::= \"a\"*", &["", "a", "aaa"], &["b"]),
        ("root ::= \"ab\"+", &["ab", "abab"], &["", "aba"]),
        ("root ::= \"a\"? \"b\"", &["ab", "b"], &["a", "aab"]),
        ("root ::= \"a\"{3}", &["aaa"], &["aa", "aaaa"]),
        ("root ::= \"a\"{2,}", &["aa", "aaaaa"], &["a"]),
        ("root ::= \"a\"{,2} \"b\"", &["b", "ab", "aab"], &["aaab"]),
        ("root ::= (\"a\" | \"b\"){1,2}", &["a", "ba"], &["", "aba"]),
        ("root ::= \"a\" | # nothing\n  \"b\"\n# end", &["a", "b"], &["#"]),
        ("root ::= (\n  \"a\" # one\n  | \"b\"\n)\r\n", &["a", "b"], &["ab"]),
        ("root ::= \"(\" root \")\" |", &["", "()", "((()))"], &["(", "())"]),
        (
            "root ::= other-rule_2 | root \"+\" other-rule_2\nother-rule_2 ::= [0-9]",
            &["1", "1+2+3"],
            &["+", "1+"],
        ),
    ];
    for (text, accepted, refused) in cases {
        let grammar = compile(form(text)).unwrap_or_else(|error| panic!("{text}: {error}"));
        accepted.iter().for_each(|answer| assert!(accepts(&grammar, answer), "{text} {answer:?}"));
        refused.iter().for_each(|answer| assert!(!accepts(&grammar, answer), "{text} {answer:?}"));
    }
}

#[test]
fn mistakes_are_named_with_their_place() {
    let cases = [
        ("root ::= a", "line 1, column 10", "not defined"),
        ("a ::= \"x\"", "grammar", "'root' is not defined"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2, column 1", "defined twice"),
        ("root ::= (\"a\"", "line 1, column 14", "')' is expected"),
        ("root ::= \"a", "line 1, column 12", "ends within"),
        ("root ::= [b-a]", "line 1, column 14", "wrong order"),
        ("root ::= \"\\q\"", "line 1, column 11", "escape"),
        ("root ::= \"\\u12\"", "line 1, column 11", "hexadecimal"),
        ("root ::= \"\\ud800\"", "line 1, column 11", "hexadecimal"),
        ("root ::= \"a\"{2,1}", "line 1, column 17", "bounds"),
        ("root ::= \"a\"{,}", "line 1, column 15", "bounds"),
        ("root ::= \"a\"{99999}", "line 1, column 14", "repetitions"),
        ("root ::= <think>", "line 1, column 10", "tokens"),
        ("root ::= \"a\" )", "line 1, column 14", "end of the line"),
        ("root ::= \"a\"\n= \"b\"", "line 2, column 1", "name"),
        ("root ::= \"a\"*+*+*", "line 1, column 16", "operators"),
    ];
    for (text, place, reason) in cases {
        let error = compile(form(text)).unwrap_err();
        let GrammarError::Refused { part, reason: given } = &error else { panic!("{error}") };
        assert!(part.ends_with(place) && given.contains(reason), "{text}: {error}");
    }
}

/// All texts of at most `longest` characters.
fn texts(alphabet: &str, longest: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut from = 0;
    for _ in 0..longest {
        let end = all.len();
        for at in from..end {
            let longer: Vec<String> = alphabet.chars().map(|c| format!("{}{c}", all[at])).collect();
            all.extend(longer);
        }
        from = end;
    }
    all
}

#[test]
fn lexemes_do_not_swallow_what_follows_them() {
    // For each, the texts of an equal regular expression; reading the longest lexeme first would lose some.
    let cases = [
        ("root ::= [a-b]+ \"b\" | \"(\" root \")\"", r"\A\(*[ab]+b\)*\z", "ab()"),
        ("root ::= a | \"(\" root \")\"\na ::= \"a\" \"ab\"? \"b\"?", r"\A\(*a(ab)?b?\)*\z", "ab()"),
        (
            "root ::= a x\na ::= \"a\" | \"ab\" | \"(\" a \")\"\nx ::= \"b\"* \"c\" | \"(\" x \")\"",
            r"\A(\(*)ab?(\)*)(\(*)b*c(\)*)\z",
            "abc()",
        ),
        ("root ::= s \"a\"\ns ::= \"a\"* | \"(\" s \")\"", r"\A\(*a*\)*a\z", "a()"),
        ("root ::= s s\ns ::= \"a\"? \"b\"* | \"(\" s \")\"", r"\A\(*a?b*\)*\(*a?b*\)*\z", "ab()"),
        (
            "root ::= (t \"\\n\")+\nt ::= [a] ws | \"(\" ws t \")\" ws\nws ::= \"\\n\"*",
            r"\A((\(\n*)*a\n*(\)\n*)*\n)+\z",
            "a\n()",
        ),
    ];
    for (text, expected, alphabet) in cases {
        let expected = regex::Regex::new(expected).unwrap();
        let balanced = |answer: &str| {
            let depth = answer.chars().try_fold(0i32, |depth, c| {
                let depth = depth + i32::from(c == '(') - i32::from(c == ')');
                (depth >= 0).then_some(depth)
            });
            depth == Some(0)
        };
        let grammar = compile(form(text)).unwrap();
        let mut accepted = BTreeSet::new();
        for answer in texts(alphabet, 5) {
            // The expressions cannot count, and do not say which brackets belong to which part.
            let plain = !answer.contains(['(', ')']);
            if accepts(&grammar, &answer) {
                assert!(expected.is_match(&answer) && balanced(&answer), "{text} {answer:?}");
                accepted.insert(answer);
            } else {
                assert!(!(plain && expected.is_match(&answer)), "{text} {answer:?}");
            }
        }
        assert!(accepted.len() > 3, "{text} {accepted:?}");
    }
}

#[test]
fn grammars_of_llama_cpp_are_followed() {
    let arithmetic = regex::Regex::new(r"\A([-+*/=() \t\na-z0-9_]*=[ \t\n]*[(a-z0-9_][^=]*\n)+\z").unwrap();
    let list = regex::Regex::new(r"\A(- [^\r\n]+\n)+\z").unwrap();
    let json =
        |text: &str| serde_json::from_str::<serde_json::Value>(text).is_ok_and(|value| value.is_object());
    type IsValid = Box<dyn Fn(&str) -> bool>;
    let grammars: [(&str, IsValid); 3] = [
        (include_str!("grammars/json.gbnf"), Box::new(json)),
        (include_str!("grammars/arithmetic.gbnf"), Box::new(move |text| arithmetic.is_match(text))),
        (include_str!("grammars/list.gbnf"), Box::new(move |text| list.is_match(text))),
    ];
    for (text, is_valid) in grammars {
        let mut dice = Dice(31);
        let mut ended = 0;
        for vocabulary in [&*TOY, &*DEMO] {
            let grammar = Grammar::compile(&Spec::new(form(text)), vocabulary, &Limits::default()).unwrap();
            for _ in 0..20 {
                let Some(answer) = generate(&mut grammar.matcher(), vocabulary, &mut dice, 400) else {
                    continue;
                };
                let answer = String::from_utf8(answer).unwrap();
                // Surrogates that JSON does not allow can be escaped by this grammar.
                let escaped = answer.contains("\\uD") || answer.contains("\\ud");
                assert!(escaped || is_valid(&answer), "{text}\n{answer:?}");
                ended += 1;
            }
        }
        assert!(ended >= 5, "{text}: {ended}");
    }
    let arithmetic = compile(form(include_str!("grammars/arithmetic.gbnf"))).unwrap();
    for answer in ["x=y\n", "x= y\n\n", "(a+b)*2 =c \n", "a=b\nc=1\n"] {
        assert!(accepts(&arithmetic, answer), "{answer:?}");
    }
}
