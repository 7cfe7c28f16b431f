//! Memory that a device has beside its own: copies in the memory of the host, and what threads hold that
//! still wait for a disk after the device was given up.
//!
//! Invariant: copies are freed when their device is given up, whoever still refers to them. A device is not
//! built while threads of two earlier builds hold buffers.

use anyhow::{Result, ensure};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::JoinHandle;

/// The memory that builds of one device hold beside that of the device.
#[derive(Debug, Default)]
pub struct HeldMemory {
    /// Bytes of copies in the memory of the host.
    copies: AtomicUsize,
    /// Threads that had not ended when the device was given up: those of the last time, and of times before.
    left: Mutex<[Vec<JoinHandle<()>>; 2]>,
}

impl HeldMemory {
    /// Returns the bytes of copies in the memory of the host.
    pub fn copies(&self) -> usize {
        self.copies.load(Ordering::Acquire)
    }

    /// Takes the threads of a device that is given up while they may wait for a disk.
    pub fn leave(&self, threads: impl IntoIterator<Item = JoinHandle<()>>) {
        self.lock()[0].extend(threads);
    }

    /// Begins a build. Fails if threads of two earlier ones still wait for a disk: each has a buffer, so what
    /// they hold is bounded.
    pub fn begin_build(&self) -> Result<()> {
        let mut left = self.lock();
        left.iter_mut().for_each(|threads| threads.retain(|thread| !thread.is_finished()));
        let [last, before] = &mut *left;
        let threads = last.len() + before.len();
        ensure!(
            last.is_empty() || before.is_empty(),
            "tiers.disk_path: the disk has hung twice; {threads} threads wait for it, and the device is \
             rebuilt once those of one time have ended"
        );
        before.append(last);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, [Vec<JoinHandle<()>>; 2]> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy in the memory of the host.
#[derive(Debug)]
pub struct HostCopy {
    bytes: RwLock<Box<[u8]>>,
    held: Arc<HeldMemory>,
}

impl HostCopy {
    /// Wraps memory that is held for a device.
    pub fn new(bytes: Box<[u8]>, held: &Arc<HeldMemory>) -> HostCopy {
        held.copies.fetch_add(bytes.len(), Ordering::AcqRel);
        HostCopy { bytes: RwLock::new(bytes), held: held.clone() }
    }

    /// Locks the bytes to read them. They are none once they are freed.
    pub fn read(&self) -> RwLockReadGuard<'_, Box<[u8]>> {
        self.bytes.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the bytes to change them. They are none once they are freed.
    pub fn write(&self) -> RwLockWriteGuard<'_, Box<[u8]>> {
        self.bytes.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Frees the memory, while others may still refer to it.
    pub fn free(&self) {
        let freed = std::mem::take(&mut *self.write());
        self.held.copies.fetch_sub(freed.len(), Ordering::AcqRel);
    }
}

impl Drop for HostCopy {
    fn drop(&mut self) {
        self.free();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_device_is_not_built_while_threads_of_two_builds_are_left() {
        let held = HeldMemory::default();
        let hang = || {
            let (end, ended) = mpsc::channel::<()>();
            (end, std::thread::spawn(move || _ = ended.recv()))
        };
        held.begin_build().unwrap();
        let [(first, thread), (second, other)] = [hang(), hang()];
        held.leave([thread]);
        held.begin_build().unwrap();
        held.begin_build().unwrap();
        held.leave([other]);
        for _ in 0..2 {
            let error = held.begin_build().unwrap_err().to_string();
            assert!(error.contains("tiers.disk_path") && error.contains("2 threads"), "{error}");
        }
        drop(first);
        while held.begin_build().is_err() {
            std::thread::yield_now();
        }
        drop(second);
    }

    #[test]
    fn copies_are_counted_until_they_are_freed() {
        let held = Arc::default();
        let copies = [7, 5].map(|bytes| HostCopy::new(vec![1; bytes].into(), &held));
        assert_eq!(held.copies(), 12);
        copies[0].free();
        copies[0].free();
        assert_eq!((held.copies(), copies[0].read().len()), (5, 0));
        drop(copies);
        assert_eq!(held.copies(), 0);
    }
}
