//! The commands.

mod flags;

mod outputs;

mod report;
mod run;
mod scenario;
mod sweep;

use std::{
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
};

use clap::{Parser, Subcommand};
use load_tests::run::Progress;

/// Drives an OpenAI-compatible server with a planned load of streaming requests, and reports latency and throughput.
///
/// A load is planned before it is sent: when each request is due, what it asks, who hangs up. In an open loop (every
/// arrival process but `users`) a request is sent when it is due, however the server fares, and its latency counts
/// from then; how late the generator itself was is reported beside it.
#[derive(Parser)]
#[command(name = "load_tests", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  load_tests run --arrivals poisson:20/s --requests 200        two hundred requests, twenty a second on the mean
  load_tests run --arrivals users:16 --output-tokens 32-256    sixteen users who wait for their answers
  load_tests run --prompts ShareGPT.json --endpoint chat --html report.html --goodput ttft:500 --goodput tpot:50
  load_tests sweep --rates 1..64x2 --html sweep.html           rising rates until the server is saturated
  load_tests scenario load_tests/scenarios/flover-interval.toml --html flover.html
  load_tests report ours.json theirs.json --html both.html     saved runs side by side

Exit codes: 0 no request failed, 1 one did, 2 there was no run, 130 interrupted (what was measured is reported).
Of a sweep and of scenarios failures are part of what is reported, and the code is 0.";

#[derive(Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Sweep(Box<sweep::SweepArgs>),
    Scenario(scenario::ScenarioArgs),
    Report(report::ReportArgs),
}

/// How a command that could do its work ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// No request failed.
    Well,
    /// A request failed.
    WithFailures,
    Interrupted,
}

impl Ending {
    fn of(failed: usize, progress: &Progress) -> Ending {
        match (progress.stop.load(Ordering::Relaxed), failed) {
            (true, _) => Ending::Interrupted,
            (false, 0) => Ending::Well,
            (false, _) => Ending::WithFailures,
        }
    }
}

/// Carries out what the arguments say.
pub fn run() -> ExitCode {
    let progress = Arc::new(Progress::default());
    stop_on_interrupt(Arc::clone(&progress));
    let ending = match Cli::parse().command {
        Command::Run(args) => run::run(&args, &progress),
        Command::Sweep(args) => sweep::run(&args, &progress),
        Command::Scenario(args) => scenario::run(&args, &progress),
        Command::Report(args) => report::run(&args),
    };
    match ending {
        Ok(Ending::Well) => ExitCode::SUCCESS,
        Ok(Ending::WithFailures) => ExitCode::FAILURE,
        Ok(Ending::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

const INTERRUPTED: u8 = 130;

/// The first Ctrl-C (or SIGTERM) ends the run early, the second the program.
fn stop_on_interrupt(progress: Arc<Progress>) {
    let listen = move || -> std::io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (mut interrupt, mut terminate) =
                (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if progress.stop.swap(true, Ordering::Relaxed) {
                    std::process::exit(i32::from(INTERRUPTED));
                }
            }
        })
    };
    // Without it Ctrl-C ends the program at once, as it does everywhere.
    std::thread::spawn(listen);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_example_is_accepted() {
        let examples = EXAMPLES.lines().filter_map(|line| line.strip_prefix("  load_tests "));
        let mut count = 0;
        for example in examples {
            // What it does stands behind three spaces.
            let words = example.split("   ").next().unwrap().split_whitespace();
            let parsed = Cli::try_parse_from(std::iter::once("load_tests").chain(words));
            assert!(parsed.is_ok(), "{example}: {}", parsed.err().unwrap());
            count += 1;
        }
        assert_eq!(count, 6);
    }
}
