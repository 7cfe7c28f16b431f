//! AVX-512: a vector is one register.
//!
//! Invariant: an `Avx512` exists only on a CPU that has the features its shim enables.

use super::{Kernel, LANES, SHIFT, Simd};
use std::arch::x86_64::*;

/// Proof that this CPU has AVX-512F, AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The proof, if there is one.
    pub fn new() -> Option<Avx512> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx512(()))
    }
}

/// An expression of AVX-512F intrinsics.
macro_rules! proven {
    ($expression:expr) => {
        // SAFETY: `self` proves the features; memory is touched through references of 16 lanes only.
        unsafe { $expression }
    };
}

#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn shim<K: Kernel>(simd: Avx512, kernel: K) -> K::Out {
    kernel.run(simd)
}

impl Simd for Avx512 {
    type V = __m512;
    const TILE_ROWS: usize = 8;
    const TILE_OUTS: usize = 3;
    const TILE_QUERIES: usize = 8;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        proven!(shim(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        proven!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> __m512 {
        proven!(_mm512_loadu_ps(x.as_ptr()))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> __m512 {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> __m512 {
        proven!({
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        })
    }
    #[inline(always)]
    fn store(self, v: __m512, to: &mut [f32; LANES]) {
        proven!(_mm512_storeu_ps(to.as_mut_ptr(), v))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        proven!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        proven!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn first(self, n: usize, v: __m512, rest: __m512) -> __m512 {
        let lanes = ((1u32 << n.min(LANES)) - 1) as u16;
        proven!(_mm512_mask_blend_ps(lanes, rest, v))
    }
    #[inline(always)]
    fn where_less(self, a: __m512, b: __m512, v: __m512, rest: __m512) -> __m512 {
        proven!(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), rest, v))
    }
    #[inline(always)]
    fn scale(self, v: __m512, shifted: __m512) -> __m512 {
        proven!({
            let n = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(SHIFT.to_bits() as i32));
            let half = _mm512_srai_epi32::<1>(n);
            let bias = _mm512_set1_epi32(127);
            let low = _mm512_slli_epi32::<23>(_mm512_add_epi32(half, bias));
            let high = _mm512_slli_epi32::<23>(_mm512_add_epi32(_mm512_sub_epi32(n, half), bias));
            _mm512_mul_ps(_mm512_mul_ps(v, _mm512_castsi512_ps(low)), _mm512_castsi512_ps(high))
        })
    }
    #[inline(always)]
    fn largest(self, v: __m512) -> f32 {
        proven!(_mm512_reduce_max_ps(v))
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        self.sum4([v; 4])[0]
    }
    #[inline(always)]
    fn sum4(self, v: [__m512; 4]) -> [f32; 4] {
        // Four quarters to a register. `pair` folds two vectors to their halves' sums (8 lanes each),
        // the next fold to 4 lanes of each of the four; the last two work within the quarters.
        proven!({
            let pair = [fold(v[0], v[1]), fold(v[2], v[3])];
            let four = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(pair[0], pair[1]),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(pair[0], pair[1]),
            );
            let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
            let quarter = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_permutexvar_ps(quarter, one)));
            sums
        })
    }
}

/// Lanes i and i + 8 of `a`, added, in the lower half; those of `b` in the upper.
///
/// # Safety
/// - The CPU has AVX-512F.
#[inline(always)]
unsafe fn fold(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
        )
    }
}
