//! `mainstem spec`: the built-in specifications, and the comparison of one with a model.
//!
//! Invariant: no weights are read.

use super::escape::one_line;
use super::{FAILURE, print, start, start_log, to_json};
use crate::config::{Config, Overrides};
use crate::model::spec::SpecFile;
use crate::model::spec_check::{Names, SpecCheck};
use crate::specs;
use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueHint};
use serde_json::json;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// List, show and check model specifications.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem spec list                          the families that are built in
  mainstem spec show llama                    a specification, with what it inherits
  mainstem spec check path/to/model           compare a model with its specification, or the nearest one
  mainstem spec check path/to/model --spec my.toml")]
pub struct SpecArgs {
    #[command(subcommand)]
    action: Action,
    /// Configuration file, of which hub.cache and hub.endpoint are used.
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Action {
    /// List the built-in specifications with the model types that select them.
    #[command(visible_alias = "ls")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print a built-in specification with what it inherits, as one file.
    Show {
        /// Name of the specification, or a model type.
        name: String,
    },
    /// Compare a specification with a model's config.json and tensors, and list all that does not fit. The
    /// exit code is 1 if something does not. A hub model is downloaded first.
    Check {
        /// Folder of the model, or hf:owner/name.
        #[arg(value_name = "MODEL", value_hint = ValueHint::DirPath)]
        model: String,
        /// The specification. Default: spec.toml in the folder, or the built-in one for the model's type, or
        /// else the nearest.
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        spec: Option<PathBuf>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Lists, shows or checks specifications. Returns the exit code.
pub fn run(args: SpecArgs) -> Result<ExitCode> {
    let mut config = Config::from_process(args.config.as_deref(), Overrides::default())?;
    start_log(&config)?;
    match args.action {
        Action::List { json } => print("list", &list(json)?)?,
        Action::Show { name } => print("specification", &show(&name)?)?,
        Action::Check { model, spec, json } => {
            config.model.path = model;
            let model = start::fetch_model(config.model, &config.hub)?;
            let check = SpecCheck::of_folder(Path::new(&model.path), spec.as_deref())?;
            print("comparison", &if json { to_json(&check) } else { as_text(&check) })?;
            if !check.fits() {
                return Ok(ExitCode::from(FAILURE));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn list(json: bool) -> Result<String> {
    let mut text = String::new();
    let mut entries = Vec::new();
    for (file, _) in specs::ALL {
        let name = specs::name_of(file);
        let spec = SpecFile::named(name)?;
        let _ = writeln!(text, "{name:24}{}", spec.model_types().join(", "));
        entries.push(json!({"name": name, "model_types": spec.model_types()}));
    }
    Ok(if json { to_json(&entries) } else { text })
}

fn show(name: &str) -> Result<String> {
    let spec = SpecFile::named(name).or_else(|error| SpecFile::for_model_type(name).map_err(|_| error))?;
    toml::to_string(spec.entries()).context("the specification cannot be written")
}

fn as_text(check: &SpecCheck) -> String {
    let mut text = format!("model          {}\n", one_line(&check.model.display().to_string()));
    let how = if check.is_relative { ", the nearest: there is none for this type" } else { "" };
    let _ = writeln!(text, "specification  {}{how}", one_line(&check.specification));
    if let Some(nearest) = check.nearest.as_ref().filter(|_| !check.fits()) {
        let _ = writeln!(
            text,
            "nearest        {}, which has {} of the {} names of tensors",
            nearest.name, nearest.known, nearest.names
        );
    }
    let names = |names: &Names| match names.count {
        1 => names.pattern.clone(),
        count => format!("{} (x {count})", names.pattern),
    };
    section(&mut text, "does not fit", check.problems.iter().cloned());
    section(&mut text, "required, but not in the files", check.missing.iter().map(names));
    section(&mut text, "in the files, but not used", check.unknown.iter().map(names));
    section(&mut text, "keys of config.json that nothing reads", check.unread_keys.iter().cloned());
    text += &verdict(check);
    text
}

fn section(text: &mut String, title: &str, lines: impl Iterator<Item = String>) {
    let lines: Vec<String> = lines.collect();
    if !lines.is_empty() {
        let _ = writeln!(text, "\n{title}:");
        lines.iter().for_each(|line| _ = writeln!(text, "  {}", one_line(line)));
    }
}

fn verdict(check: &SpecCheck) -> String {
    match &check.nearest {
        _ if check.fits() => "\nThe specification fits the model.\n".to_owned(),
        Some(nearest) if check.is_relative => format!(
            "\nBegin the file spec.toml in the model's folder with these lines, add what differs, and check \
             again:\n\nbase = \"{}\"\nmodel_types = [\"{}\"]\n",
            nearest.name,
            one_line(&check.model_type).escape_default()
        ),
        _ => "\nThe specification does not fit the model.\n".to_owned(),
    }
}
