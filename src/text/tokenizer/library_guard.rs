//! Checks of a `tokenizer.json` before the library parses it: a character map begins with the size of its
//! index, and the library allocates that size without checking it; replacements can multiply a text.
//!
//! Invariant: a character map that passes contains its whole index, and the replacements that pass make a
//! text at most `GROWTH_MAX` times as long.

use super::sentencepiece::charsmap::Charsmap;
use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;

/// Key of a character map, at any depth of the normalizers.
const RULES: &str = "precompiled_charsmap";

/// Maximum factor by which all replacements together may lengthen a text. Real ones write a space as the
/// three bytes of another character, once.
const GROWTH_MAX: f64 = 64.0;

/// The parts of the file that may contain character maps and replacements.
#[derive(Deserialize)]
struct RewritingSections {
    normalizer: Option<Value>,
    decoder: Option<Value>,
}

/// Checks all character maps and replacements in the content of a `tokenizer.json`.
pub fn check(content: &[u8]) -> Result<()> {
    let file: RewritingSections = serde_json::from_slice(content)?;
    for (name, section) in [("normalizer", &file.normalizer), ("decoder", &file.decoder)] {
        let Some(section) = section else { continue };
        let factor = growth(section);
        ensure!(factor <= GROWTH_MAX, "its {name} can make a text {factor:.0} times as long");
    }
    file.normalizer.as_ref().map_or(Ok(()), check_normalizer)
}

/// Returns the factor by which the replacements of a section can lengthen a text. A regular expression may
/// match a single character, or nothing, beside each.
fn growth(section: &Value) -> f64 {
    let nested = match section {
        Value::Array(items) => items.iter().map(growth).product(),
        Value::Object(fields) => fields.values().map(growth).product(),
        _ => 1.0,
    };
    let Some(content) = section["content"].as_str().filter(|_| section["type"] == "Replace") else {
        return nested;
    };
    let content = content.len() as f64;
    match section["pattern"]["String"].as_str() {
        Some(pattern) if !pattern.is_empty() => (content / pattern.len() as f64).max(1.0),
        _ => content + 1.0,
    }
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

    /// Sixty replacements of a letter by two make a text 2^60 times as long.
    #[test]
    fn replacements_that_multiply_a_text_are_refused() {
        let replace =
            |pattern: Value, by: &str| json!({"type": "Replace", "pattern": pattern, "content": by});
        let of_text = |pattern: &str, content: &str| replace(json!({"String": pattern}), content);
        let sequence = |key: &str, steps: Vec<Value>| {
            let list = if key == "normalizer" { "normalizers" } else { "decoders" };
            json!({key: {"type": "Sequence", list: steps}}).to_string()
        };
        let usual = vec![
            of_text(" ", "\u{2581}"),
            replace(json!({"Regex": " {2,}"}), "\u{2581}"),
            of_text("``", "\""),
            json!({"type": "Lowercase"}),
        ];
        for key in ["normalizer", "decoder"] {
            check(sequence(key, usual.clone()).as_bytes()).unwrap();
            for steps in [
                vec![of_text("a", "aa"); 60],
                vec![of_text("a", &"b".repeat(1 << 20))],
                vec![replace(json!({"Regex": ""}), &"b".repeat(100))],
                vec![json!({"type": "Sequence", "normalizers": vec![of_text("a", "aaa"); 2]}); 2],
            ] {
                let error = check(sequence(key, steps).as_bytes()).unwrap_err().to_string();
                assert!(error.starts_with(&format!("its {key} can make a text ")), "{error}");
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
