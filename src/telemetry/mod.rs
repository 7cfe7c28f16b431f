//! Metrics and the log. One table has every metric's name, type, unit and help text. Names follow vLLM's
//! where the meaning is the same, with the prefix `mainstem_`; counters end in `_total`, times are in
//! seconds, and fractions are from 0 to 1.
//!
//! Invariant: only metrics of `METRICS` are recorded, and all of them are described to the recorder.

mod buckets;
mod inflight_log;
mod log;
mod log_writer;
mod metric;
mod page;
mod record;
mod requests;
mod server;
mod traces;

pub use inflight_log::{flush_inflight_log, start_inflight_log};
pub use log::{dropped_log_lines, flush_log, milliseconds, start_log, write_line};
pub use metric::{Metric, MetricKind};
pub use page::documentation;
pub use record::record_request;
pub use requests::FinishedRequest;
pub(crate) use server::*;
pub use traces::{RequestSpan, TraceHeaders, start_traces, stop_traces};

use buckets::*;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use std::sync::OnceLock;

use MetricKind::{Counter, Gauge};

/// The streams between memory and disk.
const OFFLOAD_STREAMS: &[&str] = &["load_weights", "load_kv", "store_kv", "load_rows", "store_rows"];

pub(crate) static SLOTS: Metric =
    Metric::new("mainstem_slots", Gauge, "slots", "Maximum number of sequences in the decode loop.");
pub(crate) static KV_PAGES: Metric = Metric::new(
    "mainstem_kv_pages",
    Gauge,
    "pages",
    "KV pages available to sequences. If sliding-window layers have pages of their own, those of the other \
     layers.",
);
pub(crate) static KV_WINDOW_PAGES: Metric = Metric::new(
    "mainstem_kv_window_pages",
    Gauge,
    "pages",
    "KV pages of sliding-window layers available to sequences; 0 if these layers have no pages of their own.",
);
pub(crate) static REQUESTS_RUNNING: Metric = Metric::new(
    "mainstem_num_requests_running",
    Gauge,
    "requests",
    "Sequences in prefill or decode. Each text of a request to an encoder-only model counts as one.",
);
pub(crate) static REQUESTS_WAITING: Metric = Metric::new(
    "mainstem_num_requests_waiting",
    Gauge,
    "requests",
    "Queued sequences. The further texts of a request to an encoder-only model may exceed the queue's \
     capacity.",
);
pub(crate) static QUEUE_CAPACITY: Metric = Metric::new(
    "mainstem_queue_capacity",
    Gauge,
    "requests",
    "Number of queued sequences from which on only clients with less than their part of it may add some, up \
     to four times this number in total.",
);
/// The deprecated name of `QUEUE_CAPACITY`, exported with the same value.
pub static WAITING_ROOM: Metric = Metric::new(
    "mainstem_waiting_room",
    Gauge,
    "requests",
    "Deprecated: use mainstem_queue_capacity, which has the same value.",
);
pub(crate) static SLOTS_LIVE: Metric =
    Metric::new("mainstem_slots_live", Gauge, "slots", "Slots that hold a sequence.");
pub(crate) static KV_CACHE_USAGE: Metric = Metric::new(
    "mainstem_kv_cache_usage_perc",
    Gauge,
    "fraction, 0 to 1",
    "Fraction of the KV pages that is held by sequences, the larger one if sliding-window layers have pages \
     of their own. Pages that only the prefix cache knows are not held.",
);
pub(crate) static PREFIX_CACHE_QUERIES: Metric = Metric::new(
    "mainstem_prefix_cache_queries_total",
    Counter,
    "tokens",
    "Tokens of prompts that were looked up in the prefix cache; none while it is off. What is computed again \
     after a preemption does not count.",
);
pub(crate) static PREFIX_CACHE_HITS: Metric = Metric::new(
    "mainstem_prefix_cache_hits_total",
    Counter,
    "tokens",
    "Tokens of prompts, of those looked up, that were in the prefix cache and were not computed.",
);
pub(crate) static PREEMPTIONS: Metric = Metric::new(
    "mainstem_num_preemptions_total",
    Counter,
    "preemptions",
    "Sequences that gave up slot and KV pages to others, to be continued later, by reason. pages: for a \
     sequence that grows; class: for an interactive request; share: for a client with less than its share of \
     the slots.",
)
.labelled(&[("reason", &["pages", "class", "share"])]);
pub(crate) static SPEC_DECODE_DRAFTS: Metric = Metric::new(
    "mainstem_spec_decode_num_drafts_total",
    Counter,
    "drafts",
    "Runs of tokens that were drafted for a sequence in a step of speculative decoding.",
);
pub(crate) static SPEC_DECODE_DRAFT_TOKENS: Metric =
    Metric::new("mainstem_spec_decode_num_draft_tokens_total", Counter, "tokens", "Drafted tokens.");
