//! `mainstem quantize`: a model written with its matrices in other number formats.
//!
//! Invariant: the model appears under its name when it is whole; stopped by a signal, or failed, the command leaves nothing
//! behind.

mod calibrate;

use super::escape::one_line;
use super::spinner::{self, Spinner};
use super::start;
use super::{INTERRUPTED, print};
use crate::config::{Config, ConfigError, Overrides, Source};
use crate::formats::save::Existing;
use crate::model::importance::Choice;
use crate::model::quantize::{self, Format, Part, Target};
use crate::model::source::{ModelRef, ModelSource};
use crate::telemetry;
use anyhow::{Context, Result};
use calibrate::Calibration;
use clap::{Args, ValueEnum, ValueHint};
use indicatif::HumanBytes;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

/// Write a model with its matrices in other number formats.
///
/// What --weights would code at every start is coded once. A place that ends in .gguf becomes a GGUF file, any other a folder
/// with safetensors; both are loaded without --weights, to the same answers as the model with it, or with --codes and --calibrate
/// to nearer ones. docs/quantization.md has the formats and the form of the files.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem quantize path/to/model models/small --weights q4
  mainstem quantize path/to/model models/small --weights q4 --calibrate text.txt
  mainstem quantize hf:owner/name models/small --weights 'head=f16,*.down_proj.*=q6,q4'
  mainstem quantize model-f16.gguf model-q4_K.gguf --weights q4_K
  mainstem quantize model-f16.gguf models/small --weights q4      in formats that GGUF does not have")]
pub struct QuantizeArgs {
    /// Folder, GGUF file or hf:owner/name[@revision]
    #[arg(value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model: String,
    /// Where to write it: NAME.gguf, or a folder
    #[arg(value_name = "OUT", value_hint = ValueHint::AnyPath)]
    out: PathBuf,
    /// Number formats of matrices, such as q4 or "head=q6,q4".
    #[arg(long, value_name = "RULES")]
    weights: String,
    /// How codes are chosen: as the formats' papers have it (equations, unless --calibrate is given), or so that the squares of
    /// what is lost sum up to little.
    #[arg(long, value_name = "WAY")]
    codes: Option<CodesName>,
    /// Text (UTF-8) that the model reads first: errors count by what columns are multiplied by there. Goes with least-squares.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    calibrate: Option<PathBuf>,
    /// Chunks of that text to read, of 512 tokens or what the model was made for.
    #[arg(long, value_name = "N", requires = "calibrate", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    calibrate_chunks: u32,
    /// How it is written, whatever OUT is called.
    #[arg(long, value_name = "FORMAT")]
    format: Option<FormatName>,
    /// Replace what is at OUT, if it is a written model.
    #[arg(long)]
    force: bool,
    /// Specification to read the model by, instead of its own or the shipped one; what is written of a hub's folder gets it as its own.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    spec: Option<PathBuf>,
    /// Threads that code numbers, and read the text of --calibrate; 0 is one for each core.
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FormatName {
    Gguf,
    Safetensors,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum CodesName {
    Equations,
    LeastSquares,
}

/// How codes are to be chosen.
enum Way {
    Equations,
    /// Columns count by a text's, or all alike.
    LeastSquares(Option<Calibration>),
}

/// Does what the arguments say, and tells what came of it.
pub fn run(args: QuantizeArgs) -> Result<ExitCode> {
    let way = args.way()?;
    let (mut config, target) = args.layers()?;
    telemetry::start_log(&config.log, || spinner::Stderr);
    let begun = Instant::now();
    let mut source = opened(&mut config)?;
    let progress = source.progress.clone();
    match chosen(way, &config, &source, &target)? {
        Some(choice) => source.codes = choice,
        None => return Ok(ExitCode::from(INTERRUPTED)),
    }
    let written = {
        let _spinner = Spinner::measured("writing the weights", progress.clone());
        let target = target.clone();
        until_stopped(move || quantize::quantize(&source, &target), || progress.stop())?
    };
    match written {
        Some(parts) => {
            print("summary", &summary(&target.path, &parts, begun.elapsed())).map(|()| ExitCode::SUCCESS)
        }
        None => Ok(ExitCode::from(INTERRUPTED)),
    }
}

impl QuantizeArgs {
    fn way(&self) -> Result<Way, ConfigError> {
        let chunks = self.calibrate_chunks as usize;
        let calibration = self.calibrate.clone().map(|text| Calibration { text, chunks });
        match (self.codes, calibration) {
            (None | Some(CodesName::Equations), None) => Ok(Way::Equations),
            (Some(CodesName::Equations), Some(_)) => {
                let message = "--calibrate goes with --codes least-squares: equations know no text";
                Err(ConfigError { origin: Source::CommandLine, message: message.to_owned() })
            }
            (_, calibration) => Ok(Way::LeastSquares(calibration)),
        }
    }

    /// The configuration, and where to write.
    fn layers(self) -> Result<(Config, Target), ConfigError> {
        let mut flags = Overrides::default();
        flags.set("model.path", Some(self.model));
        flags.set("model.spec", self.spec.map(|path| path.to_string_lossy().into_owned()));
        flags.set("model.weights", Some(self.weights));
        flags.set("device.threads", self.threads);
        flags.set_default("log.level", "warn");
        let config = Config::of_process(self.config.as_deref(), flags)?;
        let is_named_gguf = self.out.extension().is_some_and(|extension| extension == "gguf");
        let format = match self.format {
            Some(FormatName::Gguf) => Format::Gguf,
            Some(FormatName::Safetensors) if is_named_gguf => {
                let message = format!("--format: {} would be a folder of safetensors", self.out.display());
                return Err(ConfigError { origin: Source::CommandLine, message });
            }
            Some(FormatName::Safetensors) => Format::Safetensors,
            None if is_named_gguf => Format::Gguf,
            None => Format::Safetensors,
        };
        let existing = if self.force { Existing::Replace } else { Existing::Refuse };
        let (spec, threads) = (config.model.spec.clone(), config.device.threads);
        Ok((config, Target { path: self.out, format, existing, spec, threads }))
    }
}

/// The configured model, on this machine from here on.
fn opened(config: &mut Config) -> Result<ModelSource> {
    config.model = start::fetched(config.model.clone(), &config.hub)?;
    let _spinner = Spinner::start("opening the model");
    start::source(&ModelRef::parse(&config.model.path)?, &config.model)
}

/// How codes are chosen, when a text has been read that is for that; `None` if a signal came. What cannot be written is refused
/// before.
fn chosen(way: Way, config: &Config, source: &ModelSource, target: &Target) -> Result<Option<Choice>> {
    let calibration = match way {
        Way::Equations => return Ok(Some(Choice::Equations)),
        Way::LeastSquares(None) => return Ok(Some(Choice::LeastSquares(None))),
        Way::LeastSquares(Some(calibration)) => calibration,
    };
    quantize::check(source, target)?;
    let prepared = calibration.prepare(config, &source.progress).context("--calibrate")?;
    let importance = until_stopped(move || prepared.run(), || source.progress.stop());
    // A signal that came with the last step found nothing left to stop.
    let importance = importance.context("--calibrate")?.filter(|_| !source.progress.is_stopped());
    Ok(importance.map(|importance| Choice::LeastSquares(Some(Arc::new(importance)))))
}

/// Does the work on a thread of its own. A signal stops it, and it is waited for; then there is no answer.
fn until_stopped<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
    stop: impl Fn(),
) -> Result<Option<T>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot listen for signals")?.block_on(async {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        let (mut interrupt, mut terminate) =
            (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
        let (sender, mut answer) = oneshot::channel();
        // Whoever asked waits for the answer.
        std::thread::spawn(move || _ = sender.send(work()));
        tokio::select! {
            answer = &mut answer => return answer.context("the thread that does it has panicked")?.map(Some),
            _ = interrupt.recv() => stop(),
            _ = terminate.recv() => stop(),
        }
        match answer.await {
            // It was done before it heard of it.
            Ok(Ok(done)) => Ok(Some(done)),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    })
}

