//! Scales, bases and what else of a block is no code: the same field of sixteen outs side by side.
//!
//! A code c of a block of 32 stands for `(c - ZERO) * scale + base`. Formats with a zero have no base and those with a base
//! no zero.
//! Invariant: scales and bases are what the number format's definition multiplies and adds, each rounded once.

use super::STRIP;
use crate::cpu::simd::{Ints, LANES};

/// What a code that stands for zero is.
#[derive(Clone, Copy, PartialEq)]
pub enum Zero {
    /// There is a base instead.
    Base,
    /// 2^n.
    Power(u32),
}

/// A way to store scales.
pub trait Fields: 'static {
    /// Bytes of each field, in the order of the block's head.
    const WIDTHS: &'static [usize];
    const ZERO: Zero;
    /// Scales of 32 numbers: 1, or 2 of 16 numbers each.
    const RUNS: usize = 1;
    /// The same, unpacked.
    type Unpacked: Fields;

    /// Scales and bases of block number `block` of 32 numbers. Of one run the second scale means nothing, and without a
    /// base that does not.
    ///
    /// # Safety
    /// * The fields can be read at `at`.
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V);
}

/// Bytes of 16 F16.
const HALVES: usize = 2 * STRIP;

/// A scale in F16; codes are 2^ZERO too large.
pub struct Scale<const ZERO: u32>;

impl<const ZERO: u32> Fields for Scale<ZERO> {
    const WIDTHS: &'static [usize] = &[2];
    const ZERO: Zero = Zero::Power(ZERO);
    type Unpacked = Scales<ZERO, 1>;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let scale = unsafe { simd.halves(at) };
        ([scale; 2], scale)
    }
}

/// Base and scale in F16.
pub struct BaseScale;

impl Fields for BaseScale {
    const WIDTHS: &'static [usize] = &[2, 2];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (base, scale) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        ([scale; 2], base)
    }
}

/// Scale and base in F16.
pub struct ScaleBase;

impl Fields for ScaleBase {
    const WIDTHS: &'static [usize] = &[2, 2];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (scale, base) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        ([scale; 2], base)
    }
}

/// FlexGen's: what divides a code, and base, in F16.
pub struct Divisor;

impl Fields for Divisor {
    const WIDTHS: &'static [usize] = &[2, 2];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (divisor, base) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        ([simd.div(simd.splat(1.0), divisor); 2], base)
    }
}

/// Of Q4_K and Q5_K: two F16, and for each of eight blocks a scale and a minimum of six bits.
pub struct Sixes;

impl Fields for Sixes {
    const WIDTHS: &'static [usize] = &[2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise, here and below.
        let (d, m) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        let six = at.wrapping_add(2 * HALVES);
        let (mut scale, mut least) = ([0; LANES], [0; LANES]);
        if block < 4 {
            let (scales, minima) = unsafe { (bytes(six, block), bytes(six, 4 + block)) };
            for i in 0..LANES {
                (scale[i], least[i]) = (scales[i] & 63, minima[i] & 63);
            }
        } else {
            let (lower, scales, minima) =
                unsafe { (bytes(six, 4 + block), bytes(six, block - 4), bytes(six, block)) };
            for i in 0..LANES {
                scale[i] = lower[i] & 15 | scales[i] >> 6 << 4;
                least[i] = lower[i] >> 4 | minima[i] >> 6 << 4;
            }
        }
        let base = simd.sub(simd.splat(0.0), simd.mul(m, simd.small(least)));
        ([simd.mul(d, simd.small(scale)); 2], base)
    }
}

/// Field number `i` of those of a byte.
///
/// # Safety
/// * It can be read.
#[inline(always)]
unsafe fn bytes(fields: *const u8, i: usize) -> [u8; LANES] {
    // SAFETY: the caller's promise.
    unsafe { fields.add(i * STRIP).cast::<[u8; LANES]>().read() }
}

/// Of Q6_K: sixteen signed bytes, each the scale of sixteen numbers, and an F16; codes are 32 too large.
pub struct Sixteens;

impl Fields for Sixteens {
    const WIDTHS: &'static [usize] = &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2];
    const ZERO: Zero = Zero::Power(5);
    const RUNS: usize = 2;
    type Unpacked = Scales<5, 2>;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise, here and below.
        let d = unsafe { simd.halves(at.add(16 * STRIP)) };
        let runs = unsafe { at.add(2 * block * STRIP).cast::<[[i8; LANES]; 2]>().read() };
        ([simd.mul(d, simd.load_i8(&runs[0])), simd.mul(d, simd.load_i8(&runs[1]))], d)
    }
}

/// Bytes of 16 F32.
const SINGLES: usize = 4 * STRIP;

/// RUNS scales in F32; codes are 2^ZERO too large.
pub struct Scales<const ZERO: u32, const RUNS: usize>;

impl<const ZERO: u32, const RUNS: usize> Fields for Scales<ZERO, RUNS> {
    const WIDTHS: &'static [usize] = if RUNS == 1 { &[4] } else { &[4, 4] };
    const ZERO: Zero = Zero::Power(ZERO);
    const RUNS: usize = RUNS;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (first, last) = unsafe { (simd.singles(at), simd.singles(at.add((RUNS - 1) * SINGLES))) };
        ([first, last], first)
    }
}

/// Scale and base in F32.
pub struct ScaleAndBase;

impl Fields for ScaleAndBase {
    const WIDTHS: &'static [usize] = &[4, 4];
    const ZERO: Zero = Zero::Base;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (scale, base) = unsafe { (simd.singles(at), simd.singles(at.add(SINGLES))) };
        ([scale; 2], base)
    }
}
