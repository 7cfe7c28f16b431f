//! Plain arrays, for CPUs without a set of their own here; the compiler vectorises what it can.
//!
//! Invariant: needs nothing of the CPU. Its products are rounded before they are added, so its bits differ
//! from those of the sets with fused multiply-add.

use super::stored::widen_f16;
use super::{Kernel, LANES, SHIFT, Simd};

/// No instruction set in particular.
#[derive(Clone, Copy)]
pub struct Portable;

type V = [f32; LANES];

#[inline(always)]
fn zip(a: V, b: V, op: impl Fn(f32, f32) -> f32) -> V {
    std::array::from_fn(|i| op(a[i], b[i]))
}

impl Simd for Portable {
    type V = V;
    const TILE_ROWS: usize = 3;
    const TILE_OUTS: usize = 2;
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
        x.map(widen_f16)
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> V {
        x.map(|x| f32::from_bits(u32::from(x) << 16))
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
        std::array::from_fn(|i| a[i] * b[i] + c[i])
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
    fn first(self, n: usize, v: V, rest: V) -> V {
        std::array::from_fn(|i| if i < n { v[i] } else { rest[i] })
    }
    #[inline(always)]
    fn where_less(self, a: V, b: V, v: V, rest: V) -> V {
        std::array::from_fn(|i| if a[i] < b[i] { v[i] } else { rest[i] })
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
