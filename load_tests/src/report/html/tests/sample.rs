//! Sample reports for page tests.

use std::collections::BTreeMap;

use crate::{
    measure::Stats,
    report::{
        Counts, Distribution, Failures, Goodput, Latencies, ModelReport, PlanReport, RunReport, Series,
        ServerReport, ServerRow,
        html::{Axis, Curve, CurveForm, Scale, Section, SweepPoint},
    },
};

/// Returns a report in which every value is distinct.
pub fn run() -> RunReport {
    let failures = Failures { count: 4, first: "queue full".into() };
    RunReport {
        label: "baseline".into(),
        date: "20260102-030405".into(),
        url: "http://example.test:8080".into(),
        models: vec!["small".into()],
        plan: plan(),
        counts: Counts {
            planned: 1_017,
            sent: 1_011,
            completed: 1_003,
            hung_up: 3,
            failed: 4,
            unsent: 6,
            short: 5,
            retries: 7,
            failures: BTreeMap::from([("status 503".into(), failures)]),
        },
        duration_s: 101.3,
        input_tokens: 8_136,
        output_tokens: 128_384,
        request_throughput: 9.87,
        input_throughput: 80.3,
        output_throughput: 1_267.4,
        goodput: None,
        peak_output_tokens_per_s: 2_222,
        peak_concurrency: 41,
        mean_concurrency: 23.45,
        overlap: 0.678,
        latencies: Latencies {
            ttft: Some(distribution(111.0)),
            tpot: Some(distribution(13.0)),
            itl: Some(distribution(17.0)),
            e2el: Some(distribution(1_900.0)),
            lateness: Some(distribution(0.019)),
        },
        series: Series {
            in_flight: vec![(0.0, 1.0), (50.0, 41.0), (101.3, 0.0)],
            progress: vec![(0.0, 0.0), (101.3, 1.0)],
            output_throughput: vec![(0.0, 900.0), (1.0, 2_222.0), (2.0, 1_300.0)],
        },
        by_model: Vec::new(),
        server: None,
    }
}

fn plan() -> PlanReport {
    PlanReport {
        requests: 1_017,
        arrivals: "poisson:10/s".into(),
        closed_loop: false,
        rate: Some(10.0),
        burstiness: Some(1.0),
        max_concurrency: None,
        prompt: "8".into(),
        output: "128".into(),
        endpoint: "completions".into(),
        seed: 1,
    }
}

pub fn distribution(median: f64) -> Distribution {
    let [mean, p90, p95, p99, max] = [1.1, 1.5, 1.7, 2.3, 3.1].map(|factor| median * factor);
    let stats = Stats { mean, median, std: median * 0.2, p90, p95, p99, max };
    Distribution { stats, histogram: vec![(median, 502), (p90, 491), (max, 10)] }
}

/// Returns a report with all optional parts.
pub fn full() -> RunReport {
    let stats = Some(distribution(31.0).stats);
    let model = |model: &str| ModelReport {
        model: model.into(),
        sent: 500,
        completed: 490,
        failed: 2,
        output_tokens: 64_000,
        ttft: stats,
        itl: None,
        e2el: stats,
    };
    let row =
        ServerRow { name: "tokens".into(), unit: "tok".into(), server: 128_390.0, client: Some(128_384.0) };
    let limits_ms = BTreeMap::from([("ttft".into(), 200.0), ("e2el".into(), 2_500.5)]);
    RunReport {
        goodput: Some(Goodput { limits_ms, good: 913, throughput: 9.04, share: 0.903 }),
        by_model: vec![model("small"), model("large")],
        server: Some(ServerReport { rows: vec![row], steps: Some(5_483), sequences_per_step: Some(23.4) }),
        ..run()
    }
}

/// Returns one section of each kind, with `text` in every place that can hold external text.
pub fn sections(text: &str) -> Vec<Section> {
    let owned = || text.to_string();
    let mut run = full();
    run.models.push(owned());
    run.counts.failures.insert(owned(), Failures { count: 1, first: owned() });
    run.by_model[0].model = owned();
    for field in [&mut run.label, &mut run.date, &mut run.url, &mut run.plan.arrivals, &mut run.plan.prompt] {
        *field = owned();
    }
    for field in [&mut run.plan.output, &mut run.plan.endpoint] {
        *field = owned();
    }
    for row in run.server.iter_mut().flat_map(|server| &mut server.rows) {
        (row.name, row.unit) = (owned(), owned());
    }
    let axis = |scale| Axis { label: owned(), scale };
    let curve = |form| Curve { label: owned(), points: vec![(0.0, 1.0), (2.0, 0.0), (3.0, 5.0)], form };
    let forms = [
        CurveForm::Steps,
        CurveForm::Line,
        CurveForm::LineAndPoints,
        CurveForm::Points,
        CurveForm::Reference,
    ];
    let other = RunReport { label: "other".into(), ..run.clone() };
    let point = |x, run: &RunReport| SweepPoint { x, run: run.clone() };
    vec![
        Section::Run(Box::new(run.clone())),
        Section::Runs { title: owned(), text: owned(), runs: vec![run.clone(), other.clone()] },
        Section::Sweep {
            title: owned(),
            text: owned(),
            x_label: owned(),
            points: vec![point(1.0, &run), point(2.0, &run), point(4.0, &run), point(1.0, &other)],
        },
        Section::Table {
            title: owned(),
            text: owned(),
            columns: vec![owned(); 2],
            rows: vec![vec![owned(); 2]],
        },
        Section::Plot {
            title: owned(),
            text: owned(),
            x: axis(Scale::Linear),
            y: axis(Scale::Log),
            curves: forms.map(curve).into(),
        },
    ]
}
