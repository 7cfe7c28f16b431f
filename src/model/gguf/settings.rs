//! Reads settings from a GGUF file one by one and combines them into one configuration.
//!
//! Invariant: for every setting the name in the file is known, whether the file has it or not.

use super::{ARCH, IdSources, ScaledSource, ValueSource};
use crate::formats::gguf::GgufValue as Stored;
use crate::formats::{Checkpoint, Gguf, HubConfig};
use crate::tensor_names;
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The table of rotary position settings, and its keys that concern scaling.
const ROPE: &str = "rope_scaling";
const ROPE_TYPE: &str = "rope_type";
const ROPE_FACTOR: &str = "factor";
const ROPE_CONTEXT: &str = "original_max_position_embeddings";
const ROPE_LONG: &str = "long_factor";
const ROPE_ATTENTION: &str = "attention_factor";

/// Maximum length of a string setting in bytes.
const TEXT_BYTES_MAX: usize = 1 << 10;

/// Metadata key of the vocabulary, and the setting for its size.
const TOKENS: &str = "tokenizer.ggml.tokens";
pub(super) const VOCAB: &str = "vocab_size";

const NOT_FINITE: &str = "it is not finite";

pub(super) struct GgufSettings<'a> {
    gguf: &'a Gguf,
    checkpoint: &'a mut Checkpoint,
    architecture: &'a str,
    entries: Map<String, Value>,
    /// Name of each setting in the file.
    names: BTreeMap<String, String>,
}

impl<'a> GgufSettings<'a> {
    pub(super) fn new(gguf: &'a Gguf, checkpoint: &'a mut Checkpoint, architecture: &'a str) -> Self {
        let (entries, names) = Default::default();
        GgufSettings { gguf, checkpoint, architecture, entries, names }
    }

    /// Reads a setting from the first of its sources that the file has.
    pub(super) fn read_setting(&mut self, key: &str, sources: &[ValueSource]) -> Result<()> {
        for source in sources {
            let (name, value) = self.read_source(source)?;
            if let Some(value) = value {
                self.set(key, value);
                self.names.insert(key.to_owned(), name);
                return Ok(());
            }
            self.names.entry(key.to_owned()).or_insert(name);
        }
        Ok(())
    }

    /// Returns all settings as a configuration.
    pub(super) fn finish(mut self) -> Result<HubConfig> {
        self.normalize_rope_scaling()?;
        Ok(HubConfig::from_entries(self.gguf.path(), self.entries).with_file_keys(self.names))
    }

    /// Returns the source's name in the file, and its value if the file has it.
    fn read_source(&mut self, source: &ValueSource) -> Result<(String, Option<Value>)> {
        Ok(match source {
            ValueSource::Key(name) => {
                let name = self.expand_key(name);
                let value = scalar(self.gguf, &name)?;
                (name, value)
            }
            ValueSource::Scaled(ScaledSource { key, by }) => {
                let name = self.expand_key(key);
                let value = scalar(self.gguf, &name)?;
                let number = value.map(|value| {
                    value
                        .as_f64()
                        .with_context(|| format!("{}: '{name}' is not a number", self.gguf.path().display()))
                });
                let number = number.transpose()?.filter(|number| *number != 0.0);
                (name, number.map(|number| (number * by).into()))
            }
            ValueSource::Count(name) => {
                let name = self.expand_key(name);
                let value = array_length(self.gguf, &name);
                (name, value)
            }
            ValueSource::Ids(ids) => self.token_ids(ids)?,
            ValueSource::Has(tensors) => self.tensor_exists(tensors, true),
            ValueSource::Lacks(tensors) => self.tensor_exists(tensors, false),
            ValueSource::Numbers(tensor) => (tensor.clone(), self.take_numbers(tensor)?),
        })
    }

    fn expand_key(&self, pattern: &str) -> String {
        pattern.replace(ARCH, self.architecture)
    }

