//! A scenario: a file that names experiments, each run against a server started for it.

use crate::{report::html::Section, run::Progress};
use std::path::{Path, PathBuf};

/// How scenarios are run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `mainstem` program.
    pub server: PathBuf,
}

/// Runs the scenarios of `files`, one after the other, and returns the parts of their report.
pub fn run(_files: &[&Path], _options: &Options, _progress: &Progress) -> anyhow::Result<Vec<Section>> {
    todo!()
}
