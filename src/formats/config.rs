//! Configuration files of a Hugging Face model: `config.json` and `generation_config.json`.
//!
//! Invariant: a value of the wrong type or out of range is an error that names the file and the key. A null
//! value counts as absent, as in the programs that write these files.

use super::{Folder, sampling_keys};
use crate::request::ParamList;
use anyhow::{Context, Result, anyhow};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Model configuration file of a model folder.
pub(crate) const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

/// Supported only for encoder-decoder models.
const FORCED_BOS: &str = "forced_bos_token_id";

/// Keys of generation_config.json that do not affect which tokens are generated: bookkeeping, how to compute,
/// speculative decoding, additional outputs. Keys that begin with '_' do not either.
const IGNORED_KEYS: [&str; 24] = [
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "disable_compile",
    "is_assistant",
    "low_memory",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
    "return_legacy_cache",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
];

/// Supported keys of generation_config.json, besides those of [`sampling_keys`].
const SUPPORTED_KEYS: [&str; 4] = ["bos_token_id", "decoder_start_token_id", "do_sample", "eos_token_id"];

/// A JSON object of settings, with typed lookups by key.
///
/// Each lookup `x` fails if the key is absent; its counterpart `opt_x` returns `None` instead.
#[derive(Clone, Debug)]
pub struct HubConfig {
    file: PathBuf,
    /// Prefix of keys in error messages: "" or, in a nested object, "outer.".
    prefix: String,
    entries: Map<String, Value>,
    /// The file's own names of keys, where they differ.
    file_keys: Arc<BTreeMap<String, String>>,
}

impl HubConfig {
    /// Reads the `config.json` of a model folder.
    pub fn from_folder(folder: &Folder) -> Result<HubConfig> {
        HubConfig::parse(folder.file(CONFIG), &folder.read_required(CONFIG)?)
    }

    /// Reads the JSON object in a file of a model folder, or returns `None` if the file does not exist.
    pub fn read_if_present(folder: &Folder, name: &str) -> Result<Option<HubConfig>> {
        folder.read(name)?.map(|content| HubConfig::parse(folder.file(name), &content)).transpose()
    }

    fn parse(file: PathBuf, content: &[u8]) -> Result<HubConfig> {
        let entries = serde_json::from_slice(content).with_context(|| file.display().to_string())?;
        Ok(HubConfig { file, prefix: String::new(), entries, file_keys: Arc::default() })
    }

    /// Creates settings from entries that come from another file; `file` names it in error messages.
    pub fn from_entries(file: &Path, entries: Map<String, Value>) -> HubConfig {
        HubConfig { file: file.to_owned(), prefix: String::new(), entries, file_keys: Arc::default() }
    }

    /// Adds the file's own names of keys, used in error messages. Nested keys are written with dots.
    pub fn with_file_keys(self, names: BTreeMap<String, String>) -> HubConfig {
        HubConfig { file_keys: Arc::new(names), ..self }
    }

