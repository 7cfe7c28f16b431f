//! Plan of a placement as text.
//!
//! Invariant: it has the same contents as the JSON output.

use super::report::{PlacementReport, PolicyFigures, StepFigures, TierFigures};
use std::fmt::Write;

const HEAD: [&str; 9] = [
    "slots",
    "per step",
    "KV cache",
    "weights",
    "weights elsewhere",
    "cache elsewhere",
    "decode",
    "job",
    "request",
];

/// Formats the plan: the machine, the best policy with its predictions, and a line per other policy.
pub fn text(report: &PlacementReport) -> String {
    let PlacementReport { model, parameters, requests, prompt, output, longest_request, policy, .. } = report;
    let mut text = String::new();
    let _ = writeln!(text, "model     {model}, {:.1} M parameters", *parameters as f64 / 1e6);
    let _ = writeln!(text, "machine   {}", machine(report));
    let _ = writeln!(
        text,
        "requests  {requests} of {prompt} + {output} tokens, none above {longest_request}, for the best {}",
        report.objective
    );
    let settings = policy.settings.iter().map(|(key, value)| format!("{key} = {value}"));
    let _ = writeln!(text, "policy    {}", settings.collect::<Vec<_>>().join(", "));
    let _ = writeln!(text, "memory    {}", memory(report));
    let _ = writeln!(text, "weights   {}", places(report, &policy.layer_bytes));
    if policy.cache_bytes.iter().sum::<f64>() > 0.0 {
        let _ = writeln!(text, "caches    {}", places(report, &policy.cache_bytes));
    }
    let _ = writeln!(text, "prefill   {}", step(&policy.prefill));
    if let Some(decode) = &policy.decode {
        let _ = writeln!(text, "decode    {}", step(decode));
    }
    let _ = writeln!(
        text,
        "job       {:.1} s, {:.1} tokens/s; a request takes {:.1} s",
        policy.job_seconds, policy.job_tokens_per_second, policy.request_seconds
    );
    let _ = writeln!(text, "bound     {}", bound(policy));
    if !report.next_best.is_empty() {
        text += "\nnext best:\n";
        text += &table(&report.next_best);
    }
    text
}

fn machine(report: &PlacementReport) -> String {
    let tier = |tier: &TierFigures| {
        let size = tier.bytes.map(|bytes| format!(" ({:.1} MiB usable)", bytes / MIB)).unwrap_or_default();
        format!("{} read at {:.2} GB/s{size}", tier.name, tier.read_bytes_per_second / 1e9)
    };
    let tiers: Vec<String> = report.tiers.iter().map(tier).collect();
    format!("{:.1} MiB of memory; {}", report.memory as f64 / MIB, tiers.join(", "))
}

fn memory(report: &PlacementReport) -> String {
    let PolicyFigures { memory, host_memory, .. } = &report.policy;
    match report.tiers.iter().any(|tier| tier.name == "host") {
        true => format!("{:.1} MiB on devices, {:.1} MiB of the host", memory / MIB, host_memory / MIB),
        false => format!("{:.1} MiB", memory / MIB),
    }
}

/// Formats the bytes in each tier.
fn places(report: &PlacementReport, bytes: &[f64]) -> String {
    let place = |(tier, bytes): (&TierFigures, &f64)| {
        let preposition = if ["memory", "host"].contains(&tier.name) { "in" } else { "on" };
        let name = if tier.name == "host" { "host memory" } else { tier.name };
        format!("{:.1} MiB {preposition} {name}", bytes / MIB)
    };
    report.tiers.iter().zip(bytes).map(place).collect::<Vec<_>>().join(", ")
}

fn step(step: &StepFigures) -> String {
    let StepFigures { tokens_per_second, seconds, compute_seconds, .. } = step;
    let mut text = format!(
        "{tokens_per_second:.1} tokens/s, a step takes {seconds:.3} s: computing {compute_seconds:.3} s"
    );
    for (name, seconds) in [
        ("link to the device", step.to_device_seconds),
        ("link from the device", step.from_device_seconds),
        ("disk", step.disk_seconds),
    ] {
        if seconds > 0.0 {
            let _ = write!(text, ", {name} {seconds:.3} s");
        }
    }
    text
}

fn bound(policy: &PolicyFigures) -> &'static str {
    match policy.bound {
        "compute" => "computing: more sequences at once are hardly faster",
        "memory" => "reading the memory of the device: each step reads all weights, for few sequences",
        "link_to_device" => {
            "the link to the device: each step waits for weights or caches that are not in its memory"
        }
        "link_from_device" => "the link from the device: each step waits until caches are stored",
        _ => "the disk: each step waits for weights or caches that are not in memory",
    }
}

/// Formats policies, a line each.
fn table(policies: &[PolicyFigures]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(policies.iter().map(cells));
    let width = |column: usize| lines.iter().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for cells in &lines {
        let line: Vec<String> =
            cells.iter().zip(widths).map(|(cell, width)| format!("{cell:>width$}")).collect();
        let _ = writeln!(text, "{}", line.join("  "));
    }
    text
}

fn cells(policy: &PolicyFigures) -> [String; HEAD.len()] {
    let below =
        |bytes: &[f64]| format!("{:.1} MiB", bytes[1..].iter().fold(0.0, |sum, bytes| sum + bytes) / MIB);
    [
        policy.slots.to_string(),
        policy.token_budget.to_string(),
        policy.kv_type.to_owned(),
        policy.weights.unwrap_or("-").to_owned(),
        below(&policy.layer_bytes),
        below(&policy.cache_bytes),
        policy.decode.as_ref().map_or("-".to_owned(), |step| format!("{:.1} tok/s", step.tokens_per_second)),
        format!("{:.1} tok/s", policy.job_tokens_per_second),
        format!("{:.1} s", policy.request_seconds),
    ]
}

const MIB: f64 = (1u64 << 20) as f64;
