//! The header of a llama2.c file: the format version and the model's sizes.
//!
//! Invariant: the sizes of a parsed header are positive and consistent with each other.

use crate::formats::fixed_bytes;
use crate::formats::groups::QuantGroups;
use anyhow::{Result, bail, ensure};

/// "ak42" as a little-endian u32.
pub(super) const MAGIC: u32 = 0x616b_3432;

/// Bytes before the first tensor, in version 0 and later.
pub(super) const HEADER_BYTES_V0: usize = 7 * 4;
pub(super) const HEADER_BYTES: usize = 256;

/// Offsets in a header of [`HEADER_BYTES`]; the group size exists only in version 2.
const SIZES: usize = 8;
const SHARED_CLASSIFIER: usize = SIZES + HEADER_BYTES_V0;
const GROUP_SIZE: usize = SHARED_CLASSIFIER + 1;

/// The sizes of a llama2.c model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Llama2cHeader {
    /// Width of the residual stream (hidden size).
    pub dim: usize,
    /// Intermediate size of the feed-forward network.
    pub hidden_dim: usize,
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; divides `heads`.
    pub kv_heads: usize,
    pub vocab: usize,
    /// Maximum sequence length in tokens.
    pub seq_len: usize,
    /// Whether the output matrix is the embedding (tied embeddings).
    pub shared_classifier: bool,
    pub version: Llama2cVersion,
}

/// Version of the llama2.c format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Llama2cVersion {
    /// F32 tensors after a header of seven numbers, with rotary tables.
    V0,
    /// F32 tensors after a header of 256 bytes.
    V1,
    /// Matrices as signed bytes, with a scale for each `group_size` elements; norms in F32.
    V2 { group_size: usize },
}

impl Llama2cHeader {
    /// Number of elements per head.
    pub fn head_dim(&self) -> usize {
        self.dim / self.heads
    }

    /// Bytes before the first tensor.
    pub(super) fn bytes(&self) -> usize {
        match self.version {
            Llama2cVersion::V0 => HEADER_BYTES_V0,
            Llama2cVersion::V1 | Llama2cVersion::V2 { .. } => HEADER_BYTES,
        }
    }

    /// Group quantization of the matrices, if any.
    pub(super) fn groups(&self) -> Option<QuantGroups> {
        match self.version {
            Llama2cVersion::V0 | Llama2cVersion::V1 => None,
            Llama2cVersion::V2 { group_size } => Some(QuantGroups { size: group_size }),
        }
    }

    /// Parses the header of a file with these bytes.
    pub(super) fn read(bytes: &[u8]) -> Result<Llama2cHeader> {
        if u32::from_le_bytes(fixed_bytes(bytes, 0)?) != MAGIC {
            let mut sizes = read_sizes(bytes, 0)?;
            let shared_classifier = sizes[5] > 0;
            sizes[5] = sizes[5].saturating_abs();
            return validate(sizes, shared_classifier, Llama2cVersion::V0);
        }
        let version = match u32::from_le_bytes(fixed_bytes(bytes, 4)?) {
            1 => Llama2cVersion::V1,
            2 => Llama2cVersion::V2 { group_size: read_group_size(bytes)? },
            version => bail!("llama2.c version {version} is not supported (supported: 0, 1 and 2)"),
        };
        let [shared] = fixed_bytes(bytes, SHARED_CLASSIFIER)?;
        ensure!(shared <= 1, "shared_classifier is {shared}, but must be 0 or 1");
        validate(read_sizes(bytes, SIZES)?, shared == 1, version)
    }
}

fn read_sizes(bytes: &[u8], at: usize) -> Result<[i32; 7]> {
    let words = fixed_bytes::<HEADER_BYTES_V0>(bytes, at)?;
    Ok(std::array::from_fn(|i| i32::from_le_bytes(std::array::from_fn(|b| words[4 * i + b]))))
}

fn read_group_size(bytes: &[u8]) -> Result<usize> {
    let size = i32::from_le_bytes(fixed_bytes(bytes, GROUP_SIZE)?);
    ensure!(size > 0, "group_size is {size}, but must be positive");
    Ok(size as usize)
}

fn validate(sizes: [i32; 7], shared_classifier: bool, version: Llama2cVersion) -> Result<Llama2cHeader> {
    let names = ["dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len"];
    for (name, size) in names.iter().zip(sizes) {
        ensure!(size > 0, "not a llama2.c file: {name} is {size}");
    }
    let [dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len] = sizes.map(|size| size as usize);
    ensure!(dim % heads == 0, "dim {dim} is not a multiple of n_heads {heads}");
    ensure!(heads % kv_heads == 0, "n_heads {heads} is not a multiple of n_kv_heads {kv_heads}");
    ensure!(dim / heads % 2 == 0, "head size dim / n_heads = {}: RoPE needs an even head size", dim / heads);
    Ok(Llama2cHeader { dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len, shared_classifier, version })
}
