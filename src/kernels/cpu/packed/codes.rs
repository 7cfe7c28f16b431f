//! Layouts of the quants of a block of sixteen outputs.
//!
//! A vector is 64 bytes: four neighbouring quants of each output. 32 quants take eight vectors, and vectors 0
//! to 3 are paired with vectors 4 to 7. Formats of fewer than eight bits store a pair in one vector of bytes.
//! Invariant: `unpack` returns what `pack` stored, and `load_pair` loads it for the kernels.

// These loops index several arrays at once, which is clearer than iterating over one of them.
#![allow(clippy::needless_range_loop)]

use super::STRIP;
use crate::cpu::simd::{BYTES, Ints};
use crate::quant::INPUT_BLOCK;

/// Quants of a vector that belong to one output.
const FOUR: usize = 4;
/// Vectors of half of 32 quants.
pub const HALF: usize = INPUT_BLOCK / FOUR / 2;

/// A layout of quants.
pub trait Codes: 'static {
    /// Quants of an output that are stored together.
    const NUMBERS: usize;
    /// Bytes of these quants, for sixteen outputs.
    const BYTES: usize;

    /// Packs the quants of output `lane` into `to`. Those of other outputs stay as they are; the bytes must
    /// be zero at first.
    fn put(quants: &[u8], lane: usize, to: &mut [u8]);

    /// Unpacks the quants of output `lane`.
    fn get(from: &[u8], lane: usize, quants: &mut [u8]);

    /// Loads vectors `number` and `number + 4` of block number `block` of 32 quants.
    ///
    /// # Safety
    /// * The bytes can be read at `at`.
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, block: usize, number: usize) -> [S::B; 2];
}

/// Returns the number of the vector that holds quant `n` of an output's 32, and the byte within it.
fn place(n: usize, lane: usize) -> (usize, usize) {
    (n / FOUR, lane * FOUR + n % FOUR)
}

/// One byte per quant.
pub struct Bytes;

impl Codes for Bytes {
    const NUMBERS: usize = INPUT_BLOCK;
    const BYTES: usize = STRIP * INPUT_BLOCK;

    fn put(quants: &[u8], lane: usize, to: &mut [u8]) {
        for (n, quant) in quants.iter().enumerate() {
            let (vector, byte) = place(n, lane);
            to[vector * BYTES + byte] = *quant;
        }
    }

    fn get(from: &[u8], lane: usize, quants: &mut [u8]) {
        for (n, quant) in quants.iter_mut().enumerate() {
            let (vector, byte) = place(n, lane);
            *quant = from[vector * BYTES + byte];
        }
    }

    #[inline(always)]
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, _: usize, number: usize) -> [S::B; 2] {
        // SAFETY: the caller's promise.
        unsafe { [simd.bytes(at.add(number * BYTES)), simd.bytes(at.add((number + HALF) * BYTES))] }
    }
}

/// Four bits per quant, and HIGH further bits in separate planes. A plane holds the high bits of 8 / HIGH
/// vectors.
pub struct Nibbles<const HIGH: usize>;

impl<const HIGH: usize> Nibbles<HIGH> {
    const LOWER: usize = HALF * BYTES;

    /// Returns the offset of the plane with a vector's high bits, and the shift within its bytes.
    #[inline(always)]
    fn plane(vector: usize) -> (usize, usize) {
        (Self::LOWER + vector * HIGH / 8 * BYTES, vector * HIGH % 8)
    }
}

impl<const HIGH: usize> Codes for Nibbles<HIGH> {
    const NUMBERS: usize = INPUT_BLOCK;
    const BYTES: usize = STRIP * INPUT_BLOCK * (4 + HIGH) / 8;

