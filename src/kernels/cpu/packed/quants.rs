//! Layouts of the quants of a block of sixteen outputs.
//!
//! A vector is 64 bytes: four neighbouring quants of each output. 32 quants take eight vectors, and vectors 0
//! to 3 are paired with vectors 4 to 7. Formats of fewer than eight bits store a pair in one vector of bytes.
//! Invariant: `unpack` returns what `pack` stored, and `load_pair` loads it for the kernels.

// These loops index several arrays at once, which is clearer than iterating over one of them.
#![allow(clippy::needless_range_loop)]

use super::PANEL_OUTPUTS;
use crate::cpu::simd::{BYTES, Ints};
use crate::quant::INT8_BLOCK_LEN;

/// Quants of a vector that belong to one output.
const QUANTS_PER_LANE: usize = 4;
/// Vectors of half of 32 quants.
pub const HALF_VECTORS: usize = INT8_BLOCK_LEN / QUANTS_PER_LANE / 2;

/// A layout of quants.
pub trait QuantPacking: 'static {
    /// Quants of an output that are stored together.
    const QUANTS: usize;
    /// Bytes of these quants, for sixteen outputs.
    const BYTES: usize;

    /// Packs the quants of output `lane` into `to`. Those of other outputs stay as they are; the bytes must
    /// be zero at first.
    fn pack(quants: &[u8], lane: usize, to: &mut [u8]);

    /// Unpacks the quants of output `lane`.
    fn unpack(from: &[u8], lane: usize, quants: &mut [u8]);

    /// Loads vectors `number` and `number + 4` of block number `block` of 32 quants.
    ///
    /// # Safety
    /// * The bytes can be read at `at`.
    unsafe fn load_pair<S: Ints>(simd: S, at: *const u8, block: usize, number: usize) -> [S::B; 2];
}

/// Returns the number of the vector that holds quant `n` of an output's 32, and the byte within it.
fn locate(n: usize, lane: usize) -> (usize, usize) {
    (n / QUANTS_PER_LANE, lane * QUANTS_PER_LANE + n % QUANTS_PER_LANE)
}

/// One byte per quant.
pub struct Int8Quants;

impl QuantPacking for Int8Quants {
    const QUANTS: usize = INT8_BLOCK_LEN;
    const BYTES: usize = PANEL_OUTPUTS * INT8_BLOCK_LEN;

    fn pack(quants: &[u8], lane: usize, to: &mut [u8]) {
        for (n, quant) in quants.iter().enumerate() {
            let (vector, byte) = locate(n, lane);
            to[vector * BYTES + byte] = *quant;
        }
    }

    fn unpack(from: &[u8], lane: usize, quants: &mut [u8]) {
        for (n, quant) in quants.iter_mut().enumerate() {
            let (vector, byte) = locate(n, lane);
            *quant = from[vector * BYTES + byte];
        }
    }

    #[inline(always)]
    unsafe fn load_pair<S: Ints>(simd: S, at: *const u8, _: usize, number: usize) -> [S::B; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                simd.load_bytes(at.add(number * BYTES)),
                simd.load_bytes(at.add((number + HALF_VECTORS) * BYTES)),
            ]
        }
    }
}

/// Four bits per quant, and HIGH further bits in separate planes. A plane holds the high bits of 8 / HIGH
/// vectors.
pub struct Nibbles<const HIGH: usize>;

impl<const HIGH: usize> Nibbles<HIGH> {
    const LOW_BYTES: usize = HALF_VECTORS * BYTES;

    /// Returns the offset of the plane with a vector's high bits, and the shift within its bytes.
    #[inline(always)]
    fn high_bit_plane(vector: usize) -> (usize, usize) {
        (Self::LOW_BYTES + vector * HIGH / 8 * BYTES, vector * HIGH % 8)
    }
}

impl<const HIGH: usize> QuantPacking for Nibbles<HIGH> {
    const QUANTS: usize = INT8_BLOCK_LEN;
    const BYTES: usize = PANEL_OUTPUTS * INT8_BLOCK_LEN * (4 + HIGH) / 8;

    fn pack(quants: &[u8], lane: usize, to: &mut [u8]) {
        for (n, quant) in quants.iter().enumerate() {
            let (vector, byte) = locate(n, lane);
            to[vector % HALF_VECTORS * BYTES + byte] |= (quant & 15) << (vector / HALF_VECTORS * 4);
            if HIGH > 0 {
                let (plane, shift) = Self::high_bit_plane(vector);
                to[plane + byte] |= (quant >> 4) << shift;
            }
        }
    }

