//! Quantized cache blocks: 8-bit or 4-bit quants, with a scale, or a divisor and a minimum, for each group of
//! a position's numbers.
//!
//! K is (groups): each group holds its F16 parameters (parameters, 32) and then its quants (numbers, 32). V
//! holds its parameters (groups, parameters, 32) and then its quants (32, v_dim padded to 16; to 32 for 4-bit
//! quants). A K that has V in it is stored like V. So the scales of 32 positions are lanes of a vector in
//! both, and the scale multiplies a sum of products (K) or a weight (V) once for a whole group. The low
//! nibble of a byte comes 16 numbers before the high nibble.
//!
//! - score = Σ over groups of scale · (Σ over its numbers of q · quant) + minimum · (Σ of q), each sum in
//!   order; of a K that is stored like V, by lanes and then as a tree.
//! - out = Σ over positions of (p · scale) · quant, preceded, for each block of positions, by Σ of p ·
//!   minimum, summed by lanes and then as a tree.
//!
//! Invariant: the order of a sum depends only on dimensions and positions, and a position that is not visible
//! enters nothing.

use super::BLOCK;
use super::float_blocks::{load_blocks, split_rows};
use super::group_formats::{GroupFormat, RUN_LEN};
use super::kv_format::KvFormat;
use super::query::VisibleRange;
use crate::cpu::simd::{LANES, Simd};
use crate::host::HostBuf;
use crate::quant::{MAX_GROUP_BYTES, MAX_GROUP_LEN};
use std::marker::PhantomData;

/// Bytes of one F16 parameter for each position of a block.
const PARAM_BYTES: usize = 2 * BLOCK;

/// Reinterprets 32 bytes as the bits of sixteen F16 numbers.
#[inline(always)]
fn as_f16_bits(bytes: &[u8; 2 * LANES]) -> [u16; LANES] {
    // SAFETY: any two bytes are a valid number, and both arrays have the same size.
    unsafe { std::mem::transmute(*bytes) }
}

/// Loads parameter number `param` of 32 positions.
#[inline(always)]
fn load_param<S: Simd>(simd: S, params: &[u8], param: usize) -> [S::V; 2] {
    let both = params[param * PARAM_BYTES..].as_chunks::<{ 2 * LANES }>().0;
    [simd.load_f16(&as_f16_bits(&both[0])), simd.load_f16(&as_f16_bits(&both[1]))]
}

/// Loads the scales of 32 positions.
#[inline(always)]
fn load_scales<S: Simd, G: GroupFormat>(simd: S, params: &[u8]) -> [S::V; 2] {
    let param = load_param(simd, params, 0);
    [G::scale(simd, param[0]), G::scale(simd, param[1])]
}

/// The storage format of a cache quantized in groups of format `G`.
pub struct QuantizedBlocks<G>(PhantomData<G>);

impl<G: GroupFormat> QuantizedBlocks<G> {
    /// Returns the bytes of `numbers` consecutive numbers. The allocation of the cache has checked that they
    /// fit.
    fn stored_bytes(numbers: usize) -> usize {
        G::TY.run_bytes(numbers).expect("the cache fits memory; this is a bug")
    }

    /// Returns the bytes of V's parameters, and those of the quants of one position.
    #[inline(always)]
    fn v_lens(v_dim: usize) -> (usize, usize) {
        (
            v_dim.div_ceil(G::NUMBERS) * G::PARAMS * PARAM_BYTES,
            v_dim.next_multiple_of(G::PADDING) * G::BYTES / RUN_LEN,
        )
    }

    /// Quantizes a group; returns its quants and parameters.
    fn quantize(numbers: &[f32]) -> ([u8; MAX_GROUP_LEN], [u8; 4]) {
        let block = G::TY.quantize_group(numbers);
        let (mut quants, mut params) = ([0; MAX_GROUP_LEN], [0; 4]);
        let split = G::TY
            .block_split()
            .expect("the format can be split into quants and parameters; this is a bug")
            .split;
        split(&block[..G::TY.row().block_bytes], &mut quants[..G::NUMBERS], &mut params[..2 * G::PARAMS]);
        (quants, params)
    }

    /// Writes the parameters of a group for position `at` to (parameters, 32).
    fn write_params(params: [u8; 4], at: usize, to: &mut [u8]) {
        for (param, to) in
            params.as_chunks::<2>().0.iter().zip(to.chunks_exact_mut(PARAM_BYTES)).take(G::PARAMS)
        {
            let half = u16::from_le_bytes(*param).to_ne_bytes();
            to[2 * at..2 * at + 2].copy_from_slice(&half);
        }
    }

