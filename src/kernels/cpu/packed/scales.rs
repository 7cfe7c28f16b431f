//! Layouts of the scales, minimums and other fields of a block: the same field of sixteen outputs side by
//! side.
//!
//! A quant q of a block of 32 represents `(q - ZERO_POINT) * scale + minimum`. A format has either a zero
//! point or a minimum.
//! Invariant: scales and minimums are those that the number format's definition multiplies and adds, each
//! rounded once.

use super::PANEL_OUTPUTS;
use crate::cpu::simd::{Ints, LANES};

/// The quant that represents zero.
#[derive(Clone, Copy, PartialEq)]
pub enum ZeroPoint {
    /// No zero point: the format has a minimum.
    Minimum,
    /// 2^n.
    PowerOfTwo(u32),
}

/// A layout of scales.
pub trait ScaleLayout: 'static {
    /// Bytes of each field, in the order of the block's header.
    const FIELD_WIDTHS: &'static [usize];
    /// The zero point of the quants.
    const ZERO_POINT: ZeroPoint;
    /// Number of scales for 32 numbers: 1, or 2 for 16 numbers each.
    const SCALE_COUNT: usize = 1;
    /// The layout of these scales when they are unpacked.
    type Unpacked: ScaleLayout;

    /// Loads the scales and minimums of block number `block` of 32 numbers. The second scale is meaningless
    /// if there is one scale, and so is the minimum if there is none.
    ///
    /// # Safety
    /// * The fields can be read at `at`.
    unsafe fn load<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V);
}

/// Bytes of 16 F16 numbers.
const F16_FIELD_BYTES: usize = 2 * PANEL_OUTPUTS;

/// F16 scale; the zero point is 2^ZERO.
pub struct F16Scale<const ZERO: u32>;

impl<const ZERO: u32> ScaleLayout for F16Scale<ZERO> {
    const FIELD_WIDTHS: &'static [usize] = &[2];
    const ZERO_POINT: ZeroPoint = ZeroPoint::PowerOfTwo(ZERO);
    type Unpacked = F32Scales<ZERO, 1>;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let scale = unsafe { simd.load_f16_at(at) };
        ([scale; 2], scale)
    }
}

/// F16 minimum, then F16 scale.
pub struct F16MinimumScale;

impl ScaleLayout for F16MinimumScale {
    const FIELD_WIDTHS: &'static [usize] = &[2, 2];
    const ZERO_POINT: ZeroPoint = ZeroPoint::Minimum;
    type Unpacked = F32ScaleMinimum;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (minimum, scale) = unsafe { (simd.load_f16_at(at), simd.load_f16_at(at.add(F16_FIELD_BYTES))) };
        ([scale; 2], minimum)
    }
}

/// F16 scale, then F16 minimum.
pub struct F16ScaleMinimum;

impl ScaleLayout for F16ScaleMinimum {
    const FIELD_WIDTHS: &'static [usize] = &[2, 2];
    const ZERO_POINT: ZeroPoint = ZeroPoint::Minimum;
    type Unpacked = F32ScaleMinimum;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (scale, minimum) = unsafe { (simd.load_f16_at(at), simd.load_f16_at(at.add(F16_FIELD_BYTES))) };
        ([scale; 2], minimum)
    }
}

/// F16 divisor (the inverse of the scale), then F16 minimum, as in FlexGen.
pub struct F16DivisorMinimum;

impl ScaleLayout for F16DivisorMinimum {
    const FIELD_WIDTHS: &'static [usize] = &[2, 2];
    const ZERO_POINT: ZeroPoint = ZeroPoint::Minimum;
    type Unpacked = F32ScaleMinimum;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (divisor, minimum) = unsafe { (simd.load_f16_at(at), simd.load_f16_at(at.add(F16_FIELD_BYTES))) };
        ([simd.div(simd.splat(1.0), divisor); 2], minimum)
    }
}

/// Scales of Q4_K and Q5_K: two F16, and a 6-bit scale and a 6-bit minimum for each of eight blocks.
pub struct KQuantScales;

