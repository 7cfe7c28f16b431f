//! The building blocks of the HTML report.
//!
//! Invariant: all values are plain text that the templates escape; none is markup.

use serde::Serialize;

use crate::report::plots::{self, Plot};

use super::numbers::MISSING;

/// A block of a section. Blocks are shown in order.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", content = "is", rename_all = "lowercase")]
pub enum Block {
    Text(String),
    /// Names and their values.
    Facts(Vec<(&'static str, String)>),
    /// A note that affects the interpretation of the results.
    Note(String),
    Cards(Vec<Card>),
    Table(ReportTable),
    Plots(Vec<Plot>),
}

/// A key metric.
#[derive(Clone, Debug, Serialize)]
pub struct Card {
    pub name: &'static str,
    pub value: String,
    pub unit: String,
    /// A detail in small print.
    pub beside: String,
    /// CSS class: `alarm`, or empty.
    pub class: &'static str,
}

/// A table of texts; the first cell of a row is its header.
#[derive(Clone, Debug, Serialize)]
pub struct ReportTable {
    pub caption: String,
    pub columns: Vec<ReportColumn>,
    pub rows: Vec<ReportRow>,
}

/// A column of a table.
#[derive(Clone, Debug, Serialize)]
pub struct ReportColumn {
    pub name: String,
    /// CSS class: `figures` are right-aligned, `short` texts do not wrap, `long` texts do.
    pub class: &'static str,
}

/// A row of a table.
#[derive(Clone, Debug, Serialize)]
pub struct ReportRow {
    /// CSS classes of the row's curve; empty for none.
    pub key: String,
    pub cells: Vec<String>,
}

/// Returns a text block, or `None` if the text is blank.
pub fn text(text: &str) -> Option<Block> {
    (!text.trim().is_empty()).then(|| Block::Text(text.trim().into()))
}

impl ReportTable {
    /// Creates a table; short rows are padded with empty cells.
    pub fn new(
        caption: &str,
        columns: impl IntoIterator<Item = impl Into<String>>,
        rows: Vec<Vec<String>>,
    ) -> Self {
        let names: Vec<String> = columns.into_iter().map(Into::into).collect();
        let columns: Vec<_> = names
            .into_iter()
            .enumerate()
            .map(|(index, name)| ReportColumn { name, class: class(&rows, index) })
            .collect();
        let filled = |mut cells: Vec<String>| {
            cells.resize(cells.len().max(columns.len()), String::new());
            ReportRow { key: String::new(), cells }
        };
        Self { caption: caption.into(), rows: rows.into_iter().map(filled).collect(), columns }
    }

    /// Marks each row with the style of the curve of this index.
    pub fn with_curve_keys(mut self, curves: impl IntoIterator<Item = usize>) -> Self {
        for (row, curve) in self.rows.iter_mut().zip(curves) {
            row.key = plots::key_classes(curve);
        }
        self
    }
}

/// Maximum number of characters of a text that does not wrap.
const SHORT_LEN_MAX: usize = 32;

fn class(rows: &[Vec<String>], column: usize) -> &'static str {
    let is_figure = |cell: &String| cell.is_empty() || cell == MISSING || begins_as_number(cell);
    let cells = || rows.iter().filter_map(|row| row.get(column));
    match column {
        1.. if cells().all(is_figure) => "figures",
        _ if cells().all(|cell| cell.chars().count() <= SHORT_LEN_MAX) => "short",
        _ => "long",
    }
}

fn begins_as_number(cell: &str) -> bool {
    cell.trim_start_matches(['-', '+', '−', '±', '≈', '<', '>', '~', '.', ' '])
        .starts_with(|c: char| c.is_ascii_digit())
}