    /// Dequantizes a group, given its quants and parameters.
    fn dequantize(quants: &[u8; MAX_GROUP_LEN], params: [u8; 4], out: &mut [f32]) {
        let (mut block, mut values) = ([0; MAX_GROUP_BYTES], [0.0; MAX_GROUP_LEN]);
        let block = &mut block[..G::TY.row().block_bytes];
        let join = G::TY
            .block_split()
            .expect("the format can be split into quants and parameters; this is a bug")
            .join;
        join(&quants[..G::NUMBERS], &params[..2 * G::PARAMS], block);
        G::TY.dequantize(block, &mut values[..G::NUMBERS]);
        out.copy_from_slice(&values[..out.len()]);
    }
}

impl<G: GroupFormat> KvFormat for QuantizedBlocks<G> {
    type Unit = u8;
    const SUMMED_GROUP: usize = if G::PARAMS == 2 { G::NUMBERS } else { 0 };

    fn units(buf: &HostBuf) -> &[u8] {
        buf.bytes()
    }
    fn units_mut(buf: &mut HostBuf) -> &mut [u8] {
        buf.bytes_mut()
    }

    fn k_len(k_dim: usize) -> usize {
        BLOCK * Self::stored_bytes(k_dim)
    }
    fn v_len(v_dim: usize) -> usize {
        BLOCK * Self::stored_bytes(v_dim.next_multiple_of(G::PADDING))
    }
    fn v_parts(v_dim: usize) -> (usize, usize) {
        Self::v_lens(v_dim)
    }

    fn write_key(key: &[f32], at: usize, block: &mut [u8]) {
        let groups = block.chunks_mut(G::PARAMS * PARAM_BYTES + G::NUMBERS * G::BYTES);
        for (numbers, group) in key.chunks(G::NUMBERS).zip(groups) {
            let (quants, params) = Self::quantize(numbers);
            let (to, runs) = group.split_at_mut(G::PARAMS * PARAM_BYTES);
            Self::write_params(params, at, to);
            for (quant, run) in quants[..numbers.len()].iter().zip(runs.chunks_exact_mut(G::BYTES)) {
                G::write(*quant, at, run);
            }
        }
    }

    fn write_value(value: &[f32], at: usize, block: &mut [u8]) {
        let (params_len, stride) = Self::v_lens(value.len());
        let (all_params, quants) = block.split_at_mut(params_len);
        let runs = &mut quants[at * stride..][..stride];
        let groups = all_params.chunks_exact_mut(G::PARAMS * PARAM_BYTES);
        for (g, (numbers, to)) in value.chunks(G::NUMBERS).zip(groups).enumerate() {
            let (quants, params) = Self::quantize(numbers);
            Self::write_params(params, at, to);
            for (d, quant) in (g * G::NUMBERS..).zip(&quants[..numbers.len()]) {
                G::write(*quant, d % RUN_LEN, &mut runs[d / RUN_LEN * G::BYTES..]);
            }
        }
    }

    fn read_value(block: &[u8], at: usize, width: usize, out: &mut [f32]) {
        let (params_len, stride) = Self::v_lens(width);
        let (all_params, quants) = block.split_at(params_len);
        let runs = &quants[at * stride..][..stride];
        let groups = all_params.chunks_exact(G::PARAMS * PARAM_BYTES);
        for (g, (out, from)) in out.chunks_mut(G::NUMBERS).zip(groups).enumerate() {
            let (mut quants, mut params) = ([0; MAX_GROUP_LEN], [0; 4]);
            for (param, from) in params.as_chunks_mut::<2>().0.iter_mut().zip(from.chunks_exact(PARAM_BYTES))
            {
                *param = u16::from_ne_bytes([from[2 * at], from[2 * at + 1]]).to_le_bytes();
            }
            for (d, quant) in (g * G::NUMBERS..).zip(&mut quants[..out.len()]) {
                *quant = G::read(&runs[d / RUN_LEN * G::BYTES..], d % RUN_LEN);
            }
            Self::dequantize(&quants, params, out);
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
            let (params, behind) = rest.split_at(G::PARAMS * PARAM_BYTES);
            let (quants, behind) = behind.split_at(numbers * G::BYTES);
            let mut part = q;
            for q in &mut part {
                *q = &q[from..from + numbers];
            }
            let products = dot_products::<S, G, T>(simd, part, quants);
            let step = load_scales::<S, G>(simd, params);
            for t in 0..T {
                scores[t][0] = simd.mul_add(products[t][0], step[0], scores[t][0]);
                scores[t][1] = simd.mul_add(products[t][1], step[1], scores[t][1]);
            }
            if G::PARAMS == 2 {
                let minimum = load_param(simd, params, 1);
                for t in 0..T {
                    let sum = simd.splat(sums[t][group]);
                    scores[t][0] = simd.mul_add(sum, minimum[0], scores[t][0]);
                    scores[t][1] = simd.mul_add(sum, minimum[1], scores[t][1]);
                }
            }
            (group, rest) = (group + 1, behind);
        }
        scores
    }

