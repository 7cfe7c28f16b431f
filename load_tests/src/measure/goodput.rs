//! Goodput: the rate of completed requests within the given latency limits.
//!
//! Invariant: only measures with a single value per request can be limited; a request without the measure
//! meets the limit.

use std::{collections::BTreeMap, time::Duration};

use super::{TimeSpan, completed};
use crate::{report::Goodput, sample::Sample};

/// Latency limits in milliseconds by measure: `ttft`, `tpot`, `e2el`. A completed request within all of them
/// is good.
pub type GoodputLimits = BTreeMap<String, f64>;

/// The measures that can be limited, and the function that computes each.
const MEASURES: [(&str, Measure); 3] =
    [("ttft", Sample::ttft), ("tpot", Sample::tpot), ("e2el", Sample::e2e)];

type Measure = fn(&Sample) -> Option<Duration>;

/// Parses a measure and its limit in milliseconds, such as `ttft:200`.
pub fn parse_limit(text: &str) -> Result<(String, f64), String> {
    let (name, limit) =
        text.split_once(':').ok_or(format!("'{text}' is not MEASURE:MS, such as ttft:200"))?;
    if !MEASURES.iter().any(|measure| measure.0 == name) {
        return Err(format!("'{name}' is not a measure that can be limited; use ttft, tpot or e2el"));
    }
    let limit_ms: f64 = limit.parse().map_err(|_| format!("'{limit}' is not a number of milliseconds"))?;
    if !(limit_ms > 0.0 && limit_ms.is_finite()) {
        return Err(format!("the limit of {limit} ms is not above 0 and finite"));
    }
    Ok((name.to_owned(), limit_ms))
}

/// Computes the goodput of a run, or `None` if there are no limits.
pub fn compute(samples: &[Sample], span: TimeSpan, limits: &GoodputLimits) -> Option<Goodput> {
    if limits.is_empty() {
        return None;
    }
    let good = completed(samples).filter(|sample| is_within_limits(sample, limits)).count();
    Some(Goodput {
        limits_ms: limits.clone(),
        good,
        throughput: span.per_second(good as f64),
        share: good as f64 / samples.len().max(1) as f64,
    })
}

/// Returns whether a request is within the limits. A measure that it lacks, such as TPOT with a single token,
/// is never exceeded.
fn is_within_limits(sample: &Sample, limits: &GoodputLimits) -> bool {
    let measured = MEASURES.iter().filter_map(|(name, measure)| limits.get(*name).zip(measure(sample)));
    measured.into_iter().all(|(&limit_ms, time)| super::milliseconds(time) <= limit_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::testing::{completed, failed};

    fn limits(texts: &[&str]) -> GoodputLimits {
        texts.iter().map(|text| parse_limit(text).unwrap()).collect()
    }

    #[test]
    fn goodput_by_hand() {
        let samples = [
            // Sent late, but due at 0: the first token took 200 ms, the later ones 50 each.
            completed(0, 150, &[200, 250, 300]),
            // The first token after 201 ms.
            completed(0, 0, &[201, 211, 221]),
            // The first token after 100, the later ones 60 each.
            completed(100, 100, &[200, 260, 320]),
            // One token alone has no time per later token.
            completed(300, 300, &[500]),
            failed(400, 400),
        ];
        let span = TimeSpan::from_samples(&samples);
        let good = |texts: &[&str]| compute(&samples, span, &limits(texts)).unwrap();
        assert_eq!(good(&["ttft:200"]).good, 3);
        assert_eq!(good(&["ttft:200", "tpot:50"]).good, 2);
        assert_eq!(good(&["tpot:50", "e2el:220"]).good, 1);
        assert_eq!(good(&["e2el:200"]).good, 1);
        let goodput = good(&["ttft:200", "tpot:50"]);
        assert_eq!((goodput.share, goodput.throughput), (0.4, 4.0));
        assert_eq!(goodput.limits_ms["tpot"], 50.0);
        assert_eq!(compute(&samples, span, &GoodputLimits::new()), None);
        assert_eq!(compute(&[], TimeSpan::from_samples(&[]), &limits(&["ttft:1"])).unwrap().share, 0.0);
    }

    #[test]
    fn limits_as_they_are_written() {
        assert_eq!(parse_limit("e2el:1500.5"), Ok(("e2el".into(), 1500.5)));
        for (bad, word) in [
            ("ttft", "'ttft' is not MEASURE:MS"),
            ("itl:10", "'itl' is not a measure"),
            ("ttft:", "'' is not a number"),
            ("ttft:fast", "'fast' is not a number"),
            ("ttft:0", "0 ms is not above 0"),
            ("ttft:-1", "-1 ms is not above 0"),
            ("ttft:inf", "inf ms is not above 0"),
            ("ttft:NaN", "NaN ms is not above 0"),
        ] {
            let error = parse_limit(bad).unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }
}
