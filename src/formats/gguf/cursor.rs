//! A cursor over the bytes of a GGUF file.
//!
//! Invariant: every range a cursor returns lies inside the file, and a count is no larger than the rest of
//! the file can hold.

use crate::formats::fixed_bytes;
use anyhow::{Context, Result, ensure};
use std::ops::Range;

/// Width of counts and lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CountWidth {
    /// Version 1.
    Bits32,
    Bits64,
}

impl CountWidth {
    /// Returns the width that a version of the format uses.
    pub(super) fn for_version(version: u32) -> CountWidth {
        if version == 1 { CountWidth::Bits32 } else { CountWidth::Bits64 }
    }

    /// Bytes of one count.
    pub(super) fn bytes(self) -> usize {
        match self {
            CountWidth::Bits32 => 4,
            CountWidth::Bits64 => 8,
        }
    }
}

/// A read position in the bytes of a file.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    pub(super) count_width: CountWidth,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize, counts: CountWidth) -> Cursor<'a> {
        Cursor { bytes, at, count_width: counts }
    }

    /// Offset of the next byte to be read.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// Reads the next `N` bytes.
    pub(super) fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let taken = fixed_bytes(self.bytes, self.at)?;
        self.at += N;
        Ok(taken)
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    /// Reads an unsigned integer of the width of counts.
    pub(super) fn size(&mut self) -> Result<usize> {
        let size = match self.count_width {
            CountWidth::Bits32 => self.u32()?.into(),
            CountWidth::Bits64 => self.u64()?,
        };
        usize::try_from(size)
            .with_context(|| format!("the size {size} does not fit this machine's address space"))
    }

    /// Reads the number of `what` that follow, each of at least `bytes_min` bytes. Fails if the file is too
    /// short for them.
    pub(super) fn count(&mut self, what: &str, bytes_min: usize) -> Result<usize> {
        let (at, count) = (self.at, self.size()?);
        let left = self.bytes.len() - self.at;
        let needed = count.checked_mul(bytes_min);
        ensure!(
            needed.is_some_and(|needed| needed <= left),
            "truncated: {count} {what} are declared at offset {at}, but only {left} bytes follow"
        );
        Ok(count)
    }

    /// Skips `len` bytes and returns their range.
    pub(super) fn skip(&mut self, len: usize) -> Result<Range<usize>> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.with_context(|| {
            format!(
                "truncated: expected {len} bytes at offset {}, but only {} follow",
                self.at,
                self.remaining()
            )
        })?;
        let begin = std::mem::replace(&mut self.at, end);
        Ok(begin..end)
    }

    /// Skips a string and returns the range of its bytes.
    pub(super) fn string(&mut self) -> Result<Range<usize>> {
        let len = self.count("string bytes", 1)?;
        self.skip(len)
    }

    /// Reads a string of at most `bytes_max` bytes.
    pub(super) fn name(&mut self, what: &str, bytes_max: usize) -> Result<&'a str> {
        let at = self.at;
        let range = self.string().with_context(|| format!("{what} at offset {at}"))?;
        let len = range.len();
        ensure!(len <= bytes_max, "{what} at offset {at}: it has {len} bytes, more than {bytes_max}");
        std::str::from_utf8(&self.bytes[range]).with_context(|| format!("{what} at offset {at}"))
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }
}
