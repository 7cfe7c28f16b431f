//! The `load_tests` command.
//!
//! Invariant: the exit code is 0 when no request failed, 1 when a request failed, 2 when no run took place,
//! and 130 when the run was interrupted.

mod cli;

fn main() -> std::process::ExitCode {
    cli::run()
}
