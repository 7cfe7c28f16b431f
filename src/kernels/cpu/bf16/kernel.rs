//! BF16 kernels: sums of products of BF16 pairs, for some rows with some panels.
//!
//! AVX-512 adds, of each pair, first one product to a sum, then the other. AMX sums the even and the odd
//! products of 32 columns separately, adds the two sums, and then adds the result to the total. Both treat
//! numbers below 2^-126 as zero.
//! Invariant: sums run over blocks in ascending order, whatever the slices of blocks.

// These loops index several arrays at once, which is clearer than iterating over one of them.
#![allow(clippy::needless_range_loop)]

use super::{BLOCK_BYTES, PANEL_BLOCK_BYTES, PANEL_OUTPUTS};
use crate::cpu::Isa;
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx;
use crate::cpu::amx::Amx;
use crate::cpu::gemm_input::RowTiles;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::ops::Range;

/// The instructions for dot products of BF16 pairs that this CPU has.
#[derive(Clone, Copy)]
pub enum Bf16Isa {
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512Bf16),
}

impl Bf16Isa {
    /// Returns the BF16 instructions of an instruction set, if it has any.
    #[cfg(target_arch = "x86_64")]
    pub fn new(isa: Isa) -> Option<Bf16Isa> {
        let amx = || Amx::new().map(Bf16Isa::Amx);
        let avx512 = || Avx512Bf16::new().map(Bf16Isa::Avx512);
        match isa {
            Isa::Auto => amx().or_else(avx512),
            Isa::Amx => amx(),
            Isa::Avx512 => avx512(),
            Isa::Avx512F | Isa::Avx2 | Isa::Portable => None,
        }
    }

    /// Returns the BF16 instructions of an instruction set, if it has any.
    #[cfg(not(target_arch = "x86_64"))]
    pub fn new(_: Isa) -> Option<Bf16Isa> {
        None
    }
}

impl Bf16Isa {
    /// Returns the proof of AMX, if this is it.
    pub fn amx(self) -> Option<Amx> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Bf16Isa::Amx(amx) => Some(amx),
            #[cfg(target_arch = "x86_64")]
            Bf16Isa::Avx512(_) => None,
        }
    }

    /// Divides rows into tiles for these instructions.
    pub fn row_tiles(self, rows: usize) -> RowTiles {
        match self {
            #[cfg(target_arch = "x86_64")]
            Bf16Isa::Amx(_) => RowTiles::equal(rows, amx::ROWS),
            #[cfg(target_arch = "x86_64")]
            Bf16Isa::Avx512(_) => RowTiles::of_sizes(rows, &[1, 2, 4, 6]),
        }
    }
}

/// Addresses of the panels and the input rows of a tile.
pub struct TileOperands<const O: usize> {
    /// Each panel's first block.
    pub panels: [*const u8; O],
    /// The tile's first block.
    pub input: *const u8,
    /// Rows of the tile.
    pub rows: usize,
}

/// Prefetch distance in bytes of weights.
#[cfg(target_arch = "x86_64")]
const PREFETCH_BYTES: usize = 4096;

/// Prefetches a block of weights `PREFETCH_BYTES` ahead.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn prefetch_ahead(panel: *const u8) {
    for line in 0..PANEL_BLOCK_BYTES / BLOCK_BYTES {
        crate::cpu::simd::prefetch_l2(panel.wrapping_add(PREFETCH_BYTES + line * BLOCK_BYTES));
    }
}

/// Sets `sums` (rows of both tiles, 2, 16) to the products of two tiles of rows, the second of which may be
/// empty, with two panels.
///
/// # Safety
/// * `blocks` blocks of the panels and of both inputs can be read.
#[cfg(target_arch = "x86_64")]
pub unsafe fn multiply_tiles(
    registers: &mut amx::Bf16Tiles,
    panels: [*const u8; 2],
    inputs: [(*const u8, usize); 2],
    blocks: usize,
    sums: &mut [f32],
) {
    let [(first, rows), (second, more)] = inputs;
    // SAFETY: a tile is set up if it has rows.
    unsafe {
        registers.zero::<{ amx::SUM_REGISTERS[0][0] }>();
        registers.zero::<{ amx::SUM_REGISTERS[0][1] }>();
        if more > 0 {
            registers.zero::<{ amx::SUM_REGISTERS[1][0] }>();
            registers.zero::<{ amx::SUM_REGISTERS[1][1] }>();
        }
    }
    for block in 0..blocks {
        let [w0, w1] = panels.map(|panel| panel.wrapping_add(block * PANEL_BLOCK_BYTES));
        // SAFETY: the caller's promise, here and below.
        unsafe {
            registers.load_weights::<0>(w0);
            registers.load_input::<0>(first.add(block * rows * BLOCK_BYTES));
            registers.multiply::<0, 0>();
            registers.load_weights::<1>(w1);
            registers.multiply::<0, 1>();
            if more > 0 {
                registers.load_input::<1>(second.add(block * more * BLOCK_BYTES));
                registers.multiply::<1, 0>();
                registers.multiply::<1, 1>();
            } else {
                // With few rows, the weights come from memory.
                prefetch_ahead(w0);
                prefetch_ahead(w1);
            }
        }
    }
    const STRIDE: usize = 2 * PANEL_OUTPUTS * size_of::<f32>();
    assert!(sums.len() >= (rows + more) * 2 * PANEL_OUTPUTS, "the buffer holds the sums; this is a bug");
    let to = sums.as_mut_ptr();
    // SAFETY: `sums` is large enough, as asserted.
    unsafe {
        registers.store::<{ amx::SUM_REGISTERS[0][0] }>(to, STRIDE);
        registers.store::<{ amx::SUM_REGISTERS[0][1] }>(to.add(PANEL_OUTPUTS), STRIDE);
        if more > 0 {
            let to = to.add(rows * 2 * PANEL_OUTPUTS);
            registers.store::<{ amx::SUM_REGISTERS[1][0] }>(to, STRIDE);
            registers.store::<{ amx::SUM_REGISTERS[1][1] }>(to.add(PANEL_OUTPUTS), STRIDE);
        }
    }
}

