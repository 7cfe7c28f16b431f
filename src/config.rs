//! The typed configuration. Layers (the defaults, a file, the command line) are laid over each other as
//! tables, then each key is read once, checked once, and put into the struct of the one who consumes it.
//! The defaults are `config/mainstem.toml` itself, compiled in, so that they are written in one place.
//!
//! Invariant: past this module no value is unchecked and nothing is read from files, flags or environment.

use mainstem_kernels::QuantType;
use mainstem_kernels::cpu::Isa;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::{Table, Value};
use tracing_subscriber::EnvFilter;

/// The commented file that holds every key with its default.
pub const DEFAULTS: &str = include_str!("../config/mainstem.toml");

/// All that can be configured, by consumer.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub model: ModelConfig,
    pub server: ServerConfig,
    pub scheduler: SchedulerConfig,
    pub kv: KvConfig,
    pub device: DeviceConfig,
    pub log: LogConfig,
}

/// What is served.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// A folder or a file.
    pub path: PathBuf,
    /// Specification to read it by; `None` is the folder's own, else the shipped one for its type.
    pub spec: Option<PathBuf>,
    /// The name in the API; empty is the model's own.
    pub served_name: String,
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
    /// Time for the requests in flight at shutdown.
    pub drain_timeout: Duration,
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

/// For the KV cache.
#[derive(Clone, Debug, PartialEq)]
pub struct KvConfig {
    pub ty: QuantType,
    /// Token positions of one page; a multiple of [`PAGE_UNIT`].
    pub page_positions: usize,
    pub size: KvSize,
    /// Longest sequence, in tokens; `None` is the model's own limit.
    pub max_context: Option<usize>,
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

/// For the device actor.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceConfig {
    pub kind: DeviceKind,
    /// Compute threads; at least 1.
    pub threads: usize,
    pub isa: Isa,
}

/// Which backend computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Reference,
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

/// Where a value was set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Defaults,
    File(PathBuf),
    CommandLine,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Defaults => write!(f, "defaults"),
            Source::File(path) => write!(f, "{}", path.display()),
            Source::CommandLine => write!(f, "command line"),
        }
    }
}

/// What is wrong with the configuration, and where it was said.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {message}")]
pub struct ConfigError {
    pub origin: Source,
    pub message: String,
}

