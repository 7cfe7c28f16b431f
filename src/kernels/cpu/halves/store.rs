//! Rows of BF16 to packed weights, and back.
//!
//! Invariant: a row that is read back has the bits it was packed from.

use super::{BLOCK, STRIP, STRIP_BYTES};
use crate::backend::Weight;
use crate::cpu::pool::{Parts, Pool};
use crate::host::HostBuf;
use half::bf16;

/// Bytes of a strip of rows of `inp` numbers.
pub fn strip_bytes(inp: usize) -> usize {
    inp.div_ceil(BLOCK) * STRIP_BYTES
}

/// Bytes that a (out, inp) matrix takes.
pub fn packed_bytes(out: usize, inp: usize) -> usize {
    out.div_ceil(STRIP) * strip_bytes(inp)
}

/// Where number `column` of a strip's out `lane` lies, in bytes.
fn place(lane: usize, column: usize) -> usize {
    let (block, within) = (column / BLOCK, column % BLOCK);
    block * STRIP_BYTES + (within / 2 * STRIP + lane) * 4 + within % 2 * 2
}

/// Packs a (out, inp) matrix of BF16. `to` is zero.
pub fn pack(pool: &mut Pool, (out, inp): (usize, usize), bytes: &[u8], to: &mut HostBuf) {
    let each = strip_bytes(inp);
    let to = Parts::new(to.bytes_mut());
    pool.run(out.div_ceil(STRIP), |_, strip| {
        // SAFETY: each strip belongs to one item.
        let to = unsafe { to.part(strip * each..(strip + 1) * each) };
        let rows = bytes[strip * STRIP * inp * 2..].chunks_exact(inp * 2).take(STRIP);
        for (lane, row) in rows.enumerate() {
            for (column, number) in row.as_chunks::<2>().0.iter().enumerate() {
                to[place(lane, column)..][..2].copy_from_slice(number);
            }
        }
    });
}

/// The values of row `row` of a packed weight from column `column` on.
pub fn read(w: &Weight<HostBuf>, row: usize, column: usize, values: &mut [f32]) {
    let strip = &w.buf.bytes()[row / STRIP * strip_bytes(w.inp)..];
    for (i, value) in values.iter_mut().enumerate() {
        let at = place(row % STRIP, column + i);
        *value = bf16::from_le_bytes([strip[at], strip[at + 1]]).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::QuantType;

    #[test]
    fn rows_are_read_back_whatever_their_number_and_width() {
        for (out, inp) in [(1, 1), (16, 32), (17, 33), (35, 70)] {
            let numbers: Vec<f32> =
                (0..out * inp).map(|i| i as f32 - 300.0).map(|x| bf16::from_f32(x).to_f32()).collect();
            let mut bytes = vec![0; 2 * out * inp];
            QuantType::BF16.quantize(&numbers, &mut bytes);
            let mut buf = HostBuf::zeroed(packed_bytes(out, inp)).unwrap();
            pack(&mut Pool::new(2).unwrap(), (out, inp), &bytes, &mut buf);
            let w = Weight { buf, ty: QuantType::BF16, out, inp };
            for row in 0..out {
                for first in [0, inp / 2] {
                    let mut values = vec![0.0; inp - first];
                    read(&w, row, first, &mut values);
                    assert_eq!(
                        values,
                        numbers[row * inp + first..(row + 1) * inp],
                        "row {row} of {out}x{inp}"
                    );
                }
            }
        }
    }
}
