//! Decides whether a step saturates the server.
//!
//! Invariant: the verdict is a function of the step's samples and of the steps of lower load.

use super::{LoadUnit, SweepStep, lag::lag};
use crate::{report::RunReport, sample::Sample};

/// Maximum fraction of failed requests.
const FAILED_MAX: f64 = 0.01;
/// Minimum fraction of requests within the goodput limits.
const GOOD_MIN: f64 = 0.9;

/// Minimum throughput gain of a closed loop for [`GAIN_MIN_FOR`] times as many users; other ratios scale
/// logarithmically.
const GAIN_MIN: f64 = 1.1;
const GAIN_MIN_FOR: f64 = 1.5;
/// Minimum ratio of users to compare with a lower step; smaller gains are lost in noise.
const RISE_MIN: f64 = 1.25;

/// Returns why a step of an open loop is saturated, or `None` if it is not.
pub(super) fn open_loop(run: &RunReport, samples: &[Sample], lower: &[SweepStep]) -> Option<String> {
    let lowest = lower.first().map_or(run, |step| &step.run);
    let latency_s = lowest.latencies.e2el.as_ref().map_or(0.0, |e2el| e2el.stats.median / 1e3);
    let behind = || lag(samples, latency_s).map(|lag| lag.to_string());
    failures(run).or_else(behind).or_else(|| goodput_missed(run))
}

/// Returns why a step of a closed loop with `users` users is saturated, or `None` if it is not.
pub(super) fn closed_loop(users: f64, run: &RunReport, lower: &[SweepStep]) -> Option<String> {
    let flat = || {
        let before = lower.iter().rev().find(|step| step.x * RISE_MIN <= users)?;
        let gain = run.output_throughput / before.run.output_throughput;
        let gain_min = (users / before.x).powf(GAIN_MIN.ln() / GAIN_MIN_FOR.ln());
        let percent = (gain - 1.0).abs() * 100.0;
        let word = if gain < 1.0 { "below" } else { "above" };
        let reason =
            || format!("throughput is {percent:.0} % {word} that of {}", LoadUnit::Users.name(before.x));
        (gain < gain_min).then(reason)
    };
    failures(run).or_else(flat).or_else(|| goodput_missed(run))
}

fn failures(run: &RunReport) -> Option<String> {
    let counts = &run.counts;
    if counts.unsent > 0 {
        return Some(format!("the time limit left {} of {} requests unsent", counts.unsent, counts.planned));
    }
    let is_many = counts.failed as f64 > FAILED_MAX * counts.sent as f64;
    is_many.then(|| format!("{} of {} requests failed", counts.failed, counts.sent))
}

fn goodput_missed(run: &RunReport) -> Option<String> {
    let share = run.goodput.as_ref()?.share;
    (share < GOOD_MIN).then(|| format!("{:.0} % of the requests are within the limits", share * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        report::{Goodput, Latencies},
        sweep::lag::tests::{constant, queue},
        testing::{constant_distribution, report},
    };

    fn step(x: f64, output_throughput: f64) -> SweepStep {
        let latencies = Latencies { e2el: constant_distribution(1000.0), ..report(0).latencies };
        SweepStep { x, run: RunReport { output_throughput, latencies, ..report(100) }, saturated: None }
    }

    /// A gain of 10 % for 1.5 times as many users corresponds to 11.7 % for 1.6 times as many.
    #[test]
    fn users_that_bring_nothing_are_too_many() {
        let lower = [step(8.0, 100.0), step(10.0, 101.0)];
        let reason = |users: f64, throughput: f64| closed_loop(users, &step(users, throughput).run, &lower);
        assert_eq!(reason(16.0, 112.0), Some("throughput is 11 % above that of 10 users".into()));
        assert_eq!(reason(16.0, 113.0), None);
        // Compared with 8 users (a ratio of 1.5), because 10 are too close.
        assert_eq!(reason(12.0, 109.0), Some("throughput is 9 % above that of 8 users".into()));
        assert_eq!(reason(12.0, 111.0), None);
        assert_eq!(reason(16.0, 50.0), Some("throughput is 50 % below that of 10 users".into()));
        assert_eq!(closed_loop(9.0, &step(9.0, 1.0).run, &lower), None);
        assert_eq!(closed_loop(1.0, &step(1.0, 0.0).run, &[]), None);
    }

    #[test]
    fn failures_and_limits_saturate() {
        let reason = |change: fn(&mut RunReport)| {
            let mut run = step(1.0, 1.0).run;
            change(&mut run);
            let open = open_loop(&run, &[], &[]);
            assert_eq!(open, closed_loop(1.0, &run, &[]));
            open
        };
        let good = |share| {
            let limits_ms = [("ttft".to_string(), 1.0)].into();
            Some(Goodput { limits_ms, good: 0, throughput: 0.0, share })
        };
        assert_eq!(reason(|run| run.counts.failed = 1), None);
        assert_eq!(reason(|run| run.counts.failed = 2), Some("2 of 100 requests failed".into()));
        let unsent = reason(|run| run.counts.unsent = 3);
        assert_eq!(unsent, Some("the time limit left 3 of 100 requests unsent".into()));
        let (mut run, enough) = (step(1.0, 1.0).run, good(0.9));
        run.goodput = enough;
        assert_eq!(open_loop(&run, &[], &[]), None);
        run.goodput = good(0.89);
        assert_eq!(open_loop(&run, &[], &[]), Some("89 % of the requests are within the limits".into()));
    }

    /// Growth is relative to the latency of the lowest step; small growth is ignored.
    #[test]
    fn the_lowest_step_is_the_measure() {
        let samples = queue(&constant(1.15, 60));
        let of = |latency_ms| {
            let mut lowest = step(1.0, 1.0);
            lowest.run.latencies.e2el = constant_distribution(latency_ms);
            open_loop(&step(2.0, 1.0).run, &samples, &[lowest])
        };
        // 60 requests arrive in 51.3 s; in the last three quarters the wait grows by 5.77 s.
        assert_eq!(of(11_400.0), Some("TTFT grows by 0.15 s per second".into()));
        assert_eq!(of(11_700.0), None);
    }
}
