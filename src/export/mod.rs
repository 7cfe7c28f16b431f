//! Writes a model with its matrices converted to the number formats of its rules, so that loading it converts
//! nothing.
//!
//! Invariant: the written model loads bit for bit as the original does under these rules. Before the output
//! appears under its final name, it is checked that it loads to the same tensors, formats, shapes and
//! settings. At most one tensor's values are in memory, and only a few megabytes of a tensor whose rows are
//! contiguous.

mod plan;

mod companion_files;

mod write;

mod hub_to_gguf;

pub use plan::{FormatTotals, OutputPlan};

use crate::formats::save::{self, AtomicOutput, Existing, SavedFile, SavedTensor};
use crate::formats::{Checkpoint, Folder, Gguf, PoolingConfig};
use crate::model::choose_spec::OWN_SPEC;
use crate::model::load;
use crate::model::source::{ModelRef, ModelSource, STORES, SourceKind};
use anyhow::{Context, Result, bail, ensure};
use companion_files::CompanionFiles;
use hub_to_gguf::GgufExport;
use std::io::Read;
use std::path::{Path, PathBuf};
use write::TensorWriter;

/// Maximum size of the tensors in one safetensors file, in bytes.
const SHARD_BYTES_MAX: usize = 5_000_000_000;

/// Name of the GGUF file beside a folder's safetensors.
const GGUF_FILE: &str = "model.gguf";

/// Metadata key of the vocabulary, without which a GGUF file cannot be loaded alone.
const TOKENS: &str = "tokenizer.ggml.tokens";

/// The file format of a written model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// One GGUF file.
    Gguf,
    /// A folder with safetensors. For a GGUF model it contains a GGUF file with the metadata.
    Safetensors,
}

/// Destination and options of a written model.
#[derive(Clone, Debug)]
pub struct ExportTarget {
    pub path: PathBuf,
    pub format: OutputFormat,
    pub existing: Existing,
    /// A specification that overrides the model's own; the written folder of a hub model gets it as its own.
    pub spec: Option<PathBuf>,
    /// Number of threads that convert values.
    pub threads: usize,
}

/// Checks that the model can be written to the target, before time is spent on it.
pub fn check(source: &ModelSource, target: &ExportTarget) -> Result<()> {
    check_settings(source)?;
    let gguf = gguf_source(source, target)?;
    if let (OutputFormat::Gguf, SourceKind::HubFolder(folder)) = (target.format, &source.kind) {
        GgufExport::new(source, folder)?;
        return open_place(target).map(drop);
    }
    let plan = OutputPlan::new(source, None)?;
    if let (OutputFormat::Gguf, Some(gguf)) = (target.format, gguf) {
        check_gguf(&plan, gguf)?;
    }
    // Dropping the place removes it again.
    open_place(target).map(drop)
}

/// Fails for a model whose settings are in its weight file.
fn check_settings(source: &ModelSource) -> Result<()> {
    let is_other = |folder: &Folder| Checkpoint::is_ctranslate2(folder);
    ensure!(
        !matches!(&source.kind, SourceKind::HubFolder(folder) if is_other(folder)),
        "{}: models of CTranslate2 are not written in other formats: write the model that it was converted \
         from",
        source.path.display()
    );
    Ok(())
}

/// Writes the model in the formats of its rules. Returns the totals of each format. If it is stopped through
/// the model's progress, it fails and leaves no files.
pub fn write_model(source: &ModelSource, target: &ExportTarget) -> Result<Vec<FormatTotals>> {
    check_settings(source)?;
    let gguf = gguf_source(source, target)?;
    if let (OutputFormat::Gguf, SourceKind::HubFolder(folder)) = (target.format, &source.kind) {
        let (place, totals) = GgufExport::new(source, folder)?.write(target)?;
        ensure!(!source.progress.is_stopped(), "stopped");
        place.finish()?;
        return Ok(totals);
    }
    // Tensors that hold settings are not weights any more, but must be written.
    let all = gguf.map(|gguf| Checkpoint::open_gguf(gguf.path())).transpose()?;
    let plan = OutputPlan::new(source, all.as_ref().map(|(checkpoint, _)| checkpoint))?;
    source.progress.add_total(plan.bytes());
    let place = match (target.format, gguf) {
        (OutputFormat::Gguf, Some(gguf)) => write_gguf(&plan, gguf, target)?,
        _ => write_folder(&plan, gguf, target)?,
    };
    check_written(source, target, place.temp_path())?;
    ensure!(!source.progress.is_stopped(), "stopped");
    place.finish()?;
    Ok(plan.format_totals())
}

