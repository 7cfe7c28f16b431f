//! Tests with damaged files: truncated, contradictory, meaningless.
//!
//! Invariant: each is an error that names the file, or harmless; nothing panics, and no number in a file
//! causes larger allocations than the limit on ids allows.

use super::fixtures::write_folder;
use crate::testing::Scratch;
use crate::testing::vocabularies::Dice;
use crate::text::tokenizer::Tokenizer;
use serde_json::{Value, json};

const TEXT: &str = "Hello  there, 日本 \u{1f600}\t<s>123 the\u{301}\u{feff} <tool>";

/// Returns the error for a folder of these files.
fn refusal(files: &Value) -> String {
    format!("{:#}", Tokenizer::from_folder(&write_folder(files).folder()).unwrap_err())
}

/// Writes a folder of files with the given content.
fn written(files: &[(&str, &[u8])]) -> Scratch {
    let scratch = Scratch::new();
    files.iter().for_each(|(name, content)| _ = scratch.write(name, content));
    scratch
}

fn refused(files: &[(&str, &[u8])]) -> String {
    format!("{:#}", Tokenizer::from_folder(&written(files).folder()).unwrap_err())
}

#[test]
fn a_folder_without_a_tokenizer_names_what_was_looked_for() {
    let error = refusal(&json!({"config.json": {"model_type": "llama"}}));
    for name in ["tokenizer.json", "tokenizer.model", "spiece.model", "*.tiktoken", "merges.txt", "vocab.txt"]
    {
        assert!(error.contains(name), "{error}");
    }
}

/// A model of 384 tokens had a vocabulary of three million, which took seconds and gigabytes.
#[test]
fn a_vocabulary_far_larger_than_the_models_is_refused() {
    let tokenizer = Tokenizer::bytes(100_000).unwrap();
    for fitting in [100_000, 99_000, 18_000] {
        tokenizer.check_vocab_size(fitting).unwrap();
    }
    let error = tokenizer.check_vocab_size(384).unwrap_err().to_string();
    assert_eq!(error, "the tokenizer has 100000 tokens, but the model has embeddings for 384");
}

#[test]
fn the_first_kind_is_taken_and_a_damaged_one_is_not_passed_over() {
    let all = json!({"tokenizer.model": "bpe.model", "vocab.txt": "vocab.txt", "vocab.json": "vocab.json"});
    assert_eq!(Tokenizer::from_folder(&write_folder(&all).folder()).unwrap().vocab_size(), 900);
    let mut damaged = all;
    damaged["tokenizer.json"] = json!({});
    assert!(refusal(&damaged).contains("tokenizer.json: "), "{}", refusal(&damaged));
}

