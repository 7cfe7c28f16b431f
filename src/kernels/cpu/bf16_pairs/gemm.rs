//! GEMM of pairs of BF16: x · wᵀ, for x (m, k) and packed F16 w (n, k).
//!
//! x is split into pairs once. With one or two tiles of rows, weights stream: a thread splits some blocks of
//! columns ahead, while AMX multiplies, and all sums are in registers, of four panels or of two. With more
//! rows, it takes a group of panels, and a slice of columns at a time. It splits the slice of two panels,
//! which then fits the first-level cache, and multiplies all rows with it, whose slice fits the second-level
//! cache. Sums wait in memory until the next slice.
//!
//! Invariant: how work is divided into items and slices decides only when a block is added, not the order.

use super::input::{self, HALF_BYTES};
#[cfg(target_arch = "x86_64")]
use super::{one_row, split};
use crate::backend::{DeviceError, Weight};
use crate::cpu::amx::Amx;
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{self, Bf16Tiles, SUM_REGISTERS};
use crate::cpu::bf16::{BLOCK, PANEL_BLOCK_BYTES, PANEL_OUTPUTS, panel_bytes};
use crate::cpu::gemm_input::{GemmInput, RowBuffers, RowTiles, Share, buffer_rows};
use crate::cpu::gemm_task::{GemmTask, PackedInput, SharedScratch};
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::scratch_memory::ScratchMemory;
use crate::cpu::simd::Level;
use crate::host::HostBuf;
use std::ops::Range;

/// Panels that are multiplied at once.
const PANELS: usize = 2;
/// Panels of a group.
const GROUP_PANELS: usize = 8;
/// Blocks of a slice of columns.
const SLICE_BLOCKS: usize = 8;
/// Bytes of the split slice of a panel: first halves and rests.
const SPLIT_BYTES: usize = SLICE_BLOCKS * 2 * PANEL_BLOCK_BYTES;
const _: () = assert!(PANELS * SPLIT_BYTES >= AHEAD_BUFFERS * STREAMED_PANELS * 2 * PANEL_BLOCK_BYTES);
/// Bytes of weights that a work item takes when the weights stream.
const STREAM_BYTES: usize = 128 * 1024;
/// Panels that are multiplied at once with a single tile of rows.
const STREAMED_PANELS: usize = 4;
/// Blocks that are split ahead when the weights stream, and blocks of which there are buffers.
const AHEAD: usize = 2;
const AHEAD_BUFFERS: usize = 4;

/// Buffers of the GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct PairScratch<Buf = HostBuf> {
    /// The packed input.
    input: Buf,
    /// For each thread: sums of all rows with a group, and the split slices of the panels that are multiplied
    /// at once.
    sums: Buf,
    sums_len: usize,
    slices: Buf,
}

impl<Buf> PairScratch<Buf> {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads.
    pub fn new<M: ScratchMemory<Buf = Buf>>(
        rows: usize,
        k: usize,
        threads: usize,
        memory: &M,
    ) -> Result<PairScratch<Buf>, DeviceError> {
        let is_used = usize::from(k > 0);
        let sums_len = is_used * rows * GROUP_PANELS * PANEL_OUTPUTS;
        Ok(PairScratch {
            input: memory.zeroed(buffer_rows(rows, threads) * input::row_bytes(k))?,
            sums: memory.zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
            slices: memory.zeroed(is_used * threads * PANELS * SPLIT_BYTES)?,
        })
    }
}

impl PairScratch {
    /// Lets threads share the scratch.
    pub fn share(&mut self, level: Level, amx: Amx) -> SharedPairs<'_> {
        SharedPairs {
            level,
            amx,
            input_len: self.input.len(),
            input: SharedSlice::new(self.input.bytes_mut()),
            sums: SharedSlice::new(self.sums.f32_mut()),
            sums_len: self.sums_len,
            slices: SharedSlice::new(self.slices.bytes_mut()),
        }
    }
}

/// Scratch that threads share.
pub struct SharedPairs<'a> {
    level: Level,
    amx: Amx,
    input: SharedSlice<'a, u8>,
    input_len: usize,
    sums: SharedSlice<'a, f32>,
    sums_len: usize,
    slices: SharedSlice<'a, u8>,
}

