//! Computes the report of a run from its samples: latencies with exact percentiles, throughput, counts.
//!
//! Invariant: latency is measured from a request's due time, so that it includes all delays before the send.

mod span;
mod stats;

mod in_flight;
mod series;

mod counts;
mod goodput;
mod plan_report;

#[cfg(test)]
pub(crate) mod testing;

use std::time::{Duration, SystemTime};

use jiff::Timestamp;

use crate::{
    report::{Distribution, Latencies, ModelReport, RunReport, Series},
    run::{RunRecord, RunSettings},
    sample::{Outcome, Sample},
    scrape,
};

pub use goodput::{GoodputLimits, parse_limit};
use in_flight::InFlight;
pub(crate) use series::progress;
use series::{output_throughput, peak_per_second, progress_curve};
use span::TimeSpan;
pub use stats::{Stats, percentile};
pub(crate) use stats::{milliseconds, seconds};

/// Maximum number of points of a curve.
const POINTS_MAX: usize = 400;

impl Sample {
    /// Returns the delay between the due time and the first send.
    pub fn lateness(&self) -> Duration {
        self.sent.saturating_sub(self.scheduled)
    }

    /// Returns the time to first token, or `None` if no token was received.
    pub fn ttft(&self) -> Option<Duration> {
        self.deliveries.first().map(|delivery| delivery.at().saturating_sub(self.scheduled))
    }

    /// Returns the time to the last token, or `None` if no token was received.
    pub fn e2e(&self) -> Option<Duration> {
        self.deliveries.last().map(|delivery| delivery.at().saturating_sub(self.scheduled))
    }

    /// Returns the mean time per token after the first, or `None` if there is at most one token.
    pub fn tpot(&self) -> Option<Duration> {
        let after_first = self.output_len.checked_sub(1).filter(|&n| n > 0)?;
        Some(self.e2e()?.saturating_sub(self.ttft()?) / after_first)
    }

    /// Returns the gaps between events with tokens.
    pub fn itls(&self) -> impl Iterator<Item = Duration> {
        self.deliveries.windows(2).map(|pair| pair[1].at().saturating_sub(pair[0].at()))
    }
}

/// Computes the report of a run.
pub fn report(settings: &RunSettings, record: &RunRecord, limits: &GoodputLimits) -> RunReport {
    let samples = record.samples.as_slice();
    let (span, in_flight) = (TimeSpan::from_samples(samples), InFlight::from_samples(samples));
    let counts = counts::count_outcomes(settings, record);
    let (input_tokens, output_tokens) = counts::tokens(samples);
    let mean_concurrency = in_flight.mean(span);
    let mut report = RunReport {
        label: settings.label.clone().unwrap_or_else(|| settings.arrivals.to_string()),
        date: utc_date(record.began),
        url: plan_report::redact_url(&settings.target.url),
        models: record.models.clone(),
        plan: plan_report::report(settings),
        duration_s: seconds(span.length()),
        input_tokens,
        output_tokens,
        request_throughput: span.per_second(counts.completed as f64),
        input_throughput: span.per_second(input_tokens as f64),
        output_throughput: span.per_second(output_tokens as f64),
        goodput: goodput::compute(samples, span, limits),
        peak_output_tokens_per_s: peak_per_second(samples),
        peak_concurrency: in_flight.peak(),
        mean_concurrency,
        overlap: mean_concurrency / samples.len().max(1) as f64,
        latencies: latencies(samples),
        series: series(samples, span, &in_flight),
        by_model: by_model(record),
        counts,
        server: None,
    };
    report.server = record.server.as_ref().and_then(|(before, after)| scrape::report(before, after, &report));
    report
}

/// Formats a time as `YYYYMMDD-HHMMSS` in UTC; times outside the supported range become 1970.
fn utc_date(at: SystemTime) -> String {
    Timestamp::try_from(at).unwrap_or_default().strftime("%Y%m%d-%H%M%S").to_string()
}

fn completed(samples: &[Sample]) -> impl Iterator<Item = &Sample> {
    samples.iter().filter(|sample| sample.outcome == Outcome::Completed)
}

