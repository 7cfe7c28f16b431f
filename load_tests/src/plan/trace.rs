//! Recorded arrivals: when requests came, and how long their prompts and answers were.

use std::{path::Path, time::Duration};

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// From the first request of the trace; ascending.
    pub due: Duration,
    /// Tokens, where the trace tells them.
    pub prompt_len: Option<u32>,
    pub output_len: Option<u32>,
}

/// Reads a trace: CSV with a header, or JSON lines. Its times are divided by `speed`. Errors name the file and the
/// line.
pub fn read(_file: &Path, _speed: f64) -> anyhow::Result<Vec<Entry>> {
    todo!()
}
