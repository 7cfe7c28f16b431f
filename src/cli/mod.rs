//! The command line: one file for each subcommand.
//!
//! Invariant: the exit code is 2 when the command line is at fault and 1 when anything else is.

pub mod start;

pub mod serve;

use crate::config::{ConfigError, Source};
use crate::telemetry;
use actix_web::rt::System;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

const USAGE: u8 = 2;
const FAILURE: u8 = 1;

/// Serves transformer models: one fused decode loop for all live requests.
#[derive(Debug, Parser)]
#[command(name = "mainstem", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::ServeArgs),
}

/// Does what the process's arguments say.
pub fn run() -> ExitCode {
    let Command::Serve(args) = Cli::parse().command;
    let config = match args.config() {
        Ok(config) => config,
        Err(error) => return refuse(&error),
    };
    telemetry::start_log(&config.log);
    match System::new().block_on(serve::run(config)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(FAILURE)
        }
    }
}

fn refuse(error: &ConfigError) -> ExitCode {
    eprintln!("error: {error}");
    ExitCode::from(if error.origin == Source::CommandLine { USAGE } else { FAILURE })
}
