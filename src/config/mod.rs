//! Typed configuration. Layers (the defaults, a file, the environment, the command line) are merged, then
//! each key is parsed and checked once and stored in the struct of its consumer. The defaults are the file
//! `config/mainstem.toml`, compiled in, so that they are written in one place.
//!
//! Invariant: all values outside this module are checked, and no other module reads keys or `MAINSTEM_`
//! variables. A file that a value names is opened by its consumer, at start and before the weights are
//! loaded.

mod aliases;
mod devices;
mod layers;
mod reference;
mod values;

pub use devices::{DeviceName, Groups, format_groups};
pub use layers::{ConfigError, ConfigSource, Overrides};
pub use reference::reference;

use crate::model::weight_rules::WeightRules;
use crate::request::Pooling;
use layers::{CONFIG_FILE_VARIABLE, Environment, LayeredSettings, variable_name};
use mainstem_kernels::cpu::Isa;
use mainstem_kernels::{ActivationPrecision, Fraction, QuantType};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use values::{
    duration, integer, log_level, non_empty_string, non_zero_duration, one_of, string, whole_seconds,
};

/// Text of `config/mainstem.toml`: every key with its default and a comment.
pub const DEFAULTS: &str = include_str!("../../config/mainstem.toml");

/// The complete configuration, by consumer.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub model: ModelConfig,
    pub server: ServerConfig,
    pub scheduler: SchedulerConfig,
    pub kv: KvConfig,
    pub device: DeviceConfig,
    pub hub: HubSettings,
    pub log: LogConfig,
}

/// Options of the served model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A folder or a file, or `hf:owner/name[@revision]`; empty for the built-in demo model.
    pub path: String,
    /// Specification file; `None` uses the folder's own, else the built-in one for the model type.
    pub spec: Option<PathBuf>,
    /// Chat template file; `None` uses the model's own.
    pub chat_template: Option<PathBuf>,
    pub sampling_defaults: SamplingDefaultsSource,
    /// Number formats in which matrices are loaded.
    pub weights: WeightRules,
    /// Model name in the API; empty for the model's own.
    pub served_name: String,
    /// How an encoder's token states are pooled into one embedding; `None` follows the model's files.
    pub pooling: Option<Pooling>,
    /// Whether embeddings are L2-normalized; `None` follows the model's files.
    pub normalize: Option<bool>,
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
    /// Maximum size of a request body.
    pub body_limit_bytes: usize,
    /// How long an idle connection stays open.
    pub keep_alive: Duration,
    /// Idle time of an event stream after which a comment is sent.
    pub stream_comment_interval: Duration,
    /// Time since the decode loop's last iteration after which requests in flight count as stalled.
    pub stalled_after: Duration,
    /// Value of the Retry-After header, in whole seconds; at least 1.
    pub retry_after: Duration,
    /// Maximum time from a request's arrival to its end; `None` is unlimited.
    pub request_timeout: Option<Duration>,
    /// Accepted API keys. If there are none here and in `api_key_file`, no key is required.
    pub api_keys: ApiKeys,
    /// File with further API keys.
    pub api_key_file: Option<KeyFile>,
    /// Origins allowed to use the API: `scheme://host[:port]`, or "*" alone. If empty, no cross-origin
    /// request is.
    pub cors_origins: Vec<String>,
    /// TLS certificate and key; `None` serves plain HTTP.
    pub tls: Option<TlsFiles>,
}

/// API keys, each non-empty printable ASCII. The `Debug` form shows only their number.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKeys(pub Vec<String>);

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// A file of API keys, one per line. It is opened only where keys are checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    pub path: PathBuf,
    /// Source of the path.
    origin: ConfigSource,
}

impl ServerConfig {
    /// Returns all API keys, including the current ones of the key file. If the file cannot be read or has no
    /// key, the error has the source of its path.
    pub fn load_api_keys(&self) -> Result<ApiKeys, ConfigError> {
        let mut keys = self.api_keys.0.clone();
        if let Some(KeyFile { path, origin }) = &self.api_key_file {
            let fault = |reason| {
                let message = format!("{API_KEY_FILE} = {:?}: {reason}", path.display().to_string());
                ConfigError { origin: origin.clone(), message }
            };
            keys.extend(values::read_api_key_file(path).map_err(fault)?);
        }
        Ok(ApiKeys(keys))
    }
}

