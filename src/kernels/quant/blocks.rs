//! Formats of blocks, as ggml defines them: 32 numbers share a scale in F16, little-endian, which comes first.
//!
//! | format | after the scale | value |
//! |---|---|---|
//! | Q8_0 | 32 signed bytes | code * scale |
//! | Q4_0 | 16 bytes: low halves for numbers 0 to 15, high halves for 16 to 31 | (code - 8) * scale |
//! | Q4_1 | the least number in F16, the same 16 bytes | code * scale + least |
//! | Q5_0 | 4 bytes, bit n is the upper bit of code n, the same 16 bytes | (code - 16) * scale |
//! | Q5_1 | the least number in F16, the same 4 and 16 bytes | code * scale + least |
//!
//! Invariant: the codes of numbers that the format can hold are those of ggml's reference, byte for byte.

use super::{bounded, half_at, put_half};
use half::f16;

/// Numbers of a block.
pub const NUMBERS: usize = 32;

/// Bytes before the codes.
pub const SCALE_BYTES: usize = 2;

/// Bytes of a block.
pub const Q8_0_BYTES: usize = SCALE_BYTES + NUMBERS;
pub const Q4_0_BYTES: usize = SCALE_BYTES + NUMBERS / 2;
pub const Q4_1_BYTES: usize = Q4_0_BYTES + SCALE_BYTES;
pub const Q5_0_BYTES: usize = Q4_0_BYTES + NUMBERS / 8;
pub const Q5_1_BYTES: usize = Q5_0_BYTES + SCALE_BYTES;

pub(super) fn dequantize_q8_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in pairs::<_, _, Q8_0_BYTES, NUMBERS>(bytes, out) {
        let (scale, codes) = parts(block);
        for (out, code) in out.iter_mut().zip(codes) {
            *out = f32::from(*code as i8) * scale;
        }
    }
}

pub(super) fn dequantize_q4_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in pairs::<_, _, Q4_0_BYTES, NUMBERS>(bytes, out) {
        let (scale, codes) = parts(block);
        let value = |code: u8| f32::from(code as i8 - 8) * scale;
        let (low, high) = out.split_at_mut(NUMBERS / 2);
        for ((low, high), codes) in low.iter_mut().zip(high).zip(codes) {
            (*low, *high) = (value(codes & 15), value(codes >> 4));
        }
    }
}

/// The largest magnitude becomes 127. Codes follow from the scale as it was before it became an F16; halves
/// are rounded away from zero.
pub(super) fn quantize_q8_0(values: &[f32], out: &mut [u8]) {
    for (values, block) in pairs::<_, _, NUMBERS, Q8_0_BYTES>(values, out) {
        let values = &values.map(|value| bounded(value, 127.0));
        let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
        let scale = largest / 127.0;
        let inverse = inverse(scale);
        for (code, value) in put_scale(scale, block).iter_mut().zip(values) {
            *code = (value * inverse).round() as i8 as u8;
        }
    }
}

/// The number of the largest magnitude, the first of equals, becomes -8 whatever its sign: the scale has the
/// opposite one. A number as large on the other side would become 8, and becomes 7.
pub(super) fn quantize_q4_0(values: &[f32], out: &mut [u8]) {
    for (values, block) in pairs::<_, _, NUMBERS, Q4_0_BYTES>(values, out) {
        let values = &values.map(|value| bounded(value, 8.0));
        let further = |extreme: f32, value: &f32| if extreme.abs() < value.abs() { *value } else { extreme };
        let scale = values.iter().fold(0.0, further) / -8.0;
        let inverse = inverse(scale);
        let code = |value: &f32| ((value * inverse + 8.5) as i8).min(15) as u8;
        let (low, high) = values.split_at(NUMBERS / 2);
        for (codes, (low, high)) in put_scale(scale, block).iter_mut().zip(low.iter().zip(high)) {
            *codes = code(low) | code(high) << 4;
        }
    }
}

/// Codes of 4 bits, and of 5 where there are upper bits.
fn spread(upper: u32, codes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(NUMBERS / 2);
    for (n, ((low, high), codes)) in low.iter_mut().zip(high).zip(codes).enumerate() {
        let upper = |n: usize| (upper >> n & 1) as u8 * 16;
        (*low, *high) = (value(codes & 15 | upper(n)), value(codes >> 4 | upper(n + NUMBERS / 2)));
    }
}

