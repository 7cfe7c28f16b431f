//! Tokenizer settings in the JSON files beside a vocabulary: `tokenizer_config.json`,
//! `special_tokens_map.json`, `added_tokens.json`, and the model type in `config.json`.
//!
//! Invariant: if two files contradict each other, the one named first above takes precedence.

use super::added::AddedTokenSpec;
use super::class::TokenizerClass;
use crate::formats::chat::{SPECIAL_TOKENS, TOKENIZER_CONFIG};
use crate::formats::{Folder, HubConfig};
use anyhow::{Context, Result};
use serde_json::Value;
use tokenizers::AddedToken;

const ADDED_TOKENS: &str = "added_tokens.json";
const CONFIG: &str = "config.json";

/// Roles of single tokens.
const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Lists of special tokens without a role.
const SPECIAL_TOKEN_LISTS: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// Names of generic classes, which do not determine the kind of vocabulary.
const GENERIC: [&str; 3] = ["PreTrainedTokenizer", "TokenizersBackend", "PythonBackend"];

/// Settings of a folder's tokenizer.
pub struct TokenizerSettings {
    config: Option<HubConfig>,
    special_tokens_map: Option<HubConfig>,
    added: Option<HubConfig>,
    class: Option<TokenizerClass>,
}

impl TokenizerSettings {
    /// Reads the settings files of a folder, all of which may be missing.
    pub fn read(folder: &Folder) -> Result<TokenizerSettings> {
        let own = HubConfig::read_if_present(folder, TOKENIZER_CONFIG)?;
        let model = HubConfig::read_if_present(folder, CONFIG)?;
        Ok(TokenizerSettings {
            class: find_class(own.iter().chain(&model), model.as_ref())?,
            config: own,
            special_tokens_map: HubConfig::read_if_present(folder, SPECIAL_TOKENS)?,
            added: HubConfig::read_if_present(folder, ADDED_TOKENS)?,
        })
    }

    /// Returns the class of the settings or of the model type; otherwise sets and returns the given one.
    pub fn class_or(&mut self, class: TokenizerClass) -> TokenizerClass {
        self.class.get_or_insert(class).clone()
    }

    /// Returns the class, if it is known.
    pub fn class(&self) -> Option<&TokenizerClass> {
        self.class.as_ref()
    }

