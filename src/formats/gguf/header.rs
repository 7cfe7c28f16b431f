//! The header of a GGUF file: metadata and tensor descriptions.
//!
//! | part | content |
//! |---|---|
//! | `GGUF`, version | u32, from 1 to 3 |
//! | counts | tensors, then metadata entries; 32 bits in version 1, 64 later |
//! | metadata | for each entry: key, type, value |
//! | tensors | for each tensor: name, number of dimensions, dimensions innermost first, type, offset |
//! | data | from the next multiple of the alignment; tensor offsets are relative to its start |
//!
//! Strings are preceded by their length, arrays by the type and number of their elements.
//! Invariant: every tensor of an accepted file lies inside the file and overlaps no other.

use super::cursor::{CountWidth, Cursor};
use super::types::GgmlType;
use super::value::GgufValue;
use crate::formats::{Dtype, fixed_bytes};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Magic number of the format.
pub(in crate::formats) const MAGIC: [u8; 4] = *b"GGUF";

/// Magic numbers of the predecessors of GGUF: their names reversed.
const LEGACY: [(&[u8; 4], &str); 4] =
    [(b"lmgg", "ggml"), (b"fmgg", "ggmf"), (b"tjgg", "ggjt"), (b"algg", "ggla")];

/// Key of the alignment of tensors in bytes, and its value if a file has no such key.
pub(in crate::formats) const ALIGNMENT: &str = "general.alignment";
pub(in crate::formats) const ALIGNMENT_DEFAULT: u32 = 32;
const ALIGNMENT_MAX: u64 = 1 << 16;

/// Limits of the format: bytes of a key and of a tensor name, and dimensions of a tensor.
const KEY_BYTES_MAX: usize = (1 << 16) - 1;
const NAME_BYTES_MAX: usize = 64;
const DIMENSIONS_MAX: u32 = 4;

/// Limits beyond any real file, which bound the memory for entries of a malicious one.
const ENTRIES_MAX: usize = 1 << 16;
const TENSORS_MAX: usize = 1 << 18;

/// The parsed header of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufHeader {
    /// 1, 2 or 3.
    pub version: u32,
    pub metadata: BTreeMap<String, GgufValue>,
    /// Tensors in the file's order.
    pub tensors: Vec<GgufTensor>,
}

/// A tensor and the range of its bytes in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    pub name: String,
    pub dtype: Dtype,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    pub bytes: Range<usize>,
}

impl GgufHeader {
    /// Parses the header of a file with these bytes. Accepts any input: an error names the key or the tensor,
    /// and no memory is allocated for a count that exceeds what the bytes can hold.
    pub fn read(bytes: &[u8]) -> Result<GgufHeader> {
        let version = read_version(bytes)?;
        let counts = CountWidth::for_version(version);
        let mut cursor = Cursor::new(bytes, 8, counts);
        let tensors = cursor.count("tensors", min_tensor_bytes(counts))?;
        let entries = cursor.count("metadata entries", min_entry_bytes(counts))?;
        ensure!(tensors <= TENSORS_MAX, "{tensors} tensors are declared, more than {TENSORS_MAX}");
        ensure!(entries <= ENTRIES_MAX, "{entries} metadata entries are declared, more than {ENTRIES_MAX}");
        let metadata = read_metadata(&mut cursor, entries)?;
        let alignment = alignment(&metadata)?;
        let described = read_tensor_infos(&mut cursor, tensors)?;
        let data =
            DataSection { start: cursor.at().next_multiple_of(alignment), alignment, end: bytes.len() };
        Ok(GgufHeader { version, metadata, tensors: data.locate(described)? })
    }
}

/// Whether these bytes begin like a GGUF file or one of its predecessors.
pub(super) fn has_ggml_magic(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC) || LEGACY.iter().any(|(magic, _)| bytes.starts_with(*magic))
}

fn read_version(bytes: &[u8]) -> Result<u32> {
    let magic = fixed_bytes::<4>(bytes, 0)?;
    if let Some((_, name)) = LEGACY.iter().find(|(legacy, _)| **legacy == magic) {
        bail!("a file in the obsolete {name} format: convert the model to GGUF");
    }
    ensure!(magic == MAGIC, "not a GGUF file: it begins with {}", magic.escape_ascii());
    match u32::from_le_bytes(fixed_bytes(bytes, 4)?) {
        version @ 1..=3 => Ok(version),
        version if (1..=3).contains(&version.swap_bytes()) => {
            bail!("a big-endian GGUF file: only little-endian files are supported")
        }
        version => bail!("GGUF version {version} is not supported (supported: 1, 2 and 3)"),
    }
}

/// Minimum bytes of a metadata entry: the key's length, a type and a value of one byte.
fn min_entry_bytes(counts: CountWidth) -> usize {
    counts.bytes() + 4 + 1
}

/// Minimum bytes of a tensor description: the name's length, the number of dimensions, a type and an offset.
fn min_tensor_bytes(counts: CountWidth) -> usize {
    counts.bytes() + 4 + 4 + 8
}

