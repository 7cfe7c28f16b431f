//! Tests of models with two tokenizers, and of vocabularies in another order than the tokenizer's.

use super::fixtures::{path, read, write_folder};
use crate::formats::Folder;
use crate::testing::Scratch;
use crate::text::tokenizer::{Tokenizer, TokenizerFiles};
use serde_json::{Value, json};

/// Returns a `tokenizer.json` with a token per word, of which those in angle brackets are special.
fn words(words: &[&str]) -> Value {
    let ids: serde_json::Map<String, Value> =
        words.iter().zip(0..).map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    let special = words.iter().zip(0..).filter(|(word, _)| word.starts_with('<'));
    let added = special.map(|(word, id)| {
        json!({ "id": id, "content": word, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false })
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added.collect::<Value>(),
        "normalizer": null, "pre_tokenizer": { "type": "WhitespaceSplit" }, "post_processor": null,
        "decoder": null, "model": { "type": "WordLevel", "vocab": ids, "unk_token": "<unk>" }
    })
}

fn open(files: Value) -> anyhow::Result<Tokenizer> {
    Tokenizer::from_folder(&write_folder(&files).folder())
}

#[test]
fn input_and_output_may_have_tokenizers_of_their_own() {
    let (own, target) = (words(&["<unk>", "a", "b"]), words(&["<unk>", "c", "a", "d"]));
    let both = open(json!({ "tokenizer.json": own, "target_tokenizer.json": target })).unwrap();
    assert_eq!(both.source().encode("b a c", true).unwrap(), [2, 1, 0]);
    assert_eq!(both.encode("b a c", true).unwrap(), [0, 2, 1]);
    assert!(both.has_two_vocabularies() && both.vocab_size() == 4 && both.source().vocab_size() == 3);
    let one = open(json!({ "tokenizer.json": own })).unwrap();
    assert!(!one.has_two_vocabularies() && one.source().vocab_size() == 3);
}

#[test]
fn files_that_the_configuration_names_come_first() {
    let folder = write_folder(&json!({ "tokenizer.json": words(&["<unk>", "a"]) }));
    let other = write_folder(&json!({ "other.json": words(&["<unk>", "b", "c"]) }));
    let named = |tokenizer: Option<&str>, target: Option<&str>| {
        let place = |name: Option<&str>| name.map(|name| other.path().join(name));
        let files = TokenizerFiles { tokenizer: place(tokenizer), target: place(target) };
        Tokenizer::from_files(&folder.folder(), &files)
    };
    assert_eq!(named(Some("other.json"), None).unwrap().encode("c", true).unwrap(), [2]);
    let both = named(None, Some("other.json")).unwrap();
    assert_eq!(both.encode("c", true).unwrap(), [2]);
    assert_eq!(both.source().encode("a", true).unwrap(), [1]);
    let error = format!("{:#}", named(None, Some("absent.json")).unwrap_err());
    assert!(error.starts_with("model.target_tokenizer: ") && error.contains("absent.json: no such file"));
}

#[test]
fn tokens_have_the_ids_of_the_models_vocabulary() {
    let tokenizer = words(&["<unk>", "<s>", "</s>", "a", "b", "c"]);
    let config = json!({ "add_source_eos": true, "add_source_bos": false, "unk_token": "<unk>" });
    let with = |vocabulary: Value| {
        open(
            json!({ "tokenizer.json": tokenizer, "shared_vocabulary.json": vocabulary, "config.json": config,
            "tokenizer_config.json": { "bos_token": "<s>", "eos_token": "</s>" } }),
        )
    };
    let same = with(json!(["<unk>", "<s>", "</s>", "a", "b", "c", "madeupword0"])).unwrap();
    assert_eq!(same.encode("b x", true).unwrap(), [4, 0, 2]);
    let fewer = with(json!(["<unk>", "<s>", "</s>", "a"])).unwrap();
    assert_eq!(fewer.encode("a b c", true).unwrap(), [3, 0, 0, 2]);
    let other = with(json!(["b", "</s>", "a", "<unk>"])).unwrap();
    assert_eq!(other.encode("a b c <s> </s>", true).unwrap(), [2, 0, 3, 3, 1, 1]);
    assert_eq!(other.decode(&[0, 2, 1], true).unwrap(), "b a");
    assert_eq!((other.bos_id(), other.eos_id(), other.token_text(2)), (None, Some(1), " a".to_owned()));
    assert!(other.is_special(1) && !other.is_special(2) && !other.has_two_vocabularies());
    let error = format!("{:#}", with(json!(["<unk>", "x", "a"])).unwrap_err());
    assert!(error.contains("tokenizer.json: it has no token 'x', which is 1 in shared_vocabulary.json"));
    let two = open(json!({ "tokenizer.json": tokenizer, "source_vocabulary.json": ["<unk>", "b", "a"],
        "target_vocabulary.json": ["<unk>", "c", "a"] }));
    let two = two.unwrap();
    assert_eq!(two.source().encode("a b", true).unwrap(), [2, 1]);
    assert_eq!(two.encode("a c", true).unwrap(), [2, 1]);
}

