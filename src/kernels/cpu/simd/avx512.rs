//! AVX-512: a vector is one register.
//!
//! VNNI and VBMI, which the first CPUs with AVX-512 lack, are used for int8 dot products where they are
//! available, which the type's parameter states.
//! Invariant: an `Avx512` exists only on a CPU that has the features its shims enable.

use super::ints::{BYTES, IntKernel, Ints};
use super::{Kernel, LANES, SHIFT, Simd};
use std::arch::x86_64::*;

/// Evaluates an expression of AVX-512F intrinsics.
macro_rules! proven {
    ($expression:expr) => {
        // SAFETY: `self` proves the features; memory is touched through references of 16 lanes only.
        unsafe { $expression }
    };
}

/// Proof that this CPU has AVX-512 F and BW, AVX2, FMA and F16C; if VNNI is set, also VNNI and VBMI.
#[derive(Clone, Copy)]
pub struct Avx512<const VNNI: bool>(());

impl Avx512<false> {
    /// Returns the proof if this CPU has the features.
    pub fn new() -> Option<Avx512<false>> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Avx512(()))
    }

    /// Returns the proof that this CPU has VNNI and VBMI too, if it does.
    pub fn with_vnni(self) -> Option<Avx512<true>> {
        let has = is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512vbmi");
        has.then_some(Avx512(()))
    }
}

