//! Renders reports as a single self-contained HTML page, without scripts and external fonts or images.
//!
//! Invariant: texts from servers and files are always escaped by the templates and never used as markup.

mod run;
mod runs;
mod sweep;

mod block;
mod cards;
mod run_plots;

mod columns;
mod curves;
pub(super) mod numbers;
mod texts;

use minijinja::{
    AutoEscape, Environment, Error, Output, State, Value, escape_formatter, syntax::SyntaxConfig,
    value::Serde,
};
use serde::Serialize;

use super::{RunReport, plots};
use block::{Block, ReportTable};

/// A section of the page.
#[derive(Clone, Debug)]
pub enum Section {
    /// One run, with its metrics and plots.
    Run(Box<RunReport>),
    /// A comparison of runs: a table, and their curves in shared axes.
    Runs { title: String, text: String, runs: Vec<RunReport> },
    /// Runs at increasing load: throughput and latency against `x`, one curve per label. `text` describes the
    /// knee.
    Sweep { title: String, text: String, x_label: String, points: Vec<SweepPoint> },
    /// A table of values; the first column names the row.
    Table { title: String, text: String, columns: Vec<String>, rows: Vec<Vec<String>> },
    /// A plot of curves.
    Plot { title: String, text: String, x: Axis, y: Axis, curves: Vec<Curve> },
}

/// A point of a sweep.
#[derive(Clone, Debug)]
pub struct SweepPoint {
    /// Requests per second, or users.
    pub x: f64,
    pub run: RunReport,
}

/// An axis of a plot.
#[derive(Clone, Debug)]
pub struct Axis {
    pub label: String,
    pub scale: Scale,
}

/// The scale of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    /// Logarithmic; values at or below zero are placed at the lower end, which is labelled accordingly.
    Log,
    /// Percentiles from 0 to 100, stretched towards 100: 90, 99 and 99.9 are equally spaced.
    Percentile,
}

/// A curve of a plot.
#[derive(Clone, Debug)]
pub struct Curve {
    pub label: String,
    pub points: Vec<(f64, f64)>,
    /// The way the points are connected.
    pub form: CurveForm,
}

/// The form in which a curve is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveForm {
    Steps,
    Line,
    LineAndPoints,
    Points,
    /// A dashed line, for reference values such as those of a paper.
    Reference,
}

/// The input of the page template.
#[derive(Serialize)]
struct Page<'a> {
    title: &'a str,
    parts: Vec<PageSection<'a>>,
    /// Whether the page includes explanations of the metrics of a run.
    of_runs: bool,
}

/// A section laid out as blocks.
#[derive(Serialize)]
struct PageSection<'a> {
    title: &'a str,
    blocks: Vec<Block>,
}

/// Renders the page.
pub fn page(title: &str, sections: &[Section]) -> String {
    let of_runs = sections.iter().any(has_run_metrics);
    let page = Page { title, parts: sections.iter().map(layout_section).collect(), of_runs };
    let rendered = templates().and_then(|templates| templates.get_template("page.html")?.render(Serde(page)));
    rendered.expect("the built-in templates are valid")
}

fn has_run_metrics(section: &Section) -> bool {
    matches!(section, Section::Run(_) | Section::Runs { .. } | Section::Sweep { .. })
}

fn templates() -> Result<Environment<'static>, Error> {
    let mut templates = Environment::new();
    // Template lines with only control tags leave no empty lines on the page.
    templates.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    templates.set_auto_escape_callback(|_| AutoEscape::Html);
    templates.set_formatter(write_sanitized);
    templates.add_template("page.html", include_str!("page.html"))?;
    templates.add_template("block.html", include_str!("block.html"))?;
    templates.add_template("plot.html", include_str!("plot.html"))?;
    templates.add_template("style.css", include_str!("style.css"))?;
    Ok(templates)
}

/// Formats a value with escaping, after replacing characters that are invalid in HTML with U+FFFD.
fn write_sanitized(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let is_foul = |c: char| c.is_control() && c != '\n' && c != '\t' || matches!(c, '\u{fffe}' | '\u{ffff}');
    match value.as_str() {
        Some(text) if text.contains(is_foul) => {
            escape_formatter(out, state, &Value::from(text.replace(is_foul, "\u{fffd}")))
        }
        _ => escape_formatter(out, state, value),
    }
}

fn layout_section(section: &Section) -> PageSection<'_> {
    let about = |text: &str, block: Block| block::text(text).into_iter().chain([block]).collect();
    let (title, blocks) = match section {
        Section::Run(run) => (&run.label, run::blocks(run)),
        Section::Runs { title, text, runs } => (title, runs::blocks(text, runs)),
        Section::Sweep { title, text, x_label, points } => (title, sweep::blocks(text, x_label, points)),
        Section::Table { title, text, columns, rows } => {
            (title, about(text, Block::Table(ReportTable::new("", columns, rows.clone()))))
        }
        Section::Plot { title, text, x, y, curves } => {
            (title, about(text, Block::Plots(vec![plots::plot("", x, y, curves)])))
        }
    };
    PageSection { title, blocks }
}

#[cfg(test)]
mod tests;
