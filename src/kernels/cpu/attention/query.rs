//! Query vectors: the positions that one sees, and where its result is written.
//!
//! Invariant: a query vector belongs to one tile, and no one else writes its result.

use super::plan::{splits_of, visible_positions};
use super::{Attention, BLOCK};
use crate::batch::RowSpan;
use crate::cpu::simd::{LANES, Simd, store_partial};
use std::ops::Range;

/// One query vector.
#[derive(Clone, Copy, Default)]
pub struct Query {
    pub head: usize,
    pub position: usize,
    /// Row and head as one index into (rows, heads).
    pub vector: usize,
    /// The visible positions are `from..to`.
    pub from: usize,
    pub to: usize,
}

/// The positions of a block that a query vector sees: `from..to`.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct VisibleRange {
    pub from: usize,
    pub to: usize,
}

/// Returns the value that weights are relative to, given the largest score. It is 0 if all scores are
/// negative infinity, so that no weight becomes NaN.
#[inline(always)]
pub fn softmax_base(largest: f32) -> f32 {
    if largest == f32::NEG_INFINITY { 0.0 } else { largest }
}

impl Query {
    /// Returns the blocks with visible positions.
    #[inline(always)]
    pub fn blocks(&self) -> Range<usize> {
        self.from / BLOCK..self.to.div_ceil(BLOCK)
    }

    /// Returns the splits with visible positions.
    #[inline(always)]
    pub fn splits(&self) -> Range<usize> {
        splits_of(&(self.from..self.to))
    }

    /// Returns the positions of a block that this query vector sees.
    #[inline(always)]
    pub fn visible_in(&self, block: usize) -> VisibleRange {
        let within = |position: usize| position.saturating_sub(block * BLOCK).min(BLOCK);
        VisibleRange { from: within(self.from), to: within(self.to) }
    }
}

impl VisibleRange {
    /// Returns whether no position is visible.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        self.from >= self.to
    }

    /// Returns the given lanes for visible positions and `rest` for the others.
    #[inline(always)]
    pub fn select<S: Simd>(self, simd: S, [low, high]: [S::V; 2], rest: S::V) -> [S::V; 2] {
        let mut low = simd.select_first(self.to, low, rest);
        let mut high = simd.select_first(self.to.saturating_sub(LANES), high, rest);
        if self.from > 0 {
            low = simd.select_first(self.from, rest, low);
            high = simd.select_first(self.from.saturating_sub(LANES), rest, high);
        }
        [low, high]
    }
}

impl Attention<'_> {
    /// Returns query vector `number` of a span for a KV head, counted by row and then by head of the group.
    #[inline(always)]
    pub fn query(&self, span: &RowSpan, kv_head: usize, number: usize) -> Query {
        let (head, position) = (kv_head * self.group + number % self.group, span.start + number / self.group);
        let seen = visible_positions(self.shape, span, position);
        let vector = (span.first_row + number / self.group) * self.shape.heads + head;
        Query { head, position, vector, from: seen.start, to: seen.end }
    }

    /// Returns the output range of a query vector.
    #[allow(clippy::mut_from_ref)] // no one else writes there
    pub fn output(&self, query: &Query) -> &mut [f32] {
        let v_dim = self.layout.v_dim;
        // SAFETY: a query vector belongs to one item at a time, and so does its range of `out`.
        unsafe { self.out.slice_mut(query.vector * v_dim..(query.vector + 1) * v_dim) }
    }

    /// Writes the sums divided by their total weight, or zeros if no position was visible. If all visible
    /// scores were negative infinity, both are 0 and the result is NaN, unless there is a sink. `largest` is
    /// the score that the weights are relative to.
    #[inline(always)]
    pub fn write<S: Simd>(&self, simd: S, query: &Query, sums: &[f32], (largest, total): (f32, f32)) {
        let sees_nothing = query.from >= query.to;
        let total = match self.shape.sinks {
            Some(sinks) => total + (sinks.f32()[query.head] - softmax_base(largest)).exp(),
            None => total,
        };
        let total = simd.splat(if sees_nothing { 1.0 } else { total });
        for (sums, out) in sums.as_chunks::<LANES>().0.iter().zip(self.output(query).chunks_mut(LANES)) {
            store_partial(simd, simd.div(simd.load(sums), total), out);
        }
    }
}