impl SharedScratch for SharedPairs<'_> {
    type Packed<'a>
        = PackedPairs<'a>
    where
        Self: 'a;

    fn rows_of(&self, share: Share, k: usize) -> usize {
        share.rows(self.input_len, 2 * HALF_BYTES, input::row_bytes(k))
    }

    #[cfg(target_arch = "x86_64")]
    unsafe fn pack(
        &self,
        share: Share,
        workers: Workers,
        x: &GemmInput,
        buffers: &RowBuffers,
    ) -> PackedPairs<'_> {
        let SharedPairs { level, amx, sums, sums_len, slices, .. } = *self;
        let (tiles, len) = (RowTiles::equal(x.rows, amx::ROWS), x.rows * input::row_bytes(x.k));
        // SAFETY: the caller's promise.
        let input = unsafe { self.input.slice_mut(share.place(self.input_len, 2 * HALF_BYTES, len)) };
        // SAFETY: an `Amx` proves AVX-512 with BF16.
        unsafe { input::pack(workers, level, x, &tiles, buffers, input) };
        PackedPairs { amx, tiles, rows: x.rows, input, sums, sums_len, slices }
    }

    /// Never called: no [`Amx`] exists.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe fn pack(&self, _: Share, _: Workers, _: &GemmInput, _: &RowBuffers) -> PackedPairs<'_> {
        match self.amx {}
    }
}

/// A packed input, and the scratch of each thread.
pub struct PackedPairs<'a> {
    amx: Amx,
    tiles: RowTiles,
    rows: usize,
    input: &'a [u8],
    sums: SharedSlice<'a, f32>,
    sums_len: usize,
    slices: SharedSlice<'a, u8>,
}

impl PackedPairs<'_> {
    /// Returns whether the weights stream.
    fn streams(&self) -> bool {
        self.tiles.count() <= 2
    }
}