/// Codes up to a highest where they lie behind scales and least numbers: upper bits first where there are some. Bytes of
/// their own have 127 less.
pub(super) fn put_codes(highest: u8, codes: &[u8], to: &mut [u8]) {
    let mut values = [0f32; NUMBERS];
    values.iter_mut().zip(codes).for_each(|(value, code)| *value = f32::from(*code));
    match highest {
        ..16 => _ = gather(&values, to, |code| code as u8),
        16..32 => {
            let (upper, lower) = to.split_at_mut(NUMBERS / 8);
            upper.copy_from_slice(&gather(&values, lower, |code| code as u8).to_le_bytes());
        }
        32.. => to.iter_mut().zip(codes).for_each(|(to, code)| *to = code.wrapping_sub(127)),
    }
}

/// The reverse; the upper bits.
fn gather(values: &[f32], codes: &mut [u8], code: impl Fn(f32) -> u8) -> u32 {
    let (low, high) = values.split_at(NUMBERS / 2);
    let mut upper = 0;
    for (n, (to, (low, high))) in codes.iter_mut().zip(low.iter().zip(high)).enumerate() {
        let (low, high) = (code(*low), code(*high));
        *to = low & 15 | high << 4;
        upper |= u32::from(low >> 4) << n | u32::from(high >> 4) << (n + NUMBERS / 2);
    }
    upper
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

pub(super) fn dequantize_q4_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in pairs::<_, _, Q4_1_BYTES, NUMBERS>(bytes, out) {
        let (scale, least) = (half_at(block, 0), half_at(block, 2));
        spread(0, &block[4..], out, |code| scale * f32::from(code) + least);
    }
}

pub(super) fn dequantize_q5_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in pairs::<_, _, Q5_0_BYTES, NUMBERS>(bytes, out) {
        let scale = half_at(block, 0);
        spread(word(&block[2..]), &block[6..], out, |code| scale * f32::from(code as i8 - 16));
    }
}

pub(super) fn dequantize_q5_1(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in pairs::<_, _, Q5_1_BYTES, NUMBERS>(bytes, out) {
        let (scale, least) = (half_at(block, 0), half_at(block, 2));
        spread(word(&block[4..]), &block[8..], out, |code| scale * f32::from(code) + least);
    }
}

/// Least number, scale and its inverse of a block with that many steps.
fn range(values: &[f32], steps: f32) -> (f32, f32, f32) {
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = (largest - least) / steps;
    (least, scale, inverse(scale))
}

pub(super) fn quantize_q4_1(values: &[f32], out: &mut [u8]) {
    for (values, block) in pairs::<_, _, NUMBERS, Q4_1_BYTES>(values, out) {
        let values = &values.map(|value| bounded(value, 1.0));
        let (least, scale, inverse) = range(values, 15.0);
        put_half(block, 0, scale);
        put_half(block, 2, least);
        gather(values, &mut block[4..], |value| (((value - least) * inverse + 0.5) as u8).min(15));
    }
}

/// As in Q4_0: the number of the largest magnitude, the first of equals, becomes -16.
pub(super) fn quantize_q5_0(values: &[f32], out: &mut [u8]) {
    for (values, block) in pairs::<_, _, NUMBERS, Q5_0_BYTES>(values, out) {
        let values = &values.map(|value| bounded(value, 16.0));
        let further = |extreme: f32, value: &f32| if extreme.abs() < value.abs() { *value } else { extreme };
        let scale = values.iter().fold(0.0, further) / -16.0;
        let inverse = inverse(scale);
        put_half(block, 0, scale);
        let upper = gather(values, &mut block[6..], |value| ((value * inverse + 16.5) as i8).min(31) as u8);
        block[2..6].copy_from_slice(&upper.to_le_bytes());
    }
}

pub(super) fn quantize_q5_1(values: &[f32], out: &mut [u8]) {
    for (values, block) in pairs::<_, _, NUMBERS, Q5_1_BYTES>(values, out) {
        let values = &values.map(|value| bounded(value, 1.0));
        let (least, scale, inverse) = range(values, 31.0);
        put_half(block, 0, scale);
        put_half(block, 2, least);
        let upper =
            gather(values, &mut block[8..], |value| (((value - least) * inverse + 0.5) as u8).min(31));
        block[4..8].copy_from_slice(&upper.to_le_bytes());
    }
}

/// A code is 128 more than the byte says.
pub(super) fn split_q8_0(block: &[u8], codes: &mut [u8], head: &mut [u8]) {
    head.copy_from_slice(&block[..SCALE_BYTES]);
    codes.iter_mut().zip(&block[SCALE_BYTES..]).for_each(|(code, byte)| *code = byte ^ 0x80);
}

