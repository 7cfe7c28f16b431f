//! Typed access to the metadata of a GGUF file.
//!
//! Invariant: an error names the file and the key; a lookup parses only the requested value.

use super::cursor::{CountWidth, Cursor};
use super::value::{GgufArray, GgufValue, ValueType};
use crate::formats::mmap::MappedFile;
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The metadata of a GGUF file, which stays memory-mapped.
///
/// Each lookup `x` fails if the key is absent; its counterpart `opt_x` returns `None` instead. Numbers may be
/// stored in any width in which they fit.
pub struct Gguf {
    pub(super) file: Arc<MappedFile>,
    pub(super) version: u32,
    pub(super) entries: BTreeMap<String, GgufValue>,
}

impl Gguf {
    /// Returns the file's path, for error messages. For a split model, this is the first file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Returns every key, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Returns every key with the bytes of its type and value, in the file's order. Fails for version 1,
    /// whose values are encoded differently.
    pub fn stored_entries(&self) -> Result<impl Iterator<Item = (&str, &[u8])>> {
        let counts = CountWidth::for_version(self.version);
        ensure!(
            counts == CountWidth::Bits64,
            "{}: metadata of GGUF version {} cannot be copied: convert the file to version 3",
            self.path().display(),
            self.version
        );
        let bytes = self.file.bytes();
        // After the magic number, the version and the two counts.
        let mut cursor = Cursor::new(bytes, 8 + 2 * counts.bytes(), counts);
        let mut entry = || {
            let key = cursor.string()?;
            let begin = cursor.at();
            GgufValue::read(&mut cursor)?;
            Ok((std::str::from_utf8(&bytes[key])?, &bytes[begin..cursor.at()]))
        };
        let entries = self.entries.iter().map(|_| entry()).collect::<Result<Vec<_>>>();
        Ok(entries.with_context(|| self.path().display().to_string())?.into_iter())
    }

    /// Returns the stored value of a key.
    pub fn value(&self, key: &str) -> Option<&GgufValue> {
        self.entries.get(key)
    }