impl PackedInput for PackedPairs<'_> {
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let streamed = STREAM_BYTES / panel_bytes(w.k).clamp(1, STREAM_BYTES);
        let wanted = if self.streams() { streamed } else { GROUP_PANELS };
        wanted.min(max.div_ceil(PANEL_OUTPUTS)).next_multiple_of(STREAMED_PANELS) * PANEL_OUTPUTS
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>) {
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let sums = unsafe { self.sums.slice_mut(worker * self.sums_len..(worker + 1) * self.sums_len) };
        let bytes = PANELS * SPLIT_BYTES;
        // SAFETY: the same.
        let slices = unsafe { self.slices.slice_mut(worker * bytes..(worker + 1) * bytes) };
        let panels = outputs.start / PANEL_OUTPUTS..outputs.end.div_ceil(PANEL_OUTPUTS);
        if self.rows == 1 {
            return self.multiply_one(gemm, panels);
        }
        if self.streams() {
            return self.multiply_streamed(gemm, panels, sums, slices);
        }
        for first in panels.clone().step_by(GROUP_PANELS) {
            let group = first..panels.end.min(first + GROUP_PANELS);
            self.multiply_group(gemm, group, sums, slices);
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn multiply(&self, _: usize, _: &GemmTask, _: Range<usize>) {
        match self.amx {}
    }
}

#[cfg(target_arch = "x86_64")]
impl PackedPairs<'_> {
    /// Multiplies the only row with panels.
    fn multiply_one(&self, gemm: &GemmTask, panels: Range<usize>) {
        assert_eq!(self.input.len(), input::row_bytes(gemm.w.k), "the row is complete; this is a bug");
        for first in panels.clone().step_by(PANELS) {
            let at = [first, first + 1].map(|panel| panel_of(gemm.w, panel).as_ptr());
            let blocks = gemm.w.k.div_ceil(BLOCK);
            // SAFETY: this runs on a CPU with AMX, so with AVX-512; panels and row are complete.
            let sums = unsafe { one_row::multiply(at, self.input.as_ptr(), blocks) };
            for (panel, sums) in (first..panels.end).zip(sums) {
                let first = panel * PANEL_OUTPUTS;
                let sums = &sums[..PANEL_OUTPUTS.min(gemm.w.n - first)];
                // SAFETY: a panel belongs to one item, so no other thread writes these elements.
                unsafe { gemm.write(0, first, sums) };
            }
        }
    }

    /// Multiplies one or two tiles of rows with panels.
    fn multiply_streamed(&self, gemm: &GemmTask, panels: Range<usize>, sums: &mut [f32], slices: &mut [u8]) {
        let is_one = self.tiles.count() == 1;
        let (blocks, count) = (gemm.w.k.div_ceil(BLOCK), if is_one { STREAMED_PANELS } else { PANELS });
        // A single tile is in the registers of both, each with other panels.
        let tiles = [self.tiles.rows_of(0), self.tiles.rows_of(usize::from(!is_one))];
        let inputs = [0, 1].map(|tile| self.input_of(&tiles[tile], gemm.w.k, &(0..blocks)));
        let rows = tiles.clone().map(|rows| rows.len());
        // SAFETY: nothing else here sets up tiles.
        let mut registers = unsafe { Bf16Tiles::new(self.amx, rows) };
        let width = count * PANEL_OUTPUTS;
        let seconds = if is_one { PANELS * PANEL_OUTPUTS } else { rows[0] * width };
        for first in panels.clone().step_by(count) {
            let split = |block: usize, slices: &mut [u8]| {
                let buffer = block % AHEAD_BUFFERS * STREAMED_PANELS * 2 * PANEL_BLOCK_BYTES;
                for (o, to) in
                    slices[buffer..].chunks_exact_mut(2 * PANEL_BLOCK_BYTES).take(count).enumerate()
                {
                    split_blocks(gemm.w, first + o, block..block + 1, to);
                }
            };
            (0..AHEAD.min(blocks)).for_each(|block| split(block, slices));
            zero_sums(&mut registers, true);
            for block in 0..blocks {
                let buffer = block % AHEAD_BUFFERS * STREAMED_PANELS * 2 * PANEL_BLOCK_BYTES;
                let w = &slices[buffer..][..STREAMED_PANELS * 2 * PANEL_BLOCK_BYTES];
                let x = [0, 1].map(|tile| &inputs[tile][block * rows[tile] * 2 * HALF_BYTES..]);
                multiply_block(&mut registers, is_one, w, x, rows);
                if block + AHEAD < blocks {
                    split(block + AHEAD, slices);
                }
            }
            let sums = &mut sums[..self.rows * width];
            assert!(sums.len() >= seconds + (rows[1] - 1) * width + PANELS * PANEL_OUTPUTS);
            // SAFETY: the sums have the length that is written, as asserted.
            unsafe {
                store_sums(&registers, [sums.as_mut_ptr(), sums.as_mut_ptr().add(seconds)], width, true)
            };
            self.write(gemm, first..panels.end.min(first + count), width, sums);
        }
    }

    /// Writes the sums (rows, width) of panels.
    fn write(&self, gemm: &GemmTask, panels: Range<usize>, width: usize, sums: &[f32]) {
        for (o, panel) in panels.enumerate() {
            let first = panel * PANEL_OUTPUTS;
            let count = PANEL_OUTPUTS.min(gemm.w.n - first);
            for (row, sums) in sums.chunks_exact(width).enumerate() {
                // SAFETY: a panel belongs to one item, so no other thread writes these elements.
                unsafe { gemm.write(row, first, &sums[o * PANEL_OUTPUTS..][..count]) };
            }
        }
    }

    /// Multiplies all rows with a group of panels.
    fn multiply_group(&self, gemm: &GemmTask, group: Range<usize>, sums: &mut [f32], slices: &mut [u8]) {
        let blocks = gemm.w.k.div_ceil(BLOCK);
        // Outputs of a row's sums.
        let width = group.len().next_multiple_of(PANELS) * PANEL_OUTPUTS;
        let sums = &mut sums[..self.rows * width];
        let mut registers = None;
        for slice in (0..blocks).step_by(SLICE_BLOCKS) {
            let slice = slice..blocks.min(slice + SLICE_BLOCKS);
            for panel in group.clone().step_by(PANELS) {
                for (o, slices) in slices.chunks_exact_mut(SPLIT_BYTES).enumerate() {
                    split_blocks(gemm.w, panel + o, slice.clone(), slices);
                }
                for tile in (0..self.tiles.count()).step_by(2) {
                    let [rows, more] = [tile, tile + 1].map(|tile| match tile < self.tiles.count() {
                        true => self.tiles.rows_of(tile),
                        false => self.rows..self.rows,
                    });
                    let sizes = [rows.len(), more.len()];
                    if registers.as_ref().is_none_or(|(known, _)| *known != sizes) {
                        drop(registers.take());
                        // SAFETY: the tiles before were dropped, and nothing else here sets up any.
                        registers = Some((sizes, unsafe { Bf16Tiles::new(self.amx, sizes) }));
                    }
                    let inputs = [rows.clone(), more].map(|rows| self.input_of(&rows, gemm.w.k, &slice));
                    let to = &mut sums[rows.start * width + (panel - group.start) * PANEL_OUTPUTS..];
                    if let Some((sizes, registers)) = &mut registers {
                        let operands = Operands { inputs, rows: *sizes, slices, blocks: slice.len() };
                        multiply_slice(registers, &operands, slice.start == 0, (to, width));
                    }
                }
            }
        }
        drop(registers);
        self.write(gemm, group, width, sums);
    }

    /// Returns a slice of a tile's rows.
    fn input_of(&self, rows: &Range<usize>, k: usize, slice: &Range<usize>) -> &[u8] {
        let block = rows.len() * 2 * HALF_BYTES;
        let tile = &self.input[rows.start * input::row_bytes(k)..rows.end * input::row_bytes(k)];
        &tile[slice.start * block..slice.end * block]
    }
}

