//! The engine's report at startup.
//!
//! Invariant: the report lists each device's part of the model like the table of the paper (Shi et al. 2024,
//! section 4), with its bytes.

use super::memory::stage_exchange_bytes;
use super::{EngineSetup, ModelInfo};
use crate::actors::speculation::DraftModelFacts;
use crate::config::Policy;
use crate::model::executor::ExecutorReport;
use crate::model::offload::{CacheReport, OffloadReport};
use crate::model::spec::Kind;
use crate::planner::DeviceAssignment;
use crate::telemetry;
use mainstem_kernels::{Fraction, KvLayout, StepLimits};

/// A fact of the report: its name, which others may have too, and its value.
pub type Fact = (&'static str, String);

/// The name of facts about places on this machine's disk.
pub const STORE: &str = "store";

/// Width of the names' column in the text of a report.
const NAME_WIDTH: usize = 13;

/// Returns the text of a report, with a line for each fact.
pub(super) fn text(facts: &[Fact]) -> String {
    facts.iter().map(|(name, value)| format!("{name:NAME_WIDTH$}{value}\n")).collect()
}

/// Returns the report of all sizes. `built` are the reports of the devices, by stage and rank.
pub(super) fn facts(setup: &EngineSetup, built: &[Vec<ExecutorReport>]) -> Vec<Fact> {
    let EngineSetup { scheduler, limits, model, .. } = setup;
    let sum = |of: fn(&ExecutorReport) -> usize| mib(built.iter().flatten().map(of).sum());
    let shuffle = if scheduler.shuffle { "on" } else { "off" };
    let ModelInfo { name, vocab, context, .. } = model;
    let mut facts =
        vec![("model", format!("{name}: {}, vocabulary {vocab}, context {context}", describe_stacks(model)))];
    facts.extend(device_facts(setup, built));
    let tensors: usize = built.iter().flatten().map(|it| it.tensors.len()).sum();
    facts.push(("weights", format!("{:.1} MiB in {tensors} tensors", sum(|it| it.weight_bytes))));
    facts.extend(offload_facts(built));
    facts.push(("kv cache", cache_size(setup, built.iter().flatten().map(|it| it.kv_bytes).sum())));
    facts.extend(cache_offload_facts(built));
    if limits.opening_rows > 0 {
        facts.push(("attention", openings(limits)));
    }
    facts.push(("activations", activations_size(limits, sum(|it| it.activation_bytes))));
    facts.push(("step buffers", format!("{:.1} MiB", sum(|it| it.step_bytes))));
    facts.extend(exchange_fact(setup));
    facts.extend(speculation_facts(model));
    let (slots, queue, policy) = (limits.slots, scheduler.max_waiting, policy_name(scheduler.policy));
    let lanes = lanes_note(setup);
    facts.push((
        "scheduler",
        format!("{slots} slots, queue of {queue}, policy {policy}, shuffle {shuffle}{lanes}"),
    ));
    facts
}

/// Returns the facts about weights that do not stay on the devices, if there are any.
fn offload_facts(built: &[Vec<ExecutorReport>]) -> Vec<Fact> {
    let mut sum = OffloadReport::default();
    built.iter().flatten().filter_map(|it| it.offload.clone()).for_each(|it| sum.add(it));
    if sum.stores.is_empty() {
        return Vec::new();
    }
    let OffloadReport { resident_bytes, host_bytes, streamed_bytes, buffer_bytes, .. } = sum;
    let [resident, streamed, buffers] = [resident_bytes, streamed_bytes, buffer_bytes].map(mib);
    let (place, host) = match host_bytes {
        0 => ("in memory", String::new()),
        bytes => ("on devices", format!("{:.1} MiB copied from the host and ", mib(bytes))),
    };
    let offload = format!(
        "{resident:.1} MiB of layers {place}, {host}{streamed:.1} MiB read from disk per step, \
         {buffers:.1} MiB of buffers"
    );
    let mut facts = vec![("offload", offload)];
    if sum.experts > 0 {
        let [bytes, pool] = [sum.expert_bytes, sum.pool_bytes].map(mib);
        let (held, all) = (sum.pool_experts, sum.experts);
        let experts = format!(
            "{pool:.1} MiB of memory for {held} of {all} experts ({bytes:.1} MiB), which are read when rows \
             choose them"
        );
        facts.push(("experts", experts));
    }
    facts.extend(sum.stores.iter().map(|store| (STORE, store.display().to_string())));
    facts
}

/// Returns the facts about KV caches in files and in the memory of the host, if there are any.
fn cache_offload_facts(built: &[Vec<ExecutorReport>]) -> Vec<Fact> {
    let mut sum = CacheReport::default();
    built.iter().flatten().filter_map(|it| it.cache_offload).for_each(|it| sum.add(it));
    let CacheReport { file_bytes, host_bytes, attended_bytes, buffer_bytes } = sum;
    let buffers = format!("for which {:.1} MiB of the cache are buffers", mib(buffer_bytes));
    let attended = "whose attention is computed there".to_owned();
    let places = [
        ("kv on disk", file_bytes, &buffers),
        ("kv on host", host_bytes, if attended_bytes > 0 { &attended } else { &buffers }),
    ];
    let fact = |(place, bytes, note)| (place, format!("{:.1} MiB of layers, {note}", mib(bytes)));
    places.into_iter().filter(|(_, bytes, _)| *bytes > 0).map(fact).collect()
}

/// Records the settings of the KV cache, as labels of a metric.
pub fn record_cache_config(setup: &EngineSetup) {
    let EngineSetup { limits, kv, prefix_rules, .. } = setup;
    let [page, pages] = [limits.page_positions, kv.pages - 1].map(|count| count.to_string());
    let caches = prefix_rules.across_requests.to_string();
    telemetry::CACHE_CONFIG_INFO.gauge_with([&page, kv.ty.name(), &caches, &pages]).set(1.0);
}

/// Returns the name of a policy, with the length of its window.
fn policy_name(policy: Policy) -> String {
    match policy {
        Policy::Window { window } => format!("{} of {} s", policy.name(), window.as_secs_f64()),
        _ => policy.name().to_owned(),
    }
}

/// Returns the fact about communication buffers, if there are several devices.
fn exchange_fact(setup: &EngineSetup) -> Option<Fact> {
    let EngineSetup { limits, lanes, row_bytes, partition, .. } = setup;
    let bytes: usize = stage_exchange_bytes(limits, *lanes, *row_bytes, partition).sum();
    (bytes > 0).then(|| ("exchanges", format!("{:.1} MiB between devices", mib(bytes))))
}

/// Describes the buffers for the rows of a step, of `mib` MiB.
fn activations_size(limits: &StepLimits, mib: f64) -> String {
    let (rows, at_once) = (limits.rows, limits.rows_at_once());
    let batches = if at_once < rows { format!(", {at_once} at once") } else { String::new() };
    format!("{mib:.1} MiB for {rows} rows per step{batches}")
}

/// Describes the attention of first chunks of prompts.
fn openings(limits: &StepLimits) -> String {
    let (least, most) = (KvLayout::BLOCK_POSITIONS, limits.opening_rows);
    format!("the first {most} tokens of prompts of at least {least} attend to all heads; no prefix cache")
}

/// Describes the KV cache of `bytes` bytes.
fn cache_size(setup: &EngineSetup, bytes: usize) -> String {
    let EngineSetup { limits, kv, page, .. } = setup;
    let per_token = match limits.window {
        None => bytes / (kv.pages * limits.page_positions),
        Some(_) => page.of(1, 1) / limits.page_positions,
    };
    format!(
        "{:.1} MiB: {} pages of {} tokens, {}, {per_token} bytes per token{}{}",
        mib(bytes),
        kv.pages - 1,
        limits.page_positions,
        kv.ty,
        window_note(setup),
        attention_note(limits)
    )
}

/// Returns a note on the pages of windowed layers, if these have pages of their own, with the memory that the
/// cache would take otherwise.
fn window_note(setup: &EngineSetup) -> String {
    let EngineSetup { limits, kv, page, .. } = setup;
    limits.window.map_or_else(String::new, |window| {
        format!(
            "; {} pages of layers with a window of {window} tokens, without which it would be {:.1} MiB",
            kv.window_pages - 1,
            mib(page.of(kv.pages, kv.pages))
        )
    })
}

/// Returns the facts about speculative decoding and its draft model, if requests speculate by default.
fn speculation_facts(model: &ModelInfo) -> Vec<Fact> {
    let Some(setup) = &model.speculation else { return Vec::new() };
    let Some(drafter) = setup.drafter else { return Vec::new() };
    let (method, drafts, rule) = (drafter.name(), setup.max_drafts, setup.acceptance);
    let how = format!("{method}, up to {drafts} drafts per step, acceptance {rule}");
    let mut facts = vec![("speculation", how)];
    facts.extend(setup.draft.as_ref().map(|DraftModelFacts { name, weight_bytes, context }| {
        let shorter = if *context < model.context { ", shorter than that of the model" } else { "" };
        ("draft model", format!("{name}: {:.1} MiB, context {context}{shorter}", mib(*weight_bytes)))
    }));
    facts
}

/// Returns a note on the fraction of cached values attended to, if it is not all.
fn attention_note(limits: &StepLimits) -> String {
    match limits.attended_fraction {
        Fraction::ONE => String::new(),
        share => format!(", of which a generated token attends to {share} of the values"),
    }
}

/// Returns a note on the number of lanes, if there are several.
fn lanes_note(setup: &EngineSetup) -> String {
    match setup.lanes {
        0 | 1 => String::new(),
        lanes => format!(", {lanes} lanes"),
    }
}

/// Returns a fact for each device: its name, part of the model, and memory.
fn device_facts(setup: &EngineSetup, built: &[Vec<ExecutorReport>]) -> Vec<Fact> {
    let fact = |(assigned, built): (&DeviceAssignment, &ExecutorReport)| {
        let (name, bytes) = (&assigned.device, mib(built.total_bytes()));
        ("device", format!("{name}: {assigned}, {bytes:.1} MiB on {}", built.device))
    };
    setup.assignments.iter().flatten().zip(built.iter().flatten()).map(fact).collect()
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

/// Describes the model's layer stacks.
fn describe_stacks(model: &ModelInfo) -> String {
    match model.kind {
        Kind::Decoder => "decoder".to_owned(),
        Kind::Encoder => "encoder".to_owned(),
        Kind::EncoderDecoder => {
            format!("encoder for inputs of up to {} tokens and decoder", model.encoder_context)
        }
    }
}
