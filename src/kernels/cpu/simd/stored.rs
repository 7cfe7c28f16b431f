//! How the rows of a matrix are stored: number by number, or in blocks that share a scale. Kernels read
//! either as vectors of 16.
//!
//! Invariant: a vector holds exactly what the number format's definition gives; a block is multiplied out once,
//! in F32.

use super::{Bf16, Code, F16, F32, LANES, Simd, load_part};
use crate::host::HostBuf;
use crate::quant::QuantType;
use crate::quant::blocks::{self, Q4_0_BYTES, Q8_0_BYTES, SCALE_BYTES};

/// A way to store rows: one type per [`QuantType`].
pub trait Stored: Send + Sync + 'static {
    /// What is stored in one piece: a number, or a block.
    type Piece: Copy + Send + Sync + 'static;
    /// Numbers of a piece: 1, or a multiple of 16.
    const NUMBERS: usize;

    /// A buffer's pieces.
    fn pieces(buf: &HostBuf) -> &[Self::Piece];

    /// The 16 numbers of vector `step` of the row that begins at `row`.
    ///
    /// # Safety
    /// * `row` points at pieces that hold these numbers, all of them.
    unsafe fn vector<S: Simd>(simd: S, row: *const Self::Piece, step: usize) -> S::V;

    /// The numbers of the pieces that end a row with less than a vector; the other lanes are zero.
    fn rest<S: Simd>(simd: S, pieces: &[Self::Piece]) -> S::V;

    /// All numbers of `pieces`.
    fn widen(pieces: &[Self::Piece], values: &mut [f32]);

    /// The piece in which vector `step` of a row begins. The address need not be valid.
    #[inline(always)]
    fn address(row: *const Self::Piece, step: usize) -> *const Self::Piece {
        row.wrapping_add(step * LANES / Self::NUMBERS)
    }
}

impl<C: Code> Stored for C {
    type Piece = C::Raw;
    const NUMBERS: usize = 1;

    fn pieces(buf: &HostBuf) -> &[C::Raw] {
        C::of(buf)
    }
    #[inline(always)]
    unsafe fn vector<S: Simd>(simd: S, row: *const C::Raw, step: usize) -> S::V {
        // SAFETY: the caller promises that the row holds these 16 codes.
        C::load(simd, unsafe { &*Self::address(row, step).cast::<[C::Raw; LANES]>() })
    }
    #[inline(always)]
    fn rest<S: Simd>(simd: S, pieces: &[C::Raw]) -> S::V {
        load_part::<S, C>(simd, pieces)
    }
    fn widen(pieces: &[C::Raw], values: &mut [f32]) {
        C::decode(pieces, values);
    }
}

/// [`QuantType::Q8_0`].
pub struct Q8_0;
/// [`QuantType::Q4_0`].
pub struct Q4_0;

macro_rules! blocks {
    ($stored:ident, $bytes:expr, $codes:ident) => {
        impl Stored for $stored {
            type Piece = [u8; $bytes];
            const NUMBERS: usize = blocks::NUMBERS;

            fn pieces(buf: &HostBuf) -> &[[u8; $bytes]] {
                buf.bytes().as_chunks().0
            }
            #[inline(always)]
            unsafe fn vector<S: Simd>(simd: S, row: *const [u8; $bytes], step: usize) -> S::V {
                // SAFETY: the caller promises that the row holds the block of these numbers.
                let block = unsafe { &*Self::address(row, step) };
                let scale = widen_f16(u16::from_le_bytes([block[0], block[1]]));
                let codes = $codes(&block[SCALE_BYTES..], step % (blocks::NUMBERS / LANES));
                simd.mul(simd.load_i8(&codes), simd.splat(scale))
            }
            #[inline(always)]
            fn rest<S: Simd>(_: S, _: &[[u8; $bytes]]) -> S::V {
                unreachable!("a row of blocks is a whole number of vectors; this is a bug")
            }
            fn widen(pieces: &[[u8; $bytes]], values: &mut [f32]) {
                (QuantType::$stored.row().dequantize)(pieces.as_flattened(), values);
            }
        }
    };
}
blocks!(Q8_0, Q8_0_BYTES, bytes);
blocks!(Q4_0, Q4_0_BYTES, half_bytes);

/// The value of an F16, without branches or table, so that it vectorises.
#[inline(always)]
pub(super) fn widen_f16(x: u16) -> f32 {
    const EXPONENT: u32 = 0x7c00;
    let (magnitude, sign) = (u32::from(x & 0x7fff), u32::from(x & 0x8000) << 16);
    // The product moves the exponent from one bias to the other, and makes small numbers normal.
    let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let not_finite = magnitude << 13 | 0x7f80_0000;
    f32::from_bits(sign | if magnitude >= EXPONENT { not_finite } else { finite })
}

/// Codes number `16 * half` and on: a byte each.
#[inline(always)]
fn bytes(codes: &[u8], half: usize) -> [i8; LANES] {
    let mut lanes = [0; LANES];
    for (lane, code) in lanes.iter_mut().zip(&codes[half * LANES..][..LANES]) {
        *lane = *code as i8;
    }
    lanes
}

/// Codes number `16 * half` and on: the low or the high half of each byte, which stands for 8 less.
#[inline(always)]
fn half_bytes(codes: &[u8], half: usize) -> [i8; LANES] {
    let mut lanes = [0; LANES];
    for (lane, code) in lanes.iter_mut().zip(&codes[..LANES]) {
        *lane = (code >> (4 * half) & 15) as i8 - 8;
    }
    lanes
}

/// Something to be done for the way of storing that belongs to a type known at run time.
pub trait ForStored {
    type Out;
    fn run<W: Stored>(self) -> Self::Out;
}

/// Calls `op` with the way `ty` is stored.
pub fn with_stored<O: ForStored>(ty: QuantType, op: O) -> O::Out {
    match ty {
        QuantType::F32 => op.run::<F32>(),
        QuantType::F16 => op.run::<F16>(),
        QuantType::BF16 => op.run::<Bf16>(),
        QuantType::Q8_0 => op.run::<Q8_0>(),
        QuantType::Q4_0 => op.run::<Q4_0>(),
    }
}
