//! Splits numbers into pairs of BF16. The first half of an F32 number is the nearest BF16, ties to even, and
//! that of an F16 number its upper bits, which takes fewer instructions.
//!
//! Invariant: the pair of an F16 number is exact. Numbers below 2^-126, which F16 does not have, become zero.

#[cfg(target_arch = "x86_64")]
use crate::cpu::bf16::{BLOCK_BYTES, PANEL_BLOCK_BYTES};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Numbers that are split at once: the columns of a block.
pub const NUMBERS: usize = 32;

/// Prefetch distance in bytes of weights.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 4096;

/// Splits whole blocks of a panel: each into the first halves of all pairs, and the rests.
///
/// # Safety
/// * The CPU has AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
pub unsafe fn split_panel(from: &[u8], to: &mut [u8]) {
    assert!(to.len() >= 2 * from.len() && from.len().is_multiple_of(PANEL_BLOCK_BYTES));
    for (from, to) in from.chunks_exact(PANEL_BLOCK_BYTES).zip(to.chunks_exact_mut(2 * PANEL_BLOCK_BYTES)) {
        let (first, rest) = to.split_at_mut(PANEL_BLOCK_BYTES);
        let halves = first.chunks_exact_mut(BLOCK_BYTES).zip(rest.chunks_exact_mut(BLOCK_BYTES));
        for (from, (first, rest)) in from.chunks_exact(BLOCK_BYTES).zip(halves) {
            crate::cpu::simd::prefetch_l2(from.as_ptr().wrapping_add(PREFETCH_BYTES));
            // SAFETY: all have 64 bytes.
            unsafe { split_f16(from.as_ptr(), first.as_mut_ptr(), rest.as_mut_ptr()) };
        }
    }
}

/// Splits the numbers of 16 outputs in two columns, 2 x 16 F16 at `from`, into their upper bits as BF16, at
/// `first`, and the rests. Both are pairs of the columns for each output.
///
/// # Safety
/// * The CPU has AVX-512.
/// * 64 bytes can be read and written at the addresses.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn split_f16(from: *const u8, first: *mut u8, rest: *mut u8) {
    // SAFETY: the caller's promise, here and below.
    let [even, odd] = unsafe { widen_f16(from) };
    let uppers = [upper(even), upper(odd)];
    let rests = [_mm512_sub_ps(even, uppers[0]), _mm512_sub_ps(odd, uppers[1])];
    unsafe {
        _mm512_storeu_si512(first.cast(), pairs_of(uppers));
        _mm512_storeu_si512(rest.cast(), pairs_of(rests));
    }
}

/// Returns pairs of BF16, given as numbers whose lower bits are zero.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
fn pairs_of([even, odd]: [__m512; 2]) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<16>(_mm512_castps_si512(even)), _mm512_castps_si512(odd))
}

/// Returns 2 x 16 F16 numbers as F32.
///
/// # Safety
/// * The CPU has AVX-512.
/// * 64 bytes can be read at `from`.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub unsafe fn widen_f16(from: *const u8) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    let halves = unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(32).cast())] };
    [_mm512_cvtph_ps(halves[0]), _mm512_cvtph_ps(halves[1])]
}

/// Returns the upper 16 bits of numbers: BF16 numbers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub fn upper(numbers: __m512) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(numbers), _mm512_set1_epi32(-0x1_0000)))
}

/// Splits 32 F32 numbers at `from` into the two halves of pairs, at `first` and `rest`.
///
/// # Safety
/// * The CPU has AVX-512 with BF16.
/// * 128 bytes can be read at `from`, and 64 written at the others.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[inline]
pub unsafe fn split_f32(from: *const f32, first: *mut u8, rest: *mut u8) {
    // SAFETY: the caller's promise, here and below.
    let (low, high) = unsafe { (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16))) };
    // SAFETY: both types are 64 bytes, and any bytes are valid.
    let bytes = |halves: __m512bh| unsafe { std::mem::transmute::<__m512bh, __m512i>(halves) };
    let nearest = bytes(_mm512_cvtne2ps_pbh(high, low));
    let widen = |halves| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)));
    let low = _mm512_sub_ps(low, widen(_mm512_castsi512_si256(nearest)));
    let high = _mm512_sub_ps(high, widen(_mm512_extracti64x4_epi64::<1>(nearest)));
    unsafe {
        _mm512_storeu_si512(first.cast(), nearest);
        _mm512_storeu_si512(rest.cast(), bytes(_mm512_cvtne2ps_pbh(high, low)));
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use half::{bf16, f16};

    fn pairs(split: impl Fn(*mut u8, *mut u8)) -> Vec<(f32, f32)> {
        let (mut first, mut rest) = ([0u8; 64], [0u8; 64]);
        split(first.as_mut_ptr(), rest.as_mut_ptr());
        let number = |bytes: &[u8; 2]| bf16::from_le_bytes(*bytes).to_f32();
        first.as_chunks().0.iter().map(number).zip(rest.as_chunks().0.iter().map(number)).collect()
    }

    #[test]
    fn every_f16_number_is_the_sum_of_its_pair() {
        if !is_x86_feature_detected!("avx512bf16") {
            return;
        }
        let finite: Vec<u16> = (0..=u16::MAX).filter(|bits| f16::from_bits(*bits).is_finite()).collect();
        for bits in finite.chunks(NUMBERS) {
            let from: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).chain([0; 64]).collect();
            // SAFETY: the CPU has the instructions, and the buffers are large enough.
            let pairs = pairs(|first, rest| unsafe { split_f16(from.as_ptr(), first, rest) });
            for (i, bits) in bits.iter().enumerate() {
                // The pairs are of outputs.
                let at = i % 16 * 2 + i / 16;
                assert_eq!(pairs[at].0 + pairs[at].1, f16::from_bits(*bits).to_f32(), "{bits:#x}");
            }
        }
    }

    #[test]
    fn an_f32_number_is_near_the_sum_of_its_pair() {
        if !is_x86_feature_detected!("avx512bf16") {
            return;
        }
        let numbers: Vec<f32> =
            (0..4096).map(|i| (i as f32 * 0.731).sin() * 2f32.powi(i % 60 - 30)).collect();
        for from in numbers.chunks(NUMBERS) {
            // SAFETY: the CPU has the instructions, and the buffers are large enough.
            let pairs = pairs(|first, rest| unsafe { split_f32(from.as_ptr(), first, rest) });
            for (x, (first, rest)) in from.iter().zip(pairs) {
                assert_eq!(first, bf16::from_f32(*x).to_f32());
                assert!((x - first - rest).abs() <= x.abs() * 2f32.powi(-16), "{x}: {first} and {rest}");
            }
        }
    }
}
