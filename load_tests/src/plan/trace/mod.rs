//! Traces: recorded arrival times, prompt lengths and output lengths.
//!
//! Fields are identified by name, ignoring case; other fields are ignored:
//!
//! ```text
//! time      timestamp (a date such as 2023-11-16 18:17:03.9799600, or seconds in CSV and milliseconds in
//!           JSON), arrival_s, arrival_ms
//! prompt    ContextTokens (Azure), Request tokens (BurstGPT), prompt_tokens, input_length (Mooncake)
//! answer    GeneratedTokens (Azure), Response tokens (BurstGPT), output_tokens, output_length (Mooncake)
//! ```
//!
//! An answer of 0 tokens marks a request that failed when the trace was recorded; such entries are skipped. A
//! prompt of 0 tokens counts as 1 token.
//!
//! Invariant: entries are sorted by due time, the first is due at once, and lengths are at least 1.

mod row;

use std::{path::Path, time::Duration};

use anyhow::{Context, anyhow, ensure};
use serde_json::Value;

use super::files::{json_lines, read_text};
use row::{TimeUnit, TraceField, TraceRow};

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceEntry {
    /// Due time since the first request of the trace; ascending.
    pub due: Duration,
    /// Number of prompt tokens, if recorded.
    pub prompt_len: Option<u32>,
    /// Number of output tokens, if recorded.
    pub output_len: Option<u32>,
}

/// Reads a trace: CSV with a header, or JSON lines. Times are divided by `speed`. Errors name the file and
/// the line.
pub fn read(file: &Path, speed: f64) -> anyhow::Result<Vec<TraceEntry>> {
    ensure!(speed.is_finite() && speed > 0.0, "the speed of a trace must be above 0, not {speed}");
    let rows = || rows(&read_text(file)?);
    Ok(entries(rows().with_context(|| file.display().to_string())?, speed))
}

/// Parses the rows that have an answer; fails when there is none.
fn rows(content: &str) -> anyhow::Result<Vec<TraceRow>> {
    let rows = if content.trim_start().starts_with('{') { json(content)? } else { csv(content)? };
    let rows: Vec<TraceRow> = rows.into_iter().filter(|row| row.output != Some(0)).collect();
    ensure!(!rows.is_empty(), "the trace contains no request with an answer");
    Ok(rows)
}

fn entries(mut rows: Vec<TraceRow>, speed: f64) -> Vec<TraceEntry> {
    rows.sort_by_key(|row| row.nanos);
    let first = rows.first().map_or(0, |row| row.nanos);
    let due = |row: &TraceRow| Duration::from_nanos(((row.nanos - first) as f64 / speed).round() as u64);
    let entry = |row: &TraceRow| TraceEntry {
        due: due(row),
        prompt_len: row.prompt.map(|tokens| tokens.max(1)),
        output_len: row.output,
    };
    rows.iter().map(entry).collect()
}

fn csv(content: &str) -> anyhow::Result<Vec<TraceRow>> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(content.as_bytes());
    let header = reader.headers()?.clone();
    let fields: Vec<Option<TraceField>> =
        header.iter().map(|name| TraceField::from_name(name, TimeUnit::Seconds)).collect();
    ensure!(
        fields.iter().flatten().any(|field| matches!(field, TraceField::Time(_))),
        "line 1: no column is named timestamp, arrival_s or arrival_ms"
    );
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record?;
        let line = record.position().map_or(0, csv::Position::line);
        let cells = header.iter().zip(&fields).zip(&record);
        let known = cells.filter_map(|((name, field), text)| Some(((*field)?, name, text)));
        rows.push(TraceRow::from_fields(known).map_err(|error| anyhow!("line {line}: {error}"))?);
    }
    Ok(rows)
}

fn json(content: &str) -> anyhow::Result<Vec<TraceRow>> {
    let row =
        |(line, value): (usize, Value)| json_row(&value).map_err(|error| anyhow!("line {line}: {error}"));
    json_lines(content).map(|line| row(line?)).collect()
}

fn json_row(value: &Value) -> Result<TraceRow, String> {
    let fields = value.as_object().ok_or("expected an object")?;
    let mut known = Vec::new();
    for (name, value) in fields {
        let Some(field) = TraceField::from_name(name, TimeUnit::Milliseconds) else { continue };
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Number(number) => number.to_string(),
            Value::Null => continue,
            _ => return Err(format!("{name} is neither a number nor a string")),
        };
        known.push((field, name.as_str(), text));
    }
    TraceRow::from_fields(known.iter().map(|(field, name, text)| (*field, *name, text.as_str())))
}

#[cfg(test)]
mod tests;
