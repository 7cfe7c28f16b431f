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
use super::product::{Avx512Bf16, multiply_tiles};
use super::product::{Dots, Operands};
use super::store::strip_bytes;
use super::{BLOCK, BLOCK_BYTES, STRIP, input};
use crate::backend::{DeviceError, Weight};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{self, Amx};
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::products::{Packed, Product};
use crate::cpu::simd::Level;
use crate::cpu::source::{Rooms, Source, Tiles};
use crate::host::HostBuf;
use std::ops::Range;

/// Panels that AVX-512 multiplies at once.
const STRIPS: usize = 4;
/// Panels that AMX multiplies at once.
const AMX_STRIPS: usize = 2;
/// Blocks of a slice of columns.
const CUT: usize = 8;
/// Bytes of weights that a work item takes when the weights stream.
const STREAM_BYTES: usize = 128 * 1024;
/// Bytes of weights that a work item takes otherwise.
const PANEL_BYTES: usize = 512 * 1024;

/// Buffers of the BF16 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct HalvesScratch {
    /// The packed input.
    input: HostBuf,
    /// For each thread: sums of all rows with the panels that are multiplied at once.
    sums: HostBuf,
    sums_len: usize,
}

impl HalvesScratch {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads.
    pub fn new(rows: usize, k: usize, threads: usize) -> Result<HalvesScratch, DeviceError> {
        let sums_len = rows * STRIPS * STRIP;
        Ok(HalvesScratch {
            input: HostBuf::zeroed(rows * input::row_bytes(k))?,
            sums: HostBuf::zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
        })
    }

    /// Converts and packs the input.
    pub fn pack(
        &mut self,
        pool: &mut Pool,
        (level, isa): (Level, Dots),
        x: &Source,
        buffers: &Rooms,
    ) -> Halves<'_> {
        let tiles = Tiles::new(x.rows, isa.tile_rows());
        let input = &mut self.input.bytes_mut()[..x.rows * input::row_bytes(x.inp)];
        input::pack(pool, level, x, &tiles, buffers, input);
        let (sums, sums_len) = (Parts::new(self.sums.f32_mut()), self.sums_len);
        Halves { dots: isa, tiles, rows: x.rows, input, sums, sums_len }
    }
}

/// A packed BF16 input, and the scratch of each thread.
pub struct Halves<'a> {
    dots: Dots,
    tiles: Tiles,
    rows: usize,
    input: &'a [u8],
    sums: Parts<'a, f32>,
    sums_len: usize,
}

impl Packed for Halves<'_> {
    fn outs_each(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let bytes = if self.tiles.count() == 1 { STREAM_BYTES } else { PANEL_BYTES };
        let wanted = bytes / strip_bytes(w.inp).clamp(1, bytes);
        wanted.min(max.div_ceil(STRIP)).next_multiple_of(STRIPS) * STRIP
    }

    fn multiply(&self, worker: usize, gemm: &Product, outputs: Range<usize>) {
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let sums = unsafe { self.sums.part(worker * self.sums_len..(worker + 1) * self.sums_len) };
        let weight = Strips { packed: self, product: gemm };
        let panels = outputs.start / STRIP..outputs.end.div_ceil(STRIP);
        match self.dots {
            #[cfg(target_arch = "x86_64")]
            Dots::Amx(amx) => weight.multiply_tiles(amx, panels, sums),
            #[cfg(target_arch = "x86_64")]
            Dots::Avx512(simd) => weight.multiply_rows(simd, panels, sums),
        }
    }
}

/// A weight, and the packed input it is multiplied with.
struct Strips<'a> {
    packed: &'a Halves<'a>,
    product: &'a Product<'a>,
}

impl Strips<'_> {
    fn w(&self) -> &Weight<HostBuf> {
        self.product.w
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_tiles(&self, amx: Amx, panels: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w().inp.div_ceil(BLOCK);
        for tile in (0..self.packed.tiles.count()).step_by(2) {
            let rows = self.packed.tiles.rows_of(tile);
            let more = if tile + 1 < self.packed.tiles.count() {
                self.packed.tiles.rows_of(tile + 1)
            } else {
                rows.end..rows.end
            };
            let inputs = [self.input_of(&rows), self.input_of(&more)];
            // SAFETY: the previous tiles have been dropped, and nothing else here sets up any.
            let mut registers = unsafe { amx::Tiles::new(amx, [rows.len(), more.len()]) };
            let rows = rows.start..more.end;
            for panel in panels.clone().step_by(AMX_STRIPS) {
                let at = [panel, panel + 1].map(|panel| self.strip(panel));
                // SAFETY: inputs and panels are complete.
                unsafe { multiply_tiles(&mut registers, at, inputs, blocks, sums) };
                for o in 0..AMX_STRIPS.min(panels.end - panel) {
                    self.put(rows.clone(), (panel + o) * STRIP, (o, AMX_STRIPS), sums);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_rows(&self, simd: Avx512Bf16, panels: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w().inp.div_ceil(BLOCK);
        let slice = if self.packed.tiles.count() == 1 { blocks } else { CUT };
        let sums = &mut sums[..self.packed.rows * STRIPS * STRIP];
        for panel in panels.clone().step_by(STRIPS) {
            sums.fill(0.0);
            let at = std::array::from_fn::<_, STRIPS, _>(|o| self.strip(panel + o));
            for first in (0..blocks).step_by(slice.max(1)) {
                for tile in 0..self.packed.tiles.count() {
                    let rows = self.packed.tiles.rows_of(tile);
                    let sums = &mut sums[rows.start * STRIPS * STRIP..rows.end * STRIPS * STRIP];
                    let operands = Operands { strips: at, input: self.input_of(&rows).0, rows: rows.len() };
                    // SAFETY: input and panels are complete.
                    unsafe { simd.multiply(&operands, first..blocks.min(first + slice), sums) };
                }
            }
            for o in 0..STRIPS.min(panels.end - panel) {
                self.put(0..self.packed.rows, (panel + o) * STRIP, (o, STRIPS), sums);
            }
        }
    }

    /// Returns the address of a panel; panels beyond the last repeat it.
    fn strip(&self, panel: usize) -> *const u8 {
        let bytes = strip_bytes(self.w().inp);
        let last = self.w().out.div_ceil(STRIP) - 1;
        self.w().buf.bytes()[panel.min(last) * bytes..][..bytes].as_ptr()
    }

    /// Returns the address of a tile's rows, and their number.
    fn input_of(&self, rows: &Range<usize>) -> (*const u8, usize) {
        let row = input::row_bytes(self.w().inp);
        debug_assert_eq!(row % BLOCK_BYTES, 0);
        (self.packed.input[rows.start * row..rows.end * row].as_ptr(), rows.len())
    }

    /// Writes the sums (rows, panels, 16) of panel `o` of `panels`, which begins with output `first`, for the
    /// given rows.
    fn put(&self, rows: Range<usize>, first: usize, (o, panels): (usize, usize), sums: &[f32]) {
        let count = STRIP.min(self.w().out - first);
        for (row, sums) in rows.zip(sums.chunks_exact(panels * STRIP)) {
            // SAFETY: a panel belongs to one item, so no other thread writes these elements.
            unsafe { self.product.put(row, first, &sums[o * STRIP..][..count]) };
        }
    }
}