    /// Returns the file's path, for error messages.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Returns the keys with a non-null value.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key.as_str())
    }

    /// Returns all keys with their values.
    pub(super) fn entries(&self) -> &Map<String, Value> {
        &self.entries
    }

    /// Returns the value of a key, unless it is null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.entries.get(key).filter(|value| !value.is_null())
    }

    /// Returns the value at a path of keys separated by dots, unless it is null. A key may itself contain
    /// dots.
    pub fn at(&self, path: &str) -> Option<&Value> {
        self.get(path).or_else(|| {
            let mut keys = path.split('.');
            let outer = self.get(keys.next()?)?;
            keys.try_fold(outer, |value, key| value.get(key)).filter(|value| !value.is_null())
        })
    }

    /// Returns the object at a path of keys separated by dots.
    pub fn section_at(&self, path: &str) -> Result<Option<HubConfig>> {
        match path.split_once('.') {
            None => self.section(path),
            Some((outer, rest)) => match self.section(outer)? {
                Some(section) => section.section_at(rest),
                None => Ok(None),
            },
        }
    }

    /// Returns the object at a key.
    pub fn section(&self, key: &str) -> Result<Option<HubConfig>> {
        let Some(entries) = self.typed(key, "an object", Value::as_object)? else { return Ok(None) };
        let prefix = format!("{}{key}.", self.prefix);
        let (entries, names) = (entries.clone(), self.file_keys.clone());
        Ok(Some(HubConfig { file: self.file.clone(), prefix, entries, file_keys: names }))
    }

    /// Returns a non-negative integer.
    pub fn usize(&self, key: &str) -> Result<usize> {
        self.require(key, self.opt_usize(key)?)
    }

    /// Returns a non-negative integer, or `None` if the key is absent.
    pub fn opt_usize(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a non-negative integer", |v| v.as_u64()?.try_into().ok())
    }

    /// Returns a 32-bit integer, or `None` if the key is absent.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a non-negative 32-bit integer", |v| v.as_u64()?.try_into().ok())
    }

    /// Returns a number. Fails if the key is absent.
    pub fn f64(&self, key: &str) -> Result<f64> {
        self.require(key, self.opt_f64(key)?)
    }

    /// Returns a number, or `None` if the key is absent.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// Returns a number rounded to F32. Fails if it is out of the range of F32.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.require(key, self.opt_f32(key)?)
    }

    /// Returns a number in the range of F32, or `None` if the key is absent.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        let single = |v: &Value| Some(v.as_f64()? as f32).filter(|x| x.is_finite());
        self.typed(key, "a number in the range of F32", single)
    }

    /// Returns a truth value. Fails if the key is absent.
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.require(key, self.opt_bool(key)?)
    }

    /// Returns a truth value, or `None` if the key is absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Returns a string. Fails if the key is absent.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.require(key, self.opt_str(key)?)
    }

    /// Returns a string, or `None` if the key is absent.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", Value::as_str)
    }

    /// Returns a token's text, given as a string or as the `content` of an object.
    pub fn opt_token(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a token's name or description", |v| v.as_str().or_else(|| v["content"].as_str()))
    }

    /// Returns token ids, given as one number or as a list; empty if the key is absent.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64()?.try_into().ok();
        let ids = self.typed(key, "a token id or a list of them", |value| match value {
            Value::Array(list) => list.iter().map(id).collect(),
            single => id(single).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// Returns the file's name of a key, whether it is present or not, including the keys of enclosing
    /// objects.
    pub fn file_key(&self, key: &str) -> String {
        let key = format!("{}{key}", self.prefix);
        self.file_keys.get(&key).cloned().unwrap_or(key)
    }

    /// Returns the keys of the file that a key's value comes from, in the file's own naming, each once.
    pub fn source_keys(&self, key: &str) -> Vec<String> {
        let members = self.get(key).and_then(Value::as_object).into_iter().flat_map(Map::keys);
        let named =
            members.filter_map(|member| self.file_keys.get(&format!("{}{key}.{member}", self.prefix)));
        let named: BTreeSet<&String> = named.collect();
        if named.is_empty() { vec![self.file_key(key)] } else { named.into_iter().cloned().collect() }
    }

    /// Returns an error about a key's value, for conditions beyond its type.
    pub fn key_error(&self, key: &str, reason: impl std::fmt::Display) -> anyhow::Error {
        anyhow!("{}: key '{}': {reason}", self.file.display(), self.file_key(key))
    }

    /// Returns the sampling parameters among the keys.
    fn sampling_params(&self) -> Result<ParamList> {
        let mut list = ParamList::default();
        for key in sampling_keys::keys() {
            let Some(value) = self.get(key) else { continue };
            let one = sampling_keys::convert(key, value).map_err(|problem| {
                anyhow!("{}: key '{}' {problem}", self.file.display(), self.file_key(key))
            })?;
            list.0.extend(one.0);
        }
        Ok(list)
    }

    pub(super) fn typed<'a, T>(
        &'a self,
        key: &str,
        kind: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(read) => Ok(Some(read)),
            None => Err(self.key_error(key, format_args!("{value} is not {kind}"))),
        }
    }

    pub(super) fn require<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.key_error(key, "it is missing"))
    }

    /// Returns `value` if it satisfies `fits` or is absent, otherwise an error that says it is not in
    /// `range`.
    pub(super) fn check_range<T: Copy + std::fmt::Display>(
        &self,
        key: &str,
        value: Option<T>,
        range: &str,
        fits: impl Fn(T) -> bool,
    ) -> Result<Option<T>> {
        match value {
            Some(x) if !fits(x) => Err(self.key_error(key, format_args!("{x} is not {range}"))),
            value => Ok(value),
        }
    }

    pub(super) fn opt_positive(&self, key: &str) -> Result<Option<f64>> {
        self.check_range(key, self.opt_f64(key)?, "a positive number", |x| x > 0.0)
    }

    pub(super) fn opt_positive_list(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let positive = |value: &Value| value.as_f64().filter(|x| *x > 0.0);
        self.typed(key, "a list of positive numbers", |list| list.as_array()?.iter().map(positive).collect())
    }

    pub(super) fn required_positive(&self, key: &str) -> Result<f64> {
        self.require(key, self.opt_positive(key)?)
    }
}

