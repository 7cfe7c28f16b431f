//! Blocks of groups: codes in bytes or half-bytes, with a scale, or a multiplier and a least number, for each group of a
//! position's numbers.
//!
//! K is (groups): of each group its heads (heads, 32) in F16 and its codes (numbers, 32). V is its heads (groups, heads, 32)
//! and then its codes (32, v_dim padded to 16; to 32 for half-bytes). So the scales of 32 positions are lanes of a vector for
//! both, and what a code counts multiplies a sum of products of K, or a weight of V, once for a whole group. Of two half-bytes
//! the lower is 16 codes before the upper.
//!
//! - score = Σ over groups of step · (Σ over its numbers of q · code) + least · (Σ of q), each sum in order.
//! - out = Σ over positions of (p · step) · code, and before a block's positions Σ of p · least, by lanes and their tree.
//!
//! Invariant: a sum's order follows from dimensions and positions alone, and a position that is not seen enters nothing.

use super::cache::BLOCK;
use super::query::Seen;
use super::stored::Stored;
use crate::cpu::simd::{LANES, Simd};
use crate::host::HostBuf;
use crate::quant::{GROUP_BYTES, GROUP_NUMBERS, QuantType};
use std::marker::PhantomData;

/// Bytes of one F16 for each position of a block.
const HEAD: usize = 2 * BLOCK;
/// Codes that are loaded together.
const RUN: usize = 2 * LANES;

/// How the codes of a format of groups lie.
pub trait Group: Send + Sync + 'static {
    const TY: QuantType;
    /// Numbers of a group.
    const NUMBERS: usize;
    /// F16 numbers beside a group's codes.
    const HEADS: usize;
    /// Bytes of a run of codes.
    const BYTES: usize;
    /// Numbers that a value is padded to a multiple of.
    const PADDED: usize;

    /// The codes of a run (BYTES).
    fn load<S: Simd>(simd: S, run: &[u8]) -> [S::V; 2];
    /// The first sixteen of a run, which may have no more.
    fn load_first<S: Simd>(simd: S, run: &[u8]) -> S::V;
    /// What a code counts, by the first head.
    fn step<S: Simd>(simd: S, head: S::V) -> S::V;
    /// Writes code number `at` of a run, as [`crate::quant::Parts`] gives it.
    fn put(code: u8, at: usize, run: &mut [u8]);
    /// Reads it.
    fn get(run: &[u8], at: usize) -> u8;
}

/// [`QuantType::Q8_0`]: signed bytes and a scale.
pub struct Bytes;
/// [`QuantType::G4_B64`]: half-bytes, a multiplier and a least number.
pub struct HalfBytes;

impl Group for Bytes {
    const TY: QuantType = QuantType::Q8_0;
    const NUMBERS: usize = 32;
    const HEADS: usize = 1;
    const BYTES: usize = RUN;
    const PADDED: usize = LANES;

    #[inline(always)]
    fn load<S: Simd>(simd: S, run: &[u8]) -> [S::V; 2] {
        let run = run.as_chunks::<LANES>().0;
        [simd.load_i8(signed(&run[0])), simd.load_i8(signed(&run[1]))]
    }
    #[inline(always)]
    fn load_first<S: Simd>(simd: S, run: &[u8]) -> S::V {
        simd.load_i8(signed(&run.as_chunks::<LANES>().0[0]))
    }
    #[inline(always)]
    fn step<S: Simd>(_: S, head: S::V) -> S::V {
        head
    }
    fn put(code: u8, at: usize, run: &mut [u8]) {
        run[at] = code ^ 0x80;
    }
    fn get(run: &[u8], at: usize) -> u8 {
        run[at] ^ 0x80
    }
}

impl Group for HalfBytes {
    const TY: QuantType = QuantType::G4_B64;
    const NUMBERS: usize = 64;
    const HEADS: usize = 2;
    const BYTES: usize = RUN / 2;
    const PADDED: usize = RUN;

