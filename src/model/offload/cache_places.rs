//! The places of the KV caches of layers: in memory, or in a file with buffers in memory.
//!
//! Invariant: the same places follow from the same layouts, whether memory is counted or allocated.

use super::residency::Residency;
use mainstem_kernels::{KvLayout, KvTable};
use std::path::PathBuf;

/// Number of layers with the same layout that the buffers are for: one that computes, one that is read, and
/// one that is written.
const LAYERS_AT_ONCE: usize = 3;

/// The settings of caches that do not all stay in memory.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheOffload {
    /// The fraction of the caches' bytes that stays in memory, apart from those of windowed layers, which all
    /// stay.
    pub resident: Residency,
    /// Folder of the file.
    pub folder: PathBuf,
    /// Whether layers are read and written while others compute, rather than between them.
    pub overlaps: bool,
}

/// The places of the caches of a model's layers, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CacheReport {
    /// The file, which has the caches that do not stay in memory.
    pub file_bytes: usize,
    /// Buffers for these caches.
    pub buffer_bytes: usize,
}

impl CacheReport {
    /// Adds the places of another device's caches.
    pub fn add(&mut self, other: CacheReport) {
        self.file_bytes += other.file_bytes;
        self.buffer_bytes += other.buffer_bytes;
    }
}

impl CacheOffload {
    /// Returns for each layer, given the tables and layouts of their caches, whether its cache is in the
    /// file.
    pub fn choose(&self, layers: &[(KvTable, KvLayout)]) -> Vec<bool> {
        let bytes = |(table, layout): &(KvTable, KvLayout)| match table {
            KvTable::Own => layout.page_bytes().unwrap_or(usize::MAX),
            _ => 0,
        };
        let bytes: Vec<usize> = layers.iter().map(bytes).collect();
        let stays = self.resident.choose(&bytes);
        bytes.iter().zip(stays).map(|(bytes, stays)| *bytes > 0 && !stays).collect()
    }
}

/// Returns the distinct layouts among those of the caches in the file, each with its number of buffers: for
/// one layer without overlap.
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
