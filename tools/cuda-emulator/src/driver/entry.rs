//! The frame of every function of the interface.

use super::code::{self, Code, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Declares functions of the interface: their bodies give a [`Result`].
macro_rules! interface {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[allow(non_snake_case)]
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $ty),*) -> $crate::driver::code::Code {
                $crate::driver::entry::guarded(move || $body)
            }
        )*
    };
}

pub(super) use interface;

/// Runs the body of a function; a panic, which would be an error of the emulator, is not carried into the
/// caller.
pub(super) fn guarded(body: impl FnOnce() -> Result) -> Code {
    if super::host::is_called() {
        return code::NOT_PERMITTED;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => code::SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => code::UNKNOWN,
    }
}

/// Writes a result through a pointer of the caller.
pub(super) fn put<T>(to: *mut T, value: T) -> Result {
    if to.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller of the interface passes pointers to writable results; null is refused above.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// The text of a C string.
pub(super) fn text(from: *const std::ffi::c_char) -> Result<String> {
    if from.is_null() {
        return Err(code::INVALID_VALUE);
    }
    // SAFETY: the caller of the interface passes strings that end with a zero.
    let text = unsafe { std::ffi::CStr::from_ptr(from) };
    Ok(text.to_string_lossy().into_owned())
}
