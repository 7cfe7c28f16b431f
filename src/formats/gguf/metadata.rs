//! What a GGUF file says of its model, by key and type.
//!
//! Invariant: an error names the file and the key; nothing but the value that is asked for is read.

use super::cursor::{Counts, Cursor};
use super::value::{Array, Type, Value};
use crate::formats::mmap::MappedFile;
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The metadata of a GGUF file, which stays mapped.
///
/// Each lookup has a twin with `opt_`, which gives `None` for an absent key where the other gives an error.
/// Numbers may be stored in any width in which they fit.
pub struct Gguf {
    pub(super) file: Arc<MappedFile>,
    pub(super) version: u32,
    pub(super) entries: BTreeMap<String, Value>,
}

impl Gguf {
    /// The file, to name in errors. Of a model in several files, the first.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Every key, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// Every key with the bytes of its value, type first, as version 2 and later have them; in the file's order.
    pub fn stored_entries(&self) -> Result<impl Iterator<Item = (&str, &[u8])>> {
        let counts = Counts::of_version(self.version);
        ensure!(
            counts == Counts::Bits64,
            "{}: keys of GGUF version {} cannot be copied: convert the file to version 3",
            self.path().display(),
            self.version
        );
        let bytes = self.file.bytes();
        // Behind magic, version and the two counts.
        let mut cursor = Cursor::new(bytes, 8 + 2 * counts.bytes(), counts);
        let mut entry = || {
            let key = cursor.string()?;
            let begin = cursor.at();
            Value::read(&mut cursor)?;
            Ok((std::str::from_utf8(&bytes[key])?, &bytes[begin..cursor.at()]))
        };
        let entries = self.entries.iter().map(|_| entry()).collect::<Result<Vec<_>>>();
        Ok(entries.with_context(|| self.path().display().to_string())?.into_iter())
    }

    /// The value of a key as it is stored.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.entries.get(key)
    }

    pub fn str(&self, key: &str) -> Result<&str> {
        self.present(key, self.opt_str(key)?)
    }

    pub fn opt_str(&self, key: &str) -> Result<Option<&str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(range)) => self.text(key, &self.file.bytes()[range.clone()]).map(Some),
            Some(other) => Err(self.wrong(key, format_args!("{} is not a string", other.kind()))),
        }
    }

    pub fn u32(&self, key: &str) -> Result<u32> {
        self.present(key, self.opt_u32(key)?)
    }

    pub fn opt_u32(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a whole number of 32 bits", |value| value.whole()?.try_into().ok())
    }

    /// A token's id; -1 says that there is none.
    pub fn opt_id(&self, key: &str) -> Result<Option<u32>> {
        match self.value(key) {
            Some(Value::Signed(-1)) => Ok(None),
            _ => self.opt_u32(key),
        }
    }

    pub fn f32(&self, key: &str) -> Result<f32> {
        self.present(key, self.opt_f32(key)?)
    }

    pub fn opt_f32(&self, key: &str) -> Result<Option<f32>> {
        self.typed(key, "a number in single precision", |value| match value {
            Value::F32(number) => Some(*number),
            Value::F64(number) => Some(*number as f32),
            _ => None,
        })
    }

    pub fn bool(&self, key: &str) -> Result<bool> {
        self.present(key, self.opt_bool(key)?)
    }

    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", |value| match value {
            Value::Bool(flag) => Some(*flag),
            _ => None,
        })
    }

    /// An array of strings; an error if one of them is no UTF-8.
    pub fn strings(&self, key: &str) -> Result<Vec<&str>> {
        self.present(key, self.opt_strings(key)?)
    }

    pub fn opt_strings(&self, key: &str) -> Result<Option<Vec<&str>>> {
        let Some(array) = self.array(key, "strings", |ty| ty == Type::String)? else { return Ok(None) };
        let mut cursor = self.cursor(array);
        let mut string = || self.text(key, &self.file.bytes()[cursor.string()?]);
        (0..array.len).map(|_| string()).collect::<Result<_>>().map(Some)
    }

    /// One element of an array of strings; `None` if there is no such array, or it is shorter.
    pub fn opt_string_at(&self, key: &str, index: usize) -> Result<Option<&str>> {
        let array = self.array(key, "strings", |ty| ty == Type::String)?;
        let Some(array) = array.filter(|array| index < array.len) else { return Ok(None) };
        let mut cursor = self.cursor(array);
        for _ in 0..index {
            cursor.string()?;
        }
        self.text(key, &self.file.bytes()[cursor.string()?]).map(Some)
    }

    /// An array of numbers in single or double precision.
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>> {
        self.present(key, self.opt_f32s(key)?)
    }

    pub fn opt_f32s(&self, key: &str) -> Result<Option<Vec<f32>>> {
        let is_float = |ty| matches!(ty, Type::F32 | Type::F64);
        self.numbers(key, "numbers in single precision", is_float, |value| match value {
            Value::F32(number) => Some(number),
            Value::F64(number) => Some(number as f32),
            _ => None,
        })
    }

    /// An array of whole numbers that fit 32 bits.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>> {
        self.present(key, self.opt_i32s(key)?)
    }

    pub fn opt_i32s(&self, key: &str) -> Result<Option<Vec<i32>>> {
        let is_whole = |ty| !matches!(ty, Type::F32 | Type::F64 | Type::Bool | Type::String | Type::Array);
        self.numbers(key, "whole numbers of 32 bits", is_whole, |value| match value {
            Value::Unsigned(number) => number.try_into().ok(),
            Value::Signed(number) => number.try_into().ok(),
            _ => None,
        })
    }

    /// An error about a key's value: for what the types cannot say.
    pub fn wrong(&self, key: &str, reason: impl fmt::Display) -> anyhow::Error {
        anyhow!("{}: key '{key}': {reason}", self.path().display())
    }

    fn present<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(key, "it is missing"))
    }

    fn typed<T>(&self, key: &str, kind: &str, read: impl Fn(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let read = read(value);
        read.map(Some).ok_or_else(|| self.wrong(key, format_args!("{} is not {kind}", value.kind())))
    }

    fn numbers<T>(
        &self,
        key: &str,
        kind: &str,
        is_kind: impl Fn(Type) -> bool,
        read: impl Fn(Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some(array) = self.array(key, kind, is_kind)? else { return Ok(None) };
        let mut cursor = self.cursor(array);
        let mut number = || {
            let value = Value::of_type(array.elements, &mut cursor, 0)?;
            let shown = value.kind();
            read(value).ok_or_else(|| self.wrong(key, format_args!("{shown} is not among {kind}")))
        };
        (0..array.len).map(|_| number()).collect::<Result<_>>().map(Some)
    }

    fn array(&self, key: &str, kind: &str, is_kind: impl Fn(Type) -> bool) -> Result<Option<&Array>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(array)) if is_kind(array.elements) => Ok(Some(array)),
            Some(other) => Err(self.wrong(key, format_args!("{} is not an array of {kind}", other.kind()))),
        }
    }

    fn cursor(&self, array: &Array) -> Cursor<'_> {
        Cursor::new(self.file.bytes(), array.bytes.start, Counts::of_version(self.version))
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