    /// Returns `found` and the tensor's name if one of the tensors exists, otherwise the opposite. `{i}` is
    /// the number of any layer.
    fn tensor_exists(&self, tensors: &[String], found: bool) -> (String, Option<Value>) {
        let exists = |tensor: &&String| match tensor.contains("{i}") {
            true => self.checkpoint.names().any(|name| tensor_names::matches(tensor, name)),
            false => self.checkpoint.tensor(tensor).is_some(),
        };
        match tensors.iter().find(exists) {
            Some(one) => (one.clone(), Some(found.into())),
            None => (tensors.join(", "), Some((!found).into())),
        }
    }

    /// Returns the ids under the keys, then those of the named tokens, each once.
    fn token_ids(&self, IdSources { keys, named }: &IdSources) -> Result<(String, Option<Value>)> {
        let (mut ids, mut found_in) = (Vec::new(), Vec::new());
        for key in keys.iter().map(|key| self.expand_key(key)) {
            let Some(id) = self.gguf.opt_id(&key)? else { continue };
            self.check_id(&key, id)?;
            found_in.push(key);
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
        let others: Vec<u32> = self.tokens_named(named)?.into_iter().filter(|id| !ids.contains(id)).collect();
        if !others.is_empty() {
            found_in.push(TOKENS.to_owned());
            ids.extend(others);
        }
        let name = if found_in.is_empty() { self.expand_key(&keys.join(", ")) } else { found_in.join(", ") };
        Ok((name, (!ids.is_empty()).then(|| ids.into())))
    }

    /// Checks an id against the size of the vocabulary, if that is known.
    fn check_id(&self, key: &str, id: u32) -> Result<()> {
        match self.vocab() {
            Some(vocab) if u64::from(id) >= vocab => Err(self
                .gguf
                .key_error(key, format_args!("token {id} is not in the vocabulary of {vocab} tokens"))),
            _ => Ok(()),
        }
    }

    fn vocab(&self) -> Option<u64> {
        self.entries.get(VOCAB).and_then(Value::as_u64)
    }

    /// Returns the ids of the tokens with these texts, without ids beyond the model's vocabulary.
    fn tokens_named(&self, names: &[String]) -> Result<Vec<u32>> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let tokens = self.gguf.opt_strings(TOKENS)?.unwrap_or_default();
        let vocab = self.vocab().unwrap_or(0);
        let called = (0..).zip(tokens).filter(|(_, token)| names.iter().any(|name| name == token));
        Ok(called.map(|(id, _)| id).filter(|id| u64::from(*id) < vocab).collect())
    }

    /// Returns the numbers of a vector and removes it from the weights.
    fn take_numbers(&mut self, name: &str) -> Result<Option<Value>> {
        const MOST: usize = 1 << 16;
        let Some(tensor) = self.checkpoint.tensor(name) else { return Ok(None) };
        let file = || format!("{}: tensor '{name}'", tensor.file.display());
        let (ty, count) = (tensor.quant_type()?, tensor.shape.iter().product());
        ensure!(
            tensor.shape.len() == 1 && count <= MOST,
            "{}: the shape {:?} is not that of a short vector",
            file(),
            tensor.shape
        );
        let mut numbers = vec![0.0; count];
        ty.dequantize(&tensor.bytes(), &mut numbers);
        let numbers = numbers.into_iter().map(shortest_decimal).collect::<Option<Vec<_>>>();
        let numbers = numbers.with_context(|| format!("{}: some of its numbers are not finite", file()))?;
        self.checkpoint.remove(name);
        Ok(Some(numbers.into()))
    }

    /// Sets a key; a dot separates a section from its key.
    fn set(&mut self, key: &str, value: Value) {
        match key.split_once('.') {
            None => _ = self.entries.insert(key.to_owned(), value),
            Some((section, key)) => _ = self.section(section).insert(key.to_owned(), value),
        }
    }

