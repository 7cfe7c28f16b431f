//! Output formats of the report: a text table, JSON with every sample, and CSV.
//!
//! Invariant: all formats show the same values.

use super::partition::rows::{self as partition, PartitionFigures};
use super::report::{
    AllocatedMemory, BenchReport, EngineSettings, MachineInfo, ModelFacts, OffloadBreakdown, RowFigures,
    StreamFigures,
};
use super::roofline::Bottleneck;
use super::sample::Summary;
use super::speculation::rows::{self as speculation, SpeculationFigures};
use crate::cli::to_json;
use mainstem_kernels::cpu::Roofline;
use serde::Serialize;
use std::fmt::Write;

/// The report in JSON.
#[derive(Serialize)]
struct BenchDocument<'a> {
    mainstem: &'static str,
    machine: &'a MachineInfo,
    model: &'a Option<ModelFacts>,
    settings: &'a EngineSettings,
    allocated: &'a Option<AllocatedMemory>,
    rows: Vec<RowFigures<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    partitions: Vec<PartitionFigures<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    speculation: Vec<SpeculationFigures<'a>>,
    notes: &'a [String],
    interrupted: bool,
}

impl BenchReport {
    /// Formats the report as JSON, with every sample.
    pub fn json(&self) -> String {
        let BenchReport { machine, model, settings, allocated, notes, interrupted, .. } = self;
        to_json(&BenchDocument {
            mainstem: env!("CARGO_PKG_VERSION"),
            machine,
            model,
            settings,
            allocated,
            rows: self.figures(),
            partitions: partition::figures(&self.partitions),
            speculation: speculation::figures(&self.speculation),
            notes,
            interrupted: *interrupted,
        })
    }

    /// Formats the report as CSV: a header, and one line per row. Values that a row does not have are empty.
    pub fn csv(&self) -> String {
        if !self.partitions.is_empty() {
            return partition::csv(&self.partitions);
        }
        if !self.speculation.is_empty() {
            return speculation::csv(&self.speculation);
        }
        let mut text = format!("{CSV_HEAD}\n");
        for row in self.figures() {
            let RowFigures { test, sequences, tokens, tokens_per_s, time_is, time, .. } = row;
            let cell = |value: Option<f64>| value.map(|value| value.to_string()).unwrap_or_default();
            let cells = [
                test.to_owned(),
                sequences.to_string(),
                cell(row.depth.map(|depth| depth as f64)),
                tokens.to_string(),
                row.samples.len().to_string(),
                tokens_per_s.min.to_string(),
                tokens_per_s.median.to_string(),
                tokens_per_s.max.to_string(),
                time_is.to_owned(),
                time.min.to_string(),
                time.median.to_string(),
                time.max.to_string(),
                cell(row.weight_bytes_per_s),
                cell(row.share.map(|share| share.median)),
                row.limit.map(Bottleneck::name).unwrap_or_default().to_owned(),
                cell(row.ratio),
            ];
            text += &cells.join(",");
            text.push('\n');
        }
        text
    }

    /// Formats the report as text: machine and model, a table of the rows, and the notes.
    pub fn table(&self) -> String {
        let text = self.head()
            + &match (self.partitions.is_empty(), self.speculation.is_empty()) {
                (false, _) => partition::table(&self.partitions),
                (true, false) => speculation::table(&self.speculation),
                (true, true) => self.rows_table(),
            };
        self.with_notes(text)
    }

