//! The section that compares runs.
//!
//! Invariant: a run has the same colour in the table and in every plot.

use super::{
    Curve, Scale,
    block::{Block, ReportTable, text},
    columns::{self, ITL, Measure, TTFT},
    curves,
    numbers::format_percent,
};
use crate::report::{
    RunReport,
    plots::{self, Plot},
};

/// Returns a table of the runs, and plots with their curves in shared axes.
pub fn blocks(about: &str, runs: &[RunReport]) -> Vec<Block> {
    if runs.is_empty() {
        return text(about).into_iter().chain(text("There are no runs to compare.")).collect();
    }
    let table = Block::Table(table(runs));
    text(about).into_iter().chain([table, Block::Plots(comparison_plots(runs))]).collect()
}

fn table(runs: &[RunReport]) -> ReportTable {
    let names = ["run", "arrivals"].into_iter().chain(columns::OUTCOME);
    let names = names.chain(columns::LATENCIES).chain(["overlap"]);
    let row = |run: &RunReport| {
        let first = [run.label.clone(), run.plan.arrivals.clone()].into_iter().chain(columns::outcome(run));
        first.chain(columns::latencies(run)).chain([format_percent(run.overlap)]).collect()
    };
    ReportTable::new(&format!("Runs, {}", columns::LATENCY_CAPTION), names, runs.iter().map(row).collect())
        .with_curve_keys(0..)
}

fn comparison_plots(runs: &[RunReport]) -> Vec<Plot> {
    let all = |curve: fn(&RunReport) -> Curve| -> Vec<_> { runs.iter().map(curve).collect() };
    let over_time = |title: &str, y: &str, curve| {
        plots::plot(title, &curves::seconds(), &curves::axis(y, Scale::Linear), &all(curve))
    };
    let percentiles = |title: &str, of: Measure| {
        let all: Vec<_> = runs.iter().map(|run| curves::percentiles(&run.label, of(run))).collect();
        plots::plot(title, &curves::percentile(), &curves::fitted_axis("ms", &all), &all)
    };
    vec![
        over_time("Progress", "% of output tokens", curves::progress),
        over_time("Requests in flight", "requests", curves::in_flight),
        percentiles("Time to first token", TTFT),
        percentiles("Inter-token latency", ITL),
    ]
}
