//! Number formats of Inferflow (Shi et al. 2024, section 3): a block stores a minimum and a scale in F16, and
//! quants of 2 to 8 bits.
//!
//! The paper's equations 1 and 2, with the minimum `mn` and the maximum `mx` of the block and n steps between
//! them: `scale = (mx - mn) / n`, `q = floor((x - mn) / scale + 1/2)`, `x' = mn + q * scale`. A format with
//! bin centers has n bins instead: `q = floor((x - mn) / scale + 1e-4)`, `x' = mn + scale / 2 + q * scale`;
//! it stores `mn + scale / 2` as the minimum. Equation 3 is the same with n = 10; two such quants form one
//! 7-bit number, the second one multiplied by 11.
//!
//! | format | elements | n | after minimum and scale |
//! |---|---|---|---|
//! | Q8_B32T1 | 32 | 255 | one byte each |
//! | Q6_B64T1 | 64 | 62 | high 2 bits, four per byte; low 4 bits, two per byte |
//! | Q5_B64T1 | 64 | 30 | high bit, eight per byte; low 4 bits, two per byte |
//! | Q4_B64T1 | 64 | 14 | two per byte, the first in the low nibble |
//! | Q4_B32T1A, Q4_B32T1B | 32 | 15, 16 bins | two per byte, the first in the low nibble |
//! | Q4_B16 | 16 | 15 | two per byte; one byte each for minimum and scale: `min / 100 - 1`, `scale / 1000` |
//! | Q3H_B64T1 | 64 | 10 | 32 pairs: bit 6, eight per byte; bits 4 and 5, four; bits 0 to 3, two |
//! | Q3_B32T1A, Q3_B32T1B | 32 | 7, 8 bins | high bit, eight per byte; low 2 bits, four per byte |
//! | Q2_B32T1A, Q2_B32T1B | 32 | 3, 4 bins | four per byte, the first in the lowest bits |
//!
//! Scales below 1e-5 count as zero: all quants are 0, so that a constant block is as exact as its minimum in
//! F16. NaN becomes 0, and numbers outside the range of F16 become its largest number. Q8_B32T2 is ggml's
//! Q8_0, and Q5_B32T1 its Q5_1.
//!
//! Invariant: the layouts are those of Inferflow's code, which multiplies the odd quant of a pair by 11.

use super::{clamp_to_f16, read_f16, write_f16};

/// Evenly spaced levels `base + quant * scale`, for quants from 0 to a maximum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Levels {
    /// Level of quant 0.
    pub minimum: f32,
    /// Spacing of the levels.
    pub scale: f32,
}

/// A block format with a minimum and a scale: its constants, and the packing of its quants.
pub(super) trait AffineFormat {
    /// Elements of a block.
    const BLOCK_LEN: usize;
    /// Bytes of a block.
    const BLOCK_BYTES: usize;
    /// Steps from the minimum to the maximum; bins if [`Self::BIN_CENTERS`].
    const STEPS: f32;
    /// Whether a quant represents the center of its bin.
    const BIN_CENTERS: bool;
    /// Bytes of minimum and scale.
    const PARAM_BYTES: usize = 4;
    /// Spacing of the representable minima and scales, if it is coarse.
    const PARAM_STEP: Option<Levels> = None;

    /// Packs quants into the bytes after minimum and scale.
    fn pack(quants: &[u8], to: &mut [u8]);

    /// Unpacks quants.
    fn unpack(from: &[u8], quants: &mut [u8]);

    /// Writes minimum and scale.
    fn write_params(minimum: f32, scale: f32, to: &mut [u8]) {
        write_f16(to, 0, minimum);
        write_f16(to, 2, scale);
    }

    /// Reads minimum and scale.
    fn read_params(from: &[u8]) -> (f32, f32) {
        (read_f16(from, 0), read_f16(from, 2))
    }
}

/// Smallest scale; smaller ones count as zero.
const MIN_SCALE: f32 = 1e-5;

/// Elements of the longest block.
const MAX_BLOCK_LEN: usize = 64;

/// Quantizes whole blocks.
pub(super) fn quantize<T: AffineFormat>(values: &[f32], out: &mut [u8]) {
    let (blocks, to) = (values.chunks_exact(T::BLOCK_LEN), out.chunks_exact_mut(T::BLOCK_BYTES));
    assert!(blocks.remainder().is_empty() && blocks.len() == to.len(), "whole blocks");
    for (block, to) in blocks.zip(to) {
        let mut numbers = [0f32; MAX_BLOCK_LEN];
        let numbers = &mut numbers[..T::BLOCK_LEN];
        for (number, value) in numbers.iter_mut().zip(block) {
            *number = clamp_to_f16(*value);
        }
        let mut quants = [0u8; MAX_BLOCK_LEN];
        let quants = &mut quants[..T::BLOCK_LEN];
        let (minimum, scale) = quantize_block::<T>(numbers, quants);
        let (params, packed) = to.split_at_mut(T::PARAM_BYTES);
        T::write_params(minimum, scale, params);
        T::pack(quants, packed);
    }
}

