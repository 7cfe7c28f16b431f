//! The report as a table for the terminal.

use super::RunReport;

/// The table.
pub fn table(_report: &RunReport) -> String {
    todo!()
}
