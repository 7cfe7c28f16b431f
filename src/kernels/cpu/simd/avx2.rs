//! AVX2 with FMA and F16C: a vector is two registers.
//!
//! Invariant: an `Avx2` exists only on a CPU that has the features its shims enable.

use super::ints::{BYTES, IntKernel, Ints};
use super::{Kernel, LANES, SHIFT, Simd};
use std::arch::x86_64::*;

/// Proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// Returns the proof if this CPU has the features.
    pub fn new() -> Option<Avx2> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx2(()))
    }
}

/// Evaluates an expression of AVX2, FMA and F16C intrinsics.
macro_rules! proven {
    ($expression:expr) => {
        // SAFETY: `self` proves the features; memory is touched through references of 16 lanes only.
        unsafe { $expression }
    };
}

/// Sixteen f32: lanes 0..8 and 8..16.
#[derive(Clone, Copy)]
pub struct V(__m256, __m256);

/// Implements operations that apply one intrinsic to both halves.
macro_rules! lanewise {
    ($($name:ident ( $($arg:ident),* ) = $intrinsic:ident;)*) => {
        $(#[inline(always)]
        fn $name(self, $($arg: V),*) -> V {
            proven!(V($intrinsic($($arg.0),*), $intrinsic($($arg.1),*)))
        })*
    };
}

#[target_feature(enable = "avx2,fma,f16c")]
fn shim<K: Kernel>(simd: Avx2, kernel: K) -> K::Out {
    kernel.run(simd)
}

impl Simd for Avx2 {
    type V = V;
    const TILE_ROWS: &[usize] = &[1, 3];
    const TILE_OUTPUTS: usize = 2;
    const ACCUMULATORS: usize = 5;
    const TILE_QUERIES: usize = 2;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        proven!(shim(self, kernel))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V {
        proven!(V(_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }
    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> V {
        proven!(V(_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x[8..].as_ptr())))
    }
    #[inline(always)]
    fn load_f16(self, x: &[u16; LANES]) -> V {
        proven!(V(
            _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(x[8..].as_ptr().cast())),
        ))
    }
    #[inline(always)]
    fn load_bf16(self, x: &[u16; LANES]) -> V {
        proven!({
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(x[8..].as_ptr().cast()));
            V(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        })
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> V {
        proven!({
            let bytes = _mm_loadu_si128(x.as_ptr().cast());
            let (low, high) = (_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)));
            V(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        })
    }
    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES]) -> [V; 2] {
        proven!({
            let (bytes, mask) = (_mm_loadu_si128(x.as_ptr().cast()), _mm_set1_epi8(15));
            let low = _mm_and_si128(bytes, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
            [widen_u8(low), widen_u8(high)]
        })
    }
    #[inline(always)]
    fn store(self, v: V, to: &mut [f32; LANES]) {
        proven!({
            _mm256_storeu_ps(to.as_mut_ptr(), v.0);
            _mm256_storeu_ps(to[8..].as_mut_ptr(), v.1);
        })
    }

    lanewise! {
        add(a, b) = _mm256_add_ps;
        sub(a, b) = _mm256_sub_ps;
        mul(a, b) = _mm256_mul_ps;
        div(a, b) = _mm256_div_ps;
        mul_add(a, b, c) = _mm256_fmadd_ps;
        min(a, b) = _mm256_min_ps;
        max(a, b) = _mm256_max_ps;
        where_less(a, b, v, rest) = where_less_half;
        scale(v, shifted) = scale_half;
    }

    #[inline(always)]
    fn select_first(self, n: usize, v: V, rest: V) -> V {
        proven!({
            let n = _mm256_set1_epi32(n.min(LANES) as i32);
            let low = _mm256_cmpgt_epi32(n, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
            let high = _mm256_cmpgt_epi32(n, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15));
            V(
                _mm256_blendv_ps(rest.0, v.0, _mm256_castsi256_ps(low)),
                _mm256_blendv_ps(rest.1, v.1, _mm256_castsi256_ps(high)),
            )
        })
    }
    #[inline(always)]
    fn largest(self, v: V) -> f32 {
        proven!({
            let eight = _mm256_max_ps(v.0, v.1);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
    #[inline(always)]
    fn sum(self, v: V) -> f32 {
        proven!({
            let eight = _mm256_add_ps(v.0, v.1);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)))
        })
    }
}

/// [`Simd::where_less`] for one register.
///
/// # Safety
/// - The CPU has AVX2.
#[inline(always)]
unsafe fn where_less_half(a: __m256, b: __m256, v: __m256, rest: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_blendv_ps(rest, v, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
}

/// Converts sixteen unsigned bytes to F32.
///
/// # Safety
/// - The CPU has AVX2.
#[inline(always)]
unsafe fn widen_u8(bytes: __m128i) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128::<8>(bytes)));
        V(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
    }
}

