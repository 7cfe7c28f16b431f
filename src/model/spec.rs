//! The specification of a model: how known blocks are wired and what their tensors are called.
//!
//! A specification file (TOML, `specs/`) makes the choices; where a number belongs it may name the key of
//! the model's config.json that holds it. Both together give a [`ModelSpec`], in which everything is known.
//!
//! Invariant: a `ModelSpec` holds no memory sizes, no devices and no model names.

use super::provenance::{Origin, Provenance, Sourced};
use crate::formats::{HubConfig, RopeConfig, RopeScaling};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::{Activation, RopeStyle};
use serde::Deserialize;
use serde_json::{Value, json};
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
    /// Who said all this.
    pub provenance: Provenance,
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
    /// Its name.
    #[serde(skip)]
    file: String,
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
        let spec: SpecFile =
            toml::from_str(text).with_context(|| format!("{file} is not a model specification"))?;
        Ok(SpecFile { file: file.to_owned(), ..spec })
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
        let impossible = || format!("{} describes an impossible model", config.file().display());
        let NormTable::Rms { eps } = self.norm;
        let PositionTable::Rope { style } = self.position;
        let MlpTable::Gated { width, activation, bias: mlp_bias } = self.mlp;
        let mut look = Lookups { config, values: Vec::new() };
        let vocab = look.up("size.vocab", self.size.vocab)?;
        let hidden = look.up("size.hidden", self.size.hidden)?;
        let layers = look.up("size.layers", self.size.layers)?;
        let context = look.up("size.context", self.size.context)?;
        look.said("norm.kind", "rms");
        let norm_eps = look.up("norm.eps", eps)? as f32;
        let heads = look.up("attention.heads", self.attention.heads)?;
        positive("number of heads", heads).with_context(impossible)?;
        let kv_heads = look.up_or("attention.kv_heads", self.attention.kv_heads, "attention.heads", heads)?;
        let by_width = hidden / heads;
        let head_dim = self.attention.head_dim;
        let head_dim =
            look.up_or("attention.head_dim", head_dim, "size.hidden / attention.heads", by_width)?;
        let bias = look.up("attention.bias", self.attention.bias)?;
        look.said("position.kind", "rope");
        let style = look.style(style);
        let rope = look.rope()?;
        look.record("position.dims", head_dim, Origin::Derived("attention.head_dim"));
        look.said("mlp.kind", "gated");
        let width = look.up("mlp.width", width)?;
        let activation = activation_named(&look.up("mlp.activation", activation)?, config.file())?;
        let mlp_bias = look.up("mlp.bias", mlp_bias)?;
        let tied_head = look.up("head.tied", self.head.tied)?;
        let spec = ModelSpec {
            vocab,
            hidden,
            layers,
            context,
            norm_eps,
            attention: AttentionSpec { heads, kv_heads, head_dim, bias },
            rope: RopeSpec { style, dims: head_dim, config: rope },
            mlp: MlpSpec { width, activation, bias: mlp_bias },
            tied_head,
            tensors: self.tensors,
            provenance: Provenance {
                specification: self.file,
                model_types: self.model_types,
                config: config.file().to_owned(),
                values: look.values,
            },
        };
        spec.check().with_context(impossible)?;
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

fn scaling(scaling: &RopeScaling) -> Value {
    match *scaling {
        RopeScaling::None => json!({"kind": "none"}),
        RopeScaling::Linear { factor } => json!({"kind": "linear", "factor": factor}),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "kind": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_context": original_context,
        }),
    }
}

/// Settings as they are looked up, each with who said it.
struct Lookups<'a> {
    config: &'a HubConfig,
    values: Vec<Sourced>,
}