/// Proof that this CPU has AVX-512 with BF16.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub struct Avx512Bf16(());

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    fn new() -> Option<Avx512Bf16> {
        let has = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
        has.then_some(Avx512Bf16(()))
    }

    /// Adds the products of a tile of up to 6 rows with O panels, over `blocks`, to `sums` (rows, O, 16).
    ///
    /// # Safety
    /// * `blocks` of the panels and of the input can be read.
    pub unsafe fn multiply<const O: usize>(
        self,
        operands: &TileOperands<O>,
        blocks: Range<usize>,
        sums: &mut [f32],
    ) {
        // SAFETY: `self` proves the instruction; the rest is the caller's promise.
        unsafe {
            match operands.rows {
                0 => {}
                1 => multiply_rows::<1, O>(operands, blocks, sums),
                2 => multiply_rows::<2, O>(operands, blocks, sums),
                4 => multiply_rows::<4, O>(operands, blocks, sums),
                6 => multiply_rows::<6, O>(operands, blocks, sums),
                rows => unreachable!("no tile has {rows} rows; this is a bug"),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Avx512Bf16 {
    /// Computes N sums of products, each added to `times` times, without reading memory: the peak rate.
    pub fn peak<const N: usize>(self, times: usize) -> [f32; N] {
        // SAFETY: `self` proves the instruction.
        unsafe { multiply_peak(times) }
    }
}

/// Reinterprets 64 bytes as pairs of BF16.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn as_bf16_pairs(bytes: __m512i) -> __m512bh {
    // SAFETY: both types are 64 bytes, and any bytes are valid.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bytes) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_peak<const N: usize>(times: usize) -> [f32; N] {
    let mut sums = [_mm512_setzero_ps(); N];
    let pair = as_bf16_pairs(_mm512_set1_epi32(std::hint::black_box(0x3f80_3f80)));
    for _ in 0..times {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, pair, pair);
        }
    }
    sums.map(|sum| _mm512_cvtss_f32(sum))
}

/// Adds the products of a tile of R rows with O panels, over `blocks`, to `sums` (R, O, 16).
///
/// # Safety
/// * `blocks` of the panels and of the input can be read.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply_rows<const R: usize, const O: usize>(
    operands: &TileOperands<O>,
    blocks: Range<usize>,
    sums: &mut [f32],
) {
    let (sums, _) = sums.as_chunks_mut::<PANEL_OUTPUTS>();
    let mut totals = [[_mm512_setzero_ps(); O]; R];
    for r in 0..R {
        for o in 0..O {
            // SAFETY: a reference to 16 lanes.
            totals[r][o] = unsafe { _mm512_loadu_ps(sums[r * O + o].as_ptr()) };
        }
    }
    for block in blocks {
        let panels = operands.panels.map(|panel| panel.wrapping_add(block * PANEL_BLOCK_BYTES));
        let input = operands.input.wrapping_add(block * R * BLOCK_BYTES);
        for pair in 0..PANEL_BLOCK_BYTES / BLOCK_BYTES {
            let mut w = [as_bf16_pairs(_mm512_setzero_si512()); O];
            for o in 0..O {
                crate::cpu::simd::prefetch_l2(panels[o].wrapping_add(PREFETCH_BYTES + pair * BLOCK_BYTES));
                // SAFETY: the caller's promise, here and below.
                w[o] = as_bf16_pairs(unsafe { _mm512_loadu_si512(panels[o].add(pair * BLOCK_BYTES).cast()) });
            }
            for r in 0..R {
                let x = unsafe { input.add(r * BLOCK_BYTES + pair * 4).cast::<i32>().read_unaligned() };
                let x = as_bf16_pairs(_mm512_set1_epi32(x));
                for o in 0..O {
                    totals[r][o] = _mm512_dpbf16_ps(totals[r][o], w[o], x);
                }
            }
        }
    }
    for r in 0..R {
        for o in 0..O {
            // SAFETY: a reference to 16 lanes.
            unsafe { _mm512_storeu_ps(sums[r * O + o].as_mut_ptr(), totals[r][o]) };
        }
    }
}