    fn put(quants: &[u8], lane: usize, to: &mut [u8]) {
        for (n, quant) in quants.iter().enumerate() {
            let (vector, byte) = place(n, lane);
            to[vector % HALF * BYTES + byte] |= (quant & 15) << (vector / HALF * 4);
            if HIGH > 0 {
                let (plane, shift) = Self::plane(vector);
                to[plane + byte] |= (quant >> 4) << shift;
            }
        }
    }

    fn get(from: &[u8], lane: usize, quants: &mut [u8]) {
        for (n, quant) in quants.iter_mut().enumerate() {
            let (vector, byte) = place(n, lane);
            *quant = from[vector % HALF * BYTES + byte] >> (vector / HALF * 4) & 15;
            if HIGH > 0 {
                let (plane, shift) = Self::plane(vector);
                *quant |= (from[plane + byte] >> shift & ((1 << HIGH) - 1)) << 4;
            }
        }
    }

    #[inline(always)]
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, _: usize, number: usize) -> [S::B; 2] {
        // SAFETY: the caller's promise, here and below.
        let both = unsafe { simd.bytes(at.add(number * BYTES)) };
        let mut pair = [simd.bits(both, 0, 4), simd.bits(both, 4, 4)];
        if HIGH > 0 {
            for half in 0..2 {
                let (plane, shift) = Self::plane(number + half * HALF);
                let upper = unsafe { simd.bytes(at.add(plane)) };
                pair[half] = simd.over(pair[half], simd.bits(upper, shift as u32, HIGH as u32), 4);
            }
        }
        pair
    }
}

/// Quants of 0 to 10. Two of them, one from each half of 32, form a number of seven bits: the first plus 11
/// times the second. Of the eight vectors for 64 quants, seven are stored; the bits of the eighth are the top
/// bits of their bytes.
pub struct Elevens;

impl Elevens {
    const BLOCKS: usize = 2;
    const STORED: usize = Self::BLOCKS * HALF - 1;
}

impl Codes for Elevens {
    const NUMBERS: usize = Self::BLOCKS * INPUT_BLOCK;
    const BYTES: usize = Self::STORED * BYTES;

    fn put(quants: &[u8], lane: usize, to: &mut [u8]) {
        for (block, quants) in quants.as_chunks::<INPUT_BLOCK>().0.iter().enumerate() {
            let (first, second) = quants.split_at(INPUT_BLOCK / 2);
            for (n, (first, second)) in first.iter().zip(second).enumerate() {
                let ((vector, byte), both) = (place(n, lane), first + 11 * second);
                match block * HALF + vector {
                    Self::STORED => {
                        (0..Self::STORED).for_each(|i| to[i * BYTES + byte] |= (both >> i & 1) << 7)
                    }
                    vector => to[vector * BYTES + byte] |= both,
                }
            }
        }
    }

    fn get(from: &[u8], lane: usize, quants: &mut [u8]) {
        for (block, quants) in quants.as_chunks_mut::<INPUT_BLOCK>().0.iter_mut().enumerate() {
            let (first, second) = quants.split_at_mut(INPUT_BLOCK / 2);
            for (n, (first, second)) in first.iter_mut().zip(second).enumerate() {
                let (vector, byte) = place(n, lane);
                let both = match block * HALF + vector {
                    Self::STORED => (0..Self::STORED).map(|i| from[i * BYTES + byte] >> 7 << i).sum(),
                    vector => from[vector * BYTES + byte] & 127,
                };
                (*first, *second) = (both % 11, both / 11);
            }
        }
    }

    #[inline(always)]
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, block: usize, number: usize) -> [S::B; 2] {
        let vector = block * HALF + number;
        // SAFETY: the caller's promise, here and below.
        if vector < Self::STORED {
            return simd.elevens(unsafe { simd.bytes(at.add(vector * BYTES)) });
        }
        let mut stored = [simd.no_bytes(); Self::STORED];
        for i in 0..Self::STORED {
            stored[i] = unsafe { simd.bytes(at.add(i * BYTES)) };
        }
        simd.elevens(simd.tops(stored))
    }
}
