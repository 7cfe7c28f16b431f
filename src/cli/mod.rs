//! The command line: one file for each subcommand, and the flags they share.
//!
//! Invariant: the exit code is 2 when the command line is at fault, 130 when Ctrl-C ended what was asked, and
//! 1 when anything else went wrong.

pub mod start;

pub mod escape;

pub mod bench;
mod completions;
mod flags;
pub mod perplexity;
mod reading;
pub mod run;
pub mod serve;
mod spinner;
mod words;

pub mod inspect;

pub mod plan;

pub mod quantize;

use crate::config::{ConfigError, Source};
use anyhow::{Context, Result};
use clap::{CommandFactory, Parser, Subcommand};
use std::io::{ErrorKind, Write};
use std::process::ExitCode;

const USAGE: u8 = 2;
const FAILURE: u8 = 1;

/// What a shell gives for a program that a SIGINT ended.
const INTERRUPTED: u8 = 130;

/// Writes `what` a command has to tell to standard output. Whoever reads no further has seen enough.
fn print(what: &str, text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.with_context(|| format!("cannot write the {what}")),
    }
}

/// Serves transformer models: one fused decode loop for all live requests.
#[derive(Parser)]
#[command(
    name = "mainstem",
    version,
    after_help = "\
Examples:
  mainstem run                                      chat with the demo model that is built in
  mainstem run path/to/model \"Why is the sky blue?\" one answer, then end
  mainstem serve hf:owner/name --port 8000          the OpenAI API before a model of the hub
  mainstem inspect path/to/model                    what it is made of, and the memory it needs
  mainstem bench path/to/model                      how fast it is here
  mainstem perplexity path/to/model --text FILE     how well it foretells a text
  mainstem plan --partition path/to/model           how fast it would be on several devices
  mainstem quantize path/to/model OUT --weights q4  the same model in a third of the memory

mainstem COMMAND --help has more of each."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(Box<serve::ServeArgs>),
    Run(Box<run::RunArgs>),
    Inspect(inspect::InspectArgs),
    Bench(Box<bench::BenchArgs>),
    Perplexity(Box<perplexity::PerplexityArgs>),
    Plan(plan::PlanArgs),
    Quantize(quantize::QuantizeArgs),
    Completions(completions::CompletionsArgs),
}

/// Does what the process's arguments say.
pub fn run() -> ExitCode {
    let succeeded = |()| ExitCode::SUCCESS;
    let outcome = match Cli::parse().command {
        Command::Serve(args) => serve::run(*args).map(succeeded),
        Command::Run(args) => run::run(*args),
        Command::Inspect(args) => inspect::run(args).map(succeeded),
        Command::Bench(args) => bench::run(*args),
        Command::Perplexity(args) => perplexity::run(*args),
        Command::Plan(args) => plan::run(args).map(succeeded),
        Command::Quantize(args) => quantize::run(args),
        Command::Completions(args) => completions::run(args, &mut Cli::command()).map(succeeded),
    };
    outcome.unwrap_or_else(|error| exit_code(&error))
}

/// Says what went wrong, once, with its causes. Names and texts in it may be a file's or a server's.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    eprintln!("error: {}", escape::visible(&format!("{error:#}")));
    let config = error.downcast_ref::<ConfigError>();
    let is_usage = config.is_some_and(|error| error.origin == Source::CommandLine);
    ExitCode::from(if is_usage { USAGE } else { FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
