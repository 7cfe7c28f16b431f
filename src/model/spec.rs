//! The specification of a model: how known blocks are wired and what their tensors are called.
//!
//! A specification file (TOML, `specs/`) makes the choices; where a number belongs it may name the key of
//! the model's config.json that holds it. Both together give a [`ModelSpec`], in which everything is known.
//!
//! Invariant: a `ModelSpec` holds no memory sizes, no devices and no model names.

use crate::formats::{HubConfig, RopeConfig};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::{Activation, RopeStyle};
use serde::Deserialize;
use std::path::Path;

/// A model's architecture with every number in place.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers of the decoder.
    pub layers: usize,
    /// Positions the model was made for.
    pub context: usize,
    /// Added to the mean of squares in every RMS norm.
    pub norm_eps: f32,
    pub attention: AttentionSpec,
    pub rope: RopeSpec,
    pub mlp: MlpSpec,
    /// The head shares the embedding's matrix.
    pub tied_head: bool,
    pub tensors: TensorNames,
}

/// Self-attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    /// Consecutive query heads share one; divides `heads`.
    pub kv_heads: usize,
    pub head_dim: usize,
    /// All four projections have a bias.
    pub bias: bool,
}

/// Rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub style: RopeStyle,
    /// Leading dimensions of each head that are rotated.
    pub dims: usize,
    pub config: RopeConfig,
}

/// The gated MLP: down(act(gate(x)) * up(x)).
#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    pub width: usize,
    pub activation: Activation,
    pub bias: bool,
}

/// Names of the tensors; `{i}` stands for the layer.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorNames {
    pub embedding: String,
    pub attention_norm: String,
    pub q: String,
    pub k: String,
    pub v: String,
    pub o: String,
    pub mlp_norm: String,
    pub gate: String,
    pub up: String,
    pub down: String,
    pub norm: String,
    pub head: String,
    /// Tensors a file may hold and nobody needs.
    pub ignored: Vec<String>,
}

