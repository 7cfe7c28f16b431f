//! The report as JSON with the field names of `vllm bench serve`, so that scripts made for it can read it.
//!
//! Invariant: [`read`] restores exactly the report that [`json()`] wrote.

use anyhow::Context;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{PlanReport, RunReport};
use crate::{
    measure::{Stats, seconds},
    run::RunRecord,
    sample::{Outcome, Sample},
};

/// Serializes a report to one object: the fields of `vllm bench serve`, and the whole report under
/// `load_tests`. With `samples`, lists with one entry per request sent, by index, are added.
pub fn json(report: &RunReport, samples: Option<&RunRecord>) -> Value {
    let mut object = plan_keys(report);
    object.extend(count_keys(report));
    object.extend(throughput_keys(report));
    object.extend(latency_keys(report));
    object.extend(samples.map(|record| detail_keys(&record.samples)).unwrap_or_default());
    let whole = serde_json::to_value(report).expect("all map keys of a report are strings");
    object.insert("load_tests".into(), whole);
    Value::Object(object)
}

/// Reads a report written by [`json()`].
pub fn read(text: &str) -> anyhow::Result<RunReport> {
    #[derive(Deserialize)]
    struct File {
        load_tests: RunReport,
    }
    let file: File = serde_json::from_str(text).context("not a report of a run")?;
    Ok(file.load_tests)
}

fn plan_keys(report: &RunReport) -> Map<String, Value> {
    let PlanReport { requests, arrivals, rate, burstiness, max_concurrency, endpoint, seed, .. } =
        &report.plan;
    object(json!({
        "date": report.date,
        "backend": if endpoint == "chat" { "openai-chat" } else { "openai" },
        "label": report.label,
        "model_id": report.models.join(","),
        "tokenizer_id": null,
        "num_prompts": requests,
        "request_rate": number(rate.unwrap_or(f64::INFINITY)),
        "burstiness": burstiness.map(number),
        "max_concurrency": max_concurrency,
        "arrivals": arrivals,
        "seed": seed,
    }))
}

fn count_keys(report: &RunReport) -> Map<String, Value> {
    let counts = &report.counts;
    let failures: Map<String, Value> =
        counts.failures.iter().map(|(kind, failures)| (kind.clone(), json!(failures.count))).collect();
    object(json!({
        "duration": report.duration_s,
        "completed": counts.completed,
        "failed": counts.failed,
        "hung_up": counts.hung_up,
        "unsent": counts.unsent,
        "short": counts.short,
        "retries": counts.retries,
        "failures": failures,
        "total_input_tokens": report.input_tokens,
        "total_output_tokens": report.output_tokens,
    }))
}

fn throughput_keys(report: &RunReport) -> Map<String, Value> {
    object(json!({
        "request_throughput": report.request_throughput,
        "request_goodput": report.goodput.as_ref().map(|goodput| goodput.throughput),
        "output_throughput": report.output_throughput,
        "total_token_throughput": report.input_throughput + report.output_throughput,
        "max_output_tokens_per_s": report.peak_output_tokens_per_s,
        "max_concurrent_requests": report.peak_concurrency,
        "mean_concurrency": report.mean_concurrency,
        "overlap": report.overlap,
    }))
}

/// Returns the latency fields; null if nothing was measured.
fn latency_keys(report: &RunReport) -> Map<String, Value> {
    let nothing = Stats { mean: 0.0, median: 0.0, std: 0.0, p90: 0.0, p95: 0.0, p99: 0.0, max: 0.0 };
    let mut keys = Map::new();
    for (measure, _, distribution) in report.latencies.named() {
        for (figure, value) in distribution.map_or(nothing, |distribution| distribution.stats).named() {
            keys.insert(format!("{figure}_{measure}_ms"), json!(distribution.map(|_| value)));
        }
    }
    keys
}

/// Returns the per-request lists. Times are in seconds; a missing time is 0.
fn detail_keys(samples: &[Sample]) -> Map<String, Value> {
    let list = |value: fn(&Sample) -> Value| samples.iter().map(value).collect::<Vec<_>>();
    object(json!({
        "input_lens": list(|s| json!(s.prompt_len)),
        "output_lens": list(|s| json!(s.output_len)),
        "start_times": list(|s| json!(seconds(s.sent))),
        "queue_times": list(|s| json!(seconds(s.lateness()))),
        "ttfts": list(|s| json!(seconds(s.ttft().unwrap_or_default()))),
        "latencies": list(|s| json!(seconds(s.e2e().unwrap_or_default()))),
        "itls": list(|s| s.itls().map(seconds).collect()),
        "errors": list(|s| match &s.outcome {
            Outcome::Failed(failure) => json!(format!("{}: {}", failure.kind, failure.message)),
            Outcome::Completed | Outcome::HungUp => json!(""),
        }),
    }))
}