const API_KEY_FILE: &str = "server.api_key_file";

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
    /// Maximum number of queued requests, in addition to the running ones.
    pub max_waiting: usize,
    /// Maximum rows of one step; more than `slots`.
    pub token_budget: usize,
    pub policy: Policy,
    /// Whether holes between slots are closed.
    pub shuffle: bool,
    pub lanes: LaneCount,
    /// How long requests in flight may take to finish at shutdown.
    pub drain_timeout: Duration,
}

/// The number of lanes. A lane is a range of slots whose micro-batch has one step in flight.
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

/// Options of the devices.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceConfig {
    /// The stages, at least one, each with at least one device.
    pub groups: Groups,
    /// Layers per stage, encoder and decoder layers together; if empty, they are divided by speed, and by
    /// memory where devices have their own.
    pub layers: Vec<usize>,
    /// Relative share of its stage per rank, at least 1; if empty, all shares are equal.
    pub shares: Vec<Vec<u32>>,
    pub experts: ExpertPlacement,
    /// Maximum time of a step; `None` is unlimited.
    pub step_timeout: Option<Duration>,
    /// Compute threads per device; at least 1.
    pub threads: usize,
    pub isa: Isa,
    /// Activation precision in GEMMs with quantized or bf16 weights.
    pub activation_precision: ActivationPrecision,
}

impl DeviceConfig {
    /// Iterates over all devices, stage by stage, in rank order.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceName> {
        self.groups.iter().flatten()
    }

    /// Returns the relative shares of a stage's ranks.
    pub fn stage_shares(&self, stage: usize) -> Vec<u32> {
        self.shares.get(stage).cloned().unwrap_or_else(|| vec![1; self.groups[stage].len()])
    }

    /// Returns this configuration with other groups and the automatic split of layers and shares.
    pub fn regrouped(&self, groups: &[Vec<DeviceName>]) -> DeviceConfig {
        DeviceConfig { groups: groups.to_vec(), layers: Vec::new(), shares: Vec::new(), ..self.clone() }
    }

    /// Whether layers and shares are the defaults.
    pub fn has_default_split(&self) -> bool {
        self.layers.is_empty() && self.shares.iter().flatten().all(|share| *share == 1)
    }
}

/// How the ranks of a stage split a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlacement {
    /// Each rank has a part of every expert.
    Column,
    /// Each rank has some of the experts.
    Expert,
}

/// Compute backend of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Reference,
    /// No arithmetic: a step takes `step` plus `row` for each of its rows.
    Fake {
        step: Duration,
        row: Duration,
    },
}

impl DeviceKind {
    /// The backend's name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Reference => "reference",
            DeviceKind::Fake { .. } => "fake",
        }
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

impl Config {
    /// Loads the configuration from the defaults (those of `flags` replace the general ones), `file` if
    /// given, and the flags. The environment is ignored.
    pub fn load(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        Config::from_layers(file, Environment::new(), flags)
    }

    /// Loads the configuration like [`Config::load`], with the process's environment between file and flags.
    /// If `file` is `None`, the variable `MAINSTEM_CONFIG` may name the file.
    pub fn from_process(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        Config::from_layers(file, layers::process_environment(), flags)
    }

    fn from_layers(
        file: Option<&Path>,
        mut environment: Environment,
        flags: Overrides,
    ) -> Result<Config, ConfigError> {
        let named = environment.remove(CONFIG_FILE_VARIABLE).filter(|path| !path.is_empty());
        let mut settings = LayeredSettings::new();
        settings.add_defaults(&flags);
        if let Some(path) = file.or(named.as_deref().map(Path::new)) {
            settings.add_file(path)?;
        }
        settings.add_environment(environment)?;
        settings.add_flags(flags)?;
        settings.config()
    }
}

impl LayeredSettings {
    fn config(&self) -> Result<Config, ConfigError> {
        Ok(Config {
            model: self.model()?,
            server: self.server()?,
            scheduler: self.scheduler()?,
            kv: self.kv()?,
            device: self.device()?,
            hub: self.hub()?,
            log: self.log()?,
        })
    }

