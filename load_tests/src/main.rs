//! The command line: arguments to settings, figures to the terminal and to files.
//!
//! Invariant: the exit code is 0 when no request failed, 1 when one did, 2 when there was no run, and 130 when it
//! was interrupted.

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
