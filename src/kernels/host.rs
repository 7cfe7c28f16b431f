//! Host memory buffers: page-aligned, zero-initialized, and in huge pages where the system grants them.
//! Invariant: the bytes of a buffer are always initialized, and its length never changes.

use crate::backend::DeviceError;
use memmap2::MmapMut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Total bytes of all live buffers and counted lists of the process.
static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

/// The host memory of one backend: allocates its buffers, and counts the bytes of those that are alive.
/// Clones share the count.
#[derive(Clone, Debug, Default)]
pub struct HostMemory(Arc<Usage>);

/// The bytes of live buffers and counted lists, and the most that they may be.
#[derive(Debug)]
struct Usage {
    used: AtomicUsize,
    limit: usize,
}

impl Default for Usage {
    fn default() -> Usage {
        Usage { used: AtomicUsize::new(0), limit: usize::MAX }
    }
}

impl HostMemory {
    /// Creates memory of which at most `limit` bytes can be used.
    pub fn limited(limit: usize) -> HostMemory {
        HostMemory(Arc::new(Usage { limit, ..Usage::default() }))
    }

    /// Allocates `bytes` zeroed bytes. Fails with [`DeviceError::OutOfMemory`] if the system cannot map them,
    /// or if they exceed the limit.
    pub fn zeroed(&self, bytes: usize) -> Result<HostBuf, DeviceError> {
        self.check(bytes)?;
        let map = MmapMut::map_anon(bytes.max(1))
            .map_err(|source| DeviceError::OutOfMemory { bytes, reason: source.to_string() })?;
        // Huge pages are optional, so a refusal is ignored. With 4 KiB pages, streaming weights loses up to a
        // fifth of the memory bandwidth.
        #[cfg(target_os = "linux")]
        if bytes >= 1 << 21 {
            let _ = map.advise(memmap2::Advice::HugePage);
        }
        ALLOCATED.fetch_add(bytes, Ordering::Relaxed);
        self.0.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(HostBuf { map, len: bytes, memory: self.clone() })
    }

    /// Fails with [`DeviceError::OutOfMemory`] if `more` bytes exceed the limit.
    pub fn check(&self, more: usize) -> Result<(), DeviceError> {
        let (used, limit) = (self.used(), self.0.limit);
        if used.saturating_add(more) <= limit {
            return Ok(());
        }
        let reason = format!("the device has a memory of {limit} bytes, of which {used} are used");
        Err(DeviceError::OutOfMemory { bytes: more, reason })
    }

    /// Returns a count of lists that are allocated elsewhere and used like buffers.
    pub fn lists(&self) -> HostLists {
        HostLists { bytes: 0, memory: self.clone() }
    }

    /// Returns the bytes of all live buffers that were allocated here, and of lists that were counted here.
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

/// Counts the bytes of lists as memory of a backend, until it is dropped. Its owner keeps it with the lists.
#[derive(Debug)]
pub struct HostLists {
    bytes: usize,
    memory: HostMemory,
}

impl HostLists {
    /// Counts the bytes of a list.
    pub fn count(&mut self, bytes: usize) {
        self.bytes += bytes;
        ALLOCATED.fetch_add(bytes, Ordering::Relaxed);
        self.memory.0.used.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Drop for HostLists {
    fn drop(&mut self) {
        ALLOCATED.fetch_sub(self.bytes, Ordering::Relaxed);
        self.memory.0.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A byte buffer in host memory, page-aligned and therefore at least 64-byte aligned.
pub struct HostBuf {
    map: MmapMut,
    len: usize,
    memory: HostMemory,
}

impl HostBuf {
    /// Returns the total bytes of all live buffers and counted lists of the process.
    pub fn total_allocated() -> usize {
        ALLOCATED.load(Ordering::Relaxed)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map[..self.len]
    }

    /// Returns the bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        &mut self.map[..len]
    }

    /// Returns the bytes as f32 values, without a remainder of less than four bytes.
    pub fn f32(&self) -> &[f32] {
        cast::f32s(self.bytes())
    }

    /// Returns the bytes as f32 values for writing, without a remainder of less than four bytes.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        cast::f32s_mut(self.bytes_mut())
    }

    /// Returns the bytes as u16 values, the raw form of F16 and BF16.
    pub fn u16(&self) -> &[u16] {
        cast::u16s(self.bytes())
    }

    /// Returns the bytes as u16 values for writing.
    pub fn u16_mut(&mut self) -> &mut [u16] {
        cast::u16s_mut(self.bytes_mut())
    }
}

impl Drop for HostBuf {
    fn drop(&mut self) {
        ALLOCATED.fetch_sub(self.len, Ordering::Relaxed);
        self.memory.0.used.fetch_sub(self.len, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for HostBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HostBuf({} bytes)", self.len)
    }
}

/// Casts from bytes to numbers: the only place where host memory is reinterpreted.
mod cast {
    #![allow(unsafe_code)]

    macro_rules! casts {
        ($shared:ident, $unique:ident, $ty:ty) => {
            /// Casts bytes to numbers.
            pub fn $shared(bytes: &[u8]) -> &[$ty] {
                // SAFETY: every bit pattern is a valid number. The map is page-aligned, so the prefix is
                // empty (asserted).
                let (head, body, _) = unsafe { bytes.align_to::<$ty>() };
                assert!(head.is_empty());
                body
            }
            /// Casts bytes to numbers for writing.
            pub fn $unique(bytes: &mut [u8]) -> &mut [$ty] {
                // SAFETY: as above.
                let (head, body, _) = unsafe { bytes.align_to_mut::<$ty>() };
                assert!(head.is_empty());
                body
            }
        };
    }
    casts!(f32s, f32s_mut, f32);
    casts!(u16s, u16s_mut, u16);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_counts_its_own_live_buffers_whichever_thread_drops_them() {
        let (memory, other) = (HostMemory::default(), HostMemory::default());
        let _foreign = other.zeroed(1000).unwrap();
        let [first, second] = [30, 4096].map(|bytes| memory.zeroed(bytes).unwrap());
        assert_eq!((memory.used(), other.used()), (4126, 1000));
        std::thread::spawn(move || drop(second)).join().unwrap();
        assert_eq!((first.len(), memory.clone().used()), (30, 30));
        let mut lists = memory.lists();
        [5, 7].into_iter().for_each(|bytes| lists.count(bytes));
        assert_eq!(memory.used(), 42);
        drop(lists);
        assert_eq!(memory.used(), 30);
    }

    #[test]
    fn a_limited_memory_names_its_sizes_when_it_is_full() {
        let memory = HostMemory::limited(100);
        let first = memory.zeroed(60).unwrap();
        let error = memory.zeroed(41).err().unwrap().to_string();
        assert_eq!(
            error,
            "out of memory: 41 bytes cannot be allocated (the device has a memory of 100 bytes, of which 60 \
             are used)"
        );
        let _second = memory.zeroed(40).unwrap();
        drop(first);
        assert!(memory.zeroed(60).is_ok());
        memory.lists().count(61);
        assert!(memory.check(0).is_ok(), "the lists are gone");
        let mut lists = memory.lists();
        lists.count(61);
        assert!(memory.check(0).is_err());
    }
}