    fn model(&self) -> Result<ModelConfig, ConfigError> {
        let sources =
            [("model", SamplingDefaultsSource::Model), ("neutral", SamplingDefaultsSource::Neutral)];
        let poolings = Pooling::ALL.map(|pooling| (pooling.name(), Some(pooling)));
        let poolings = [&[("auto", None)], &poolings[..]].concat();
        let normalize = [("auto", None), ("yes", Some(true)), ("no", Some(false))];
        Ok(ModelConfig {
            path: self.get("model.path", string)?,
            spec: self.get("model.spec", values::path)?,
            chat_template: self.get("model.chat_template", values::path)?,
            sampling_defaults: self.get("model.sampling_defaults", |v| one_of(v, &sources))?,
            weights: self.get("model.weights", |v| WeightRules::parse(&string(v)?))?,
            served_name: self.get("model.served_name", string)?,
            pooling: self.get("model.pooling", |v| one_of(v, &poolings))?,
            normalize: self.get("model.normalize", |v| one_of(v, &normalize))?,
        })
    }

    fn server(&self) -> Result<ServerConfig, ConfigError> {
        let request_timeout = self.get("server.request_timeout", duration)?;
        Ok(ServerConfig {
            host: self.get("server.host", non_empty_string)?,
            port: self.get("server.port", |v| integer(v, 0, u16::MAX.into()))? as u16,
            workers: self.get("server.workers", |v| integer(v, 1, 1024))?,
            body_limit_bytes: self.get("server.body_limit", |v| values::size(v, 1024))? as usize,
            keep_alive: self.get("server.keep_alive", duration)?,
            stream_comment_interval: self.get("server.stream_comment_interval", non_zero_duration)?,
            stalled_after: self.get("server.stalled_after", non_zero_duration)?,
            retry_after: self.get("server.retry_after", whole_seconds)?,
            request_timeout: (!request_timeout.is_zero()).then_some(request_timeout),
            api_keys: ApiKeys(self.get("server.api_keys", |v| values::strings(v, values::api_key))?),
            api_key_file: self
                .get(API_KEY_FILE, values::path)?
                .map(|path| KeyFile { path, origin: self.source(API_KEY_FILE) }),
            cors_origins: self.get("server.cors_origins", values::origins)?,
            tls: self.tls()?,
        })
    }

    fn tls(&self) -> Result<Option<TlsFiles>, ConfigError> {
        let (cert, key) = ("server.tls_cert", "server.tls_key");
        match (self.get(cert, values::path)?, self.get(key, values::path)?) {
            (Some(cert), Some(key)) => Ok(Some(TlsFiles { cert, key })),
            (Some(_), None) => Err(self.error_for(cert, "requires server.tls_key")),
            (None, Some(_)) => Err(self.error_for(key, "requires server.tls_cert")),
            (None, None) => Ok(None),
        }
    }

    fn scheduler(&self) -> Result<SchedulerConfig, ConfigError> {
        let (slots, token_budget) = self.slots_and_token_budget()?;
        let window = self.get("scheduler.window", non_zero_duration)?;
        let policies = [
            ("fused", Policy::Fused),
            ("window", Policy::Window { window }),
            ("concurrent", Policy::Concurrent),
        ];
        Ok(SchedulerConfig {
            slots,
            max_waiting: self.get("scheduler.max_waiting", |v| integer(v, 0, 1 << 24))?,
            token_budget,
            policy: self.get("scheduler.policy", |v| one_of(v, &policies))?,
            shuffle: self.get("scheduler.shuffle", |v| one_of(v, &[("on", true), ("off", false)]))?,
            lanes: self.get("scheduler.lanes", values::lanes)?,
            drain_timeout: self.get("scheduler.drain_timeout", duration)?,
        })
    }

    /// Returns slots and token budget. The budget must exceed the slots: with all rows taken by decode,
    /// prompts would never be processed. An error is attributed to the key that a later layer set.
    fn slots_and_token_budget(&self) -> Result<(usize, usize), ConfigError> {
        let (slots_key, budget_key) = ("scheduler.slots", "scheduler.token_budget");
        let slots = self.get(slots_key, |v| integer(v, 1, 1 << 16))?;
        let budget = self.get(budget_key, |v| integer(v, 1, 1 << 24))?;
        if budget > slots {
            return Ok((slots, budget));
        }
        Err(if self.source(slots_key) > self.source(budget_key) {
            self.error_for(slots_key, &format!("must be less than {budget_key}, which is {budget}"))
        } else {
            self.error_for(budget_key, &format!("must be more than {slots_key}, which is {slots}"))
        })
    }

