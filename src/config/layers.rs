//! Configuration layers: the defaults, then a file, the environment, and the command line. Each layer is
//! parsed into keys with values. A later layer replaces a value together with its source.
//!
//! Invariant: only keys of the defaults are ever set, and every value carries its source.

use super::policy::{POLICY_KEYS, POLICY_SECTION, PlacementPolicy};
use super::{DEFAULTS, aliases};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::mem::discriminant;
use std::path::{Path, PathBuf};
use strsim::levenshtein;
use toml::Value;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// The source of a value. Later variants override earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConfigSource {
    Defaults,
    /// A file, at a line (from 1), or as a whole if `line` is `None`.
    File {
        path: PathBuf,
        line: Option<usize>,
    },
    /// An environment variable, by name.
    Environment(String),
    CommandLine,
}

impl fmt::Display for ConfigSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConfigSource::Defaults => write!(f, "defaults"),
            ConfigSource::File { path, line: None } => write!(f, "{}", path.display()),
            ConfigSource::File { path, line: Some(line) } => write!(f, "{}:{line}", path.display()),
            ConfigSource::Environment(variable) => write!(f, "environment variable {variable}"),
            ConfigSource::CommandLine => write!(f, "command line"),
        }
    }
}

/// An error in the configuration, with the source of the offending value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {message}")]
pub struct ConfigError {
    pub origin: ConfigSource,
    pub message: String,
}

/// Values from a subcommand: its flags, which override every other layer, and its own defaults, which replace
/// the general defaults and are overridden by all other layers.
#[derive(Clone, Default)]
pub struct Overrides {
    flags: Vec<(&'static str, Value)>,
    defaults: Vec<(&'static str, Value)>,
}

impl Overrides {
    /// Sets `key` (such as `server.port`) from a flag if `value` is `Some`.
    pub fn set(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        self.flags.extend(value.map(|value| (key, value.into())));
    }

    /// Whether a flag sets `key`.
    pub fn sets(&self, key: &str) -> bool {
        self.flags.iter().any(|(set, _)| *set == key)
    }

    /// Sets the subcommand's default of `key`.
    pub fn set_default(&mut self, key: &'static str, value: impl Into<Value>) {
        self.defaults.push((key, value.into()));
    }
}

const PREFIX: &str = "MAINSTEM_";

/// Environment variable that names the configuration file if no flag does.
pub const CONFIG_FILE_VARIABLE: &str = "MAINSTEM_CONFIG";

/// Returns the environment variable that sets `key`: `MAINSTEM_SERVER_PORT` for `server.port`.
pub fn variable_name(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

/// Environment variables with this program's prefix, by name.
pub(super) type Environment = BTreeMap<String, OsString>;

/// Returns the process's environment variables that start with `MAINSTEM_`.
pub(super) fn process_environment() -> Environment {
    let named = std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value));
    named.filter(|(name, _)| name.starts_with(PREFIX)).collect()
}

/// Keys whose values are never shown in messages.
const SECRETS: [&str; 1] = ["server.api_keys"];

/// All keys with their defaults, and the values that layers set over them.
pub(super) struct LayeredSettings {
    defaults: BTreeMap<String, Value>,
    set: BTreeMap<String, SetValue>,
    /// A message for each environment variable that looks like a setting and is none.
    warnings: Vec<String>,
    /// The policy, if its file is a layer.
    policy: Option<PlacementPolicy>,
}

/// A value that a layer sets.
struct SetValue {
    origin: ConfigSource,
    /// The key as written: the key itself or a deprecated spelling of it.
    spelling: String,
    value: Value,
}

impl SetValue {
    /// Whether one layer sets the same key under two spellings to different values.
    fn contradicts(&self, other: &SetValue) -> bool {
        let is_same_layer = discriminant(&self.origin) == discriminant(&other.origin);
        is_same_layer && self.spelling != other.spelling && self.value != other.value
    }
}

impl LayeredSettings {
    /// Settings with the defaults only.
    pub fn new() -> LayeredSettings {
        let entries = parse_toml(DEFAULTS).expect("the defaults are valid TOML; anything else is a bug");
        let keys = entries.into_iter().filter_map(|(_, entry)| match entry {
            TomlEntry::Key(key, value) => Some((key, value)),
            TomlEntry::Section(_) | TomlEntry::Bare(_) => None,
        });
        LayeredSettings { defaults: keys.collect(), set: BTreeMap::new(), warnings: Vec::new(), policy: None }
    }