/// Dequantizes whole blocks.
pub(super) fn dequantize<T: AffineFormat>(bytes: &[u8], out: &mut [f32]) {
    let (blocks, to) = (bytes.chunks_exact(T::BLOCK_BYTES), out.chunks_exact_mut(T::BLOCK_LEN));
    assert!(blocks.remainder().is_empty() && blocks.len() == to.len(), "whole blocks");
    for (block, to) in blocks.zip(to) {
        let (params, packed) = block.split_at(T::PARAM_BYTES);
        let (minimum, scale) = T::read_params(params);
        let mut quants = [0u8; MAX_BLOCK_LEN];
        T::unpack(packed, &mut quants[..T::BLOCK_LEN]);
        for (value, quant) in to.iter_mut().zip(quants) {
            *value = minimum + f32::from(quant) * scale;
        }
    }
}

/// Computes the quants of a block; returns its minimum and scale.
fn quantize_block<T: AffineFormat>(numbers: &[f32], quants: &mut [u8]) -> (f32, f32) {
    let minimum = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let maximum = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (maximum - minimum) / T::STEPS;
    let inverse = if scale < MIN_SCALE { 0.0 } else { 1.0 / scale };
    let (rounding, highest) = if T::BIN_CENTERS { (1e-4, T::STEPS - 1.0) } else { (0.5, T::STEPS) };
    for (quant, number) in quants.iter_mut().zip(numbers) {
        *quant = ((number - minimum) * inverse + rounding).min(highest) as u8;
    }
    if inverse == 0.0 {
        return (minimum, 0.0);
    }
    (if T::BIN_CENTERS { minimum + scale / 2.0 } else { minimum }, scale)
}

