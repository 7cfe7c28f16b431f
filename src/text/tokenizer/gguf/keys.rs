//! Reads the vocabulary of a GGUF file from its metadata.
//!
//! Invariant: a value of the wrong type is an error that names the key.

use super::GgufVocabulary;
use crate::formats::Gguf;
use anyhow::Result;

/// Prefix of the keys.
pub(super) const PREFIX: &str = "tokenizer.ggml.";

/// Values of `tokenizer.ggml.model` for files without a vocabulary.
const NONE: [&str; 2] = ["none", "no_vocab"];

impl GgufVocabulary {
    /// Reads the vocabulary of a file; `None` if it has none.
    pub fn from_file(gguf: &Gguf) -> Result<Option<GgufVocabulary>> {
        let key = |name: &str| format!("{PREFIX}{name}");
        let has_tokens = gguf.value(&key("tokens")).is_some();
        let model = match gguf.opt_str(&key("model"))? {
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
        }))
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
