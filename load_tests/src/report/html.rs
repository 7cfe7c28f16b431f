//! Reports as one page of HTML that needs nothing beside it.

use super::RunReport;

/// A part of a page.
#[derive(Clone, Debug)]
pub enum Section {
    /// One run, with its figures and its pictures.
    Run(Box<RunReport>),
    /// Runs side by side: a table, and their curves in the same axes.
    Runs { title: String, text: String, runs: Vec<RunReport> },
    /// Runs at rising load: throughput and latency against `x`, one curve per label. The knee is told in `text`.
    Sweep { title: String, text: String, x_label: String, points: Vec<SweepPoint> },
    /// A table of figures; the first column names the row.
    Table { title: String, text: String, columns: Vec<String>, rows: Vec<Vec<String>> },
    /// Curves.
    Plot { title: String, text: String, x: Axis, y: Axis, curves: Vec<Curve> },
}

/// A point of a sweep.
#[derive(Clone, Debug)]
pub struct SweepPoint {
    /// Requests per second, or users.
    pub x: f64,
    pub run: RunReport,
}

#[derive(Clone, Debug)]
pub struct Axis {
    pub label: String,
    pub scale: Scale,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    Log,
}

#[derive(Clone, Debug)]
pub struct Curve {
    pub label: String,
    pub points: Vec<(f64, f64)>,
    /// Points are joined as steps, by straight lines, or not at all.
    pub form: Form,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Steps,
    Line,
    LineAndPoints,
    /// Dashed: figures of a paper beside ours.
    Reference,
}

/// The page.
pub fn page(_title: &str, _sections: &[Section]) -> String {
    todo!()
}