pub(crate) static SPEC_DECODE_ACCEPTED_TOKENS: Metric = Metric::new(
    "mainstem_spec_decode_num_accepted_tokens_total",
    Counter,
    "tokens",
    "Drafted tokens that were accepted.",
);
pub(crate) static SPEC_DECODE_ACCEPTED_TOKENS_PER_POS: Metric = Metric::new(
    "mainstem_spec_decode_num_accepted_tokens_per_pos_total",
    Counter,
    "tokens",
    "Drafted tokens that were accepted, by their position in the run, from 0.",
)
.labelled(&[("position", &[])]);
pub(crate) static PROMPT_TOKENS: Metric = Metric::new(
    "mainstem_prompt_tokens_total",
    Counter,
    "tokens",
    "Tokens of prompts, encoder inputs and texts whose sequences have reached their first token or their \
     result.",
);
pub(crate) static GENERATION_TOKENS: Metric = Metric::new(
    "mainstem_generation_tokens_total",
    Counter,
    "tokens",
    "Generated tokens, including end tokens.",
);
pub(crate) static REQUEST_SUCCESS: Metric = Metric::new(
    "mainstem_request_success_total",
    Counter,
    "requests",
    "Accepted requests that have ended, by finish reason. Each choice of a completion counts as one; the \
     texts of a request to an encoder-only model count as one \
     together.",
)
.labelled(&[("finished_reason", &["stop", "length", "abort", "error", "timeout"])]);
pub(crate) static ADMISSION_REJECTIONS: Metric = Metric::new(
    "mainstem_admission_rejections_total",
    Counter,
    "requests",
    "Rejected requests, by reason. too_long: exceeds the context; too_large: exceeds the KV cache; invalid: \
     any other error in the body; busy: no space in a queue; rate_limit: the client's limit per minute. \
     Unknown paths and methods are not counted.",
)
.labelled(&[(
    "reason",
    &["invalid", "too_long", "too_large", "unknown_model", "busy", "rate_limit", "draining", "unauthorized"],
)]);
pub(crate) static REQUESTS_BY_STRATEGY: Metric = Metric::new(
    "mainstem_requests_by_strategy_total",
    Counter,
    "requests",
    "Accepted completions by sampling strategy that is on, by the names of docs/sampling.md; a request with \
     several counts for each, one with none for \"sample\", a beam search for \"beam_search\" only.",
)
.labelled(&[("strategy", &[])]);
pub(crate) static IGNORED_FIELDS: Metric = Metric::new(
    "mainstem_ignored_fields_total",
    Counter,
    "fields",
    "Unknown fields of requests that were ignored.",
);
pub(crate) static CLIENTS_GONE: Metric = Metric::new(
    "mainstem_clients_gone_total",
    Counter,
    "requests",
    "Responses whose client disconnected before their end. Each choice of a completion counts as one; the \
     texts of a request to an encoder-only model count as one \
     together.",
);
pub(crate) static TIME_TO_FIRST_TOKEN: Metric = Metric::new(
    "mainstem_time_to_first_token_seconds",
    MetricKind::Histogram(FIRST_TOKEN_BUCKETS_S),
    "seconds",
    "Time from accepting a request to its first generated token. Beam searches have none.",
);
pub(crate) static INTER_TOKEN_LATENCY: Metric = Metric::new(
    "mainstem_inter_token_latency_seconds",
    MetricKind::Histogram(INTER_TOKEN_BUCKETS_S),
    "seconds",
    "Time between successive generated tokens of a request. Beam searches have none.",
);
pub(crate) static E2E_LATENCY: Metric = Metric::new(
    "mainstem_e2e_request_latency_seconds",
    MetricKind::Histogram(REQUEST_BUCKETS_S),
    "seconds",
    "Time from accepting a request to its end.",
);
pub(crate) static QUEUE_TIME: Metric = Metric::new(
    "mainstem_request_queue_time_seconds",
    MetricKind::Histogram(REQUEST_BUCKETS_S),
    "seconds",
    "Time from accepting a request to the step with its first prompt chunk, encoder input or text, by class.",
)
.labelled(&[("class", &["interactive", "batch"])]);
pub(crate) static PREFILL_TIME: Metric = Metric::new(
    "mainstem_request_prefill_time_seconds",
    MetricKind::Histogram(REQUEST_BUCKETS_S),
    "seconds",
    "Time from the step with a request's first prompt chunk, encoder input or text to its first generated \
     token, or to the result for the \
     text.",
);
pub(crate) static DECODE_TIME: Metric = Metric::new(
    "mainstem_request_decode_time_seconds",
    MetricKind::Histogram(REQUEST_BUCKETS_S),
    "seconds",
    "Time from a request's first generated token to its last. Not recorded for encoder-only models.",
);
pub(crate) static INFERENCE_TIME: Metric = Metric::new(
    "mainstem_request_inference_time_seconds",
    MetricKind::Histogram(REQUEST_BUCKETS_S),
    "seconds",
    "Time from the step with a request's first prompt chunk, encoder input or text to its last generated \
     token, or to the result for the \
     text.",
);
pub(crate) static TIME_PER_OUTPUT_TOKEN: Metric = Metric::new(
    "mainstem_request_time_per_output_token_seconds",
    MetricKind::Histogram(INTER_TOKEN_BUCKETS_S),
    "seconds",
    "Decode time of a request divided by its generated tokens after the first.",
);
pub(crate) static REQUEST_PROMPT_TOKENS: Metric = Metric::new(
    "mainstem_request_prompt_tokens",
    MetricKind::Histogram(REQUEST_TOKEN_BUCKETS),
    "tokens",
    "Prompt length of a request, or total length of the texts of a request to an encoder-only model.",
);
pub(crate) static REQUEST_GENERATION_TOKENS: Metric = Metric::new(
    "mainstem_request_generation_tokens",
    MetricKind::Histogram(REQUEST_TOKEN_BUCKETS),
    "tokens",
    "Generated tokens of a request; 0 for encoder-only models.",
);
pub(crate) static ITERATION_TOKENS: Metric = Metric::new(
    "mainstem_iteration_tokens",
    MetricKind::Histogram(STEP_TOKEN_BUCKETS),
    "tokens",
    "Tokens per step: decoded tokens and those of prompt chunks, encoder inputs and texts.",
);
pub(crate) static STEP_ROWS: Metric = Metric::new(
    "mainstem_step_rows",
    MetricKind::Histogram(STEP_TOKEN_BUCKETS),
    "rows",
    "Rows per step, including holes between slots.",
);
pub(crate) static STEP_SECONDS: Metric = Metric::new(
    "mainstem_step_seconds",
    MetricKind::Histogram(STEP_BUCKETS_S),
    "seconds",
    "Time from sending a step to the device, or from the results of the previous step if it was sent before \
     them, to its results.",
);
pub(crate) static STEP_PHASES: Metric = Metric::new(
    "mainstem_step_phase_seconds",
    MetricKind::Histogram(PHASE_BUCKETS_S),
    "seconds",
    "Time of a step by phase. On the control thread: plan is from the previous results, the end of an idle \
     period, or the end of the previous step's last layer, to sending the step; deliver is sending the \
     previous step's events and processing this step's results. On the device: gap is from the end of the \
     previous step to the begin of this one, unless there was no work; forward is from the batch to \
     logits; sample is from logits to tokens.",
)
.labelled(&[("phase", &["plan", "gap", "forward", "sample", "deliver"])]);
pub(crate) static HOST_SAMPLING: Metric = Metric::new(
    "mainstem_host_sampling_seconds",
    MetricKind::Histogram(PHASE_BUCKETS_S),
    "seconds",
    "Time of the host's part in sampling one token, while the device works on other rows: draw is the draw \
     of a token that the device cannot draw, mask is the mask of a grammar.",
)
.labelled(&[("work", &["draw", "mask"])]);
pub(crate) static GRAMMAR_COMPILE: Metric = Metric::new(
    "mainstem_grammar_compile_seconds",
    MetricKind::Histogram(STEP_BUCKETS_S),
    "seconds",
    "Time to compile, or to reject, the schema or grammar of a request whose grammar was not cached.",
);
pub(crate) static CONSTRAINED_REQUESTS: Metric = Metric::new(
    "mainstem_constrained_requests_total",
    Counter,
    "requests",
    "Requests for constrained output, by its form, including those whose schema or grammar is rejected. \
     tools are calls that are required.",
)
.labelled(&[("kind", &["json_schema", "json_object", "regex", "choice", "grammar", "tools"])]);
pub(crate) static STEP_SLOTS: Metric = Metric::new(
    "mainstem_step_slots",
    MetricKind::Histogram(STEP_TOKEN_BUCKETS),
    "slots",
    "Slots whose sequence takes part in a step.",
);
pub(crate) static SLOT_SHUFFLES: Metric = Metric::new(
    "mainstem_slot_shuffles_total",
    Counter,
    "iterations",
    "Iterations of the decode loop that moved sequences to close holes.",
);
pub(crate) static SLOT_MOVES: Metric = Metric::new(
    "mainstem_slot_moves_total",
    Counter,
    "moves",
    "Sequences moved to another slot to close holes.",
);
pub(crate) static WASTED_ROWS: Metric = Metric::new(
    "mainstem_wasted_rows_total",
    Counter,
    "rows",
    "Output rows that were discarded because their sequence had ended, or its client was gone, when their \
     step ran.",
);
pub(crate) static NOT_FINITE: Metric = Metric::new(
    "mainstem_non_finite_rows_total",
    Counter,
    "rows",
    "Output rows whose logits or embedding the model computed as NaN or infinite. Their requests ended with \
     an error.",
);
pub(crate) static DEVICE_RESTARTS: Metric = Metric::new(
    "mainstem_device_restarts_total",
    Counter,
    "restarts",
    "Rebuilds of the device after a fault.",
);
pub(crate) static INJECTED_FAULTS: Metric = Metric::new(
    "mainstem_injected_faults_total",
    Counter,
    "faults",
    "Faults that devices were made to have, by kind. Always 0 unless faults are rehearsed (faults.inject).",
)
.labelled(&[("kind", &["fail", "panic", "hang", "slow", "nan"])]);
pub(crate) static OFFLOAD_BYTES: Metric = Metric::new(
    "mainstem_offload_bytes_total",
    Counter,
    "bytes",
    "Bytes moved between the memory of devices and what is below, by stream: weights that are read, pages of \
     the KV cache that are read and written, and rows of activations to attention in the memory of the host \
     (store_rows) and back (load_rows); and by tier: disk, or host if devices have memory of their own.",
)
.labelled(&[("stream", OFFLOAD_STREAMS), ("tier", &["host", "disk"])]);
pub(crate) static OFFLOAD_STALLS: Metric = Metric::new(
    "mainstem_offload_stall_seconds",
    MetricKind::Histogram(PHASE_BUCKETS_S),
    "seconds",
    "Time of a step in which its devices waited for a stream between memory and disk. A part of the step's \
     forward phase.",
)
.labelled(&[("stream", OFFLOAD_STREAMS)]);
pub(crate) static OFFLOAD_LAYERS: Metric = Metric::new(
    "mainstem_offload_layers_total",
    Counter,
    "layers",
    "Layers whose weights, or whose KV cache, are on disk, by whether what a device needed of them was in a \
     buffer when it needed it.",
)
.labelled(&[("state", &["ready", "late"])]);
pub(crate) static OFFLOAD_BUFFERS: Metric = Metric::new(
    "mainstem_offload_ready_buffers_ratio",
    MetricKind::Histogram(FRACTION_BUCKETS),
    "fraction, 0 to 1",
    "Fraction of the buffers for weights on disk that had been read when a device needed a layer, on average \
     over the layers of a step. Near 1: computing limits the speed; near 0: the disk does.",
);

