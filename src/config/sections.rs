//! The sections of the configuration, each a struct of checked values for one consumer.
//!
//! Invariant: this is plain data; how it is written in files is defined in [`super::read`] and its parsers.

pub use super::device_sections::*;

use super::clients::{ApiKeys, KeyFile};
use crate::quantize::WeightRules;
use crate::request::client::ClientSettings;
use crate::request::{AcceptanceRule, DraftSource, ParamList, Pooling};
use mainstem_kernels::{Fraction, QuantType};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Duration;

/// The complete configuration, by consumer.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub model: ModelConfig,
    pub server: ServerConfig,
    pub scheduler: SchedulerConfig,
    pub kv: KvConfig,
    pub tiers: TierConfig,
    pub speculation: SpeculationConfig,
    pub device: DeviceConfig,
    pub faults: FaultPlan,
    pub hub: HubSettings,
    pub telemetry: TelemetryConfig,
    pub log: LogConfig,
    /// Messages about settings that are ignored, for the log.
    pub warnings: Vec<String>,
}

/// Options of the served model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A folder or a file, or `hf:owner/name[@revision]`; empty for the built-in demo model.
    pub path: String,
    /// Specification file; `None` uses the folder's own, else the built-in one for the model type.
    pub spec: Option<PathBuf>,
    /// Tokenizer file or folder; `None` uses the model's own.
    pub tokenizer: Option<PathBuf>,
    /// Tokenizer file or folder of an encoder-decoder's output; `None` uses the model's own.
    pub target_tokenizer: Option<PathBuf>,
    /// Chat template file; `None` uses the model's own.
    pub chat_template: Option<PathBuf>,
    /// Name of the format of tool calls, "auto" or "none".
    pub tool_parser: String,
    /// Name of the format of reasoning, "auto" or "none".
    pub reasoning_parser: String,
    pub sampling_defaults: SamplingDefaultsSource,
    /// Default sampling parameters, which override those of `sampling_defaults`.
    pub sampling: ParamList,
    /// Number formats in which matrices are loaded.
    pub weights: WeightRules,
    /// Whether the first chunks of prompts attend to keys and values of all heads, in models with latent
    /// attention.
    pub fast_openings: bool,
    /// Model name in the API; empty for the model's own.
    pub served_name: String,
    /// Pooling of an encoder's token states into one embedding; `None` follows the model's files.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are L2-normalized; `None` follows the model's files.
    pub normalize: Option<bool>,
    /// Tokens whose logits are the scores of a generative model; none if config.json decides.
    pub classifier_tokens: Vec<String>,
    /// The text that a classifier reads for a pair, if it is not that of the tokenizer.
    pub pair_template: Option<PairTemplate>,
}

/// The text that a classifier reads for a query and a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairTemplate {
    /// The text before the document, with `{query}` for the query.
    before: String,
    after: String,
}

impl PairTemplate {
    /// Parses a text with `{query}` and one `{document}`, or returns what is missing.
    pub fn parse(text: &str) -> Result<PairTemplate, String> {
        let (before, after) = text.split_once("{document}").ok_or("it has no {document}")?;
        let has_query = [before, after].iter().any(|part| part.contains("{query}"));
        match (has_query, after.contains("{document}")) {
            (false, _) => Err("it has no {query}".into()),
            (true, true) => Err("it has {document} more than once".into()),
            (true, false) => Ok(PairTemplate { before: before.to_owned(), after: after.to_owned() }),
        }
    }

    /// Returns the texts before and after the document, for a query.
    pub fn around(&self, query: &str) -> [String; 2] {
        [&self.before, &self.after].map(|part| part.replace("{query}", query))
    }
}

/// Source of default sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingDefaultsSource {
    /// The model's generation_config.json.
    Model,
    /// Temperature 1, without truncation.
    Neutral,
}

