//! Pooling settings of an embedding model: the files of sentence-transformers, `modules.json` and the
//! settings of its modules.
//!
//! Invariant: an unsupported module, pooling mode or setting is recorded by name, so that the caller can
//! reject it; only a file that cannot be parsed is an error here.

mod dense;
mod preprocessing;

pub use dense::{DenseConfig, DenseWeights};
pub use preprocessing::{TEXT_CONFIG, TextPreprocessing};

use super::{Folder, HubConfig, is_plain_name};
use crate::request::Pooling;
use anyhow::{Context, Result, anyhow, ensure};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;

/// File with the list of modules.
pub const MODULES: &str = "modules.json";

/// Settings file of a pooling module, in its folder.
const CONFIG: &str = "config.json";

/// File with prompts, and the function that compares embeddings.
pub const PROMPTS_FILE: &str = "config_sentence_transformers.json";

/// Prefix of the switches of pooling modes.
const MODE_PREFIX: &str = "pooling_mode_";
/// Key that some files have instead of switches: a mode or a list of modes.
const MODE_KEY: &str = "pooling_mode";

/// Embedding settings of a model folder.
#[derive(Clone, Debug, PartialEq)]
pub struct SentenceConfig {
    /// The file with the modules, for messages.
    pub file: String,
    pub pooling: PoolingConfig,
    /// Dense modules after pooling, in order.
    pub dense: Vec<DenseConfig>,
    /// Whether embeddings are L2-normalized.
    pub normalize: bool,
    pub prompts: Prompts,
    /// The function that compares embeddings.
    pub similarity: Similarity,
    /// Text preprocessing, if it is configured.
    pub preprocessing: Option<TextPreprocessing>,
}

/// Texts that are put before a text to embed, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompts {
    pub texts: BTreeMap<String, String>,
    /// Name of the one that applies unless a request names another.
    pub default: Option<String>,
    /// Whether pooling leaves out their tokens, which is not supported.
    pub are_left_out: bool,
}

impl Prompts {
    /// Returns the prompt with the first of these names that there is, otherwise the default one, which may
    /// be empty.
    pub fn of_role(&self, names: &[&str]) -> &str {
        let mut names = names.iter().copied().chain(self.default.as_deref());
        names.find_map(|name| self.texts.get(name)).map_or("", String::as_str)
    }
}

/// A function that compares two embeddings; larger is nearer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Similarity {
    #[default]
    Cosine,
    Dot,
    /// The negative distance.
    Euclidean,
    /// The negative sum of absolute differences.
    Manhattan,
}

/// The configured pooling, supported or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolingConfig {
    Supported(Pooling),
    Unsupported(UnsupportedSetting),
}

/// A setting that is not supported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsupportedSetting {
    /// The file with the setting, with its path.
    pub file: String,
    pub reason: String,
}

impl fmt::Display for UnsupportedSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.reason)
    }
}

#[derive(Deserialize)]
struct Module {
    path: String,
    /// Python class, for example `sentence_transformers.models.Pooling`; the last component decides.
    #[serde(rename = "type")]
    class: String,
}

