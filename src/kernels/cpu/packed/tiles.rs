//! Many rows with some strips, by AMX: 16 rows with 16 outs at once.
//!
//! AMX sums the products of bytes with sign; so codes are unpacked less what stands for zero, and no sum need be mended. While it
//! multiplies two runs of columns, the whole sums of the two before, written down, are scaled and added to the totals,
//! which stay in registers.
//! Invariant: the numbers are those of `product`, added in its order, so the bits are the same.

// Arrays in step: what they are indexed by says more than iterators over one of them.
#![allow(clippy::needless_range_loop)]

use super::ahead::Ahead;
use super::input::{ROW_BYTES, WORD};
use crate::cpu::amx::{CodeTiles, ROWS};
use crate::cpu::simd::LANES;
use crate::quant::INPUT_BLOCK;
use std::arch::x86_64::*;

/// Whole sums of a run of columns.
const SUMS: usize = ROWS * LANES;

/// Some columns of a tile of rows, and of a strip that is unpacked.
pub struct Columns {
    /// The tile's first block at hand, and its rows.
    pub input: *const u8,
    pub rows: usize,
    /// Bytes with sign, (blocks, 8, 16, 4).
    pub codes: *const u8,
    /// (blocks, 1, 16), (blocks, 2, 16) with two scales to a block, or with a base.
    pub fields: *const f32,
    pub blocks: usize,
    /// What to ask for meanwhile, a little in each step.
    pub ahead: Ahead,
}

/// Room for what AMX writes down.
#[repr(C, align(64))]
pub struct Whole([i32; 4 * SUMS]);

impl Whole {
    pub const NONE: Whole = Whole([0; 4 * SUMS]);
}

/// Steps of two runs each.
pub fn steps(runs: usize) -> usize {
    runs.div_ceil(2)
}

/// To `sums`, 16 of each row, `stride` apart, go the products of the columns. There are RUNS scales to 32 columns, and a base if
/// BASE.
///
/// # Safety
/// * The CPU has AVX-512F.
/// * Input, codes and fields can be read for all blocks, and `registers` were set up for the rows and 32 / RUNS columns.
/// * The tile has at least six rows, or more of the input lies behind it: sixteen scales are read.
#[target_feature(enable = "avx512f")]
pub unsafe fn multiply<const RUNS: usize, const BASE: bool>(
    registers: &mut CodeTiles,
    columns: &Columns,
    whole: &mut Whole,
    (sums, stride): (&mut [f32], usize),
) {
    let rows = columns.rows;
    assert!(rows <= ROWS && sums.len() >= (rows - 1) * stride + LANES, "room for the sums; this is a bug");
    let mut totals = [_mm512_setzero_ps(); ROWS];
    for r in 0..ROWS {
        if r < rows {
            // SAFETY: there is room for each row, as asserted; below too.
            totals[r] = unsafe { _mm512_loadu_ps(sums.as_ptr().add(r * stride)) };
        }
    }
    let (runs, whole) = (columns.blocks * RUNS, &mut whole.0);
    let mut ahead = columns.ahead;
    // SAFETY: the caller's promise, here and below.
    unsafe {
        for first in (0..runs).step_by(2) {
            ahead.ask();
            let is_odd = first / 2 % 2 == 1;
            let two = first + 1 < runs;
            match is_odd {
                false => begin::<RUNS, 0, 1>(registers, columns, first, two),
                true => begin::<RUNS, 2, 3>(registers, columns, first, two),
            }
            let (now, before) = whole.split_at_mut(2 * SUMS);
            let (now, before) = if is_odd { (before, now) } else { (now, before) };
            if first > 0 {
                add::<RUNS, BASE>(columns, first - 2, &before[..SUMS], &mut totals);
                add::<RUNS, BASE>(columns, first - 1, &before[SUMS..], &mut totals);
            }
            match is_odd {
                false => end::<0, 1>(registers, now),
                true => end::<2, 3>(registers, now),
            }
        }
        let last = runs.saturating_sub(1) / 2 * 2;
        let whole = &whole[last / 2 % 2 * 2 * SUMS..];
        for run in last..runs {
            add::<RUNS, BASE>(columns, run, &whole[(run - last) * SUMS..][..SUMS], &mut totals);
        }
    }
    for r in 0..ROWS {
        if r < rows {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr().add(r * stride), totals[r]) };
        }
    }
}

/// Multiplies one run of columns, or two.
///
/// # Safety
/// * As [`multiply`] has it.
#[inline(always)]
unsafe fn begin<const RUNS: usize, const FIRST: u8, const SECOND: u8>(
    registers: &mut CodeTiles,
    columns: &Columns,
    run: usize,
    two: bool,
) {
    let place = |run: usize| {
        let codes = run * (INPUT_BLOCK / RUNS) * LANES;
        (block::<RUNS>(columns, run).wrapping_add(run % RUNS * (INPUT_BLOCK / RUNS)), codes)
    };
    // SAFETY: the caller's promise.
    unsafe {
        let (input, codes) = place(run);
        registers.multiply::<FIRST>(input, INPUT_BLOCK, columns.codes.add(codes));
        if two {
            let (input, codes) = place(run + 1);
            registers.multiply::<SECOND>(input, INPUT_BLOCK, columns.codes.add(codes));
        }
    }
}

/// Writes down what [`begin`] has multiplied; of one run, the second is that of an earlier one.
///
/// # Safety
/// * Both were set up.
#[inline(always)]
unsafe fn end<const FIRST: u8, const SECOND: u8>(registers: &CodeTiles, whole: &mut [i32]) {
    assert!(whole.len() >= 2 * SUMS, "room for two; this is a bug");
    // SAFETY: there is.
    unsafe {
        registers.store::<FIRST>(whole.as_mut_ptr());
        registers.store::<SECOND>(whole.as_mut_ptr().add(SUMS));
    }
}

/// The block of 32 columns of the input that a run belongs to.
#[inline(always)]
fn block<const RUNS: usize>(columns: &Columns, run: usize) -> *const u8 {
    columns.input.wrapping_add(run / RUNS * columns.rows * ROW_BYTES)
}

/// totals += the whole sums of a run, times both scales; and the base times the input's sum.
///
/// # Safety
/// * As [`multiply`] has it.
#[inline(always)]
unsafe fn add<const RUNS: usize, const BASE: bool>(
    columns: &Columns,
    run: usize,
    whole: &[i32],
    totals: &mut [__m512; ROWS],
) {
    assert!(whole.len() == SUMS, "as many as a tile has; this is a bug");
    let words = block::<RUNS>(columns, run).wrapping_add(columns.rows * INPUT_BLOCK).cast::<f32>();
    let vectors = if BASE { 2 } else { 1 };
    // SAFETY: AVX-512 by the caller's promise; the whole sums are there, and scales too.
    unsafe {
        let fields = columns.fields.add(run * vectors * LANES);
        let (scale, base) = (_mm512_loadu_ps(fields), _mm512_loadu_ps(fields.add((vectors - 1) * LANES)));
        for r in 0..ROWS {
            let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(whole.as_ptr().add(r * LANES).cast()));
            let both = _mm512_mul_ps(scale, _mm512_set1_ps(words.add(r).read_unaligned()));
            totals[r] = _mm512_fmadd_ps(sum, both, totals[r]);
            if BASE {
                let input = _mm512_set1_ps(words.byte_add((columns.rows + r) * WORD).read_unaligned());
                totals[r] = _mm512_fmadd_ps(base, input, totals[r]);
            }
        }
    }
}
