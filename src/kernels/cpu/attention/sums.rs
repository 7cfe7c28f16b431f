//! Sums of weighted values.
//!
//! Invariant: a sum takes its values in the order of positions, however many query vectors and columns go together.

use super::cache::BLOCK;
use super::tile::Seen;
use crate::cpu::simd::{Code, LANES, Simd};

/// sums (T, v_padded) += p (T, those seen of 32) · v (those seen of 32, v_padded).
#[inline(always)]
pub fn add_values<S: Simd, C: Code, const T: usize>(
    simd: S,
    seen: Seen,
    p: &[[f32; BLOCK]; T],
    v: &[C::Raw],
    sums: &mut [f32],
) {
    let vectors = sums.len() / T / LANES;
    let mut at = 0;
    while at + 2 <= vectors {
        at += add_columns::<S, C, T, 2>(simd, seen, p, v, sums, at);
    }
    if at < vectors {
        add_columns::<S, C, T, 1>(simd, seen, p, v, sums, at);
    }
}

/// The W vectors of columns from `at` on; gives W.
#[inline(always)]
fn add_columns<S: Simd, C: Code, const T: usize, const W: usize>(
    simd: S,
    seen: Seen,
    p: &[[f32; BLOCK]; T],
    v: &[C::Raw],
    sums: &mut [f32],
    at: usize,
) -> usize {
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let vectors = sums.len() / T;
    let mut totals = [[simd.splat(0.0); W]; T];
    for t in 0..T {
        for w in 0..W {
            totals[t][w] = simd.load(&sums[t * vectors + at + w]);
        }
    }
    let (v, _) = v.as_chunks::<LANES>();
    for j in seen.from..seen.to {
        let mut values = [simd.splat(0.0); W];
        for w in 0..W {
            values[w] = C::load(simd, &v[j * vectors + at + w]);
        }
        for t in 0..T {
            let p = simd.splat(p[t][j]);
            for w in 0..W {
                totals[t][w] = simd.mul_add(p, values[w], totals[t][w]);
            }
        }
    }
    for t in 0..T {
        for w in 0..W {
            simd.store(totals[t][w], &mut sums[t * vectors + at + w]);
        }
    }
    W
}
