//! The origins of the values in a model's specification.
//!
//! Invariant: a value is recorded together with its origin where it is looked up.

use serde_json::Value;
use std::path::PathBuf;

/// The files from which a [`super::ModelSpec`] was resolved, and the origin of each value.
#[derive(Clone, Debug, PartialEq)]
pub struct Provenance {
    /// The specification file.
    pub specification: String,
    /// Values of config.json's `model_type` that select the specification.
    pub model_types: Vec<String>,
    /// The model's own value of that key; `None` if it has none.
    pub model_type: Option<String>,
    /// The model's config.json, or the file whose header replaces it.
    pub config: PathBuf,
    /// The values, in the order in which they were looked up.
    pub values: Vec<SourcedValue>,
    /// Keys of the configuration that nothing reads, and of which it is not known that they change nothing.
    pub unread_keys: Vec<String>,
}

/// A value with its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct SourcedValue {
    /// Key of the value in the specification file, such as `attention.heads`.
    pub key: String,
    /// Layers with this value, ascending; empty for values outside of layers.
    pub layers: Vec<usize>,
    pub value: Value,
    pub origin: Origin,
}

/// The origin of a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Given in the specification file.
    Specification,
    /// Read from the model's configuration, from these keys.
    Config(Vec<String>),
    /// Default of the specification file, because the configuration lacks this key.
    Default(String),
    /// Default of the configuration format.
    Format,
    /// Derived by this rule, written with keys of the specification.
    Derived(&'static str),
    /// Computed with this formula of the specification.
    Formula(String),
}

impl Provenance {
    /// Returns the first entry of a key.
    pub fn get(&self, key: &str) -> Option<&SourcedValue> {
        self.values.iter().find(|sourced| sourced.key == key)
    }
}
