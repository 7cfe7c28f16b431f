//! Commands of the programs that tests start, without the environment variables that configure the program,
//! the hub's tools and API clients.

use std::ffi::OsStr;
use std::process::Command;

const FOREIGN: [&str; 4] = ["MAINSTEM_", "HF_", "OPENAI_", "OTEL_"];

/// Returns a command of the program under test.
pub fn mainstem() -> Command {
    alone(env!("CARGO_BIN_EXE_mainstem"))
}

/// Returns a command of another program, which may start the program under test or replace it.
pub fn alone(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if FOREIGN.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes())) {
            command.env_remove(name);
        }
    }
    command
}
