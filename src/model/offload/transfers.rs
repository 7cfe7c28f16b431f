//! Counts of what is copied to devices and from them, and of the time that they wait for it.
//!
//! Invariant: totals only grow. They are those of all devices and of all their rebuilds.

use super::held::HeldMemory;
use super::tier::Tier;
use super::trace::Trace;
use crate::model::shard::Shard;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// A stream of data between the memory of devices and the tiers below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Weights that are read.
    LoadWeights,
    /// Pages of KV caches that are read, and V of single positions.
    LoadCache,
    /// Pages of KV caches that are written.
    StoreCache,
    /// Attention outputs that were computed in the memory of the host.
    LoadRows,
    /// Queries, keys and values for attention in the memory of the host.
    StoreRows,
}

impl Stream {
    /// All streams.
    pub const ALL: [Stream; 5] =
        [Stream::LoadWeights, Stream::LoadCache, Stream::StoreCache, Stream::LoadRows, Stream::StoreRows];

    /// Returns the name of the stream in metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Stream::LoadWeights => "load_weights",
            Stream::LoadCache => "load_kv",
            Stream::StoreCache => "store_kv",
            Stream::LoadRows => "load_rows",
            Stream::StoreRows => "store_rows",
        }
    }
}

/// A number for each stream, in the order of [`Stream::ALL`], and each tier in that of [`Tier::BELOW`].
pub type ByStream<T> = [[T; Tier::BELOW.len()]; Stream::ALL.len()];

/// Counters of a model's streams, shared by its devices.
#[derive(Debug, Default)]
pub struct Transfers {
    bytes: ByStream<AtomicU64>,
    stall_nanos: [AtomicU64; Stream::ALL.len()],
    /// Layers whose data was ready when it was needed, and those whose was not.
    layers: [AtomicU64; 2],
    /// Sums over layers of streamed weights: buffers that were ready, and all buffers.
    buffers: [AtomicU64; 2],
    /// The times of single transfers, if they are wanted.
    trace: OnceLock<Arc<Trace>>,
    /// Experts that were in memory when rows chose them, and those that were read.
    experts: [AtomicU64; 2],
    /// The memory that builds of each device hold beside its own.
    held: Mutex<HashMap<String, Arc<HeldMemory>>>,
    /// Totals that [`Transfers::take_new`] has returned.
    reported: Mutex<TransferTotals>,
}

/// Totals of a model's streams, in the order of [`Stream::ALL`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TransferTotals {
    /// Bytes by the tier that they are read from or written to.
    pub bytes: ByStream<u64>,
    /// Time that devices waited for the stream.
    pub stalls: [Duration; Stream::ALL.len()],
    /// Layers whose weights, or whose cache, were ready when a device needed them.
    pub ready: u64,
    /// Layers for whose weights, or for whose cache, a device waited.
    pub late: u64,
    /// Sum, over the layers whose weights a device needed, of the buffers that were ready then.
    pub ready_buffers: u64,
    /// Sum of all buffers over the same layers.
    pub buffers: u64,
    /// Uses of experts that were in memory when rows chose them.
    pub expert_hits: u64,
    /// Uses of experts that were read for it.
    pub expert_misses: u64,
}

impl TransferTotals {
    /// Returns what was added since `earlier`.
    pub fn since(&self, earlier: &TransferTotals) -> TransferTotals {
        TransferTotals {
            bytes: std::array::from_fn(|at| {
                std::array::from_fn(|tier| self.bytes[at][tier].saturating_sub(earlier.bytes[at][tier]))
            }),
            stalls: std::array::from_fn(|at| self.stalls[at].saturating_sub(earlier.stalls[at])),
            ready: self.ready.saturating_sub(earlier.ready),
            late: self.late.saturating_sub(earlier.late),
            ready_buffers: self.ready_buffers.saturating_sub(earlier.ready_buffers),
            buffers: self.buffers.saturating_sub(earlier.buffers),
            expert_hits: self.expert_hits.saturating_sub(earlier.expert_hits),
            expert_misses: self.expert_misses.saturating_sub(earlier.expert_misses),
        }
    }

    /// Returns the mean fraction of the buffers for weights that were ready when a device needed a layer;
    /// `None` if it needed none.
    pub fn occupancy(&self) -> Option<f64> {
        (self.buffers > 0).then(|| self.ready_buffers as f64 / self.buffers as f64)
    }
}

