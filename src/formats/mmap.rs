//! A file's bytes, mapped into memory: pages come from the disk when first read and are shared with
//! every other process that maps the file.
//!
//! Invariant: the bytes are constant, because nobody writes to a file that is being served.
#![allow(unsafe_code)]

use anyhow::{Context, Result, ensure};
use memmap2::Mmap;
use std::fs::File;
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::scratch::Scratch;

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
