//! The settings of a model, as keys of a configuration: those of config.json, and what the variables say.
//!
//! | key | value |
//! |---|---|
//! | `model_type` | the name of the specification, such as `TransformerSpec` |
//! | the name of a scalar variable | its number; true or false if it is a flag for the scale of embeddings |
//! | `shapes`.NAME`.rows`, `.columns` | the shape of a matrix |
//! | `layers`.STACK | number of layers of `encoder` or `decoder` |
//! | `aliases`.NAME | the name of the variable of which this is another name |
//! | `eos_token_id`, `bos_token_id`, `decoder_start_token_id` | ids of the tokens that config.json names |
//!
//! In names of scalars and matrices, `layer_N` becomes `layer`, and the value is a list with one entry per
//! layer; an object by layers if some layers lack it.
//! Invariant: the number of entries is in proportion to the variables and aliases of the file.

use super::file::{ModelFile, Variable, VariableType};
use super::vocabulary::Vocabulary;
use crate::formats::HubConfig;
use anyhow::{Result, ensure};
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Exclusive upper limit of the numbers of layers.
const LAYERS_MAX: usize = 1 << 12;

/// The settings that may be a truth value or a number.
const FLAGS_OR_NUMBERS: [&str; 2] = ["scale_embeddings", "multiply_by_sqrt_depth"];

/// Settings by name, and by layer within those of layers.
#[derive(Default)]
struct Collected {
    settings: Map<String, Value>,
    by_layer: BTreeMap<String, BTreeMap<usize, Value>>,
    /// Number of layers of each stack.
    layers: BTreeMap<String, usize>,
}

/// Returns the settings of a model: `config` with those of the file. `shape` returns the shape of a matrix,
/// and `is_setting` whether a scalar is a setting.
pub(super) fn entries(
    config: Map<String, Value>,
    file: &ModelFile,
    bytes: &[u8],
    shape: impl Fn(&str) -> Option<[usize; 2]>,
    is_setting: impl Fn(&str) -> bool,
) -> Result<Map<String, Value>> {
    let (mut scalars, mut shapes) = (Collected::default(), Collected::default());
    for (name, variable) in &file.variables {
        if variable.shape.is_empty() && is_setting(name) {
            scalars.insert(name, number(name, variable, &bytes[variable.bytes.clone()])?)?;
        }
    }
    for name in file.variables.keys().chain(file.aliases.keys()) {
        if let Some([rows, columns]) = shape(name) {
            shapes.insert(name, json!({ "rows": rows, "columns": columns }))?;
        }
    }
    let layers = std::mem::take(&mut shapes.layers);
    let shapes: Map<String, Value> =
        shapes.finish().into_iter().map(|(name, sizes)| (name, turned(sizes))).collect();
    let mut entries = config;
    entries.extend(scalars.finish());
    entries.insert("model_type".to_owned(), file.specification.clone().into());
    entries.insert("shapes".to_owned(), shapes.into());
    entries.insert("layers".to_owned(), json!(layers));
    entries.insert("aliases".to_owned(), json!(file.aliases));
    Ok(entries)
}

/// Turns a list of shapes into lists of rows and columns.
fn turned(sizes: Value) -> Value {
    let Some(list) = sizes.as_array() else { return sizes };
    let all = |key: &str| -> Vec<Value> { list.iter().map(|shape| shape[key].clone()).collect() };
    json!({ "rows": all("rows"), "columns": all("columns") })
}

impl Collected {
    fn insert(&mut self, name: &str, value: Value) -> Result<()> {
        let parts: Vec<&str> = name.split('/').collect();
        let Some((at, layer)) = (0..).zip(&parts).find_map(|(at, part)| Some((at, layer_number(part)?)))
        else {
            self.settings.insert(name.to_owned(), value);
            return Ok(());
        };
        ensure!(layer < LAYERS_MAX, "variable '{name}': layers are numbered below {LAYERS_MAX}");
        let stack = self.layers.entry(parts[..at].join("/")).or_default();
        *stack = (layer + 1).max(*stack);
        let key = [&parts[..at], &["layer"], &parts[at + 1..]].concat().join("/");
        self.by_layer.entry(key).or_default().insert(layer, value);
        Ok(())
    }

    fn finish(self) -> Map<String, Value> {
        let mut settings = self.settings;
        for (name, by_layer) in self.by_layer {
            let is_whole = by_layer.keys().copied().eq(0..by_layer.len());
            let value = match is_whole {
                true => by_layer.into_values().collect(),
                false => json!(by_layer),
            };
            settings.insert(name, value);
        }
        settings
    }
}

/// Returns N of `layer_N`.
fn layer_number(part: &str) -> Option<usize> {
    let digits = part.strip_prefix("layer_")?;
    // Other spellings, such as `05`, would be further names of the same layer.
    digits.parse().ok().filter(|number: &usize| number.to_string() == digits)
}

fn number(name: &str, variable: &Variable, bytes: &[u8]) -> Result<Value> {
    let is_flag = name.rsplit('/').next().is_some_and(|last| FLAGS_OR_NUMBERS.contains(&last));
    let number = match (variable.ty, bytes) {
        (VariableType::I8, [byte]) if is_flag => return Ok((*byte != 0).into()),
        (VariableType::I8, [byte]) => (*byte as i8).into(),
        (VariableType::I16, [a, b]) => i16::from_le_bytes([*a, *b]).into(),
        (VariableType::I32, [a, b, c, d]) => i32::from_le_bytes([*a, *b, *c, *d]).into(),
        (VariableType::F32, [a, b, c, d]) => json!(f32::from_le_bytes([*a, *b, *c, *d])),
        (VariableType::F16, [a, b]) => json!(f16::from_le_bytes([*a, *b]).to_f32()),
        (VariableType::BF16, [a, b]) => json!(bf16::from_le_bytes([*a, *b]).to_f32()),
        _ => Value::Null,
    };
    ensure!(!number.is_null(), "variable '{name}': it is not finite");
    Ok(number)
}

/// Adds the ids of the tokens that config.json names. `start` is the decoder start token if it is not a
/// token of the vocabulary.
pub(super) fn add_token_ids(
    config: &HubConfig,
    target: &Vocabulary,
    start: Option<usize>,
    entries: &mut Map<String, Value>,
) -> Result<()> {
    let roles = [
        ("eos_token", "eos_token_id"),
        ("bos_token", "bos_token_id"),
        ("decoder_start_token", "decoder_start_token_id"),
    ];
    for (role, key) in roles {
        let Some(token) = config.opt_str(role)? else { continue };
        match target.id(token) {
            Some(id) => _ = entries.insert(key.to_owned(), id.into()),
            // A vocabulary without a begin token need not have a name for it.
            None if role == "bos_token" => {}
            None => {
                return Err(
                    config.key_error(role, format_args!("'{token}' is not a token of {}", target.file))
                );
            }
        }
    }
    if let Some(start) = start {
        entries.insert("decoder_start_token_id".to_owned(), start.into());
    }
    Ok(())
}
