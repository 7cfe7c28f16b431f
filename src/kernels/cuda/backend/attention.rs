//! The KV cache and attention.
//!
//! Invariant: the sum of an output runs in an order that follows from the positions that its row sees.

use super::CudaBackend;
use super::launch::{Device, THREADS, f32_bytes};
use super::program::KernelName;
use super::steps::Steps;
use crate::backend::{
    AttentionShape, DeviceError, DistanceScores, HeldShapes, KvLayer, KvLayout, KvTable, Mask, StepLimits,
};
use crate::batch::{PageCopy, RowSpan, SpanTable};
use crate::cuda::{Arguments, CudaBuf};
use crate::quant::QuantType;

/// Number of scratch buffers.
pub(super) const BUFFERS: usize = 1;

/// Blocks of threads that attend to selected values, each with scores of its own.
const SELECTING_BLOCKS: usize = 128;

/// Threads of a block that attends.
const ATTENDING_THREADS: u32 = 128;

/// Largest number of bytes of shared memory for queries and sums, so that a kernel needs no more than 48 KiB.
const SHARED_BYTES: usize = 40 << 10;

/// Kernels that attend, with the query heads that share what a block of threads reads.
const ATTENDING: [(usize, &str); 3] = [(4, "attend_4"), (2, "attend_2"), (1, "attend_1")];

/// The kernel that attends to selected values.
const SELECTING: &str = "attend_selected";

/// Bits of the table and the mask of attention, in the order of `cache.cu` and `attention.cu`.
const IS_SCRATCH: u32 = 1;
const IS_CROSS: u32 = 2;
const IS_CAUSAL: u32 = 4;
const IS_SELECTIVE: u32 = 8;
const IS_CHUNKED: u32 = 16;

/// Distance to positions that stands for no window.
const UNBOUNDED: usize = 1 << 30;

/// Returns the bytes of the scratch buffers: scores of the positions that rows with top-k sparse attention
/// see.
pub(super) fn scratch_bytes(limits: &StepLimits, shapes: &HeldShapes) -> [usize; BUFFERS] {
    let is_used = !limits.attended_fraction.is_one() && !shapes.caches.is_empty();
    [if is_used { SELECTING_BLOCKS * f32_bytes(scores_len(limits)) } else { 0 }]
}

/// Returns the scores of a block of threads.
fn scores_len(limits: &StepLimits) -> usize {
    limits.positions.next_multiple_of(KvLayout::BLOCK_POSITIONS)
}

/// Compiles and loads the kernels for caches of a format.
pub(super) fn load(device: &mut Device, ty: QuantType) -> Result<(), DeviceError> {
    let attending = ATTENDING.iter().map(|(_, entry)| *entry);
    attending.chain(["store_kv", SELECTING]).try_for_each(|entry| device.load(KernelName::cache(entry, ty)))
}

/// Computes [`crate::Backend::copy_pages`].
pub(super) fn copy_pages(
    device: &mut Device,
    table: KvTable,
    copies: &[PageCopy],
    cache: &mut KvLayer<CudaBuf>,
) -> Result<(), DeviceError> {
    for buf in [&mut cache.k, &mut cache.v].into_iter().filter(|buf| !buf.is_empty()) {
        let page_bytes = buf.len() / cache.layout.pages;
        for copy in copies.iter().filter(|copy| copy.table == table && copy.from != copy.to) {
            let [from, to] = [copy.from, copy.to].map(|page| page as usize * page_bytes);
            device.context.copy_within(buf, from, to, page_bytes)?;
        }
    }
    Ok(())
}

/// Computes [`crate::Backend::store_kv`].
pub(super) fn store_kv(
    device: &mut Device,
    steps: &Steps,
    table: KvTable,
    (k, v): (&CudaBuf, &CudaBuf),
    cache: &mut KvLayer<CudaBuf>,
) -> Result<(), DeviceError> {
    check_cache(steps, table, &cache.layout);
    let KvLayout { ty, page_positions, kv_heads, k_dim, .. } = cache.layout;
    let v_dim = cache.layout.stored_v_dim();
    let rows = steps.row_count();
    let arguments = steps.table(steps.rows(Arguments::default()).int(rows), table).word(table_bits(table));
    let arguments = arguments.int(page_positions).int(kv_heads).int(k_dim).int(v_dim);
    let arguments = arguments.buf(k, f32_bytes(rows * kv_heads * k_dim));
    let arguments = arguments.buf(v, f32_bytes(rows * kv_heads * v_dim));
    let arguments = arguments.buf(&cache.k, cache.k.len()).buf(&cache.v, cache.v.len());
    let buffers = if v_dim > 0 { 2 } else { 1 };
    device.launch(KernelName::cache("store_kv", ty), ([rows, buffers, 1], THREADS), arguments)
}

