//! The increase of counters and histograms between two scrapes.
//!
//! Invariant: increases are never negative: a smaller value means a reset, and the later value is the whole
//! increase.

use std::ops::Add;

use super::exposition::{Labels, MetricSet, parse};

/// The increase of a server's metrics between two scrapes.
#[derive(Debug)]
pub struct MetricsIncrease {
    /// The earlier scrape; empty if the server restarted after it.
    before: MetricSet,
    after: MetricSet,
    restarted: bool,
}

/// The increase of a histogram, summed over all label sets.
#[derive(Clone, Debug, PartialEq)]
pub struct HistogramIncrease {
    sum: Option<f64>,
    pub count: f64,
    /// Upper bounds, ascending, with the cumulative number of values.
    buckets: Vec<(f64, f64)>,
}

impl MetricsIncrease {
    /// Parses two scrapes of the same server.
    pub fn between(before: &str, after: &str) -> Self {
        let (before, after) = (parse(before), parse(after));
        let restarted = restarted(&before, &after);
        Self { before: if restarted { MetricSet::new() } else { before }, after, restarted }
    }

    /// Returns whether the server restarted in between, so that increases are since its start.
    pub fn restarted(&self) -> bool {
        self.restarted
    }

    /// Returns the increase of a counter, summed over the label sets accepted by `belongs`, or `None` if the
    /// metric does not exist.
    pub fn total_where(&self, name: &str, belongs: impl Fn(&Labels) -> bool) -> Option<f64> {
        let series = self.after.get(name)?;
        let growths =
            series.keys().filter(|labels| belongs(labels)).map(|labels| self.series_increase(name, labels));
        // `sum` of no floats would be -0.
        Some(growths.fold(0.0, f64::add))
    }

    /// Returns the increase of a counter, summed over all label sets, or `None` if the metric does not exist.
    pub fn total(&self, name: &str) -> Option<f64> {
        self.total_where(name, |_| true)
    }

    /// Returns the increase of a histogram, or `None` if the metric does not exist.
    pub fn histogram(&self, name: &str) -> Option<HistogramIncrease> {
        let count = self.total(&format!("{name}_count"))?;
        let sum = self.total(&format!("{name}_sum"));
        Some(HistogramIncrease { sum, count, buckets: self.buckets(&format!("{name}_bucket")) })
    }

    /// Returns the values of a gauge with a single label set, before and after.
    pub fn gauge(&self, name: &str) -> Option<(f64, f64)> {
        let value =
            |reading: &MetricSet| reading.get(name).and_then(|series| series.values().next().copied());
        value(&self.after).map(|after| (value(&self.before).unwrap_or(0.0), after))
    }

    /// Returns the earlier value of a counter, summed over all label sets.
    pub fn before(&self, name: &str) -> f64 {
        self.before.get(name).map_or(0.0, |series| series.values().sum())
    }

    fn buckets(&self, name: &str) -> Vec<(f64, f64)> {
        let ends = self.after.get(name).into_iter().flatten().filter_map(|(labels, _)| {
            let end: f64 = labels.get("le")?.parse().ok().filter(|end: &f64| !end.is_nan())?;
            Some((end, self.series_increase(name, labels)))
        });
        let mut buckets: Vec<(f64, f64)> = ends.collect();
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        buckets.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            kept.1 += if same { next.1 } else { 0.0 };
            same
        });
        buckets
    }

    fn series_increase(&self, name: &str, labels: &Labels) -> f64 {
        let value = |reading: &MetricSet| reading.get(name).and_then(|series| series.get(labels).copied());
        counter_increase(value(&self.before).unwrap_or(0.0), value(&self.after).unwrap_or(0.0))
    }
}

fn counter_increase(before: f64, after: f64) -> f64 {
    if after < before { after } else { after - before }
}

/// Returns whether any counter decreased or the process start time changed: then all metrics were reset,
/// including those that have exceeded their old value since.
fn restarted(before: &MetricSet, after: &MetricSet) -> bool {
    let start = |reading: &MetricSet| reading.get("process_start_time_seconds").cloned();
    // Gauges of other programs may have names with these endings.
    let known = |name: &str| ["mainstem_", "vllm:", "llamacpp:"].iter().any(|begin| name.starts_with(begin));
    let counts =
        |name: &str| known(name) && ["_total", "_count", "_bucket"].iter().any(|end| name.ends_with(end));
    let fell = before.iter().filter(|(name, _)| counts(name)).any(|(name, series)| {
        let now = |labels| after.get(name).and_then(|series| series.get(labels));
        series.iter().any(|(labels, value)| now(labels).is_some_and(|now| now < value))
    });
    fell || start(before).zip(start(after)).is_some_and(|(before, after)| before != after)
}

impl HistogramIncrease {
    /// Returns the mean of the added values, or `None` if there are none.
    pub fn mean(&self) -> Option<f64> {
        self.sum.filter(|_| self.count > 0.0).map(|sum| sum / self.count)
    }