/// Returns the model's GGUF file, if it is one. Fails if the model cannot be written in the target's format.
fn gguf_source<'a>(source: &'a ModelSource, target: &ExportTarget) -> Result<Option<&'a Gguf>> {
    check_not_source(source, &target.path)?;
    match (&source.kind, target.format) {
        (SourceKind::Gguf(gguf), _) => Ok(Some(gguf.as_ref())),
        (SourceKind::HubFolder(_), _) => Ok(None),
        (SourceKind::Llama2c | SourceKind::Synthetic, _) => {
            bail!("{}: only a model folder or a GGUF file can be converted", source.path.display())
        }
    }
}

fn open_place(target: &ExportTarget) -> Result<AtomicOutput> {
    match target.format {
        OutputFormat::Gguf => AtomicOutput::file(&target.path, target.existing, check_file),
        OutputFormat::Safetensors => AtomicOutput::folder(&target.path, target.existing, check_folder),
    }
}

/// Checks that the target neither is nor contains a file of the model.
fn check_not_source(source: &ModelSource, target: &Path) -> Result<()> {
    let Ok(target) = target.canonicalize() else { return Ok(()) };
    let files = source.checkpoint.tensors().map(|tensor| tensor.file);
    let mut files: Vec<&Path> = files.chain([source.path.as_path()]).collect();
    files.dedup();
    let is_within = |file: &Path| file.canonicalize().is_ok_and(|file| file.starts_with(&target));
    ensure!(
        !files.into_iter().any(is_within),
        "{} is or contains the model that is read, or a part of it: choose another path",
        target.display()
    );
    Ok(())
}

/// Checks that an existing folder is a written model: that it has weights, and only files that this module
/// writes.
fn check_folder(folder: &Path) -> Result<()> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let has_weights = entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_weights));
    ensure!(has_weights, "{} is not a written model: choose another path", folder.display());
    save::check_only_known_files(folder, STORES, is_output_file)
}

/// Checks that an existing file is a GGUF file.
fn check_file(file: &Path) -> Result<()> {
    let is_gguf = std::fs::File::open(file).and_then(|mut opened| {
        let mut magic = [0; 4];
        opened.read_exact(&mut magic)?;
        Ok(&magic == b"GGUF")
    });
    ensure!(is_gguf.unwrap_or(false), "{} is not a GGUF file: choose another path", file.display());
    Ok(())
}

fn write_gguf(plan: &OutputPlan, gguf: &Gguf, target: &ExportTarget) -> Result<AtomicOutput> {
    check_gguf(plan, gguf)?;
    let place = open_place(target)?;
    let file = save::gguf_file("", gguf, &plan.saved())?;
    writer(plan, target).write(&file, place.temp_path(), &target.path)?;
    Ok(place)
}

/// Checks that a GGUF file can hold the tensors, and that there is a vocabulary for it.
fn check_gguf(plan: &OutputPlan, gguf: &Gguf) -> Result<()> {
    save::check_gguf(&plan.saved()).with_context(|| gguf.path().display().to_string())?;
    ensure!(
        gguf.value(TOKENS).is_some(),
        "{}: it has no vocabulary, so it cannot be written as a GGUF file: specify a folder",
        gguf.path().display()
    );
    Ok(())
}

