//! Integers divided by a scale, of each row or of the whole matrix, as in CTranslate2; and rows that the
//! file does not have.
//!
//! An element is q * (1 / scale). With 8 bits, rows of whole blocks of 32 columns become Q8_0, whose scales
//! are rounded to F16: this changes an element by no more than rounding it to F16 would. Where F16 is not as
//! precise for a scale, because that is tiny or huge, and with 16 bits, the matrix is F32, loaded as F16.
//! Invariant: the quants of Q8_0 are those of the file.

use super::super::elements;
use super::integers::BLOCK_LEN;
use super::stored::StoredPart;
use super::{Encoded, Encoding};
use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// The arrangement of the elements: the first part has the numbers, the second their scales.
#[derive(Debug)]
pub(super) struct Divided {
    numbers: Numbers,
    /// Rows that the file has; the others are zeros.
    stored_rows: usize,
    /// Element of the last row, if the file does not have it.
    last: f32,
}

/// Type of the stored numbers. Integers are divided by scales in F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Numbers {
    Float(QuantType),
    Int8,
    Int16,
}

/// A row that is appended to a matrix, or an element to a vector.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct AppendedRow {
    /// Value of its elements.
    pub(in super::super) value: f32,
}

/// A variable with its bytes, whose number the shape implies.
#[derive(Clone, Debug)]
pub(in super::super) struct StoredNumbers {
    pub(in super::super) name: String,
    /// Type, as safetensors names it.
    pub(in super::super) dtype: &'static str,
    pub(in super::super) shape: Vec<usize>,
    pub(in super::super) bytes: Range<usize>,
}

impl StoredNumbers {
    fn part(self) -> StoredPart {
        let StoredNumbers { name, dtype, shape, bytes } = self;
        StoredPart { name, dtype: dtype.to_owned(), shape, file: 0, bytes }
    }
}

/// Whether F16 represents the factors of quants with all of their bits, given the scales.
pub(in super::super) fn are_precise(scales: &[u8]) -> bool {
    factors(scales).all(is_precise)
}

/// Creates a matrix or vector from numbers of the only file and their scales, with a row after the stored
/// ones if one is appended. `is_precise` is what [`are_precise`] says of the scales. Returns it with its
/// shape.
pub(in super::super) fn encoded(
    numbers: StoredNumbers,
    scales: Option<StoredNumbers>,
    is_precise: bool,
    appended: Option<AppendedRow>,
) -> Result<(Vec<usize>, Encoded)> {
    let (stored_rows, columns) = match numbers.shape[..] {
        [rows] => (rows, 1),
        [rows, columns] => (rows, columns),
        _ => bail!("its shape {:?} is not that of a matrix or vector", numbers.shape),
    };
    let kind = match numbers.dtype {
        "I8" => Numbers::Int8,
        "I16" => Numbers::Int16,
        _ => Numbers::Float(numbers.clone().part().float_type()?),
    };
    let rows = stored_rows + usize::from(appended.is_some());
    let mut shape = numbers.shape.clone();
    shape[0] = rows;
    ensure!(columns > 0 && elements(&shape).is_some(), "its shape {shape:?} is not supported");
    let mut parts = vec![numbers.part()];
    if let Numbers::Int8 | Numbers::Int16 = kind {
        let scales = scales.context("its scale is missing")?;
        let is_whole = scales.shape.is_empty() || scales.shape == [stored_rows];
        ensure!(
            is_whole && scales.dtype == "F32",
            "its scale '{}' of type {} and shape {:?} has to be F32, one for each of {stored_rows} rows or \
             one for all",
            scales.name,
            scales.dtype,
            scales.shape
        );
        parts.push(scales.part());
    }
    let (ty, load_type) = match kind {
        Numbers::Float(ty) => (ty, ty),
        Numbers::Int8 if columns.is_multiple_of(BLOCK_LEN) && is_precise => {
            (QuantType::Q8_0, QuantType::Q8_0)
        }
        Numbers::Int8 | Numbers::Int16 => (QuantType::F32, QuantType::F16),
    };
    let last = appended.map_or(0.0, |row| row.value);
    let encoding = Encoding::Divided(Divided { numbers: kind, stored_rows, last });
    Ok((shape, Encoded { parts, rows, columns, encoding, ty, load_type, has_zero_bias: false }))
}

