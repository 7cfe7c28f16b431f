//! Block formats of ggml: 32 elements share an F16 scale, little-endian, which comes first.
//!
//! | format | after the scale | value of quant q |
//! |---|---|---|
//! | Q8_0 | 32 signed bytes | q * scale |
//! | Q4_0 | 16 bytes: low nibbles for elements 0 to 15, high nibbles for 16 to 31 | (q - 8) * scale |
//! | Q4_1 | the minimum in F16, the same 16 bytes | q * scale + minimum |
//! | Q5_0 | 4 bytes, bit i is the high bit of quant i, the same 16 bytes | (q - 16) * scale |
//! | Q5_1 | the minimum in F16, the same 4 and 16 bytes | q * scale + minimum |
//!
//! Invariant: for numbers that the format can represent, the bytes are those of ggml's reference.

use super::{clamp_to_f16_times, read_f16, write_f16};
use half::f16;

/// Elements of a block.
pub const BLOCK_LEN: usize = 32;

/// Bytes of a scale or a minimum.
pub const SCALE_BYTES: usize = 2;

/// Bytes of a block of Q8_0.
pub const Q8_0_BYTES: usize = SCALE_BYTES + BLOCK_LEN;
/// Bytes of a block of Q4_0.
pub const Q4_0_BYTES: usize = SCALE_BYTES + BLOCK_LEN / 2;
/// Bytes of a block of Q4_1.
pub const Q4_1_BYTES: usize = Q4_0_BYTES + SCALE_BYTES;
/// Bytes of a block of Q5_0.
pub const Q5_0_BYTES: usize = Q4_0_BYTES + BLOCK_LEN / 8;
/// Bytes of a block of Q5_1.
pub const Q5_1_BYTES: usize = Q5_0_BYTES + SCALE_BYTES;

pub(super) fn dequantize_q8_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_chunks::<_, _, Q8_0_BYTES, BLOCK_LEN>(bytes, out) {
        let (scale, quants) = split_scale(block);
        for (out, quant) in out.iter_mut().zip(quants) {
            *out = f32::from(*quant as i8) * scale;
        }
    }
}

pub(super) fn dequantize_q4_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_chunks::<_, _, Q4_0_BYTES, BLOCK_LEN>(bytes, out) {
        let (scale, quants) = split_scale(block);
        let value = |quant: u8| f32::from(quant as i8 - 8) * scale;
        let (low, high) = out.split_at_mut(BLOCK_LEN / 2);
        for ((low, high), quants) in low.iter_mut().zip(high).zip(quants) {
            (*low, *high) = (value(quants & 15), value(quants >> 4));
        }
    }
}

/// Quantizes to Q8_0: the largest magnitude becomes 127. The quants use the scale before its conversion to
/// F16, and ties are rounded away from zero.
pub(super) fn quantize_q8_0(values: &[f32], out: &mut [u8]) {
    for (values, block) in zip_chunks::<_, _, BLOCK_LEN, Q8_0_BYTES>(values, out) {
        let values = &values.map(|value| clamp_to_f16_times(value, 127.0));
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = reciprocal(scale);
        for (quant, value) in write_scale(scale, block).iter_mut().zip(values) {
            *quant = (value * inverse).round() as i8 as u8;
        }
    }
}

/// Quantizes to Q4_0: the element with the largest magnitude (the first of equals) becomes -8 whatever its
/// sign, because the scale has the opposite sign. An equally large element of the other sign would become 8,
/// and is clamped to 7.
pub(super) fn quantize_q4_0(values: &[f32], out: &mut [u8]) {
    for (values, block) in zip_chunks::<_, _, BLOCK_LEN, Q4_0_BYTES>(values, out) {
        let values = &values.map(|value| clamp_to_f16_times(value, 8.0));
        let larger = |extreme: f32, value: &f32| if extreme.abs() < value.abs() { *value } else { extreme };
        let scale = values.iter().fold(0.0, larger) / -8.0;
        let inverse = reciprocal(scale);
        let quant = |value: &f32| ((value * inverse + 8.5) as i8).min(15) as u8;
        let (low, high) = values.split_at(BLOCK_LEN / 2);
        for (quants, (low, high)) in write_scale(scale, block).iter_mut().zip(low.iter().zip(high)) {
            *quants = quant(low) | quant(high) << 4;
        }
    }
}