    fn section(&mut self, name: &str) -> &mut Map<String, Value> {
        let section = self.entries.entry(name).or_insert_with(|| Value::Object(Map::new()));
        section.as_object_mut().expect("the table has no value of the same name; this is a bug")
    }

    /// Adds a type to RoPE scaling that lacks one, and removes scaling that has no effect.
    fn normalize_rope_scaling(&mut self) -> Result<()> {
        let Some(Value::Object(rope)) = self.entries.get_mut(ROPE) else { return Ok(()) };
        let stored_type = rope.get(ROPE_TYPE).and_then(Value::as_str);
        let implied_types = match stored_type {
            None => [(ROPE_LONG, "longrope"), (ROPE_FACTOR, "linear")].as_slice(),
            Some("none") => &[(ROPE_LONG, "longrope")],
            Some(_) => &[],
        };
        if let Some((key, kind)) = implied_types.iter().find(|(key, _)| rope.contains_key(*key)) {
            rope.insert(ROPE_TYPE.to_owned(), (*kind).into());
            let name = self.names.get(&format!("{ROPE}.{key}")).cloned().unwrap_or_default();
            self.names.insert(format!("{ROPE}.{ROPE_TYPE}"), name);
        }
        let number = |key: &str| rope.get(key).and_then(Value::as_f64).filter(|x| ![0.0, 1.0].contains(x));
        let kind = rope.get(ROPE_TYPE).and_then(Value::as_str).unwrap_or("none");
        if let Some(factor) = number(ROPE_ATTENTION).filter(|_| kind != "longrope") {
            let name = self.names.get(&format!("{ROPE}.{ROPE_ATTENTION}")).map_or("", String::as_str);
            return Err(self.gguf.key_error(name, format_args!("{factor} is only supported with longrope")));
        }
        if kind == "none" || kind == "linear" && number(ROPE_FACTOR).is_none() {
            [ROPE_TYPE, ROPE_FACTOR, ROPE_CONTEXT].iter().for_each(|key| _ = rope.remove(*key));
        }
        if rope.is_empty() {
            self.entries.remove(ROPE);
        }
        Ok(())
    }
}

/// Returns a scalar of the metadata as JSON; arrays and long strings are errors.
pub(super) fn scalar(gguf: &Gguf, key: &str) -> Result<Option<Value>> {
    Ok(Some(match gguf.value(key) {
        None => return Ok(None),
        Some(Stored::Unsigned(whole)) => (*whole).into(),
        Some(Stored::Signed(whole)) => (*whole).into(),
        Some(Stored::Bool(flag)) => (*flag).into(),
        Some(Stored::String(bytes)) if bytes.len() > TEXT_BYTES_MAX => {
            return Err(gguf.key_error(
                key,
                format_args!("a string of {} bytes is too long for a setting", bytes.len()),
            ));
        }
        Some(Stored::String(_)) => gguf.str(key)?.into(),
        Some(Stored::F32(single)) => {
            shortest_decimal(*single).ok_or_else(|| gguf.key_error(key, NOT_FINITE))?
        }
        Some(Stored::F64(double)) if double.is_finite() => (*double).into(),
        Some(Stored::F64(_)) => return Err(gguf.key_error(key, NOT_FINITE)),
        Some(Stored::Array(array)) => {
            let reason = format!("it has {} values, but one value for all layers is required", array.len);
            return Err(gguf.key_error(key, reason));
        }
    }))
}

/// Returns whether two values are equal; numbers are compared by value.
pub(super) fn values_equal(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// Returns the length of a metadata array.
fn array_length(gguf: &Gguf, key: &str) -> Option<Value> {
    match gguf.value(key) {
        Some(Stored::Array(array)) => Some(array.len.into()),
        _ => None,
    }
}

/// Converts a number to the shortest decimal that reads back as the same F32; `None` if it is not finite.
fn shortest_decimal(single: f32) -> Option<Value> {
    let double = single.to_string().parse::<f64>().ok().filter(|number| number.is_finite());
    double.map(Value::from)
}
