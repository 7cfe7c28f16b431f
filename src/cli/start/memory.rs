//! The memory that the process can take: whether it is there, and what a server takes at most, by part.
//!
//! Invariant: each part of the budget is bounded by something: sizes that are allocated once, or a setting.

use super::{PreparedModel, configured_model, forecast, merge_reports, open_source, open_tokenizer};
use crate::actors::EngineSetup;
use crate::actors::engine::{available_memory, queued_step_bytes, running_bytes, sequence_bytes};
use crate::actors::queue::ROOM_FACTOR;
use crate::config::{Config, DeviceConfig, HostTier, Placement, ServerConfig, TierConfig};
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::server::{BoundServer, blocking_threads, request_memory_max};
use crate::text::Tokenizer;
use crate::text::chat_template::RENDERING_BYTES_MAX;
use anyhow::{Context, Result};
use std::hint::black_box;
use tracing::warn;

/// Bytes of a connection: the buffers of its requests and responses, of TLS, and its task.
const CONNECTION_BYTES: usize = 320 << 10;

/// Bytes of log lines that wait to be written and are being written.
const LOG_BYTES: usize = 4 << 20;

/// Bytes of a thread's stack and of what the allocator keeps for it.
const THREAD_BYTES: usize = 1 << 20;

/// The memory that an engine allocates at its start, in bytes, on its devices and on the host.
#[derive(Clone, Copy, Debug)]
pub struct EngineMemory {
    pub weights: usize,
    pub kv: usize,
    /// Activations, step buffers, and steps on their way.
    pub steps: usize,
    /// Weights and KV caches, of those above, that are in host memory instead of a device's own.
    pub copies: [usize; 2],
}

impl EngineMemory {
    /// Predicts the memory of an engine, without that of devices that have their own.
    pub fn predict(device: &DeviceConfig, source: &ModelSource, setup: &EngineSetup) -> Result<EngineMemory> {
        let reports = device.devices().zip(forecast(device, source, setup)?.into_iter().flatten());
        let on_host = reports.filter(|(device, _)| !device.kind.has_own_memory());
        Ok(EngineMemory::from_reports(on_host.map(|(_, report)| report).collect(), setup))
    }

    /// Adds up the forecasts of an engine's devices.
    pub fn from_reports(devices: Vec<ExecutorReport>, setup: &EngineSetup) -> EngineMemory {
        let members = setup.partition.device_names().concat().len();
        let queued = queued_step_bytes(&setup.limits, setup.lanes, members);
        let sum = merge_reports(devices);
        let [weights, kv] = sum.host_bytes();
        let steps = [sum.activation_bytes, sum.step_bytes].into_iter().fold(queued, usize::saturating_add);
        EngineMemory {
            weights: sum.weight_bytes + weights,
            kv: sum.kv_bytes + kv,
            steps,
            copies: [weights, kv],
        }
    }

    /// Returns the sum of all parts in bytes.
    pub fn total(&self) -> usize {
        [self.kv, self.steps].into_iter().fold(self.weights, usize::saturating_add)
    }

    /// Fails if the memory is not available to the process. Some of it is allocated where a failure would
    /// abort the process.
    pub fn check(&self, setup: &EngineSetup) -> Result<()> {
        let total = self.total();
        // Reserved only, not written, so it costs nothing.
        let mut probe: Vec<u8> = Vec::new();
        let reserved = probe.try_reserve_exact(total);
        black_box(&probe);
        reserved.with_context(|| self.shortage(setup.limits.rows))
    }

    /// Returns the message for memory that is not there, with the settings that determine its parts.
    fn shortage(&self, rows: usize) -> String {
        let [weights, kv] = self.copies.map(mib);
        let copies = match self.copies {
            [0, 0] => String::new(),
            _ => format!(
                "; of these, {weights:.1} MiB of weights (tiers.host) and {kv:.1} MiB of caches \
                          (tiers.host_kv) are in the memory of the host, beside that of the devices"
            ),
        };
        format!(
            "cannot allocate {:.1} MiB: {:.1} MiB for weights, {:.1} MiB for the KV cache (kv.size) and \
             {:.1} MiB for steps of {rows} rows (scheduler.token_budget, scheduler.slots){copies}",
            mib(self.total()),
            mib(self.weights),
            mib(self.kv),
            mib(self.steps),
        )
    }
}

