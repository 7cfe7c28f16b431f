//! Layout of the KV cache, and writing to it.
//!
//! K and V are (pages, kv_heads, blocks). A block holds 32 positions of one head, stored as its [`KvFormat`]
//! defines: keys with the positions side by side, so that their scores are lanes of a vector; values with the
//! numbers of a position side by side. Keys that have V in them are stored like values, in K alone.
//!
//! Invariant: all data in a cache was written by [`store_kv`] or copied with its whole page.

use super::BLOCK;
use super::dispatch::{KvFormatOp, dispatch_kv_format};
use super::kv_format::KvFormat;
use crate::backend::{DeviceError, KvLayer, KvLayout, KvTable};
use crate::batch::{Page, PageCopy, StepState};
use crate::cpu::pool::{SharedSlice, ThreadPool};
use crate::host::HostBuf;
use std::ops::Range;

/// Layout of a layer's cache, in units of its storage format. Positions are those within a page.
#[derive(Clone, Copy)]
pub struct CacheLayout {
    pub layout: KvLayout,
    /// Units of a block of K and of a block of V.
    k_len: usize,
    v_len: usize,
}

impl CacheLayout {
    /// Computes the layout for storage format `C`.
    pub fn new<C: KvFormat>(layout: KvLayout) -> CacheLayout {
        match layout.v_in_k {
            true => CacheLayout { layout, k_len: C::v_len(layout.k_dim), v_len: 0 },
            false => CacheLayout { layout, k_len: C::k_len(layout.k_dim), v_len: C::v_len(layout.v_dim) },
        }
    }

    /// Returns the range in K of the block that holds `position`.
    pub fn k_block(&self, page: Page, head: usize, position: usize) -> Range<usize> {
        let at = self.block(page, head, position) * self.k_len;
        at..at + self.k_len
    }

    /// Returns the range in V, or in a K that has it, of the block that holds `position`.
    pub fn v_block(&self, page: Page, head: usize, position: usize) -> Range<usize> {
        if self.layout.v_in_k {
            return self.k_block(page, head, position);
        }
        let at = self.block(page, head, position) * self.v_len;
        at..at + self.v_len
    }

    /// Returns the index of the block that holds `position`.
    fn block(&self, page: Page, head: usize, position: usize) -> usize {
        let layout = &self.layout;
        assert!((page as usize) < layout.pages, "page {page} is outside the pool");
        let heads_before = page as usize * layout.kv_heads + head;
        heads_before * (layout.page_positions / BLOCK) + position / BLOCK
    }
}

/// Returns the bytes of K and of V in the cache of one layer.
pub fn kv_bytes(layout: &KvLayout) -> Result<[usize; 2], DeviceError> {
    assert!(layout.page_positions.is_multiple_of(BLOCK), "a page holds whole blocks");
    layout.check_type()?;
    // A head that is too large for a number of bytes makes the cache so too.
    layout.cache_bytes(layout.head_bytes().unwrap_or([usize::MAX; 2]))
}

/// Copies whole pages within a cache: those of `copies` that are for `table`.
pub fn copy_pages(table: KvTable, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
    for buf in [&mut cache.k, &mut cache.v] {
        let page = buf.len() / cache.layout.pages;
        for copy in copies.iter().filter(|copy| copy.table == table) {
            let from = copy.from as usize * page;
            buf.bytes_mut().copy_within(from..from + page, copy.to as usize * page);
        }
    }
}

/// Writes k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) to the cache positions of their rows, found
/// through `table`.
pub fn store_kv(
    pool: &mut ThreadPool,
    step: &StepState,
    table: KvTable,
    k: &[f32],
    v: &[f32],
    cache: &mut KvLayer<HostBuf>,
) {
    assert_eq!(
        cache.layout.page_positions, step.limits.page_positions,
        "the cache and the step have the same page size"
    );
    dispatch_kv_format(cache.layout.ty, StoreKv { pool, step, table, k, v, cache });
}

/// Writes keys and values in the storage format of the cache.
struct StoreKv<'a> {
    pool: &'a mut ThreadPool,
    step: &'a StepState,
    table: KvTable,
    k: &'a [f32],
    v: &'a [f32],
    cache: &'a mut KvLayer<HostBuf>,
}

impl KvFormatOp for StoreKv<'_> {
    type Out = ();

    /// Writes all rows. A work item is a KV head: rows may share a page (the null page), heads share nothing.
    fn run<C: KvFormat>(self) {
        let layout = self.cache.layout;
        let places = CacheLayout::new::<C>(layout);
        let (k_cache, v_cache) = (
            SharedSlice::new(C::units_mut(&mut self.cache.k)),
            SharedSlice::new(C::units_mut(&mut self.cache.v)),
        );
        let (step, table, k, v) = (self.step, self.table, self.k, self.v);
        self.pool.run(layout.kv_heads, |_, head| {
            for (r, row) in step.rows().iter().enumerate() {
                let (page, position) = step.locate(step.span_of(row), table, row.position);
                let (from, at) = (r * layout.kv_heads + head, position % BLOCK);
                let k = &k[from * layout.k_dim..][..layout.k_dim];
                // SAFETY: the range lies in the part of this head, which only this item writes.
                let k_to = unsafe { k_cache.slice_mut(places.k_block(page, head, position)) };
                if layout.v_in_k {
                    C::write_value(k, at, k_to);
                    continue;
                }
                C::write_key(k, at, k_to);
                // SAFETY: as above.
                let v_to = unsafe { v_cache.slice_mut(places.v_block(page, head, position)) };
                C::write_value(&v[from * layout.v_dim..][..layout.v_dim], at, v_to);
            }
        });
    }
}
