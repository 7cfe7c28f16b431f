//! AMX kernel: many rows with one panel at a time, 16 rows by 16 outputs.
//!
//! AMX multiplies signed bytes, so quants are unpacked with their zero point subtracted, and sums need no
//! correction. While AMX multiplies two groups of columns, the integer sums of the previous two, which have
//! been stored to memory, are scaled and added to the totals, which stay in registers. A group of columns
//! shares one scale: 32 columns, or 16 if there are two scales for 32 columns.
//! Invariant: the numbers and their order of addition are those of `kernel`, so the results agree bit for
//! bit.

// These loops index several arrays at once, which is clearer than iterating over one of them.
#![allow(clippy::needless_range_loop)]

use super::input::{ROW_BLOCK_BYTES, WORD_BYTES};
use super::prefetch::Prefetcher;
use crate::cpu::amx::{Int8Tiles, ROWS};
use crate::cpu::simd::LANES;
use crate::quant::INT8_BLOCK_LEN;
use std::arch::x86_64::*;

/// Number of integer sums of a group of columns.
const INT_SUMS: usize = ROWS * LANES;

/// A range of columns of a tile of rows and of an unpacked panel.
pub struct TileColumns {
    /// The tile's first block of these columns, and the number of rows.
    pub input: *const u8,
    pub rows: usize,
    /// Signed quants: (blocks, 8, 16, 4).
    pub quants: *const u8,
    /// F32 scales (blocks, 1, 16), or (blocks, 2, 16) with two scales to a block or with a minimum.
    pub scales: *const f32,
    pub blocks: usize,
    /// Prefetcher of what comes next, a little in each step.
    pub prefetcher: Prefetcher,
}

/// Buffer for the integer sums that AMX stores.
#[repr(C, align(64))]
pub struct IntSumBuffer([i32; 4 * INT_SUMS]);

impl IntSumBuffer {
    /// A buffer of zeros.
    pub const ZERO: IntSumBuffer = IntSumBuffer([0; 4 * INT_SUMS]);
}

/// Returns the number of steps of two groups of columns each.
pub fn step_count(groups: usize) -> usize {
    groups.div_ceil(2)
}

/// Adds the products of the columns to `sums`, 16 for each row, rows `stride` apart. SCALES is the number of
/// scales for 32 columns; MINIMUM is whether there is a minimum.
///
/// # Safety
/// * The CPU has AVX-512F.
/// * Input, quants and scales can be read for all blocks, and `registers` were set up for the rows and 32 /
///   SCALES columns.
/// * The tile has at least six rows, or more of the input follows it: sixteen scales are read.
#[target_feature(enable = "avx512f")]
pub unsafe fn multiply<const SCALES: usize, const MINIMUM: bool>(
    registers: &mut Int8Tiles,
    columns: &TileColumns,
    int_sums: &mut IntSumBuffer,
    (sums, stride): (&mut [f32], usize),
) {
    let rows = columns.rows;
    assert!(
        rows <= ROWS && sums.len() >= (rows - 1) * stride + LANES,
        "the buffer holds the sums; this is a bug"
    );
    let mut totals = [_mm512_setzero_ps(); ROWS];
    for r in 0..ROWS {
        if r < rows {
            // SAFETY: `sums` holds each row, as asserted; below too.
            totals[r] = unsafe { _mm512_loadu_ps(sums.as_ptr().add(r * stride)) };
        }
    }
    let (groups, int_sums) = (columns.blocks * SCALES, &mut int_sums.0);
    let mut prefetcher = columns.prefetcher;
    // SAFETY: the caller's promise, here and below.
    unsafe {
        for first in (0..groups).step_by(2) {
            prefetcher.step();
            let is_odd = first / 2 % 2 == 1;
            let has_second = first + 1 < groups;
            match is_odd {
                false => multiply_pair::<SCALES, 0, 1>(registers, columns, first, has_second),
                true => multiply_pair::<SCALES, 2, 3>(registers, columns, first, has_second),
            }
            let (now, before) = int_sums.split_at_mut(2 * INT_SUMS);
            let (now, before) = if is_odd { (before, now) } else { (now, before) };
            if first > 0 {
                add_scaled::<SCALES, MINIMUM>(columns, first - 2, &before[..INT_SUMS], &mut totals);
                add_scaled::<SCALES, MINIMUM>(columns, first - 1, &before[INT_SUMS..], &mut totals);
            }
            match is_odd {
                false => store_pair::<0, 1>(registers, now),
                true => store_pair::<2, 3>(registers, now),
            }
        }
        let last = groups.saturating_sub(1) / 2 * 2;
        let int_sums = &int_sums[last / 2 % 2 * 2 * INT_SUMS..];
        for group in last..groups {
            add_scaled::<SCALES, MINIMUM>(
                columns,
                group,
                &int_sums[(group - last) * INT_SUMS..][..INT_SUMS],
                &mut totals,
            );
        }
    }
    for r in 0..ROWS {
        if r < rows {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(sums.as_mut_ptr().add(r * stride), totals[r]) };
        }
    }
}

