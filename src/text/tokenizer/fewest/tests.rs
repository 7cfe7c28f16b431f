//! Tests of the bounds, against the numbers of tokens of texts.

use super::*;
use crate::testing::vocabularies::{
    Dice, byte_fallback, byte_level, from_tokenizer_json, llama2c, metaspace, word_piece,
};
use crate::text::tokenizer::tests::fixtures;
use crate::text::tokenizer::{BYTES_PER_TOKEN, COUNTED_TOKENS, Encoded};
use serde_json::json;

/// Returns all small tokenizers, by name.
fn tokenizers() -> Vec<(String, Tokenizer)> {
    let samples = [
        ("byte level", byte_level()),
        ("byte fallback", byte_fallback()),
        ("word piece", word_piece()),
        ("metaspace", metaspace()),
    ];
    let samples = samples
        .into_iter()
        .map(|(name, sample)| (name.to_owned(), from_tokenizer_json(&sample, None).unwrap()));
    let fixtures = fixtures::folders().into_iter().chain(fixtures::ggufs());
    let fixtures = fixtures.map(|case| (case.name, case.tokenizer));
    let own = [("llama2c", llama2c()), ("bytes", Tokenizer::bytes(300).unwrap())];
    samples.chain(fixtures).chain(own.map(|(name, it)| (name.to_owned(), it))).collect()
}

/// Text that tokenizers shorten, join or drop.
const PARTS: [&str; 24] = [
    " ",
    "  ",
    "                ",
    "\n",
    "\t",
    "\u{a0}",
    "\u{2581}",
    "the",
    "re",
    " the",
    "ab",
    "Z9",
    "e\u{301}",
    "\u{301}\u{323}",
    "한",
    "\u{1112}\u{1161}\u{11ab}",
    "日本",
    "\u{1f600}",
    "\u{0}",
    "<",
    "``",
    "\u{fffd}",
    "ﬁ",
    "\u{200b}",
];

/// If a bound is too large, prompts that fit are refused.
#[test]
fn no_bound_exceeds_the_number_of_tokens() {
    let mut dice = Dice::new(23);
    let recorded = fixtures::texts();
    let mut bounded = 0;
    for (name, tokenizer) in tokenizers() {
        let bound = tokenizer.fewest();
        let names: Vec<String> = match &tokenizer.encoder {
            Encoder::Pipeline(pipeline) => {
                let added = pipeline.library().get_added_tokens_decoder();
                added.values().map(|token| token.content.clone()).collect()
            }
            Encoder::Bytes => Vec::new(),
        };
        for round in 0..120 {
            let mut text = String::new();
            let focus: Vec<&str> = (0..1 + dice.below(4)).map(|_| *dice.pick(&PARTS)).collect();
            for _ in 0..dice.below(60) {
                match dice.below(12) {
                    0 if !names.is_empty() => text.push_str(dice.pick::<String>(&names)),
                    1 if round % 2 == 0 => text.push_str(dice.pick::<String>(&recorded)),
                    _ => text.push_str(dice.pick::<&str>(&focus)),
                }
            }
            let tokens = tokenizer.encode(&text, false).unwrap().len();
            for most in [0, tokens / 8, tokens / 2, tokens.saturating_sub(1), tokens] {
                let above = bound.above(&text, most);
                assert!(
                    above.is_none_or(|above| most < above && above <= tokens),
                    "{name}: {text:?} has {tokens} tokens, not {above:?}"
                );
                bounded += usize::from(above.is_some());
                assert!(
                    text.len() <= bound.longest_text(most) || tokens > most,
                    "{name}: {text:?} has {tokens} tokens"
                );
            }
        }
    }
    assert!(bounded > 2000, "{bounded} texts had a bound");
}

/// A tokenizer without a bound is right, but its hopeless prompts are tokenized whole.
#[test]
fn usual_tokenizers_have_a_bound() {
    let named = |is: fn(&FewestTokens) -> bool| -> Vec<String> {
        let all = tokenizers().into_iter();
        all.filter(|(_, tokenizer)| is(tokenizer.fewest())).map(|(name, _)| name).collect()
    };
    let words = named(|bound| matches!(bound, FewestTokens::Words));
    let expected = [
        "word piece",
        "deberta",
        "albert",
        "xlm-roberta",
        "nllb",
        "mbart",
        "camembert",
        "bert",
        "bert, cased",
        "bert, accents kept",
        "t5",
        "bert",
    ];
    assert_eq!(words, expected);
    let unknown = named(|bound| matches!(bound, FewestTokens::Unknown));
    assert_eq!(unknown, ["metaspace", "t5", "m2m100"]);
}

