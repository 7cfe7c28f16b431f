//! Int8 GEMM: x · wᵀ, for x (m, k) and packed w (n, k).
//!
//! x is quantized to int8 once. With few rows, a thread streams several panels of outputs from memory, one
//! after another. With more rows, it takes a group of panels and processes the columns a slice at a time.
//!
//! Invariant: how work is divided decides only when a block is added, never in which order.

use super::PANEL_OUTPUTS;
use super::formats::{PackedFormat, PackedFormatOp, dispatch_format};
use super::input::{self, PackedInt8, ROW_BLOCK_BYTES, WeightPath};
use super::panel_group::{self, GroupScratch, PanelGroup, SLICE_QUANT_BYTES, SLICE_SCALES};
use crate::backend::{DeviceError, Weight};
use crate::cpu::bf16::Bf16Isa;
use crate::cpu::gemm_input::{GemmInput, PADDING_ROWS_MAX, RowBuffers, Share, buffer_rows};
use crate::cpu::gemm_task::{GemmTask, PackedInput, SharedScratch};
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::scratch_memory::ScratchMemory;
use crate::cpu::simd::{IntKernel, Ints, LANES, Level};
use crate::host::HostBuf;
use crate::quant::INT8_BLOCK_LEN;
use std::ops::Range;

/// Bytes of weights that one work item takes when the weights stream.
const STREAM_BYTES: usize = 128 * 1024;
/// The number of panels of a work item is a multiple of this, the number of panels of the largest tile.
const TILE_PANELS_MAX: usize = 2;

/// Buffers of the int8 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct Int8Scratch<Buf = HostBuf> {
    /// The packed input.
    input: Buf,
    /// For each thread: the sums of all rows with a panel group, and the group's unpacked quants and scales.
    sums: Buf,
    sums_len: usize,
    quants: Buf,
    scales: Buf,
}

impl<Buf> Int8Scratch<Buf> {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads.
    pub fn new<M: ScratchMemory<Buf = Buf>>(
        rows: usize,
        k: usize,
        threads: usize,
        memory: &M,
    ) -> Result<Int8Scratch<Buf>, DeviceError> {
        let sums_len = (rows + PADDING_ROWS_MAX) * panel_group::GROUP_PANELS * LANES;
        let panels = if k == 0 { 0 } else { threads * panel_group::GROUP_PANELS };
        Ok(Int8Scratch {
            input: memory
                .zeroed(buffer_rows(rows, threads) * k.div_ceil(INT8_BLOCK_LEN) * ROW_BLOCK_BYTES)?,
            sums: memory.zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
            quants: memory.zeroed(panels * SLICE_QUANT_BYTES)?,
            scales: memory.zeroed(panels * SLICE_SCALES * size_of::<f32>())?,
        })
    }
}

impl Int8Scratch {
    /// Lets `threads` threads share the scratch.
    pub fn share(&mut self, level: Level, bf16_isa: Option<Bf16Isa>, threads: usize) -> SharedInt8<'_> {
        SharedInt8 {
            level,
            bf16_isa,
            threads,
            input_len: self.input.len(),
            input: SharedSlice::new(self.input.bytes_mut()),
            sums: SharedSlice::new(self.sums.f32_mut()),
            sums_len: self.sums_len,
            quants: SharedSlice::new(self.quants.bytes_mut()),
            scales: SharedSlice::new(self.scales.f32_mut()),
        }
    }
}

/// Scratch that threads share.
pub struct SharedInt8<'a> {
    level: Level,
    bf16_isa: Option<Bf16Isa>,
    threads: usize,
    input: SharedSlice<'a, u8>,
    input_len: usize,
    sums: SharedSlice<'a, f32>,
    sums_len: usize,
    quants: SharedSlice<'a, u8>,
    scales: SharedSlice<'a, f32>,
}

impl SharedScratch for SharedInt8<'_> {
    type Packed<'a>
        = PackedInt8<'a>
    where
        Self: 'a;

    fn rows_of(&self, share: Share, k: usize) -> usize {
        share.rows(self.input_len, ROW_BLOCK_BYTES, k / INT8_BLOCK_LEN * ROW_BLOCK_BYTES)
    }

    unsafe fn pack(
        &self,
        share: Share,
        workers: Workers,
        x: &GemmInput,
        buffers: &RowBuffers,
    ) -> PackedInt8<'_> {
        let SharedInt8 { level, threads, sums, sums_len, quants, scales, .. } = *self;
        let (path, tiles) = WeightPath::for_rows(level, self.bf16_isa, x.rows);
        let len = tiles.padded_rows() * (x.k / INT8_BLOCK_LEN * ROW_BLOCK_BYTES);
        // SAFETY: the caller's promise.
        let input = unsafe { self.input.slice_mut(share.place(self.input_len, ROW_BLOCK_BYTES, len)) };
        input::pack(workers, level, x, &tiles, buffers, input);
        PackedInt8 { level, threads, path, tiles, rows: x.rows, input, sums, sums_len, quants, scales }
    }
}

impl PackedInput for PackedInt8<'_> {
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let panel_bytes = w.buf.len() / w.n.div_ceil(PANEL_OUTPUTS);
        let streamed = STREAM_BYTES / panel_bytes.clamp(1, STREAM_BYTES);
        let panels = if self.is_streaming() { streamed } else { panel_group::GROUP_PANELS };
        panels.min(max.div_ceil(PANEL_OUTPUTS)).next_multiple_of(TILE_PANELS_MAX) * PANEL_OUTPUTS
    }

    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>) {
        let own = |each: usize| worker * each..(worker + 1) * each;
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let scratch = unsafe {
            GroupScratch {
                sums: self.sums.slice_mut(own(self.sums_len)),
                quants: self.quants.slice_mut(own(panel_group::GROUP_PANELS * SLICE_QUANT_BYTES)),
                scales: self.scales.slice_mut(own(panel_group::GROUP_PANELS * SLICE_SCALES)),
            }
        };
        self.level.run_ints(Int8Item { input: self, gemm, outputs, scratch });
    }
}

/// A work item: all rows with a range of outputs.
struct Int8Item<'a> {
    input: &'a PackedInt8<'a>,
    gemm: &'a GemmTask<'a>,
    outputs: Range<usize>,
    scratch: GroupScratch<'a>,
}

impl IntKernel for Int8Item<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        dispatch_format(self.gemm.w.ty, WithFormat { item: self, simd })
            .expect("the weight is packed; this is a bug")
    }
}

/// Runs a work item for the packed format of its weight.
struct WithFormat<'a, S> {
    item: Int8Item<'a>,
    simd: S,
}

impl<S: Ints> PackedFormatOp for WithFormat<'_, S> {
    type Out = ();

    fn run<F: PackedFormat>(self) {
        let Int8Item { input, gemm, outputs, mut scratch } = self.item;
        let end = outputs.end.div_ceil(PANEL_OUTPUTS);
        for first in (outputs.start / PANEL_OUTPUTS..end).step_by(panel_group::GROUP_PANELS) {
            let panels = first..end.min(first + panel_group::GROUP_PANELS);
            PanelGroup::<F>::new(input, gemm, panels).multiply(self.simd, &mut scratch);
        }
    }
}