/// Unpacks 32 quants of 4 bits, or of 5 bits with the high bits `upper`, and writes the `value` of each.
fn unpack_quants(upper: u32, quants: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(BLOCK_LEN / 2);
    for (n, ((low, high), quants)) in low.iter_mut().zip(high).zip(quants).enumerate() {
        let upper = |n: usize| (upper >> n & 1) as u8 * 16;
        (*low, *high) = (value(quants & 15 | upper(n)), value(quants >> 4 | upper(n + BLOCK_LEN / 2)));
    }
}

/// Writes 32 quants of at most `highest` behind scale and minimum. 5-bit quants have their high bits first.
/// 8-bit quants are stored with an offset of -127.
pub(super) fn write_quants(highest: u8, quants: &[u8], to: &mut [u8]) {
    let mut values = [0f32; BLOCK_LEN];
    values.iter_mut().zip(quants).for_each(|(value, quant)| *value = f32::from(*quant));
    match highest {
        ..16 => _ = pack_quants(&values, to, |quant| quant as u8),
        16..32 => {
            let (upper, lower) = to.split_at_mut(BLOCK_LEN / 8);
            upper.copy_from_slice(&pack_quants(&values, lower, |quant| quant as u8).to_le_bytes());
        }
        32.. => to.iter_mut().zip(quants).for_each(|(to, quant)| *to = quant.wrapping_sub(127)),
    }
}

/// Packs the quants of 32 values as nibbles, and returns the high bits.
fn pack_quants(values: &[f32], quants: &mut [u8], quant: impl Fn(f32) -> u8) -> u32 {
    let (low, high) = values.split_at(BLOCK_LEN / 2);
    let mut upper = 0;
    for (n, (to, (low, high))) in quants.iter_mut().zip(low.iter().zip(high)).enumerate() {
        let (low, high) = (quant(*low), quant(*high));
        *to = low & 15 | high << 4;
        upper |= u32::from(low >> 4) << n | u32::from(high >> 4) << (n + BLOCK_LEN / 2);
    }
    upper
}

fn read_u32(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

pub(super) fn dequantize_q4_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_chunks::<_, _, Q4_1_BYTES, BLOCK_LEN>(bytes, out) {
        let (scale, minimum) = (read_f16(block, 0), read_f16(block, 2));
        unpack_quants(0, &block[4..], out, |quant| scale * f32::from(quant) + minimum);
    }
}

pub(super) fn dequantize_q5_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_chunks::<_, _, Q5_0_BYTES, BLOCK_LEN>(bytes, out) {
        let scale = read_f16(block, 0);
        unpack_quants(read_u32(&block[2..]), &block[6..], out, |quant| scale * f32::from(quant as i8 - 16));
    }
}

pub(super) fn dequantize_q5_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_chunks::<_, _, Q5_1_BYTES, BLOCK_LEN>(bytes, out) {
        let (scale, minimum) = (read_f16(block, 0), read_f16(block, 2));
        unpack_quants(read_u32(&block[4..]), &block[8..], out, |quant| scale * f32::from(quant) + minimum);
    }
}

/// Returns the minimum, the scale and its reciprocal for a block with `steps` steps.
fn min_and_scale(values: &[f32], steps: f32) -> (f32, f32, f32) {
    let minimum = values.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (largest - minimum) / steps;
    (minimum, scale, reciprocal(scale))
}

