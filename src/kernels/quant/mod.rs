//! The table of number formats: one row each, with its block size, its bytes and its scalar definition.
//!
//! Invariant: whatever is known about a format's bytes is known here; a backend may be faster than
//! these definitions, never different from them.

pub mod blocks;

use half::{bf16, f16};

/// How the numbers of a matrix, or of the KV cache, are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuantType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an F32.
    BF16,
    /// Blocks of 32 signed bytes with a scale; see [`blocks`].
    Q8_0,
    /// Blocks of 32 half-bytes with a scale; see [`blocks`].
    Q4_0,
}

/// One row of the table. Lengths in elements and bytes.
pub struct QuantRow {
    /// The type this row describes.
    pub ty: QuantType,
    /// The name used in configuration, logs and `inspect`.
    pub name: &'static str,
    /// Elements in one block; a matrix row holds a whole number of blocks.
    pub block_elements: usize,
    /// Bytes of one block.
    pub block_bytes: usize,
    /// Writes the values of whole blocks: `bytes` (n * block_bytes) to `out` (n * block_elements).
    pub dequantize: fn(bytes: &[u8], out: &mut [f32]),
    /// Writes the nearest codes of whole blocks: `values` (n * block_elements) to `out` (n * block_bytes).
    pub quantize: fn(values: &[f32], out: &mut [u8]),
}

static TABLE: [QuantRow; 5] = [
    QuantRow {
        ty: QuantType::F32,
        name: "f32",
        block_elements: 1,
        block_bytes: 4,
        dequantize: |bytes, out| decode(bytes, out, f32::from_le_bytes),
        quantize: |values, out| encode(values, out, f32::to_le_bytes),
    },
    QuantRow {
        ty: QuantType::F16,
        name: "f16",
        block_elements: 1,
        block_bytes: 2,
        dequantize: |bytes, out| decode(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        quantize: |values, out| encode(values, out, |v| f16::from_f32(v).to_le_bytes()),
    },
    QuantRow {
        ty: QuantType::BF16,
        name: "bf16",
        block_elements: 1,
        block_bytes: 2,
        dequantize: |bytes, out| decode(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        quantize: |values, out| encode(values, out, |v| bf16::from_f32(v).to_le_bytes()),
    },
    QuantRow {
        ty: QuantType::Q8_0,
        name: "q8_0",
        block_elements: blocks::NUMBERS,
        block_bytes: blocks::Q8_0_BYTES,
        dequantize: blocks::dequantize_q8_0,
        quantize: blocks::quantize_q8_0,
    },
    QuantRow {
        ty: QuantType::Q4_0,
        name: "q4_0",
        block_elements: blocks::NUMBERS,
        block_bytes: blocks::Q4_0_BYTES,
        dequantize: blocks::dequantize_q4_0,
        quantize: blocks::quantize_q4_0,
    },
];

impl QuantType {
    /// Every type, in table order.
    pub fn all() -> impl Iterator<Item = QuantType> {
        TABLE.iter().map(|row| row.ty)
    }

    /// Those that store each number by itself, as keys and values must be stored, in table order.
    pub fn unblocked() -> impl Iterator<Item = QuantType> {
        QuantType::all().filter(|ty| !ty.is_blocked())
    }

    /// Whether numbers are stored in blocks that share a scale. Such a type is for matrices only.
    pub fn is_blocked(self) -> bool {
        self.row().block_elements > 1
    }

    /// The type's row of the table.
    pub fn row(self) -> &'static QuantRow {
        let row = &TABLE[self as usize];
        debug_assert_eq!(row.ty, self);
        row
    }

    /// The type of that name, if there is one.
    pub fn by_name(name: &str) -> Option<QuantType> {
        TABLE.iter().find(|row| row.name.eq_ignore_ascii_case(name)).map(|row| row.ty)
    }

    /// The name used in configuration, logs and `inspect`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Bytes that `elements` numbers take; `None` when they are no whole number of blocks or overflow.
    pub fn bytes(self, elements: usize) -> Option<usize> {
        let row = self.row();
        if !elements.is_multiple_of(row.block_elements) {
            return None;
        }
        (elements / row.block_elements).checked_mul(row.block_bytes)
    }
}

impl std::fmt::Display for QuantType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

fn decode<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    let (codes, rest) = bytes.as_chunks::<N>();
    assert!(rest.is_empty() && codes.len() == out.len());
    for (o, code) in out.iter_mut().zip(codes) {
        *o = value(*code);
    }
}

fn encode<const N: usize>(values: &[f32], out: &mut [u8], code: impl Fn(f32) -> [u8; N]) {
    let (codes, rest) = out.as_chunks_mut::<N>();
    assert!(rest.is_empty() && codes.len() == values.len());
    for (c, v) in codes.iter_mut().zip(values) {
        *c = code(*v);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_rows_stand_where_their_type_says() {
        for ty in QuantType::all() {
            assert_eq!(ty.row().ty, ty);
            assert_eq!(QuantType::by_name(&ty.name().to_uppercase()), Some(ty));
        }
    }

    #[test]
    fn representable_values_survive_and_ties_go_to_even() {
        let values = [0.0f32, -0.0, 1.0, -2.5, 0.15625, 1024.0];
        for ty in QuantType::unblocked() {
            let mut bytes = vec![0; ty.bytes(values.len()).unwrap()];
            let mut back = [0f32; 6];
            (ty.row().quantize)(&values, &mut bytes);
            (ty.row().dequantize)(&bytes, &mut back);
            assert_eq!(values.map(f32::to_bits), back.map(f32::to_bits), "{ty}");
        }
        let mut half_ulp = [0u8; 2];
        (QuantType::F16.row().quantize)(&[1.0 + 1.0 / 2048.0], &mut half_ulp);
        assert_eq!(u16::from_le_bytes(half_ulp), 0x3c00);
        (QuantType::BF16.row().quantize)(&[1.0 + 3.0 / 256.0], &mut half_ulp);
        assert_eq!(u16::from_le_bytes(half_ulp), 0x3f82);
    }
}
