//! The columns shared by tables of several runs.
//!
//! Invariant: cells are in the order of the columns, even if values are missing.

use super::numbers::{format_count, format_optional, format_value};
use crate::{
    measure::Stats,
    report::{Distribution, RunReport},
};

/// Columns of [`outcome`].
pub const OUTCOME: [&str; 5] = ["completed", "failed", "duration (s)", "req/s", "tok/s"];

/// Columns of [`latencies`], in milliseconds.
pub const LATENCIES: [&str; 6] = ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2EL p50", "E2EL p99"];

/// Caption text for [`LATENCIES`].
pub const LATENCY_CAPTION: &str = "latencies in milliseconds";

/// Selects one of a run's distributions.
pub type Measure = fn(&RunReport) -> Option<&Distribution>;

/// Times to first token of a run.
pub const TTFT: Measure = |run| run.latencies.ttft.as_ref();
/// Inter-token latencies of a run.
pub const ITL: Measure = |run| run.latencies.itl.as_ref();
/// End-to-end latencies of a run.
pub const E2EL: Measure = |run| run.latencies.e2el.as_ref();

/// Returns the cells of the [`OUTCOME`] columns of a run.
pub fn outcome(run: &RunReport) -> impl Iterator<Item = String> {
    let counts = [run.counts.completed, run.counts.failed].map(format_count);
    let rates = [run.duration_s, run.request_throughput, run.output_throughput].map(format_value);
    counts.into_iter().chain(rates)
}

/// Returns the cells of the [`LATENCIES`] columns of a run: median and 99th percentile of each latency.
pub fn latencies(run: &RunReport) -> impl Iterator<Item = String> {
    stats_cells([TTFT, ITL, E2EL].map(|of| of(run).map(|distribution| distribution.stats)))
}

/// Returns the cells of the [`LATENCIES`] columns for statistics in the order TTFT, ITL, E2EL.
pub fn stats_cells(stats: [Option<Stats>; 3]) -> impl Iterator<Item = String> {
    let pair = |stats: Option<Stats>| [stats.map(|stats| stats.median), stats.map(|stats| stats.p99)];
    stats.into_iter().flat_map(pair).map(format_optional)
}
