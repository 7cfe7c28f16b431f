//! The result of an inspection as data: architecture, specification, tensors and memory.

use crate::actors::speculation::SpeculationSetup;
use crate::model::offload::OffloadReport;
use crate::model::spec::Kind;
use crate::planner::DeviceAssignment;
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// The result of an inspection. Its field names are the keys of the JSON output.
#[derive(Debug, Serialize)]
pub struct Inspection {
    pub name: String,
    pub path: PathBuf,
    /// The files with the tensors.
    pub files: Vec<PathBuf>,
    pub architecture: Architecture,
    pub specification: Specification,
    pub tensors: Vec<Tensor>,
    /// Tensors of the files that the model does not need.
    pub unused: Vec<Unused>,
    pub tokenizer: Tokenizer,
    pub end_tokens: EndTokens,
    /// Prompting defaults of a model with an encoder.
    pub prompting_defaults: Map<String, Value>,
    /// Sampling parameters that generation_config.json recommends, by its keys.
    pub sampling: Map<String, Value>,
    /// Further features that the model requests and the server does not support.
    pub unsupported_settings: Map<String, Value>,
    /// Keys of config.json that nothing reads, and that may change what the model computes.
    pub unread_keys: Vec<String>,
    /// Speculative decoding; absent if it is off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<Speculation>,
    /// The part of each device, stage by stage, by rank.
    pub partition: Vec<DeviceMemory>,
    pub memory: MemorySummary,
}

/// Speculative decoding, as requests have it that choose nothing else.
#[derive(Debug, Serialize)]
pub struct Speculation {
    /// Source of drafts.
    pub method: &'static str,
    pub max_drafts: usize,
    pub acceptance: &'static str,
    /// The draft model, if there is one; its weights are in the memory of the device that holds it.
    pub draft: Option<Draft>,
}

/// A draft model.
#[derive(Debug, Serialize)]
pub struct Draft {
    pub name: String,
    /// Bytes of its weights as loaded.
    pub weights: usize,
    pub context: usize,
}

impl Speculation {
    /// Returns the facts of an engine's speculative decoding; `None` if requests that choose nothing do not
    /// speculate.
    pub fn from_setup(setup: &SpeculationSetup) -> Option<Speculation> {
        let draft = setup.draft.clone();
        setup.drafter.map(|drafter| Speculation {
            method: drafter.name(),
            max_drafts: setup.max_drafts,
            acceptance: setup.acceptance.name(),
            draft: draft.map(|it| Draft { name: it.name, weights: it.weight_bytes, context: it.context }),
        })
    }
}

/// The part of a model that one device holds: layers and heads, and its memory in bytes.
#[derive(Debug, Serialize)]
pub struct DeviceMemory {
    #[serde(flatten)]
    pub assigned: DeviceAssignment,
    pub weights: usize,
    pub kv: usize,
    pub activations: usize,
    pub step_buffers: usize,
    pub total: usize,
}

/// Architecture of the stack that produces the output: the decoder, or the encoder of an encoder-only model.
/// `specification` has the source of each value. Where layers differ, the values are those of the first
/// layer.
#[derive(Debug, Serialize)]
pub struct Architecture {
    /// Values of `model_type` that the specification covers.
    pub family: Vec<String>,
    /// The model's own `model_type`; null if it has none.
    pub model_type: Option<String>,
    /// `decoder`, `encoder` or `encoder_decoder`.
    pub kind: Kind,
    /// Supported API endpoints.
    pub serves: Vec<&'static str>,
    pub parameters: usize,
    /// Average bits per parameter as loaded.
    pub bits: f64,
    pub layers: usize,
    /// Layers of the encoder before a decoder; else 0.
    pub encoder_layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub mlp: &'static str,
    pub mlp_width: usize,
    /// Experts per layer; 0 if the layers have none.
    pub experts: usize,
    /// Experts that process each token; 0 if the layers have none.
    pub experts_per_token: usize,
    pub activation: Value,
    pub attention_bias: bool,
    pub mlp_bias: bool,
    pub norm: Value,
    pub norm_eps: Value,
    pub positions: Value,
    pub rope_style: Value,
    pub rope_dims: Value,
    pub rope_theta: Value,
    pub rope_scaling: Value,
    pub vocab: usize,
    pub context: usize,
    /// Maximum length of the encoder input; 0 without an encoder before a decoder.
    pub encoder_context: usize,
    /// Whether the head is the embedding matrix; null without a head.
    pub tied_head: Option<bool>,
}

/// The effective specification.
#[derive(Debug, Serialize)]
pub struct Specification {
    pub file: String,
    pub config: PathBuf,
    pub values: Vec<SpecificationValue>,
}

