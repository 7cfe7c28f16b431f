//! Metadata values of a GGUF file: numbers by value, strings and arrays as ranges of the file.
//!
//! Invariant: every string and array element lies inside the file, and every bool is stored as 0 or 1.

use super::cursor::{CountWidth, Cursor};
use anyhow::{Result, bail, ensure};
use std::ops::Range;

/// Maximum nesting depth of arrays.
const DEPTH_MAX: usize = 4;

/// A metadata value. Ranges are in bytes of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    Unsigned(u64),
    Signed(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(Range<usize>),
    Array(GgufArray),
}

/// An array of values of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufArray {
    pub(super) elements: ValueType,
    /// Number of elements.
    pub len: usize,
    pub(super) bytes: Range<usize>,
}

/// The type of a value; the discriminant is the type's id in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

const TYPES: [ValueType; 13] = [
    ValueType::U8,
    ValueType::I8,
    ValueType::U16,
    ValueType::I16,
    ValueType::U32,
    ValueType::I32,
    ValueType::F32,
    ValueType::Bool,
    ValueType::String,
    ValueType::Array,
    ValueType::U64,
    ValueType::I64,
    ValueType::F64,
];

impl ValueType {
    fn read(cursor: &mut Cursor) -> Result<ValueType> {
        let id = cursor.u32()?;
        match TYPES.get(id as usize) {
            Some(ty) => Ok(*ty),
            None => bail!("unknown value type {id}"),
        }
    }

    /// Minimum bytes of a value of this type; for a number, its exact size.
    fn min_bytes(self, counts: CountWidth) -> usize {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 => 8,
            ValueType::String => counts.bytes(),
            ValueType::Array => 4 + counts.bytes(),
        }
    }
}

impl GgufValue {
    /// Reads a type and a value of that type.
    pub(super) fn read(cursor: &mut Cursor) -> Result<GgufValue> {
        let ty = ValueType::read(cursor)?;
        GgufValue::read_typed(ty, cursor, 0)
    }

    /// Reads a value of type `ty`. `depth` is the number of enclosing arrays.
    pub(super) fn read_typed(ty: ValueType, cursor: &mut Cursor, depth: usize) -> Result<GgufValue> {
        Ok(match ty {
            ValueType::U8 => GgufValue::Unsigned(u8::from_le_bytes(cursor.take()?).into()),
            ValueType::U16 => GgufValue::Unsigned(u16::from_le_bytes(cursor.take()?).into()),
            ValueType::U32 => GgufValue::Unsigned(cursor.u32()?.into()),
            ValueType::U64 => GgufValue::Unsigned(cursor.u64()?),
            ValueType::I8 => GgufValue::Signed(i8::from_le_bytes(cursor.take()?).into()),
            ValueType::I16 => GgufValue::Signed(i16::from_le_bytes(cursor.take()?).into()),
            ValueType::I32 => GgufValue::Signed(i32::from_le_bytes(cursor.take()?).into()),
            ValueType::I64 => GgufValue::Signed(i64::from_le_bytes(cursor.take()?)),
            ValueType::F32 => GgufValue::F32(f32::from_le_bytes(cursor.take()?)),
            ValueType::F64 => GgufValue::F64(f64::from_le_bytes(cursor.take()?)),
            ValueType::Bool => GgufValue::Bool(read_bool(cursor)?),
            ValueType::String => GgufValue::String(cursor.string()?),
            ValueType::Array => GgufValue::Array(GgufArray::read(cursor, depth + 1)?),
        })
    }

    /// Returns a non-negative integer of any width.
    pub(super) fn as_u64(&self) -> Option<u64> {
        match self {
            GgufValue::Unsigned(number) => Some(*number),
            GgufValue::Signed(number) => (*number).try_into().ok(),
            _ => None,
        }
    }

    /// Describes the value, for error messages.
    pub(super) fn describe(&self) -> String {
        match self {
            GgufValue::Unsigned(value) => value.to_string(),
            GgufValue::Signed(value) => value.to_string(),
            GgufValue::F32(value) => value.to_string(),
            GgufValue::F64(value) => value.to_string(),
            GgufValue::Bool(value) => value.to_string(),
            GgufValue::String(_) => "a string".to_owned(),
            GgufValue::Array(array) => format!("an array of {} {:?}", array.len, array.elements),
        }
    }
}

fn read_bool(cursor: &mut Cursor) -> Result<bool> {
    let [byte] = cursor.take()?;
    ensure!(byte <= 1, "{byte} is neither true (1) nor false (0)");
    Ok(byte == 1)
}

impl GgufArray {
    fn read(cursor: &mut Cursor, depth: usize) -> Result<GgufArray> {
        ensure!(depth <= DEPTH_MAX, "arrays are nested more than {DEPTH_MAX} deep");
        let elements = ValueType::read(cursor)?;
        let size = elements.min_bytes(cursor.count_width);
        let len = cursor.count("array elements", size)?;
        let begin = cursor.at();
        match elements {
            ValueType::String | ValueType::Array | ValueType::Bool => {
                for _ in 0..len {
                    GgufValue::read_typed(elements, cursor, depth)?;
                }
            }
            _ => _ = cursor.skip(len * size)?,
        }
        Ok(GgufArray { elements, len, bytes: begin..cursor.at() })
    }
}
