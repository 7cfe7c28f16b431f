//! What became of the requests, in numbers.
//!
//! Invariant: completed, hung up and failed are all that were sent.

use std::collections::BTreeMap;

use crate::{
    report::{Counts, Failures},
    run::{Record, Settings},
    sample::{Outcome, Sample},
};

/// The counts of a run.
pub fn of(settings: &Settings, record: &Record) -> Counts {
    let samples = record.samples.as_slice();
    let failures = failures(samples);
    Counts {
        planned: settings.load.requests,
        sent: samples.len(),
        completed: super::completed(samples).count(),
        hung_up: samples.iter().filter(|sample| sample.outcome == Outcome::HungUp).count(),
        failed: failures.values().map(|failures| failures.count).sum(),
        unsent: record.unsent,
        short: super::completed(samples).filter(|sample| sample.output_len < sample.output_len_asked).count(),
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

/// Tokens of the prompts and of the answers of those that got any answer.
pub fn tokens<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> (u64, u64) {
    let answered = samples.into_iter().filter(|sample| !sample.deliveries.is_empty());
    answered.fold((0, 0), |(input, output), sample| {
        (input + u64::from(sample.prompt_len), output + u64::from(sample.output_len))
    })
}
