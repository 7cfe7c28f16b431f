//! Whole numbers in lanes: what products of codes are made of.
//!
//! A [`Ints::B`] is 64 bytes: four for each of 16 lanes. A [`Ints::I`] is 16 sums of 32 bits.
//! Invariant: these are exact, so every instruction set gives the same bits.

use super::{LANES, Simd};

/// Bytes of a [`Ints::B`].
pub const BYTES: usize = 4 * LANES;

/// An instruction set's operations on codes.
pub trait Ints: Simd {
    /// 64 bytes without sign.
    type B: Copy;
    /// 16 whole numbers of 32 bits.
    type I: Copy;

    /// Rows of a tile of products of codes, and its runs of 16 outs.
    const CODE_ROWS: usize;
    const CODE_OUTS: usize;

    /// Runs a kernel with all that this CPU has of the set.
    fn call_ints<K: IntKernel>(self, kernel: K) -> K::Out;

    /// # Safety
    /// * 64 bytes can be read at `at`.
    unsafe fn bytes(self, at: *const u8) -> Self::B;
    fn put_bytes(self, b: Self::B, to: &mut [u8; BYTES]);
    fn no_bytes(self) -> Self::B;
    /// Bits `from..from + n` of every byte, n under 8.
    fn bits(self, b: Self::B, from: u32, n: u32) -> Self::B;
    /// a | b << by, where nothing is shifted out of a byte of b.
    fn over(self, a: Self::B, b: Self::B, by: u32) -> Self::B;
    /// The uppermost bits of every byte of seven vectors: the lower seven of one, in their order; its own uppermost is any.
    fn tops(self, b: [Self::B; 7]) -> Self::B;
    /// Every byte less `by`, modulo 256.
    fn less(self, b: Self::B, by: u8) -> Self::B;
    /// The lower seven bits of every byte, below 121, modulo 11 and divided by it.
    fn elevens(self, b: Self::B) -> [Self::B; 2];

    /// The same number in all lanes: of four bytes, or of one word.
    ///
    /// # Safety
    /// * Four bytes can be read at `at`.
    unsafe fn word(self, at: *const u8) -> Self::I;
    fn zero(self) -> Self::I;
    fn sub_ints(self, a: Self::I, b: Self::I) -> Self::I;
    /// i * 2^by.
    fn times_power(self, i: Self::I, by: u32) -> Self::I;
    /// Each lane's sum, plus the products of its four bytes in `w`, without sign, with those in `x`, with sign.
    fn dot(self, sum: Self::I, w: Self::B, x: Self::I) -> Self::I;
    fn to_float(self, i: Self::I) -> Self::V;

    /// Sixteen F16.
    ///
    /// # Safety
    /// * 32 bytes can be read at `at`.
    #[inline(always)]
    unsafe fn halves(self, at: *const u8) -> Self::V {
        // SAFETY: the caller's promise; any bytes are numbers.
        self.load_f16(&unsafe { at.cast::<[u16; LANES]>().read_unaligned() })
    }
    /// Sixteen F32.
    ///
    /// # Safety
    /// * 64 bytes can be read at `at`.
    #[inline(always)]
    unsafe fn singles(self, at: *const u8) -> Self::V {
        // SAFETY: the caller's promise; any bytes are numbers.
        self.load(&unsafe { at.cast::<[f32; LANES]>().read_unaligned() })
    }
    /// Sixteen bytes without sign.
    fn small(self, bytes: [u8; LANES]) -> Self::V;
}

/// Work to be done with an instruction set's whole numbers.
pub trait IntKernel {
    type Out;
    /// Must be `#[inline(always)]`.
    fn run<S: Ints>(self, simd: S) -> Self::Out;
}
