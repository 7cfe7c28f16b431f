//! K-quants of ggml: superblocks of 256 elements with one or two F16 scales. Runs of 16 or 32 elements within
//! a superblock have small integer scales of their own.
//!
//! | format | run | value of quant q | bytes |
//! |---|---|---|---|
//! | Q2_K | 16 | d * s * q - m * t, 2-bit q, 4-bit s and t | s and t, quants, d, m |
//! | Q3_K | 16 | d * s * q, signed 3-bit q, signed 6-bit s | high bits, quants, s, d |
//! | Q4_K | 32 | d * s * q - m * t, 4-bit q, 6-bit s and t | d, m, s and t, quants |
//! | Q5_K | 32 | d * s * q - m * t, 5-bit q, 6-bit s and t | d, m, s and t, high bits, quants |
//! | Q6_K | 16 | d * s * q, signed 6-bit q, signed 8-bit s | quants, high bits, s, d |
//!
//! Here s is the scale and t the minimum of a run; d and m (`dmin` in ggml) are F16. The layouts are ggml's,
//! the search for scales and quants is not: see [`super::scale_search`].
//!
//! Invariant: dequantization follows ggml's order of operations, so that the values agree bit for bit.

use super::scale_search::{self, AffineFit, ErrorWeights, SymmetricFit};
use super::{clamp_to_f16, read_f16, write_f16};

/// Elements of a superblock.
pub const SUPERBLOCK_LEN: usize = 256;

/// Bytes of a superblock of Q2_K.
pub const Q2_K_BYTES: usize = 84;
/// Bytes of a superblock of Q3_K.
pub const Q3_K_BYTES: usize = 110;
/// Bytes of a superblock of Q4_K.
pub const Q4_K_BYTES: usize = 144;
/// Bytes of a superblock of Q5_K.
pub const Q5_K_BYTES: usize = 176;
/// Bytes of a superblock of Q6_K.
pub const Q6_K_BYTES: usize = 210;

/// Returns the byte and the shift of the field of element `e`, with `bits` bits per field. Consecutive groups
/// of 32 elements use higher bits of the same 32 bytes.
fn field_position(e: usize, bits: usize) -> (usize, usize) {
    let (group, within) = (8 / bits * 32, e % 32);
    (e / group * 32 + within, e % group / 32 * bits)
}

/// Reads the field of element `e`.
fn read_field(bytes: &[u8], e: usize, bits: usize) -> u8 {
    let (byte, shift) = field_position(e, bits);
    bytes[byte] >> shift & ((1 << bits) - 1)
}

/// Writes the field of element `e` to zeroed bytes.
fn write_field(bytes: &mut [u8], e: usize, bits: usize, quant: u8) {
    let (byte, shift) = field_position(e, bits);
    bytes[byte] |= (quant & ((1 << bits) - 1)) << shift;
}

/// Returns the byte and the shift of the low bits of element `e` of Q6_K. Consecutive groups of 64 elements
/// use higher bits of the same 64 bytes.
fn q6_k_position(e: usize) -> (usize, usize) {
    (e / 128 * 64 + e % 64, e % 128 / 64 * 4)
}

/// Reads the scale and the minimum of a run of Q4_K or Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes.
fn read_scale_and_min(bytes: &[u8], run: usize) -> (u8, u8) {
    match run.checked_sub(4) {
        None => (bytes[run] & 63, bytes[4 + run] & 63),
        Some(j) => {
            let upper = |at: usize| bytes[at] >> 6 << 4;
            (bytes[8 + j] & 15 | upper(j), bytes[8 + j] >> 4 | upper(4 + j))
        }
    }
}

/// Writes the scale and the minimum of a run of Q4_K or Q5_K to zeroed bytes.
fn write_scale_and_min(bytes: &mut [u8], run: usize, scale: u8, minimum: u8) {
    match run.checked_sub(4) {
        None => {
            bytes[run] |= scale;
            bytes[4 + run] |= minimum;
        }
        Some(j) => {
            bytes[8 + j] = scale & 15 | minimum << 4;
            bytes[j] |= scale >> 4 << 6;
            bytes[4 + j] |= minimum >> 4 << 6;
        }
    }
}

/// Reads the scale of a run of Q3_K: 16 scales of 6 bits in 12 bytes, with an offset of 32.
fn read_q3_k_scale(bytes: &[u8], run: usize) -> i8 {
    let low = bytes[run % 8] >> (run / 8 * 4) & 15;
    let high = bytes[8 + run % 4] >> (run / 4 * 2) & 3;
    (low | high << 4) as i8 - 32
}

/// Writes the scale of a run of Q3_K to zeroed bytes.
fn write_q3_k_scale(bytes: &mut [u8], run: usize, scale: i8) {
    let scale = (scale + 32) as u8;
    bytes[run % 8] |= (scale & 15) << (run / 8 * 4);
    bytes[8 + run % 4] |= (scale >> 4) << (run / 4 * 2);
}