/// Flags of the command line: keys with the values given for them.
#[derive(Clone, Debug, Default)]
pub struct Overrides(Vec<(&'static str, Value)>);

impl Overrides {
    /// Sets `key` (such as `server.port`) if there is a value.
    pub fn set(&mut self, key: &'static str, value: Option<impl Into<Value>>) {
        self.0.extend(value.map(|value| (key, value.into())));
    }
}

impl Config {
    /// Reads the file, if one is named, lays the flags over it and checks everything.
    pub fn load(file: Option<&Path>, flags: Overrides) -> Result<Config, ConfigError> {
        let mut layers = Layers::new();
        if let Some(path) = file {
            layers.add_file(path)?;
        }
        layers.add_flags(flags)?;
        layers.config()
    }
}

/// Tables over each other; the last that has a key gives its value.
struct Layers(Vec<(Source, Table)>);

impl Layers {
    fn new() -> Layers {
        let defaults = DEFAULTS.parse().expect("the defaults are valid TOML; anything else is a bug");
        Layers(vec![(Source::Defaults, defaults)])
    }

    fn add_file(&mut self, path: &Path) -> Result<(), ConfigError> {
        let error = |message| ConfigError { origin: Source::File(path.to_path_buf()), message };
        let text = std::fs::read_to_string(path).map_err(|e| error(e.to_string()))?;
        let table = text.parse::<Table>().map_err(|e| error(e.to_string().trim_end().to_string()))?;
        self.add(Source::File(path.to_path_buf()), table)
    }

    fn add_flags(&mut self, flags: Overrides) -> Result<(), ConfigError> {
        let mut table = Table::new();
        for (key, value) in flags.0 {
            let (section, name) = split(key);
            let keys = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
            keys.as_table_mut().expect("a section is a table").insert(name.to_string(), value);
        }
        self.add(Source::CommandLine, table)
    }

    /// Adds a layer whose keys are all known.
    fn add(&mut self, origin: Source, table: Table) -> Result<(), ConfigError> {
        let defaults = &self.0[0].1;
        let known = keys(defaults);
        // A section whose keys are all commented out is empty, and no mistake.
        let is_known =
            |key: &String| known.contains(key) || (defaults.contains_key(key) && table[key].is_table());
        let unknown = keys(&table).into_iter().find(|key| !is_known(key));
        if let Some(key) = unknown {
            let nearest = known.iter().min_by_key(|k| distance(k, &key)).expect("there are keys");
            let message = format!("there is no key '{key}'; the nearest is '{nearest}'");
            return Err(ConfigError { origin, message });
        }
        self.0.push((origin, table));
        Ok(())
    }

    /// The value of `key` and who set it.
    fn find(&self, key: &str) -> (&Source, &Value) {
        let (section, name) = split(key);
        let hit =
            self.0.iter().rev().find_map(|(origin, table)| Some((origin, table.get(section)?.get(name)?)));
        hit.unwrap_or_else(|| panic!("'{key}' is not in the defaults; this is a bug"))
    }

    /// The value of `key` as `parse` reads it.
    fn get<T>(&self, key: &str, parse: impl Fn(&Value) -> Result<T, String>) -> Result<T, ConfigError> {
        let (origin, value) = self.find(key);
        parse(value).map_err(|reason| ConfigError {
            origin: origin.clone(),
            message: format!("{key} = {value}: {reason}"),
        })
    }

    fn config(&self) -> Result<Config, ConfigError> {
        Ok(Config {
            model: self.model()?,
            server: self.server()?,
            scheduler: self.scheduler()?,
            kv: self.kv()?,
            device: self.device()?,
            log: self.log()?,
        })
    }

    fn model(&self) -> Result<ModelConfig, ConfigError> {
        Ok(ModelConfig {
            path: self.get("model.path", text)?.into(),
            spec: Some(self.get("model.spec", text)?).filter(|spec| !spec.is_empty()).map(PathBuf::from),
            served_name: self.get("model.served_name", text)?,
        })
    }

    fn server(&self) -> Result<ServerConfig, ConfigError> {
        Ok(ServerConfig {
            host: self.get("server.host", some_text)?,
            port: self.get("server.port", |v| integer(v, 0, u16::MAX.into()))? as u16,
            workers: self.get("server.workers", |v| integer(v, 1, 1024))?,
            body_limit_bytes: self.get("server.body_limit", |v| size(v, 1024))? as usize,
            keep_alive: self.get("server.keep_alive", duration)?,
            stream_comment_interval: self.get("server.stream_comment_interval", some_duration)?,
            stalled_after: self.get("server.stalled_after", some_duration)?,
            retry_after: self.get("server.retry_after", whole_seconds)?,
        })
    }

    fn scheduler(&self) -> Result<SchedulerConfig, ConfigError> {
        let slots = self.get("scheduler.slots", |v| integer(v, 1, 1 << 16))?;
        let window = self.get("scheduler.window", some_duration)?;
        let policies = [
            ("fused", Policy::Fused),
            ("window", Policy::Window { window }),
            ("concurrent", Policy::Concurrent),
        ];
        Ok(SchedulerConfig {
            slots,
            max_waiting: self.get("scheduler.max_waiting", |v| integer(v, 0, 1 << 24))?,
            token_budget: self.get("scheduler.token_budget", |v| token_budget(v, slots))?,
            policy: self.get("scheduler.policy", |v| one_of(v, &policies))?,
            shuffle: self.get("scheduler.shuffle", |v| one_of(v, &[("on", true), ("off", false)]))?,
            drain_timeout: self.get("scheduler.drain_timeout", duration)?,
        })
    }

    fn kv(&self) -> Result<KvConfig, ConfigError> {
        let types: Vec<_> = QuantType::all().map(|ty| (ty.name(), ty)).collect();
        let max_context = self.get("kv.max_context", |v| integer(v, 0, 1 << 32))?;
        Ok(KvConfig {
            ty: self.get("kv.type", |v| one_of(v, &types))?,
            page_positions: self.get("kv.page_positions", page_positions)?,
            size: self.get("kv.size", kv_size)?,
            max_context: (max_context > 0).then_some(max_context),
        })
    }

    fn device(&self) -> Result<DeviceConfig, ConfigError> {
        let kinds = [("cpu", DeviceKind::Cpu), ("reference", DeviceKind::Reference)];
        let isas =
            [("auto", Isa::Auto), ("avx512", Isa::Avx512), ("avx2", Isa::Avx2), ("portable", Isa::Portable)];
        let threads = self.get("device.threads", |v| integer(v, 0, 4096))?;
        Ok(DeviceConfig {
            kind: self.get("device.kind", |v| one_of(v, &kinds))?,
            threads: if threads == 0 { cores() } else { threads },
            isa: self.get("device.isa", |v| one_of(v, &isas))?,
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

/// `section.name` in its two parts.
fn split(key: &str) -> (&str, &str) {
    key.split_once('.').expect("a key has a section; anything else is a bug")
}

/// Every `section.name` of a table, and the names that stand in no section or for an empty one.
fn keys(table: &Table) -> Vec<String> {
    let names = |(section, value): (&String, &Value)| match value {
        Value::Table(inner) if !inner.is_empty() => {
            inner.keys().map(|name| format!("{section}.{name}")).collect()
        }
        _ => vec![section.clone()],
    };
    table.iter().flat_map(names).collect()
}

/// Edits (insert, delete, replace a character) between two keys.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn text(value: &Value) -> Result<String, String> {
    value.as_str().map(str::to_string).ok_or_else(|| "expected a text".to_string())
}

fn some_text(value: &Value) -> Result<String, String> {
    text(value).and_then(|s| if s.is_empty() { Err("must not be empty".to_string()) } else { Ok(s) })
}

fn integer(value: &Value, min: i64, max: i64) -> Result<usize, String> {
    let number = value.as_integer().ok_or("expected a whole number")?;
    if !(min..=max).contains(&number) {
        return Err(format!("must be from {min} to {max}"));
    }
    Ok(number as usize)
}

/// The meaning of the word that `value` is.
fn one_of<T: Copy>(value: &Value, words: &[(&str, T)]) -> Result<T, String> {
    let hit = value.as_str().and_then(|word| words.iter().find(|(name, _)| *name == word));
    hit.map(|(_, meaning)| *meaning).ok_or_else(|| {
        let names: Vec<_> = words.iter().map(|(name, _)| format!("\"{name}\"")).collect();
        format!("must be one of {}", names.join(", "))
    })
}

/// A number and the unit behind it.
fn number_and_unit(text: &str) -> Result<(f64, &str), String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number = text[..end].parse().map_err(|_| "must begin with a number".to_string())?;
    Ok((number, text[end..].trim()))
}

fn duration(value: &Value) -> Result<Duration, String> {
    let text = value.as_str().ok_or("expected a duration such as \"250ms\" or \"4s\"")?;
    let (number, unit) = number_and_unit(text)?;
    let seconds = match unit {
        "ms" => 1e-3,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err("the unit must be ms, s, m or h".to_string()),
    };
    let limit_s = 366.0 * 86400.0;
    if number * seconds > limit_s {
        return Err("must be at most a year".to_string());
    }
    Ok(Duration::from_secs_f64(number * seconds))
}

fn some_duration(value: &Value) -> Result<Duration, String> {
    duration(value).and_then(|d| if d.is_zero() { Err("must not be zero".to_string()) } else { Ok(d) })
}

fn whole_seconds(value: &Value) -> Result<Duration, String> {
    let duration = some_duration(value)?;
    if duration.subsec_nanos() > 0 { Err("must be whole seconds".to_string()) } else { Ok(duration) }
}

fn bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = number_and_unit(text)?;
    let scale: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return Err("the unit must be B, KiB, MiB, GiB, TiB, kB, MB, GB or TB".to_string()),
    };
    let bytes = number * scale as f64;
    if bytes > (1u64 << 50) as f64 { Err("must be at most 1024TiB".to_string()) } else { Ok(bytes as u64) }
}

/// A size in bytes, given as a text with a unit or as a number.
fn size(value: &Value, min: u64) -> Result<u64, String> {
    let size = match value {
        Value::String(text) => bytes(text)?,
        Value::Integer(number) => bytes(&number.to_string())?,
        _ => return Err("expected a size such as \"4MiB\"".to_string()),
    };
    if size < min { Err(format!("must be at least {min} bytes")) } else { Ok(size) }
}

fn kv_size(value: &Value) -> Result<KvSize, String> {
    let text = value.as_str().ok_or("expected \"auto\", \"65536 tokens\" or \"2GiB\"")?;
    if text == "auto" {
        return Ok(KvSize::Fitting);
    }
    if let Some(number) = text.strip_suffix("tokens") {
        let tokens = number.trim().parse().ok().filter(|tokens| (1..=1usize << 40).contains(tokens));
        return tokens.map(KvSize::Tokens).ok_or_else(|| "expected a whole number of tokens".to_string());
    }
    size(value, 1).map(KvSize::Bytes)
}

fn page_positions(value: &Value) -> Result<usize, String> {
    let positions = integer(value, PAGE_UNIT as i64, 1 << 24)?;
    if positions % PAGE_UNIT != 0 {
        return Err(format!("must be a multiple of {PAGE_UNIT}"));
    }
    Ok(positions)
}

/// With no row to spare beside the decode rows, prompts would never be read.
fn token_budget(value: &Value, slots: usize) -> Result<usize, String> {
    let budget = integer(value, 1, 1 << 24)?;
    if budget <= slots {
        return Err(format!("must be more than scheduler.slots, which is {slots}"));
    }
    Ok(budget)
}

fn log_level(value: &Value) -> Result<String, String> {
    let level = some_text(value)?;
    EnvFilter::try_new(&level).map(|_| level).map_err(|e| e.to_string())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config_of(toml: &str) -> Result<Config, ConfigError> {
        let mut layers = Layers::new();
        layers.add(Source::File("some.toml".into()), toml.parse().unwrap())?;
        layers.config()
    }

    fn error_of(toml: &str) -> String {
        config_of(toml).unwrap_err().to_string()
    }

    #[test]
    fn the_commented_file_is_the_defaults() {
        let config = Config::load(None, Overrides::default()).unwrap();
        let expected = Config {
            model: ModelConfig { path: "".into(), spec: None, served_name: "".into() },
            server: ServerConfig {
                host: "127.0.0.1".into(),
                port: 8080,
                workers: 2,
                body_limit_bytes: 4 << 20,
                keep_alive: Duration::from_secs(75),
                stream_comment_interval: Duration::from_secs(15),
                stalled_after: Duration::from_secs(30),
                retry_after: Duration::from_secs(1),
            },
            scheduler: SchedulerConfig {
                slots: 32,
                max_waiting: 256,
                token_budget: 512,
                policy: Policy::Fused,
                shuffle: true,
                drain_timeout: Duration::from_secs(30),
            },
            kv: KvConfig { ty: QuantType::F16, page_positions: 32, size: KvSize::Fitting, max_context: None },
            device: DeviceConfig { kind: DeviceKind::Cpu, threads: cores(), isa: Isa::Auto },
            log: LogConfig { format: LogFormat::Text, level: "info,actix_server=warn".into() },
        };
        assert_eq!(config, expected);
    }

    /// Each key of the file reaches the configuration: a wrong type there is told by its name.
    #[test]
    fn every_key_of_the_file_is_read() {
        let defaults: Table = DEFAULTS.parse().unwrap();
        for key in keys(&defaults) {
            let (section, name) = split(&key);
            let error = error_of(&format!("[{section}]\n{name} = []"));
            assert!(error.starts_with(&format!("some.toml: {key} = []: ")), "{key}: {error}");
        }
        assert_eq!(keys(&defaults).len(), DEFAULTS.lines().filter(|line| line.contains(" = ")).count());
    }

    #[test]
    fn an_unknown_key_is_told_with_the_nearest() {
        assert_eq!(
            error_of("[server]\nprot = 1"),
            "some.toml: there is no key 'server.prot'; the nearest is 'server.port'"
        );
        assert!(error_of("[schedular]\nslots = 1").ends_with("the nearest is 'scheduler.slots'"));
        assert!(error_of("slots = 1").contains("there is no key 'slots'"));
        assert!(error_of("[schedular]").contains("there is no key 'schedular'"));
        assert!(error_of("server = 1").contains("there is no key 'server'"));
    }

    #[test]
    fn a_section_whose_keys_are_all_commented_out_changes_nothing() {
        let defaults = Config::load(None, Overrides::default()).unwrap();
        assert_eq!(config_of("[server]\n# port = 1\n[kv]\n").unwrap(), defaults);
    }

    #[test]
    fn wrong_values_are_told_by_key_and_value() {
        for (toml, part) in [
            ("[server]\nport = 65536", "server.port = 65536: must be from 0 to 65535"),
            ("[server]\nport = \"x\"", "server.port = \"x\": expected a whole number"),
            ("[server]\nretry_after = \"1500ms\"", "must be whole seconds"),
            ("[server]\nbody_limit = \"4 apples\"", "the unit must be B, KiB"),
            ("[scheduler]\nslots = 0", "scheduler.slots = 0: must be from 1"),
            (
                "[scheduler]\nslots = 512",
                "token_budget = 512: must be more than scheduler.slots, which is 512",
            ),
            ("[scheduler]\npolicy = \"best\"", "one of \"fused\", \"window\", \"concurrent\""),
            ("[scheduler]\nwindow = \"0s\"", "must not be zero"),
            ("[scheduler]\nwindow = \"-1s\"", "must begin with a number"),
            ("[scheduler]\nwindow = \"4\"", "the unit must be ms, s, m or h"),
            ("[kv]\npage_positions = 48", "must be a multiple of 32"),
            ("[kv]\nsize = \"x tokens\"", "expected a whole number of tokens"),
            ("[kv]\ntype = \"q1\"", "must be one of \"f32\", \"f16\", \"bf16\""),
            ("[log]\nlevel = \"a=b=c\"", "log.level = "),
        ] {
            let error = error_of(toml);
            assert!(error.contains(part), "{toml}: {error}");
        }
    }

    #[test]
    fn values_are_read_with_their_units() {
        let toml =
            "[scheduler]\npolicy = \"window\"\nwindow = \"1.5s\"\n[kv]\nsize = \"2GiB\"\nmax_context = 9";
        let config = config_of(toml).unwrap();
        assert_eq!(config.scheduler.policy, Policy::Window { window: Duration::from_millis(1500) });
        assert_eq!(config.kv.size, KvSize::Bytes(2 << 30));
        assert_eq!(config.kv.max_context, Some(9));
        assert_eq!(config_of("[kv]\nsize = \"4096 tokens\"").unwrap().kv.size, KvSize::Tokens(4096));
    }

    #[test]
    fn flags_go_before_the_file_and_are_blamed_for_their_own() {
        let mut layers = Layers::new();
        layers.add(Source::File("some.toml".into()), "[server]\nport = 1".parse().unwrap()).unwrap();
        let mut flags = Overrides::default();
        flags.set("server.port", Some(2));
        flags.set("server.host", None::<String>);
        flags.set("kv.page_positions", Some(33));
        layers.add_flags(flags).unwrap();
        assert_eq!(layers.server().unwrap().port, 2);
        assert_eq!(layers.kv().unwrap_err().origin, Source::CommandLine);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let error = Config::load(Some(Path::new("/nowhere/at/all.toml")), Overrides::default()).unwrap_err();
        assert!(error.to_string().starts_with("/nowhere/at/all.toml: "));
    }
}
