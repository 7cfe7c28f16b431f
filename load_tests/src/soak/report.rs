//! The report of a soak test.
//!
//! Invariant: a test passes if and only if its report has no problems.

use std::{collections::BTreeMap, fmt::Write};

use serde::Serialize;

use super::{
    check::{ClientFaults, ServerFaults},
    exchange::Outcome,
    flat::{Growth, Level, SAMPLES_MIN},
    kind::Kind,
    process::Resources,
};

/// Maximum number of differences that are reported.
const DIFFERENCES_MAX: usize = 10;

/// File descriptors and threads that may come and go, however many requests were sent: threads of pools start
/// and end as needed.
const COUNT_NOISE: f64 = 2.0;

/// Bytes of memory by which a request may add to the fragmentation of the heap: half a page per 100 requests.
const BYTES_PER_REQUEST: f64 = 4096.0 / 2.0 / 100.0;

/// The resources of the server after a round, when it is idle.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RoundSample {
    /// Number of requests since the start.
    pub requests: u64,
    /// Seconds since the start.
    pub seconds: f64,
    /// Rebuilds of the devices since the start.
    pub restarts: u64,
    #[serde(flatten)]
    pub resources: Resources,
}

/// The outcomes of all requests.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tally {
    pub requests: u64,
    /// Number of requests by kind and outcome.
    pub outcomes: BTreeMap<Kind, BTreeMap<String, u64>>,
    /// Requests that ended with an error of a fault.
    pub failed_requests: u64,
    pub faults: ClientFaults,
    /// The first outcomes that were wrong, with their kind and variant.
    pub differences: Vec<String>,
    pub wrong: u64,
}

/// The results of a soak test.
#[derive(Clone, Debug, Serialize)]
pub struct SoakReport {
    pub title: String,
    pub passed: bool,
    /// Failures; empty if the test passed.
    pub problems: Vec<String>,
    pub seconds: f64,
    /// Kinds that the model has no endpoint for.
    pub skipped: Vec<Kind>,
    #[serde(flatten)]
    pub tally: Tally,
    pub server: ServerFaults,
    /// Growth of each resource; empty if there were too few rounds.
    pub growth: BTreeMap<&'static str, Growth>,
    pub samples: Vec<RoundSample>,
}

impl Tally {
    /// Adds the outcome of a request.
    pub fn add(&mut self, kind: Kind, variant: u32, outcome: &Outcome) {
        self.requests += 1;
        *self.outcomes.entry(kind).or_default().entry(outcome.name().to_owned()).or_default() += 1;
        match outcome {
            Outcome::Expected | Outcome::Reset => {}
            Outcome::HungUp => self.faults.hung_up_choices += kind.choices(),
            Outcome::Fault(code) => {
                self.failed_requests += 1;
                self.faults.failed_choices += kind.choices();
                match &**code {
                    "device_failed" => self.faults.device_failed += 1,
                    _ => self.faults.sampling_failed += 1,
                }
            }
            Outcome::Wrong(why) => {
                self.wrong += 1;
                if self.differences.len() < DIFFERENCES_MAX {
                    self.differences.push(format!("{kind:?} {variant}: {why}"));
                }
            }
        }
    }

    /// Returns the kinds of requests whose connections were reset every time. Since the client cannot see
    /// why, the server must have given the reason to some.
    pub fn without_reason(&self) -> Vec<Kind> {
        let reset = self.outcomes.iter().filter(|(_, counts)| counts.contains_key(Outcome::Reset.name()));
        let never = reset.filter(|(_, counts)| !counts.contains_key(Outcome::Expected.name()));
        never.map(|(kind, _)| *kind).collect()
    }
}

/// Returns the growth of each resource, or `None` if there are too few samples. Memory may differ by
/// `rss_noise` bytes without a leak.
pub fn growth(samples: &[RoundSample], rss_noise: f64) -> Option<BTreeMap<&'static str, Growth>> {
    let of = |value: fn(&Resources) -> u64, per_request: f64, noise: f64| {
        let level = |sample: &RoundSample| Level {
            requests: sample.requests,
            value: value(&sample.resources) as f64,
        };
        let levels: Vec<Level> = samples.iter().map(level).collect();
        Growth::of(&levels, per_request, noise)
    };
    (samples.len() >= SAMPLES_MIN).then(|| {
        [
            ("rss_bytes", of(|resources| resources.rss_bytes, BYTES_PER_REQUEST, rss_noise)),
            ("fds", of(|resources| resources.fds, 0.0, COUNT_NOISE)),
            ("threads", of(|resources| resources.threads, 0.0, COUNT_NOISE)),
        ]
        .into()
    })
}

