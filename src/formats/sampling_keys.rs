//! The keys of generation_config.json that are sampling parameters of requests.
//!
//! Invariant: values are checked when the file is read, except token ids, which need the vocabulary.

use crate::request::ParamList;
use serde_json::Value;

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
    ("suppress_tokens", "suppress_tokens"),
];

/// Returns the parameter of a key.
pub fn param(key: &str) -> Option<&'static str> {
    KEYS.iter().find(|(known, _)| *known == key).map(|(_, param)| *param)
}

/// Returns the keys in the order of the table.
pub(super) fn keys() -> impl Iterator<Item = &'static str> {
    KEYS.iter().map(|(key, _)| *key)
}

/// Returns the key of a parameter.
pub fn key(param: &str) -> &str {
    KEYS.iter().find(|(_, known)| *known == param).map_or(param, |(key, _)| key)
}

/// Converts a key's value to that of its parameter. The error begins with a verb.
pub(super) fn convert(key: &str, value: &Value) -> Result<ParamList, String> {
    let Some(param) = param(key) else { return Ok(ParamList::default()) };
    let value = match key {
        "suppress_tokens" => {
            token_ids(value).ok_or_else(|| format!("is {value} but must be a list of token ids"))?
        }
        _ => value.clone(),
    };
    let list = ParamList(vec![(param.to_owned(), value)]);
    list.check().map_err(|error| error.rest().to_owned())?;
    Ok(list)
}

/// Returns the tokens of a list. The libraries also write -1, which is no token.
fn token_ids(ids: &Value) -> Option<Value> {
    let id = |id: &Value| id.as_i64().filter(|id| (-1..=u32::MAX.into()).contains(id));
    let ids = ids.as_array()?.iter().map(id).collect::<Option<Vec<i64>>>()?;
    Some(ids.into_iter().filter(|id| *id >= 0).collect())
}
