//! Results of the benchmark of speculative decoding, in all output formats.
//!
//! Invariant: only what was measured is stored; all formats show the same values.

use super::super::sample::{Sample, Summary};
use serde::Serialize;
use std::fmt::Write;

/// A number of sequences with its turns.
pub struct SpeculationRow {
    /// Source of drafts.
    pub method: &'static str,
    /// Name of the draft model, if there is one.
    pub draft: Option<String>,
    pub acceptance: &'static str,
    pub max_drafts: usize,
    pub temperature: f32,
    pub sequences: usize,
    /// Measured tokens per sequence.
    pub tokens: usize,
    pub turns: Vec<SpeculationTurn>,
}

/// A turn: the same texts without speculation and with it.
#[derive(Clone, Debug, Serialize)]
pub struct SpeculationTurn {
    pub without: Sample,
    pub with: Sample,
    /// Drafted tokens, and those that were accepted.
    pub drafted: usize,
    pub accepted: usize,
    /// Number of steps of a sequence by the number of drafts that were accepted in them, from 0.
    pub steps_by_accepted: Vec<u64>,
    /// Whether the texts are equal; null if they need not be.
    pub has_same_text: Option<bool>,
}

/// The values of a row.
#[derive(Serialize)]
pub struct SpeculationFigures<'a> {
    pub method: &'static str,
    pub draft: Option<&'a str>,
    pub acceptance: &'static str,
    pub max_drafts: usize,
    pub temperature: f32,
    pub sequences: usize,
    pub tokens: usize,
    pub without_tokens_per_s: Summary,
    pub with_tokens_per_s: Summary,
    /// Speed with speculation divided by that without it, in the same turn.
    pub ratio: Summary,
    /// Mean number of accepted drafts in a step of a sequence.
    pub accepted_per_step: f64,
    /// Fraction of the drafts that were accepted; null if there were none.
    pub acceptance_rate: Option<f64>,
    /// Fraction of the steps of a sequence in which the first draft was accepted, the first two, and so on.
    pub accepted_at_position: Vec<f64>,
    pub turns: &'a [SpeculationTurn],
}

impl SpeculationRow {
    /// Returns whether a text differs with speculation although it must not.
    pub fn has_changed_text(&self) -> bool {
        self.turns.iter().any(|turn| turn.has_same_text == Some(false))
    }

    /// Computes the values of a row; `None` without turns.
    fn figures(&self) -> Option<SpeculationFigures<'_>> {
        let turns = self.turns.first().map(|_| self.turns.iter())?;
        let speeds = |of: fn(&SpeculationTurn) -> f64| Summary::from_values(turns.clone().map(of));
        let steps = self.steps_by_accepted();
        let all = steps.iter().sum::<u64>().max(1) as f64;
        let at_least = |accepted: usize| steps[accepted..].iter().sum::<u64>() as f64 / all;
        let at_position: Vec<f64> = (1..steps.len()).map(at_least).collect();
        let drafted: usize = turns.clone().map(|turn| turn.drafted).sum();
        let accepted: usize = turns.clone().map(|turn| turn.accepted).sum();
        Some(SpeculationFigures {
            method: self.method,
            draft: self.draft.as_deref(),
            acceptance: self.acceptance,
            max_drafts: self.max_drafts,
            temperature: self.temperature,
            sequences: self.sequences,
            tokens: self.tokens,
            without_tokens_per_s: speeds(|turn| turn.without.tokens_per_s()),
            with_tokens_per_s: speeds(|turn| turn.with.tokens_per_s()),
            ratio: speeds(|turn| turn.with.tokens_per_s() / turn.without.tokens_per_s()),
            // The sum of no numbers would be -0.
            accepted_per_step: at_position.iter().fold(0.0, |sum, fraction| sum + fraction),
            acceptance_rate: (drafted > 0).then(|| accepted as f64 / drafted as f64),
            accepted_at_position: at_position,
            turns: &self.turns,
        })
    }

    /// Adds up the steps of all turns.
    fn steps_by_accepted(&self) -> Vec<u64> {
        let mut sum = vec![0; self.turns.iter().map(|turn| turn.steps_by_accepted.len()).max().unwrap_or(0)];
        for turn in &self.turns {
            sum.iter_mut().zip(&turn.steps_by_accepted).for_each(|(sum, steps)| *sum += steps);
        }
        sum
    }
}

/// Computes the values of all measured rows.
pub fn figures(rows: &[SpeculationRow]) -> Vec<SpeculationFigures<'_>> {
    rows.iter().filter_map(SpeculationRow::figures).collect()
}

const HEAD: [&str; 8] = [
    "drafts",
    "sequences",
    "without tok/s (min..max)",
    "with tok/s (min..max)",
    "ratio (min..max)",
    "accepted per step",
    "accepted",
    "accepted at position",
];

