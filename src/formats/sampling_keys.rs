//! The keys of generation_config.json that are sampling parameters of requests.
//!
//! Invariant: values are checked when the file is read, except token ids, which need the vocabulary.

use super::HubConfig;
use crate::request::ParamList;
use anyhow::Result;
use serde_json::{Value, json};

/// Keys with the parameters that they are.
const KEYS: [(&str, &str); 12] = [
    ("temperature", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("repetition_penalty", "repetition_penalty"),
    ("no_repeat_ngram_size", "no_repeat_ngram_size"),
    ("typical_p", "typical_p"),
    ("epsilon_cutoff", "epsilon_cutoff"),
    ("eta_cutoff", "eta_cutoff"),
    ("min_new_tokens", "min_new_tokens"),
    ("bad_words_ids", "bad_words"),
    ("suppress_tokens", "logit_bias"),
];

/// Returns the parameter of a key.
pub fn param(key: &str) -> Option<&'static str> {
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, param)| *param)
}

/// Returns the key of a parameter.
pub fn key(param: &str) -> &str {
    KEYS.iter().find(|(_, known)| *known == param).map_or(param, |(key, _)| key)
}

/// Reads the parameters. The error names the file and the key.
pub(super) fn read(settings: &HubConfig) -> Result<ParamList> {
    let mut list = ParamList::default();
    for (key, param) in KEYS {
        let Some(value) = settings.get(key) else { continue };
        let value = match key {
            "suppress_tokens" => forbidden(settings)?,
            _ => value.clone(),
        };
        let one = ParamList(vec![(param.to_owned(), value)]);
        one.check().map_err(|error| settings.value_error(key, error.rest()))?;
        list.0.extend(one.0);
    }
    Ok(list)
}

/// Returns the tokens to suppress as biases. The libraries also write -1, which is no token.
fn forbidden(settings: &HubConfig) -> Result<Value> {
    let id = |id: &Value| id.as_i64().filter(|id| (-1..=u32::MAX.into()).contains(id));
    let ids = settings.typed("suppress_tokens", "a list of token ids", |list| {
        list.as_array()?.iter().map(id).collect::<Option<Vec<i64>>>()
    })?;
    let ids = ids.unwrap_or_default().into_iter().filter(|id| *id >= 0);
    Ok(ids.map(|id| json!([id, false])).collect())
}
