//! V of single positions of a layer's cache in the memory of the host, which is read when rows that attend
//! sparsely have chosen it.
//!
//! Invariant: nothing is written to the cache while its layer computes, so threads read it without waiting.

use super::cache_ring::{Ring, UnitPlace};
use super::link::Direction;
use super::page_plan::Plan;
use super::tier::Tier;
use super::transfers::Stream;
use mainstem_kernels::ValueSource;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The source of the pages of V that the cache of a layer lacks, until the layer is released.
pub struct ChosenValues<Buf> {
    ring: Arc<Ring<Buf>>,
    unit: usize,
    plan: Arc<Plan>,
    /// Bytes that were read in the current operation.
    bytes: AtomicUsize,
}

impl<Buf> ChosenValues<Buf> {
    /// Returns the source of V number `unit` in a step; `None` if the step has brought all pages of it.
    pub(super) fn new(ring: &Arc<Ring<Buf>>, unit: usize, plan: Arc<Plan>) -> Option<ChosenValues<Buf>> {
        let is_used = ring.can_fetch(unit) && !plan.fetched.is_empty();
        is_used.then(|| ChosenValues { ring: ring.clone(), unit, plan, bytes: AtomicUsize::new(0) })
    }
}

impl<Buf: Send + Sync> ChosenValues<Buf> {
    /// Lets `attend` read values, and waits until they would have come over the link.
    pub fn serve(&self, attend: impl FnOnce(&dyn ValueSource)) {
        let began = Instant::now();
        attend(self);
        let (path, computed) = (&self.ring.path, Instant::now());
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        let is_stopped = || self.ring.is_stopped() || self.ring.abort.is_aborted();
        path.wait(Direction::ToDevice, bytes, began, &is_stopped);
        path.transfers.add_bytes(Stream::LoadCache, Tier::Host, bytes);
        path.transfers.add_stall(Stream::LoadCache, computed.elapsed());
    }
}

impl<Buf: Send + Sync> ValueSource for ChosenValues<Buf> {
    fn is_present(&self, page: u32) -> bool {
        !self.plan.fetches(page as usize)
    }

    fn read(&self, at: usize, to: &mut [u8]) {
        let UnitPlace::Host(memory) = &self.ring.units[self.unit].place else {
            unreachable!("only V in the memory of the host is fetched; this is a bug")
        };
        let memory = memory.read();
        // It is freed when the device is given up, and nobody has the results then.
        match memory.get(at..at + to.len()) {
            Some(from) => to.copy_from_slice(from),
            None => to.fill(0),
        }
        self.bytes.fetch_add(to.len(), Ordering::Relaxed);
    }
}
