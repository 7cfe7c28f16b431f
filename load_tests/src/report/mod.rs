//! The report of a run, the source of all output formats: table, JSON, CSV, HTML.
//!
//! Invariant: output formats only convert units. A report can be saved and loaded, so that several runs can
//! be compared later.

pub mod csv;
pub mod html;
pub mod json;
pub mod live;
mod plots;
pub mod table;

mod bars;
mod number;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::measure::Stats;

/// The report of one run. Times are in milliseconds unless the name says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// Name of the run in legends.
    pub label: String,
    /// Start of the run as `YYYYMMDD-HHMMSS`, UTC.
    pub date: String,
    pub url: String,
    pub models: Vec<String>,
    pub plan: PlanReport,
    pub counts: Counts,
    /// Seconds from the first send to the last token.
    pub duration_s: f64,
    /// Prompt tokens of the requests that received any token.
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// Completed requests per second.
    pub request_throughput: f64,
    /// Prompt tokens per second.
    pub input_throughput: f64,
    /// Output tokens per second.
    pub output_throughput: f64,
    pub goodput: Option<Goodput>,
    /// Maximum number of output tokens within one of the whole seconds since the start of the run.
    pub peak_output_tokens_per_s: u64,
    pub peak_concurrency: usize,
    /// Requests in flight, averaged over `duration_s`.
    pub mean_concurrency: f64,
    /// Flover's overlap: mean concurrency over the number of requests, 0 to 1 (paper, section VI-C).
    pub overlap: f64,
    pub latencies: Latencies,
    pub series: Series,
    /// Metrics of each model, if there are several.
    pub by_model: Vec<ModelReport>,
    /// The server's own metrics of the run, if available.
    pub server: Option<ServerReport>,
}

/// The plan of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    pub requests: usize,
    /// The arrival process in its text form.
    pub arrivals: String,
    /// Whether the run was a closed loop, which is subject to coordinated omission.
    pub closed_loop: bool,
    /// Mean requests per second; `None` for all at once and closed loops.
    pub rate: Option<f64>,
    /// Shape of the gamma distribution of gaps: 1 for Poisson, infinite for a constant gap; `None` if the
    /// gaps are not gamma-distributed.
    #[serde(with = "number")]
    pub burstiness: Option<f64>,
    pub max_concurrency: Option<usize>,
    /// Prompt length in its text form, or its source.
    pub prompt: String,
    /// Output length in its text form, or its source.
    pub output: String,
    pub endpoint: String,
    pub seed: u64,
}

/// Request counts by outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    pub planned: usize,
    pub sent: usize,
    pub completed: usize,
    pub hung_up: usize,
    pub failed: usize,
    pub unsent: usize,
    /// Completed requests with fewer tokens than requested.
    pub short: usize,
    pub retries: u64,
    /// Failed requests by kind.
    pub failures: BTreeMap<String, Failures>,
}

/// The failures of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failures {
    pub count: usize,
    /// Message of the first failure.
    pub first: String,
}

/// Completed requests within the given limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The limits in milliseconds by measure (`ttft`, `tpot`, `e2el`).
    pub limits_ms: BTreeMap<String, f64>,
    pub good: usize,
    /// Good requests per second.
    pub throughput: f64,
    /// Good requests as a fraction of all requests sent, 0 to 1.
    pub share: f64,
}

/// The latency distributions of completed requests, and the lateness of all requests sent; `None` if nothing
/// was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Time to first token, from when the request was due.
    pub ttft: Option<Distribution>,
    /// Mean time per token after the first, one value per request.
    pub tpot: Option<Distribution>,
    /// Time between events with tokens.
    pub itl: Option<Distribution>,
    /// Time from when the request was due to its last token.
    pub e2el: Option<Distribution>,
    /// Delay of the send after the due time: caused by the generator itself, or by the wait for
    /// `max_concurrency`.
    pub lateness: Option<Distribution>,
}

impl Latencies {
    /// Returns each measure with its name in JSON and its label in the table.
    pub fn named(&self) -> [(&'static str, &'static str, Option<&Distribution>); 5] {
        [
            ("ttft", "time to first token", self.ttft.as_ref()),
            ("tpot", "time per output token", self.tpot.as_ref()),
            ("itl", "inter-token latency", self.itl.as_ref()),
            ("e2el", "end-to-end latency", self.e2el.as_ref()),
            ("client_queue_time", "send delay", self.lateness.as_ref()),
        ]
    }
}

/// A distribution: exact statistics, and a histogram of 2 significant digits for plots and merging.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    #[serde(flatten)]
    pub stats: Stats,
    /// Upper bound and count of each non-empty bucket, ascending.
    pub histogram: Vec<(f64, u64)>,
}

/// Time series of a run as (seconds, value), with at most about 400 points each.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Requests in flight: a step function whose value holds until the next point.
    pub in_flight: Vec<(f64, f64)>,
    /// Fraction of all output tokens received, 0 to 1 (Flover, figure 7).
    pub progress: Vec<(f64, f64)>,
    /// Output tokens per second: a step function whose last point marks the end of the last step.
    pub output_throughput: Vec<(f64, f64)>,
}

/// The results of one of several models of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelReport {
    pub model: String,
    pub sent: usize,
    pub completed: usize,
    pub failed: usize,
    pub output_tokens: u64,
    pub ttft: Option<Stats>,
    pub itl: Option<Stats>,
    pub e2el: Option<Stats>,
}

/// The increase of the server's counters and histograms over the run, for known metric names (Mainstem, vLLM,
/// llama.cpp).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerReport {
    /// The metrics in table order, each with the client's own value if it has one.
    pub rows: Vec<ServerRow>,
    /// Decode steps during the run: Flover's total iterations.
    pub steps: Option<u64>,
    /// Mean number of sequences per step.
    pub sequences_per_step: Option<f64>,
}

/// A server metric, with the client's value of the same metric if there is one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerRow {
    pub name: String,
    pub unit: String,
    pub server: f64,
    pub client: Option<f64>,
}
