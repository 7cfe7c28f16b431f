//! The vocabulary of a GGUF file for a `tokenizer.json`.
//!
//! Invariant: a file with this vocabulary has the `tokenizer.json` itself, so here texts are encoded as in
//! the folder. The other keys are for programs that do not read it; where GGUF has no such kind of tokenizer,
//! they say that there is none.

use super::pre_tokenizer::PreTokenizerSpec;
use super::{BYTE, GgufVocabulary};
use crate::formats::Folder;
use crate::text::tokenizer::Tokenizer;
use crate::text::tokenizer::json::FILE;
use crate::text::tokenizer::spelling::byte_of_name;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::HashMap;
use tracing::warn;

/// Numbers of token types.
const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;

/// Value of `tokenizer.ggml.model` if GGUF has no such tokenizer.
const NO_MODEL: &str = "none";

impl GgufVocabulary {
    /// Makes the vocabulary of a file from the tokenizer of a folder, which must have a `tokenizer.json`, for
    /// a model with embeddings for `vocab` tokens.
    pub fn from_folder(folder: &Folder, vocab: usize) -> Result<GgufVocabulary> {
        let name = || folder.file(FILE).display().to_string();
        let text = folder.read_text(FILE)?.with_context(|| {
            format!("{}: it does not exist, and a GGUF file is made with no other tokenizer", name())
        })?;
        let json: Value = serde_json::from_str(&text).with_context(name)?;
        let tokenizer = Tokenizer::from_folder(folder)?;
        let around = tokenizer.encode("", true)?;
        let is_added = |id: Option<u32>, at: Option<&u32>| id.is_some().then(|| at == id.as_ref());
        let mut vocabulary = GgufVocabulary {
            model: NO_MODEL.to_owned(),
            bos_token_id: tokenizer.bos_id(),
            eos_token_id: tokenizer.eos_id(),
            add_bos_token: is_added(tokenizer.bos_id(), around.first()),
            add_eos_token: is_added(tokenizer.eos_id(), around.last()),
            ..GgufVocabulary::default()
        };
        vocabulary.fill_tokens(&json, vocab.max(tokenizer.vocab_size()));
        vocabulary.fill_model(&json);
        vocabulary.huggingface_json = Some(text);
        Ok(vocabulary)
    }

    /// Fills in the tokens with their types. Ids without a token are padding.
    fn fill_tokens(&mut self, json: &Value, count: usize) {
        let model = &json["model"];
        self.tokens = (0..count).map(|id| format!("[PAD{id}]")).collect();
        self.token_type = vec![UNUSED; count];
        for (token, id) in vocabulary_of(model) {
            let ty = if byte_of_name(&token).is_some() { BYTE } else { NORMAL };
            self.set_token(id, token, ty);
        }
        for added in json["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(token)) = (added["id"].as_u64(), added["content"].as_str()) else { continue };
            let ty = if added["special"] == true { CONTROL } else { USER_DEFINED };
            self.set_token(id as usize, token.to_owned(), ty);
        }
        let unknown = model["unk_token"].as_str();
        if let Some(id) = self.tokens.iter().position(|token| Some(token.as_str()) == unknown) {
            self.token_type[id] = UNKNOWN;
            self.unknown_token_id = Some(id as u32);
        }
    }

    fn set_token(&mut self, id: usize, token: String, ty: i32) {
        if let (Some(place), Some(own_type)) = (self.tokens.get_mut(id), self.token_type.get_mut(id)) {
            (*place, *own_type) = (token, ty);
        }
    }

    /// Fills in the kind of tokenizer, if GGUF has it.
    fn fill_model(&mut self, json: &Value) {
        let model = &json["model"];
        let steps = ["normalizer", "pre_tokenizer"].map(|key| steps(&json[key]));
        let has = |kind: &str| steps.iter().flatten().any(|step| step["type"] == kind);
        let merges = merges_of(model);
        match (model["type"].as_str(), model["byte_fallback"] == true) {
            (Some("BPE"), false) if has("ByteLevel") => {
                self.model = "gpt2".to_owned();
                self.pre = Some(self.pre_tokenizer_name(&steps[1]).to_owned());
                self.merges = merges;
            }
            (Some("BPE"), true) => {
                self.model = "llama".to_owned();
                self.scores = scores(&self.tokens, &merges);
                self.add_space_prefix = Some(has("Prepend") || has("Metaspace"));
            }
            (kind, _) => warn!(
                "GGUF has no tokenizer of the kind {}: only programs that read the key \
                 'tokenizer.huggingface.json' can encode texts for this file",
                kind.unwrap_or("unknown")
            ),
        }
    }

    /// Returns the name of a pre-tokenizer of byte-level BPE.
    fn pre_tokenizer_name(&self, steps: &[&Value]) -> &'static str {
        let patterns: Vec<&str> = steps.iter().filter_map(|step| step["pattern"]["Regex"].as_str()).collect();
        PreTokenizerSpec::name_of(&patterns, self.add_bos_token == Some(true)).unwrap_or_else(|| {
            warn!(
                "GGUF has no name for how the model splits texts into words: programs that do not read \
                 the key 'tokenizer.huggingface.json' split them in another way"
            );
            PreTokenizerSpec::DEFAULT
        })
    }
}

/// Returns the tokens of a model with their ids: an object, or a list of tokens with scores.
fn vocabulary_of(model: &Value) -> Vec<(String, usize)> {
    match &model["vocab"] {
        Value::Object(ids) => {
            ids.iter().filter_map(|(token, id)| Some((token.clone(), id.as_u64()? as usize))).collect()
        }
        Value::Array(pieces) => {
            (0..).zip(pieces).filter_map(|(id, piece)| Some((piece[0].as_str()?.to_owned(), id))).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the merges, each as two tokens with a space between them.
fn merges_of(model: &Value) -> Vec<String> {
    let merge = |merge: &Value| match merge {
        Value::Array(pair) => Some(format!("{} {}", pair.first()?.as_str()?, pair.get(1)?.as_str()?)),
        text => text.as_str().map(str::to_owned),
    };
    model["merges"].as_array().into_iter().flatten().filter_map(merge).collect()
}

/// Returns the steps of a normalizer or pre-tokenizer.
fn steps(step: &Value) -> Vec<&Value> {
    let inner = step["normalizers"].as_array().or(step["pretokenizers"].as_array());
    inner.map_or_else(|| vec![step], |inner| inner.iter().flat_map(steps).collect())
}

/// Returns scores of tokens such that those of earlier merges are merged first.
fn scores(tokens: &[String], merges: &[String]) -> Vec<f32> {
    let mut ranks: HashMap<String, usize> = HashMap::new();
    for (rank, merge) in merges.iter().enumerate() {
        ranks.entry(merge.replacen(' ', "", 1)).or_insert(rank);
    }
    let last = merges.len();
    tokens.iter().map(|token| -(ranks.get(token).copied().unwrap_or(last) as f32)).collect()
}
