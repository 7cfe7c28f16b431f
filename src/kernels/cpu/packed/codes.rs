//! How the codes of a block's sixteen outs lie.
//!
//! A vector is 64 bytes: four neighbouring codes of each out. Of 32 codes there are eight; the half of them, numbers 0 to 3,
//! goes together with the other, 4 to 7. Formats of fewer than eight bits put both into one vector of bytes.
//! Invariant: `get` finds what `put` stored, and `pair` gives it to the kernels.

// Arrays in step: what they are indexed by says more than iterators over one of them.
#![allow(clippy::needless_range_loop)]

use super::STRIP;
use crate::cpu::simd::{BYTES, Ints};
use crate::quant::INPUT_BLOCK;

/// Codes of a vector that belong to one out.
const FOUR: usize = 4;
/// Vectors of half of 32 codes.
pub const HALF: usize = INPUT_BLOCK / FOUR / 2;

/// A way to store codes.
pub trait Codes: 'static {
    /// Codes of an out that are stored together.
    const NUMBERS: usize;
    /// Bytes of those of sixteen outs.
    const BYTES: usize;

    /// Stores the codes of out `lane`; other outs' stay as they are, and bytes are zero at first.
    fn put(codes: &[u8], lane: usize, to: &mut [u8]);

    /// The codes of out `lane`.
    fn get(from: &[u8], lane: usize, codes: &mut [u8]);

    /// Vectors `number` and `number + 4` of block number `block` of 32 codes.
    ///
    /// # Safety
    /// * The bytes can be read at `at`.
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, block: usize, number: usize) -> [S::B; 2];
}

/// Number, and place within it, of the vector in which code `n` of an out's 32 is, and the byte.
fn place(n: usize, lane: usize) -> (usize, usize) {
    (n / FOUR, lane * FOUR + n % FOUR)
}

/// A byte each.
pub struct Bytes;

impl Codes for Bytes {
    const NUMBERS: usize = INPUT_BLOCK;
    const BYTES: usize = STRIP * INPUT_BLOCK;

    fn put(codes: &[u8], lane: usize, to: &mut [u8]) {
        for (n, code) in codes.iter().enumerate() {
            let (vector, byte) = place(n, lane);
            to[vector * BYTES + byte] = *code;
        }
    }

    fn get(from: &[u8], lane: usize, codes: &mut [u8]) {
        for (n, code) in codes.iter_mut().enumerate() {
            let (vector, byte) = place(n, lane);
            *code = from[vector * BYTES + byte];
        }
    }

    #[inline(always)]
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, _: usize, number: usize) -> [S::B; 2] {
        // SAFETY: the caller's promise.
        unsafe { [simd.bytes(at.add(number * BYTES)), simd.bytes(at.add((number + HALF) * BYTES))] }
    }
}

/// Half a byte each, and UPPER further bits in planes of their own: a plane has those of 8 / UPPER vectors.
pub struct Nibbles<const UPPER: usize>;

impl<const UPPER: usize> Nibbles<UPPER> {
    const LOWER: usize = HALF * BYTES;

    /// The plane with a vector's upper bits, and where in its bytes.
    #[inline(always)]
    fn plane(vector: usize) -> (usize, usize) {
        (Self::LOWER + vector * UPPER / 8 * BYTES, vector * UPPER % 8)
    }
}

impl<const UPPER: usize> Codes for Nibbles<UPPER> {
    const NUMBERS: usize = INPUT_BLOCK;
    const BYTES: usize = STRIP * INPUT_BLOCK * (4 + UPPER) / 8;

    fn put(codes: &[u8], lane: usize, to: &mut [u8]) {
        for (n, code) in codes.iter().enumerate() {
            let (vector, byte) = place(n, lane);
            to[vector % HALF * BYTES + byte] |= (code & 15) << (vector / HALF * 4);
            if UPPER > 0 {
                let (plane, shift) = Self::plane(vector);
                to[plane + byte] |= (code >> 4) << shift;
            }
        }
    }

    fn get(from: &[u8], lane: usize, codes: &mut [u8]) {
        for (n, code) in codes.iter_mut().enumerate() {
            let (vector, byte) = place(n, lane);
            *code = from[vector % HALF * BYTES + byte] >> (vector / HALF * 4) & 15;
            if UPPER > 0 {
                let (plane, shift) = Self::plane(vector);
                *code |= (from[plane + byte] >> shift & ((1 << UPPER) - 1)) << 4;
            }
        }
    }

    #[inline(always)]
    unsafe fn pair<S: Ints>(simd: S, at: *const u8, _: usize, number: usize) -> [S::B; 2] {
        // SAFETY: the caller's promise, here and below.
        let both = unsafe { simd.bytes(at.add(number * BYTES)) };
        let mut pair = [simd.bits(both, 0, 4), simd.bits(both, 4, 4)];
        if UPPER > 0 {
            for half in 0..2 {
                let (plane, shift) = Self::plane(number + half * HALF);
                let upper = unsafe { simd.bytes(at.add(plane)) };
                pair[half] = simd.over(pair[half], simd.bits(upper, shift as u32, UPPER as u32), 4);
            }
        }
        pair
    }
}

/// Codes of 0 to 10: two of them, of either half of 32, are a number of seven bits, the second times 11. Of the eight vectors
/// of 64 codes seven are stored; the bits of the last one are the upper ones of their bytes.
pub struct Elevens;

impl Elevens {
    const BLOCKS: usize = 2;
    const STORED: usize = Self::BLOCKS * HALF - 1;
}

impl Codes for Elevens {
    const NUMBERS: usize = Self::BLOCKS * INPUT_BLOCK;
    const BYTES: usize = Self::STORED * BYTES;

    fn put(codes: &[u8], lane: usize, to: &mut [u8]) {
        for (block, codes) in codes.as_chunks::<INPUT_BLOCK>().0.iter().enumerate() {
            let (first, second) = codes.split_at(INPUT_BLOCK / 2);
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

    fn get(from: &[u8], lane: usize, codes: &mut [u8]) {
        for (block, codes) in codes.as_chunks_mut::<INPUT_BLOCK>().0.iter_mut().enumerate() {
            let (first, second) = codes.split_at_mut(INPUT_BLOCK / 2);
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