impl Transfers {
    /// Counts bytes of a stream that are read from a tier below the device, or written to it.
    pub(super) fn add_bytes(&self, stream: Stream, tier: Tier, bytes: usize) {
        let tier = usize::from(tier == Tier::Disk);
        self.bytes[stream as usize][tier].fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts time that a device waited for a stream.
    pub(super) fn add_stall(&self, stream: Stream, stall: Duration) {
        let nanos = u64::try_from(stall.as_nanos()).unwrap_or(u64::MAX);
        self.stall_nanos[stream as usize].fetch_add(nanos, Ordering::Relaxed);
    }

    /// Counts a layer, and the time that the device waited for it; `None` if it was ready.
    pub(super) fn add_layer(&self, stream: Stream, stall: Option<Duration>) {
        self.layers[usize::from(stall.is_some())].fetch_add(1, Ordering::Relaxed);
        self.add_stall(stream, stall.unwrap_or_default());
    }

    /// Counts the buffers for weights that are ready when a device needs a layer, of so many.
    pub(super) fn add_occupancy(&self, ready: usize, all: usize) {
        self.buffers[0].fetch_add(ready as u64, Ordering::Relaxed);
        self.buffers[1].fetch_add(all as u64, Ordering::Relaxed);
    }

    /// Begins to record the times of transfers and computations, of devices that are built from now on.
    pub fn start_trace(&self) {
        self.trace.get_or_init(|| Arc::new(Trace::new()));
    }

    /// Returns the recorded times, if any are recorded.
    pub fn trace(&self) -> Option<&Arc<Trace>> {
        self.trace.get()
    }

    /// Counts the use of an expert, which was in memory or was read for it.
    pub(super) fn add_expert(&self, is_hit: bool) {
        self.experts[usize::from(!is_hit)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the memory that builds of a device hold beside its own.
    pub fn held_by(&self, device: &Shard) -> Arc<HeldMemory> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.entry(format!("{device:?}")).or_default().clone()
    }

    /// Returns the totals.
    pub fn totals(&self) -> TransferTotals {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        TransferTotals {
            bytes: self.bytes.each_ref().map(|tiers| tiers.each_ref().map(read)),
            stalls: self.stall_nanos.each_ref().map(|nanos| Duration::from_nanos(read(nanos))),
            ready: read(&self.layers[0]),
            late: read(&self.layers[1]),
            ready_buffers: read(&self.buffers[0]),
            buffers: read(&self.buffers[1]),
            expert_hits: read(&self.experts[0]),
            expert_misses: read(&self.experts[1]),
        }
    }

    /// Returns what was added since the last call.
    pub fn take_new(&self) -> TransferTotals {
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = self.totals();
        totals.since(&std::mem::replace(&mut reported, totals))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_amount_is_taken_once() {
        let (transfers, second) = (Transfers::default(), Duration::from_secs(1));
        transfers.add_bytes(Stream::LoadCache, Tier::Host, 5);
        transfers.add_layer(Stream::LoadWeights, Some(second));
        transfers.add_layer(Stream::LoadWeights, None);
        let first = transfers.take_new();
        let mut bytes = ByStream::default();
        bytes[Stream::LoadCache as usize][0] = 5;
        let mut stalls = [Duration::ZERO; Stream::ALL.len()];
        stalls[Stream::LoadWeights as usize] = second;
        assert_eq!((first.bytes, first.stalls), (bytes, stalls));
        assert_eq!((first.ready, first.late), (1, 1));
        assert_eq!(first.occupancy(), None);
        transfers.add_occupancy(1, 4);
        transfers.add_occupancy(2, 4);
        assert_eq!(transfers.take_new().occupancy(), Some(0.375));
        transfers.add_expert(true);
        transfers.add_expert(false);
        transfers.add_expert(false);
        let experts = transfers.take_new();
        assert_eq!((experts.expert_hits, experts.expert_misses), (1, 2));
        transfers.add_bytes(Stream::StoreCache, Tier::Disk, 2);
        let mut stored = ByStream::default();
        stored[Stream::StoreCache as usize][1] = 2;
        assert_eq!(transfers.take_new(), TransferTotals { bytes: stored, ..TransferTotals::default() });
        assert_eq!(transfers.take_new(), TransferTotals::default());
        bytes[Stream::StoreCache as usize][1] = 2;
        assert_eq!(transfers.totals().bytes, bytes);
    }
}
