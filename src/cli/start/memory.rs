//! The memory that the process can take: whether it is there, and what a server takes at most, by part.
//!
//! Invariant: each part of the budget is bounded by something: sizes that are allocated once, or a setting.

use super::{PreparedModel, forecast, merge_reports};
use crate::actors::EngineSetup;
use crate::actors::queue::{PREEMPTED_FACTOR, ROOM_FACTOR};
use crate::actors::step::Step;
use crate::config::{DeviceConfig, ServerConfig};
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::server::{BoundServer, blocking_threads, request_memory_max};
use crate::text::chat_template::RENDERING_BYTES_MAX;
use anyhow::{Context, Result};
use std::hint::black_box;

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
}

impl EngineMemory {
    /// Predicts the memory of an engine.
    pub fn predict(device: &DeviceConfig, source: &ModelSource, setup: &EngineSetup) -> Result<EngineMemory> {
        let devices = forecast(device, source, setup)?.into_iter().flatten().collect();
        Ok(EngineMemory::from_reports(devices, setup))
    }

    /// Adds up the forecasts of an engine's devices.
    pub fn from_reports(devices: Vec<ExecutorReport>, setup: &EngineSetup) -> EngineMemory {
        // Each device has an output, and each lane a step on its way and one that is prepared.
        let queued = (2 * setup.lanes + 1 + devices.len()).saturating_mul(Step::bytes(&setup.limits));
        let sum = merge_reports(devices);
        let [weights, kv] = sum.host_bytes();
        let steps = [sum.activation_bytes, sum.step_bytes].into_iter().fold(queued, usize::saturating_add);
        EngineMemory { weights: sum.weight_bytes + weights, kv: sum.kv_bytes + kv, steps }
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
        reserved.with_context(|| {
            format!(
                "cannot allocate {:.1} MiB: {:.1} MiB for weights, {:.1} MiB for the KV cache (kv.size) and \
                 {:.1} MiB for steps of {} rows (scheduler.token_budget, scheduler.slots)",
                mib(total),
                mib(self.weights),
                mib(self.kv),
                mib(self.steps),
                setup.limits.rows
            )
        })
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
        let serving = server.workers * (1 + blocking_threads(server));
        // Each worker renders a short conversation, and the turns to be parsed are for as many long ones, and
        // for one more than as many small ones that began before.
        let renderings = setup.model.chat_template.as_ref().map_or(0, |_| 3 * server.workers + 1);
        model.tokenizer.build_tables();
        let part = |name, bytes| Part { name, bytes };
        Ok(MemoryBudget(vec![
            part("weights", engine.weights),
            part("KV cache", engine.kv),
            part("steps", engine.steps),
            part("sequences", sequence_bytes(setup)),
            part("connections", place.connections().saturating_mul(CONNECTION_BYTES)),
            part("requests", request_memory_max(server, model.tokenizer.memory_per_byte())),
            part("templates", renderings * RENDERING_BYTES_MAX),
            part("tokenizers", serving * model.tokenizer.thread_bytes()),
            part("responses", server.response_bytes),
            part("grammars", server.grammar.cache_bytes),
            part("program", anonymous_bytes() + (serving + 4) * THREAD_BYTES + LOG_BYTES),
        ]))
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

/// Returns the bytes of the sequences that run and wait: their tokens, what the host needs to choose the next
/// ones, and the records of pages and of the tokens in them.
fn sequence_bytes(setup: &EngineSetup) -> usize {
    /// Bytes of a sequence besides its tokens: its request, channel and places in the queues.
    const SEQUENCE_BYTES: usize = 16 << 10;
    /// Bytes of a page's record, and of its entry in the prefix index, besides its tokens.
    const PAGE_BYTES: usize = 512;
    let (limits, scheduler) = (&setup.limits, &setup.scheduler);
    // Prompt and output; the prompt again as its pages are found, with hashes.
    let tokens = 4 * size_of::<u32>() * (limits.positions + limits.encoder_positions);
    // The queue has space for the shares of several clients.
    let queued = scheduler.max_waiting.saturating_mul(ROOM_FACTOR);
    let waiting = (scheduler.slots + queued).saturating_mul(SEQUENCE_BYTES + tokens);
    // Logits, candidates and counts of running sequences, and counts of preempted ones.
    let host = limits.slots.saturating_mul(limits.vocab).saturating_mul(16 + 4 * PREEMPTED_FACTOR);
    let pages = (setup.kv.pages + setup.kv.window_pages)
        .saturating_mul(PAGE_BYTES + 2 * size_of::<u32>() * limits.page_positions);
    waiting.saturating_add(host).saturating_add(pages)
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
