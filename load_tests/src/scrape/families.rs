//! Known server metrics and the report rows derived from them: those of Mainstem, vLLM and llama.cpp.
//!
//! Invariant: a row exists only if the server provides the metrics it is computed from.

use super::{
    exposition::Labels,
    increase::{HistogramIncrease, MetricsIncrease},
};
use crate::report::{Distribution, RunReport, ServerReport, ServerRow};

/// Metric name prefixes of Mainstem and vLLM, which share many metric names.
const PREFIXES: [&str; 2] = ["mainstem_", "vllm:"];

const MS: f64 = 1e3;

/// Builds the server report from the increase of its metrics.
struct ReportBuilder<'a> {
    server: &'a MetricsIncrease,
    client: &'a RunReport,
    rows: Vec<ServerRow>,
}

/// Builds the rows in table order, or returns `None` if no metric is known.
pub fn report(server: &MetricsIncrease, client: &RunReport) -> Option<ServerReport> {
    let mut account = ReportBuilder { server, client, rows: Vec::new() };
    account.requests();
    account.tokens();
    account.steps();
    account.shuffles();
    account.latencies();
    account.phases();
    account.add_row("device restarts", "", account.total("device_restarts_total"), None);
    if account.rows.is_empty() {
        return None;
    }
    account.add_row("server restarted", "", server.restarted().then_some(1.0), None);
    let (steps, sequences_per_step) = (account.step_count(), account.sequences_per_step());
    let steps = steps.map(|steps| steps as u64);
    Some(ServerReport { rows: account.rows, steps, sequences_per_step })
}