    fn unpack(from: &[u8], lane: usize, quants: &mut [u8]) {
        for (n, quant) in quants.iter_mut().enumerate() {
            let (vector, byte) = locate(n, lane);
            *quant = from[vector % HALF_VECTORS * BYTES + byte] >> (vector / HALF_VECTORS * 4) & 15;
            if HIGH > 0 {
                let (plane, shift) = Self::high_bit_plane(vector);
                *quant |= (from[plane + byte] >> shift & ((1 << HIGH) - 1)) << 4;
            }
        }
    }

    #[inline(always)]
    unsafe fn load_pair<S: Ints>(simd: S, at: *const u8, _: usize, number: usize) -> [S::B; 2] {
        // SAFETY: the caller's promise, here and below.
        let both = unsafe { simd.load_bytes(at.add(number * BYTES)) };
        let mut pair = [simd.bits(both, 0, 4), simd.bits(both, 4, 4)];
        if HIGH > 0 {
            for half in 0..2 {
                let (plane, shift) = Self::high_bit_plane(number + half * HALF_VECTORS);
                let upper = unsafe { simd.load_bytes(at.add(plane)) };
                pair[half] = simd.or_shifted(pair[half], simd.bits(upper, shift as u32, HIGH as u32), 4);
            }
        }
        pair
    }
}

/// Quants of 0 to 10. Two of them, one from each half of 32, form a number of seven bits: the first plus 11
/// times the second. Of the eight vectors for 64 quants, seven are stored; the bits of the eighth are the top
/// bits of their bytes.
pub struct Base11Pairs;

impl Base11Pairs {
    const BLOCKS: usize = 2;
    const STORED_VECTORS: usize = Self::BLOCKS * HALF_VECTORS - 1;
}

impl QuantPacking for Base11Pairs {
    const QUANTS: usize = Self::BLOCKS * INT8_BLOCK_LEN;
    const BYTES: usize = Self::STORED_VECTORS * BYTES;

    fn pack(quants: &[u8], lane: usize, to: &mut [u8]) {
        for (block, quants) in quants.as_chunks::<INT8_BLOCK_LEN>().0.iter().enumerate() {
            let (first, second) = quants.split_at(INT8_BLOCK_LEN / 2);
            for (n, (first, second)) in first.iter().zip(second).enumerate() {
                let ((vector, byte), both) = (locate(n, lane), first + 11 * second);
                match block * HALF_VECTORS + vector {
                    Self::STORED_VECTORS => {
                        (0..Self::STORED_VECTORS).for_each(|i| to[i * BYTES + byte] |= (both >> i & 1) << 7)
                    }
                    vector => to[vector * BYTES + byte] |= both,
                }
            }
        }
    }

    fn unpack(from: &[u8], lane: usize, quants: &mut [u8]) {
        for (block, quants) in quants.as_chunks_mut::<INT8_BLOCK_LEN>().0.iter_mut().enumerate() {
            let (first, second) = quants.split_at_mut(INT8_BLOCK_LEN / 2);
            for (n, (first, second)) in first.iter_mut().zip(second).enumerate() {
                let (vector, byte) = locate(n, lane);
                let both = match block * HALF_VECTORS + vector {
                    Self::STORED_VECTORS => {
                        (0..Self::STORED_VECTORS).map(|i| from[i * BYTES + byte] >> 7 << i).sum()
                    }
                    vector => from[vector * BYTES + byte] & 127,
                };
                (*first, *second) = (both % 11, both / 11);
            }
        }
    }

    #[inline(always)]
    unsafe fn load_pair<S: Ints>(simd: S, at: *const u8, block: usize, number: usize) -> [S::B; 2] {
        let vector = block * HALF_VECTORS + number;
        // SAFETY: the caller's promise, here and below.
        if vector < Self::STORED_VECTORS {
            return simd.div_rem_11(unsafe { simd.load_bytes(at.add(vector * BYTES)) });
        }
        let mut stored = [simd.zero_bytes(); Self::STORED_VECTORS];
        for i in 0..Self::STORED_VECTORS {
            stored[i] = unsafe { simd.load_bytes(at.add(i * BYTES)) };
        }
        simd.div_rem_11(simd.gather_top_bits(stored))
    }
}
