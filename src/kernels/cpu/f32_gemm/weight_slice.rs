//! The weights of a work item, as they are stored.
//!
//! Invariant: only outputs of the work item are written.

use super::input::PackedF32;
use crate::backend::Weight;
use crate::cpu::gemm_task::GemmTask;
use crate::cpu::simd::{FloatFormat, LANES, Simd, load_partial};
use crate::host::HostBuf;

/// A range of outputs of a weight, and the input they are multiplied with.
pub struct WeightSlice<'a, W: FloatFormat> {
    /// (outputs from `first_output` on, k).
    pub(super) w: &'a [W::Raw],
    pub(super) first_output: usize,
    pub(super) input: &'a PackedF32<'a>,
    pub(super) gemm: &'a GemmTask<'a>,
}

impl<W: FloatFormat> WeightSlice<'_, W> {
    /// Returns the whole weight.
    pub fn weight(&self) -> &Weight<HostBuf> {
        self.gemm.w
    }

    /// Returns the number of columns.
    pub fn k(&self) -> usize {
        self.gemm.w.k
    }

    /// Returns the stored weights of one output.
    #[inline(always)]
    pub fn row(&self, output: usize) -> &[W::Raw] {
        &self.w[(output - self.first_output) * self.k()..][..self.k()]
    }

    /// Returns the last, incomplete vector of one output.
    #[inline(always)]
    pub fn last_vector<S: Simd>(&self, simd: S, output: usize) -> S::V {
        load_partial::<S, W>(simd, &self.row(output)[self.k() / LANES * LANES..])
    }

    /// Writes the sums of the first `count` of O outputs, starting with output `first`, of one row.
    #[inline(always)]
    pub fn write<S: Simd, const O: usize>(
        &self,
        simd: S,
        row: usize,
        first: usize,
        sums: &[S::V; O],
        count: usize,
    ) {
        for at in (0..count).step_by(4) {
            let mut four = [sums[at]; 4];
            let some = four.len().min(O - at);
            four[..some].copy_from_slice(&sums[at..at + some]);
            let four = simd.sum4(four);
            let four = &four[..four.len().min(count - at)];
            // SAFETY: an output belongs to one work item, so no other thread writes it.
            unsafe { self.gemm.write(row, first + at, four) };
        }
    }
}
