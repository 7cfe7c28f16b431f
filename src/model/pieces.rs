//! Parts of stored tensors: rows picked from fused ones, planes of stacked ones, matrices stored the other way round.
//!
//! Invariant: a tensor that is wanted whole is not copied; of any other one piece is in memory at a time.

use super::load::TensorRecord;
use super::spec::{Part, Piece};
use crate::formats::Checkpoint;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;
use std::borrow::Cow;

/// The numbers of a piece.
pub struct Taken<'a> {
    pub ty: QuantType,
    /// (out, in), or the length of a vector.
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

/// The piece's numbers. That its tensor has the shape it should have was seen when the model was opened.
pub fn take<'a>(checkpoint: &'a Checkpoint, piece: &Piece) -> Result<Taken<'a>> {
    let name = &piece.name;
    let tensor = checkpoint.tensor(name).with_context(|| format!("tensor '{name}' is missing"))?;
    let ty = tensor.quant_type()?;
    let bytes = tensor.bytes();
    let context = || format!("{}: tensor '{name}'", tensor.file.display());
    let (shape, bytes) = match piece.part {
        Part::Plane(plane) => {
            let len = bytes.len() / piece.shape[0];
            (piece.shape[1..].to_vec(), slice(bytes, plane * len, len))
        }
        _ => (piece.shape.clone(), bytes),
    };
    let (shape, bytes) = match piece.transposed {
        true => (
            vec![shape[1], shape[0]],
            transposed(ty, shape[0], shape[1], &bytes).with_context(context)?.into(),
        ),
        false => (shape, bytes),
    };
    let (shape, bytes) = match piece.part {
        Part::Rows { .. } => picked(ty, &shape, piece.part, bytes).with_context(context)?,
        Part::Whole | Part::Plane(_) => (shape, bytes),
    };
    Ok(Taken { ty, shape, bytes })
}

/// Refuses a part that cannot be taken of numbers stored as `ty`: blocks of numbers are neither cut nor turned.
pub fn check(ty: QuantType, piece: &Piece) -> Result<()> {
    ensure!(
        !(piece.transposed && ty.is_blocked()),
        "numbers in blocks ({ty}) cannot be turned from (in, out) to (out, in)"
    );
    let row = piece.shape.get(1).copied().unwrap_or(1);
    ensure!(
        !matches!(piece.part, Part::Rows { .. }) || ty.bytes(row).is_some(),
        "rows of {row} do not end where blocks of numbers ({ty}) do"
    );
    Ok(())
}

/// What taking a piece would record.
pub fn record(checkpoint: &Checkpoint, piece: &Piece) -> TensorRecord {
    const CHECKED: &str = "it was there at opening, and computable; anything else is a bug";
    let tensor = checkpoint.tensor(&piece.name).expect(CHECKED);
    let ty = tensor.quant_type().expect(CHECKED);
    let mut shape = match piece.part {
        Part::Plane(_) => piece.shape[1..].to_vec(),
        _ => piece.shape.clone(),
    };
    if piece.transposed {
        shape.reverse();
    }
    shape[0] = piece.part.rows(shape[0]);
    let bytes = ty.bytes(shape.iter().product()).expect(CHECKED);
    TensorRecord { name: piece.name.clone(), ty, shape, bytes }
}

/// The same with rows of length 1, in single precision. A row of zeros stays as it is.
pub fn normalised(taken: Taken<'_>) -> Taken<'static> {
    let width = taken.inp();
    let mut bytes = Vec::with_capacity(taken.shape.iter().product::<usize>() * size_of::<f32>());
    let mut row = vec![0f32; width];
    let stored = taken.bytes.len() / taken.out();
    // Rounded again to 16 bits, they would move logits by more than those are good for.
    for codes in taken.bytes.chunks_exact(stored) {
        (taken.ty.row().dequantize)(codes, &mut row);
        let length = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(1e-12);
        bytes.extend(row.iter().flat_map(|x| ((f64::from(*x) / length) as f32).to_le_bytes()));
    }
    Taken { ty: QuantType::F32, shape: taken.shape, bytes: Cow::Owned(bytes) }
}

impl Taken<'_> {
    /// Rows of the matrix.
    pub fn out(&self) -> usize {
        self.shape[0]
    }

    /// Columns of the matrix; 1 of a vector.
    pub fn inp(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }

    /// All numbers in single precision.
    pub fn widened(&self) -> Vec<f32> {
        let mut values = vec![0f32; self.shape.iter().product()];
        (self.ty.row().dequantize)(&self.bytes, &mut values);
        values
    }

    pub fn record(&self, name: &str) -> TensorRecord {
        let bytes = self.bytes.len();
        TensorRecord { name: name.to_owned(), ty: self.ty, shape: self.shape.clone(), bytes }
    }
}

fn slice(bytes: Cow<'_, [u8]>, begin: usize, len: usize) -> Cow<'_, [u8]> {
    match bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[begin..][..len]),
        Cow::Owned(bytes) => Cow::Owned(bytes[begin..][..len].to_vec()),
    }
}