/// Generation defaults of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationConfig {
    /// Ids of the tokens that end a sequence.
    pub eos: Vec<u32>,
    pub bos: Option<u32>,
    pub do_sample: Option<bool>,
    /// Default sampling parameters, independent of `do_sample`.
    pub sampling: ParamList,
    /// Unsupported settings that would change the output, with their values.
    pub unsupported: Map<String, Value>,
}

/// Tokens that the decoder of an encoder-decoder model starts with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecoderStart {
    /// Decoder start token; BOS if none is configured.
    pub start: Option<u32>,
    /// Forced BOS token, which follows the start token, such as the target language.
    pub forced_bos: Option<u32>,
}

impl GenerationConfig {
    /// Reads the `generation_config.json` of a model folder, if it exists. Token ids that it does not have
    /// are taken from the model's `config`.
    pub fn from_folder(folder: &Folder, config: &HubConfig) -> Result<GenerationConfig> {
        let own = HubConfig::read_if_present(folder, GENERATION_CONFIG)?;
        let ids = |key: &str| ids(own.as_ref(), config, key);
        let (eos, bos) = (ids("eos_token_id")?, ids("bos_token_id")?.first().copied());
        let Some(own) = &own else {
            return Ok(GenerationConfig { eos, bos, ..Default::default() });
        };
        let (do_sample, sampling) = (own.opt_bool("do_sample")?, own.sampling_params()?);
        let unserved = own.entries.iter().filter(|(key, value)| is_unsupported(key, value));
        let unserved = unserved.map(|(key, value)| (key.clone(), value.clone())).collect();
        Ok(GenerationConfig { eos, bos, do_sample, sampling, unsupported: unserved })
    }

    /// Marks the settings of encoder-decoder models as supported, for such a model.
    pub fn for_encoder_decoder(mut self) -> GenerationConfig {
        self.unsupported.remove(FORCED_BOS);
        self
    }
}

impl DecoderStart {
    /// Reads the start tokens of an encoder-decoder model, from the files that
    /// [`GenerationConfig::from_folder`] reads.
    pub fn from_folder(folder: &Folder, config: &HubConfig) -> Result<DecoderStart> {
        let own = HubConfig::read_if_present(folder, GENERATION_CONFIG)?;
        let first = |key: &str| Ok::<_, anyhow::Error>(ids(own.as_ref(), config, key)?.first().copied());
        Ok(DecoderStart {
            start: first("decoder_start_token_id")?.or(first("bos_token_id")?),
            // If generation_config.json exists but has no such key, no token is forced.
            forced_bos: own.as_ref().unwrap_or(config).opt_u32(FORCED_BOS)?,
        })
    }
}

/// Returns the token ids of a key, from generation_config.json if it has it, otherwise from the model's
/// `config`.
fn ids(own: Option<&HubConfig>, config: &HubConfig, key: &str) -> Result<Vec<u32>> {
    own.filter(|own| own.get(key).is_some()).unwrap_or(config).token_ids(key)
}

/// Whether a setting of generation_config.json is unsupported and would change the output. Unknown keys
/// count.
fn is_unsupported(key: &str, value: &Value) -> bool {
    let is_neutral = match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(neutral_number(key)),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(entries) => entries.is_empty(),
    };
    let is_supported = SUPPORTED_KEYS.contains(&key) || sampling_keys::param(key).is_some();
    let has_say = !key.starts_with('_') && !IGNORED_KEYS.contains(&key) && !is_supported;
    has_say && !is_neutral
}

