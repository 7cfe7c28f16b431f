//! A file's bytes, mapped into memory: pages come from the disk when first read and are shared with
//! every other process that maps the file.
//!
//! Invariant: the bytes are constant, because nobody writes to a file that is being served.
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
        // Asked before opening: opening a pipe would wait for its writer.
        let metadata = std::fs::metadata(path).with_context(name)?;
        ensure!(metadata.is_file(), "{}: not a regular file", path.display());
        let file = File::open(path).with_context(name)?;
        // SAFETY: the operator promises, as the documentation asks, that a model's files are neither
        // written to nor truncated while they are served; replacing them by renaming is fine.
        let map = unsafe { Mmap::map(&file) }.with_context(name)?;
        Ok(MappedFile { path: path.to_owned(), map })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Gives the memory of these bytes back: whoever reads them again gets them from the disk, or from the system's cache.
    #[cfg(unix)]
    pub fn let_go(&self, bytes: Range<usize>) {
        // SAFETY: the mapping is of a file and never written to, so that pages which are dropped come back the same.
        let advised =
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
        // Only advice: the memory is given back later, when it is needed.
        drop(advised);
    }

    /// Gives nothing back, where there is no way to.
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
            file.let_go(range);
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