impl CudaBackend {
    /// Computes [`crate::Backend::attention`].
    pub(super) fn attend(
        &mut self,
        shape: &AttentionShape<CudaBuf>,
        cache: &KvLayer<CudaBuf>,
        (q, out): (&CudaBuf, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        let (device, steps) = (&mut self.device, self.steps.as_ref().expect(super::NOT_PREPARED));
        let KvLayout { ty, kv_heads, k_dim, v_dim, .. } = cache.layout;
        check_cache(steps, shape.table, &cache.layout);
        assert!(shape.heads.is_multiple_of(kv_heads), "query heads share KV heads evenly");
        shape.assert_valid();
        if let Some(bias) = shape.bias {
            assert_eq!(bias.heads, shape.heads, "a bias for each query head");
            check_reach(steps, shape, bias.reach);
        }
        if let Some(distances) = &shape.distances {
            check_reach(steps, shape, distances.buckets.reach);
        }
        let limits = &steps.state.limits;
        let (rows, group) = (steps.row_count(), shape.heads / kv_heads);
        let is_selective = !limits.attended_fraction.is_one() && shape.table.holds_sequence();
        let arguments = arguments(steps, shape, cache, is_selective);
        let arguments = arguments.buf(q, f32_bytes(rows * shape.heads * k_dim));
        let values = if cache.layout.v_in_k { &cache.k } else { &cache.v };
        let arguments = arguments.buf(&cache.k, cache.k.len()).buf(values, values.len());
        let arguments = arguments.buf(out, f32_bytes(rows * shape.heads * v_dim));
        let shared = |heads: usize| heads * head_bytes(&cache.layout);
        let fits = |heads: usize| shared(heads) <= SHARED_BYTES && (heads == 1 || heads < 2 * group);
        let kernel = ATTENDING.into_iter().find(|(heads, _)| fits(*heads));
        let (heads, entry) = kernel.expect("the width of heads is checked when a cache is allocated");
        let grid = ([rows, kv_heads * group.div_ceil(heads), 1], ATTENDING_THREADS, shared(heads));
        device.launch_shared(KernelName::cache(entry, ty), grid, arguments)?;
        if is_selective && steps.state.spans().iter().any(|span| span.is_generated) {
            let scores = &self.attention_scratch.0[0];
            let arguments = arguments.int(rows).word(limits.attended_fraction.millionths());
            let arguments = arguments.int(scores_len(limits)).buf(scores, scores.len());
            let blocks = (rows * shape.heads).min(SELECTING_BLOCKS);
            let grid = ([blocks, 1, 1], ATTENDING_THREADS, shared(1));
            device.launch_shared(KernelName::cache(SELECTING, ty), grid, arguments)?;
        }
        Ok(())
    }
}

/// Returns the bytes of shared memory for a query and the sums of a head, each in fours.
fn head_bytes(layout: &KvLayout) -> usize {
    f32_bytes(layout.k_dim.next_multiple_of(4) + layout.v_dim.next_multiple_of(4))
}

/// Checks that heads are not too wide. Fails with [`DeviceError::Unsupported`].
pub(super) fn check_heads(layout: &KvLayout) -> Result<(), DeviceError> {
    match head_bytes(layout) <= SHARED_BYTES {
        true => Ok(()),
        false => Err(DeviceError::Unsupported(format!(
            "heads of width {} with values of width {} are too wide for attention on a GPU",
            layout.k_dim, layout.v_dim
        ))),
    }
}

/// Returns the arguments of kernels that attend, up to the queries.
fn arguments(
    steps: &Steps,
    shape: &AttentionShape<CudaBuf>,
    cache: &KvLayer<CudaBuf>,
    is_selective: bool,
) -> Arguments {
    let KvLayout { page_positions, kv_heads, k_dim, v_dim, .. } = cache.layout;
    let mut bits = table_bits(shape.table);
    if is_selective {
        bits |= IS_SELECTIVE;
    }
    let [mut before, after] = distances(shape.mask);
    match shape.mask {
        Mask::Causal { .. } => bits |= IS_CAUSAL,
        Mask::Chunked { chunk } => {
            bits |= IS_CAUSAL | IS_CHUNKED;
            before = chunk.min(UNBOUNDED);
        }
        Mask::Bidirectional { .. } => {}
    }
    let arguments = steps.table(steps.rows(Arguments::default()), shape.table);
    let arguments = arguments.word(bits).int(before).int(after).int(page_positions);
    let width = if cache.layout.v_in_k { k_dim } else { v_dim };
    let arguments = arguments.int(shape.heads).int(kv_heads).int(k_dim).int(v_dim).int(width);
    let arguments = arguments.float(shape.scale).float(shape.softcap.unwrap_or(0.0));
    let (bias, reach) = (shape.bias.map(|bias| &bias.table), shape.bias.map_or(0, |bias| bias.reach));
    let biases = shape.bias.map_or(0, |bias| bias.heads * (2 * bias.reach - 1));
    let arguments =
        arguments.optional(bias, f32_bytes(biases)).int(reach).optional(shape.sinks, f32_bytes(shape.heads));
    let Some(DistanceScores { of_queries, of_keys, buckets }) = &shape.distances else {
        return arguments.optional(None, 0).optional(None, 0).optional(None, 0).int(0).int(0);
    };
    let bytes = f32_bytes(steps.row_count() * shape.heads * buckets.count);
    let arguments = arguments.buf(of_queries, bytes).buf(of_keys, bytes);
    let arguments = arguments.buf(&buckets.table, f32_bytes(2 * buckets.reach - 1));
    arguments.int(buckets.count).int(buckets.reach)
}

/// Returns the bits of a table.
fn table_bits(table: KvTable) -> u32 {
    match table {
        KvTable::Own | KvTable::Window => 0,
        KvTable::Cross => IS_CROSS,
        KvTable::Scratch => IS_SCRATCH,
    }
}

/// Returns the largest distances to positions before and after that of the row.
fn distances(mask: Mask) -> [usize; 2] {
    match mask {
        Mask::Causal { window } => [window.map_or(UNBOUNDED, |window| (window - 1).min(UNBOUNDED)), 0],
        Mask::Chunked { chunk } => [(chunk - 1).min(UNBOUNDED), 0],
        Mask::Bidirectional { window } => [window.unwrap_or(UNBOUNDED).min(UNBOUNDED); 2],
    }
}

/// Asserts that the positions of a step are within the pages of a cache.
fn check_cache(steps: &Steps, table: KvTable, layout: &KvLayout) {
    let limits = &steps.state.limits;
    assert_eq!(
        layout.page_positions, limits.page_positions,
        "the cache and the step have the same page size"
    );
    if table == KvTable::Scratch {
        let positions = layout.pages * layout.page_positions;
        assert!(limits.scratch_positions() <= positions, "{positions} positions of a scratch cache");
    }
}

/// Asserts that a table of so many distances covers every distance that rows see.
fn check_reach(steps: &Steps, shape: &AttentionShape<CudaBuf>, reach: usize) {
    let [before, after] = distances(shape.mask);
    let farthest = |span: &RowSpan| {
        let (first, last) = (span.start, span.start + span.len - 1);
        let end = match (shape.mask, shape.table) {
            (Mask::Causal { .. } | Mask::Chunked { .. }, _) => 0,
            (_, KvTable::Scratch) => span.len,
            _ => span.encoder_len,
        };
        last.min(before).max(end.saturating_sub(first + 1).min(after))
    };
    let is_seeing = |span: &&RowSpan| span.table != SpanTable::Null;
    let farthest = steps.state.spans().iter().filter(is_seeing).map(farthest).max();
    assert!(farthest.is_none_or(|far| far < reach), "the table covers {reach} distances");
}
