//! Tests of parsing and formatting arrival processes, and of invalid texts.
//!
//! Invariant: a parsed process is compared with one built by hand, or with its own text.

use super::*;
use crate::plan::random::{Purpose, RandomStream};

fn parsed(text: &str) -> Arrivals {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn every_text_form_reads_as_what_it_says() {
    let (ms, us) = (Duration::from_millis, Duration::from_micros);
    let same = [
        ("poisson:20/s", Arrivals::Poisson { mean_gap: ms(50) }),
        ("poisson:0.5/s", Arrivals::Poisson { mean_gap: ms(2000) }),
        ("poisson:50ms", Arrivals::Poisson { mean_gap: ms(50) }),
        ("poisson:2s", Arrivals::Poisson { mean_gap: ms(2000) }),
        ("poisson:500us", Arrivals::Poisson { mean_gap: us(500) }),
        ("poisson:0.5", Arrivals::Poisson { mean_gap: us(500) }),
        ("constant:500", Arrivals::Constant { gap: ms(500) }),
        ("gamma:1/s:0.25", Arrivals::Gamma { mean_gap: ms(1000), shape: 0.25 }),
        ("users:8", Arrivals::Users { count: 8, think: Duration::ZERO }),
        ("users:8:250ms", Arrivals::Users { count: 8, think: ms(250) }),
    ];
    for (text, arrivals) in same {
        assert_eq!(parsed(text), arrivals, "{text}");
    }
    assert_eq!(parsed("ramp:0.5-20/s:1500"), parsed("ramp:0.5/s-20:1.5s"));
    assert_ne!(parsed("ramp:1-20:1s"), parsed("ramp-exponential:1-20:1s"));
}

#[test]
fn what_is_shown_is_short_and_reads_back() {
    for text in [
        "all",
        "constant:500ms",
        "constant:50ms",
        "poisson:10/s",
        "poisson:3/s",
        "poisson:2s",
        "poisson:2000/s",
        "poisson:300ms",
        "poisson:1.234567ms",
        "gamma:128/s:0.25",
        "ramp:0/s-0.5/s:90s",
        "ramp-exponential:1/s-20/s:1500ms",
        "users:1",
        "users:8:250ms",
    ] {
        assert_eq!(parsed(text).to_string(), text);
    }
    assert_eq!(Arrivals::Trace([Duration::ZERO].into()).to_string(), "trace");
}

/// Returns a random arrival process with log-uniform parameters.
fn random_process(draws: &mut RandomStream) -> Arrivals {
    let within = |draws: &mut RandomStream, low: f64, high: f64| low * f64::powf(high / low, draws.unit());
    let gap = |draws: &mut RandomStream| Duration::from_secs_f64(within(draws, 1e-6, 86_400.0));
    let rate = |draws: &mut RandomStream| within(draws, 1.2e-5, 1e6);
    let (first, second) = (gap(draws), within(draws, 0.01, 1e4));
    match draws.between(0, 5) {
        0 => Arrivals::Constant { gap: first },
        1 => Arrivals::Poisson { mean_gap: Duration::from_secs_f64(1.0 / rate(draws)) },
        2 => Arrivals::Gamma { mean_gap: first, shape: second },
        3 => Arrivals::Ramp { from: rate(draws), to: rate(draws), over: first, kind: RampKind::Linear },
        4 => Arrivals::Ramp { from: rate(draws), to: rate(draws), over: first, kind: RampKind::Exponential },
        _ => Arrivals::Users { count: second.ceil() as usize, think: first },
    }
}

#[test]
fn whatever_is_shown_reads_back_to_the_nanosecond_and_the_last_digit() {
    let mut draws = RandomStream::new(1, Purpose::Arrivals);
    for _ in 0..20_000 {
        let arrivals = random_process(&mut draws);
        assert_eq!(arrivals.to_string().parse(), Ok(arrivals.clone()), "{arrivals}");
    }
    // Rates with few digits are shown with as few digits or as a whole number of milliseconds.
    for tenths in 1..20_000 {
        let text = format!("poisson:{}/s", f64::from(tenths) / 10.0);
        let shown = parsed(&text).to_string();
        assert!(
            shown.len() <= text.len() || shown.ends_with("ms") && !shown.contains('.'),
            "{text}: {shown}"
        );
        assert_eq!(parsed(&shown), parsed(&text));
    }
}

#[test]
fn nonsense_is_refused_with_what_is_expected() {
    for (text, expected) in [
        ("", "expected all"),
        ("all:5", "expected all"),
        ("constant", "expected all"),
        ("trace", "expected all"),
        ("gamma:5", "expected all"),
        ("ramp:1-2", "expected all"),
        ("users:1:2:3", "expected all"),
        ("poisson:", "not a time such as 50ms"),
        ("poisson:5h", "not a time such as 50ms"),
        ("poisson:5 ms", "not a time such as 50ms"),
        ("poisson:0", "not between 1us and one day"),
        ("poisson:-1", "not between 1us and one day"),
        ("poisson:NaN", "not between 1us and one day"),
        ("constant:infs", "not between 1us and one day"),
        ("constant:1e300", "not between 1us and one day"),
        ("constant:86401s", "not between 1us and one day"),
        ("poisson:/s", "not a rate such as 20/s"),
        ("poisson:5ms/s", "not a rate such as 20/s"),
        ("poisson:0/s", "not between one per day and 1000000/s"),
        ("poisson:-3/s", "not between one per day and 1000000/s"),
        ("poisson:nan/s", "not between one per day and 1000000/s"),
        ("poisson:1e7/s", "not between one per day and 1000000/s"),
        ("gamma:5:0", "not a shape: expected a number from 0.01 to 10000"),
        ("gamma:5:inf", "not a shape"),
        ("gamma:5:NaN", "not a shape"),
        ("gamma:5:-1", "not a shape"),
        ("ramp:5:1s", "not a pair of rates such as 1/s-20/s"),
        ("ramp:-5-6:1s", "not a rate: expected requests per second"),
        ("ramp:1-NaN:1s", "not a rate"),
        ("ramp:1-2e6:1s", "not a rate"),
        ("ramp:5ms-6ms:1s", "not a rate"),
        ("ramp:5-0:1s", "cannot end at 0"),
        ("ramp:5-6:0s", "not between 1us and one day"),
        ("ramp-exponential:0-6:1s", "cannot start at 0"),
        ("ramp-exponential:-0-6:1s", "not a rate"),
        ("users:0", "not a number of users from 1 to 100000"),
        ("users:-1", "not a number of users"),
        ("users:1.5", "not a number of users"),
        ("users:100001", "not a number of users"),
        ("users:2:-1s", "not between 0ms and one day"),
    ] {
        let refused = text.parse::<Arrivals>().unwrap_err();
        assert!(refused.contains(expected), "{text}: {refused}");
    }
}
