//! The number formats of weights and of the KV cache. A table has one row for each format, with its name, its
//! block size, and the functions that define it.
//!
//! A quantized format divides the rows of a matrix into blocks. A block stores a small integer, the quant,
//! for each element, and shares a scale (and sometimes a minimum) among its elements.
//!
//! Invariant: this module is the only definition of the bytes of a format. A backend may be faster than these
//! definitions, but its results are the same.

mod affine;

mod blocks;

mod read_only;

mod least_squares;

mod grid_search;

mod group;

mod activations;

mod block_split;

mod finite;

mod kv_runs;

mod scale_search;

mod superblocks;

mod table;

pub use activations::{ActivationPrecision, INT8_BLOCK_LEN, Int8Block, OperandFormat};
pub use block_split::BlockSplit;
pub use kv_runs::{MAX_GROUP_BYTES, MAX_GROUP_LEN};

use half::f16;

/// The storage format of a matrix or of the KV cache. The files named between the groups document the layout
/// of the blocks; [`QuantType::row`] returns sizes and functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // Names as in files and papers.
pub enum QuantType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper 16 bits of a binary32.
    BF16,
    // ggml formats with blocks of 32: blocks.rs
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    // ggml K-quants with superblocks of 256: superblocks.rs
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    // GGUF formats that are read but not written: read_only.rs
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    // Inferflow: affine.rs
    Q8_B32T1,
    Q6_B64T1,
    Q5_B64T1,
    Q4_B64T1,
    Q4_B32T1A,
    Q4_B32T1B,
    Q4_B16,
    Q3H_B64T1,
    Q3_B32T1A,
    Q3_B32T1B,
    Q2_B32T1A,
    Q2_B32T1B,
    // FlexGen: group.rs
    G4_B64,
}

/// A function that quantizes whole blocks: values (blocks * block_elements) to bytes (blocks * block_bytes).
pub type QuantizeFn = fn(values: &[f32], out: &mut [u8]);

/// The description of a number format: a row of the table of formats.
pub struct FormatRow {
    /// The format that this row describes.
    pub ty: QuantType,
    /// The name in configuration, logs and `inspect`.
    pub name: &'static str,
    /// Other names that configuration accepts.
    pub aliases: &'static [&'static str],
    /// Elements of one block. A matrix row consists of whole blocks.
    pub block_elements: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Dequantizes whole blocks: bytes (blocks * block_bytes) to values (blocks * block_elements).
    pub dequantize: fn(bytes: &[u8], out: &mut [f32]),
    /// Quantizes whole blocks; `None` for formats that are only read.
    pub quantize: Option<QuantizeFn>,
    /// The fields of a block, in order, for the documentation.
    pub layout: &'static str,
    /// The purpose of the format, for the documentation.
    pub purpose: &'static str,
}

impl QuantType {
    /// Returns every format, in table order.
    pub fn all() -> impl Iterator<Item = QuantType> {
        table::FORMATS.iter().map(|row| row.ty)
    }

    /// Returns the formats that store each number separately, in table order.
    pub fn unblocked() -> impl Iterator<Item = QuantType> {
        QuantType::all().filter(|ty| !ty.is_blocked())
    }

    /// Returns whether numbers are stored in blocks that share a scale.
    pub fn is_blocked(self) -> bool {
        self.row().block_elements > 1
    }

    /// Returns the row of the format in the table.
    pub fn row(self) -> &'static FormatRow {
        let row = &table::FORMATS[self as usize];
        debug_assert_eq!(row.ty, self);
        row
    }

    /// Returns the format with this name or alias, ignoring case.
    pub fn by_name(name: &str) -> Option<QuantType> {
        let matches = |row: &&FormatRow| {
            row.name.eq_ignore_ascii_case(name)
                || row.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
        };
        table::FORMATS.iter().find(matches).map(|row| row.ty)
    }

    /// Returns the name in configuration, logs and `inspect`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Returns how to split blocks into quants and parameters; `None` if a backend has to use
    /// [`Self::dequantize`].
    pub fn block_split(self) -> Option<BlockSplit> {
        block_split::block_split(self)
    }

    /// Returns the format of the activations in GEMMs with weights of this format, on a device with this
    /// precision.
    pub fn operand_format(self, inputs: ActivationPrecision) -> OperandFormat {
        use ActivationPrecision::{F32, Int8AndBf16, Int8AndBf16Pairs};
        match (inputs, self) {
            (F32, _) => OperandFormat::F32,
            _ if self.block_split().is_some() => OperandFormat::Int8,
            (Int8AndBf16 | Int8AndBf16Pairs, QuantType::BF16) => OperandFormat::Bf16,
            (Int8AndBf16Pairs, QuantType::F16) => OperandFormat::Bf16Pair,
            _ => OperandFormat::F32,
        }
    }

    /// Returns the average number of bits per element, scales included.
    pub fn bits_per_element(self) -> f64 {
        self.row().block_bytes as f64 * 8.0 / self.row().block_elements as f64
    }

    /// Returns the bytes of `elements` elements; `None` if they are not whole blocks or on overflow.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        let row = self.row();
        if !elements.is_multiple_of(row.block_elements) {
            return None;
        }
        (elements / row.block_elements).checked_mul(row.block_bytes)
    }

    /// Dequantizes whole blocks of `bytes` to `out`.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        (self.row().dequantize)(bytes, out);
    }

    /// Returns the index of the first number that is NaN or infinite in `bytes` (whole blocks). Of blocks,
    /// only the scales are read, unless one of them is not finite.
    pub fn first_not_finite(self, bytes: &[u8]) -> Option<usize> {
        finite::first_not_finite(self, bytes)
    }

    /// Quantizes `values` to whole blocks, by round-to-nearest or the own search of the format. Panics if the
    /// format is only read.
    pub fn quantize(self, values: &[f32], out: &mut [u8]) {
        let quantize = self.row().quantize.expect("a read-only format is never written; this is a bug");
        quantize(values, out);
    }
}

impl std::fmt::Display for QuantType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// Clamps a value to the range of F16; NaN becomes 0.
fn clamp_to_f16(value: f32) -> f32 {
    clamp_to_f16_times(value, 1.0)
}

/// Clamps a value to `times` the range of F16; NaN becomes 0.
fn clamp_to_f16_times(value: f32, times: f32) -> f32 {
    let largest = times * f16::MAX.to_f32();
    if value.is_nan() { 0.0 } else { value.clamp(-largest, largest) }
}

/// Reads the F16 at byte offset `at`.
fn read_f16(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Writes a value as F16 at byte offset `at`.
fn write_f16(bytes: &mut [u8], at: usize, value: f32) {
    bytes[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

#[cfg(test)]
mod tests;