    /// Estimates a quantile, 0 to 1, like Prometheus: values are assumed to be uniform within a bucket, and
    /// values beyond the last finite bound to lie at that bound. Returns `None` if there are no values.
    pub fn quantile(&self, quantile: f64) -> Option<f64> {
        if self.count <= 0.0 {
            return None;
        }
        let rank = quantile * self.count;
        let (mut low, mut below) = (0.0f64, 0.0);
        for &(end, up_to) in &self.buckets {
            if end.is_infinite() {
                break;
            }
            if up_to >= rank && up_to > below {
                let low = low.min(end);
                return Some(low + (end - low) * (rank - below) / (up_to - below));
            }
            (low, below) = (end, up_to);
        }
        self.buckets.iter().any(|bucket| bucket.0.is_finite()).then_some(low)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_sets_are_added_up_or_chosen() {
        let before = "done_total{why=\"a\",engine=\"0\"} 5\ndone_total{why=\"b\",engine=\"0\"} 1\n";
        let after = "done_total{why=\"a\",engine=\"0\"} 9\ndone_total{why=\"b\",engine=\"0\"} 1\n\
                     done_total{engine=\"1\",why=\"a\"} 3\n";
        let increase = MetricsIncrease::between(before, after);
        assert_eq!(increase.total("done_total"), Some(7.0));
        assert_eq!(increase.total_where("done_total", |labels| labels["engine"] == "0"), Some(4.0));
        assert_eq!(increase.total_where("done_total", |labels| labels["why"] == "b"), Some(0.0));
        assert_eq!(increase.total("other_total"), None);
    }

    #[test]
    fn a_server_started_anew_counts_from_its_start() {
        // The first has exceeded its old value; the second shows that the server restarted.
        let before = "vllm:a_total 100\nvllm:b_total 7\nvllm:c_sum 5\n";
        let after = "vllm:a_total 150\nvllm:b_total 3\nvllm:c_sum 6\n";
        let increase = MetricsIncrease::between(before, after);
        assert!(increase.restarted());
        let grown = ["vllm:a_total", "vllm:b_total", "vllm:c_sum"].map(|name| increase.total(name));
        assert_eq!(grown, [150.0, 3.0, 6.0].map(Some));
        let gauges = |value| format!("vllm:running {value}\nthread_count {value}\nvllm:a_total 1\n");
        assert!(!MetricsIncrease::between(&gauges(9), &gauges(2)).restarted());
        // A metric of unknown type may decrease without a restart; its increase is still not negative.
        assert_eq!(MetricsIncrease::between("c_sum 5\n", "c_sum 2\n").total("c_sum"), Some(2.0));
        let start = |at: u64, a: u64| format!("process_start_time_seconds {at}\na_total {a}\n");
        assert_eq!(MetricsIncrease::between(&start(1, 5), &start(2, 8)).total("a_total"), Some(8.0));
        assert_eq!(MetricsIncrease::between(&start(1, 5), &start(1, 8)).total("a_total"), Some(3.0));
    }

    fn histogram(buckets: &[(&str, u64)], sum: f64, count: u64) -> HistogramIncrease {
        let lines: Vec<String> =
            buckets.iter().map(|(le, n)| format!("h_bucket{{le=\"{le}\"}} {n}\n")).collect();
        let text = format!("{}h_sum {sum}\nh_count {count}\n", lines.concat());
        MetricsIncrease::between("", &text).histogram("h").unwrap()
    }

    #[test]
    fn quantiles_lie_evenly_within_their_bucket() {
        // 10 values up to 1, 30 from 1 to 3, 8 from 3 to 10, 2 above.
        let histogram = histogram(&[("10", 48), ("1", 10), ("3.0", 40), ("+Inf", 50)], 140.0, 50);
        assert_eq!(histogram.mean(), Some(2.8));
        assert_eq!(histogram.quantile(0.1), Some(0.5));
        assert_eq!(histogram.quantile(0.5), Some(2.0));
        assert_eq!(histogram.quantile(0.88), Some(6.5));
        assert_eq!(histogram.quantile(0.99), Some(10.0));
    }

    #[test]
    fn a_histogram_without_values_or_buckets_has_no_quantile() {
        assert_eq!(histogram(&[("1", 0), ("+Inf", 0)], 0.0, 0).quantile(0.5), None);
        assert_eq!(histogram(&[("1", 0), ("+Inf", 0)], 0.0, 0).mean(), None);
        assert_eq!(histogram(&[], 8.0, 4).quantile(0.5), None);
        assert_eq!(histogram(&[("+Inf", 4)], 8.0, 4).quantile(0.5), None);
        assert_eq!(histogram(&[], 8.0, 4).mean(), Some(2.0));
    }

    #[test]
    fn a_histogram_grows_by_the_difference_of_its_buckets() {
        let text = |low: u64, all: u64, sum: f64| {
            format!("h_bucket{{le=\"1\"}} {low}\nh_bucket{{le=\"+Inf\"}} {all}\nh_sum {sum}\nh_count {all}\n")
        };
        let grown =
            MetricsIncrease::between(&text(100, 100, 50.0), &text(104, 104, 53.0)).histogram("h").unwrap();
        assert_eq!((grown.count, grown.mean(), grown.quantile(0.5)), (4.0, Some(0.75), Some(0.5)));
    }
}
