//! Request counts by outcome.
//!
//! Invariant: completed, hung-up and failed requests add up to the requests sent.

use std::collections::BTreeMap;

use crate::{
    report::{Counts, Failures},
    run::{RunRecord, RunSettings},
    sample::{Outcome, Sample},
};

/// Counts the requests of a run by outcome.
pub fn count_outcomes(settings: &RunSettings, record: &RunRecord) -> Counts {
    let samples = record.samples.as_slice();
    let failures = failures(samples);
    Counts {
        planned: settings.load.requests,
        sent: samples.len(),
        completed: super::completed(samples).count(),
        hung_up: samples.iter().filter(|sample| sample.outcome == Outcome::HungUp).count(),
        failed: failures.values().map(|failures| failures.count).sum(),
        unsent: record.unsent,
        short: super::completed(samples)
            .filter(|sample| sample.output_len < sample.requested_output_len)
            .count(),
        retries: samples.iter().map(|sample| u64::from(sample.retries)).sum(),
        failures,
    }
}

fn failures(samples: &[Sample]) -> BTreeMap<String, Failures> {
    let mut failures: BTreeMap<String, Failures> = BTreeMap::new();
    for sample in samples {
        if let Outcome::Failed(failure) = &sample.outcome {
            let first = || Failures { count: 0, first: failure.message.clone() };
            failures.entry(failure.kind.to_string()).or_insert_with(first).count += 1;
        }
    }
    failures
}

/// Returns the numbers of prompt tokens and output tokens, over the requests that received any token.
pub fn tokens<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> (u64, u64) {
    let answered = samples.into_iter().filter(|sample| !sample.deliveries.is_empty());
    answered.fold((0, 0), |(input, output), sample| {
        (input + u64::from(sample.prompt_len), output + u64::from(sample.output_len))
    })
}
