//! ggml's formats of superblocks: 256 numbers share one or two F16 scales, runs of 16 or 32 of them small scales of
//! their own.
//!
//! | format | run | value | bytes |
//! |---|---|---|---|
//! | Q2_K | 16 | d * s * code - m * t, codes of 2 bits, s and t of 4 | s and t, codes, d, m |
//! | Q3_K | 16 | d * s * code, codes of 3 bits with sign, s of 6 with sign | upper bits, codes, s, d |
//! | Q4_K | 32 | d * s * code - m * t, codes of 4 bits, s and t of 6 | d, m, s and t, codes |
//! | Q5_K | 32 | the same with codes of 5 bits | d, m, s and t, upper bits, codes |
//! | Q6_K | 16 | d * s * code, codes of 6 bits with sign, s of 8 with sign | codes, upper bits, s, d |
//!
//! The bytes are ggml's. Its search for scales and codes is not: [`super::search`] is ours.
//!
//! Invariant: reading follows ggml's order of operations, so that the values agree bit for bit.

use super::parts::Parts;
use super::search::{self, Affine, Symmetric, Weighing};
use super::{finite, half_at, put_half};

/// Numbers of a superblock.
pub const NUMBERS: usize = 256;

pub const Q2_K_BYTES: usize = 84;
pub const Q3_K_BYTES: usize = 110;
pub const Q4_K_BYTES: usize = 144;
pub const Q5_K_BYTES: usize = 176;
pub const Q6_K_BYTES: usize = 210;

/// Where number e's field of `bits` bits is, in a run of bytes that 32 numbers after 32 numbers go through: byte and shift.
fn place(e: usize, bits: usize) -> (usize, usize) {
    let (group, within) = (8 / bits * 32, e % 32);
    (e / group * 32 + within, e % group / 32 * bits)
}

fn field(bytes: &[u8], e: usize, bits: usize) -> u8 {
    let (byte, shift) = place(e, bits);
    bytes[byte] >> shift & ((1 << bits) - 1)
}

fn put_field(bytes: &mut [u8], e: usize, bits: usize, code: u8) {
    let (byte, shift) = place(e, bits);
    bytes[byte] |= (code & ((1 << bits) - 1)) << shift;
}

/// Fields of Q6_K's lower bits: 64 numbers after 64.
fn place_6(e: usize) -> (usize, usize) {
    (e / 128 * 64 + e % 64, e % 128 / 64 * 4)
}

/// The eight scales and eight minima of Q4_K and Q5_K, 6 bits each in 12 bytes.
fn scale_and_least(bytes: &[u8], run: usize) -> (u8, u8) {
    match run.checked_sub(4) {
        None => (bytes[run] & 63, bytes[4 + run] & 63),
        Some(j) => {
            let upper = |at: usize| bytes[at] >> 6 << 4;
            (bytes[8 + j] & 15 | upper(j), bytes[8 + j] >> 4 | upper(4 + j))
        }
    }
}

fn put_scale_and_least(bytes: &mut [u8], run: usize, scale: u8, least: u8) {
    match run.checked_sub(4) {
        None => {
            bytes[run] |= scale;
            bytes[4 + run] |= least;
        }
        Some(j) => {
            bytes[8 + j] = scale & 15 | least << 4;
            bytes[j] |= scale >> 4 << 6;
            bytes[4 + j] |= least >> 4 << 6;
        }
    }
}

/// The sixteen scales of Q3_K, 6 bits each in 12 bytes, 32 too large.
fn scale_3(bytes: &[u8], run: usize) -> i8 {
    let low = bytes[run % 8] >> (run / 8 * 4) & 15;
    let high = bytes[8 + run % 4] >> (run / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

fn put_scale_3(bytes: &mut [u8], run: usize, scale: i8) {
    let scale = (scale + 32) as u8;
    bytes[run % 8] |= (scale & 15) << (run / 8 * 4);
    bytes[8 + run % 4] |= (scale >> 4) << (run / 4 * 2);
}

/// Superblocks with their numbers.
fn blocks<'a>(
    bytes: &'a [u8],
    len: usize,
    out: &'a mut [f32],
) -> impl Iterator<Item = (&'a [u8], &'a mut [f32])> {
    let (from, to) = (bytes.chunks_exact(len), out.chunks_exact_mut(NUMBERS));
    assert!(from.remainder().is_empty() && from.len() == to.len(), "whole superblocks");
    from.zip(to)
}

pub(super) fn dequantize_q2_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, Q2_K_BYTES, out) {
        let (scales, codes, d, m) = (&block[..16], &block[16..80], half_at(block, 80), half_at(block, 82));
        for (e, value) in out.iter_mut().enumerate() {
            let both = scales[e / 16];
            let (scale, least) = (d * f32::from(both & 15), m * f32::from(both >> 4));
            *value = scale * f32::from(field(codes, e, 2)) - least;
        }
    }
}

