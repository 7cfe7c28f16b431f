//! V of single positions of a KV cache, which is brought into a device's memory once attention has chosen
//! them.
//!
//! Invariant: an operation gets the bytes that the cache holds, wherever they come from.

use crate::batch::Page;

/// Brings V of chosen positions of a layer's cache, of which only some pages are in a device's memory.
pub trait ValueSource: Send + Sync {
    /// Returns whether V of a page is in the device's buffer.
    fn is_present(&self, page: Page) -> bool;

    /// Fills `to` with the bytes of V from `at` on, in a cache that the device has laid out. They are on a
    /// page that is not present. Several threads may call this at once. Allocates nothing.
    fn read(&self, at: usize, to: &mut [u8]);
}
