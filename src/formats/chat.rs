//! Chat settings of a model folder: the chat template, which renders messages to one text, and the special
//! tokens it may use.
//!
//! Invariant: if several files have a template, the one that transformers would use is taken.

use super::Folder;
use super::config::HubConfig;
use anyhow::Result;
use serde_json::Value;
use std::collections::BTreeMap;

/// The tokenizer settings file.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// The file where older models name the special tokens missing from [`TOKENIZER_CONFIG`].
pub const SPECIAL_TOKENS: &str = "special_tokens_map.json";

/// Files that hold only a template: as plain text, and as JSON next to multimodal models.
const TEMPLATE_FILE: &str = "chat_template.jinja";
const TEMPLATE_JSON: &str = "chat_template.json";

const TEMPLATE: &str = "chat_template";

/// Name of the default template in a list of named templates.
const DEFAULT_TEMPLATE: &str = "default";

/// Input of a chat template; all empty for a model without chat settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChatConfig {
    pub template: Option<ChatTemplateSource>,
    /// Special tokens by role (`bos_token`, `eos_token`, `pad_token`, ...), which is how templates refer to
    /// them: from `tokenizer_config.json`, and from `special_tokens_map.json` where that has none.
    pub special_tokens: BTreeMap<String, String>,
}

/// The source text of a chat template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatTemplateSource {
    /// The file, and the key within it if it is JSON, for error messages.
    pub origin: String,
    pub text: String,
}

impl ChatConfig {
    /// Reads a model folder. The template comes from `chat_template.jinja`, else from
    /// `tokenizer_config.json`, else from `chat_template.json`.
    pub fn from_folder(folder: &Folder) -> Result<ChatConfig> {
        let settings = HubConfig::read_if_present(folder, TOKENIZER_CONFIG)?;
        let older = HubConfig::read_if_present(folder, SPECIAL_TOKENS)?;
        let special_tokens = special_tokens(older.iter().chain(&settings))?;
        let alone = folder.read_text(TEMPLATE_FILE)?;
        let template = match (alone, settings) {
            (Some(text), _) => {
                Some(ChatTemplateSource { origin: folder.file(TEMPLATE_FILE).display().to_string(), text })
            }
            (None, Some(settings)) if settings.get(TEMPLATE).is_some() => template(&settings)?,
            (None, _) => match HubConfig::read_if_present(folder, TEMPLATE_JSON)? {
                Some(settings) => template(&settings)?,
                None => None,
            },
        };
        Ok(ChatConfig { template, special_tokens })
    }
}

/// Returns the template in `settings`: a string, or the default one of a list of named templates.
fn template(settings: &HubConfig) -> Result<Option<ChatTemplateSource>> {
    let text = match settings.get(TEMPLATE) {
        Some(Value::Array(named)) => {
            let Some(default) = named.iter().find(|one| one["name"] == DEFAULT_TEMPLATE) else {
                return Ok(None);
            };
            let missing = || settings.key_error(TEMPLATE, "the default template has no text in 'template'");
            Some(default["template"].as_str().ok_or_else(missing)?)
        }
        _ => settings.opt_str(TEMPLATE)?,
    };
    let origin = || format!("{}: key '{TEMPLATE}'", settings.file().display());
    Ok(text.map(|text| ChatTemplateSource { origin: origin(), text: text.to_owned() }))
}

