//! The small vocabularies of tests/fixtures/tokenizers, with the recorded results of their reference
//! libraries.
//!
//! Invariant: this module contains no knowledge of how the vocabularies are read.

use crate::testing::Scratch;
use crate::text::tokenizer::{GgufVocabulary, Tokenizer};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A tokenizer and the recorded results of its library.
pub(crate) struct VocabularyCase {
    pub name: String,
    pub tokenizer: Tokenizer,
    /// Results of the library: the ids of every text, and more. For a GGUF file, `all` contains its keys.
    pub answers: Value,
}

/// Returns the texts to encode.
pub(crate) fn texts() -> Vec<String> {
    serde_json::from_value(read("texts.json")).unwrap()
}

/// Returns the vocabularies in folders.
pub(crate) fn folders() -> Vec<VocabularyCase> {
    let case = |answers: &Value| {
        let scratch = write_folder(&answers["files"]);
        case(answers, Tokenizer::from_folder(&scratch.folder()))
    };
    read("folders.json").as_array().unwrap().iter().map(case).collect()
}

/// Returns the vocabularies in GGUF files.
pub(crate) fn ggufs() -> Vec<VocabularyCase> {
    let all = read("gguf.json");
    let case = |answers: &Value| {
        let mut answers = answers.clone();
        let mut keys = all["vocabularies"][answers["vocabulary"].as_str().unwrap()].clone();
        keys.as_object_mut().unwrap().extend(answers["keys"].as_object().unwrap().clone());
        let tokenizer = Tokenizer::from_gguf(Path::new("vocabulary.gguf"), &vocabulary(&keys));
        answers["all"] = keys;
        case(&answers, tokenizer)
    };
    all["cases"].as_array().unwrap().iter().map(case).collect()
}

/// Writes a folder of files: each value is a fixture's name, or the file's JSON content.
pub(crate) fn write_folder(files: &Value) -> Scratch {
    let scratch = Scratch::new();
    for (name, source) in files.as_object().unwrap() {
        let content = match source.as_str() {
            Some(fixture) => std::fs::read(path("files").join(fixture)).unwrap(),
            None => source.to_string().into_bytes(),
        };
        scratch.write(name, &content);
    }
    scratch
}

/// Converts a GGUF file's keys.
pub(crate) fn vocabulary(keys: &Value) -> GgufVocabulary {
    fn list<T: serde::de::DeserializeOwned>(value: &Value) -> Vec<T> {
        serde_json::from_value(value.clone()).unwrap_or_default()
    }
    let id = |key: &str| keys[key].as_u64().map(|id| id as u32);
    GgufVocabulary {
        architecture: None,
        name: None,
        model: keys["model"].as_str().unwrap().to_owned(),
        pre: keys["pre"].as_str().map(str::to_owned),
        tokens: list(&keys["tokens"]),
        scores: list(&keys["scores"]),
        token_type: list(&keys["token_type"]),
        merges: list(&keys["merges"]),
        bos_token_id: id("bos_token_id"),
        eos_token_id: id("eos_token_id"),
        unknown_token_id: id("unknown_token_id"),
        separator_token_id: id("seperator_token_id"),
        cls_token_id: id("cls_token_id"),
        add_bos_token: keys["add_bos_token"].as_bool(),
        add_eos_token: keys["add_eos_token"].as_bool(),
        add_space_prefix: keys["add_space_prefix"].as_bool(),
        remove_extra_whitespaces: keys["remove_extra_whitespaces"].as_bool(),
        precompiled_charsmap: list(&keys["precompiled_charsmap"]),
        lowercase: keys["lowercase"].as_bool(),
        strip_accents: keys["strip_accents"].as_bool(),
        huggingface_json: None,
    }
}

fn case(answers: &Value, tokenizer: anyhow::Result<Tokenizer>) -> VocabularyCase {
    let name = answers["name"].as_str().unwrap().to_owned();
    let tokenizer = tokenizer.unwrap_or_else(|error| panic!("{name}: {error:#}"));
    VocabularyCase { name, tokenizer, answers: answers.clone() }
}

pub(super) fn read(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path(name)).unwrap()).unwrap()
}

pub(super) fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name)
}
