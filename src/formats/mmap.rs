//! Memory-mapped files: pages are read from disk on first access and shared with every other process that
//! maps the file.
//!
//! Invariant: the bytes do not change, because nothing writes to a file that is being served.
#![allow(unsafe_code)]

use anyhow::{Context, Result, ensure};
use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A read-only mapping of a whole file.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps `path`, which must be a regular file.
    pub fn open(path: &Path) -> Result<MappedFile> {
        let name = || path.display().to_string();
        // Checked before opening, because opening a pipe would block until it has a writer.
        let metadata = std::fs::metadata(path).with_context(name)?;
        ensure!(metadata.is_file(), "{}: not a regular file", path.display());
        let file = File::open(path).with_context(name)?;
        // SAFETY: the operator promises, as the documentation asks, that a model's files are neither
        // written to nor truncated while they are served; replacing them by renaming is fine.
        let map = unsafe { Mmap::map(&file) }.with_context(name)?;
        Ok(MappedFile { path: path.to_owned(), map })
    }

    /// Returns the path the file was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the content of the whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Releases the memory of these bytes. Later reads fetch them again from disk or from the page cache.
    #[cfg(unix)]
    pub fn release(&self, bytes: Range<usize>) {
        // SAFETY: the mapping is read-only and backed by a file, so dropped pages are read again unchanged.
        let advised =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
        // This is only advice: a failure has no effect on the content.
        drop(advised);
    }

    /// Does nothing: this platform has no such call.
    #[cfg(not(unix))]
    pub fn let_go(&self, _: Range<usize>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn bytes_that_were_let_go_come_back_the_same() {
        let folder = Scratch::new();
        let content: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        let file = MappedFile::open(&folder.write("file", &content)).unwrap();
        for range in [0..content.len(), 5000..5001, 299_999..300_000, 7..7] {
            assert!(file.bytes() == content);
            file.release(range);
        }
        assert!(file.bytes() == content);
    }

    #[test]
    fn whole_files_are_mapped_and_anything_else_is_refused_by_name() {
        let folder = Scratch::new();
        for content in [&b"weights"[..], b""] {
            let path = folder.write("file", content);
            assert_eq!(MappedFile::open(&path).unwrap().bytes(), content);
        }
        for path in [folder.path().to_owned(), folder.path().join("absent")] {
            let error = format!("{:#}", MappedFile::open(&path).unwrap_err());
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
    }
}