/// A value of the specification with its source.
#[derive(Debug, Serialize)]
pub struct SpecificationValue {
    pub key: String,
    /// Layers with this value; absent if all layers have it, or if the value is not per layer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<usize>,
    pub value: Value,
    /// `specification`, `config`, `default`, `format`, `derived` or `formula`.
    pub origin: &'static str,
    /// Keys or rule that gave the value.
    pub by: Vec<String>,
}

/// A tensor that the model needs.
#[derive(Debug, Serialize)]
pub struct Tensor {
    pub name: String,
    pub role: &'static str,
    /// Name with `{i}` for the layer number.
    pub pattern: String,
    pub layer: Option<usize>,
    /// Number formats in which it is loaded.
    #[serde(rename = "type")]
    pub ty: String,
    /// Number format in which it is stored.
    pub stored: String,
    pub shape: Vec<usize>,
    /// Bytes as loaded.
    pub bytes: usize,
    /// Bits per number, including scales.
    pub bits: f64,
}

/// A tensor of the files that the model does not need.
#[derive(Debug, Serialize)]
pub struct Unused {
    pub name: String,
    pub bytes: usize,
    /// The reason why it is not needed.
    pub why: &'static str,
}

/// Whether the tokenizer can be opened.
#[derive(Debug, Serialize)]
pub struct Tokenizer {
    /// The reason why the tokenizer cannot be opened; null if it can.
    pub error: Option<String>,
    /// Number of tokens; null if the tokenizer cannot be opened.
    pub tokens: Option<usize>,
    /// Number of tokens of the encoder input's tokenizer; null if it has none of its own.
    pub source_tokens: Option<usize>,
}

/// The end tokens and their source.
#[derive(Debug, Serialize)]
pub struct EndTokens {
    pub ids: Vec<u32>,
    /// File or format that names the end tokens; null if nothing does.
    pub source: Option<&'static str>,
}

/// Memory requirements, in bytes unless the name says otherwise.
#[derive(Debug, Serialize)]
pub struct MemorySummary {
    pub device: String,
    pub kv_type: &'static str,
    pub slots: usize,
    /// Configured maximum sequence length in tokens, without the encoder input.
    pub context_tokens: usize,
    /// Maximum sequence length in tokens that fits the cache.
    pub longest_tokens: usize,
    /// KV page size in tokens.
    pub page_size: usize,
    pub weights: usize,
    pub kv_per_token: usize,
    pub kv_per_sequence: usize,
    /// KV cache for sequences of maximum length in all slots, plus the null page.
    pub kv_for_slots: usize,
    /// KV cache that the engine allocates: the same, or less if configured or if memory is short.
    pub kv: usize,
    pub activations: usize,
    pub step_buffers: usize,
    pub total: usize,
    /// KV caches of layers that are in a file; 0 if all stay in memory.
    pub kv_on_disk: usize,
    /// KV caches of layers that are in the memory of the host; 0 if devices have no memory of their own.
    pub kv_on_host: usize,
    /// Bytes of each device's own memory; null if devices have that of the host.
    pub device_memory: Option<u64>,
    /// The places of the layers' weights; `None` if all stay in memory.
    pub offload: Option<OffloadedWeights>,
    pub free: usize,
}

/// The places of the weights of layers that do not all stay in memory, in bytes.
#[derive(Debug, Serialize)]
pub struct OffloadedWeights {
    /// Weights that stay in the memory of the devices.
    pub resident: usize,
    /// Weights in the memory of the host, which are copied in each pass through all layers.
    pub host: usize,
    /// Weights that are read from disk in each pass through all layers.
    pub streamed: usize,
    /// Buffers for weights that are read.
    pub buffers: usize,
    /// Experts of mixtures; `None` if all stay in memory, or there are none.
    pub experts: Option<ExpertPlaces>,
    /// Folders of the files that they are read from, one per device.
    pub stores: Vec<PathBuf>,
}

/// The places of experts that are read when rows choose them.
#[derive(Debug, Serialize)]
pub struct ExpertPlaces {
    /// Number of experts, and their bytes.
    pub experts: usize,
    pub bytes: usize,
    /// Number of experts that are in memory at the same time, and the bytes of the pool that they are in.
    pub pool_experts: usize,
    pub pool: usize,
}

impl OffloadedWeights {
    /// Returns the places as the devices report them.
    pub fn from_report(report: &OffloadReport) -> OffloadedWeights {
        let OffloadReport { experts, expert_bytes: bytes, pool_experts, pool_bytes: pool, .. } = *report;
        OffloadedWeights {
            resident: report.resident_bytes,
            host: report.host_bytes,
            streamed: report.streamed_bytes,
            buffers: report.buffer_bytes,
            experts: (experts > 0).then_some(ExpertPlaces { experts, bytes, pool_experts, pool }),
            stores: report.stores.clone(),
        }
    }
}
