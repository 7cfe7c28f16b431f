//! Packing of F16 rows, and unpacking. Sixteen outputs form a panel, and 32 columns of a panel form a block
//! of 16 vectors: of two neighbouring columns, first the numbers of all outputs in the one, then in the
//! other. So two halves of a vector become a vector of pairs without moving numbers between lanes. Outputs
//! and columns beyond the last are zero.
//!
//! Invariant: a row that is unpacked has the bits it was packed from.

use crate::backend::Weight;
use crate::cpu::bf16::{BLOCK, PANEL_BLOCK_BYTES, PANEL_OUTPUTS, panel_bytes};
use crate::cpu::pool::{SharedSlice, ThreadPool};
use crate::host::HostBuf;
use half::f16;

/// Returns the byte offset of number `column` of output `lane` in a panel.
fn offset_of(lane: usize, column: usize) -> usize {
    let (block, within) = (column / BLOCK, column % BLOCK);
    block * PANEL_BLOCK_BYTES + (within * PANEL_OUTPUTS + lane) * 2
}

/// Packs a (n, k) matrix of F16. `to` must be zero.
pub fn pack(pool: &mut ThreadPool, (n, k): (usize, usize), bytes: &[u8], to: &mut HostBuf) {
    let panel_bytes = panel_bytes(k);
    let to = SharedSlice::new(to.bytes_mut());
    pool.run(n.div_ceil(PANEL_OUTPUTS), |_, panel| {
        // SAFETY: each panel belongs to one item.
        let to = unsafe { to.slice_mut(panel * panel_bytes..(panel + 1) * panel_bytes) };
        let rows = bytes[panel * PANEL_OUTPUTS * k * 2..].chunks_exact(k * 2).take(PANEL_OUTPUTS);
        for (lane, row) in rows.enumerate() {
            let columns = to.chunks_exact_mut(2 * PANEL_OUTPUTS);
            for (number, column) in row.as_chunks::<2>().0.iter().zip(columns) {
                column[2 * lane..][..2].copy_from_slice(number);
            }
        }
    });
}

/// Decodes row `row` of a packed weight from column `column` on.
pub fn read(w: &Weight<HostBuf>, row: usize, column: usize, values: &mut [f32]) {
    let panel = &w.buf.bytes()[row / PANEL_OUTPUTS * panel_bytes(w.k)..];
    for (i, value) in values.iter_mut().enumerate() {
        let at = offset_of(row % PANEL_OUTPUTS, column + i);
        *value = f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::bf16::packed_bytes;
    use crate::host::HostMemory;
    use crate::quant::QuantType;

    #[test]
    fn rows_are_read_back_whatever_their_number_and_width() {
        for (n, k) in [(1, 1), (16, 32), (17, 33), (35, 70)] {
            let numbers: Vec<f32> = (0..n * k).map(|i| i as f32 - 300.0).collect();
            let numbers: Vec<f32> = numbers.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
            let mut bytes = vec![0; 2 * n * k];
            QuantType::F16.quantize(&numbers, &mut bytes);
            let mut buf = HostMemory::default().zeroed(packed_bytes(n, k)).unwrap();
            pack(&mut ThreadPool::new(0, 2).unwrap(), (n, k), &bytes, &mut buf);
            let w = Weight { id: None, buf, ty: QuantType::F16, n, k };
            for row in 0..n {
                for first in [0, k / 2] {
                    let mut values = vec![0.0; k - first];
                    read(&w, row, first, &mut values);
                    assert_eq!(values, numbers[row * k + first..(row + 1) * k], "row {row} of {n}x{k}");
                }
            }
        }
    }
}
