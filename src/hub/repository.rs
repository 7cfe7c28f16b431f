//! A repository's folder in the hub's cache, laid out as the hub's own tools lay it out: `blobs/` by content,
//! `snapshots/COMMIT/` with a link for each file, `refs/REVISION` with a commit's name, `.no_exist/COMMIT/`
//! with a mark for each file the commit is known to lack.
//!
//! Invariant: every path is this folder joined to plain names and to a reference's own revision. What has a
//! blob's name is whole: it is filled as a part, under a lock that the system frees when a process ends.

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

/// Where the content of one name is, or will be.
pub(super) struct Blob {
    blobs: PathBuf,
    etag: String,
}

impl Repository {
    pub fn new(cache: &Path, reference: &HubReference) -> Repository {
        let name = format!("models--{}", reference.repository().replace('/', "--"));
        Repository { folder: cache.join(name) }
    }

    /// The folder with a commit's files.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// The commit that a revision was when it was last fetched.
    pub fn commit(&self, revision: &str) -> Option<String> {
        let commit = fs::read_to_string(self.reference(revision)).ok()?.trim().to_owned();
        is_plain_name(&commit).then_some(commit)
    }

    /// Notes which commit a revision is.
    pub fn set_commit(&self, revision: &str, commit: &str) -> io::Result<()> {
        if self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let reference = self.reference(revision);
        create_folder_of(&reference)?;
        // Never seen half-written.
        let new = self.folder.join(format!(".ref-{}", std::process::id()));
        fs::write(&new, commit)?;
        fs::rename(new, reference)
    }

    /// Whether it is known that a commit has no file of that name.
    pub fn is_absent(&self, commit: &str, name: &str) -> bool {
        self.absent(commit).join(name).exists()
    }

    pub fn mark_absent(&self, commit: &str, name: &str) -> io::Result<()> {
        if self.is_absent(commit, name) {
            return Ok(());
        }
        let mark = self.absent(commit).join(name);
        create_folder_of(&mark)?;
        fs::write(mark, [])
    }

    /// The place of the content that the hub calls `etag`: refused if it is no plain name.
    pub fn blob(&self, etag: &str) -> Result<Blob> {
        ensure!(is_plain_name(etag), "the hub calls its content {etag:?}, which is no name for a file");
        Ok(Blob { blobs: self.folder.join("blobs"), etag: etag.to_owned() })
    }

    /// Gives the content a name in a commit's folder, or in a folder there.
    pub fn link(&self, blob: &Blob, commit: &str, name: &str) -> io::Result<()> {
        let link = self.snapshot(commit).join(name);
        create_folder_of(&link)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let target = Path::new(&up).join("blobs").join(&blob.etag);
        match std::os::unix::fs::symlink(&target, &link) {
            // By another process that knows the same content.
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

fn create_folder_of(file: &Path) -> io::Result<()> {
    fs::create_dir_all(file.parent().expect("it is in a folder; anything else is a bug"))
}

impl Blob {
    pub fn path(&self) -> PathBuf {
        self.blobs.join(&self.etag)
    }

    /// What has come of it so far.
    pub fn part(&self) -> PathBuf {
        self.beside("part")
    }

    /// The right to fill the part, until it is dropped. Waits while another process has it.
    pub fn lock(&self, name: &str) -> io::Result<File> {
        fs::create_dir_all(&self.blobs)?;
        let lock = OpenOptions::new().create(true).append(true).open(self.beside("lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                info!("{name}: another process is fetching it; waiting for that");
                lock.lock()?;
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(lock)
    }

    fn beside(&self, ending: &str) -> PathBuf {
        self.blobs.join(format!("{}.{ending}", self.etag))
    }
}
