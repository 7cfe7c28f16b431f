//! Plan of a placement as text.
//!
//! Invariant: it has the same contents as the JSON output.

use super::report::{PlacementReport, PolicyFigures, StepFigures, TierFigures};
use std::fmt::Write;

const HEAD: [&str; 8] = ["slots", "per step", "KV cache", "weights", "from disk", "decode", "job", "request"];

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
    let PolicyFigures { memory, layer_bytes, .. } = &report.policy;
    let mut text = format!("{:.1} MiB; weights of layers:", memory / MIB);
    for (place, (tier, bytes)) in report.tiers.iter().zip(layer_bytes).enumerate() {
        let comma = if place > 0 { "," } else { "" };
        let _ = write!(
            text,
            "{comma} {:.1} MiB {} {}",
            bytes / MIB,
            if place > 0 { "on" } else { "in" },
            tier.name
        );
    }
    text
}

fn step(step: &StepFigures) -> String {
    let StepFigures { tokens_per_second, seconds, compute_seconds, read_seconds } = step;
    format!(
        "{tokens_per_second:.1} tokens/s, a step takes {seconds:.3} s: computing {compute_seconds:.3} s, \
         reading {read_seconds:.3} s"
    )
}

fn bound(policy: &PolicyFigures) -> String {
    match policy.bound {
        "compute" => "computing: more sequences at once are hardly faster".to_owned(),
        "memory" => "reading memory: each step reads all weights, for few sequences".to_owned(),
        tier => format!("reading the {tier}: each step waits for weights that are not in memory"),
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
    let below = policy.layer_bytes[1..].iter().fold(0.0, |sum, bytes| sum + bytes);
    [
        policy.slots.to_string(),
        policy.token_budget.to_string(),
        policy.kv_type.to_owned(),
        policy.weights.unwrap_or("-").to_owned(),
        format!("{:.1} MiB", below / MIB),
        policy.decode.as_ref().map_or("-".to_owned(), |step| format!("{:.1} tok/s", step.tokens_per_second)),
        format!("{:.1} tok/s", policy.job_tokens_per_second),
        format!("{:.1} s", policy.request_seconds),
    ]
}

const MIB: f64 = (1u64 << 20) as f64;
