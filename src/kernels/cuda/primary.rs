//! The primary context of a GPU, which the driver shares among all that a process does there.
//!
//! Invariant: a context that has failed is reset when one of its users drops it, so that the next one works,
//! as far as the driver allows it. What still lives in a context that was reset calls the driver no more.

use super::driver::fault;
use crate::backend::DeviceError;
use cudarc::driver::result;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// A handle of the driver. Handles may be used by any thread that has the context current.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle<T>(pub T);

// Sound: the driver's handles are numbers to us, and the driver's functions may be called by any thread.
unsafe impl<T> Send for Handle<T> {}
unsafe impl<T> Sync for Handle<T> {}

/// The number of resets of each GPU's primary context. A thread that hung may return after a reset, and
/// drop what it had in the memory of the context before.
static RESETS: LazyLock<Mutex<HashMap<sys::CUdevice, u64>>> = LazyLock::new(Mutex::default);

fn resets() -> MutexGuard<'static, HashMap<sys::CUdevice, u64>> {
    RESETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The primary context of a GPU, shared by all that lives in its memory.
#[derive(Debug)]
pub(super) struct PrimaryContext {
    device: sys::CUdevice,
    /// Number of resets before.
    resets: u64,
    handle: Handle<sys::CUcontext>,
    /// Bytes of the live buffers.
    pub allocated: AtomicUsize,
}

impl PrimaryContext {
    /// Takes part in the primary context of GPU `number`, which the driver makes if there is none.
    pub fn retain(number: u32) -> Result<PrimaryContext, DeviceError> {
        let failed = |error| fault(&format!("use GPU {number}"), error);
        let device = result::device::get(number as i32).map_err(failed)?;
        // Sound: the device exists.
        let handle = unsafe { result::primary_ctx::retain(device) }.map_err(failed)?;
        let (resets, allocated) = (*resets().entry(device).or_default(), AtomicUsize::new(0));
        Ok(PrimaryContext { device, resets, handle: Handle(handle), allocated })
    }

    /// Makes the context that of the calling thread. Fails if the driver does, or if the context was reset.
    pub fn make_current(&self) -> Result<(), DeviceError> {
        if resets().get(&self.device) != Some(&self.resets) {
            return Err(DeviceError::Fault("the GPU was reset after a fault".into()));
        }
        // Sound: the context is retained.
        unsafe { result::ctx::set_current(self.handle.0) }.map_err(|error| fault("use a GPU", error))
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // After a fault, each call of the driver returns that error.
        let is_failed = self.make_current().is_err() || result::mem_get_info().is_err();
        let mut resets = resets();
        let count = resets.entry(self.device).or_default();
        // Sound: it was retained once. What is left in it calls the driver no more after the reset.
        unsafe {
            let _ = result::primary_ctx::release(self.device);
            if is_failed && *count == self.resets {
                *count += 1;
                let _ = sys::cuDevicePrimaryCtxReset_v2(self.device);
            }
        }
    }
}