/// Pairs superblocks with the slices of `out` for their elements.
fn zip_superblocks<'a>(
    bytes: &'a [u8],
    len: usize,
    out: &'a mut [f32],
) -> impl Iterator<Item = (&'a [u8], &'a mut [f32])> {
    let (from, to) = (bytes.chunks_exact(len), out.chunks_exact_mut(SUPERBLOCK_LEN));
    assert!(from.remainder().is_empty() && from.len() == to.len(), "whole superblocks");
    from.zip(to)
}

pub(super) fn dequantize_q2_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_superblocks(bytes, Q2_K_BYTES, out) {
        let (scales, quants, d, m) = (&block[..16], &block[16..80], read_f16(block, 80), read_f16(block, 82));
        for (e, value) in out.iter_mut().enumerate() {
            let both = scales[e / 16];
            let (scale, minimum) = (d * f32::from(both & 15), m * f32::from(both >> 4));
            *value = scale * f32::from(read_field(quants, e, 2)) - minimum;
        }
    }
}

pub(super) fn dequantize_q3_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_superblocks(bytes, Q3_K_BYTES, out) {
        let (upper, quants, scales, d) =
            (&block[..32], &block[32..96], &block[96..108], read_f16(block, 108));
        for (e, value) in out.iter_mut().enumerate() {
            let scale = d * f32::from(read_q3_k_scale(scales, e / 16));
            let quant = read_field(quants, e, 2) as i8 - if read_field(upper, e, 1) == 0 { 4 } else { 0 };
            *value = scale * f32::from(quant);
        }
    }
}

pub(super) fn dequantize_q4_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_superblocks(bytes, Q4_K_BYTES, out) {
        let (d, m, scales, quants) = (read_f16(block, 0), read_f16(block, 2), &block[4..16], &block[16..]);
        for (e, value) in out.iter_mut().enumerate() {
            let (scale, minimum) = read_scale_and_min(scales, e / 32);
            *value = d * f32::from(scale) * f32::from(read_field(quants, e, 4)) - m * f32::from(minimum);
        }
    }
}

pub(super) fn dequantize_q5_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_superblocks(bytes, Q5_K_BYTES, out) {
        let (d, m, scales) = (read_f16(block, 0), read_f16(block, 2), &block[4..16]);
        let (upper, quants) = block[16..].split_at(32);
        for (e, value) in out.iter_mut().enumerate() {
            let (scale, minimum) = read_scale_and_min(scales, e / 32);
            let quant = read_field(quants, e, 4) | read_field(upper, e, 1) << 4;
            *value = d * f32::from(scale) * f32::from(quant) - m * f32::from(minimum);
        }
    }
}

pub(super) fn dequantize_q6_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_superblocks(bytes, Q6_K_BYTES, out) {
        let (lower, upper, scales, d) =
            (&block[..128], &block[128..192], &block[192..208], read_f16(block, 208));
        for (e, value) in out.iter_mut().enumerate() {
            let (byte, shift) = q6_k_position(e);
            let quant = (lower[byte] >> shift & 15 | read_field(upper, e, 2) << 4) as i8 - 32;
            *value = d * f32::from(scales[e / 16] as i8) * f32::from(quant);
        }
    }
}

/// Splits a block of Q4_K or Q5_K: d, m and the 12 bytes of scales and minima are the parameters.
pub(super) fn split_q4_k<const BITS: usize>(block: &[u8], quants: &mut [u8], params: &mut [u8]) {
    params.copy_from_slice(&block[..16]);
    let (upper, lower) = block[16..].split_at(if BITS == 5 { 32 } else { 0 });
    for (e, quant) in quants.iter_mut().enumerate() {
        *quant = read_field(lower, e, 4) | if BITS == 5 { read_field(upper, e, 1) << 4 } else { 0 };
    }
}

/// Joins a block of Q4_K or Q5_K.
pub(super) fn join_q4_k<const BITS: usize>(quants: &[u8], params: &[u8], block: &mut [u8]) {
    block.fill(0);
    block[..16].copy_from_slice(params);
    let (upper, lower) = block[16..].split_at_mut(if BITS == 5 { 32 } else { 0 });
    for (e, quant) in quants.iter().enumerate() {
        write_field(lower, e, 4, *quant);
        if BITS == 5 {
            write_field(upper, e, 1, quant >> 4);
        }
    }
}

/// Splits a block of Q6_K: the scales and d are the parameters. An unsigned quant is the signed one plus 32.
pub(super) fn split_q6_k(block: &[u8], quants: &mut [u8], params: &mut [u8]) {
    params.copy_from_slice(&block[192..]);
    for (e, quant) in quants.iter_mut().enumerate() {
        let (byte, shift) = q6_k_position(e);
        *quant = block[byte] >> shift & 15 | read_field(&block[128..192], e, 2) << 4;
    }
}

