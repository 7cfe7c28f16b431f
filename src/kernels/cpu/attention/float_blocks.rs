//! Cache blocks of floating-point numbers: K is (k_dim, 32), V is (32, v_dim padded to 16). A K that has V in
//! it is stored like V.
//!
//! Invariant: a sum takes its terms in the order of dimensions, or of positions, however many query vectors
//! and columns are processed together.

use super::BLOCK;
use super::kv_format::KvFormat;
use super::query::VisibleRange;
use crate::cpu::simd::{FloatFormat, LANES, Simd};
use crate::host::HostBuf;
use std::marker::PhantomData;

/// The storage format of a cache of floating-point format `C`.
pub struct FloatBlocks<C>(PhantomData<C>);

impl<C: FloatFormat> KvFormat for FloatBlocks<C> {
    type Unit = C::Raw;
    const SUMMED_GROUP: usize = 0;

    fn units(buf: &HostBuf) -> &[C::Raw] {
        C::values(buf)
    }
    fn units_mut(buf: &mut HostBuf) -> &mut [C::Raw] {
        C::values_mut(buf)
    }

    fn k_len(k_dim: usize) -> usize {
        BLOCK * k_dim
    }
    fn v_len(v_dim: usize) -> usize {
        BLOCK * v_dim.next_multiple_of(LANES)
    }
    fn v_parts(v_dim: usize) -> (usize, usize) {
        (0, v_dim.next_multiple_of(LANES) * size_of::<C::Raw>())
    }

    fn write_key(key: &[f32], at: usize, block: &mut [C::Raw]) {
        let mut encoded = [C::Raw::default(); 4 * LANES];
        let blocks = block.chunks_mut(encoded.len() * BLOCK);
        for (key, block) in key.chunks(encoded.len()).zip(blocks) {
            C::encode(key, &mut encoded[..key.len()]);
            for (number, dim) in encoded.iter().zip(block.chunks_exact_mut(BLOCK)) {
                dim[at] = *number;
            }
        }
    }
    fn write_value(value: &[f32], at: usize, block: &mut [C::Raw]) {
        let padded = block.len() / BLOCK;
        C::encode(value, &mut block[at * padded..][..value.len()]);
    }
    fn read_value(block: &[C::Raw], at: usize, _: usize, out: &mut [f32]) {
        let padded = block.len() / BLOCK;
        C::decode(&block[at * padded..][..out.len()], out);
    }

    #[inline(always)]
    fn scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        _: [&[f32]; T],
        k: &[C::Raw],
    ) -> [[S::V; 2]; T] {
        let pairs = k.as_chunks::<LANES>().0.as_chunks::<2>().0;
        for q in q {
            assert!(q.len() >= pairs.len(), "a query has the width of a key");
        }
        let mut scores = [[simd.splat(0.0); 2]; T];
        for (d, k) in pairs.iter().enumerate() {
            let k = [C::load(simd, &k[0]), C::load(simd, &k[1])];
            for t in 0..T {
                // SAFETY: q[t] has an element for each pair of vectors.
                let q = simd.splat(unsafe { *q[t].get_unchecked(d) });
                scores[t][0] = simd.mul_add(q, k[0], scores[t][0]);
                scores[t][1] = simd.mul_add(q, k[1], scores[t][1]);
            }
        }
        scores
    }

    #[inline(always)]
    fn row_scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        _: [&[f32]; T],
        k: &[C::Raw],
    ) -> [[S::V; 2]; T] {
        let (stride, (q, rest)) = (q[0].len().div_ceil(LANES), split_rows(q));
        let (k, _) = k.as_chunks::<LANES>();
        let mut scores = [[0.0; BLOCK]; T];
        for j in (0..BLOCK).step_by(ROWS_AT_ONCE) {
            let rows: [&[[C::Raw; LANES]]; ROWS_AT_ONCE] =
                std::array::from_fn(|row| &k[(j + row) * stride..][..stride]);
            let mut sums = [[simd.splat(0.0); ROWS_AT_ONCE]; T];
            for d in 0..stride {
                let k = rows.map(|row| C::load(simd, &row[d]));
                for t in 0..T {
                    let q = simd.load(q[t].get(d).unwrap_or(&rest[t]));
                    for row in 0..ROWS_AT_ONCE {
                        sums[t][row] = simd.mul_add(q, k[row], sums[t][row]);
                    }
                }
            }
            for t in 0..T {
                for row in 0..ROWS_AT_ONCE {
                    scores[t][j + row] = simd.sum(sums[t][row]);
                }
            }
        }
        load_blocks(simd, &scores)
    }

    #[inline(always)]
    fn add_values<S: Simd, const T: usize>(
        simd: S,
        seen: VisibleRange,
        p: &[[f32; BLOCK]; T],
        (v, width): (&[C::Raw], usize),
        sums: &mut [f32],
    ) {
        let (vectors, v) = (sums.len() / T / LANES, (v, width.div_ceil(LANES)));
        let mut at = 0;
        while at + 2 <= vectors {
            at += add_columns::<S, C, T, 2>(simd, seen, p, v, sums, at);
        }
        if at < vectors {
            add_columns::<S, C, T, 1>(simd, seen, p, v, sums, at);
        }
    }
}

/// Rows of a block that are multiplied by a query vector at once.
pub const ROWS_AT_ONCE: usize = 2;

/// Divides query vectors into whole SIMD vectors, and the rest, filled up with zeros.
#[inline(always)]
pub fn split_rows<const T: usize>(q: [&[f32]; T]) -> ([&[[f32; LANES]]; T], [[f32; LANES]; T]) {
    let mut rest = [[0.0; LANES]; T];
    let whole = std::array::from_fn(|t| {
        let (whole, more) = q[t].as_chunks::<LANES>();
        rest[t][..more.len()].copy_from_slice(more);
        whole
    });
    (whole, rest)
}

/// Loads a number for each of 32 positions.
#[inline(always)]
pub fn load_blocks<S: Simd, const T: usize>(simd: S, numbers: &[[f32; BLOCK]; T]) -> [[S::V; 2]; T] {
    let mut loaded = [[simd.splat(0.0); 2]; T];
    for t in 0..T {
        let (halves, _) = numbers[t].as_chunks::<LANES>();
        loaded[t] = [simd.load(&halves[0]), simd.load(&halves[1])];
    }
    loaded
}

/// Adds the weighted values, of `stride` vectors each, to W vectors of columns, from vector `at` on; returns
/// W.
#[inline(always)]
fn add_columns<S: Simd, C: FloatFormat, const T: usize, const W: usize>(
    simd: S,
    seen: VisibleRange,
    p: &[[f32; BLOCK]; T],
    (v, stride): (&[C::Raw], usize),
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
            values[w] = C::load(simd, &v[j * stride + at + w]);
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
