//! The figures of a run as one value that every form is made from: table, JSON, CSV, HTML.
//!
//! Invariant: the forms show what is here; nothing is computed in them but units. What is here can be saved and
//! read again, so that reports of several runs can be made later.

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

/// One run. Times in milliseconds unless their name says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunReport {
    /// What a legend calls the run.
    pub label: String,
    /// When it began, `YYYYMMDD-HHMMSS`, UTC.
    pub date: String,
    pub url: String,
    pub models: Vec<String>,
    pub plan: PlanReport,
    pub counts: Counts,
    /// From the first send to the last token.
    pub duration_s: f64,
    /// Prompt tokens of the requests that got any answer.
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// Completed requests per second.
    pub request_throughput: f64,
    /// Tokens per second.
    pub input_throughput: f64,
    pub output_throughput: f64,
    pub goodput: Option<Goodput>,
    /// Most output tokens within one second of the run, in whole seconds from its start.
    pub peak_output_tokens_per_s: u64,
    pub peak_concurrency: usize,
    /// Requests in flight, averaged over `duration_s`.
    pub mean_concurrency: f64,
    /// Flover's overlap: mean concurrency over the number of requests, 0 to 1 (paper, section VI-C).
    pub overlap: f64,
    pub latencies: Latencies,
    pub series: Series,
    /// The same figures for each model, where there are several.
    pub by_model: Vec<ModelReport>,
    /// The server's own account of the run, where it gives one.
    pub server: Option<ServerReport>,
}

/// What was planned, in words and numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    pub requests: usize,
    /// The arrival process in its text form.
    pub arrivals: String,
    /// A closed loop has coordinated omission by its nature; reports say so.
    pub closed_loop: bool,
    /// Requests per second; `None` for all at once and closed loops.
    pub rate: Option<f64>,
    /// Shape of the gaps' gamma distribution: 1 for Poisson, infinite where all gaps are the same; `None` where gaps
    /// have none.
    #[serde(with = "number")]
    pub burstiness: Option<f64>,
    pub max_concurrency: Option<usize>,
    /// Lengths in their text form, or where they come from.
    pub prompt: String,
    pub output: String,
    pub endpoint: String,
    pub seed: u64,
}

/// What became of the requests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    pub planned: usize,
    pub sent: usize,
    pub completed: usize,
    pub hung_up: usize,
    pub failed: usize,
    pub unsent: usize,
    /// Completed requests with fewer tokens than they asked for.
    pub short: usize,
    pub retries: u64,
    /// Failed requests by kind.
    pub failures: BTreeMap<String, Failures>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failures {
    pub count: usize,
    /// What the first of them said.
    pub first: String,
}

/// Completed requests within the limits that were given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goodput {
    /// The limits by measure (`ttft`, `tpot`, `e2el`).
    pub limits_ms: BTreeMap<String, f64>,
    pub good: usize,
    /// Per second.
    pub throughput: f64,
    /// Of all requests sent, 0 to 1.
    pub share: f64,
}

/// The distributions; `None` where nothing was measured. Of completed requests, but lateness of all sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Time to first token, from when the request was due.
    pub ttft: Option<Distribution>,
    /// Mean time per token after the first, one value per request.
    pub tpot: Option<Distribution>,
    /// Between events that brought tokens.
    pub itl: Option<Distribution>,
    /// From when the request was due to its last token.
    pub e2el: Option<Distribution>,
    /// How late requests were sent: the generator's own fault, or the wait for `max_concurrency`.
    pub lateness: Option<Distribution>,
}

impl Latencies {
    /// Each measure with its name in JSON and its name in the table.
    pub fn named(&self) -> [(&'static str, &'static str, Option<&Distribution>); 5] {
        [
            ("ttft", "time to first token", self.ttft.as_ref()),
            ("tpot", "time per later token", self.tpot.as_ref()),
            ("itl", "between tokens", self.itl.as_ref()),
            ("e2el", "end to end", self.e2el.as_ref()),
            ("client_queue_time", "sent late by", self.lateness.as_ref()),
        ]
    }
}

/// A distribution: exact figures, and a histogram of 2 significant digits for pictures and for merging.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    #[serde(flatten)]
    pub stats: Stats,
    /// The upper ends of the occupied buckets, ascending, and how many values each holds.
    pub histogram: Vec<(f64, u64)>,
}

/// Curves over the run's time, at most some 400 points each: seconds, value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Requests in flight: a step function, the value holding until the next point.
    pub in_flight: Vec<(f64, f64)>,
    /// Share of all output tokens that had come, 0 to 1 (Flover, figure 7).
    pub progress: Vec<(f64, f64)>,
    /// Output tokens per second: a step function too, whose last point ends its last step.
    pub output_throughput: Vec<(f64, f64)>,
}

/// One of several models of a run.
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

/// Differences of the server's counters and histograms over the run, as far as known names are there (ours, vLLM's,
/// llama.cpp's).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerReport {
    /// What each figure is, in the order of the table; the client's own figure beside it where it has one.
    pub rows: Vec<ServerRow>,
    /// Decode steps over the run: Flover's total iterations.
    pub steps: Option<u64>,
    /// Sequences per step on the mean.
    pub sequences_per_step: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServerRow {
    pub name: String,
    pub unit: String,
    pub server: f64,
    pub client: Option<f64>,
}
