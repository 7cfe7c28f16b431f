//! Writing GGUF: the metadata of an existing file with other tensors.
//!
//! Invariant: the value of a key is copied unchanged; keys that describe only the file or its number formats
//! are dropped or written anew.

use super::{SavedFile, SavedTensor};
use crate::formats::Gguf;
use crate::formats::gguf::{ALIGNMENT, ALIGNMENT_DEFAULT, EXTERNAL_TENSORS, MAGIC, ggml_id};
use anyhow::{Context, Result, ensure};

/// Version of the format.
const VERSION: u32 = 3;

/// Ids of value types.
const U32: u32 = 4;
const BOOL: u32 = 7;

const QUANTIZATION: &str = "general.quantization_version";
const QUANTIZATION_VERSION: u32 = 2;

/// Keys that are not valid for another file.
const FILE_SPECIFIC_KEYS: [&str; 6] =
    ["general.file_type", QUANTIZATION, "split.no", "split.count", "split.tensors.count", EXTERNAL_TENSORS];

/// Fails, naming the tensor, if GGUF cannot express a tensor.
pub fn check_gguf(tensors: &[SavedTensor]) -> Result<()> {
    for tensor in tensors {
        let SavedTensor { name, ty, .. } = tensor;
        ensure!(
            ggml_id(*ty).is_some(),
            "tensor '{name}' would be {ty}, which GGUF cannot store: choose one of its types, such as q4_K \
             or q8_0, or name a folder to write safetensors to"
        );
        ensure!(
            !tensor.transposed,
            "tensor '{name}' would be transposed, which GGUF cannot store; this is a bug"
        );
    }
    Ok(())
}

/// Returns the file with the metadata of `gguf` and these tensors, whose types GGUF must have.
pub fn gguf_file(name: &str, gguf: &Gguf, tensors: &[SavedTensor]) -> Result<SavedFile> {
    build_file(name, gguf, (0..tensors.len()).collect(), tensors, Vec::new())
}

/// Returns a file with the metadata of `gguf` for a model whose tensors are in safetensors files next to it.
/// Only the tensors with the indices `settings` are in the file itself.
pub fn gguf_settings_file(
    name: &str,
    gguf: &Gguf,
    settings: Vec<usize>,
    tensors: &[SavedTensor],
) -> Result<SavedFile> {
    build_file(name, gguf, settings, tensors, [key_bytes(EXTERNAL_TENSORS, BOOL), vec![1]].concat())
}

/// Builds a file. `more` is one additional metadata entry, or empty.
fn build_file(
    name: &str,
    gguf: &Gguf,
    order: Vec<usize>,
    tensors: &[SavedTensor],
    more: Vec<u8>,
) -> Result<SavedFile> {
    let mut entries: Vec<Vec<u8>> = gguf
        .stored_entries()?
        .filter(|(name, _)| !FILE_SPECIFIC_KEYS.contains(name))
        .map(|(name, value)| [&string_bytes(name), value].concat())
        .collect();
    if order.iter().any(|at| tensors[*at].ty.is_blocked()) {
        entries.push([key_bytes(QUANTIZATION, U32), QUANTIZATION_VERSION.to_le_bytes().to_vec()].concat());
    }
    if !more.is_empty() {
        entries.push(more);
    }
    let alignment = gguf.opt_u32(ALIGNMENT)?.unwrap_or(ALIGNMENT_DEFAULT) as usize;
    let mut head =
        [&MAGIC[..], &VERSION.to_le_bytes(), &count_bytes(order.len()), &count_bytes(entries.len())].concat();
    entries.iter().for_each(|entry| head.extend_from_slice(entry));
    let mut offset = 0;
    for tensor in order.iter().map(|at| &tensors[*at]) {
        write_tensor_info(tensor, offset, &mut head)?;
        offset += tensor.bytes().next_multiple_of(alignment);
    }
    head.resize(head.len().next_multiple_of(alignment), 0);
    Ok(SavedFile { name: name.to_owned(), header: head, tensors: order, alignment })
}

fn write_tensor_info(tensor: &SavedTensor, offset: usize, head: &mut Vec<u8>) -> Result<()> {
    let SavedTensor { name, ty, shape, .. } = tensor;
    let id =
        ggml_id(*ty).with_context(|| format!("tensor '{name}': GGUF has no type for {ty}; this is a bug"))?;
    head.extend(string_bytes(name));
    head.extend((shape.len() as u32).to_le_bytes());
    shape.iter().rev().for_each(|size| head.extend(count_bytes(*size)));
    head.extend(id.to_le_bytes());
    head.extend(count_bytes(offset));
    Ok(())
}

fn key_bytes(name: &str, ty: u32) -> Vec<u8> {
    [string_bytes(name), ty.to_le_bytes().to_vec()].concat()
}

fn string_bytes(text: &str) -> Vec<u8> {
    [&count_bytes(text.len()), text.as_bytes()].concat()
}

fn count_bytes(count: usize) -> [u8; 8] {
    (count as u64).to_le_bytes()
}