pub(super) fn dequantize_q3_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, Q3_K_BYTES, out) {
        let (upper, codes, scales, d) = (&block[..32], &block[32..96], &block[96..108], half_at(block, 108));
        for (e, value) in out.iter_mut().enumerate() {
            let scale = d * f32::from(scale_3(scales, e / 16));
            let code = field(codes, e, 2) as i8 - if field(upper, e, 1) == 0 { 4 } else { 0 };
            *value = scale * f32::from(code);
        }
    }
}

pub(super) fn dequantize_q4_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, Q4_K_BYTES, out) {
        let (d, m, scales, codes) = (half_at(block, 0), half_at(block, 2), &block[4..16], &block[16..]);
        for (e, value) in out.iter_mut().enumerate() {
            let (scale, least) = scale_and_least(scales, e / 32);
            *value = d * f32::from(scale) * f32::from(field(codes, e, 4)) - m * f32::from(least);
        }
    }
}

pub(super) fn dequantize_q5_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, Q5_K_BYTES, out) {
        let (d, m, scales) = (half_at(block, 0), half_at(block, 2), &block[4..16]);
        let (upper, codes) = block[16..].split_at(32);
        for (e, value) in out.iter_mut().enumerate() {
            let (scale, least) = scale_and_least(scales, e / 32);
            let code = field(codes, e, 4) | field(upper, e, 1) << 4;
            *value = d * f32::from(scale) * f32::from(code) - m * f32::from(least);
        }
    }
}

pub(super) fn dequantize_q6_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, Q6_K_BYTES, out) {
        let (lower, upper, scales, d) =
            (&block[..128], &block[128..192], &block[192..208], half_at(block, 208));
        for (e, value) in out.iter_mut().enumerate() {
            let (byte, shift) = place_6(e);
            let code = (lower[byte] >> shift & 15 | field(upper, e, 2) << 4) as i8 - 32;
            *value = d * f32::from(scales[e / 16] as i8) * f32::from(code);
        }
    }
}

/// Of Q4_K and Q5_K: d, m and the twelve bytes of scales and minima are the head.
pub(super) fn parts_k<const BITS: usize>() -> Parts {
    Parts { head: 16, split: split_k::<BITS>, join: join_k::<BITS> }
}

fn split_k<const BITS: usize>(block: &[u8], codes: &mut [u8], head: &mut [u8]) {
    head.copy_from_slice(&block[..16]);
    let (upper, lower) = block[16..].split_at(if BITS == 5 { 32 } else { 0 });
    for (e, code) in codes.iter_mut().enumerate() {
        *code = field(lower, e, 4) | if BITS == 5 { field(upper, e, 1) << 4 } else { 0 };
    }
}

fn join_k<const BITS: usize>(codes: &[u8], head: &[u8], block: &mut [u8]) {
    block.fill(0);
    block[..16].copy_from_slice(head);
    let (upper, lower) = block[16..].split_at_mut(if BITS == 5 { 32 } else { 0 });
    for (e, code) in codes.iter().enumerate() {
        put_field(lower, e, 4, *code);
        if BITS == 5 {
            put_field(upper, e, 1, code >> 4);
        }
    }
}

