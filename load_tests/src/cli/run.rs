//! `load_tests run`: sends one load and reports the results.

use std::{io::Write, sync::Arc};

use clap::Args;
use load_tests::{
    measure,
    report::{live::LiveDisplay, table},
    run::{self, Progress},
};

use super::{
    CommandOutcome,
    flags::{LimitFlags, SettingsFlags},
    outputs::OutputFlags,
};

/// Send one load and report the results
#[derive(Args)]
pub struct RunArgs {
    #[command(flatten)]
    settings: SettingsFlags,
    #[command(flatten)]
    limits: LimitFlags,
    #[command(flatten)]
    outputs: OutputFlags,
}

/// Runs `run`: one load run.
pub fn run(args: &RunArgs, progress: &Arc<Progress>) -> anyhow::Result<CommandOutcome> {
    let settings = args.settings.settings(args.outputs.label.clone())?;
    let outputs = args.outputs.open()?;
    let live = LiveDisplay::start(Arc::clone(progress), Some(settings.load.requests), "");
    let record = run::run(&settings, progress)?;
    drop(live);
    let report = measure::report(&settings, &record, &args.limits.limits());
    let written = outputs.write(&report, &record);
    // A closed stdout is not an error.
    let _ = write!(std::io::stdout(), "{}", table::table(&report));
    written?;
    Ok(CommandOutcome::from_failures(report.counts.failed, progress))
}
