//! Samples as CSV: a line per request, and a line per event with tokens.

use crate::run::Record;
use std::io::Write;

/// One line per request sent.
pub fn requests(_record: &Record, _out: impl Write) -> anyhow::Result<()> {
    todo!()
}

/// One line per event that brought tokens.
pub fn tokens(_record: &Record, _out: impl Write) -> anyhow::Result<()> {
    todo!()
}
