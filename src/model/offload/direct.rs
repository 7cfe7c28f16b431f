//! Reads and writes of a file that bypass the system's page cache, where the file system allows it: a model
//! that is larger than memory would only push out what others keep there.
//!
//! Invariant: offsets are multiples of [`BLOCK`], and so are the lengths of direct reads.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Unit of direct reads in bytes, a multiple of the sectors of every disk.
pub const BLOCK: usize = 4096;

/// Size of a single read or write: large enough for the full rate of a disk, small enough to stop soon.
const READ: usize = 2 << 20;

/// Rounds up to a multiple of [`BLOCK`].
pub fn to_blocks(bytes: usize) -> usize {
    bytes.next_multiple_of(BLOCK)
}

/// A file whose bytes are not kept in the page cache after they are read.
pub struct DirectFile {
    file: File,
    /// Whether reads bypass the page cache. What others read is removed from it at once.
    is_direct: bool,
    #[cfg(test)]
    pub(super) hook: Option<std::sync::Arc<super::testing::Hook>>,
}

impl DirectFile {
    /// Wraps a file, which is in `folder`.
    fn new(file: File, is_direct: bool, folder: &Path) -> DirectFile {
        #[cfg(not(test))]
        let _ = folder;
        DirectFile {
            file,
            is_direct,
            #[cfg(test)]
            hook: super::testing::hook_for(folder),
        }
    }

    /// Lets a test delay or fail the access to the bytes at `offset`.
    #[cfg(test)]
    fn before(&self, access: super::testing::Access, offset: u64) -> io::Result<()> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(access, offset))
    }

    /// The unit of [`DirectFile::unnamed`], in bytes, where its reads and writes bypass the page cache.
    pub const SECTOR: usize = 512;

    /// Creates a file of `bytes` bytes without a name in `folder`, which nobody else can open, whose space is
    /// reserved, and which is gone when it is closed. Its reads and writes bypass the page cache if the file
    /// system allows that for memory like `probe` (two sectors or more), in multiples of
    /// [`DirectFile::SECTOR`].
    pub fn unnamed(folder: &Path, bytes: u64, probe: Option<&mut [u8]>) -> io::Result<DirectFile> {
        std::fs::create_dir_all(folder)?;
        let works = |file: &File, probe: &mut [u8]| {
            let (sector, at) = (&mut probe[Self::SECTOR..2 * Self::SECTOR], Self::SECTOR as u64);
            file.write_all_at(sector, at).and_then(|()| file.read_exact_at(sector, at)).is_ok()
        };
        let direct = probe.and_then(|probe| {
            let file = create_unnamed(folder, true).ok()?;
            works(&file, probe).then_some(file)
        });
        let is_direct = direct.is_some();
        let file = direct.map_or_else(|| create_unnamed(folder, false), Ok)?;
        reserve(&file, bytes)?;
        Ok(DirectFile::new(file, is_direct, folder))
    }

    /// Writes `bytes` at `offset`. Returns early with an error of kind [`io::ErrorKind::Interrupted`] if
    /// `is_stopped` says so.
    pub fn write(&self, mut offset: u64, bytes: &[u8], is_stopped: &dyn Fn() -> bool) -> io::Result<()> {
        for part in bytes.chunks(READ) {
            if is_stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            #[cfg(test)]
            self.before(super::testing::Access::Write, offset)?;
            self.file.write_all_at(part, offset)?;
            offset += part.len() as u64;
        }
        Ok(())
    }

    /// Returns a file of which reads and writes do what those of `file` do.
    #[cfg(test)]
    pub fn of(file: File) -> DirectFile {
        DirectFile { file, is_direct: false, hook: None }
    }

    /// Opens a file for direct reads into memory like `probe` (a block or more), or for ordinary ones if its
    /// file system has no others.
    pub fn open(path: &Path, probe: &mut [u8]) -> io::Result<DirectFile> {
        let direct = open_direct(path).filter(|file| file.read_exact_at(&mut probe[..BLOCK], 0).is_ok());
        direct.map_or_else(|| DirectFile::ordinary(path), |file| Ok(DirectFile::new(file, true, path)))
    }

    /// Opens a file for reads into any memory.
    pub fn ordinary(path: &Path) -> io::Result<DirectFile> {
        Ok(DirectFile::new(File::open(path)?, false, path))
    }

    /// Fills `bytes` with those at `offset`. Returns early with an error of kind
    /// [`io::ErrorKind::Interrupted`] if `is_stopped` says so.
    pub fn read(&self, mut offset: u64, bytes: &mut [u8], is_stopped: &dyn Fn() -> bool) -> io::Result<()> {
        for part in bytes.chunks_mut(READ) {
            if is_stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            #[cfg(test)]
            self.before(super::testing::Access::Read, offset)?;
            self.file.read_exact_at(part, offset)?;
            if !self.is_direct {
                forget(&self.file, offset, part.len() as u64);
            }
            offset += part.len() as u64;
        }
        Ok(())
    }
}

/// Asks the system to remove bytes of a file from the page cache, if they are on disk.
#[cfg(target_os = "linux")]
pub fn forget(file: &File, offset: u64, bytes: u64) {
    // A hint, so a refusal is ignored.
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZero::new(bytes), rustix::fs::Advice::DontNeed);
}

/// Does nothing: this system takes no such hint.
#[cfg(not(target_os = "linux"))]
pub fn forget(_: &File, _: u64, _: u64) {}

#[cfg(target_os = "linux")]
const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;

/// Other systems have no such flag.
#[cfg(not(target_os = "linux"))]
const DIRECT: i32 = 0;

fn open_direct(path: &Path) -> Option<File> {
    File::options().read(true).custom_flags(DIRECT).open(path).ok().filter(|_| DIRECT != 0)
}

/// Creates a file without a name that only its user could open.
fn create_unnamed(folder: &Path, is_direct: bool) -> io::Result<File> {
    let flags = if is_direct { DIRECT } else { 0 };
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::OFlags;
        let unnamed = (OFlags::TMPFILE | OFlags::EXCL).bits() as i32;
        if let Ok(file) = options.custom_flags(flags | unnamed).open(folder) {
            return Ok(file);
        }
    }
    // Not all file systems have such files.
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("kv-cache-{}-{number}", std::process::id()));
        match options.custom_flags(flags).create_new(true).open(&path) {
            Ok(file) => return std::fs::remove_file(&path).map(|()| file),
            // A process in another container may have the same number, and have been killed here.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

/// Gives a file so many bytes, and the space for them if the file system can reserve it.
#[cfg(target_os = "linux")]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    use rustix::io::Errno;
    match fallocate(file, FallocateFlags::empty(), 0, bytes.max(1)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        outcome => Ok(outcome?),
    }
}

#[cfg(not(target_os = "linux"))]
fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)
}
