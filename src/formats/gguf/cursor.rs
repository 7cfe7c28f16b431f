//! A place in a file's bytes that moves on as they are read.
//!
//! Invariant: what it gives lies inside the file, and a count it gives is no more than what can still follow.

use crate::formats::fixed_bytes;
use anyhow::{Context, Result, ensure};
use std::ops::Range;

/// How wide counts and lengths are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counts {
    /// As in version 1.
    Bits32,
    Bits64,
}

impl Counts {
    /// Those of that version of the format.
    pub(super) fn of_version(version: u32) -> Counts {
        if version == 1 { Counts::Bits32 } else { Counts::Bits64 }
    }

    /// Bytes of one.
    pub(super) fn bytes(self) -> usize {
        match self {
            Counts::Bits32 => 4,
            Counts::Bits64 => 8,
        }
    }
}

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    pub(super) counts: Counts,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], at: usize, counts: Counts) -> Cursor<'a> {
        Cursor { bytes, at, counts }
    }

    /// The offset of the byte that is read next.
    pub(super) fn at(&self) -> usize {
        self.at
    }

    /// The next `N` bytes.
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

    /// A whole number of the width that the version gives to counts.
    pub(super) fn size(&mut self) -> Result<usize> {
        let size = match self.counts {
            Counts::Bits32 => self.u32()?.into(),
            Counts::Bits64 => self.u64()?,
        };
        usize::try_from(size).with_context(|| format!("{size} is too large for this machine"))
    }

    /// How many of `what` follow, each of at least `bytes_min`.
    pub(super) fn count(&mut self, what: &str, bytes_min: usize) -> Result<usize> {
        let (at, count) = (self.at, self.size()?);
        let left = self.bytes.len() - self.at;
        let needed = count.checked_mul(bytes_min);
        ensure!(
            needed.is_some_and(|needed| needed <= left),
            "truncated: {count} {what} are declared at offset {at}, and {left} bytes follow"
        );
        Ok(count)
    }

    /// Where the next `len` bytes lie.
    pub(super) fn skip(&mut self, len: usize) -> Result<Range<usize>> {
        let end = self.at.checked_add(len).filter(|end| *end <= self.bytes.len());
        let end = end.with_context(|| {
            format!("truncated: {len} bytes expected at offset {}, and {} follow", self.at, self.left())
        })?;
        let begin = std::mem::replace(&mut self.at, end);
        Ok(begin..end)
    }

    /// Where the bytes of a string lie.
    pub(super) fn string(&mut self) -> Result<Range<usize>> {
        let len = self.count("bytes of a string", 1)?;
        self.skip(len)
    }

    /// A name of at most `bytes_max`.
    pub(super) fn name(&mut self, what: &str, bytes_max: usize) -> Result<&'a str> {
        let at = self.at;
        let range = self.string().with_context(|| format!("{what} at offset {at}"))?;
        let len = range.len();
        ensure!(len <= bytes_max, "{what} at offset {at}: {len} bytes long, more than {bytes_max}");
        std::str::from_utf8(&self.bytes[range]).with_context(|| format!("{what} at offset {at}"))
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }
}