    #[inline(always)]
    fn row_scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        sums: [&[f32]; T],
        k: &[u8],
    ) -> [[S::V; 2]; T] {
        let (params_len, stride) = Self::v_lens(q[0].len());
        let (params, quants) = k.split_at(params_len);
        let q = split_rows(q);
        let mut scores = [[0.0; BLOCK]; T];
        let parts = params.chunks(SCORED_GROUPS * G::PARAMS * PARAM_BYTES);
        for (first, params) in (0..).step_by(SCORED_GROUPS).zip(parts) {
            add_row_scores::<S, G, T>(simd, &q, (first, params), (quants, stride), &mut scores);
        }
        let mut scores = load_blocks(simd, &scores);
        if G::PARAMS == 2 {
            for (group, params) in params.chunks_exact(G::PARAMS * PARAM_BYTES).enumerate() {
                let minimum = load_param(simd, params, 1);
                for t in 0..T {
                    let sum = simd.splat(sums[t][group]);
                    scores[t][0] = simd.mul_add(sum, minimum[0], scores[t][0]);
                    scores[t][1] = simd.mul_add(sum, minimum[1], scores[t][1]);
                }
            }
        }
        scores
    }

    #[inline(always)]
    fn add_values<S: Simd, const T: usize>(
        simd: S,
        seen: VisibleRange,
        p: &[[f32; BLOCK]; T],
        (v, width): (&[u8], usize),
        sums: &mut [f32],
    ) {
        let vectors = sums.len() / T / LANES;
        let (params_len, stride) = Self::v_lens(width);
        let (params, quants) = v.split_at(params_len);
        let params = params.chunks_exact(G::PARAMS * PARAM_BYTES);
        for (group, params) in params.take((vectors * LANES).div_ceil(G::NUMBERS)).enumerate() {
            let weights = group_weights::<S, G, T>(simd, seen, p, params);
            let mut at = group * (G::NUMBERS / LANES);
            let end = vectors.min(at + G::NUMBERS / LANES);
            while at + 2 <= end {
                at += add_columns::<S, G, T, 2>(simd, seen, &weights, (quants, stride), sums, at);
            }
            if at < end {
                add_columns::<S, G, T, 1>(simd, seen, &weights, (quants, stride), sums, at);
            }
        }
    }
}

