//! A metric and the access to its series.
//!
//! Invariant: a metric is recorded with the type and the labels that its row of the table has.

/// A metric: one row of the table.
#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub kind: MetricKind,
    /// Unit, for the documentation.
    pub unit: &'static str,
    pub help: &'static str,
    /// Label names, each with its values as far as they are known in advance.
    pub labels: &'static [(&'static str, &'static [&'static str])],
}

/// Type of a metric; a histogram has the upper bounds of its buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MetricKind {
    Counter,
    Gauge,
    Histogram(&'static [f64]),
}

impl MetricKind {
    /// The type's name in the Prometheus exposition format.
    pub fn as_str(self) -> &'static str {
        match self {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram(_) => "histogram",
        }
    }
}

impl Metric {
    pub(super) const fn new(
        name: &'static str,
        kind: MetricKind,
        unit: &'static str,
        help: &'static str,
    ) -> Metric {
        Metric { name, kind, unit, help, labels: &[] }
    }

    pub(super) const fn labelled(
        mut self,
        labels: &'static [(&'static str, &'static [&'static str])],
    ) -> Metric {
        self.labels = labels;
        self
    }

    /// Returns the handle of a counter without labels, for frequent use.
    pub fn counter(&self) -> metrics::Counter {
        debug_assert!(self.kind == MetricKind::Counter && self.labels.is_empty(), "{}", self.name);
        metrics::counter!(self.name)
    }

    /// Returns the handle of a counter with these label values, in the table's order.
    pub fn counter_with<const N: usize>(&self, values: [&str; N]) -> metrics::Counter {
        debug_assert!(self.kind == MetricKind::Counter && self.labels.len() == N, "{}", self.name);
        metrics::counter!(self.name, &self.label_pairs(&values))
    }

    /// Returns the handle of a gauge without labels, for frequent use.
    pub fn gauge(&self) -> metrics::Gauge {
        debug_assert!(self.kind == MetricKind::Gauge && self.labels.is_empty(), "{}", self.name);
        metrics::gauge!(self.name)
    }

    /// Returns the handle of a gauge with these label values, in the table's order.
    pub fn gauge_with<const N: usize>(&self, values: [&str; N]) -> metrics::Gauge {
        debug_assert!(self.kind == MetricKind::Gauge && self.labels.len() == N, "{}", self.name);
        metrics::gauge!(self.name, &self.label_pairs(&values))
    }

    /// Returns the handle of a histogram without labels, for frequent use.
    pub fn histogram(&self) -> metrics::Histogram {
        self.histogram_with([])
    }

    /// Returns the handle of a histogram with these label values, in the table's order.
    pub fn histogram_with<const N: usize>(&self, values: [&str; N]) -> metrics::Histogram {
        debug_assert!(
            matches!(self.kind, MetricKind::Histogram(_)) && self.labels.len() == N,
            "{}",
            self.name
        );
        metrics::histogram!(self.name, &self.label_pairs(&values))
    }

    /// Adds `n` to a counter.
    pub fn add(&self, n: u64) {
        self.counter().increment(n);
    }

    /// Adds 1 to the counter with these label values, in the table's order.
    pub fn count<const N: usize>(&self, values: [&str; N]) {
        self.counter_with(values).increment(1);
    }

    /// Sets a gauge.
    pub fn set(&self, value: f64) {
        self.gauge().set(value);
    }

    /// Records an observation in a histogram.
    pub fn record(&self, value: f64) {
        self.histogram().record(value);
    }

    pub(super) fn label_pairs(&self, values: &[&str]) -> Vec<(&'static str, String)> {
        self.labels.iter().zip(values).map(|((name, _), value)| (*name, value.to_string())).collect()
    }

    pub(super) fn describe(&self) {
        match self.kind {
            MetricKind::Counter => metrics::describe_counter!(self.name, self.help),
            MetricKind::Gauge => metrics::describe_gauge!(self.name, self.help),
            MetricKind::Histogram(_) => metrics::describe_histogram!(self.name, self.help),
        }
    }

    /// Creates the series with known label values, so that they are exported as 0 instead of being absent.
    pub(super) fn init_series(&self) {
        let known: Vec<Vec<(&str, String)>> = match self.labels {
            [] => vec![Vec::new()],
            [(_, values)] => values.iter().map(|value| self.label_pairs(&[value])).collect(),
            _ => Vec::new(),
        };
        for labels in &known {
            match self.kind {
                MetricKind::Counter => metrics::counter!(self.name, labels).increment(0),
                MetricKind::Gauge => metrics::gauge!(self.name, labels).set(0.0),
                MetricKind::Histogram(_) => drop(metrics::histogram!(self.name, labels)),
            }
        }
    }
}
