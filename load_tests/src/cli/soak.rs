//! `load_tests soak`: runs a soak test and writes its report.

use std::{io::Write, path::PathBuf, sync::Arc, time::Duration};

use clap::{Args, ValueHint};
use load_tests::{
    run::Progress,
    soak::{self, SoakOptions, SoakTarget},
};

use super::{CommandOutcome, flags::parse_seconds, outputs::Output, scenario::default_server};

/// Send mixed traffic with hang-ups, bad requests and faults for a long time, and check that the server stays
/// the same
#[derive(Args)]
pub struct SoakArgs {
    /// Soak file [default: load_tests/scenarios/soak.toml]
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: Option<PathBuf>,

    /// Write the report as JSON to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json: Option<PathBuf>,

    /// Time of all rounds in seconds, overriding the file
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    time: Option<Duration>,

    /// Number of rounds, overriding the file
    #[arg(long, value_name = "COUNT")]
    rounds: Option<u32>,

    /// Faults to inject, overriding the file; "" for none
    #[arg(long, value_name = "FAULTS")]
    inject: Option<String>,

    /// The mainstem executable [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::ExecutablePath, conflicts_with = "url")]
    server: Option<PathBuf>,

    /// Model to serve, overriding the file
    #[arg(long, value_name = "MODEL", conflicts_with = "url")]
    model: Option<String>,

    /// Extra argument of `mainstem serve`; may be given several times
    #[arg(long = "server-arg", value_name = "ARGUMENT", allow_hyphen_values = true, conflicts_with = "url")]
    server_args: Vec<String>,

    /// URL of a running server on this machine to test instead of starting one
    #[arg(long, value_name = "URL", requires = "pid")]
    url: Option<String>,

    /// Number of the running server's process
    #[arg(long, value_name = "NUMBER", requires = "url")]
    pid: Option<u32>,

    /// File whose first line is an API key of the running server
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "url")]
    api_key_file: Option<PathBuf>,

    /// Time limit in seconds for a server to load its model, and to exit
    #[arg(long, default_value = "600", value_name = "SECONDS", value_parser = parse_seconds)]
    start_timeout: Duration,
}

/// Runs `soak`.
pub fn run(args: &SoakArgs, progress: &Arc<Progress>) -> anyhow::Result<CommandOutcome> {
    let options = args.options()?;
    let json = args.json.as_deref().map(Output::open).transpose()?;
    let report = soak::run(&options, progress, &mut |line| eprintln!("{line}"))?;
    // A closed stdout is not an error.
    let _ = write!(std::io::stdout(), "{}", report.text());
    if let Some(json) = json {
        json.write(|out| Ok(serde_json::to_writer_pretty(out, &report)?))?;
    }
    Ok(CommandOutcome::from_failures(report.problems.len(), progress))
}

impl SoakArgs {
    fn options(&self) -> anyhow::Result<SoakOptions> {
        let target = match (&self.url, self.pid) {
            (Some(url), Some(pid)) => SoakTarget::Running { url: url.clone(), pid, key: self.key()? },
            _ => SoakTarget::Program(self.server.clone().map_or_else(default_server, Ok)?),
        };
        Ok(SoakOptions {
            file: self.file.clone(),
            model: self.model.clone(),
            server_args: self.server_args.clone(),
            inject: self.inject.clone(),
            time: self.time,
            rounds: self.rounds,
            start_timeout: self.start_timeout,
            ..SoakOptions::new(target)
        })
    }

    fn key(&self) -> anyhow::Result<Option<String>> {
        let Some(file) = &self.api_key_file else { return Ok(None) };
        let text = std::fs::read_to_string(file)
            .map_err(|error| anyhow::anyhow!("cannot read {}: {error}", file.display()))?;
        Ok(text.lines().next().map(|line| line.trim().to_owned()))
    }
}
