//! The figures as a table for people and as JSON under the names other benchmark clients use.
//!
//! Invariant: both show the same summary; nothing is computed here but rates and units.

use std::{
    fmt::Write,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Map, Value, json};

use crate::{
    arrivals::Arrivals,
    client::{FailureKind, Outcome, Sample},
    measure::{Stats, Summary},
    run::{Record, Settings},
};

/// The latency measures: name in JSON, name in the table, figures.
fn measures(summary: &Summary) -> [(&'static str, &'static str, Option<Stats>); 5] {
    [
        ("ttft", "time to first token", summary.ttft),
        ("tpot", "time per later token", summary.tpot),
        ("itl", "between tokens", summary.itl),
        ("e2el", "end to end", summary.e2e),
        ("client_queue_time", "generator was late", summary.lateness),
    ]
}

/// The table for the terminal.
pub fn table(settings: &Settings, record: &Record, summary: &Summary) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |label: &str, value: String| {
        let _ = writeln!(text, "{}", format!("{label:<21}{value}").trim_end());
    };
    line("server", format!("{}  model {}", settings.url, record.model));
    let Settings { load, arrivals, .. } = settings;
    line(
        "load",
        format!("{} -> {} tokens, arrivals {arrivals}, seed {}", load.prompt, load.output, load.seed),
    );
    line(
        "requests",
        format!(
            "{} sent, {} completed, {} failed, {} hung up, {} unsent, {} at once at most",
            summary.sent,
            summary.completed,
            summary.failed(),
            summary.hung_up,
            record.unsent,
            summary.peak_concurrency
        ),
    );
    if summary.short > 0 {
        line("short answers", format!("{} with fewer tokens than asked for", summary.short));
    }
    line("span", format!("{:.3} s, first send to last token", summary.span.as_secs_f64()));
    line(
        "throughput",
        format!(
            "{:.1} output tok/s ({} tokens, at most {} in a second), {:.2} req/s",
            summary.per_second(summary.output_tokens),
            summary.output_tokens,
            summary.peak_output_tokens_per_s,
            summary.per_second(summary.completed as u64)
        ),
    );
    line("", String::new());
    let figures =
        |figures: [&str; 7]| figures.iter().map(|figure| format!("{figure:>11}")).collect::<String>();
    line("ms", figures(["mean", "median", "std", "p90", "p95", "p99", "max"]));
    for (_, label, stats) in measures(summary) {
        let values = stats.map(|stats| stats.named().map(|(_, value)| format!("{value:.2}")));
        line(
            label,
            values.map_or("          -".into(), |values| figures(values.each_ref().map(String::as_str))),
        );
    }
    for (kind, count) in &summary.failures {
        let message = first_message(&record.samples, *kind);
        line("failed", format!("{count} x {kind}, first: {message}"));
    }
    text
}

fn first_message(samples: &[Sample], kind: FailureKind) -> &str {
    samples
        .iter()
        .find_map(|sample| match &sample.outcome {
            Outcome::Failed(failure) if failure.kind == kind => Some(failure.message.as_str()),
            _ => None,
        })
        .unwrap_or_default()
}

/// The report as one JSON object with the names of `vllm bench serve`, and a few of our own: `hung_up`,
/// `unsent`, `short`, `failures`, `arrivals`, `seed`.
pub fn json(settings: &Settings, record: &Record, summary: &Summary) -> Value {
    Value::Object(summary_keys(settings, record, summary))
}

/// The same with lists of one entry per request sent, by index.
pub fn detailed_json(settings: &Settings, record: &Record, summary: &Summary) -> Value {
    let mut report = summary_keys(settings, record, summary);
    report.extend(detail_keys(&record.samples));
    Value::Object(report)
}

fn summary_keys(settings: &Settings, record: &Record, summary: &Summary) -> Map<String, Value> {
    let mut report = run_keys(settings, record);
    report.extend(count_keys(record, summary));
    for (name, _, stats) in measures(summary) {
        for figure in stats.iter().flat_map(Stats::named) {
            report.insert(format!("{}_{name}_ms", figure.0), json!(figure.1));
        }
    }
    report
}

fn run_keys(settings: &Settings, record: &Record) -> Map<String, Value> {
    let rate = settings.arrivals.rate();
    let burstiness =
        if matches!(settings.arrivals, Arrivals::Constant { .. }) { json!("inf") } else { json!(1.0) };
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    object(json!({
        "date": utc_date(since_epoch),
        "backend": "openai",
        "label": null,
        "model_id": record.model,
        "tokenizer_id": null,
        "num_prompts": settings.load.requests,
        "request_rate": if rate.is_finite() { json!(rate) } else { json!("inf") },
        "burstiness": burstiness,
        "max_concurrency": null,
        "arrivals": settings.arrivals.to_string(),
        "seed": settings.load.seed,
    }))
}

