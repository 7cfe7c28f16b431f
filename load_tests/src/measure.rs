//! Samples to figures: latencies with exact percentiles, throughput, counts.
//!
//! Invariant: latency runs from when a request was due, so that no lateness is lost, whoever's it is.

use std::{collections::BTreeMap, time::Duration};

use crate::client::{FailureKind, Outcome, Sample};

impl Sample {
    /// How late the generator sent the request.
    pub fn lateness(&self) -> Duration {
        self.sent.saturating_sub(self.scheduled)
    }

    /// Time to first token; `None` when none came.
    pub fn ttft(&self) -> Option<Duration> {
        self.deliveries.first().map(|&(at, _)| at.saturating_sub(self.scheduled))
    }

    /// Time to the last token; `None` when none came.
    pub fn e2e(&self) -> Option<Duration> {
        self.deliveries.last().map(|&(at, _)| at.saturating_sub(self.scheduled))
    }

    /// Mean time per token after the first; `None` when there was no more than one.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first = self.output_len.checked_sub(1).filter(|&n| n > 0)?;
        Some(self.e2e()?.saturating_sub(self.ttft()?) / after_first)
    }

    /// The gaps between events that brought tokens.
    pub fn itls(&self) -> impl Iterator<Item = Duration> {
        self.deliveries.windows(2).map(|pair| pair[1].0.saturating_sub(pair[0].0))
    }
}

/// The distribution of one measure, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stats {
    pub mean: f64,
    pub median: f64,
    /// Of the whole population, not an estimate from a sample.
    pub std: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

impl Stats {
    /// `None` when there are no values.
    pub fn of(values: impl IntoIterator<Item = Duration>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().map(|value| value.as_secs_f64() * 1e3).collect();
        sorted.sort_by(f64::total_cmp);
        let max = *sorted.last()?;
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        let variance = sorted.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / sorted.len() as f64;
        let [median, p90, p95, p99] = [50.0, 90.0, 95.0, 99.0].map(|percent| percentile(&sorted, percent));
        Some(Self { mean, median, std: variance.sqrt(), p90, p95, p99, max })
    }

    /// Each figure with its name in reports.
    pub fn named(&self) -> [(&'static str, f64); 7] {
        [
            ("mean", self.mean),
            ("median", self.median),
            ("std", self.std),
            ("p90", self.p90),
            ("p95", self.p95),
            ("p99", self.p99),
            ("max", self.max),
        ]
    }
}

/// The percentile of ascending values, of which there is at least one. Between two ranks it is interpolated,
/// as most statistics libraries do by default.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    assert!(!sorted.is_empty() && (0.0..=100.0).contains(&percent), "no such percentile; this is a bug");
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let (low, high) = (sorted[rank.floor() as usize], sorted[rank.ceil() as usize]);
    low + (high - low) * rank.fract()
}

/// The figures of a run. Latencies are those of completed requests; throughput counts every token that came.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    pub sent: usize,
    pub completed: usize,
    pub hung_up: usize,
    /// Failed requests by kind.
    pub failures: BTreeMap<FailureKind, usize>,
    /// Completed requests with fewer tokens than they asked for.
    pub short: usize,
    /// From the first send to the last token.
    pub span: Duration,
    /// Prompt tokens of the requests that got any answer.
    pub input_tokens: u64,
    pub output_tokens: u64,
    /// Most tokens within one second of the run, in whole seconds from its start.
    pub peak_output_tokens_per_s: u64,
    /// Most requests in flight at once.
    pub peak_concurrency: usize,
    pub ttft: Option<Stats>,
    pub tpot: Option<Stats>,
    pub itl: Option<Stats>,
    pub e2e: Option<Stats>,
    /// How late the generator was, over all requests sent.
    pub lateness: Option<Stats>,
}

impl Summary {
    pub fn of(samples: &[Sample]) -> Self {
        let completed: Vec<&Sample> = samples.iter().filter(|s| s.outcome == Outcome::Completed).collect();
        let answered = || samples.iter().filter(|s| !s.deliveries.is_empty());
        Self {
            sent: samples.len(),
            completed: completed.len(),
            hung_up: samples.iter().filter(|s| s.outcome == Outcome::HungUp).count(),
            failures: failures(samples),
            short: completed.iter().filter(|s| s.output_len < s.output_len_asked).count(),
            span: span(samples),
            input_tokens: answered().map(|s| u64::from(s.prompt_len)).sum(),
            output_tokens: answered().map(|s| u64::from(s.output_len)).sum(),
            peak_output_tokens_per_s: peak_output_tokens_per_s(samples),
            peak_concurrency: peak_concurrency(samples),
            ttft: Stats::of(completed.iter().filter_map(|s| s.ttft())),
            tpot: Stats::of(completed.iter().filter_map(|s| s.tpot())),
            itl: Stats::of(completed.iter().flat_map(|s| s.itls())),
            e2e: Stats::of(completed.iter().filter_map(|s| s.e2e())),
            lateness: Stats::of(samples.iter().map(Sample::lateness)),
        }
    }

    /// Requests that failed, of any kind.
    pub fn failed(&self) -> usize {
        self.failures.values().sum()
    }

    /// `count` per second of the span; 0 when no token came.
    pub fn per_second(&self, count: u64) -> f64 {
        if self.span.is_zero() { 0.0 } else { count as f64 / self.span.as_secs_f64() }
    }
}

fn failures(samples: &[Sample]) -> BTreeMap<FailureKind, usize> {
    let mut failures = BTreeMap::new();
    for sample in samples {
        if let Outcome::Failed(failure) = &sample.outcome {
            *failures.entry(failure.kind).or_default() += 1;
        }
    }
    failures
}