/// The number with which a setting of generation_config.json has no effect.
fn neutral_number(key: &str) -> f64 {
    match key {
        "encoder_repetition_penalty"
        | "guidance_scale"
        | "length_penalty"
        | "num_beam_groups"
        | "num_beams"
        | "num_return_sequences" => 1.0,
        // The default of the libraries that write this file, which store it even if nobody chose it.
        "max_length" => 20.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn config(text: &str) -> HubConfig {
        let folder = Scratch::new();
        folder.write(CONFIG, text.as_bytes());
        HubConfig::from_folder(&folder.folder()).unwrap()
    }

    #[test]
    fn values_are_read_by_type_and_null_is_absent() {
        let c = config(r#"{"n":3,"x":1e-5,"b":true,"s":"silu","null":null,"ids":[2,7],"inner":{"n":4}}"#);
        assert_eq!((c.usize("n").unwrap(), c.f64("x").unwrap(), c.f32("n").unwrap()), (3, 1e-5, 3.0));
        assert_eq!((c.bool("b").unwrap(), c.str("s").unwrap()), (true, "silu"));
        assert_eq!(c.token_ids("ids").unwrap(), [2, 7]);
        assert_eq!(c.token_ids("n").unwrap(), [3]);
        assert_eq!(c.section("inner").unwrap().unwrap().usize("n").unwrap(), 4);
        for key in ["null", "absent"] {
            assert_eq!(c.opt_usize(key).unwrap(), None);
            assert!(c.get(key).is_none() && c.section(key).unwrap().is_none());
            assert!(c.token_ids(key).unwrap().is_empty());
        }
        assert!(!c.keys().any(|key| key == "null"));
    }

    #[test]
    fn errors_name_file_and_key() {
        let c = config(
            r#"{"n":-1,"x":"1","f":8.5,"huge":1e300,"ids":[1,"a"],"big":4294967296,"inner":{"n":[]}}"#,
        );
        let inner = c.section("inner").unwrap().unwrap();
        let cases = [
            (c.usize("n").map(drop), "key 'n': -1 is not a non-negative integer"),
            (c.usize("f").map(drop), "key 'f': 8.5 is not a non-negative integer"),
            (c.f64("x").map(drop), "key 'x': \"1\" is not a number"),
            (c.f32("huge").map(drop), "key 'huge'"),
            (c.bool("n").map(drop), "key 'n': -1 is not true or false"),
            (c.str("n").map(drop), "key 'n': -1 is not a string"),
            (c.str("gone").map(drop), "key 'gone': it is missing"),
            (c.token_ids("ids").map(drop), "key 'ids'"),
            (c.token_ids("big").map(drop), "key 'big'"),
            (c.section("n").map(drop), "key 'n': -1 is not an object"),
            (inner.usize("n").map(drop), "key 'inner.n': [] is not a non-negative integer"),
        ];
        for (result, reason) in cases {
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(reason) && error.starts_with(c.file().to_str().unwrap()), "{error}");
        }
        let folder = Scratch::new();
        for text in ["", "[]", "{", "{\"a\":NaN}"] {
            let path = folder.write(CONFIG, text.as_bytes());
            let error = format!("{:#}", HubConfig::from_folder(&folder.folder()).unwrap_err());
            assert!(error.starts_with(path.to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn a_files_own_names_for_keys_are_those_it_is_blamed_by() {
        let names = [("n", "x.count"), ("gone", "x.gone"), ("inner.a", "x.a"), ("inner.b", "x.b")];
        let names = names.map(|(key, name)| (key.to_owned(), name.to_owned()));
        let c = config(r#"{"n":-1,"plain":2,"inner":{"a":true,"c":1}}"#).with_file_keys(names.into());
        let inner = c.section("inner").unwrap().unwrap();
        for (result, named) in [
            (c.usize("n").map(drop), "key 'x.count': -1"),
            (c.usize("gone").map(drop), "key 'x.gone': it is missing"),
            (c.str("plain").map(drop), "key 'plain': 2"),
            (inner.usize("a").map(drop), "key 'x.a': true"),
            (inner.str("c").map(drop), "key 'inner.c': 1"),
        ] {
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(named), "{error}");
        }
        // For a nested object, only keys that are present count.
        assert_eq!(
            [c.source_keys("inner"), c.source_keys("n"), c.source_keys("plain")],
            [["x.a"], ["x.count"], ["plain"]]
        );
    }

    fn generation(own: Option<&str>, config_text: &str) -> Result<GenerationConfig> {
        GenerationConfig::from_folder(&folder_with(own).folder(), &config(config_text))
    }

    fn decoder_start(own: Option<&str>, config_text: &str) -> Result<DecoderStart> {
        DecoderStart::from_folder(&folder_with(own).folder(), &config(config_text))
    }

    fn folder_with(own: Option<&str>) -> Scratch {
        let folder = Scratch::new();
        if let Some(own) = own {
            folder.write(GENERATION_CONFIG, own.as_bytes());
        }
        folder
    }

    #[test]
    fn generation_settings_win_over_the_models_own() {
        let model = r#"{"eos_token_id":2,"bos_token_id":1}"#;
        let g = generation(
            Some(r#"{"eos_token_id":[5,6],"temperature":0.6,"top_p":0.9,"top_k":50,"min_p":0.05}"#),
            model,
        )
        .unwrap();
        assert_eq!((g.eos, g.bos, g.do_sample), (vec![5, 6], Some(1), None));
        let sampling = "temperature=0.6,top_k=50,top_p=0.9,min_p=0.05";
        assert_eq!(g.sampling, ParamList::parse_text(sampling).unwrap());
        let absent = GenerationConfig { eos: vec![2], bos: Some(1), ..Default::default() };
        assert_eq!(generation(None, model).unwrap(), absent);
        assert_eq!(generation(Some("{}"), model).unwrap(), absent);
        for (own, key) in [
            (r#"{"temperature":-0.1}"#, "'temperature' is -0.1 but must be finite and at least 0"),
            (r#"{"top_p":0}"#, "'top_p' is 0"),
            (r#"{"top_p":1.5}"#, "'top_p' is 1.5"),
            (r#"{"temperature":1e39}"#, "'temperature' is 1e+39"),
            (r#"{"temperature":"0.7"}"#, "'temperature' is \"0.7\""),
            (r#"{"top_k":-2}"#, "'top_k' is -2"),
            (r#"{"top_k":4294967296}"#, "'top_k' is 4294967296"),
            (r#"{"min_p":-0.5}"#, "'min_p' is -0.5"),
            (r#"{"min_p":1.01}"#, "'min_p' is 1.01"),
            (r#"{"repetition_penalty":0}"#, "'repetition_penalty' is 0"),
            (r#"{"bad_words_ids":[[]]}"#, "'bad_words_ids' is [[]]"),
            (r#"{"suppress_tokens":[1,"a"]}"#, "'suppress_tokens' is [1,\"a\"]"),
            (r#"{"do_sample":1}"#, "'do_sample': 1"),
            (r#"{"eos_token_id":"</s>"}"#, "'eos_token_id'"),
        ] {
            let error = format!("{:#}", generation(Some(own), model).unwrap_err());
            assert!(error.contains(key) && error.contains(GENERATION_CONFIG), "{error}");
        }
    }

    /// As in transformers: the start token from either file, BOS as a fallback; the forced token only from
    /// generation_config.json, if it exists.
    #[test]
    fn a_decoder_begins_as_the_files_say() {
        let model = r#"{"decoder_start_token_id":2,"bos_token_id":1,"forced_bos_token_id":7}"#;
        for (own, config, start, forced_bos) in [
            (None, model, Some(2), Some(7)),
            (Some("{}"), model, Some(2), None),
            (Some(r#"{"decoder_start_token_id":3,"forced_bos_token_id":8}"#), model, Some(3), Some(8)),
            (Some(r#"{"bos_token_id":5}"#), "{}", Some(5), None),
            (None, "{}", None, None),
        ] {
            let found = decoder_start(own, config).unwrap();
            assert_eq!(found, DecoderStart { start, forced_bos }, "{own:?} {config}");
        }
        // Decoder-only models may have any value there.
        for (own, key) in [
            (r#"{"decoder_start_token_id":-1}"#, "'decoder_start_token_id'"),
            (r#"{"forced_bos_token_id":[1]}"#, "'forced_bos_token_id': [1]"),
        ] {
            let error = format!("{:#}", decoder_start(Some(own), model).unwrap_err());
            assert!(error.contains(key) && error.contains(GENERATION_CONFIG), "{error}");
            assert!(generation(Some(own), model).is_ok(), "{own}");
        }
        let settings = r#"{"decoder_start_token_id":3,"forced_bos_token_id":8,"num_beams":4}"#;
        let plain = generation(Some(settings), "{}").unwrap();
        assert!(plain.unsupported.keys().eq(["forced_bos_token_id", "num_beams"]));
        assert!(plain.for_encoder_decoder().unsupported.keys().eq(["num_beams"]));
    }

    /// `do_sample` alone sets no defaults.
    #[test]
    fn only_values_that_are_given_are_defaults() {
        for own in ["{}", r#"{"do_sample":false}"#, r#"{"do_sample":true,"temperature":null}"#] {
            assert_eq!(generation(Some(own), "{}").unwrap().sampling, ParamList::default(), "{own}");
        }
        let given = generation(Some(r#"{"do_sample":false,"temperature":0}"#), "{}").unwrap().sampling;
        assert_eq!(given, ParamList::parse_text("temperature=0").unwrap());
        let all = generation(Some(r#"{"top_k":-1}"#), "{}").unwrap();
        assert_eq!((all.sampling, all.unsupported.len()), (ParamList::parse_text("top_k=-1").unwrap(), 0));
    }

    #[test]
    fn what_would_change_the_answers_and_is_not_served_is_kept() {
        let unserved = |own: &str| Value::Object(generation(Some(own), "{}").unwrap().unsupported);
        let neutral = r#"{
            "_from_model_config": true, "transformers_version": "5.0", "use_cache": true, "pad_token_id": 3,
            "bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": true, "temperature": 0.7, "top_p": 0.95,
            "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.0, "typical_p": 1, "num_beams": 1,
            "no_repeat_ngram_size": 0, "length_penalty": 1.0, "max_length": 20, "max_new_tokens": null,
            "suppress_tokens": [], "early_stopping": false, "epsilon_cutoff": 0.0, "cache_config": {}
        }"#;
        assert_eq!(unserved(neutral), Value::Object(Map::new()));
        let settings = r#"{
            "encoder_no_repeat_ngram_size": 2, "max_length": 4096, "max_new_tokens": 400, "min_length": 1,
            "num_beams": 4, "some_new_wish": "much", "stop_strings": ["END"], "begin_suppress_tokens": [7],
            "watermarking_config": {"a": 1}
        }"#;
        assert_eq!(unserved(settings), serde_json::from_str::<Value>(settings).unwrap());
    }

    /// Keys that another name has here, and values that the libraries write for "off".
    #[test]
    fn penalties_and_forbidden_tokens_are_served() {
        let own = r#"{
            "repetition_penalty": 1.05, "no_repeat_ngram_size": 3, "typical_p": 0.9, "epsilon_cutoff": 0.0003,
            "eta_cutoff": 0.002, "min_new_tokens": 4, "bad_words_ids": [[5, 6], [7]],
            "suppress_tokens": [8, -1],
            "top_k": null
        }"#;
        let found = generation(Some(own), "{}").unwrap();
        let expected = r#"repetition_penalty=1.05,no_repeat_ngram_size=3,typical_p=0.9,epsilon_cutoff=0.0003,
            eta_cutoff=0.002,min_new_tokens=4,bad_words=[[5,6],[7]],suppress_tokens=[8]"#;
        let mut sorted = (found.sampling.0, ParamList::parse_text(expected).unwrap().0);
        sorted.0.sort_by(|a, b| a.0.cmp(&b.0));
        sorted.1.sort_by(|a, b| a.0.cmp(&b.0));
        assert_eq!(sorted.0, sorted.1);
        assert!(found.unsupported.is_empty());
        let off =
            r#"{"bad_words_ids": [], "suppress_tokens": [], "typical_p": 1, "repetition_penalty": 1.0}"#;
        assert_eq!(generation(Some(off), "{}").unwrap().sampling.check(), Ok(()));
    }
}
