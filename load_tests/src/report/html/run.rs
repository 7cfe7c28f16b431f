//! The section of one run: the plan, key metrics, notes, plots, and full tables.
//!
//! Invariant: a measure without values is shown as missing, never as zero.

use super::{
    block::{Block, Table},
    cards::cards,
    columns,
    numbers::{ABSENT, count, figure, maybe},
    pictures::pictures,
    words,
};
use crate::report::{Distribution, Failures, ModelReport, RunReport, ServerRow};

/// Returns all blocks of a run.
pub fn blocks(run: &RunReport) -> Vec<Block> {
    let notes = words::notes(run).into_iter().map(Block::Note);
    let whole = [latencies(run), counts(run)];
    let tables = whole.into_iter().chain(failures(run)).chain(models(run)).chain(server(run));
    [Block::Facts(words::facts(run)), Block::Cards(cards(run))]
        .into_iter()
        .chain(notes)
        .chain([Block::Plots(pictures(run))])
        .chain(tables.map(Block::Table))
        .collect()
}

fn latencies(run: &RunReport) -> Table {
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
            Some(distribution) => distribution.stats.named().map(|(_, value)| figure(value)),
            None => [ABSENT; 7].map(String::from),
        };
        [name.to_string()].into_iter().chain(figures).collect()
    };
    let columns = ["ms", "mean", "median", "std", "p90", "p95", "p99", "max"];
    Table::new("Latencies", columns, rows.into_iter().map(row).collect())
}

fn counts(run: &RunReport) -> Table {
    let counts = &run.counts;
    let columns =
        ["planned", "sent", "completed", "hung up", "failed", "unsent", "short responses", "retries"];
    let row = [
        count(counts.planned),
        count(counts.sent),
        count(counts.completed),
        count(counts.hung_up),
        count(counts.failed),
        count(counts.unsent),
        count(counts.short),
        count(counts.retries),
    ];
    let cells = ["requests".to_string()].into_iter().chain(row).collect();
    Table::new("Requests", [""].into_iter().chain(columns), vec![cells])
}

fn failures(run: &RunReport) -> Option<Table> {
    let row = |(kind, failures): (&String, &Failures)| {
        vec![kind.clone(), count(failures.count), failures.first.clone()]
    };
    let rows: Vec<_> = run.counts.failures.iter().map(row).collect();
    (!rows.is_empty()).then(|| Table::new("Failures", ["kind", "requests", "first message"], rows))
}

fn models(run: &RunReport) -> Option<Table> {
    let row = |model: &ModelReport| {
        let counts = [model.sent, model.completed, model.failed].map(count);
        let latencies = columns::of_stats([model.ttft, model.itl, model.e2el]);
        let cells = [model.model.clone()].into_iter().chain(counts);
        cells.chain([count(model.output_tokens)]).chain(latencies).collect()
    };
    let names = ["model", "sent", "completed", "failed", "output tokens"];
    let names = names.into_iter().chain(columns::LATENCIES);
    let rows: Vec<_> = run.by_model.iter().map(row).collect();
    (!rows.is_empty()).then(|| Table::new(&format!("By model, {}", columns::IN_MS), names, rows))
}

fn server(run: &RunReport) -> Option<Table> {
    let server = run.server.as_ref()?;
    let row =
        |row: &ServerRow| vec![row.name.clone(), row.unit.clone(), figure(row.server), maybe(row.client)];
    let more = [
        ("decode steps", server.steps.map(count)),
        ("sequences per step", server.sequences_per_step.map(figure)),
    ];
    let more = more
        .into_iter()
        .filter_map(|(name, value)| Some(vec![name.to_string(), String::new(), value?, ABSENT.to_string()]));
    let rows: Vec<_> = server.rows.iter().map(row).chain(more).collect();
    let columns = ["", "unit", "server", "client"];
    (!rows.is_empty()).then(|| Table::new("Server metrics", columns, rows))
}