/// Joins a block of Q6_K.
pub(super) fn join_q6_k(quants: &[u8], params: &[u8], block: &mut [u8]) {
    block[..192].fill(0);
    block[192..].copy_from_slice(params);
    for (e, quant) in quants.iter().enumerate() {
        let (byte, shift) = q6_k_position(e);
        block[byte] |= (quant & 15) << shift;
        write_field(&mut block[128..192], e, 2, quant >> 4);
    }
}

/// Pairs the elements of each superblock, clamped to the range of F16, with zeroed bytes for them.
fn prepare_superblocks<'a>(
    values: &'a [f32],
    len: usize,
    out: &'a mut [u8],
) -> impl Iterator<Item = ([f32; SUPERBLOCK_LEN], &'a mut [u8])> {
    let (from, to) = (values.chunks_exact(SUPERBLOCK_LEN), out.chunks_exact_mut(len));
    assert!(from.remainder().is_empty() && from.len() == to.len(), "whole superblocks");
    from.zip(to).map(|(values, to)| {
        let mut numbers = [0f32; SUPERBLOCK_LEN];
        for (number, value) in numbers.iter_mut().zip(values) {
            *number = clamp_to_f16(*value);
        }
        to.fill(0);
        (numbers, to)
    })
}

/// Rounded scales and minima of all runs: the two F16 factors and the integers of each run.
struct ScalesAndMins<const RUNS: usize> {
    d: f32,
    m: f32,
    runs: [(u8, u8); RUNS],
}

impl<const RUNS: usize> ScalesAndMins<RUNS> {
    /// Finds the best pair for each run. Quants are at most `quant_max`, scales and minima at most
    /// `scale_max`.
    fn fit(
        numbers: &[f32; SUPERBLOCK_LEN],
        by: ErrorWeights,
        quant_max: u8,
        scale_max: u8,
    ) -> ScalesAndMins<RUNS> {
        let runs: [AffineFit; RUNS] = std::array::from_fn(|run| {
            let (first, len) = (run * SUPERBLOCK_LEN / RUNS, SUPERBLOCK_LEN / RUNS);
            scale_search::fit_affine(&numbers[first..][..len], by.slice(first, len), quant_max)
        });
        let largest = |of: fn(&AffineFit) -> f32| runs.iter().map(of).fold(0f32, f32::max);
        let d = scale_search::round_to_f16(largest(|run| run.scale) / f32::from(scale_max));
        let m = scale_search::round_to_f16(largest(|run| run.offset) / f32::from(scale_max));
        let rounded = |value: f32, unit: f32| scale_search::nearest_quant(value, unit, scale_max);
        ScalesAndMins { d, m, runs: runs.map(|run| (rounded(run.scale, d), rounded(run.offset, m))) }
    }

    /// Returns the quant of a number in a run.
    fn quant(&self, run: usize, number: f32, quant_max: u8) -> u8 {
        let (scale, minimum) = self.runs[run];
        scale_search::nearest_quant(
            number + self.m * f32::from(minimum),
            self.d * f32::from(scale),
            quant_max,
        )
    }
}

/// Rounded scales of all runs: the F16 factor and the integer of each run.
struct RunScales {
    d: f32,
    runs: [i8; 16],
}

impl RunScales {
    /// Finds the best scale for each run. Quants are in `-quant_range..quant_range`, scales in
    /// `-scale_range..scale_range`.
    fn fit(
        numbers: &[f32; SUPERBLOCK_LEN],
        by: ErrorWeights,
        quant_range: i32,
        scale_range: i32,
    ) -> RunScales {
        let runs: [SymmetricFit; 16] = std::array::from_fn(|run| {
            scale_search::fit_symmetric(&numbers[run * 16..][..16], by.slice(run * 16, 16), quant_range)
        });
        let larger = |extreme: f32, run: &SymmetricFit| {
            if extreme.abs() < run.scale.abs() { run.scale } else { extreme }
        };
        let d = scale_search::round_to_f16(runs.iter().fold(0.0, larger) / -scale_range as f32);
        RunScales {
            d,
            runs: runs.map(|run| scale_search::nearest_signed_quant(run.scale, d, scale_range) as i8),
        }
    }

    /// Returns the unsigned quant of a number in a run: the signed one plus `quant_range`.
    fn quant(&self, run: usize, number: f32, quant_range: i32) -> u8 {
        (scale_search::nearest_signed_quant(number, self.d * f32::from(self.runs[run]), quant_range)
            + quant_range) as u8
    }
}

pub(super) fn quantize_q2_k(values: &[f32], out: &mut [u8]) {
    write_q2_k(values, ErrorWeights::Magnitude, out);
}

