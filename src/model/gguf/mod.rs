//! Translates the metadata of a GGUF file to the keys of config.json and to a specification, by the table
//! `specs/gguf.toml`.
//!
//! Invariant: a key of the table that would change what is computed is either supported or an error, never
//! ignored, whoever wrote the specification. No architecture is named in this module.

mod settings;
mod target;

use super::spec::SpecFile;
use super::spec::merge::{MissingKey, merge};
use crate::formats::gguf::GgufValue;
use crate::formats::{Checkpoint, Gguf, HubConfig};
use anyhow::{Context, Result};
use serde::Deserialize;
use settings::{GgufSettings, VOCAB};
use std::collections::BTreeMap;
pub use target::GgufTarget;

/// File name of the table, for error messages.
const FILE: &str = "specs/gguf.toml";

/// Metadata key of a file's architecture.
const ARCHITECTURE: &str = "general.architecture";

/// Placeholder for the architecture in key names.
const ARCH: &str = "{arch}";

/// The table as written in `specs/gguf.toml`, whose head comment describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GgufTable {
    config: ValueSources,
    supported_values: SupportedValues,
    spec: toml::Table,
    architecture: BTreeMap<String, Architecture>,
}

/// Names of settings, each with the sources of its value, in order of preference.
type ValueSources = BTreeMap<String, Vec<ValueSource>>;

/// Metadata keys, each with the values that do not change what is computed.
type SupportedValues = BTreeMap<String, Vec<serde_json::Value>>;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Architecture {
    model_type: String,
    /// Values of config.json's `model_type` whose models are written as this architecture.
    #[serde(default)]
    hub_types: Vec<String>,
    #[serde(default)]
    spec: toml::Table,
    #[serde(default)]
    config: ValueSources,
    #[serde(default)]
    supported_values: SupportedValues,
}

/// A source of a setting's value.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ValueSource {
    Key(String),
    Scaled(ScaledSource),
    Count(String),
    Ids(IdSources),
    Has(Vec<String>),
    Lacks(Vec<String>),
    Numbers(String),
}

/// A number under a key, and what it is multiplied by; 0 counts as absent.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScaledSource {
    key: String,
    by: f64,
}

/// Tokens, listed by the metadata keys that hold their ids and by their text in the vocabulary.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct IdSources {
    keys: Vec<String>,
    #[serde(default)]
    named: Vec<String>,
}

impl GgufTable {
    /// Returns the table that ships with the program.
    pub fn shipped() -> GgufTable {
        let text = include_str!("../../../specs/gguf.toml");
        toml::from_str(text).unwrap_or_else(|error| panic!("{FILE}: {error}; this is a bug"))
    }

    /// Returns the file's settings under the names that config.json uses. A tensor that holds settings is
    /// read and removed from the checkpoint. `spec` may support values that the table does not.
    pub fn config(&self, gguf: &Gguf, checkpoint: &mut Checkpoint, spec: &SpecFile) -> Result<HubConfig> {
        let name = architecture(gguf)?;
        let own = self.architecture.get(name);
        self.check_unsupported_keys(gguf, name, own, spec)?;
        let mut settings = GgufSettings::new(gguf, checkpoint, name);
        let own = own.map(|own| &own.config).into_iter().flatten();
        let mut sources: BTreeMap<&str, _> =
            self.config.iter().chain(own).map(|(key, sources)| (key.as_str(), sources)).collect();
        // Token ids are checked against the vocabulary size.
        if let Some((key, sources)) = sources.remove_entry(VOCAB) {
            settings.read_setting(key, sources)?;
        }
        for (key, sources) in sources {
            settings.read_setting(key, sources)?;
        }
        settings.finish()
    }

    /// Returns the built-in specification for the file's architecture, with the overrides for GGUF.
    pub fn specification(&self, gguf: &Gguf) -> Result<SpecFile> {
        let architecture = architecture(gguf)?;
        let own = self.architecture.get(architecture).with_context(|| {
            let known = self.architecture.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
            let reason = format!(
                "there is no built-in specification for '{architecture}' (known: {known}); use --spec FILE"
            );
            gguf.key_error(ARCHITECTURE, reason)
        })?;
        let (file, spec) = SpecFile::shipped(&own.model_type)?;
        SpecFile::of_entries(&format!("{file} with {FILE}"), self.with_overrides(spec, own))
    }

