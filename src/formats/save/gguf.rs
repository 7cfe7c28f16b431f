//! Writing GGUF: other tensors with new metadata, or with that of an existing file.
//!
//! Invariant: the value of an existing file's key is copied unchanged; keys that describe only the file or
//! its number formats are dropped or written anew.

use super::{SavedFile, SavedTensor};
use crate::formats::Gguf;
use crate::formats::gguf::{ALIGNMENT, ALIGNMENT_DEFAULT, EXTERNAL_TENSORS, MAGIC, ggml_id};
use anyhow::{Context, Result, ensure};

/// Version of the format.
const VERSION: u32 = 3;

/// Ids of value types.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

const QUANTIZATION: &str = "general.quantization_version";
const QUANTIZATION_VERSION: u32 = 2;

/// Keys that are not valid for another file.
const FILE_SPECIFIC_KEYS: [&str; 6] =
    ["general.file_type", QUANTIZATION, "split.no", "split.count", "split.tensors.count", EXTERNAL_TENSORS];

/// A metadata value of a new file.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufMetadata {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
}

/// Metadata of a new file: keys with their values, in the order of the file.
pub type GgufEntries = Vec<(String, GgufMetadata)>;

impl GgufMetadata {
    /// Returns the value's type and content as in a file.
    fn bytes(&self) -> Vec<u8> {
        let array = |ty: u32, len: usize, content: Vec<u8>| {
            (ARRAY, [&ty.to_le_bytes()[..], &count_bytes(len), &content].concat())
        };
        let (ty, content) = match self {
            GgufMetadata::U32(number) => (U32, number.to_le_bytes().to_vec()),
            GgufMetadata::F32(number) => (F32, number.to_le_bytes().to_vec()),
            GgufMetadata::Bool(flag) => (BOOL, vec![u8::from(*flag)]),
            GgufMetadata::Text(text) => (STRING, string_bytes(text)),
            GgufMetadata::Texts(texts) => {
                array(STRING, texts.len(), texts.iter().flat_map(|text| string_bytes(text)).collect())
            }
            GgufMetadata::I32s(numbers) => {
                array(I32, numbers.len(), numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
            }
            GgufMetadata::F32s(numbers) => {
                array(F32, numbers.len(), numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
            }
        };
        [&ty.to_le_bytes()[..], &content].concat()
    }
}

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

/// Returns a new file with this metadata and these tensors, whose types GGUF must have.
pub fn new_gguf_file(name: &str, metadata: &GgufEntries, tensors: &[SavedTensor]) -> Result<SavedFile> {
    let entries = metadata.iter().map(|(key, value)| [string_bytes(key), value.bytes()].concat()).collect();
    layout(name, entries, (0..tensors.len()).collect(), tensors, ALIGNMENT_DEFAULT as usize)
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
    if !more.is_empty() {
        entries.push(more);
    }
    layout(name, entries, order, tensors, gguf.opt_u32(ALIGNMENT)?.unwrap_or(ALIGNMENT_DEFAULT) as usize)
}

/// Lays out a file with these metadata entries, and the version of number formats if any is in blocks.
fn layout(
    name: &str,
    mut entries: Vec<Vec<u8>>,
    order: Vec<usize>,
    tensors: &[SavedTensor],
    alignment: usize,
) -> Result<SavedFile> {
    if order.iter().any(|at| tensors[*at].ty.is_blocked()) {
        entries.push([key_bytes(QUANTIZATION, U32), QUANTIZATION_VERSION.to_le_bytes().to_vec()].concat());
    }
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
