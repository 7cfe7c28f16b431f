//! `mainstem inspect`: what a model is made of, who said so, and the memory that serving it takes.
//!
//! Invariant: no weight is read. Sizes come from the functions that the engine itself allocates by.

mod text;

use super::spinner::{self, Spinner};
use super::start;
use crate::actors::engine::{EngineSetup, available_memory};
use crate::config::{Config, ConfigError, Overrides};
use crate::formats::{Folder, GenerationConfig, HubConfig};
use crate::model::executor::{ExecutorReport, page_bytes};
use crate::model::provenance::{Origin, Provenance};
use crate::model::source::{ModelRef, ModelSource, SourceKind};
use crate::model::tensors::{self, Needed};
use crate::telemetry;
use anyhow::{Context, Result};
use clap::{Args, ValueHint};
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

const EXAMPLES: &str = "Examples:
  mainstem inspect models/llama
  mainstem inspect hf:owner/name@main --slots 64 --max-context 4096 --kv-type bf16
  mainstem inspect stories.bin --json";

/// Show what a model is made of and what it needs.
///
/// Architecture, the specification in force with the origin of each value, tensors, end tokens, and memory
/// for a number of sequences. Weights are not loaded.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct InspectArgs {
    /// Folder, file or hf:owner/name[@revision]; without one, the built-in demo model
    #[arg(value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model: Option<String>,
    #[command(flatten)]
    sizes: SizeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// What the memory is reckoned for.
#[derive(Debug, Args)]
struct SizeArgs {
    /// Specification file to read the model by, instead of the one that ships for its type.
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,
    /// Configuration file (TOML); its sizes are those of `serve`.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Sequences at once.
    #[arg(long, value_name = "N")]
    slots: Option<u32>,
    /// Longest prompt and answer together, in tokens; 0 is the model's own limit.
    #[arg(long, value_name = "N")]
    max_context: Option<u32>,
    /// Number format of keys and values.
    #[arg(long, value_parser = ["f32", "f16", "bf16"])]
    kv_type: Option<String>,
}

/// How the answer looks.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArgs {
    /// Answer in JSON, every tensor included.
    #[arg(long)]
    json: bool,
    /// List every tensor, not one line for those that are alike in all layers.
    #[arg(long)]
    tensors: bool,
}

impl InspectArgs {
    /// The configuration that `serve` would have with these flags, and what the answer looks like.
    pub fn config(self) -> Result<(Config, OutputArgs), ConfigError> {
        let SizeArgs { spec, config, slots, max_context, kv_type } = self.sizes;
        let mut flags = Overrides::default();
        flags.set("model.path", self.model);
        flags.set("model.spec", spec.map(|path| path.to_string_lossy().into_owned()));
        flags.set("scheduler.slots", slots);
        flags.set("kv.max_context", max_context);
        flags.set("kv.type", kv_type);
        Ok((Config::of_process(config.as_deref(), flags)?, self.output))
    }
}

/// Looks at the configured model and prints what it finds.
pub fn run(args: InspectArgs) -> Result<()> {
    let (config, output) = args.config()?;
    telemetry::start_log(&config.log, || spinner::Stderr);
    let inspection = Inspection::of(config)?;
    let text = match output.json {
        true => serde_json::to_string_pretty(&inspection)? + "\n",
        false if output.tensors => text::whole(&inspection),
        false => text::summary(&inspection),
    };
    match std::io::stdout().write_all(text.as_bytes()) {
        // Whoever reads has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("cannot write the answer"),
    }
}

/// All there is to say of a model. Its field names are the keys of the JSON form.
#[derive(Debug, Serialize)]
pub struct Inspection {
    pub name: String,
    pub path: PathBuf,
    /// The files with the tensors.
    pub files: Vec<PathBuf>,
    pub architecture: Architecture,
    pub specification: Specification,
    pub tensors: Vec<Tensor>,
    /// In the files, and rightly unused.
    pub unused: Vec<Unused>,
    pub tokenizer: Tokenizer,
    pub end_tokens: EndTokens,
    /// What generation_config.json recommends, by its own keys.
    pub sampling: Map<String, Value>,
    /// What it wants beside, and is not served.
    pub unserved: Map<String, Value>,
    pub memory: Memory,
}

/// Sizes in numbers, dimensions and tokens; each is explained in `specification` by its key there.
#[derive(Debug, Serialize)]
pub struct Architecture {
    /// Values of `model_type` that the specification is for.
    pub family: Vec<String>,
    pub parameters: usize,
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub mlp_width: usize,
    pub activation: Value,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub norm: Value,
    pub norm_eps: f32,
    pub rope_style: Value,
    pub rope_dims: usize,
    pub rope_theta: f64,
    pub rope_scaling: Value,
    pub vocab: usize,
    pub context: usize,
    pub tied_head: bool,
}