    /// Replaces general defaults by those of the subcommand.
    pub fn add_defaults(&mut self, overrides: &Overrides) {
        for (key, value) in &overrides.defaults {
            let default = self.defaults.get_mut(*key);
            *default.unwrap_or_else(|| panic!("'{key}' is not in the defaults; this is a bug")) =
                value.clone();
        }
    }

    /// Adds the layer of the file at `path`.
    pub fn add_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        self.add_text(path, &read_file(path)?)
    }

    /// Adds the layer of the policy file at `path`.
    pub fn add_policy_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        self.add_policy(path, &read_file(path)?)
    }

    /// Adds the layer of a policy file at `path` that contains `text`.
    pub fn add_policy(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let at = |line| ConfigSource::File { path: path.to_path_buf(), line };
        let entries =
            parse_toml(text).map_err(|(line, message)| ConfigError { origin: at(Some(line)), message })?;
        let mut policy = toml::Table::new();
        for (line, entry) in entries {
            match entry {
                TomlEntry::Section(name) if name == POLICY_SECTION => {}
                TomlEntry::Section(name) => self.check_section(&name, at(Some(line)))?,
                TomlEntry::Key(key, value) => match key.split_once('.') {
                    Some((POLICY_SECTION, name)) => _ = policy.insert(name.to_owned(), value),
                    _ if POLICY_KEYS.contains(&&*key) => self.set(&key, at(Some(line)), value)?,
                    _ => {
                        let message = format!("a policy cannot set {key}");
                        return Err(ConfigError { origin: at(Some(line)), message });
                    }
                },
                TomlEntry::Bare(name) => {
                    let message = format!("'{name}' is outside of any section");
                    return Err(ConfigError { origin: at(Some(line)), message });
                }
            }
        }
        let parsed = match policy.is_empty() {
            true => Err("this is no policy file: it has no section [policy]".to_owned()),
            false => PlacementPolicy::parse(policy),
        };
        self.policy = Some(parsed.map_err(|message| ConfigError { origin: at(None), message })?);
        Ok(())
    }

    /// Returns the policy, if its file is a layer.
    pub fn policy(&self) -> Option<PlacementPolicy> {
        self.policy.clone()
    }

    /// Adds the layer of a file at `path` that contains `text`.
    pub fn add_text(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let at = |line| ConfigSource::File { path: path.to_path_buf(), line: Some(line) };
        let entries =
            parse_toml(text).map_err(|(line, message)| ConfigError { origin: at(line), message })?;
        for (line, entry) in entries {
            match entry {
                TomlEntry::Key(key, value) => self.set(&key, at(line), value)?,
                TomlEntry::Section(name) => self.check_section(&name, at(line))?,
                TomlEntry::Bare(name) if self.sections().any(|section| section == name) => {
                    let message = format!("'{name}' is a section; its keys belong under [{name}]");
                    return Err(ConfigError { origin: at(line), message });
                }
                TomlEntry::Bare(name) => return Err(self.unknown_key(&name, at(line))),
            }
        }
        Ok(())
    }

    /// Adds the layer of environment variables. Unknown ones are not errors but warnings, because others set
    /// variables too: Kubernetes does for a service with the program's name.
    pub fn add_environment(&mut self, environment: Environment) -> Result<(), ConfigError> {
        for (name, text) in environment {
            let Some(key) = self.key_of_variable(&name) else {
                self.warnings.push(self.unknown_variable(&name).to_string());
                continue;
            };
            let origin = ConfigSource::Environment(name);
            match text.into_string() {
                Ok(text) => {
                    let value = parse_variable(text, &self.defaults[aliases::resolve(&key)]);
                    self.set(&key, origin, value)?;
                }
                Err(_) => {
                    return Err(ConfigError { origin, message: format!("{key}: the value is not UTF-8") });
                }
            }
        }
        Ok(())
    }

    /// Returns messages about settings that are ignored.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.clone()
    }

    /// Returns the key, or its deprecated spelling, that the environment variable `name` sets.
    fn key_of_variable(&self, name: &str) -> Option<String> {
        let mut spellings = self.defaults.keys().map(String::as_str).chain(aliases::deprecated());
        spellings.find(|spelling| variable_name(spelling) == name).map(str::to_string)
    }

    /// Adds the layer of command-line flags.
    pub fn add_flags(&mut self, flags: Overrides) -> Result<(), ConfigError> {
        flags.flags.into_iter().try_for_each(|(key, value)| self.set(key, ConfigSource::CommandLine, value))
    }

    /// Sets the key that `spelling` names. Fails for an unknown key, and if the same layer already sets the
    /// key to a different value under another spelling.
    fn set(&mut self, spelling: &str, origin: ConfigSource, value: Value) -> Result<(), ConfigError> {
        let key = aliases::resolve(spelling);
        if !self.defaults.contains_key(key) {
            return Err(self.unknown_key(spelling, origin));
        }
        let set = SetValue { origin, spelling: spelling.to_string(), value };
        match self.set.get(key) {
            Some(earlier) if earlier.contradicts(&set) => {
                let message = format!(
                    "{} = {} and {spelling} = {} are two names of the same setting; use {key} only",
                    earlier.spelling, earlier.value, set.value
                );
                Err(ConfigError { origin: set.origin, message })
            }
            _ => {
                self.set.insert(key.to_string(), set);
                Ok(())
            }
        }
    }

    /// Returns the value of `key`, parsed by `parse`. An error of `parse` becomes one at the value's source.
    pub fn get<T>(&self, key: &str, parse: impl Fn(&Value) -> Result<T, String>) -> Result<T, ConfigError> {
        parse(self.find(key).1).map_err(|reason| self.error_for(key, &reason))
    }

    /// Returns the text of `key`, if it is a text that is not empty.
    pub fn text(&self, key: &str) -> Option<&str> {
        self.find(key).1.as_str().filter(|text| !text.is_empty())
    }

    /// Returns whether a layer sets `key`.
    pub fn is_set(&self, key: &str) -> bool {
        self.set.contains_key(key)
    }

    /// Returns the source of `key`'s value.
    pub fn source(&self, key: &str) -> ConfigSource {
        self.find(key).0
    }

    /// Returns an error about the value of `key`, with its source and, unless it is secret, the value.
    pub fn error_for(&self, key: &str, reason: &str) -> ConfigError {
        let (origin, value) = self.find(key);
        let shown = if SECRETS.contains(&key) { "(hidden)".to_string() } else { value.to_string() };
        let spelling = self.set.get(key).map_or(key, |set| &set.spelling);
        ConfigError { origin, message: format!("{spelling} = {shown}: {reason}") }
    }

    fn find(&self, key: &str) -> (ConfigSource, &Value) {
        match (self.set.get(key), self.defaults.get(key)) {
            (Some(set), _) => (set.origin.clone(), &set.value),
            (None, Some(value)) => (ConfigSource::Defaults, value),
            (None, None) => panic!("'{key}' is not in the defaults; this is a bug"),
        }
    }

    fn sections(&self) -> impl Iterator<Item = &str> {
        self.defaults.keys().map(|key| split_key(key).0)
    }

    fn check_section(&self, name: &str, origin: ConfigSource) -> Result<(), ConfigError> {
        if self.sections().any(|section| section == name) {
            return Ok(());
        }
        let nearest = self.sections().min_by_key(|section| levenshtein(section, name));
        let nearest = nearest.expect("there are sections");
        let message = format!("there is no section '{name}'; did you mean '{nearest}'?");
        Err(ConfigError { origin, message })
    }

    fn unknown_key(&self, key: &str, origin: ConfigSource) -> ConfigError {
        let nearest = nearest(key, self.defaults.keys().map(String::as_str));
        ConfigError { origin, message: format!("there is no key '{key}'; did you mean '{nearest}'?") }
    }

    fn unknown_variable(&self, name: &str) -> ConfigError {
        let key = name[PREFIX.len()..].to_lowercase().replacen('_', ".", 1);
        let nearest = nearest(&key, self.defaults.keys().map(String::as_str).chain(["config"]));
        // Others set variables of their own, which resemble none of these.
        let hint = match distance(&key, nearest) <= key.len() / 3 {
            true => format!("; did you mean {}?", variable_name(nearest)),
            false => String::new(),
        };
        let message = format!("there is no such setting{hint}");
        ConfigError { origin: ConfigSource::Environment(name.to_string()), message }
    }

    /// All keys.
    #[cfg(test)]
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.defaults.keys().map(String::as_str)
    }
}

