//! Page-locked memory of the host, through which copies to and from a GPU pass, in two halves.
//!
//! While copies from one half are queued, the next bytes are written to the other.
//! Invariant: no byte is handed out again before the copies that use it are done.

use super::driver::fault;
use super::primary::{Handle, PrimaryContext};
use crate::backend::DeviceError;
use cudarc::driver::result;
use cudarc::driver::sys;
use std::sync::Arc;

/// Bytes of a half.
const HALF: usize = 4 << 20;

/// The memory for copies of one stream.
pub(super) struct Staging {
    memory: Pinned,
    /// Number of the current half, and its bytes that are handed out.
    half: usize,
    used: usize,
    /// For each half, an event after the copies that used it.
    done: [Handle<sys::CUevent>; 2],
}

/// Page-locked memory of the host, from and to which the GPU copies by itself.
struct Pinned {
    address: Handle<*mut u8>,
    primary: Arc<PrimaryContext>,
}

impl Staging {
    /// Allocates the memory.
    pub fn new(primary: &Arc<PrimaryContext>) -> Result<Staging, DeviceError> {
        let memory = Pinned::new(primary, 2 * HALF)?;
        let event = || {
            let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
            event.map(Handle).map_err(|error| fault("create an event", error))
        };
        Ok(Staging { memory, half: 0, used: 0, done: [event()?, event()?] })
    }

    /// Returns the next bytes, at least one and at most `most`, to be used by copies on `stream`. Waits until
    /// the copies that used them last are done.
    pub fn next(&mut self, most: usize, stream: Handle<sys::CUstream>) -> Result<&mut [u8], DeviceError> {
        if self.used >= HALF {
            let failed = |error| fault("finish a copy", error);
            // Sound: the events live as long as this, and the stream as long as the context.
            unsafe {
                result::event::record(self.done[self.half].0, stream.0).map_err(failed)?;
                self.half = 1 - self.half;
                result::event::synchronize(self.done[self.half].0).map_err(failed)?;
            }
            self.used = 0;
        }
        let len = most.min(HALF - self.used);
        let first = self.half * HALF + self.used;
        // Copies from whole lines of memory are fast.
        self.used += len.next_multiple_of(64);
        // Sound: the range is within the memory, which is initialized, lives as long as this, and is used by
        // no copy.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory.address.0.add(first), len) })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.memory.primary.make_current().is_err() {
            return;
        }
        for event in self.done {
            // Sound: it was created once, and nothing uses it any more.
            let _ = unsafe { result::event::destroy(event.0) };
        }
    }
}

impl Pinned {
    fn new(primary: &Arc<PrimaryContext>, bytes: usize) -> Result<Pinned, DeviceError> {
        // Sound: the memory is written before it is read.
        let address = unsafe { result::malloc_host(bytes, 0) };
        let address = address.map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                DeviceError::OutOfMemory { bytes, reason: "the host has no memory to lock".into() }
            }
            _ => fault("lock memory of the host", error),
        })?;
        // Sound: the driver returned so many bytes.
        unsafe { std::ptr::write_bytes(address.cast::<u8>(), 0, bytes) };
        Ok(Pinned { address: Handle(address.cast()), primary: primary.clone() })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.primary.make_current().is_ok() {
            // Sound: it was allocated once, and the context waits for its work before this is dropped.
            let _ = unsafe { result::free_host(self.address.0.cast()) };
        }
    }
}
