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

/// The beginning of a `model.bin` of CTranslate2, beside which lists of tokens are vocabularies.
const MODEL: &[u8] = b"\x06\0\0\0\x10\0TransformerSpec\0\x07\0\0\0";

/// Opens the tokenizer of a folder with these files and a model of CTranslate2.
fn open_beside_model(files: Value) -> anyhow::Result<Tokenizer> {
    let folder = write_folder(&files);
    folder.write("model.bin", MODEL);
    Tokenizer::from_folder(&folder.folder())
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
        open_beside_model(
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
    let unused = open(json!({ "tokenizer.json": tokenizer, "vocabulary.json": ["a"] })).unwrap();
    assert_eq!(unused.encode("b", true).unwrap(), [4]);
    let error = format!("{:#}", with(json!(["<unk>", "a", "a", "b"])).unwrap_err());
    assert!(error.contains("the token 'a' is both 1 and 2 in shared_vocabulary.json"), "{error}");
    let two = open_beside_model(
        json!({ "tokenizer.json": tokenizer, "source_vocabulary.json": ["<unk>", "b", "a"],
        "target_vocabulary.json": ["<unk>", "c", "a"] }),
    );
    let two = two.unwrap();
    assert_eq!(two.source().encode("a b", true).unwrap(), [2, 1]);
    assert_eq!(two.encode("a c", true).unwrap(), [2, 1]);
}

#[test]
fn a_token_on_both_sides_is_added_where_it_is_missing() {
    let mut tokenizer = words(&["<unk>", "<s>", "a"]);
    tokenizer["post_processor"] = json!({ "type": "TemplateProcessing",
        "single": [{ "Sequence": { "id": "A", "type_id": 0 } },
            { "SpecialToken": { "id": "<s>", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } } });
    let config = json!({ "add_source_eos": true, "add_source_bos": true, "eos_token": "<s>" });
    let with = |list: Value| {
        open_beside_model(
            json!({ "tokenizer.json": tokenizer, "config.json": config, "shared_vocabulary.json": list }),
        )
    };
    assert_eq!(with(json!(["<unk>", "<s>", "a"])).unwrap().encode("a", true).unwrap(), [1, 2, 1]);
}

#[test]
fn the_unknown_token_of_the_vocabulary_has_an_id_although_the_tokenizer_lacks_it() {
    let mut tokenizer = words(&["[U]", "a", "b"]);
    tokenizer["model"]["unk_token"] = json!("[U]");
    let files = |list: Value| json!({ "tokenizer.json": tokenizer, "shared_vocabulary.json": list });
    for list in [json!(["b", "a", "<unk>"]), json!(["b", "a"])] {
        let tokenizer = open_beside_model(files(list)).unwrap();
        assert_eq!((tokenizer.encode("a x b", true).unwrap(), tokenizer.vocab_size()), (vec![1, 2, 0], 3));
    }
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
    let converted = marian(&recorded, &[("shared_vocabulary.json", list)]);
    converted.write("model.bin", MODEL);
    check_marian(&recorded, &converted.folder(), "<pad>");
    let kind = json!({ "model_type": "marian" });
    let folder = write_folder(&json!({ "vocab.json": ids, "config.json": kind }));
    let pieces = marian(&recorded, &[]);
    let place = |name: &str| Some(pieces.path().join(name));
    let files = TokenizerFiles { tokenizer: place("source.spm"), target: place("target.spm") };
    let named = Tokenizer::from_files(&folder.folder(), &files).unwrap();
    assert_eq!(json!(named.source().encode(">>fra<< the rain", true).unwrap()), json!([2, 533, 422, 438, 0]));
    // The file of the input has any name, and the model has that of the output.
    pieces.write("own.model", &std::fs::read(pieces.path().join("source.spm")).unwrap());
    let files = TokenizerFiles { tokenizer: place("own.model"), target: None };
    let model = marian(&recorded, &[("vocab.json", json!(ids))]);
    let named = Tokenizer::from_files(&model.folder(), &files).unwrap();
    assert_eq!(json!(named.source().encode(">>fra<< the rain", true).unwrap()), json!([2, 533, 422, 438, 0]));
    assert!(named.has_two_vocabularies());
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
        "shared_vocabulary.json": tokens, "config.json": { "add_source_eos": true, "eos_token": "</s>" },
        "tokenizer_config.json": { "bos_token": "<absent>" },
        "added_tokens.json": { "eng_Latn": 1, "<other>": 2 } }));
    folder.write("model.bin", MODEL);
    let tokenizer = Tokenizer::from_folder(&folder.folder()).unwrap();
    for encoded in recorded["encoded"].as_array().unwrap() {
        let ids = tokenizer.encode(encoded["text"].as_str().unwrap(), true).unwrap();
        assert_eq!(json!(ids), encoded["ids"], "{}", encoded["text"]);
    }
    assert_eq!((tokenizer.token_id("eng_Latn"), tokenizer.is_special(code)), (Some(code), true));
    assert_eq!((tokenizer.has_two_vocabularies(), tokenizer.bos_id()), (false, None));
    let bare = write_folder(&json!({ "vocab.txt": "vocab.txt", "shared_vocabulary.json": ["a"] }));
    bare.write("model.bin", MODEL);
    let error = format!("{:#}", Tokenizer::from_folder(&bare.folder()).unwrap_err());
    assert!(error.contains("no tokenizer found for shared_vocabulary.json"), "{error}");
}
