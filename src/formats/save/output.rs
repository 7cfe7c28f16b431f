//! Atomic output: a model is written to a temporary path next to its target, and renamed when it is complete.
//!
//! Invariant: the target path holds either its previous content or the complete new one, except for the
//! moment in which a folder is replaced. The temporary output is removed however writing ends.

use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Handling of a target that already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    Refuse,
    /// Keep it until its replacement is complete.
    Replace,
}

/// Output in progress. Dropping it before [`AtomicOutput::finish`] removes everything that was written.
#[derive(Debug)]
pub struct AtomicOutput {
    target: PathBuf,
    existing: Existing,
    /// Fails if the existing target must not be replaced.
    check: fn(&Path) -> Result<()>,
    /// Temporary path next to the target, in the same file system.
    temp_path: PathBuf,
    is_finished: bool,
}

impl AtomicOutput {
    /// Creates output to a folder at `target`, whose parent must exist. `check` decides whether an existing
    /// target may be replaced; it runs before writing and again before replacing.
    pub fn folder(target: &Path, existing: Existing, check: fn(&Path) -> Result<()>) -> Result<AtomicOutput> {
        ensure!(!target.is_file(), "{} is a file, but the output is a folder", target.display());
        let place = AtomicOutput::new(target, existing, check)?;
        fs::create_dir(&place.temp_path).with_context(|| format!("cannot write {}", target.display()))?;
        Ok(place)
    }

    /// Creates output to a file at `target`; see [`AtomicOutput::folder`].
    pub fn file(target: &Path, existing: Existing, check: fn(&Path) -> Result<()>) -> Result<AtomicOutput> {
        ensure!(!target.is_dir(), "{} is a folder, but the output is a file", target.display());
        AtomicOutput::new(target, existing, check)
    }

    fn new(target: &Path, existing: Existing, check: fn(&Path) -> Result<()>) -> Result<AtomicOutput> {
        let name = target
            .file_name()
            .with_context(|| format!("{} is not a usable output path", target.display()))?;
        let name = format!(".{}.{}.part", name.to_string_lossy(), std::process::id());
        let begun = target.with_file_name(name);
        ensure!(
            fs::symlink_metadata(&begun).is_err(),
            "{} already exists from another run: remove it",
            begun.display()
        );
        let place =
            AtomicOutput { target: target.to_owned(), existing, check, temp_path: begun, is_finished: false };
        place.check_target()?;
        Ok(place)
    }

    /// Fails if the target exists and must not be replaced.
    fn check_target(&self) -> Result<()> {
        if fs::symlink_metadata(&self.target).is_err() {
            return Ok(());
        }
        if self.existing == Existing::Refuse {
            bail!("{} already exists; --force replaces it", self.target.display());
        }
        (self.check)(&self.target)
    }

    /// Returns the temporary path to write to: an existing folder, or a file that does not exist yet.
    pub fn temp_path(&self) -> &Path {
        &self.temp_path
    }

    /// Moves the output to its target. The caller must have synced its files.
    pub fn finish(mut self) -> Result<()> {
        sync(&self.temp_path)?;
        // Another process may have created the target in the meantime.
        self.check_target()?;
        let named = || format!("cannot move {} to {}", self.temp_path.display(), self.target.display());
        let old = self.target.is_dir().then(|| self.temp_path.with_extension("old"));
        if let Some(old) = &old {
            fs::rename(&self.target, old).with_context(named)?;
        }
        if let Err(error) = fs::rename(&self.temp_path, &self.target) {
            if let Some(old) = &old {
                // Restore the previous content.
                let _ = fs::rename(old, &self.target);
            }
            return Err(error).with_context(named);
        }
        self.is_finished = true;
        if let Some(old) = &old {
            fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
        let parent = self.target.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync(parent.unwrap_or(Path::new(".")))
    }
}

impl Drop for AtomicOutput {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let removed = match self.temp_path.is_dir() {
            true => fs::remove_dir_all(&self.temp_path),
            false => fs::remove_file(&self.temp_path),
        };
        if let Err(error) =
            removed.or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
        {
            tracing::warn!("cannot remove {}: {error}", self.temp_path.display());
        }
    }
}

/// Syncs a file or the entries of a folder to disk.
fn sync(path: &Path) -> Result<()> {
    let sync = || File::open(path)?.sync_all();
    sync().with_context(|| format!("cannot sync {}", path.display()))
}