    /// Returns a string. Fails if the key is absent.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.require(key, self.opt_str(key)?)
    }

    /// Returns a string, or `None` if the key is absent.
    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(GgufValue::String(range)) => self.text(key, &self.file.bytes()[range.clone()]).map(Some),
            Some(other) => Err(self.key_error(key, format_args!("{} is not a string", other.describe()))),
        }
    }

    /// Returns a 32-bit integer. Fails if the key is absent.
    pub fn u32(&self, key: &str) -> Result<u32> {
        self.require(key, self.opt_u32(key)?)
    }

    /// Returns a 32-bit integer, or `None` if the key is absent.
    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a non-negative 32-bit integer", |value| value.as_u64()?.try_into().ok())
    }

    /// Returns a token id; a stored -1 means none.
    pub fn opt_id(&self, key: &str) -> Result<Option<u32>> {
        match self.value(key) {
            Some(GgufValue::Signed(-1)) => Ok(None),
            _ => self.opt_u32(key),
        }
    }

    /// Returns a floating-point number. Fails if the key is absent.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.require(key, self.opt_f32(key)?)
    }

    /// Returns a floating-point number, or `None` if the key is absent.
    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a floating-point number", |value| match value {
            GgufValue::F32(number) => Some(*number),
            GgufValue::F64(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// Returns a truth value. Fails if the key is absent.
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.require(key, self.opt_bool(key)?)
    }

    /// Returns a truth value, or `None` if the key is absent.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| match value {
            GgufValue::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// Returns an array of strings. Fails if one of them is not UTF-8.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        self.require(key, self.opt_strings(key)?)
    }

    /// Returns a list of strings, or `None` if the key is absent.
    pub fn opt_strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(array) = self.array(key, "strings", |ty| ty == ValueType::String)? else { return Ok(None) };
        let mut cursor = self.cursor(array);
        let mut string = || self.text(key, &self.file.bytes()[cursor.string()?]);
        (0..array.len).map(|_| string()).collect::<Result<_>>().map(Some)
    }

    /// Returns one element of an array of strings, or `None` if the array is absent or shorter.
    pub fn opt_string_at(&self, key: &str, index: usize) -> Result<Option<&str>> {
        let array = self.array(key, "strings", |ty| ty == ValueType::String)?;
        let Some(array) = array.filter(|array| index < array.len) else { return Ok(None) };
        let mut cursor = self.cursor(array);
        for _ in 0..index {
            cursor.string()?;
        }
        self.text(key, &self.file.bytes()[cursor.string()?]).map(Some)
    }

    /// Returns an array of F32 or F64 numbers, converted to F32.
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>> {
        self.require(key, self.opt_f32s(key)?)
    }

    /// Returns a list of floating-point numbers, or `None` if the key is absent.
    pub fn opt_f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        let is_float = |ty| matches!(ty, ValueType::F32 | ValueType::F64);
        self.numbers(key, "floating-point numbers", is_float, |value| match value {
            GgufValue::F32(number) => Some(number),
            GgufValue::F64(number) => Some(number as f32),
            _ => None,
        })
    }

    /// Returns an array of integers that fit 32 bits.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>> {
        self.require(key, self.opt_i32s(key)?)
    }

    /// Returns a list of integers, or `None` if the key is absent.
    pub fn opt_i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        let is_whole = |ty| {
            !matches!(
                ty,
                ValueType::F32 | ValueType::F64 | ValueType::Bool | ValueType::String | ValueType::Array
            )
        };
        self.numbers(key, "32-bit integers", is_whole, |value| match value {
            GgufValue::Unsigned(number) => number.try_into().ok(),
            GgufValue::Signed(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// Returns an error about a key's value, for conditions beyond its type.
    pub fn key_error(&self, key: &str, reason: impl fmt::Display) -> anyhow::Error {
        anyhow!("{}: key '{key}': {reason}", self.path().display())
    }

    fn require<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.key_error(key, "it is missing"))
    }

    fn typed<T>(&self, key: &str, kind: &str, read: impl Fn(&GgufValue) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let read = read(value);
        read.map(Some).ok_or_else(|| self.key_error(key, format_args!("{} is not {kind}", value.describe())))
    }

    fn numbers<T>(
        &self,
        key: &str,
        kind: &str,
        is_kind: impl Fn(ValueType) -> bool,
        read: impl Fn(GgufValue) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(array) = self.array(key, kind, is_kind)? else { return Ok(None) };
        let mut cursor = self.cursor(array);
        let mut number = || {
            let value = GgufValue::read_typed(array.elements, &mut cursor, 0)?;
            let shown = value.describe();
            read(value).ok_or_else(|| {
                self.key_error(key, format_args!("the array has {shown}, but must hold {kind}"))
            })
        };
        (0..array.len).map(|_| number()).collect::<Result<_>>().map(Some)
    }

    fn array(
        &self,
        key: &str,
        kind: &str,
        is_kind: impl Fn(ValueType) -> bool,
    ) -> Result<Option<&GgufArray>> {
        match self.value(key) {
            None => Ok(None),
            Some(GgufValue::Array(array)) if is_kind(array.elements) => Ok(Some(array)),
            Some(other) => {
                Err(self.key_error(key, format_args!("{} is not an array of {kind}", other.describe())))
            }
        }
    }

    fn cursor(&self, array: &GgufArray) -> Cursor<'_> {
        Cursor::new(self.file.bytes(), array.bytes.start, CountWidth::for_version(self.version))
    }

    fn text<'a>(&self, key: &str, bytes: &'a [u8]) -> Result<&'a str> {
        std::str::from_utf8(bytes).with_context(|| format!("{}: key '{key}'", self.path().display()))
    }
}

impl fmt::Debug for Gguf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gguf({}, version {}, {} keys)", self.path().display(), self.version, self.entries.len())
    }
}
