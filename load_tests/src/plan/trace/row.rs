//! One line of a trace, from the texts of its fields.
//!
//! Invariant: a row has a time, and no length above `LENGTH_MAX`.

use jiff::{Timestamp, civil::DateTime, tz::TimeZone};

use crate::plan::lengths::LENGTH_MAX;

/// What a field tells.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Field {
    Time(Clock),
    Prompt,
    Output,
}

/// What a bare number of a time counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Clock {
    Seconds,
    Milliseconds,
}

/// A request as it was recorded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// From any beginning that all rows share.
    pub nanos: i128,
    /// Tokens.
    pub prompt: Option<u32>,
    pub output: Option<u32>,
}

/// Beyond any clock: 30,000 years.
const SECONDS_MAX: f64 = 1e12;

impl Field {
    /// The field of this name, if it is one that matters; `timestamp` counts as the format does.
    pub fn named(name: &str, timestamp: Clock) -> Option<Self> {
        match name.trim().to_ascii_lowercase().as_str() {
            "timestamp" => Some(Field::Time(timestamp)),
            "arrival_s" => Some(Field::Time(Clock::Seconds)),
            "arrival_ms" => Some(Field::Time(Clock::Milliseconds)),
            "contexttokens" | "request tokens" | "prompt_tokens" | "input_length" => Some(Field::Prompt),
            "generatedtokens" | "response tokens" | "output_tokens" | "output_length" => Some(Field::Output),
            _ => None,
        }
    }
}

impl Row {
    /// A row of fields, each with its name and text; empty ones tell nothing.
    pub fn of<'a>(fields: impl Iterator<Item = (Field, &'a str, &'a str)>) -> Result<Self, String> {
        let (mut nanos, mut prompt, mut output) = (None, None, None);
        for (field, name, text) in fields.filter(|(_, _, text)| !text.is_empty()) {
            let twice = match field {
                Field::Time(clock) => nanos.replace(time(text, clock)?).is_some(),
                Field::Prompt => prompt.replace(tokens(name, text)?).is_some(),
                Field::Output => output.replace(tokens(name, text)?).is_some(),
            };
            if twice {
                return Err(format!("{name} tells what another field has told"));
            }
        }
        Ok(Row { nanos: nanos.ok_or("there is no time")?, prompt, output })
    }
}

fn tokens(name: &str, text: &str) -> Result<u32, String> {
    let tokens = text.parse().ok().filter(|&tokens| tokens <= LENGTH_MAX);
    tokens.ok_or_else(|| format!("{name} is '{text}', not a number of tokens up to {LENGTH_MAX}"))
}

/// Nanoseconds of a number on this clock, or of a date.
fn time(text: &str, clock: Clock) -> Result<i128, String> {
    let Ok(number) = text.parse::<f64>() else {
        return date(text).ok_or_else(|| format!("'{text}' is neither a number nor a date"));
    };
    let per_s = match clock {
        Clock::Seconds => 1.0,
        Clock::Milliseconds => 1e3,
    };
    if !(0.0..=SECONDS_MAX).contains(&(number / per_s)) {
        return Err(format!("a time of {text} is not within 0 and {SECONDS_MAX} seconds"));
    }
    Ok((number * (1e9 / per_s)).round() as i128)
}

/// Nanoseconds of a date with an offset from UTC, or without one, as if it were UTC.
fn date(text: &str) -> Option<i128> {
    if let Ok(timestamp) = text.parse::<Timestamp>() {
        return Some(timestamp.as_nanosecond());
    }
    let zoned = text.parse::<DateTime>().ok()?.to_zoned(TimeZone::UTC).ok()?;
    Some(zoned.timestamp().as_nanosecond())
}
