//! `mainstem completions`: prints a shell completion script.
//!
//! Invariant: the script is generated from the definitions that parse the arguments.

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;

/// Print a shell completion script.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem completions bash > ~/.local/share/bash-completion/completions/mainstem
  mainstem completions zsh > ~/.zfunc/_mainstem
  mainstem completions fish > ~/.config/fish/completions/mainstem.fish")]
pub struct CompletionsArgs {
    /// Shell to generate the script for.
    shell: Shell,
}

/// Prints the completion script of `command`.
pub fn run(args: CompletionsArgs, command: &mut Command) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, command, command.get_name().to_string(), &mut script);
    std::io::stdout().write_all(&script).context("cannot write the script")
}
