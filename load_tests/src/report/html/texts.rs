//! Texts of the HTML report: the plan, request outcomes, and notes.
//!
//! Invariant: notes are based only on the report; a run without anomalies has none.

use super::numbers::{format_count, format_date, format_requests, format_setting, format_value};
use crate::report::{Counts, Goodput, RunReport};

/// Maximum 99th percentile of lateness, in milliseconds, before a note warns about a distorted measurement.
const LATE_MS_MAX: f64 = 10.0;

/// Returns the facts about a run: server, models, load, arrivals, start, duration.
pub fn facts(run: &RunReport) -> Vec<(&'static str, String)> {
    let models = if run.models.len() == 1 { "Model" } else { "Models" };
    vec![
        ("Server", run.url.clone()),
        (models, run.models.join(", ")),
        ("Load", load(run)),
        ("Arrivals", arrivals(run)),
        ("Started", format_date(&run.date)),
        (
            "Duration",
            format!(
                "{} s; {} prompt tokens in, {} output tokens out",
                format_value(run.duration_s),
                format_count(run.input_tokens),
                format_count(run.output_tokens)
            ),
        ),
    ]
}

fn load(run: &RunReport) -> String {
    let plan = &run.plan;
    format!(
        "{} to {}; prompt tokens: {}; output tokens: {}; seed {}",
        format_requests(plan.requests),
        plan.endpoint,
        plan.prompt,
        plan.output,
        plan.seed
    )
}

fn arrivals(run: &RunReport) -> String {
    let plan = &run.plan;
    let mut words = match process(&plan.arrivals) {
        Some(words) => format!("{words} ({})", plan.arrivals),
        None => plan.arrivals.clone(),
    };
    if let Some(rate) = plan.rate.filter(|rate| rate.is_finite()) {
        words += &format!(", {} req/s on average", format_setting(rate));
    }
    if let Some(burstiness) = plan.burstiness.filter(|&burstiness| burstiness != 1.0) {
        words += &format!(", burstiness {}", format_setting(burstiness));
    }
    if let Some(limit) = plan.max_concurrency {
        words += &format!(", at most {} in flight", format_count(limit));
    }
    words
}

/// Describes an arrival process given in its text form.
fn process(arrivals: &str) -> Option<&'static str> {
    Some(match arrivals.split(':').next()? {
        "all" => "all at once",
        "constant" => "at a constant interval",
        "poisson" => "a Poisson process",
        "gamma" => "gamma-distributed gaps",
        "ramp" => "a Poisson process whose rate changes linearly",
        "ramp-exponential" => "a Poisson process whose rate changes exponentially",
        "users" => "a closed loop of users",
        _ => return None,
    })
}

/// Describes the outcomes of the requests that did not complete.
pub fn describe_outcomes(counts: &Counts) -> String {
    let fates = [("failed", counts.failed), ("hung up", counts.hung_up), ("unsent", counts.unsent)];
    let seen: Vec<_> = fates
        .into_iter()
        .filter(|&(fate, number)| number > 0 || fate == "failed")
        .map(|(fate, number)| format!("{} {fate}", format_count(number)))
        .collect();
    format!("of {}; {}", format_count(counts.planned), seen.join(", "))
}

/// Formats the goodput limits: `TTFT ≤ 200 ms and TPOT ≤ 50 ms`.
pub fn limits(good: &Goodput) -> String {
    let limits = good.limits_ms.iter();
    let limits: Vec<_> = limits
        .map(|(measure, limit)| format!("{} ≤ {} ms", measure.to_uppercase(), format_setting(*limit)))
        .collect();
    limits.join(" and ")
}

/// Returns notes about anomalies that affect the interpretation of the results.
pub fn notes(run: &RunReport) -> Vec<String> {
    let counts = &run.counts;
    let nothing = (counts.completed == 0)
        .then(|| "No request completed, so there are no request latencies.".to_string());
    let unsent = (counts.unsent > 0).then(|| {
        format!(
            "The run ended early and left {} unsent. The results cover only the requests that were sent.",
            format_requests(counts.unsent)
        )
    });
    let short = (counts.short > 0).then(|| {
        format!(
            "{} got fewer tokens than requested although they completed, so the load was lighter than \
             planned.",
            format_requests(counts.short)
        )
    });
    [nothing, unsent, short, late(run), closed_loop(run)].into_iter().flatten().collect()
}

fn late(run: &RunReport) -> Option<String> {
    let lateness = run.latencies.lateness.as_ref().filter(|lateness| lateness.stats.p99 > LATE_MS_MAX)?;
    let cause = match run.plan.max_concurrency {
        Some(limit) => format!(
            "They waited because the limit of {} requests in flight was reached, or the client machine \
             could not keep up.",
            format_count(limit)
        ),
        None => "The client machine could not keep up with the planned load.".into(),
    };
    Some(format!(
        "1 % of the requests were sent {} ms late or later. {cause} Latencies are measured from the due \
         time, so they include this \
         delay.",
        format_value(lateness.stats.p99)
    ))
}

fn closed_loop(run: &RunReport) -> Option<String> {
    run.plan.closed_loop.then(|| {
        "This was a closed loop: a user sends the next request only after the previous response, so a slow \
         server receives fewer requests. The latencies do not include the time that further requests would \
         have waited (coordinated omission); compare them only with those of other closed \
         loops."
            .into()
    })
}