    #[inline(always)]
    fn load<S: Simd>(simd: S, run: &[u8]) -> [S::V; 2] {
        simd.load_nibbles(&run.as_chunks::<LANES>().0[0])
    }
    #[inline(always)]
    fn load_first<S: Simd>(simd: S, run: &[u8]) -> S::V {
        simd.load_nibbles(&run.as_chunks::<LANES>().0[0])[0]
    }
    #[inline(always)]
    fn step<S: Simd>(simd: S, head: S::V) -> S::V {
        simd.div(simd.splat(1.0), head)
    }
    fn put(code: u8, at: usize, run: &mut [u8]) {
        let (byte, shift) = (&mut run[at % LANES], 4 * (at / LANES));
        *byte = *byte & !(15 << shift) | code << shift;
    }
    fn get(run: &[u8], at: usize) -> u8 {
        run[at % LANES] >> (4 * (at / LANES)) & 15
    }
}

#[inline(always)]
fn signed(bytes: &[u8; LANES]) -> &[i8; LANES] {
    // SAFETY: the same bytes, read as numbers with a sign.
    unsafe { &*(&raw const *bytes).cast() }
}

/// Sixteen F16.
#[inline(always)]
fn halves(bytes: &[u8; 2 * LANES]) -> [u16; LANES] {
    // SAFETY: any two bytes are a number, and the array is as long.
    unsafe { std::mem::transmute(*bytes) }
}

/// Head number `head` of 32 positions.
#[inline(always)]
fn load_head<S: Simd>(simd: S, heads: &[u8], head: usize) -> [S::V; 2] {
    let both = heads[head * HEAD..].as_chunks::<{ 2 * LANES }>().0;
    [simd.load_f16(&halves(&both[0])), simd.load_f16(&halves(&both[1]))]
}

/// What the codes of 32 positions count.
#[inline(always)]
fn load_step<S: Simd, G: Group>(simd: S, heads: &[u8]) -> [S::V; 2] {
    let head = load_head(simd, heads, 0);
    [G::step(simd, head[0]), G::step(simd, head[1])]
}

/// Those of groups of `G`.
pub struct Grouped<G>(PhantomData<G>);

impl<G: Group> Grouped<G> {
    /// Bytes of a run of `numbers`. Where a cache is made it was seen that they fit.
    fn bytes(numbers: usize) -> usize {
        G::TY.run_bytes(numbers).expect("the cache fits memory; this is a bug")
    }

    /// Bytes of V's heads, and of the codes of one position.
    #[inline(always)]
    fn v_parts(v_dim: usize) -> (usize, usize) {
        (v_dim.div_ceil(G::NUMBERS) * G::HEADS * HEAD, v_dim.next_multiple_of(G::PADDED) * G::BYTES / RUN)
    }

    /// Codes and heads of a group.
    fn coded(numbers: &[f32]) -> ([u8; GROUP_NUMBERS], [u8; 4]) {
        let block = G::TY.quantize_group(numbers);
        let (mut codes, mut heads) = ([0; GROUP_NUMBERS], [0; 4]);
        let split = G::TY.parts().expect("groups can be taken apart; this is a bug").split;
        split(&block[..G::TY.row().block_bytes], &mut codes[..G::NUMBERS], &mut heads[..2 * G::HEADS]);
        (codes, heads)
    }

    /// Writes the heads of a group at position `at` of theirs (heads, 32).
    fn put_heads(heads: [u8; 4], at: usize, to: &mut [u8]) {
        for (head, to) in heads.as_chunks::<2>().0.iter().zip(to.chunks_exact_mut(HEAD)).take(G::HEADS) {
            let half = u16::from_le_bytes(*head).to_ne_bytes();
            to[2 * at..2 * at + 2].copy_from_slice(&half);
        }
    }

    /// The numbers that codes and heads stand for.
    fn decoded(codes: &[u8; GROUP_NUMBERS], heads: [u8; 4], out: &mut [f32]) {
        let (mut block, mut values) = ([0; GROUP_BYTES], [0.0; GROUP_NUMBERS]);
        let block = &mut block[..G::TY.row().block_bytes];
        let join = G::TY.parts().expect("groups can be taken apart; this is a bug").join;
        join(&codes[..G::NUMBERS], &heads[..2 * G::HEADS], block);
        G::TY.dequantize(block, &mut values[..G::NUMBERS]);
        out.copy_from_slice(&values[..out.len()]);
    }
}

impl<G: Group> Stored for Grouped<G> {
    type Unit = u8;
    const SUMMED: usize = if G::HEADS == 2 { G::NUMBERS } else { 0 };