#[test]
fn a_hopeless_text_is_not_encoded_and_others_have_all_their_tokens() {
    let tokenizer = from_tokenizer_json(&byte_level(), None).unwrap();
    let most = 10;
    let encode = |text: &str| tokenizer.encode_at_most(text, false, most).unwrap();
    let is_above =
        |encoded: Encoded, most: usize| matches!(encoded, Encoded::TooMany(tokens) if tokens > most);
    assert!(is_above(encode(&" the".repeat(BYTES_PER_TOKEN * most / 4 + 1)), most));
    assert!(is_above(encode(&"z".repeat(BYTES_PER_TOKEN * most)), COUNTED_TOKENS * most));
    for few in [1, most, most + 1, COUNTED_TOKENS * most] {
        let text = " the".repeat(few);
        assert_eq!(encode(&text), Encoded::Ids(tokenizer.encode(&text, false).unwrap()), "{few}");
    }
    assert_eq!(encode(""), Encoded::Ids(vec![]));
}

/// The library may lower-case, compose or remove text, and fuse runs of unknown text.
#[test]
fn what_makes_fewer_tokens_of_a_text_has_no_bound() {
    let changed = |[section, key]: [&str; 2], value: serde_json::Value| {
        let mut file = byte_fallback();
        match key {
            "" => file[section] = value,
            key => file[section][key] = value,
        }
        from_tokenizer_json(&file, None).unwrap()
    };
    let same = changed(["model", "dropout"], json!(null));
    assert!(matches!(same.fewest(), FewestTokens::Pieces(_)));
    let removing =
        json!({"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": false});
    for (place, value) in [
        (["normalizer", ""], json!({"type": "NFKC"})),
        (["normalizer", ""], json!({"type": "Strip", "strip_left": true, "strip_right": true})),
        (["normalizer", ""], json!({"type": "Replace", "pattern": {"String": "aaaa"}, "content": "a"})),
        (["pre_tokenizer", ""], removing),
        (["pre_tokenizer", ""], json!({"type": "WhitespaceSplit"})),
        (["model", "byte_fallback"], json!(false)),
        (["model", "end_of_word_suffix"], json!("</w>")),
    ] {
        let tokenizer = changed(place, value.clone());
        assert!(matches!(tokenizer.fewest(), FewestTokens::Unknown), "{place:?} {value}");
    }
    // Of words, those of three digits vanish, or a name spans two of them only once it is normalized.
    let replacing = |regex: &str, content: &str| {
        let pattern = json!({ "Regex": regex });
        json!({"type": "Replace", "pattern": pattern, "content": content})
    };
    let spaces = json!({"type": "Sequence", "normalizers": [{"type": "NFKC"}, replacing(" {2,}", " ")]});
    let named = json!({"id": 12, "content": "the\u{a0}re", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": true, "special": false});
    for (normalizer, name, has_bound) in [
        (json!({"type": "NFKC"}), None, true),
        (spaces, None, true),
        (replacing("[0-9]{3,}", ""), None, false),
        (replacing(" {2,}", ""), None, false),
        (json!({"type": "Replace", "pattern": {"String": "the"}, "content": ""}), None, false),
        (json!(null), Some(&named), true),
        (json!({"type": "NFKC"}), Some(&named), false),
    ] {
        let mut file = word_piece();
        file["normalizer"] = normalizer.clone();
        file["added_tokens"].as_array_mut().unwrap().extend(name.cloned());
        let tokenizer = from_tokenizer_json(&file, None).unwrap();
        let bound = tokenizer.fewest();
        assert_eq!(matches!(bound, FewestTokens::Words), has_bound, "{normalizer} {name:?}: {bound:?}");
    }
}

/// The name of a token that is found in normalized text is another one there.
#[test]
fn names_of_tokens_are_normalized_as_the_text_is() {
    let mut file = byte_level();
    file["normalizer"] = json!({"type": "NFC"});
    let named = json!({"id": 265, "content": "re\u{301}sume\u{301}", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": true, "special": false});
    file["added_tokens"].as_array_mut().unwrap().push(named);
    let tokenizer = from_tokenizer_json(&file, None).unwrap();
    let text = "r\u{e9}sum\u{e9}".repeat(20);
    assert_eq!(tokenizer.encode(&text, false).unwrap().len(), 20);
    assert_eq!(tokenizer.fewest_above(&text, 20), None);
    assert!(tokenizer.fewest_above(&text, 19).is_some());
    // One that takes the spaces beside it is looked for in the text as it is.
    if let Some(named) = file["added_tokens"].as_array_mut().unwrap().last_mut() {
        named["rstrip"] = json!(true);
    }
    let greedy = from_tokenizer_json(&file, None).unwrap();
    assert!(matches!(greedy.fewest(), FewestTokens::Unknown));
}