pub(super) fn join_q8_0(codes: &[u8], head: &[u8], block: &mut [u8]) {
    block[..SCALE_BYTES].copy_from_slice(head);
    block[SCALE_BYTES..].iter_mut().zip(codes).for_each(|(byte, code)| *byte = code ^ 0x80);
}

pub(super) fn split_q4<const HEAD: usize>(block: &[u8], codes: &mut [u8], head: &mut [u8]) {
    head.copy_from_slice(&block[..HEAD]);
    let (low, high) = codes.split_at_mut(NUMBERS / 2);
    for ((low, high), both) in low.iter_mut().zip(high).zip(&block[HEAD..]) {
        (*low, *high) = (both & 15, both >> 4);
    }
}

pub(super) fn join_q4<const HEAD: usize>(codes: &[u8], head: &[u8], block: &mut [u8]) {
    block[..HEAD].copy_from_slice(head);
    let (low, high) = codes.split_at(NUMBERS / 2);
    for ((low, high), both) in low.iter().zip(high).zip(&mut block[HEAD..]) {
        *both = low | high << 4;
    }
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// A block's scale, and its codes.
fn parts<const N: usize>(block: &[u8; N]) -> (f32, &[u8]) {
    let (scale, codes) = block.split_at(SCALE_BYTES);
    (f16::from_le_bytes([scale[0], scale[1]]).to_f32(), codes)
}

/// Writes a block's scale; the room for its codes.
fn put_scale<const N: usize>(scale: f32, block: &mut [u8; N]) -> &mut [u8] {
    let (to, codes) = block.split_at_mut(SCALE_BYTES);
    to.copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    codes
}

/// Runs of N with runs of M, of which there must be as many, and nothing over.
fn pairs<'a, A, B, const N: usize, const M: usize>(
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

    fn coded(ty: QuantType, values: &[f32]) -> Vec<u8> {
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
        let codes: Vec<u8> = (0..32u8).map(|i| i.wrapping_mul(37)).collect();
        let expected: Vec<f32> =
            (0..32i32).map(|i| (i * 37 + 128).rem_euclid(256) - 128).map(|code| code as f32 / 2.0).collect();
        assert_eq!(values(QuantType::Q8_0, &[&half[..], &codes].concat(), 32), expected);

        let codes: Vec<u8> = (0..16u8).map(|i| i | (15 - i) << 4).collect();
        let expected: Vec<f32> =
            (0..16).chain((0..16).rev()).map(|code: i32| (code - 8) as f32 / 2.0).collect();
        assert_eq!(values(QuantType::Q4_0, &[&half[..], &codes].concat(), 32), expected);
    }

    #[test]
    fn the_largest_number_fills_the_codes_and_zeros_stay_zero() {
        let mut block = [0.25f32; 64];
        block[..32].fill(0.0);
        (block[40], block[41]) = (-127.0, 127.0);
        let bytes = coded(QuantType::Q8_0, &block);
        assert!(bytes[..34].iter().all(|byte| *byte == 0));
        assert_eq!(bytes[34..36], [0x00, 0x3c], "a scale of 1");
        assert_eq!((bytes[36 + 8] as i8, bytes[36 + 9] as i8, bytes[36]), (-127, 127, 0));

        (block[40], block[41]) = (16.0, -16.0);
        let bytes = coded(QuantType::Q4_0, &block);
        assert_eq!(bytes[..2], [0x00, 0x80], "the opposite of zero");
        assert_eq!(values(QuantType::Q4_0, &bytes[..18], 32), [0.0; 32]);
        assert_eq!(bytes[18..20], [0x00, 0xc0], "the first of equals gives a scale of -2");
        assert_eq!(values(QuantType::Q4_0, &bytes[18..], 32)[8..10], [16.0, -14.0]);
    }

    /// Within half a step of the block's scale, and what rounding that to 11 bits adds; a whole step where Q4_0
    /// clips one end.
    #[test]
    fn numbers_come_back_within_a_step_of_their_block() {
        let numbers = crate::conformance::noise(7, 4096);
        for (ty, steps, codes) in [(QuantType::Q8_0, 0.57, 127.0), (QuantType::Q4_0, 1.01, 8.0)] {
            let back = values(ty, &coded(ty, &numbers), numbers.len());
            for (block, back) in numbers.chunks(32).zip(back.chunks(32)) {
                let step = block.iter().fold(0f32, |largest, v| largest.max(v.abs())) / codes;
                for (number, back) in block.iter().zip(back) {
                    assert!((number - back).abs() <= steps * step, "{ty}: {number} became {back}");
                }
            }
        }
    }
}
