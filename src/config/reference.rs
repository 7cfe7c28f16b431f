//! Key reference: renders `config/mainstem.toml` as the tables of `docs/configuration.md`.
//!
//! Invariant: a key's description is its comment in that file, unchanged.

use super::{DEFAULTS, variable_name};

/// A key of the file of defaults.
struct KeyDoc {
    /// Name with its section.
    name: String,
    /// Default value in TOML syntax.
    default: String,
    /// The comment above it; empty if there is none.
    meaning: String,
}

/// Returns the keys that have a default, with the default as a command line has it.
pub fn defaults() -> impl Iterator<Item = (String, String)> {
    let shown = |KeyDoc { name, default, .. }| (name, default.trim_matches('"').to_owned());
    keys().into_iter().map(shown).filter(|(_, default)| !default.is_empty() && default != "[]")
}

/// Renders all keys as Markdown tables, one per section. `flag` returns the command-line flag of a key.
pub fn reference(flag: impl Fn(&str) -> Option<String>) -> String {
    let mut page = String::new();
    let mut section = String::new();
    for KeyDoc { name, default, meaning } in keys() {
        let (its_section, _) = name.split_once('.').expect("a key has a section; anything else is a bug");
        if its_section != section {
            section = its_section.to_string();
            page += &format!("\n### [{section}]\n\n{TABLE_HEAD}");
        }
        let flag = flag(&name).map(|flag| format!("`{flag}`")).unwrap_or_default();
        let variable = variable_name(&name);
        page += &format!("| `{name}` | `{default}` | {meaning} | {flag} | `{variable}` |\n");
    }
    page
}

const TABLE_HEAD: &str = "| key | default | meaning | flag | environment variable |\n|---|---|---|---|---|\n";

/// Returns the keys in file order.
fn keys() -> Vec<KeyDoc> {
    let mut keys = Vec::new();
    let (mut section, mut comment) = ("", Vec::new());
    for line in DEFAULTS.lines() {
        if let Some(words) = line.strip_prefix('#') {
            comment.push(words.trim());
        } else if let Some((name, default)) = line.split_once(" = ") {
            let meaning = std::mem::take(&mut comment).join(" ");
            let name = format!("{section}.{name}");
            keys.push(KeyDoc { name, default: default.to_string(), meaning });
        } else {
            comment.clear();
            section = line.trim_matches(['[', ']']).trim();
        }
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_a_comment_that_fits_a_table() {
        for KeyDoc { name, meaning, .. } in keys() {
            assert!(meaning.ends_with('.') && meaning.len() > 10, "{name}: {meaning}");
            assert!(!meaning.contains('|') && !meaning.contains("  "), "{name}: {meaning}");
        }
    }

    #[test]
    fn the_keys_are_those_of_the_file() {
        let mut names: Vec<_> = keys().into_iter().map(|key| key.name).collect();
        names.sort();
        assert!(names.iter().map(String::as_str).eq(super::super::layers::LayeredSettings::new().keys()));
    }
}
