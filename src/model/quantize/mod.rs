//! A model written with its matrices in the number formats that its rules say, so that loading it codes nothing any more.
//!
//! Invariant: what is written loads to the very bits that the model itself loads to by these rules; that it loads to the same
//! tensors, formats, shapes and settings is seen before it appears under its name. Of the numbers no more than one tensor's are in memory, and of those that rows lie
//! together of, a few megabytes.

mod plan;

mod settings;

mod write;

pub use plan::{Part, Plan};

use super::load;
use super::source::{ModelRef, ModelSource, OWN_SPEC, SourceKind};
use crate::formats::save::{self, Existing, Place, SavedFile, SavedTensor};
use crate::formats::{Checkpoint, Folder, FoundPooling, Gguf};
use anyhow::{Context, Result, bail, ensure};
use settings::Settings;
use std::io::Read;
use std::path::{Path, PathBuf};
use write::Writer;

/// Bytes of tensors in one file of safetensors.
const SHARD_BYTES_MAX: usize = 5_000_000_000;

/// What the GGUF file beside a folder's safetensors is called.
const GGUF_FILE: &str = "model.gguf";

/// The vocabulary that a GGUF file needs to be loaded alone.
const TOKENS: &str = "tokenizer.ggml.tokens";

/// How a model is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One file.
    Gguf,
    /// A folder. Of a GGUF file's model it has the keys in a GGUF file.
    Safetensors,
}

/// Where to, and how.
#[derive(Clone, Debug)]
pub struct Target {
    pub path: PathBuf,
    pub format: Format,
    pub existing: Existing,
    /// A specification that goes before the model's own; a folder that is written of a hub's gets it as its own.
    pub spec: Option<PathBuf>,
    /// That code numbers.
    pub threads: usize,
}

/// Refuses what cannot be written there, before time is spent on it.
pub fn check(source: &ModelSource, target: &Target) -> Result<()> {
    let gguf = keys_of(source, target)?;
    let plan = Plan::of(source, None)?;
    if let (Format::Gguf, Some(gguf)) = (target.format, gguf) {
        check_gguf(&plan, gguf)?;
    }
    // Dropped, it leaves nothing.
    place(target).map(drop)
}

/// Writes the model in the formats that its rules say. What is stopped by the model's progress is an error, and leaves nothing.
pub fn quantize(source: &ModelSource, target: &Target) -> Result<Vec<Part>> {
    let gguf = keys_of(source, target)?;
    // Tensors that hold settings are no weights any more, but belong to the file.
    let all = gguf.map(|gguf| Checkpoint::open_gguf(gguf.path())).transpose()?;
    let plan = Plan::of(source, all.as_ref().map(|(checkpoint, _)| checkpoint))?;
    source.progress.expect(plan.bytes());
    let place = match (target.format, gguf) {
        (Format::Gguf, Some(gguf)) => write_gguf(&plan, gguf, target)?,
        _ => write_folder(&plan, gguf, target)?,
    };
    check_written(source, target, place.begun())?;
    ensure!(!source.progress.is_stopped(), "stopped");
    place.finish()?;
    Ok(plan.parts())
}

/// The GGUF file that the model is, if it is one. Refuses what has no form like that.
fn keys_of<'a>(source: &'a ModelSource, target: &Target) -> Result<Option<&'a Gguf>> {
    check_apart(source, &target.path)?;
    match (&source.kind, target.format) {
        (SourceKind::Gguf(gguf), _) => Ok(Some(gguf.as_ref())),
        (SourceKind::HubFolder(_), Format::Safetensors) => Ok(None),
        (SourceKind::HubFolder(folder), Format::Gguf) => bail!(
            "{}: only a GGUF file's model can be written as GGUF, for its keys and its vocabulary are in GGUF's words: \
             name a folder to write safetensors to",
            folder.path().display()
        ),
        (SourceKind::Llama2c | SourceKind::Synthetic, _) => bail!(
            "{}: only the model of a hub's folder or of a GGUF file can be written",
            source.path.display()
        ),
    }
}

fn place(target: &Target) -> Result<Place> {
    match target.format {
        Format::Gguf => Place::file(&target.path, target.existing, check_file),
        Format::Safetensors => Place::folder(&target.path, target.existing, check_folder),
    }
}

/// A model is neither replaced by itself nor removed with the folder that it lies in.
fn check_apart(source: &ModelSource, target: &Path) -> Result<()> {
    let Ok(target) = target.canonicalize() else { return Ok(()) };
    let files = source.checkpoint.tensors().map(|tensor| tensor.file);
    let mut files: Vec<&Path> = files.chain([source.path.as_path()]).collect();
    files.dedup();
    let is_within = |file: &Path| file.canonicalize().is_ok_and(|file| file.starts_with(&target));
    ensure!(
        !files.into_iter().any(is_within),
        "{} is, or has in it, the model that is read, or a part of it: choose another place",
        target.display()
    );
    Ok(())
}