/// Multiplies one or two groups of columns.
///
/// # Safety
/// * The conditions of [`multiply`].
#[inline(always)]
unsafe fn multiply_pair<const SCALES: usize, const FIRST: u8, const SECOND: u8>(
    registers: &mut Int8Tiles,
    columns: &TileColumns,
    group: usize,
    has_second: bool,
) {
    let operands = |group: usize| {
        let quants = group * (INT8_BLOCK_LEN / SCALES) * LANES;
        (
            input_block::<SCALES>(columns, group).wrapping_add(group % SCALES * (INT8_BLOCK_LEN / SCALES)),
            quants,
        )
    };
    // SAFETY: the caller's promise.
    unsafe {
        let (input, quants) = operands(group);
        registers.multiply::<FIRST>(input, INT8_BLOCK_LEN, columns.quants.add(quants));
        if has_second {
            let (input, quants) = operands(group + 1);
            registers.multiply::<SECOND>(input, INT8_BLOCK_LEN, columns.quants.add(quants));
        }
    }
}

/// Stores the sums that [`multiply_pair`] has computed. If it computed only one group, the second sums are
/// those of an earlier call.
///
/// # Safety
/// * Both registers were set up.
#[inline(always)]
unsafe fn store_pair<const FIRST: u8, const SECOND: u8>(registers: &Int8Tiles, int_sums: &mut [i32]) {
    assert!(int_sums.len() >= 2 * INT_SUMS, "the buffer holds two groups of sums; this is a bug");
    // SAFETY: the buffer holds both, as asserted.
    unsafe {
        registers.store::<FIRST>(int_sums.as_mut_ptr());
        registers.store::<SECOND>(int_sums.as_mut_ptr().add(INT_SUMS));
    }
}

/// Returns the input block of 32 columns that a group of columns belongs to.
#[inline(always)]
fn input_block<const SCALES: usize>(columns: &TileColumns, group: usize) -> *const u8 {
    columns.input.wrapping_add(group / SCALES * columns.rows * ROW_BLOCK_BYTES)
}

/// Adds the integer sums of a group of columns, multiplied by both scales, and the minimum multiplied by the
/// input's sum, to `totals`.
///
/// # Safety
/// * The conditions of [`multiply`].
#[inline(always)]
unsafe fn add_scaled<const SCALES: usize, const MINIMUM: bool>(
    columns: &TileColumns,
    group: usize,
    int_sums: &[i32],
    totals: &mut [__m512; ROWS],
) {
    assert!(int_sums.len() == INT_SUMS, "a tile has this many sums; this is a bug");
    let words =
        input_block::<SCALES>(columns, group).wrapping_add(columns.rows * INT8_BLOCK_LEN).cast::<f32>();
    let vectors = if MINIMUM { 2 } else { 1 };
    // SAFETY: the caller guarantees AVX-512; the integer sums and the scales can be read.
    unsafe {
        let scales = columns.scales.add(group * vectors * LANES);
        let (scale, minimum) = (_mm512_loadu_ps(scales), _mm512_loadu_ps(scales.add((vectors - 1) * LANES)));
        for r in 0..ROWS {
            let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(int_sums.as_ptr().add(r * LANES).cast()));
            let both = _mm512_mul_ps(scale, _mm512_set1_ps(words.add(r).read_unaligned()));
            totals[r] = _mm512_fmadd_ps(sum, both, totals[r]);
            if MINIMUM {
                let input = _mm512_set1_ps(words.byte_add((columns.rows + r) * WORD_BYTES).read_unaligned());
                totals[r] = _mm512_fmadd_ps(minimum, input, totals[r]);
            }
        }
    }
}
