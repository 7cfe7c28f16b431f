//! Copies from and to memory of the host.

use super::state::HostCall;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::cell::Cell;
use std::ffi::c_void;

thread_local! {
    /// Whether this thread runs a function of the host, which may not call the driver.
    static CALLED: Cell<bool> = const { Cell::new(false) };
}

/// Whether a function of the host runs in this thread.
pub(super) fn is_called() -> bool {
    CALLED.get()
}

/// Reads bytes of the host.
///
/// # Safety
/// `address` points to `bytes` readable bytes, which nobody writes meanwhile: what the caller of the driver
/// promises of every host pointer until the copy is complete.
pub(super) unsafe fn read(address: usize, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: the caller promises that the source is readable; the target is `bytes` long.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, data.as_mut_ptr(), bytes) };
    data
}

/// Writes bytes of the host.
///
/// # Safety
/// `address` points to as many writable bytes, which nobody accesses meanwhile.
pub(super) unsafe fn write(address: usize, data: &[u8]) {
    // SAFETY: the caller promises that the target is writable.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
}

/// Alignment of pinned memory.
const ALIGN: usize = 4096;

/// Allocates memory of the host; 0 if there is none.
pub(super) fn allocate(bytes: usize) -> usize {
    match Layout::from_size_align(bytes.max(1), ALIGN) {
        // SAFETY: the layout has a size.
        Ok(layout) => unsafe { alloc_zeroed(layout) as usize },
        Err(_) => 0,
    }
}

/// Frees memory of the host.
///
/// # Safety
/// `address` is from [`allocate`] with the same size, and nobody uses it any more.
pub(super) unsafe fn free(address: usize, bytes: usize) {
    if let Ok(layout) = Layout::from_size_align(bytes.max(1), ALIGN) {
        // SAFETY: the caller promises that it was allocated with this layout.
        unsafe { dealloc(address as *mut u8, layout) };
    }
}

/// Calls a function of the host.
///
/// # Safety
/// The function can be called with its argument: what the caller of `cuLaunchHostFunc` promises.
pub(super) unsafe fn call(call: HostCall) {
    let before = CALLED.replace(true);
    // SAFETY: as above.
    unsafe { (call.function)(call.argument as *mut c_void) };
    CALLED.set(before);
}
