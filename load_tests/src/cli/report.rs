//! `load_tests report`: renders saved runs as one HTML report.

use std::{fs, path::PathBuf};

use anyhow::Context;
use clap::{Args, ValueHint};
use load_tests::report::{
    RunReport,
    html::{self, Section},
    json,
};

use super::{CommandOutcome, outputs::Output};

/// Compare saved runs in one HTML report
#[derive(Args)]
pub struct ReportArgs {
    /// JSON files written by `run --json`
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,

    /// Write the HTML report to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: PathBuf,

    /// Title of the report
    #[arg(long, default_value = "Load tests")]
    title: String,
}

/// Runs `report`: renders the given results as a page.
pub fn run(args: &ReportArgs) -> anyhow::Result<CommandOutcome> {
    let runs = args.files.iter().map(read).collect::<anyhow::Result<Vec<RunReport>>>()?;
    let output = Output::open(&args.html)?;
    let mut sections = Vec::new();
    if runs.len() > 1 {
        let (title, text) = ("Side by side".to_owned(), String::new());
        sections.push(Section::Runs { title, text, runs: runs.clone() });
    }
    sections.extend(runs.into_iter().map(|run| Section::Run(Box::new(run))));
    let page = html::page(&args.title, &sections);
    output.write(|out| Ok(std::io::Write::write_all(out, page.as_bytes())?))?;
    Ok(CommandOutcome::Success)
}

fn read(file: &PathBuf) -> anyhow::Result<RunReport> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    json::read(&text).with_context(|| format!("reading {}", file.display()))
}
