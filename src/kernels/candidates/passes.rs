//! Passes over the values of a whole vocabulary, compiled for each instruction set.
//!
//! Invariant: the result is the same for all of them, because the compiler neither fuses nor reorders
//! operations.

use super::prefix::{Bucket, find_bucket, sum_buckets};
use crate::cpu::simd::{Kernel, Simd};
use crate::random::block_words;
use crate::random::token_words;
use crate::reference::draw::{Best, weight};

/// Sums the weights of all values.
pub struct TotalWeight<'a> {
    pub values: &'a [f32],
    pub largest: f32,
}

impl Kernel for TotalWeight<'_> {
    type Out = u64;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u64 {
        let mut lanes = [0u64; 16];
        let (chunks, rest) = self.values.as_chunks::<16>();
        for chunk in chunks {
            for i in 0..16 {
                lanes[i] += weight(chunk[i] - self.largest);
            }
        }
        let mut sum = 0;
        for lane in lanes {
            sum += lane;
        }
        for value in rest {
            sum += weight(value - self.largest);
        }
        sum
    }
}

/// Finds the bucket in which the weights of the most likely values sum up to a fraction of all, and that sum.
pub struct WeightBuckets<'a> {
    pub values: &'a [f32],
    pub largest: f32,
    pub fraction: f32,
}

impl Kernel for WeightBuckets<'_> {
    type Out = (Bucket, f64);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (Bucket, f64) {
        let WeightBuckets { values, largest, fraction } = self;
        let sums = sum_buckets(values, |value| largest - value, |value| weight(value - largest));
        let enough = f64::from(fraction) * sums.iter().sum::<u64>() as f64;
        (find_bucket(&sums, enough), enough)
    }
}

/// Draws from the values of a whole vocabulary as [`crate::reference::draw::draw`] does; `first` is the id of
/// the largest. No noise is computed for tokens that cannot win with the largest.
pub struct DrawFromAll<'a> {
    pub values: &'a [f32],
    pub first: u32,
    pub seed: u64,
    pub position: u64,
}

impl Kernel for DrawFromAll<'_> {
    type Out = u32;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> u32 {
        let DrawFromAll { values, first, seed, position } = self;
        let mut best = Best::new(first, values[first as usize], seed, position);
        let (blocks, rest) = values.as_chunks::<64>();
        for (number, values) in blocks.iter().enumerate() {
            let mut may_win = false;
            for value in values {
                may_win |= best.may_lose_to(*value);
            }
            if !may_win {
                continue;
            }
            let words = block_words(seed, position, number as u32);
            let mut may_win = false;
            for i in 0..64 {
                may_win |= best.may_lose_with(values[i], words[i]);
            }
            if may_win {
                for i in 0..64 {
                    best.offer((64 * number + i) as u32, values[i], words[i]);
                }
            }
        }
        for (i, value) in rest.iter().enumerate() {
            let id = (64 * blocks.len() + i) as u32;
            best.offer(id, *value, token_words(seed, position, id / 4)[id as usize % 4]);
        }
        best.id
    }
}