fn read_metadata(cursor: &mut Cursor, entries: usize) -> Result<BTreeMap<String, GgufValue>> {
    let mut metadata = BTreeMap::new();
    for _ in 0..entries {
        let key = cursor.name("the metadata key", KEY_BYTES_MAX)?;
        let value = GgufValue::read(cursor).with_context(|| format!("key '{key}'"))?;
        ensure!(metadata.insert(key.to_owned(), value).is_none(), "key '{key}': it appears twice");
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<String, GgufValue>) -> Result<usize> {
    let alignment = match metadata.get(ALIGNMENT) {
        None => ALIGNMENT_DEFAULT.into(),
        Some(value) => value.as_u64().with_context(|| {
            format!("key '{ALIGNMENT}': {} is not a non-negative integer", value.describe())
        })?,
    };
    let fits = alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX;
    ensure!(fits, "key '{ALIGNMENT}': {alignment} is not a power of two up to {ALIGNMENT_MAX}");
    Ok(alignment as usize)
}

/// A tensor description in the header.
struct TensorInfo<'a> {
    name: &'a str,
    ty: GgmlType,
    shape: Vec<usize>,
    /// Bytes from the start of the data section.
    offset: u64,
}

fn read_tensor_infos<'a>(cursor: &mut Cursor<'a>, count: usize) -> Result<Vec<TensorInfo<'a>>> {
    let mut described = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let name = cursor.name("the tensor name", NAME_BYTES_MAX)?;
        ensure!(names.insert(name), "tensor '{name}': it is described twice");
        described.push(TensorInfo::read(name, cursor).with_context(|| format!("tensor '{name}'"))?);
    }
    Ok(described)
}

impl<'a> TensorInfo<'a> {
    fn read(name: &'a str, cursor: &mut Cursor<'a>) -> Result<TensorInfo<'a>> {
        let dimensions = cursor.u32()?;
        ensure!(dimensions <= DIMENSIONS_MAX, "it has {dimensions} dimensions, more than {DIMENSIONS_MAX}");
        let mut shape = (0..dimensions).map(|_| cursor.size()).collect::<Result<Vec<_>>>()?;
        shape.reverse();
        ensure!(!shape.contains(&0), "shape {shape:?} has no elements");
        Ok(TensorInfo { name, ty: GgmlType::from_id(cursor.u32()?), shape, offset: cursor.u64()? })
    }
}

/// The data section of a file.
struct DataSection {
    /// Offset in the file, in bytes.
    start: usize,
    alignment: usize,
    /// Length of the file in bytes.
    end: usize,
}

impl DataSection {
    /// Computes the byte range of each tensor. Tensors may be in any order, with gaps between them.
    fn locate(&self, described: Vec<TensorInfo>) -> Result<Vec<GgufTensor>> {
        let begins = described.iter().map(|tensor| self.tensor_start(tensor)).collect::<Result<Vec<_>>>()?;
        let mut order: Vec<usize> = (0..described.len()).collect();
        order.sort_by_key(|at| begins[*at]);
        let mut ends = vec![self.end; described.len()];
        let mut free = (self.start, "");
        for (nth, &at) in order.iter().enumerate() {
            let (tensor, begin) = (&described[at], begins[at]);
            let next = order.get(nth + 1).map_or(self.end, |next| begins[*next]);
            ensure!(
                begin >= free.0,
                "tensor '{}': it begins at {begin}, inside the tensor '{}', which ends at {}",
                tensor.name,
                free.1,
                free.0
            );
            ends[at] = self.tensor_end(tensor, begin, next)?;
            free = (ends[at], tensor.name);
        }
        let places = begins.into_iter().zip(ends);
        Ok(described
            .into_iter()
            .zip(places)
            .map(|(tensor, (begin, end))| tensor.into_tensor(begin..end))
            .collect())
    }

    fn tensor_start(&self, tensor: &TensorInfo) -> Result<usize> {
        let TensorInfo { name, offset, .. } = tensor;
        let (within, alignment) = (usize::try_from(*offset).ok(), self.alignment);
        let begin = within.and_then(|offset| self.start.checked_add(offset)).filter(|at| *at <= self.end);
        let begin = begin.with_context(|| {
            format!(
                "truncated: tensor '{name}': its offset {offset} in the data is beyond the end of the file"
            )
        })?;
        ensure!(
            (begin - self.start).is_multiple_of(alignment),
            "tensor '{name}': its offset {offset} is not a multiple of the alignment {alignment}"
        );
        Ok(begin)
    }

    /// Returns the end of a tensor; one of an unknown type extends to the next tensor.
    fn tensor_end(&self, tensor: &TensorInfo, begin: usize, next: usize) -> Result<usize> {
        let name = tensor.name;
        let bytes = tensor.ty.bytes(&tensor.shape).with_context(|| format!("tensor '{name}'"))?;
        let Some(bytes) = bytes else {
            ensure!(begin < next, "tensor '{name}': it begins at {begin}, which leaves no bytes for it");
            return Ok(next);
        };
        let end = begin.checked_add(bytes).filter(|end| *end <= self.end);
        end.with_context(|| {
            let file = self.end;
            format!(
                "truncated: tensor '{name}': {bytes} bytes from offset {begin} on, but the file has {file}"
            )
        })
    }
}

impl TensorInfo<'_> {
    fn into_tensor(self, bytes: Range<usize>) -> GgufTensor {
        GgufTensor { name: self.name.to_owned(), dtype: self.ty.dtype(), shape: self.shape, bytes }
    }
}
