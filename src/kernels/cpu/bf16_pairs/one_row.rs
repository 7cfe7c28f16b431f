//! Products of a single row by AVX-512, in the order of AMX: for each block of 32 columns and each of the
//! three products of pairs, even and odd columns are summed separately, then together, then added to the
//! total.
//!
//! Invariant: a row has the bits that it has among others in a tile of AMX, but for sums below 2^-126, which
//! AMX treats as zero.

#![cfg(target_arch = "x86_64")]

use super::input::HALF_BYTES;
use super::split::{upper, widen_f16};
use crate::cpu::bf16::{BLOCK, BLOCK_BYTES, PANEL_BLOCK_BYTES, PANEL_OUTPUTS};
use std::arch::x86_64::*;

/// Prefetch distance in bytes of weights.
const PREFETCH_BYTES: usize = 4096;

/// Returns the sums of the products of a packed row of `blocks` blocks with O panels, given by address.
///
/// # Safety
/// * The CPU has AVX-512.
/// * So many blocks of the panels and of the row can be read.
#[target_feature(enable = "avx512f")]
pub unsafe fn multiply<const O: usize>(
    panels: [*const u8; O],
    row: *const u8,
    blocks: usize,
) -> [[f32; PANEL_OUTPUTS]; O] {
    let zero = _mm512_setzero_ps();
    let mut totals = [zero; O];
    for block in 0..blocks {
        // For each panel, even and odd: rests with first halves, first halves with these, and with rests.
        let mut sums = [[[zero; 2]; 3]; O];
        let x = row.wrapping_add(block * 2 * HALF_BYTES);
        for pair in 0..BLOCK / 2 {
            // SAFETY: the caller's promise, here and below.
            let first = unsafe { broadcast(x, pair) };
            let rest = unsafe { broadcast(x.wrapping_add(HALF_BYTES), pair) };
            for (sums, panel) in sums.iter_mut().zip(panels) {
                let at = panel.wrapping_add(block * PANEL_BLOCK_BYTES + pair * BLOCK_BYTES);
                crate::cpu::simd::prefetch_l2(at.wrapping_add(PREFETCH_BYTES));
                let w = unsafe { widen_f16(at) };
                for half in 0..2 {
                    let w_first = upper(w[half]);
                    let w_rest = _mm512_sub_ps(w[half], w_first);
                    sums[0][half] = _mm512_fmadd_ps(w_rest, first[half], sums[0][half]);
                    sums[1][half] = _mm512_fmadd_ps(w_first, first[half], sums[1][half]);
                    sums[2][half] = _mm512_fmadd_ps(w_first, rest[half], sums[2][half]);
                }
            }
        }
        for (total, sums) in totals.iter_mut().zip(sums) {
            for [even, odd] in sums {
                *total = _mm512_add_ps(*total, _mm512_add_ps(even, odd));
            }
        }
    }
    let mut sums = [[0.0; PANEL_OUTPUTS]; O];
    for (sums, total) in sums.iter_mut().zip(totals) {
        // SAFETY: the array has 16 numbers.
        unsafe { _mm512_storeu_ps(sums.as_mut_ptr(), total) };
    }
    sums
}

/// Returns a pair of BF16, each in all lanes.
///
/// # Safety
/// * The CPU has AVX-512.
/// * The pairs up to this one can be read at `at`.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn broadcast(at: *const u8, pair: usize) -> [__m512; 2] {
    // SAFETY: the caller's promise.
    let pair = _mm512_set1_epi32(unsafe { at.add(4 * pair).cast::<i32>().read_unaligned() });
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(pair)), upper(_mm512_castsi512_ps(pair))]
}
