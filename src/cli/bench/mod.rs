//! `mainstem bench`: measures the speed of a model in the engine, or with `--fake-device` the speed of
//! everything around a model.
//!
//! Invariant: every reported sample was measured in this run, and requested tests that were not run are
//! noted.

mod client;
mod formats;
mod frontend;
mod host_part;
mod measure;
mod page;
mod partition;
pub(super) mod report;
mod roofline;
mod sample;
mod speculation;
mod suite;
mod timeline;

use super::flags::{ConfigFlags, MODEL_HELP, SpeculationFlags};
use super::plan::load_with_several_devices;
use super::start::merge_reports;
use super::{INTERRUPTED, start_log};
use crate::actors::device::ExecutorFactory;
use crate::actors::{Engine, EngineSetup, engine};
use crate::config::{Config, ConfigError, ConfigSource, Overrides};
use crate::model::executor::ExecutorReport;
use crate::telemetry;
use crate::text::Tokenizer;
use actix_web::rt::{self, System, time};
use anyhow::{Context, Error, Result, ensure};
use clap::{Args, ValueEnum, ValueHint};
use indicatif::{ProgressBar, ProgressStyle};
use partition::PartitionTests;
use report::BenchReport;
use speculation::SpeculationTests;
use speculation::rows::SpeculationRow;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use suite::SuiteArgs;
use tokio::select;

/// Default slots with `--fake-device`.
const FAKE_SLOTS: i64 = 256;

/// Interval of the metrics upkeep, which sorts observations into buckets; the same as in a server.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Measure speed: prefill, decode at depth, and fused decode of several sequences. With --draft or
/// --speculation, decoding with and without speculation.
///
/// The tests run in the engine, without HTTP, with greedy sampling and reproducible prompts. Slots, token
/// budget and KV cache are made large enough for them. docs/benchmarks.md explains each value.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem bench                                    the built-in demo model
  mainstem bench path/to/model --depth 0,1024 --format json --output bench.json
  mainstem bench --synthetic 1B --dtype bf16 --prefill 512 --sequences 1,8
  mainstem bench --draft demo-draft                 speed with and without speculative decoding
  mainstem bench --partition path/to/model          compare partitions over four devices
  mainstem bench --fake-device --duration 10s       measure loop, text and HTTP without a model
  mainstem bench --fake-device --inflight --repeat 7   what the page of requests in flight costs")]
pub struct BenchArgs {
    #[arg(help = MODEL_HELP, value_name = "MODEL", value_hint = ValueHint::AnyPath,
          conflicts_with_all = ["synthetic", "fake_device"])]
    model_path: Option<String>,
    /// Model, in place of the argument MODEL.
    #[arg(short = 'm', long = "model", value_name = "MODEL", value_hint = ValueHint::AnyPath,
          conflicts_with_all = ["synthetic", "fake_device", "model_path"])]
    model_option: Option<String>,
    /// Model with random weights of this shape, such as 110M or 1B, instead of files.
    #[arg(long, value_name = "SHAPE", conflicts_with = "fake_device")]
    synthetic: Option<String>,
    /// Weight data type of the synthetic model.
    #[arg(long, value_name = "TYPE", value_parser = ["f16", "bf16", "f32"], requires = "synthetic")]
    dtype: Option<String>,
    #[command(flatten)]
    run: RunOptions,
    /// Consumer threads with --fake-device, and HTTP worker threads.
    #[arg(long, value_name = "N")]
    workers: Option<u32>,
    #[command(flatten)]
    speculation: SpeculationFlags,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Options of the tests and of the report.
#[derive(Args)]
struct RunOptions {
    #[command(flatten)]
    suite: SuiteArgs,
    /// Samples per test, after one warm-up run.
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,
    /// Report format.
    #[arg(long, value_name = "FORMAT", default_value = "table")]
    format: ReportFormat,
    /// Write the report to this file instead of standard output.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    output: Option<PathBuf>,
    /// Write a picture (SVG) of the last step to this file: reads, writes and layers.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          conflicts_with_all = ["fake_device", "partition", "SpeculationFlags"])]
    offload_trace: Option<PathBuf>,
    #[command(flatten)]
    partition_tests: PartitionTests,
    #[command(flatten)]
    speculation_tests: SpeculationTests,
    /// Measure everything around the model, with a fake device without delay; default 256 slots.
    #[arg(long, conflicts_with = "SpeculationFlags")]
    fake_device: bool,
    /// With --fake-device: compare steps with and without a client that shows the sequences in flight.
    #[arg(long, requires = "fake_device")]
    inflight: bool,
    /// Measurement time per layer around the fake device, such as 10s or 500ms.
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    duration: Duration,
}