fn latencies(samples: &[Sample]) -> Latencies {
    Latencies {
        ttft: Distribution::from_values(completed(samples).filter_map(Sample::ttft)),
        tpot: Distribution::from_values(completed(samples).filter_map(Sample::tpot)),
        itl: Distribution::from_values(completed(samples).flat_map(Sample::itls)),
        e2el: Distribution::from_values(completed(samples).filter_map(Sample::e2e)),
        lateness: Distribution::from_values(samples.iter().map(Sample::lateness)),
    }
}

fn series(samples: &[Sample], span: TimeSpan, in_flight: &InFlight) -> Series {
    Series {
        in_flight: in_flight.curve(),
        progress: progress_curve(samples, span),
        output_throughput: output_throughput(samples, span),
    }
}

fn by_model(record: &RunRecord) -> Vec<ModelReport> {
    if record.models.len() < 2 {
        return Vec::new();
    }
    record.models.iter().enumerate().map(|(index, model)| model_report(record, index, model)).collect()
}

fn model_report(record: &RunRecord, index: usize, model: &str) -> ModelReport {
    let of_model = || record.samples.iter().filter(|sample| sample.model == index);
    let completed = || of_model().filter(|sample| sample.outcome == Outcome::Completed);
    ModelReport {
        model: model.to_owned(),
        sent: of_model().count(),
        completed: completed().count(),
        failed: of_model().filter(|sample| matches!(sample.outcome, Outcome::Failed(_))).count(),
        output_tokens: counts::tokens(of_model()).1,
        ttft: Stats::from_values(completed().filter_map(Sample::ttft)),
        itl: Stats::from_values(completed().flat_map(Sample::itls)),
        e2el: Stats::from_values(completed().filter_map(Sample::e2e)),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        testing::{completed, failed, ms, record, settings},
        *,
    };
    use crate::sample::FailureKind;

    fn report_of(samples: Vec<Sample>) -> RunReport {
        report(&settings(), &record(samples), &GoodputLimits::new())
    }

    #[test]
    fn latency_counts_from_when_the_request_was_due() {
        let late = completed(100, 400, &[500, 510, 530]);
        assert_eq!(late.ttft(), Some(ms(400)));
        assert_eq!(late.e2e(), Some(ms(430)));
        assert_eq!(late.tpot(), Some(ms(15)));
        assert_eq!(late.itls().collect::<Vec<_>>(), [ms(10), ms(20)]);
        assert_eq!(late.lateness(), ms(300));
        let single = completed(0, 0, &[7]);
        assert_eq!((single.tpot(), single.itls().count()), (None, 0));
    }

    #[test]
    fn a_report_keeps_outcomes_apart() {
        let early_close = Outcome::Failed(FailureKind::EarlyClose.with_message("the second"));
        let samples = vec![
            Sample { retries: 2, ..completed(0, 0, &[100, 200, 1300]) },
            completed(0, 50, &[150, 1200]),
            Sample { outcome: Outcome::HungUp, ..completed(0, 60, &[2060]) },
            failed(0, 70),
            Sample { outcome: early_close, ..completed(0, 75, &[90]) },
            Sample {
                outcome: Outcome::Failed(FailureKind::Status(500).with_message("not told")),
                ..failed(0, 80)
            },
        ];
        let RunReport { counts, latencies, .. } = &report_of(samples);
        assert_eq!((counts.planned, counts.sent, counts.unsent, counts.retries), (5, 6, 1, 2));
        assert_eq!((counts.completed, counts.hung_up, counts.failed, counts.short), (2, 1, 3, 1));
        let failures: Vec<_> =
            counts.failures.iter().map(|(kind, of)| (kind.as_str(), of.count, of.first.as_str())).collect();
        assert_eq!(failures, [("early close", 1, "the second"), ("status 500", 2, "out of luck")]);
        // Latencies cover completed requests only, but lateness covers all.
        assert_eq!(latencies.ttft.as_ref().unwrap().stats.max, 150.0);
        assert_eq!(latencies.e2el.as_ref().unwrap().stats.mean, 1250.0);
        assert_eq!(latencies.itl.as_ref().unwrap().stats.median, 1050.0);
        assert_eq!(latencies.lateness.as_ref().unwrap().stats.max, 80.0);
    }

    #[test]
    fn throughput_counts_every_token_that_came() {
        let samples = vec![
            completed(0, 100, &[200, 300, 1300]),
            Sample { outcome: Outcome::HungUp, ..completed(0, 160, &[2100]) },
            // No token was received, so the prompt is not counted, and the run ends with the last token
            // before it.
            Sample { ended: ms(9000), ..failed(0, 170) },
        ];
        let report = report_of(samples);
        assert_eq!((report.duration_s, report.input_tokens, report.output_tokens), (2.0, 20, 4));
        assert_eq!((report.input_throughput, report.output_throughput), (10.0, 2.0));
        assert_eq!((report.request_throughput, report.peak_output_tokens_per_s), (0.5, 2));
        assert_eq!(report.peak_concurrency, 3);
        // Durations in flight within the two seconds: 1200, 1940 and 1930 ms.
        assert!((report.mean_concurrency - 5.07 / 2.0).abs() < 1e-12);
        assert!((report.overlap - 5.07 / 6.0).abs() < 1e-12);
        assert_eq!(report.series.in_flight.last(), Some(&(9.0, 0.0)));
    }

    #[test]
    fn percentiles_of_a_report_are_those_of_all_values() {
        let samples = (0..201).rev().map(|i| completed(0, 0, &[1000 + i, 1000 + 3 * i])).collect();
        let report = report_of(samples);
        // Ranks 100, 180, 190, 198 of 0..=200.
        let ttft = report.latencies.ttft.unwrap().stats;
        assert_eq!([ttft.median, ttft.p90, ttft.p95, ttft.p99], [1100.0, 1180.0, 1190.0, 1198.0]);
        let itl = report.latencies.itl.unwrap().stats;
        assert_eq!([itl.median, itl.p90, itl.p95, itl.p99], [200.0, 360.0, 380.0, 396.0]);
        assert_eq!(report.latencies.tpot.unwrap().stats, itl);
    }

    #[test]
    fn overlap_is_the_share_of_all_requests_that_is_in_flight_on_the_mean() {
        // 32 requests of 5.6 s, 500 ms apart: 32 x 5.6 request seconds within 15.5 + 5.6 seconds.
        let samples =
            (0..32).map(|i| completed(i * 500, i * 500, &[i * 500 + 100, i * 500 + 5600])).collect();
        let report = report_of(samples);
        assert!((report.duration_s - 21.1).abs() < 1e-12);
        assert!((report.mean_concurrency - 32.0 * 5.6 / 21.1).abs() < 1e-9);
        assert!((report.overlap - 5.6 / 21.1).abs() < 1e-9);
        // One request every 500 ms, each taking 5.6 s.
        assert_eq!(report.peak_concurrency, 12);
    }

    #[test]
    fn models_are_reported_separately_where_there_are_several() {
        let mut record = record(vec![
            completed(0, 0, &[10, 20, 30]),
            Sample { model: 1, ..completed(0, 0, &[40, 60]) },
            Sample { model: 1, ..failed(0, 0) },
        ]);
        assert_eq!(report(&settings(), &record, &GoodputLimits::new()).by_model, []);
        record.models.push("n".into());
        let models = report(&settings(), &record, &GoodputLimits::new()).by_model;
        assert_eq!([&models[0].model, &models[1].model], ["m", "n"]);
        assert_eq!((models[0].sent, models[0].completed, models[0].output_tokens), (1, 1, 3));
        assert_eq!((models[1].sent, models[1].completed, models[1].failed), (2, 1, 1));
        let means =
            |model: &ModelReport| [model.ttft, model.itl, model.e2el].map(|stats| stats.unwrap().mean);
        assert_eq!((means(&models[0]), means(&models[1])), ([10.0, 10.0, 30.0], [40.0, 20.0, 60.0]));
    }

    #[test]
    fn nothing_at_all_has_a_report_too() {
        let report = report_of(Vec::new());
        assert_eq!((report.duration_s, report.overlap, report.request_throughput), (0.0, 0.0, 0.0));
        assert_eq!((report.latencies.ttft, report.latencies.lateness, report.goodput), (None, None, None));
        assert_eq!(report.series, Series { in_flight: vec![], progress: vec![], output_throughput: vec![] });
    }

    #[test]
    fn dates_are_of_utc() {
        let date = |seconds| utc_date(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(date(0), "19700101-000000");
        assert_eq!(date(951_782_399), "20000228-235959");
        assert_eq!(date(951_782_400), "20000229-000000");
    }
}
