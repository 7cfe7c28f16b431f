//! The programs that tests start, by themselves: what the environment of whoever runs the tests says to the
//! program, to the hub's tools and to clients of the API, it says to nobody here.

use std::ffi::OsStr;
use std::process::Command;

const FOREIGN: [&str; 3] = ["MAINSTEM_", "HF_", "OPENAI_"];

/// The program under test.
pub fn mainstem() -> Command {
    alone(env!("CARGO_BIN_EXE_mainstem"))
}

/// A program that may start the one under test, or stand in for it.
pub fn alone(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if FOREIGN.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
            command.env_remove(name);
        }
    }
    command
}
