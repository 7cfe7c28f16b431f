//! BF16 GEMM: x · wᵀ, for x (m, k) and packed w (n, k).
//!
//! x is converted to BF16 once. A thread takes some panels and multiplies all rows with them. AMX takes 2 x
//! 16 rows with 2 panels, all columns at once: its sums stay in registers, and the panels of a work item,
//! with two tiles of rows, in the second-level cache. AVX-512 takes up to 6 rows with 4 panels, a slice of
//! columns at a time, such that panels and rows fit the first-level cache.
//!
//! Invariant: how work is divided into items and slices decides only when a block is added, never in which
//! order.

#[cfg(target_arch = "x86_64")]
use super::kernel::{Avx512Bf16, multiply_tiles};
use super::kernel::{Bf16Isa, TileOperands};
use super::store::panel_bytes;
use super::{BLOCK, BLOCK_BYTES, PANEL_OUTPUTS, input};
use crate::backend::{DeviceError, Weight};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{self, Amx};
use crate::cpu::gemm_input::{GemmInput, PADDING_ROWS_MAX, RowBuffers, RowTiles, Share, buffer_rows};
use crate::cpu::gemm_task::{GemmTask, PackedInput, SharedScratch};
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::scratch_memory::ScratchMemory;
use crate::cpu::simd::Level;
use crate::host::HostBuf;
use std::ops::Range;

/// Panels that AVX-512 multiplies at once.
const AVX512_PANELS: usize = 4;
/// Panels that AMX multiplies at once.
const AMX_PANELS: usize = 2;
/// Blocks of a slice of columns.
const SLICE_BLOCKS: usize = 8;
/// Bytes of weights that a work item takes when the weights stream.
const STREAM_BYTES: usize = 128 * 1024;
/// Bytes of weights that a work item takes otherwise.
const ITEM_BYTES: usize = 512 * 1024;

/// Buffers of the BF16 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct Bf16Scratch<Buf = HostBuf> {
    /// The packed input.
    input: Buf,
    /// For each thread: sums of all rows with the panels that are multiplied at once.
    sums: Buf,
    sums_len: usize,
}

impl<Buf> Bf16Scratch<Buf> {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads.
    pub fn new<M: ScratchMemory<Buf = Buf>>(
        rows: usize,
        k: usize,
        threads: usize,
        memory: &M,
    ) -> Result<Bf16Scratch<Buf>, DeviceError> {
        let sums_len = (rows + PADDING_ROWS_MAX) * AVX512_PANELS * PANEL_OUTPUTS;
        Ok(Bf16Scratch {
            input: memory.zeroed(buffer_rows(rows, threads) * input::row_bytes(k))?,
            sums: memory.zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
        })
    }
}

impl Bf16Scratch {
    /// Lets threads share the scratch.
    pub fn share(&mut self, level: Level, isa: Bf16Isa) -> SharedBf16<'_> {
        let (input_len, sums_len) = (self.input.len(), self.sums_len);
        let (input, sums) = (SharedSlice::new(self.input.bytes_mut()), SharedSlice::new(self.sums.f32_mut()));
        SharedBf16 { level, isa, input, input_len, sums, sums_len }
    }
}

/// Scratch that threads share.
pub struct SharedBf16<'a> {
    level: Level,
    isa: Bf16Isa,
    input: SharedSlice<'a, u8>,
    input_len: usize,
    sums: SharedSlice<'a, f32>,
    sums_len: usize,
}

impl SharedScratch for SharedBf16<'_> {
    type Packed<'a>
        = PackedBf16<'a>
    where
        Self: 'a;

    fn rows_of(&self, share: Share, k: usize) -> usize {
        share.rows(self.input_len, BLOCK_BYTES, input::row_bytes(k))
    }

    unsafe fn pack(
        &self,
        share: Share,
        workers: Workers,
        x: &GemmInput,
        buffers: &RowBuffers,
    ) -> PackedBf16<'_> {
        let tiles = self.isa.row_tiles(x.rows);
        let place = share.place(self.input_len, BLOCK_BYTES, tiles.padded_rows() * input::row_bytes(x.k));
        // SAFETY: the caller's promise.
        let input = unsafe { self.input.slice_mut(place) };
        input::pack(workers, self.level, x, &tiles, buffers, input);
        PackedBf16 { isa: self.isa, tiles, rows: x.rows, input, sums: self.sums, sums_len: self.sums_len }
    }
}

/// A packed BF16 input, and the scratch of each thread.
pub struct PackedBf16<'a> {
    isa: Bf16Isa,
    tiles: RowTiles,
    rows: usize,
    input: &'a [u8],
    sums: SharedSlice<'a, f32>,
    sums_len: usize,
}