impl ScaleLayout for KQuantScales {
    const FIELD_WIDTHS: &'static [usize] = &[2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1];
    const ZERO_POINT: ZeroPoint = ZeroPoint::Minimum;
    type Unpacked = F32ScaleMinimum;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise, here and below.
        let (d, m) = unsafe { (simd.load_f16_at(at), simd.load_f16_at(at.add(F16_FIELD_BYTES))) };
        let six = at.wrapping_add(2 * F16_FIELD_BYTES);
        let (mut scale, mut min) = ([0; LANES], [0; LANES]);
        if block < 4 {
            let (scales, minima) = unsafe { (load_byte_field(six, block), load_byte_field(six, 4 + block)) };
            for i in 0..LANES {
                (scale[i], min[i]) = (scales[i] & 63, minima[i] & 63);
            }
        } else {
            let (lower, scales, minima) = unsafe {
                (
                    load_byte_field(six, 4 + block),
                    load_byte_field(six, block - 4),
                    load_byte_field(six, block),
                )
            };
            for i in 0..LANES {
                scale[i] = lower[i] & 15 | scales[i] >> 6 << 4;
                min[i] = lower[i] >> 4 | minima[i] >> 6 << 4;
            }
        }
        let minimum = simd.sub(simd.splat(0.0), simd.mul(m, simd.load_u8(min)));
        ([simd.mul(d, simd.load_u8(scale)); 2], minimum)
    }
}

/// Loads field number `i` of the one-byte fields.
///
/// # Safety
/// * It can be read.
#[inline(always)]
unsafe fn load_byte_field(fields: *const u8, i: usize) -> [u8; LANES] {
    // SAFETY: the caller's promise.
    unsafe { fields.add(i * PANEL_OUTPUTS).cast::<[u8; LANES]>().read() }
}

/// Scales of Q6_K: sixteen signed bytes, each the scale of sixteen numbers, and an F16; the zero point is 32.
pub struct Q6KScales;

impl ScaleLayout for Q6KScales {
    const FIELD_WIDTHS: &'static [usize] = &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2];
    const ZERO_POINT: ZeroPoint = ZeroPoint::PowerOfTwo(5);
    const SCALE_COUNT: usize = 2;
    type Unpacked = F32Scales<5, 2>;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, block: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise, here and below.
        let d = unsafe { simd.load_f16_at(at.add(16 * PANEL_OUTPUTS)) };
        let runs = unsafe { at.add(2 * block * PANEL_OUTPUTS).cast::<[[i8; LANES]; 2]>().read() };
        ([simd.mul(d, simd.load_i8(&runs[0])), simd.mul(d, simd.load_i8(&runs[1]))], d)
    }
}

/// Bytes of 16 F32 numbers.
const F32_FIELD_BYTES: usize = 4 * PANEL_OUTPUTS;

/// COUNT F32 scales; the zero point is 2^ZERO.
pub struct F32Scales<const ZERO: u32, const COUNT: usize>;

impl<const ZERO: u32, const COUNT: usize> ScaleLayout for F32Scales<ZERO, COUNT> {
    const FIELD_WIDTHS: &'static [usize] = if COUNT == 1 { &[4] } else { &[4, 4] };
    const ZERO_POINT: ZeroPoint = ZeroPoint::PowerOfTwo(ZERO);
    const SCALE_COUNT: usize = COUNT;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (first, last) =
            unsafe { (simd.load_f32_at(at), simd.load_f32_at(at.add((COUNT - 1) * F32_FIELD_BYTES))) };
        ([first, last], first)
    }
}

/// F32 scale, then F32 minimum.
pub struct F32ScaleMinimum;

impl ScaleLayout for F32ScaleMinimum {
    const FIELD_WIDTHS: &'static [usize] = &[4, 4];
    const ZERO_POINT: ZeroPoint = ZeroPoint::Minimum;
    type Unpacked = Self;

    #[inline(always)]
    unsafe fn load<S: Ints>(simd: S, at: *const u8, _: usize) -> ([S::V; 2], S::V) {
        // SAFETY: the caller's promise.
        let (scale, minimum) = unsafe { (simd.load_f32_at(at), simd.load_f32_at(at.add(F32_FIELD_BYTES))) };
        ([scale; 2], minimum)
    }
}
