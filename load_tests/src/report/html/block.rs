//! The few things that every part of the page is made of.
//!
//! Invariant: all values are plain texts; the templates escape them, and nothing here is markup.

use serde::Serialize;

use crate::report::plots::{self, Plot};

use super::numbers::ABSENT;

/// A piece of a part, in the order in which they are shown.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "kind", content = "is", rename_all = "lowercase")]
pub enum Block {
    Text(String),
    /// Names and what they are.
    Facts(Vec<(&'static str, String)>),
    /// What a reader must know to read the figures right.
    Note(String),
    Cards(Vec<Card>),
    Table(Table),
    Plots(Vec<Plot>),
}

/// A key figure.
#[derive(Clone, Debug, Serialize)]
pub struct Card {
    pub name: &'static str,
    pub value: String,
    pub unit: String,
    /// What goes with it, in small print.
    pub beside: String,
    /// `alarm`, or empty.
    pub class: &'static str,
}

/// A table of texts; the first cell of a row names it.
#[derive(Clone, Debug, Serialize)]
pub struct Table {
    pub caption: String,
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Column {
    pub name: String,
    /// `figures` are set to the right, `short` texts are not broken, `long` ones are.
    pub class: &'static str,
}

#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Classes of the row's curve; empty for none.
    pub key: String,
    pub cells: Vec<String>,
}

/// A text, if there is one.
pub fn text(text: &str) -> Option<Block> {
    (!text.trim().is_empty()).then(|| Block::Text(text.trim().into()))
}

impl Table {
    /// Short rows are filled up.
    pub fn new(
        caption: &str,
        columns: impl IntoIterator<Item = impl Into<String>>,
        rows: Vec<Vec<String>>,
    ) -> Self {
        let names: Vec<String> = columns.into_iter().map(Into::into).collect();
        let columns: Vec<_> = names
            .into_iter()
            .enumerate()
            .map(|(index, name)| Column { name, class: class(&rows, index) })
            .collect();
        let filled = |mut cells: Vec<String>| {
            cells.resize(cells.len().max(columns.len()), String::new());
            Row { key: String::new(), cells }
        };
        Self { caption: caption.into(), rows: rows.into_iter().map(filled).collect(), columns }
    }

    /// Gives each row the look of a curve, by the curve's index.
    pub fn keyed(mut self, curves: impl IntoIterator<Item = usize>) -> Self {
        for (row, curve) in self.rows.iter_mut().zip(curves) {
            row.key = plots::key(curve);
        }
        self
    }
}

/// Texts up to this many characters are not broken.
const SHORT: usize = 32;

fn class(rows: &[Vec<String>], column: usize) -> &'static str {
    let is_figure = |cell: &String| cell.is_empty() || cell == ABSENT || begins_as_number(cell);
    let cells = || rows.iter().filter_map(|row| row.get(column));
    match column {
        1.. if cells().all(is_figure) => "figures",
        _ if cells().all(|cell| cell.chars().count() <= SHORT) => "short",
        _ => "long",
    }
}

fn begins_as_number(cell: &str) -> bool {
    cell.trim_start_matches(['-', '+', '−', '±', '≈', '<', '>', '~', '.', ' '])
        .starts_with(|c: char| c.is_ascii_digit())
}
