//! Metrics of the HTTP server: requests, batches and connections; and of the settings of the KV cache.
//!
//! Invariant: each is in the table of all metrics.

use super::Metric;
use super::MetricKind::{self, Counter, Gauge};
use super::buckets::{REQUEST_CHOICE_BUCKETS, REQUEST_TOKEN_BUCKETS};

pub(crate) static BUILD_INFO: Metric =
    Metric::new("mainstem_build_info", Gauge, "1", "Always 1; the label is the running version.")
        .labelled(&[("version", &[])]);
pub(crate) static HTTP_REQUESTS: Metric = Metric::new(
    "mainstem_http_requests_total",
    Counter,
    "requests",
    "Answered HTTP requests. Unknown paths count as \"other\".",
)
.labelled(&[("method", &[]), ("path", &[]), ("status", &[])]);
pub(crate) static REJECTED_PARAMETERS: Metric = Metric::new(
    "mainstem_rejected_parameters_total",
    Counter,
    "requests",
    "Requests rejected because of a parameter, by the parameter, without indices, and the error's code. \
     Unknown parameters count as \"unknown\".",
)
.labelled(&[("param", &[]), ("code", &[])]);
pub(crate) static BATCHES: Metric =
    Metric::new("mainstem_batches", Gauge, "batches", "Batches of the API, those that have ended included.")
        .labelled(&[(
            "status",
            &[
                "validating",
                "failed",
                "in_progress",
                "finalizing",
                "completed",
                "expired",
                "cancelling",
                "cancelled",
            ],
        )]);
pub(crate) static BATCH_REQUESTS: Metric = Metric::new(
    "mainstem_batch_requests_total",
    Counter,
    "requests",
    "Requests of batches that have ended. ok: answered with status 200; failed: with another status; \
     expired: not run, because the completion window of their batch had passed.",
)
.labelled(&[("outcome", &["ok", "failed", "expired"])]);
pub(crate) static CONNECTIONS: Metric =
    Metric::new("mainstem_connections", Gauge, "connections", "Open connections of clients.");
pub(crate) static CONNECTIONS_CLOSED: Metric = Metric::new(
    "mainstem_connections_closed_total",
    Counter,
    "connections",
    "Connections that the server refused or closed: \"full\" and \"address\" were refused, because all of \
     server.max_connections were busy, or by server.max_connections_per_address; \"idle\" made room for new \
     ones; \"timeout\" sent no complete request for too long.",
)
.labelled(&[("reason", &["full", "address", "idle", "timeout"])]);
pub(crate) static LOG_LINES_DROPPED: Metric = Metric::new(
    "mainstem_log_lines_dropped_total",
    Counter,
    "lines",
    "Lines of the log that were not written, because stderr is closed or full, or its reader is too slow.",
);
pub(crate) static TRACE_SPANS: Metric = Metric::new(
    "mainstem_trace_spans_total",
    Counter,
    "spans",
    "Spans of traces that have ended, by result. exported: the collector got them; lost: it could not be \
     reached, refused them, or is too slow.",
)
.labelled(&[("result", &["exported", "lost"])]);
pub(crate) static REQUEST_PARAMS_N: Metric = Metric::new(
    "mainstem_request_params_n",
    MetricKind::Histogram(REQUEST_CHOICE_BUCKETS),
    "choices",
    "Number of choices (n) that an accepted request asks for.",
);
pub(crate) static REQUEST_PARAMS_MAX_TOKENS: Metric = Metric::new(
    "mainstem_request_params_max_tokens",
    MetricKind::Histogram(REQUEST_TOKEN_BUCKETS),
    "tokens",
    "Maximum number of generated tokens that an accepted request asks for, if it asks for one.",
);
pub(crate) static CACHE_CONFIG_INFO: Metric = Metric::new(
    "mainstem_cache_config_info",
    Gauge,
    "1",
    "Always 1; the labels are the settings of the KV cache: tokens of a page, number format, whether there \
     is a prefix cache, and the number of pages, whatever device they are on.",
)
.labelled(&[
    ("block_size", &[]),
    ("cache_dtype", &[]),
    ("enable_prefix_caching", &["true", "false"]),
    ("num_gpu_blocks", &[]),
]);