impl SentenceConfig {
    /// Reads a model folder. Returns `None` if it has no list of modules.
    pub fn from_folder(folder: &Folder) -> Result<Option<SentenceConfig>> {
        let Some(modules) = Module::read_all(folder)? else { return Ok(None) };
        let file = || folder.file(MODULES).display().to_string();
        let unserved = |why| PoolingConfig::Unsupported(UnsupportedSetting { file: file(), reason: why });
        let pooling = unserved("no pooling module".to_owned());
        let (prompts, similarity) = read_prompts(folder)?;
        let (dense, preprocessing) = (Vec::new(), None);
        let mut found = SentenceConfig {
            file: file(),
            pooling,
            dense,
            normalize: false,
            prompts,
            similarity,
            preprocessing,
        };
        let (mut stranger, mut is_pooled) = (None, false);
        let mut refuse = |why: String| stranger = stranger.take().or(Some(why));
        for module in &modules {
            match module.class() {
                "Transformer" => found.preprocessing = TextPreprocessing::read(folder, &module.path)?,
                "Normalize" => found.normalize = true,
                "Pooling" => {
                    (found.pooling, found.prompts.are_left_out) = read_pooling(folder, &module.path)?;
                    is_pooled = true;
                }
                "Dense" if !is_pooled || found.normalize => {
                    refuse("a module of type Dense before pooling or after Normalize is not supported".into())
                }
                "Dense" => match DenseConfig::open(folder, &module.path)? {
                    Ok(module) => found.dense.push(module),
                    Err(why) => refuse(why),
                },
                other => refuse(format!("modules of type {other} are not supported")),
            }
        }
        // The other modules are read all the same: a request can choose its own pooling.
        if let Some(why) = stranger {
            found.pooling = unserved(why);
            found.dense.clear();
        }
        Ok(Some(found))
    }

    /// Reads the folder of a decoder. Returns `None` if it has no pooling module, and so generates text.
    pub fn of_decoder(folder: &Folder) -> Result<Option<SentenceConfig>> {
        let modules = Module::read_all(folder)?.unwrap_or_default();
        match modules.iter().any(|module| module.class() == "Pooling") {
            true => Ok(SentenceConfig::from_folder(folder)?.map(SentenceConfig::for_decoder)),
            false => Ok(None),
        }
    }

    /// Returns the settings for a decoder, in which the first token sees no others.
    pub fn for_decoder(self) -> SentenceConfig {
        let PoolingConfig::Supported(Pooling::Cls) = self.pooling else { return self };
        let reason = "a decoder's first token knows nothing of the text".to_owned();
        let setting = UnsupportedSetting { file: self.file.clone(), reason };
        SentenceConfig { pooling: PoolingConfig::Unsupported(setting), ..self }
    }

    /// Returns the paths of the files of the modules after the model, within the folder; empty if the list of
    /// modules is missing or malformed.
    pub fn module_files(folder: &Folder) -> Vec<String> {
        let modules = Module::read_all(folder).ok().flatten().unwrap_or_default();
        let files = |module: &Module| match module.class() {
            "Pooling" => module_file(folder, &module.path, CONFIG).ok().into_iter().collect(),
            "Dense" => DenseConfig::files(folder, &module.path),
            _ => Vec::new(),
        };
        modules.iter().flat_map(files).collect()
    }
}

impl Module {
    /// Returns a folder's modules in order, or `None` if it has no list of them.
    fn read_all(folder: &Folder) -> Result<Option<Vec<Module>>> {
        let Some(content) = folder.read(MODULES)? else { return Ok(None) };
        let modules = serde_json::from_slice(&content);
        modules.map(Some).with_context(|| folder.file(MODULES).display().to_string())
    }

    fn class(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or_default()
    }
}

/// Returns the path of a file in a module's folder, which is next to the list of modules.
fn module_file(folder: &Folder, path: &str, name: &str) -> Result<String> {
    let is_own = is_plain_name(path);
    ensure!(is_own, "{}: '{path}' is not the name of a folder next to it", folder.file(MODULES).display());
    Ok(format!("{path}/{name}"))
}

/// Reads the prompts and the function that compares embeddings.
fn read_prompts(folder: &Folder) -> Result<(Prompts, Similarity)> {
    let Some(settings) = HubConfig::read_if_present(folder, PROMPTS_FILE)? else {
        return Ok(Default::default());
    };
    let texts = settings.typed("prompts", "an object of texts", |value| {
        let texts =
            value.as_object()?.iter().map(|(name, text)| Some((name.clone(), text.as_str()?.to_owned())));
        texts.collect::<Option<BTreeMap<_, _>>>()
    })?;
    let texts = texts.unwrap_or_default();
    let default = settings.opt_str("default_prompt_name")?.map(str::to_owned);
    if let Some(name) = default.as_ref().filter(|name| !texts.contains_key(*name)) {
        return Err(settings.key_error("default_prompt_name", format_args!("there is no prompt '{name}'")));
    }
    let similarity = match settings.opt_str("similarity_fn_name")? {
        None | Some("cosine") => Similarity::Cosine,
        Some("dot") => Similarity::Dot,
        Some("euclidean") => Similarity::Euclidean,
        Some("manhattan") => Similarity::Manhattan,
        Some(other) => {
            return Err(settings.key_error("similarity_fn_name", format_args!("'{other}' is not supported")));
        }
    };
    Ok((Prompts { texts, default, are_left_out: false }, similarity))
}