/// Of Q6_K: the scales and d are the head; a code is 32 more than it says.
pub(super) const PARTS_6: Parts = Parts {
    head: 18,
    split: |block, codes, head| {
        head.copy_from_slice(&block[192..]);
        for (e, code) in codes.iter_mut().enumerate() {
            let (byte, shift) = place_6(e);
            *code = block[byte] >> shift & 15 | field(&block[128..192], e, 2) << 4;
        }
    },
    join: |codes, head, block| {
        block[..192].fill(0);
        block[192..].copy_from_slice(head);
        for (e, code) in codes.iter().enumerate() {
            let (byte, shift) = place_6(e);
            block[byte] |= (code & 15) << shift;
            put_field(&mut block[128..192], e, 2, code >> 4);
        }
    },
};

/// Numbers of a superblock as they can be stored, and where their bytes go, all zero.
fn prepared<'a>(
    values: &'a [f32],
    len: usize,
    out: &'a mut [u8],
) -> impl Iterator<Item = ([f32; NUMBERS], &'a mut [u8])> {
    let (from, to) = (values.chunks_exact(NUMBERS), out.chunks_exact_mut(len));
    assert!(from.remainder().is_empty() && from.len() == to.len(), "whole superblocks");
    from.zip(to).map(|(values, to)| {
        let mut numbers = [0f32; NUMBERS];
        for (number, value) in numbers.iter_mut().zip(values) {
            *number = finite(*value);
        }
        to.fill(0);
        (numbers, to)
    })
}

/// Scales and minima of all runs, rounded: the two F16 scales, and each run's pair.
struct Pairs<const RUNS: usize> {
    d: f32,
    m: f32,
    runs: [(u8, u8); RUNS],
}

impl<const RUNS: usize> Pairs<RUNS> {
    /// The best pair for each run, where codes go up to `codes` and scales and minima to `scales`.
    fn of(numbers: &[f32; NUMBERS], by: Weighing, codes: u8, scales: u8) -> Pairs<RUNS> {
        let runs: [Affine; RUNS] = std::array::from_fn(|run| {
            let (first, len) = (run * NUMBERS / RUNS, NUMBERS / RUNS);
            search::affine(&numbers[first..][..len], by.part(first, len), codes)
        });
        let largest = |of: fn(&Affine) -> f32| runs.iter().map(of).fold(0f32, f32::max);
        let d = search::halved(largest(|run| run.scale) / f32::from(scales));
        let m = search::halved(largest(|run| run.least) / f32::from(scales));
        let rounded = |value: f32, unit: f32| search::nearest(value, unit, scales);
        Pairs { d, m, runs: runs.map(|run| (rounded(run.scale, d), rounded(run.least, m))) }
    }

    /// The code of a number of that run.
    fn code(&self, run: usize, number: f32, codes: u8) -> u8 {
        let (scale, least) = self.runs[run];
        search::nearest(number + self.m * f32::from(least), self.d * f32::from(scale), codes)
    }
}

/// Scales of all runs, rounded: the F16 scale, and each run's.
struct Scales {
    d: f32,
    runs: [i8; 16],
}

impl Scales {
    /// The best scale for each run, where codes lie in `-codes..codes` and scales in `-scales..scales`.
    fn of(numbers: &[f32; NUMBERS], by: Weighing, codes: i32, scales: i32) -> Scales {
        let runs: [Symmetric; 16] = std::array::from_fn(|run| {
            search::symmetric(&numbers[run * 16..][..16], by.part(run * 16, 16), codes)
        });
        let further =
            |extreme: f32, run: &Symmetric| if extreme.abs() < run.scale.abs() { run.scale } else { extreme };
        let d = search::halved(runs.iter().fold(0.0, further) / -scales as f32);
        Scales { d, runs: runs.map(|run| search::nearest_signed(run.scale, d, scales) as i8) }
    }

    /// The code of a number of that run, without sign: `codes` too large.
    fn code(&self, run: usize, number: f32, codes: i32) -> u8 {
        (search::nearest_signed(number, self.d * f32::from(self.runs[run]), codes) + codes) as u8
    }
}

pub(super) fn quantize_q2_k(values: &[f32], out: &mut [u8]) {
    write_q2_k(values, Weighing::Magnitude, out);
}

pub(super) fn fit_q2_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q2_k(values, Weighing::Given(weights), out);
}

