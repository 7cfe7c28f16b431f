//! Partial results of attention: the result of a query vector for one split or several, which is the sums of
//! weighted values, the sum of the weights, and the largest score, which the weights are relative to. Two
//! results are merged as follows:
//!
//! - largest = max(largest, other largest)
//! - sums = sums · e^(own largest - largest) + other sums · e^(other largest - largest), and likewise the sum
//!   of the weights.
//!
//! Invariant: splits are merged in ascending order, from the first that the query vector sees, and no others
//! are merged.

use super::plan::SplitResults;
use super::query::{Query, softmax_base};
use super::{Attention, padded_len};
use crate::batch::RowSpan;
use crate::cpu::pool::SharedSlice;
use crate::cpu::simd::{Kernel, LANES, Simd, exp};
use std::ops::Range;

/// Returns the F32 numbers of a partial result: its sums, and a vector of [`PartialResult::rest`].
pub fn len(v_dim: usize) -> usize {
    padded_len(v_dim) + LANES
}

/// Index of the largest score in the last vector of a partial result.
const LARGEST: usize = 0;
/// Index of the sum of the weights in the last vector of a partial result.
const TOTAL: usize = 1;

/// Storage of partial results: (results, len) from `start` on.
#[derive(Clone, Copy)]
pub struct PartialResults<'a> {
    pub numbers: &'a SharedSlice<'a, f32>,
    pub start: usize,
    pub len: usize,
}

impl<'a> PartialResults<'a> {
    /// Returns partial results for writing.
    ///
    /// # Safety
    /// - No one else uses any of these results while the returned slice is alive.
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's promise
    pub unsafe fn results_mut(&self, results: Range<usize>) -> &'a mut [f32] {
        let numbers = self.start + results.start * self.len..self.start + results.end * self.len;
        // SAFETY: the caller's promise.
        unsafe { self.numbers.slice_mut(numbers) }
    }
}

/// The result of a query vector for one split.
#[derive(Clone, Copy)]
pub struct PartialResult<'a> {
    sums: &'a [f32],
    rest: [f32; LANES],
}

impl<'a> PartialResult<'a> {
    /// Creates a result from the sums of weighted values, the largest score and the sum of the weights.
    pub fn new(sums: &'a [f32], largest: f32, total: f32) -> PartialResult<'a> {
        let mut rest = [0.0; LANES];
        (rest[LARGEST], rest[TOTAL]) = (largest, total);
        PartialResult { sums, rest }
    }

    /// Reads a stored result.
    fn from_stored(numbers: &'a [f32]) -> PartialResult<'a> {
        let (sums, rest) = numbers.split_at(numbers.len() - LANES);
        PartialResult::new(sums, rest[LARGEST], rest[TOTAL])
    }

    /// Stores the result.
    pub fn store(&self, to: &mut [f32]) {
        let (sums, rest) = to.split_at_mut(self.sums.len());
        sums.copy_from_slice(self.sums);
        rest.copy_from_slice(&self.rest);
    }

    /// Merges this result into that of the earlier splits, which is stored in `to`.
    #[inline(always)]
    pub fn merge_into<S: Simd>(&self, simd: S, to: &mut [f32]) {
        let (sums, rest) = to.split_at_mut(self.sums.len());
        let (own, other) = (rest[LARGEST], self.rest[LARGEST]);
        let largest = own.max(other);
        let own = exp(simd, simd.splat(own - softmax_base(largest)));
        let other = exp(simd, simd.splat(other - softmax_base(largest)));
        add(simd, (self.sums, other), (sums, own));
        add(simd, (&self.rest, other), (rest, own));
        rest[LARGEST] = largest;
    }
}

/// Computes to = to · own + from · other.
#[inline(always)]
fn add<S: Simd>(simd: S, (from, other): (&[f32], S::V), (to, own): (&mut [f32], S::V)) {
    for (from, to) in from.as_chunks::<LANES>().0.iter().zip(to.as_chunks_mut::<LANES>().0) {
        let before = simd.mul(simd.load(to), own);
        simd.store(simd.mul_add(simd.load(from), other, before), to);
    }
}

/// Kernel that merges the results of the splits of a tile and writes its output, once all are computed.
pub struct MergeSplits<'a, 'b> {
    pub op: &'a Attention<'b>,
    pub span: &'a RowSpan,
    pub kv_head: usize,
    pub queries: Range<usize>,
    pub results: SplitResults,
    pub partials: PartialResults<'a>,
}

impl Kernel for MergeSplits<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (number, query) in self.queries.clone().enumerate() {
            let query = self.op.query(self.span, self.kv_head, query);
            let results = self.results.range(number, query.splits());
            // SAFETY: a query vector belongs to one tile, and so do its results.
            let results = unsafe { self.partials.results_mut(results) };
            write_merged(simd, self.op, &query, results, self.partials.len);
        }
    }
}

/// Merges the results of all splits that a query vector sees into the first, and writes the output.
#[inline(always)]
fn write_merged<S: Simd>(simd: S, op: &Attention, query: &Query, results: &mut [f32], len: usize) {
    if results.is_empty() {
        return op.output(query).fill(0.0);
    }
    let (whole, others) = results.split_at_mut(len);
    for other in others.chunks_exact(len) {
        PartialResult::from_stored(other).merge_into(simd, whole);
    }
    write_output(simd, op, query, whole);
}

/// Writes a query vector's output from its stored result.
#[inline(always)]
pub fn write_output<S: Simd>(simd: S, op: &Attention, query: &Query, whole: &[f32]) {
    let whole = PartialResult::from_stored(whole);
    op.write(simd, query, whole.sums, (whole.rest[LARGEST], whole.rest[TOTAL]));
}
