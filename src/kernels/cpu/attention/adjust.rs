//! Adjustments of attention scores beyond scaling: distance scores, soft capping, and relative position
//! bias.
//!
//! Invariant: the adjustment of a score depends only on its head, its two positions and the shape.

use super::query::Query;
use super::{Attention, BLOCK};
use crate::backend::DistanceScores;
use crate::cpu::activation::softcap_lanes;
use crate::cpu::simd::{Kernel, LANES, Simd};

/// Kernel that scales, caps and biases the dot products of one query vector with a block.
pub struct AdjustScores<'a> {
    scale: f32,
    softcap: Option<f32>,
    bias: Option<BiasRow<'a>>,
    scores: &'a mut [f32; BLOCK],
}

/// Adds the distance scores to the dot products of a query vector with the keys that it sees of a block.
pub fn add_distances(op: &Attention, query: &Query, block: usize, products: &mut [f32; BLOCK]) {
    let Some(DistanceScores { of_queries, of_keys, buckets }) = &op.shape.distances else { return };
    let (heads, count, first) = (op.shape.heads, buckets.count, block * BLOCK);
    let of_query = &of_queries.f32()[query.vector * count..][..count];
    let (table, of_keys) = (buckets.table.f32(), of_keys.f32());
    let seen = query.visible_in(block);
    for (number, product) in products[..seen.to].iter_mut().enumerate().skip(seen.from) {
        let position = first + number;
        let bucket = table[position + buckets.reach - 1 - query.position] as usize;
        // The rows of a span are neighbors.
        let key = query.vector + position * heads - query.position * heads;
        *product += of_query[bucket] + of_keys[key * count + bucket];
    }
}

/// A head's row of the bias table, and the index of the block's first position in it. The index lies before
/// the row's start or beyond its end only for positions that the query does not see.
struct BiasRow<'a> {
    table: &'a [f32],
    first: isize,
}

impl<'a> AdjustScores<'a> {
    /// Creates the adjustment of `scores`; `at` is the position of the first key of the block.
    pub fn new(
        op: &Attention<'a>,
        query: &Query,
        at: usize,
        scores: &'a mut [f32; BLOCK],
    ) -> AdjustScores<'a> {
        let bias = op.shape.bias.map(|bias| {
            let width = 2 * bias.reach - 1;
            let table = &bias.table.f32()[query.head * width..][..width];
            BiasRow { table, first: (at + bias.reach - 1) as isize - query.position as isize }
        });
        AdjustScores { scale: op.shape.scale, softcap: op.shape.softcap, bias, scores }
    }
}

impl Kernel for AdjustScores<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (half, scores) in self.scores.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut adjusted = simd.mul(simd.load(scores), simd.splat(self.scale));
            if let Some(cap) = self.softcap {
                adjusted = softcap_lanes(simd, simd.splat(cap), adjusted);
            }
            if let Some(biases) = &self.bias {
                let first = biases.first + (half * LANES) as isize;
                adjusted = simd.add(adjusted, load_or_zero(simd, biases.table, first));
            }
            simd.store(adjusted, scores);
        }
    }
}

/// Loads sixteen numbers from index `first` on; zero where the index is out of range.
#[inline(always)]
fn load_or_zero<S: Simd>(simd: S, numbers: &[f32], first: isize) -> S::V {
    if first >= 0 && first as usize + LANES <= numbers.len() {
        return simd.load(&numbers[first as usize..].as_chunks::<LANES>().0[0]);
    }
    let mut lanes = [0.0; LANES];
    for (lane, index) in lanes.iter_mut().zip(first..) {
        if index >= 0 && (index as usize) < numbers.len() {
            *lane = numbers[index as usize];
        }
    }
    simd.load(&lanes)
}