fn write_folder(plan: &OutputPlan, gguf: Option<&Gguf>, target: &ExportTarget) -> Result<AtomicOutput> {
    let settings = match (&plan.source().kind, target.spec.as_deref()) {
        (SourceKind::HubFolder(folder), spec) => CompanionFiles::of_folder(folder, spec)?,
        _ => CompanionFiles::beside_gguf(&plan.source().folder().unwrap_or(Folder::disk(Path::new("."))))?,
    };
    let place = open_place(target)?;
    settings.write(place.temp_path())?;
    let saved = plan.saved();
    let (files, index) = save::safetensors_files(&saved[..plan.weights()], SHARD_BYTES_MAX);
    index.iter().try_for_each(|(name, content)| write::write_file(&place.temp_path().join(name), content))?;
    for file in files.iter().chain(&gguf_metadata_file(plan, gguf, &saved)?) {
        let named = target.path.join(&file.name);
        writer(plan, target).write(file, &place.temp_path().join(&file.name), &named)?;
    }
    Ok(place)
}

/// Returns the GGUF file that holds a GGUF model's metadata.
fn gguf_metadata_file(
    plan: &OutputPlan,
    gguf: Option<&Gguf>,
    saved: &[SavedTensor],
) -> Result<Option<SavedFile>> {
    let settings = (plan.weights()..saved.len()).collect();
    gguf.map(|gguf| save::gguf_settings_file(GGUF_FILE, gguf, settings, saved)).transpose()
}

fn writer<'a>(plan: &'a OutputPlan<'a>, target: &ExportTarget) -> TensorWriter<'a> {
    TensorWriter { plan, threads: target.threads }
}

/// Returns whether a file with that name may have been written by this module.
fn is_output_file(name: &str) -> bool {
    is_weights(name)
        || name.ends_with(".safetensors.index.json")
        || companion_files::is_companion_file(name)
        || name == OWN_SPEC
}

fn is_weights(name: &str) -> bool {
    name.starts_with("model") && (name.ends_with(".safetensors") || name == GGUF_FILE)
}

/// Compares the written model with the original: names, formats, shapes and settings.
fn check_written(source: &ModelSource, target: &ExportTarget, begun: &Path) -> Result<()> {
    let has_own_spec = matches!(source.kind, SourceKind::HubFolder(_));
    let spec = target.spec.as_deref().filter(|_| !has_own_spec);
    let open = || {
        let written = ModelSource::open(&ModelRef::Path(begun.to_owned()), spec)?;
        let (expected, found) = (load::records(source, &source.spec), load::records(&written, &written.spec));
        let other = expected.iter().zip(&found).find(|(expected, found)| expected != found);
        if let Some((expected, found)) = other {
            bail!("it would load {found:?} instead of {expected:?}");
        }
        ensure!(expected.len() == found.len(), "it has {} tensors, not {}", found.len(), expected.len());
        // Files beside a GGUF file are not copied into another one.
        let is_alone = target.format == OutputFormat::Gguf;
        ensure!(is_alone || same_settings(&written, source), "its settings are not those of the model");
        Ok(())
    };
    open().with_context(|| {
        format!("the model written to {} differs from the original; this is a bug", target.path.display())
    })
}

/// Returns whether the settings outside of the specification are equal, wherever they are stored.
fn same_settings(a: &ModelSource, b: &ModelSource) -> bool {
    let pooling = match (&a.sentence, &b.sentence) {
        (Some(a), Some(b)) if a.normalize == b.normalize => match (&a.pooling, &b.pooling) {
            (PoolingConfig::Supported(a), PoolingConfig::Supported(b)) => a == b,
            (PoolingConfig::Unsupported(_), PoolingConfig::Unsupported(_)) => true,
            _ => false,
        },
        (a, b) => a.is_none() && b.is_none(),
    };
    pooling
        && (&a.eos, &a.sampling_defaults, a.decoder_start) == (&b.eos, &b.sampling_defaults, b.decoder_start)
}
