//! Masks, acceptance and rollback.

use super::vocabularies::{CALL, DEMO, Dice, EOS, TOY, bits, compile, demo, generate, schema, text_of};
use crate::{Form, Grammar, GrammarError, Limits, Matcher, Spec, Token, Vocabulary};
use serde_json::json;

fn forms() -> Vec<Form> {
    vec![
        Form::JsonObject,
        schema(&json!({
            "type": "object",
            "properties": { "name": { "type": "string", "maxLength": 6 }, "age": { "type": "integer" } },
            "required": ["name"],
        })),
        schema(&json!({ "type": "array", "items": { "enum": ["hello", "abc", 10, null] }, "maxItems": 4 })),
        Form::Regex(r"[a-c]{2,4}(é|日本)?x*".into()),
        Form::Choice(["yes".to_owned(), "yes, no".to_owned(), "no".to_owned()].into()),
        Form::Grammar("start: \"a\" start \"b\" | \"x\"\n".into()),
        Form::Grammar("root ::= \"[\" (root (\",\" root)*)? \"]\" | [0-9]+ \" \"?\n".into()),
    ]
}

fn mask_of(matcher: &mut Matcher, vocabulary: &Vocabulary) -> Vec<u32> {
    let mut mask = vec![u32::MAX; vocabulary.mask_words() + 2];
    matcher.mask(&mut mask).unwrap();
    assert!(mask[vocabulary.mask_words()..].iter().all(|word| *word == 0), "padding is not allowed");
    bits(&mask)
}

#[test]
fn a_mask_has_exactly_the_tokens_that_are_accepted() {
    let mut dice = Dice(7);
    for form in forms() {
        let grammar = compile(form.clone()).unwrap();
        for _ in 0..3 {
            let mut matcher = grammar.matcher();
            for _ in 0..12 {
                let allowed = mask_of(&mut matcher, &TOY);
                let accepted = |id: &u32| matcher.fork().accept(*id).is_ok();
                let expected: Vec<u32> = (0..TOY.size() as u32 + 40).filter(accepted).collect();
                assert_eq!(allowed, expected, "{form:?}");
                if matcher.is_complete() {
                    break;
                }
                matcher.accept(allowed[dice.below(allowed.len())]).unwrap();
            }
        }
    }
}

/// Each property that may come next is several items of the parser.
#[test]
fn an_object_may_have_as_many_optional_properties_as_a_schema() {
    let count = Limits::default().properties;
    let properties: serde_json::Map<_, _> =
        (0..count).map(|at| (format!("p{at}"), json!({ "type": "null" }))).collect();
    let mut matcher = compile(schema(&json!({ "properties": properties }))).unwrap().matcher();
    for token in format!("{{\"p0\":null,\"p{}\":null}}", count - 1).bytes() {
        assert!(mask_of(&mut matcher, &TOY).contains(&token.into()), "{}", token as char);
        matcher.accept(token.into()).unwrap();
    }
    assert!(matcher.is_accepting().unwrap());
}

/// A user's grammar may name EOS, but the answer does not end there unless its text may.
#[test]
fn a_grammar_cannot_end_the_text_early() {
    let matcher = |text: &str| compile(Form::Grammar(text.into())).unwrap().matcher();
    let mut early = matcher("start: <[255-257]> \"a\"\n");
    assert_eq!(mask_of(&mut early, &TOY), [255, 257]);
    let mut mask = vec![0; TOY.mask_words()];
    let mut stuck = matcher("start: <[256]> \"a\"\n");
    assert!(matches!(stuck.mask(&mut mask), Err(GrammarError::Stuck(_))));
    let mut allowed = matcher("start: \"a\" <[256-257]>?\n");
    allowed.accept(b'a'.into()).unwrap();
    assert_eq!(mask_of(&mut allowed, &TOY), [256, 257]);
}

#[test]
fn rolling_back_restores_every_mask() {
    let mut dice = Dice(11);
    for (vocabulary, form) in
        [&*TOY, &*DEMO].into_iter().flat_map(|v| forms().into_iter().map(move |f| (v, f)))
    {
        let grammar = Grammar::compile(&Spec::new(form.clone()), vocabulary, &Limits::default()).unwrap();
        let mut matcher = grammar.matcher();
        let mut masks = Vec::new();
        for _ in 0..60 {
            masks.push(mask_of(&mut matcher, vocabulary));
            let allowed = masks.last().unwrap();
            let ended = allowed.iter().all(|id| vocabulary.eos().contains(id));
            if !ended && dice.below(4) > 0 {
                matcher.accept(allowed[dice.below(allowed.len())]).unwrap();
                continue;
            }
            if ended && dice.below(2) == 0 && !vocabulary.eos().is_empty() {
                matcher.accept(vocabulary.eos()[0]).unwrap();
                assert!(matcher.is_complete());
                matcher.rollback(1).unwrap();
            }
            let back = dice.below(masks.len());
            matcher.rollback(back).unwrap();
            masks.truncate(masks.len() - back);
            assert_eq!(mask_of(&mut matcher, vocabulary), *masks.last().unwrap(), "{form:?}");
            masks.pop();
        }
        assert!(grammar.matcher().rollback(1).is_err());
    }
}

