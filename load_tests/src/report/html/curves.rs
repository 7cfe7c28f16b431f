//! The curves of runs, and their axes.
//!
//! Invariant: curves are in the order of the runs, including those without points, so that a run keeps its
//! colour.

use super::{Axis, Curve, CurveForm, Scale};
use crate::report::{Distribution, RunReport};

/// Ratio of the largest to the smallest value above which an axis is logarithmic.
const LOG_RATIO_MIN: f64 = 30.0;

/// Returns an axis with this label and scale.
pub fn axis(label: impl Into<String>, scale: Scale) -> Axis {
    Axis { label: label.into(), scale }
}

/// Returns the linear axis of times in seconds.
pub fn seconds() -> Axis {
    axis("seconds", Scale::Linear)
}

/// Returns the axis of percentiles.
pub fn percentile() -> Axis {
    axis("percentile", Scale::Percentile)
}

/// Returns an axis with a suitable scale: logarithmic if the values above zero span a ratio of more than
/// [`LOG_RATIO_MIN`].
pub fn fitted_axis(label: &str, curves: &[Curve]) -> Axis {
    let values = || curves.iter().flat_map(|curve| &curve.points).map(|point| point.1);
    let (low, high) = values()
        .filter(|value| value.is_finite() && *value > 0.0)
        .fold((f64::INFINITY, 0.0), |(low, high): (f64, f64), value| (value.min(low), value.max(high)));
    axis(label, if high / low > LOG_RATIO_MIN { Scale::Log } else { Scale::Linear })
}

/// Returns the percentage of output tokens received over time.
pub fn progress(run: &RunReport) -> Curve {
    let points = run.series.progress.iter().map(|&(at, share)| (at, share * 100.0)).collect();
    Curve { label: run.label.clone(), points, form: CurveForm::Line }
}

/// Returns the number of requests in flight over time.
pub fn in_flight(run: &RunReport) -> Curve {
    Curve { label: run.label.clone(), points: run.series.in_flight.clone(), form: CurveForm::Steps }
}

/// Returns the output tokens per second over time.
pub fn output_throughput(run: &RunReport) -> Curve {
    Curve { label: run.label.clone(), points: run.series.output_throughput.clone(), form: CurveForm::Line }
}

/// Returns a dashed horizontal line at `value`.
pub fn level_line(label: &str, value: f64, x: (f64, f64)) -> Curve {
    Curve { label: label.into(), points: vec![(x.0, value), (x.1, value)], form: CurveForm::Reference }
}

/// Returns the value at each percentile as steps, the inverse of the distribution function. The curve ends at
/// the middle of the last rank, because the percentile axis cannot reach 100.
pub fn percentiles(label: &str, distribution: Option<&Distribution>) -> Curve {
    let points = distribution.map_or(Vec::new(), |distribution| {
        let occupied = distribution.histogram.iter().filter(|&&(_, count)| count > 0);
        let total: u64 = occupied.clone().map(|&(_, count)| count).sum();
        let percent = |rank: f64| 100.0 * rank / total as f64;
        let mut below = 0;
        let mut points = Vec::new();
        for &(upper_end, count) in occupied {
            // The upper bound of the last bucket exceeds the largest value.
            points.push((percent(below as f64), upper_end.min(distribution.stats.max)));
            below += count;
        }
        points.extend(points.last().map(|&(_, largest)| (percent(total as f64 - 0.5), largest)));
        points
    });
    Curve { label: label.into(), points, form: CurveForm::Steps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{measure::Stats, report::plots};
    use std::time::Duration;

    #[test]
    fn percentile_curves_give_back_each_value_at_its_rank() {
        // Buckets of one to seven values each, and an empty one.
        let mut histogram: Vec<_> = (1..=200u64).map(|n| (n as f64 * 1.5, n * 5 % 7 + 1)).collect();
        histogram.insert(77, (116.0, 0));
        let values: Vec<f64> =
            histogram.iter().flat_map(|&(value, count)| vec![value; count as usize]).collect();
        let stats = Stats::from_values(values.iter().map(|&ms| Duration::from_secs_f64(ms / 1e3))).unwrap();
        let curve = percentiles("", Some(&Distribution { stats, histogram }));
        for (rank, &value) in values.iter().enumerate() {
            let percent = 100.0 * (rank as f64 + 0.5) / values.len() as f64;
            let before = curve.points.partition_point(|point| point.0 <= percent + 1e-9);
            assert_eq!(curve.points[before - 1].1, value, "at rank {rank}");
        }
        assert!(curve.points.last().unwrap().0 < 100.0);
    }

    #[test]
    fn nothing_beyond_the_largest_value_is_drawn() {
        let stats = Stats::from_values([Duration::from_millis(1001)]).unwrap();
        let curve = percentiles("", Some(&Distribution { stats, histogram: vec![(1010.0, 1)] }));
        assert!(curve.points.iter().all(|point| point.1 == stats.max), "{:?}", curve.points);
        assert!(!plots::plot("", &percentile(), &seconds(), &[curve]).empty);
    }

    #[test]
    fn an_axis_is_logarithmic_when_values_are_far_apart() {
        let scale = |values: &[f64]| {
            let points = values.iter().map(|&value| (0.0, value)).collect();
            fitted_axis("", &[Curve { label: String::new(), points, form: CurveForm::Line }]).scale
        };
        assert_eq!(scale(&[1.0, 20.0]), Scale::Linear);
        assert_eq!(scale(&[1.0, 0.0, 2000.0]), Scale::Log);
        assert_eq!(scale(&[]), Scale::Linear);
        assert_eq!(scale(&[0.0, f64::NAN]), Scale::Linear);
    }
}