pub(super) fn quantize_q4_1(values: &[f32], out: &mut [u8]) {
    for (values, block) in zip_chunks::<_, _, BLOCK_LEN, Q4_1_BYTES>(values, out) {
        let values = &values.map(|value| clamp_to_f16_times(value, 1.0));
        let (minimum, scale, inverse) = min_and_scale(values, 15.0);
        write_f16(block, 0, scale);
        write_f16(block, 2, minimum);
        pack_quants(values, &mut block[4..], |value| (((value - minimum) * inverse + 0.5) as u8).min(15));
    }
}

/// Quantizes to Q5_0: as in Q4_0, the element with the largest magnitude (the first of equals) becomes -16.
pub(super) fn quantize_q5_0(values: &[f32], out: &mut [u8]) {
    for (values, block) in zip_chunks::<_, _, BLOCK_LEN, Q5_0_BYTES>(values, out) {
        let values = &values.map(|value| clamp_to_f16_times(value, 16.0));
        let larger = |extreme: f32, value: &f32| if extreme.abs() < value.abs() { *value } else { extreme };
        let scale = values.iter().fold(0.0, larger) / -16.0;
        let inverse = reciprocal(scale);
        write_f16(block, 0, scale);
        let upper =
            pack_quants(values, &mut block[6..], |value| ((value * inverse + 16.5) as i8).min(31) as u8);
        block[2..6].copy_from_slice(&upper.to_le_bytes());
    }
}

pub(super) fn quantize_q5_1(values: &[f32], out: &mut [u8]) {
    for (values, block) in zip_chunks::<_, _, BLOCK_LEN, Q5_1_BYTES>(values, out) {
        let values = &values.map(|value| clamp_to_f16_times(value, 1.0));
        let (minimum, scale, inverse) = min_and_scale(values, 31.0);
        write_f16(block, 0, scale);
        write_f16(block, 2, minimum);
        let upper =
            pack_quants(values, &mut block[8..], |value| (((value - minimum) * inverse + 0.5) as u8).min(31));
        block[4..8].copy_from_slice(&upper.to_le_bytes());
    }
}

/// Splits a block of Q8_0. An unsigned quant is the signed byte plus 128.
pub(super) fn split_q8_0(block: &[u8], quants: &mut [u8], params: &mut [u8]) {
    params.copy_from_slice(&block[..SCALE_BYTES]);
    quants.iter_mut().zip(&block[SCALE_BYTES..]).for_each(|(quant, byte)| *quant = byte ^ 0x80);
}

pub(super) fn join_q8_0(quants: &[u8], params: &[u8], block: &mut [u8]) {
    block[..SCALE_BYTES].copy_from_slice(params);
    block[SCALE_BYTES..].iter_mut().zip(quants).for_each(|(byte, quant)| *byte = quant ^ 0x80);
}

pub(super) fn split_q4<const HEAD: usize>(block: &[u8], quants: &mut [u8], params: &mut [u8]) {
    params.copy_from_slice(&block[..HEAD]);
    let (low, high) = quants.split_at_mut(BLOCK_LEN / 2);
    for ((low, high), both) in low.iter_mut().zip(high).zip(&block[HEAD..]) {
        (*low, *high) = (both & 15, both >> 4);
    }
}

pub(super) fn join_q4<const HEAD: usize>(quants: &[u8], params: &[u8], block: &mut [u8]) {
    block[..HEAD].copy_from_slice(params);
    let (low, high) = quants.split_at(BLOCK_LEN / 2);
    for ((low, high), both) in low.iter().zip(high).zip(&mut block[HEAD..]) {
        *both = low | high << 4;
    }
}

