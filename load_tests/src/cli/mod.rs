//! The command line: parses the arguments, runs the selected command and returns the exit code.

mod flags;

mod outputs;

mod report;
mod run;
mod scenario;
mod soak;
mod sweep;

use std::{
    process::ExitCode,
    sync::{Arc, atomic::Ordering},
};

use clap::{Parser, Subcommand};
use load_tests::run::Progress;

/// Drives an OpenAI-compatible server with a planned load of streaming requests, and reports latency and
/// throughput.
///
/// The load is planned before it is sent: when each request is due, its content, and which clients hang up.
/// In an open loop (every arrival process except `users`) a request is sent when it is due, however slow the
/// server is, and its latency counts from its due time; the delay caused by the generator itself is reported
/// separately.
#[derive(Parser)]
#[command(name = "load_tests", version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  load_tests run --arrivals poisson:20/s --requests 200        200 requests, 20 per second on average
  load_tests run --arrivals users:16 --output-tokens 32-256    16 users in a closed loop
  load_tests run --prompts ShareGPT.json --endpoint chat --html report.html --goodput ttft:500 \
--goodput tpot:50
  load_tests sweep --rates 1..64x2 --html sweep.html           rising rates until the server is saturated
  load_tests scenario load_tests/scenarios/flover-interval.toml --html flover.html
  load_tests report ours.json theirs.json --html both.html     saved runs side by side
  load_tests soak --time 3600 --json soak.json                 an hour of mixed traffic and faults

Exit codes: 0 no request failed, 1 a request or the soak test failed, 2 no run took place, 130 \
interrupted (partial results are reported).
Sweeps and scenarios report failed requests as results and exit with 0.";

#[derive(Subcommand)]
enum Command {
    Run(Box<run::RunArgs>),
    Sweep(Box<sweep::SweepArgs>),
    Scenario(scenario::ScenarioArgs),
    Report(report::ReportArgs),
    Soak(Box<soak::SoakArgs>),
}

/// The outcome of a command that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandOutcome {
    /// The command succeeded: no request failed.
    Success,
    /// At least one request failed.
    WithFailures,
    Interrupted,
}

impl CommandOutcome {
    fn from_failures(failed: usize, progress: &Progress) -> CommandOutcome {
        match (progress.stop.load(Ordering::Relaxed), failed) {
            (true, _) => CommandOutcome::Interrupted,
            (false, 0) => CommandOutcome::Success,
            (false, _) => CommandOutcome::WithFailures,
        }
    }
}

/// Runs the command given on the command line and returns the exit code.
pub fn run() -> ExitCode {
    let progress = Arc::new(Progress::default());
    stop_on_interrupt(Arc::clone(&progress));
    let ending = match Cli::parse().command {
        Command::Run(args) => run::run(&args, &progress),
        Command::Sweep(args) => sweep::run(&args, &progress),
        Command::Scenario(args) => scenario::run(&args, &progress),
        Command::Report(args) => report::run(&args),
        Command::Soak(args) => soak::run(&args, &progress),
    };
    match ending {
        Ok(CommandOutcome::Success) => ExitCode::SUCCESS,
        Ok(CommandOutcome::WithFailures) => ExitCode::FAILURE,
        Ok(CommandOutcome::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

const INTERRUPTED: u8 = 130;

/// Installs the signal handler: the first Ctrl-C (or SIGTERM) ends the run early, the second ends the
/// program.
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
    // If the thread fails, Ctrl-C keeps its default behavior and ends the program at once.
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
            // The description follows after three spaces.
            let words = example.split("   ").next().unwrap().split_whitespace();
            let parsed = Cli::try_parse_from(std::iter::once("load_tests").chain(words));
            assert!(parsed.is_ok(), "{example}: {}", parsed.err().unwrap());
            count += 1;
        }
        assert_eq!(count, 7);
    }
}
