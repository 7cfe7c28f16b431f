//! `load_tests scenario`: runs experiments defined in files, with a server per variant, and writes one
//! report.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use clap::{Args, ValueHint};
use load_tests::{
    report::html,
    run::Progress,
    scenario::{self, ScenarioOptions},
};

use super::{
    CommandOutcome,
    flags::{parse_positive, parse_seconds},
    outputs::Output,
};

/// Run the experiments defined in scenario files, each variant on its own server, and write one HTML report
#[derive(Args)]
pub struct ScenarioArgs {
    /// Scenario files; load_tests/scenarios contains those of the Flover paper
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,

    /// Write the HTML report to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: PathBuf,

    /// Title of the report
    #[arg(long, default_value = "Load tests")]
    title: String,

    /// The mainstem executable [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::ExecutablePath)]
    server: Option<PathBuf>,

    /// URL of a running server to use instead of starting one; requires a single variant
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// Model to serve, overriding the model in the scenario files
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,

    /// Factor applied to the response lengths of the scenario files
    #[arg(long, value_name = "FACTOR", value_parser = parse_positive)]
    token_scale: Option<f64>,

    /// Number of slots of the server
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    slots: Option<u32>,

    /// Extra argument of `mainstem serve`; may be given several times
    #[arg(long = "server-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    server_args: Vec<String>,

    /// Names of the variants to run, comma-separated [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variants: Vec<String>,

    /// Number of runs per variant and row; the median is reported
    #[arg(
        long,
        default_value_t = 1,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=100)
    )]
    repeats: u32,

    /// Time limit in seconds for a server to load its model
    #[arg(long, default_value = "600", value_name = "SECONDS", value_parser = parse_seconds)]
    start_timeout: Duration,

    /// Time limit of one run in seconds
    #[arg(long, default_value = "3600", value_name = "SECONDS", value_parser = parse_seconds)]
    time_limit: Duration,

    /// Number of client threads
    #[arg(
        long,
        default_value_t = 1,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    workers: u32,
}

/// Runs `scenario`: the experiments of a scenario file.
pub fn run(args: &ScenarioArgs, progress: &Arc<Progress>) -> anyhow::Result<CommandOutcome> {
    let options = args.options()?;
    let html = Output::open(&args.html)?;
    let files: Vec<&Path> = args.files.iter().map(PathBuf::as_path).collect();
    let sections = scenario::run(&files, &options, progress, &mut |line| eprintln!("{line}"))?;
    let page = html::page(&args.title, &sections);
    html.write(|out| Ok(std::io::Write::write_all(out, page.as_bytes())?))?;
    Ok(CommandOutcome::from_failures(0, progress))
}

impl ScenarioArgs {
    fn options(&self) -> anyhow::Result<ScenarioOptions> {
        let server = self.server.clone().map_or_else(default_server, Ok)?;
        Ok(ScenarioOptions {
            server,
            url: self.url.clone(),
            model: self.model.clone(),
            token_scale: self.token_scale,
            slots: self.slots,
            server_args: self.server_args.clone(),
            variants: self.variants.clone(),
            repeats: self.repeats as usize,
            start_timeout: self.start_timeout,
            time_limit: self.time_limit,
            workers: self.workers as usize,
        })
    }
}

/// Returns the path of the `mainstem` executable in the directory of this program.
pub fn default_server() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find the directory of this program")?;
    Ok(own.with_file_name("mainstem"))
}
