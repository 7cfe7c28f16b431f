//! The section of one run: the plan, key metrics, notes, plots, and full tables.
//!
//! Invariant: a measure without values is shown as missing, never as zero.

use super::{
    block::{Block, ReportTable},
    cards::cards,
    columns,
    numbers::{MISSING, format_count, format_optional, format_value},
    run_plots::run_plots,
    texts,
};
use crate::report::{Distribution, Failures, ModelReport, RunReport, ServerRow};

/// Returns all blocks of a run.
pub fn blocks(run: &RunReport) -> Vec<Block> {
    let notes = texts::notes(run).into_iter().map(Block::Note);
    let whole = [latencies(run), counts(run)];
    let tables = whole.into_iter().chain(failures(run)).chain(models(run)).chain(server(run));
    [Block::Facts(texts::facts(run)), Block::Cards(cards(run))]
        .into_iter()
        .chain(notes)
        .chain([Block::Plots(run_plots(run))])
        .chain(tables.map(Block::Table))
        .collect()
}

fn latencies(run: &RunReport) -> ReportTable {
    let of = &run.latencies;
    let rows = [
        ("Time to first token (TTFT)", &of.ttft),
        ("Time per output token (TPOT)", &of.tpot),
        ("Inter-token latency (ITL)", &of.itl),
        ("End-to-end latency (E2EL)", &of.e2el),
        ("Send delay", &of.lateness),
    ];
    let row = |(name, distribution): (&str, &Option<Distribution>)| {
        let figures = match distribution {
            Some(distribution) => distribution.stats.named().map(|(_, value)| format_value(value)),
            None => [MISSING; 7].map(String::from),
        };
        [name.to_string()].into_iter().chain(figures).collect()
    };
    let columns = ["ms", "mean", "median", "std", "p90", "p95", "p99", "max"];
    ReportTable::new("Latencies", columns, rows.into_iter().map(row).collect())
}

fn counts(run: &RunReport) -> ReportTable {
    let counts = &run.counts;
    let columns =
        ["planned", "sent", "completed", "hung up", "failed", "unsent", "short responses", "retries"];
    let row = [
        format_count(counts.planned),
        format_count(counts.sent),
        format_count(counts.completed),
        format_count(counts.hung_up),
        format_count(counts.failed),
        format_count(counts.unsent),
        format_count(counts.short),
        format_count(counts.retries),
    ];
    let cells = ["requests".to_string()].into_iter().chain(row).collect();
    ReportTable::new("Requests", [""].into_iter().chain(columns), vec![cells])
}

fn failures(run: &RunReport) -> Option<ReportTable> {
    let row = |(kind, failures): (&String, &Failures)| {
        vec![kind.clone(), format_count(failures.count), failures.first.clone()]
    };
    let rows: Vec<_> = run.counts.failures.iter().map(row).collect();
    (!rows.is_empty()).then(|| ReportTable::new("Failures", ["kind", "requests", "first message"], rows))
}

fn models(run: &RunReport) -> Option<ReportTable> {
    let row = |model: &ModelReport| {
        let counts = [model.sent, model.completed, model.failed].map(format_count);
        let latencies = columns::stats_cells([model.ttft, model.itl, model.e2el]);
        let cells = [model.model.clone()].into_iter().chain(counts);
        cells.chain([format_count(model.output_tokens)]).chain(latencies).collect()
    };
    let names = ["model", "sent", "completed", "failed", "output tokens"];
    let names = names.into_iter().chain(columns::LATENCIES);
    let rows: Vec<_> = run.by_model.iter().map(row).collect();
    (!rows.is_empty())
        .then(|| ReportTable::new(&format!("By model, {}", columns::LATENCY_CAPTION), names, rows))
}

fn server(run: &RunReport) -> Option<ReportTable> {
    let server = run.server.as_ref()?;
    let row = |row: &ServerRow| {
        vec![row.name.clone(), row.unit.clone(), format_value(row.server), format_optional(row.client)]
    };
    let more = [
        ("decode steps", server.steps.map(format_count)),
        ("sequences per step", server.sequences_per_step.map(format_value)),
    ];
    let more = more
        .into_iter()
        .filter_map(|(name, value)| Some(vec![name.to_string(), String::new(), value?, MISSING.to_string()]));
    let rows: Vec<_> = server.rows.iter().map(row).chain(more).collect();
    let columns = ["", "unit", "server", "client"];
    (!rows.is_empty()).then(|| ReportTable::new("Server metrics", columns, rows))
}