/// Returns a panel; panels beyond the last repeat it.
#[cfg(target_arch = "x86_64")]
fn panel_of(w: &Weight<HostBuf>, panel: usize) -> &[u8] {
    let panel = panel.min(w.n.div_ceil(PANEL_OUTPUTS) - 1);
    &w.buf.bytes()[panel * panel_bytes(w.k)..][..panel_bytes(w.k)]
}

/// Splits some blocks of a panel.
#[cfg(target_arch = "x86_64")]
fn split_blocks(w: &Weight<HostBuf>, panel: usize, blocks: Range<usize>, to: &mut [u8]) {
    let from = &panel_of(w, panel)[blocks.start * PANEL_BLOCK_BYTES..blocks.end * PANEL_BLOCK_BYTES];
    // SAFETY: this runs on a CPU with AMX, so with AVX-512.
    unsafe { split::split_panel(from, to) };
}

/// Slices of two tiles of rows, the second of which may be empty, and of two panels.
#[cfg(target_arch = "x86_64")]
struct Operands<'a> {
    inputs: [&'a [u8]; 2],
    /// Rows of the tiles.
    rows: [usize; 2],
    /// The split slices.
    slices: &'a [u8],
    blocks: usize,
}

/// Adds the products of a slice to the sums at `to`, whose rows are `width` numbers apart, or sets them, if
/// the slice is the first one.
#[cfg(target_arch = "x86_64")]
fn multiply_slice(
    registers: &mut Bf16Tiles,
    operands: &Operands,
    is_first: bool,
    (to, width): (&mut [f32], usize),
) {
    let Operands { inputs: [first, second], rows: [rows, more], slices, blocks } = *operands;
    let block = |rows: usize| rows * 2 * HALF_BYTES;
    assert!(
        first.len() == blocks * block(rows)
            && second.len() == blocks * block(more)
            && slices.len() == PANELS * SPLIT_BYTES
            && to.len() >= (rows + more - 1) * width + PANELS * PANEL_OUTPUTS,
        "the operands are complete; this is a bug"
    );
    let stride = width * size_of::<f32>();
    let (at, has_more) = (to.as_mut_ptr(), more > 0);
    let below = at.wrapping_add(rows * width);
    if is_first {
        zero_sums(registers, has_more);
    }
    // SAFETY: the lengths are as asserted, and a tile is set up if it has rows.
    unsafe {
        if !is_first {
            registers.load_sums::<A0>(at, stride);
            registers.load_sums::<A1>(at.add(PANEL_OUTPUTS), stride);
            if has_more {
                registers.load_sums::<B0>(below, stride);
                registers.load_sums::<B1>(below.add(PANEL_OUTPUTS), stride);
            }
        }
        for number in 0..blocks {
            let w = slices.as_ptr().add(number * 2 * PANEL_BLOCK_BYTES);
            let x = [
                first.as_ptr().add(number * block(rows)),
                second.as_ptr().wrapping_add(number * block(more)),
            ];
            let x_rest = [x[0].add(rows * HALF_BYTES), x[1].wrapping_add(more * HALF_BYTES)];
            // The rests of the weights with the first halves of the input, these with the first halves of the
            // weights, and these with the rests of the input.
            load_weights(registers, w.add(PANEL_BLOCK_BYTES));
            load_input(registers, x, has_more);
            multiply_loaded(registers, has_more);
            load_weights(registers, w);
            multiply_loaded(registers, has_more);
            load_input(registers, x_rest, has_more);
            multiply_loaded(registers, has_more);
        }
        store_sums(registers, [at, below], width, has_more);
    }
}