/// Returns the reciprocal, or 0 for 0.
fn reciprocal(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Returns the scale of a block and the bytes after it.
fn split_scale<const N: usize>(block: &[u8; N]) -> (f32, &[u8]) {
    let (scale, quants) = block.split_at(SCALE_BYTES);
    (f16::from_le_bytes([scale[0], scale[1]]).to_f32(), quants)
}

/// Writes the scale of a block, and returns the bytes after it.
fn write_scale<const N: usize>(scale: f32, block: &mut [u8; N]) -> &mut [u8] {
    let (to, quants) = block.split_at_mut(SCALE_BYTES);
    to.copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    quants
}

/// Pairs chunks of N with chunks of M. Asserts that both slices have the same number of whole chunks.
fn zip_chunks<'a, A, B, const N: usize, const M: usize>(
    from: &'a [A],
    to: &'a mut [B],
) -> impl Iterator<Item = (&'a [A; N], &'a mut [B; M])> {
    let ((from, from_rest), (to, to_rest)) = (from.as_chunks(), to.as_chunks_mut());
    assert!(from_rest.is_empty() && to_rest.is_empty() && from.len() == to.len());
    from.iter().zip(to)
}

#[cfg(test)]
mod tests {
    use crate::quant::QuantType;

    fn quantized(ty: QuantType, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; ty.bytes(values.len()).unwrap()];
        ty.quantize(values, &mut bytes);
        bytes
    }

    fn values(ty: QuantType, bytes: &[u8], count: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; count];
        ty.dequantize(bytes, &mut values);
        values
    }

    /// A block with a scale of 0.5, written by hand.
    #[test]
    fn a_block_is_read_as_it_is_described() {
        let half = [0x00, 0x38];
        let quants: Vec<u8> = (0..32u8).map(|i| i.wrapping_mul(37)).collect();
        let expected: Vec<f32> = (0..32i32)
            .map(|i| (i * 37 + 128).rem_euclid(256) - 128)
            .map(|quant| quant as f32 / 2.0)
            .collect();
        assert_eq!(values(QuantType::Q8_0, &[&half[..], &quants].concat(), 32), expected);

        let quants: Vec<u8> = (0..16u8).map(|i| i | (15 - i) << 4).collect();
        let expected: Vec<f32> =
            (0..16).chain((0..16).rev()).map(|quant: i32| (quant - 8) as f32 / 2.0).collect();
        assert_eq!(values(QuantType::Q4_0, &[&half[..], &quants].concat(), 32), expected);
    }

    #[test]
    fn the_largest_number_uses_the_full_range_and_zeros_stay_zero() {
        let mut block = [0.25f32; 64];
        block[..32].fill(0.0);
        (block[40], block[41]) = (-127.0, 127.0);
        let bytes = quantized(QuantType::Q8_0, &block);
        assert!(bytes[..34].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[34..36], [0x00, 0x3c], "a scale of 1");
        assert_eq!((bytes[36 + 8] as i8, bytes[36 + 9] as i8, bytes[36]), (-127, 127, 0));

        (block[40], block[41]) = (16.0, -16.0);
        let bytes = quantized(QuantType::Q4_0, &block);
        assert_eq!(bytes[..2], [0x00, 0x80], "a scale of negative zero");
        assert_eq!(values(QuantType::Q4_0, &bytes[..18], 32), [0.0; 32]);
        assert_eq!(bytes[18..20], [0x00, 0xc0], "the first of equals gives a scale of -2");
        assert_eq!(values(QuantType::Q4_0, &bytes[18..], 32)[8..10], [16.0, -14.0]);
    }

    /// Values return within half a step of the scale of their block, plus its rounding to 11 bits; within a
    /// whole step where Q4_0 clamps one end.
    #[test]
    fn numbers_return_within_a_step_of_their_block() {
        let numbers = crate::random::noise(7, 4096);
        for (ty, steps, quants) in [(QuantType::Q8_0, 0.57, 127.0), (QuantType::Q4_0, 1.01, 8.0)] {
            let back = values(ty, &quantized(ty, &numbers), numbers.len());
            for (block, back) in numbers.chunks(32).zip(back.chunks(32)) {
                let step = block.iter().fold(0f32, |largest, v| largest.max(v.abs())) / quants;
                for (number, back) in block.iter().zip(back) {
                    assert!((number - back).abs() <= steps * step, "{ty}: {number} became {back}");
                }
            }
        }
    }
}
