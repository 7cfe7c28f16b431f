//! Results of the partition benchmark, in all output formats.
//!
//! Invariant: only samples are stored; all formats show the same values.

use super::super::sample::{Sample, Summary};
use serde::Serialize;
use std::fmt::Write;

/// One partition with its samples.
pub struct PartitionRow {
    pub strategy: &'static str,
    /// Device groups in the format of `--devices`.
    pub devices: String,
    /// Layers per stage.
    pub layers: Vec<usize>,
    /// Steps in flight.
    pub lanes: usize,
    /// Sequences that decode together.
    pub sequences: usize,
    /// Samples of one sequence.
    pub decode: Vec<Sample>,
    /// Samples of all sequences together.
    pub throughput: Vec<Sample>,
    pub predicted: Option<Predicted>,
}

/// The planner's prediction, in tokens per second.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Predicted {
    pub decode: f64,
    pub throughput: f64,
}

/// The values of a row, in tokens per second.
#[derive(Serialize)]
pub struct PartitionFigures<'a> {
    pub partition: &'static str,
    pub devices: &'a str,
    pub layers: &'a [usize],
    pub lanes: usize,
    pub sequences: usize,
    pub decode_tokens_per_s: Summary,
    pub throughput_tokens_per_s: Summary,
    pub predicted: Option<Predicted>,
    pub decode_samples: &'a [Sample],
    pub throughput_samples: &'a [Sample],
}

impl PartitionRow {
    /// Computes the values of a row; `None` unless decode and throughput have samples.
    fn figures(&self) -> Option<PartitionFigures<'_>> {
        let speeds = |samples: &[Sample]| {
            let speeds = samples.iter().map(|sample| sample.tokens as f64 / sample.seconds);
            (!samples.is_empty()).then(|| Summary::from_values(speeds))
        };
        Some(PartitionFigures {
            partition: self.strategy,
            devices: &self.devices,
            layers: &self.layers,
            lanes: self.lanes,
            sequences: self.sequences,
            decode_tokens_per_s: speeds(&self.decode)?,
            throughput_tokens_per_s: speeds(&self.throughput)?,
            predicted: self.predicted,
            decode_samples: &self.decode,
            throughput_samples: &self.throughput,
        })
    }
}

/// Computes the values of all measured rows.
pub fn figures(rows: &[PartitionRow]) -> Vec<PartitionFigures<'_>> {
    rows.iter().filter_map(PartitionRow::figures).collect()
}

const HEAD: [&str; 9] = [
    "partition",
    "devices",
    "layers",
    "lanes",
    "sequences",
    "decode tok/s (min..max)",
    "throughput tok/s (min..max)",
    "predicted decode",
    "predicted throughput",
];

/// Number of columns without predictions.
const MEASURED_COLUMNS: usize = 7;

/// Formats the rows as a text table.
pub fn table(rows: &[PartitionRow]) -> String {
    let figures = figures(rows);
    let columns =
        if figures.iter().any(|row| row.predicted.is_some()) { HEAD.len() } else { MEASURED_COLUMNS };
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(figures.iter().map(cells));
    let width = |column: usize| lines.iter().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for cells in &lines {
        let mut line = String::new();
        for (column, (cell, width)) in cells.iter().zip(widths).enumerate().take(columns) {
            let _ = match column {
                0..=2 => write!(line, "{cell:<width$}  "),
                _ => write!(line, "{cell:>width$}  "),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn cells(row: &PartitionFigures) -> [String; HEAD.len()] {
    let predicted = |of: fn(Predicted) -> f64| row.predicted.map(|it| format!("{:.1}", of(it)));
    [
        row.partition.to_owned(),
        row.devices.to_owned(),
        row.layers.iter().map(usize::to_string).collect::<Vec<_>>().join(","),
        row.lanes.to_string(),
        row.sequences.to_string(),
        row.decode_tokens_per_s.format(1),
        row.throughput_tokens_per_s.format(1),
        predicted(|it| it.decode).unwrap_or_default(),
        predicted(|it| it.throughput).unwrap_or_default(),
    ]
}

const CSV_HEAD: &str = "partition,devices,layers,lanes,sequences,samples,decode_min,decode_median,decode_max,\
                        throughput_min,throughput_median,throughput_max,predicted_decode,\
                        predicted_throughput";

/// Formats the rows as CSV, with a header.
pub fn csv(rows: &[PartitionRow]) -> String {
    let mut text = format!("{CSV_HEAD}\n");
    for row in figures(rows) {
        let (decode, throughput) = (row.decode_tokens_per_s, row.throughput_tokens_per_s);
        let cell = |of: fn(Predicted) -> f64| row.predicted.map(|it| of(it).to_string()).unwrap_or_default();
        let cells = [
            row.partition.to_owned(),
            row.devices.to_owned(),
            row.layers.iter().map(usize::to_string).collect::<Vec<_>>().join(";"),
            row.lanes.to_string(),
            row.sequences.to_string(),
            row.decode_samples.len().to_string(),
            decode.min.to_string(),
            decode.median.to_string(),
            decode.max.to_string(),
            throughput.min.to_string(),
            throughput.median.to_string(),
            throughput.max.to_string(),
            cell(|it| it.decode),
            cell(|it| it.throughput),
        ];
        text += &cells.join(",");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(strategy: &'static str, predicted: Option<Predicted>) -> PartitionRow {
        let sample = |tokens| Sample { tokens, steps: 1, seconds: 2.0, roofline: None };
        PartitionRow {
            strategy,
            devices: "0&1;2".to_owned(),
            layers: vec![2, 1],
            lanes: 2,
            sequences: 4,
            decode: vec![sample(20), sample(40)],
            throughput: vec![sample(80)],
            predicted,
        }
    }

    #[test]
    fn all_forms_show_the_same_figures() {
        let rows = [row("hybrid", Some(Predicted { decode: 16.0, throughput: 41.5 })), row("other", None)];
        let json = serde_json::to_value(figures(&rows)).unwrap();
        assert_eq!(json[0]["decode_tokens_per_s"]["median"], 15.0);
        assert_eq!(json[0]["predicted"]["throughput"], 41.5);
        let csv = csv(&rows);
        let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert!(lines.iter().all(|cells| cells.len() == lines[0].len()), "{csv}");
        assert_eq!((lines[1][7], lines[1][10], lines[1][13]), ("15", "40", "41.5"));
        let table = table(&rows);
        assert!(table.contains("15.0 (10.0..20.0)") && table.contains("41.5"), "{table}");
        assert!(!super::table(&rows[1..]).contains("predicted"));
    }

    #[test]
    fn what_was_not_measured_is_not_shown() {
        let rows = [PartitionRow { throughput: Vec::new(), ..row("hybrid", None) }];
        assert!(figures(&rows).is_empty());
    }
}
