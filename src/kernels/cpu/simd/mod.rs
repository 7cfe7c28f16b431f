//! Sixteen lanes of f32, whatever the register size: kernels are written once, generic over [`Simd`].
//!
//! A kernel is a value with a generic, always-inlined `run`. [`Simd::call`] is the one place per instruction
//! set where it is compiled with that set's features. Everything a kernel calls must be `#[inline(always)]`
//! and free of closures, or it is compiled without these features.
//!
//! Invariant: every lane operation is the IEEE operation, and reductions have one fixed tree, so instruction
//! sets with fused multiply-add give the same bits.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod ints;
mod portable;

pub use ints::{BYTES, IntKernel, Ints};

mod functions;

pub use functions::{SHIFT, exp, exp_excess, normal_tail, sigmoid, tanh};

use crate::backend::DeviceError;
use crate::cpu::Isa;
use crate::host::HostBuf;
use crate::quant::QuantType;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

/// Lanes of a vector.
pub const LANES: usize = 16;

/// An instruction set. A value of the type proves that this CPU supports it.
pub trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type V: Copy;

    /// Numbers of rows that tiles of the F32 GEMM have, ascending, beginning with 1. They are few, because
    /// kernels are compiled for each of them.
    const TILE_ROWS: &'static [usize];
    /// Outputs of the largest tile of the F32 GEMM: its sums and one operand's vectors fit the registers.
    const TILE_OUTPUTS: usize;
    /// Number of accumulators that stay in registers: as many as hide the latency of an addition, up to 12.
    const ACCUMULATORS: usize;
    /// Query vectors that share a pass over a block of K or V.
    const TILE_QUERIES: usize;

    /// Runs a kernel with this instruction set's features.
    fn call<K: Kernel>(self, kernel: K) -> K::Out;

    /// Returns `x` in all lanes.
    fn splat(self, x: f32) -> Self::V;
    /// Loads F32 numbers.
    fn load(self, x: &[f32; LANES]) -> Self::V;
    /// Loads F16 numbers, given as bits.
    fn load_f16(self, x: &[u16; LANES]) -> Self::V;
    /// Loads BF16 numbers, given as bits.
    fn load_bf16(self, x: &[u16; LANES]) -> Self::V;
    /// Loads signed bytes and converts them.
    fn load_i8(self, x: &[i8; LANES]) -> Self::V;
    /// Loads the low nibbles of sixteen bytes, and the high nibbles.
    fn load_nibbles(self, x: &[u8; LANES]) -> [Self::V; 2];
    /// Stores all lanes.
    fn store(self, v: Self::V, to: &mut [f32; LANES]);

    /// Returns a + b.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns a - b.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns a * b.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns a / b.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns a * b + c, rounded once if the instruction set can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// Returns the lesser; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns the greater; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// Returns `v` in the first `n` lanes, `rest` in the others.
    fn select_first(self, n: usize, v: Self::V, rest: Self::V) -> Self::V;
    /// Returns `v` in the lanes where a < b, `rest` in the others, which include those with a NaN.
    fn where_less(self, a: Self::V, b: Self::V, v: Self::V, rest: Self::V) -> Self::V;
    /// Returns v * 2^n, rounded once, where n is the integer that the bits of `shifted` exceed those of
    /// [`SHIFT`] by.
    fn scale(self, v: Self::V, shifted: Self::V) -> Self::V;

    /// Returns the largest lane; any lane if one is NaN.
    fn largest(self, v: Self::V) -> f32;
    /// Returns the sum of the lanes. Halves are added to halves: 16 to 8 to 4 to 2 to 1.
    fn sum(self, v: Self::V) -> f32;
    /// Returns the sums of four vectors, each computed like `sum`.
    #[inline(always)]
    fn sum4(self, v: [Self::V; 4]) -> [f32; 4] {
        [self.sum(v[0]), self.sum(v[1]), self.sum(v[2]), self.sum(v[3])]
    }
}

/// Returns whether a tile size is among `sizes`: guards keep kernels of other sizes from being compiled.
pub const fn contains(sizes: &[usize], size: usize) -> bool {
    let mut i = 0;
    while i < sizes.len() {
        if sizes[i] == size {
            return true;
        }
        i += 1;
    }
    false
}

/// A computation that is compiled for each instruction set.
pub trait Kernel {
    type Out;
    /// Runs the kernel. Must be `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Out;
}

/// The instruction set that the backend uses, chosen at start.
#[derive(Clone, Copy)]
pub enum Level {
    #[cfg(target_arch = "x86_64")]
    Avx512(avx512::Avx512<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512F(avx512::Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx2(avx2::Avx2),
    Portable(portable::Portable),
}

impl std::fmt::Debug for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.isa().name())
    }
}

impl Level {
    /// Returns the best instruction set of this CPU.
    pub fn best() -> Level {
        Level::new(Isa::Auto).expect("the portable one needs nothing; this is a bug")
    }

    /// Returns the requested instruction set, or an error if this CPU does not support it.
    pub fn new(isa: Isa) -> Result<Level, DeviceError> {
        let found = match isa {
            Isa::Auto => Level::avx512().or_else(Level::avx2).or_else(Level::portable),
            Isa::Amx | Isa::Avx512 => Level::avx512(),
            Isa::Avx512F => Level::avx512f(),
            Isa::Avx2 => Level::avx2(),
            Isa::Portable => Level::portable(),
        };
        found.ok_or_else(|| DeviceError::Unsupported(format!("this CPU does not support {}", isa.name())))
    }

    #[cfg(target_arch = "x86_64")]
    fn avx512() -> Option<Level> {
        avx512::Avx512::new()?.with_vnni().map(Level::Avx512).or_else(Level::avx512f)
    }