/// Collects every key that ends in `_token` and holds a token's name; later sources override earlier ones.
/// Boolean switches such as `add_bos_token` are skipped.
fn special_tokens<'a>(sources: impl Iterator<Item = &'a HubConfig>) -> Result<BTreeMap<String, String>> {
    let mut tokens = BTreeMap::new();
    for settings in sources {
        for key in settings.keys().filter(|key| key.ends_with("_token")) {
            if !matches!(settings.get(key), Some(Value::Bool(_)))
                && let Some(token) = settings.opt_token(key)?
            {
                tokens.insert(key.to_owned(), token.to_owned());
            }
        }
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use serde_json::json;

    /// Reads a folder with these files, given as (name, content).
    fn read(files: &[(&str, &str)]) -> Result<ChatConfig> {
        let scratch = Scratch::new();
        files.iter().for_each(|(name, content)| _ = scratch.write(name, content.as_bytes()));
        let mut chat = ChatConfig::from_folder(&Folder::disk(scratch.path()))?;
        // Paths are compared relative to the scratch folder.
        if let Some(source) = &mut chat.template {
            let folder = format!("{}/", scratch.path().display());
            source.origin = source.origin.strip_prefix(&folder).expect("it names the folder").to_owned();
        }
        Ok(chat)
    }

    #[test]
    fn a_template_is_taken_from_where_transformers_takes_it() {
        let alone = (TEMPLATE_FILE, "alone");
        let in_settings = (TOKENIZER_CONFIG, r#"{"chat_template": "settings"}"#);
        let several = (
            TOKENIZER_CONFIG,
            r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]}"#,
        );
        let no_default = (TOKENIZER_CONFIG, r#"{"chat_template": [{"name": "rag", "template": "r"}]}"#);
        let none = (TOKENIZER_CONFIG, r#"{"chat_template": null}"#);
        let json = (TEMPLATE_JSON, r#"{"chat_template": "json"}"#);
        let key = "tokenizer_config.json: key 'chat_template'";
        let cases = [
            (vec![alone, in_settings, json], Some(("chat_template.jinja", "alone"))),
            (vec![in_settings, json], Some((key, "settings"))),
            (vec![several], Some((key, "d"))),
            (vec![no_default], None),
            (vec![none, json], Some(("chat_template.json: key 'chat_template'", "json"))),
            (vec![json], Some(("chat_template.json: key 'chat_template'", "json"))),
            (vec![none], None),
            (vec![], None),
        ];
        for (files, expected) in cases {
            let found = read(&files).unwrap().template;
            let found = found.as_ref().map(|source| (source.origin.as_str(), source.text.as_str()));
            assert_eq!(found, expected, "{files:?}");
        }
    }

    #[test]
    fn special_tokens_come_by_the_part_they_play() {
        let settings = json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null,
            "add_bos_token": true, "image_token": "<image>", "model_max_length": 8,
        });
        let chat = read(&[(TOKENIZER_CONFIG, &settings.to_string())]).unwrap();
        let expected = [("bos_token", "<s>"), ("eos_token", "</s>"), ("image_token", "<image>")];
        assert!(chat.special_tokens.iter().map(|(part, name)| (part.as_str(), name.as_str())).eq(expected));
        assert_eq!(read(&[]).unwrap(), ChatConfig::default());
    }

    #[test]
    fn the_map_of_special_tokens_says_what_the_settings_leave_open() {
        let map = json!({
            "bos_token": "<old>", "pad_token": "<pad>", "unk_token": {"content": "<unk>"},
            "additional_special_tokens": ["<a>", "<b>"],
        });
        let map = map.to_string();
        let map = (SPECIAL_TOKENS, map.as_str());
        let settings = (TOKENIZER_CONFIG, r#"{"bos_token": "<s>", "pad_token": null}"#);
        for (files, expected) in [
            (vec![map, settings], vec![("bos_token", "<s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")]),
            (vec![map], vec![("bos_token", "<old>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")]),
        ] {
            let tokens = read(&files).unwrap().special_tokens;
            let tokens: Vec<_> = tokens.iter().map(|(part, name)| (part.as_str(), name.as_str())).collect();
            assert_eq!(tokens, expected);
        }
    }

    #[test]
    fn what_cannot_be_a_template_or_a_token_is_refused_by_name() {
        let cases = [
            ((TOKENIZER_CONFIG, r#"{"chat_template": 3}"#), "key 'chat_template': 3 is not a string"),
            (
                (TOKENIZER_CONFIG, r#"{"chat_template": [{"name": "default"}]}"#),
                "key 'chat_template': the default",
            ),
            ((TOKENIZER_CONFIG, r#"{"bos_token": 3}"#), "key 'bos_token': 3 is not"),
            ((SPECIAL_TOKENS, r#"{"eos_token": [1]}"#), "key 'eos_token': [1] is not"),
            ((TEMPLATE_JSON, "{"), TEMPLATE_JSON),
        ];
        for (file, reason) in cases {
            let error = format!("{:#}", read(&[file]).unwrap_err());
            assert!(error.contains(reason) && error.contains(file.0), "{error}\nexpected: {reason}");
        }
        let scratch = Scratch::new();
        let path = scratch.write(TEMPLATE_FILE, b"\xff");
        let error = format!("{:#}", ChatConfig::from_folder(&Folder::disk(scratch.path())).unwrap_err());
        assert!(error.starts_with(path.to_str().unwrap()), "{error}");
    }
}
