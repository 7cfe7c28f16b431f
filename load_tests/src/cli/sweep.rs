//! `load_tests sweep`: sends one load at increasing rates or numbers of users.

use std::{io::Write, path::PathBuf, sync::Arc};

use clap::{ArgGroup, Args, ValueHint};
use load_tests::{
    measure::Stats,
    report::{Distribution, html, json, live::LiveDisplay},
    run::Progress,
    sweep::{self, Ladder, LoadUnit, StepSize, SweepSettings, SweepStep},
};

use super::{
    CommandOutcome,
    flags::{LimitFlags, SettingsFlags},
    outputs::Output,
};

/// Increase the rate or the number of users until the server is saturated, and report the knee
#[derive(Args)]
#[command(group = ArgGroup::new("ladder").required(true))]
pub struct SweepArgs {
    /// Requests per second: comma-separated values and ranges, such as 1,2,5 or 1..64x2 or 10..100+10
    #[arg(long, group = "ladder", value_name = "LADDER", value_parser = Ladder::rates)]
    rates: Option<Ladder>,

    /// Numbers of users of a closed loop, same syntax
    #[arg(long, group = "ladder", value_name = "LADDER", value_parser = Ladder::users)]
    users: Option<Ladder>,

    /// Size of each step as a number of requests or a duration: 200, 30s, 2m
    #[arg(long, default_value = "30s", value_name = "SIZE")]
    step: StepSize,

    /// Number of saturated steps to run before stopping
    #[arg(long, default_value_t = 1, value_name = "STEPS")]
    beyond: usize,

    /// Number of bisection steps between the knee and the first saturated step
    #[arg(long, default_value_t = 0, value_name = "STEPS")]
    refine: usize,

    #[command(flatten)]
    settings: SettingsFlags,
    #[command(flatten)]
    limits: LimitFlags,
    #[command(flatten)]
    outputs: OutputFlags,
}

#[derive(Args)]
#[command(next_help_heading = "Output")]
struct OutputFlags {
    /// Name of the sweep in the report
    #[arg(long, default_value = "Sweep", value_name = "TEXT")]
    label: String,

    /// Write the results of all steps to this file, as a JSON array of the objects that `run --json` writes
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    json: Option<PathBuf>,

    /// Write an HTML report with plots to this file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    html: Option<PathBuf>,
}

/// Runs `sweep`: one run per rate or number of users.
pub fn run(args: &SweepArgs, progress: &Arc<Progress>) -> anyhow::Result<CommandOutcome> {
    let settings = args.settings.settings(Some(args.outputs.label.clone()))?;
    let ladder = args.rates.as_ref().or(args.users.as_ref()).expect("one of the two is required");
    let climb = SweepSettings {
        ladder: ladder.clone(),
        size: args.step,
        limits: args.limits.limits(),
        beyond: args.beyond,
        refine: args.refine,
    };
    let json = args.outputs.json.as_deref().map(Output::open).transpose()?;
    let html = args.outputs.html.as_deref().map(Output::open).transpose()?;
    let unit = ladder.unit();
    let watched = || LiveDisplay::start(Arc::clone(progress), None, &args.outputs.label);
    let mut live = Some(watched());
    print_line(TABLE_HEADER);
    let sweep = sweep::sweep(&settings, &climb, progress, &mut |step| {
        // The live display must be off while a line is printed.
        live = None;
        print_line(&format_step(unit, step));
        live = Some(watched());
    });
    drop(live);
    let sweep = sweep?;
    print_line(&sweep::describe_knee(&sweep));
    if let Some(file) = json {
        let steps = sweep.steps.iter().map(|step| json::json(&step.run, None)).collect();
        let steps = serde_json::Value::Array(steps);
        file.write(|out| Ok(writeln!(out, "{steps:#}")?))?;
    }
    if let Some(file) = html {
        let page = html::page(&args.outputs.label, &sweep::sections(&sweep, &args.outputs.label));
        file.write(|out| Ok(out.write_all(page.as_bytes())?))?;
    }
    // Failed requests are a result of a sweep, not an error.
    Ok(CommandOutcome::from_failures(0, progress))
}

/// Prints a line to stdout; a closed stdout is not an error.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

const TABLE_HEADER: &str =
    "        load  requests/s  output tok/s  TTFT p50 ms  TTFT p99 ms  ITL p50 ms  e2e p99 ms  failed";

/// Formats one step as a line under [`TABLE_HEADER`].
fn format_step(unit: LoadUnit, step: &SweepStep) -> String {
    let run = &step.run;
    let latency = |of: &Option<Distribution>, value: fn(&Stats) -> f64| match of {
        Some(distribution) => format!("{:.2}", value(&distribution.stats)),
        None => "-".into(),
    };
    let latencies = &run.latencies;
    let mut line = format!(
        "{:>12}  {:>10.2}  {:>12.1}  {:>11}  {:>11}  {:>10}  {:>10}  {:>6}",
        unit.name(step.x),
        run.request_throughput,
        run.output_throughput,
        latency(&latencies.ttft, |stats| stats.median),
        latency(&latencies.ttft, |stats| stats.p99),
        latency(&latencies.itl, |stats| stats.median),
        latency(&latencies.e2el, |stats| stats.p99),
        run.counts.failed,
    );
    if let Some(reason) = &step.saturated {
        line += &format!("  saturated: {reason}");
    }
    line
}
