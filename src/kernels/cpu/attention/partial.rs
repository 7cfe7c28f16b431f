//! What a query vector has of one split, and of several: the sums of weighted values, the sum of the weights, and the largest
//! score, which weights are relative to.
//!
//! - largest = max(largest, other largest)
//! - sums = sums · e^(own largest - largest) + other sums · e^(other largest - largest), and so the sum of the weights.
//!
//! Invariant: splits are folded in ascending order, from the first that the query vector sees, and no other enters.

use super::plan::Apart;
use super::query::Query;
use super::{Attention, padded};
use crate::cpu::pool::Parts;
use crate::cpu::simd::{Kernel, LANES, Simd, exp};
use crate::cpu::step::Run;
use std::ops::Range;

/// F32 numbers of a partial result: its sums, and a vector of [`Part::rest`].
pub fn len(v_dim: usize) -> usize {
    padded(v_dim) + LANES
}

/// In the last vector of a partial result.
const LARGEST: usize = 0;
const TOTAL: usize = 1;

/// Where partial results are kept: (results, len) from `start` on.
#[derive(Clone, Copy)]
pub struct Partials<'a> {
    pub numbers: &'a Parts<'a, f32>,
    pub start: usize,
    pub len: usize,
}

impl<'a> Partials<'a> {
    /// # Safety
    /// - Nobody else uses any of these results meanwhile.
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's promise
    pub unsafe fn part(&self, results: Range<usize>) -> &'a mut [f32] {
        let numbers = self.start + results.start * self.len..self.start + results.end * self.len;
        // SAFETY: the caller's promise.
        unsafe { self.numbers.part(numbers) }
    }
}

/// A split's result, as it comes.
#[derive(Clone, Copy)]
pub struct Part<'a> {
    sums: &'a [f32],
    rest: [f32; LANES],
}

impl<'a> Part<'a> {
    pub fn new(sums: &'a [f32], largest: f32, total: f32) -> Part<'a> {
        let mut rest = [0.0; LANES];
        (rest[LARGEST], rest[TOTAL]) = (largest, total);
        Part { sums, rest }
    }

    fn kept(numbers: &'a [f32]) -> Part<'a> {
        let (sums, rest) = numbers.split_at(numbers.len() - LANES);
        Part::new(sums, rest[LARGEST], rest[TOTAL])
    }

    pub fn keep(&self, to: &mut [f32]) {
        let (sums, rest) = to.split_at_mut(self.sums.len());
        sums.copy_from_slice(self.sums);
        rest.copy_from_slice(&self.rest);
    }

    /// Adds this split to those before it.
    #[inline(always)]
    pub fn fold<S: Simd>(&self, simd: S, to: &mut [f32]) {
        let (sums, rest) = to.split_at_mut(self.sums.len());
        let (own, other) = (rest[LARGEST], self.rest[LARGEST]);
        let largest = own.max(other);
        let own = exp(simd, simd.splat(own - base(largest)));
        let other = exp(simd, simd.splat(other - base(largest)));
        add(simd, (self.sums, other), (sums, own));
        add(simd, (&self.rest, other), (rest, own));
        rest[LARGEST] = largest;
    }
}

/// What weights are relative to where this is the largest score: with none but infinitely small ones, no weight is to be NaN.
#[inline(always)]
pub fn base(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

/// to = to · its factor + from · its factor
#[inline(always)]
fn add<S: Simd>(simd: S, (from, other): (&[f32], S::V), (to, own): (&mut [f32], S::V)) {
    for (from, to) in from.as_chunks::<LANES>().0.iter().zip(to.as_chunks_mut::<LANES>().0) {
        let before = simd.mul(simd.load(to), own);
        simd.store(simd.mul_add(simd.load(from), other, before), to);
    }
}

/// A tile whose splits' results are all there.
pub struct Fold<'a, 'b> {
    pub op: &'a Attention<'b>,
    pub run: &'a Run,
    pub kv_head: usize,
    pub queries: Range<usize>,
    pub apart: Apart,
    pub partials: Partials<'a>,
}

impl Kernel for Fold<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (number, query) in self.queries.clone().enumerate() {
            let query = self.op.query(self.run, self.kv_head, query);
            let results = self.apart.of(number, query.splits());
            // SAFETY: a query vector belongs to one tile, and so do its results.
            let results = unsafe { self.partials.part(results) };
            write_folded(simd, self.op, &query, results, self.partials.len);
        }
    }
}

/// Folds the results of all splits that a query vector sees into the first, and writes what comes out.
#[inline(always)]
fn write_folded<S: Simd>(simd: S, op: &Attention, query: &Query, results: &mut [f32], len: usize) {
    if results.is_empty() {
        return op.out(query).fill(0.0);
    }
    let (whole, others) = results.split_at_mut(len);
    for other in others.chunks_exact(len) {
        Part::kept(other).fold(simd, whole);
    }
    write(simd, op, query, whole);
}

/// Writes a query vector's result.
#[inline(always)]
pub fn write<S: Simd>(simd: S, op: &Attention, query: &Query, whole: &[f32]) {
    let whole = Part::kept(whole);
    op.write(simd, query, whole.sums, whole.rest[TOTAL]);
}