/// Serializes a number; infinity is written as `"inf"`, like `vllm bench serve` does.
fn number(value: f64) -> Value {
    if value.is_finite() { json!(value) } else { json!("inf") }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("the value is a JSON object"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::{
            GoodputLimits, report,
            testing::{completed, failed, ms, record, settings},
        },
        plan::arrivals::Arrivals,
        run::RunSettings,
    };

    /// One completed request of two tokens, and one that failed.
    fn run() -> RunRecord {
        let answered = Sample { requested_output_len: 2, prompt_len: 4, ..completed(0, 0, &[1500, 2000]) };
        record(vec![answered, failed(0, 0)])
    }

    #[test]
    fn json_has_the_known_names_and_units() {
        let record = run();
        let limits = GoodputLimits::from([("ttft".to_owned(), 1500.0)]);
        let report = json(&report(&settings(), &record, &limits), Some(&record));
        for (key, value) in [
            ("backend", json!("openai")),
            ("label", json!(settings().arrivals.to_string())),
            ("model_id", json!("m")),
            ("tokenizer_id", json!(null)),
            ("num_prompts", json!(5)),
            ("request_rate", json!(2.0)),
            ("burstiness", json!(1.0)),
            ("max_concurrency", json!(null)),
            ("duration", json!(2.0)),
            ("completed", json!(1)),
            ("failed", json!(1)),
            ("unsent", json!(1)),
            ("total_input_tokens", json!(4)),
            ("total_output_tokens", json!(2)),
            ("request_throughput", json!(0.5)),
            ("request_goodput", json!(0.5)),
            ("output_throughput", json!(1.0)),
            ("total_token_throughput", json!(3.0)),
            ("max_output_tokens_per_s", json!(1)),
            ("max_concurrent_requests", json!(1)),
            ("p99_ttft_ms", json!(1500.0)),
            ("mean_tpot_ms", json!(500.0)),
            ("max_itl_ms", json!(500.0)),
            ("median_e2el_ms", json!(2000.0)),
            ("std_client_queue_time_ms", json!(0.0)),
            ("ttfts", json!([1.5, 0.0])),
            ("itls", json!([[0.5], []])),
            ("input_lens", json!([4, 10])),
            ("output_lens", json!([2, 0])),
            ("latencies", json!([2.0, 0.0])),
            ("start_times", json!([0.0, 0.0])),
            ("queue_times", json!([0.0, 0.0])),
            ("errors", json!(["", "status 500: out of luck"])),
        ] {
            assert_eq!(report.get(key), Some(&value), "{key}");
        }
        assert_eq!(report["failures"]["status 500"], 1);
        assert_eq!(report["date"], "19700101-000000");
    }

    #[test]
    fn every_name_is_there_when_nothing_was_measured() {
        let report = json(&report(&settings(), &record(vec![]), &GoodputLimits::new()), None);
        for measure in ["ttft", "tpot", "itl", "e2el", "client_queue_time"] {
            for figure in ["mean", "median", "std", "p90", "p95", "p99", "max"] {
                assert_eq!(report.get(format!("{figure}_{measure}_ms")), Some(&Value::Null));
            }
        }
        assert_eq!(report.get("request_goodput"), Some(&Value::Null));
        assert_eq!(report.get("ttfts"), None);
    }

    #[test]
    fn reports_are_read_back_to_the_last_bit() {
        let endless = RunSettings { arrivals: Arrivals::Constant { gap: ms(3) }, ..settings() };
        let at_once = RunSettings { arrivals: Arrivals::AllAtOnce, ..settings() };
        // Values without a short decimal form.
        let thirds = record((0..300).map(|i| completed(i, i, &[i * i + 7, i * i * i + 1000])).collect());
        let limits = GoodputLimits::from([("e2el".to_owned(), 0.1 + 0.2)]);
        for settings in [settings(), endless, at_once] {
            for record in [run(), record(vec![]), thirds.clone()] {
                let report = report(&settings, &record, &limits);
                let text = json(&report, Some(&record)).to_string();
                assert_eq!(read(&text).unwrap(), report);
            }
        }
    }

    #[test]
    fn a_constant_interval_is_infinitely_smooth() {
        let endless = RunSettings { arrivals: Arrivals::Constant { gap: ms(4) }, ..settings() };
        let report = report(&endless, &run(), &GoodputLimits::new());
        assert_eq!(report.plan.burstiness, Some(f64::INFINITY));
        let json = json(&report, None);
        assert_eq!((&json["burstiness"], &json["request_rate"]), (&json!("inf"), &json!(250.0)));
    }

    #[test]
    fn what_is_no_report_is_an_error() {
        for (text, word) in
            [("{}", "load_tests"), ("{\"load_tests\": {\"label\": 1}}", "line 1"), ("", "EOF")]
        {
            let error = format!("{:#}", read(text).unwrap_err());
            assert!(error.contains("not a report of a run") && error.contains(word), "{error}");
        }
    }
}