/// The memory that a server takes at most, by part.
#[derive(Clone, Debug)]
pub struct MemoryBudget(Vec<Part>);

#[derive(Clone, Copy, Debug)]
struct Part {
    name: &'static str,
    bytes: usize,
}

impl MemoryBudget {
    /// Computes the budget of a server, before its model is loaded: what the program takes by itself, with
    /// its tokenizer, is measured now.
    pub fn new(model: &PreparedModel, server: &ServerConfig, place: &BoundServer) -> Result<MemoryBudget> {
        let setup = &model.setup;
        let engine = EngineMemory::predict(&model.device, &model.source, setup)?;
        model.tokenizer.build_tables();
        let serving = Serving {
            server,
            max_waiting: setup.scheduler.max_waiting,
            connections: place.connections(),
            tokenizer: &model.tokenizer,
            has_template: setup.model.chat_template.is_some(),
            sequence: sequence_bytes(setup.limits.positions + setup.limits.encoder_positions),
        };
        let part = |name, bytes| Part { name, bytes };
        let of_engine =
            [part("weights", engine.weights), part("KV cache", engine.kv), part("steps", engine.steps)];
        let others = serving.parts(running_sequences(setup), anonymous_bytes());
        Ok(MemoryBudget(of_engine.into_iter().chain(others).collect()))
    }

    /// Returns the sum of all parts in bytes.
    pub fn total(&self) -> usize {
        self.0.iter().map(|part| part.bytes).fold(0, usize::saturating_add)
    }

    /// Returns the budget as one line.
    pub fn line(&self) -> String {
        let parts: Vec<_> =
            self.0.iter().map(|part| format!("{} {:.1}", part.name, mib(part.bytes))).collect();
        format!("memory       at most {:.1} MiB: {}", mib(self.total()), parts.join(", "))
    }
}

/// The sizes that the memory of a server beside its engine follows from.
struct Serving<'a> {
    server: &'a ServerConfig,
    max_waiting: usize,
    connections: usize,
    tokenizer: &'a Tokenizer,
    has_template: bool,
    /// Bytes of the longest sequence.
    sequence: usize,
}

impl Serving<'_> {
    /// Returns the parts of the memory. Sequences that run take `running` bytes, and the program has
    /// `program` bytes already.
    fn parts(&self, running: usize, program: usize) -> [Part; 8] {
        let Serving { server, tokenizer, .. } = self;
        let threads = server.workers * (1 + blocking_threads(server));
        // Each worker renders a short conversation, and the turns to be parsed are for as many long ones, and
        // for one more than as many small ones that began before.
        let renderings = if self.has_template { 3 * server.workers + 1 } else { 0 };
        // The queue has space for the shares of several clients.
        let queued = self.max_waiting.saturating_mul(ROOM_FACTOR).saturating_mul(self.sequence);
        let part = |name, bytes| Part { name, bytes };
        [
            part("sequences", queued.saturating_add(running)),
            part("connections", self.connections.saturating_mul(CONNECTION_BYTES)),
            part("requests", request_memory_max(server, tokenizer.memory_per_byte())),
            part("templates", renderings * RENDERING_BYTES_MAX),
            part("tokenizers", threads * tokenizer.thread_bytes()),
            part("responses", server.response_bytes),
            part("grammars", server.grammar.cache_bytes),
            part("program", program + (threads + 4) * THREAD_BYTES + LOG_BYTES),
        ]
    }
}

/// Returns the bytes of the sequences that run in an engine.
fn running_sequences(setup: &EngineSetup) -> usize {
    running_bytes(&setup.limits, setup.kv.pages + setup.kv.window_pages)
}

/// Returns the bytes that are reserved beside an engine with sizes that follow from the memory, without and
/// with those of running sequences.
pub(super) fn reserved_beside(config: &Config, setup: &EngineSetup) -> (usize, usize) {
    let reserved = config.tiers.reserved;
    let all = reserved.map_or(0, |bytes| bytes.saturating_add(running_sequences(setup)));
    (reserved.unwrap_or(0), all)
}

