//! The folder of files and batches: the contents of files, uploads that are not complete, the database, and
//! the lock that keeps other servers out.
//!
//! Invariant: nobody but the user of the server can read what is in it, and no other server uses it before
//! this one has written the last byte. A file whose content is here without being in the database, or in a
//! batch that has not ended, is removed at the next start.

use super::{FILE_PREFIX, lock};
use anyhow::{Context, Result, bail};
use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// The locked folder of a server.
pub struct Folder {
    path: PathBuf,
    /// `None` once the folder is released.
    lock: Mutex<Option<Arc<FolderLock>>>,
}

/// The lock of a folder, which everything that writes to it holds.
pub struct FolderLock(File);

impl Drop for FolderLock {
    /// Releases the lock at once: a process that is just being started may have the same open file.
    fn drop(&mut self) {
        _ = self.0.unlock();
    }
}

const CONTENTS: &str = "files";
const UPLOADS: &str = "uploads";

impl Folder {
    /// Opens or creates a folder. Fails if another server uses it.
    pub fn open(path: &Path) -> Result<Folder> {
        let named = || format!("batches.data_dir = {:?}: cannot use the folder", path.display().to_string());
        for folder in [path.to_owned(), path.join(CONTENTS), path.join(UPLOADS)] {
            DirBuilder::new().recursive(true).mode(0o700).create(folder).with_context(named)?;
        }
        let lock = private().create(true).truncate(false).open(path.join("lock")).with_context(named)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("batches.data_dir = {:?}: another server uses this folder", path.display().to_string())
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(named),
        }
        let folder = Folder { path: path.to_owned(), lock: Mutex::new(Some(Arc::new(FolderLock(lock)))) };
        // Without their database, they would be removed as what a server has left.
        if !folder.database().exists() && folder.has_contents().with_context(named)? {
            let (path, database) = (path.display().to_string(), folder.database());
            bail!(
                "batches.data_dir = {path:?}: there are files of batches, but no database {}; restore it, or \
                 move the folder {CONTENTS:?} away",
                database.display()
            );
        }
        // The database and the files beside it have the mode that it has when it is opened.
        private().create(true).truncate(false).open(folder.database()).with_context(named)?;
        Ok(folder)
    }

    /// Returns whether the content of a file is in the folder.
    fn has_contents(&self) -> io::Result<bool> {
        for entry in std::fs::read_dir(self.path.join(CONTENTS))? {
            if entry?.file_name().to_str().is_some_and(is_file_id) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Lets other servers use the folder once nobody holds it. Nothing can be begun here any more.
    pub fn release(&self) {
        lock(&self.lock).take();
    }

    /// Keeps other servers out until the result is dropped. Fails if the folder is released.
    pub fn hold(&self) -> io::Result<Arc<FolderLock>> {
        lock(&self.lock).clone().ok_or_else(|| io::Error::other("the server has stopped"))
    }

    /// Returns the path of the database.
    pub fn database(&self) -> PathBuf {
        self.path.join("batches.sqlite")
    }

    /// Returns the path of a file's content. `id` must be one that the server has made.
    pub fn content(&self, id: &str) -> PathBuf {
        self.path.join(CONTENTS).join(id)
    }

    /// Creates the file of an upload.
    pub fn create_upload(&self, id: &str) -> io::Result<Upload> {
        let (path, lock) = (self.path.join(UPLOADS).join(id), self.hold()?);
        let file = private().create_new(true).open(&path)?;
        Ok(Upload { file, path, content: self.content(id), _lock: lock })
    }

    /// Creates a file for answers, unless it is there.
    pub fn create_content(&self, id: &str) -> io::Result<()> {
        let path = self.content(id);
        private().create(true).truncate(false).open(&path)?;
        sync_folder(&path)
    }

    /// Removes a file's content.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        match std::fs::remove_file(self.content(id)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// Removes all uploads, and the contents of all files but these: what a server that was killed has left.
    /// Returns their number. Files whose names are not those of a server stay.
    pub fn remove_others(&self, known: &HashSet<String>) -> io::Result<usize> {
        let mut removed = 0;
        for (folder, known) in [(UPLOADS, None), (CONTENTS, Some(known))] {
            for entry in std::fs::read_dir(self.path.join(folder))? {
                let entry = entry?;
                let is_known =
                    |known: &HashSet<String>| entry.file_name().to_str().is_some_and(|id| known.contains(id));
                let is_own =
                    entry.file_name().to_str().is_some_and(is_file_id) && entry.file_type()?.is_file();
                if is_own && !known.is_some_and(is_known) {
                    std::fs::remove_file(entry.path())?;
                    removed += 1;
                }
            }
        }
        Ok(removed)
    }
}

/// Returns whether a name is one that the server makes: the folder may have been another one's before.
fn is_file_id(name: &str) -> bool {
    let random = name.strip_prefix(FILE_PREFIX).map(|rest| rest.split('-').next().unwrap_or(rest));
    random.is_some_and(|random| random.len() == 32 && random.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns the options to write a file that others cannot read.
fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}

/// The file of an upload, which is removed unless it becomes the content of a file.
pub struct Upload {
    pub file: File,
    path: PathBuf,
    content: PathBuf,
    _lock: Arc<FolderLock>,
}

impl Upload {
    /// Makes it the content of its file, on the disk.
    pub fn keep(self) -> io::Result<()> {
        self.file.sync_all()?;
        std::fs::rename(&self.path, &self.content)?;
        sync_folder(&self.content)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        // It is not there any more if it was kept.
        _ = std::fs::remove_file(&self.path);
    }
}

/// Writes the entry of a file in its folder to the disk.
fn sync_folder(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::new_id;
    use super::*;
    use crate::testing::Scratch;
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_folder_has_one_server_and_no_readers() {
        let scratch = Scratch::new();
        let path = scratch.path().join("a/data");
        let folder = Folder::open(&path).unwrap();
        let error = Folder::open(&path).err().unwrap().to_string();
        assert!(
            error.contains("data_dir = ") && error.ends_with("another server uses this folder"),
            "{error}"
        );
        for (name, mode) in [("", 0o700), ("files", 0o700), ("batches.sqlite", 0o600), ("lock", 0o600)] {
            assert_eq!(path.join(name).metadata().unwrap().permissions().mode() & 0o777, mode, "{name}");
        }
        // Regression: the lock was released while an upload was still being written.
        let upload = folder.create_upload("file-1").unwrap();
        folder.release();
        assert!(Folder::open(&path).is_err() && folder.create_upload("file-2").is_err());
        drop(upload);
        drop(Folder::open(&path).unwrap());
        std::fs::write(scratch.path().join("file"), "").unwrap();
        let error = format!("{:#}", Folder::open(&scratch.path().join("file")).err().unwrap());
        assert!(error.starts_with("batches.data_dir = "), "{error}");
    }

    #[test]
    fn what_a_killed_server_left_is_removed() {
        let scratch = Scratch::new();
        let folder = Folder::open(scratch.path()).unwrap();
        let [one, two, three, four] = [(); 4].map(|()| new_id(FILE_PREFIX));
        let mut kept = folder.create_upload(&one).unwrap();
        kept.file.write_all(b"kept").unwrap();
        kept.keep().unwrap();
        let two = two + "-output";
        folder.create_content(&two).unwrap();
        std::fs::write(scratch.path().join(UPLOADS).join(&three), "").unwrap();
        drop(folder.create_upload(&four).unwrap());
        // Somebody chose a folder that had files already.
        std::fs::write(folder.content("file-of-mine"), "mine").unwrap();
        assert_eq!(folder.remove_others(&[one.clone()].into()).unwrap(), 2);
        assert_eq!(std::fs::read(folder.content(&one)).unwrap(), b"kept");
        assert!(!folder.content(&two).exists() && folder.content("file-of-mine").exists());
        // Regression: with a database that was lost, the next start removed all files.
        std::fs::remove_file(folder.database()).unwrap();
        drop(folder);
        let error = Folder::open(scratch.path()).err().unwrap().to_string();
        assert!(error.contains("there are files of batches, but no database "), "{error}");
        std::fs::write(scratch.path().join("batches.sqlite"), "").unwrap();
        let folder = Folder::open(scratch.path()).unwrap();
        folder.remove(&one).unwrap();
        folder.remove(&one).unwrap();
    }
}
