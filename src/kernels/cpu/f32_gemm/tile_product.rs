//! The products of one step of the columns.
//!
//! Invariant: each sum gets one product, with one fused multiply-add.

use crate::cpu::simd::{LANES, Simd};

/// Adds the products of one vector of each row and one of each output to sums (R, O).
#[inline(always)]
pub fn add_products<S: Simd, const R: usize, const O: usize>(
    simd: S,
    x: &[[f32; LANES]; R],
    ws: &[S::V; O],
    sums: &mut [[S::V; O]; R],
) {
    for r in 0..R {
        let x = simd.load(&x[r]);
        for o in 0..O {
            sums[r][o] = simd.mul_add(x, ws[o], sums[r][o]);
        }
    }
}