impl Lookups<'_> {
    /// The setting's value.
    fn up<T: Lookup>(&mut self, key: &'static str, setting: Setting<T>) -> Result<T> {
        let (value, origin) = match setting {
            Setting::Fixed(value) => (value, Origin::Specification),
            Setting::Keyed(keyed) => {
                let missing = format!("{}: the key '{}' is missing", self.config.file().display(), keyed.key);
                keyed.value(self.config)?.context(missing)?
            }
        };
        Ok(self.record(key, value, origin))
    }

    /// The setting's value; without one, what `rule` gives.
    fn up_or<T: Lookup>(
        &mut self,
        key: &'static str,
        setting: Option<Setting<T>>,
        rule: &'static str,
        derived: T,
    ) -> Result<T> {
        let found = match setting {
            None => None,
            Some(Setting::Fixed(value)) => Some((value, Origin::Specification)),
            Some(Setting::Keyed(keyed)) => keyed.value(self.config)?,
        };
        let (value, origin) = found.unwrap_or((derived, Origin::Derived(rule)));
        Ok(self.record(key, value, origin))
    }

    fn style(&mut self, style: RopeStyleName) -> RopeStyle {
        let (name, style) = match style {
            RopeStyleName::Halves => ("halves", RopeStyle::Halves),
            RopeStyleName::Interleaved => ("interleaved", RopeStyle::Interleaved),
        };
        self.said("position.style", name);
        style
    }

    /// The rotary settings; the configuration has its own words for them.
    fn rope(&mut self) -> Result<RopeConfig> {
        let rope = RopeConfig::from_config(self.config)?;
        let keys = RopeConfig::keys(self.config)?;
        let origin = |keys: Vec<String>| if keys.is_empty() { Origin::Format } else { Origin::Config(keys) };
        self.record("position.theta", rope.theta, origin(keys.theta));
        self.record("position.scaling", scaling(&rope.scaling), origin(keys.scaling));
        Ok(rope)
    }

    /// Records one of the specification's choices.
    fn said(&mut self, key: &'static str, choice: &str) {
        self.record(key, choice.to_owned(), Origin::Specification);
    }

    fn record<T: Clone + Into<Value>>(&mut self, key: &'static str, value: T, origin: Origin) -> T {
        self.values.push(Sourced { key, value: value.clone().into(), origin });
        value
    }
}

impl<T: Lookup> Keyed<T> {
    fn value(self, config: &HubConfig) -> Result<Option<(T, Origin)>> {
        let Keyed { key, default } = self;
        Ok(match T::lookup(config, &key)? {
            Some(value) => Some((value, Origin::Config(vec![key]))),
            None => default.map(|value| (value, Origin::Default(key))),
        })
    }
}

/// What a [`Setting`] can be read as.
trait Lookup: Clone + Into<Value> {
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
    fn every_value_tells_who_said_it() {
        let spec = llama(json!({
            "num_key_value_heads": 2, "mlp_bias": true, "rope_theta": 5e5,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        }))
        .unwrap();
        let config = |key: &str| Origin::Config(vec![key.to_owned()]);
        for (key, value, origin) in [
            ("size.vocab", json!(320), config("vocab_size")),
            ("norm.kind", json!("rms"), Origin::Specification),
            ("norm.eps", json!(1e-5), config("rms_norm_eps")),
            ("attention.kv_heads", json!(2), config("num_key_value_heads")),
            ("attention.head_dim", json!(12), Origin::Derived("size.hidden / attention.heads")),
            ("attention.bias", json!(false), Origin::Default("attention_bias".to_owned())),
            ("position.style", json!("halves"), Origin::Specification),
            ("position.theta", json!(5e5), config("rope_theta")),
            ("position.scaling", json!({"kind": "linear", "factor": 2.0}), config("rope_scaling")),
            ("mlp.activation", json!("silu"), Origin::Default("hidden_act".to_owned())),
            ("mlp.bias", json!(true), config("mlp_bias")),
        ] {
            assert_eq!(spec.provenance.get(key), Some(&Sourced { key, value, origin }));
        }
        assert_eq!(spec.provenance.specification, "specs/llama.toml");
        assert_eq!(spec.provenance.config, Path::new("config.json"));
        let silent = llama(json!({})).unwrap().provenance;
        assert_eq!(silent.get("position.theta").unwrap().origin, Origin::Format);
        assert_eq!(silent.get("position.scaling").unwrap().origin, Origin::Format);
        let nested = llama(json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}})).unwrap();
        assert_eq!(nested.rope.config.theta, 5e5);
        assert_eq!(
            nested.provenance.get("position.theta").unwrap().origin,
            config("rope_parameters.rope_theta")
        );
        assert_eq!(silent.get("attention.kv_heads").unwrap().origin, Origin::Derived("attention.heads"));
    }

    /// Every number and choice of a specification file has its entry, under its own name.
    #[test]
    fn no_value_is_left_out() {
        let file: toml::Table = SHIPPED[0].1.parse().unwrap();
        let provenance = llama(json!({})).unwrap().provenance;
        for (section, table) in file.iter().filter(|(name, _)| *name != "tensors") {
            for name in table.as_table().into_iter().flat_map(toml::Table::keys) {
                assert!(provenance.get(&format!("{section}.{name}")).is_some(), "{section}.{name}");
            }
        }
        let mut keys: Vec<_> = provenance.values.iter().map(|sourced| sourced.key).collect();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "{keys:?}");
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