impl Avx512<true> {
    /// Drops VNNI and VBMI, so that kernels that do not use them are not compiled twice.
    pub fn without_vnni(self) -> Avx512<false> {
        Avx512(())
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx2,fma,f16c")]
fn shim<K: Kernel, const VNNI: bool>(simd: Avx512<VNNI>, kernel: K) -> K::Out {
    kernel.run(simd)
}

#[target_feature(enable = "avx512f,avx512bw,avx2,fma,f16c")]
fn int_shim<K: IntKernel>(simd: Avx512<false>, kernel: K) -> K::Out {
    kernel.run(simd)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx512vbmi,avx2,fma,f16c")]
fn vnni_shim<K: IntKernel>(simd: Avx512<true>, kernel: K) -> K::Out {
    kernel.run(simd)
}

impl<const VNNI: bool> Simd for Avx512<VNNI> {
    type V = __m512;
    const TILE_ROWS: &[usize] = &[1, 2, 4, 6, 8];
    const TILE_OUTPUTS: usize = 3;
    const ACCUMULATORS: usize = 12;
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
    fn load_i8(self, x: &[i8; LANES]) -> __m512 {
        proven!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))))
    }
    #[inline(always)]
    fn load_nibbles(self, x: &[u8; LANES]) -> [__m512; 2] {
        proven!({
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let low = _mm512_and_si512(wide, _mm512_set1_epi32(15));
            [_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(wide))]
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
    fn select_first(self, n: usize, v: __m512, rest: __m512) -> __m512 {
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
        // A register has four quarters. `pair` folds two vectors to the sums of their halves (8 lanes each),
        // the next fold gives 4 lanes of each of the four vectors, and the last two work within the quarters.
        proven!({
            let pair = [fold_halves(v[0], v[1]), fold_halves(v[2], v[3])];
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

impl<const VNNI: bool> Ints for Avx512<VNNI> {
    type B = __m512i;
    type I = __m512i;
    const INT8_TILE_ROWS: &[usize] = &[1, 2, 4, 6];
    const INT8_TILE_PANELS: usize = 2;

    #[inline(always)]
    fn call_ints<K: IntKernel>(self, kernel: K) -> K::Out {
        match VNNI {
            true => proven!(vnni_shim(Avx512::<true>(()), kernel)),
            false => proven!(int_shim(Avx512::<false>(()), kernel)),
        }
    }

    #[inline(always)]
    unsafe fn load_bytes(self, at: *const u8) -> __m512i {
        // SAFETY: `self` proves the features, the caller the 64 bytes.
        unsafe { _mm512_loadu_si512(at.cast()) }
    }
    #[inline(always)]
    fn store_bytes(self, b: __m512i, to: &mut [u8; BYTES]) {
        proven!(_mm512_storeu_si512(to.as_mut_ptr().cast(), b))
    }
    #[inline(always)]
    fn zero_bytes(self) -> __m512i {
        self.zero()
    }
    #[inline(always)]
    fn bits(self, b: __m512i, from: u32, n: u32) -> __m512i {
        let mask = ((1u32 << n) - 1) as i8;
        proven!({
            let shifted = _mm512_srl_epi16(b, _mm_cvtsi32_si128(from as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi8(mask))
        })
    }
    #[inline(always)]
    fn or_shifted(self, a: __m512i, b: __m512i, by: u32) -> __m512i {
        proven!(_mm512_or_si512(a, _mm512_sll_epi16(b, _mm_cvtsi32_si128(by as i32))))
    }
    #[inline(always)]
    fn gather_top_bits(self, b: [__m512i; 7]) -> __m512i {
        // Selects the second operand's bits where those of the last operand are set, the first operand's
        // elsewhere.
        const CHOICE: i32 = 0b1101_1000;
        proven!({
            let mut tops = b[0];
            for b in &b[1..] {
                tops = _mm512_ternarylogic_epi32::<CHOICE>(
                    _mm512_srli_epi16::<1>(tops),
                    *b,
                    _mm512_set1_epi8(-128),
                );
            }
            _mm512_srli_epi16::<1>(tops)
        })
    }
    #[inline(always)]
    fn sub_bytes(self, b: __m512i, by: u8) -> __m512i {
        proven!(_mm512_sub_epi8(b, _mm512_set1_epi8(by as i8)))
    }
    #[inline(always)]
    fn div_rem_11(self, b: __m512i) -> [__m512i; 2] {
        if VNNI {
            // SAFETY: VNNI proves VBMI, whose permutation uses the low seven bits; the tables are as long as
            // what is read.
            return unsafe {
                let at = DIV_11.0.as_ptr();
                let (low, high) = (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast()));
                let divided = _mm512_permutex2var_epi8(low, b, high);
                // A second 128-entry lookup would occupy the permutation port longer than this 16-entry one.
                let elevens = _mm512_broadcast_i32x4(_mm_loadu_si128(TIMES_11.as_ptr().cast()));
                let eleven = _mm512_shuffle_epi8(elevens, divided);
                [_mm512_sub_epi8(_mm512_and_si512(b, _mm512_set1_epi8(127)), eleven), divided]
            };
        }
        proven!({
            // b / 11 = b * 373 / 4096 for b below 128, in 16-bit words.
            let by = _mm512_set1_epi16(373);
            let low = _mm512_and_si512(b, _mm512_set1_epi16(127));
            let high = _mm512_and_si512(_mm512_srli_epi16::<8>(b), _mm512_set1_epi16(127));
            let low = _mm512_srli_epi16::<12>(_mm512_mullo_epi16(low, by));
            let high = _mm512_srli_epi16::<12>(_mm512_mullo_epi16(high, by));
            let divided = _mm512_or_si512(low, _mm512_slli_epi16::<8>(high));
            let eleven = _mm512_mullo_epi16(divided, _mm512_set1_epi16(11));
            [_mm512_sub_epi8(_mm512_and_si512(b, _mm512_set1_epi8(127)), eleven), divided]
        })
    }

    #[inline(always)]
    unsafe fn broadcast_word(self, at: *const u8) -> __m512i {
        // SAFETY: `self` proves the features, the caller the four bytes.
        unsafe { _mm512_set1_epi32(at.cast::<i32>().read_unaligned()) }
    }
    #[inline(always)]
    fn zero(self) -> __m512i {
        proven!(_mm512_setzero_si512())
    }
    #[inline(always)]
    fn sub_ints(self, a: __m512i, b: __m512i) -> __m512i {
        proven!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn shift_left(self, i: __m512i, by: u32) -> __m512i {
        proven!(_mm512_sll_epi32(i, _mm_cvtsi32_si128(by as i32)))
    }
    #[inline(always)]
    fn dot(self, sum: __m512i, w: __m512i, x: __m512i) -> __m512i {
        if VNNI {
            // SAFETY: the parameter proves VNNI.
            return unsafe { _mm512_dpbusd_epi32(sum, w, x) };
        }
        proven!({
            // The sum of two products of full bytes does not fit 16 bits, so the top bit of w is multiplied
            // separately.
            let low = _mm512_maddubs_epi16(_mm512_and_si512(w, _mm512_set1_epi8(127)), x);
            let upper = _mm512_and_si512(_mm512_srli_epi16::<7>(w), _mm512_set1_epi8(1));
            let high = _mm512_madd_epi16(_mm512_maddubs_epi16(upper, x), _mm512_set1_epi16(128));
            _mm512_add_epi32(sum, _mm512_add_epi32(_mm512_madd_epi16(low, _mm512_set1_epi16(1)), high))
        })
    }
    #[inline(always)]
    fn to_float(self, i: __m512i) -> __m512 {
        proven!(_mm512_cvtepi32_ps(i))
    }
    #[inline(always)]
    fn load_u8(self, bytes: [u8; LANES]) -> __m512 {
        proven!(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()))))
    }
}

/// Quotients of 0 to 127 by 11, in two vectors.
static DIV_11: AlignedTable = AlignedTable(div_11_table());
/// 11 times 0 to 11.
static TIMES_11: [u8; 16] = [0, 11, 22, 33, 44, 55, 66, 77, 88, 99, 110, 121, 0, 0, 0, 0];

/// A lookup table, aligned to a cache line.
#[repr(align(64))]
struct AlignedTable([u8; 128]);

/// Returns the quotients of 0 to 127 by 11.
const fn div_11_table() -> [u8; 128] {
    let mut table = [0; 128];
    let mut i = 0;
    while i < 128 {
        table[i] = (i / 11) as u8;
        i += 1;
    }
    table
}

/// Adds lanes i and i + 8: those of `a` give the low half, those of `b` the high half.
///
/// # Safety
/// - The CPU has AVX-512F.
#[inline(always)]
unsafe fn fold_halves(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_add_ps(
            _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b),
            _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b),
        )
    }
}