fn read_file(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|error| ConfigError {
        origin: ConfigSource::File { path: path.to_path_buf(), line: None },
        message: error.to_string(),
    })
}

/// An entry of a TOML text.
enum TomlEntry {
    /// A section header, by name.
    Section(String),
    /// A key, as `section.name`, with its value.
    Key(String, Value),
    /// A top-level name with a value, outside of any section.
    Bare(String),
}

/// Parses a TOML text into its entries with their line numbers (from 1), in order. An error has its line
/// number too; its message never quotes the text, which may contain secrets.
fn parse_toml(text: &str) -> Result<Vec<(usize, TomlEntry)>, (usize, String)> {
    // Not counted from the beginning for each key: every process and many tests parse the long defaults.
    let ends: Vec<usize> = text.match_indices('\n').map(|(at, _)| at).collect();
    let line_at = |offset: usize| 1 + ends.partition_point(|end| *end < offset);
    let document = DeTable::parse(text)
        .map_err(|e| (line_at(e.span().map_or(0, |span| span.start)), e.message().to_string()))?;
    let mut all = Vec::new();
    for (section, value) in document.into_inner() {
        let line = line_at(section.span().start);
        let section = section.into_inner();
        let DeValue::Table(keys) = value.into_inner() else {
            all.push((line, TomlEntry::Bare(section.into_owned())));
            continue;
        };
        all.push((line, TomlEntry::Section(section.to_string())));
        for (name, value) in keys {
            let line = line_at(name.span().start);
            let key = format!("{section}.{}", name.into_inner());
            let value = Value::deserialize(ValueDeserializer::from(value))
                .map_err(|_| (line, format!("{key}: the number is too large")))?;
            all.push((line, TomlEntry::Key(key, value)));
        }
    }
    all.sort_by_key(|(line, _)| *line);
    Ok(all)
}

