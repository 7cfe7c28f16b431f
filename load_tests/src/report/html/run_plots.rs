//! The plots of a run.
//!
//! Invariant: empty plots are omitted.

use super::{Curve, Scale, curves, numbers::format_setting};
use crate::report::{
    Distribution, RunReport,
    plots::{self, Plot},
};

/// Returns the plots of a run that are not empty.
pub fn run_plots(run: &RunReport) -> Vec<Plot> {
    let latencies = &run.latencies;
    let distributions = [
        percentiles("Time to first token", "ttft", latencies.ttft.as_ref(), run),
        percentiles("Inter-token latency", "itl", latencies.itl.as_ref(), run),
        percentiles("End-to-end latency", "e2el", latencies.e2el.as_ref(), run),
    ];
    let progress = vec![Curve { label: String::new(), ..curves::progress(run) }];
    let pictures = [
        over_time("Output throughput", "tokens per second", throughput(run)),
        over_time("Requests in flight", "requests", in_flight(run)),
        over_time("Progress", "% of output tokens", progress),
    ];
    pictures.into_iter().chain(distributions).filter(|picture| !picture.empty).collect()
}

fn over_time(title: &str, y: &str, curves: Vec<Curve>) -> Plot {
    plots::plot(title, &curves::seconds(), &curves::axis(y, Scale::Linear), &curves).filled()
}

fn throughput(run: &RunReport) -> Vec<Curve> {
    with_mean(Curve { label: "output".into(), ..curves::output_throughput(run) }, run.output_throughput, run)
}

fn in_flight(run: &RunReport) -> Vec<Curve> {
    with_mean(Curve { label: "in flight".into(), ..curves::in_flight(run) }, run.mean_concurrency, run)
}

/// Adds a line at the mean, unless the curve is empty.
fn with_mean(curve: Curve, mean: f64, run: &RunReport) -> Vec<Curve> {
    let mean = (!curve.points.is_empty()).then(|| curves::level_line("mean", mean, (0.0, run.duration_s)));
    [curve].into_iter().chain(mean).collect()
}

/// Returns a percentile plot, with a line at the goodput limit of the measure if there is one.
fn percentiles(title: &str, measure: &str, distribution: Option<&Distribution>, run: &RunReport) -> Plot {
    let values = curves::percentiles("", distribution);
    let limit = run.goodput.as_ref().and_then(|good| good.limits_ms.get(measure));
    let all = match (limit, values.points.last()) {
        (Some(&limit), Some(&(last, _))) => {
            let level =
                curves::level_line(&format!("limit {} ms", format_setting(limit)), limit, (0.0, last));
            vec![Curve { label: measure.to_uppercase(), ..values }, level]
        }
        _ => vec![values],
    };
    plots::plot(title, &curves::percentile(), &curves::fitted_axis("ms", &all), &all)
}
