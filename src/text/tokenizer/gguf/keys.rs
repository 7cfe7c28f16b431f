//! Reads the vocabulary of a GGUF file from its metadata, and returns the metadata of a vocabulary.
//!
//! Invariant: a value of the wrong type is an error that names the key.

use super::GgufVocabulary;
use crate::formats::Gguf;
use crate::formats::save::{GgufEntries, GgufMetadata};
use anyhow::Result;

/// Key of a whole `tokenizer.json`.
const HUGGINGFACE_JSON: &str = "tokenizer.huggingface.json";

/// Prefix of the keys.
pub(super) const PREFIX: &str = "tokenizer.ggml.";

/// Values of `tokenizer.ggml.model` for files without a vocabulary.
const NONE: [&str; 2] = ["none", "no_vocab"];

impl GgufVocabulary {
    /// Reads the vocabulary of a file; `None` if it has none.
    pub fn from_file(gguf: &Gguf) -> Result<Option<GgufVocabulary>> {
        let key = |name: &str| format!("{PREFIX}{name}");
        let has_tokens = gguf.value(&key("tokens")).is_some();
        let huggingface_json = gguf.opt_str(HUGGINGFACE_JSON)?.map(str::to_owned);
        let model = match gguf.opt_str(&key("model"))? {
            Some(model) if has_tokens && huggingface_json.is_some() => model.to_owned(),
            Some(model) if !NONE.contains(&model) => model.to_owned(),
            None if has_tokens => gguf.str(&key("model"))?.to_owned(),
            _ => return Ok(None),
        };
        let strings = |list: Vec<&str>| list.into_iter().map(str::to_owned).collect();
        let id = |name: &str| gguf.opt_id(&key(name));
        let flag = |name: &str| gguf.opt_bool(&key(name));
        Ok(Some(GgufVocabulary {
            architecture: gguf.opt_str("general.architecture")?.map(str::to_owned),
            name: gguf.opt_str("general.name")?.map(str::to_owned),
            model,
            pre: gguf.opt_str(&key("pre"))?.map(str::to_owned),
            tokens: strings(gguf.strings(&key("tokens"))?),
            scores: gguf.opt_f32s(&key("scores"))?.unwrap_or_default(),
            token_type: gguf.opt_i32s(&key("token_type"))?.unwrap_or_default(),
            merges: strings(gguf.opt_strings(&key("merges"))?.unwrap_or_default()),
            bos_token_id: id("bos_token_id")?,
            eos_token_id: id("eos_token_id")?,
            unknown_token_id: id("unknown_token_id")?,
            separator_token_id: id("seperator_token_id")?,
            cls_token_id: id("cls_token_id")?,
            add_bos_token: flag("add_bos_token")?,
            add_eos_token: flag("add_eos_token")?,
            add_space_prefix: flag("add_space_prefix")?,
            remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
            precompiled_charsmap: bytes(gguf, &key("precompiled_charsmap"))?,
            lowercase: flag("normalizer.lowercase")?,
            strip_accents: flag("normalizer.strip_accents")?,
            huggingface_json,
        }))
    }

    /// Returns the metadata of a file with this vocabulary, without the keys under `general.`.
    pub fn entries(&self) -> GgufEntries {
        let mut entries = GgufEntries::new();
        let mut push = |name: &str, value: Option<GgufMetadata>| {
            entries.extend(value.map(|value| (format!("{PREFIX}{name}"), value)))
        };
        let id = |id: Option<u32>| id.map(GgufMetadata::U32);
        let flag = |flag: Option<bool>| flag.map(GgufMetadata::Bool);
        push("model", Some(GgufMetadata::Text(self.model.clone())));
        push("pre", self.pre.clone().map(GgufMetadata::Text));
        push("tokens", Some(GgufMetadata::Texts(self.tokens.clone())));
        push("scores", (!self.scores.is_empty()).then(|| GgufMetadata::F32s(self.scores.clone())));
        push(
            "token_type",
            (!self.token_type.is_empty()).then(|| GgufMetadata::I32s(self.token_type.clone())),
        );
        push("merges", (!self.merges.is_empty()).then(|| GgufMetadata::Texts(self.merges.clone())));
        push("bos_token_id", id(self.bos_token_id));
        push("eos_token_id", id(self.eos_token_id));
        push("unknown_token_id", id(self.unknown_token_id));
        push("add_bos_token", flag(self.add_bos_token));
        push("add_eos_token", flag(self.add_eos_token));
        push("add_space_prefix", flag(self.add_space_prefix));
        let json = self.huggingface_json.clone().map(GgufMetadata::Text);
        entries.extend(json.map(|json| (HUGGINGFACE_JSON.to_owned(), json)));
        entries
    }
}

/// Reads an array of bytes, which some programs write as signed bytes. Empty if the key is missing.
fn bytes(gguf: &Gguf, key: &str) -> Result<Vec<u8>> {
    let numbers = gguf.opt_i32s(key)?.unwrap_or_default();
    let byte = |number: i32| {
        let byte = u8::try_from(number).ok().or_else(|| i8::try_from(number).ok().map(i8::cast_unsigned));
        byte.ok_or_else(|| gguf.key_error(key, format_args!("{number} is not a byte")))
    };
    numbers.into_iter().map(byte).collect()
}
