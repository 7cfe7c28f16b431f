//! The table of metrics as a page of the documentation.

use super::{METRICS, Metric, MetricKind};

/// Renders the table as the page `docs/metrics.md`.
pub fn documentation() -> String {
    let mut page = String::from(PAGE_HEAD);
    for Metric { name, kind, unit, help, labels } in METRICS {
        let labels: Vec<_> = labels.iter().map(|(name, values)| label_text(name, values)).collect();
        page += &format!("| `{name}` | {} | {unit} | {} | {help} |\n", kind.as_str(), labels.join(", "));
    }
    page += "\n## Buckets\n\n";
    for metric in METRICS {
        if let MetricKind::Histogram(buckets) = metric.kind {
            let edges: Vec<_> = buckets.iter().map(f64::to_string).collect();
            page += &format!("- `{}`: {}\n", metric.name, edges.join(", "));
        }
    }
    page
}

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
