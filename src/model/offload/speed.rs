//! The speed of the disk that stores lie on, measured with the reads of [`super::stream`].
//!
//! Invariant: the file that is written for it has no name any more while it is read, so it leaves nothing.

use super::direct::{BLOCK, DirectFile};
use super::stream::READERS;
use anyhow::{Context, Result, anyhow};
use mainstem_kernels::HostMemory;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of the file.
const FILE_BYTES: usize = 384 << 20;

/// Bytes that a thread reads at a time: about a matrix.
const UNIT: usize = 8 << 20;

/// Bytes of a page of a KV cache: K or V of 32 positions of a layer with four heads of 64 numbers in F16.
const PAGE: usize = 16 << 10;

/// Number of pages between two that are read one after the other: none are neighbours.
const STRIDE: u64 = 7919;

/// Time of reading large units.
const READ_TIME: Duration = Duration::from_millis(1200);

/// Bytes per second of a disk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskSpeed {
    pub read: f64,
    /// Includes the time until the bytes are on the disk.
    pub write: f64,
    /// Of small pieces from all over the file, as pages of KV caches are read.
    pub pages: f64,
}

impl DiskSpeed {
    /// Measures the disk of `folder`, which is created if it does not exist. Takes two seconds or more, and
    /// writes 384 MiB.
    pub fn measure(folder: &Path) -> Result<DiskSpeed> {
        DiskSpeed::measure_with(folder, FILE_BYTES, READ_TIME)
            .with_context(|| format!("measuring the disk of {}", folder.display()))
    }

    fn measure_with(folder: &Path, bytes: usize, time: Duration) -> Result<DiskSpeed> {
        fs::create_dir_all(folder)?;
        let path = folder.join(format!("speed.{}.tmp", std::process::id()));
        let measured = write_file(&path, bytes).and_then(|write| {
            let mut probe = HostMemory::default().zeroed(BLOCK).map_err(io::Error::other)?;
            DirectFile::open(&path, probe.bytes_mut()).map(|file| (write, file))
        });
        fs::remove_file(&path)?;
        let (write, file) = measured?;
        let read = read_speed(&file, (UNIT.min(bytes), bytes), time, 1)?;
        let pages = read_speed(&file, (PAGE, bytes), time / 3, STRIDE)?;
        Ok(DiskSpeed { read, write, pages })
    }
}

/// Writes a file and returns the bytes per second.
fn write_file(path: &Path, bytes: usize) -> io::Result<f64> {
    // Not zeros, which a disk may compress.
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let unit: Vec<u8> = (0..UNIT.min(bytes)).map(|_| next()).collect();
    let began = Instant::now();
    let mut file = File::create_new(path)?;
    for _ in 0..bytes / unit.len() {
        file.write_all(&unit)?;
    }
    file.sync_all()?;
    Ok(bytes as f64 / began.elapsed().as_secs_f64())
}

/// Reads units of a file of so many bytes, each `stride` units after the one before, again and again, with as
/// many threads as read weights, into memory as CPU devices have it: in huge pages, some disks are read three
/// times as fast. Returns the bytes per second.
fn read_speed(file: &DirectFile, (unit, bytes): (usize, usize), time: Duration, stride: u64) -> Result<f64> {
    let (began, next) = (Instant::now(), AtomicU64::new(0));
    let units = (bytes / unit) as u64;
    let read_units = || -> io::Result<u64> {
        let mut memory = HostMemory::default().zeroed(unit).map_err(io::Error::other)?;
        let (buffer, mut done) = (memory.bytes_mut(), 0);
        while began.elapsed() < time || done == 0 {
            let number = next.fetch_add(stride, Ordering::Relaxed) % units;
            file.read(number * unit as u64, buffer, &|| false)?;
            done += unit as u64;
        }
        Ok(done)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..READERS).map(|_| scope.spawn(read_units)).collect();
        let mut sum = 0;
        for thread in threads {
            sum += thread.join().map_err(|_| anyhow!("a thread that reads has panicked"))??;
        }
        Ok(sum as f64 / began.elapsed().as_secs_f64())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scratch;

    #[test]
    fn a_disk_has_a_speed_and_keeps_nothing() {
        let folder = Scratch::new();
        let place = folder.path().join("stores");
        let speed = DiskSpeed::measure_with(&place, 1 << 20, Duration::ZERO).unwrap();
        assert!(
            [speed.read, speed.write, speed.pages].iter().all(|rate| rate.is_finite() && *rate > 0.0),
            "{speed:?}"
        );
        assert_eq!(place.read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = Scratch::new();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = format!("{:#}", DiskSpeed::measure(&file.join("stores")).unwrap_err());
        assert!(error.contains("measuring the disk of") && error.contains("stores"), "{error}");
    }
}
