//! GGUF formats that are read but not written: quants that index uneven levels, and ternary quants.
//!
//! | format | elements | value of quant q | bytes |
//! |---|---|---|---|
//! | IQ4_NL | 32 | d * IQ4_LEVELS\[q\] | d, quants |
//! | IQ4_XS | 256 | d * (s - 32) * IQ4_LEVELS\[q\], 6-bit s per 32 | d, high bits of s, low bits, quants |
//! | MXFP4 | 32 | 2^(e - 128) * twice an E2M1 number | e, quants |
//! | TQ1_0 | 256 | d * (q - 1), five ternary quants per byte | quants, d |
//! | TQ2_0 | 256 | d * (q - 1), 2-bit quants | quants, d |
//!
//! `d` is an F16 scale. 4-bit quants: first the low nibbles of 16 bytes, then the high nibbles. MXFP4 follows
//! the OCP Microscaling Formats specification, version 1.0, of the Open Compute Project.
//!
//! Invariant: the values are those of the gguf package, bit for bit.

use super::read_f16;

/// Elements of a small block.
pub const BLOCK_LEN: usize = 32;
/// Elements of a superblock.
pub const SUPERBLOCK_LEN: usize = 256;

/// Bytes of a block of IQ4_NL.
pub const IQ4_NL_BYTES: usize = 18;
/// Bytes of a block of IQ4_XS.
pub const IQ4_XS_BYTES: usize = 136;
/// Bytes of a block of MXFP4.
pub const MXFP4_BYTES: usize = 17;
/// Bytes of a block of TQ1_0.
pub const TQ1_0_BYTES: usize = 54;
/// Bytes of a block of TQ2_0.
pub const TQ2_0_BYTES: usize = 66;

/// Levels of the quants of IQ4_NL and IQ4_XS.
const IQ4_LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the E2M1 numbers of the quants of MXFP4.
const DOUBLED_E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Pairs blocks with the slices of `out` for their elements.
fn zip_blocks<'a>(
    bytes: &'a [u8],
    block_bytes: usize,
    out: &'a mut [f32],
    elements: usize,
) -> impl Iterator<Item = (&'a [u8], &'a mut [f32])> {
    let (from, to) = (bytes.chunks_exact(block_bytes), out.chunks_exact_mut(elements));
    assert!(from.remainder().is_empty() && from.len() == to.len(), "whole blocks");
    from.zip(to)
}

/// Dequantizes 32 elements from the nibbles of 16 bytes.
fn dequantize_nibbles(quants: &[u8], scale: f32, levels: &[i8; 16], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(BLOCK_LEN / 2);
    let value = |quant: u8| scale * f32::from(levels[usize::from(quant)]);
    for ((low, high), quants) in low.iter_mut().zip(high).zip(quants) {
        (*low, *high) = (value(quants & 15), value(quants >> 4));
    }
}

pub(super) fn dequantize_iq4_nl(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_blocks(bytes, IQ4_NL_BYTES, out, BLOCK_LEN) {
        dequantize_nibbles(&block[2..], read_f16(block, 0), &IQ4_LEVELS, out);
    }
}

pub(super) fn dequantize_iq4_xs(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_blocks(bytes, IQ4_XS_BYTES, out, SUPERBLOCK_LEN) {
        let (d, upper, lower) = (read_f16(block, 0), u16::from_le_bytes([block[2], block[3]]), &block[4..8]);
        for (run, (out, quants)) in
            out.chunks_exact_mut(BLOCK_LEN).zip(block[8..].chunks_exact(16)).enumerate()
        {
            let scale = lower[run / 2] >> (run % 2 * 4) & 15 | ((upper >> (run * 2) & 3) as u8) << 4;
            dequantize_nibbles(quants, d * f32::from(scale as i8 - 32), &IQ4_LEVELS, out);
        }
    }
}

pub(super) fn dequantize_mxfp4(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_blocks(bytes, MXFP4_BYTES, out, BLOCK_LEN) {
        dequantize_nibbles(&block[1..], half_e8m0(block[0]), &DOUBLED_E2M1, out);
    }
}

/// Returns 2^(e - 128), which is subnormal for the two smallest e.
fn half_e8m0(e: u8) -> f32 {
    f32::from_bits(match e {
        0 | 1 => 0x0020_0000 << e,
        _ => u32::from(e - 1) << 23,
    })
}

pub(super) fn dequantize_tq1_0(bytes: &[u8], out: &mut [f32]) {
    /// Powers of three, each of which moves one ternary digit of a byte to the top.
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    for (block, out) in zip_blocks(bytes, TQ1_0_BYTES, out, SUPERBLOCK_LEN) {
        let d = read_f16(block, 52);
        let runs = [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)];
        let bytes = runs.iter().flat_map(|(run, quants)| {
            POWERS[..*quants]
                .iter()
                .flat_map(move |power| run.iter().map(move |byte| byte.wrapping_mul(*power)))
        });
        for (value, byte) in out.iter_mut().zip(bytes) {
            let quant = ((u16::from(byte) * 3) >> 8) as i8 - 1;
            *value = d * f32::from(quant);
        }
    }
}

pub(super) fn dequantize_tq2_0(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in zip_blocks(bytes, TQ2_0_BYTES, out, SUPERBLOCK_LEN) {
        let d = read_f16(block, 64);
        for (e, value) in out.iter_mut().enumerate() {
            let quant = block[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
            *value = d * f32::from(quant as i8 - 1);
        }
    }
}
