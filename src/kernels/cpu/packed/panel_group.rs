//! A panel group: some panels with all rows, one slice of columns at a time.
//!
//! With few rows, the panels are used as they are stored. With many, they are unpacked, as many columns at
//! once as leave space in a first-level cache for the rows. The tiles of rows are processed one after
//! another; each is multiplied with all panels of the group. Sums of a later slice continue from those of the
//! earlier ones.
//! Invariant: the order of the loops decides only when a block is added, never in which order.

use super::PANEL_OUTPUTS;
#[cfg(target_arch = "x86_64")]
use super::amx_kernel::{self, IntSumBuffer, TileColumns};
use super::formats::{PackedFormat, UnpackedFormat};
use super::input::{PackedInt8, WeightPath};
use super::kernel::{Panels, TileKernel, UnpackKernel};
use super::prefetch::Prefetcher;
use super::scales::ScaleLayout;
#[cfg(target_arch = "x86_64")]
use super::scales::ZeroPoint;
use super::store::PackedLayout;
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{Amx, Int8Tiles};
use crate::cpu::gemm_task::GemmTask;
use crate::cpu::simd::{self, Ints, LANES};
use crate::quant::INT8_BLOCK_LEN;
use std::marker::PhantomData;
use std::ops::Range;

/// Panels of a group: their unpacked quants take a part of a second-level cache.
pub const GROUP_PANELS: usize = 8;
/// Columns of a slice: a multiple of every block.
const SLICE_COLUMNS: usize = 512;
/// Bytes of the unpacked quants of a panel's slice.
pub const SLICE_QUANT_BYTES: usize = PANEL_OUTPUTS * SLICE_COLUMNS;
/// F32 numbers of the unpacked scales of a panel's slice: at most two vectors for each 32 columns.
pub const SLICE_SCALES: usize = SLICE_COLUMNS / INT8_BLOCK_LEN * 2 * LANES;

/// The scratch of one thread.
pub struct GroupScratch<'a> {
    /// (padded rows, GROUP_PANELS, 16).
    pub sums: &'a mut [f32],
    /// Unpacked quants: [`SLICE_QUANT_BYTES`] for each panel.
    pub quants: &'a mut [u8],
    /// Unpacked scales: [`SLICE_SCALES`] for each panel.
    pub scales: &'a mut [f32],
}

/// Some panels of a weight, and the input they are multiplied with.
pub struct PanelGroup<'a, F> {
    input: &'a PackedInt8<'a>,
    gemm: &'a GemmTask<'a>,
    layout: PackedLayout,
    panels: Range<usize>,
    format: PhantomData<F>,
}