/// Format of a report.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum ReportFormat {
    Table,
    Json,
    Csv,
}

/// Runs the tests and writes the report. The exit code is 0, or 130 after an interruption. Fails, after the
/// report, if speculation changed a text.
pub fn run(args: BenchArgs) -> Result<ExitCode> {
    let (run, file, flags) = args.layers();
    let config = match run.partition_tests.partition {
        true => load_with_several_devices(file.as_deref(), flags)?.0,
        false => Config::from_process(file.as_deref(), flags)?,
    };
    start_log(&config)?;
    // Opened first, so that an unwritable file fails before the measurement.
    let mut to: Box<dyn Write> = match &run.output {
        Some(path) => Box::new(create(path)?),
        None => Box::new(io::stdout()),
    };
    let mut trace_to = run.offload_trace.as_deref().map(create).transpose()?;
    let report = System::new().block_on(measure_all(&run, config))?;
    if let (Some(to), Some(timeline)) = (&mut trace_to, &report.timeline) {
        to.write_all(timeline::svg(timeline).as_bytes()).context("cannot write the picture")?;
    }
    let text = match run.format {
        ReportFormat::Table => report.table(),
        ReportFormat::Json => report.json(),
        ReportFormat::Csv => report.csv(),
    };
    to.write_all(text.as_bytes()).and_then(|()| to.flush()).context("cannot write the report")?;
    let has_changed_text = report.speculation.iter().any(SpeculationRow::has_changed_text);
    ensure!(!has_changed_text, "the text differs with and without speculation; this is a bug");
    Ok(if report.interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

/// Creates a file.
fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Runs the tests until their end or a SIGINT.
async fn measure_all(run: &RunOptions, config: Config) -> Result<BenchReport> {
    // Metrics are recorded and maintained as in a server, because their cost is part of the measurement.
    let metrics = telemetry::install(None);
    let upkeep = rt::spawn(async move {
        let mut ticks = time::interval(UPKEEP_INTERVAL);
        loop {
            ticks.tick().await;
            metrics.run_upkeep();
        }
    });
    let mut report = BenchReport::new(&config, run.repeat);
    let progress = progress_bar();
    let measuring = async {
        let (report, progress, repeat) = (&mut report, &progress, run.repeat);
        if run.inflight {
            page::measure(config, run.duration, repeat, report, progress).await
        } else if run.fake_device {
            frontend::measure(config, run.duration, repeat, report, progress).await
        } else if run.partition_tests.partition {
            let tokens = run.suite.decode_tokens();
            partition::measure(config, &run.partition_tests, tokens, repeat, report, progress).await
        } else if run.speculation_tests.is_wanted && config.speculation.drafter().is_some() {
            let (suite, tests) = (&run.suite, &run.speculation_tests);
            speculation::measure(config, suite, tests, repeat, report, progress).await
        } else {
            let is_traced = run.offload_trace.is_some();
            measure::measure(config, &run.suite, (repeat, is_traced), report, progress).await
        }
    };
    let interrupted = select! {
        outcome = measuring => outcome.map(|()| false)?,
        caught = tokio::signal::ctrl_c() => caught.map(|()| true).context("cannot listen for signals")?,
    };
    report.interrupted = interrupted;
    progress.finish_and_clear();
    upkeep.abort();
    Ok(report)
}

impl BenchArgs {
    /// Returns the test options, the configuration file, if given, and the flags that override it.
    fn layers(mut self) -> (RunOptions, Option<PathBuf>, Overrides) {
        let mut flags = Overrides::default();
        let synthetic = self.synthetic.as_ref().map(|shape| match &self.dtype {
            Some(dtype) => format!("synthetic:{shape}:{dtype}"),
            None => format!("synthetic:{shape}"),
        });
        flags.set("model.path", synthetic.or(self.model_path).or(self.model_option));
        flags.set("server.workers", self.workers);
        flags.set_default("log.level", "warn");
        // Sequences of a test begin together, rather than a few in each step.
        flags.set_default("scheduler.itl_target", "0s");
        if self.run.fake_device {
            flags.set_default("scheduler.slots", FAKE_SLOTS);
        }
        self.run.speculation_tests.is_wanted = self.speculation.are_given();
        self.speculation.add_to(&mut flags);
        let file = self.config.add_to(&mut flags);
        (self.run, file, flags)
    }
}

/// Starts an engine. Also returns the merged reports of its devices.
async fn start_engine(
    setup: EngineSetup,
    tokenizer: Arc<Tokenizer>,
    factories: Vec<Vec<ExecutorFactory>>,
) -> Result<(Engine, ExecutorReport)> {
    let built = Arc::new(Mutex::new(Vec::new()));
    let watched = |mut factory: ExecutorFactory| -> ExecutorFactory {
        let built = built.clone();
        let mut is_first = true;
        Box::new(move |stage| {
            let executor = factory(stage)?;
            if std::mem::take(&mut is_first) {
                built.lock().unwrap_or_else(PoisonError::into_inner).push(executor.report());
            }
            Ok(executor)
        })
    };
    let watch_all = |stage: Vec<ExecutorFactory>| stage.into_iter().map(watched).collect();
    let engine = engine::start(setup, tokenizer, factories.into_iter().map(watch_all).collect()).await?;
    let built = std::mem::take(&mut *built.lock().unwrap_or_else(PoisonError::into_inner));
    Ok((engine, merge_reports(built)))
}

/// Returns an error in the command line.
fn usage(message: impl Into<String>) -> Error {
    ConfigError { origin: ConfigSource::CommandLine, message: message.into() }.into()
}

/// Creates a progress bar. It is drawn only if stderr is a terminal.
fn progress_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}");
    ProgressBar::new(0).with_style(style.expect("the template is well formed; anything else is a bug"))
}

