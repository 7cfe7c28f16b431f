//! The limit of open files: every connection takes one.
//!
//! Invariant: the server accepts no more connections than it may have files open, so that accepting never
//! fails for lack of them.

use anyhow::{Result, ensure};
use std::io;
use tracing::warn;

/// Files that are opened while the server runs, besides connections: those of the model when devices are
/// rebuilt, keys and certificates.
const SPARE_FILES: u64 = 64;

/// Files of a worker: its event loop, and connections that are accepted or closed at this moment.
pub const FILES_PER_WORKER: u64 = 40;

/// Raises the limit of open files as far as the system allows, and returns the number of connections that
/// fit: `wanted`, or less, with a warning. Fails if there is room for none.
pub fn connection_limit(wanted: usize, workers: usize) -> Result<usize> {
    // Without a limit to raise, the present one counts.
    let limit = rlimit::increase_nofile_limit(u64::MAX).or_else(|_| files_max())?;
    // More files than now are open later, but fewer than are spared.
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |files| files.count() as u64);
    let other = open + SPARE_FILES + FILES_PER_WORKER * workers as u64;
    let fitting = fitting_connections(wanted, limit, other)?;
    if fitting < wanted {
        warn!(
            "server.max_connections = {wanted} is lowered to {fitting}: the process may have {limit} files \
             open (ulimit -n), of which it needs {other} otherwise"
        );
    }
    Ok(fitting)
}

fn files_max() -> io::Result<u64> {
    rlimit::getrlimit(rlimit::Resource::NOFILE).map(|(soft, _)| soft)
}

/// Returns how many of `wanted` connections fit into `limit` open files, beside `other` ones.
fn fitting_connections(wanted: usize, limit: u64, other: u64) -> Result<usize> {
    let fitting = usize::try_from(limit.saturating_sub(other)).unwrap_or(usize::MAX).min(wanted);
    ensure!(
        fitting > 0,
        "server.max_connections: there is no room for connections: the process may have {limit} files open \
         (ulimit -n), and needs {other} otherwise"
    );
    Ok(fitting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_are_limited_by_the_open_files() {
        assert_eq!(fitting_connections(2048, 65536, 200).unwrap(), 2048);
        assert_eq!(fitting_connections(2048, 1024, 200).unwrap(), 824);
        assert_eq!(fitting_connections(2048, u64::MAX, 200).unwrap(), 2048);
        let error = fitting_connections(2048, 200, 200).unwrap_err().to_string();
        assert!(error.contains("200 files open (ulimit -n)"), "{error}");
    }
}
