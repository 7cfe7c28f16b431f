//! The models in the hub's cache: what there is, and removing it.
//!
//! Invariant: only folders with the names of models are read or removed, and of those only what a
//! [`Repository`] has.

use super::reference::HubReference;
use super::repository::{Locks, Repository};
use super::{CachedSnapshot, Hub};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A model in the hub's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// `owner/name`
    pub repository: String,
    /// Folder of the model in the cache.
    pub folder: PathBuf,
    /// Bytes of all files, also of those that are not complete.
    pub bytes: u64,
    /// Branches, tags and commits, sorted by name.
    pub revisions: Vec<CachedRevision>,
}

/// A revision of a model in the hub's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRevision {
    /// Branch or tag; the commit if none refers to it.
    pub name: String,
    pub commit: String,
    /// Whether all files that loading needs are there.
    pub is_loadable: bool,
}

impl Hub {
    /// Returns the models in the cache, sorted by name. Fails if the cache cannot be read.
    pub fn cached(&self) -> Result<Vec<CachedModel>> {
        let names = names_in(&self.cache).with_context(|| format!("cannot read {}", self.cache.display()))?;
        let folders = names.iter().filter(|name| self.cache.join(name).is_dir());
        let models = folders.filter_map(|name| HubReference::of_folder(name));
        // A model may be removed meanwhile.
        Ok(models.filter_map(|reference| self.cached_model(&reference).ok()).collect())
    }

    /// Returns a model in the cache. Fails if it is not there.
    pub fn cached_model(&self, reference: &HubReference) -> Result<CachedModel> {
        let repository = Repository::new(&self.cache, reference);
        let folder = repository.folder().to_owned();
        let missing = || format!("{} is not in {}", reference.repository(), self.cache.display());
        ensure!(folder.is_dir(), missing());
        let unreadable = || format!("cannot read {}", folder.display());
        let mut revisions = Vec::new();
        for name in references(&folder.join("refs"), "").with_context(unreadable)? {
            if let Some(commit) = repository.commit(&name) {
                revisions.push(CachedRevision {
                    is_loadable: is_loadable(&repository, &commit),
                    name,
                    commit,
                });
            }
        }
        for commit in names_in(&folder.join("snapshots")).with_context(unreadable)? {
            if !repository.snapshot(&commit).is_dir() {
                continue;
            }
            if revisions.iter().all(|known| known.commit != commit) {
                let is_loadable = is_loadable(&repository, &commit);
                revisions.push(CachedRevision { name: commit.clone(), is_loadable, commit });
            }
        }
        let bytes = size_of_files(&folder.join("blobs")).with_context(unreadable)?;
        Ok(CachedModel { repository: reference.repository().to_owned(), folder, bytes, revisions })
    }

    /// Removes a model with all its revisions from the cache. A process that uses its files keeps them until
    /// it ends. Fails if the model is not there, is a link to another folder, or is being downloaded.
    pub fn remove(&self, reference: &HubReference) -> Result<CachedModel> {
        let model = self.cached_model(reference)?;
        let CachedModel { repository: name, folder, .. } = &model;
        ensure!(!folder.is_symlink(), "{} is a link: remove what it leads to, and it", folder.display());
        let failed = || format!("cannot remove {}", folder.display());
        let locks =
            Locks::new(&self.cache, reference).take_all(&folder.join("blobs")).with_context(failed)?;
        let _held = locks.with_context(|| format!("{name}: another process is downloading it"))?;
        self.remove_leftovers();
        // First under another name, so that no start finds a part of it.
        let leaving = self.cache.join(format!("{REMOVED}{}", std::process::id()));
        fs::rename(folder, &leaving).with_context(failed)?;
        fs::remove_dir_all(&leaving).with_context(|| format!("cannot remove {}", leaving.display()))?;
        Ok(model)
    }

    /// Removes what removals that ended early have left.
    fn remove_leftovers(&self) {
        for name in names_in(&self.cache).unwrap_or_default().iter().filter(|name| name.starts_with(REMOVED))
        {
            let _ = fs::remove_dir_all(self.cache.join(name));
        }
    }
}

/// Names of folders that are being removed begin with this.
const REMOVED: &str = ".removed-";

fn is_loadable(repository: &Repository, commit: &str) -> bool {
    CachedSnapshot::find(repository, commit).is_some()
}

/// Returns the names in a folder that are text, sorted; none if there is no folder.
fn names_in(folder: &Path) -> std::io::Result<BTreeSet<String>> {
    match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
        Ok(entries) => entries
            .filter_map(|entry| entry.map(|entry| entry.file_name().into_string().ok()).transpose())
            .collect(),
    }
}

/// Returns the paths of files below a folder, each after `before`.
fn references(folder: &Path, before: &str) -> std::io::Result<Vec<String>> {
    let mut found = Vec::new();
    for name in names_in(folder)? {
        let (path, name) = (folder.join(&name), format!("{before}{name}"));
        match path.symlink_metadata()?.is_dir() {
            true => found.extend(references(&path, &format!("{name}/"))?),
            false => found.push(name),
        }
    }
    Ok(found)
}

/// Returns the bytes of the files in a folder.
fn size_of_files(folder: &Path) -> std::io::Result<u64> {
    names_in(folder)?.iter().map(|name| Ok(folder.join(name).symlink_metadata()?.len())).sum()
}
