//! Access to a model's files, on disk, embedded in the program, or in memory.
//!
//! Invariant: embedded bytes are borrowed in place, never copied. An error about a file names it as
//! [`Folder::file`] does.

use super::mmap::MappedFile;
use anyhow::{Context, Result, bail};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Maximum size of a settings file, and of a tokenizer's file, in bytes. The largest in use have a tenth of
/// it.
const SETTINGS_BYTES_MAX: u64 = 64 << 20;
const TOKENIZER_BYTES_MAX: u64 = 384 << 20;

/// Parts of the names of tokenizer files.
const TOKENIZER_NAMES: [&str; 5] = ["tokenizer", "vocab", "merges", ".tiktoken", ".model"];

/// A folder with a model's files.
#[derive(Clone, Debug)]
pub enum Folder {
    Disk(PathBuf),
    Embedded(&'static EmbeddedFolder),
    Memory(Arc<MemoryFolder>),
}

/// Files held in memory, by name.
#[derive(Debug)]
pub struct MemoryFolder {
    name: String,
    files: BTreeMap<String, Vec<u8>>,
}

/// Files embedded in the program.
pub struct EmbeddedFolder {
    /// The name the folder would have on disk.
    pub name: &'static str,
    /// Name and content of each file.
    pub files: &'static [(&'static str, &'static [u8])],
}

impl Folder {
    /// Creates a folder of the file system.
    pub fn disk(path: &Path) -> Folder {
        Folder::Disk(path.to_owned())
    }

    /// Creates a folder called `name` from files in memory, given as (name, content).
    pub fn memory(name: &str, files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Folder {
        Folder::Memory(Arc::new(MemoryFolder { name: name.to_owned(), files: files.into_iter().collect() }))
    }

    /// Returns the folder's path for error messages. For a folder that is not on disk, it is only a label.
    pub fn path(&self) -> PathBuf {
        match self {
            Folder::Disk(path) => path.clone(),
            Folder::Embedded(folder) => format!("embedded:{}", folder.name).into(),
            Folder::Memory(folder) => format!("memory:{}", folder.name).into(),
        }
    }

    /// Returns a file's path for error messages.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Whether the folder has a file called `name`.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Folder::Disk(path) => path.join(name).exists(),
            Folder::Embedded(folder) => folder.get(name).is_some(),
            Folder::Memory(folder) => folder.files.contains_key(name),
        }
    }

    /// Returns the names of all files and subfolders, sorted.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = match self {
            Folder::Embedded(folder) => folder.files.iter().map(|(name, _)| (*name).to_owned()).collect(),
            Folder::Memory(folder) => folder.files.keys().cloned().collect(),
            Folder::Disk(path) => {
                let list = || std::fs::read_dir(path)?.collect::<std::io::Result<Vec<_>>>();
                let entries = list().with_context(|| format!("cannot list {}", path.display()))?;
                // Names that are not UTF-8 are skipped: no file that the loader reads has one.
                entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect()
            }
        };
        names.sort_unstable();
        Ok(names)
    }

    /// Returns a file's content, or `None` if the file does not exist.
    pub fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>> {
        match self {
            Folder::Embedded(folder) => Ok(folder.get(name).map(Cow::Borrowed)),
            Folder::Memory(folder) => Ok(folder.files.get(name).cloned().map(Cow::Owned)),
            Folder::Disk(path) => match read_bounded(&path.join(name)) {
                Ok(content) => Ok(Some(Cow::Owned(content))),
                Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
                Err(e) => Err(e).with_context(|| self.file(name).display().to_string()),
            },
        }
    }

    /// Returns a file's content. Fails if the file does not exist.
    pub fn read_required(&self, name: &str) -> Result<Cow<'static, [u8]>> {
        match self.read(name)? {
            Some(content) => Ok(content),
            None => bail!("{}: no such file", self.file(name).display()),
        }
    }

    /// Returns a file's text, or `None` if the file does not exist.
    pub fn read_text(&self, name: &str) -> Result<Option<String>> {
        let Some(content) = self.read(name)? else { return Ok(None) };
        let text = String::from_utf8(content.into_owned());
        text.map(Some).with_context(|| self.file(name).display().to_string())
    }

    /// Opens a file for random access: memory-mapped if it is on disk, otherwise borrowed or held in memory.
    pub(super) fn open(&self, name: &str) -> Result<FileBytes> {
        match self {
            Folder::Disk(path) => Ok(FileBytes::Mapped(Arc::new(MappedFile::open(&path.join(name))?))),
            Folder::Embedded(_) | Folder::Memory(_) => {
                Ok(FileBytes::InMemory { path: self.file(name), bytes: self.read_required(name)? })
            }
        }
    }
}

/// Reads a whole file of a model. Fails for anything but a regular file, which opening or reading could block
/// on, and for a file that is larger than any of its kind.
pub(crate) fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let is_tokenizer = TOKENIZER_NAMES.iter().any(|part| name.contains(part));
    let limit = if is_tokenizer { TOKENIZER_BYTES_MAX } else { SETTINGS_BYTES_MAX };
    // Checked before opening, because opening a pipe blocks until it has a writer.
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut content = Vec::new();
    if metadata.len() <= limit {
        // A file may grow while it is read.
        File::open(path)?.take(limit + 1).read_to_end(&mut content)?;
    }
    match metadata.len().max(content.len() as u64) > limit {
        true => Err(io::Error::other(format!("it has more than {} MiB", limit >> 20))),
        false => Ok(content),
    }
}

