//! What the library would believe of a `tokenizer.json`, looked at before it does: its rules for characters open with
//! the size of their index, and the library makes room for as much as they say.
//!
//! Invariant: rules for characters that pass have an index that lies within them.

use super::sentencepiece::charsmap::Charsmap;
use anyhow::{Context, Result};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

/// The key of such rules, wherever among the normalizers they are.
const RULES: &str = "precompiled_charsmap";

/// The part of the file that has them.
#[derive(Deserialize)]
struct Normalizing {
    normalizer: Option<Value>,
}

/// Checks the rules for characters that are in the content of a `tokenizer.json`, if there are any.
pub fn check(content: &[u8]) -> Result<()> {
    let file: Normalizing = serde_json::from_slice(content)?;
    file.normalizer.as_ref().map_or(Ok(()), check_normalizer)
}

fn check_normalizer(normalizer: &Value) -> Result<()> {
    match normalizer {
        Value::Array(items) => items.iter().try_for_each(check_normalizer),
        Value::Object(fields) => fields.iter().try_for_each(|(key, value)| match value.as_str() {
            Some(rules) if key == RULES => check_rules(rules),
            _ => check_normalizer(value),
        }),
        _ => Ok(()),
    }
}

fn check_rules(rules: &str) -> Result<()> {
    let bytes = BASE64_STANDARD.decode(rules).with_context(|| format!("'{RULES}' is no base 64"))?;
    Charsmap::read(&bytes).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A file with these rules, alone and among other normalizers.
    fn files(rules: &[u8]) -> [String; 2] {
        let rules = json!({"type": "Precompiled", "precompiled_charsmap": BASE64_STANDARD.encode(rules)});
        let sequence = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, &rules]});
        [rules, sequence].map(|normalizer| json!({"version": "1.0", "normalizer": normalizer}).to_string())
    }

    #[test]
    fn rules_that_claim_an_index_larger_than_themselves_are_refused() {
        let claims = |bytes: u32| [&bytes.to_le_bytes()[..], &[0; 8], b"a\0"].concat();
        for file in files(&claims(8)) {
            check(file.as_bytes()).unwrap();
        }
        for file in [12, 1 << 20, u32::MAX].into_iter().flat_map(|bytes| files(&claims(bytes))) {
            for spelled in [file.clone(), file.replace(RULES, "precompiled\\u005fcharsmap")] {
                let error = check(spelled.as_bytes()).unwrap_err().to_string();
                assert!(error.contains("the rules for characters say that their index has"), "{error}");
            }
        }
    }

    #[test]
    fn files_without_rules_are_left_to_the_library() {
        for file in ["{}", r#"{"normalizer": null}"#, r#"{"normalizer": {"type": "NFC"}}"#] {
            check(file.as_bytes()).unwrap();
        }
    }
}
