//! `mainstem inspect`: shows a model's architecture, the source of each value, and the memory that serving it
//! needs.
//!
//! Invariant: no weights are read. Sizes come from the functions that the engine uses for allocation.

mod report;
mod text;

use super::flags::{ConfigFlags, ModelArgument, SpeculationFlags};
use super::spinner::Spinner;
use super::{print, start, start_log, to_json};
use crate::actors::PromptingDefaults;
use crate::actors::engine::EngineSetup;
use crate::actors::prompting_defaults::endpoints;
use crate::config::{Config, ConfigError, ModelConfig, Overrides};
use crate::formats::{GenerationConfig, HubConfig, PoolingConfig, sampling_keys};
use crate::model::TensorRecord;
use crate::model::executor::{ExecutorReport, page_bytes};
use crate::model::provenance::{Origin, Provenance};
use crate::model::source::{ModelSource, SourceKind};
use crate::model::spec::{Kind, MlpSpec, ModelSpec, TensorPart, TensorSlice};
use crate::model::tensor_slices;
use crate::model::tensors;
use crate::planner::DeviceAssignment;
use anyhow::{Context, Result};
use clap::Args;
pub use report::{
    Architecture, DeviceMemory, EndTokens, ExpertPlaces, Inspection, MemorySummary, OffloadedWeights,
    Specification, SpecificationValue, Speculation, Tensor, Tokenizer, Unused,
};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

const EXAMPLES: &str = "Examples:
  mainstem inspect models/llama
  mainstem inspect hf:owner/name@main --slots 64 --max-context 4096 --kv-type bf16
  mainstem inspect path/to/model --devices \"0&1;2&3\"   show the layers and heads of each device
  mainstem inspect stories.bin --json";

/// Show a model's architecture and memory requirements.
///
/// Prints the architecture, the effective specification with the source of each value, tensors, end tokens,
/// the part of each device, and the memory for a number of sequences. Weights are not loaded.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct InspectArgs {
    #[command(flatten)]
    path: ModelArgument,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    speculation: SpeculationFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Output options.
#[derive(Clone, Copy, Debug, Args)]
pub struct OutputArgs {
    /// Print JSON, with every tensor.
    #[arg(long)]
    json: bool,
    /// List every tensor instead of one line per tensor of all layers.
    #[arg(long)]
    tensors: bool,
}

impl InspectArgs {
    /// Returns the configuration that `serve` would have with these flags, and the output options.
    pub fn config(self) -> Result<(Config, OutputArgs), ConfigError> {
        let mut flags = Overrides::default();
        flags.set("model.path", self.path.name());
        self.speculation.add_to(&mut flags);
        let file = self.config.add_to(&mut flags);
        Ok((Config::from_process(file.as_deref(), flags)?, self.output))
    }
}

/// Inspects the configured model and prints the result.
pub fn run(args: InspectArgs) -> Result<()> {
    let (config, output) = args.config()?;
    start_log(&config)?;
    let inspection = Inspection::inspect(config)?;
    let text = match output.json {
        true => to_json(&inspection),
        false if output.tensors => text::full(&inspection),
        false => text::summary(&inspection),
    };
    print("inspection", &text)
}

impl Inspection {
    /// Opens the configured model and inspects it.
    pub fn inspect(mut config: Config) -> Result<Inspection> {
        config.model = start::fetch_model(config.model, &config.hub)?;
        config.speculation = start::fetch_draft(config.speculation, &config.hub)?;
        let model = start::configured_model(&config.model)?;
        let _spinner = Spinner::start("opening the model");
        let mut source = start::open_source(&model, &config.model)?;
        let tokenizer = start::open_tokenizer(&source);
        if let Ok(tokenizer) = &tokenizer {
            start::attach_draft(&config.speculation, &mut source, tokenizer)?;
        }
        start::place_tiers(&config, &mut source)?;
        let mut end_tokens =
            end_tokens(&source, tokenizer.as_ref().ok().and_then(|tokenizer| tokenizer.eos_id()))?;
        source.eos.clone_from(&end_tokens.ids);
        let setup = start::engine_setup(&config, &source)?;
        end_tokens.ids.clone_from(&setup.model.eos);
        let forecast = start::forecast(&config.device, &source, &setup)?;
        let tensors = needed_tensors(&source)?;
        let free = start::free_memory(&config.device)?;
        Ok(Inspection {
            name: setup.model.name.clone(),
            path: source.path.clone(),
            files: source.checkpoint.files().map(PathBuf::from).collect(),
            architecture: architecture(&source, &tensors, &config.model),
            specification: specification(&source.spec),
            unused: unused(&source, &tensors),
            tensors,
            tokenizer: tokenizer_report(tokenizer),
            end_tokens,
            prompting_defaults: prompting_defaults(&setup.model.prompting),
            sampling: sampling(&source)?,
            unsupported_settings: source.unsupported_settings.clone(),
            unread_keys: source.spec.provenance.unread_keys.clone(),
            speculation: setup.model.speculation.as_ref().and_then(Speculation::from_setup),
            partition: setup
                .assignments
                .iter()
                .flatten()
                .zip(forecast.iter().flatten())
                .map(device_memory)
                .collect(),
            memory: MemorySummary {
                device_memory: config.device.memory,
                ..memory(
                    (&source, &setup),
                    &start::merge_reports(forecast.into_iter().flatten().collect()),
                    free,
                )?
            },
        })
    }
}

