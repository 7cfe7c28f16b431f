//! Work items of the F32 GEMM: all rows with a range of outputs.
//!
//! Invariant: a work item uses only the scratch of its thread.

use super::input::{F32_PANEL_OUTPUTS, PackedF32, STREAM_OUTPUTS, SUMS_LEN};
use super::panel::F32Panel;
use super::stream::StreamTile;
use super::weight_slice::WeightSlice;
use crate::backend::Weight;
use crate::cpu::gemm_task::{GemmTask, PackedInput};
use crate::cpu::simd::{F32, FloatFormat, FloatFormatOp, Kernel, Simd, dispatch_float_format};
use crate::host::HostBuf;
use std::ops::Range;

/// Bytes of weights that a streaming work item takes.
const STREAM_BYTES: usize = 128 * 1024;

impl PackedInput for PackedF32<'_> {
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let tile = if self.is_streaming() { STREAM_OUTPUTS } else { self.tile_outputs };
        let wanted = match !w.ty.is_blocked() && self.is_streaming() {
            true => STREAM_BYTES / (w.buf.len() / w.n).clamp(1, STREAM_BYTES),
            false => F32_PANEL_OUTPUTS,
        };
        wanted.min(max).next_multiple_of(tile).min(self.max_outputs(w))
    }

    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>) {
        let each = self.panel_len + SUMS_LEN + self.dequantized_len;
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let scratch = unsafe { self.scratch.slice_mut(worker * each..(worker + 1) * each) };
        self.level.run(F32Item { input: self, gemm, outputs, scratch });
    }
}

/// A work item: all rows with a range of outputs.
struct F32Item<'a> {
    input: &'a PackedF32<'a>,
    gemm: &'a GemmTask<'a>,
    outputs: Range<usize>,
    scratch: &'a mut [f32],
}

impl Kernel for F32Item<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match self.gemm.w.ty.is_blocked() {
            false => dispatch_float_format(self.gemm.w.ty, WithFormat { item: self, simd }),
            true => self.dequantize_and_multiply(simd),
        }
    }
}

impl F32Item<'_> {
    /// Dequantizes the outputs to F32 and multiplies with these.
    fn dequantize_and_multiply<S: Simd>(self, simd: S) {
        let F32Item { input, gemm, outputs, scratch } = self;
        let w = gemm.w;
        let (scratch, written) = scratch.split_at_mut(input.panel_len + SUMS_LEN);
        // The buffer may be longer than the weight.
        let stored = w.ty.bytes(w.k).expect("rows are whole blocks; this is a bug");
        let written = &mut written[..outputs.len() * w.k];
        w.ty.dequantize(&w.buf.bytes()[outputs.start * stored..outputs.end * stored], written);
        let weights = WeightSlice::<F32> { w: written, first_output: outputs.start, input, gemm };
        multiply(simd, &weights, outputs, scratch);
    }
}

/// Runs a work item for the number format of its weight.
struct WithFormat<'a, S> {
    item: F32Item<'a>,
    simd: S,
}

impl<S: Simd> FloatFormatOp for WithFormat<'_, S> {
    type Out = ();

    fn run<W: FloatFormat>(self) {
        let F32Item { input, gemm, outputs, scratch } = self.item;
        let w = &W::values(&gemm.w.buf)[..gemm.w.n * gemm.w.k];
        let scratch = &mut scratch[..input.panel_len + SUMS_LEN];
        multiply(self.simd, &WeightSlice::<W> { w, first_output: 0, input, gemm }, outputs, scratch);
    }
}

/// Multiplies all rows with a range of outputs.
fn multiply<S: Simd, W: FloatFormat>(
    simd: S,
    weights: &WeightSlice<W>,
    outputs: Range<usize>,
    scratch: &mut [f32],
) {
    if weights.input.is_streaming() {
        let tiles = &weights.input.tiles;
        (0..tiles.count()).for_each(|tile| stream(simd, weights, tile, outputs.clone()));
        return;
    }
    let (w, sums) = scratch.split_at_mut(weights.input.panel_len);
    let panel = F32Panel { weights, outputs, w, sums };
    match S::TILE_OUTPUTS {
        2 => panel.run::<S, 2>(simd),
        _ => panel.run::<S, 3>(simd),
    }
}

/// Multiplies one tile of rows with as many outputs at a time as leave registers for the sums.
fn stream<S: Simd, W: FloatFormat>(simd: S, weights: &WeightSlice<W>, tile: usize, outputs: Range<usize>) {
    let (rows, tile_rows) =
        (weights.input.tiles.rows_of(tile), weights.input.tiles.padded_rows_of(tile).len());
    // The matches are nested so that only the sizes an instruction set uses are compiled for it.
    match S::TILE_OUTPUTS {
        2 => match tile_rows {
            0 => {}
            1 => simd.call(StreamTile::<W, 1, 4> { weights, rows, outputs }),
            3 => simd.call(StreamTile::<W, 3, 2> { weights, rows, outputs }),
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        },
        _ => match tile_rows {
            0 => {}
            1 => simd.call(StreamTile::<W, 1, 8> { weights, rows, outputs }),
            2 => simd.call(StreamTile::<W, 2, 8> { weights, rows, outputs }),
            4 => simd.call(StreamTile::<W, 4, 6> { weights, rows, outputs }),
            6 => simd.call(StreamTile::<W, 6, 4> { weights, rows, outputs }),
            8 => simd.call(StreamTile::<W, 8, 3> { weights, rows, outputs }),
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        },
    }
}
