//! `mainstem quantize`: writes a model with its matrices in other number formats.
//!
//! Invariant: the output appears under its name only when it is complete. If the command fails or is stopped
//! by a signal, it leaves no files.

mod calibrate;

use super::escape::one_line;
use super::spinner::Spinner;
use super::start;
use super::{INTERRUPTED, print, start_log};
use crate::config::{Config, ConfigError, ConfigSource, Overrides};
use crate::export::{self, ExportTarget, FormatTotals, OutputFormat};
use crate::formats::save::Existing;
use crate::model::source::ModelSource;
use crate::quantize::{RoundingPolicy, WeightRules};
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

/// Help text of the argument MODEL.
const MODEL_HELP: &str = "Folder, GGUF file or hf:owner/name[@revision]";

/// Write a model with its matrices in other number formats.
///
/// Quantizes once what --weights would quantize at every start. A name that ends in .gguf becomes a GGUF
/// file, any other a folder with safetensors. Both load without --weights and give the same outputs as the
/// model with it; with --rounding and --calibrate they are closer to the original. docs/quantization.md
/// describes formats and files. --store writes the layers' weights in the layout of this CPU beside a model,
/// from where starts with --host-memory read them.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem quantize path/to/model models/small --weights q4
  mainstem quantize path/to/model models/small --weights q4 --calibrate text.txt
  mainstem quantize hf:owner/name models/small --weights 'head=f16,*.down_proj.*=q6,q4'
  mainstem quantize path/to/model model-q4_K.gguf --weights q4_K  in formats that GGUF has
  mainstem quantize model-f16.gguf model-q4_K.gguf --weights q4_K
  mainstem quantize model-f16.gguf models/small --weights q4      in formats that GGUF does not have
  mainstem quantize path/to/model models/small --weights q4 --store   with the store for --host-memory
  mainstem quantize models/small --store                              the store of a model that exists")]
pub struct QuantizeArgs {
    #[arg(help = MODEL_HELP, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    model: String,
    /// Output: NAME.gguf, or a folder; may be left out with --store
    #[arg(value_name = "OUT", value_hint = ValueHint::AnyPath, required_unless_present = "store")]
    out: Option<PathBuf>,
    /// Number formats of weight matrices, such as q4 or "head=q6,q4". Without OUT, those in which MODEL will
    /// be loaded.
    #[arg(long, value_name = "RULES", required_unless_present = "store")]
    weights: Option<String>,
    /// Also write the store of OUT, or that of MODEL if there is no OUT: the weights of its layers, as this
    /// machine's CPU holds them, in a folder beside the model, or in tiers.disk_path if none can be written
    /// there.
    #[arg(long)]
    store: bool,
    /// Rounding: to the nearest value, or minimizing the squared error (default with --calibrate).
    #[arg(long, alias = "codes", value_name = "METHOD", requires = "out")]
    rounding: Option<RoundingName>,
    /// Calibration text (UTF-8): weights errors by the activations on it. Requires least-squares rounding.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, requires = "out")]
    calibrate: Option<PathBuf>,
    /// Maximum chunks of the calibration text, of 512 tokens or the model's context length.
    #[arg(long, value_name = "N", requires = "calibrate", default_value_t = 32)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    calibrate_chunks: u32,
    /// Output format, overriding the extension of OUT.
    #[arg(long, value_name = "FORMAT", requires = "out")]
    format: Option<FormatName>,
    /// Replace an existing model at OUT.
    #[arg(long, requires = "out")]
    force: bool,
    /// Model specification file, instead of the model's own or the built-in one. If the model is a folder
    /// in Hugging Face's format, the output folder gets a copy.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    spec: Option<PathBuf>,
    /// Threads for quantization and calibration; 0 is one per core.
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
enum RoundingName {
    #[value(alias = "equations")]
    Nearest,
    LeastSquares,
}

/// Rounding of weights.
enum RoundingMethod {
    RoundToNearest,
    /// Minimizes the squared error; columns are weighted by a calibration text if there is one, else equally.
    LeastSquares(Option<Calibration>),
}

/// Quantizes the model, writes its store if that is wanted, and prints a summary. The exit code is 0, or 130
/// if a signal stopped it.
pub fn run(args: QuantizeArgs) -> Result<ExitCode> {
    let (way, wants_store) = (args.rounding_method()?, args.store);
    let (mut config, target) = args.into_config()?;
    start_log(&config)?;
    let mut source = open_model(&mut config)?;
    if let Some(target) = target {
        if !export_model(way, &config, source, &target)? {
            return Ok(ExitCode::from(INTERRUPTED));
        }
        if !wants_store {
            return Ok(ExitCode::SUCCESS);
        }
        // An absolute path is none of the names of built-in models.
        let path = target.path.canonicalize().with_context(|| target.path.display().to_string())?;
        config.model.path = path.to_str().context("the output path is not UTF-8")?.to_owned();
        config.model.weights = WeightRules::default();
        source = open_model(&mut config)?;
    }
    Ok(if write_stores(config, source)? { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) })
}