    fn of(buf: &HostBuf) -> &[u8] {
        buf.bytes()
    }
    fn of_mut(buf: &mut HostBuf) -> &mut [u8] {
        buf.bytes_mut()
    }

    fn k_len(k_dim: usize) -> usize {
        BLOCK * Self::bytes(k_dim)
    }
    fn v_len(v_dim: usize) -> usize {
        BLOCK * Self::bytes(v_dim.next_multiple_of(G::PADDED))
    }

    fn put_key(key: &[f32], at: usize, block: &mut [u8]) {
        let groups = block.chunks_mut(G::HEADS * HEAD + G::NUMBERS * G::BYTES);
        for (numbers, group) in key.chunks(G::NUMBERS).zip(groups) {
            let (codes, heads) = Self::coded(numbers);
            let (to, runs) = group.split_at_mut(G::HEADS * HEAD);
            Self::put_heads(heads, at, to);
            for (code, run) in codes[..numbers.len()].iter().zip(runs.chunks_exact_mut(G::BYTES)) {
                G::put(*code, at, run);
            }
        }
    }

    fn put_value(value: &[f32], at: usize, block: &mut [u8]) {
        let (heads_len, stride) = Self::v_parts(value.len());
        let (all_heads, codes) = block.split_at_mut(heads_len);
        let runs = &mut codes[at * stride..][..stride];
        let groups = all_heads.chunks_exact_mut(G::HEADS * HEAD);
        for (g, (numbers, to)) in value.chunks(G::NUMBERS).zip(groups).enumerate() {
            let (codes, heads) = Self::coded(numbers);
            Self::put_heads(heads, at, to);
            for (d, code) in (g * G::NUMBERS..).zip(&codes[..numbers.len()]) {
                G::put(*code, d % RUN, &mut runs[d / RUN * G::BYTES..]);
            }
        }
    }

    fn value(block: &[u8], at: usize, out: &mut [f32]) {
        let (heads_len, stride) = Self::v_parts(out.len());
        let (all_heads, codes) = block.split_at(heads_len);
        let runs = &codes[at * stride..][..stride];
        let groups = all_heads.chunks_exact(G::HEADS * HEAD);
        for (g, (out, from)) in out.chunks_mut(G::NUMBERS).zip(groups).enumerate() {
            let (mut codes, mut heads) = ([0; GROUP_NUMBERS], [0; 4]);
            for (head, from) in heads.as_chunks_mut::<2>().0.iter_mut().zip(from.chunks_exact(HEAD)) {
                *head = u16::from_ne_bytes([from[2 * at], from[2 * at + 1]]).to_le_bytes();
            }
            for (d, code) in (g * G::NUMBERS..).zip(&mut codes[..out.len()]) {
                *code = G::get(&runs[d / RUN * G::BYTES..], d % RUN);
            }
            Self::decoded(&codes, heads, out);
        }
    }

    #[inline(always)]
    fn scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        sums: [&[f32]; T],
        k: &[u8],
    ) -> [[S::V; 2]; T] {
        let k_dim = q[0].len();
        let mut scores = [[simd.splat(0.0); 2]; T];
        let (mut group, mut rest) = (0, k);
        while group * G::NUMBERS < k_dim {
            let from = group * G::NUMBERS;
            let numbers = G::NUMBERS.min(k_dim - from);
            let (heads, behind) = rest.split_at(G::HEADS * HEAD);
            let (codes, behind) = behind.split_at(numbers * G::BYTES);
            let mut part = q;
            for q in &mut part {
                *q = &q[from..from + numbers];
            }
            let products = products::<S, G, T>(simd, part, codes);
            let step = load_step::<S, G>(simd, heads);
            for t in 0..T {
                scores[t][0] = simd.mul_add(products[t][0], step[0], scores[t][0]);
                scores[t][1] = simd.mul_add(products[t][1], step[1], scores[t][1]);
            }
            if G::HEADS == 2 {
                let least = load_head(simd, heads, 1);
                for t in 0..T {
                    let sum = simd.splat(sums[t][group]);
                    scores[t][0] = simd.mul_add(sum, least[0], scores[t][0]);
                    scores[t][1] = simd.mul_add(sum, least[1], scores[t][1]);
                }
            }
            (group, rest) = (group + 1, behind);
        }
        scores
    }

    #[inline(always)]
    fn add_values<S: Simd, const T: usize>(
        simd: S,
        seen: Seen,
        p: &[[f32; BLOCK]; T],
        v: &[u8],
        sums: &mut [f32],
    ) {
        let vectors = sums.len() / T / LANES;
        let (heads_len, stride) = Self::v_parts(vectors * LANES);
        let (heads, codes) = v.split_at(heads_len);
        for (group, heads) in heads.chunks_exact(G::HEADS * HEAD).enumerate() {
            let weights = weigh::<S, G, T>(simd, seen, p, heads);
            let mut at = group * (G::NUMBERS / LANES);
            let end = vectors.min(at + G::NUMBERS / LANES);
            while at + 2 <= end {
                at += add_columns::<S, G, T, 2>(simd, seen, &weights, (codes, stride), sums, at);
            }
            if at < end {
                add_columns::<S, G, T, 1>(simd, seen, &weights, (codes, stride), sums, at);
            }
        }
    }
}

