//! Layouts of the scales, minimums and other fields of a block: the same field of sixteen outputs side by
//! side.
//!
//! A quant q of a block of 32 represents `(q - ZERO_POINT) * scale + minimum`. A format has either a zero
//! point or a minimum.
//! Invariant: scales and minimums are those that the number format's definition multiplies and adds, each
//! rounded once.

use super::STRIP;
use crate::cpu::simd::{Ints, LANES};

/// The quant that represents zero.
#[derive(Clone, Copy, PartialEq)]
pub enum Zero {
    /// No zero point: the format has a minimum.
    Base,
    /// 2^n.
    Power(u32),
}

/// A layout of scales.
pub trait Fields: 'static {
    /// Bytes of each field, in the order of the block's header.
    const WIDTHS: &'static [usize];
    /// The zero point of the quants.
    const ZERO: Zero;
    /// Number of scales for 32 numbers: 1, or 2 for 16 numbers each.
    const RUNS: usize = 1;
    /// The layout of these scales when they are unpacked.
    type Unpacked: Fields;

    /// Loads the scales and minimums of block number `block` of 32 numbers. The second scale is meaningless
    /// if there is one scale, and so is the minimum if there is none.
    ///
    /// # Safety
    /// * The fields can be read at `at`.
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V);
}

/// Bytes of 16 F16 numbers.
const HALVES: usize = 2 * STRIP;

/// F16 scale; the zero point is 2^ZERO.
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

/// F16 minimum, then F16 scale.
pub struct BaseScale;

impl Fields for BaseScale {
    const WIDTHS: &'static [usize] = &[2, 2];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (minimum, scale) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        ([scale; 2], minimum)
    }
}

/// F16 scale, then F16 minimum.
pub struct ScaleBase;

impl Fields for ScaleBase {
    const WIDTHS: &'static [usize] = &[2, 2];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (scale, minimum) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        ([scale; 2], minimum)
    }
}

/// F16 divisor (the inverse of the scale), then F16 minimum, as in FlexGen.
pub struct Divisor;

impl Fields for Divisor {
    const WIDTHS: &'static [usize] = &[2, 2];
    const ZERO: Zero = Zero::Base;
    type Unpacked = ScaleAndBase;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (divisor, minimum) = unsafe { (simd.halves(at), simd.halves(at.add(HALVES))) };
        ([simd.div(simd.splat(1.0), divisor); 2], minimum)
    }
}

/// Scales of Q4_K and Q5_K: two F16, and a 6-bit scale and a 6-bit minimum for each of eight blocks.
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
        let (mut scale, mut min) = ([0; LANES], [0; LANES]);
        if block < 4 {
            let (scales, minima) = unsafe { (bytes(six, block), bytes(six, 4 + block)) };
            for i in 0..LANES {
                (scale[i], min[i]) = (scales[i] & 63, minima[i] & 63);
            }
        } else {
            let (lower, scales, minima) =
                unsafe { (bytes(six, 4 + block), bytes(six, block - 4), bytes(six, block)) };
            for i in 0..LANES {
                scale[i] = lower[i] & 15 | scales[i] >> 6 << 4;
                min[i] = lower[i] >> 4 | minima[i] >> 6 << 4;
            }
        }
        let minimum = simd.sub(simd.splat(0.0), simd.mul(m, simd.small(min)));
        ([simd.mul(d, simd.small(scale)); 2], minimum)
    }
}

/// Loads field number `i` of the one-byte fields.
///
/// # Safety
/// * It can be read.
#[inline(always)]
unsafe fn bytes(fields: *const u8, i: usize) -> [u8; LANES] {
    // SAFETY: the caller's promise.
    unsafe { fields.add(i * STRIP).cast::<[u8; LANES]>().read() }
}

/// Scales of Q6_K: sixteen signed bytes, each the scale of sixteen numbers, and an F16; the zero point is 32.
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

/// Bytes of 16 F32 numbers.
const SINGLES: usize = 4 * STRIP;

/// COUNT F32 scales; the zero point is 2^ZERO.
pub struct Scales<const ZERO: u32, const COUNT: usize>;

impl<const ZERO: u32, const COUNT: usize> Fields for Scales<ZERO, COUNT> {
    const WIDTHS: &'static [usize] = if COUNT == 1 { &[4] } else { &[4, 4] };
    const ZERO: Zero = Zero::Power(ZERO);
    const RUNS: usize = COUNT;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (first, last) = unsafe { (simd.singles(at), simd.singles(at.add((COUNT - 1) * SINGLES))) };
        ([first, last], first)
    }
}

/// F32 scale, then F32 minimum.
pub struct ScaleAndBase;

impl Fields for ScaleAndBase {
    const WIDTHS: &'static [usize] = &[4, 4];
    const ZERO: Zero = Zero::Base;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn scales<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (scale, minimum) = unsafe { (simd.singles(at), simd.singles(at.add(SINGLES))) };
        ([scale; 2], minimum)
    }
}
