//! Formats of GGUF that are read and not written: codes that are not evenly spaced, and codes of three values.
//!
//! | format | numbers | value | bytes |
//! |---|---|---|---|
//! | IQ4_NL | 32 | d * LEVELS\[code\] | d, codes |
//! | IQ4_XS | 256 | d * (s - 32) * LEVELS\[code\], s of 6 bits for 32 numbers | d, upper bits of s, lower bits, codes |
//! | MXFP4 | 32 | 2^(e - 128) * twice an E2M1 number | e, codes |
//! | TQ1_0 | 256 | d * (code - 1), five codes of three values to a byte | codes, d |
//! | TQ2_0 | 256 | d * (code - 1), codes of 2 bits | codes, d |
//!
//! Codes of 4 bits: the lower halves of 16 bytes, then the upper halves. MXFP4 is that of the Open Compute Project's
//! microscaling formats, version 1.0.
//!
//! Invariant: the values are those of the gguf package, bit for bit.

use super::half_at;

/// Numbers of a small block.
pub const NUMBERS: usize = 32;
/// Numbers of a superblock.
pub const SUPER_NUMBERS: usize = 256;

pub const IQ4_NL_BYTES: usize = 18;
pub const IQ4_XS_BYTES: usize = 136;
pub const MXFP4_BYTES: usize = 17;
pub const TQ1_0_BYTES: usize = 54;
pub const TQ2_0_BYTES: usize = 66;

/// What the codes of IQ4_NL and IQ4_XS stand for.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice what the codes of MXFP4 stand for.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

fn blocks<'a>(
    bytes: &'a [u8],
    len: usize,
    out: &'a mut [f32],
    numbers: usize,
) -> impl Iterator<Item = (&'a [u8], &'a mut [f32])> {
    let (from, to) = (bytes.chunks_exact(len), out.chunks_exact_mut(numbers));
    assert!(from.remainder().is_empty() && from.len() == to.len(), "whole blocks");
    from.zip(to)
}

/// 32 numbers of 16 bytes.
fn spread(codes: &[u8], scale: f32, levels: &[i8; 16], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(NUMBERS / 2);
    let value = |code: u8| scale * f32::from(levels[usize::from(code)]);
    for ((low, high), codes) in low.iter_mut().zip(high).zip(codes) {
        (*low, *high) = (value(codes & 15), value(codes >> 4));
    }
}

pub(super) fn dequantize_iq4_nl(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, IQ4_NL_BYTES, out, NUMBERS) {
        spread(&block[2..], half_at(block, 0), &LEVELS, out);
    }
}

pub(super) fn dequantize_iq4_xs(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, IQ4_XS_BYTES, out, SUPER_NUMBERS) {
        let (d, upper, lower) = (half_at(block, 0), u16::from_le_bytes([block[2], block[3]]), &block[4..8]);
        for (run, (out, codes)) in out.chunks_exact_mut(NUMBERS).zip(block[8..].chunks_exact(16)).enumerate()
        {
            let scale = lower[run / 2] >> (run % 2 * 4) & 15 | ((upper >> (run * 2) & 3) as u8) << 4;
            spread(codes, d * f32::from(scale as i8 - 32), &LEVELS, out);
        }
    }
}

pub(super) fn dequantize_mxfp4(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, MXFP4_BYTES, out, NUMBERS) {
        spread(&block[1..], half_power(block[0]), &DOUBLED, out);
    }
}

/// 2^(e - 128), denormal for the two smallest.
fn half_power(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

pub(super) fn dequantize_tq1_0(bytes: &[u8], out: &mut [f32]) {
    /// Powers of three that bring each of a byte's codes to its top.
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    for (block, out) in blocks(bytes, TQ1_0_BYTES, out, SUPER_NUMBERS) {
        let d = half_at(block, 52);
        let runs = [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)];
        let bytes = runs.iter().flat_map(|(run, codes)| {
            POWERS[..*codes]
                .iter()
                .flat_map(move |power| run.iter().map(move |byte| byte.wrapping_mul(*power)))
        });
        for (value, byte) in out.iter_mut().zip(bytes) {
            let code = ((u16::from(byte) * 3) >> 8) as i8 - 1;
            *value = d * f32::from(code);
        }
    }
}

pub(super) fn dequantize_tq2_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in blocks(bytes, TQ2_0_BYTES, out, SUPER_NUMBERS) {
        let d = half_at(block, 64);
        for (e, value) in out.iter_mut().enumerate() {
            let code = block[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
            *value = d * f32::from(code as i8 - 1);
        }
    }
}
