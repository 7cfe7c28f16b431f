//! Names, keys and conventions that a GGUF file has for a model of a hub folder: the table, read backwards.
//!
//! Invariant: only an architecture that lists the `model_type` has a target.

use super::{ARCH, GgufTable, ValueSource};
use crate::formats::HubConfig;
use crate::model::spec::{SpecFile, TensorSlice};
use crate::tensor_names::{bias_name, tensor_name};
use anyhow::{Context, Result};
use serde_json::Value;

/// The architecture of GGUF as which a hub model is written.
pub struct GgufTarget {
    pub architecture: String,
    /// The specification of the architecture's files.
    spec: toml::Table,
    /// Settings of config.json and the metadata keys that they have in a file, for this architecture only.
    settings: Vec<(String, String)>,
}

impl GgufTable {
    /// Returns the target for a `model_type` of config.json. Fails if no architecture lists it.
    pub fn target(&self, model_type: &str) -> Result<GgufTarget> {
        let lists = |name: &&String| self.architecture[*name].hub_types.iter().any(|own| own == model_type);
        let name = self.architecture.keys().find(lists).with_context(|| {
            let mut known: Vec<&str> =
                self.architecture.values().flat_map(|own| &own.hub_types).map(String::as_str).collect();
            known.sort_unstable();
            format!(
                "models of the type '{model_type}' cannot be written as GGUF (possible: {}): specify a \
                 folder to write safetensors",
                known.join(", ")
            )
        })?;
        let own = &self.architecture[name];
        let (_, spec) = SpecFile::shipped(&own.model_type)?;
        let key_of = |sources: &Vec<ValueSource>| match sources.first() {
            Some(ValueSource::Key(key)) => Some(key.replace(ARCH, name)),
            _ => None,
        };
        let settings = own.config.iter().filter_map(|(name, sources)| Some((name.clone(), key_of(sources)?)));
        Ok(GgufTarget {
            architecture: name.clone(),
            spec: self.with_overrides(spec, own),
            settings: settings.collect(),
        })
    }
}

impl GgufTarget {
    /// Returns a key of the architecture.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    /// Returns the values of config.json that only this architecture has, with their metadata keys.
    pub fn own_values<'a>(&'a self, config: &HubConfig) -> Vec<(&'a str, Value)> {
        let value = |own: &'a (String, String)| Some((own.1.as_str(), config.at(&own.0)?.clone()));
        let values = self.settings.iter().filter_map(value);
        values.filter(|(_, value)| value.is_number() || value.is_boolean()).collect()
    }

    /// Returns the tensor's name in a file.
    pub fn tensor_name(&self, piece: &TensorSlice) -> Result<String> {
        let (role, is_bias) = match piece.role.strip_suffix(" bias") {
            Some(role) => (role, true),
            None => (piece.role, false),
        };
        let pattern = self.spec.get("tensors").and_then(|tensors| tensors.get(role)).and_then(first_text);
        let pattern = pattern.with_context(|| {
            format!("tensor '{}': GGUF files of '{}' have none like it", piece.name, self.architecture)
        })?;
        let name = tensor_name(pattern, piece.layer, None);
        Ok(if is_bias { bias_name(&name) } else { name })
    }

    /// Returns whether the two rows of a rotated pair are side by side in a file.
    pub fn pairs_are_adjacent(&self) -> bool {
        self.value("position", "style").and_then(toml::Value::as_str) == Some("gptj")
    }

    /// Returns what is added to the weights of a norm when a file is loaded.
    pub fn norm_offset(&self) -> f32 {
        self.value("norm", "offset").and_then(toml::Value::as_float).unwrap_or(0.0) as f32
    }

    fn value(&self, table: &str, key: &str) -> Option<&toml::Value> {
        self.spec.get(table)?.get(key)
    }
}

/// Returns a text, or the first of a list of texts.
fn first_text(value: &toml::Value) -> Option<&str> {
    value.as_str().or_else(|| value.as_array()?.first()?.as_str())
}
