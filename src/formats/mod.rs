//! Files of weights, read as named tensors over memory-mapped bytes, and the settings that lie beside them.
//!
//! Invariant: a [`Checkpoint`] that exists is consistent: every tensor's bytes lie inside its file and are
//! exactly as many as its shape and type need. A file that is not so is refused, with the file, the tensor
//! and the reason, before anything is allocated from a number it holds.

mod mmap;

pub mod config;

mod llama2c;
mod safetensors;

#[cfg(test)]
pub(crate) mod scratch;

pub use config::{GenerationConfig, HubConfig, RopeConfig, RopeScaling};
pub use llama2c::Llama2cHeader;

use anyhow::{Result, bail};
use mainstem_kernels::QuantType;
use mmap::MappedFile;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Named tensors over one or more memory-mapped files.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Entry>,
}

/// Where a tensor's bytes lie.
#[derive(Debug)]
struct Entry {
    ty: QuantType,
    shape: Vec<usize>,
    file: usize,
    bytes: Range<usize>,
}

/// One tensor of a checkpoint. Its bytes are little-endian, row-major and of any alignment.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    pub name: &'a str,
    pub ty: QuantType,
    /// Outermost dimension first; empty for a single number.
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
    /// The file it comes from, to name in errors.
    pub file: &'a Path,
}

impl Checkpoint {
    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        self.tensors.get_key_value(name).map(|(name, entry)| self.view(name, entry))
    }

    /// Every tensor, in the order of names.
    pub fn tensors(&self) -> impl Iterator<Item = TensorView<'_>> {
        self.tensors.iter().map(|(name, entry)| self.view(name, entry))
    }

    /// Every tensor's name, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The files, in the order they were opened.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(MappedFile::path)
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> usize {
        self.tensors.values().map(|entry| entry.bytes.len()).sum()
    }

    fn view<'a>(&'a self, name: &'a str, entry: &'a Entry) -> TensorView<'a> {
        let file = &self.files[entry.file];
        let bytes = &file.bytes()[entry.bytes.clone()];
        TensorView { name, ty: entry.ty, shape: &entry.shape, bytes, file: file.path() }
    }
}

/// The elements of a shape, if they can be counted.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |product, dim| product.checked_mul(*dim))
}

/// The `N` bytes at `at`, which a truncated file may lack.
fn fixed_bytes<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<N>()) {
        Some(chunk) => Ok(*chunk),
        None => bail!("truncated: {N} bytes expected at offset {at}, and the file ends at {}", bytes.len()),
    }
}