/// [`Simd::scale`] for one register. Multiplies by two factors, since 2^n alone may not be representable.
///
/// # Safety
/// - The CPU has AVX2.
#[inline(always)]
unsafe fn scale_half(v: __m256, shifted: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(SHIFT.to_bits() as i32));
        let half = _mm256_srai_epi32::<1>(n);
        let bias = _mm256_set1_epi32(127);
        let low = _mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias));
        let high = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_sub_epi32(n, half), bias));
        _mm256_mul_ps(_mm256_mul_ps(v, _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn int_shim<K: IntKernel>(simd: Avx2, kernel: K) -> K::Out {
    kernel.run(simd)
}

/// Lanes 0..8 and 8..16 of 32-bit integers, or of four bytes each.
#[derive(Clone, Copy)]
pub struct W(__m256i, __m256i);

/// Evaluates an expression for both halves.
macro_rules! both {
    ([$($half:ident = $whole:ident),*] $expression:expr) => {
        // SAFETY: `self` proves the features.
        unsafe { W({ $(let $half = $whole.0;)* $expression }, { $(let $half = $whole.1;)* $expression }) }
    };
}

impl Ints for Avx2 {
    type B = W;
    type I = W;
    const INT8_TILE_ROWS: &[usize] = &[1, 2];
    const INT8_TILE_PANELS: usize = 1;

    #[inline(always)]
    fn call_ints<K: IntKernel>(self, kernel: K) -> K::Out {
        proven!(int_shim(self, kernel))
    }

    #[inline(always)]
    unsafe fn load_bytes(self, at: *const u8) -> W {
        // SAFETY: `self` proves the features, the caller the 64 bytes.
        unsafe { W(_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())) }
    }
    #[inline(always)]
    fn store_bytes(self, b: W, to: &mut [u8; BYTES]) {
        let to = to.as_mut_ptr();
        proven!({
            _mm256_storeu_si256(to.cast(), b.0);
            _mm256_storeu_si256(to.add(32).cast(), b.1);
        })
    }
    #[inline(always)]
    fn zero_bytes(self) -> W {
        self.zero()
    }
    #[inline(always)]
    fn bits(self, b: W, from: u32, n: u32) -> W {
        let mask = ((1u32 << n) - 1) as i8;
        both!([b = b] {
            let shifted = _mm256_srl_epi16(b, _mm_cvtsi32_si128(from as i32));
            _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
        })
    }
    #[inline(always)]
    fn or_shifted(self, a: W, b: W, by: u32) -> W {
        both!([a = a, b = b] _mm256_or_si256(a, _mm256_sll_epi16(b, _mm_cvtsi32_si128(by as i32))))
    }
    #[inline(always)]
    fn gather_top_bits(self, b: [W; 7]) -> W {
        let mut tops = b[0];
        for &b in &b[1..] {
            tops = both!([a = tops, b = b] {
                let top = _mm256_set1_epi8(-128);
                _mm256_or_si256(_mm256_and_si256(b, top), _mm256_andnot_si256(top, _mm256_srli_epi16::<1>(a)))
            });
        }
        both!([a = tops] _mm256_srli_epi16::<1>(a))
    }
    #[inline(always)]
    fn sub_bytes(self, b: W, by: u8) -> W {
        both!([b = b] _mm256_sub_epi8(b, _mm256_set1_epi8(by as i8)))
    }
    #[inline(always)]
    fn div_rem_11(self, b: W) -> [W; 2] {
        // b / 11 = b * 373 / 4096 for b below 128, in 16-bit words.
        let divided = both!([b = b] {
            let low = _mm256_and_si256(b, _mm256_set1_epi16(127));
            let high = _mm256_and_si256(_mm256_srli_epi16::<8>(b), _mm256_set1_epi16(127));
            let by = _mm256_set1_epi16(373);
            let low = _mm256_srli_epi16::<12>(_mm256_mullo_epi16(low, by));
            let high = _mm256_srli_epi16::<12>(_mm256_mullo_epi16(high, by));
            _mm256_or_si256(low, _mm256_slli_epi16::<8>(high))
        });
        let rest = both!([b = b, d = divided] {
            let eleven = _mm256_mullo_epi16(d, _mm256_set1_epi16(11));
            _mm256_sub_epi8(_mm256_and_si256(b, _mm256_set1_epi8(127)), eleven)
        });
        [rest, divided]
    }

    #[inline(always)]
    unsafe fn broadcast_word(self, at: *const u8) -> W {
        // SAFETY: `self` proves the features, the caller the four bytes.
        let word = unsafe { _mm256_set1_epi32(at.cast::<i32>().read_unaligned()) };
        W(word, word)
    }
    #[inline(always)]
    fn zero(self) -> W {
        proven!(W(_mm256_setzero_si256(), _mm256_setzero_si256()))
    }
    #[inline(always)]
    fn sub_ints(self, a: W, b: W) -> W {
        both!([a = a, b = b] _mm256_sub_epi32(a, b))
    }
    #[inline(always)]
    fn shift_left(self, i: W, by: u32) -> W {
        both!([i = i] _mm256_sll_epi32(i, _mm_cvtsi32_si128(by as i32)))
    }
    #[inline(always)]
    fn dot(self, sum: W, w: W, x: W) -> W {
        // The sum of two products of full bytes does not fit 16 bits, so the top bit of w is multiplied
        // separately.
        both!([sum = sum, w = w, x = x] {
            let ones = _mm256_set1_epi16(1);
            let low = _mm256_maddubs_epi16(_mm256_and_si256(w, _mm256_set1_epi8(127)), x);
            let upper = _mm256_and_si256(_mm256_srli_epi16::<7>(w), _mm256_set1_epi8(1));
            let high = _mm256_madd_epi16(_mm256_maddubs_epi16(upper, x), _mm256_set1_epi16(128));
            _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(low, ones), high))
        })
    }
    #[inline(always)]
    fn to_float(self, i: W) -> V {
        proven!(V(_mm256_cvtepi32_ps(i.0), _mm256_cvtepi32_ps(i.1)))
    }
    #[inline(always)]
    fn load_u8(self, bytes: [u8; LANES]) -> V {
        // SAFETY: `self` proves the features; the array holds the 16 bytes that are read.
        unsafe { widen_u8(_mm_loadu_si128(bytes.as_ptr().cast())) }
    }
}
