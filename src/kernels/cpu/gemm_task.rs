//! One of several GEMMs with the same input, as the threads see it, and the inputs that they are multiplied
//! with.
//!
//! Invariant: an output element is written once, by the thread that computes it.

#![allow(unsafe_code)]

use super::pool::SharedSlice;
use crate::backend::{Epilogue, Gemm, Weight};
use crate::host::HostBuf;
use std::ops::Range;

/// One of several GEMMs with the same input, whose output the threads share.
pub struct GemmTask<'a> {
    pub w: &'a Weight<HostBuf>,
    bias: Option<&'a [f32]>,
    /// Destinations (m, n).
    epilogue: Epilogue<SharedSlice<'a, f32>>,
}

impl<'a> GemmTask<'a> {
    /// Creates the task of a GEMM with `rows` rows.
    pub fn new(gemm: Gemm<'a, HostBuf>, rows: usize) -> GemmTask<'a> {
        let Gemm { w, bias, epilogue } = gemm;
        let share = |y: &'a mut HostBuf| SharedSlice::new(&mut y.f32_mut()[..rows * w.n]);
        GemmTask { w, bias: bias.map(|bias| &bias.f32()[..w.n]), epilogue: epilogue.map(share) }
    }

    /// Applies the epilogue to the sums of one row, for the outputs from `first` on.
    ///
    /// # Safety
    /// * No other thread writes these outputs of this row.
    #[inline(always)]
    pub unsafe fn write(&self, row: usize, first: usize, sums: &[f32]) {
        let start = row * self.w.n + first;
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

    /// Adds the bias to the sums of the outputs from `first` on, and calls `put` with each element.
    #[inline(always)]
    fn store(&self, first: usize, sums: &[f32], to: &mut [f32], put: impl Fn(&mut f32, f32)) {
        let zip = to.iter_mut().zip(sums);
        match self.bias {
            None => zip.for_each(|(to, sum)| put(to, *sum)),
            Some(bias) => zip.zip(&bias[first..]).for_each(|((to, sum), bias)| put(to, *sum + *bias)),
        }
    }
}

/// An input that is packed for one kind of GEMM.
pub trait PackedInput: Sync {
    /// Returns the number of outputs of one work item: as many as give it a suitable number of bytes, at most
    /// `max`, rounded up to whole tiles.
    fn outputs_per_item(&self, w: &Weight<HostBuf>, max: usize) -> usize;

    /// Computes a work item: all rows with a range of outputs. `worker` runs no other item meanwhile.
    fn multiply(&self, worker: usize, gemm: &GemmTask, outputs: Range<usize>);
}
