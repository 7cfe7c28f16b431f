//! Command line: one module per subcommand, and the flags they share.
//!
//! Invariant: the exit code is 2 for an error in the command line, 130 after an interruption by Ctrl-C, and 1
//! for any other failure.

pub mod start;

pub mod escape;

pub mod batch;

pub mod bench;
mod completions;
mod devices;
mod evaluation;
mod flags;
mod models;
pub mod perplexity;
pub mod run;
pub mod serve;
mod spec;
mod spinner;
mod tier_flags;
mod vocabulary;

pub mod inspect;

pub mod plan;

pub mod quantize;

use crate::config::{Config, ConfigError, ConfigSource};
use crate::telemetry;
use anyhow::{Context, Result};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use serde::Serialize;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::process::ExitCode;
use tracing::warn;

const USAGE: u8 = 2;
const FAILURE: u8 = 1;

/// Exit code that shells report for a program ended by SIGINT.
const INTERRUPTED: u8 = 130;

/// Writes a command's output to stdout. A closed pipe is not an error. `what` names the output in other
/// errors.
fn print(what: &str, text: &str) -> Result<()> {
    telemetry::flush_log();
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.with_context(|| format!("cannot write the {what}")),
    }
}

/// Starts the log on stderr, with the warnings about the configuration.
fn start_log(config: &Config) -> Result<()> {
    telemetry::start_log(&config.log, spinner::Stderr)
        .context("cannot start the thread that writes the log")?;
    config.warnings.iter().for_each(|warning| warn!("{}", warning.escape_debug()));
    Ok(())
}

/// Deprecated keys of JSON reports, each with the current key, whose value it repeats.
const DEPRECATED_KEYS: [(&str, &str); 10] = [
    ("ceilings", "roofline"),
    ("codes", "int8"),
    ("conventions", "prompting_defaults"),
    ("page_positions", "page_size"),
    ("refused", "rejected"),
    ("said_by", "source"),
    ("source_context", "encoder_context"),
    ("unserved", "unsupported_settings"),
    ("unserved_pooling", "unsupported_pooling"),
    ("unserved_texts", "unsupported_texts"),
];

/// Formats a report as indented JSON, with the deprecated keys after the current ones.
fn to_json(document: &impl Serialize) -> String {
    let document = serde_json::to_value(document);
    let mut document = document.expect("a report is plain data; anything else is a bug");
    repeat_deprecated_keys(&mut document);
    format!("{document:#}\n")
}

fn repeat_deprecated_keys(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(repeat_deprecated_keys),
        Value::Object(members) => {
            members.values_mut().for_each(repeat_deprecated_keys);
            for (deprecated, current) in DEPRECATED_KEYS {
                if let Some(value) = members.get(current).cloned() {
                    members.insert(deprecated.to_owned(), value);
                }
            }
        }
        _ => {}
    }
}

/// Serve, run and measure transformer models.
#[derive(Parser)]
#[command(
    name = "mainstem",
    version,
    after_help = "\
Examples:
  mainstem run                                      chat with the built-in demo model
  mainstem run path/to/model \"Why is the sky blue?\" answer one prompt
  mainstem serve hf:owner/name --port 8000          serve a hub model with the OpenAI API
  mainstem batch path/to/model IN.jsonl OUT.jsonl   answer a file of requests
  mainstem inspect path/to/model                    show architecture and memory requirements
  mainstem bench path/to/model                      measure speed on this machine
  mainstem perplexity path/to/model --text FILE     measure perplexity on a text
  mainstem plan path/to/model                       find the best settings, and predict speed
  mainstem quantize path/to/model OUT --weights q4  quantize to about a third of the size
  mainstem models list                              list the models in the hub's cache
  mainstem spec check path/to/model                 compare a model with its specification
  mainstem devices                                  list CPU and GPUs

Run mainstem COMMAND --help for the options of a command."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(Box<serve::ServeArgs>),
    Run(Box<run::RunArgs>),
    Batch(Box<batch::BatchArgs>),
    Inspect(Box<inspect::InspectArgs>),
    Bench(Box<bench::BenchArgs>),
    Perplexity(Box<perplexity::PerplexityArgs>),
    Plan(Box<plan::PlanArgs>),
    Quantize(quantize::QuantizeArgs),
    Devices(devices::DevicesArgs),
    Models(models::ModelsArgs),
    Spec(spec::SpecArgs),
    Completions(completions::CompletionsArgs),
}

/// Returns the command line, with the defaults of options in the help of `serve` and `run`.
fn command() -> clap::Command {
    Cli::command()
        .mut_subcommand("serve", |serve| flags::with_defaults(serve, &[]))
        .mut_subcommand("run", |run| flags::with_defaults(run, &run::OWN_DEFAULTS))
}

/// Parses the process's arguments and runs the subcommand. Returns the exit code.
pub fn run() -> ExitCode {
    let succeeded = |()| ExitCode::SUCCESS;
    let parsed = Cli::from_arg_matches(&command().get_matches()).unwrap_or_else(|error| error.exit());
    let outcome = match parsed.command {
        Command::Serve(args) => serve::run(*args).map(succeeded),
        Command::Run(args) => run::run(*args),
        Command::Batch(args) => batch::run(*args),
        Command::Inspect(args) => inspect::run(*args).map(succeeded),
        Command::Bench(args) => bench::run(*args),
        Command::Perplexity(args) => perplexity::run(*args),
        Command::Plan(args) => plan::run(*args).map(succeeded),
        Command::Quantize(args) => quantize::run(args),
        Command::Devices(args) => devices::run(args).map(succeeded),
        Command::Models(args) => models::run(args).map(succeeded),
        Command::Spec(args) => spec::run(args),
        Command::Completions(args) => completions::run(args, &mut Cli::command()).map(succeeded),
    };
    let code = outcome.unwrap_or_else(|error| exit_code(&error));
    telemetry::flush_log();
    code
}

/// Prints an error with its causes to stderr and returns its exit code. Control characters are escaped,
/// because the message may quote a file or a server.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    telemetry::write_line(&format!("error: {}", escape::visible(&format!("{error:#}"))));
    let config = error.downcast_ref::<ConfigError>();
    let is_usage = config.is_some_and(|error| error.origin == ConfigSource::CommandLine);
    ExitCode::from(if is_usage { USAGE } else { FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        command().debug_assert();
    }

    #[test]
    fn the_help_has_defaults_and_keeps_options_of_experiments_apart() {
        for (name, slots) in [("serve", "[default: 32]"), ("run", "[default: 1]")] {
            let mut own = command().find_subcommand(name).expect("there is one").clone();
            let (short, long) = (own.render_help().to_string(), own.render_long_help().to_string());
            assert!(short.lines().any(|line| line.contains("--slots") && line.contains(slots)), "{short}");
            assert!(!short.contains("--fake-step") && !short.contains("--policy <"), "{short}");
            let (_, apart) = long.split_once("Experiments:").expect("they have a heading");
            assert!(
                ["--fake-step", "--policy", "--shuffle"].iter().all(|flag| apart.contains(flag)),
                "{long}"
            );
        }
    }
}
