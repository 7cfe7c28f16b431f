//! Tests of arrival processes against their distributions, with CDFs of another library and numerical
//! integrals.
//!
//! Invariant: every seed is fixed, so the tests are deterministic.

use std::time::Duration;

use statrs::distribution::{ContinuousCDF, Exp, Gamma};

use super::{Arrivals, Schedule};
use crate::plan::{
    random::{Purpose, RandomStream},
    testing::{KS_CRITICAL, ks_distance},
};

const N: usize = 20_000;

fn parsed(text: &str) -> Arrivals {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn schedule(arrivals: &Arrivals, count: usize, seed: u64) -> Vec<Duration> {
    match arrivals.schedule(count, &mut RandomStream::new(seed, Purpose::Arrivals)) {
        Schedule::Open(times) => times,
        closed => panic!("{closed:?}"),
    }
}

/// Returns the gaps of `N` + 1 requests in units of `mean_s`.
fn gaps(text: &str, mean_s: f64) -> Vec<f64> {
    let times = schedule(&parsed(text), N + 1, 11);
    assert!(times[0].is_zero() && !times[1].is_zero(), "the first alone is due at once");
    times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() / mean_s).collect()
}

fn assert_fits(values: &[f64], cdf: impl Fn(f64) -> f64) {
    let distance = ks_distance(values, cdf);
    assert!(distance < KS_CRITICAL / (values.len() as f64).sqrt(), "{distance}");
}

/// Asserts that the lag-1 correlation is small; independent values exceed the bound once in 1000.
fn assert_independent(values: &[f64]) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / n;
    let covariance = values.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum::<f64>() / n;
    let correlation = covariance / variance;
    assert!(correlation.abs() < 3.29 / n.sqrt(), "{correlation}");
}

#[test]
fn poisson_gaps_are_exponential_and_independent() {
    let exact = Exp::new(1.0).unwrap();
    for (text, mean_s) in [("poisson:50ms", 0.05), ("poisson:300/s", 1.0 / 300.0)] {
        let gaps = gaps(text, mean_s);
        assert_fits(&gaps, |x| exact.cdf(x));
        assert_independent(&gaps);
    }
}

#[test]
fn gamma_gaps_have_their_shape_and_the_same_mean() {
    for shape in [0.25, 1.0, 4.0] {
        let exact = Gamma::new(shape, shape).unwrap();
        let gaps = gaps(&format!("gamma:20/s:{shape}"), 0.05);
        assert_fits(&gaps, |x| exact.cdf(x));
        assert_independent(&gaps);
    }
}

/// Tests the index of dispersion over windows of 50 mean gaps: 1 for Poisson, 1 / shape for gamma in long
/// windows.
#[test]
fn a_small_shape_comes_in_bursts_and_a_large_one_evenly() {
    let dispersion = |text: &str| {
        let mut counts = vec![0.0; N / 50 * 9 / 10];
        let mut time = 0.0;
        for gap in gaps(text, 0.05) {
            time += gap / 50.0;
            counts.get_mut(time as usize).into_iter().for_each(|count| *count += 1.0);
        }
        let mean = counts.iter().sum::<f64>() / counts.len() as f64;
        counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / counts.len() as f64 / mean
    };
    let [bursts, poisson, even] = ["gamma:20/s:0.25", "poisson:20/s", "gamma:20/s:4"].map(dispersion);
    // The index over 360 windows has a standard deviation of about 7.5 %.
    assert!((3.0..5.0).contains(&bursts), "{bursts}");
    assert!((0.75..1.25).contains(&poisson), "{poisson}");
    assert!((0.19..0.32).contains(&even), "{even}");
}

/// Integrates `rate` from 0 to `end` by Simpson's rule.
fn integral(rate: impl Fn(f64) -> f64, end: f64) -> f64 {
    let half = end / 1000.0;
    let part = |i: usize| {
        let left = 2.0 * half * i as f64;
        (rate(left) + 4.0 * rate(left + half) + rate(left + 2.0 * half)) * half / 3.0
    };
    (0..500).map(part).sum()
}

/// Computes the rate of a ramp at a time from its definition.
fn rate_at(text: &str, time: f64) -> f64 {
    let (from, to, over, exponential) = match text {
        "ramp:0-100:60s" => (0.0, 100.0, 60.0, false),
        "ramp:90/s-30/s:60s" => (90.0, 30.0, 60.0, false),
        "ramp:40-40:60s" => (40.0, 40.0, 60.0, false),
        "ramp-exponential:2-200:60s" => (2.0, 200.0, 60.0, true),
        "ramp-exponential:200-2:60s" => (200.0, 2.0, 60.0, true),
        "ramp-exponential:40-40:60s" => (40.0, 40.0, 60.0, true),
        _ => panic!("{text}"),
    };
    let part = f64::min(time / over, 1.0);
    if exponential { from * f64::powf(to / from, part) } else { from + (to - from) * part }
}

const RAMPS: [&str; 6] = [
    "ramp:0-100:60s",
    "ramp:90/s-30/s:60s",
    "ramp:40-40:60s",
    "ramp-exponential:2-200:60s",
    "ramp-exponential:200-2:60s",
    "ramp-exponential:40-40:60s",
];

