//! Arrangements of small integers in stored tensors: several in a word of 32 bits, or one in a byte.
//!
//! Invariant: every arrangement is that of a matrix (rows, columns), whatever its order in the file.

use std::ops::Range;

/// Rows that are unpacked at once: their words are neighbours in a cache line where words follow each other
/// by rows.
pub(super) const TILE_ROWS: usize = 16;

/// Columns whose words are read before their integers are separated.
const COLUMN_RUN: usize = 32;

/// Place of each of eight consecutive integers in a word of AWQ.
const AWQ_PLACES: [u32; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// The arrangement of a matrix of integers in the bytes of a tensor.
#[derive(Debug)]
pub(super) struct Packing {
    pub(super) cell: Cell,
    /// Distances of consecutive words of a column and of a row, in words.
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
    /// Added to each word, modulo 2^32, before its integers are separated.
    pub(super) added: u32,
}

/// Content of a word.
#[derive(Debug)]
pub(super) enum Cell {
    /// A signed byte, to which `offset` is added.
    Byte { offset: i16 },
    /// A word of 32 bits with unsigned integers of `bits` bits, of consecutive rows or columns.
    Word { bits: u32, along: Axis },
}

/// The integers that share a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Axis {
    /// Consecutive columns, the first in the lowest bits.
    Columns,
    /// Consecutive rows, the first in the lowest bits.
    Rows,
    /// Eight consecutive rows, in the order of AWQ.
    AwqRows,
}

impl Packing {
    /// Returns the arrangement of words in the order (columns, rows). Those that integers share are fewer
    /// along their axis.
    pub(super) fn by_columns(bits: u32, along: Axis, rows: usize) -> Packing {
        let words = if along == Axis::Columns { rows } else { rows.div_ceil(per_word(bits)) };
        Packing { cell: Cell::Word { bits, along }, row_stride: 1, column_stride: words, added: 0 }
    }

    /// Returns the arrangement of words in the order (rows, columns). Those that integers share are fewer
    /// along their axis.
    pub(super) fn by_rows(bits: u32, along: Axis, columns: usize) -> Packing {
        let words = if along == Axis::Columns { columns.div_ceil(per_word(bits)) } else { columns };
        Packing { cell: Cell::Word { bits, along }, row_stride: words, column_stride: 1, added: 0 }
    }

    /// Returns the arrangement of signed bytes in the order (rows, columns), to which `offset` is added.
    pub(super) fn bytes(offset: i16, columns: usize) -> Packing {
        Packing { cell: Cell::Byte { offset }, row_stride: columns, column_stride: 1, added: 0 }
    }

    /// Reads one integer.
    pub(super) fn read(&self, bytes: &[u8], row: usize, column: usize) -> i16 {
        let at = |row: usize, column: usize| row * self.row_stride + column * self.column_stride;
        match self.cell {
            Cell::Byte { offset } => i16::from(bytes[at(row, column)] as i8) + offset,
            Cell::Word { bits, along: Axis::Columns } => {
                let per = per_word(bits);
                quant(self.word(bytes, at(row, column / per)), (column % per) as u32 * bits, bits)
            }
            Cell::Word { bits, along } => {
                let per = per_word(bits);
                quant(self.word(bytes, at(row / per, column)), along.place(row % per) * bits, bits)
            }
        }
    }

    /// Reads `rows` of a matrix with so many columns into `out` (rows, columns).
    pub(super) fn unpack(&self, bytes: &[u8], rows: Range<usize>, columns: usize, out: &mut [i16]) {
        match self.cell {
            Cell::Byte { .. } => {
                for (row, out) in rows.zip(out.chunks_exact_mut(columns)) {
                    out.iter_mut().enumerate().for_each(|(column, out)| *out = self.read(bytes, row, column));
                }
            }
            Cell::Word { bits, along: Axis::Columns } => self.unpack_columns(bytes, bits, rows, columns, out),
            Cell::Word { bits, along } => self.unpack_rows(bytes, (bits, along), rows, columns, out),
        }
    }

    fn word(&self, bytes: &[u8], at: usize) -> u32 {
        word(bytes, at).wrapping_add(self.added)
    }