fn architecture(source: &ModelSource, tensors: &[Tensor], config: &ModelConfig) -> Architecture {
    let spec = &source.spec;
    let stack = spec.last_stack();
    let own = if spec.kind == Kind::EncoderDecoder { "decoder." } else { "" };
    let value = |key| spec.provenance.get(&format!("{own}{key}")).map_or(Value::Null, |it| it.value.clone());
    let first = stack.layers.first().expect("a stack has a layer; anything else is a bug");
    let rope = first.attention.rope.map(|rope| &stack.ropes[rope]);
    let moe = stack.layers.iter().find_map(|layer| match &layer.mlp {
        MlpSpec::Experts(moe) => Some(moe),
        MlpSpec::Dense(_) => None,
    });
    let (mlp, mlp_width, mlp_bias) = match &first.mlp {
        MlpSpec::Experts(moe) => ("experts", moe.experts.first().map_or(0, |expert| expert.width), false),
        MlpSpec::Dense(dense) => {
            let kind = if dense.up.is_some() { "gated" } else { "ungated" };
            (kind, dense.width, dense.down.bias.is_some())
        }
    };
    let parameters = tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum::<usize>();
    Architecture {
        family: spec.provenance.model_types.clone(),
        model_type: spec.provenance.model_type.clone(),
        kind: spec.kind,
        serves: endpoints(source, config),
        parameters,
        bits: tensors.iter().map(|tensor| tensor.bytes).sum::<usize>() as f64 * 8.0
            / parameters.max(1) as f64,
        layers: stack.layers.len(),
        encoder_layers: spec.layers() - stack.layers.len(),
        hidden: spec.hidden,
        heads: first.attention.heads,
        kv_heads: first.attention.kv_heads,
        head_dim: first.attention.k_dim,
        mlp,
        mlp_width,
        experts: moe.map_or(0, |moe| moe.experts.len()),
        experts_per_token: moe.map_or(0, |moe| moe.top_k),
        activation: value("mlp.activation"),
        attention_bias: first.attention.q.bias.is_some(),
        mlp_bias,
        norm: value("norm.kind"),
        norm_eps: value("norm.eps"),
        positions: value("position.kind"),
        rope_style: rope.map_or(Value::Null, |rope| format!("{:?}", rope.style).to_lowercase().into()),
        rope_dims: rope.map_or(Value::Null, |rope| rope.dims.into()),
        rope_theta: rope.map_or(Value::Null, |rope| rope.config.theta.into()),
        rope_scaling: rope.map_or(Value::Null, |rope| rope.config.scaling.to_json()),
        vocab: spec.vocab,
        context: spec.context,
        encoder_context: spec.decoder.as_ref().map_or(0, |_| spec.encoder_context()),
        tied_head: stack.head.as_ref().map(|head| head.tied),
    }
}