    /// Returns a boolean of `tokenizer_config.json`.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.config.as_ref().map_or(Ok(None), |own| own.opt_bool(key))
    }

    /// Returns a number of `tokenizer_config.json`.
    pub fn number(&self, key: &str) -> Result<Option<u32>> {
        self.config.as_ref().map_or(Ok(None), |own| own.opt_u32(key))
    }

    /// Returns a string of `tokenizer_config.json`.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        self.config.as_ref().map_or(Ok(None), |own| own.opt_str(key))
    }

    /// Returns a list of strings of `tokenizer_config.json`; empty if it is missing.
    pub fn names(&self, key: &str) -> Result<Vec<&str>> {
        let Some((own, list)) = self.config.as_ref().and_then(|own| Some((own, own.get(key)?))) else {
            return Ok(Vec::new());
        };
        let names: Option<Vec<&str>> =
            list.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        names.ok_or_else(|| own.key_error(key, format_args!("{list} is not a list of names")))
    }

    /// Returns the id of the token with a role. A token that `tokenizer_config.json` names must be in the
    /// vocabulary, whose file `vocabulary` is named in errors; one from `special_tokens_map.json` or the
    /// class need not.
    pub fn token_id(
        &self,
        role: &str,
        vocabulary: &str,
        find: impl Fn(&str) -> Option<u32>,
    ) -> Result<Option<u32>> {
        if let Some(own) = &self.config
            && let Some(token) = own.opt_token(role)?
        {
            let missing = || own.key_error(role, format_args!("{vocabulary} has no token '{token}'"));
            return find(token).ok_or_else(missing).map(Some);
        }
        let older = self.special_tokens_map.as_ref().map_or(Ok(None), |map| map.opt_token(role))?;
        let usual = || self.class.as_ref().and_then(|class| class.default_token(role));
        Ok(older.or_else(usual).and_then(find))
    }

    /// Returns the tokens of `additional_special_tokens` or of its newer name, in order.
    pub fn listed(&self) -> Result<Vec<AddedToken>> {
        for settings in self.role_files() {
            for key in SPECIAL_TOKEN_LISTS {
                let Some(list) = settings.get(key).and_then(Value::as_array) else { continue };
                let token = |value| {
                    parse_token(value, SpecialFlag::Always).with_context(|| key_context(settings, key))
                };
                return list.iter().map(token).collect();
            }
        }
        Ok(Vec::new())
    }

    /// Returns all added tokens of the settings.
    pub fn added(&self) -> Result<Vec<AddedTokenSpec>> {
        let mut added = self.with_ids()?;
        for role in ROLES {
            added.extend(self.token_in_role(role)?.map(AddedTokenSpec::if_in_vocabulary));
        }
        added.extend(self.listed()?.into_iter().map(AddedTokenSpec::appended));
        Ok(added)
    }

    /// Returns the added tokens with given ids.
    fn with_ids(&self) -> Result<Vec<AddedTokenSpec>> {
        const DECODER: &str = "added_tokens_decoder";
        let mut added = Vec::new();
        if let Some(own) = &self.config
            && let Some(decoder) = own.get(DECODER).and_then(Value::as_object)
        {
            for (id, value) in decoder {
                let read = || {
                    anyhow::Ok(AddedTokenSpec::with_id(
                        id.parse()?,
                        parse_token(value, SpecialFlag::FromFile)?,
                    ))
                };
                added.push(read().with_context(|| format!("{}.{id}", key_context(own, DECODER)))?);
            }
        }
        for (settings, name) in
            self.added.iter().flat_map(|added| added.keys().map(move |name| (added, name)))
        {
            let Some(id) = settings.opt_u32(name)? else { continue };
            if name.is_empty() {
                return Err(settings.key_error(name, "not a token name"));
            }
            added.push(AddedTokenSpec::with_id(id, AddedToken::from(name, false).normalized(false)));
        }
        Ok(added)
    }

    /// Returns the token with a role.
    fn token_in_role(&self, role: &str) -> Result<Option<AddedToken>> {
        // If a file gives only the name, the class determines whether the token includes spaces.
        let takes_spaces =
            role == "mask_token" && self.class.as_ref().is_some_and(TokenizerClass::mask_takes_spaces);
        for settings in self.role_files() {
            if let Some(value) = settings.get(role) {
                let token =
                    parse_token(value, SpecialFlag::Always).with_context(|| key_context(settings, role))?;
                let takes_spaces = token.lstrip || (value.is_string() && takes_spaces);
                return Ok(Some(token.lstrip(takes_spaces)));
            }
        }
        let own = self.class.as_ref().and_then(|class| class.default_token(role));
        Ok(own.map(|name| AddedToken::from(name, true).lstrip(takes_spaces)))
    }

    /// Returns the files that assign roles, in order of precedence.
    fn role_files(&self) -> impl Iterator<Item = &HubConfig> {
        self.config.iter().chain(&self.special_tokens_map)
    }
}

/// Determines the class: the one that the settings name, without the suffix "Fast", or else that of the model
/// type.
fn find_class<'a>(
    settings: impl Iterator<Item = &'a HubConfig>,
    model: Option<&HubConfig>,
) -> Result<Option<TokenizerClass>> {
    for settings in settings {
        let name = settings.opt_str("tokenizer_class")?;
        let name = name.map(|name| name.strip_suffix("Fast").unwrap_or(name));
        if let Some(name) = name.filter(|name| !GENERIC.contains(name)) {
            return Ok(Some(TokenizerClass::from_name(name)));
        }
    }
    let kind = model.map_or(Ok(None), |model| model.opt_str("model_type"))?;
    Ok(kind.and_then(TokenizerClass::for_model_type))
}

/// Describes a key for an error message.
fn key_context(settings: &HubConfig, key: &str) -> String {
    format!("{}: key '{key}'", settings.file().display())
}