#[test]
fn each_part_of_a_ramp_and_what_follows_has_as_many_requests_as_the_rates_integral() {
    for text in RAMPS {
        let times = schedule(&parsed(text), N, 4);
        let until = |end: f64| times[1..].iter().filter(|time| time.as_secs_f64() < end).count() as f64;
        for (begin, end) in [(0.0, 20.0), (20.0, 40.0), (40.0, 60.0), (60.0, 90.0)] {
            let expected = integral(|t| rate_at(text, t), end) - integral(|t| rate_at(text, t), begin);
            let count = until(end) - until(begin);
            let deviation = (count - expected) / expected.sqrt();
            assert!(deviation.abs() < 3.5, "{text}, {begin} to {end}: {count} for {expected}");
        }
    }
}

#[test]
fn along_the_rates_integral_a_ramp_is_a_poisson_process() {
    let exact = Exp::new(1.0).unwrap();
    for text in RAMPS {
        let times = schedule(&parsed(text), 2000, 5);
        // The integrand is smooth only on each side of the ramp's end.
        let along = |time: &Duration| {
            let time = time.as_secs_f64();
            integral(|t| rate_at(text, t), time.min(60.0)) + (time - 60.0).max(0.0) * rate_at(text, 60.0)
        };
        let along: Vec<f64> = times.iter().map(along).collect();
        let gaps: Vec<f64> = along.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert_fits(&gaps, |x| exact.cdf(x));
        assert_independent(&gaps);
    }
}

#[test]
fn the_seed_decides_and_a_longer_schedule_begins_as_a_shorter_one() {
    for text in ["poisson:20ms", "gamma:20ms:0.5", "ramp:1-50:10s", "ramp-exponential:1-50:10s"] {
        let arrivals = parsed(text);
        assert_eq!(schedule(&arrivals, 100, 5), schedule(&arrivals, 100, 5));
        assert_ne!(schedule(&arrivals, 100, 5), schedule(&arrivals, 100, 6));
        assert_eq!(schedule(&arrivals, 100, 5)[..50], schedule(&arrivals, 50, 5));
        assert!(schedule(&arrivals, 1000, 5).is_sorted());
        assert_eq!(schedule(&arrivals, 0, 5), []);
    }
}

#[test]
fn what_is_not_random_is_exact() {
    assert_eq!(schedule(&parsed("constant:500"), 32, 0)[31], Duration::from_millis(15_500));
    assert_eq!(
        schedule(&parsed("constant:3/s"), 3_000_001, 0)[3_000_000],
        Duration::from_nanos(333_333_333 * 3_000_000)
    );
    assert_eq!(schedule(&Arrivals::AllAtOnce, 3, 0), [Duration::ZERO; 3]);
    let users = parsed("users:7:2s").schedule(100, &mut RandomStream::new(0, Purpose::Arrivals));
    assert_eq!(users, Schedule::Closed { users: 7, think: Duration::from_secs(2) });
}

#[test]
fn a_trace_is_as_recorded_and_begins_anew_a_mean_gap_after_its_end() {
    let ms = Duration::from_millis;
    let trace = Arrivals::Trace([ms(0), ms(10), ms(40)].into());
    assert_eq!(schedule(&trace, 2, 0), [ms(0), ms(10)]);
    let twice = [0, 10, 40, 60, 70, 100, 120].map(ms);
    assert_eq!(schedule(&trace, 7, 0), twice);
    assert_eq!(schedule(&Arrivals::Trace([ms(0)].into()), 3, 0), [ms(0); 3]);
    assert_eq!(trace.rate(), Some(50.0));
    assert_eq!(Arrivals::Trace([ms(0)].into()).rate(), None);
}

#[test]
fn stretching_scales_every_time_exactly() {
    let trace = Arrivals::Trace([0, 7, 30].map(Duration::from_millis).into());
    let others =
        ["all", "constant:3/s", "poisson:20/s", "gamma:20/s:0.3", "ramp:0-9:20s", "ramp-exponential:1-9:20s"];
    for arrivals in others.map(parsed).into_iter().chain([trace]) {
        let (before, after) = (schedule(&arrivals, 500, 3), schedule(&arrivals.scaled(2.5), 500, 3));
        for (index, (before, after)) in before.iter().zip(&after).enumerate() {
            let expected = before.as_nanos() as f64 * 2.5;
            // The mean gap and each time are rounded to the nanosecond.
            let rounding = 2.0 + index as f64;
            assert!(
                (after.as_nanos() as f64 - expected).abs() <= rounding,
                "{arrivals}: {before:?} {after:?}"
            );
        }
    }
    assert_eq!(parsed("users:3:10ms").scaled(0.5), parsed("users:3:5ms"));
    assert_eq!(parsed("ramp:2-8:10s").scaled(0.5), parsed("ramp:4-16:5s"));
    assert_eq!(parsed("poisson:40ms").scaled(0.25).rate(), Some(100.0));
    assert_eq!(Arrivals::AllAtOnce.scaled(f64::INFINITY), Arrivals::AllAtOnce);
}

#[test]
fn rate_and_burstiness_are_reported_where_they_are_known() {
    let properties = |text: &str| (parsed(text).rate(), parsed(text).burstiness());
    assert_eq!(properties("all"), (Some(f64::INFINITY), None));
    assert_eq!(properties("constant:50"), (Some(20.0), Some(f64::INFINITY)));
    assert_eq!(properties("poisson:20/s"), (Some(20.0), Some(1.0)));
    assert_eq!(properties("gamma:2s:0.5"), (Some(0.5), Some(0.5)));
    for text in ["ramp:1-2:3s", "ramp-exponential:1-2:3s", "users:3"] {
        assert_eq!(properties(text), (None, None), "{text}");
    }
}