    #[cfg(target_arch = "x86_64")]
    fn avx512f() -> Option<Level> {
        avx512::Avx512::new().map(Level::Avx512F)
    }

    #[cfg(target_arch = "x86_64")]
    fn avx2() -> Option<Level> {
        avx2::Avx2::new().map(Level::Avx2)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn avx512() -> Option<Level> {
        None
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn avx512f() -> Option<Level> {
        None
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn avx2() -> Option<Level> {
        None
    }

    fn portable() -> Option<Level> {
        Some(Level::Portable(portable::Portable))
    }

    /// Returns the instruction set of this level.
    pub fn isa(self) -> Isa {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(_) => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512F(_) => Isa::Avx512F,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(_) => Isa::Avx2,
            Level::Portable(_) => Isa::Portable,
        }
    }

    /// Runs an integer kernel with the level's instruction set.
    pub fn run_ints<K: IntKernel>(self, kernel: K) -> K::Out {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) => simd.call_ints(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512F(simd) => simd.call_ints(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(simd) => simd.call_ints(kernel),
            Level::Portable(simd) => simd.call_ints(kernel),
        }
    }

    /// Runs a kernel with the level's instruction set.
    pub fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512(simd) => simd.without_vnni().call(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512F(simd) => simd.call(kernel),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2(simd) => simd.call(kernel),
            Level::Portable(simd) => simd.call(kernel),
        }
    }
}

/// A floating-point storage format: one type per [`QuantType`] that is not blocked.
pub trait FloatFormat: Send + Sync + 'static {
    /// One stored number.
    type Raw: Copy + Default + Send + Sync + 'static;
    /// Loads sixteen numbers, widened exactly.
    fn load<S: Simd>(simd: S, numbers: &[Self::Raw; LANES]) -> S::V;
    /// Encodes `values`, rounded to nearest.
    fn encode(values: &[f32], numbers: &mut [Self::Raw]);
    /// Decodes numbers to F32.
    fn decode(numbers: &[Self::Raw], values: &mut [f32]);
    /// Returns a buffer's numbers.
    fn values(buf: &HostBuf) -> &[Self::Raw];
    /// Returns a buffer's numbers for writing.
    fn values_mut(buf: &mut HostBuf) -> &mut [Self::Raw];
}

/// [`QuantType::F32`].
pub struct F32;
/// [`QuantType::F16`].
pub struct F16;
/// [`QuantType::BF16`].
pub struct Bf16;

impl FloatFormat for F32 {
    type Raw = f32;
    #[inline(always)]
    fn load<S: Simd>(simd: S, numbers: &[f32; LANES]) -> S::V {
        simd.load(numbers)
    }
    fn encode(values: &[f32], numbers: &mut [f32]) {
        numbers.copy_from_slice(values);
    }
    fn decode(numbers: &[f32], values: &mut [f32]) {
        values.copy_from_slice(numbers);
    }
    fn values(buf: &HostBuf) -> &[f32] {
        buf.f32()
    }
    fn values_mut(buf: &mut HostBuf) -> &mut [f32] {
        buf.f32_mut()
    }
}

macro_rules! half_format {
    ($format:ty, $half:ty, $load:ident) => {
        impl FloatFormat for $format {
            type Raw = u16;
            #[inline(always)]
            fn load<S: Simd>(simd: S, numbers: &[u16; LANES]) -> S::V {
                simd.$load(numbers)
            }
            fn encode(values: &[f32], numbers: &mut [u16]) {
                numbers.reinterpret_cast_mut::<$half>().convert_from_f32_slice(values);
            }
            fn decode(numbers: &[u16], values: &mut [f32]) {
                numbers.reinterpret_cast::<$half>().convert_to_f32_slice(values);
            }
            fn values(buf: &HostBuf) -> &[u16] {
                buf.u16()
            }
            fn values_mut(buf: &mut HostBuf) -> &mut [u16] {
                buf.u16_mut()
            }
        }
    };
}
half_format!(F16, half::f16, load_f16);
half_format!(Bf16, half::bf16, load_bf16);

/// An operation that is generic over the [`FloatFormat`], which is known only at run time.
pub trait FloatFormatOp {
    type Out;
    /// Runs the operation with one format.
    fn run<C: FloatFormat>(self) -> Self::Out;
}

/// Calls `op` with the [`FloatFormat`] of `ty`, which must not be blocked.
pub fn dispatch_float_format<O: FloatFormatOp>(ty: QuantType, op: O) -> O::Out {
    match ty {
        QuantType::F32 => op.run::<F32>(),
        QuantType::F16 => op.run::<F16>(),
        QuantType::BF16 => op.run::<Bf16>(),
        _ => unreachable!("{ty} is a blocked format; this is a bug"),
    }
}

/// Loads up to 16 numbers; lanes beyond them are zero.
#[inline(always)]
pub fn load_partial<S: Simd, C: FloatFormat>(simd: S, numbers: &[C::Raw]) -> S::V {
    let mut padded = [C::Raw::default(); LANES];
    padded[..numbers.len()].copy_from_slice(numbers);
    C::load(simd, &padded)
}

/// Stores the first lanes of `v`, as many as `to` holds.
#[inline(always)]
pub fn store_partial<S: Simd>(simd: S, v: S::V, to: &mut [f32]) {
    let mut lanes = [0.0; LANES];
    simd.store(v, &mut lanes);
    to.copy_from_slice(&lanes[..to.len()]);
}

/// Prefetches the cache line at `address`, which need not be valid, to the second-level cache.
#[inline(always)]
pub fn prefetch_l2<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and faults on no address; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Prefetches the cache line at `address`, which need not be valid, to the first-level cache.
#[inline(always)]
pub fn prefetch_l1<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests;