fn span(samples: &[Sample]) -> Duration {
    let first_sent = samples.iter().map(|s| s.sent).min();
    let last_token = samples.iter().filter_map(|s| s.deliveries.last()).map(|&(at, _)| at).max();
    first_sent.zip(last_token).map_or(Duration::ZERO, |(first, last)| last.saturating_sub(first))
}

fn peak_output_tokens_per_s(samples: &[Sample]) -> u64 {
    let mut seconds: BTreeMap<u64, u64> = BTreeMap::new();
    for &(at, tokens) in samples.iter().flat_map(|s| &s.deliveries) {
        *seconds.entry(at.as_secs()).or_default() += u64::from(tokens);
    }
    seconds.into_values().max().unwrap_or(0)
}

fn peak_concurrency(samples: &[Sample]) -> usize {
    let mut turns: Vec<(Duration, isize)> =
        samples.iter().flat_map(|s| [(s.sent, 1), (s.ended, -1)]).collect();
    // At the same time, ends come first.
    turns.sort_unstable();
    let (mut live, mut peak) = (0, 0);
    for (_, turn) in turns {
        live += turn;
        peak = peak.max(live);
    }
    peak.max(0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        client::Failure,
        draws::{Draws, Purpose},
    };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn sample(scheduled: u64, sent: u64, tokens: &[u64], outcome: Outcome) -> Sample {
        Sample {
            index: 0,
            prompt_len: 10,
            output_len_asked: 3,
            output_len: tokens.len() as u32,
            scheduled: ms(scheduled),
            sent: ms(sent),
            ended: ms(*tokens.last().unwrap_or(&sent)),
            deliveries: tokens.iter().map(|&at| (ms(at), 1)).collect(),
            outcome,
        }
    }

    /// The k-th smallest by counting, no sorting.
    fn kth_smallest(values: &[f64], k: usize) -> f64 {
        let is_kth = |&&x: &&f64| {
            let below = values.iter().filter(|&&v| v < x).count();
            let not_above = values.iter().filter(|&&v| v <= x).count();
            (below..not_above).contains(&k)
        };
        *values.iter().find(is_kth).unwrap()
    }

    #[test]
    fn percentiles_agree_with_brute_force() {
        let mut draws = Draws::new(1, Purpose::Request(0));
        for count in 1..60u32 {
            // Few distinct values, so that ties occur.
            let values: Vec<f64> = (0..count).map(|_| f64::from(draws.between(0, 20))).collect();
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            for percent in [0, 1, 50, 90, 95, 99, 100] {
                // Whole numbers: rank = hundredths / 100 exactly.
                let hundredths = percent * (count as usize - 1);
                let (low, part) = (hundredths / 100, hundredths % 100);
                let next = kth_smallest(&values, (low + 1).min(values.len() - 1));
                let low = kth_smallest(&values, low);
                let expected = low + (next - low) * part as f64 / 100.0;
                let got = percentile(&sorted, percent as f64);
                assert!((got - expected).abs() < 1e-9, "p{percent} of {values:?}: {got}, not {expected}");
            }
        }
    }

    #[test]
    fn stats_of_known_values() {
        let stats = Stats::of([4, 1, 3, 2].map(ms)).unwrap();
        assert_eq!((stats.mean, stats.median, stats.max), (2.5, 2.5, 4.0));
        assert!((stats.std - 1.25f64.sqrt()).abs() < 1e-12);
        assert!((stats.p90 - 3.7).abs() < 1e-9);
        assert_eq!(Stats::of([]), None);
    }

    #[test]
    fn latency_counts_from_when_the_request_was_due() {
        let late = sample(100, 400, &[500, 510, 530], Outcome::Completed);
        assert_eq!(late.ttft(), Some(ms(400)));
        assert_eq!(late.e2e(), Some(ms(430)));
        assert_eq!(late.tpot(), Some(ms(15)));
        assert_eq!(late.itls().collect::<Vec<_>>(), [ms(10), ms(20)]);
        assert_eq!(late.lateness(), ms(300));
        let single = sample(0, 0, &[7], Outcome::Completed);
        assert_eq!((single.tpot(), single.itls().count()), (None, 0));
    }

    #[test]
    fn a_summary_keeps_outcomes_apart() {
        let failure = Failure { kind: FailureKind::EarlyClose, message: String::new() };
        let samples = [
            sample(0, 0, &[100, 200, 1300], Outcome::Completed),
            sample(0, 50, &[150, 1200], Outcome::Completed),
            sample(0, 60, &[2060], Outcome::HungUp),
            sample(0, 70, &[], Outcome::Failed(failure)),
        ];
        let summary = Summary::of(&samples);
        assert_eq!((summary.sent, summary.completed, summary.hung_up, summary.failed()), (4, 2, 1, 1));
        assert_eq!(summary.short, 1);
        assert_eq!(summary.span, ms(2060));
        assert_eq!((summary.input_tokens, summary.output_tokens), (30, 6));
        assert!((summary.per_second(6) - 6.0 / 2.06).abs() < 1e-9);
        assert_eq!((summary.peak_output_tokens_per_s, summary.peak_concurrency), (3, 3));
        assert_eq!(summary.ttft.unwrap().max, 150.0);
    }

    #[test]
    fn nothing_at_all_is_a_summary_too() {
        let summary = Summary::of(&[]);
        assert_eq!((summary.failed(), summary.ttft, summary.per_second(0)), (0, None, 0.0));
    }
}