/// Parses a time such as `5s` or `200ms`, greater than zero and at most a day.
fn duration(text: &str) -> Result<Duration, String> {
    let (number, seconds) = match (text.strip_suffix("ms"), text.strip_suffix('s')) {
        (Some(number), _) => (number, 1e-3),
        (None, Some(number)) => (number, 1.0),
        (None, None) => return Err("the unit must be s or ms".to_owned()),
    };
    let number: f64 = number.trim().parse().map_err(|_| "must begin with a number".to_owned())?;
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if !time.is_zero() && time <= Duration::from_secs(86_400) => Ok(time),
        _ => Err("must be greater than zero and at most a day".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: BenchArgs,
    }

    fn config(line: &str) -> Config {
        let alone = Alone::try_parse_from(["bench"].into_iter().chain(line.split(' '))).unwrap();
        let (_, file, flags) = alone.args.layers();
        Config::load(file.as_deref(), flags).unwrap()
    }

    #[test]
    fn flags_override_the_defaults_of_bench() {
        Alone::command().debug_assert();
        let quiet = config("--fake-device");
        assert_eq!((quiet.scheduler.slots, quiet.log.level.as_str()), (256, "warn"));
        assert_eq!(quiet.scheduler.itl_target, None, "it would spread the beginnings of sequences");
        let set = config("--fake-device --slots 8 --log-level debug --workers 3");
        assert_eq!((set.scheduler.slots, set.log.level.as_str(), set.server.workers), (8, "debug", 3));
        let synthetic = config("--synthetic 1B --dtype f32 --repeat 1");
        assert_eq!((synthetic.scheduler.slots, synthetic.model.path.as_str()), (32, "synthetic:1B:f32"));
        let kv = config("--kv q4 --sparse-attention 0.25").kv;
        assert_eq!((kv.ty, kv.sparse_attention.floor_of(100)), (mainstem_kernels::QuantType::G4_B64, 25));
    }

    #[test]
    fn durations_have_a_unit() {
        assert_eq!(duration("200ms"), Ok(Duration::from_millis(200)));
        assert_eq!(duration("1.5 s"), Ok(Duration::from_millis(1500)));
        for wrong in ["", "5", "0s", "-1s", "xs", "NaNs", "1e99s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }
}