/// Returns the dot products of a group's part of T query vectors with the group's quants (numbers, 32).
#[inline(always)]
fn dot_products<S: Simd, G: GroupFormat, const T: usize>(
    simd: S,
    q: [&[f32]; T],
    quants: &[u8],
) -> [[S::V; 2]; T] {
    for q in q {
        assert!(q.len() * G::BYTES == quants.len(), "the query's part has the length of the key's");
    }
    let mut products = [[simd.splat(0.0); 2]; T];
    for (d, run) in quants.chunks_exact(G::BYTES).enumerate() {
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

/// Groups of a row whose scales are loaded at once.
const SCORED_GROUPS: usize = 8;

/// Adds the dot products of T query vectors with up to [`SCORED_GROUPS`] groups of the rows of a block, from
/// group `first` on, to the scores, without minimums. The quants are (32, stride).
#[inline(always)]
fn add_row_scores<S: Simd, G: GroupFormat, const T: usize>(
    simd: S,
    (q, rest): &([&[[f32; LANES]]; T], [[f32; LANES]; T]),
    (first, params): (usize, &[u8]),
    (quants, stride): (&[u8], usize),
    scores: &mut [[f32; BLOCK]; T],
) {
    let mut scales = [[0.0; BLOCK]; SCORED_GROUPS];
    let groups = params.chunks_exact(G::PARAMS * PARAM_BYTES);
    for (scales, params) in scales.iter_mut().zip(groups) {
        let (halves, _) = scales.as_chunks_mut::<LANES>();
        let [low, high] = load_scales::<S, G>(simd, params);
        simd.store(low, &mut halves[0]);
        simd.store(high, &mut halves[1]);
    }
    let groups = params.len() / (G::PARAMS * PARAM_BYTES);
    let runs = G::NUMBERS / RUN_LEN;
    let vectors = q[0].len() + 1;
    for j in 0..BLOCK {
        let row = &quants[j * stride..][..stride];
        let mut sums = [simd.splat(0.0); T];
        for (group, scales) in scales[..groups].iter().enumerate() {
            let mut products = [simd.splat(0.0); T];
            for run in (first + group) * runs..(first + group + 1) * runs {
                if 2 * run >= vectors || run * G::BYTES >= stride {
                    break;
                }
                let whole = row.get(run * G::BYTES..(run + 1) * G::BYTES);
                let k = match whole {
                    Some(whole) => G::load(simd, whole),
                    None => [G::load_first(simd, &row[run * G::BYTES..]), simd.splat(0.0)],
                };
                for t in 0..T {
                    for (half, k) in k.into_iter().enumerate() {
                        let q = simd.load(q[t].get(2 * run + half).unwrap_or(match 2 * run + half {
                            at if at == q[t].len() => &rest[t],
                            _ => &[0.0; LANES],
                        }));
                        products[t] = simd.mul_add(q, k, products[t]);
                    }
                }
            }
            let scale = simd.splat(scales[j]);
            for t in 0..T {
                sums[t] = simd.mul_add(products[t], scale, sums[t]);
            }
        }
        for t in 0..T {
            scores[t][j] += simd.sum(sums[t]);
        }
    }
}

/// The weights that the values of a group are multiplied with.
struct GroupWeights<const T: usize> {
    /// Weight of the quants of each position; arbitrary for positions that are not visible.
    quants: [[f32; BLOCK]; T],
    /// Weighted sum of the minimums of all positions.
    minimum: [f32; T],
}

/// Computes the weights of a group from the softmax weights `p` and the parameters of the group.
#[inline(always)]
fn group_weights<S: Simd, G: GroupFormat, const T: usize>(
    simd: S,
    seen: VisibleRange,
    p: &[[f32; BLOCK]; T],
    params: &[u8],
) -> GroupWeights<T> {
    let mut weights = GroupWeights { quants: [[0.0; BLOCK]; T], minimum: [0.0; T] };
    let step = load_scales::<S, G>(simd, params);
    for t in 0..T {
        let (p, _) = p[t].as_chunks::<LANES>();
        let (quants, _) = weights.quants[t].as_chunks_mut::<LANES>();
        let p = [simd.load(&p[0]), simd.load(&p[1])];
        simd.store(simd.mul(p[0], step[0]), &mut quants[0]);
        simd.store(simd.mul(p[1], step[1]), &mut quants[1]);
        if G::PARAMS == 2 {
            let minimum = load_param(simd, params, 1);
            let none = simd.splat(0.0);
            let [low, high] =
                seen.select(simd, [simd.mul(p[0], minimum[0]), simd.mul(p[1], minimum[1])], none);
            weights.minimum[t] = simd.sum(simd.add(low, high));
        }
    }
    weights
}

/// Adds the weighted values to W vectors of columns, from vector `at` on, which is even; returns W. The
/// quants are (32, stride).
#[inline(always)]
fn add_columns<S: Simd, G: GroupFormat, const T: usize, const W: usize>(
    simd: S,
    seen: VisibleRange,
    weights: &GroupWeights<T>,
    (quants, stride): (&[u8], usize),
    sums: &mut [f32],
    at: usize,
) -> usize {
    let (sums, _) = sums.as_chunks_mut::<LANES>();
    let vectors = sums.len() / T;
    let GroupWeights { quants: p, minimum } = weights;
    let mut totals = [[simd.splat(0.0); W]; T];
    for t in 0..T {
        for w in 0..W {
            totals[t][w] = simd.load(&sums[t * vectors + at + w]);
            if G::PARAMS == 2 {
                totals[t][w] = simd.add(totals[t][w], simd.splat(minimum[t]));
            }
        }
    }
    for j in seen.from..seen.to {
        let run = &quants[j * stride + at / 2 * G::BYTES..];
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