/// The specification file, as written.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpecFile {
    /// Values of config.json's `model_type` this file is for.
    pub model_types: Vec<String>,
    size: SizeTable,
    norm: NormTable,
    attention: AttentionTable,
    position: PositionTable,
    mlp: MlpTable,
    head: HeadTable,
    tensors: TensorNames,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SizeTable {
    vocab: Setting<usize>,
    hidden: Setting<usize>,
    layers: Setting<usize>,
    context: Setting<usize>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum NormTable {
    Rms { eps: Setting<f64> },
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct AttentionTable {
    heads: Setting<usize>,
    kv_heads: Option<Setting<usize>>,
    head_dim: Option<Setting<usize>>,
    bias: Setting<bool>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum PositionTable {
    Rope { style: RopeStyleName },
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum RopeStyleName {
    Halves,
    Interleaved,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum MlpTable {
    Gated { width: Setting<usize>, activation: Setting<String>, bias: Setting<bool> },
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadTable {
    tied: Setting<bool>,
}

/// A value of a specification: written there, or looked up in config.json.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Setting<T> {
    Fixed(T),
    Keyed(Keyed<T>),
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Keyed<T> {
    key: String,
    default: Option<T>,
}

/// The specifications that ship with the program: (file name, text).
pub const SHIPPED: [(&str, &str); 2] = [
    ("specs/llama.toml", include_str!("../../specs/llama.toml")),
    ("specs/llama2c.toml", include_str!("../../specs/llama2c.toml")),
];

impl SpecFile {
    /// Reads a specification; errors name `file`, and line and key where the text is at fault.
    pub fn parse(file: &str, text: &str) -> Result<SpecFile> {
        toml::from_str(text).with_context(|| format!("{file} is not a model specification"))
    }

    /// The shipped specification for a config.json's `model_type`.
    pub fn for_model_type(model_type: &str) -> Result<SpecFile> {
        let mut known = Vec::new();
        for (file, text) in SHIPPED {
            let spec = SpecFile::parse(file, text)?;
            if spec.model_types.iter().any(|t| t == model_type) {
                return Ok(spec);
            }
            known.extend(spec.model_types);
        }
        bail!(
            "no shipped specification is for model_type '{model_type}' (known: {}); give one with --spec FILE",
            known.join(", ")
        )
    }

    /// The specification with the numbers of `config` in it.
    pub fn resolve(self, config: &HubConfig) -> Result<ModelSpec> {
        let NormTable::Rms { eps } = self.norm;
        let PositionTable::Rope { style } = self.position;
        let MlpTable::Gated { width, activation, bias } = self.mlp;
        let hidden = self.size.hidden.get(config)?;
        let heads = positive("number of heads", self.attention.heads.get(config)?)
            .with_context(|| format!("{} describes an impossible model", config.file().display()))?;
        let kv_heads = optional(self.attention.kv_heads, config)?.unwrap_or(heads);
        let head_dim = optional(self.attention.head_dim, config)?.unwrap_or(hidden / heads);
        let spec = ModelSpec {
            vocab: self.size.vocab.get(config)?,
            hidden,
            layers: self.size.layers.get(config)?,
            context: self.size.context.get(config)?,
            norm_eps: eps.get(config)? as f32,
            attention: AttentionSpec { heads, kv_heads, head_dim, bias: self.attention.bias.get(config)? },
            rope: RopeSpec {
                style: match style {
                    RopeStyleName::Halves => RopeStyle::Halves,
                    RopeStyleName::Interleaved => RopeStyle::Interleaved,
                },
                dims: head_dim,
                config: RopeConfig::from_config(config)?,
            },
            mlp: MlpSpec {
                width: width.get(config)?,
                activation: activation_named(&activation.get(config)?, config.file())?,
                bias: bias.get(config)?,
            },
            tied_head: self.head.tied.get(config)?,
            tensors: self.tensors,
        };
        spec.check().with_context(|| format!("{} describes an impossible model", config.file().display()))?;
        Ok(spec)
    }
}

impl ModelSpec {
    /// Width of all query heads together.
    pub fn q_width(&self) -> usize {
        self.attention.heads * self.attention.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_width(&self) -> usize {
        self.attention.kv_heads * self.attention.head_dim
    }

    /// Bounds no real model comes near, so that products of sizes cannot overflow.
    fn check(&self) -> Result<()> {
        const LARGEST: usize = 1 << 24;
        for (name, value) in [
            ("vocabulary size", self.vocab),
            ("hidden size", self.hidden),
            ("number of layers", self.layers),
            ("context", self.context),
            ("number of heads", self.attention.heads),
            ("number of KV heads", self.attention.kv_heads),
            ("head dimension", self.attention.head_dim),
            ("MLP width", self.mlp.width),
        ] {
            positive(name, value)?;
            ensure!(value <= LARGEST, "the {name} is {value}, more than {LARGEST}");
        }
        let AttentionSpec { heads, kv_heads, head_dim, .. } = self.attention;
        ensure!(heads % kv_heads == 0, "{heads} heads cannot share {kv_heads} KV heads evenly");
        ensure!(self.q_width() <= LARGEST, "{heads} heads of {head_dim} are more than {LARGEST}");
        ensure!(
            self.rope.dims.is_multiple_of(2),
            "rotary positions need an even head dimension, not {head_dim}"
        );
        ensure!(self.norm_eps > 0.0 && self.norm_eps < 1.0, "a norm epsilon of {} is none", self.norm_eps);
        Ok(())
    }
}

impl TensorNames {
    /// The name of a per-layer tensor in one layer.
    pub fn in_layer(pattern: &str, layer: usize) -> String {
        pattern.replace("{i}", &layer.to_string())
    }

    /// Whether a tensor may stand in a file unused.
    pub fn is_ignored(&self, name: &str) -> bool {
        self.ignored.iter().any(|pattern| match pattern.split_once("{i}") {
            None => pattern == name,
            Some((before, after)) => name
                .strip_prefix(before)
                .and_then(|rest| rest.strip_suffix(after))
                .is_some_and(|layer| !layer.is_empty() && layer.bytes().all(|b| b.is_ascii_digit())),
        })
    }
}

fn positive(name: &str, value: usize) -> Result<usize> {
    ensure!(value > 0, "the {name} is 0");
    Ok(value)
}

fn activation_named(name: &str, file: &Path) -> Result<Activation> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        other => bail!("{}: activation '{other}' is not known (known: silu)", file.display()),
    }
}

fn optional<T: Lookup>(setting: Option<Setting<T>>, config: &HubConfig) -> Result<Option<T>> {
    match setting {
        None => Ok(None),
        Some(Setting::Fixed(value)) => Ok(Some(value)),
        Some(Setting::Keyed(Keyed { key, default })) => Ok(T::lookup(config, &key)?.or(default)),
    }
}

impl<T: Lookup> Setting<T> {
    fn get(self, config: &HubConfig) -> Result<T> {
        let key = match &self {
            Setting::Fixed(_) => String::new(),
            Setting::Keyed(keyed) => keyed.key.clone(),
        };
        optional(Some(self), config)?
            .with_context(|| format!("{}: the key '{key}' is missing", config.file().display()))
    }
}

/// What a [`Setting`] can be read as.
trait Lookup: Sized {
    fn lookup(config: &HubConfig, key: &str) -> Result<Option<Self>>;
}

impl Lookup for usize {
    fn lookup(config: &HubConfig, key: &str) -> Result<Option<usize>> {
        config.opt_usize(key)
    }
}

impl Lookup for f64 {
    fn lookup(config: &HubConfig, key: &str) -> Result<Option<f64>> {
        config.opt_f64(key)
    }
}

impl Lookup for bool {
    fn lookup(config: &HubConfig, key: &str) -> Result<Option<bool>> {
        config.opt_bool(key)
    }
}

impl Lookup for String {
    fn lookup(config: &HubConfig, key: &str) -> Result<Option<String>> {
        Ok(config.opt_str(key)?.map(str::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(extra: serde_json::Value) -> HubConfig {
        let mut entries = json!({
            "vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 100, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        });
        let (serde_json::Value::Object(base), serde_json::Value::Object(extra)) = (&mut entries, extra)
        else {
            unreachable!("both are objects")
        };
        base.extend(extra);
        HubConfig::from_entries(Path::new("config.json"), base.clone())
    }

    fn llama(extra: serde_json::Value) -> Result<ModelSpec> {
        SpecFile::for_model_type("llama").unwrap().resolve(&config(extra))
    }

    #[test]
    fn what_config_leaves_out_is_derived_or_has_its_default() {
        let spec = llama(json!({})).unwrap();
        assert_eq!((spec.attention.kv_heads, spec.attention.head_dim), (4, 12));
        assert_eq!((spec.tied_head, spec.attention.bias, spec.mlp.bias), (false, false, false));
        let spec =
            llama(json!({"num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": true})).unwrap();
        assert_eq!((spec.kv_width(), spec.q_width(), spec.tied_head), (20, 40, true));
    }

    #[test]
    fn impossible_numbers_are_refused_by_name() {
        for (extra, named) in [
            (json!({"num_key_value_heads": 3}), "3 KV heads"),
            (json!({"num_attention_heads": 0}), "heads"),
            (json!({"head_dim": 7}), "even"),
            (json!({"hidden_size": null}), "hidden_size"),
            (json!({"vocab_size": 1u64 << 60}), "vocab"),
            (json!({"num_attention_heads": 1 << 20, "head_dim": 1 << 20}), "more than"),
            (json!({"rms_norm_eps": 0.0}), "epsilon"),
            (json!({"hidden_act": "gelu"}), "'gelu'"),
        ] {
            let error = format!("{:#}", llama(extra.clone()).unwrap_err());
            assert!(error.contains(named) && error.contains("config.json"), "{extra}: {error}");
        }
    }

    #[test]
    fn a_specification_names_its_wrong_key_and_line() {
        let text = SHIPPED[0].1.replace("kv_heads = {", "kv_headz = {");
        let error = format!("{:#}", SpecFile::parse("mine.toml", &text).unwrap_err());
        assert!(
            error.contains("mine.toml") && error.contains("kv_headz") && error.contains("line"),
            "{error}"
        );
    }

    #[test]
    fn ignored_names_stand_for_every_layer_and_nothing_else() {
        let names = SpecFile::for_model_type("llama").unwrap().tensors;
        assert!(names.is_ignored("model.layers.31.self_attn.rotary_emb.inv_freq"));
        assert!(!names.is_ignored("model.layers.x.self_attn.rotary_emb.inv_freq"));
        assert!(!names.is_ignored("model.layers..self_attn.rotary_emb.inv_freq"));
        assert!(!names.is_ignored("model.layers.3.self_attn.q_proj.weight"));
    }
}