/// Fails if the folder, or a subfolder, has a file whose name `is_ours` does not accept. Subfolders whose
/// names end in `known` may have any files.
pub fn check_only_known_files(folder: &Path, known: &str, is_ours: impl Fn(&str) -> bool) -> Result<()> {
    let named = |folder: &Path| format!("cannot list {}", folder.display());
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| named(&folder))? {
            let entry = entry.with_context(|| named(&folder))?;
            let is_folder = entry.file_type().with_context(|| named(&folder))?.is_dir();
            match is_folder {
                true if entry.file_name().to_str().is_some_and(|name| name.ends_with(known)) => {}
                true => folders.push(entry.path()),
                false => ensure!(
                    entry.file_name().to_str().is_some_and(&is_ours),
                    "{} would be removed, which is not a file of a written model: choose another output path",
                    entry.path().display()
                ),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn are_ours(folder: &Path) -> Result<()> {
        check_only_known_files(folder, ".store", |name| name.ends_with(".json"))
    }

    fn any(_: &Path) -> Result<()> {
        Ok(())
    }

    #[test]
    fn what_is_dropped_leaves_nothing_and_what_is_finished_is_there() {
        let scratch = Scratch::new();
        let (file, folder) = (scratch.path().join("a.gguf"), scratch.path().join("b"));
        for finished in [false, true] {
            let place = AtomicOutput::file(&file, Existing::Refuse, any).unwrap();
            fs::write(place.temp_path(), "x").unwrap();
            let other = AtomicOutput::folder(&folder, Existing::Refuse, are_ours).unwrap();
            fs::write(other.temp_path().join("c.json"), "y").unwrap();
            if finished {
                place.finish().unwrap();
                other.finish().unwrap();
            } else {
                drop((place, other));
                assert!(names(scratch.path()).is_empty());
            }
        }
        assert_eq!(
            (names(scratch.path()), names(&folder)),
            (vec!["a.gguf".into(), "b".into()], vec!["c.json".into()])
        );
    }

    #[test]
    fn what_is_there_is_replaced_only_on_request_and_as_a_whole() {
        let scratch = Scratch::new();
        let (file, folder) = (scratch.write("a", b"old"), scratch.path().join("b"));
        fs::create_dir_all(folder.join("1_Pooling")).unwrap();
        fs::write(folder.join("1_Pooling/config.json"), "old").unwrap();
        for refused in [
            AtomicOutput::file(&file, Existing::Refuse, any),
            AtomicOutput::folder(&folder, Existing::Refuse, are_ours),
        ] {
            assert!(refused.unwrap_err().to_string().contains("already exists; --force"));
        }
        assert!(
            AtomicOutput::file(&folder, Existing::Replace, any).is_err()
                && AtomicOutput::folder(&file, Existing::Replace, are_ours).is_err()
        );
        let place = AtomicOutput::file(&file, Existing::Replace, any).unwrap();
        fs::write(place.temp_path(), "new").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"old");
        place.finish().unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"new");
        AtomicOutput::folder(&folder, Existing::Replace, are_ours).unwrap().finish().unwrap();
        assert!(names(&folder).is_empty() && names(scratch.path()) == ["a", "b"]);
    }

    #[test]
    fn what_came_while_it_was_written_stays() {
        let scratch = Scratch::new();
        let (file, folder) = (scratch.path().join("a"), scratch.path().join("b"));
        let (one, other) = (
            AtomicOutput::file(&file, Existing::Refuse, any).unwrap(),
            AtomicOutput::folder(&folder, Existing::Replace, are_ours).unwrap(),
        );
        fs::write(one.temp_path(), "new").unwrap();
        fs::write(&file, "theirs").unwrap();
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("letter.txt"), "dear").unwrap();
        assert!(one.finish().unwrap_err().to_string().contains("already exists"));
        assert!(other.finish().unwrap_err().to_string().contains("letter.txt"));
        assert_eq!(
            (fs::read(&file).unwrap(), names(&folder)),
            (b"theirs".to_vec(), vec!["letter.txt".into()])
        );
        assert_eq!(names(scratch.path()), ["a", "b"]);
    }

    /// A folder with foreign files is not removed, even with [`Existing::Replace`].
    #[test]
    fn what_is_not_ours_is_never_removed() {
        let scratch = Scratch::new();
        let folder = scratch.path().join("b");
        fs::create_dir_all(folder.join("within")).unwrap();
        fs::write(folder.join("within/letter.txt"), "dear").unwrap();
        let error = AtomicOutput::folder(&folder, Existing::Replace, are_ours).unwrap_err().to_string();
        assert!(error.contains("letter.txt"), "{error}");
        assert_eq!(
            (names(scratch.path()), fs::read(folder.join("within/letter.txt")).unwrap()),
            (vec!["b".into()], b"dear".to_vec())
        );
    }
}