/// Defines formats whose minimum and scale are F16.
macro_rules! formats {
    ($(
        $(#[$doc:meta])*
        $name:ident: $len:literal elements, $bytes:literal bytes, $steps:literal $kind:ident, $layout:ident;
    )*) => {
        $($(#[$doc])*
        pub(super) struct $name;

        impl AffineFormat for $name {
            const BLOCK_LEN: usize = $len;
            const BLOCK_BYTES: usize = $bytes;
            const STEPS: f32 = $steps;
            const BIN_CENTERS: bool = formats!(@$kind);

            fn pack(quants: &[u8], to: &mut [u8]) {
                $layout::pack(quants, to);
            }

            fn unpack(from: &[u8], quants: &mut [u8]) {
                $layout::unpack(from, quants);
            }
        })*
    };
    (@steps) => { false };
    (@bins) => { true };
}

formats! {
    Q8B32T1: 32 elements, 36 bytes, 255.0 steps, bytes;
    Q6B64T1: 64 elements, 52 bytes, 62.0 steps, six;
    Q5B64T1: 64 elements, 44 bytes, 30.0 steps, five;
    Q4B64T1: 64 elements, 36 bytes, 14.0 steps, four;
    Q4B32T1A: 32 elements, 20 bytes, 15.0 steps, four;
    Q4B32T1B: 32 elements, 20 bytes, 16.0 bins, four;
    Q3HB64T1: 64 elements, 32 bytes, 10.0 steps, three_and_a_half;
    Q3B32T1A: 32 elements, 16 bytes, 7.0 steps, three;
    Q3B32T1B: 32 elements, 16 bytes, 8.0 bins, three;
    Q2B32T1A: 32 elements, 12 bytes, 3.0 steps, two;
    Q2B32T1B: 32 elements, 12 bytes, 4.0 bins, two;
}

/// The format with 16 elements per block, and one byte each for minimum and scale. Suitable for weights
/// between -1 and 1.5.
pub(super) struct Q4B16;

impl AffineFormat for Q4B16 {
    const BLOCK_LEN: usize = 16;
    const BLOCK_BYTES: usize = 10;
    const STEPS: f32 = 15.0;
    const BIN_CENTERS: bool = false;
    const PARAM_BYTES: usize = 2;
    const PARAM_STEP: Option<Levels> = Some(Levels { minimum: 0.01, scale: 0.001 });

    fn pack(quants: &[u8], to: &mut [u8]) {
        four::pack(quants, to);
    }

    fn unpack(from: &[u8], quants: &mut [u8]) {
        four::unpack(from, quants);
    }

    fn write_params(minimum: f32, scale: f32, to: &mut [u8]) {
        // The conversion saturates numbers outside the range of a byte.
        to[0] = (minimum * 100.0 + 100.5) as u8;
        to[1] = (scale * 1000.0 + 0.5) as u8;
    }

    fn read_params(from: &[u8]) -> (f32, f32) {
        (f32::from(from[0]) / 100.0 - 1.0, f32::from(from[1]) / 1000.0)
    }
}

/// Packing of one byte per quant.
mod bytes {
    /// Packs quants.
    pub fn pack(quants: &[u8], to: &mut [u8]) {
        to.copy_from_slice(quants);
    }

    /// Unpacks quants.
    pub fn unpack(from: &[u8], quants: &mut [u8]) {
        quants.copy_from_slice(from);
    }
}

/// Packs fields of `bits` bits, the first in the lowest bits.
fn write_fields(quants: impl Iterator<Item = u8>, bits: usize, to: &mut [u8]) {
    to.fill(0);
    for (n, quant) in quants.enumerate() {
        let at = n * bits;
        to[at / 8] |= (quant & ((1 << bits) - 1)) << (at % 8);
    }
}

/// Reads field number n of [`write_fields`].
fn read_field(from: &[u8], bits: usize, n: usize) -> u8 {
    let at = n * bits;
    from[at / 8] >> (at % 8) & ((1 << bits) - 1)
}

/// Packs quants in two parts: the `high` upper bits of all, then the `low` lower bits of all.
fn pack_parts(quants: &[u8], high: usize, low: usize, to: &mut [u8]) {
    let (upper, lower) = to.split_at_mut(quants.len() * high / 8);
    write_fields(quants.iter().map(|quant| quant >> low), high, upper);
    write_fields(quants.iter().copied(), low, lower);
}

/// Unpacks the two parts of [`pack_parts`].
fn unpack_parts(from: &[u8], high: usize, low: usize, quants: &mut [u8]) {
    let (upper, lower) = from.split_at(quants.len() * high / 8);
    for (n, quant) in quants.iter_mut().enumerate() {
        *quant = read_field(upper, high, n) << low | read_field(lower, low, n);
    }
}

/// Defines packings in two parts of the given numbers of bits.
macro_rules! parts {
    ($($name:ident: $high:literal, $low:literal;)*) => {
        $(mod $name {
            /// Packs quants.
            pub fn pack(quants: &[u8], to: &mut [u8]) {
                super::pack_parts(quants, $high, $low, to);
            }

            /// Unpacks quants.
            pub fn unpack(from: &[u8], quants: &mut [u8]) {
                super::unpack_parts(from, $high, $low, quants);
            }
        })*
    };
}

parts! {
    six: 2, 4;
    five: 1, 4;
    three: 1, 2;
}

/// Defines packings in fields of the given number of bits.
macro_rules! fields {
    ($($name:ident: $bits:literal;)*) => {
        $(mod $name {
            /// Packs quants.
            pub fn pack(quants: &[u8], to: &mut [u8]) {
                super::write_fields(quants.iter().copied(), $bits, to);
            }

            /// Unpacks quants.
            pub fn unpack(from: &[u8], quants: &mut [u8]) {
                for (n, quant) in quants.iter_mut().enumerate() {
                    *quant = super::read_field(from, $bits, n);
                }
            }
        })*
    };
}

fields! {
    four: 4;
    two: 2;
}

/// Packing of pairs of quants from 0 to 10 as 7-bit numbers.
mod three_and_a_half {
    use super::{read_field, write_fields};

    const BASE: u8 = 11;

    /// Packs quants.
    pub fn pack(quants: &[u8], to: &mut [u8]) {
        let pairs = || quants.as_chunks::<2>().0.iter().map(|[even, odd]| even + BASE * odd);
        let (highest, rest) = to.split_at_mut(quants.len() / 16);
        let (middle, low) = rest.split_at_mut(quants.len() / 8);
        write_fields(pairs().map(|pair| pair >> 6), 1, highest);
        write_fields(pairs().map(|pair| pair >> 4), 2, middle);
        write_fields(pairs(), 4, low);
    }

    /// Unpacks quants.
    pub fn unpack(from: &[u8], quants: &mut [u8]) {
        let (highest, rest) = from.split_at(quants.len() / 16);
        let (middle, low) = rest.split_at(quants.len() / 8);
        for (n, quants) in quants.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let pair = read_field(highest, 1, n) << 6 | read_field(middle, 2, n) << 4 | read_field(low, 4, n);
            *quants = [pair % BASE, pair / BASE];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Table 2 of the paper: quants and mean errors of twelve weights.
    #[test]
    fn table_2_is_reproduced() {
        const WEIGHTS: [f32; 12] = [-1.0, -0.9, -0.6, -0.4, -0.2, 0.0, 0.1, 0.5, 0.7, 1.0, 1.3, 1.5];
        fn row<T: AffineFormat>(expected: [u8; 12], error: f32) {
            let mut quants = [0; 12];
            let (minimum, scale) = quantize_block::<T>(&WEIGHTS, &mut quants);
            assert_eq!(quants, expected);
            let off = |(weight, quant): (&f32, u8)| (weight - (minimum + f32::from(quant) * scale)).abs();
            let mean = WEIGHTS.iter().zip(quants).map(off).sum::<f32>() / 12.0;
            assert!((mean - error).abs() < 0.0005, "{mean}");
        }
        row::<Q4B32T1A>([0, 1, 2, 4, 5, 6, 7, 9, 10, 12, 14, 15], 0.031);
        row::<Q3B32T1A>([0, 0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7], 0.075);
        row::<Q3HB64T1>([0, 0, 2, 2, 3, 4, 4, 6, 7, 8, 9, 10], 0.046);
    }

    /// Bytes that Inferflow produces for the quants n mod 11.
    #[test]
    fn pairs_have_the_layout_of_inferflow() {
        let quants: Vec<u8> = (0..64).map(|n| n % 11).collect();
        let expected = [
            24, 199, 56, 198, 120, 146, 52, 158, 36, 141, 39, 73, 59, 59, 171, 247, 247, 183, 179, 179, 122,
            127, 127, 59, 59, 171, 247, 247,
        ];
        let mut packed = [0; 28];
        three_and_a_half::pack(&quants, &mut packed);
        assert_eq!(packed, expected);
        let mut back = [0; 64];
        three_and_a_half::unpack(&packed, &mut back);
        assert_eq!(back.to_vec(), quants);
    }

    /// Expected bytes written by hand from the description of the layouts.
    #[test]
    fn fields_have_the_described_layout() {
        let packed = |pack: fn(&[u8], &mut [u8]), quants: &[u8], bytes: usize| {
            let mut to = vec![0xff; bytes];
            pack(quants, &mut to);
            to
        };
        let ascending = |numbers: u8, modulus: u8| -> Vec<u8> { (0..numbers).map(|n| n % modulus).collect() };
        assert_eq!(packed(four::pack, &[1, 2, 3, 4], 2), [0x21, 0x43]);
        assert_eq!(packed(two::pack, &[0, 1, 2, 3, 3, 2, 1, 0], 2), [0b11_10_01_00, 0b00_01_10_11]);
        assert_eq!(
            packed(three::pack, &[0, 1, 2, 3, 4, 5, 6, 7], 3),
            [0b1111_0000, 0b11_10_01_00, 0b11_10_01_00]
        );
        let six = packed(six::pack, &ascending(64, 63), 48);
        assert_eq!(
            six[..16],
            [0, 0, 0, 0, 0x55, 0x55, 0x55, 0x55, 0xaa, 0xaa, 0xaa, 0xaa, 0xff, 0xff, 0xff, 0b0011_1111]
        );
        assert_eq!(six[16..18], [0x10, 0x32]);
        let five = packed(five::pack, &ascending(64, 31), 40);
        assert_eq!(five[..4], [0, 0, 0xff, 0b0111_1111]);
        assert_eq!(five[8..10], [0x10, 0x32]);
    }

    /// Every quant survives in every position.
    #[test]
    fn quants_survive_packing() {
        fn check<T: AffineFormat>() {
            let highest = if T::BIN_CENTERS { T::STEPS - 1.0 } else { T::STEPS } as usize + 1;
            for shift in 0..highest {
                let quants: Vec<u8> = (0..T::BLOCK_LEN).map(|n| ((n * 7 + shift) % highest) as u8).collect();
                let (mut packed, mut back) =
                    (vec![0xa5; T::BLOCK_BYTES - T::PARAM_BYTES], vec![0; T::BLOCK_LEN]);
                T::pack(&quants, &mut packed);
                T::unpack(&packed, &mut back);
                assert_eq!(back, quants);
            }
        }
        check::<Q8B32T1>();
        check::<Q6B64T1>();
        check::<Q5B64T1>();
        check::<Q4B64T1>();
        check::<Q4B32T1A>();
        check::<Q4B32T1B>();
        check::<Q4B16>();
        check::<Q3HB64T1>();
        check::<Q3B32T1A>();
        check::<Q3B32T1B>();
        check::<Q2B32T1A>();
        check::<Q2B32T1B>();
    }
}
