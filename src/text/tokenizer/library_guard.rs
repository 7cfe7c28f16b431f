//! Checks of a `tokenizer.json` before the library parses it: a character map begins with the size of its
//! index, and the library allocates that size without checking it.
//!
//! Invariant: a character map that passes contains its whole index.

use super::sentencepiece::charsmap::Charsmap;
use anyhow::{Context, Result};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

/// Key of a character map, at any depth of the normalizers.
const RULES: &str = "precompiled_charsmap";

/// The part of the file that may contain character maps.
#[derive(Deserialize)]
struct NormalizerSection {
    normalizer: Option<Value>,
}

/// Checks all character maps in the content of a `tokenizer.json`.
pub fn check(content: &[u8]) -> Result<()> {
    let file: NormalizerSection = serde_json::from_slice(content)?;
    file.normalizer.as_ref().map_or(Ok(()), check_normalizer)
}

fn check_normalizer(normalizer: &Value) -> Result<()> {
    match normalizer {
        Value::Array(items) => items.iter().try_for_each(check_normalizer),
        Value::Object(fields) => fields.iter().try_for_each(|(key, value)| match value.as_str() {
            Some(rules) if key == RULES => check_charsmap(rules),
            _ => check_normalizer(value),
        }),
        _ => Ok(()),
    }
}

fn check_charsmap(rules: &str) -> Result<()> {
    let bytes = BASE64_STANDARD.decode(rules).with_context(|| format!("'{RULES}' is not base64"))?;
    Charsmap::read(&bytes).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Returns files with this character map, alone and among other normalizers.
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
                assert!(error.contains("the character map claims an index of"), "{error}");
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
