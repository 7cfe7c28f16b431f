//! `mainstem models`: the models in the hub's cache.
//!
//! Invariant: the cache is that of `serve` and of the hub's own tools.

use super::{print, start_log, to_json};
use crate::config::{Config, Overrides};
use crate::hub::{self, CachedModel, Hub, HubReference, ProgressBars};
use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand, ValueHint};
use indicatif::HumanBytes;
use serde_json::json;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::PathBuf;

/// List, download and remove the models in the hub's cache.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem models list
  mainstem models pull owner/name            download it, as serve hf:owner/name does
  mainstem models pull owner/name@revision
  mainstem models remove owner/name")]
pub struct ModelsArgs {
    #[command(subcommand)]
    action: Action,
    /// Configuration file, of which hub.cache and hub.endpoint are used.
    #[arg(long, global = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Action {
    /// List the models in the cache, with their sizes and revisions.
    #[command(visible_alias = "ls")]
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Download a model, or what is missing of it, and print its folder.
    Pull {
        /// owner/name[@revision]
        model: String,
    },
    /// Remove a model with all its revisions.
    #[command(visible_alias = "rm")]
    Remove {
        /// owner/name
        model: String,
        /// Do not ask.
        #[arg(long, short)]
        yes: bool,
    },
}

/// Lists, downloads or removes models.
pub fn run(args: ModelsArgs) -> Result<()> {
    let config = Config::from_process(args.config.as_deref(), Overrides::default())?;
    start_log(&config)?;
    let hub = || Hub::new(&config.hub, |variable| std::env::var(variable).ok());
    match args.action {
        Action::List { json } => {
            let models = hub()?.cached()?;
            print("list", &if json { to_json(&as_json(&models)) } else { as_text(&models) })
        }
        Action::Pull { model } => {
            let folder = hub::fetch(&parse(&model)?, &config.hub, &mut ProgressBars::default())?;
            print("folder", &format!("{}\n", folder.display()))
        }
        Action::Remove { model, yes } => {
            ensure!(!model.contains('@'), "{model}: a model is removed with all its revisions; leave out @");
            let (hub, reference) = (hub()?, parse(&model)?);
            let found = hub.cached_model(&reference)?;
            if !yes && !is_confirmed(&found)? {
                return print("answer", "nothing was removed\n");
            }
            let removed = hub.remove(&reference)?;
            print("result", &format!("removed {}: {}\n", removed.repository, HumanBytes(removed.bytes)))
        }
    }
}

/// Parses `owner/name[@revision]`, with or without `hf:`.
fn parse(model: &str) -> Result<HubReference> {
    match HubReference::has_prefix(model) {
        true => HubReference::parse(model),
        false => HubReference::parse(&format!("hf:{model}")),
    }
}

/// Asks whether to remove a model. Fails if there is nobody to ask.
fn is_confirmed(model: &CachedModel) -> Result<bool> {
    let CachedModel { repository, bytes, .. } = model;
    ensure!(
        std::io::stdin().is_terminal(),
        "{repository}: --yes is required, as there is no terminal to ask at"
    );
    print!("Remove {repository} ({})? [y/N] ", HumanBytes(*bytes));
    std::io::stdout().flush().context("cannot ask")?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).context("cannot read the answer")?;
    Ok(["y", "yes"].contains(&answer.trim().to_lowercase().as_str()))
}

fn as_json(models: &[CachedModel]) -> serde_json::Value {
    let revisions = |model: &CachedModel| {
        let revisions = model.revisions.iter().map(|revision| {
            json!({"name": revision.name, "commit": revision.commit, "is_loadable": revision.is_loadable})
        });
        revisions.collect::<Vec<_>>()
    };
    let models = models.iter().map(|model| {
        json!({
            "name": model.repository,
            "folder": model.folder,
            "bytes": model.bytes,
            "revisions": revisions(model),
        })
    });
    models.collect()
}

fn as_text(models: &[CachedModel]) -> String {
    if models.is_empty() {
        return "no models; mainstem models pull owner/name downloads one\n".into();
    }
    let width = models.iter().map(|model| model.repository.len()).max().unwrap_or(0);
    let mut text = String::new();
    for CachedModel { repository, bytes, revisions, .. } in models {
        let revisions = revisions.iter().map(|revision| match revision.is_loadable {
            true => revision.name.clone(),
            false => format!("{} (incomplete)", revision.name),
        });
        let revisions = revisions.collect::<Vec<_>>().join(", ");
        let size = HumanBytes(*bytes).to_string();
        let _ = writeln!(text, "{repository:<width$}  {size:>10}  {revisions}");
    }
    text
}
