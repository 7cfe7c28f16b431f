//! A repository's folder in the hub's cache, with the layout of the hub's own tools: `blobs/` by content,
//! `snapshots/COMMIT/` with a link for each file, `refs/REVISION` with a commit hash, `.no_exist/COMMIT/`
//! with a marker for each file that the commit is known to lack.
//!
//! Invariant: every path is this folder joined to plain names and to a reference's revision. A file with a
//! blob's name is complete: it is downloaded as a partial file, under a lock that the system releases when
//! the process ends.

use super::reference::HubReference;
use crate::formats::is_plain_name;
use anyhow::{Result, ensure};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use tracing::info;

pub(super) struct Repository {
    folder: PathBuf,
}

/// Location of the content with one ETag, present or not.
pub(super) struct Blob {
    blobs: PathBuf,
    etag: String,
}

impl Repository {
    /// Returns the folder of a model in the hub cache; creates nothing.
    pub fn new(cache: &Path, reference: &HubReference) -> Repository {
        Repository { folder: cache.join(reference.folder_name()) }
    }

    /// Returns the folder with all of the model.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder with a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns the commit of a revision when it was last fetched.
    pub fn commit(&self, revision: &str) -> Option<String> {
        let commit = fs::read_to_string(self.reference(revision)).ok()?.trim().to_owned();
        is_plain_name(&commit).then_some(commit)
    }

    /// Records the commit of a revision.
    pub fn set_commit(&self, revision: &str, commit: &str) -> io::Result<()> {
        if self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let reference = self.reference(revision);
        create_parent(&reference)?;
        // Renaming makes the update atomic.
        let new = self.folder.join(format!(".ref-{}", std::process::id()));
        fs::write(&new, commit)?;
        fs::rename(new, reference)
    }

    /// Whether a commit is known to lack a file.
    pub fn is_absent(&self, commit: &str, name: &str) -> bool {
        self.absent(commit).join(name).exists()
    }

    /// Records that a commit has no file of this name.
    pub fn mark_absent(&self, commit: &str, name: &str) -> io::Result<()> {
        if self.is_absent(commit, name) {
            return Ok(());
        }
        let mark = self.absent(commit).join(name);
        create_parent(&mark)?;
        fs::write(mark, [])
    }

    /// Returns the location of the content with this ETag. Fails if it is not a plain name.
    pub fn blob(&self, etag: &str) -> Result<Blob> {
        ensure!(is_plain_name(etag), "the hub's ETag {etag:?} is not usable as a file name");
        Ok(Blob { blobs: self.folder.join("blobs"), etag: etag.to_owned() })
    }

    /// Links the content into a commit's folder as `name`, which may have folders.
    pub fn link(&self, blob: &Blob, commit: &str, name: &str) -> io::Result<()> {
        let link = self.snapshot(commit).join(name);
        create_parent(&link)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let target = Path::new(&up).join("blobs").join(&blob.etag);
        match std::os::unix::fs::symlink(&target, &link) {
            // Another process has created the link.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && link.exists() => Ok(()),
            made => made,
        }
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }

    fn absent(&self, commit: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit)
    }
}

/// Locks of a model in the hub's cache, which the system releases when the process ends: `.locks/MODEL/` has
/// those of the hub's own tools, by content, and one of ours, which downloads share and a removal has alone.
pub(super) struct Locks {
    folder: PathBuf,
}

impl Locks {
    /// Returns the locks of a model; creates nothing.
    pub fn new(cache: &Path, reference: &HubReference) -> Locks {
        Locks { folder: cache.join(".locks").join(reference.folder_name()) }
    }

    /// Shares the lock of downloads until the returned file is dropped; waits for a removal. `None` if the
    /// cache cannot be written.
    pub fn share(&self) -> Option<File> {
        let lock = self.own().ok()?;
        lock.lock_shared().ok()?;
        Some(lock)
    }

    /// Takes all locks, also those of downloads in `blobs`, until the returned files are dropped. `None` if
    /// another process has one.
    pub fn take_all(&self, blobs: &Path) -> io::Result<Option<Vec<File>>> {
        let mut taken = vec![self.own()?];
        for folder in [&self.folder, blobs] {
            for entry in fs::read_dir(folder).into_iter().flatten() {
                let path = entry?.path();
                if path.extension().is_some_and(|extension| extension == "lock") && path != self.own_path() {
                    taken.push(File::open(path)?);
                }
            }
        }
        for lock in &taken {
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
        Ok(Some(taken))
    }

    fn own(&self) -> io::Result<File> {
        fs::create_dir_all(&self.folder)?;
        OpenOptions::new().create(true).append(true).open(self.own_path())
    }

    fn own_path(&self) -> PathBuf {
        self.folder.join("mainstem.lock")
    }
}

fn create_parent(file: &Path) -> io::Result<()> {
    fs::create_dir_all(file.parent().expect("every path here has a parent; this is a bug"))
}

impl Blob {
    /// Path of the complete file.
    pub fn path(&self) -> PathBuf {
        self.blobs.join(&self.etag)
    }

    /// Path of the partial download.
    pub fn partial_path(&self) -> PathBuf {
        self.with_suffix("part")
    }

    /// Locks the partial download until the returned file is dropped. Blocks while another process holds the
    /// lock.
    pub fn lock(&self, name: &str) -> io::Result<File> {
        fs::create_dir_all(&self.blobs)?;
        let lock = OpenOptions::new().create(true).append(true).open(self.with_suffix("lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                info!("{name}: waiting for another process that is downloading it");
                lock.lock()?;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(lock)
    }

    fn with_suffix(&self, ending: &str) -> PathBuf {
        self.blobs.join(format!("{}.{ending}", self.etag))
    }
}
