//! `mainstem completions`: a script that completes this command line in a shell.
//!
//! Invariant: the script is made from the very definitions that the arguments are parsed by.

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;

/// Print a script that completes this command line in a shell.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem completions bash > ~/.local/share/bash-completion/completions/mainstem
  mainstem completions zsh > ~/.zfunc/_mainstem
  mainstem completions fish > ~/.config/fish/completions/mainstem.fish")]
pub struct CompletionsArgs {
    /// The shell.
    shell: Shell,
}

/// Prints the script for `command`.
pub fn run(args: CompletionsArgs, command: &mut Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, command.get_name().to_string(), &mut script);
    std::io::stdout().write_all(&script).context("cannot write the script")
}
