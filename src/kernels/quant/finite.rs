//! Finds numbers that are NaN or infinite in stored weights.
//!
//! Invariant: the result is that of dequantizing everything, but blocks whose scales are finite are not
//! dequantized.

use super::QuantType;

/// Numbers that are looked at together before one is looked for.
const RUN: usize = 4096;

/// Exponents of E8M0 from which on a number of MXFP4 may exceed F32.
const LARGE_E8M0: u8 = 250;

/// Returns the index of the first number that is not finite; see [`QuantType::first_not_finite`].
pub(super) fn first_not_finite(ty: QuantType, bytes: &[u8]) -> Option<usize> {
    match ty {
        QuantType::F32 => first_of(bytes, |bytes| u32::from_le_bytes(bytes) & 0x7f80_0000 == 0x7f80_0000),
        QuantType::F16 => first_of(bytes, is_f16_not_finite),
        QuantType::BF16 => first_of(bytes, |bytes| u16::from_le_bytes(bytes) & 0x7f80 == 0x7f80),
        _ => first_in_blocks(ty, bytes),
    }
}

fn is_f16_not_finite(bytes: [u8; 2]) -> bool {
    u16::from_le_bytes(bytes) & 0x7c00 == 0x7c00
}

/// Returns the index of the first of some numbers of `N` bytes for which the condition holds.
fn first_of<const N: usize>(bytes: &[u8], is_wrong: impl Fn([u8; N]) -> bool) -> Option<usize> {
    let (numbers, _) = bytes.as_chunks::<N>();
    let runs = numbers.chunks(RUN).enumerate();
    // A fold over all numbers of a run, which the compiler vectorizes.
    let mut wrong = runs.filter(|(_, run)| run.iter().fold(false, |any, number| any | is_wrong(*number)));
    let (at, run) = wrong.next()?;
    Some(at * RUN + run.iter().position(|number| is_wrong(*number))?)
}

fn first_in_blocks(ty: QuantType, bytes: &[u8]) -> Option<usize> {
    let row = ty.row();
    let scales = f16_fields(ty, row.block_bytes);
    let is_suspicious = |block: &[u8]| match ty {
        QuantType::MXFP4 => block[0] >= LARGE_E8M0,
        _ => scales.iter().any(|at| is_f16_not_finite([block[*at], block[at + 1]])),
    };
    let blocks = bytes.chunks_exact(row.block_bytes).enumerate();
    let mut values = vec![0.0; row.block_elements];
    blocks.filter(|(_, block)| is_suspicious(block)).find_map(|(at, block)| {
        ty.dequantize(block, &mut values);
        Some(at * row.block_elements + values.iter().position(|value| !value.is_finite())?)
    })
}

/// Returns where the F16 scales and minima of a block of `len` bytes are.
fn f16_fields(ty: QuantType, len: usize) -> Vec<usize> {
    use QuantType::*;
    match ty {
        F32 | F16 | BF16 | MXFP4 | Q4_B16 => Vec::new(),
        Q8_0 | Q4_0 | Q5_0 | IQ4_NL | IQ4_XS => vec![0],
        Q2_K => vec![len - 4, len - 2],
        Q3_K | Q6_K | TQ1_0 | TQ2_0 => vec![len - 2],
        Q4_1 | Q5_1 | Q4_K | Q5_K | G4_B64 => vec![0, 2],
        Q8_B32T1 | Q6_B64T1 | Q5_B64T1 | Q4_B64T1 | Q4_B32T1A | Q4_B32T1B | Q3H_B64T1 | Q3_B32T1A
        | Q3_B32T1B | Q2_B32T1A | Q2_B32T1B => vec![0, 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::philox;

    /// Compares with dequantizing everything, for blocks of random bytes, of which some have scales that are
    /// not finite.
    #[test]
    fn the_first_number_that_is_not_finite_is_found_in_every_format() {
        for ty in QuantType::all() {
            let row = ty.row();
            let (mut found, blocks) = (0, 24);
            for trial in 0..400 {
                let byte = |at: usize| philox([at as u32 / 4, trial, 0, 0], [5, 5])[0].to_le_bytes()[at % 4];
                let mut bytes: Vec<u8> = (0..blocks * row.block_bytes).map(byte).collect();
                if trial % 2 == 0 {
                    // Most random blocks are finite, but few lists of many blocks are.
                    let zeros = vec![0.0; row.block_elements * (blocks - 1)];
                    let wanted = row.quantize.is_some();
                    if wanted {
                        ty.quantize(&zeros, &mut bytes[..(blocks - 1) * row.block_bytes]);
                    }
                }
                let mut values = vec![0.0; blocks * row.block_elements];
                ty.dequantize(&bytes, &mut values);
                let expected = values.iter().position(|value| !value.is_finite());
                assert_eq!(ty.first_not_finite(&bytes), expected, "{ty}");
                found += usize::from(expected.is_some());
            }
            assert!(found > 0 || ty == QuantType::Q4_B16, "{ty}");
        }
    }

    #[test]
    fn numbers_in_long_lists_are_found_at_their_place() {
        for ty in [QuantType::F32, QuantType::F16, QuantType::BF16, QuantType::Q8_0] {
            let mut bytes = vec![0; ty.bytes(5 * RUN).unwrap()];
            assert_eq!(ty.first_not_finite(&bytes), None, "{ty}");
            for at in [5 * RUN - 32, 2 * RUN + 64, RUN, 0] {
                let place = ty.bytes(at).unwrap();
                let wrong: &[u8] = match ty {
                    QuantType::F32 => &f32::NEG_INFINITY.to_le_bytes(),
                    QuantType::BF16 => &[0x81, 0x7f],
                    _ => &[0, 0x7c],
                };
                bytes[place..place + wrong.len()].copy_from_slice(wrong);
                assert_eq!(ty.first_not_finite(&bytes), Some(at), "{ty}");
            }
        }
    }
}
