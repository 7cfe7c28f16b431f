//! The table of number formats: one row each, with its block size, its bytes and its scalar definition.
//!
//! Invariant: whatever is known about a format's bytes is known here; a backend may be faster than
//! these definitions, never different from them.

mod affine;

mod blocks;

mod few;

mod fit;

mod grid;

mod group;

mod input;

mod parts;

mod runs;

mod search;

mod superblocks;

mod table;

pub use input::{INPUT_BLOCK, InputBlock, Inputs, Operand};
pub use parts::Parts;
pub use runs::{GROUP_BYTES, GROUP_NUMBERS};

use half::f16;

/// How the numbers of a matrix, or of the KV cache, are stored. Their layouts are in the files named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)] // the names that files and papers have
pub enum QuantType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an F32.
    BF16,
    // blocks.rs
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    // superblocks.rs
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    // few.rs
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4,
    // affine.rs
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
    // group.rs
    G4_B64,
}

/// Writes the codes of whole blocks: values (n * block_elements) to codes (n * block_bytes).
pub type Quantize = fn(values: &[f32], out: &mut [u8]);

/// One row of the table. Lengths in elements and bytes.
pub struct QuantRow {
    /// The type this row describes.
    pub ty: QuantType,
    /// The name used in configuration, logs and `inspect`.
    pub name: &'static str,
    /// Other names that configuration takes.
    pub aliases: &'static [&'static str],
    /// Elements in one block; a matrix row holds a whole number of blocks.
    pub block_elements: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Writes the values of whole blocks: `bytes` (n * block_bytes) to `out` (n * block_elements).
    pub dequantize: fn(bytes: &[u8], out: &mut [f32]),
    /// `None` for formats that are only read.
    pub quantize: Option<Quantize>,
    /// What lies in a block, in order.
    pub layout: &'static str,
    /// What the format is good for.
    pub purpose: &'static str,
}

impl QuantType {
    /// Every type, in table order.
    pub fn all() -> impl Iterator<Item = QuantType> {
        table::TABLE.iter().map(|row| row.ty)
    }

    /// Those that store each number by itself, in table order.
    pub fn unblocked() -> impl Iterator<Item = QuantType> {
        QuantType::all().filter(|ty| !ty.is_blocked())
    }

    /// Whether numbers are stored in blocks that share a scale.
    pub fn is_blocked(self) -> bool {
        self.row().block_elements > 1
    }

    /// The type's row of the table.
    pub fn row(self) -> &'static QuantRow {
        let row = &table::TABLE[self as usize];
        debug_assert_eq!(row.ty, self);
        row
    }

    /// The type of that name, or of that other name, if there is one; upper and lower case are the same.
    pub fn by_name(name: &str) -> Option<QuantType> {
        let names = |row: &&QuantRow| {
            row.name.eq_ignore_ascii_case(name)
                || row.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(name))
        };
        table::TABLE.iter().find(names).map(|row| row.ty)
    }

    /// The name used in configuration, logs and `inspect`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// How blocks are taken apart, where a backend may do so.
    pub fn parts(self) -> Option<Parts> {
        parts::of(self)
    }

    /// What products with weights of this type take the other operand as, on a device of these inputs.
    pub fn operand(self, inputs: Inputs) -> Operand {
        match inputs {
            Inputs::Coded | Inputs::CodedAndHalves if self.parts().is_some() => Operand::Codes,
            Inputs::CodedAndHalves if self == QuantType::BF16 => Operand::Bf16,
            _ => Operand::F32,
        }
    }

    /// Bits that a number takes, its share of the block's scales counted.
    pub fn bits(self) -> f64 {
        self.row().block_bytes as f64 * 8.0 / self.row().block_elements as f64
    }

    /// Bytes that `elements` numbers take; `None` when they are no whole number of blocks or overflow.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        let row = self.row();
        if !elements.is_multiple_of(row.block_elements) {
            return None;
        }
        (elements / row.block_elements).checked_mul(row.block_bytes)
    }

    /// Writes the values of whole blocks.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        (self.row().dequantize)(bytes, out);
    }

    /// Writes the codes of whole blocks. The type is one that is written.
    pub fn quantize(self, values: &[f32], out: &mut [u8]) {
        let quantize = self.row().quantize.expect("a format that is only read is not written; this is a bug");
        quantize(values, out);
    }
}

impl std::fmt::Display for QuantType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What a block can hold that stores numbers as F16: a NaN counts as 0, and what F16 cannot hold as its largest number.
fn finite(value: f32) -> f32 {
    bounded(value, 1.0)
}

/// The same where the largest number is that many times F16's.
fn bounded(value: f32, times: f32) -> f32 {
    let largest = times * f16::MAX.to_f32();
    if value.is_nan() { 0.0 } else { value.clamp(-largest, largest) }
}

/// The F16 at that place.
fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

fn put_half(bytes: &mut [u8], at: usize, value: f32) {
    bytes[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

#[cfg(test)]
mod tests;
