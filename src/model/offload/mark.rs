//! Marks of a model's files, by which a store is known to be made of them.
//!
//! Invariant: files with different bytes have different marks, unless they differ only between the blocks
//! that mark a large file, and have the same time of change.

use super::direct::{BLOCK, DirectFile};
use crate::formats::Checkpoint;
use crate::model::progress::Progress;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;
use xxhash_rust::xxh3::Xxh3;

/// Files up to this size in bytes are marked by all their bytes, larger ones by a block of each [`STRIDE`].
const MARKED_WHOLE: u64 = 64 << 20;

/// Distance of the blocks that mark a large file, in bytes: matrices that matter are larger.
const STRIDE: u64 = 1 << 20;

/// A file of the model as it was when the store was written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileMark {
    pub path: PathBuf,
    pub bytes: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub changed: u128,
    /// XXH3 of its bytes, or of a part of them: image builders give files of the same size the same time.
    pub sample: u64,
}

impl FileMark {
    /// Returns the mark of a file. Fails if it cannot be read.
    pub fn new(path: &Path) -> Result<FileMark> {
        let read = || {
            let file = File::open(path)?;
            let found = file.metadata()?;
            let changed = found.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            let changed = changed.map_or(0, |time| time.as_nanos());
            let sample = sample(&file, found.len())?;
            io::Result::Ok(FileMark { path: canonical(path), bytes: found.len(), changed, sample })
        };
        read().with_context(|| format!("cannot read {}", path.display()))
    }
}

/// The marks of a model's files, which are read once.
#[derive(Clone, Debug, Default)]
pub struct FileMarks(Arc<OnceLock<Vec<FileMark>>>);

impl FileMarks {
    /// Returns the marks of the files of `checkpoint`, which is the same one each time. Those of built-in
    /// models are in the program, and have none. Fails if a file cannot be read.
    pub fn of(&self, checkpoint: &Checkpoint) -> Result<&[FileMark]> {
        if let Some(marks) = self.0.get() {
            return Ok(marks);
        }
        let files = checkpoint.files().filter(|path| path.exists());
        let marks = files.map(FileMark::new).collect::<Result<_>>()?;
        Ok(self.0.get_or_init(|| marks))
    }
}

/// Returns the checksum of a file's bytes, or of a part of them if it is large.
fn sample(file: &File, bytes: u64) -> io::Result<u64> {
    let stride = if bytes <= MARKED_WHOLE { BLOCK as u64 } else { STRIDE };
    let (mut hash, mut block) = (Xxh3::new(), [0; BLOCK]);
    let mut offset = 0;
    while offset < bytes {
        let part = &mut block[..BLOCK.min((bytes - offset) as usize)];
        file.read_exact_at(part, offset)?;
        hash.update(part);
        offset += stride;
    }
    Ok(hash.digest())
}

/// Returns the checksums of all bytes of some files. Fails if one of them cannot be read, or if the work is
/// stopped.
pub fn contents(files: &[PathBuf], progress: &Progress) -> Result<Vec<u64>> {
    let mut block = vec![0; STRIDE as usize];
    let mut content = |(path, bytes): (&PathBuf, u64)| {
        let (file, mut hash, mut offset) = (DirectFile::ordinary(path)?, Xxh3::new(), 0);
        while offset < bytes {
            let part = &mut block[..STRIDE.min(bytes - offset) as usize];
            file.read(offset, part, &|| progress.is_stopped())?;
            hash.update(part);
            offset += part.len() as u64;
            progress.advance(part.len())?;
        }
        anyhow::Ok(hash.digest())
    };
    let cannot_read = |path: &PathBuf| format!("cannot read {}", path.display());
    let size = |path: &PathBuf| path.metadata().map(|found| found.len()).with_context(|| cannot_read(path));
    let sizes = files.iter().map(size).collect::<Result<Vec<u64>>>()?;
    progress.add_total(sizes.iter().sum::<u64>() as usize);
    files.iter().zip(sizes).map(|file| content(file).with_context(|| cannot_read(file.0))).collect()
}

/// Returns the absolute path of a file, without links, if it has one.
pub fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn a_large_file_is_marked_by_blocks_of_all_its_parts() {
        let scratch = Scratch::new();
        scratch.write("large", b"");
        let path = scratch.path().join("large");
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(MARKED_WHOLE + 10 * STRIDE + 1).unwrap();
        let mut marks = vec![FileMark::new(&path).unwrap().sample];
        for offset in [0, 7 * STRIDE + 100, MARKED_WHOLE + 10 * STRIDE] {
            file.write_all_at(b"x", offset).unwrap();
            marks.push(FileMark::new(&path).unwrap().sample);
        }
        marks.dedup();
        assert_eq!(marks.len(), 4);
    }
}
