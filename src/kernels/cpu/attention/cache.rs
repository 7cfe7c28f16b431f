//! The KV cache's layout, and writing to it.
//!
//! K is (pages, kv_heads, blocks, k_dim, 32): 32 positions lie side by side, so that their scores are lanes
//! of a vector. V is (pages, kv_heads, positions, v_dim padded to 16), so that a position's values are.
//!
//! Invariant: whatever lies in a cache was put there by [`store_kv`] or copied with its whole page.

use crate::backend::{DeviceError, KvLayer, KvLayout, KvTable};
use crate::batch::{Page, PageCopy};
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::simd::{Code, ForCode, LANES, with_code};
use crate::cpu::step::Step;
use crate::host::HostBuf;
use std::ops::Range;

pub const BLOCK: usize = KvLayout::BLOCK;

/// Where things lie in a layer's cache, in elements. Positions are those within the page.
#[derive(Clone, Copy)]
pub struct Places {
    pub layout: KvLayout,
}

impl Places {
    pub fn v_padded(&self) -> usize {
        self.layout.v_dim.next_multiple_of(LANES)
    }

    /// Elements of one page of K, and of V, for one head.
    fn head_lens(&self) -> (usize, usize) {
        (self.layout.page_positions * self.layout.k_dim, self.layout.page_positions * self.v_padded())
    }

    /// K (k_dim, 32) of the block of `position`.
    pub fn k_block(&self, page: Page, head: usize, position: usize) -> Range<usize> {
        let at = self.head(page, head) * self.head_lens().0 + position / BLOCK * BLOCK * self.layout.k_dim;
        at..at + BLOCK * self.layout.k_dim
    }

    /// V (n, v_padded) of `n` positions from `position` on.
    pub fn v_run(&self, page: Page, head: usize, position: usize, n: usize) -> Range<usize> {
        let at = self.head(page, head) * self.head_lens().1 + position * self.v_padded();
        at..at + n * self.v_padded()
    }

    fn head(&self, page: Page, head: usize) -> usize {
        assert!((page as usize) < self.layout.pages, "page {page} is outside the pool");
        page as usize * self.layout.kv_heads + head
    }
}

/// Allocates one layer's cache.
pub fn alloc_kv(layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
    assert!(layout.page_positions.is_multiple_of(BLOCK), "pages hold whole blocks");
    layout.check_type()?;
    let (k_len, v_len) = Places { layout }.head_lens();
    let allocate = |len: usize| {
        let elements = layout.pages.checked_mul(layout.kv_heads).and_then(|heads| heads.checked_mul(len));
        let bytes = elements.and_then(|elements| layout.ty.bytes(elements));
        HostBuf::zeroed(bytes.ok_or_else(|| DeviceError::OutOfMemory {
            bytes: usize::MAX,
            reason: "the KV cache is larger than the address space".into(),
        })?)
    };
    Ok(KvLayer { k: allocate(k_len)?, v: allocate(v_len)?, layout })
}

/// Copies whole pages.
pub fn copy_pages(copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
    for buf in [&mut cache.k, &mut cache.v] {
        let page = buf.len() / cache.layout.pages;
        for copy in copies {
            let from = copy.from as usize * page;
            buf.bytes_mut().copy_within(from..from + page, copy.to as usize * page);
        }
    }
}

/// Writes k (rows, kv_heads, k_dim) and v (rows, kv_heads, v_dim) to their rows' positions, through `table`.
pub fn store_kv(
    pool: &mut Pool,
    step: &Step,
    table: KvTable,
    k: &[f32],
    v: &[f32],
    cache: &mut KvLayer<HostBuf>,
) {
    assert_eq!(cache.layout.page_positions, step.limits.page_positions, "pages of one size");
    with_code(cache.layout.ty, Store { pool, step, table, k, v, cache });
}

struct Store<'a> {
    pool: &'a mut Pool,
    step: &'a Step,
    table: KvTable,
    k: &'a [f32],
    v: &'a [f32],
    cache: &'a mut KvLayer<HostBuf>,
}

impl ForCode for Store<'_> {
    type Out = ();

    /// An item is a KV head: rows may share a page (the sink), heads share nothing.
    fn run<C: Code>(self) {
        let layout = self.cache.layout;
        let places = Places { layout };
        let (k_cache, v_cache) =
            (Parts::new(C::of_mut(&mut self.cache.k)), Parts::new(C::of_mut(&mut self.cache.v)));
        let (step, table, k, v) = (self.step, self.table, self.k, self.v);
        self.pool.run(layout.kv_heads, |_, head| {
            for (r, row) in step.rows().iter().enumerate() {
                let (page, position) = step.place(step.run_of(row), table, row.position);
                let (k_at, v_at) =
                    (places.k_block(page, head, position), places.v_run(page, head, position, 1));
                // SAFETY: both ranges lie in the part of this head, which is this item's alone.
                let (k_to, v_to) =
                    unsafe { (k_cache.part(k_at), v_cache.part(v_at.start..v_at.start + layout.v_dim)) };
                let from = r * layout.kv_heads + head;
                scatter::<C>(&k[from * layout.k_dim..][..layout.k_dim], position % BLOCK, k_to);
                C::encode(&v[from * layout.v_dim..][..layout.v_dim], v_to);
            }
        });
    }
}

/// Writes `values` (k_dim) to column `column` of a block (k_dim, 32).
fn scatter<C: Code>(values: &[f32], column: usize, block: &mut [C::Raw]) {
    let mut codes = [C::Raw::default(); 4 * LANES];
    let blocks = block.chunks_mut(codes.len() * BLOCK);
    for (values, block) in values.chunks(codes.len()).zip(blocks) {
        C::encode(values, &mut codes[..values.len()]);
        for (code, dim) in codes.iter().zip(block.chunks_exact_mut(BLOCK)) {
            dim[column] = *code;
        }
    }
}