pub(crate) static OFFLOAD_EXPERTS: Metric = Metric::new(
    "mainstem_offload_experts_total",
    Counter,
    "experts",
    "Experts that rows of a row batch chose, in mixtures whose experts are on disk, by whether the expert \
     was in memory (hit) or had to be read (miss).",
)
.labelled(&[("result", &["hit", "miss"])]);

/// All metrics, in the order of the documentation.
pub static METRICS: &[&Metric] = &[
    &BUILD_INFO,
    &CACHE_CONFIG_INFO,
    &REQUESTS_RUNNING,
    &REQUESTS_WAITING,
    &QUEUE_CAPACITY,
    &WAITING_ROOM,
    &SLOTS,
    &SLOTS_LIVE,
    &KV_PAGES,
    &KV_WINDOW_PAGES,
    &KV_CACHE_USAGE,
    &PREFIX_CACHE_QUERIES,
    &PREFIX_CACHE_HITS,
    &PREEMPTIONS,
    &SPEC_DECODE_DRAFTS,
    &SPEC_DECODE_DRAFT_TOKENS,
    &SPEC_DECODE_ACCEPTED_TOKENS,
    &SPEC_DECODE_ACCEPTED_TOKENS_PER_POS,
    &PROMPT_TOKENS,
    &GENERATION_TOKENS,
    &REQUEST_SUCCESS,
    &ADMISSION_REJECTIONS,
    &REJECTED_PARAMETERS,
    &REQUESTS_BY_STRATEGY,
    &IGNORED_FIELDS,
    &CLIENTS_GONE,
    &TIME_TO_FIRST_TOKEN,
    &INTER_TOKEN_LATENCY,
    &E2E_LATENCY,
    &QUEUE_TIME,
    &PREFILL_TIME,
    &DECODE_TIME,
    &INFERENCE_TIME,
    &TIME_PER_OUTPUT_TOKEN,
    &REQUEST_PROMPT_TOKENS,
    &REQUEST_GENERATION_TOKENS,
    &REQUEST_PARAMS_N,
    &REQUEST_PARAMS_MAX_TOKENS,
    &ITERATION_TOKENS,
    &STEP_ROWS,
    &STEP_SLOTS,
    &STEP_SECONDS,
    &STEP_PHASES,
    &HOST_SAMPLING,
    &CONSTRAINED_REQUESTS,
    &GRAMMAR_COMPILE,
    &SLOT_SHUFFLES,
    &SLOT_MOVES,
    &WASTED_ROWS,
    &NOT_FINITE,
    &DEVICE_RESTARTS,
    &INJECTED_FAULTS,
    &OFFLOAD_BYTES,
    &OFFLOAD_STALLS,
    &OFFLOAD_LAYERS,
    &OFFLOAD_BUFFERS,
    &OFFLOAD_EXPERTS,
    &HTTP_REQUESTS,
    &BATCHES,
    &BATCH_REQUESTS,
    &CONNECTIONS,
    &CONNECTIONS_CLOSED,
    &LOG_LINES_DROPPED,
    &TRACE_SPANS,
];