impl<'a, F: PackedFormat> PanelGroup<'a, F> {
    /// Creates a group of up to [`GROUP_PANELS`] panels.
    pub fn new(input: &'a PackedInt8<'a>, gemm: &'a GemmTask<'a>, panels: Range<usize>) -> PanelGroup<'a, F> {
        let layout = PackedLayout::new::<F>(gemm.w.n, gemm.w.k);
        PanelGroup { input, gemm, layout, panels, format: PhantomData }
    }

    /// Multiplies all rows with all panels and writes the results.
    pub fn multiply<S: Ints>(&self, simd: S, scratch: &mut GroupScratch) {
        let count = self.layout.row_blocks;
        scratch.sums[..self.input.tiles.padded_rows() * self.stride()].fill(0.0);
        let slice = if self.input.is_streaming() { count.max(1) } else { SLICE_COLUMNS / F::BLOCK_LEN };
        for first in (0..count).step_by(slice) {
            let blocks = first..count.min(first + slice);
            // Two scales to a block take the registers of a second panel.
            match (self.input.path, const { S::INT8_TILE_PANELS / F::Scales::SCALE_COUNT }) {
                (WeightPath::Stored, 2) => self.add_stored::<S, 2>(simd, blocks, scratch.sums),
                (WeightPath::Stored, _) => self.add_stored::<S, 1>(simd, blocks, scratch.sums),
                (WeightPath::Unpacked, 2) => self.add_unpacked::<S, 2>(simd, blocks, scratch),
                (WeightPath::Unpacked, _) => self.add_unpacked::<S, 1>(simd, blocks, scratch),
                #[cfg(target_arch = "x86_64")]
                (WeightPath::Amx(amx), _) => self.add_amx(simd, amx, blocks, scratch),
                #[cfg(not(target_arch = "x86_64"))]
                (WeightPath::Amx(amx), _) => match amx {},
            }
        }
        self.write(scratch.sums);
    }

    /// Returns the distance between the sums of two rows. A tile of two panels may have one that is repeated.
    fn stride(&self) -> usize {
        self.panels.len().next_multiple_of(2) * LANES
    }

    /// Iterates over the group's panels, O at a time: the offset of their sums, and their numbers.
    fn panel_tuples<const O: usize>(&self) -> impl Iterator<Item = (usize, [usize; O])> {
        let last = self.panels.end - 1;
        self.panels.clone().step_by(O).map(move |panel| {
            ((panel - self.panels.start) * LANES, std::array::from_fn(|o| last.min(panel + o)))
        })
    }

    /// Returns the addresses of a panel's quants and scales.
    fn panel_address(&self, panel: usize) -> (*const u8, *const u8) {
        let (bytes, layout) = (self.gemm.w.buf.bytes(), &self.layout);
        let quants = &bytes[panel * layout.panel_quant_bytes..][..layout.panel_quant_bytes];
        let scales =
            &bytes[layout.scales_start + panel * layout.panel_scale_bytes..][..layout.panel_scale_bytes];
        (quants.as_ptr(), scales.as_ptr())
    }

    /// Returns what to prefetch, in `times` steps, while a tile of rows is multiplied with some unpacked
    /// blocks of a panel: a part of the blocks that are unpacked next, of the same panel or of one that this
    /// thread is likely to take.
    fn prefetcher(&self, panel: usize, tile: usize, blocks: &Range<usize>, times: usize) -> Prefetcher {
        let layout = &self.layout;
        let (panel, first) = match blocks.end < layout.row_blocks {
            true => (panel, blocks.end),
            false => (panel + self.input.threads * self.panels.len(), 0),
        };
        if panel * PANEL_OUTPUTS >= self.gemm.w.n {
            return Prefetcher::NONE;
        }
        let count = (SLICE_COLUMNS / F::BLOCK_LEN).min(layout.row_blocks - first);
        let at = |offset| self.gemm.w.buf.bytes().as_ptr().wrapping_add(offset);
        let quants = at(panel * layout.panel_quant_bytes + first * F::QUANT_BYTES);
        let scales = at(layout.scales_start + panel * layout.panel_scale_bytes + first * F::SCALE_BYTES);
        let bytes = ((quants, count * F::QUANT_BYTES), (scales, count * F::SCALE_BYTES));
        Prefetcher::new(bytes, (tile, self.input.tiles.count()), times)
    }

    /// Adds the products of some blocks of the stored panels.
    fn add_stored<S: Ints, const O: usize>(&self, simd: S, blocks: Range<usize>, sums: &mut [f32]) {
        let stride = self.stride();
        for (first, numbers) in self.panel_tuples::<O>() {
            let (quants, scales) =
                (numbers.map(|o| self.panel_address(o).0), numbers.map(|o| self.panel_address(o).1));
            let (row, ahead) = (self.layout.row_blocks, [Prefetcher::NONE; O]);
            let panels = Panels { quants, scales, row_blocks: row, prefetchers: ahead };
            for tile in 0..self.input.tiles.count() {
                let (rows, input) = self.input.tile(tile, 0);
                let sums = (&mut sums[rows.start * stride + first..rows.end * stride], stride);
                // SAFETY: panels and input are complete.
                unsafe { multiply_tile::<S, F, O>(simd, rows.len(), panels, input, blocks.clone(), sums) };
            }
        }
    }

    /// Unpacks some blocks of the panels, each quant minus `offset`.
    fn unpack<S: Ints>(&self, simd: S, blocks: Range<usize>, offset: u8, scratch: &mut GroupScratch) {
        let to = scratch
            .quants
            .chunks_exact_mut(SLICE_QUANT_BYTES)
            .zip(scratch.scales.chunks_exact_mut(SLICE_SCALES));
        for (panel, to) in self.panels.clone().zip(to) {
            // SAFETY: the panel is complete.
            simd.call_ints(unsafe {
                UnpackKernel::<F>::new(self.panel_address(panel), blocks.clone(), offset, to)
            });
        }
    }

    /// Unpacks some blocks of the panels and adds their products.
    fn add_unpacked<S: Ints, const O: usize>(
        &self,
        simd: S,
        blocks: Range<usize>,
        scratch: &mut GroupScratch,
    ) {
        self.unpack(simd, blocks.clone(), 0, scratch);
        let stride = self.stride();
        let unpacked = 0..blocks.len() * (F::BLOCK_LEN / INT8_BLOCK_LEN);
        for tile in 0..self.input.tiles.count() {
            let (rows, input) = self.input.tile(tile, blocks.start * F::BLOCK_LEN / INT8_BLOCK_LEN);
            for (first, numbers) in self.panel_tuples::<O>() {
                let panels = numbers.map(|panel| panel - self.panels.start);
                let quants = panels.map(|panel| scratch.quants[panel * SLICE_QUANT_BYTES..].as_ptr());
                let scales = panels.map(|panel| scratch.scales[panel * SLICE_SCALES..].as_ptr().cast());
                let sums = (&mut scratch.sums[rows.start * stride + first..rows.end * stride], stride);
                let ahead = numbers.map(|panel| self.prefetcher(panel, tile, &blocks, unpacked.len()));
                let panels = Panels { quants, scales, row_blocks: 0, prefetchers: ahead };
                // SAFETY: the unpacked data has as many blocks, and so has the input from there on.
                unsafe {
                    multiply_tile::<S, UnpackedFormat<F>, O>(
                        simd,
                        rows.len(),
                        panels,
                        input,
                        unpacked.clone(),
                        sums,
                    )
                };
            }
        }
    }

    /// Unpacks some blocks of the panels and adds their products with AMX.
    #[cfg(target_arch = "x86_64")]
    fn add_amx<S: Ints>(&self, simd: S, amx: Amx, blocks: Range<usize>, scratch: &mut GroupScratch) {
        let offset = if let ZeroPoint::PowerOfTwo(n) = F::Scales::ZERO_POINT { 1 << n } else { 0 };
        self.unpack(simd, blocks.clone(), offset, scratch);
        let (stride, mut int_sums) = (self.stride(), IntSumBuffer::ZERO);
        let mut registers: Option<Int8Tiles> = None;
        let (mut set_up_for, width) = (0, INT8_BLOCK_LEN / F::Scales::SCALE_COUNT);
        for tile in 0..self.input.tiles.count() {
            let (rows, input) = self.input.tile(tile, blocks.start * F::BLOCK_LEN / INT8_BLOCK_LEN);
            if set_up_for != rows.len() {
                // The old configuration must be released before a new one is set up.
                drop(registers.take());
                set_up_for = rows.len();
            }
            // SAFETY: no tiles are set up, and nothing else here sets up any.
            let new = || unsafe { Int8Tiles::new(amx, rows.len(), width) };
            let registers = registers.get_or_insert_with(new);
            for panel in 0..self.panels.len() {
                let chunks = blocks.len() * F::BLOCK_LEN / INT8_BLOCK_LEN;
                let times = amx_kernel::step_count(chunks * F::Scales::SCALE_COUNT);
                let columns = TileColumns {
                    input,
                    rows: rows.len(),
                    quants: scratch.quants[panel * SLICE_QUANT_BYTES..].as_ptr(),
                    scales: scratch.scales[panel * SLICE_SCALES..].as_ptr(),
                    blocks: chunks,
                    prefetcher: self.prefetcher(self.panels.start + panel, tile, &blocks, times),
                };
                let sums = &mut scratch.sums[rows.start * stride + panel * LANES..rows.end * stride];
                let (int_sums, sums) = (&mut int_sums, (sums, stride));
                // SAFETY: `amx` proves AVX-512; the input and the unpacked data are complete, and a tile has
                // at least six rows.
                unsafe {
                    match (F::Scales::SCALE_COUNT, F::Scales::ZERO_POINT) {
                        (2, _) => amx_kernel::multiply::<2, false>(registers, &columns, int_sums, sums),
                        (_, ZeroPoint::Minimum) => {
                            amx_kernel::multiply::<1, true>(registers, &columns, int_sums, sums)
                        }
                        _ => amx_kernel::multiply::<1, false>(registers, &columns, int_sums, sums),
                    }
                }
            }
        }
    }

    /// Writes the sums to the output.
    fn write(&self, sums: &[f32]) {
        let first = self.panels.start * PANEL_OUTPUTS;
        let count = (self.panels.len() * PANEL_OUTPUTS).min(self.gemm.w.n - first);
        for (row, sums) in sums.chunks_exact(self.stride()).take(self.input.rows).enumerate() {
            // SAFETY: a panel belongs to one item, so no other thread writes these elements.
            unsafe { self.gemm.write(row, first, &sums[..count]) };
        }
    }
}

/// Adds the products of a tile's rows with `blocks` of O panels to `sums`, O times 16 for each row.
///
/// # Safety
/// * The conditions of [`TileKernel::new`].
unsafe fn multiply_tile<S: Ints, F: PackedFormat, const O: usize>(
    simd: S,
    rows: usize,
    panels: Panels<O>,
    input: *const u8,
    blocks: Range<usize>,
    sums: (&mut [f32], usize),
) {
    // SAFETY: the caller's promise. The guards keep tile sizes that an instruction set does not use from
    // being compiled for it.
    unsafe {
        match rows {
            0 => {}
            1 => simd.call_ints(TileKernel::<F, 1, O>::new(panels, input, blocks, sums)),
            2 => simd.call_ints(TileKernel::<F, 2, O>::new(panels, input, blocks, sums)),
            4 if const { simd::contains(S::INT8_TILE_ROWS, 4) } => {
                simd.call_ints(TileKernel::<F, 4, O>::new(panels, input, blocks, sums))
            }
            6 if const { simd::contains(S::INT8_TILE_ROWS, 6) } => {
                simd.call_ints(TileKernel::<F, 6, O>::new(panels, input, blocks, sums))
            }
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        }
    }
}