/// Returns the configuration of a server whose models are fetched. If sizes follow from the memory, it
/// reserves what the server takes beside its engine, but no more than half of what is available.
pub fn with_reserve(config: Config) -> Result<Config> {
    let TierConfig { host, kv, host_kv, placement, .. } = &config.tiers;
    if ![host, kv, host_kv].contains(&&HostTier::Auto) && *placement == Placement::Configured {
        return Ok(config);
    }
    let before = anonymous_bytes();
    let source = open_source(&configured_model(&config.model)?, &config.model)?;
    let tokenizer = open_tokenizer(&source)?;
    tokenizer.build_tables();
    let serving = Serving {
        server: &config.server,
        max_waiting: config.scheduler.max_waiting,
        connections: config.server.max_connections,
        tokenizer: &tokenizer,
        has_template: source.chat.template.is_some(),
        sequence: sequence_bytes(contexts(&config, &source).iter().sum()),
    };
    let parts = serving.parts(0, anonymous_bytes().saturating_sub(before));
    let wanted = parts.iter().map(|part| part.bytes).fold(0, usize::saturating_add);
    let most = available_memory() / 2;
    if wanted > most {
        warn!(
            "a server with these settings may take {:.1} MiB beside its model, more than half of the memory; \
             {:.1} MiB are reserved. server.max_connections, server.request_memory, server.response_memory \
             and server.workers lower it",
            mib(wanted),
            mib(most)
        );
    }
    Ok(Config { tiers: TierConfig { reserved: Some(wanted.min(most)), ..config.tiers }, ..config })
}

/// Returns the tokens of a model's context and those of its encoder's input; 0 for what it does not have.
pub(super) fn contexts(config: &Config, source: &ModelSource) -> [usize; 2] {
    let limit = config.kv.max_context.unwrap_or(usize::MAX);
    let own = source.spec.decoder.as_ref().map_or(0, |_| source.spec.context);
    [own, source.spec.encoder_context()].map(|tokens| tokens.min(limit))
}

/// Returns the bytes of this process that are in memory and come from no file; 0 if the system does not say.
fn anonymous_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    kib.unwrap_or(0) * 1024
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    #[test]
    fn a_shortage_of_host_memory_names_what_takes_it() {
        let memory = |copies| EngineMemory { weights: 3 << 20, kv: 2 << 20, steps: 1 << 20, copies };
        let plain = memory([0, 0]).shortage(9);
        assert!(plain.starts_with("cannot allocate 6.0 MiB: ") && !plain.contains("tiers"), "{plain}");
        let copied = memory([2 << 20, 1 << 20]).shortage(9);
        for part in ["2.0 MiB of weights (tiers.host)", "1.0 MiB of caches (tiers.host_kv)"] {
            assert!(copied.contains(part), "{copied}");
        }
    }

    fn reserved(settings: &[(&'static str, &str)]) -> Option<usize> {
        let mut flags = Overrides::default();
        for (key, value) in settings {
            match value.parse::<u32>() {
                Ok(number) => flags.set(key, Some(number)),
                Err(_) => flags.set(key, Some(*value)),
            }
        }
        with_reserve(Config::load(None, flags).unwrap()).unwrap().tiers.reserved
    }

    #[test]
    fn a_server_reserves_what_its_settings_allow_if_sizes_follow_from_the_memory() {
        assert_eq!(reserved(&[]), None);
        let small = [
            ("server.request_memory", "8MiB"),
            ("server.response_memory", "4MiB"),
            ("server.body_limit", "64KiB"),
            ("server.workers", "1"),
            ("grammar.cache_size", "1MiB"),
        ];
        let least = (16 * CONNECTION_BYTES) + (12 << 20);
        for way in [("tiers.host", "auto"), ("tiers.kv", "auto"), ("tiers.placement", "auto")] {
            let with = |connections| {
                reserved(&[&small[..], &[way, ("server.max_connections", connections)]].concat()).unwrap()
            };
            let (bytes, more) = (with("16"), with("1016"));
            assert!(bytes > least, "{bytes}");
            // What opening the tokenizer takes varies.
            assert!(more >= bytes + 500 * CONNECTION_BYTES, "{bytes}, {more}");
        }
        let half = reserved(&[("tiers.host", "auto"), ("server.response_memory", "4096GiB")]).unwrap();
        assert!(half <= available_memory(), "{half}");
    }
}
