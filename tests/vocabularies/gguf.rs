//! Vocabulary keys of GGUF files: read from a file, or built from another file of the same vocabulary.
//!
//! Invariant: missing values stay empty.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use mainstem::text::GgufVocabulary;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Reads the vocabulary of a GGUF file.
pub fn read(content: &[u8]) -> Result<GgufVocabulary, String> {
    let keys = Reader { rest: content }.keys().ok_or("it is no GGUF file, or truncated")?;
    let key = |name: &str| keys.get(&format!("tokenizer.ggml.{name}")).cloned().unwrap_or_default();
    let id = |name: &str| key(name).as_u64().map(|id| id as u32);
    let names = |name: &str| serde_json::from_value(key(name)).unwrap_or_default();
    Ok(GgufVocabulary {
        model: key("model").as_str().unwrap_or_default().to_owned(),
        pre: key("pre").as_str().map(str::to_owned),
        tokens: names("tokens"),
        token_type: serde_json::from_value(key("token_type")).unwrap_or_default(),
        merges: names("merges"),
        bos_token_id: id("bos_token_id"),
        eos_token_id: id("eos_token_id"),
        unknown_token_id: id("unknown_token_id"),
        separator_token_id: id("seperator_token_id"),
        cls_token_id: id("cls_token_id"),
        ..GgufVocabulary::default()
    })
}

/// Builds the GGUF keys of a `tokenizer.json` with a unigram model.
pub fn of_unigram(content: &[u8]) -> Result<GgufVocabulary, String> {
    let file: Value = serde_json::from_slice(content).map_err(|error| error.to_string())?;
    let pieces: Vec<(String, f32)> =
        serde_json::from_value(file["model"]["vocab"].clone()).map_err(|error| error.to_string())?;
    let unknown = file["model"]["unk_id"].as_u64().ok_or("it has no unknown piece")? as usize;
    let mut kinds = vec![1; pieces.len()];
    for id in file["added_tokens"].as_array().into_iter().flatten().filter_map(|token| token["id"].as_u64()) {
        *kinds.get_mut(id as usize).ok_or("an added token is no piece")? = 3;
    }
    *kinds.get_mut(unknown).ok_or("the unknown token is no piece")? = 2;
    let rules = file["normalizer"]["precompiled_charsmap"].as_str().unwrap_or_default();
    let (tokens, scores) = pieces.into_iter().unzip();
    Ok(GgufVocabulary {
        model: "t5".to_owned(),
        tokens,
        scores,
        token_type: kinds,
        unknown_token_id: Some(unknown as u32),
        eos_token_id: Some(1),
        add_space_prefix: Some(true),
        remove_extra_whitespaces: Some(true),
        precompiled_charsmap: BASE64_STANDARD.decode(rules).map_err(|error| error.to_string())?,
        ..GgufVocabulary::default()
    })
}

/// A minimal GGUF parser.
struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn keys(mut self) -> Option<BTreeMap<String, Value>> {
        let [magic, _version] = [self.number::<4>()?, self.number::<4>()?];
        let [_tensors, count] = [self.number::<8>()?, self.number::<8>()?];
        if magic != u64::from(u32::from_le_bytes(*b"GGUF")) {
            return None;
        }
        (0..count).map(|_| Some((self.text()?, self.typed()?))).collect()
    }

    fn typed(&mut self) -> Option<Value> {
        let kind = self.number::<4>()?;
        self.value(kind)
    }

    fn value(&mut self, kind: u64) -> Option<Value> {
        Some(match kind {
            0 | 1 => json!(self.number::<1>()?),
            2 | 3 => json!(self.number::<2>()?),
            4 | 5 => json!(self.number::<4>()?),
            6 => json!(f32::from_bits(self.number::<4>()? as u32)),
            7 => json!(self.number::<1>()? != 0),
            8 => json!(self.text()?),
            9 => {
                let (kind, count) = (self.number::<4>()?, self.number::<8>()?);
                (0..count).map(|_| self.value(kind)).collect::<Option<_>>()?
            }
            _ => return None,
        })
    }

    fn text(&mut self) -> Option<String> {
        let len = usize::try_from(self.number::<8>()?).ok()?;
        let (text, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        String::from_utf8(text.to_vec()).ok()
    }

    fn number<const N: usize>(&mut self) -> Option<u64> {
        let (chunk, rest) = self.rest.split_first_chunk::<N>()?;
        self.rest = rest;
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(chunk);
        Some(u64::from_le_bytes(bytes))
    }
}
