//! Where the values of a model's specification come from.
//!
//! Invariant: a value is recorded together with its origin, where it is found.

use serde_json::Value;
use std::path::PathBuf;

/// The files a [`super::ModelSpec`] was made from, and what each gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Provenance {
    /// The specification file.
    pub specification: String,
    /// Values of config.json's `model_type` that it is for.
    pub model_types: Vec<String>,
    /// The model's config.json, or the file whose header takes its place.
    pub config: PathBuf,
    /// One entry for each value, in the order in which they were found.
    pub values: Vec<Sourced>,
}

/// A value with its origin.
#[derive(Clone, Debug, PartialEq)]
pub struct Sourced {
    /// Its place in the specification file, such as `attention.heads`.
    pub key: String,
    /// The layers that have it, ascending; empty for what is no layer's.
    pub layers: Vec<usize>,
    pub value: Value,
    pub origin: Origin,
}

/// Who said a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The specification file, outright.
    Specification,
    /// The model's configuration, under these keys.
    Config(Vec<String>),
    /// The specification file, for models whose configuration lacks this key.
    Default(String),
    /// Nobody: what the format of the configuration means when it says nothing.
    Format,
    /// Computed; the rule, in keys of the specification.
    Derived(&'static str),
    /// Computed, by this formula of the specification.
    Formula(String),
}

impl Provenance {
    /// The first entry of that key.
    pub fn get(&self, key: &str) -> Option<&Sourced> {
        self.values.iter().find(|sourced| sourced.key == key)
    }
}