    /// Reads words along columns.
    fn unpack_columns(&self, bytes: &[u8], bits: u32, rows: Range<usize>, columns: usize, out: &mut [i16]) {
        let per = per_word(bits);
        for index in 0..columns.div_ceil(per) {
            let shared = index * per..(index * per + per).min(columns);
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns)) {
                let word = self.word(bytes, row * self.row_stride + index * self.column_stride);
                for (place, out) in (0..).zip(&mut out[shared.clone()]) {
                    *out = quant(word, place * bits, bits);
                }
            }
        }
    }

    /// Reads words along rows, in runs of columns, because the words of a column are far from those of the
    /// next.
    fn unpack_rows(
        &self,
        bytes: &[u8],
        (bits, along): (u32, Axis),
        rows: Range<usize>,
        columns: usize,
        out: &mut [i16],
    ) {
        let per = per_word(bits);
        for first in (0..columns).step_by(COLUMN_RUN) {
            let run = first..(first + COLUMN_RUN).min(columns);
            for index in rows.start / per..rows.end.div_ceil(per) {
                let mut words = [0; COLUMN_RUN];
                for (found, column) in words.iter_mut().zip(run.clone()) {
                    *found = self.word(bytes, index * self.row_stride + column * self.column_stride);
                }
                for row in (index * per).max(rows.start)..(index * per + per).min(rows.end) {
                    let shift = along.place(row % per) * bits;
                    let out = &mut out[(row - rows.start) * columns..][run.clone()];
                    out.iter_mut().zip(words).for_each(|(out, word)| *out = quant(word, shift, bits));
                }
            }
        }
    }
}

impl Axis {
    /// Returns the place in a word of the `index`-th of the integers that share it.
    fn place(self, index: usize) -> u32 {
        match self {
            Axis::Columns | Axis::Rows => index as u32,
            Axis::AwqRows => AWQ_PLACES[index],
        }
    }
}

/// Returns the integer of `bits` bits in a word from bit `shift` on.
fn quant(word: u32, shift: u32, bits: u32) -> i16 {
    (word >> shift & ((1 << bits) - 1)) as i16
}

/// Number of integers of so many bits in a word.
pub(super) fn per_word(bits: u32) -> usize {
    (u32::BITS / bits) as usize
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[4 * at], bytes[4 * at + 1], bytes[4 * at + 2], bytes[4 * at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packs a matrix (rows, columns) of integers by the definition of the arrangement.
    fn packed(
        packing: &Packing,
        rows: usize,
        columns: usize,
        value: impl Fn(usize, usize) -> u32,
    ) -> Vec<u8> {
        let Cell::Word { bits, along } = packing.cell else { unreachable!("words only") };
        let per = per_word(bits);
        let mut words = vec![0u32; rows * columns];
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            let (r, c, place) = match along {
                Axis::Columns => (row, column / per, column % per),
                Axis::Rows => (row / per, column, row % per),
                Axis::AwqRows => (row / per, column, [0, 4, 1, 5, 2, 6, 3, 7][row % per]),
            };
            words[r * packing.row_stride + c * packing.column_stride] |=
                value(row, column) << (place as u32 * bits);
        }
        words.into_iter().flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn every_integer_is_found_in_every_arrangement() {
        let (rows, columns) = (24, 40);
        let value =
            |bits: u32| move |row: usize, column: usize| (row * 7 + column * 3) as u32 & ((1 << bits) - 1);
        for (bits, along) in [
            (2, Axis::Columns),
            (4, Axis::Columns),
            (8, Axis::Columns),
            (4, Axis::Rows),
            (8, Axis::Rows),
            (4, Axis::AwqRows),
        ] {
            for packing in [Packing::by_columns(bits, along, rows), Packing::by_rows(bits, along, columns)] {
                let bytes = packed(&packing, rows, columns, value(bits));
                for range in [0..rows, 3..11] {
                    let mut out = vec![0; range.len() * columns];
                    packing.unpack(&bytes, range.clone(), columns, &mut out);
                    for (at, found) in out.iter().enumerate() {
                        let (row, column) = (range.start + at / columns, at % columns);
                        let expected = value(bits)(row, column) as i16;
                        assert_eq!(*found, expected, "{packing:?} {row} {column}");
                        assert_eq!(packing.read(&bytes, row, column), expected);
                    }
                }
            }
        }
    }

    #[test]
    fn a_sum_of_words_carries_into_the_next_integer() {
        let zeros = |added| Packing { added, ..Packing::by_columns(4, Axis::Rows, 8) };
        // The integers 0, 8, 0, 15, 1, 8, 8, 8 as the difference of words.
        let stored = 0x8881_f080u32.wrapping_sub(0x1111_1111).to_le_bytes();
        let read: Vec<i16> = (0..8).map(|row| zeros(0x1111_1111).read(&stored, row, 0)).collect();
        assert_eq!(read, [0, 8, 0, 15, 1, 8, 8, 8]);
        let mut unpacked = [0; 8];
        zeros(0x1111_1111).unpack(&stored, 0..8, 1, &mut unpacked);
        assert_eq!(unpacked[..], read[..]);
    }

    #[test]
    fn bytes_are_signed() {
        let packing = Packing::bytes(128, 2);
        assert_eq!(
            (packing.read(&[0, 0x80, 0x7f, 0xff], 0, 1), packing.read(&[0, 0x80, 0x7f, 0xff], 1, 0)),
            (0, 255)
        );
        assert_eq!(Packing::bytes(8, 2).read(&[0, 0x80, 0xf8, 0xff], 1, 1), 7);
    }
}
