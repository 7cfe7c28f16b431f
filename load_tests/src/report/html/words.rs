//! What a page says in words: the plan, the fates of requests, and what a reader must beware of.
//!
//! Invariant: notes are of what is in the report; a run without oddities has none.

use super::numbers::{chosen, count, date, figure, of_requests};
use crate::report::{Counts, Goodput, RunReport};

/// A generator later than this at the 99th percentile distorts what it measures.
const LATE_MS: f64 = 10.0;

/// Who was asked, for what, when.
pub fn facts(run: &RunReport) -> Vec<(&'static str, String)> {
    let models = if run.models.len() == 1 { "Model" } else { "Models" };
    vec![
        ("Server", run.url.clone()),
        (models, run.models.join(", ")),
        ("Load", load(run)),
        ("Arrivals", arrivals(run)),
        ("Began", date(&run.date)),
        (
            "Lasted",
            format!(
                "{} s; {} prompt tokens in, {} output tokens out",
                figure(run.duration_s),
                count(run.input_tokens),
                count(run.output_tokens)
            ),
        ),
    ]
}

fn load(run: &RunReport) -> String {
    let plan = &run.plan;
    format!(
        "{} to {}; prompt tokens: {}; answer tokens: {}; seed {}",
        of_requests(plan.requests),
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
        words += &format!(", {} req/s on the mean", chosen(rate));
    }
    if let Some(burstiness) = plan.burstiness.filter(|&burstiness| burstiness != 1.0) {
        words += &format!(", burstiness {}", chosen(burstiness));
    }
    if let Some(limit) = plan.max_concurrency {
        words += &format!(", at most {} in flight", count(limit));
    }
    words
}

/// An arrival process by the beginning of its text form.
fn process(arrivals: &str) -> Option<&'static str> {
    Some(match arrivals.split(':').next()? {
        "all" => "all at once",
        "constant" => "at a constant interval",
        "poisson" => "a Poisson process",
        "gamma" => "gamma-distributed gaps",
        "ramp" => "a Poisson process whose rate changes evenly",
        "ramp-exponential" => "a Poisson process whose rate changes exponentially",
        "users" => "a closed loop of users",
        _ => return None,
    })
}

/// What became of the requests that did not complete.
pub fn fates(counts: &Counts) -> String {
    let fates = [("failed", counts.failed), ("hung up", counts.hung_up), ("unsent", counts.unsent)];
    let seen: Vec<_> = fates
        .into_iter()
        .filter(|&(fate, number)| number > 0 || fate == "failed")
        .map(|(fate, number)| format!("{} {fate}", count(number)))
        .collect();
    format!("of {}; {}", count(counts.planned), seen.join(", "))
}

/// `TTFT ≤ 200 ms and TPOT ≤ 50 ms`.
pub fn limits(good: &Goodput) -> String {
    let limits = good.limits_ms.iter();
    let limits: Vec<_> = limits
        .map(|(measure, limit)| format!("{} ≤ {} ms", measure.to_uppercase(), chosen(*limit)))
        .collect();
    limits.join(" and ")
}

/// What a reader must beware of.
pub fn notes(run: &RunReport) -> Vec<String> {
    let counts = &run.counts;
    let nothing = (counts.completed == 0)
        .then(|| "No request completed, so there are no latencies of requests to show.".to_string());
    let unsent = (counts.unsent > 0).then(|| {
        format!(
            "The run ended early and left {} unsent. The figures are of those that were sent.",
            of_requests(counts.unsent)
        )
    });
    let short = (counts.short > 0).then(|| {
        format!(
            "Of the completed, {} got fewer tokens than asked for, so the load was lighter than planned.",
            of_requests(counts.short)
        )
    });
    [nothing, unsent, short, late(run), closed_loop(run)].into_iter().flatten().collect()
}

fn late(run: &RunReport) -> Option<String> {
    let lateness = run.latencies.lateness.as_ref().filter(|lateness| lateness.stats.p99 > LATE_MS)?;
    let cause = match run.plan.max_concurrency {
        Some(limit) => format!(
            "Either they waited because {} were in flight already, or this machine could not keep up.",
            count(limit)
        ),
        None => "This machine could not keep up with the load it was to make.".into(),
    };
    Some(format!(
        "Of the requests, 1 % were sent {} ms late or later. {cause} Latencies count from when a request was due, so \
         this is within them.",
        figure(lateness.stats.p99)
    ))
}

fn closed_loop(run: &RunReport) -> Option<String> {
    run.plan.closed_loop.then(|| {
        "This was a closed loop: a user sends the next request only after the last answer, so a slow server is asked \
         less. The latencies leave out what requests would have waited meanwhile (coordinated omission); compare \
         them with those of other closed loops only."
            .into()
    })
}
