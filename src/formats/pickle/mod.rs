//! What `torch.save` wrote: a pickle that describes tensors, and their numbers beside it, in a zip archive or in
//! the stream that came before.
//!
//! A pickle is a program. Here it runs on a machine that can make numbers, strings, containers and tensors, and
//! nothing else: no name leads out of the few that are known, so no file can have anything done.
//!
//! Invariant: whatever a file's bytes are, they become tensors that lie inside the file, or an error. What that
//! takes is bounded: no recursion, and no memory beyond a fixed amount and a share of the file's length.

mod globals;
mod machine;
mod numbers;
mod opcodes;
mod state_dict;
mod stream;
mod tensor;
mod value;
mod zip;

#[cfg(test)]
mod tests;

use super::folder::{FileBytes, Folder};
use super::mmap::MappedFile;
use super::sharded::Naming;
use super::{Checkpoint, Tensors};
use anyhow::{Context, Result, bail, ensure};
use std::borrow::Cow;
use std::path::Path;

const SINGLE: &str = "pytorch_model.bin";
const INDEX: &str = "pytorch_model.bin.index.json";

/// How a folder holds such files.
pub(super) const FILES: Naming = Naming { single: SINGLE, index: INDEX, read: read_tensors };

/// Where a tar archive says that it is one.
const TAR_MAGIC: (usize, &[u8]) = (257, b"ustar");

impl Checkpoint {
    /// Opens what PyTorch saved in a folder: `pytorch_model.bin`, or the files that
    /// `pytorch_model.bin.index.json` names.
    pub fn open_pickle(folder: &Folder) -> Result<Checkpoint> {
        FILES.open_needed(folder)
    }

    /// The same of one file's bytes; `path` stands for the file in errors.
    pub fn from_pickle(path: &Path, bytes: Vec<u8>) -> Result<Checkpoint> {
        let tensors = read_tensors(&bytes, 0).with_context(|| path.display().to_string())?;
        let file = FileBytes::Held { path: path.to_owned(), bytes: Cow::Owned(bytes) };
        Ok(Checkpoint { files: vec![file], tensors })
    }
}

/// Whether a file is one that PyTorch saved; what is in it may still be refused.
pub fn is_pytorch(path: &Path) -> Result<bool> {
    let file = MappedFile::open(path)?;
    let bytes = file.bytes();
    Ok(stream::is_stream(bytes) || (bytes.starts_with(zip::MAGIC) && zip::read(bytes).is_ok()))
}

/// The tensors of a file with these bytes.
fn read_tensors(bytes: &[u8], file: usize) -> Result<Tensors> {
    if bytes.starts_with(zip::MAGIC) {
        let archive = zip::read(bytes)?;
        let content = &bytes[archive.pickle];
        let pickle = machine::run(content)?;
        let (held, read) = (content.len(), pickle.bytes);
        ensure!(held == read, "data.pkl has {held} bytes, and its pickle ends at {read}");
        return state_dict::entries(pickle, &archive.places, file);
    }
    let (at, tar) = TAR_MAGIC;
    if bytes.get(at..).is_some_and(|rest| rest.starts_with(tar)) {
        bail!("a tar archive: PyTorch's first format is not supported; load and save the model anew");
    }
    let (pickle, places) = stream::read(bytes)?;
    state_dict::entries(pickle, &places, file)
}