/// Whether a file name, joined to a folder, stays in that folder on every operating system.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(['/', '\\', ':', '\0'])
}

impl EmbeddedFolder {
    fn get(&self, name: &str) -> Option<&'static [u8]> {
        self.files.iter().find(|(known, _)| *known == name).map(|(_, content)| *content)
    }
}

impl fmt::Debug for EmbeddedFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EmbeddedFolder({}, {} files)", self.name, self.files.len())
    }
}

/// The bytes of a checkpoint's file, with its path.
pub(super) enum FileBytes {
    Mapped(Arc<MappedFile>),
    /// Embedded in the program, or in memory.
    InMemory {
        path: PathBuf,
        bytes: Cow<'static, [u8]>,
    },
}

impl FileBytes {
    /// Returns the path, for error messages.
    pub(super) fn path(&self) -> &Path {
        match self {
            FileBytes::Mapped(file) => file.path(),
            FileBytes::InMemory { path, .. } => path,
        }
    }

    /// Returns the content of the whole file.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            FileBytes::Mapped(file) => file.bytes(),
            FileBytes::InMemory { bytes, .. } => bytes,
        }
    }

    /// Releases the memory of these bytes, if they can be read again from disk.
    pub(super) fn release(&self, bytes: Range<usize>) {
        match self {
            FileBytes::Mapped(file) => file.release(bytes),
            FileBytes::InMemory { .. } => {}
        }
    }
}

impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileBytes({}, {} bytes)", self.path().display(), self.bytes().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    static FILES: EmbeddedFolder =
        EmbeddedFolder { name: "sample", files: &[("a", b"first"), ("b", b"\xff")] };

    /// Returns a folder with [`FILES`] in memory.
    fn memory() -> Folder {
        let files = FILES.files.iter().map(|(name, content)| ((*name).to_owned(), content.to_vec()));
        Folder::memory("sample", files)
    }

    #[test]
    fn files_are_the_same_wherever_they_lie() {
        let scratch = Scratch::new();
        FILES.files.iter().for_each(|(name, content)| _ = scratch.write(name, content));
        for folder in [Folder::disk(scratch.path()), Folder::Embedded(&FILES), memory()] {
            for (name, content) in FILES.files {
                assert!(folder.has(name));
                assert_eq!(folder.read(name).unwrap().unwrap(), *content);
                assert_eq!(folder.open(name).unwrap().bytes(), *content);
                assert_eq!(folder.open(name).unwrap().path(), folder.file(name));
            }
            assert_eq!(folder.read_text("a").unwrap().unwrap(), "first");
            assert_eq!(folder.names().unwrap(), ["a", "b"]);
            assert!(!folder.has("c") && folder.read("c").unwrap().is_none());
            assert!(folder.read_text("c").unwrap().is_none());
        }
    }

    /// A pipe without a writer would block for ever, and a sparse file of a terabyte would fill the memory.
    #[cfg(unix)]
    #[test]
    fn what_is_no_file_of_a_sensible_size_is_refused_by_name() {
        let scratch = Scratch::new();
        let made = std::process::Command::new("mkfifo").arg(scratch.path().join("config.json")).status();
        assert!(made.unwrap().success());
        std::os::unix::fs::symlink("/dev/zero", scratch.path().join("vocab.txt")).unwrap();
        for (name, size) in [("tokenizer.json", 1 << 40), ("generation_config.json", SETTINGS_BYTES_MAX + 1)]
        {
            File::create(scratch.path().join(name)).unwrap().set_len(size).unwrap();
        }
        std::fs::create_dir(scratch.path().join("merges.txt")).unwrap();
        let folder = Folder::disk(scratch.path());
        for (name, reason) in [
            ("config.json", "not a regular file"),
            ("vocab.txt", "not a regular file"),
            ("merges.txt", "not a regular file"),
            ("tokenizer.json", "it has more than 384 MiB"),
            ("generation_config.json", "it has more than 64 MiB"),
        ] {
            let error = format!("{:#}", folder.read(name).unwrap_err());
            assert_eq!(error, format!("{}: {reason}", folder.file(name).display()));
        }
    }

    #[test]
    fn errors_name_the_file() {
        let scratch = Scratch::new();
        let absent = scratch.path().join("absent");
        let error = format!("{:#}", Folder::disk(&absent).names().unwrap_err());
        assert!(error.starts_with(&format!("cannot list {}: ", absent.display())), "{error}");
        scratch.write("b", b"\xff");
        for folder in [Folder::disk(scratch.path()), Folder::Embedded(&FILES), memory()] {
            let refusals = [
                (folder.read_required("c").map(drop), "c"),
                (folder.open("c").map(drop), "c"),
                (folder.read_text("b").map(drop), "b"),
            ];
            for (refusal, name) in refusals {
                let error = format!("{:#}", refusal.unwrap_err());
                assert!(error.starts_with(&format!("{}: ", folder.file(name).display())), "{error}");
            }
        }
        assert_eq!(Folder::Embedded(&FILES).file("c"), Path::new("embedded:sample/c"));
        assert_eq!(memory().file("c"), Path::new("memory:sample/c"));
    }

    #[test]
    fn embedded_bytes_are_used_where_they_are() {
        let folder = Folder::Embedded(&FILES);
        let there = FILES.files[0].1.as_ptr();
        assert_eq!(folder.open("a").unwrap().bytes().as_ptr(), there);
        assert!(matches!(folder.read("a").unwrap(), Some(Cow::Borrowed(bytes)) if bytes.as_ptr() == there));
    }
}