/// Reads the settings of a pooling module, and whether it leaves prompts out.
fn read_pooling(folder: &Folder, path: &str) -> Result<(PoolingConfig, bool)> {
    let name = module_file(folder, path, CONFIG)?;
    let missing = || anyhow!("{}: no such file", folder.file(&name).display());
    let settings = HubConfig::read_if_present(folder, &name)?.ok_or_else(missing)?;
    let named = settings.typed(MODE_KEY, "a mode or a list of modes", |value| match value {
        Value::Array(modes) => modes.iter().map(Value::as_str).collect(),
        mode => mode.as_str().map(|mode| vec![mode]),
    })?;
    let on = named.map_or_else(|| enabled_modes(&settings), Ok)?;
    let unserved = |reason| {
        PoolingConfig::Unsupported(UnsupportedSetting { file: settings.file().display().to_string(), reason })
    };
    let leaves_prompts_out = settings.opt_bool("include_prompt")? == Some(false);
    let pooling = match on[..] {
        ["mean_tokens" | "mean"] => PoolingConfig::Supported(Pooling::Mean),
        ["cls_token" | "cls"] => PoolingConfig::Supported(Pooling::Cls),
        ["lasttoken"] => PoolingConfig::Supported(Pooling::Last),
        _ => {
            let what = if on.is_empty() { "none".to_owned() } else { on.join(" with ") };
            unserved(format!("the pooling mode is {what}, which is not supported"))
        }
    };
    Ok((pooling, leaves_prompts_out))
}