#[test]
fn masks_depend_on_the_tokens_alone() {
    let mut dice = Dice(3);
    for form in forms() {
        let grammar = Grammar::compile(&Spec::new(form), &DEMO, &Limits::default()).unwrap();
        let mut with_masks = grammar.matcher();
        let mut without = grammar.matcher();
        for _ in 0..20 {
            let allowed = mask_of(&mut with_masks, &DEMO);
            assert_eq!(allowed, mask_of(&mut with_masks, &DEMO), "computed again");
            assert_eq!(allowed, mask_of(&mut without.fork(), &DEMO), "computed first");
            if with_masks.is_complete() {
                break;
            }
            let token = allowed[dice.below(allowed.len())];
            with_masks.accept(token).unwrap();
            without.accept(token).unwrap();
        }
    }
}

#[test]
fn text_without_a_choice_is_forced_in_the_tokenizers_own_tokens() {
    let form = schema(&json!({
        "type": "object",
        "properties": { "description": { "const": "the weather of today" }, "n": { "type": "integer" } },
        "required": ["description", "n"],
        "additionalProperties": false,
    }));
    let expected = "{\"description\":\"the weather of today\",\"n\":";
    for canonical in [true, false] {
        let vocabulary = demo(canonical);
        let mut matcher =
            Grammar::compile(&Spec::new(form.clone()), &vocabulary, &Limits::default()).unwrap().matcher();
        let mut mask = vec![0; vocabulary.mask_words()];
        let forced = matcher.accept_forced(1000, &mut mask).unwrap();
        let text: Vec<u8> = forced.iter().flat_map(|id| text_of(&vocabulary, *id)).collect();
        let text = String::from_utf8(text).unwrap();
        assert!(expected.starts_with(&text));
        if canonical {
            // The last tokens may be joined with what follows.
            assert!(text.len() + 8 > expected.len(), "{text}");
            let mut few = Grammar::compile(&Spec::new(form.clone()), &vocabulary, &Limits::default());
            assert_eq!(few.as_mut().unwrap().matcher().accept_forced(2, &mut mask).unwrap(), forced[..2]);
        }
    }
}

#[test]
fn a_refused_token_changes_nothing() {
    let mut matcher = compile(Form::Regex("abc".into())).unwrap().matcher();
    let before = mask_of(&mut matcher, &TOY);
    for token in [u32::from(b'x'), EOS, CALL, 100_000, u32::MAX] {
        assert_eq!(matcher.accept(token), Err(GrammarError::Token(token)));
        assert_eq!(mask_of(&mut matcher, &TOY), before);
    }
    for byte in *b"abc" {
        assert!(!matcher.is_complete() && !matcher.is_accepting().unwrap());
        matcher.accept(byte.into()).unwrap();
    }
    assert!(matcher.is_complete() && matcher.is_accepting().unwrap());
    assert_eq!(mask_of(&mut matcher, &TOY), [EOS]);
    assert_eq!(matcher.accept(u32::from(b'a')), Err(GrammarError::Token(b'a'.into())));
    matcher.accept(EOS).unwrap();
    assert_eq!(mask_of(&mut matcher, &TOY), [EOS]);
    matcher.rollback(2).unwrap();
    assert_eq!(mask_of(&mut matcher, &TOY), [u32::from(b'c')]);
}

#[test]
fn a_vocabulary_without_eos_ends_where_the_grammar_does() {
    let token = |id: u32| if id == 1 { Token::Text(b"a") } else { Token::Text(b"b") };
    let vocabulary = std::sync::Arc::new(Vocabulary::new(2, token, &[], None).unwrap());
    let grammar =
        Grammar::compile(&Spec::new(Form::Regex("ab".into())), &vocabulary, &Limits::default()).unwrap();
    assert_eq!(generate(&mut grammar.matcher(), &vocabulary, &mut Dice(1), 10).unwrap(), b"ab");
    assert!(vocabulary.eos().is_empty());
}

#[test]
fn every_eos_token_is_set_where_the_text_may_end() {
    let token = |id: u32| match id {
        0 => Token::Text(b"a"),
        // EOS although the tokenizer says that it is text.
        1 => Token::Text(b"aa"),
        _ => Token::Special("<end>"),
    };
    let vocabulary = std::sync::Arc::new(Vocabulary::new(3, token, &[1, 2, 77], None).unwrap());
    let grammar =
        Grammar::compile(&Spec::new(Form::Regex("a+".into())), &vocabulary, &Limits::default()).unwrap();
    let mut matcher = grammar.matcher();
    assert_eq!(mask_of(&mut matcher, &vocabulary), [0]);
    matcher.accept(0).unwrap();
    assert_eq!(mask_of(&mut matcher, &vocabulary), [0, 1, 2]);
    matcher.accept(1).unwrap();
    assert!(matcher.is_complete());
    assert_eq!(vocabulary.eos(), [1, 2]);
}

#[test]
fn vocabularies_that_the_trie_cannot_hold_are_refused_and_long_tokens_unused() {
    assert!(Vocabulary::new(0, |_| Token::Unused, &[], None).is_err());
    assert!(Vocabulary::new(1 << 24, |_| Token::Unused, &[], None).is_err());
    let long = vec![b'a'; 5000];
    assert!(Vocabulary::new(1000, |_| Token::Text(&long[..999]), &[], None).is_ok());
    assert!(Vocabulary::new(5000, |_| Token::Text(&long[..999]), &[], None).is_err());
    let token = |id: u32| if id == 0 { Token::Text(&long) } else { Token::Text(b"a") };
    let vocabulary = std::sync::Arc::new(Vocabulary::new(2, token, &[], None).unwrap());
    let grammar =
        Grammar::compile(&Spec::new(Form::Regex("a{6000}".into())), &vocabulary, &Limits::default());
    assert_eq!(mask_of(&mut grammar.unwrap().matcher(), &vocabulary), [1]);
}
