//! FlexGen's group-wise 4-bit format (Sheng et al. 2023, section 5; `compression.py`): groups of 64 elements
//! share a multiplier and a minimum, both F16.
//!
//! `S = 15 / (mx - mn)`, `q = round(clamp((x - mn) * S, 0, 15))`, ties to even; `x' = q / S + mn`, with the
//! minimum `mn` and the maximum `mx` of the group. A byte holds two quants, the first in the high nibble.
//!
//! FlexGen stores quants and (S, mn) in two tensors; here they lie together, S and mn first. If S exceeds the
//! range of F16, it is the largest F16: the quants are then small, and the error stays below 1 / 131008. In
//! FlexGen, S overflows in this case, and all elements become the minimum. NaN becomes 0, and numbers outside
//! the range of F16 become its largest number.
//!
//! Invariant: a constant group is stored as exactly as F16 represents the constant.

use super::{clamp_to_f16, read_f16, write_f16};
use half::f16;

/// Elements of a group.
pub const GROUP_LEN: usize = 64;
/// Bytes of a group.
pub const GROUP_BYTES: usize = 4 + GROUP_LEN / 2;

pub(super) fn quantize(values: &[f32], out: &mut [u8]) {
    let (groups, to) = (values.chunks_exact(GROUP_LEN), out.chunks_exact_mut(GROUP_BYTES));
    assert!(groups.remainder().is_empty() && groups.len() == to.len(), "whole groups");
    for (group, to) in groups.zip(to) {
        let minimum = group.iter().map(|x| clamp_to_f16(*x)).fold(f32::INFINITY, f32::min);
        let maximum = group.iter().map(|x| clamp_to_f16(*x)).fold(f32::NEG_INFINITY, f32::max);
        // A division by zero gives infinity, which `min` limits too.
        let multiplier = (15.0 / (maximum - minimum)).min(f16::MAX.to_f32());
        write_f16(to, 0, multiplier);
        write_f16(to, 2, minimum);
        let quant =
            |x: f32| ((clamp_to_f16(x) - minimum) * multiplier).clamp(0.0, 15.0).round_ties_even() as u8;
        for (byte, [first, second]) in to[4..].iter_mut().zip(group.as_chunks().0) {
            *byte = quant(*first) << 4 | quant(*second);
        }
    }
}

pub(super) fn dequantize(bytes: &[u8], out: &mut [f32]) {
    let (groups, to) = (bytes.chunks_exact(GROUP_BYTES), out.chunks_exact_mut(GROUP_LEN));
    assert!(groups.remainder().is_empty() && groups.len() == to.len(), "whole groups");
    for (group, to) in groups.zip(to) {
        let (multiplier, minimum) = (read_f16(group, 0), read_f16(group, 2));
        for (byte, values) in group[4..].iter().zip(to.as_chunks_mut().0) {
            *values = [byte >> 4, byte & 15].map(|quant| f32::from(quant) / multiplier + minimum);
        }
    }
}

pub(super) fn split(block: &[u8], quants: &mut [u8], params: &mut [u8]) {
    params.copy_from_slice(&block[..4]);
    for (quants, both) in quants.as_chunks_mut().0.iter_mut().zip(&block[4..]) {
        *quants = [both >> 4, both & 15];
    }
}

pub(super) fn join(quants: &[u8], params: &[u8], block: &mut [u8]) {
    block[..4].copy_from_slice(params);
    for ([first, second], both) in quants.as_chunks().0.iter().zip(&mut block[4..]) {
        *both = first << 4 | second;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(group: &[f32; GROUP_LEN]) -> ([u8; GROUP_BYTES], [f32; GROUP_LEN]) {
        let (mut bytes, mut back) = ([0; GROUP_BYTES], [0.0; GROUP_LEN]);
        quantize(group, &mut bytes);
        dequantize(&bytes, &mut back);
        (bytes, back)
    }

    #[test]
    fn the_first_of_two_quants_is_in_the_high_nibble() {
        let group = std::array::from_fn(|n| (n % 16) as f32 - 5.0);
        let (bytes, back) = there_and_back(&group);
        assert_eq!(read_f16(&bytes, 0), 1.0);
        assert_eq!(read_f16(&bytes, 2), -5.0);
        assert_eq!(bytes[4..8], [0x01, 0x23, 0x45, 0x67]);
        assert_eq!(back, group);
    }

    /// Ties go to the even quant.
    #[test]
    fn halves_are_rounded_to_even() {
        let mut group = [0.0; GROUP_LEN];
        (group[0], group[1], group[2], group[3]) = (15.0, 2.5, 3.5, 0.5);
        assert_eq!(there_and_back(&group).1[..4], [15.0, 2.0, 4.0, 0.0]);
    }

    /// For the first group, FlexGen divides by zero; for the second one, it overflows.
    #[test]
    fn constant_and_narrow_groups_are_preserved() {
        let (_, back) = there_and_back(&[0.375; GROUP_LEN]);
        assert_eq!(back, [0.375; GROUP_LEN]);
        let group: [f32; GROUP_LEN] = std::array::from_fn(|n| 0.25 + n as f32 * 1e-6);
        let (_, back) = there_and_back(&group);
        for (x, back) in group.iter().zip(back) {
            assert!((x - back).abs() <= 1.0 / 131_000.0, "{x} became {back}");
        }
    }
}
