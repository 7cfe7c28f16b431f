//! The GGUF format: one file, or several, with a model's tensors and its metadata, including the vocabulary.
//!
//! Versions 1 to 3, little-endian, are supported. Tensors in a number format without compute support may be
//! in a file as long as nothing reads them.
//! Invariant: tensors stay in the memory-mapped files, in the types they are stored in.

mod cursor;

mod value;

mod types;

mod header;

mod metadata;

mod split;

mod chat;

mod sentence;

#[cfg(test)]
mod tests;

pub(super) use header::{ALIGNMENT, ALIGNMENT_DEFAULT, MAGIC};
pub use header::{GgufHeader, GgufTensor};
pub use metadata::Gguf;
pub(super) use types::ggml_id;
pub use value::{GgufArray, GgufValue};

use super::folder::FileBytes;
use super::mmap::MappedFile;
use super::{Checkpoint, Folder, Layout, TensorEntry};
use anyhow::{Context, Result, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// File name extension.
const EXTENSION: &str = "gguf";

/// Metadata key that is true if the tensors are in safetensors files next to the GGUF file, because GGUF
/// cannot express their formats.
pub(super) const EXTERNAL_TENSORS: &str = "mainstem.tensors_beside";

impl Checkpoint {
    /// Opens a GGUF file and, for a split model, all of its files. Tensors keep the names they have in the
    /// file.
    pub fn open_gguf(path: &Path) -> Result<(Checkpoint, Gguf)> {
        let opened = open(path)?;
        let files = match split::files(&opened.0)? {
            None => vec![opened],
            Some(paths) => paths.iter().map(|path| open(path)).collect::<Result<_>>()?,
        };
        let count = files.len();
        let mut checkpoint = Checkpoint { files: Vec::new(), tensors: BTreeMap::new() };
        let mut first = None;
        for (place, (gguf, tensors)) in files.into_iter().enumerate() {
            split::check_index(&gguf, place, count)?;
            checkpoint.add_gguf_tensors(&gguf, tensors)?;
            first.get_or_insert(gguf);
        }
        let first = first.expect("there is at least one file; this is a bug");
        split::check_tensor_count(&first, checkpoint.tensors.len())?;
        if first.opt_bool(EXTERNAL_TENSORS)?.unwrap_or(false) {
            checkpoint.merge(Checkpoint::open_safetensors(&first.folder())?)?;
        }
        Ok((checkpoint, first))
    }

    fn add_gguf_tensors(&mut self, gguf: &Gguf, tensors: Vec<GgufTensor>) -> Result<()> {
        let file = self.files.len();
        self.files.push(FileBytes::Mapped(gguf.file.clone()));
        for GgufTensor { name, dtype, shape, bytes } in tensors {
            let is_new = !self.tensors.contains_key(&name);
            ensure!(is_new, "{}: tensor '{name}': it is also in another file", gguf.path().display());
            self.tensors.insert(name, TensorEntry { dtype, shape, file, bytes, layout: Layout::Dense });
        }
        Ok(())
    }
}

fn open(path: &Path) -> Result<(Gguf, Vec<GgufTensor>)> {
    let file = MappedFile::open(path)?;
    let head = GgufHeader::read(file.bytes()).with_context(|| path.display().to_string())?;
    let gguf = Gguf { file: Arc::new(file), version: head.version, entries: head.metadata };
    Ok((gguf, head.tensors))
}

impl Gguf {
    /// Whether to open a file as GGUF: its name ends in `.gguf`, or it begins like a GGUF file or one of its
    /// predecessors, which [`Checkpoint::open_gguf`] rejects by name.
    pub fn is_gguf_path(path: &Path) -> Result<bool> {
        let is_named = path.extension().is_some_and(|extension| extension == EXTENSION);
        Ok(is_named || header::has_ggml_magic(MappedFile::open(path)?.bytes()))
    }

    /// Returns the first file of the one GGUF model in a folder, or `None` if there is none. Fails if there
    /// are several.
    pub fn find_in_folder(folder: &Path) -> Result<Option<PathBuf>> {
        let named = || format!("cannot list {}", folder.display());
        let mut found = BTreeSet::new();
        for entry in std::fs::read_dir(folder).with_context(named)? {
            let name = entry.with_context(named)?.file_name().to_string_lossy().into_owned();
            if Path::new(&name).extension().is_some_and(|extension| extension == EXTENSION) {
                found.insert(split::SplitName::parse(&name).map_or(name, |split| split.first()));
            }
        }
        let names = found.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        ensure!(
            found.len() <= 1,
            "{}: the folder has several models, name one of the files: {names}",
            folder.display()
        );
        Ok(found.pop_first().map(|name| folder.join(name)))
    }

    /// Returns the model's name, derived from the file name.
    pub fn stem(&self) -> Option<String> {
        split::stem(self.path())
    }

    /// Returns the folder of the file, which may have further configuration files.
    pub fn folder(&self) -> Folder {
        let parent = self.path().parent().filter(|parent| !parent.as_os_str().is_empty());
        Folder::disk(parent.unwrap_or(Path::new(".")))
    }
}
