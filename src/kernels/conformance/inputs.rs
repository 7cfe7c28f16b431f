//! Sizes, pseudo-random inputs, and comparisons that report what differs.

use super::Bounds;
use super::memo::QUANTIZED;
use super::rig::RowResults;
use mainstem_kernels::backend::{Fraction, StepLimits};
use mainstem_kernels::quant::QuantType;
pub(super) use mainstem_kernels::random::noise;
use mainstem_kernels::random::philox;
use std::fmt::Arguments;

pub(super) const WIDTHS: [usize; 7] = [1, 7, 16, 33, 64, 172, 300];
pub(super) const ROWS: [usize; 7] = [1, 2, 3, 5, 7, 17, 64];
pub(super) const HEAD_DIMS: [usize; 6] = [8, 10, 12, 64, 80, 128];
pub(super) const KV_HEADS: [usize; 3] = [1, 2, 3];
pub(super) const GROUPS: [usize; 3] = [1, 2, 8];
pub(super) const PAGE_POSITIONS: [usize; 3] = [32, 64, 128];
/// The sequence with a long encoder input, and the length of that input.
pub(super) const LONG_INPUT_SEQUENCE: u32 = 4;
pub(super) const LONG_INPUT_LEN: usize = 1100;
/// Pages in the pool of every test, including the null page.
pub(super) const POOL_PAGES: usize = 64;

/// Returns the limits of most tests.
pub(super) fn limits(page_positions: usize) -> StepLimits {
    StepLimits {
        slots: 8,
        rows: 320,
        batch_rows: usize::MAX,
        logit_rows: 8,
        positions: 512,
        encoder_positions: 128,
        page_positions,
        window: None,
        top_logprobs: 8,
        vocab: 57,
        hidden: 64,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    }
}

/// Returns the number of reserved tokens of a sequence.
pub(super) fn reserved(sequence: u32) -> usize {
    [100, 300, 150, 500][sequence as usize % 4]
}

/// Returns the length of the encoder input of a sequence.
pub(super) fn encoder_len(sequence: u32) -> usize {
    if sequence == LONG_INPUT_SEQUENCE { LONG_INPUT_LEN } else { [45, 70, 0, 33][sequence as usize % 4] }
}

/// Returns the token of a sequence at a position. It is less than the vocabulary of every test.
pub(super) fn token_at(sequence: u32, position: usize) -> u32 {
    philox([sequence, position as u32, 0, 0], [3, 0])[0] % 57
}

/// Returns logits that determine the sampled token.
pub(super) fn one_hot(token: u32, vocab: usize) -> impl Iterator<Item = f32> {
    (0..vocab as u32).map(move |id| if id == token { 5.0 } else { 0.0 })
}

/// Returns `n` pseudo-random numbers in [-factor, factor].
pub(super) fn scaled(tag: u32, n: usize, factor: f32) -> Vec<f32> {
    noise(tag, n).into_iter().map(|v| v * factor).collect()
}

/// Rounds a width up to whole blocks of the format.
pub(super) fn round_to_blocks(ty: QuantType, width: usize) -> usize {
    width.next_multiple_of(ty.row().block_elements)
}

/// Returns the test widths, rounded to whole blocks, without repeats.
pub(super) fn valid_widths(ty: QuantType) -> Vec<usize> {
    let mut widths = WIDTHS.map(|width| round_to_blocks(ty, width)).to_vec();
    widths.dedup();
    widths
}

/// Returns all pairs of test row counts and widths.
pub(super) fn sizes() -> impl Iterator<Item = (usize, usize)> {
    ROWS.into_iter().flat_map(|rows| WIDTHS.map(|width| (rows, width)))
}

/// Quantizes values, and memoizes the result. For a format that is only read, returns random blocks with
/// numbers no larger than the values.
pub(super) fn quantize_values(ty: QuantType, values: &[f32]) -> Vec<u8> {
    if !ty.is_blocked() {
        return quantize_uncached(ty, values);
    }
    let bits = values.iter().map(|value| value.to_bits()).collect();
    QUANTIZED.get((ty, bits), || quantize_uncached(ty, values)).to_vec()
}

/// Quantizes values.
fn quantize_uncached(ty: QuantType, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; ty.bytes(values.len()).expect("the suite's sizes are whole blocks")];
    match ty.row().quantize {
        Some(quantize) => quantize(values, &mut bytes),
        None => write_random_blocks(ty, &mut bytes),
    }
    bytes
}

/// Returns one format of each storage kind, without K-quants, which would make everything 256 wide. Tests
/// that do not concern the bytes of blocks use these.
pub fn few_types() -> impl Iterator<Item = QuantType> {
    use QuantType::*;
    [F32, F16, BF16, Q8_0, Q4_0, Q3H_B64T1].into_iter()
}

/// Returns the numbers of outputs to test a format with: fewer for formats that differ only in the
/// dequantization of blocks.
pub(super) fn output_counts(ty: QuantType) -> &'static [usize] {
    if few_types().any(|other| other == ty) { &WIDTHS } else { &[7, 172] }
}

/// Writes pseudo-random blocks whose scale keeps numbers below 1.
fn write_random_blocks(ty: QuantType, bytes: &mut [u8]) {
    const SMALL: [u8; 2] = [0, 0x10];
    let words = (0..bytes.len().div_ceil(4) as u32).flat_map(|i| philox([i, 7, 0, 0], [4, ty as u32]));
    bytes.iter_mut().zip(words).for_each(|(byte, word)| *byte = word as u8);
    for block in bytes.chunks_exact_mut(ty.row().block_bytes) {
        match ty {
            QuantType::IQ4_NL | QuantType::IQ4_XS => block[..2].copy_from_slice(&SMALL),
            QuantType::TQ1_0 => block[52..].copy_from_slice(&SMALL),
            QuantType::TQ2_0 => block[64..].copy_from_slice(&SMALL),
            QuantType::MXFP4 => block[0] = 120,
            _ => unreachable!("{ty} can be quantized; this is a bug"),
        }
    }
}

/// Asserts that each element differs from the reference by at most `bound` times its magnitude.
pub(super) fn assert_close(
    what: Arguments,
    got: &[f32],
    want: &[f32],
    bound: f32,
    magnitude: impl Fn(usize) -> f32,
) {
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let allowed = bound * magnitude(i) + f32::MIN_POSITIVE;
        let ok = (got - want).abs() <= allowed;
        assert!(ok, "{what}: element {i}: got {got}, oracle {want}, allowed difference {allowed}");
    }
}

/// Asserts equal bits, or, if `bound` is positive, a difference of at most `bound` times the largest element.
pub(super) fn assert_same(what: Arguments, got: &[f32], want: &[f32], bound: f32) {
    if bound > 0.0 {
        let largest = want.iter().fold(0f32, |largest, v| largest.max(v.abs()));
        return assert_close(what, got, want, bound, |_| largest);
    }
    assert_eq!(got.len(), want.len(), "{what}: number of elements");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(got.to_bits() == want.to_bits(), "{what}: element {i}: got {got:e}, expected {want:e}");
    }
}

/// Asserts that all rows of `got` equal those of `want`, within the bound of batch invariance.
pub(super) fn assert_same_rows(what: Arguments, got: &RowResults, want: &RowResults, bounds: &Bounds) {
    for ((sequence, position), got) in got {
        let what = format_args!("{what}, sequence {sequence}, position {position}");
        assert_same(what, got, &want[&(*sequence, *position)], bounds.batch_invariance);
    }
}
