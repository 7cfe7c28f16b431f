//! Comparison of every kind of vocabulary with its reference library: sentencepiece, transformers, tiktoken,
//! llama.cpp.
//!
//! Invariant: token ids and decoded texts equal those of the library.

use super::fixtures::{VocabularyCase, folders, ggufs, texts, vocabulary};
use crate::text::tokenizer::{TokenLimits, Tokenizer};
use serde_json::Value;
use std::path::Path;

/// Parses recorded ids.
fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Known differences from llama.cpp: the case, a substring of the affected texts, and the reason.
const DEPARTURES: [(&str, &str, &str); 9] = [
    ("llama", "<tool>", "user-defined pieces are not special tokens: no space is added after them"),
    ("t5", "\u{ad}", "spaces from the character map are not merged"),
    ("t5", "\u{2581}", "trailing spaces are removed, whether written as U+2581 or not"),
    ("bert", "\u{b}", "control characters are removed"),
    ("bert", "\u{93f}", "only non-spacing marks are removed"),
    ("qwen2", "\u{301}", "texts are normalized to NFC"),
    ("qwen2", "\u{3099}", "texts are normalized to NFC"),
    ("qwen2", "\u{1100}", "texts are normalized to NFC"),
    ("qwen2", "\u{212a}", "texts are normalized to NFC"),
];

/// Returns the texts whose ids differ from the library's.
fn differing(case: &VocabularyCase) -> Vec<String> {
    let VocabularyCase { name, tokenizer, answers } = case;
    let [before, after] = ["before", "after"].map(|key| ids(&answers[key]));
    let mut differing = Vec::new();
    for (text, expected) in texts().into_iter().zip(answers["ids"].as_array().unwrap()) {
        let found = tokenizer.encode(&text, false).unwrap();
        let whole = [&before[..], &found, &after].concat();
        assert_eq!(tokenizer.encode(&text, true).unwrap(), whole, "{name}: {text:?}");
        if found != ids(expected) {
            differing.push(text);
        }
    }
    differing
}

#[test]
fn folders_encode_as_their_libraries_do() {
    for case in folders() {
        assert_eq!(differing(&case), [""; 0], "{}", case.name);
    }
}

#[test]
fn gguf_vocabularies_encode_as_llama_cpp_does() {
    let mut departures = Vec::new();
    for case in ggufs() {
        for text in differing(&case) {
            let known =
                DEPARTURES.iter().position(|(name, part, _)| case.name == *name && text.contains(part));
            departures.push(known.unwrap_or_else(|| panic!("{}: {text:?}", case.name)));
        }
    }
    departures.sort_unstable();
    departures.dedup();
    assert_eq!(departures.len(), DEPARTURES.len(), "a known difference no longer occurs: {departures:?}");
}

#[test]
fn folders_decode_as_their_libraries_do() {
    let mut compared = 0;
    for VocabularyCase { name, tokenizer, answers } in folders() {
        for pair in answers["decoded"].as_array().unwrap() {
            let ids = ids(&pair[0]);
            let text = tokenizer.decode(&ids, true).unwrap();
            assert_eq!(text, pair[1].as_str().unwrap(), "{name}: {ids:?}");
            compared += 1;
        }
    }
    assert_eq!(compared, 7 * 30);
}

#[test]
fn tokens_have_the_ids_that_their_class_gives_them() {
    for VocabularyCase { name, tokenizer, answers } in folders() {
        for (found, key) in [(tokenizer.bos_id(), "bos"), (tokenizer.eos_id(), "eos")] {
            let expected = answers[key].as_u64();
            assert!(expected.is_none() || found.map(u64::from) == expected, "{name}: {key} {found:?}");
        }
        for (token, id) in answers["tokens"].as_object().into_iter().flatten() {
            let id = id.as_u64().unwrap() as u32;
            assert_eq!(tokenizer.encode(token, false).unwrap(), [id], "{name}: {token}");
            assert!(tokenizer.is_special(id) && tokenizer.token_text(id) == *token, "{name}: {token}");
        }
    }
}

#[test]
fn two_texts_have_the_tokens_of_their_class_between_them() {
    let mut compared = 0;
    for VocabularyCase { name, tokenizer, answers } in folders() {
        let Some([first, second, pair]) = answers["pair"].as_array().map(Vec::as_slice) else { continue };
        let [first, second] = [first, second].map(|text| text.as_str().unwrap());
        let texts = tokenizer.encode_texts(first, Some(second), true, TokenLimits::whole(99)).unwrap();
        assert_eq!(texts.ids, ids(pair), "{name}");
        let after = tokenizer.encode(second, true).unwrap().len() - 1;
        assert_eq!(texts.second, Some(texts.ids.len() - after), "{name}");
        let most = texts.ids.len() - 1;
        let limited = tokenizer.encode_texts(first, Some(second), true, TokenLimits::whole(most)).unwrap();
        assert_eq!(limited.ids.len(), most, "{name}");
        compared += 1;
    }
    assert_eq!(compared, 4);
}

#[test]
fn texts_come_back_from_the_ids_of_vocabularies_that_lose_nothing() {
    let kept = ["llama", "ties, no prefix, EOS", "gpt2", "roberta", "ranks alone", "own pattern"];
    let mut compared = 0;
    for VocabularyCase { name, tokenizer, .. } in
        folders().iter().filter(|case| kept.contains(&case.name.as_str()))
    {
        // Texts with special tokens are excluded, since models add a space after them.
        for text in texts().iter().filter(|text| !text.contains(['<', '\u{2581}'])) {
            let ids = tokenizer.encode(text, true).unwrap();
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), *text, "{name}");
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared}");
}

#[test]
fn gguf_tokens_without_types_have_those_of_their_names_and_roles() {
    for case in ggufs().into_iter().filter(|case| ["llama", "gpt-2"].contains(&case.name.as_str())) {
        let mut keys = case.answers["all"].clone();
        keys.as_object_mut().unwrap().remove("token_type");
        let bare = Tokenizer::from_gguf(Path::new("bare.gguf"), &vocabulary(&keys)).unwrap();
        let (bos, eos) = (bare.bos_id().unwrap(), bare.eos_id().unwrap());
        assert!(bare.is_special(bos) && bare.is_special(eos), "{}", case.name);
        for text in ["Hello \u{1f600} world", &case.tokenizer.token_text(eos)] {
            let ids = case.tokenizer.encode(text, true).unwrap();
            assert_eq!(bare.encode(text, true).unwrap(), ids, "{}: {text}", case.name);
        }
    }
}
