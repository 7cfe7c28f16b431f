//! FlexGen's group-wise 4-bit format (Sheng et al. 2023, section 5; `compression.py`): 64 numbers share a multiplier
//! and their least number, both F16.
//!
//! `S = 15 / (mx - mn)`, `code = round(clamp((x - mn) * S, 0, 15))`, halves to even; `x' = code / S + mn`. A byte holds two
//! codes, the first in its upper half.
//!
//! FlexGen keeps codes and (S, mn) in two tensors; here they lie together, S and mn first. Where S would exceed what F16
//! holds, it is the largest that does: codes stay small, and the error below 1 / 131008. FlexGen's S overflows there, and all
//! numbers become the least. A NaN counts as 0, and what F16 cannot hold as its largest number.
//!
//! Invariant: a constant group is exact, as exact as F16 holds it.

use super::{finite, half_at, put_half};
use half::f16;

/// Numbers of a group.
pub const NUMBERS: usize = 64;
/// Bytes of a group.
pub const BYTES: usize = 4 + NUMBERS / 2;

pub(super) fn quantize(values: &[f32], out: &mut [u8]) {
    let (groups, to) = (values.chunks_exact(NUMBERS), out.chunks_exact_mut(BYTES));
    assert!(groups.remainder().is_empty() && groups.len() == to.len(), "whole groups");
    for (group, to) in groups.zip(to) {
        let least = group.iter().map(|x| finite(*x)).fold(f32::INFINITY, f32::min);
        let largest = group.iter().map(|x| finite(*x)).fold(f32::NEG_INFINITY, f32::max);
        // Divided by zero it is infinite, which the bound catches too.
        let multiplier = (15.0 / (largest - least)).min(f16::MAX.to_f32());
        put_half(to, 0, multiplier);
        put_half(to, 2, least);
        let code = |x: f32| ((finite(x) - least) * multiplier).clamp(0.0, 15.0).round_ties_even() as u8;
        for (byte, [first, second]) in to[4..].iter_mut().zip(group.as_chunks().0) {
            *byte = code(*first) << 4 | code(*second);
        }
    }
}

pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    let (groups, to) = (bytes.chunks_exact(BYTES), out.chunks_exact_mut(NUMBERS));
    assert!(groups.remainder().is_empty() && groups.len() == to.len(), "whole groups");
    for (group, to) in groups.zip(to) {
        let (multiplier, least) = (half_at(group, 0), half_at(group, 2));
        for (byte, values) in group[4..].iter().zip(to.as_chunks_mut().0) {
            *values = [byte >> 4, byte & 15].map(|code| f32::from(code) / multiplier + least);
        }
    }
}

pub(super) fn split(block: &[u8], codes: &mut [u8], head: &mut [u8]) {
    head.copy_from_slice(&block[..4]);
    for (codes, both) in codes.as_chunks_mut().0.iter_mut().zip(&block[4..]) {
        *codes = [both >> 4, both & 15];
    }
}

pub(super) fn join(codes: &[u8], head: &[u8], block: &mut [u8]) {
    block[..4].copy_from_slice(head);
    for ([first, second], both) in codes.as_chunks().0.iter().zip(&mut block[4..]) {
        *both = first << 4 | second;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(group: &[f32; NUMBERS]) -> ([u8; BYTES], [f32; NUMBERS]) {
        let (mut bytes, mut back) = ([0; BYTES], [0.0; NUMBERS]);
        quantize(group, &mut bytes);
        dequantize(&bytes, &mut back);
        (bytes, back)
    }

    #[test]
    fn the_first_of_two_is_in_the_upper_half() {
        let group = std::array::from_fn(|n| (n % 16) as f32 - 5.0);
        let (bytes, back) = there_and_back(&group);
        assert_eq!(half_at(&bytes, 0), 1.0);
        assert_eq!(half_at(&bytes, 2), -5.0);
        assert_eq!(bytes[4..8], [0x01, 0x23, 0x45, 0x67]);
        assert_eq!(back, group);
    }

    /// Halves go to the even code.
    #[test]
    fn halves_are_rounded_to_even() {
        let mut group = [0.0; NUMBERS];
        (group[0], group[1], group[2], group[3]) = (15.0, 2.5, 3.5, 0.5);
        assert_eq!(there_and_back(&group).1[..4], [15.0, 2.0, 4.0, 0.0]);
    }

    /// FlexGen divides by zero in the one, and overflows in the other.
    #[test]
    fn constant_groups_and_narrow_ones_are_kept() {
        let (_, back) = there_and_back(&[0.375; NUMBERS]);
        assert_eq!(back, [0.375; NUMBERS]);
        let group: [f32; NUMBERS] = std::array::from_fn(|n| 0.25 + n as f32 * 1e-6);
        let (_, back) = there_and_back(&group);
        for (x, back) in group.iter().zip(back) {
            assert!((x - back).abs() <= 1.0 / 131_000.0, "{x} became {back}");
        }
    }
}
