//! Inferflow's formats (Shi et al. 2024, section 3): a block has a base and a scale in F16, and codes of 2 to 8 bits.
//!
//! The paper's equations 1 and 2, with `mn` and `mx` the block's least and largest number and n the number of steps
//! between them: `scale = (mx - mn) / n`, `code = floor((x - mn) / scale + 1/2)`, `x' = base + code * scale`, with
//! `base = mn`. A format of bin centres has n bins instead: `code = floor((x - mn) / scale + 1e-4)`, `base = mn + scale / 2`.
//! Equation 3 is the same with n = 10; two such codes are one number of 7 bits, the second times 11.
//!
//! | format | numbers | n | after base and scale |
//! |---|---|---|---|
//! | Q8_B32T1 | 32 | 255 | a byte each |
//! | Q6_B64T1 | 64 | 62 | upper 2 bits, four to a byte; lower 4 bits, two to a byte |
//! | Q5_B64T1 | 64 | 30 | upper bit, eight to a byte; lower 4 bits, two to a byte |
//! | Q4_B64T1 | 64 | 14 | two to a byte, the first in the lower half |
//! | Q4_B32T1A, Q4_B32T1B | 32 | 15, 16 bins | the same |
//! | Q4_B16 | 16 | 15 | the same; base and scale are a byte each: `base / 100 - 1`, `scale / 1000` |
//! | Q3H_B64T1 | 64 | 10 | of 32 pairs: bit 6, eight to a byte; bits 4 and 5, four to a byte; bits 0 to 3, two to a byte |
//! | Q3_B32T1A, Q3_B32T1B | 32 | 7, 8 bins | upper bit, eight to a byte; lower 2 bits, four to a byte |
//! | Q2_B32T1A, Q2_B32T1B | 32 | 3, 4 bins | four to a byte, the first in the lowest bits |
//!
//! Scales below 1e-5 count as none: every code is 0, so that a constant block is exact (as exact as its base in F16). A NaN
//! counts as 0, and what F16 cannot hold as its largest number. Q8_B32T2 is ggml's Q8_0, Q5_B32T1 its Q5_1.
//!
//! Invariant: the layouts are those of Inferflow's code, which puts the odd number of a pair into the digit of 11.

use super::grid::Line;
use super::{finite, half_at, put_half};

/// How a block's numbers become codes and bytes.
pub(super) trait Affine {
    /// Numbers of a block.
    const NUMBERS: usize;
    /// Bytes of a block.
    const BYTES: usize;
    /// Steps from the least number to the largest; of bin centres, bins.
    const STEPS: f32;
    /// Whether a code stands for the middle of its bin.
    const CENTRES: bool;
    /// Bytes of base and scale.
    const HEAD: usize = 4;
    /// How far bases and scales are apart, where that is far.
    const COARSE: Option<Line> = None;

    /// Codes to the bytes behind base and scale.
    fn pack(codes: &[u8], to: &mut [u8]);

    /// The reverse.
    fn unpack(from: &[u8], codes: &mut [u8]);

    /// Writes base and scale.
    fn put_head(base: f32, scale: f32, to: &mut [u8]) {
        put_half(to, 0, base);
        put_half(to, 2, scale);
    }

    /// Reads base and scale.
    fn head(from: &[u8]) -> (f32, f32) {
        (half_at(from, 0), half_at(from, 2))
    }
}

/// Scales below this count as none.
const LEAST_SCALE: f32 = 1e-5;

/// Codes of a block, whatever the format.
const NUMBERS_MAX: usize = 64;

pub(super) fn quantize<T: Affine>(values: &[f32], out: &mut [u8]) {
    let (blocks, to) = (values.chunks_exact(T::NUMBERS), out.chunks_exact_mut(T::BYTES));
    assert!(blocks.remainder().is_empty() && blocks.len() == to.len(), "whole blocks");
    for (block, to) in blocks.zip(to) {
        let mut numbers = [0f32; NUMBERS_MAX];
        let numbers = &mut numbers[..T::NUMBERS];
        for (number, value) in numbers.iter_mut().zip(block) {
            *number = finite(*value);
        }
        let mut codes = [0u8; NUMBERS_MAX];
        let codes = &mut codes[..T::NUMBERS];
        let (base, scale) = encode::<T>(numbers, codes);
        let (head, packed) = to.split_at_mut(T::HEAD);
        T::put_head(base, scale, head);
        T::pack(codes, packed);
    }
}

pub(super) fn dequantize<T: Affine>(bytes: &[u8], out: &mut [f32]) {
    let (blocks, to) = (bytes.chunks_exact(T::BYTES), out.chunks_exact_mut(T::NUMBERS));
    assert!(blocks.remainder().is_empty() && blocks.len() == to.len(), "whole blocks");
    for (block, to) in blocks.zip(to) {
        let (head, packed) = block.split_at(T::HEAD);
        let (base, scale) = T::head(head);
        let mut codes = [0u8; NUMBERS_MAX];
        T::unpack(packed, &mut codes[..T::NUMBERS]);
        for (value, code) in to.iter_mut().zip(codes) {
            *value = base + f32::from(code) * scale;
        }
    }
}