#[cfg(target_arch = "x86_64")]
const A0: u8 = SUM_REGISTERS[0][0];
#[cfg(target_arch = "x86_64")]
const A1: u8 = SUM_REGISTERS[0][1];
#[cfg(target_arch = "x86_64")]
const B0: u8 = SUM_REGISTERS[1][0];
#[cfg(target_arch = "x86_64")]
const B1: u8 = SUM_REGISTERS[1][1];

/// Sets the sums of the first tile to zero, and those of the second if it has rows.
#[cfg(target_arch = "x86_64")]
fn zero_sums(registers: &mut Bf16Tiles, has_more: bool) {
    // SAFETY: a tile is set up if it has rows.
    unsafe {
        registers.zero::<A0>();
        registers.zero::<A1>();
        if has_more {
            registers.zero::<B0>();
            registers.zero::<B1>();
        }
    }
}

/// Stores the sums of the first tile with two panels, and those of the second if it has rows. Rows are
/// `width` numbers apart.
///
/// # Safety
/// * They can be written at the addresses.
#[cfg(target_arch = "x86_64")]
unsafe fn store_sums(registers: &Bf16Tiles, to: [*mut f32; 2], width: usize, has_more: bool) {
    let stride = width * size_of::<f32>();
    // SAFETY: the caller's promise.
    unsafe {
        registers.store::<A0>(to[0], stride);
        registers.store::<A1>(to[0].add(PANEL_OUTPUTS), stride);
        if has_more {
            registers.store::<B0>(to[1], stride);
            registers.store::<B1>(to[1].add(PANEL_OUTPUTS), stride);
        }
    }
}

/// Adds the products of a block: of the same tile with two pairs of panels, or of two tiles with one pair.
/// `w` has the split blocks of the panels, and `x` begins with the blocks of the tiles, which have `rows`
/// rows.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn multiply_block(registers: &mut Bf16Tiles, is_one: bool, w: &[u8], x: [&[u8]; 2], rows: [usize; 2]) {
    let is_complete = |tile: usize| x[tile].len() >= rows[tile] * 2 * HALF_BYTES;
    assert!(
        w.len() == STREAMED_PANELS * 2 * PANEL_BLOCK_BYTES && is_complete(0) && is_complete(1),
        "the operands are complete; this is a bug"
    );
    // Halves of weights and of inputs, in the order of `multiply_slice`.
    for (w_half, x_half) in [(1, 0), (0, 0), (0, 1)] {
        let w = |panel: usize| w[(2 * panel + w_half) * PANEL_BLOCK_BYTES..].as_ptr();
        let x = |tile: usize| x[tile][x_half * rows[tile] * HALF_BYTES..].as_ptr();
        // SAFETY: the lengths are as asserted, and both tiles have rows.
        unsafe {
            registers.load_weights::<0>(w(0));
            registers.load_weights::<1>(w(1));
            registers.load_input::<0>(x(0));
            registers.multiply::<0, 0>();
            registers.multiply::<0, 1>();
            if is_one {
                registers.load_weights::<0>(w(2));
                registers.load_weights::<1>(w(3));
            }
            registers.load_input::<1>(x(1));
            registers.multiply::<1, 0>();
            registers.multiply::<1, 1>();
        }
    }
}

/// Loads a block of both panels.
///
/// # Safety
/// * The blocks of the split slices of the first panel at `at`, and of the second behind it, can be read.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn load_weights(registers: &mut Bf16Tiles, at: *const u8) {
    // SAFETY: the caller's promise.
    unsafe {
        registers.load_weights::<0>(at);
        registers.load_weights::<1>(at.add(SPLIT_BYTES));
    }
}

/// Loads a block of one or both tiles of rows.
///
/// # Safety
/// * As many rows as the tiles are set up for can be read at the addresses.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn load_input(registers: &mut Bf16Tiles, at: [*const u8; 2], has_more: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        registers.load_input::<0>(at[0]);
        if has_more {
            registers.load_input::<1>(at[1]);
        }
    }
}

/// Adds the products of what is loaded.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn multiply_loaded(registers: &mut Bf16Tiles, has_more: bool) {
    registers.multiply::<0, 0>();
    registers.multiply::<0, 1>();
    if has_more {
        registers.multiply::<1, 0>();
        registers.multiply::<1, 1>();
    }
}