    fn with_overrides(&self, mut spec: toml::Table, own: &Architecture) -> toml::Table {
        merge(&mut spec, &self.spec, MissingKey::Skip);
        merge(&mut spec, &own.spec, MissingKey::Insert);
        spec
    }

    fn check_unsupported_keys(
        &self,
        gguf: &Gguf,
        name: &str,
        own: Option<&Architecture>,
        spec: &SpecFile,
    ) -> Result<()> {
        let of_own = own.map(|own| &own.supported_values).into_iter().flatten();
        let supported: BTreeMap<_, _> = self.supported_values.iter().chain(of_own).collect();
        for (key, values) in
            supported.into_iter().filter(|(key, _)| !own.is_some_and(|own| own.reads_key(key)))
        {
            let key = key.replace(ARCH, name);
            let values = spec.supported_values().get(&key).unwrap_or(values);
            if let Some(GgufValue::Array(array)) = gguf.value(&key) {
                return Err(
                    gguf.key_error(&key, format_args!("a list of {} values is not supported", array.len))
                );
            }
            let Some(value) = settings::scalar(gguf, &key)? else { continue };
            if !values.iter().any(|known| settings::values_equal(known, &value)) {
                return Err(gguf.key_error(&key, format_args!("{value} is not supported")));
            }
        }
        Ok(())
    }
}

/// Returns the file's architecture. Long names are refused, because key names are built from it.
fn architecture(gguf: &Gguf) -> Result<&str> {
    const MOST: usize = 64;
    let name = gguf.str(ARCHITECTURE)?;
    if name.len() > MOST {
        return Err(gguf.key_error(ARCHITECTURE, format_args!("a name of {} bytes is too long", name.len())));
    }
    Ok(name)
}

impl Architecture {
    /// Returns whether one of the architecture's own settings is read from that key.
    fn reads_key(&self, key: &str) -> bool {
        self.config.values().flatten().any(|source| match source {
            ValueSource::Key(taken) | ValueSource::Scaled(ScaledSource { key: taken, .. }) => taken == key,
            _ => false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the table at a path of keys; an empty one if there is none.
    fn table(spec: &toml::Table, path: &[&str]) -> toml::Table {
        let inner = path.iter().try_fold(spec, |table, key| table.get(*key)?.as_table());
        inner.cloned().unwrap_or_default()
    }

    /// Finds rows of the table that the specification cannot take, and tensors that still have a hub model's
    /// name, before a file is opened.
    #[test]
    fn every_architecture_fits_its_specification() {
        let gguf = GgufTable::shipped();
        assert!(gguf.architecture.len() > 10);
        for (name, own) in &gguf.architecture {
            let (file, plain) = SpecFile::shipped(&own.model_type).unwrap();
            let spec = gguf.with_overrides(plain.clone(), own);
            SpecFile::of_entries(name, spec.clone()).unwrap();
            for path in [&["tensors"][..], &["encoder", "tensors"], &["decoder", "tensors"]] {
                let ours = table(&spec, path);
                for (part, hubs) in table(&plain, path) {
                    assert_ne!(ours[&part], hubs, "{name}: '{part}' still has the name from {file}");
                }
            }
        }
    }

    /// Keys that settings are read from are supported; otherwise keys in which models differ would be
    /// refused.
    #[test]
    fn keys_that_settings_are_taken_from_are_known() {
        let own = "model_type = 'x'\n[config]\na = [{ count = '{arch}.b' }, { key = '{arch}.c' }]";
        let own: Architecture = toml::from_str(own).unwrap();
        assert!(own.reads_key("{arch}.c"));
        assert!(!own.reads_key("{arch}.b") && !own.reads_key("a"));
        for (name, own) in &GgufTable::shipped().architecture {
            for key in own.supported_values.keys() {
                assert!(
                    key.starts_with(ARCH) && !own.reads_key(key),
                    "{name}: '{key}' is both supported and refused"
                );
            }
        }
    }
}
