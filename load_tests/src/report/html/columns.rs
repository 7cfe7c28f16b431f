//! The columns that tables of several runs have in common.
//!
//! Invariant: the cells come in the order of the columns, whatever is absent.

use super::numbers::{count, figure, maybe};
use crate::{
    measure::Stats,
    report::{Distribution, RunReport},
};

/// Columns of [`outcome`].
pub const OUTCOME: [&str; 5] = ["completed", "failed", "duration (s)", "req/s", "tok/s"];

/// Columns of [`latencies`], in milliseconds.
pub const LATENCIES: [&str; 6] = ["TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "E2EL p50", "E2EL p99"];

/// What a caption says of them.
pub const IN_MS: &str = "latencies in milliseconds";

/// Which of a run's distributions.
pub type Measure = fn(&RunReport) -> Option<&Distribution>;

pub const TTFT: Measure = |run| run.latencies.ttft.as_ref();
pub const ITL: Measure = |run| run.latencies.itl.as_ref();
pub const E2EL: Measure = |run| run.latencies.e2el.as_ref();

/// What came of a run.
pub fn outcome(run: &RunReport) -> impl Iterator<Item = String> {
    let counts = [run.counts.completed, run.counts.failed].map(count);
    let rates = [run.duration_s, run.request_throughput, run.output_throughput].map(figure);
    counts.into_iter().chain(rates)
}

/// Median and 99th percentile of the latencies of a run.
pub fn latencies(run: &RunReport) -> impl Iterator<Item = String> {
    of_stats([TTFT, ITL, E2EL].map(|of| of(run).map(|distribution| distribution.stats)))
}

/// The same of figures by model.
pub fn of_stats(stats: [Option<Stats>; 3]) -> impl Iterator<Item = String> {
    let pair = |stats: Option<Stats>| [stats.map(|stats| stats.median), stats.map(|stats| stats.p99)];
    stats.into_iter().flat_map(pair).map(maybe)
}
