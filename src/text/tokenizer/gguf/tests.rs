//! Tests with invalid vocabularies of GGUF files.
//!
//! Invariant: each is an error that names the file, or harmless; nothing panics.

use super::GgufVocabulary;
use crate::testing::vocabularies::Dice;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::tests::damage::survives;
use crate::text::tokenizer::tests::fixtures::vocabulary;
use serde_json::json;
use std::path::Path;

/// Returns a vocabulary of only control tokens and bytes.
fn of_bytes() -> GgufVocabulary {
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).into_iter().chain(bytes).collect();
    let kinds = (0..tokens.len()).map(|id| if id > 2 { 6 } else { 3 - i32::from(id == 0) }).collect();
    let scores = vec![0.0; tokens.len()];
    GgufVocabulary {
        model: "llama".to_owned(),
        tokens,
        scores,
        token_type: kinds,
        ..GgufVocabulary::default()
    }
}

#[test]
fn byte_pieces_declared_normal_are_bytes_if_all_256_exist() {
    let read = |file: &GgufVocabulary| Tokenizer::from_gguf(Path::new("m.gguf"), file).unwrap();
    let (good, mut plain) = (read(&of_bytes()), of_bytes());
    plain.token_type.fill(1);
    let text = "\u{e9}\n";
    let ids = good.encode(text, false).unwrap();
    assert_eq!(read(&plain).encode(text, false).unwrap(), ids);
    assert_eq!(read(&plain).decode(&ids[1..], false).unwrap(), good.decode(&ids[1..], false).unwrap());
    // If one byte is missing, the tokens are plain text.
    plain.tokens[200] = "x".to_owned();
    assert_eq!(read(&plain).decode(&[13], false).unwrap(), "<0x0A>");
}

#[test]
fn invalid_gguf_vocabularies_are_rejected() {
    let refusal =
        |file: &GgufVocabulary| format!("{:#}", Tokenizer::from_gguf(Path::new("m.gguf"), file).unwrap_err());
    let good = of_bytes();
    assert!(Tokenizer::from_gguf(Path::new("m.gguf"), &good).is_ok());
    let with = |change: &dyn Fn(&mut GgufVocabulary)| {
        let mut file = good.clone();
        change(&mut file);
        refusal(&file)
    };
    type Change<'a> = &'a dyn Fn(&mut GgufVocabulary);
    let cases: [(Change, &str); 15] = [
        (&|f| f.model = "rwkv".into(), "m.gguf: its tokenizer 'rwkv' is not supported (supported: llama"),
        (&|f| f.model = "no_vocab".into(), "it has no tokenizer"),
        (&|f| f.tokens.clear(), "its vocabulary is empty"),
        (&|f| f.scores.truncate(9), "it has 259 tokens, but scores for 9 of them"),
        (&|f| f.token_type.truncate(9), "it has 259 tokens, but types for 9 of them"),
        (
            &|f| f.eos_token_id = Some(259),
            "key 'tokenizer.ggml.eos_token_id': 259 is not one of its 259 tokens",
        ),
        (&|f| f.tokens[7] = "<s>".into(), "its tokens 1 and 7 are both '<s>'"),
        (&|f| f.scores[7] = f32::NAN, "piece 7: its score is NaN"),
        (&|f| f.token_type[7] = 9, "token 7: its type 9 is unknown"),
        (&|f| f.token_type[7] = 1, "it has pieces for bytes, but none for 0x04"),
        (&|f| f.tokens[7] = "x".into(), "piece 7: 'x' is not a byte"),
        (&|f| f.model = "gpt2".into(), "it has no merges"),
        (
            &|f| {
                f.model = "bert".into();
                f.unknown_token_id = Some(7);
                f.tokens[7].clear();
            },
            "its unknown token has no name",
        ),
        (
            &|f| {
                f.model = "gpt2".into();
                f.merges = vec!["<s> x".into()];
            },
            "merge 0: '<s> x': the vocabulary has no token 'x'",
        ),
        (
            &|f| {
                f.model = "gpt2".into();
                f.merges = vec!["<s> <s>".into()];
                f.pre = Some("kimi-k2".into());
            },
            "its pre-tokenizer 'kimi-k2' is not supported",
        ),
    ];
    for (change, reason) in cases {
        assert!(with(change).contains(reason), "{}\nexpected: {reason}", with(change));
    }
}

#[test]
fn no_random_change_makes_a_gguf_vocabulary_panic() {
    let mut dice = Dice::new(52);
    let (mut read, mut refused) = ([0; 4], [0; 4]);
    for round in 0..800 {
        let model = round % 4;
        let file = vocabulary(&json!({
            "model": (["llama", "gpt2", "bert", "t5"][model]),
            "tokens": TOKENS,
            "token_type": draw(&mut dice, TOKENS.len(), &[0, 1, 1, 1, 2, 3, 4, 5, 5], &[6, 7, -1]),
            "scores": draw(&mut dice, TOKENS.len(), &[0.0, -1.0, 3e38, -3e38], &[]),
            "merges": draw(&mut dice, 4, &["a b", "Ġ a", "a a"], &["a", "b ab", "x y"]),
            "unknown_token_id": dice.below(TOKENS.len() + 1),
            "bos_token_id": dice.below(TOKENS.len()),
            "precompiled_charsmap": charsmap(&mut dice),
        }));
        let counts = match survives(Tokenizer::from_gguf(Path::new("m.gguf"), &file)) {
            true => &mut read,
            false => &mut refused,
        };
        counts[model] += 1;
    }
    assert!(read.into_iter().chain(refused).all(|count| count > 20), "{read:?} read, {refused:?} refused");
}

const TOKENS: [&str; 12] =
    ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u{2581}", "\u{2581}a", "", "[UNK]", "aa", "Ġ"];

/// Picks random valid values, and sometimes one invalid value.
fn draw<T: Clone>(dice: &mut Dice, count: usize, good: &[T], bad: &[T]) -> Vec<T> {
    let mut values: Vec<T> = (0..count).map(|_| dice.pick(good).clone()).collect();
    if !bad.is_empty() && dice.below(3) == 0 {
        values[dice.below(count)] = dice.pick(bad).clone();
    }
    values
}

/// Returns a character map: none, or one of random units, mostly with the declared number of units.
fn charsmap(dice: &mut Dice) -> Vec<u8> {
    let units = dice.below(3) * 128;
    if units == 0 {
        return Vec::new();
    }
    let len = (4 * units + dice.below(8) / 7) as u32;
    // Labels are letters of the test text, so that lookups match.
    let unit = |dice: &mut Dice| {
        (dice.below(1 << 9) << 10 | dice.below(4) << 8) as u32 | u32::from(*dice.pick(b"Hel123"))
    };
    let index: Vec<u8> = (0..units).flat_map(|_| unit(dice).to_le_bytes()).collect();
    [&len.to_le_bytes()[..], &index, b"x\0 \0\0"].concat()
}
