//! The memory that scratch buffers and lists are allocated from, or a counter in its place.
//!
//! Invariant: the same code allocates and counts.

use crate::backend::DeviceError;
use crate::host::{HostBuf, HostLists, HostMemory};
use std::cell::Cell;

/// The memory that scratch buffers are allocated from, or a counter of their bytes.
pub trait ScratchMemory {
    type Buf;

    /// Allocates `bytes` zeroed bytes.
    fn zeroed(&self, bytes: usize) -> Result<Self::Buf, DeviceError>;
}

impl ScratchMemory for HostMemory {
    type Buf = HostBuf;

    fn zeroed(&self, bytes: usize) -> Result<HostBuf, DeviceError> {
        HostMemory::zeroed(self, bytes)
    }
}

/// The memory that lists are allocated from, or a counter of their bytes.
pub trait ListMemory {
    /// Allocates an empty list with capacity for `n` elements.
    fn empty<T>(&mut self, n: usize) -> Vec<T>;

    /// Allocates a list of `n` equal elements.
    fn filled<T: Clone>(&mut self, n: usize, element: T) -> Vec<T>;
}

impl ListMemory for HostLists {
    fn empty<T>(&mut self, n: usize) -> Vec<T> {
        self.count(n * size_of::<T>());
        Vec::with_capacity(n)
    }

    fn filled<T: Clone>(&mut self, n: usize, element: T) -> Vec<T> {
        self.count(n * size_of::<T>());
        vec![element; n]
    }
}

/// Counts the bytes of buffers and lists instead of allocating them.
#[derive(Default)]
pub struct ByteCount(Cell<usize>);

impl ByteCount {
    /// Returns the bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.0.get()
    }
}

impl ScratchMemory for ByteCount {
    type Buf = ();

    fn zeroed(&self, bytes: usize) -> Result<(), DeviceError> {
        self.0.set(self.0.get().saturating_add(bytes));
        Ok(())
    }
}

impl ListMemory for &ByteCount {
    fn empty<T>(&mut self, n: usize) -> Vec<T> {
        self.0.set(self.0.get().saturating_add(n.saturating_mul(size_of::<T>())));
        Vec::new()
    }

    fn filled<T: Clone>(&mut self, n: usize, _: T) -> Vec<T> {
        self.empty(n)
    }
}