/// Returns the modes whose switches are on.
fn enabled_modes(settings: &HubConfig) -> Result<Vec<&str>> {
    let mut on = Vec::new();
    for key in settings.keys() {
        if let Some(mode) = key.strip_prefix(MODE_PREFIX)
            && settings.bool(key)?
        {
            on.push(mode);
        }
    }
    Ok(on)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;
    use serde_json::json;

    const POOLING_CONFIG: &str = "1_Pooling/config.json";

    fn modules(classes: &[&str]) -> Value {
        let path = |index: usize, class: &str| match class {
            "Transformer" => String::new(),
            class => format!("{index}_{class}"),
        };
        let module = |(index, class): (usize, &&str)| {
            let kind = format!("sentence_transformers.models.{class}");
            json!({"idx": index, "name": index.to_string(), "path": path(index, class), "type": kind})
        };
        classes.iter().enumerate().map(module).collect()
    }

    fn read(modules: &Value, pooling: Option<&Value>) -> Result<Option<SentenceConfig>> {
        let folder = Scratch::new();
        folder.write(MODULES, modules.to_string().as_bytes());
        if let Some(pooling) = pooling {
            std::fs::create_dir(folder.path().join("1_Pooling")).unwrap();
            folder.write(POOLING_CONFIG, pooling.to_string().as_bytes());
        }
        SentenceConfig::from_folder(&folder.folder())
    }

    /// Settings as the library writes them: a switch for every mode.
    fn switches(on: &[&str]) -> Value {
        let mut settings = json!({"word_embedding_dimension": 32, "include_prompt": true});
        for mode in [
            "cls_token",
            "mean_tokens",
            "max_tokens",
            "mean_sqrt_len_tokens",
            "weightedmean_tokens",
            "lasttoken",
        ] {
            settings[format!("pooling_mode_{mode}")] = on.contains(&mode).into();
        }
        settings
    }

    #[test]
    fn each_served_mode_is_known_by_its_switch_and_by_its_name() {
        for (mode, name, pooling) in [
            ("mean_tokens", "mean", Pooling::Mean),
            ("cls_token", "cls", Pooling::Cls),
            ("lasttoken", "lasttoken", Pooling::Last),
        ] {
            for settings in
                [switches(&[mode]), json!({"pooling_mode": name}), json!({"pooling_mode": [name]})]
            {
                let bare = read(&modules(&["Transformer", "Pooling"]), Some(&settings)).unwrap().unwrap();
                assert_eq!(
                    bare,
                    SentenceConfig {
                        pooling: PoolingConfig::Supported(pooling),
                        dense: Vec::new(),
                        normalize: false,
                        prompts: Prompts::default(),
                        similarity: Similarity::Cosine,
                        preprocessing: None,
                        file: bare.file.clone(),
                    },
                    "{settings}"
                );
                let classes = ["Transformer", "Pooling", "Normalize"];
                let unit = read(&modules(&classes), Some(&settings)).unwrap().unwrap();
                assert!(unit.normalize && unit.pooling == bare.pooling);
            }
        }
    }

    #[test]
    fn what_is_not_served_is_kept_by_its_name() {
        let plain = modules(&["Transformer", "Pooling"]);
        for (modules, settings, named) in [
            (&plain, switches(&["max_tokens"]), "max_tokens"),
            (&plain, switches(&["weightedmean_tokens"]), "weightedmean_tokens"),
            (&plain, switches(&["cls_token", "mean_tokens"]), "cls_token with mean_tokens"),
            (&plain, switches(&[]), "none"),
            (&plain, json!({"pooling_mode": "max"}), "max"),
            (&plain, json!({"pooling_mode": ["mean", "cls"]}), "mean with cls"),
            (&modules(&["Transformer", "Pooling", "CNN"]), switches(&["cls_token"]), "type CNN"),
            (&modules(&["Transformer"]), switches(&["cls_token"]), "no pooling module"),
        ] {
            let found = read(modules, Some(&settings)).unwrap().unwrap();
            let PoolingConfig::Unsupported(UnsupportedSetting { file, reason: why }) = found.pooling else {
                panic!("{named} is supported")
            };
            assert!(why.contains(named) && file.contains(".json"), "{file}: {why}");
        }
    }

    #[test]
    fn the_others_are_read_though_a_module_is_not_served() {
        let settings = switches(&["cls_token"]);
        for classes in [
            ["Transformer", "Pooling", "CNN", "Normalize"],
            ["Transformer", "Pooling", "Normalize", "CNN"],
            ["CNN", "Pooling", "LayerNorm", "Normalize"],
        ] {
            let found = read(&modules(&classes), Some(&settings)).unwrap().unwrap();
            let PoolingConfig::Unsupported(unserved) = &found.pooling else { panic!("CNN is supported") };
            assert!(found.normalize && unserved.reason.contains("CNN"), "{unserved}");
        }
    }

    #[test]
    fn files_that_cannot_be_read_are_named() {
        let folder = Scratch::new();
        assert_eq!(SentenceConfig::from_folder(&folder.folder()).unwrap(), None);
        let plain = modules(&["Transformer", "Pooling"]);
        for (modules, settings, named) in [
            (&json!({}), None, MODULES),
            (&json!([{"path": 1}]), None, MODULES),
            (&json!([{"path": "../1_Pooling", "type": "x.Pooling"}]), None, MODULES),
            (&plain, None, POOLING_CONFIG),
            (&plain, Some(json!({"pooling_mode_cls_token": 1})), "pooling_mode_cls_token"),
            (&plain, Some(json!({"pooling_mode": 1})), "pooling_mode"),
            (&plain, Some(json!({"pooling_mode": ["mean", 1]})), "pooling_mode"),
        ] {
            let error = format!("{:#}", read(modules, settings.as_ref()).unwrap_err());
            assert!(error.contains(named), "{error}");
        }
    }
}