/// Returns the folder of a Marian model, with these files in addition.
fn marian(recorded: &Value, files: &[(&str, Value)]) -> Scratch {
    let scratch = Scratch::new();
    for (name, key) in [("source.spm", "source"), ("target.spm", "target")] {
        let file = path("files").join(recorded[key].as_str().unwrap());
        scratch.write(name, &std::fs::read(file).unwrap());
    }
    files.iter().for_each(|(name, content)| _ = scratch.write(name, content.to_string().as_bytes()));
    scratch
}

/// Compares the results of transformers, apart from those of texts with `left_out`.
fn check_marian(recorded: &Value, folder: &Folder, left_out: &str) {
    let tokenizer = Tokenizer::from_folder(folder).unwrap();
    let has_it = |encoded: &&Value| encoded["text"].as_str().unwrap().contains(left_out);
    for encoded in recorded["encoded"].as_array().unwrap().iter().filter(|encoded| !has_it(encoded)) {
        let ids = tokenizer.source().encode(encoded["text"].as_str().unwrap(), true).unwrap();
        assert_eq!(json!(ids), encoded["ids"], "{}", encoded["text"]);
    }
    for decoded in recorded["decoded"].as_array().unwrap() {
        let ids: Vec<u32> = serde_json::from_value(decoded["ids"].clone()).unwrap();
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), decoded["text"].as_str().unwrap(), "{ids:?}");
    }
}

#[test]
fn marians_two_sentencepiece_models_share_a_vocabulary() {
    let recorded = read("marian.json");
    let tokens = recorded["tokens"].as_array().unwrap();
    let ids: serde_json::Map<String, Value> =
        tokens.iter().zip(0..).map(|(token, id)| (token.as_str().unwrap().to_owned(), json!(id))).collect();
    let class = json!({ "tokenizer_class": "MarianTokenizer", "eos_token": "</s>", "unk_token": "<unk>" });
    let files = [("vocab.json", json!(ids)), ("tokenizer_config.json", class)];
    check_marian(&recorded, &marian(&recorded, &files).folder(), "none");
    // Converted for CTranslate2, which drops the last token.
    let list = json!(tokens[..tokens.len() - 1]);
    check_marian(&recorded, &marian(&recorded, &[("shared_vocabulary.json", list)]).folder(), "<pad>");
    let (folder, pieces) = (write_folder(&json!({ "vocab.json": ids })), marian(&recorded, &[]));
    let place = |name: &str| Some(pieces.path().join(name));
    let files = TokenizerFiles { tokenizer: place("source.spm"), target: place("target.spm") };
    let named = Tokenizer::from_files(&folder.folder(), &files).unwrap();
    assert_eq!(json!(named.source().encode(">>fra<< the rain", true).unwrap()), json!([2, 533, 422, 438, 0]));
    let few = json!({ "<unk>": 0, "</s>": 1, "a": 2 });
    let error = marian(&recorded, &[("vocab.json", few)]);
    let error = format!("{:#}", Tokenizer::from_folder(&error.folder()).unwrap_err());
    assert!(error.contains("source.spm: the model's vocabulary has no token '"), "{error}");
    for (wrong, expected) in [
        (json!({ "<unk>": 0, "a": 0 }), "both have id 0"),
        (json!({ "<unk>": 2, "a": 0 }), "the token '<unk>' has id 2, but there are 2 tokens"),
    ] {
        let folder = marian(&recorded, &[("vocab.json", wrong)]);
        let error = format!("{:#}", Tokenizer::from_folder(&folder.folder()).unwrap_err());
        assert!(error.contains("vocab.json: ") && error.contains(expected), "{error}");
    }
}

/// Tokens of the vocabulary that are not pieces are found by name if they look like codes.
#[test]
fn one_sentencepiece_model_gets_the_ids_of_a_vocabulary() {
    let recorded = read("marian.json");
    let mut tokens = recorded["tokens"].as_array().unwrap().clone();
    tokens.push("eng_Latn".into());
    let code = tokens.len() as u32 - 1;
    let folder = write_folder(&json!({ "sentencepiece.bpe.model": recorded["source"],
        "shared_vocabulary.json": tokens, "config.json": { "add_source_eos": true, "eos_token": "</s>" } }));
    let tokenizer = Tokenizer::from_folder(&folder.folder()).unwrap();
    for encoded in recorded["encoded"].as_array().unwrap() {
        let ids = tokenizer.encode(encoded["text"].as_str().unwrap(), true).unwrap();
        assert_eq!(json!(ids), encoded["ids"], "{}", encoded["text"]);
    }
    assert_eq!((tokenizer.token_id("eng_Latn"), tokenizer.is_special(code)), (Some(code), true));
    assert!(!tokenizer.has_two_vocabularies());
    let bare = write_folder(&json!({ "vocab.txt": "vocab.txt", "shared_vocabulary.json": ["a"] }));
    let error = format!("{:#}", Tokenizer::from_folder(&bare.folder()).unwrap_err());
    assert!(error.contains("no tokenizer found for shared_vocabulary.json"), "{error}");
}
