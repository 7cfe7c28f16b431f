//! Integer operations in lanes, from which int8 dot products are built.
//!
//! A [`Ints::B`] is 64 bytes: four for each of 16 lanes. A [`Ints::I`] is 16 sums of 32 bits.
//! Invariant: these operations are exact, so every instruction set gives the same bits.

use super::{LANES, Simd};

/// Bytes of a [`Ints::B`].
pub const BYTES: usize = 4 * LANES;

/// The integer operations of an instruction set.
pub trait Ints: Simd {
    /// 64 unsigned bytes.
    type B: Copy;
    /// 16 signed integers of 32 bits.
    type I: Copy;

    /// Numbers of rows that tiles of the int8 GEMM have, ascending, beginning with 1 and 2. They are few,
    /// because kernels are compiled for each of them and each format.
    const INT8_TILE_ROWS: &'static [usize];
    /// Panels of 16 outputs of the largest tile of the int8 GEMM.
    const INT8_TILE_PANELS: usize;

    /// Runs a kernel with all features of this instruction set that this CPU has.
    fn call_ints<K: IntKernel>(self, kernel: K) -> K::Out;

    /// Loads 64 bytes.
    ///
    /// # Safety
    /// * 64 bytes can be read at `at`.
    unsafe fn load_bytes(self, at: *const u8) -> Self::B;
    /// Stores 64 bytes.
    fn store_bytes(self, b: Self::B, to: &mut [u8; BYTES]);
    /// Returns 64 zero bytes.
    fn zero_bytes(self) -> Self::B;
    /// Returns bits `from..from + n` of every byte, for n under 8.
    fn bits(self, b: Self::B, from: u32, n: u32) -> Self::B;
    /// Returns a | b << by in every byte; no bits may be shifted out of a byte of b.
    fn or_shifted(self, a: Self::B, b: Self::B, by: u32) -> Self::B;
    /// Returns the top bits of every byte of seven vectors as the low seven bits of one vector, in their
    /// order; its own top bit is undefined.
    fn gather_top_bits(self, b: [Self::B; 7]) -> Self::B;
    /// Subtracts `by` from every byte, modulo 256.
    fn sub_bytes(self, b: Self::B, by: u8) -> Self::B;
    /// Divides the low seven bits of every byte, which must be below 121, by 11; returns remainders and
    /// quotients.
    fn div_rem_11(self, b: Self::B) -> [Self::B; 2];

    /// Returns the same four bytes in all lanes.
    ///
    /// # Safety
    /// * Four bytes can be read at `at`.
    unsafe fn broadcast_word(self, at: *const u8) -> Self::I;
    /// Returns zero in all lanes.
    fn zero(self) -> Self::I;
    /// Returns a - b.
    fn sub_ints(self, a: Self::I, b: Self::I) -> Self::I;
    /// Returns i * 2^by.
    fn shift_left(self, i: Self::I, by: u32) -> Self::I;
    /// Adds to each lane of `sum` the dot product of its four unsigned bytes in `w` with its four signed
    /// bytes in `x`.
    fn dot(self, sum: Self::I, w: Self::B, x: Self::I) -> Self::I;
    /// Converts integers to F32.
    fn to_float(self, i: Self::I) -> Self::V;

    /// Loads sixteen F16 numbers.
    ///
    /// # Safety
    /// * 32 bytes can be read at `at`.
    #[inline(always)]
    unsafe fn load_f16_at(self, at: *const u8) -> Self::V {
        // SAFETY: the caller's promise; any bytes are valid numbers.
        self.load_f16(&unsafe { at.cast::<[u16; LANES]>().read_unaligned() })
    }
    /// Loads sixteen F32 numbers.
    ///
    /// # Safety
    /// * 64 bytes can be read at `at`.
    #[inline(always)]
    unsafe fn load_f32_at(self, at: *const u8) -> Self::V {
        // SAFETY: the caller's promise; any bytes are valid numbers.
        self.load(&unsafe { at.cast::<[f32; LANES]>().read_unaligned() })
    }
    /// Converts sixteen unsigned bytes to F32.
    fn load_u8(self, bytes: [u8; LANES]) -> Self::V;
}

/// A computation with integers that is compiled for each instruction set.
pub trait IntKernel {
    type Out;
    /// Runs the kernel. Must be `#[inline(always)]`.
    fn run<S: Ints>(self, simd: S) -> Self::Out;
}