/// Rows in groups, of a matrix or a vector.
fn picked<'a>(
    ty: QuantType,
    shape: &[usize],
    part: Part,
    bytes: Cow<'a, [u8]>,
) -> Result<(Vec<usize>, Cow<'a, [u8]>)> {
    let Part::Rows { groups, stride, first, count } = part else { return Ok((shape.to_vec(), bytes)) };
    let width = shape.get(1).copied().unwrap_or(1);
    let row = ty.bytes(width).context("rows do not end where blocks of numbers do")?;
    let mut shape = shape.to_vec();
    shape[0] = groups * count;
    if groups == 1 {
        return Ok((shape, slice(bytes, first * row, count * row)));
    }
    let rows = bytes.chunks_exact(stride * row).take(groups);
    let picked: Vec<u8> = rows.flat_map(|group| &group[first * row..][..count * row]).copied().collect();
    Ok((shape, picked.into()))
}

/// A matrix (rows, columns) as (columns, rows).
fn transposed(ty: QuantType, rows: usize, columns: usize, bytes: &[u8]) -> Result<Vec<u8>> {
    let size = ty.bytes(1).filter(|size| size * rows * columns == bytes.len());
    let size = size
        .with_context(|| format!("numbers in blocks ({ty}) cannot be turned from (in, out) to (out, in)"))?;
    ensure!(size > 0, "a number of no bytes");
    let mut turned = vec![0; bytes.len()];
    // In squares, so that both sides stay in cache.
    const SQUARE: usize = 32;
    for top in (0..rows).step_by(SQUARE) {
        for left in (0..columns).step_by(SQUARE) {
            for row in top..rows.min(top + SQUARE) {
                for column in left..columns.min(left + SQUARE) {
                    let (from, to) = ((row * columns + column) * size, (column * rows + row) * size);
                    turned[to..to + size].copy_from_slice(&bytes[from..from + size]);
                }
            }
        }
    }
    Ok(turned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(shape: &[usize], part: Part, transposed: bool) -> Piece {
        let (role, name, pattern, layer) = ("q", "t".to_owned(), "t".into(), None);
        Piece { role, name, pattern, layer, shape: shape.to_vec(), part, transposed }
    }

    /// A tensor of the numbers 0, 1, 2 …
    fn counted(shape: &[usize]) -> Checkpoint {
        let numbers = 0..shape.iter().product::<usize>();
        let bytes = numbers.flat_map(|number| (number as f32).to_le_bytes()).collect();
        Checkpoint::from_buffer("t".as_ref(), bytes, QuantType::F32, [("t".to_owned(), shape.to_vec(), 0)])
    }

    fn numbers(shape: &[usize], part: Part, transposed: bool) -> (Vec<usize>, Vec<f32>) {
        let checkpoint = counted(shape);
        let piece = piece(shape, part, transposed);
        let taken = take(&checkpoint, &piece).unwrap();
        assert_eq!(record(&checkpoint, &piece), taken.record("t"));
        (taken.shape.clone(), taken.widened())
    }

    #[test]
    fn rows_are_picked_group_by_group() {
        let part = Part::Rows { groups: 2, stride: 3, first: 1, count: 2 };
        assert_eq!(numbers(&[6, 2], part, false), (vec![4, 2], vec![2., 3., 4., 5., 8., 9., 10., 11.]));
        assert_eq!(numbers(&[6], part, false), (vec![4], vec![1., 2., 4., 5.]));
        let part = Part::Rows { groups: 1, stride: 3, first: 1, count: 2 };
        assert_eq!(numbers(&[3, 2], part, false), (vec![2, 2], vec![2., 3., 4., 5.]));
        assert_eq!(numbers(&[2, 3], part, true), (vec![2, 2], vec![1., 4., 2., 5.]));
        assert_eq!(numbers(&[2, 2, 2], Part::Plane(1), false), (vec![2, 2], vec![4., 5., 6., 7.]));
    }

    /// What a report of the model would otherwise fail at.
    #[test]
    fn blocks_are_neither_cut_nor_turned() {
        let part = Part::Rows { groups: 2, stride: 48, first: 0, count: 16 };
        for (ty, shape, part, transposed, is_fine) in [
            (QuantType::Q8_0, &[96, 64][..], part, false, true),
            (QuantType::Q8_0, &[96], part, false, false),
            (QuantType::Q4_0, &[64, 96], Part::Whole, true, false),
            (QuantType::Q4_0, &[64, 96], Part::Whole, false, true),
            (QuantType::F16, &[96], part, false, true),
            (QuantType::F16, &[64, 96], Part::Whole, true, true),
        ] {
            assert_eq!(check(ty, &piece(shape, part, transposed)).is_ok(), is_fine, "{ty} {shape:?}");
        }
    }

    #[test]
    fn a_matrix_is_turned_whatever_its_size() {
        let (shape, turned) = numbers(&[70, 33], Part::Whole, true);
        assert_eq!(shape, [33, 70]);
        let right = |at: usize| ((at % 70) * 33 + at / 70) as f32;
        assert!(turned.iter().enumerate().all(|(at, number)| *number == right(at)));
    }

    #[test]
    fn normalised_rows_have_length_one() {
        let checkpoint = counted(&[2, 2]);
        let taken = normalised(take(&checkpoint, &piece(&[2, 2], Part::Whole, false)).unwrap());
        let root = 13f32.sqrt();
        assert_eq!(taken.widened(), [0.0, 1.0, 2.0 / root, 3.0 / root]);
    }
}
