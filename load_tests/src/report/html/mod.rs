//! Reports as one page of HTML that needs nothing beside it: no script, no font, no picture from elsewhere.
//!
//! Invariant: texts of servers and files reach the page through the templates' escaping alone; none is markup.

mod run;
mod runs;
mod sweep;

mod block;
mod cards;
mod pictures;

mod columns;
mod curves;
pub(super) mod numbers;
mod words;

use minijinja::{
    AutoEscape, Environment, Error, Output, State, Value, escape_formatter, syntax::SyntaxConfig,
    value::Serde,
};
use serde::Serialize;

use super::{RunReport, plots};
use block::{Block, Table};

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
    /// Values at or below zero lie on the axis's lower end, which says so.
    Log,
    /// Percent of all values, 0 to 100, stretched towards 100: 90, 99 and 99.9 are equally far apart.
    Percentile,
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
    Points,
    /// Dashed: figures of a paper beside ours.
    Reference,
}

/// What the template makes the page of.
#[derive(Serialize)]
struct Page<'a> {
    title: &'a str,
    parts: Vec<Part<'a>>,
    /// Whether the page must say what the figures of a run mean.
    of_runs: bool,
}

/// A section as blocks.
#[derive(Serialize)]
struct Part<'a> {
    title: &'a str,
    blocks: Vec<Block>,
}

/// The page.
pub fn page(title: &str, sections: &[Section]) -> String {
    let of_runs = sections.iter().any(is_of_runs);
    let page = Page { title, parts: sections.iter().map(part).collect(), of_runs };
    let rendered = templates().and_then(|templates| templates.get_template("page.html")?.render(Serde(page)));
    rendered.expect("the page's own templates render; this is a bug")
}

fn is_of_runs(section: &Section) -> bool {
    matches!(section, Section::Run(_) | Section::Runs { .. } | Section::Sweep { .. })
}

fn templates() -> Result<Environment<'static>, Error> {
    let mut templates = Environment::new();
    // Lines of the templates that only steer leave no empty lines on the page.
    templates.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    templates.set_auto_escape_callback(|_| AutoEscape::Html);
    templates.set_formatter(write_clean);
    templates.add_template("page.html", include_str!("page.html"))?;
    templates.add_template("block.html", include_str!("block.html"))?;
    templates.add_template("plot.html", include_str!("plot.html"))?;
    templates.add_template("style.css", include_str!("style.css"))?;
    Ok(templates)
}

/// Characters that no page may have, escaped or not, become the sign for such.
fn write_clean(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let is_foul = |c: char| c.is_control() && c != '\n' && c != '\t' || matches!(c, '\u{fffe}' | '\u{ffff}');
    match value.as_str() {
        Some(text) if text.contains(is_foul) => {
            escape_formatter(out, state, &Value::from(text.replace(is_foul, "\u{fffd}")))
        }
        _ => escape_formatter(out, state, value),
    }
}

fn part(section: &Section) -> Part<'_> {
    let about = |text: &str, block: Block| block::text(text).into_iter().chain([block]).collect();
    let (title, blocks) = match section {
        Section::Run(run) => (&run.label, run::blocks(run)),
        Section::Runs { title, text, runs } => (title, runs::blocks(text, runs)),
        Section::Sweep { title, text, x_label, points } => (title, sweep::blocks(text, x_label, points)),
        Section::Table { title, text, columns, rows } => {
            (title, about(text, Block::Table(Table::new("", columns, rows.clone()))))
        }
        Section::Plot { title, text, x, y, curves } => {
            (title, about(text, Block::Plots(vec![plots::plot("", x, y, curves)])))
        }
    };
    Part { title, blocks }
}

#[cfg(test)]
mod tests;
