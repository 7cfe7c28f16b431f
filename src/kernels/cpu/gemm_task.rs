//! One of several GEMMs with the same input, as the threads see it, and the inputs that they are multiplied
//! with.
//!
//! Invariant: an output element is written once, by the thread that computes it.

#![allow(unsafe_code)]

use super::gemm_input::{GemmInput, RowBuffers, Share};
use super::pool::{SharedSlice, Workers};
use crate::backend::{Epilogue, Gemm, OutputColumns, Weight, weights_of};
use crate::host::HostBuf;
use std::ops::Range;

/// One of several GEMMs with the same input, whose output the threads share.
pub struct GemmTask<'a> {
    pub w: &'a Weight<HostBuf>,
    /// The outputs of the weight that are computed.
    pub outputs: Range<usize>,
    /// The columns of the destinations that have these outputs.
    columns: OutputColumns,
    /// A value for each column.
    bias: Option<&'a [f32]>,
    /// Destinations (m, columns).
    epilogue: Epilogue<SharedSlice<'a, f32>>,
}

impl<'a> GemmTask<'a> {
    /// Creates the task of a weight with `rows` rows.
    pub fn new(
        (w, columns): (&'a Weight<HostBuf>, OutputColumns),
        bias: Option<&'a HostBuf>,
        epilogue: Epilogue<&'a mut HostBuf>,
        rows: usize,
    ) -> GemmTask<'a> {
        assert!(columns.first + w.n <= columns.of, "outputs of {} columns begin at {}", w.n, columns.first);
        let share = |y: &'a mut HostBuf| SharedSlice::new(&mut y.f32_mut()[..rows * columns.of]);
        GemmTask {
            w,
            outputs: 0..w.n,
            columns,
            bias: bias.map(|bias| &bias.f32()[..columns.of]),
            epilogue: epilogue.map(share),
        }
    }

    /// Creates the tasks of a GEMM with `rows` rows: one for each weight.
    pub fn of(gemm: Gemm<'a, HostBuf>, rows: usize) -> impl Iterator<Item = GemmTask<'a>> {
        let Gemm { w, rest, bias, epilogue } = gemm;
        let of = w.n + rest.iter().map(|w| w.n).sum::<usize>();
        let first = GemmTask::new((w, OutputColumns { first: 0, of }), bias, epilogue, rows);
        let (bias, epilogue) = (first.bias, first.epilogue);
        weights_of(w, rest).map(move |(w, columns)| GemmTask { w, outputs: 0..w.n, columns, bias, epilogue })
    }

    /// Creates the task of some outputs of one of the heads whose matrices `w` has, for y (rows, heads,
    /// `columns.of`).
    pub fn of_head(
        (w, columns): (&'a Weight<HostBuf>, OutputColumns),
        (heads, head): (usize, usize),
        outputs: Range<usize>,
        y: SharedSlice<'a, f32>,
    ) -> GemmTask<'a> {
        let (n, OutputColumns { first, of }) = (w.n / heads, columns);
        assert!(first + n <= of, "outputs of {n} columns of a head begin at {first} of {of}");
        let columns = OutputColumns { first: head * of + first + outputs.start, of: heads * of };
        let outputs = head * n + outputs.start..head * n + outputs.end;
        GemmTask { w, outputs, columns, bias: None, epilogue: Epilogue::Set(y) }
    }

    /// Applies the epilogue to the sums of one row, for the outputs from `first` on, of which only those that
    /// are computed are stored.
    ///
    /// # Safety
    /// * No other thread writes these outputs of this row.
    #[inline(always)]
    pub unsafe fn write(&self, row: usize, first: usize, sums: &[f32]) {
        debug_assert!(first + sums.len() <= self.w.n, "the outputs are the weight's own");
        let OutputColumns { first: column, of } = self.columns;
        let own = first.max(self.outputs.start)..(first + sums.len()).min(self.outputs.end);
        if own.is_empty() {
            return;
        }
        let sums = &sums[own.start - first..own.end - first];
        let first = column + own.start - self.outputs.start;
        let start = row * of + first;
        let range = start..start + sums.len();
        // SAFETY: the caller's promise, in both cases.
        match &self.epilogue {
            Epilogue::Set(y) => {
                self.store(first, sums, unsafe { y.slice_mut(range) }, |y, sum| *y = sum);
            }
            Epilogue::Add { x, .. } => {
                self.store(first, sums, unsafe { x.slice_mut(range) }, |x, sum| *x += sum);
            }
        }
    }

    /// Adds the bias to the sums of the outputs from column `first` on, and calls `put` with each element.
    #[inline(always)]
    fn store(&self, first: usize, sums: &[f32], to: &mut [f32], put: impl Fn(&mut f32, f32)) {
        let zip = to.iter_mut().zip(sums);
        match self.bias {
            None => zip.for_each(|(to, sum)| put(to, *sum)),
            Some(bias) => zip.zip(&bias[first..]).for_each(|((to, sum), bias)| put(to, *sum + *bias)),
        }
    }
}

/// Scratch of one kind of GEMM that threads share.
pub trait SharedScratch: Sync {
    /// An input that is packed in it.
    type Packed<'a>: PackedInput
    where
        Self: 'a;

    /// Returns the most rows of an input with `k` columns that is packed in a share.
    fn rows_of(&self, share: Share, k: usize) -> usize;

    /// Packs an input in a share, which `workers` do.
    ///
    /// # Safety
    /// * Nobody else uses the share while the packed input exists.
    unsafe fn pack(
        &self,
        share: Share,
        workers: Workers,
        input: &GemmInput,
        buffers: &RowBuffers,
    ) -> Self::Packed<'_>;
}

/// An input that is packed for one kind of GEMM.
pub trait PackedInput: Sync {
    /// Returns the number of outputs of one work item: as many as give it a suitable number of bytes, at most
    /// `max`, rounded up to whole tiles.
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize;

    /// Computes a work item: all rows with a range of outputs. `worker` runs no other item meanwhile.
    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>);
}