/// The products of T parts of query vectors with a group's codes (numbers, 32).
#[inline(always)]
fn products<S: Simd, G: Group, const T: usize>(simd: S, q: [&[f32]; T], codes: &[u8]) -> [[S::V; 2]; T] {
    for q in q {
        assert!(q.len() * G::BYTES == codes.len(), "a query's part is as long as a key's");
    }
    let mut products = [[simd.splat(0.0); 2]; T];
    for (d, run) in codes.chunks_exact(G::BYTES).enumerate() {
        let k = G::load(simd, run);
        for t in 0..T {
            // SAFETY: q[t] has an element for each run.
            let q = simd.splat(unsafe { *q[t].get_unchecked(d) });
            products[t][0] = simd.mul_add(q, k[0], products[t][0]);
            products[t][1] = simd.mul_add(q, k[1], products[t][1]);
        }
    }
    products
}

/// What the values of a group are added with.
struct Weights<const T: usize> {
    /// Of each position's codes. Those that are not seen may be anything.
    codes: [[f32; BLOCK]; T],
    /// What all positions' least numbers come to.
    least: [f32; T],
}

#[inline(always)]
fn weigh<S: Simd, G: Group, const T: usize>(
    simd: S,
    seen: Seen,
    p: &[[f32; BLOCK]; T],
    heads: &[u8],
) -> Weights<T> {
    let mut weights = Weights { codes: [[0.0; BLOCK]; T], least: [0.0; T] };
    let step = load_step::<S, G>(simd, heads);
    for t in 0..T {
        let (p, _) = p[t].as_chunks::<LANES>();
        let (codes, _) = weights.codes[t].as_chunks_mut::<LANES>();
        let p = [simd.load(&p[0]), simd.load(&p[1])];
        simd.store(simd.mul(p[0], step[0]), &mut codes[0]);
        simd.store(simd.mul(p[1], step[1]), &mut codes[1]);
        if G::HEADS == 2 {
            let least = load_head(simd, heads, 1);
            let none = simd.splat(0.0);
            let [low, high] = seen.choose(simd, [simd.mul(p[0], least[0]), simd.mul(p[1], least[1])], none);
            weights.least[t] = simd.sum(simd.add(low, high));
        }
    }
    weights
}

/// The W vectors of columns from `at` on, which is even; gives W. Codes are (32, stride).
#[inline(always)]
fn add_columns<S: Simd, G: Group, const T: usize, const W: usize>(
    simd: S,
    seen: Seen,
    weights: &Weights<T>,
    (codes, stride): (&[u8], usize),
    sums: &mut [f32],
    at: usize,
) -> usize {
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let vectors = sums.len() / T;
    let Weights { codes: p, least } = weights;
    let mut totals = [[simd.splat(0.0); W]; T];
    for t in 0..T {
        for w in 0..W {
            totals[t][w] = simd.load(&sums[t * vectors + at + w]);
            if G::HEADS == 2 {
                totals[t][w] = simd.add(totals[t][w], simd.splat(least[t]));
            }
        }
    }
    for j in seen.from..seen.to {
        let run = &codes[j * stride + at / 2 * G::BYTES..];
        let mut values = [simd.splat(0.0); W];
        if W == 2 {
            [values[0], values[W - 1]] = G::load(simd, run);
        } else {
            values[0] = G::load_first(simd, run);
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
