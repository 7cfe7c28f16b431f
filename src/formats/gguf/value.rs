//! Metadata values of a GGUF file: numbers by value, strings and arrays as ranges of the file.
//!
//! Invariant: every string and array element lies inside the file, and every bool is stored as 0 or 1.

use super::cursor::{Counts, Cursor};
use anyhow::{Result, bail, ensure};
use std::ops::Range;

/// Maximum nesting depth of arrays.
const DEPTH_MAX: usize = 4;

/// A metadata value. Ranges are in bytes of the file.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Unsigned(u64),
    Signed(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(Range<usize>),
    Array(Array),
}

/// An array of values of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Array {
    pub(super) elements: Type,
    /// Number of elements.
    pub len: usize,
    pub(super) bytes: Range<usize>,
}

/// The type of a value; the discriminant is the type's id in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Type {
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

const TYPES: [Type; 13] = [
    Type::U8,
    Type::I8,
    Type::U16,
    Type::I16,
    Type::U32,
    Type::I32,
    Type::F32,
    Type::Bool,
    Type::String,
    Type::Array,
    Type::U64,
    Type::I64,
    Type::F64,
];

impl Type {
    fn read(cursor: &mut Cursor) -> Result<Type> {
        let id = cursor.u32()?;
        match TYPES.get(id as usize) {
            Some(ty) => Ok(*ty),
            None => bail!("unknown value type {id}"),
        }
    }

    /// Minimum bytes of a value of this type; for a number, its exact size.
    fn bytes_min(self, counts: Counts) -> usize {
        match self {
            Type::U8 | Type::I8 | Type::Bool => 1,
            Type::U16 | Type::I16 => 2,
            Type::U32 | Type::I32 | Type::F32 => 4,
            Type::U64 | Type::I64 | Type::F64 => 8,
            Type::String => counts.bytes(),
            Type::Array => 4 + counts.bytes(),
        }
    }
}

impl Value {
    /// Reads a type and a value of that type.
    pub(super) fn read(cursor: &mut Cursor) -> Result<Value> {
        let ty = Type::read(cursor)?;
        Value::of_type(ty, cursor, 0)
    }

    /// Reads a value of type `ty`. `depth` is the number of enclosing arrays.
    pub(super) fn of_type(ty: Type, cursor: &mut Cursor, depth: usize) -> Result<Value> {
        Ok(match ty {
            Type::U8 => Value::Unsigned(u8::from_le_bytes(cursor.take()?).into()),
            Type::U16 => Value::Unsigned(u16::from_le_bytes(cursor.take()?).into()),
            Type::U32 => Value::Unsigned(cursor.u32()?.into()),
            Type::U64 => Value::Unsigned(cursor.u64()?),
            Type::I8 => Value::Signed(i8::from_le_bytes(cursor.take()?).into()),
            Type::I16 => Value::Signed(i16::from_le_bytes(cursor.take()?).into()),
            Type::I32 => Value::Signed(i32::from_le_bytes(cursor.take()?).into()),
            Type::I64 => Value::Signed(i64::from_le_bytes(cursor.take()?)),
            Type::F32 => Value::F32(f32::from_le_bytes(cursor.take()?)),
            Type::F64 => Value::F64(f64::from_le_bytes(cursor.take()?)),
            Type::Bool => Value::Bool(flag(cursor)?),
            Type::String => Value::String(cursor.string()?),
            Type::Array => Value::Array(Array::read(cursor, depth + 1)?),
        })
    }

    /// Returns a non-negative integer of any width.
    pub(super) fn whole(&self) -> Option<u64> {
        match self {
            Value::Unsigned(number) => Some(*number),
            Value::Signed(number) => (*number).try_into().ok(),
            _ => None,
        }
    }

    /// Describes the value, for error messages.
    pub(super) fn kind(&self) -> String {
        match self {
            Value::Unsigned(value) => value.to_string(),
            Value::Signed(value) => value.to_string(),
            Value::F32(value) => value.to_string(),
            Value::F64(value) => value.to_string(),
            Value::Bool(value) => value.to_string(),
            Value::String(_) => "a string".to_owned(),
            Value::Array(array) => format!("an array of {} {:?}", array.len, array.elements),
        }
    }
}

fn flag(cursor: &mut Cursor) -> Result<bool> {
    let [byte] = cursor.take()?;
    ensure!(byte <= 1, "{byte} is neither true (1) nor false (0)");
    Ok(byte == 1)
}

impl Array {
    fn read(cursor: &mut Cursor, depth: usize) -> Result<Array> {
        ensure!(depth <= DEPTH_MAX, "arrays are nested more than {DEPTH_MAX} deep");
        let elements = Type::read(cursor)?;
        let size = elements.bytes_min(cursor.counts);
        let len = cursor.count("array elements", size)?;
        let begin = cursor.at();
        match elements {
            Type::String | Type::Array | Type::Bool => {
                for _ in 0..len {
                    Value::of_type(elements, cursor, depth)?;
                }
            }
            _ => _ = cursor.skip(len * size)?,
        }
        Ok(Array { elements, len, bytes: begin..cursor.at() })
    }
}