/// Writes the model in its new formats, and prints a summary. Returns whether no signal stopped it.
fn export_model(
    way: RoundingMethod,
    config: &Config,
    mut source: ModelSource,
    target: &ExportTarget,
) -> Result<bool> {
    let begun = Instant::now();
    match choose_rounding(way, config, &source, target)? {
        Some(choice) => source.rounding = choice,
        None => return Ok(false),
    }
    let progress = source.progress.clone();
    let written = {
        let _spinner = Spinner::with_progress("writing the weights", progress.clone());
        let target = target.clone();
        until_stopped(move || export::write_model(&source, &target), || progress.stop())?
    };
    let Some(parts) = written else { return Ok(false) };
    print("summary", &summary(&target.path, &parts, begun.elapsed()))?;
    Ok(true)
}

/// Writes the stores of a model, and prints their folders. Returns whether no signal stopped it.
fn write_stores(config: Config, source: ModelSource) -> Result<bool> {
    let (begun, progress) = (Instant::now(), source.progress.clone());
    let written = {
        let _spinner = Spinner::with_progress("writing the store", progress.clone());
        until_stopped(move || start::write_stores(&config, &source), || progress.stop())?
    };
    let Some(stores) = written else { return Ok(false) };
    for store in stores {
        let (bytes, place) = (HumanBytes(store.bytes()), store.folder().display().to_string());
        let took = begun.elapsed().as_secs_f64();
        print("summary", &format!("store        {bytes} in {} after {took:.1} s\n", one_line(&place)))?;
    }
    Ok(true)
}

impl QuantizeArgs {
    fn rounding_method(&self) -> Result<RoundingMethod, ConfigError> {
        let chunks = self.calibrate_chunks as usize;
        let calibration = self.calibrate.clone().map(|text| Calibration { text, chunks });
        match (self.rounding, calibration) {
            (None | Some(RoundingName::Nearest), None) => Ok(RoundingMethod::RoundToNearest),
            (Some(RoundingName::Nearest), Some(_)) => {
                let message = "--calibrate requires --rounding least-squares";
                Err(ConfigError { origin: ConfigSource::CommandLine, message: message.to_owned() })
            }
            (_, calibration) => Ok(RoundingMethod::LeastSquares(calibration)),
        }
    }

    /// Returns the configuration and the output target, if there is one.
    fn into_config(self) -> Result<(Config, Option<ExportTarget>), ConfigError> {
        if self.out.is_some() && self.weights.is_none() {
            let message = "OUT requires --weights".to_owned();
            return Err(ConfigError { origin: ConfigSource::CommandLine, message });
        }
        let mut flags = Overrides::default();
        flags.set("model.path", Some(self.model));
        flags.set("model.spec", self.spec.map(|path| path.to_string_lossy().into_owned()));
        flags.set("model.weights", self.weights);
        flags.set("device.threads", self.threads);
        flags.set_default("log.level", "warn");
        let config = Config::from_process(self.config.as_deref(), flags)?;
        let Some(out) = self.out else { return Ok((config, None)) };
        let is_named_gguf = out.extension().is_some_and(|extension| extension == "gguf");
        let format = match self.format {
            Some(FormatName::Gguf) => OutputFormat::Gguf,
            Some(FormatName::Safetensors) if is_named_gguf => {
                let message =
                    format!("--format safetensors writes a folder, but {} ends in .gguf", out.display());
                return Err(ConfigError { origin: ConfigSource::CommandLine, message });
            }
            Some(FormatName::Safetensors) => OutputFormat::Safetensors,
            None if is_named_gguf => OutputFormat::Gguf,
            None => OutputFormat::Safetensors,
        };
        let existing = if self.force { Existing::Replace } else { Existing::Refuse };
        let (spec, threads) = (config.model.spec.clone(), config.device.threads);
        Ok((config, Some(ExportTarget { path: out, format, existing, spec, threads })))
    }
}

/// Fetches the configured model if it is on a hub, and opens it.
fn open_model(config: &mut Config) -> Result<ModelSource> {
    config.model = start::fetch_model(config.model.clone(), &config.hub)?;
    let _spinner = Spinner::start("opening the model");
    start::open_source(&start::configured_model(&config.model)?, &config.model)
}