fn write_q2_k(values: &[f32], by: Weighing, out: &mut [u8]) {
    for (numbers, to) in prepared(values, Q2_K_BYTES, out) {
        let pairs = Pairs::<16>::of(&numbers, by, 3, 15);
        for (at, (scale, least)) in pairs.runs.iter().enumerate() {
            to[at] = scale | least << 4;
        }
        for (e, number) in numbers.iter().enumerate() {
            put_field(&mut to[16..80], e, 2, pairs.code(e / 16, *number, 3));
        }
        put_half(to, 80, pairs.d);
        put_half(to, 82, pairs.m);
    }
}

pub(super) fn quantize_q3_k(values: &[f32], out: &mut [u8]) {
    write_q3_k(values, Weighing::Magnitude, out);
}

pub(super) fn fit_q3_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q3_k(values, Weighing::Given(weights), out);
}

fn write_q3_k(values: &[f32], by: Weighing, out: &mut [u8]) {
    for (numbers, to) in prepared(values, Q3_K_BYTES, out) {
        let scales = Scales::of(&numbers, by, 4, 32);
        for (e, number) in numbers.iter().enumerate() {
            let code = scales.code(e / 16, *number, 4);
            put_field(&mut to[..32], e, 1, code >> 2);
            put_field(&mut to[32..96], e, 2, code);
        }
        for (run, scale) in scales.runs.iter().enumerate() {
            put_scale_3(&mut to[96..108], run, *scale);
        }
        put_half(to, 108, scales.d);
    }
}

/// Head and minima of Q4_K and Q5_K.
fn put_pairs(to: &mut [u8], pairs: &Pairs<8>) {
    put_half(to, 0, pairs.d);
    put_half(to, 2, pairs.m);
    for (run, (scale, least)) in pairs.runs.iter().enumerate() {
        put_scale_and_least(&mut to[4..16], run, *scale, *least);
    }
}

pub(super) fn quantize_q4_k(values: &[f32], out: &mut [u8]) {
    write_q4_k(values, Weighing::Magnitude, out);
}

pub(super) fn fit_q4_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q4_k(values, Weighing::Given(weights), out);
}

fn write_q4_k(values: &[f32], by: Weighing, out: &mut [u8]) {
    for (numbers, to) in prepared(values, Q4_K_BYTES, out) {
        let pairs = Pairs::<8>::of(&numbers, by, 15, 63);
        put_pairs(to, &pairs);
        for (e, number) in numbers.iter().enumerate() {
            put_field(&mut to[16..], e, 4, pairs.code(e / 32, *number, 15));
        }
    }
}

pub(super) fn quantize_q5_k(values: &[f32], out: &mut [u8]) {
    write_q5_k(values, Weighing::Magnitude, out);
}

pub(super) fn fit_q5_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q5_k(values, Weighing::Given(weights), out);
}

fn write_q5_k(values: &[f32], by: Weighing, out: &mut [u8]) {
    for (numbers, to) in prepared(values, Q5_K_BYTES, out) {
        let pairs = Pairs::<8>::of(&numbers, by, 31, 63);
        put_pairs(to, &pairs);
        let (upper, codes) = to[16..].split_at_mut(32);
        for (e, number) in numbers.iter().enumerate() {
            let code = pairs.code(e / 32, *number, 31);
            put_field(upper, e, 1, code >> 4);
            put_field(codes, e, 4, code);
        }
    }
}

pub(super) fn quantize_q6_k(values: &[f32], out: &mut [u8]) {
    write_q6_k(values, Weighing::Magnitude, out);
}

pub(super) fn fit_q6_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q6_k(values, Weighing::Given(weights), out);
}

fn write_q6_k(values: &[f32], by: Weighing, out: &mut [u8]) {
    for (numbers, to) in prepared(values, Q6_K_BYTES, out) {
        let scales = Scales::of(&numbers, by, 32, 128);
        for (e, number) in numbers.iter().enumerate() {
            let code = scales.code(e / 16, *number, 32);
            let (byte, shift) = place_6(e);
            to[byte] |= (code & 15) << shift;
            put_field(&mut to[128..192], e, 2, code >> 4);
        }
        for (to, scale) in to[192..208].iter_mut().zip(scales.runs) {
            *to = scale as u8;
        }
        put_half(to, 208, scales.d);
    }
}
