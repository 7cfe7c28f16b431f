//! The section of a sweep: runs at increasing load.
//!
//! Invariant: a step without measurements is a gap in its curve.

use super::{
    Axis, Curve, CurveForm, Scale, SweepPoint,
    block::{Block, ReportTable, text},
    columns::{self, ITL, TTFT},
    curves,
    numbers::{format_count, format_setting},
};
use crate::{
    measure::Stats,
    report::{
        RunReport,
        plots::{self, Plot},
    },
};

/// Computes the plotted value of a step.
type StepValue = dyn Fn(&RunReport) -> Option<f64>;

/// A label and its steps.
type LabelGroup<'a> = (&'a str, Vec<&'a SweepPoint>);

/// Returns the plots and the table of the steps.
pub fn blocks(about: &str, x_label: &str, points: &[SweepPoint]) -> Vec<Block> {
    if points.is_empty() {
        return text(about).into_iter().chain(text("The sweep has no steps.")).collect();
    }
    let by_label = by_label(points);
    let pictures = Block::Plots(load_plots(x_label, points, &by_label));
    let table = Block::Table(steps(x_label, &by_label));
    text(about).into_iter().chain([pictures, table]).collect()
}

/// Groups points by label and sorts each group by x; groups are in order of first appearance.
fn by_label(points: &[SweepPoint]) -> Vec<LabelGroup<'_>> {
    let mut groups: Vec<LabelGroup> = Vec::new();
    for point in points {
        match groups.iter_mut().find(|(label, _)| *label == point.run.label) {
            Some((_, group)) => group.push(point),
            None => groups.push((&point.run.label, vec![point])),
        }
    }
    groups.iter_mut().for_each(|(_, group)| group.sort_by(|a, b| a.x.total_cmp(&b.x)));
    groups
}

fn load_plots(x_label: &str, points: &[SweepPoint], groups: &[LabelGroup]) -> Vec<Plot> {
    let scale = if is_geometric(points) { Scale::Log } else { Scale::Linear };
    let x = curves::axis(x_label, scale);
    let each = |value: &StepValue| -> Vec<Curve> {
        groups.iter().map(|(label, group)| curve(label, group, value)).collect()
    };
    let mut achieved = each(&|run| Some(run.request_throughput));
    if points.iter().all(|point| !point.run.plan.closed_loop) {
        achieved.push(offered_load(points));
    }
    let output = each(&|run| Some(run.output_throughput));
    let mut pictures = vec![
        plots::plot("Requests completed", &x, &curves::axis("requests per second", scale), &achieved),
        plots::plot("Output throughput", &x, &curves::axis("tokens per second", scale), &output),
    ];
    for (title, of) in [("Time to first token", TTFT), ("Inter-token latency", ITL)] {
        let quantile =
            |get: fn(&Stats) -> f64| each(&move |run| of(run).map(|measured| get(&measured.stats)));
        let both = [("p50", quantile(|stats| stats.median)), ("p99", quantile(|stats| stats.p99))];
        pictures.extend(latency(title, &x, both));
    }
    pictures
}

/// Returns one plot with both quantiles for a single label, or one plot per quantile for several labels.
fn latency(title: &str, x: &Axis, quantiles: [(&str, Vec<Curve>); 2]) -> Vec<Plot> {
    let picture =
        |title: String, curves: &[Curve]| plots::plot(title, x, &curves::fitted_axis("ms", curves), curves);
    if quantiles[0].1.len() > 1 {
        return quantiles.map(|(name, curves)| picture(format!("{title}, {name}"), &curves)).into();
    }
    let named = |(name, curves): (&str, Vec<Curve>)| {
        curves.into_iter().map(|curve| Curve { label: name.into(), ..curve }).collect::<Vec<_>>()
    };
    vec![picture(title.into(), &quantiles.map(named).concat())]
}

/// Returns the curve of a group; a missing value is a gap.
fn curve(label: &str, group: &[&SweepPoint], value: &StepValue) -> Curve {
    let points = group.iter().map(|point| (point.x, value(&point.run).unwrap_or(f64::NAN))).collect();
    Curve { label: label.into(), points, form: CurveForm::LineAndPoints }
}