impl SoakReport {
    /// Returns the report as text.
    pub fn text(&self) -> String {
        let mut text = format!(
            "{}\n{} requests in {:.0} s: {}\n",
            self.title,
            self.tally.requests,
            self.seconds,
            if self.passed { "passed" } else { "FAILED" }
        );
        self.problems.iter().for_each(|problem| _ = writeln!(text, "  problem: {problem}"));
        for (kind, outcomes) in &self.tally.outcomes {
            let counts: Vec<_> = outcomes.iter().map(|(name, count)| format!("{count} {name}")).collect();
            _ = writeln!(text, "  {:<14} {}", format!("{kind:?}"), counts.join(", "));
        }
        let ServerFaults { injected, restarts, non_finite_rows, failed_choices, .. } = &self.server;
        _ = writeln!(
            text,
            "  injected {injected:?}; {restarts} rebuilds, {non_finite_rows} rows not finite, \
             {failed_choices} choices failed"
        );
        for (name, growth) in &self.growth {
            let Growth { early, late, requests, allowed } = growth;
            let change = late - early;
            _ = writeln!(
                text,
                "  {name:<9} {early:.0} to {late:.0} ({change:+.0}; flat up to {allowed:+.0} in {requests} \
                 requests)"
            );
        }
        for RoundSample { requests, seconds, restarts, resources } in &self.samples {
            let Resources { rss_bytes, fds, threads } = resources;
            let mib = *rss_bytes as f64 / f64::from(1 << 20);
            _ = writeln!(
                text,
                "  {seconds:>7.1} s {requests:>8} requests: {mib:>7.1} MiB, {fds} files, {threads} threads, \
                 {restarts} rebuilds"
            );
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVEL: Resources = Resources { rss_bytes: 100 << 20, fds: 30, threads: 12 };

    /// Returns the samples of `rounds` rounds of 1,000 requests each.
    fn samples(rounds: u64, value: impl Fn(u64) -> Resources) -> Vec<RoundSample> {
        let sample = |round: u64| RoundSample {
            requests: 1000 * round,
            seconds: round as f64,
            restarts: 0,
            resources: value(1000 * round),
        };
        (1..=rounds).map(sample).collect()
    }

    fn leaking(samples: &[RoundSample]) -> Vec<&'static str> {
        let growth = growth(samples, 3e6).expect("there are enough");
        growth.into_iter().filter(|(_, growth)| !growth.is_flat()).map(|(name, _)| name).collect()
    }

    #[test]
    fn a_leak_of_any_resource_is_found() {
        assert_eq!(leaking(&samples(16, |_| LEVEL)), [""; 0]);
        let fds = |at: u64| Resources { fds: 30 + at / 1000, ..LEVEL };
        assert_eq!(leaking(&samples(16, fds)), ["fds"]);
        let threads = |at: u64| Resources { threads: 12 + at / 1000, ..LEVEL };
        assert_eq!(leaking(&samples(16, threads)), ["threads"]);
        let memory = |at: u64| Resources { rss_bytes: LEVEL.rss_bytes + 1024 * at, ..LEVEL };
        assert_eq!(leaking(&samples(16, memory)), ["rss_bytes"]);
        let warm_up =
            |at: u64| Resources { rss_bytes: LEVEL.rss_bytes.min(at << 20), fds: 30 + at % 3, ..LEVEL };
        assert_eq!(leaking(&samples(16, warm_up)), [""; 0]);
        assert!(growth(&samples(7, |_| LEVEL), 0.0).is_none());
    }

    /// A rebuild of the devices comes once in thousands of requests, so the number of requests must not
    /// excuse what each one leaves behind.
    #[test]
    fn what_each_rebuild_leaves_behind_is_found_however_many_requests_there_are() {
        let rebuilds = |at: u64| at / 12_000;
        let fds = |at: u64| Resources { fds: LEVEL.fds + rebuilds(at), ..LEVEL };
        assert_eq!(leaking(&samples(80, fds)), ["fds"]);
        let threads = |at: u64| Resources { threads: LEVEL.threads + rebuilds(at), ..LEVEL };
        assert_eq!(leaking(&samples(80, threads)), ["threads"]);
        // Threads of a pool that come and go.
        let pool = |at: u64| Resources { threads: 11 + [3, 0, 2, 1, 2][at as usize / 1000 % 5], ..LEVEL };
        assert_eq!(leaking(&samples(80, pool)), [""; 0]);
    }

    #[test]
    fn the_tally_counts_choices_and_keeps_the_first_differences() {
        let mut tally = Tally::default();
        tally.add(Kind::Choices, 0, &Outcome::Fault("device_failed".into()));
        tally.add(Kind::Short, 0, &Outcome::Fault("sampling_failed".into()));
        tally.add(Kind::HangUp, 0, &Outcome::HungUp);
        (0..20).for_each(|variant| tally.add(Kind::Long, variant, &Outcome::Wrong("no".into())));
        let faults =
            ClientFaults { device_failed: 1, sampling_failed: 1, failed_choices: 4, hung_up_choices: 1 };
        assert_eq!((tally.faults, tally.failed_requests, tally.wrong), (faults, 2, 20));
        assert_eq!((tally.differences.len(), &*tally.differences[1]), (10, "Long 1: no"));
        assert_eq!(tally.outcomes[&Kind::Long]["WRONG"], 20);
    }

    #[test]
    fn resets_need_a_reason_that_some_request_got() {
        let mut tally = Tally::default();
        tally.add(Kind::HugeBody, 0, &Outcome::Reset);
        assert_eq!((tally.without_reason(), tally.wrong), (vec![Kind::HugeBody], 0));
        tally.add(Kind::HugeBody, 1, &Outcome::Expected);
        assert_eq!(tally.without_reason(), []);
    }
}