/// Formats the rows as a text table.
pub fn table(rows: &[SpeculationRow]) -> String {
    let mut lines = vec![HEAD.map(str::to_owned)];
    lines.extend(figures(rows).iter().map(cells));
    let width = |column: usize| lines.iter().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; HEAD.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for cells in &lines {
        let mut line = String::new();
        for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
            // Columns of words and lists are aligned to the left.
            let _ = match column {
                0 | 7 => write!(line, "{cell:<width$}  "),
                _ => write!(line, "{cell:>width$}  "),
            };
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

fn cells(row: &SpeculationFigures) -> [String; HEAD.len()] {
    let percent = |fraction: &f64| format!("{:.0} %", 100.0 * fraction);
    [
        row.draft.map_or(row.method.to_owned(), |draft| format!("{} {draft}", row.method)),
        row.sequences.to_string(),
        row.without_tokens_per_s.format(1),
        row.with_tokens_per_s.format(1),
        row.ratio.format(2),
        format!("{:.2}", row.accepted_per_step),
        row.acceptance_rate.as_ref().map(percent).unwrap_or_default(),
        row.accepted_at_position.iter().map(percent).collect::<Vec<_>>().join(", "),
    ]
}

const CSV_HEAD: &str = "method,draft,acceptance,max_drafts,temperature,sequences,tokens,turns,without_min,\
                        without_median,without_max,with_min,with_median,with_max,ratio_min,ratio_median,\
                        ratio_max,accepted_per_step,acceptance_rate,accepted_at_position";

/// Formats the rows as CSV, with a header. Accepted fractions by position are separated by spaces.
pub fn csv(rows: &[SpeculationRow]) -> String {
    let mut text = format!("{CSV_HEAD}\n");
    for row in figures(rows) {
        let mut cells = vec![
            row.method.to_owned(),
            row.draft.unwrap_or_default().replace([',', '"', '\n'], "_"),
            row.acceptance.to_owned(),
            row.max_drafts.to_string(),
            row.temperature.to_string(),
            row.sequences.to_string(),
            row.tokens.to_string(),
            row.turns.len().to_string(),
        ];
        for Summary { min, median, max } in [row.without_tokens_per_s, row.with_tokens_per_s, row.ratio] {
            cells.extend([min, median, max].map(|value| value.to_string()));
        }
        cells.push(row.accepted_per_step.to_string());
        cells.push(row.acceptance_rate.map(|rate| rate.to_string()).unwrap_or_default());
        cells.push(row.accepted_at_position.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
        text += &cells.join(",");
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(without: f64, with: f64, steps_by_accepted: &[u64]) -> SpeculationTurn {
        let sample = |seconds| Sample { tokens: 100, steps: 10, seconds, roofline: None };
        SpeculationTurn {
            without: sample(without),
            with: sample(with),
            drafted: 40,
            accepted: 10,
            steps_by_accepted: steps_by_accepted.to_vec(),
            has_same_text: Some(true),
        }
    }

    fn row(turns: Vec<SpeculationTurn>) -> SpeculationRow {
        SpeculationRow {
            method: "draft",
            draft: Some("small".to_owned()),
            acceptance: "coupled",
            max_drafts: 5,
            temperature: 0.0,
            sequences: 4,
            tokens: 25,
            turns,
        }
    }

    /// Noise that both halves of a turn have does not change its ratio.
    #[test]
    fn ratios_are_of_turns() {
        let rows = [row(vec![turn(2.0, 1.0, &[2, 1, 1]), turn(20.0, 10.0, &[4]), turn(2.0, 4.0, &[])])];
        let figures = &figures(&rows)[0];
        assert_eq!(figures.ratio, Summary { min: 0.5, median: 2.0, max: 2.0 });
        assert_eq!(figures.with_tokens_per_s, Summary { min: 10.0, median: 25.0, max: 100.0 });
        // Eight steps, of which one accepted one draft, and one two.
        assert_eq!(
            (figures.accepted_per_step, &figures.accepted_at_position[..]),
            (0.375, &[0.25, 0.125][..])
        );
        assert_eq!(figures.acceptance_rate, Some(0.25));
    }

    #[test]
    fn all_formats_show_the_same_rows() {
        let rows = [row(vec![turn(2.0, 1.0, &[2, 1, 1])]), row(Vec::new())];
        let (csv, table) = (csv(&rows), table(&rows));
        let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 2, "what was not measured is not shown");
        assert_eq!(lines[0].len(), lines[1].len(), "{csv}");
        assert_eq!((lines[1][5], lines[1][15], lines[1][19]), ("4", "2", "0.5 0.25"));
        assert!(table.contains("draft small") && table.contains("50 %, 25 %"), "{table}");
    }
}