/// Codes of the numbers; base and scale.
fn encode<T: Affine>(numbers: &[f32], codes: &mut [u8]) -> (f32, f32) {
    let least = numbers.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (largest - least) / T::STEPS;
    let inverse = if scale < LEAST_SCALE { 0.0 } else { 1.0 / scale };
    let (rounding, highest) = if T::CENTRES { (1e-4, T::STEPS - 1.0) } else { (0.5, T::STEPS) };
    for (code, number) in codes.iter_mut().zip(numbers) {
        *code = ((number - least) * inverse + rounding).min(highest) as u8;
    }
    if inverse == 0.0 {
        return (least, 0.0);
    }
    (if T::CENTRES { least + scale / 2.0 } else { least }, scale)
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident: $numbers:literal numbers, $bytes:literal bytes, $steps:literal $kind:ident, $layout:ident;)*) => {
        $($(#[$doc])*
        pub(super) struct $name;

        impl Affine for $name {
            const NUMBERS: usize = $numbers;
            const BYTES: usize = $bytes;
            const STEPS: f32 = $steps;
            const CENTRES: bool = formats!(@$kind);

            fn pack(codes: &[u8], to: &mut [u8]) {
                $layout::pack(codes, to);
            }

            fn unpack(from: &[u8], codes: &mut [u8]) {
                $layout::unpack(from, codes);
            }
        })*
    };
    (@steps) => { false };
    (@bins) => { true };
}

formats! {
    Q8B32T1: 32 numbers, 36 bytes, 255.0 steps, bytes;
    Q6B64T1: 64 numbers, 52 bytes, 62.0 steps, six;
    Q5B64T1: 64 numbers, 44 bytes, 30.0 steps, five;
    Q4B64T1: 64 numbers, 36 bytes, 14.0 steps, four;
    Q4B32T1A: 32 numbers, 20 bytes, 15.0 steps, four;
    Q4B32T1B: 32 numbers, 20 bytes, 16.0 bins, four;
    Q3HB64T1: 64 numbers, 32 bytes, 10.0 steps, three_and_a_half;
    Q3B32T1A: 32 numbers, 16 bytes, 7.0 steps, three;
    Q3B32T1B: 32 numbers, 16 bytes, 8.0 bins, three;
    Q2B32T1A: 32 numbers, 12 bytes, 3.0 steps, two;
    Q2B32T1B: 32 numbers, 12 bytes, 4.0 bins, two;
}

/// 16 numbers whose base and scale are a byte each, good for weights between -1 and 1.5.
pub(super) struct Q4B16;

impl Affine for Q4B16 {
    const NUMBERS: usize = 16;
    const BYTES: usize = 10;
    const STEPS: f32 = 15.0;
    const CENTRES: bool = false;
    const HEAD: usize = 2;
    const COARSE: Option<Line> = Some(Line { base: 0.01, scale: 0.001 });

    fn pack(codes: &[u8], to: &mut [u8]) {
        four::pack(codes, to);
    }

    fn unpack(from: &[u8], codes: &mut [u8]) {
        four::unpack(from, codes);
    }

    fn put_head(base: f32, scale: f32, to: &mut [u8]) {
        // Numbers beyond a byte become its end.
        to[0] = (base * 100.0 + 100.5) as u8;
        to[1] = (scale * 1000.0 + 0.5) as u8;
    }

    fn head(from: &[u8]) -> (f32, f32) {
        (f32::from(from[0]) / 100.0 - 1.0, f32::from(from[1]) / 1000.0)
    }
}

/// A byte each.
mod bytes {
    pub fn pack(codes: &[u8], to: &mut [u8]) {
        to.copy_from_slice(codes);
    }

    pub fn unpack(from: &[u8], codes: &mut [u8]) {
        codes.copy_from_slice(from);
    }
}

/// Fields of `bits` bits of consecutive codes, the first in the lowest bits.
fn put(codes: impl Iterator<Item = u8>, bits: usize, to: &mut [u8]) {
    to.fill(0);
    for (n, code) in codes.enumerate() {
        let at = n * bits;
        to[at / 8] |= (code & ((1 << bits) - 1)) << (at % 8);
    }
}

/// Field number n of [`put`].
fn get(from: &[u8], bits: usize, n: usize) -> u8 {
    let at = n * bits;
    from[at / 8] >> (at % 8) & ((1 << bits) - 1)
}

/// Codes whose lowest `low` bits stand behind the others, `high` of them.
fn pack_parts(codes: &[u8], high: usize, low: usize, to: &mut [u8]) {
    let (upper, lower) = to.split_at_mut(codes.len() * high / 8);
    put(codes.iter().map(|code| code >> low), high, upper);
    put(codes.iter().copied(), low, lower);
}

fn unpack_parts(from: &[u8], high: usize, low: usize, codes: &mut [u8]) {
    let (upper, lower) = from.split_at(codes.len() * high / 8);
    for (n, code) in codes.iter_mut().enumerate() {
        *code = get(upper, high, n) << low | get(lower, low, n);
    }
}

