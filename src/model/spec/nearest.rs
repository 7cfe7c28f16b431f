//! The built-in specification that is nearest to a model, by its names of tensors and keys of config.json.
//!
//! Invariant: a specification that names nothing of the model is never the nearest.

use super::SpecFile;
use crate::formats::HubConfig;
use crate::specs;
use crate::tensor_names::matches;
use serde::Serialize;
use std::collections::BTreeSet;
use std::sync::LazyLock;
use toml::{Table, Value};

/// Each built-in specification, with its name and its names of tensors.
static BUILT_IN: LazyLock<Vec<(&str, SpecFile, BTreeSet<String>)>> = LazyLock::new(|| {
    let parsed = specs::ALL.iter().filter_map(|(file, text)| {
        let spec = SpecFile::parse(file, text).ok()?;
        let named = spec.tensor_names();
        Some((specs::name_of(file), spec, named))
    });
    parsed.collect()
});

/// Weight of the keys of config.json, which many families share, against the names of tensors.
const KEYS_WEIGHT: f64 = 0.3;

/// A built-in specification that has some of a model's names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Relative {
    /// The name by which a specification derives from it.
    pub name: &'static str,
    /// Names of the model's tensors that it has, without numbers and biases.
    pub known: usize,
    /// All such names of the model.
    pub names: usize,
}

/// Returns the built-in specification that is nearest to a model; `None` if none has a name of its tensors.
pub fn nearest<'a>(config: &HubConfig, tensors: impl Iterator<Item = &'a str>) -> Option<Relative> {
    let tensors: BTreeSet<String> = tensors.map(simplified).collect();
    let mut best: Option<(f64, Relative)> = None;
    for (name, spec, named) in BUILT_IN.iter() {
        let prefixes: Vec<String> = spec.text.prefixes.iter().map(|prefix| simplified(prefix)).collect();
        let optional = &spec.text.optional_prefixes;
        let is_known = |name: &String| {
            let shorter = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix.as_str()));
            let is_cut = || optional.iter().any(|prefix| named.contains(&format!("{prefix}{name}")));
            named.contains(name) || shorter.is_some_and(|name| named.contains(name)) || is_cut()
        };
        let known = tensors.iter().filter(|name| is_known(name)).count();
        let named_keys = spec.named.keys().filter(|key| !is_rotary(key)).count();
        let keys = config.keys().filter(|key| !is_rotary(key) && spec.named.contains_key(*key)).count();
        let keys = overlap(keys, config.keys().filter(|key| !is_rotary(key)).count(), named_keys);
        let score = coverage(known, tensors.len(), named.len()) + KEYS_WEIGHT * keys;
        if known > 0 && best.as_ref().is_none_or(|(most, _)| score > *most) {
            best = Some((score, Relative { name, known, names: tensors.len() }));
        }
    }
    best.map(|(_, relative)| relative)
}

/// Returns whether a key is of the rotary settings, which are read whether a specification names them or not.
fn is_rotary(key: &str) -> bool {
    key.starts_with("rope_")
}

/// Returns how much of a model's names a specification has, against names that only the specification has,
/// which belong to optional parts: the F measure that counts recall twice (van Rijsbergen 1979), from 0 to 1.
fn coverage(common: usize, of_model: usize, of_spec: usize) -> f64 {
    5.0 * common as f64 / (4 * of_model + of_spec).max(1) as f64
}

/// Returns how much two sets have in common, from 0 to 1 (Dice 1945).
fn overlap(common: usize, one: usize, other: usize) -> f64 {
    2.0 * common as f64 / (one + other).max(1) as f64
}

impl SpecFile {
    /// Returns the names of tensors that the file may require, or ignores.
    pub fn known_names(&self) -> KnownNames<'_> {
        KnownNames { spec: self, named: self.tensor_names() }
    }

    /// Returns the names of all tensors that the file may require, without numbers and biases.
    fn tensor_names(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        collect(&self.entries, &mut names);
        names
    }
}

/// The names of tensors that a specification may require, or ignores.
pub struct KnownNames<'a> {
    spec: &'a SpecFile,
    /// Without numbers and biases.
    named: BTreeSet<String>,
}

impl KnownNames<'_> {
    /// Returns whether the name of a tensor is one of them, with or without a prefix.
    pub fn contain(&self, tensor: &str) -> bool {
        let text = &self.spec.text;
        let plain = text.prefixes.iter().filter_map(|prefix| tensor.strip_prefix(prefix.as_str()));
        let longer: Vec<String> = text.optional_prefixes.iter().map(|cut| format!("{cut}{tensor}")).collect();
        plain.chain([tensor]).chain(longer.iter().map(String::as_str)).any(|name| {
            self.named.contains(&simplified(name))
                || text.ignored.iter().any(|pattern| matches(pattern, name))
        })
    }
}

/// Adds the names in all tables of tensors.
fn collect(entries: &Table, names: &mut BTreeSet<String>) {
    for (key, value) in entries {
        match value {
            Value::Table(tensors) if key == "tensors" => {
                let lists = tensors
                    .values()
                    .map(|value| value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice));
                names.extend(lists.flatten().filter_map(Value::as_str).map(simplified));
            }
            Value::Table(inner) => collect(inner, names),
            Value::Array(items) => {
                items.iter().filter_map(Value::as_table).for_each(|item| collect(item, names))
            }
            _ => {}
        }
    }
}

/// Returns a name or pattern with `#` for each number and placeholder, and of a bias the name of its weight.
fn simplified(name: &str) -> String {
    let name = ["{i}", "{e}", "{h}", "{g}", "{j}"]
        .iter()
        .fold(name.to_owned(), |name, mark| name.replace(mark, "0"));
    let mut simple = String::new();
    for c in name.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }) {
        if c != '#' || !simple.ends_with('#') {
            simple.push(c);
        }
    }
    for (bias, weight) in [(".bias", ".weight"), (".beta", ".gamma")] {
        if let Some(stem) = simple.strip_suffix(bias) {
            return format!("{stem}{weight}");
        }
    }
    simple
}