pub(super) fn fit_q2_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q2_k(values, ErrorWeights::Given(weights), out);
}

fn write_q2_k(values: &[f32], by: ErrorWeights, out: &mut [u8]) {
    for (numbers, to) in prepare_superblocks(values, Q2_K_BYTES, out) {
        let pairs = ScalesAndMins::<16>::fit(&numbers, by, 3, 15);
        for (at, (scale, minimum)) in pairs.runs.iter().enumerate() {
            to[at] = scale | minimum << 4;
        }
        for (e, number) in numbers.iter().enumerate() {
            write_field(&mut to[16..80], e, 2, pairs.quant(e / 16, *number, 3));
        }
        write_f16(to, 80, pairs.d);
        write_f16(to, 82, pairs.m);
    }
}

pub(super) fn quantize_q3_k(values: &[f32], out: &mut [u8]) {
    write_q3_k(values, ErrorWeights::Magnitude, out);
}

pub(super) fn fit_q3_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q3_k(values, ErrorWeights::Given(weights), out);
}

fn write_q3_k(values: &[f32], by: ErrorWeights, out: &mut [u8]) {
    for (numbers, to) in prepare_superblocks(values, Q3_K_BYTES, out) {
        let scales = RunScales::fit(&numbers, by, 4, 32);
        for (e, number) in numbers.iter().enumerate() {
            let quant = scales.quant(e / 16, *number, 4);
            write_field(&mut to[..32], e, 1, quant >> 2);
            write_field(&mut to[32..96], e, 2, quant);
        }
        for (run, scale) in scales.runs.iter().enumerate() {
            write_q3_k_scale(&mut to[96..108], run, *scale);
        }
        write_f16(to, 108, scales.d);
    }
}

/// Writes the F16 factors, scales and minima of Q4_K and Q5_K.
fn write_scales_and_mins(to: &mut [u8], pairs: &ScalesAndMins<8>) {
    write_f16(to, 0, pairs.d);
    write_f16(to, 2, pairs.m);
    for (run, (scale, minimum)) in pairs.runs.iter().enumerate() {
        write_scale_and_min(&mut to[4..16], run, *scale, *minimum);
    }
}

pub(super) fn quantize_q4_k(values: &[f32], out: &mut [u8]) {
    write_q4_k(values, ErrorWeights::Magnitude, out);
}

pub(super) fn fit_q4_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q4_k(values, ErrorWeights::Given(weights), out);
}

fn write_q4_k(values: &[f32], by: ErrorWeights, out: &mut [u8]) {
    for (numbers, to) in prepare_superblocks(values, Q4_K_BYTES, out) {
        let pairs = ScalesAndMins::<8>::fit(&numbers, by, 15, 63);
        write_scales_and_mins(to, &pairs);
        for (e, number) in numbers.iter().enumerate() {
            write_field(&mut to[16..], e, 4, pairs.quant(e / 32, *number, 15));
        }
    }
}

pub(super) fn quantize_q5_k(values: &[f32], out: &mut [u8]) {
    write_q5_k(values, ErrorWeights::Magnitude, out);
}

pub(super) fn fit_q5_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q5_k(values, ErrorWeights::Given(weights), out);
}

fn write_q5_k(values: &[f32], by: ErrorWeights, out: &mut [u8]) {
    for (numbers, to) in prepare_superblocks(values, Q5_K_BYTES, out) {
        let pairs = ScalesAndMins::<8>::fit(&numbers, by, 31, 63);
        write_scales_and_mins(to, &pairs);
        let (upper, quants) = to[16..].split_at_mut(32);
        for (e, number) in numbers.iter().enumerate() {
            let quant = pairs.quant(e / 32, *number, 31);
            write_field(upper, e, 1, quant >> 4);
            write_field(quants, e, 4, quant);
        }
    }
}

pub(super) fn quantize_q6_k(values: &[f32], out: &mut [u8]) {
    write_q6_k(values, ErrorWeights::Magnitude, out);
}

pub(super) fn fit_q6_k(values: &[f32], weights: &[f32], out: &mut [u8]) {
    write_q6_k(values, ErrorWeights::Given(weights), out);
}

fn write_q6_k(values: &[f32], by: ErrorWeights, out: &mut [u8]) {
    for (numbers, to) in prepare_superblocks(values, Q6_K_BYTES, out) {
        let scales = RunScales::fit(&numbers, by, 32, 128);
        for (e, number) in numbers.iter().enumerate() {
            let quant = scales.quant(e / 16, *number, 32);
            let (byte, shift) = q6_k_position(e);
            to[byte] |= (quant & 15) << shift;
            write_field(&mut to[128..192], e, 2, quant >> 4);
        }
        for (to, scale) in to[192..208].iter_mut().zip(scales.runs) {
            *to = scale as u8;
        }
        write_f16(to, 208, scales.d);
    }
}