macro_rules! parts {
    ($($name:ident: $high:literal, $low:literal;)*) => {
        $(mod $name {
            pub fn pack(codes: &[u8], to: &mut [u8]) {
                super::pack_parts(codes, $high, $low, to);
            }

            pub fn unpack(from: &[u8], codes: &mut [u8]) {
                super::unpack_parts(from, $high, $low, codes);
            }
        })*
    };
}

parts! {
    six: 2, 4;
    five: 1, 4;
    three: 1, 2;
}

macro_rules! fields {
    ($($name:ident: $bits:literal;)*) => {
        $(mod $name {
            pub fn pack(codes: &[u8], to: &mut [u8]) {
                super::put(codes.iter().copied(), $bits, to);
            }

            pub fn unpack(from: &[u8], codes: &mut [u8]) {
                for (n, code) in codes.iter_mut().enumerate() {
                    *code = super::get(from, $bits, n);
                }
            }
        })*
    };
}

fields! {
    four: 4;
    two: 2;
}

/// Pairs of codes of 0 to 10 as numbers of 7 bits.
mod three_and_a_half {
    use super::{get, put};

    const BASE: u8 = 11;

    pub fn pack(codes: &[u8], to: &mut [u8]) {
        let pairs = || codes.as_chunks::<2>().0.iter().map(|[even, odd]| even + BASE * odd);
        let (highest, rest) = to.split_at_mut(codes.len() / 16);
        let (middle, low) = rest.split_at_mut(codes.len() / 8);
        put(pairs().map(|pair| pair >> 6), 1, highest);
        put(pairs().map(|pair| pair >> 4), 2, middle);
        put(pairs(), 4, low);
    }

    pub fn unpack(from: &[u8], codes: &mut [u8]) {
        let (highest, rest) = from.split_at(codes.len() / 16);
        let (middle, low) = rest.split_at(codes.len() / 8);
        for (n, codes) in codes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let pair = get(highest, 1, n) << 6 | get(middle, 2, n) << 4 | get(low, 4, n);
            *codes = [pair % BASE, pair / BASE];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paper's Table 2: codes and mean errors of twelve weights.
    #[test]
    fn table_2_is_reproduced() {
        const WEIGHTS: [f32; 12] = [-1.0, -0.9, -0.6, -0.4, -0.2, 0.0, 0.1, 0.5, 0.7, 1.0, 1.3, 1.5];
        fn row<T: Affine>(expected: [u8; 12], error: f32) {
            let mut codes = [0; 12];
            let (base, scale) = encode::<T>(&WEIGHTS, &mut codes);
            assert_eq!(codes, expected);
            let off = |(weight, code): (&f32, u8)| (weight - (base + f32::from(code) * scale)).abs();
            let mean = WEIGHTS.iter().zip(codes).map(off).sum::<f32>() / 12.0;
            assert!((mean - error).abs() < 0.0005, "{mean}");
        }
        row::<Q4B32T1A>([0, 1, 2, 4, 5, 6, 7, 9, 10, 12, 14, 15], 0.031);
        row::<Q3B32T1A>([0, 0, 1, 2, 2, 3, 3, 4, 5, 6, 6, 7], 0.075);
        row::<Q3HB64T1>([0, 0, 2, 2, 3, 4, 4, 6, 7, 8, 9, 10], 0.046);
    }

    /// Bytes that Inferflow's own code makes of codes n mod 11.
    #[test]
    fn pairs_lie_where_the_seed_puts_them() {
        let codes: Vec<u8> = (0..64).map(|n| n % 11).collect();
        let expected = [
            24, 199, 56, 198, 120, 146, 52, 158, 36, 141, 39, 73, 59, 59, 171, 247, 247, 183, 179, 179, 122,
            127, 127, 59, 59, 171, 247, 247,
        ];
        let mut packed = [0; 28];
        three_and_a_half::pack(&codes, &mut packed);
        assert_eq!(packed, expected);
        let mut back = [0; 64];
        three_and_a_half::unpack(&packed, &mut back);
        assert_eq!(back.to_vec(), codes);
    }

    /// Written by hand from the description of the layouts.
    #[test]
    fn fields_lie_where_the_description_puts_them() {
        let packed = |pack: fn(&[u8], &mut [u8]), codes: &[u8], bytes: usize| {
            let mut to = vec![0xff; bytes];
            pack(codes, &mut to);
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

    /// Every code of every place comes back.
    #[test]
    fn codes_survive_packing() {
        fn check<T: Affine>() {
            let highest = if T::CENTRES { T::STEPS - 1.0 } else { T::STEPS } as usize + 1;
            for shift in 0..highest {
                let codes: Vec<u8> = (0..T::NUMBERS).map(|n| ((n * 7 + shift) % highest) as u8).collect();
                let (mut packed, mut back) = (vec![0xa5; T::BYTES - T::HEAD], vec![0; T::NUMBERS]);
                T::pack(&codes, &mut packed);
                T::unpack(&packed, &mut back);
                assert_eq!(back, codes);
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