/// Refuses a folder that is no written model: one without weights, or with anything else in it.
fn check_folder(folder: &Path) -> Result<()> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let has_weights = entries.flatten().any(|entry| entry.file_name().to_str().is_some_and(is_weights));
    ensure!(has_weights, "{} is no written model: choose another place", folder.display());
    save::check_names(folder, is_ours)
}

/// Refuses a file that is no GGUF.
fn check_file(file: &Path) -> Result<()> {
    let is_gguf = std::fs::File::open(file).and_then(|mut opened| {
        let mut magic = [0; 4];
        opened.read_exact(&mut magic)?;
        Ok(&magic == b"GGUF")
    });
    ensure!(is_gguf.unwrap_or(false), "{} is no GGUF file: choose another place", file.display());
    Ok(())
}

fn write_gguf(plan: &Plan, gguf: &Gguf, target: &Target) -> Result<Place> {
    check_gguf(plan, gguf)?;
    let place = place(target)?;
    let file = save::gguf_file("", gguf, &plan.saved())?;
    writer(plan, target).write(&file, place.begun(), &target.path)?;
    Ok(place)
}

/// Refuses what a GGUF file cannot have, or would have to have.
fn check_gguf(plan: &Plan, gguf: &Gguf) -> Result<()> {
    save::check_gguf(&plan.saved()).with_context(|| gguf.path().display().to_string())?;
    ensure!(
        gguf.value(TOKENS).is_some(),
        "{}: it has no vocabulary, so that a GGUF file cannot have it either: name a folder to write to",
        gguf.path().display()
    );
    Ok(())
}

fn write_folder(plan: &Plan, gguf: Option<&Gguf>, target: &Target) -> Result<Place> {
    let settings = match (&plan.source().kind, target.spec.as_deref()) {
        (SourceKind::HubFolder(folder), spec) => Settings::of_folder(folder, spec)?,
        _ => Settings::beside_gguf(&plan.source().folder().unwrap_or(Folder::disk(Path::new("."))))?,
    };
    let place = place(target)?;
    settings.write(place.begun())?;
    let saved = plan.saved();
    let (files, index) = save::safetensors_files(&saved[..plan.weights()], SHARD_BYTES_MAX);
    index.iter().try_for_each(|(name, content)| write::whole(&place.begun().join(name), content))?;
    for file in files.iter().chain(&keys(plan, gguf, &saved)?) {
        let named = target.path.join(&file.name);
        writer(plan, target).write(file, &place.begun().join(&file.name), &named)?;
    }
    Ok(place)
}

/// The file of a GGUF model's keys.
fn keys(plan: &Plan, gguf: Option<&Gguf>, saved: &[SavedTensor]) -> Result<Option<SavedFile>> {
    let settings = (plan.weights()..saved.len()).collect();
    gguf.map(|gguf| save::gguf_settings(GGUF_FILE, gguf, settings, saved)).transpose()
}

fn writer<'a>(plan: &'a Plan<'a>, target: &Target) -> Writer<'a> {
    Writer { plan, threads: target.threads }
}

/// Whether a file of that name may be one that was written here.
fn is_ours(name: &str) -> bool {
    is_weights(name)
        || name.ends_with(".safetensors.index.json")
        || settings::is_setting(name)
        || name == OWN_SPEC
}

fn is_weights(name: &str) -> bool {
    name.starts_with("model") && (name.ends_with(".safetensors") || name == GGUF_FILE)
}

/// Holds what was written against what it was made of: names, formats, shapes and settings.
fn check_written(source: &ModelSource, target: &Target, begun: &Path) -> Result<()> {
    let has_own_spec = matches!(source.kind, SourceKind::HubFolder(_));
    let spec = target.spec.as_deref().filter(|_| !has_own_spec);
    let open = || {
        let written = ModelSource::open(&ModelRef::Path(begun.to_owned()), spec)?;
        let (expected, found) = (load::records(source, &source.spec), load::records(&written, &written.spec));
        let other = expected.iter().zip(&found).find(|(expected, found)| expected != found);
        if let Some((expected, found)) = other {
            bail!("it would load {expected:?} as {found:?}");
        }
        ensure!(expected.len() == found.len(), "it has {} tensors, not {}", found.len(), expected.len());
        // What lies beside a GGUF file does not come with it into another.
        let is_alone = target.format == Format::Gguf;
        ensure!(is_alone || have_same_settings(&written, source), "its settings are not those of the model");
        Ok(())
    };
    open().with_context(|| {
        format!("what was written to {} is not the model; this is a bug", target.path.display())
    })
}

/// Whether their folders say the same beside the specification, wherever it is said.
fn have_same_settings(a: &ModelSource, b: &ModelSource) -> bool {
    let pooling = match (&a.sentence, &b.sentence) {
        (Some(a), Some(b)) if a.normalize == b.normalize => match (&a.pooling, &b.pooling) {
            (FoundPooling::Served(a), FoundPooling::Served(b)) => a == b,
            (FoundPooling::Unserved(_), FoundPooling::Unserved(_)) => true,
            _ => false,
        },
        (a, b) => a.is_none() && b.is_none(),
    };
    pooling && (&a.eos, &a.defaults, a.opening) == (&b.eos, &b.defaults, b.opening)
}
