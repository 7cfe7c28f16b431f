//! PyTorch checkpoints (`torch.save`): a pickle that describes tensors, and their elements next to it, in a
//! zip archive or in the older stream container.
//!
//! A pickle is a program. The machine that executes it here can create numbers, strings, containers and
//! tensors, and nothing else: only a few fixed names can be referenced, so a malicious file cannot run code.
//!
//! Invariant: any input yields tensors that lie inside the file, or an error. The cost is bounded: no
//! recursion, and no more memory than a fixed amount plus a fraction of the file's length.

mod calls;
mod dtypes;
mod globals;
mod machine;
mod opcodes;
mod state_dict;
mod storage;
mod stream;
mod tensor;
mod value;
mod zip;

#[cfg(test)]
mod tests;

use super::folder::{FileBytes, Folder};
use super::mmap::MappedFile;
use super::sharded::FolderFormat;
use super::{Checkpoint, Tensors};
use anyhow::{Context, Result, bail, ensure};
use std::borrow::Cow;
use std::path::Path;

const SINGLE: &str = "pytorch_model.bin";
const INDEX: &str = "pytorch_model.bin.index.json";

/// File names of PyTorch weights in a model folder.
pub(super) const FOLDER_FORMAT: FolderFormat =
    FolderFormat { single: SINGLE, index: INDEX, read: read_tensors };

/// Offset and magic number of a tar archive.
const TAR_MAGIC: (usize, &[u8]) = (257, b"ustar");

impl Checkpoint {
    /// Opens a folder's PyTorch weights: `pytorch_model.bin`, or the files listed in
    /// `pytorch_model.bin.index.json`.
    pub fn open_pickle(folder: &Folder) -> Result<Checkpoint> {
        FOLDER_FORMAT.open_required(folder)
    }

    /// Opens a PyTorch checkpoint from the bytes of one file; `path` stands for the file in error messages.
    pub fn from_pickle(path: &Path, bytes: Vec<u8>) -> Result<Checkpoint> {
        let tensors = read_tensors(&bytes, 0).with_context(|| path.display().to_string())?;
        let file = FileBytes::InMemory { path: path.to_owned(), bytes: Cow::Owned(bytes) };
        Ok(Checkpoint { files: vec![file], tensors })
    }
}

/// Whether a file looks like a PyTorch checkpoint. Its content may still be rejected.
pub fn is_pytorch(path: &Path) -> Result<bool> {
    let file = MappedFile::open(path)?;
    let bytes = file.bytes();
    Ok(stream::is_stream(bytes) || (bytes.starts_with(zip::MAGIC) && zip::read(bytes).is_ok()))
}

/// Parses the tensors of a PyTorch file.
fn read_tensors(bytes: &[u8], file: usize) -> Result<Tensors> {
    if bytes.starts_with(zip::MAGIC) {
        let archive = zip::read(bytes)?;
        let content = &bytes[archive.pickle];
        let pickle = machine::run(content)?;
        let (held, read) = (content.len(), pickle.bytes);
        ensure!(held == read, "data.pkl has {held} bytes, but its pickle ends at byte {read}");
        return state_dict::entries(pickle, &archive.storages, file);
    }
    let (at, tar) = TAR_MAGIC;
    if bytes.get(at..).is_some_and(|rest| rest.starts_with(tar)) {
        bail!(
            "a tar archive: this old PyTorch format is not supported; save the model again with a current \
             PyTorch"
        );
    }
    let (pickle, places) = stream::read(bytes)?;
    state_dict::entries(pickle, &places, file)
}
