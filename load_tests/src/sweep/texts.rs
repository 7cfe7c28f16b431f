//! The report sections of a sweep, and a sentence about its knee.
//!
//! Invariant: texts only restate the verdicts of the steps.

use super::{LoadUnit, Sweep, SweepStep};
use crate::{
    measure::Stats,
    report::{
        Distribution,
        html::{Section, SweepPoint},
    },
};

/// Describes the knee in a sentence.
pub fn describe_knee(sweep: &Sweep) -> String {
    let name = |step: &SweepStep| sweep.unit.name(step.x);
    let beyond = |step: &SweepStep| {
        let why = step.saturated.as_deref().unwrap_or("it is saturated");
        format!("at {} it {}: {why}", name(step), sweep.unit.saturation_verb())
    };
    let first_beyond = sweep.knee.map_or(0, |knee| knee + 1);
    match (sweep.knee.map(|knee| &sweep.steps[knee]), sweep.steps.get(first_beyond)) {
        (Some(knee), Some(next)) => format!("The server keeps up at {}; {}.", name(knee), beyond(next)),
        (Some(knee), None) => format!("The server keeps up at every step, up to {}.", name(knee)),
        (None, Some(first)) => format!("The server is saturated at the lowest step: {}.", beyond(first)),
        (None, None) => "No step completed.".into(),
    }
}

/// Returns the report sections of a sweep: its curves, and a table of the steps.
pub fn sections(sweep: &Sweep, title: &str) -> Vec<Section> {
    let points = sweep.steps.iter().map(|step| SweepPoint { x: step.x, run: step.run.clone() });
    let curves = Section::Sweep {
        title: title.into(),
        text: describe_knee(sweep),
        x_label: sweep.unit.label().into(),
        points: points.collect(),
    };
    let table = Section::Table {
        title: format!("{title}: steps"),
        text: "A step is saturated when requests fail, wait longer and longer, pile up or miss the limits, \
               or when more users do not increase \
               throughput."
            .into(),
        columns: columns(sweep.unit),
        rows: sweep.steps.iter().map(row).collect(),
    };
    vec![curves, table]
}

impl LoadUnit {
    fn label(self) -> &'static str {
        match self {
            LoadUnit::Rate => "requests per second",
            LoadUnit::Users => "users",
        }
    }

    fn saturation_verb(self) -> &'static str {
        match self {
            LoadUnit::Rate => "falls behind",
            LoadUnit::Users => "is saturated",
        }
    }
}

fn columns(unit: LoadUnit) -> Vec<String> {
    let measured = [
        "requests",
        "completed/s",
        "output tok/s",
        "TTFT median ms",
        "TTFT p99 ms",
        "TPOT median ms",
        "e2e median ms",
        "e2e p99 ms",
        "in flight, mean",
        "saturated",
    ];
    [unit.label()].iter().chain(&measured).map(|column| column.to_string()).collect()
}

fn row(step: &SweepStep) -> Vec<String> {
    let SweepStep { x, run, saturated } = step;
    let of = |measure: &Option<Distribution>, figure: fn(&Stats) -> f64| {
        measure.as_ref().map_or("-".into(), |measure| format!("{:.1}", figure(&measure.stats)))
    };
    let latencies = &run.latencies;
    vec![
        x.to_string(),
        run.counts.sent.to_string(),
        format!("{:.2}", run.request_throughput),
        format!("{:.1}", run.output_throughput),
        of(&latencies.ttft, |stats| stats.median),
        of(&latencies.ttft, |stats| stats.p99),
        of(&latencies.tpot, |stats| stats.median),
        of(&latencies.e2el, |stats| stats.median),
        of(&latencies.e2el, |stats| stats.p99),
        format!("{:.1}", run.mean_concurrency),
        saturated.clone().unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{constant_distribution, report};

    fn sweep(unit: LoadUnit, steps: &[(f64, Option<&str>)], knee: Option<usize>) -> Sweep {
        let step = |(x, why): &(f64, Option<&str>)| {
            let mut run = report(40);
            run.latencies.ttft = constant_distribution(12.34);
            SweepStep { x: *x, run, saturated: why.map(str::to_owned) }
        };
        Sweep { unit, steps: steps.iter().map(step).collect(), knee }
    }

    #[test]
    fn the_knee_is_described_in_words() {
        let steps = [(4.0, None), (8.0, None), (16.0, Some("TTFT grows by 0.41 s per second"))];
        let describe = |steps: &[_], at| describe_knee(&sweep(LoadUnit::Rate, steps, at));
        assert_eq!(
            describe(&steps, Some(1)),
            "The server keeps up at 8/s; at 16/s it falls behind: TTFT grows by 0.41 s per second."
        );
        assert_eq!(describe(&steps[..2], Some(1)), "The server keeps up at every step, up to 8/s.");
        assert!(
            describe(&steps[2..], None)
                .starts_with("The server is saturated at the lowest step: at 16/s it falls")
        );
        assert_eq!(describe(&[], None), "No step completed.");
        let users = describe_knee(&sweep(LoadUnit::Users, &[(1.0, None), (2.0, Some("it was"))], Some(0)));
        assert_eq!(users, "The server keeps up at 1 user; at 2 users it is saturated: it was.");
    }

    #[test]
    fn every_step_is_a_point_and_a_row() {
        let sections = sections(&sweep(LoadUnit::Rate, &[(0.5, None), (1.0, Some("why"))], Some(0)), "Rates");
        let [Section::Sweep { points, x_label, .. }, Section::Table { columns, rows, .. }] = &sections[..]
        else {
            panic!("{sections:?}")
        };
        assert_eq!((points.len(), points[1].x, x_label.as_str()), (2, 1.0, "requests per second"));
        assert!(rows.iter().all(|row| row.len() == columns.len()));
        assert_eq!((rows[0][0].as_str(), rows[0][4].as_str(), rows[0][5].as_str()), ("0.5", "12.3", "12.3"));
        assert_eq!((rows[0][10].as_str(), rows[1][10].as_str(), rows[0][6].as_str()), ("", "why", "-"));
    }
}