    fn rows_table(&self) -> String {
        let mut text = String::new();
        let figures = self.figures();
        let mut lines = vec![TABLE_HEAD.map(str::to_owned)];
        lines.extend(figures.iter().map(RowFigures::cells));
        let width =
            |column: usize| lines.iter().map(|cells| cells[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; TABLE_HEAD.len()] = std::array::from_fn(width);
        for cells in &lines {
            let mut line = String::new();
            for (column, (cell, width)) in cells.iter().zip(widths).enumerate() {
                // Columns of words are aligned to the left.
                let _ = match column {
                    0 | 5 => write!(line, "{cell:<width$}  "),
                    _ => write!(line, "{cell:>width$}  "),
                };
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
        for (row, cells) in figures.iter().zip(&lines[1..]) {
            if let Some(offload) = row.offload {
                let _ = writeln!(text, "\n{}, {}:", cells[0], row.sequences);
                text += &offload.table();
            }
        }
        text
    }

    fn with_notes(&self, mut text: String) -> String {
        for note in &self.notes {
            let _ = writeln!(text, "note: {note}");
        }
        if self.interrupted {
            text += "note: interrupted; the report has the results so far\n";
        }
        text
    }

    fn head(&self) -> String {
        let MachineInfo { cpu, cores, device } = &self.machine;
        let mut text = format!("mainstem {} on {cpu}, {cores} cores\n", env!("CARGO_PKG_VERSION"));
        if let Some(ModelFacts { name, parameters, weight_bytes, dtype, context }) = &self.model {
            let (millions, mib) = (*parameters as f64 / 1e6, mib(*weight_bytes));
            let _ = writeln!(
                text,
                "model:     {name}, {millions:.1} M parameters, {mib:.1} MiB of {dtype}, context {context}"
            );
        }
        let EngineSettings { slots, token_budget, kv_type, .. } = &self.settings;
        let _ = writeln!(text, "device:    {device}, {slots} slots, at most {token_budget} tokens per step");
        if let Some(allocated) = &self.allocated {
            let AllocatedMemory { weight_bytes, kv_bytes, kv_positions, activation_bytes, step_bytes } =
                allocated;
            let _ = writeln!(
                text,
                "allocated: weights {:.1} MiB, KV cache {:.1} MiB ({kv_positions} positions, {kv_type}), \
                 activations {:.1} MiB, step buffers {:.1} MiB",
                mib(*weight_bytes),
                mib(*kv_bytes),
                mib(*activation_bytes),
                mib(*step_bytes)
            );
        }
        if let Some(Roofline { read, f32, int8, bf16 }) = self.roofline() {
            let (f32, int8, bf16) = (f32 / 1e12, int8 / 1e12, bf16 / 1e12);
            let _ = writeln!(
                text,
                "roofline:  reads {:.1} GB/s; {f32:.2} Top/s in F32, {int8:.2} in int8, {bf16:.2} in BF16",
                read / 1e9
            );
        }
        text.push('\n');
        text
    }
}

const CSV_HEAD: &str = "test,sequences,depth,tokens,samples,tokens_per_s_min,tokens_per_s_median,\
                        tokens_per_s_max,time_is,time_min,time_median,time_max,weight_bytes_per_s,share,\
                        limit,ratio";

const TABLE_HEAD: [&str; 9] = [
    "test",
    "sequences",
    "tokens",
    "tok/s median (min..max)",
    "time median (min..max)",
    "unit",
    "weights",
    "of roofline",
    "speed-up",
];

impl OffloadBreakdown {
    /// Returns the breakdown as lines of a table.
    fn table(&self) -> String {
        let OffloadBreakdown { seconds, compute_seconds, streams, layers_ready, layers_late, .. } = self;
        let share = |part: f64| 100.0 * part / seconds.max(f64::MIN_POSITIVE);
        let mut text =
            format!("  compute       {compute_seconds:8.2} s, {:3.0} %\n", share(*compute_seconds));
        for StreamFigures { stream, bytes, host_bytes, stall_seconds } in streams {
            let (gb, rate) = (*bytes as f64 / 1e9, *bytes as f64 / 1e9 / seconds.max(f64::MIN_POSITIVE));
            let host = match host_bytes {
                0 => String::new(),
                bytes => format!(", {:.2} GB of it in host memory", *bytes as f64 / 1e9),
            };
            let _ = writeln!(
                text,
                "  {stream:<13} {stall_seconds:8.2} s, {:3.0} % waited for; {gb:.2} GB, {rate:.2} GB/s{host}",
                share(*stall_seconds)
            );
        }
        let _ = writeln!(text, "  layers        {layers_ready} ready, {layers_late} late");
        let OffloadBreakdown { buffers_ready, expert_hits: hits, expert_misses: misses, .. } = self;
        if let Some(ready) = buffers_ready {
            let _ = writeln!(text, "  buffers       {:.0} % ready on average", 100.0 * ready);
        }
        if hits + misses > 0 {
            let _ = writeln!(text, "  experts       {hits} in memory when chosen, {misses} read");
        }
        text
    }
}

impl RowFigures<'_> {
    fn cells(&self) -> [String; TABLE_HEAD.len()] {
        let name = match self.depth {
            Some(depth) => format!("{} at {depth}", self.test),
            None => self.test.to_owned(),
        };
        let of_weights = |bytes: f64| format!("{:.2} GB/s", bytes / 1e9);
        let of_limit = |(share, limit): (Summary, Bottleneck)| {
            format!("{:.0} % ({})", 100.0 * share.median, limit.name())
        };
        [
            name,
            self.sequences.to_string(),
            self.tokens.to_string(),
            self.tokens_per_s.format(1),
            self.time.format(2),
            self.time_is.to_owned(),
            self.weight_bytes_per_s.map(of_weights).unwrap_or_default(),
            self.share.zip(self.limit).map(of_limit).unwrap_or_default(),
            self.ratio.map(|ratio| format!("{ratio:.2}x")).unwrap_or_default(),
        ]
    }
}

impl Summary {
    /// Formats the summary as `median (min..max)`.
    pub fn format(&self, decimals: usize) -> String {
        let Summary { min, median, max } = self;
        format!("{median:.decimals$} ({min:.decimals$}..{max:.decimals$})")
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::{report, row};
    use super::super::sample::TestKind;

    #[test]
    fn all_forms_show_the_same_rows() {
        let report = report(vec![
            row(TestKind::Decode { depth: 7 }, 1, &[3.0]),
            row(TestKind::Http, 256, &[0.7, 0.9]),
        ]);
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        let csv = report.csv();
        let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|cells| cells.len() == lines[0].len()), "{csv}");
        for (cells, row) in lines[1..].iter().zip(json["rows"].as_array().unwrap()) {
            assert_eq!(cells[0], row["test"].as_str().unwrap());
            assert_eq!(cells[6].parse().ok(), row["tokens_per_s"]["median"].as_f64());
            assert_eq!(cells[11].parse().ok(), row["time"]["max"].as_f64());
        }
        let table = report.table();
        assert!(table.contains("decode at 7") && table.contains("loop + text + HTTP"), "{table}");
    }

    #[test]
    fn table_columns_are_aligned() {
        let report = report(vec![
            row(TestKind::Fused { depth: 8 }, 1, &[1.0]),
            row(TestKind::Fused { depth: 8 }, 32, &[1.0, 2.0]),
        ]);
        let table = report.table();
        let ends: Vec<usize> = table
            .lines()
            .filter(|line| line.starts_with("fused"))
            .map(|line| line.rfind('x').unwrap())
            .collect();
        assert_eq!(ends.len(), 2);
        assert_eq!(ends[0], ends[1], "{table}");
    }
}
