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
use mainstem_kernels::{Fraction, StepLimits};
use std::fmt::Write;

/// Returns the report of all sizes, one per line. `built` are the reports of the devices, by stage and rank.
pub(super) fn report(setup: &EngineSetup, built: &[Vec<ExecutorReport>]) -> String {
    let EngineSetup { scheduler, limits, model, .. } = setup;
    let sum = |of: fn(&ExecutorReport) -> usize| mib(built.iter().flatten().map(of).sum());
    let shuffle = if scheduler.shuffle { "on" } else { "off" };
    let mut lines = vec![format!(
        "model        {}: {}, vocabulary {}, context {}",
        model.name,
        describe_stacks(model),
        model.vocab,
        model.context
    )];
    lines.extend(device_lines(setup, built));
    lines.extend([format!(
        "weights      {:.1} MiB in {} tensors",
        sum(|it| it.weight_bytes),
        built.iter().flatten().map(|it| it.tensors.len()).sum::<usize>()
    )]);
    lines.extend(offload_lines(built));
    lines.extend([cache_line(setup, built.iter().flatten().map(|it| it.kv_bytes).sum())]);
    lines.extend(cache_offload_lines(built));
    lines.extend([
        activations_line(limits, sum(|it| it.activation_bytes)),
        format!("step buffers {:.1} MiB", sum(|it| it.step_bytes)),
    ]);
    lines.extend(exchange_line(setup));
    lines.extend(speculation_lines(model));
    lines.push(format!(
        "scheduler    {} slots, queue of {}, policy {}, shuffle {shuffle}{}",
        limits.slots,
        scheduler.max_waiting,
        policy_name(scheduler.policy),
        lanes_note(setup)
    ));
    lines.iter().fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "{line}");
        text
    })
}

/// Returns the lines about weights that do not stay on the devices, if there are any.
fn offload_lines(built: &[Vec<ExecutorReport>]) -> Vec<String> {
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
    let mut lines = vec![format!(
        "offload      {resident:.1} MiB of layers {place}, {host}{streamed:.1} MiB read from disk per step, \
         {buffers:.1} MiB of buffers"
    )];
    if sum.experts > 0 {
        let [bytes, pool] = [sum.expert_bytes, sum.pool_bytes].map(mib);
        lines.push(format!(
            "experts      {pool:.1} MiB of memory for {} of {} experts ({bytes:.1} MiB), which are read when \
             rows choose them",
            sum.pool_experts, sum.experts
        ));
    }
    lines.extend(sum.stores.iter().map(|store| format!("store        {}", store.display())));
    lines
}

/// Returns the lines about KV caches in files and in the memory of the host, if there are any.
fn cache_offload_lines(built: &[Vec<ExecutorReport>]) -> Vec<String> {
    let mut sum = CacheReport::default();
    built.iter().flatten().filter_map(|it| it.cache_offload).for_each(|it| sum.add(it));
    let CacheReport { file_bytes, host_bytes, attended_bytes, buffer_bytes } = sum;
    let buffers = format!("for which {:.1} MiB of the cache are buffers", mib(buffer_bytes));
    let attended = "whose attention is computed there".to_owned();
    let places = [
        ("kv on disk", file_bytes, &buffers),
        ("kv on host", host_bytes, if attended_bytes > 0 { &attended } else { &buffers }),
    ];
    let line = |(place, bytes, note)| format!("{place}   {:.1} MiB of layers, {note}", mib(bytes));
    places.into_iter().filter(|(_, bytes, _)| *bytes > 0).map(line).collect()
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

/// Returns the line about communication buffers, if there are several devices.
fn exchange_line(setup: &EngineSetup) -> Option<String> {
    let EngineSetup { limits, lanes, row_bytes, partition, .. } = setup;
    let bytes: usize = stage_exchange_bytes(limits, *lanes, *row_bytes, partition).sum();
    (bytes > 0).then(|| format!("exchanges    {:.1} MiB between devices", mib(bytes)))
}

/// Returns the line about the buffers for the rows of a step, of `mib` MiB.
fn activations_line(limits: &StepLimits, mib: f64) -> String {
    let (rows, at_once) = (limits.rows, limits.rows_at_once());
    let batches = if at_once < rows { format!(", {at_once} at once") } else { String::new() };
    format!("activations  {mib:.1} MiB for {rows} rows per step{batches}")
}

/// Returns the line about the KV cache of `bytes` bytes.
fn cache_line(setup: &EngineSetup, bytes: usize) -> String {
    let EngineSetup { limits, kv, page, .. } = setup;
    let per_token = match limits.window {
        None => bytes / (kv.pages * limits.page_positions),
        Some(_) => page.of(1, 1) / limits.page_positions,
    };
    format!(
        "kv cache     {:.1} MiB: {} pages of {} tokens, {}, {per_token} bytes per token{}{}",
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

/// Returns the lines about speculative decoding and its draft model, if requests speculate by default.
fn speculation_lines(model: &ModelInfo) -> Vec<String> {
    let Some(setup) = &model.speculation else { return Vec::new() };
    let Some(drafter) = setup.drafter else { return Vec::new() };
    let (method, drafts, rule) = (drafter.name(), setup.max_drafts, setup.acceptance);
    let mut lines = vec![format!("speculation  {method}, up to {drafts} drafts per step, acceptance {rule}")];
    lines.extend(setup.draft.as_ref().map(|DraftModelFacts { name, weight_bytes, context }| {
        let shorter = if *context < model.context { ", shorter than that of the model" } else { "" };
        format!("draft model  {name}: {:.1} MiB, context {context}{shorter}", mib(*weight_bytes))
    }));
    lines
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

/// Returns a line for each device: its name, part of the model, and memory.
fn device_lines(setup: &EngineSetup, built: &[Vec<ExecutorReport>]) -> Vec<String> {
    let line = |(assigned, built): (&DeviceAssignment, &ExecutorReport)| {
        let (name, bytes) = (&assigned.device, mib(built.total_bytes()));
        format!("device       {name}: {assigned}, {bytes:.1} MiB on {}", built.device)
    };
    setup.assignments.iter().flatten().zip(built.iter().flatten()).map(line).collect()
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