    fn kv(&self) -> Result<KvConfig, ConfigError> {
        let types: Vec<_> = QuantType::kv_cache_names().collect();
        let max_context = self.get("kv.max_context", |v| integer(v, 0, 1 << 32))?;
        Ok(KvConfig {
            ty: self.get("kv.type", |v| one_of(v, &types))?,
            page_size: self.get("kv.page_size", values::page_size)?,
            size: self.get("kv.size", values::kv_size)?,
            max_context: (max_context > 0).then_some(max_context),
            sparse_attention: self.get("kv.sparse_attention", values::fraction)?,
        })
    }

    fn device(&self) -> Result<DeviceConfig, ConfigError> {
        let step = self.get("device.fake_step", duration)?;
        let row = self.get("device.fake_row", duration)?;
        let kinds = [DeviceKind::Cpu, DeviceKind::Reference, DeviceKind::Fake { step, row }];
        let kind = self.get("device.kind", |v| one_of(v, &kinds.map(|kind| (kind.name(), kind))))?;
        let groups = self.get("device.groups", |v| devices::parse_groups(v, kind, &kinds))?;
        let isas = Isa::ALL.map(|isa| (isa.name(), isa));
        let inputs = [("fast", ActivationPrecision::Int8), ("f32", ActivationPrecision::F32)];
        let threads = self.get("device.threads", |v| integer(v, 0, 4096))?;
        let step_timeout = self.get("device.step_timeout", duration)?;
        Ok(DeviceConfig {
            layers: self.get("device.layers", |v| devices::parse_layers(v, &groups))?,
            shares: self.get("device.shares", |v| devices::parse_shares(v, &groups))?,
            experts: self.get("device.experts", |v| one_of(v, &devices::EXPERTS))?,
            step_timeout: (!step_timeout.is_zero()).then_some(step_timeout),
            threads: if threads == 0 { cores_per_device(&groups) } else { threads },
            isa: self.get("device.isa", |v| one_of(v, &isas))?,
            activation_precision: self.get("device.activations", |v| one_of(v, &inputs))?,
            groups,
        })
    }

    fn hub(&self) -> Result<HubSettings, ConfigError> {
        Ok(HubSettings {
            cache: self.get("hub.cache", values::path)?,
            endpoint: self.get("hub.endpoint", values::url)?,
        })
    }

    fn log(&self) -> Result<LogConfig, ConfigError> {
        let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
        Ok(LogConfig {
            format: self.get("log.format", |v| one_of(v, &formats))?,
            level: self.get("log.level", log_level)?,
        })
    }
}

/// Parses a duration in the configuration's syntax, such as `250ms`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    duration(&text.into())
}

/// Parses a number of bytes in the configuration's syntax, such as `4MiB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    values::size(&text.into(), 1)
}