impl PackedInput for PackedBf16<'_> {
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let bytes = if self.tiles.count() == 1 { STREAM_BYTES } else { ITEM_BYTES };
        let wanted = bytes / panel_bytes(w.k).clamp(1, bytes);
        wanted.min(max.div_ceil(PANEL_OUTPUTS)).next_multiple_of(AVX512_PANELS) * PANEL_OUTPUTS
    }

    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>) {
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let sums = unsafe { self.sums.slice_mut(worker * self.sums_len..(worker + 1) * self.sums_len) };
        let weight = Bf16Gemm { input: self, gemm };
        let panels = outputs.start / PANEL_OUTPUTS..outputs.end.div_ceil(PANEL_OUTPUTS);
        match self.isa {
            #[cfg(target_arch = "x86_64")]
            Bf16Isa::Amx(amx) => weight.multiply_tiles(amx, panels, sums),
            #[cfg(target_arch = "x86_64")]
            Bf16Isa::Avx512(simd) => weight.multiply_rows(simd, panels, sums),
        }
    }
}

/// A weight, and the packed input it is multiplied with.
struct Bf16Gemm<'a> {
    input: &'a PackedBf16<'a>,
    gemm: &'a GemmTask<'a>,
}

impl Bf16Gemm<'_> {
    fn w(&self) -> &Weight<HostBuf> {
        self.gemm.w
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_tiles(&self, amx: Amx, panels: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w().k.div_ceil(BLOCK);
        for tile in (0..self.input.tiles.count()).step_by(2) {
            let rows = self.input.tiles.rows_of(tile);
            let more = if tile + 1 < self.input.tiles.count() {
                self.input.tiles.rows_of(tile + 1)
            } else {
                rows.end..rows.end
            };
            let inputs = [self.input_address(&rows), self.input_address(&more)];
            // SAFETY: the previous tiles have been dropped, and nothing else here sets up any.
            let mut registers = unsafe { amx::Bf16Tiles::new(amx, [rows.len(), more.len()]) };
            let rows = rows.start..more.end;
            for panel in panels.clone().step_by(AMX_PANELS) {
                let at = [panel, panel + 1].map(|panel| self.panel_address(panel));
                // SAFETY: inputs and panels are complete.
                unsafe { multiply_tiles(&mut registers, at, inputs, blocks, sums) };
                for o in 0..AMX_PANELS.min(panels.end - panel) {
                    self.write_panel(rows.clone(), (panel + o) * PANEL_OUTPUTS, (o, AMX_PANELS), sums);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_rows(&self, simd: Avx512Bf16, panels: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w().k.div_ceil(BLOCK);
        let slice = if self.input.tiles.count() == 1 { blocks } else { SLICE_BLOCKS };
        let sums = &mut sums[..self.input.tiles.padded_rows() * AVX512_PANELS * PANEL_OUTPUTS];
        for panel in panels.clone().step_by(AVX512_PANELS) {
            sums.fill(0.0);
            let at = std::array::from_fn::<_, AVX512_PANELS, _>(|o| self.panel_address(panel + o));
            for first in (0..blocks).step_by(slice.max(1)) {
                for tile in 0..self.input.tiles.count() {
                    let rows = self.input.tiles.padded_rows_of(tile);
                    let sums = &mut sums[rows.start * AVX512_PANELS * PANEL_OUTPUTS
                        ..rows.end * AVX512_PANELS * PANEL_OUTPUTS];
                    let operands =
                        TileOperands { panels: at, input: self.input_address(&rows).0, rows: rows.len() };
                    // SAFETY: input and panels are complete.
                    unsafe { simd.multiply(&operands, first..blocks.min(first + slice), sums) };
                }
            }
            for o in 0..AVX512_PANELS.min(panels.end - panel) {
                self.write_panel(0..self.input.rows, (panel + o) * PANEL_OUTPUTS, (o, AVX512_PANELS), sums);
            }
        }
    }

    /// Returns the address of a panel; panels beyond the last repeat it.
    fn panel_address(&self, panel: usize) -> *const u8 {
        let bytes = panel_bytes(self.w().k);
        let last = self.w().n.div_ceil(PANEL_OUTPUTS) - 1;
        self.w().buf.bytes()[panel.min(last) * bytes..][..bytes].as_ptr()
    }

    /// Returns the address of a tile's rows, and their number.
    fn input_address(&self, rows: &Range<usize>) -> (*const u8, usize) {
        let row = input::row_bytes(self.w().k);
        debug_assert_eq!(row % BLOCK_BYTES, 0);
        (self.input.input[rows.start * row..rows.end * row].as_ptr(), rows.len())
    }

    /// Writes the sums (rows, panels, 16) of panel `o` of `panels`, which begins with output `first`, for the
    /// given rows.
    fn write_panel(&self, rows: Range<usize>, first: usize, (o, panels): (usize, usize), sums: &[f32]) {
        let count = PANEL_OUTPUTS.min(self.w().n - first);
        for (row, sums) in rows.zip(sums.chunks_exact(panels * PANEL_OUTPUTS)) {
            // SAFETY: a panel belongs to one item, so no other thread writes these elements.
            unsafe { self.gemm.write(row, first, &sums[o * PANEL_OUTPUTS..][..count]) };
        }
    }
}
