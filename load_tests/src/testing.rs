//! Reports and samples for tests that use neither a network connection nor a clock.
//!
//! Invariant: the values are built without code under test.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    measure::Stats,
    report::{Counts, Distribution, Latencies, PlanReport, RunReport, Series},
    sample::{Delivery, Outcome, Sample},
};

/// Returns a report of `requests` requests, all completed, without measurements.
pub fn report(requests: usize) -> RunReport {
    RunReport {
        label: String::new(),
        date: "20260101-000000".into(),
        url: "http://127.0.0.1:1".into(),
        models: vec!["tiny".into()],
        plan: PlanReport {
            requests,
            arrivals: "all".into(),
            closed_loop: false,
            rate: None,
            burstiness: None,
            max_concurrency: None,
            prompt: "8".into(),
            output: "8".into(),
            endpoint: "/v1/completions".into(),
            seed: 0,
        },
        counts: Counts {
            planned: requests,
            sent: requests,
            completed: requests,
            hung_up: 0,
            failed: 0,
            unsent: 0,
            short: 0,
            retries: 0,
            failures: BTreeMap::new(),
        },
        duration_s: 1.0,
        input_tokens: 0,
        output_tokens: 0,
        request_throughput: 0.0,
        input_throughput: 0.0,
        output_throughput: 0.0,
        goodput: None,
        peak_output_tokens_per_s: 0,
        peak_concurrency: 0,
        mean_concurrency: 0.0,
        overlap: 0.0,
        latencies: Latencies { ttft: None, tpot: None, itl: None, e2el: None, lateness: None },
        series: Series { in_flight: vec![], progress: vec![], output_throughput: vec![] },
        by_model: vec![],
        server: None,
    }
}

/// Returns a distribution in which every value is `ms`.
pub fn constant_distribution(ms: f64) -> Option<Distribution> {
    let stats = Stats { mean: ms, median: ms, std: 0.0, p90: ms, p95: ms, p99: ms, max: ms };
    Some(Distribution { stats, histogram: vec![] })
}

/// Returns a completed request with two tokens; times are in seconds since the start of the run.
pub fn sample(index: usize, scheduled: f64, first: f64, last: f64) -> Sample {
    let [scheduled, first, last] = [scheduled, first, last].map(Duration::from_secs_f64);
    Sample {
        index,
        model: 0,
        prompt_len: 1,
        requested_output_len: 2,
        output_len: 2,
        scheduled,
        sent: scheduled,
        ended: last,
        retries: 0,
        deliveries: vec![Delivery::new(first, 1), Delivery::new(last, 1)],
        outcome: Outcome::Completed,
    }
}
