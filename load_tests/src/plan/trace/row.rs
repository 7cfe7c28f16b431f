//! Parses one row of a trace from the texts of its fields.
//!
//! Invariant: a row has a time, and no length above `LENGTH_MAX`.

use jiff::{Timestamp, civil::DateTime, tz::TimeZone};

use crate::plan::lengths::LENGTH_MAX;

/// The meaning of a field.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TraceField {
    Time(TimeUnit),
    Prompt,
    Output,
}

/// The unit of a time given as a bare number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TimeUnit {
    Seconds,
    Milliseconds,
}

/// A recorded request.
#[derive(Clone, Copy, Debug)]
pub(super) struct TraceRow {
    /// Arrival time in nanoseconds since an epoch common to all rows.
    pub nanos: i128,
    /// Number of prompt tokens.
    pub prompt: Option<u32>,
    /// Number of output tokens.
    pub output: Option<u32>,
}

/// Upper bound of times: about 30,000 years.
const SECONDS_MAX: f64 = 1e12;

impl TraceField {
    /// Returns the field of this name, if it is a known one; `timestamp` has the unit of the file format.
    pub fn from_name(name: &str, timestamp: TimeUnit) -> Option<Self> {
        match name.trim().to_ascii_lowercase().as_str() {
            "timestamp" => Some(TraceField::Time(timestamp)),
            "arrival_s" => Some(TraceField::Time(TimeUnit::Seconds)),
            "arrival_ms" => Some(TraceField::Time(TimeUnit::Milliseconds)),
            "contexttokens" | "request tokens" | "prompt_tokens" | "input_length" => Some(TraceField::Prompt),
            "generatedtokens" | "response tokens" | "output_tokens" | "output_length" => {
                Some(TraceField::Output)
            }
            _ => None,
        }
    }
}

impl TraceRow {
    /// Builds a row from fields with their names and texts; empty texts are ignored.
    pub fn from_fields<'a>(
        fields: impl Iterator<Item = (TraceField, &'a str, &'a str)>,
    ) -> Result<Self, String> {
        let (mut nanos, mut prompt, mut output) = (None, None, None);
        for (field, name, text) in fields.filter(|(_, _, text)| !text.is_empty()) {
            let twice = match field {
                TraceField::Time(clock) => nanos.replace(time(text, clock)?).is_some(),
                TraceField::Prompt => prompt.replace(tokens(name, text)?).is_some(),
                TraceField::Output => output.replace(tokens(name, text)?).is_some(),
            };
            if twice {
                return Err(format!("{name} duplicates another field"));
            }
        }
        Ok(TraceRow { nanos: nanos.ok_or("the time is missing")?, prompt, output })
    }
}

fn tokens(name: &str, text: &str) -> Result<u32, String> {
    let tokens = text.parse().ok().filter(|&tokens| tokens <= LENGTH_MAX);
    tokens.ok_or_else(|| format!("{name} is '{text}', not a number of tokens up to {LENGTH_MAX}"))
}

/// Parses a number in the unit of `clock`, or a date, to nanoseconds.
fn time(text: &str, clock: TimeUnit) -> Result<i128, String> {
    let Ok(number) = text.parse::<f64>() else {
        return date(text).ok_or_else(|| format!("'{text}' is neither a number nor a date"));
    };
    let per_s = match clock {
        TimeUnit::Seconds => 1.0,
        TimeUnit::Milliseconds => 1e3,
    };
    if !(0.0..=SECONDS_MAX).contains(&(number / per_s)) {
        return Err(format!("the time {text} is not between 0 and {SECONDS_MAX} seconds"));
    }
    Ok((number * (1e9 / per_s)).round() as i128)
}

/// Parses a date to nanoseconds since the Unix epoch; a date without an offset is taken as UTC.
fn date(text: &str) -> Option<i128> {
    if let Ok(timestamp) = text.parse::<Timestamp>() {
        return Some(timestamp.as_nanosecond());
    }
    let zoned = text.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_nanosecond())
}
