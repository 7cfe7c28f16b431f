//! The places of the KV caches of layers: on the device, or in the memory of the host or a file, with buffers
//! on the device.
//!
//! Invariant: the same places follow from the same layouts, whether memory is counted or allocated.

use super::residency::Residency;
use super::tier::{Tier, spread};
use mainstem_kernels::{KvLayout, KvTable};
use std::path::PathBuf;

/// Number of layers with the same layout that the buffers are for: one that computes, one that is read, and
/// one that is written.
const LAYERS_AT_ONCE: usize = 3;

/// The settings of caches that do not all stay in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOffload {
    /// The fraction of the caches' bytes that stays on the device, apart from those of windowed layers, which
    /// all stay.
    pub resident: Residency,
    /// The fraction of these bytes that is in the memory of the host, from 0 to 1: of a device without memory
    /// of its own, none.
    pub host: f64,
    /// Folder of the file.
    pub folder: PathBuf,
    /// Whether layers are read and written while others compute, rather than between them.
    pub overlaps: bool,
    /// Whether attention on the caches in the memory of the host is computed there, so that their pages are
    /// not copied to the device.
    pub attends_on_host: bool,
}

/// The places of the caches of a model's layers, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheReport {
    /// The file, which has the caches that are in no memory.
    pub file_bytes: usize,
    /// Caches in the memory of the host.
    pub host_bytes: usize,
    /// Caches among these on which attention is computed there, without buffers.
    pub attended_bytes: usize,
    /// Buffers for these caches.
    pub buffer_bytes: usize,
}

impl CacheReport {
    /// Adds the places of another device's caches.
    pub fn add(&mut self, other: CacheReport) {
        self.file_bytes += other.file_bytes;
        self.host_bytes += other.host_bytes;
        self.attended_bytes += other.attended_bytes;
        self.buffer_bytes += other.buffer_bytes;
    }
}

impl CacheOffload {
    /// Returns the tier of the cache of each layer, given the tables and layouts of the caches.
    pub fn choose(&self, layers: &[(KvTable, KvLayout)]) -> Vec<Tier> {
        let bytes = |(table, layout): &(KvTable, KvLayout)| match table {
            KvTable::Own => layout.page_bytes().unwrap_or(usize::MAX),
            _ => 0,
        };
        let bytes: Vec<usize> = layers.iter().map(bytes).collect();
        let tiers = spread(&bytes, self.resident, self.host);
        bytes.iter().zip(tiers).map(|(bytes, tier)| if *bytes > 0 { tier } else { Tier::Device }).collect()
    }

    /// Returns whether attention on a cache in `tier` is computed in the memory of the host.
    pub fn attends_in(&self, tier: Tier) -> bool {
        self.attends_on_host && tier == Tier::Host
    }

    /// Returns whether pages of a cache in `tier` are copied to buffers on the device.
    pub fn streams_from(&self, tier: Tier) -> bool {
        tier != Tier::Device && !self.attends_in(tier)
    }
}

/// Returns the distinct layouts among those of the caches that are not on the device, each with its number of
/// buffers: for one layer without overlap.
pub fn buffer_layouts(streamed: &[KvLayout], overlaps: bool) -> Vec<(KvLayout, usize)> {
    let at_once = if overlaps { LAYERS_AT_ONCE } else { 1 };
    let mut layouts: Vec<(KvLayout, usize)> = Vec::new();
    for layout in streamed {
        match layouts.iter_mut().find(|(known, _)| known == layout) {
            Some((_, count)) => *count = at_once.min(*count + 1),
            None => layouts.push((*layout, 1)),
        }
    }
    layouts
}
