//! `load_tests scenario`: the papers' protocols, a server for each variant, one report of all.

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
    scenario::{self, Options},
};

use super::{
    Ending,
    flags::{parse_positive, parse_seconds},
    outputs::Output,
};

/// Run experiments that files describe, each variant against a server started for it, and report them on one page
#[derive(Args)]
pub struct ScenarioArgs {
    /// Scenario files; load_tests/scenarios has those of Flover's paper
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    files: Vec<PathBuf>,

    /// The page
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: PathBuf,

    /// Its title
    #[arg(long, default_value = "Load tests")]
    title: String,

    /// The mainstem program [default: the one beside this program]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::ExecutablePath)]
    server: Option<PathBuf>,

    /// A server that runs already, in the place of the one variant that is left
    #[arg(long, value_name = "URL")]
    url: Option<String>,

    /// Model to serve in the place of the files' own
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,

    /// Answers are this many times as long as the files say
    #[arg(long, value_name = "FACTOR", value_parser = parse_positive)]
    token_scale: Option<f64>,

    /// Slots of the server
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    slots: Option<u32>,

    /// A further argument of `mainstem serve`; may be given several times
    #[arg(long = "server-arg", value_name = "ARGUMENT", allow_hyphen_values = true)]
    server_args: Vec<String>,

    /// Variants to run, by name, with commas between them [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    variants: Vec<String>,

    /// Runs of each variant at each row; the median counts
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,

    /// Seconds that a server may take to load its model
    #[arg(long, default_value = "600", value_name = "SECONDS", value_parser = parse_seconds)]
    start_timeout: Duration,

    /// Seconds that one run may take
    #[arg(long, default_value = "3600", value_name = "SECONDS", value_parser = parse_seconds)]
    time_limit: Duration,

    /// Threads that send and read
    #[arg(long, default_value_t = 1, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=256))]
    workers: u32,
}

pub fn run(args: &ScenarioArgs, progress: &Arc<Progress>) -> anyhow::Result<Ending> {
    let options = args.options()?;
    let html = Output::open(&args.html)?;
    let files: Vec<&Path> = args.files.iter().map(PathBuf::as_path).collect();
    let sections = scenario::run(&files, &options, progress, &mut |line| eprintln!("{line}"))?;
    let page = html::page(&args.title, &sections);
    html.write(|out| Ok(std::io::Write::write_all(out, page.as_bytes())?))?;
    Ok(Ending::of(0, progress))
}

impl ScenarioArgs {
    fn options(&self) -> anyhow::Result<Options> {
        let server = self.server.clone().map_or_else(beside, Ok)?;
        Ok(Options {
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

/// The mainstem program that was built into the same folder.
fn beside() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own folder")?;
    Ok(own.with_file_name("mainstem"))
}