/// Returns the reference line of a server that completes requests at the offered rate.
fn offered_load(points: &[SweepPoint]) -> Curve {
    let mut xs: Vec<_> = points.iter().map(|point| point.x).collect();
    xs.sort_by(f64::total_cmp);
    let points = xs.first().into_iter().chain(xs.last()).map(|&x| (x, x)).collect();
    Curve { label: "offered load".into(), points, form: CurveForm::Reference }
}

/// Returns whether the loads are closer to a geometric than to an arithmetic progression.
fn is_geometric(points: &[SweepPoint]) -> bool {
    let mut xs: Vec<_> = points.iter().map(|point| point.x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let uneven = |gap: fn(f64, f64) -> f64| {
        let gaps = xs.windows(2).map(|pair| gap(pair[0], pair[1]));
        let (low, high) =
            gaps.fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), gap| (low.min(gap), high.max(gap)));
        high / low
    };
    xs.first().is_some_and(|&x| x > 0.0) && uneven(|a, b| (b / a).ln()) < uneven(|a, b| b - a)
}

fn steps(x_label: &str, groups: &[LabelGroup]) -> ReportTable {
    let several = groups.len() > 1;
    let first = [x_label].into_iter().chain(several.then_some("run"));
    let names = first.chain(columns::OUTCOME).chain(columns::LATENCIES).chain(["peak in flight"]);
    let row = |point: &&SweepPoint| {
        let first = [format_setting(point.x)].into_iter().chain(several.then(|| point.run.label.clone()));
        let figures = columns::outcome(&point.run).chain(columns::latencies(&point.run));
        first.chain(figures).chain([format_count(point.run.peak_concurrency)]).collect()
    };
    let rows = groups.iter().flat_map(|(_, group)| group.iter().map(row)).collect();
    let table = ReportTable::new(&format!("Steps, {}", columns::LATENCY_CAPTION), names, rows);
    let curves = groups.iter().enumerate().flat_map(|(index, (_, group))| vec![index; group.len()]);
    if several { table.with_curve_keys(curves) } else { table }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::html::tests::run;

    fn points(label: &str, xs: &[f64]) -> Vec<SweepPoint> {
        xs.iter().map(|&x| SweepPoint { x, run: RunReport { label: label.into(), ..run() } }).collect()
    }

    fn pictures(points: &[SweepPoint]) -> Vec<Plot> {
        let blocks = blocks("", "load", points);
        let plots = blocks.into_iter().filter_map(|block| match block {
            Block::Plots(plots) => Some(plots),
            _ => None,
        });
        plots.flatten().collect()
    }

    #[test]
    fn axes_are_logarithmic_where_the_ladder_is_geometric() {
        let geometric = |xs: &[f64]| is_geometric(&points("", xs));
        assert!(
            geometric(&[1.0, 2.0, 4.0, 8.0])
                && geometric(&[0.5, 1.6, 5.0])
                && geometric(&[8.0, 1.0, 2.0, 4.0])
        );
        assert!(!geometric(&[10.0, 20.0, 30.0]) && !geometric(&[0.0, 1.0, 10.0]) && !geometric(&[5.0, 5.0]));
        assert!(!geometric(&[]) && !geometric(&[f64::NAN, 1.0]));
    }

    #[test]
    fn the_line_of_the_offered_load_is_there_for_rates_only() {
        let mut points = points("a", &[1.0, 2.0, 4.0]);
        let has_offered_load = |points: &[SweepPoint]| {
            pictures(points)[0].curves.iter().any(|curve| curve.label == "offered load")
        };
        assert!(has_offered_load(&points));
        points.iter_mut().for_each(|point| point.run.plan.closed_loop = true);
        assert!(!has_offered_load(&points));
    }

    #[test]
    fn each_label_has_its_curve_and_a_step_without_latencies_is_a_gap() {
        let mut points = points("a", &[4.0, 1.0, 2.0]);
        points.extend(self::points("b", &[1.0]));
        points[2].run.latencies.ttft = None;
        let pictures = pictures(&points);
        let ttft = pictures.iter().find(|picture| picture.title == "Time to first token, p99").unwrap();
        let labels: Vec<_> = ttft.curves.iter().map(|curve| curve.label.as_str()).collect();
        assert_eq!(labels, ["a", "b"]);
        assert_eq!(ttft.curves[0].line.matches('M').count(), 2, "{}", ttft.curves[0].line);
        assert_eq!(ttft.curves[0].marks.len(), 2);
    }
}
