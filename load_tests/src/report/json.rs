//! The report as JSON under the names of `vllm bench serve`, so that plots and scripts made for it read ours.

use super::RunReport;
use crate::run::Record;
use serde_json::Value;

/// One object: the names of `vllm bench serve`, and under `load_tests` the whole report. With `samples`, lists of one
/// entry per request sent, by index, come too.
pub fn json(_report: &RunReport, _samples: Option<&Record>) -> Value {
    todo!()
}

/// Reads what [`json`] wrote.
pub fn read(_text: &str) -> anyhow::Result<RunReport> {
    todo!()
}