/// Rule that determines whether a token is special.
#[derive(Clone, Copy)]
enum SpecialFlag {
    /// The token is special.
    Always,
    /// The token's description says so.
    FromFile,
}

/// Parses a token, given by its name or as an object.
fn parse_token(value: &Value, special: SpecialFlag) -> Result<AddedToken> {
    let name = value.as_str().or_else(|| value["content"].as_str());
    let name = name.filter(|name| !name.is_empty());
    let name = name.with_context(|| format!("{value} is not a token name or description"))?;
    let is = |key: &str| value[key].as_bool().unwrap_or(false);
    let special = matches!(special, SpecialFlag::Always) || is("special");
    // No vocabulary that uses these settings normalizes the names of special tokens.
    Ok(AddedToken::from(name, special)
        .normalized(false)
        .lstrip(is("lstrip"))
        .rstrip(is("rstrip"))
        .single_word(is("single_word")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::tests::fixtures::write_folder;
    use serde_json::json;

    fn settings(files: Value) -> TokenizerSettings {
        TokenizerSettings::read(&write_folder(&files).folder()).unwrap()
    }

    #[test]
    fn the_class_is_named_or_that_of_the_models_kind() {
        let class = |own: Value, model: Value| {
            settings(json!({"tokenizer_config.json": own, "config.json": model})).class().cloned()
        };
        let kind = json!({"model_type": "roberta"});
        let cases = [
            (json!({"tokenizer_class": "Qwen2TokenizerFast"}), kind.clone(), Some(TokenizerClass::Qwen2)),
            (
                json!({"tokenizer_class": "PreTrainedTokenizerFast"}),
                kind.clone(),
                Some(TokenizerClass::Roberta),
            ),
            (
                json!({}),
                json!({"tokenizer_class": "BertTokenizer", "model_type": "x"}),
                Some(TokenizerClass::Bert),
            ),
            (json!({"tokenizer_class": "Own"}), kind, Some(TokenizerClass::Other("Own".to_owned()))),
            (json!({}), json!({"model_type": "x"}), None),
        ];
        for (own, model, expected) in cases {
            assert_eq!(class(own.clone(), model), expected, "{own}");
        }
    }

    #[test]
    fn roles_are_taken_from_the_settings_then_the_older_file_then_the_class() {
        let settings = settings(json!({
            "tokenizer_config.json":
                {"tokenizer_class": "BertTokenizer", "bos_token": "<b>", "never_split": ["x"]},
            "special_tokens_map.json": {"bos_token": "<c>", "sep_token": "<s>", "pad_token": "<absent>"},
        }));
        let find = |name: &str| ["<b>", "<c>", "<s>", "[CLS]"].iter().position(|known| *known == name);
        let id = |role| settings.token_id(role, "vocab.txt", |name| find(name).map(|id| id as u32)).unwrap();
        let found = ["bos_token", "sep_token", "cls_token", "pad_token", "eos_token"].map(id);
        assert_eq!(found, [Some(0), Some(2), Some(3), None, None]);
        assert_eq!(settings.names("never_split").unwrap(), ["x"]);
    }

    #[test]
    fn a_mask_takes_the_spaces_before_it_where_its_class_says_so() {
        let takes = |class: &str, mask: Value| {
            let mut own = json!({"tokenizer_class": class});
            own["mask_token"] = mask;
            let found = settings(json!({"tokenizer_config.json": own})).token_in_role("mask_token").unwrap();
            found.map(|token| token.lstrip)
        };
        let described = json!({"content": "<mask>", "lstrip": false});
        let cases = [
            ("RobertaTokenizer", Value::Null, Some(true)),
            ("XLMRobertaTokenizer", json!("<mask>"), Some(true)),
            ("RobertaTokenizer", described, Some(false)),
            ("BertTokenizer", Value::Null, Some(false)),
            ("LlamaTokenizer", Value::Null, None),
        ];
        for (class, mask, expected) in cases {
            assert_eq!(takes(class, mask.clone()), expected, "{class} {mask}");
        }
    }
}
