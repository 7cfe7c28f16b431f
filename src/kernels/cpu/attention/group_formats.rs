//! Formats of groups of quants in a cache: 8-bit or 4-bit quants with their parameters.
//!
//! Invariant: what a format writes at a place, it reads there.

use crate::cpu::simd::{LANES, Simd};
use crate::quant::QuantType;

/// Number of quants that are loaded together, called a run.
pub const RUN_LEN: usize = 2 * LANES;

/// A quantized group format: how its quants are stored.
pub trait GroupFormat: Send + Sync + 'static {
    const TY: QuantType;
    /// Numbers of a group.
    const NUMBERS: usize;
    /// F16 parameters of a group: 1 (scale) or 2 (divisor and minimum).
    const PARAMS: usize;
    /// Bytes of a run of quants.
    const BYTES: usize;
    /// A value vector is padded to a multiple of this many numbers.
    const PADDING: usize;

    /// Loads the quants of a run (BYTES).
    fn load<S: Simd>(simd: S, run: &[u8]) -> [S::V; 2];
    /// Loads the first sixteen quants of a run, which may have no more.
    fn load_first<S: Simd>(simd: S, run: &[u8]) -> S::V;
    /// Returns the scale of the quants, given the first parameter.
    fn scale<S: Simd>(simd: S, param: S::V) -> S::V;
    /// Writes quant number `at` of a run, in the form that [`crate::quant::BlockSplit`] uses.
    fn write(quant: u8, at: usize, run: &mut [u8]);
    /// Reads quant number `at` of a run.
    fn read(run: &[u8], at: usize) -> u8;
}

/// Groups of [`QuantType::Q8_0`]: signed 8-bit quants and a scale.
pub struct Q8Groups;
/// Groups of [`QuantType::G4_B64`]: 4-bit quants, a divisor and a minimum.
pub struct Q4Groups;

impl GroupFormat for Q8Groups {
    const TY: QuantType = QuantType::Q8_0;
    const NUMBERS: usize = 32;
    const PARAMS: usize = 1;
    const BYTES: usize = RUN_LEN;
    const PADDING: usize = LANES;

    #[inline(always)]
    fn load<S: Simd>(simd: S, run: &[u8]) -> [S::V; 2] {
        let run = run.as_chunks::<LANES>().0;
        [simd.load_i8(as_i8(&run[0])), simd.load_i8(as_i8(&run[1]))]
    }
    #[inline(always)]
    fn load_first<S: Simd>(simd: S, run: &[u8]) -> S::V {
        simd.load_i8(as_i8(&run.as_chunks::<LANES>().0[0]))
    }
    #[inline(always)]
    fn scale<S: Simd>(_: S, param: S::V) -> S::V {
        param
    }
    fn write(quant: u8, at: usize, run: &mut [u8]) {
        run[at] = quant ^ 0x80;
    }
    fn read(run: &[u8], at: usize) -> u8 {
        run[at] ^ 0x80
    }
}

impl GroupFormat for Q4Groups {
    const TY: QuantType = QuantType::G4_B64;
    const NUMBERS: usize = 64;
    const PARAMS: usize = 2;
    const BYTES: usize = RUN_LEN / 2;
    const PADDING: usize = RUN_LEN;

    #[inline(always)]
    fn load<S: Simd>(simd: S, run: &[u8]) -> [S::V; 2] {
        simd.load_nibbles(&run.as_chunks::<LANES>().0[0])
    }
    #[inline(always)]
    fn load_first<S: Simd>(simd: S, run: &[u8]) -> S::V {
        simd.load_nibbles(&run.as_chunks::<LANES>().0[0])[0]
    }
    #[inline(always)]
    fn scale<S: Simd>(simd: S, param: S::V) -> S::V {
        simd.div(simd.splat(1.0), param)
    }
    fn write(quant: u8, at: usize, run: &mut [u8]) {
        let (byte, shift) = (&mut run[at % LANES], 4 * (at / LANES));
        *byte = *byte & !(15 << shift) | quant << shift;
    }
    fn read(run: &[u8], at: usize) -> u8 {
        run[at % LANES] >> (4 * (at / LANES)) & 15
    }
}

/// Reinterprets bytes as signed numbers.
#[inline(always)]
fn as_i8(bytes: &[u8; LANES]) -> &[i8; LANES] {
    // SAFETY: the same bytes, read as signed numbers.
    unsafe { &*(&raw const *bytes).cast() }
}
