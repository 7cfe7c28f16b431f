//! The files a run's figures go to.
//!
//! Invariant: no run begins whose report could not be written: every file is opened before.

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
    run::Record,
};

/// Where one run's figures go.
#[derive(Args)]
#[command(next_help_heading = "Output")]
pub struct OutputFlags {
    /// What reports call the run [default: the arrival process]
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,

    /// Write the figures to this file, with the names of `vllm bench serve`
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json: Option<PathBuf>,

    /// Put one entry per request into that file too
    #[arg(long, requires = "json")]
    detailed: bool,

    /// Write a line per request to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv: Option<PathBuf>,

    /// Write a line per token, or rather per event that brought some, to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv_tokens: Option<PathBuf>,

    /// Write the cumulative progress to this file: milliseconds, share of all tokens
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv_progress: Option<PathBuf>,

    /// Write how long each completed request took to this file, in the order in which they ended
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    csv_elapsed: Option<PathBuf>,

    /// Write a page with plots to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
}

/// The opened files.
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
    /// Opens every file.
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
    /// Writes a run to all of them. What goes wrong with one keeps no other from being written; the first such error
    /// is returned.
    pub fn write(self, report: &RunReport, record: &Record) -> anyhow::Result<()> {
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

/// A file that is open, and its name for errors.
pub struct Output {
    path: PathBuf,
    file: File,
}

impl Output {
    pub fn open(path: &Path) -> anyhow::Result<Output> {
        // What is there goes only when there is something to take its place.
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Output { path: path.to_owned(), file })
    }

    /// Replaces the file's content.
    pub fn write(
        mut self,
        content: impl FnOnce(&mut BufWriter<&mut File>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let path = self.path;
        let write = || -> anyhow::Result<()> {
            // A pipe or a device has no length.
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
