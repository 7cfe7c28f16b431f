//! The typed configuration. Layers (the defaults, a file, the environment, the command line) are laid over
//! each other, then each key is read once, checked once, and put into the struct of the one who consumes it.
//! The defaults are `config/mainstem.toml` itself, compiled in, so that they are written in one place.
//!
//! Invariant: past this module no value is unchecked, and of keys, flags and `MAINSTEM_` variables nothing is read.
//! A file that a value names is opened by its consumer, at start and before the weights.

mod devices;
mod layers;
mod reference;
mod values;

pub use devices::{DeviceName, Groups, spelled};
pub use layers::{ConfigError, Overrides, Source};
pub use reference::reference;

use crate::model::weights::Weights;
use crate::request::Pooling;
use layers::{CONFIG_VARIABLE, Environment, Settings, variable};
use mainstem_kernels::cpu::Isa;
use mainstem_kernels::{Inputs, QuantType, Share};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use values::{duration, integer, log_level, one_of, some_duration, some_text, text, whole_seconds};

/// The commented file that holds every key with its default.
pub const DEFAULTS: &str = include_str!("../../config/mainstem.toml");

/// All that can be configured, by consumer.
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

/// What is served.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A folder or a file, or `hf:owner/name[@revision]`; empty is the embedded demo model.
    pub path: String,
    /// Specification to read it by; `None` is the folder's own, else the shipped one for its type.
    pub spec: Option<PathBuf>,
    /// Template of chat prompts; `None` is the model's own.
    pub chat_template: Option<PathBuf>,
    pub sampling_defaults: SamplingDefaultsFrom,
    /// In which number formats matrices are loaded.
    pub weights: Weights,
    /// The name in the API; empty is the model's own.
    pub served_name: String,
    /// How an encoder's states become one vector; `None` is as the model's files say.
    pub pooling: Option<Pooling>,
    /// Whether vectors are brought to length 1; `None` is as the model's files say.
    pub normalize: Option<bool>,
}

/// Who says how to sample when a request does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SamplingDefaultsFrom {
    /// The model's generation_config.json.
    Model,
    /// Nobody: temperature 1, nothing cut off.
    Neutral,
}

/// For `server/`.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerConfig {
    pub host: String,
    /// 0 takes any free port.
    pub port: u16,
    /// HTTP threads; at least 1.
    pub workers: usize,
    /// Longest request body.
    pub body_limit_bytes: usize,
    /// How long an idle connection stays open.
    pub keep_alive: Duration,
    /// Longest silence on a stream before a comment is sent.
    pub stream_comment_interval: Duration,
    /// Age of the decode loop's last turn from which on requests in flight count as stuck.
    pub stalled_after: Duration,
    /// Whole seconds, at least 1.
    pub retry_after: Duration,
    /// Longest time of a request from its arrival to its end; `None` is as long as it takes.
    pub request_timeout: Option<Duration>,
    /// Those who may use the API. With none, here and in `api_key_file`, everybody may.
    pub api_keys: ApiKeys,
    /// More of them.
    pub api_key_file: Option<KeyFile>,
    /// Origins whose pages may use the API: `scheme://host[:port]`, or "*" alone. With none, no page may.
    pub cors_origins: Vec<String>,
    /// Speak TLS with these; `None` is plain HTTP.
    pub tls: Option<TlsFiles>,
}

/// Keys that clients must show. Not empty each, of printable ASCII; what prints it shows only how many.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKeys(pub Vec<String>);

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.0.len())
    }
}

/// A file of keys, one in a line, which is only opened where keys are of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    pub path: PathBuf,
    /// Who named it.
    origin: Source,
}

impl ServerConfig {
    /// Every key, those of the file as it is now included. A file that cannot be read, or holds none, is the
    /// fault of who named it.
    pub fn keys(&self) -> Result<ApiKeys, ConfigError> {
        let mut keys = self.api_keys.0.clone();
        if let Some(KeyFile { path, origin }) = &self.api_key_file {
            let fault = |reason| {
                let message = format!("{API_KEY_FILE} = {:?}: {reason}", path.display().to_string());
                ConfigError { origin: origin.clone(), message }
            };
            keys.extend(values::keys_in(path).map_err(fault)?);
        }
        Ok(ApiKeys(keys))
    }
}