fn specification(spec: &ModelSpec) -> Specification {
    let provenance: &Provenance = &spec.provenance;
    let values = provenance.values.iter().map(|sourced| {
        let (origin, by) = match &sourced.origin {
            Origin::Specification => ("specification", vec![sourced.key.clone()]),
            Origin::Config(keys) => ("config", keys.clone()),
            Origin::Default(key) => ("default", vec![key.clone()]),
            Origin::Format => ("format", Vec::new()),
            Origin::Derived(rule) => ("derived", vec![(*rule).to_owned()]),
            Origin::Formula(formula) => ("formula", vec![formula.clone()]),
        };
        let stack = match sourced.key.starts_with("encoder.") {
            true => spec.encoder.as_ref(),
            false => Some(spec.last_stack()),
        };
        let is_every = stack.is_some_and(|stack| stack.layers.len() == sourced.layers.len());
        let layers = if is_every { Vec::new() } else { sourced.layers.clone() };
        SpecificationValue { key: sourced.key.clone(), layers, value: sourced.value.clone(), origin, by }
    });
    Specification {
        file: provenance.specification.clone(),
        config: provenance.config.clone(),
        values: values.collect(),
    }
}

/// Returns every needed tensor once. Parts of a tensor may be loaded in different formats: all formats are
/// listed, and the bytes are added up.
fn needed_tensors(source: &ModelSource) -> Result<Vec<Tensor>> {
    let mut parts: HashMap<&str, Vec<TensorRecord>> = HashMap::new();
    for piece in tensors::required_slices(&source.spec) {
        let part = tensor_slices::slice_record(piece, source.load_type(piece));
        let known = parts.entry(&piece.name).or_default();
        // An embedding and a head tied to it are one part.
        if !matches!(piece.part, TensorPart::Whole) || known.is_empty() {
            known.push(part);
        }
    }
    let all = tensors::required_tensors(&source.spec).into_iter();
    all.map(|piece| tensor(source, piece, &parts[piece.name.as_str()])).collect()
}

fn tensor(source: &ModelSource, piece: &TensorSlice, parts: &[TensorRecord]) -> Result<Tensor> {
    let stored =
        source.checkpoint.tensor(&piece.name).expect("it was there at opening; anything else is a bug");
    let mut types: Vec<&str> = parts.iter().map(|part| part.ty.name()).collect();
    types.sort_unstable();
    types.dedup();
    let numbers = parts.iter().map(|part| part.shape.iter().product::<usize>()).sum::<usize>();
    let bytes = parts.iter().map(|part| part.bytes).sum();
    Ok(Tensor {
        ty: types.join(", "),
        stored: stored.stored_type_name().to_owned(),
        bytes,
        bits: bytes as f64 * 8.0 / numbers.max(1) as f64,
        role: piece.role,
        layer: piece.layer,
        pattern: piece.pattern.to_string(),
        shape: piece.shape.clone(),
        name: piece.name.clone(),
    })
}

fn unused(source: &ModelSource, used: &[Tensor]) -> Vec<Unused> {
    let used: BTreeMap<&str, &Tensor> = used.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let rest = source.checkpoint.tensors().filter(|tensor| !used.contains_key(tensor.name));
    let why = |name: &str| match tensors::is_tied_head(&source.spec, name) {
        true => "the head is the embedding",
        false => source.checkpoint.unused_reason(name).unwrap_or("the specification ignores it"),
    };
    rest.map(|tensor| Unused {
        name: tensor.name.to_owned(),
        bytes: tensor.bytes_len(),
        why: why(tensor.name),
    })
    .collect()
}

/// Returns whether the tokenizers can be opened, and their sizes.
fn tokenizer_report(tokenizer: Result<crate::text::Tokenizer>) -> Tokenizer {
    match tokenizer {
        Err(error) => Tokenizer { error: Some(format!("{error:#}")), tokens: None, source_tokens: None },
        Ok(tokenizer) => Tokenizer {
            error: None,
            tokens: Some(tokenizer.vocab_size()),
            source_tokens: tokenizer.has_two_vocabularies().then(|| tokenizer.source().vocab_size()),
        },
    }
}

/// Returns the end tokens that serving would use, and their source.
fn end_tokens(source: &ModelSource, tokenizer_eos: Option<u32>) -> Result<EndTokens> {
    let origin = match &source.kind {
        _ if source.eos.is_empty() => tokenizer_eos.map(|_| "tokenizer"),
        SourceKind::Llama2c => Some("format"),
        SourceKind::Synthetic => None,
        _ if !generation_config(source)?.eos.is_empty() => Some("generation_config.json"),
        SourceKind::HubFolder(_) => Some("config.json"),
        SourceKind::Gguf(_) => Some("GGUF metadata"),
    };
    let ids = if source.eos.is_empty() { tokenizer_eos.into_iter().collect() } else { source.eos.clone() };
    Ok(EndTokens { ids, source: origin })
}