/// Creates a vector of zeros with `value` as its last element. `part` stands for its bytes, which are none.
pub(in super::super) fn zeros_and(value: f32, len: usize, part: StoredNumbers) -> Encoded {
    let encoding =
        Encoding::Divided(Divided { numbers: Numbers::Float(QuantType::F32), stored_rows: 0, last: value });
    let (ty, parts) = (QuantType::F32, vec![part.part()]);
    Encoded { parts, rows: len, columns: 1, encoding, ty, load_type: ty, has_zero_bias: false }
}

/// Returns the factors of quants, given the scales.
fn factors(scales: &[u8]) -> impl Iterator<Item = f32> {
    scales.as_chunks().0.iter().map(|scale| 1.0 / f32::from_le_bytes(*scale))
}

/// Whether F16 represents a factor with all of its bits.
fn is_precise(factor: f32) -> bool {
    let rounded = f16::from_f32(factor);
    rounded.is_normal() || rounded.is_finite() && rounded.to_f32() == factor
}

impl Divided {
    /// Appends rows of a matrix in the format `ty`, given the parts and the numbers of its rows and columns.
    pub(super) fn decode(
        &self,
        parts: &[&[u8]],
        (rows, [all_rows, columns]): (Range<usize>, [usize; 2]),
        ty: QuantType,
        out: &mut Vec<u8>,
    ) {
        let scales: Vec<f32> = parts.get(1).map(|scales| factors(scales).collect()).unwrap_or_default();
        for row in rows {
            if row >= self.stored_rows {
                let value = if row + 1 == all_rows { self.last } else { 0.0 };
                append_constant(value, columns, ty, out);
                continue;
            }
            let factor = scales.get(row).or(scales.first()).copied().unwrap_or(1.0);
            let elements = row * columns..(row + 1) * columns;
            match self.numbers {
                Numbers::Float(ty) => {
                    let size = ty.row().block_bytes;
                    out.extend_from_slice(&parts[0][elements.start * size..elements.end * size]);
                }
                Numbers::Int8 if ty == QuantType::Q8_0 => {
                    for block in parts[0][elements].chunks_exact(BLOCK_LEN) {
                        out.extend_from_slice(&f16::from_f32(factor).to_le_bytes());
                        out.extend_from_slice(block);
                    }
                }
                Numbers::Int8 => out.extend(
                    parts[0][elements].iter().flat_map(|q| (f32::from(*q as i8) * factor).to_le_bytes()),
                ),
                Numbers::Int16 => {
                    let quants = parts[0].as_chunks().0[elements].iter().map(|q| i16::from_le_bytes(*q));
                    out.extend(quants.flat_map(|q| (f32::from(q) * factor).to_le_bytes()));
                }
            }
        }
    }

    /// Name of the encoding.
    pub(super) fn name(&self) -> &'static str {
        match self.numbers {
            Numbers::Float(ty) => ty.name(),
            Numbers::Int8 => "int8",
            Numbers::Int16 => "int16",
        }
    }
}

/// Appends a row of equal elements; in Q8_0 these are zeros.
fn append_constant(value: f32, columns: usize, ty: QuantType, out: &mut Vec<u8>) {
    match ty {
        QuantType::F32 => out.extend((0..columns).flat_map(|_| value.to_le_bytes())),
        QuantType::F16 => out.extend((0..columns).flat_map(|_| f16::from_f32(value).to_le_bytes())),
        QuantType::BF16 => out.extend((0..columns).flat_map(|_| bf16::from_f32(value).to_le_bytes())),
        ty => out.resize(out.len() + ty.bytes(columns).unwrap_or_default(), 0),
    }
}