const API_KEY_FILE: &str = "server.api_key_file";

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and those between it and a root.
    pub cert: PathBuf,
    pub key: PathBuf,
}

/// For intake, prefill and decode.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Sequences in the decode loop at once; at least 1.
    pub slots: usize,
    /// Requests that may wait beside those that run.
    pub max_waiting: usize,
    /// Rows of one step; more than `slots`.
    pub token_budget: usize,
    pub policy: Policy,
    /// Close holes between slots.
    pub shuffle: bool,
    pub lanes: Lanes,
    /// Time for the requests in flight at shutdown.
    pub drain_timeout: Duration,
}

/// How many lanes there are: windows of slots that have steps in flight at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lanes {
    /// As many as stages.
    ByStages,
    /// So many; at least 1.
    Number(usize),
}

/// How requests share the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// New requests join the running batch at the next step.
    Fused,
    /// Requests gathered for `window` run as one batch to its end.
    Window { window: Duration },
    /// Every request steps alone.
    Concurrent,
}

impl Policy {
    /// The word that sets it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Fused => "fused",
            Policy::Window { .. } => "window",
            Policy::Concurrent => "concurrent",
        }
    }
}

/// For the KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvConfig {
    pub ty: QuantType,
    /// Token positions of one page; a multiple of [`PAGE_UNIT`].
    pub page_positions: usize,
    pub size: KvSize,
    /// Longest sequence, in tokens; `None` is the model's own limit.
    pub max_context: Option<usize>,
    /// Of the positions before a drawn token's, how many give it their values.
    pub attended: Share,
}

/// Page sizes are multiples of this many positions.
pub const PAGE_UNIT: usize = 32;

/// How much room keys and values get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSize {
    /// Token positions.
    Tokens(usize),
    Bytes(u64),
    /// Every slot can hold a whole context, if memory allows.
    Fitting,
}

/// For the devices.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceConfig {
    /// At least one stage, each with at least one member.
    pub groups: Groups,
    /// Layers of each stage, encoder's and decoder's together; empty is by speed, and memory where devices have their own.
    pub layers: Vec<usize>,
    /// How much of its stage each member takes, in proportion; at least 1. Empty is the same for all.
    pub shares: Vec<Vec<u32>>,
    pub experts: Experts,
    /// How long the group may take for a step; `None` is as long as it takes.
    pub step_timeout: Option<Duration>,
    /// Compute threads of each device; at least 1.
    pub threads: usize,
    pub isa: Isa,
    /// What products with coded weights take activations as.
    pub inputs: Inputs,
}

impl DeviceConfig {
    /// All devices, stage by stage.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceName> {
        self.groups.iter().flatten()
    }

    /// How much each member of a stage takes, in proportion.
    pub fn shares_of(&self, stage: usize) -> Vec<u32> {
        self.shares.get(stage).cloned().unwrap_or_else(|| vec![1; self.groups[stage].len()])
    }

    /// The same devices in other groups, with layers and shares left to the program.
    pub fn regrouped(&self, groups: &[Vec<DeviceName>]) -> DeviceConfig {
        DeviceConfig { groups: groups.to_vec(), layers: Vec::new(), shares: Vec::new(), ..self.clone() }
    }

    /// Whether layers and shares are as they would be if nothing was said of them.
    pub fn is_left_open(&self) -> bool {
        self.layers.is_empty() && self.shares.iter().flatten().all(|share| *share == 1)
    }
}

/// How the members of a stage share a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// Each has a part of every expert.
    Column,
    /// Each has some of them.
    Expert,
}

/// Which backend computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Reference,
    /// No arithmetic: a step takes `step`, and `row` for each of its rows.
    Fake {
        step: Duration,
        row: Duration,
    },
}

impl DeviceKind {
    /// The word that names it.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Reference => "reference",
            DeviceKind::Fake { .. } => "fake",
        }
    }
}

/// For downloads. Tokens are the hub's own business and stay out of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HubSettings {
    /// Folder for what was downloaded; `None` is what the environment says (HF_HUB_CACHE, HF_HOME), else the
    /// usual place in the user's home.
    pub cache: Option<PathBuf>,
    /// Address; `None` is what the environment says (HF_ENDPOINT), else the public hub.
    pub endpoint: Option<String>,
}

