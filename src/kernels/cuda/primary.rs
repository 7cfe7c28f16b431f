//! The primary context of a GPU, which the driver shares among all that a process does there.
//!
//! Invariant: a context that has failed is reset once nothing lives in it any more, so that the next one
//! works, as far as the driver allows it.

use super::driver::fault;
use crate::backend::DeviceError;
use cudarc::driver::result;
use cudarc::driver::sys;
use std::sync::atomic::AtomicUsize;

/// A handle of the driver. Handles may be used by any thread that has the context current.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handle<T>(pub T);

// Sound: the driver's handles are numbers to us, and the driver's functions may be called by any thread.
unsafe impl<T> Send for Handle<T> {}
unsafe impl<T> Sync for Handle<T> {}

/// The primary context of a GPU, shared by all that lives in its memory.
#[derive(Debug)]
pub(super) struct PrimaryContext {
    device: sys::CUdevice,
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
        Ok(PrimaryContext { device, handle: Handle(handle), allocated: AtomicUsize::new(0) })
    }

    /// Makes the context that of the calling thread.
    pub fn make_current(&self) -> Result<(), DeviceError> {
        // Sound: the context is retained.
        unsafe { result::ctx::set_current(self.handle.0) }.map_err(|error| fault("use a GPU", error))
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // After a fault, each call of the driver returns that error.
        let is_failed = self.make_current().is_err() || result::mem_get_info().is_err();
        // Sound: it was retained once, and nothing that lived in it is left.
        unsafe {
            let _ = result::primary_ctx::release(self.device);
            if is_failed {
                let _ = sys::cuDevicePrimaryCtxReset_v2(self.device);
            }
        }
    }
}