fn count_keys(record: &Record, summary: &Summary) -> Map<String, Value> {
    let failures: Map<String, Value> =
        summary.failures.iter().map(|(kind, count)| (kind.to_string(), json!(count))).collect();
    object(json!({
        "duration": summary.span.as_secs_f64(),
        "completed": summary.completed,
        "failed": summary.failed(),
        "hung_up": summary.hung_up,
        "unsent": record.unsent,
        "short": summary.short,
        "failures": failures,
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.per_second(summary.completed as u64),
        "request_goodput": null,
        "output_throughput": summary.per_second(summary.output_tokens),
        "total_token_throughput": summary.per_second(summary.input_tokens + summary.output_tokens),
        "max_output_tokens_per_s": summary.peak_output_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrency,
    }))
}

/// Times in seconds, 0 where there is none.
fn detail_keys(samples: &[Sample]) -> Map<String, Value> {
    let list = |value: fn(&Sample) -> Value| samples.iter().map(value).collect::<Vec<_>>();
    object(json!({
        "input_lens": list(|s| json!(s.prompt_len)),
        "output_lens": list(|s| json!(s.output_len)),
        "start_times": list(|s| json!(s.sent.as_secs_f64())),
        "queue_times": list(|s| json!(s.lateness().as_secs_f64())),
        "ttfts": list(|s| json!(s.ttft().unwrap_or_default().as_secs_f64())),
        "latencies": list(|s| json!(s.e2e().unwrap_or_default().as_secs_f64())),
        "itls": list(|s| json!(s.itls().map(|gap| gap.as_secs_f64()).collect::<Vec<_>>())),
        "errors": list(|s| match &s.outcome {
            Outcome::Failed(failure) => json!(format!("{}: {}", failure.kind, failure.message)),
            Outcome::Completed | Outcome::HungUp => json!(""),
        }),
    }))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => unreachable!("only objects are passed; this is a bug"),
    }
}

/// `YYYYMMDD-HHMMSS`, in UTC.
fn utc_date(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (days, clock) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March, so that the leap day is the last; 0000-03-01 is 719468 days before 1970-01-01.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", clock / 3600, clock / 60 % 60, clock % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Failure;

    fn settings() -> Settings {
        Settings {
            url: "http://localhost:1".into(),
            model: None,
            load: crate::requests::Load {
                requests: 3,
                prompt: "4".parse().unwrap(),
                output: "2".parse().unwrap(),
                vocab: 10,
                temperature: 0.0,
                seed: 9,
                hangup_share: 0.0,
                hangup_after: 1,
            },
            arrivals: "poisson:500".parse().unwrap(),
            request_timeout: Duration::from_secs(1),
            time_limit: Duration::from_secs(9),
        }
    }

    fn record() -> Record {
        let ms = Duration::from_millis;
        let completed = Sample {
            index: 0,
            prompt_len: 4,
            output_len_asked: 2,
            output_len: 2,
            scheduled: ms(0),
            sent: ms(0),
            ended: ms(2000),
            deliveries: vec![(ms(1500), 1), (ms(2000), 1)],
            outcome: Outcome::Completed,
        };
        let failure = Failure { kind: FailureKind::Status(500), message: "out of luck".into() };
        let failed =
            Sample { index: 1, deliveries: vec![], outcome: Outcome::Failed(failure), ..completed.clone() };
        Record { model: "m".into(), samples: vec![completed, failed], unsent: 1 }
    }

    #[test]
    fn json_has_the_known_names_and_units() {
        let (settings, record) = (settings(), record());
        let summary = Summary::of(&record.samples);
        let report = detailed_json(&settings, &record, &summary);
        assert_eq!(report["completed"], 1);
        assert_eq!(report["failed"], 1);
        assert_eq!(report["unsent"], 1);
        assert_eq!(report["failures"]["status 500"], 1);
        assert_eq!(report["duration"], 2.0);
        assert_eq!(report["output_throughput"], 1.0);
        assert_eq!(report["total_token_throughput"], 3.0);
        assert_eq!(report["request_rate"], 2.0);
        assert_eq!(report["p99_ttft_ms"], 1500.0);
        assert_eq!(report["mean_tpot_ms"], 500.0);
        assert_eq!(report["median_e2el_ms"], 2000.0);
        assert_eq!(report["ttfts"], json!([1.5, 0.0]));
        assert_eq!(report["errors"], json!(["", "status 500: out of luck"]));
        assert!(json(&settings, &record, &summary).get("ttfts").is_none());
    }

    #[test]
    fn the_table_names_failures_and_survives_having_no_figures() {
        let (settings, record) = (settings(), record());
        let text = table(&settings, &record, &Summary::of(&record.samples));
        assert!(text.contains("1 x status 500, first: out of luck"), "{text}");
        assert!(text.contains("1.0 output tok/s"), "{text}");
        let nothing = Record { samples: vec![], ..record };
        let text = table(&settings, &nothing, &Summary::of(&[]));
        assert!(text.contains("0 sent"), "{text}");
    }

    #[test]
    fn dates_of_known_moments() {
        assert_eq!(utc_date(Duration::ZERO), "19700101-000000");
        assert_eq!(utc_date(Duration::from_secs(951_782_399)), "20000228-235959");
        assert_eq!(utc_date(Duration::from_secs(951_782_400)), "20000229-000000");
        assert_eq!(utc_date(Duration::from_secs(4_107_542_400)), "21000301-000000");
    }
}
