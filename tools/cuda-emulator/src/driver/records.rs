//! Findings for the program that uses the library, and its release from hanging launches.

use super::state::{lock, notify};
use crate::findings::Finding;
use std::fmt::Write;

/// Findings of all devices since the last [`reset`].
pub fn findings() -> Vec<Finding> {
    lock().as_ref().map_or_else(Vec::new, |state| state.findings.clone())
}

/// Forgets findings, releases launches that hang, and reads the settings anew: injected failures count from
/// now on.
pub fn reset() {
    if let Some(state) = lock().as_mut() {
        state.restart();
    }
    notify();
}

fn quoted(text: &str) -> String {
    let mut out = String::from('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                out.push('\\');
                out.push(c);
            }
            c if c.is_control() => _ = write!(out, "\\u{:04x}", c as u32),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// A finding as a line of JSON.
fn json(finding: &Finding) -> String {
    let Finding { kind, kernel, line, cta: [x, y, z], thread, address, what, count } = finding;
    format!(
        "{{\"kind\":\"{}\",\"kernel\":{},\"line\":{line},\"cta\":[{x},{y},{z}],\"thread\":{thread},\
         \"address\":{address},\"what\":{},\"count\":{count}}}\n",
        kind.name(),
        quoted(kernel),
        quoted(what),
    )
}

/// Writes findings as lines of JSON, of which `len` bytes fit into `buffer`; gives how many bytes there are.
///
/// # Safety
/// `buffer` points to `len` writable bytes, or is null.
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaEmulatorFindings(buffer: *mut u8, len: usize) -> usize {
    let text: String = findings().iter().map(json).collect();
    if !buffer.is_null() {
        let fits = text.len().min(len);
        // SAFETY: the caller promises that so many bytes are writable.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr(), buffer, fits) };
    }
    text.len()
}

/// Calls [`reset`].
#[allow(non_snake_case)]
#[unsafe(no_mangle)]
pub extern "C" fn cudaEmulatorReset() {
    reset();
}
