//! The files that the results of a run are written to.
//!
//! Invariant: every output file is opened before the run starts, so that no result is lost to a bad path.

use std::{
    fs::File,
    io::{BufWriter, Write},
    path::{Path, PathBuf},
};

use anyhow::Context;
use clap::{Args, ValueHint};
use load_tests::{
    report::{
        RunReport, csv,
        html::{self, Section},
        json,
    },
    run::RunRecord,
};

/// Flags that select the output files of one run.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct OutputFlags {
    /// Name of the run in reports [default: the arrival process]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,

    /// Write the results as JSON to this file, with the field names of `vllm bench serve`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json: Option<PathBuf>,

    /// Add one entry per request to the JSON file
    #[arg(long, requires = "json")]
    detailed: bool,

    /// Write one line per request to this CSV file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv: Option<PathBuf>,

    /// Write one line per received event with tokens to this CSV file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv_tokens: Option<PathBuf>,

    /// Write the cumulative progress to this CSV file: milliseconds, fraction of all tokens
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv_progress: Option<PathBuf>,

    /// Write the duration of each completed request to this CSV file, in order of completion
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv_elapsed: Option<PathBuf>,

    /// Write an HTML report with plots to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
}

/// The opened output files of one run.
pub struct Outputs {
    json: Option<Output>,
    detailed: bool,
    csv: Option<Output>,
    csv_tokens: Option<Output>,
    csv_progress: Option<Output>,
    csv_elapsed: Option<Output>,
    html: Option<Output>,
}

impl OutputFlags {
    /// Opens all selected output files.
    pub fn open(&self) -> anyhow::Result<Outputs> {
        let open = |path: &Option<PathBuf>| path.as_deref().map(Output::open).transpose();
        Ok(Outputs {
            json: open(&self.json)?,
            detailed: self.detailed,
            csv: open(&self.csv)?,
            csv_tokens: open(&self.csv_tokens)?,
            csv_progress: open(&self.csv_progress)?,
            csv_elapsed: open(&self.csv_elapsed)?,
            html: open(&self.html)?,
        })
    }
}

impl Outputs {
    /// Writes the results of a run to all files. An error on one file does not prevent writing the others;
    /// the first error is returned.
    pub fn write(self, report: &RunReport, record: &RunRecord) -> anyhow::Result<()> {
        let write = |file: Option<Output>,
                     content: &dyn Fn(&mut BufWriter<&mut File>) -> anyhow::Result<()>| {
            file.map_or(Ok(()), |file| file.write(content))
        };
        let samples = self.detailed.then_some(record);
        let page = || html::page(&report.label, &[Section::Run(Box::new(report.clone()))]);
        let written = [
            write(self.json, &|out| Ok(writeln!(out, "{:#}", json::json(report, samples))?)),
            write(self.csv, &|out| csv::requests(record, out)),
            write(self.csv_tokens, &|out| csv::tokens(record, out)),
            write(self.csv_progress, &|out| csv::progress(record, out)),
            write(self.csv_elapsed, &|out| csv::elapsed(record, out)),
            write(self.html, &|out| Ok(out.write_all(page().as_bytes())?)),
        ];
        written.into_iter().collect()
    }
}

/// An open output file, with its path for error messages.
pub struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    /// Opens or creates the file at `path`, keeping its content.
    pub fn open(path: &Path) -> anyhow::Result<Output> {
        // The content is truncated only when there is something to replace it.
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Output { path: path.to_owned(), file })
    }

    /// Replaces the content of the file with what `content` writes.
    pub fn write(
        mut self,
        content: impl FnOnce(&mut BufWriter<&mut File>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let path = self.path;
        let write = || -> anyhow::Result<()> {
            // A pipe or a device cannot be truncated.
            if self.file.metadata()?.is_file() {
                self.file.set_len(0)?;
            }
            let mut out = BufWriter::new(&mut self.file);
            content(&mut out)?;
            Ok(out.flush()?)
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }
}