/// Returns the rounding, after evaluating the calibration text if there is one; `None` if a signal stopped
/// it. A target that cannot be written fails first.
fn choose_rounding(
    way: RoundingMethod,
    config: &Config,
    source: &ModelSource,
    target: &ExportTarget,
) -> Result<Option<RoundingPolicy>> {
    let calibration = match way {
        RoundingMethod::RoundToNearest => return Ok(Some(RoundingPolicy::RoundToNearest)),
        RoundingMethod::LeastSquares(None) => return Ok(Some(RoundingPolicy::LeastSquares(None))),
        RoundingMethod::LeastSquares(Some(calibration)) => calibration,
    };
    export::check(source, target)?;
    let prepared = calibration.prepare(config, &source.progress).context("--calibrate")?;
    let importance = until_stopped(move || prepared.run(), || source.progress.stop());
    // A signal during the last step did not stop the work.
    let importance = importance.context("--calibrate")?.filter(|_| !source.progress.is_stopped());
    Ok(importance.map(|importance| RoundingPolicy::LeastSquares(Some(Arc::new(importance)))))
}

/// Runs `work` on a separate thread and returns its result. On SIGINT or SIGTERM, calls `stop`, waits for the
/// work to end, and returns `None` unless it has succeeded.
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
        // The receiver is awaited below, so sending succeeds.
        std::thread::spawn(move || _ = sender.send(work()));
        tokio::select! {
            answer = &mut answer => return answer.context("the worker thread has panicked")?.map(Some),
            _ = interrupt.recv() => stop(),
            _ = terminate.recv() => stop(),
        }
        match answer.await {
            // The work completed before it noticed the stop.
            Ok(Ok(done)) => Ok(Some(done)),
            Ok(Err(_)) | Err(_) => Ok(None),
        }
    })
}

/// Formats the summary: a line per number format, one for all, and the output path.
fn summary(path: &Path, parts: &[FormatTotals], took: Duration) -> String {
    let mut text = String::new();
    let mut line = |ty: &str, tensors: usize, numbers: usize, before: usize, after: usize| {
        let (from, to) = (HumanBytes(before as u64).to_string(), HumanBytes(after as u64).to_string());
        let bits = after as f64 * 8.0 / numbers.max(1) as f64;
        let _ = writeln!(
            text,
            "{ty:<12} {tensors:>6} tensors  {from:>12} -> {to:>12}  {bits:>7.4} bits per number"
        );
    };
    for part in parts {
        line(part.ty.name(), part.tensors, part.elements, part.bytes_before, part.bytes_after);
    }
    let sum = |of: fn(&FormatTotals) -> usize| parts.iter().map(of).sum();
    line("all", sum(|p| p.tensors), sum(|p| p.elements), sum(|p| p.bytes_before), sum(|p| p.bytes_after));
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
    use std::sync::{Mutex, PoisonError, mpsc};

    /// Held by tests that listen for signals: one of them sends one, which all listeners of the process get.
    static SIGNALS: Mutex<()> = Mutex::new(());

    /// The signal listeners are installed before the work begins, so the signal cannot arrive too early.
    #[test]
    fn a_signal_stops_the_work_and_it_is_waited_for() {
        let _alone = SIGNALS.lock().unwrap_or_else(PoisonError::into_inner);
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
        let _alone = SIGNALS.lock().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(until_stopped(|| Ok(7), || ()).unwrap(), Some(7));
        let failed = until_stopped::<()>(|| bail!("full"), || ()).unwrap_err();
        assert_eq!(failed.to_string(), "full");
        assert!(
            until_stopped::<()>(|| panic!("on purpose"), || ()).unwrap_err().to_string().contains("panicked")
        );
    }

    #[test]
    fn a_summary_adds_up() {
        let part = |ty, tensors, numbers, before, after| FormatTotals {
            ty,
            tensors,
            elements: numbers,
            bytes_before: before,
            bytes_after: after,
        };
        let parts = [part(QuantType::F32, 3, 64, 256, 256), part(QuantType::Q8_0, 1, 1024, 4096, 1088)];
        let text = summary("a\nb".as_ref(), &parts, Duration::from_millis(1540));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1].join(" "), "q8_0 1 tensors 4.00 KiB -> 1.06 KiB 8.5000 bits per number");
        assert_eq!(lines[2].join(" "), "all 4 tensors 4.25 KiB -> 1.31 KiB 9.8824 bits per number");
        assert_eq!((lines.len(), lines[3].last()), (4, Some(&"s")));
    }
}