impl ReportBuilder<'_> {
    fn add_row(&mut self, name: &str, unit: &str, server: Option<f64>, client: Option<f64>) {
        if let Some(server) = server.filter(|value| value.is_finite()) {
            self.rows.push(ServerRow { name: name.to_owned(), unit: unit.to_owned(), server, client });
        }
    }

    fn requests(&mut self) {
        let counts = &self.client.counts;
        let (completed, failed) = (Some(counts.completed as f64), Some(counts.failed as f64));
        self.add_row(
            "requests succeeded",
            "",
            self.finished_requests(&["stop", "length", "repetition"]),
            completed,
        );
        self.add_row("requests failed", "", self.finished_requests(&["error", "timeout"]), failed);
        self.add_row("requests aborted", "", self.finished_requests(&["abort"]), None);
        self.add_row("requests rejected", "", self.total("admission_rejections_total"), None);
        self.add_row("clients disconnected", "", self.total("clients_gone_total"), None);
        self.add_row("preemptions", "", self.total("num_preemptions_total"), None);
    }

    fn tokens(&mut self) {
        let llama = |name| self.server.total(name);
        let prompt = self.total("prompt_tokens_total").or_else(|| llama("llamacpp:prompt_tokens_total"));
        let output =
            self.total("generation_tokens_total").or_else(|| llama("llamacpp:tokens_predicted_total"));
        let [prompt_s, output_s] =
            ["llamacpp:prompt_seconds_total", "llamacpp:tokens_predicted_seconds_total"].map(llama);
        self.add_row("prompt tokens", "", prompt, Some(self.client.input_tokens as f64));
        self.add_row("output tokens", "", output, Some(self.client.output_tokens as f64));
        self.add_row("prompt processing time", "s", prompt_s, None);
        self.add_row("generation time", "s", output_s, None);
    }

    fn steps(&mut self) {
        let rows = self.histogram("step_rows").and_then(|rows| rows.mean());
        let tokens = self.histogram("iteration_tokens").or_else(|| self.histogram("iteration_tokens_total"));
        let tokens = tokens.and_then(|tokens| tokens.mean());
        self.add_row("steps", "", self.step_count(), None);
        self.add_row("sequences per step", "", self.sequences_per_step(), None);
        self.add_row("tokens per step", "", tokens, None);
        self.add_row("rows per step", "", rows, None);
        // Rows of a step are tokens and holes.
        self.add_row("holes per step", "", rows.zip(tokens).map(|(rows, tokens)| rows - tokens), None);
        self.add_histogram("step", "step_seconds", None);
    }

    fn shuffles(&mut self) {
        self.add_row("shuffles", "", self.total("slot_shuffles_total"), None);
        self.add_row("moves", "", self.total("slot_moves_total"), None);
    }

    fn latencies(&mut self) {
        let client = &self.client.latencies;
        self.add_histogram("queue", "request_queue_time_seconds", None);
        self.add_histogram("prefill", "request_prefill_time_seconds", None);
        self.add_histogram("decode", "request_decode_time_seconds", None);
        self.add_histogram("TTFT", "time_to_first_token_seconds", client.ttft.as_ref());
        self.add_histogram("TPOT", "request_time_per_output_token_seconds", client.tpot.as_ref());
        // The second is vLLM's former name.
        let itl = ["inter_token_latency_seconds", "time_per_output_token_seconds"];
        let itl = itl.into_iter().find(|name| self.histogram(name).is_some());
        self.add_histogram("ITL", itl.unwrap_or_default(), client.itl.as_ref());
        self.add_histogram("E2E", "e2e_request_latency_seconds", client.e2el.as_ref());
    }

    fn phases(&mut self) {
        for phase in ["plan", "gap", "forward", "sample", "deliver"] {
            let matches = |labels: &Labels| labels.get("phase").is_some_and(|label| label == phase);
            let total = self
                .server
                .total_where("mainstem_step_phase_seconds_sum", matches)
                .filter(|&total| total > 0.0);
            self.add_row(&format!("phase {phase}"), "s", total, None);
        }
    }

    /// Adds the mean and estimated percentiles of a histogram of seconds, in milliseconds.
    fn add_histogram(&mut self, name: &str, suffix: &str, client: Option<&Distribution>) {
        let Some(histogram) = self.histogram(suffix) else { return };
        let stats = client.map(|distribution| &distribution.stats);
        for (figure, server, client) in [
            ("mean", histogram.mean(), stats.map(|stats| stats.mean)),
            ("p50", histogram.quantile(0.5), stats.map(|stats| stats.median)),
            ("p99", histogram.quantile(0.99), stats.map(|stats| stats.p99)),
        ] {
            self.add_row(&format!("{name} {figure}"), "ms", server.map(|seconds| seconds * MS), client);
        }
    }

    /// Returns the number of decode steps; each step counts once in every histogram about steps.
    fn step_count(&self) -> Option<f64> {
        let histograms = ["step_slots", "iteration_tokens", "iteration_tokens_total"];
        let count =
            histograms.into_iter().find_map(|name| self.histogram(name)).map(|histogram| histogram.count);
        count.or_else(|| self.server.total("llamacpp:n_decode_total"))
    }

    fn sequences_per_step(&self) -> Option<f64> {
        self.histogram("step_slots").and_then(|slots| slots.mean()).or_else(|| self.busy_slots())
    }

    /// Computes the mean number of busy slots per step of llama.cpp, which reports the mean since its start:
    /// each scrape's mean times its steps is the cumulative number of sequences.
    fn busy_slots(&self) -> Option<f64> {
        let (mean_before, mean) = self.server.gauge("llamacpp:n_busy_slots_per_decode")?;
        let steps = self.server.total("llamacpp:n_decode_total").filter(|&steps| steps > 0.0)?;
        let steps_before = self.server.before("llamacpp:n_decode_total");
        Some((mean * (steps_before + steps) - mean_before * steps_before) / steps)
    }

    fn total(&self, suffix: &str) -> Option<f64> {
        PREFIXES.iter().find_map(|prefix| self.server.total(&format!("{prefix}{suffix}")))
    }

    fn finished_requests(&self, reasons: &[&str]) -> Option<f64> {
        let matches = |labels: &Labels| {
            labels.get("finished_reason").is_some_and(|reason| reasons.contains(&reason.as_str()))
        };
        let of = |prefix| self.server.total_where(&format!("{prefix}request_success_total"), matches);
        PREFIXES.iter().find_map(of)
    }

    fn histogram(&self, suffix: &str) -> Option<HistogramIncrease> {
        PREFIXES.iter().find_map(|prefix| self.server.histogram(&format!("{prefix}{suffix}")))
    }
}