/// For the log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogConfig {
    pub format: LogFormat,
    /// A level or filter directives.
    pub level: String,
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

impl Config {
    /// The defaults (those of `flags` first), under the file if one is named, under the flags. The environment
    /// has no say.
    pub fn load(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        Config::layered(file, Environment::new(), flags)
    }

    /// As [`Config::load`], with the process's environment between file and flags. Without `file` it may
    /// name the file.
    pub fn of_process(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        Config::layered(file, layers::process_environment(), flags)
    }

    fn layered(
        file: Option<&Path>,
        mut environment: Environment,
        flags: Overrides,
    ) -> Result<Config, ConfigError> {
        let named = environment.remove(CONFIG_VARIABLE).filter(|path| !path.is_empty());
        let mut settings = Settings::new();
        settings.add_defaults(&flags);
        if let Some(path) = file.or(named.as_deref().map(Path::new)) {
            settings.add_file(path)?;
        }
        settings.add_environment(environment)?;
        settings.add_flags(flags)?;
        settings.config()
    }
}

impl Settings {
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
        let whose = [("model", SamplingDefaultsFrom::Model), ("neutral", SamplingDefaultsFrom::Neutral)];
        let poolings = Pooling::ALL.map(|pooling| (pooling.name(), Some(pooling)));
        let poolings = [&[("auto", None)], &poolings[..]].concat();
        let normalize = [("auto", None), ("yes", Some(true)), ("no", Some(false))];
        Ok(ModelConfig {
            path: self.get("model.path", text)?,
            spec: self.get("model.spec", values::path)?,
            chat_template: self.get("model.chat_template", values::path)?,
            sampling_defaults: self.get("model.sampling_defaults", |v| one_of(v, &whose))?,
            weights: self.get("model.weights", |v| Weights::parse(&text(v)?))?,
            served_name: self.get("model.served_name", text)?,
            pooling: self.get("model.pooling", |v| one_of(v, &poolings))?,
            normalize: self.get("model.normalize", |v| one_of(v, &normalize))?,
        })
    }

    fn server(&self) -> Result<ServerConfig, ConfigError> {
        let request_timeout = self.get("server.request_timeout", duration)?;
        Ok(ServerConfig {
            host: self.get("server.host", some_text)?,
            port: self.get("server.port", |v| integer(v, 0, u16::MAX.into()))? as u16,
            workers: self.get("server.workers", |v| integer(v, 1, 1024))?,
            body_limit_bytes: self.get("server.body_limit", |v| values::size(v, 1024))? as usize,
            keep_alive: self.get("server.keep_alive", duration)?,
            stream_comment_interval: self.get("server.stream_comment_interval", some_duration)?,
            stalled_after: self.get("server.stalled_after", some_duration)?,
            retry_after: self.get("server.retry_after", whole_seconds)?,
            request_timeout: (!request_timeout.is_zero()).then_some(request_timeout),
            api_keys: ApiKeys(self.get("server.api_keys", |v| values::texts(v, values::api_key))?),
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
            (Some(_), None) => Err(self.fault(cert, "needs server.tls_key beside it")),
            (None, Some(_)) => Err(self.fault(key, "needs server.tls_cert beside it")),
            (None, None) => Ok(None),
        }
    }

    fn scheduler(&self) -> Result<SchedulerConfig, ConfigError> {
        let (slots, token_budget) = self.slots_and_token_budget()?;
        let window = self.get("scheduler.window", some_duration)?;
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

    /// With no row to spare beside the decode rows, prompts would never be read. Of the two keys, the one
    /// that was set later is blamed.
    fn slots_and_token_budget(&self) -> Result<(usize, usize), ConfigError> {
        let (slots_key, budget_key) = ("scheduler.slots", "scheduler.token_budget");
        let slots = self.get(slots_key, |v| integer(v, 1, 1 << 16))?;
        let budget = self.get(budget_key, |v| integer(v, 1, 1 << 24))?;
        if budget > slots {
            return Ok((slots, budget));
        }
        Err(if self.source(slots_key) > self.source(budget_key) {
            self.fault(slots_key, &format!("must be less than {budget_key}, which is {budget}"))
        } else {
            self.fault(budget_key, &format!("must be more than {slots_key}, which is {slots}"))
        })
    }

    fn kv(&self) -> Result<KvConfig, ConfigError> {
        let types: Vec<_> = QuantType::cache_names().collect();
        let max_context = self.get("kv.max_context", |v| integer(v, 0, 1 << 32))?;
        Ok(KvConfig {
            ty: self.get("kv.type", |v| one_of(v, &types))?,
            page_positions: self.get("kv.page_positions", values::page_positions)?,
            size: self.get("kv.size", values::kv_size)?,
            max_context: (max_context > 0).then_some(max_context),
            attended: self.get("kv.attended_share", values::share)?,
        })
    }

    fn device(&self) -> Result<DeviceConfig, ConfigError> {
        let step = self.get("device.fake_step", duration)?;
        let row = self.get("device.fake_row", duration)?;
        let kinds = [DeviceKind::Cpu, DeviceKind::Reference, DeviceKind::Fake { step, row }];
        let kind = self.get("device.kind", |v| one_of(v, &kinds.map(|kind| (kind.name(), kind))))?;
        let groups = self.get("device.groups", |v| devices::groups(v, kind, &kinds))?;
        let isas = Isa::ALL.map(|isa| (isa.name(), isa));
        let inputs = [("fast", Inputs::Coded), ("f32", Inputs::Plain)];
        let threads = self.get("device.threads", |v| integer(v, 0, 4096))?;
        let step_timeout = self.get("device.step_timeout", duration)?;
        Ok(DeviceConfig {
            layers: self.get("device.layers", |v| devices::layers(v, &groups))?,
            shares: self.get("device.shares", |v| devices::shares(v, &groups))?,
            experts: self.get("device.experts", |v| one_of(v, &devices::EXPERTS))?,
            step_timeout: (!step_timeout.is_zero()).then_some(step_timeout),
            threads: if threads == 0 { cores_each(&groups) } else { threads },
            isa: self.get("device.isa", |v| one_of(v, &isas))?,
            inputs: self.get("device.activations", |v| one_of(v, &inputs))?,
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

/// A duration, as every layer writes it: `250ms`.
pub fn duration_of(text: &str) -> Result<Duration, String> {
    duration(&text.into())
}

/// A number of bytes, as every layer writes it: `4MiB`.
pub fn bytes_of(text: &str) -> Result<u64, String> {
    values::size(&text.into(), 1)
}

/// The cores that each CPU device gets when they are divided among all.
fn cores_each(groups: &Groups) -> usize {
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

    fn config_of(toml: &str) -> Result<Config, ConfigError> {
        let mut settings = Settings::new();
        settings.add_text(Path::new("some.toml"), toml)?;
        settings.config()
    }

    fn error_of(toml: &str) -> String {
        config_of(toml).unwrap_err().to_string()
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
        Config::layered(None, environment, Overrides::default())
    }

    /// A file that is gone with the test.
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
                sampling_defaults: SamplingDefaultsFrom::Model,
                weights: Weights::default(),
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
                lanes: Lanes::ByStages,
                drain_timeout: Duration::from_secs(30),
            },
            kv: KvConfig {
                ty: QuantType::F16,
                page_positions: 32,
                size: KvSize::Fitting,
                max_context: None,
                attended: Share::ALL,
            },
            device: DeviceConfig {
                groups: vec![vec![DeviceName { kind: DeviceKind::Cpu, number: 0 }]],
                layers: vec![],
                shares: vec![],
                experts: Experts::Column,
                step_timeout: None,
                threads: cores(),
                isa: Isa::Auto,
                inputs: Inputs::Coded,
            },
            hub: HubSettings { cache: None, endpoint: None },
            log: LogConfig { format: LogFormat::Text, level: "info,actix_server=warn".into() },
        };
        assert_eq!(defaults(), expected);
    }

    /// Each key of the file reaches the configuration: a wrong type there is told by its name, from a file
    /// and from the environment.
    #[test]
    fn every_key_of_the_file_is_read() {
        let settings = Settings::new();
        for key in settings.keys() {
            let (section, name) = key.split_once('.').unwrap();
            let error = error_of(&format!("[{section}]\n{name} = 1.5"));
            let shown = if key == "server.api_keys" { "(hidden)" } else { "1.5" };
            assert!(error.starts_with(&format!("some.toml:2: {key} = {shown}: ")), "{key}: {error}");
        }
        assert_eq!(settings.keys().count(), DEFAULTS.lines().filter(|line| line.contains(" = ")).count());
    }

    /// Each key can be set from the environment, in the words of the file.
    #[test]
    fn every_key_can_be_a_variable() {
        let table: toml::Table = DEFAULTS.parse().unwrap();
        for key in Settings::new().keys() {
            let (section, name) = key.split_once('.').unwrap();
            let default = &table[section][name];
            let text = default.as_str().map_or_else(|| default.to_string(), str::to_string);
            assert_eq!(with_variable(&variable(key), &text).unwrap(), defaults(), "{key} = {text}");
        }
    }

    #[test]
    fn a_section_whose_keys_are_all_commented_out_changes_nothing() {
        assert_eq!(config_of("[server]\n# port = 1\n[kv]\n").unwrap(), defaults());
    }

    #[test]
    fn wrong_values_are_told_by_line_key_and_value() {
        for (toml, part) in [
            ("\n[server]\nport = 65536", "some.toml:3: server.port = 65536: must be from 0 to 65535"),
            ("[server]\nport = \"x\"", "server.port = \"x\": expected a whole number"),
            ("[server]\nretry_after = \"1500ms\"", "must be whole seconds"),
            ("[server]\nbody_limit = \"4 apples\"", "the unit must be B, KiB"),
            ("[server]\ncors_origins = [\"example.com\"]", "an origin must be \"*\" or like"),
            ("[server]\ncors_origins = [\"https://example.com/\"]", "an origin must be"),
            ("[server]\ncors_origins = [\"*\", \"https://a.b\"]", "it must stand alone"),
            ("[server]\ncors_origins = \"https://a.b\"", "expected a list of texts"),
            ("[server]\ntls_cert = \"c\"", "some.toml:2: server.tls_cert = \"c\": needs server.tls_key"),
            ("[server]\ntls_key = \"k\"", "server.tls_key = \"k\": needs server.tls_cert"),
            ("[kv]\ntype = \"q5\"", r#"must be one of "f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64""#),
            ("[kv]\nattended_share = 0", "kv.attended_share = 0: must be more than 0 and at most 1"),
            ("[kv]\nattended_share = 1.01", "must be more than 0 and at most 1"),
            ("[kv]\nattended_share = nan", "must be more than 0 and at most 1"),
            ("[kv]\nattended_share = \"half\"", "must be more than 0 and at most 1"),
            ("[scheduler]\nslots = 0", "scheduler.slots = 0: must be from 1"),
            ("[scheduler]\nlanes = 0", "scheduler.lanes = 0: must be from 1 to 65536, or be \"auto\""),
            ("[scheduler]\nlanes = \"many\"", "expected a whole number, or \"auto\""),
            ("[device]\ngroups = [[0, \"cpu:0\"]]", "cpu:0 is there twice; the nearest possible is cpu:0"),
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
            ("[kv]\npage_positions = 48", "must be a multiple of 32"),
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
        let config = config_of(
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
            .map(|lanes| config_of(&format!("[scheduler]\nlanes = {lanes}")).unwrap().scheduler.lanes);
        assert_eq!((auto, two, three), (Lanes::ByStages, Lanes::Number(2), Lanes::Number(3)));
        let groups =
            config_of("[device]\ngroups = \"0;1\"\nthreads = 0\nstep_timeout = \"60s\"").unwrap().device;
        let minute = Some(Duration::from_secs(60));
        assert_eq!((groups.threads, groups.step_timeout), ((cores() / 2).max(1), minute));
        let nanos = config_of("[device]\nkind = \"fake\"\nfake_step = \"7 ns\"").unwrap().device.groups;
        assert_eq!(nanos[0][0].kind, DeviceKind::Fake { step: Duration::from_nanos(7), row: Duration::ZERO });
        assert_eq!(config_of("[kv]\nsize = \"4096 tokens\"").unwrap().kv.size, KvSize::Tokens(4096));
        let few = config_of("[kv]\nattended_share = 0.1\ntype = \"q4\"").unwrap().kv;
        assert_eq!(
            (few.attended.of(20), few.ty),
            (2, QuantType::G4_B64),
            "not q4_b32t1a, which is q4 of weights"
        );
    }

    /// Slots and budget contradict each other: whoever spoke last is at fault.
    #[test]
    fn the_later_of_two_keys_at_odds_is_blamed() {
        let error = with_flag("scheduler.slots", 512).unwrap_err();
        let message = "scheduler.slots = 512: must be less than scheduler.token_budget, which is 512";
        assert_eq!((error.origin, error.message.as_str()), (Source::CommandLine, message));
        let message = "scheduler.token_budget = 7: must be more than scheduler.slots, which is 8";
        assert_eq!(error_of("[scheduler]\nslots = 8\ntoken_budget = 7"), format!("some.toml:3: {message}"));
    }

    #[test]
    fn keys_come_from_list_file_and_variable() {
        let file = Scratch::new("keys", "# Ours\nfirst\r\n\n  second#2  \n");
        let name = file.name();
        let config = config_of(&format!("[server]\napi_keys = [\"zero\"]\napi_key_file = '{name}'")).unwrap();
        let keys = config.server.keys().unwrap();
        assert_eq!(keys.0, ["zero", "first", "second#2"]);
        assert_eq!(format!("{keys:?}"), "ApiKeys(3)");
        for text in ["a, b", "[\"a\", \"b\"]"] {
            let config = with_variable("MAINSTEM_SERVER_API_KEYS", text).unwrap();
            assert_eq!(config.server.api_keys.0, ["a", "b"]);
        }
    }

    /// A key that is wrong lets nobody in unasked, and is not shown.
    #[test]
    fn a_wrong_key_is_refused_and_not_shown() {
        for text in ["", "secret key", "secret,", "sécret", "[\"secret\", 5]", "[\"secret\""] {
            let error = with_variable("MAINSTEM_SERVER_API_KEYS", text).unwrap_err().to_string();
            assert!(error.contains("SERVER_API_KEYS: server.api_keys = (hidden): "), "{error}");
            assert!(!error.contains("secret") && !error.contains("cret"), "{error}");
        }
        let error = with_flag("server.api_keys", vec![""]).unwrap_err();
        assert_eq!(error.origin, Source::CommandLine);
        for (name, text, reason) in [
            ("none", "# no key\n\n", "the file holds no key"),
            ("space", "#\nsecret key # Ann", "line 2: a key must"),
        ] {
            let file = Scratch::new(name, text);
            let config = with_flag("server.api_key_file", file.name()).unwrap();
            let error = config.server.keys().unwrap_err();
            assert_eq!(error.origin, Source::CommandLine);
            let error = error.to_string();
            assert!(error.contains(&file.name()) && error.contains(reason), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
        let config = config_of("[server]\napi_key_file = \"/no/such/keys\"").unwrap();
        let error = config.server.keys().unwrap_err().to_string();
        assert!(
            error.starts_with("some.toml:2: server.api_key_file = \"/no/such/keys\": No such file"),
            "{error}"
        );
    }

    /// What a subcommand wants is beneath what anybody says, and nobody's fault.
    #[test]
    fn a_subcommands_defaults_are_beneath_every_layer() {
        let mut own = Overrides::default();
        own.set_default("scheduler.slots", 1);
        own.set_default("log.level", "warn");
        let file = Scratch::new("own", "[scheduler]\nslots = 3");
        let environment = [("MAINSTEM_LOG_LEVEL".to_string(), OsString::from("debug"))].into();
        let said = Config::layered(Some(&file.0), environment, own.clone()).unwrap();
        assert_eq!((said.scheduler.slots, said.log.level.as_str()), (3, "debug"));
        own.set("scheduler.slots", Some(2));
        let unsaid = Config::load(None, own.clone()).unwrap();
        assert_eq!((unsaid.scheduler.slots, unsaid.log.level.as_str()), (2, "warn"));
        own = Overrides::default();
        own.set_default("scheduler.slots", 1 << 20);
        assert_eq!(Config::load(None, own).unwrap_err().origin, Source::Defaults);
    }

    #[test]
    fn the_environment_names_the_file_when_no_flag_does() {
        let (one, two) =
            (Scratch::new("one", "[server]\nport = 1"), Scratch::new("two", "[server]\nport = 2"));
        let port = |file, variable: &str| {
            let environment = [(CONFIG_VARIABLE.to_string(), OsString::from(variable))].into();
            Config::layered(file, environment, Overrides::default()).unwrap().server.port
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

    /// Every example is accepted, and says something.
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
