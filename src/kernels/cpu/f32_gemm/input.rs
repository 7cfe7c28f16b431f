//! The packed input of the F32 GEMM, and the scratch of its threads.
//!
//! Invariant: buffers are sized for every step within the limits.

use crate::backend::{DeviceError, Weight};
use crate::cpu::gemm_input::{GemmInput, RowBuffers, RowTiles, Share, buffer_rows};
use crate::cpu::gemm_task::SharedScratch;
use crate::cpu::pool::{SharedSlice, Workers};
use crate::cpu::scratch_memory::ScratchMemory;
use crate::cpu::simd::{Kernel, LANES, Level, Simd};
use crate::host::HostBuf;
use std::ops::Range;

/// F32 numbers of an F32 panel: half of a second-level cache of 2 MiB.
const F32_PANEL_LEN: usize = 256 * 1024;
/// Outputs of an F32 panel.
pub const F32_PANEL_OUTPUTS: usize = 48;
/// Rows and outputs of the largest tile, which the scratch is sized for.
const TILE_ROWS_MAX: usize = 8;
const TILE_OUTPUTS_MAX: usize = 3;
/// The number of outputs of a streaming work item is a multiple of this, which the number of outputs of every
/// tile divides.
pub const STREAM_OUTPUTS: usize = 24;
/// Largest number of rows for which the weights stream.
const STREAM_ROWS: usize = 16;
/// Sums of a tile of rows with all outputs of a panel, in F32 numbers.
pub const SUMS_LEN: usize = TILE_ROWS_MAX * F32_PANEL_OUTPUTS * LANES;

/// Buffers of the F32 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct F32Scratch<Buf = HostBuf> {
    /// The packed input (m, k).
    x: Buf,
    /// For each thread: the converted panel, then the sums of a tile of rows with all outputs of the panel,
    /// then the dequantized outputs, if there are any.
    panels: Buf,
    panel_len: usize,
    dequantized_len: usize,
}

impl<Buf> F32Scratch<Buf> {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads. `written` is the largest number
    /// of columns of a weight that must be dequantized first, 0 without such weights.
    pub fn new<M: ScratchMemory<Buf = Buf>>(
        rows: usize,
        k: usize,
        written: usize,
        threads: usize,
        memory: &M,
    ) -> Result<F32Scratch<Buf>, DeviceError> {
        let padded = k.next_multiple_of(LANES);
        let panel_len = F32_PANEL_LEN.max(TILE_OUTPUTS_MAX * padded);
        let written_len = if written == 0 { 0 } else { F32_PANEL_LEN.max(STREAM_OUTPUTS * written) };
        let each = panel_len + SUMS_LEN + written_len;
        Ok(F32Scratch {
            x: memory.zeroed(buffer_rows(rows, threads) * padded * size_of::<f32>())?,
            panels: memory.zeroed(threads * each * size_of::<f32>())?,
            panel_len,
            dequantized_len: written_len,
        })
    }
}

impl F32Scratch {
    /// Lets threads share the scratch.
    pub fn share(&mut self, level: Level) -> SharedF32<'_> {
        let x = self.x.f32_mut();
        SharedF32 {
            level,
            x_len: x.len(),
            x: SharedSlice::new(x),
            scratch: SharedSlice::new(self.panels.f32_mut()),
            panel_len: self.panel_len,
            dequantized_len: self.dequantized_len,
        }
    }
}

/// Scratch that threads share.
pub struct SharedF32<'a> {
    level: Level,
    x: SharedSlice<'a, f32>,
    x_len: usize,
    scratch: SharedSlice<'a, f32>,
    panel_len: usize,
    dequantized_len: usize,
}

impl SharedScratch for SharedF32<'_> {
    type Packed<'a>
        = PackedF32<'a>
    where
        Self: 'a;

    fn rows_of(&self, share: Share, k: usize) -> usize {
        share.rows(self.x_len, LANES, k.next_multiple_of(LANES))
    }

    /// Packs the input: for each tile (steps, tile rows, 16), zero beyond the last column.
    unsafe fn pack(
        &self,
        share: Share,
        workers: Workers,
        input: &GemmInput,
        buffers: &RowBuffers,
    ) -> PackedF32<'_> {
        let level = self.level;
        let (tile_rows, tile_outs) = level.run(TileSize);
        let (tiles, steps) = (RowTiles::of_sizes(input.rows, tile_rows), input.k.div_ceil(LANES));
        // SAFETY: the caller's promise.
        let x =
            unsafe { self.x.slice_mut(share.place(self.x_len, LANES, tiles.padded_rows() * steps * LANES)) };
        tiles.clear_padding(x);
        let packed = SharedSlice::new(&mut *x);
        input.for_each(workers, level, &tiles, buffers, |rows, r, values| {
            // SAFETY: each tile belongs to one item.
            let to = unsafe { packed.slice_mut(rows.start * steps * LANES..rows.end * steps * LANES) };
            pack_row(values, r, rows.len(), to);
        });
        PackedF32 {
            level,
            tiles,
            tile_outputs: tile_outs,
            steps,
            rows: input.rows,
            x,
            scratch: self.scratch,
            panel_len: self.panel_len,
            dequantized_len: self.dequantized_len,
        }
    }
}

/// Kernel that returns the numbers of rows of the instruction set's tiles, and the outputs of the largest.
struct TileSize;

impl Kernel for TileSize {
    type Out = (&'static [usize], usize);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (&'static [usize], usize) {
        (S::TILE_ROWS, S::TILE_OUTPUTS)
    }
}

fn pack_row(x: &[f32], r: usize, rows: usize, to: &mut [f32]) {
    let (to, _) = to.as_chunks_mut::<LANES>();
    let (x, rest) = x.as_chunks::<LANES>();
    for (to, x) in to[r..].iter_mut().step_by(rows).zip(x) {
        *to = *x;
    }
    if !rest.is_empty() {
        let last = &mut to[x.len() * rows + r];
        *last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
    }
}

/// A packed F32 input, and the scratch of each thread.
pub struct PackedF32<'a> {
    pub(super) level: Level,
    pub(super) tiles: RowTiles,
    pub(super) tile_outputs: usize,
    /// Number of vectors of columns.
    pub(super) steps: usize,
    pub(super) rows: usize,
    pub(super) x: &'a [f32],
    pub(super) scratch: SharedSlice<'a, f32>,
    pub(super) panel_len: usize,
    pub(super) dequantized_len: usize,
}

impl PackedF32<'_> {
    /// Returns whether the rows are so few that the weights are read directly.
    pub fn is_streaming(&self) -> bool {
        self.rows <= STREAM_ROWS
    }

    /// Returns the input of some rows, with padding: (steps, tile rows, 16).
    pub fn values_of(&self, rows: &Range<usize>) -> &[f32] {
        let row = self.steps * LANES;
        &self.x[rows.start * row..rows.end * row]
    }

    /// Returns the number of outputs of `w` that fit the scratch.
    pub fn max_outputs(&self, w: &Weight<HostBuf>) -> usize {
        let panel = self.panel_len / (self.steps * LANES) / self.tile_outputs * self.tile_outputs;
        match (w.ty.is_blocked(), self.is_streaming()) {
            (false, true) => usize::MAX,
            (false, false) => panel,
            (true, true) => self.dequantized_len / w.k / STREAM_OUTPUTS * STREAM_OUTPUTS,
            (true, false) => panel.min(self.dequantized_len / w.k / self.tile_outputs * self.tile_outputs),
        }
    }
}