/// Options of the HTTP server.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: String,
    /// 0 picks a free port.
    pub port: u16,
    /// HTTP worker threads; at least 1.
    pub workers: usize,
    /// Maximum number of open connections, of all workers together; at least 1.
    pub max_connections: usize,
    /// Maximum number of open connections from one address; `None` is unlimited.
    pub max_connections_per_address: Option<NonZero<usize>>,
    /// Maximum size of a request body.
    pub body_limit_bytes: usize,
    /// Maximum memory of responses that are computed or not read yet, in bytes.
    pub response_bytes: usize,
    /// Memory of all long request bodies, and of parsing and tokenizing them.
    pub request_memory_bytes: usize,
    /// Time for which an idle connection stays open.
    pub keep_alive: Duration,
    /// Idle time of an event stream after which a comment is sent.
    pub stream_comment_interval: Duration,
    /// Time since the decode loop's last iteration after which requests in flight count as stalled.
    pub stalled_after: Duration,
    /// Value of the Retry-After header, in whole seconds; at least 1.
    pub retry_after: Duration,
    /// Maximum time from a request's arrival to its end; `None` is unlimited.
    pub request_timeout: Option<Duration>,
    /// Names of the model in the API beside its own.
    pub model_names: Vec<String>,
    /// Whether a request may name any model.
    pub accept_any_model: bool,
    pub unknown_fields: UnknownFieldsPolicy,
    /// Accepted API keys. If there are none here and in `api_key_file`, no key is required.
    pub api_keys: ApiKeys,
    /// File with further API keys.
    pub api_key_file: Option<KeyFile>,
    /// Origins allowed to use the API: `scheme://host[:port]`, or "*" alone. If empty, no cross-origin
    /// request is.
    pub cors_origins: Vec<String>,
    /// Host names that requests may be for, or "*" alone; if empty, they depend on the address.
    pub allowed_hosts: Vec<String>,
    pub metrics_access: MetricsAccess,
    /// Whether the web page is served.
    pub web: bool,
    /// File to which a line is appended for each request that ends.
    pub inflight_log: Option<PathBuf>,
    /// Address and port of a listener of its own for `/metrics`; `None` serves it with everything else.
    pub metrics_listener: Option<(String, NonZero<u16>)>,
    /// TLS certificate and key; `None` serves plain HTTP.
    pub tls: Option<TlsFiles>,
    pub grammar: GrammarConfig,
    /// Settings of clients without an API key, and defaults of those with one.
    pub clients: ClientSettings,
    pub batches: BatchConfig,
}

/// Options of files, batches and kept responses in the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchConfig {
    /// Folder of the files and the database; `None` for no such API.
    pub data_dir: Option<PathBuf>,
    /// Maximum size of an uploaded file, in bytes.
    pub file_limit_bytes: u64,
    /// Maximum size of all files of a client, in bytes.
    pub quota_bytes: u64,
    /// Maximum number of batches of a client that have not ended.
    pub max_batches: usize,
    /// Maximum number of requests of a batch.
    pub max_requests: usize,
    /// Time for which a file is kept if its upload does not say, and a batch after its end.
    pub retention: Duration,
    /// Maximum size of the responses that are kept for a client, in bytes.
    pub responses_quota_bytes: u64,
    /// Time for which a response is kept.
    pub responses_retention: Duration,
    /// Number of requests of a batch that are in flight at once.
    pub requests_at_once: usize,
}

/// Access to `/metrics` if API keys are configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsAccess {
    /// Everyone.
    Open,
    /// Clients with an API key.
    Key,
}

/// Options of constrained output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrammarConfig {
    /// Maximum number of grammars compiled at once; at least 1.
    pub threads: usize,
    /// Maximum number of compiled grammars that are kept; at least 1.
    pub cache_entries: usize,
    /// Maximum memory of compiled grammars that are kept, in bytes.
    pub cache_bytes: usize,
    /// Maximum size of a schema or grammar in a request, in bytes.
    pub text_bytes: usize,
}

/// The treatment of request fields that the server does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownFieldsPolicy {
    /// The field is ignored, and named in the log and in a response header.
    Ignore,
    /// The request is rejected.
    Reject,
}

/// PEM files for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate with its intermediate certificates.
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// Options of intake, prefill and decode.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Maximum number of sequences decoded at once; at least 1.
    pub slots: usize,
    /// Maximum number of queued sequences, in addition to the running ones.
    pub max_waiting: usize,
    /// Maximum rows of one step; more than `slots`.
    pub token_budget: usize,
    /// Whether no token budget was configured, so that steps which read weights from disk may have more rows.
    pub is_budget_auto: bool,
    /// Rows that are computed at once; `None` chooses them.
    pub batch_rows: Option<usize>,
    /// The time between two tokens of a stream that prompts leave it; `None` is any time.
    pub itl_target: Option<Duration>,
    pub policy: Policy,
    /// Whether holes between slots are closed.
    pub shuffle: bool,
    pub lanes: LaneCount,
    /// Whether a step may be sent before the results of the previous one.
    pub run_ahead: bool,
    /// Number of threads that draw and mask tokens on the host; `None` is as many as the machine has cores.
    pub sampling_threads: Option<NonZero<usize>>,
    /// Time that requests in flight may take to finish at shutdown.
    pub drain_timeout: Duration,
}

impl SchedulerConfig {
    /// Returns the number of requests of a batch that are in flight at once: those that run, and enough
    /// queued ones that each step can be filled.
    pub fn requests_at_once(&self) -> usize {
        self.slots + self.slots.max(QUEUED_MIN).min(self.max_waiting)
    }
}

/// Least number of requests of a batch that are queued, so that a slot that becomes free finds one.
const QUEUED_MIN: usize = 4;

