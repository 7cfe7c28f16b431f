//! Portable implementation on plain arrays, for CPUs without a specific implementation here. It relies on the
//! compiler to vectorize.
//!
//! Invariant: requires no CPU features. Products are rounded before they are added, so its results differ in
//! bits from those of the instruction sets with fused multiply-add.

use super::ints::{BYTES, IntKernel, Ints};
use super::{Kernel, LANES, SHIFT, Simd};

/// The portable implementation.
#[derive(Clone, Copy)]
pub struct Portable;

type V = [f32; LANES];

/// Builds an array with a plain loop. The standard library's functions call a closure for each element where
/// the compiler does not see through them.
#[inline(always)]
fn build_array<T: Copy + Default, const N: usize>(element: impl Fn(usize) -> T) -> [T; N] {
    let mut array = [T::default(); N];
    for (i, to) in array.iter_mut().enumerate() {
        *to = element(i);
    }
    array
}

#[inline(always)]
fn map_array<A: Copy, T: Copy + Default, const N: usize>(a: &[A; N], op: impl Fn(A) -> T) -> [T; N] {
    build_array(|i| op(a[i]))
}

#[inline(always)]
fn zip(a: V, b: V, op: impl Fn(f32, f32) -> f32) -> V {
    build_array(|i| op(a[i], b[i]))
}

impl Simd for Portable {
    type V = V;
    const TILE_ROWS: &[usize] = &[1, 3];
    const TILE_OUTPUTS: usize = 2;
    const ACCUMULATORS: usize = 2;
    const TILE_QUERIES: usize = 1;

    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        *x
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> V {
        map_array(x, widen_f16)
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> V {
        map_array(x, |x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> V {
        map_array(x, f32::from)
    }
    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES]) -> [V; 2] {
        [map_array(x, |x| f32::from(x & 15)), map_array(x, |x| f32::from(x >> 4))]
    }
    #[inline(always)]
    fn store(self, v: V, to: &mut [f32; LANES]) {
        *to = v;
    }
    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        build_array(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn select_first(self, n: usize, v: V, rest: V) -> V {
        build_array(|i| if i < n { v[i] } else { rest[i] })
    }
    #[inline(always)]
    fn where_less(self, a: V, b: V, v: V, rest: V) -> V {
        build_array(|i| if a[i] < b[i] { v[i] } else { rest[i] })
    }
    #[inline(always)]
    fn scale(self, v: V, shifted: V) -> V {
        zip(v, shifted, |v, shifted| {
            let n = (shifted.to_bits() as i32).wrapping_sub(SHIFT.to_bits() as i32);
            let half = n >> 1;
            let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
            v * power(half) * power(n.wrapping_sub(half))
        })
    }
    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        v.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn sum(self, mut v: V) -> f32 {
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                v[i] += v[i + half];
            }
        }
        v[0]
    }
}

impl Ints for Portable {
    type B = [u8; BYTES];
    type I = [i32; LANES];
    const INT8_TILE_ROWS: &[usize] = &[1, 2];
    const INT8_TILE_PANELS: usize = 1;

    fn call_ints<K: IntKernel>(self, kernel: K) -> K::Out {
        kernel.run(self)
    }

    #[inline(always)]
    unsafe fn load_bytes(self, at: *const u8) -> [u8; BYTES] {
        // SAFETY: the caller's promise.
        unsafe { at.cast::<[u8; BYTES]>().read_unaligned() }
    }
    #[inline(always)]
    fn store_bytes(self, b: [u8; BYTES], to: &mut [u8; BYTES]) {
        *to = b;
    }
    #[inline(always)]
    fn zero_bytes(self) -> [u8; BYTES] {
        [0; BYTES]
    }
    #[inline(always)]
    fn bits(self, b: [u8; BYTES], from: u32, n: u32) -> [u8; BYTES] {
        map_array(&b, |b| b >> from & ((1 << n) - 1))
    }
    #[inline(always)]
    fn or_shifted(self, a: [u8; BYTES], b: [u8; BYTES], by: u32) -> [u8; BYTES] {
        build_array(|i| a[i] | b[i] << by)
    }
    #[inline(always)]
    fn gather_top_bits(self, b: [[u8; BYTES]; 7]) -> [u8; BYTES] {
        let mut tops = [0; BYTES];
        for (i, b) in b.iter().enumerate() {
            tops = build_array(|n| tops[n] | b[n] >> 7 << i);
        }
        tops
    }
    #[inline(always)]
    fn sub_bytes(self, b: [u8; BYTES], by: u8) -> [u8; BYTES] {
        map_array(&b, |b| b.wrapping_sub(by))
    }
    #[inline(always)]
    fn div_rem_11(self, b: [u8; BYTES]) -> [[u8; BYTES]; 2] {
        [map_array(&b, |b| (b & 127) % 11), map_array(&b, |b| (b & 127) / 11)]
    }

    #[inline(always)]
    unsafe fn broadcast_word(self, at: *const u8) -> [i32; LANES] {
        // SAFETY: the caller's promise.
        [unsafe { at.cast::<i32>().read_unaligned() }; LANES]
    }
    #[inline(always)]
    fn zero(self) -> [i32; LANES] {
        [0; LANES]
    }
    #[inline(always)]
    fn sub_ints(self, a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        build_array(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn shift_left(self, i: [i32; LANES], by: u32) -> [i32; LANES] {
        map_array(&i, |i| i << by)
    }
    #[inline(always)]
    fn dot(self, sum: [i32; LANES], w: [u8; BYTES], x: [i32; LANES]) -> [i32; LANES] {
        build_array(|lane| {
            let x = x[lane].to_le_bytes();
            let product = |i: usize| i32::from(w[4 * lane + i]) * i32::from(x[i] as i8);
            // No dot product of quants overflows; a check for it would prevent vectorization.
            sum[lane].wrapping_add(product(0) + product(1) + product(2) + product(3))
        })
    }
    #[inline(always)]
    fn to_float(self, i: [i32; LANES]) -> V {
        map_array(&i, |i| i as f32)
    }
    #[inline(always)]
    fn load_u8(self, bytes: [u8; LANES]) -> V {
        map_array(&bytes, f32::from)
    }
}

/// Returns the value of an F16, without branches or tables, so that it vectorizes.
#[inline(always)]
fn widen_f16(x: u16) -> f32 {
    const EXPONENT: u32 = 0x7c00;
    let (magnitude, sign) = (u32::from(x & 0x7fff), u32::from(x & 0x8000) << 16);
    // The product changes the exponent from one bias to the other, and normalizes subnormal numbers.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let not_finite = magnitude << 13 | 0x7f80_0000;
    f32::from_bits(sign | if magnitude >= EXPONENT { not_finite } else { finite })
}
