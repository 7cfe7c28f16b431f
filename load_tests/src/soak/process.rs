//! Resources of the server's process, read from `/proc`.
//!
//! Invariant: nothing but `/proc` of this process is read, and nothing is written.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

/// The resources that a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Resources {
    /// Resident memory in bytes.
    pub rss_bytes: u64,
    /// Open file descriptors.
    pub fds: u64,
    pub threads: u64,
}

impl Resources {
    /// Reads the resources of a process. Fails if there is none with this number, or it is another user's.
    pub fn of(pid: u32) -> Result<Resources> {
        let folder = PathBuf::from(format!("/proc/{pid}"));
        let status = fs::read_to_string(folder.join("status"))
            .with_context(|| format!("cannot read the status of the process {pid}"))?;
        let fds = fs::read_dir(folder.join("fd"))
            .with_context(|| format!("cannot list the files of the process {pid}"))?;
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            let number = line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok());
            number.with_context(|| format!("the status of the process {pid} has no {name}"))
        };
        let (kib, threads) = (field("VmRSS")?, field("Threads")?);
        Ok(Resources { rss_bytes: kib << 10, fds: fds.count() as u64, threads })
    }

    /// Returns the smaller of each.
    pub fn min(self, other: Resources) -> Resources {
        Resources {
            rss_bytes: self.rss_bytes.min(other.rss_bytes),
            fds: self.fds.min(other.fds),
            threads: self.threads.min(other.threads),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_counted() {
        let own = std::process::id();
        let before = Resources::of(own).unwrap();
        assert!(before.rss_bytes > 1 << 20 && before.threads >= 1 && before.fds >= 3, "{before:?}");
        // Other tests open and close files, but not as many.
        let files: Vec<_> = (0..200).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        assert!(Resources::of(own).unwrap().fds >= 200);
        drop(files);
        assert!(Resources::of(u32::MAX).is_err());
    }
}
