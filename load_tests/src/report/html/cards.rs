//! The key metrics of a run.
//!
//! Invariant: a metric that was not measured has a card that says so; a metric that was not requested has
//! none.

use super::{
    block::Card,
    numbers::{MISSING, format_count, format_percent, format_setting, format_value},
    texts,
};
use crate::report::{Distribution, Goodput, RunReport};

/// Returns the cards of a run.
pub fn cards(run: &RunReport) -> Vec<Card> {
    let [throughput, requests] = throughput(run);
    let [in_flight, overlap] = concurrency(run);
    let latencies = &run.latencies;
    let latencies = [
        latency("Time to first token", latencies.ttft.as_ref()),
        latency("Inter-token latency", latencies.itl.as_ref()),
        latency("End to end", latencies.e2el.as_ref()),
    ];
    let first = [completed(run), throughput, requests].into_iter().chain(latencies);
    first.chain([in_flight, overlap]).chain(run.goodput.as_ref().map(goodput)).collect()
}

fn card(name: &'static str, value: String, unit: &str, beside: String) -> Card {
    Card { name, value, unit: unit.into(), beside, class: "" }
}

fn completed(run: &RunReport) -> Card {
    let class = if run.counts.failed > 0 { "alarm" } else { "" };
    Card {
        class,
        ..card("Completed", format_count(run.counts.completed), "", texts::describe_outcomes(&run.counts))
    }
}

fn throughput(run: &RunReport) -> [Card; 2] {
    let peak = format!("peak {} per second", format_count(run.peak_output_tokens_per_s));
    let planned = run.plan.rate.map_or(String::new(), |rate| format!("{} planned", format_setting(rate)));
    [
        card("Output", format_value(run.output_throughput), "tok/s", peak),
        card("Requests", format_value(run.request_throughput), "req/s", planned),
    ]
}

fn latency(name: &'static str, distribution: Option<&Distribution>) -> Card {
    match distribution {
        Some(Distribution { stats, .. }) => {
            card(name, format_value(stats.median), "ms p50", format!("{} ms p99", format_value(stats.p99)))
        }
        None => card(name, MISSING.into(), "", "not measured".into()),
    }
}

fn concurrency(run: &RunReport) -> [Card; 2] {
    let peak = format!("peak {}", format_count(run.peak_concurrency));
    let of_all = "average fraction of requests in flight";
    [
        card("In flight", format_value(run.mean_concurrency), "on average", peak),
        card("Overlap", format_percent(run.overlap), "", of_all.into()),
    ]
}

fn goodput(good: &Goodput) -> Card {
    let kept = format!(
        "{} ({}) within {}",
        format_count(good.good),
        format_percent(good.share),
        texts::limits(good)
    );
    card("Goodput", format_value(good.throughput), "req/s", kept)
}