fn prompting_defaults(prompting: &PromptingDefaults) -> Map<String, Value> {
    let values: Vec<(&str, Value)> = match prompting {
        PromptingDefaults::Decoder(None) => vec![],
        PromptingDefaults::Decoder(Some(defaults)) | PromptingDefaults::Encoder(defaults) => vec![
            match &defaults.pooling {
                PoolingConfig::Supported(pooling) => ("pooling", pooling.name().into()),
                PoolingConfig::Unsupported(setting) => ("unsupported_pooling", setting.to_string().into()),
            },
            ("normalize", defaults.normalize.into()),
            ("dimensions", defaults.dimensions.into()),
        ],
        PromptingDefaults::EncoderDecoder(decoder) => {
            vec![("decoder_start", decoder.start_token.into()), ("forced_bos", decoder.forced_bos.into())]
        }
    };
    let texts = prompting.embedding().into_iter().flat_map(|defaults| &defaults.unsupported);
    let texts: Vec<String> = texts.map(|it| it.to_string()).collect();
    let texts = (!texts.is_empty()).then(|| ("unsupported_texts", texts.join("; ").into()));
    values.into_iter().chain(texts).map(|(key, value)| (key.to_owned(), value)).collect()
}

fn sampling(source: &ModelSource) -> Result<Map<String, Value>> {
    let config = generation_config(source)?;
    let do_sample = config.do_sample.map(|on| ("do_sample".to_owned(), on.into()));
    let sampling = config.sampling.0.into_iter();
    let sampling = sampling.map(|(param, value)| (sampling_keys::key(&param).to_owned(), value));
    Ok(do_sample.into_iter().chain(sampling).collect())
}

/// Reads generation_config.json, without values from config.json; the default if there is no such file.
fn generation_config(source: &ModelSource) -> Result<GenerationConfig> {
    let nothing = HubConfig::from_entries(&source.spec.provenance.config, Map::new());
    match source.folder() {
        Some(folder) => GenerationConfig::from_folder(&folder, &nothing),
        None => Ok(GenerationConfig::default()),
    }
}

fn device_memory((assigned, forecast): (&DeviceAssignment, &ExecutorReport)) -> DeviceMemory {
    let ExecutorReport { weight_bytes, kv_bytes, activation_bytes, step_bytes, .. } = *forecast;
    DeviceMemory {
        assigned: assigned.clone(),
        weights: weight_bytes,
        kv: kv_bytes,
        activations: activation_bytes,
        step_buffers: step_bytes,
        total: forecast.total_bytes(),
    }
}

fn memory(
    (source, setup): (&ModelSource, &EngineSetup),
    forecast: &ExecutorReport,
    free: usize,
) -> Result<MemorySummary> {
    let (limits, kv) = (&setup.limits, setup.kv);
    let page = page_bytes(&source.spec, kv.ty, limits).context("a page is too large")?;
    // Pages of the sequence and of its encoder input.
    let pages_each = setup.model.context.div_ceil(limits.page_positions) + limits.cross_table_len();
    let in_window = limits.window.map_or(0, |window| limits.pages_of_window(window));
    let kv_per_sequence = page.of(pages_each, in_window);
    let ExecutorReport { weight_bytes, kv_bytes, activation_bytes, step_bytes, .. } = *forecast;
    Ok(MemorySummary {
        device: forecast.device.clone(),
        kv_type: kv.ty.name(),
        slots: limits.slots,
        context_tokens: setup.model.context,
        longest_tokens: setup.model.max_sequence_tokens,
        page_size: limits.page_positions,
        weights: weight_bytes,
        kv_per_token: page.of(1, 1) / limits.page_positions,
        kv_per_sequence,
        kv_for_slots: kv_per_sequence
            .saturating_mul(limits.slots)
            .saturating_add(page.of(1, usize::from(in_window > 0))),
        kv: kv_bytes,
        activations: activation_bytes,
        step_buffers: step_bytes,
        total: forecast.total_bytes(),
        kv_on_disk: forecast.cache_offload.map_or(0, |caches| caches.file_bytes),
        kv_on_host: forecast.host_bytes()[1],
        device_memory: None,
        offload: forecast.offload.as_ref().map(OffloadedWeights::from_report),
        free,
    })
}
