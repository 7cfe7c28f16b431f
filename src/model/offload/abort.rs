//! The abort that ends the waits of a device for a disk.
//!
//! Invariant: a device hears of one abort at most, that of the build which it belongs to.

use mainstem_kernels::{Abort, Aborted, DeviceError, Waiters};
use std::sync::{OnceLock, Weak};

/// The abort of a device's steps, once it is known.
#[derive(Default)]
pub struct StepAbort(OnceLock<Abort>);

impl StepAbort {
    /// Lets `abort` wake `waiters`, which then find it here.
    pub fn set(&self, abort: &Abort, waiters: Weak<dyn Waiters>) {
        if self.0.set(abort.clone()).is_ok() {
            abort.wake_on_abort(waiters);
        }
    }

    /// Returns whether the steps are aborted.
    pub fn is_aborted(&self) -> bool {
        self.0.get().is_some_and(Abort::is_aborted)
    }

    /// Fails if the steps are aborted.
    pub fn check(&self) -> Result<(), DeviceError> {
        if self.is_aborted() { Err(DeviceError::Fault(Aborted.to_string())) } else { Ok(()) }
    }
}