#[test]
fn invalid_merges_are_rejected_with_file_and_line() {
    let pairs = |vocabulary: &str, merges: &str| {
        refused(&[("vocab.json", vocabulary.as_bytes()), ("merges.txt", merges.as_bytes())])
    };
    let letters = r#"{"a": 0, "b": 1, "ab": 2}"#;
    let cases = [
        (refused(&[("vocab.json", letters.as_bytes())]), "vocab.json: there is no merges.txt beside it"),
        (
            pairs(letters, "#version: 0.2\na b\nb a\n"),
            "merges.txt: line 3: 'b a': the vocabulary has no token 'ba'",
        ),
        (pairs(letters, "a b c"), "merges.txt: line 1: 'a b c' is not two tokens"),
        (pairs(letters, "ab"), "merges.txt: line 1: 'ab' is not two tokens"),
        (pairs(letters, " ab"), "line 1: ' ab' is not two tokens"),
        (pairs(r#"{"a": 1, "b": 1}"#, ""), "vocab.json: the tokens 'a' and 'b' both have id 1"),
        (pairs(r#"{"a": 16777216}"#, ""), "vocab.json: its largest token id is 16777216"),
        (pairs(r#"{"a": -1}"#, ""), "vocab.json: "),
        (pairs("{}", ""), "vocab.json: its vocabulary is empty"),
        (pairs(r#"{"a": 0"#, ""), "vocab.json: EOF"),
        (
            refused(&[("vocab.json", letters.as_bytes()), ("merges.txt", b"\xff b")]),
            "merges.txt: invalid utf-8",
        ),
        (
            refusal(&json!({"vocab.json": "vocab.json", "merges.txt": "merges.txt",
                "tokenizer_config.json": {"tokenizer_class": "CLIPTokenizer"}})),
            "vocab.json: CLIPTokenizer cannot be built from this file and merges.txt: it needs a \
             tokenizer.json",
        ),
    ];
    for (error, reason) in cases {
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

#[test]
fn settings_that_contradict_a_vocabulary_are_refused() {
    let with = |config: Value| {
        refusal(
            &json!({"vocab.json": "vocab.json", "merges.txt": "merges.txt", "tokenizer_config.json": config}),
        )
    };
    let two = json!({"1000": {"content": "<x>"}, "1001": {"content": "<y>"}});
    let cases = [
        (
            with(json!({"added_tokens_decoder": {"one": {"content": "<x>"}}})),
            "added_tokens_decoder'.one: invalid digit",
        ),
        (with(json!({"added_tokens_decoder": {"1000": {"content": 7}}})), "is not a token name"),
        (with(json!({"added_tokens_decoder": {"1000": {"content": ""}}})), "is not a token name"),
        (with(json!({"added_tokens_decoder": {"4294967295": {"content": "<x>"}}})), "ids must be below"),
        (
            refusal(&json!({"vocab.txt": "vocab.txt", "added_tokens.json": {"": 900}})),
            "added_tokens.json: key '': not a token name",
        ),
        (
            refusal(&json!({"spiece.model": "unigram.model", "vocab.json": {"<unk>": 0, "b": 1, "a": 1},
                "tokenizer_config.json": {"tokenizer_class": "M2M100Tokenizer"}})),
            "vocab.json: the tokens 'a' and 'b' both have id 1",
        ),
        (with(json!({"bos_token": "<none>"})), "key 'bos_token': vocab.json has no token '<none>'"),
        (with(json!({"add_bos_token": "yes"})), "key 'add_bos_token'"),
        (
            refusal(&json!({"vocab.json": "vocab.json", "merges.txt": "merges.txt",
                "added_tokens.json": {"<z>": 1001},
                "tokenizer_config.json": {"added_tokens_decoder": two}})),
            "vocab.json: the tokens '<y>' and '<z>' both have id 1001",
        ),
        (
            refusal(&json!({"vocab.txt": "vocab.txt",
                "tokenizer_config.json": {"tokenizer_class": "FunnelTokenizer"}})),
            "vocab.txt: FunnelTokenizer cannot be built from this file",
        ),
        (refused(&[("vocab.txt", b"the\n##re\n")]), "vocab.txt: it has no token '[UNK]'"),
        (refused(&[("vocab.txt", b"[UNK]\n\xff\n")]), "vocab.txt: invalid utf-8"),
    ];
    for (error, reason) in cases {
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

#[test]
fn invalid_rank_files_are_rejected_with_the_line() {
    let all =
        std::fs::read_to_string(write_folder(&json!({"x": "ranks.tiktoken"})).path().join("x")).unwrap();
    let ranks = |content: &str| refused(&[("x.tiktoken", content.as_bytes())]);
    let cases = [
        (ranks("IQ== 0\nIg=\n"), "x.tiktoken: line 2: expected a token in base64 and a rank"),
        (ranks("IQ== 0\nIg= 1\n"), "line 2: 'Ig=' is not base64"),
        (ranks("IQ== 0\nIg== one\n"), "line 2: 'one' is not a rank"),
        (ranks("IQ== 0\n\nIQ== 1\n"), "line 3: its token is a duplicate"),
        (ranks("IQ== 0\nIg== 0\n"), "line 2: its rank 0 is a duplicate"),
        (ranks("IQ== 16777216\n"), "line 1: its rank is 16777216: ranks must be below"),
        (ranks("IQ== 0\n"), "x.tiktoken: it has no token for the byte 0x00"),
        (refused(&[("x.tiktoken", b"\xff\xfe")]), "x.tiktoken: invalid utf-8"),
        (
            refused(&[("a.tiktoken", all.as_bytes()), ("b.tiktoken", all.as_bytes())]),
            "both a.tiktoken and b.tiktoken are rank files",
        ),
        (
            refusal(&json!({"x.tiktoken": "ranks.tiktoken",
                "tokenizer_config.json": {"tokenizer_class": "Kimi"}})),
            "the split pattern of Kimi is not known",
        ),
        (
            refusal(&json!({"x.tiktoken": "ranks.tiktoken", "tokenizer_config.json": {"pat_str": "(a"}})),
            "x.tiktoken: the pattern '(a': ",
        ),
    ];
    for (error, reason) in cases {
        assert!(error.contains(reason), "{error}\nexpected: {reason}");
    }
}

/// Encodes and decodes with a tokenizer, if it was read. Returns whether it was.
pub fn survives(tokenizer: anyhow::Result<Tokenizer>) -> bool {
    let Ok(tokenizer) = tokenizer else { return false };
    let ids = tokenizer.encode(TEXT, true).unwrap();
    assert!(ids.iter().all(|id| (*id as usize) < tokenizer.vocab_size()), "{ids:?}");
    // Further ids, especially large ones.
    let ids = ids.into_iter().chain([0, 7, u32::MAX, tokenizer.vocab_size() as u32]);
    tokenizer.decode(&ids.collect::<Vec<_>>(), false).unwrap();
    true
}

#[test]
fn no_random_damage_makes_a_folder_panic() {
    let mut dice = Dice::new(51);
    let config = |class: &str| json!({"tokenizer_class": class});
    let roles = json!({"bos_token": "<s>", "added_tokens_decoder": {"1000": {"content": "<x>"}}});
    let pairs = |other: Value| {
        let (vocab, merges) = ("vocab.json", "merges.txt");
        json!({"vocab.json": vocab, "merges.txt": merges, "tokenizer_config.json": other})
    };
    // Each with the name of the file to damage.
    let folders = [
        ("tokenizer.model", json!({"tokenizer.model": "fallback.model"})),
        (
            "spiece.model",
            json!({"spiece.model": "bare.model", "tokenizer_config.json": config("T5Tokenizer")}),
        ),
        ("tokenizer.model", json!({"tokenizer.model": "tied.model"})),
        ("spm.model", json!({"spm.model": "unigram.model", "config.json": {"model_type": "xlm-roberta"}})),
        ("x.tiktoken", json!({"x.tiktoken": "ranks.tiktoken"})),
        ("vocab.json", pairs(config("GPT2Tokenizer"))),
        ("merges.txt", pairs(config("Qwen2Tokenizer"))),
        ("tokenizer_config.json", pairs(roles)),
        ("vocab.txt", json!({"vocab.txt": "vocab.txt"})),
    ];
    let (mut read, mut refused) = (0, 0);
    for (name, files) in folders {
        let scratch = write_folder(&files);
        let whole = std::fs::read(scratch.path().join(name)).unwrap();
        for round in 0..40 {
            let mut content = whole.clone();
            for _ in 0..dice.below(4) {
                let at = dice.below(content.len());
                content[at] = dice.below(256) as u8;
            }
            if round % 3 == 0 {
                content.truncate(dice.below(content.len()));
            }
            scratch.write(name, &content);
            match survives(Tokenizer::from_folder(&scratch.folder())) {
                true => read += 1,
                false => refused += 1,
            }
        }
    }
    assert!(read > 30 && refused > 30, "{read} read, {refused} refused");
}