/// A line for each number format, one for all, and the place.
fn summary(path: &Path, parts: &[Part], took: Duration) -> String {
    let mut text = String::new();
    let mut line = |ty: &str, tensors: usize, numbers: usize, before: usize, after: usize| {
        let (from, to) = (HumanBytes(before as u64).to_string(), HumanBytes(after as u64).to_string());
        let bits = after as f64 * 8.0 / numbers.max(1) as f64;
        let _ = writeln!(
            text,
            "{ty:<12} {tensors:>6} tensors  {from:>12} -> {to:>12}  {bits:>7.4} bits a number"
        );
    };
    for part in parts {
        line(part.ty.name(), part.tensors, part.numbers, part.before, part.after);
    }
    let sum = |of: fn(&Part) -> usize| parts.iter().map(of).sum();
    line("all", sum(|p| p.tensors), sum(|p| p.numbers), sum(|p| p.before), sum(|p| p.after));
    let place = path.display().to_string();
    let _ = writeln!(text, "written to {} in {:.1} s", one_line(&place), took.as_secs_f64());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;
    use mainstem_kernels::QuantType;
    use std::process::Command;
    use std::sync::mpsc;

    /// The listeners are there before the work begins, so the signal cannot come too early.
    #[test]
    fn a_signal_stops_the_work_and_it_is_waited_for() {
        let (stop, stopped) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        let work = move || -> Result<()> {
            let id = std::process::id().to_string();
            assert!(Command::new("kill").args(["-s", "INT", &id]).status()?.success());
            stopped.recv_timeout(Duration::from_secs(60))?;
            end.send(()).context("the test waits")?;
            bail!("stopped")
        };
        let answer = until_stopped(work, || stop.send(()).expect("the work waits for it")).unwrap();
        assert!(answer.is_none() && ended.try_recv().is_ok());
    }

    #[test]
    fn work_that_ends_by_itself_has_its_answer_or_its_error() {
        assert_eq!(until_stopped(|| Ok(7), || ()).unwrap(), Some(7));
        let failed = until_stopped::<()>(|| bail!("full"), || ()).unwrap_err();
        assert_eq!(failed.to_string(), "full");
        assert!(
            until_stopped::<()>(|| panic!("on purpose"), || ()).unwrap_err().to_string().contains("panicked")
        );
    }

    #[test]
    fn a_summary_adds_up() {
        let part = |ty, tensors, numbers, before, after| Part { ty, tensors, numbers, before, after };
        let parts = [part(QuantType::F32, 3, 64, 256, 256), part(QuantType::Q8_0, 1, 1024, 4096, 1088)];
        let text = summary("a\nb".as_ref(), &parts, Duration::from_millis(1540));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1].join(" "), "q8_0 1 tensors 4.00 KiB -> 1.06 KiB 8.5000 bits a number");
        assert_eq!(lines[2].join(" "), "all 4 tensors 4.25 KiB -> 1.31 KiB 9.8824 bits a number");
        assert_eq!((lines.len(), lines[3].last()), (4, Some(&"s")));
    }
}
