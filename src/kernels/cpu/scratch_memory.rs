//! The memory that scratch buffers are allocated from, or a counter in its place.
//!
//! Invariant: the same code allocates and counts.

use crate::backend::DeviceError;
use crate::host::{HostBuf, HostMemory};
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

/// Counts the bytes of buffers instead of allocating them.
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