/// Returns the cores per CPU device when they are divided evenly; at least 1.
fn cores_per_device(groups: &Groups) -> usize {
    let computing = groups.iter().flatten().filter(|device| device.kind == DeviceKind::Cpu).count();
    (cores() / computing.max(1)).max(1)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    fn parse_config(toml: &str) -> Result<Config, ConfigError> {
        let mut settings = LayeredSettings::new();
        settings.add_text(Path::new("some.toml"), toml)?;
        settings.config()
    }

    fn error_of(toml: &str) -> String {
        parse_config(toml).unwrap_err().to_string()
    }

    fn defaults() -> Config {
        Config::load(None, Overrides::default()).unwrap()
    }

    fn with_flag(key: &'static str, value: impl Into<toml::Value>) -> Result<Config, ConfigError> {
        let mut flags = Overrides::default();
        flags.set(key, Some(value));
        Config::load(None, flags)
    }

    fn with_variable(name: &str, text: &str) -> Result<Config, ConfigError> {
        let environment = [(name.to_string(), OsString::from(text))].into();
        Config::from_layers(None, environment, Overrides::default())
    }

    /// A temporary file, removed on drop.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, text: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("mainstem-config-{}-{name}", std::process::id()));
            std::fs::write(&path, text).unwrap();
            Scratch(path)
        }

        fn name(&self) -> String {
            self.0.display().to_string()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn the_commented_file_is_the_defaults() {
        let expected = Config {
            model: ModelConfig {
                path: "".into(),
                spec: None,
                chat_template: None,
                sampling_defaults: SamplingDefaultsSource::Model,
                weights: WeightRules::default(),
                served_name: "".into(),
                pooling: None,
                normalize: None,
            },
            server: ServerConfig {
                host: "127.0.0.1".into(),
                port: 8080,
                workers: 2,
                body_limit_bytes: 4 << 20,
                keep_alive: Duration::from_secs(75),
                stream_comment_interval: Duration::from_secs(15),
                stalled_after: Duration::from_secs(30),
                retry_after: Duration::from_secs(1),
                request_timeout: Some(Duration::from_secs(3600)),
                api_keys: ApiKeys(vec![]),
                api_key_file: None,
                cors_origins: vec![],
                tls: None,
            },
            scheduler: SchedulerConfig {
                slots: 32,
                max_waiting: 256,
                token_budget: 512,
                policy: Policy::Fused,
                shuffle: true,
                lanes: LaneCount::PerStage,
                drain_timeout: Duration::from_secs(30),
            },
            kv: KvConfig {
                ty: QuantType::F16,
                page_size: 32,
                size: KvSize::Auto,
                max_context: None,
                sparse_attention: Fraction::ONE,
            },
            device: DeviceConfig {
                groups: vec![vec![DeviceName { kind: DeviceKind::Cpu, number: 0 }]],
                layers: vec![],
                shares: vec![],
                experts: ExpertPlacement::Column,
                step_timeout: None,
                threads: cores(),
                isa: Isa::Auto,
                activation_precision: ActivationPrecision::Int8,
            },
            hub: HubSettings { cache: None, endpoint: None },
            log: LogConfig { format: LogFormat::Text, level: "info,actix_server=warn".into() },
        };
        assert_eq!(defaults(), expected);
    }

    /// Each key of the file reaches the configuration: a value of the wrong type is reported with the key's
    /// name.
    #[test]
    fn every_key_of_the_file_is_read() {
        let settings = LayeredSettings::new();
        for key in settings.keys() {
            let (section, name) = key.split_once('.').unwrap();
            let error = error_of(&format!("[{section}]\n{name} = 1.5"));
            let shown = if key == "server.api_keys" { "(hidden)" } else { "1.5" };
            assert!(error.starts_with(&format!("some.toml:2: {key} = {shown}: ")), "{key}: {error}");
        }
        assert_eq!(settings.keys().count(), DEFAULTS.lines().filter(|line| line.contains(" = ")).count());
    }

    /// Each key can be set from the environment, in the syntax of the file.
    #[test]
    fn every_key_can_be_a_variable() {
        let table: toml::Table = DEFAULTS.parse().unwrap();
        for key in LayeredSettings::new().keys() {
            let (section, name) = key.split_once('.').unwrap();
            let default = &table[section][name];
            let text = default.as_str().map_or_else(|| default.to_string(), str::to_string);
            assert_eq!(with_variable(&variable_name(key), &text).unwrap(), defaults(), "{key} = {text}");
        }
    }

    #[test]
    fn a_section_whose_keys_are_all_commented_out_changes_nothing() {
        assert_eq!(parse_config("[server]\n# port = 1\n[kv]\n").unwrap(), defaults());
    }

    #[test]
    fn wrong_values_are_reported_with_line_key_and_value() {
        for (toml, part) in [
            ("\n[server]\nport = 65536", "some.toml:3: server.port = 65536: must be from 0 to 65535"),
            ("[server]\nport = \"x\"", "server.port = \"x\": expected a whole number"),
            ("[server]\nretry_after = \"1500ms\"", "must be whole seconds"),
            ("[server]\nbody_limit = \"4 apples\"", "the unit must be B, KiB"),
            ("[server]\ncors_origins = [\"example.com\"]", "an origin must be \"*\" or like"),
            ("[server]\ncors_origins = [\"https://example.com/\"]", "an origin must be"),
            ("[server]\ncors_origins = [\"*\", \"https://a.b\"]", "must be the only entry"),
            ("[server]\ncors_origins = \"https://a.b\"", "expected a list of strings"),
            ("[server]\ntls_cert = \"c\"", "some.toml:2: server.tls_cert = \"c\": requires server.tls_key"),
            ("[server]\ntls_key = \"k\"", "server.tls_key = \"k\": requires server.tls_cert"),
            ("[kv]\ntype = \"q5\"", r#"must be one of "f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64""#),
            ("[kv]\nsparse_attention = 0", "kv.sparse_attention = 0: must be more than 0 and at most 1"),
            ("[kv]\nsparse_attention = 1.01", "must be more than 0 and at most 1"),
            ("[kv]\nsparse_attention = nan", "must be more than 0 and at most 1"),
            ("[kv]\nsparse_attention = \"half\"", "must be more than 0 and at most 1"),
            ("[scheduler]\nslots = 0", "scheduler.slots = 0: must be from 1"),
            ("[scheduler]\nlanes = 0", "scheduler.lanes = 0: must be from 1 to 65536, or be \"auto\""),
            ("[scheduler]\nlanes = \"many\"", "expected a whole number, or \"auto\""),
            ("[device]\ngroups = [[0, \"cpu:0\"]]", "cpu:0 is listed twice; the nearest possible is cpu:0"),
            (
                "[device]\ngroups = \"0;1\"\nlayers = [4]",
                "some.toml:3: device.layers = [4]: is for 1 stage, but",
            ),
            ("[device]\nshares = [[1, 1]]", "device.shares = [[1, 1]]: does not fit the devices"),
            ("[device]\nexperts = \"row\"", "must be one of \"column\", \"expert\""),
            ("[scheduler]\npolicy = \"best\"", "one of \"fused\", \"window\", \"concurrent\""),
            ("[scheduler]\nwindow = \"0s\"", "must not be zero"),
            ("[scheduler]\nwindow = \"-1s\"", "must begin with a number"),
            ("[scheduler]\nwindow = \"4\"", "the unit must be ns, us, ms, s, m or h"),
            ("[model]\npooling = \"max\"", "must be one of \"auto\", \"mean\", \"cls\", \"last\""),
            ("[model]\nnormalize = true", "model.normalize = true"),
            ("[kv]\npage_size = 48", "kv.page_size = 48: must be a multiple of 32"),
            ("[kv]\npage_positions = 48", "kv.page_positions = 48: must be a multiple of 32"),
            ("[kv]\nsize = \"x tokens\"", "expected a whole number of tokens"),
            ("[kv]\ntype = \"q1\"", "must be one of \"f32\", \"f16\", \"bf16\""),
            ("[device]\nfake_row = \"9\"", "device.fake_row = \"9\": the unit must be ns, us"),
            ("[hub]\nendpoint = \"hub.example\"", "must begin with https:// or http://"),
            ("[log]\nlevel = \"a=b=c\"", "log.level = "),
        ] {
            let error = error_of(toml);
            assert!(error.contains(part), "{toml}: {error}");
        }
    }

    #[test]
    fn values_are_read_with_their_units() {
        let config = parse_config(
            "[scheduler]\npolicy = \"window\"\nwindow = \"1.5s\"\n[kv]\nsize = \"2GiB\"\nmax_context = 9\n\
             [server]\nrequest_timeout = \"0s\"\ncors_origins = [\"https://a.b:1\", \"tauri://localhost\"]\n\
             tls_cert = \"c\"\ntls_key = \"k\"\n[hub]\nendpoint = \"http://hub\"\n\
             [device]\nkind = \"fake\"\nfake_step = \"0.02s\"\nfake_row = \"150us\"",
        )
        .unwrap();
        assert_eq!(config.scheduler.policy, Policy::Window { window: Duration::from_millis(1500) });
        assert_eq!((config.kv.size, config.kv.max_context), (KvSize::Bytes(2 << 30), Some(9)));
        assert_eq!(config.server.request_timeout, None);
        assert_eq!(config.server.cors_origins, ["https://a.b:1", "tauri://localhost"]);
        assert_eq!(config.server.tls, Some(TlsFiles { cert: "c".into(), key: "k".into() }));
        assert_eq!(config.hub.endpoint.as_deref(), Some("http://hub"));
        let (step, row) = (Duration::from_millis(20), Duration::from_micros(150));
        assert_eq!(config.device.groups[0][0].kind, DeviceKind::Fake { step, row });
        let [auto, two, three] = ["\"auto\"", "2", "\"3\""]
            .map(|lanes| parse_config(&format!("[scheduler]\nlanes = {lanes}")).unwrap().scheduler.lanes);
        assert_eq!((auto, two, three), (LaneCount::PerStage, LaneCount::Number(2), LaneCount::Number(3)));
        let groups =
            parse_config("[device]\ngroups = \"0;1\"\nthreads = 0\nstep_timeout = \"60s\"").unwrap().device;
        let minute = Some(Duration::from_secs(60));
        assert_eq!((groups.threads, groups.step_timeout), ((cores() / 2).max(1), minute));
        let nanos = parse_config("[device]\nkind = \"fake\"\nfake_step = \"7 ns\"").unwrap().device.groups;
        assert_eq!(nanos[0][0].kind, DeviceKind::Fake { step: Duration::from_nanos(7), row: Duration::ZERO });
        assert_eq!(parse_config("[kv]\nsize = \"4096 tokens\"").unwrap().kv.size, KvSize::Tokens(4096));
        let few = parse_config("[kv]\nsparse_attention = 0.1\ntype = \"q4\"").unwrap().kv;
        assert_eq!(
            (few.sparse_attention.floor_of(20), few.ty),
            (2, QuantType::G4_B64),
            "not q4_b32t1a, which is q4 of weights"
        );
    }

    /// Deprecated names set the same value, whichever layer uses which name.
    #[test]
    fn deprecated_names_are_accepted() {
        let page = |config: Result<Config, ConfigError>| config.unwrap().kv.page_size;
        assert_eq!(page(parse_config("[kv]\npage_positions = 64")), 64);
        assert_eq!(page(parse_config("[kv]\npage_positions = 64\npage_size = 64")), 64);
        assert_eq!(page(with_variable("MAINSTEM_KV_PAGE_POSITIONS", "96")), 96);
        assert_eq!(page(with_flag("kv.page_positions", 128)), 128);
        let attended =
            |config: Result<Config, ConfigError>| config.unwrap().kv.sparse_attention.floor_of(100);
        assert_eq!(attended(parse_config("[kv]\nattended_share = 0.25")), 25);
        assert_eq!(attended(with_variable("MAINSTEM_KV_ATTENDED_SHARE", "0.5")), 50);

        let file = Scratch::new("deprecated", "[kv]\npage_size = 64");
        let environment = [("MAINSTEM_KV_PAGE_POSITIONS".to_string(), OsString::from("96"))].into();
        assert_eq!(page(Config::from_layers(Some(&file.0), environment, Overrides::default())), 96);
        let mut flags = Overrides::default();
        flags.set("kv.page_size", Some(128));
        let environment = [("MAINSTEM_KV_PAGE_POSITIONS".to_string(), OsString::from("96"))].into();
        assert_eq!(page(Config::from_layers(Some(&file.0), environment, flags)), 128);
    }

    #[test]
    fn two_names_of_a_key_with_different_values_are_an_error() {
        assert_eq!(
            error_of("[kv]\npage_size = 64\npage_positions = 32"),
            "some.toml:3: kv.page_size = 64 and kv.page_positions = 32 are two names of the same setting; \
             use kv.page_size only"
        );
        let environment = [("ATTENDED_SHARE", "0.5"), ("SPARSE_ATTENTION", "0.25")];
        let environment =
            environment.map(|(name, text)| (format!("MAINSTEM_KV_{name}"), OsString::from(text)));
        let error = Config::from_layers(None, environment.into(), Overrides::default()).unwrap_err();
        assert_eq!(error.origin, ConfigSource::Environment("MAINSTEM_KV_SPARSE_ATTENTION".into()));
        assert!(error.message.contains("use kv.sparse_attention only"), "{error}");
    }

    /// Slots and token budget contradict each other: the error names the key that was set later.
    #[test]
    fn the_later_of_two_contradicting_keys_is_reported() {
        let error = with_flag("scheduler.slots", 512).unwrap_err();
        let message = "scheduler.slots = 512: must be less than scheduler.token_budget, which is 512";
        assert_eq!((error.origin, error.message.as_str()), (ConfigSource::CommandLine, message));
        let message = "scheduler.token_budget = 7: must be more than scheduler.slots, which is 8";
        assert_eq!(error_of("[scheduler]\nslots = 8\ntoken_budget = 7"), format!("some.toml:3: {message}"));
    }

    #[test]
    fn keys_come_from_list_file_and_variable() {
        let file = Scratch::new("keys", "# Ours\nfirst\r\n\n  second#2  \n");
        let name = file.name();
        let config =
            parse_config(&format!("[server]\napi_keys = [\"zero\"]\napi_key_file = '{name}'")).unwrap();
        let keys = config.server.load_api_keys().unwrap();
        assert_eq!(keys.0, ["zero", "first", "second#2"]);
        assert_eq!(format!("{keys:?}"), "ApiKeys(3)");
        for text in ["a, b", "[\"a\", \"b\"]"] {
            let config = with_variable("MAINSTEM_SERVER_API_KEYS", text).unwrap();
            assert_eq!(config.server.api_keys.0, ["a", "b"]);
        }
    }

    /// An invalid API key is an error rather than no key, and is not shown.
    #[test]
    fn a_wrong_key_is_refused_and_not_shown() {
        for text in ["", "secret key", "secret,", "sécret", "[\"secret\", 5]", "[\"secret\""] {
            let error = with_variable("MAINSTEM_SERVER_API_KEYS", text).unwrap_err().to_string();
            assert!(error.contains("SERVER_API_KEYS: server.api_keys = (hidden): "), "{error}");
            assert!(!error.contains("secret") && !error.contains("cret"), "{error}");
        }
        let error = with_flag("server.api_keys", vec![""]).unwrap_err();
        assert_eq!(error.origin, ConfigSource::CommandLine);
        for (name, text, reason) in [
            ("none", "# no key\n\n", "the file contains no API key"),
            ("space", "#\nsecret key # Ann", "line 2: an API key must"),
        ] {
            let file = Scratch::new(name, text);
            let config = with_flag("server.api_key_file", file.name()).unwrap();
            let error = config.server.load_api_keys().unwrap_err();
            assert_eq!(error.origin, ConfigSource::CommandLine);
            let error = error.to_string();
            assert!(error.contains(&file.name()) && error.contains(reason), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let config = parse_config("[server]\napi_key_file = \"/no/such/keys\"").unwrap();
        let error = config.server.load_api_keys().unwrap_err().to_string();
        assert!(
            error.starts_with("some.toml:2: server.api_key_file = \"/no/such/keys\": No such file"),
            "{error}"
        );
    }

    /// A subcommand's defaults are overridden by every layer, and their source is the defaults.
    #[test]
    fn a_subcommands_defaults_are_beneath_every_layer() {
        let mut own = Overrides::default();
        own.set_default("scheduler.slots", 1);
        own.set_default("log.level", "warn");
        let file = Scratch::new("own", "[scheduler]\nslots = 3");
        let environment = [("MAINSTEM_LOG_LEVEL".to_string(), OsString::from("debug"))].into();
        let layered = Config::from_layers(Some(&file.0), environment, own.clone()).unwrap();
        assert_eq!((layered.scheduler.slots, layered.log.level.as_str()), (3, "debug"));
        own.set("scheduler.slots", Some(2));
        let flags = Config::load(None, own.clone()).unwrap();
        assert_eq!((flags.scheduler.slots, flags.log.level.as_str()), (2, "warn"));
        own = Overrides::default();
        own.set_default("scheduler.slots", 1 << 20);
        assert_eq!(Config::load(None, own).unwrap_err().origin, ConfigSource::Defaults);
    }

    #[test]
    fn the_environment_names_the_file_when_no_flag_does() {
        let (one, two) =
            (Scratch::new("one", "[server]\nport = 1"), Scratch::new("two", "[server]\nport = 2"));
        let port = |file, variable: &str| {
            let environment = [(CONFIG_FILE_VARIABLE.to_string(), OsString::from(variable))].into();
            Config::from_layers(file, environment, Overrides::default()).unwrap().server.port
        };
        assert_eq!(port(None, &one.name()), 1);
        assert_eq!(port(Some(two.0.as_path()), &one.name()), 2);
        assert_eq!(port(None, ""), 8080);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let error = Config::load(Some(Path::new("/nowhere/at/all.toml")), Overrides::default()).unwrap_err();
        assert!(error.to_string().starts_with("/nowhere/at/all.toml: "));
    }

    /// Every example is accepted and changes some value.
    #[test]
    fn the_examples_are_accepted() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("config/examples");
        let mut names = Vec::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let config = Config::load(Some(&path), Overrides::default()).unwrap();
            assert_ne!(config, defaults(), "{}", path.display());
            names.push(path.file_name().unwrap().to_string_lossy().into_owned());
        }
        names.sort();
        assert_eq!(names, ["hybrid.toml", "policy-window.toml", "public-server.toml", "small-machine.toml"]);
    }
}