/// The specification in force.
#[derive(Debug, Serialize)]
pub struct Specification {
    pub file: String,
    pub config: PathBuf,
    pub values: Vec<SpecificationValue>,
}

#[derive(Debug, Serialize)]
pub struct SpecificationValue {
    pub key: &'static str,
    pub value: Value,
    /// `specification`, `config`, `default`, `format` or `derived`.
    pub origin: &'static str,
    /// The keys, or the rule, it was found by.
    pub by: Vec<String>,
}

#[derive(Debug, Serialize)]
pub struct Tensor {
    pub name: String,
    pub role: &'static str,
    /// The name with `{i}` for the layer.
    pub pattern: String,
    pub layer: Option<usize>,
    #[serde(rename = "type")]
    pub ty: &'static str,
    pub shape: Vec<usize>,
    pub bytes: usize,
}

#[derive(Debug, Serialize)]
pub struct Unused {
    pub name: String,
    pub bytes: usize,
    pub why: &'static str,
}

#[derive(Debug, Serialize)]
pub struct Tokenizer {
    /// Why there is none.
    pub error: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct EndTokens {
    pub ids: Vec<u32>,
    pub said_by: Option<&'static str>,
}

/// Bytes, but where the name says otherwise.
#[derive(Debug, Serialize)]
pub struct Memory {
    pub device: String,
    pub kv_type: &'static str,
    pub slots: usize,
    /// Tokens of the longest sequence asked for.
    pub context_tokens: usize,
    /// Tokens of the longest sequence for which there is room.
    pub longest_tokens: usize,
    pub page_positions: usize,
    pub weights: usize,
    pub kv_per_token: usize,
    pub kv_per_sequence: usize,
    /// For all slots at the longest sequence asked for, and the sink.
    pub kv_for_slots: usize,
    /// What the engine takes at start: the same, or less where the configuration or free memory bounds it.
    pub kv: usize,
    pub activations: usize,
    pub step_buffers: usize,
    pub total: usize,
    pub free: usize,
}

impl Inspection {
    /// Opens the configured model and looks at it.
    pub fn of(mut config: Config) -> Result<Inspection> {
        config.model = start::fetched(config.model, &config.hub)?;
        let model = ModelRef::parse(&config.model.path)?;
        let _spinner = Spinner::start("opening the model");
        let mut source = start::source(&model, &config.model)?;
        let tokenizer = start::tokenizer(&source);
        let mut end_tokens =
            end_tokens(&source, tokenizer.as_ref().ok().and_then(|tokenizer| tokenizer.eos_id()))?;
        source.eos.clone_from(&end_tokens.ids);
        let setup = EngineSetup::new(&config, &source)?;
        end_tokens.ids.clone_from(&setup.model.eos);
        let forecast = start::forecast(&config.device, &source, &setup)?;
        let tensors: Vec<Tensor> =
            tensors::needed(&source.spec).map(|needed| tensor(&source, needed)).collect::<Result<_>>()?;
        Ok(Inspection {
            name: setup.model.name.clone(),
            path: source.path.clone(),
            files: source.checkpoint.files().map(PathBuf::from).collect(),
            architecture: architecture(&source, &tensors),
            specification: specification(&source.spec.provenance),
            unused: unused(&source, &tensors),
            tensors,
            tokenizer: Tokenizer { error: tokenizer.err().map(|error| format!("{error:#}")) },
            end_tokens,
            sampling: sampling(&source)?,
            unserved: source.unserved.clone(),
            memory: memory(&source, &setup, &forecast)?,
        })
    }
}

fn architecture(source: &ModelSource, tensors: &[Tensor]) -> Architecture {
    let spec = &source.spec;
    let said = |key| spec.provenance.get(key).map_or(Value::Null, |sourced| sourced.value.clone());
    Architecture {
        family: spec.provenance.model_types.clone(),
        parameters: tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum(),
        layers: spec.layers,
        hidden: spec.hidden,
        heads: spec.attention.heads,
        kv_heads: spec.attention.kv_heads,
        head_dim: spec.attention.head_dim,
        mlp_width: spec.mlp.width,
        activation: said("mlp.activation"),
        attention_bias: spec.attention.bias,
        mlp_bias: spec.mlp.bias,
        norm: said("norm.kind"),
        norm_eps: spec.norm_eps,
        rope_style: said("position.style"),
        rope_dims: spec.rope.dims,
        rope_theta: spec.rope.config.theta,
        rope_scaling: said("position.scaling"),
        vocab: spec.vocab,
        context: spec.context,
        tied_head: spec.tied_head,
    }
}

fn specification(provenance: &Provenance) -> Specification {
    let values = provenance.values.iter().map(|sourced| {
        let (origin, by) = match &sourced.origin {
            Origin::Specification => ("specification", vec![sourced.key.to_owned()]),
            Origin::Config(keys) => ("config", keys.clone()),
            Origin::Default(key) => ("default", vec![key.clone()]),
            Origin::Format => ("format", Vec::new()),
            Origin::Derived(rule) => ("derived", vec![(*rule).to_owned()]),
        };
        SpecificationValue { key: sourced.key, value: sourced.value.clone(), origin, by }
    });
    Specification {
        file: provenance.specification.clone(),
        config: provenance.config.clone(),
        values: values.collect(),
    }
}

fn tensor(source: &ModelSource, needed: Needed) -> Result<Tensor> {
    let name = needed.name();
    let stored = source.checkpoint.tensor(&name).expect("it was there at opening; anything else is a bug");
    Ok(Tensor {
        ty: stored.quant_type()?.name(),
        bytes: stored.bytes_len(),
        role: needed.role,
        layer: needed.layer,
        pattern: needed.pattern,
        shape: needed.shape,
        name,
    })
}

fn unused(source: &ModelSource, used: &[Tensor]) -> Vec<Unused> {
    let used: BTreeMap<&str, &Tensor> = used.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let rest = source.checkpoint.tensors().filter(|tensor| !used.contains_key(tensor.name));
    let why = |name: &str| match tensors::is_tied_head(&source.spec, name) {
        true => "the head is the embedding",
        false => "the specification ignores it",
    };
    rest.map(|tensor| Unused {
        name: tensor.name.to_owned(),
        bytes: tensor.bytes_len(),
        why: why(tensor.name),
    })
    .collect()
}

/// The end tokens that serving would use, and who names them.
fn end_tokens(source: &ModelSource, tokenizer_eos: Option<u32>) -> Result<EndTokens> {
    let said_by = match &source.kind {
        _ if source.eos.is_empty() => tokenizer_eos.map(|_| "tokenizer"),
        SourceKind::Llama2c => Some("format"),
        SourceKind::HubFolder(folder) if generation(source, folder)?.eos.is_empty() => Some("config.json"),
        SourceKind::HubFolder(_) => Some("generation_config.json"),
        SourceKind::Synthetic => None,
    };
    let ids = if source.eos.is_empty() { tokenizer_eos.into_iter().collect() } else { source.eos.clone() };
    Ok(EndTokens { ids, said_by })
}

fn sampling(source: &ModelSource) -> Result<Map<String, Value>> {
    let said = match &source.kind {
        SourceKind::HubFolder(folder) => generation(source, folder)?,
        SourceKind::Llama2c | SourceKind::Synthetic => GenerationConfig::default(),
    };
    let values = [
        ("do_sample", said.do_sample.map(Value::from)),
        ("temperature", said.sampling.temperature.map(as_written)),
        ("top_p", said.sampling.top_p.map(as_written)),
        ("top_k", said.sampling.top_k.map(Value::from)),
        ("min_p", said.sampling.min_p.map(as_written)),
    ];
    Ok(values.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect())
}

/// A number with the few digits that name it in single precision, not the many of its double.
fn as_written(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// What generation_config.json says itself, with nothing filled in from config.json.
fn generation(source: &ModelSource, folder: &Folder) -> Result<GenerationConfig> {
    let nothing = HubConfig::from_entries(&source.spec.provenance.config, Map::new());
    GenerationConfig::from_folder(folder, &nothing)
}

fn memory(source: &ModelSource, setup: &EngineSetup, forecast: &ExecutorReport) -> Result<Memory> {
    let (limits, kv) = (&setup.limits, setup.kv);
    let page = page_bytes(source, kv.ty, limits.page_positions).context("a page is too large")?;
    let pages_each = setup.model.context.div_ceil(limits.page_positions);
    let kv_per_sequence = pages_each.saturating_mul(page);
    let ExecutorReport { weight_bytes, kv_bytes, activation_bytes, step_bytes, .. } = *forecast;
    Ok(Memory {
        device: forecast.device.clone(),
        kv_type: kv.ty.name(),
        slots: limits.slots,
        context_tokens: setup.model.context,
        longest_tokens: limits.positions,
        page_positions: limits.page_positions,
        weights: weight_bytes,
        kv_per_token: page / limits.page_positions,
        kv_per_sequence,
        kv_for_slots: kv_per_sequence.saturating_mul(limits.slots).saturating_add(page),
        kv: kv_bytes,
        activations: activation_bytes,
        step_buffers: step_bytes,
        total: weight_bytes + kv_bytes + activation_bytes + step_bytes,
        free: available_memory(),
    })
}
