//! The table of metrics as a page of the documentation.

use super::{METRICS, Metric, MetricKind};

/// Renders the table as the page `docs/metrics.md`.
pub fn documentation() -> String {
    let mut page = String::from(PAGE_HEAD);
    for Metric { name, kind, unit, help, labels } in METRICS {
        let labels: Vec<_> = labels.iter().map(|(name, values)| label_text(name, values)).collect();
        page += &format!("| `{name}` | {} | {unit} | {} | {help} |\n", kind.as_str(), labels.join(", "));
    }
    page += &under_vllm_names();
    page += "\n## Buckets\n\n";
    for metric in METRICS {
        if let MetricKind::Histogram(buckets) = metric.kind {
            let edges: Vec<_> = buckets.iter().map(f64::to_string).collect();
            page += &format!("- `{}`: {}\n", metric.name, edges.join(", "));
        }
    }
    page
}

/// Metrics that vLLM has under the same name, with its prefix `vllm:`.
const NAMES_OF_VLLM: [&str; 27] = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "cache_config_info",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "iteration_tokens",
];

/// Renders the section about dashboards for vLLM.
fn under_vllm_names() -> String {
    let names = NAMES_OF_VLLM.map(|name| format!("`{name}`")).join(", ");
    format!("{VLLM_HEAD}The metrics that vLLM has, too: {names}.\n")
}

const VLLM_HEAD: &str = "
## Dashboards and alerts for vLLM

These rules of a job in `prometheus.yml` rename the metrics to those of vLLM. A metric has only one name:
to keep both, scrape the server in a second job without them.

```yaml
metric_relabel_configs:
  - source_labels: [__name__]
    regex: mainstem_iteration_tokens(_bucket|_sum|_count)
    target_label: __name__
    replacement: vllm:iteration_tokens_total$1
  - source_labels: [__name__]
    regex: mainstem_(.+)
    target_label: __name__
    replacement: vllm:$1
```

`vllm:num_preemptions_total` has a label `reason`, and the queue time a label `class`, which vLLM's do not
have: sum over them. ";

const PAGE_HEAD: &str = "# Metrics

`GET /metrics` answers in the Prometheus text format. The buckets of histograms are listed below. If the \
name of
the served model is known at start, every series also has the labels `model_name` and `engine`. This page is
generated from the table in `src/telemetry/mod.rs`; a test compares the two.

| name | type | unit | labels | meaning |
|---|---|---|---|---|
";

fn label_text(name: &str, values: &[&str]) -> String {
    if values.is_empty() { format!("`{name}`") } else { format!("`{name}`: {}", values.join(" / ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_that_vllm_has_is_a_metric() {
        for name in NAMES_OF_VLLM {
            assert!(METRICS.iter().any(|metric| metric.name == format!("mainstem_{name}")), "{name}");
        }
    }
}