/// Installs the process's recorder at the first call; later calls return the same handle. The caller must
/// call `run_upkeep` regularly, since unread observations accumulate otherwise.
///
/// If the first call names the served model, every series has the labels `model_name` and `engine`.
pub fn install(model: Option<&str>) -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(|| install_recorder(model)).clone()
}

fn install_recorder(model: Option<&str>) -> PrometheusHandle {
    let recorder = recorder(model);
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).expect("no other recorder is installed; anything else is a bug");
    register_metrics();
    handle
}

/// Creates a recorder with the buckets of all histograms and the labels of [`install`].
pub(crate) fn recorder(model: Option<&str>) -> PrometheusRecorder {
    let mut builder = PrometheusBuilder::new();
    if let Some(model) = model {
        builder = builder.add_global_label("model_name", model).add_global_label("engine", "0");
    }
    for metric in METRICS {
        if let MetricKind::Histogram(buckets) = metric.kind {
            let name = Matcher::Full(metric.name.to_string());
            builder = builder.set_buckets_for_metric(name, buckets).expect("buckets are not empty");
        }
    }
    builder.build_recorder()
}

/// Describes all metrics to the recorder and creates their known series.
fn register_metrics() {
    for metric in METRICS {
        metric.describe();
        metric.init_series();
    }
    metrics::gauge!(BUILD_INFO.name, &BUILD_INFO.label_pairs(&[env!("CARGO_PKG_VERSION")])).set(1.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_the_table() {
        let page = include_str!("../../docs/metrics.md");
        assert_eq!(page, documentation(), "docs/metrics.md differs from telemetry::documentation()");
    }

    #[test]
    fn names_follow_the_convention() {
        for metric in METRICS {
            assert!(metric.name.starts_with("mainstem_"), "{}", metric.name);
            assert_eq!(metric.name.ends_with("_total"), metric.kind == Counter, "{}", metric.name);
            assert_eq!(metric.name.ends_with("_seconds"), metric.unit == "seconds", "{}", metric.name);
            assert!(metric.help.ends_with('.'), "{}", metric.name);
            if let MetricKind::Histogram(buckets) = metric.kind {
                assert!(buckets.is_sorted_by(|a, b| a < b), "{}", metric.name);
            }
        }
        let mut names: Vec<_> = METRICS.iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }

    /// The exposition has each metric with its help and type from the start, histograms as histograms.
    #[test]
    fn the_exposition_has_every_metric() {
        let handle = install(None);
        HTTP_REQUESTS.count(["GET", "/health", "200"]);
        REQUESTS_BY_STRATEGY.count(["penalties"]);
        SPEC_DECODE_ACCEPTED_TOKENS_PER_POS.count(["0"]);
        REJECTED_PARAMETERS.count(["n", "invalid_value"]);
        OFFLOAD_BYTES.count(["load_weights", "disk"]);
        CACHE_CONFIG_INFO.gauge_with(["32", "f16", "true", "1"]).set(1.0);
        STEP_SECONDS.record(0.004);
        let text = handle.render();
        for metric in METRICS {
            let (name, kind) = (metric.name, metric.kind.as_str());
            assert!(text.contains(&format!("# HELP {name} {}\n", metric.help)), "{name}\n{text}");
            assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name}\n{text}");
        }
        assert!(text.contains("mainstem_step_seconds_bucket{le=\"0.005\"}"), "{text}");
        assert!(text.contains("mainstem_request_success_total{finished_reason=\"abort\"}"), "{text}");
        for line in text.lines().filter(|line| line.starts_with("# TYPE ")) {
            let words: Vec<_> = line.split(' ').collect();
            assert!(METRICS.iter().any(|metric| metric.name == words[2]), "not in the table: {line}");
            assert_eq!(words[2].ends_with("_total"), words[3] == "counter", "{line}");
        }
        let version = env!("CARGO_PKG_VERSION");
        assert!(text.contains(&format!("mainstem_build_info{{version=\"{version}\"}} 1\n")), "{text}");
        for phase in ["plan", "forward", "sample", "deliver"] {
            let bucket = format!("mainstem_step_phase_seconds_bucket{{phase=\"{phase}\",le=\"0.00001\"}} ");
            assert!(text.contains(&bucket), "{text}");
        }
    }

    #[test]
    fn a_served_model_is_a_label_of_every_series() {
        let recorder = recorder(Some("a \"model\""));
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            register_metrics();
            STEP_PHASES.histogram_with(["plan"]).record(2e-5);
        });
        let text = handle.render();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            assert!(
                line.contains("model_name=\"a \\\"model\\\"\"") && line.contains("engine=\"0\""),
                "{line}"
            );
        }
        assert!(text.contains("mainstem_slots{"), "{text}");
        let plans = text.lines().find(|line| {
            line.starts_with("mainstem_step_phase_seconds_count{") && line.contains("phase=\"plan\"")
        });
        assert!(plans.is_some_and(|line| line.ends_with(" 1")), "{text}");
    }
}