/// The token budget if none is configured, and weights are in memory.
pub(super) const AUTO_TOKEN_BUDGET: usize = 512;

/// The number of lanes. A lane is a range of slots that has one step in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LaneCount {
    /// One lane per stage.
    PerStage,
    /// A fixed number; at least 1.
    Number(usize),
}

/// Batching policy: how requests share the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// New requests join the running batch at the next step.
    Fused,
    /// Requests that arrive within `window` run as one batch to completion.
    Window { window: Duration },
    /// Each request runs its own steps.
    Concurrent,
}

impl Policy {
    /// The policy's name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Fused => "fused",
            Policy::Window { .. } => "window",
            Policy::Concurrent => "concurrent",
        }
    }
}

/// Options of the KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvConfig {
    /// Data type of cached keys and values.
    pub ty: QuantType,
    /// Tokens per page; a multiple of [`PAGE_UNIT`].
    pub page_size: usize,
    pub size: KvSize,
    /// Maximum sequence length in tokens; `None` is the model's own limit.
    pub max_context: Option<usize>,
    /// Fraction of cached values attended to per generated token.
    pub sparse_attention: Fraction,
    /// Whether a prompt's leading tokens are found in the pages of earlier sequences.
    pub prefix_cache: bool,
}

/// Unit of the KV page size, in tokens: page sizes are multiples of it.
pub const PAGE_UNIT: usize = 32;

/// Size of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSize {
    /// A number of tokens.
    Tokens(usize),
    Bytes(u64),
    /// Room for a sequence of full context length in every slot, if memory allows.
    Auto,
}

/// Options of speculative decoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeculationConfig {
    /// The draft model: a folder or a file, `hf:owner/name[@revision]` or `demo-draft`; empty for none.
    pub draft: String,
    pub method: SpeculationMethod,
    /// Maximum number of drafts of a sequence in a step, from 1 to [`DRAFTS_MAX`].
    pub max_drafts: usize,
    /// The rule of requests that choose none.
    pub acceptance: AcceptanceRule,
    pub lookup: LookupSizes,
}

/// Upper limit of the drafts of a sequence in a step.
pub const DRAFTS_MAX: usize = 16;

/// Source of drafts for requests that choose none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpeculationMethod {
    /// The draft model if there is one; otherwise none.
    Auto,
    /// No speculative decoding, whatever requests choose.
    Off,
    Draft,
    PromptLookup,
}

/// Numbers of last tokens that prompt lookup searches for in the text before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupSizes {
    /// At least 1.
    pub min: usize,
    /// Tried first; at least `min`.
    pub max: usize,
}

impl LookupSizes {
    /// Returns prompt lookup with these sizes.
    pub fn drafter(self) -> DraftSource {
        DraftSource::PromptLookup { shortest: self.min, longest: self.max }
    }
}

impl SpeculationConfig {
    /// Returns whether no request can speculate.
    pub fn is_off(&self) -> bool {
        self.method == SpeculationMethod::Off
    }

    /// Returns the source of drafts of requests that choose none; `None` if these do not speculate.
    pub fn drafter(&self) -> Option<DraftSource> {
        match self.method {
            SpeculationMethod::Auto => (!self.draft.is_empty()).then_some(DraftSource::Model),
            SpeculationMethod::Off => None,
            SpeculationMethod::Draft => Some(DraftSource::Model),
            SpeculationMethod::PromptLookup => Some(self.lookup.drafter()),
        }
    }

    /// Returns the name of the draft model to load, if requests can use one.
    pub fn draft_model(&self) -> Option<&str> {
        (!self.draft.is_empty() && !self.is_off()).then_some(self.draft.as_str())
    }

    /// Returns a warning if a draft model is configured that is not loaded.
    pub fn warning(&self) -> Option<String> {
        let is_unused = !self.draft.is_empty() && self.is_off();
        is_unused.then(|| {
            format!("speculation.draft is {}, but not loaded: speculation.method is off", self.draft)
        })
    }
}

/// Options of hub downloads. Access tokens are not part of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubSettings {
    /// Download folder; `None` follows the environment (HF_HUB_CACHE, HF_HOME), else it is the usual folder
    /// in the user's home.
    pub cache: Option<PathBuf>,
    /// Hub URL; `None` follows the environment (HF_ENDPOINT), else it is the public hub.
    pub endpoint: Option<String>,
}

/// Options of traces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TelemetryConfig {
    /// The address that traces are sent to; `None` for no traces.
    pub traces: Option<TraceEndpoint>,
}

/// The address that traces are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TraceEndpoint {
    /// An address with its path.
    Url(String),
    /// The address in OpenTelemetry's environment variables.
    Environment,
}

/// Options of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    pub format: LogFormat,
    /// A level or filter directives.
    pub level: String,
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}