/// Parses an environment variable by the type of its key's default: a string is taken as is, a list may be in
/// TOML's syntax or comma-separated, and anything else is in TOML's syntax. Text that does not parse stays a
/// string, which the key's own parser then rejects.
fn parse_variable(text: String, default: &Value) -> Value {
    let trimmed = text.trim();
    match default {
        Value::String(_) => Value::String(text),
        Value::Array(_) if !trimmed.starts_with('[') => {
            Value::Array(trimmed.split(',').map(|item| Value::from(item.trim())).collect())
        }
        _ => trimmed.parse().unwrap_or(Value::String(text)),
    }
}

/// Splits `section.name` into its two parts.
fn split_key(key: &str) -> (&str, &str) {
    key.split_once('.').unwrap_or(("", key))
}

/// Returns the key most similar to `word`, by edit distance: as a whole, with the section omitted, or in
/// another section.
fn nearest<'a>(word: &str, keys: impl Iterator<Item = &'a str>) -> &'a str {
    keys.min_by_key(|key| distance(word, key)).expect("there are keys")
}

/// Returns how much `word`, which may lack its section or have another one, differs from `key`, in
/// characters.
fn distance(word: &str, key: &str) -> usize {
    let name = split_key(key).1;
    let whole = levenshtein(word, key).min(levenshtein(&word.replace('.', "_"), name));
    whole.min(1 + levenshtein(split_key(word).1, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(toml: &str) -> String {
        LayeredSettings::new().add_text(Path::new("some.toml"), toml).unwrap_err().to_string()
    }

    fn environment(variables: &[(&str, &str)]) -> Environment {
        variables.iter().map(|(name, text)| (name.to_string(), OsString::from(text))).collect()
    }

    #[test]
    fn an_unknown_key_is_reported_with_its_line_and_the_nearest() {
        assert_eq!(
            error_of("# A comment\n[server]\n\nprot = 1"),
            "some.toml:4: there is no key 'server.prot'; did you mean 'server.port'?"
        );
        for (toml, part) in [
            ("[server]\nslots = 1", "2: there is no key 'server.slots'; did you mean 'scheduler.slots'?"),
            ("slots = 1", "1: there is no key 'slots'; did you mean 'scheduler.slots'?"),
            ("\"server.port\" = 1", "1: there is no key 'server.port'"),
            ("[server.tls]\ncert = 1", "1: there is no key 'server.tls'"),
            ("[schedular]\nslots = 1", "1: there is no section 'schedular'; did you mean 'scheduler'?"),
            ("\n[schedular]", "2: there is no section 'schedular'"),
            ("[kv]\n[log]\nx = 1\ny = 2\n[server]\na = 1", "3: there is no key 'log.x'"),
        ] {
            let error = error_of(toml);
            assert!(error.starts_with("some.toml:") && error.contains(part), "{toml}: {error}");
        }
    }

    #[test]
    fn a_section_name_used_as_a_key_is_reported() {
        let message = "'server' is a section; its keys belong under [server]";
        assert_eq!(error_of("server = 1"), format!("some.toml:1: {message}"));
        assert_eq!(error_of("\n[[server]]\nport = 1"), format!("some.toml:2: {message}"));
    }

    #[test]
    fn invalid_toml_is_reported_with_its_line_but_not_shown() {
        assert_eq!(error_of("[server]\nport = 1\nport = 2"), "some.toml:3: duplicate key");
        assert!(error_of("[kv]\n[server]\n[kv]").starts_with("some.toml:3: "));
        for toml in [
            "[server]\n\n\napi_keys = [\"secret, \"b\"]",
            "[server]\n\n\napi_keys = secret",
            "[server]\n\n\napi_keys = [99999999999999999999999999999999999999999]",
        ] {
            let error = error_of(toml);
            assert!(error.starts_with("some.toml:4: "), "{error}");
            assert!(!error.contains("secret") && !error.contains("999"), "{error}");
        }
    }

    #[test]
    fn a_secret_is_hidden_wherever_it_stands() {
        let mut settings = LayeredSettings::new();
        settings.add_text(Path::new("f"), "[server]\napi_keys = \"secret\"").unwrap();
        let error = settings.get("server.api_keys", |_| Err::<(), _>("no".to_string())).unwrap_err();
        assert_eq!(error.to_string(), "f:2: server.api_keys = (hidden): no");
    }

    #[test]
    fn an_unknown_variable_is_reported_with_the_nearest() {
        for (name, nearest) in [
            ("MAINSTEM_SERVER_PROT", "MAINSTEM_SERVER_PORT"),
            ("MAINSTEM_PORT", "MAINSTEM_SERVER_PORT"),
            ("MAINSTEM_API_KEY", "MAINSTEM_SERVER_API_KEYS"),
            ("MAINSTEM_CONFG", "MAINSTEM_CONFIG"),
        ] {
            let mut settings = LayeredSettings::new();
            settings.add_environment(environment(&[(name, "secret")])).unwrap();
            let no_setting = "there is no such setting; did you mean";
            let warning = format!("environment variable {name}: {no_setting} {nearest}");
            let warnings = settings.warnings();
            assert!(warnings.len() == 1 && warnings[0].starts_with(&warning), "{warnings:?}");
            assert!(!warnings[0].contains("secret") && settings.config().is_ok());
        }
        for name in ["MAINSTEM_", "MAINSTEM_FOO", "MAINSTEM_BUILD_REVISION"] {
            let mut settings = LayeredSettings::new();
            settings.add_environment(environment(&[(name, "secret")])).unwrap();
            let warning = format!("environment variable {name}: there is no such setting");
            assert_eq!(settings.warnings(), [warning]);
        }
    }

    #[test]
    fn no_two_keys_share_a_variable() {
        let mut variables: Vec<_> =
            LayeredSettings::new().keys().chain(aliases::deprecated()).map(variable_name).collect();
        let keys = variables.len();
        variables.push(CONFIG_FILE_VARIABLE.into());
        variables.sort();
        variables.dedup();
        assert_eq!(variables.len(), keys + 1);
    }

    #[test]
    fn variables_are_parsed_by_the_type_of_their_key() {
        let mut settings = LayeredSettings::new();
        // A value of the wrong type in a file does not change how the variable over it is parsed.
        settings.add_text(Path::new("f"), "[server]\nport = \"x\"").unwrap();
        let variables = environment(&[
            ("MAINSTEM_SERVER_PORT", " 81 "),
            ("MAINSTEM_SERVER_WORKERS", "many"),
            ("MAINSTEM_MODEL_SERVED_NAME", "7"),
            ("MAINSTEM_SERVER_API_KEYS", "a, b"),
            ("MAINSTEM_SERVER_CORS_ORIGINS", "[\"https://a.b\"]"),
        ]);
        settings.add_environment(variables).unwrap();
        let value = |key: &str| settings.find(key).1.clone();
        assert_eq!(value("server.port"), Value::Integer(81));
        assert_eq!(value("server.workers"), Value::from("many"));
        assert_eq!(value("model.served_name"), Value::from("7"));
        assert_eq!(value("server.api_keys"), Value::from(vec!["a", "b"]));
        assert_eq!(value("server.cors_origins"), Value::from(vec!["https://a.b"]));
        let fault = settings.error_for("server.workers", "no").to_string();
        assert_eq!(fault, "environment variable MAINSTEM_SERVER_WORKERS: server.workers = \"many\": no");
    }

    #[test]
    fn later_layers_override_earlier_ones_and_are_the_source() {
        let mut settings = LayeredSettings::new();
        let text = "[server]\nport = 1\nworkers = 1\nhost = \"a\"\n";
        settings.add_text(Path::new("some.toml"), text).unwrap();
        settings
            .add_environment(environment(&[("MAINSTEM_SERVER_PORT", "2"), ("MAINSTEM_SERVER_WORKERS", "2")]))
            .unwrap();
        let mut flags = Overrides::default();
        flags.set("server.port", Some(3));
        flags.set("server.host", None::<String>);
        settings.add_flags(flags).unwrap();
        let found =
            ["port", "workers", "host", "retry_after"].map(|name| settings.find(&format!("server.{name}")));
        let values: Vec<_> = found.iter().map(|(_, value)| value.to_string()).collect();
        assert_eq!(values, ["3", "2", "\"a\"", "\"1s\""]);
        assert_eq!(found[0].0, ConfigSource::CommandLine);
        assert_eq!(found[1].0, ConfigSource::Environment("MAINSTEM_SERVER_WORKERS".into()));
        assert_eq!(found[2].0, ConfigSource::File { path: "some.toml".into(), line: Some(4) });
        assert_eq!(found[3].0, ConfigSource::Defaults);
        assert!(found.windows(2).all(|pair| pair[0].0 > pair[1].0), "sources have the layers' order");
    }
}
