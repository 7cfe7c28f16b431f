//! Slices of stored tensors: rows of fused tensors, planes of stacked ones, matrices stored transposed, and
//! of each the range that one rank of a stage needs.
//!
//! Invariant: contiguous bytes are not copied, and bytes outside the slice are not read. Otherwise one slice
//! is in memory at a time, and only the requested range of it: of a matrix that is decoded from several
//! stored tensors, the requested rows. The exception is a tensor that the file stores in another order or
//! type: it is converted as a whole before a slice is extracted.

use super::spec::{SliceBounds, TensorPart, TensorSlice};
use super::weights::TensorRecord;
use crate::formats::{Checkpoint, TensorView};
use crate::quantize::{Rounding, SourceRows, requantize};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use std::borrow::Cow;
use std::ops::Range;

/// The data of a tensor slice.
pub struct SliceData<'a> {
    pub ty: QuantType,
    /// (n, k) of a matrix (outputs, inputs), or the length of a vector.
    pub shape: Vec<usize>,
    pub bytes: Cow<'a, [u8]>,
}

/// Reads the data of a slice. The shape of its tensor was checked when the model was opened.
pub fn read_slice<'a>(checkpoint: &'a Checkpoint, piece: &TensorSlice) -> Result<SliceData<'a>> {
    if let TensorPart::TurnedRows { .. } = piece.part {
        return read_turned(checkpoint, piece);
    }
    let name = &piece.name;
    let tensor = checkpoint.tensor(name).with_context(|| format!("tensor '{name}' is missing"))?;
    let (ty, wanted) = (tensor.quant_type()?, StoredRegion::new(piece));
    let bytes = match piece.transposed && !tensor.is_transposed() {
        true => wanted.extract_transposed(ty, &plane_bytes(&tensor, piece)).map(Cow::Owned),
        false if tensor.is_encoded() => wanted.extract_decoded(ty, &tensor, piece.plane).map(Cow::Owned),
        false => wanted.extract(ty, plane_bytes(&tensor, piece)),
    };
    let bytes = bytes.with_context(|| format!("{}: tensor '{name}'", tensor.file.display()))?;
    Ok(SliceData { ty, shape: wanted.shape(), bytes })
}

/// Reads a slice of [`TensorPart::TurnedRows`]: in the stored number format, or in F32 if that has blocks.
fn read_turned<'a>(checkpoint: &'a Checkpoint, piece: &TensorSlice) -> Result<SliceData<'a>> {
    let stored = as_stored(piece);
    let data = read_slice(checkpoint, &stored)?;
    check_finite(&stored, &data)?;
    let TensorPart::TurnedRows { count, .. } = piece.part else { return Ok(data) };
    let data = match data.ty.is_blocked() {
        true => {
            let bytes = data.to_f32().iter().flat_map(|number| number.to_le_bytes()).collect();
            SliceData { ty: QuantType::F32, shape: data.shape, bytes }
        }
        false => data,
    };
    let (columns, size) = (data.k(), data.bytes.len() / (data.n() * data.k()));
    let mut turned = Vec::with_capacity(data.bytes.len());
    for group in data.bytes.chunks_exact(count * columns * size) {
        for column in 0..columns {
            for row in group.chunks_exact(columns * size) {
                turned.extend_from_slice(&row[column * size..][..size]);
            }
        }
    }
    Ok(SliceData { ty: data.ty, shape: turned_shape(piece, &stored), bytes: Cow::Owned(turned) })
}

/// Returns the slice whose groups [`TensorPart::TurnedRows`] transposes; any other slice as it is.
fn as_stored(piece: &TensorSlice) -> TensorSlice {
    let TensorPart::TurnedRows { groups, stride, first, count } = piece.part else { return piece.clone() };
    let columns = piece.shape[usize::from(!piece.transposed)];
    let rows =
        piece.bounds.rows.as_ref().map(|rows| rows.start / columns * count..rows.end / columns * count);
    let part = TensorPart::Rows { groups, stride, first, count };
    TensorSlice { part, bounds: SliceBounds { rows, columns: None }, ..piece.clone() }
}

/// Returns the shape of a slice, given the one that is stored.
fn turned_shape(piece: &TensorSlice, stored: &TensorSlice) -> Vec<usize> {
    let shape = StoredRegion::new(stored).shape();
    match (piece.part, &shape[..]) {
        (TensorPart::TurnedRows { count, .. }, [rows, columns]) => vec![rows / count * columns, count],
        _ => shape,
    }
}

/// Returns the shape of a slice.
fn slice_shape(piece: &TensorSlice) -> Vec<usize> {
    turned_shape(piece, &as_stored(piece))
}

/// Returns the bytes of the matrix that contains the slice.
fn plane_bytes<'a>(tensor: &TensorView<'a>, piece: &TensorSlice) -> Cow<'a, [u8]> {
    let bytes = tensor.bytes();
    match piece.plane {
        Some(plane) => {
            let len = bytes.len() / piece.shape[0];
            sub_slice(bytes, plane * len, len)
        }
        None => bytes,
    }
}

/// Checks that all numbers of a slice are finite. The error names the tensor and the first number that is
/// not.
pub fn check_finite(piece: &TensorSlice, data: &SliceData) -> Result<()> {
    if let TensorPart::TurnedRows { .. } = piece.part {
        return Ok(()); // They were checked in the order in which they are stored.
    }
    let Some(at) = data.ty.first_not_finite(&data.bytes) else { return Ok(()) };
    let region = StoredRegion::new(piece);
    let row = region.rows.iter().cloned().flatten().nth(at / data.k()).unwrap_or_default();
    let column = region.columns.start + at % data.k();
    let in_matrix = match (region.is_vector, piece.transposed) {
        (true, _) => vec![row],
        (false, true) => vec![column, row],
        (false, false) => vec![row, column],
    };
    let index: Vec<usize> = piece.plane.into_iter().chain(in_matrix).collect();
    bail!("tensor '{}' is damaged: the number at {index:?} is NaN or infinite", piece.name)
}

/// Checks that a slice can be extracted from a tensor: quantization blocks are neither split nor transposed.
pub fn check_slice(tensor: &TensorView, piece: &TensorSlice) -> Result<()> {
    let (ty, is_turned) = (tensor.quant_type()?, tensor.is_transposed());
    ensure!(
        piece.transposed || !is_turned,
        "the file stores the matrix transposed, but the specification expects (out, in)"
    );
    ensure!(
        is_turned || !(piece.transposed && ty.is_blocked()),
        "a matrix in blocks ({ty}) cannot be transposed from (in, out) to (out, in)"
    );
    let row = matrix_shape(piece).get(1).copied().unwrap_or(1);
    ensure!(
        is_turned
            || !matches!(piece.part, TensorPart::Rows { .. } | TensorPart::TurnedRows { .. })
            || ty.bytes(row).is_some(),
        "rows of {row} values do not end at block boundaries ({ty})"
    );
    Ok(())
}

/// Returns the record of a slice that is loaded in that number format.
pub fn slice_record(piece: &TensorSlice, ty: QuantType) -> TensorRecord {
    let shape = slice_shape(piece);
    let bytes = ty.bytes(shape.iter().product()).expect("rows are whole blocks; this is a bug");
    TensorRecord { name: piece.name.clone(), ty, shape, bytes }
}

/// A divided matrix has multiples of so many rows in all parts but the last: whole panels of every device.
const PART_ROWS: usize = 32;

/// Divides a slice with `n` rows into ranges of its rows: at most so many, which are equal but for the last.
pub fn divide_rows(piece: &TensorSlice, n: usize, parts: usize) -> Vec<TensorSlice> {
    let rows = n.div_ceil(parts.max(1)).next_multiple_of(PART_ROWS);
    if rows >= n {
        return vec![piece.clone()];
    }
    let start = piece.bounds.rows.as_ref().map_or(0, |rows| rows.start);
    let part = |first: usize| {
        let range = start + first..start + (first + rows).min(n);
        let bounds = SliceBounds { rows: Some(range), columns: piece.bounds.columns.clone() };
        TensorSlice { bounds, ..piece.clone() }
    };
    (0..n).step_by(rows).map(part).collect()
}

/// Returns all matrices of the slice's stored tensor, whose shape is `stored`.
pub fn stored_matrices(piece: &TensorSlice, stored: &[usize]) -> Vec<TensorSlice> {
    let (part, shape) = (TensorPart::Whole, stored.to_vec());
    let whole = TensorSlice { part, plane: None, bounds: SliceBounds::default(), shape, ..piece.clone() };
    match stored {
        [planes, _, _] => {
            (0..*planes).map(|plane| TensorSlice { plane: Some(plane), ..whole.clone() }).collect()
        }
        _ => vec![whole],
    }
}

/// Returns the shape of a slice's whole part, ignoring the requested range.
pub fn full_shape(piece: &TensorSlice) -> Vec<usize> {
    slice_shape(&TensorSlice { bounds: SliceBounds::default(), ..piece.clone() })
}

/// Scales each row to an L2 norm of 1, in F32. A row of zeros stays as it is.
pub fn l2_normalize_rows(taken: SliceData<'_>) -> SliceData<'static> {
    let width = taken.k();
    let mut bytes = Vec::with_capacity(taken.shape.iter().product::<usize>() * size_of::<f32>());
    let mut row = vec![0f32; width];
    let stored = taken.bytes.len() / taken.n();
    // Rounding to 16 bits again would change the logits noticeably.
    for quants in taken.bytes.chunks_exact(stored) {
        taken.ty.dequantize(quants, &mut row);
        let length = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt().max(1e-12);
        bytes.extend(row.iter().flat_map(|x| ((f64::from(*x) / length) as f32).to_le_bytes()));
    }
    SliceData { ty: QuantType::F32, shape: taken.shape, bytes: Cow::Owned(bytes) }
}

impl<'a> SliceData<'a> {
    /// Returns the rows of the matrix, its N in a GEMM.
    pub fn n(&self) -> usize {
        self.shape[0]
    }

    /// Returns the columns of the matrix, its K in a GEMM; 1 for a vector.
    pub fn k(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }

    /// Converts the data to another number format on `threads` threads. Fails if rows are not whole blocks of
    /// that format.
    pub fn requantize(self, ty: QuantType, rounding: Rounding, threads: usize) -> Result<SliceData<'a>> {
        if ty == self.ty {
            return Ok(self);
        }
        let rows = SourceRows { ty: self.ty, width: self.k(), bytes: &self.bytes };
        let bytes = requantize(rows, ty, rounding, threads)?;
        Ok(SliceData { ty, shape: self.shape, bytes: Cow::Owned(bytes) })
    }

    /// Returns the values in F32.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0f32; self.shape.iter().product()];
        self.ty.dequantize(&self.bytes, &mut values);
        values
    }

    /// Returns the record of these data under that tensor name.
    pub fn record(&self, name: &str) -> TensorRecord {
        let bytes = self.bytes.len();
        TensorRecord { name: name.to_owned(), ty: self.ty, shape: self.shape.clone(), bytes }
    }
}

fn sub_slice(bytes: Cow<'_, [u8]>, begin: usize, len: usize) -> Cow<'_, [u8]> {
    match bytes {
        Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[begin..][..len]),
        Cow::Owned(bytes) if len == bytes.len() => Cow::Owned(bytes),
        Cow::Owned(bytes) => Cow::Owned(bytes[begin..][..len].to_vec()),
    }
}

/// Returns the shape of the stored matrix or vector that contains a slice.
fn matrix_shape(piece: &TensorSlice) -> &[usize] {
    &piece.shape[usize::from(piece.plane.is_some())..]
}

/// The region of a stored matrix that a slice covers.
struct StoredRegion {
    /// Rows and columns of the stored matrix, seen as (out, in).
    n: usize,
    k: usize,
    /// Ranges of the covered rows.
    rows: Vec<Range<usize>>,
    columns: Range<usize>,
    is_vector: bool,
}

impl StoredRegion {
    fn new(piece: &TensorSlice) -> StoredRegion {
        let shape = matrix_shape(piece);
        let (n, k) = match (shape, piece.transposed) {
            (&[k, n], true) | (&[n, k], false) => (n, k),
            _ => (shape[0], 1),
        };
        let rows = piece.bounds.rows.clone().unwrap_or(0..piece.part.rows(n));
        let columns = piece.bounds.columns.clone().unwrap_or(0..k);
        StoredRegion { n, k, rows: row_runs(piece.part, rows), columns, is_vector: shape.len() == 1 }
    }

    fn shape(&self) -> Vec<usize> {
        let rows = self.rows.iter().map(Range::len).sum();
        if self.is_vector { vec![rows] } else { vec![rows, self.columns.len()] }
    }

    fn has_all_columns(&self) -> bool {
        self.columns == (0..self.k)
    }

    /// Extracts the region from a matrix that is stored as (out, in).
    fn extract<'a>(&self, ty: QuantType, bytes: Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>> {
        if self.has_all_columns() && self.shape()[0] == self.n {
            return Ok(bytes);
        }
        let (row, columns) = self.row_bytes(ty)?;
        if let ([run], true) = (&self.rows[..], self.has_all_columns()) {
            return Ok(sub_slice(bytes, run.start * row, run.len() * row));
        }
        let rows = self.rows.iter().flat_map(|run| bytes[run.start * row..run.end * row].chunks_exact(row));
        let mut picked = Vec::with_capacity(self.shape()[0] * columns.len());
        rows.for_each(|row| picked.extend_from_slice(&row[columns.clone()]));
        Ok(picked.into())
    }

    /// Decodes the rows of the region from a matrix that is stored as (out, in) in several tensors.
    fn extract_decoded(&self, ty: QuantType, tensor: &TensorView, plane: Option<usize>) -> Result<Vec<u8>> {
        let (row, columns) = self.row_bytes(ty)?;
        let first = plane.map_or(0, |plane| plane * self.n);
        let mut picked = Vec::with_capacity(self.shape()[0] * columns.len());
        for run in &self.rows {
            let decoded = tensor.decoded_rows(first + run.start..first + run.end);
            let decoded = decoded.context("the tensor is encoded; this is a bug")?;
            match self.has_all_columns() {
                true if picked.is_empty() => picked = decoded,
                true => picked.extend(decoded),
                false => {
                    decoded.chunks_exact(row).for_each(|row| picked.extend_from_slice(&row[columns.clone()]))
                }
            }
        }
        Ok(picked)
    }

    /// Returns the bytes of a stored row, and the range of the covered columns in them.
    fn row_bytes(&self, ty: QuantType) -> Result<(usize, Range<usize>)> {
        const CUT: &str = "the requested range does not end at block boundaries";
        let (first, end) = (ty.bytes(self.columns.start), ty.bytes(self.columns.end));
        Ok((ty.bytes(self.k).context(CUT)?, first.context(CUT)?..end.context(CUT)?))
    }

    /// Extracts the region as (out, in) from a matrix that is stored as (in, out).
    fn extract_transposed(&self, ty: QuantType, bytes: &[u8]) -> Result<Vec<u8>> {
        let size = ty.bytes(1).filter(|size| size * self.n * self.k == bytes.len());
        let size = size.with_context(|| {
            format!("a matrix in blocks ({ty}) cannot be transposed from (in, out) to (out, in)")
        })?;
        let rows: Vec<usize> = self.rows.iter().cloned().flatten().collect();
        let width = self.columns.len();
        let mut turned = vec![0; rows.len() * width * size];
        // In square tiles, so that source and destination stay in cache.
        const SQUARE: usize = 32;
        for left in (0..width).step_by(SQUARE) {
            for top in (0..rows.len()).step_by(SQUARE) {
                for column in left..width.min(left + SQUARE) {
                    let stored = (self.columns.start + column) * self.n;
                    for (row, place) in (top..).zip(rows[top..].iter().take(SQUARE)) {
                        let (from, to) = ((stored + place) * size, (row * width + column) * size);
                        turned[to..to + size].copy_from_slice(&bytes[from..from + size]);
                    }
                }
            }
        }
        Ok(turned)
    }
}

/// Returns where rows of a part are among the stored rows, as ranges that do not touch.
fn row_runs(part: TensorPart, rows: Range<usize>) -> Vec<Range<usize>> {
    let TensorPart::Rows { groups, stride, first, count } = part else { return vec![rows] };
    let mut runs: Vec<Range<usize>> = Vec::new();
    for group in 0..groups {
        let own = rows.start.max(group * count)..rows.end.min((group + 1) * count);
        if own.is_empty() {
            continue;
        }
        let begin = group * stride + first + (own.start - group * count);
        match runs.last_mut().filter(|last| last.end == begin) {
            Some(last) => last.end += own.len(),
            None => runs.push(begin..begin + own.len()),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(shape: &[usize], part: TensorPart, transposed: bool) -> TensorSlice {
        let (role, name, pattern, layer) = ("q", "t".to_owned(), "t".into(), None);
        let cut = SliceBounds::default();
        let (shape, plane) = (shape.to_vec(), None);
        TensorSlice { role, name, pattern, layer, shape, plane, part, bounds: cut, transposed }
    }

    /// Returns the piece of a matrix or vector that is stacked with others.
    fn stacked(plane: usize, piece: TensorSlice) -> TensorSlice {
        TensorSlice { plane: Some(plane), ..piece }
    }

    /// Returns a tensor with the values 0, 1, 2 …
    fn counted(ty: QuantType, shape: &[usize]) -> Checkpoint {
        let numbers: Vec<f32> = (0..shape.iter().product::<usize>()).map(|number| number as f32).collect();
        let mut bytes = vec![0; ty.bytes(numbers.len()).unwrap()];
        ty.quantize(&numbers, &mut bytes);
        Checkpoint::from_buffer("t".as_ref(), bytes, ty, [("t".to_owned(), shape.to_vec(), 0)])
    }

    fn numbers(shape: &[usize], part: TensorPart, transposed: bool) -> (Vec<usize>, Vec<f32>) {
        numbers_of(piece(shape, part, transposed))
    }

    fn numbers_of(piece: TensorSlice) -> (Vec<usize>, Vec<f32>) {
        let checkpoint = counted(QuantType::F32, &piece.shape);
        let taken = read_slice(&checkpoint, &piece).unwrap();
        assert_eq!(slice_record(&piece, taken.ty), taken.record("t"));
        (taken.shape.clone(), taken.to_f32())
    }

    #[test]
    fn rows_are_picked_group_by_group() {
        let part = TensorPart::Rows { groups: 2, stride: 3, first: 1, count: 2 };
        assert_eq!(numbers(&[6, 2], part, false), (vec![4, 2], vec![2., 3., 4., 5., 8., 9., 10., 11.]));
        assert_eq!(numbers(&[6], part, false), (vec![4], vec![1., 2., 4., 5.]));
        let part = TensorPart::Rows { groups: 1, stride: 3, first: 1, count: 2 };
        assert_eq!(numbers(&[3, 2], part, false), (vec![2, 2], vec![2., 3., 4., 5.]));
        assert_eq!(numbers(&[2, 3], part, true), (vec![2, 2], vec![1., 4., 2., 5.]));
        let second =
            |shape: &[usize], part, transposed| numbers_of(stacked(1, piece(shape, part, transposed)));
        assert_eq!(second(&[2, 2, 2], TensorPart::Whole, false), (vec![2, 2], vec![4., 5., 6., 7.]));
        let odd = TensorPart::Rows { groups: 2, stride: 2, first: 1, count: 1 };
        assert_eq!(second(&[2, 4, 2], odd, false), (vec![2, 2], vec![10., 11., 14., 15.]));
        assert_eq!(second(&[2, 2, 4], odd, true), (vec![2, 2], vec![9., 13., 11., 15.]));
        assert_eq!(second(&[2, 4], odd, false), (vec![2], vec![5., 7.]));
    }

    /// Compares every range of every kind of part with the same range of the whole part.
    #[test]
    fn a_cut_is_what_the_whole_has_there() {
        let rows = |groups, stride, first, count| TensorPart::Rows { groups, stride, first, count };
        for (shape, part, transposed) in [
            (&[6, 5][..], TensorPart::Whole, false),
            (&[6, 5], TensorPart::Whole, true),
            (&[7], TensorPart::Whole, false),
            (&[12, 3], rows(3, 4, 1, 2), false),
            (&[12, 3], rows(3, 4, 0, 4), false),
            (&[12], rows(3, 4, 1, 2), false),
            (&[3, 12], rows(3, 4, 2, 2), true),
            (&[2, 4, 3], TensorPart::Whole, false),
            (&[2, 3, 4], rows(2, 2, 1, 1), true),
        ] {
            let (checkpoint, mut whole) = (counted(QuantType::F32, shape), piece(shape, part, transposed));
            whole.plane = (shape.len() == 3).then_some(1);
            let all = read_slice(&checkpoint, &whole).unwrap();
            let (n, k, values) = (all.n(), all.k(), all.to_f32());
            let ranges = |end: usize| (0..end).flat_map(move |a| (a + 1..=end).map(move |b| a..b));
            for (rows, columns) in ranges(n).flat_map(|rows| ranges(k).map(move |c| (rows.clone(), c))) {
                let cut = SliceBounds { rows: Some(rows.clone()), columns: Some(columns.clone()) };
                let piece = TensorSlice { bounds: cut, ..whole.clone() };
                let taken = read_slice(&checkpoint, &piece).unwrap();
                assert_eq!(slice_record(&piece, taken.ty), taken.record("t"));
                assert_eq!((taken.n(), taken.k()), (rows.len(), columns.len()), "{piece:?}");
                let row = |row: usize| &values[row * k..][columns.clone()];
                let expected: Vec<f32> = rows.flat_map(row).copied().collect();
                assert_eq!(taken.to_f32(), expected, "{piece:?}");
            }
        }
    }

    /// Contiguous rows are borrowed; of other rows, and of columns, only the requested ones are copied.
    #[test]
    fn what_lies_together_is_not_copied() {
        let checkpoint = counted(QuantType::F32, &[12, 8]);
        let of = |part, rows: Option<Range<usize>>, columns| {
            let piece = TensorSlice { bounds: SliceBounds { rows, columns }, ..piece(&[12, 8], part, false) };
            let taken = read_slice(&checkpoint, &piece).unwrap();
            (matches!(taken.bytes, Cow::Borrowed(_)), taken.bytes.len() / size_of::<f32>())
        };
        let grouped = TensorPart::Rows { groups: 3, stride: 4, first: 1, count: 2 };
        assert_eq!(of(TensorPart::Whole, None, None), (true, 96));
        assert_eq!(of(TensorPart::Whole, Some(3..7), None), (true, 32));
        assert_eq!(of(grouped, Some(2..4), None), (true, 16));
        assert_eq!(of(grouped, Some(1..4), None), (false, 24));
        assert_eq!(of(TensorPart::Whole, None, Some(2..4)), (false, 24));
        assert_eq!(of(TensorPart::Whole, Some(5..6), Some(2..4)), (false, 2));
    }

    /// Otherwise computing the records of the model would fail.
    #[test]
    fn blocks_are_neither_cut_nor_turned() {
        let part = TensorPart::Rows { groups: 2, stride: 48, first: 0, count: 16 };
        for (ty, shape, part, transposed, is_fine) in [
            (QuantType::Q8_0, &[96, 64][..], part, false, true),
            (QuantType::Q8_0, &[96], part, false, false),
            (QuantType::Q4_0, &[64, 96], TensorPart::Whole, true, false),
            (QuantType::Q4_0, &[64, 96], TensorPart::Whole, false, true),
            (QuantType::F16, &[96], part, false, true),
            (QuantType::F16, &[64, 96], TensorPart::Whole, true, true),
        ] {
            let checkpoint = counted(ty, shape);
            let (tensor, piece) = (checkpoint.tensor("t").unwrap(), piece(shape, part, transposed));
            assert_eq!(check_slice(&tensor, &piece).is_ok(), is_fine, "{ty} {shape:?}");
        }
    }

    #[test]
    fn columns_are_cut_between_blocks_only() {
        let checkpoint = counted(QuantType::Q8_0, &[2, 96]);
        let columns = |columns: Range<usize>| {
            let cut = SliceBounds { rows: None, columns: Some(columns) };
            read_slice(&checkpoint, &TensorSlice { bounds: cut, ..piece(&[2, 96], TensorPart::Whole, false) })
        };
        let all = read_slice(&checkpoint, &piece(&[2, 96], TensorPart::Whole, false)).unwrap().to_f32();
        let taken = columns(32..96).unwrap();
        assert_eq!((taken.shape.clone(), taken.bytes.len()), (vec![2, 64], 4 * 34));
        assert_eq!(taken.to_f32(), [&all[32..96], &all[128..]].concat());
        assert!(columns(16..96).is_err() && columns(32..80).is_err());
    }

    #[test]
    fn a_matrix_is_turned_whatever_its_size() {
        let (shape, turned) = numbers(&[70, 33], TensorPart::Whole, true);
        assert_eq!(shape, [33, 70]);
        let right = |at: usize| ((at % 70) * 33 + at / 70) as f32;
        assert!(turned.iter().enumerate().all(|(at, number)| *number == right(at)));
    }

    #[test]
    fn a_number_that_is_not_finite_is_named_by_its_place_in_the_file() {
        let grouped = TensorPart::Rows { groups: 2, stride: 3, first: 1, count: 2 };
        for (shape, part, transposed, rows, index) in [
            (&[6, 2][..], TensorPart::Whole, false, None, "[4, 1]"),
            (&[6, 2], grouped, false, None, "[4, 1]"),
            (&[6, 2], TensorPart::Whole, false, Some(3..5), "[4, 1]"),
            (&[3, 4], TensorPart::Whole, true, None, "[2, 1]"),
            (&[12], TensorPart::Whole, false, Some(8..12), "[9]"),
            (&[2, 3, 2], TensorPart::Whole, false, None, "[1, 1, 1]"),
        ] {
            let mut numbers = [1f32; 12];
            numbers[9] = f32::NAN;
            let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let tensors = [("t".to_owned(), shape.to_vec(), 0)];
            let checkpoint = Checkpoint::from_buffer("t".as_ref(), bytes, QuantType::F32, tensors);
            let bounds = SliceBounds { rows, columns: None };
            let plane = (shape.len() == 3).then_some(1);
            let piece = TensorSlice { bounds, plane, ..piece(shape, part, transposed) };
            let error = check_finite(&piece, &read_slice(&checkpoint, &piece).unwrap()).unwrap_err();
            let expected = format!("tensor 't' is damaged: the number at {index} is NaN or infinite");
            assert_eq!(error.to_string(), expected);
        }
        let (fine, whole) = (counted(QuantType::F16, &[6, 2]), piece(&[6, 2], TensorPart::Whole, false));
        check_finite(&whole, &read_slice(&fine, &whole).unwrap()).unwrap();
    }

    #[test]
    fn normalized_rows_have_length_one() {
        let checkpoint = counted(QuantType::F32, &[2, 2]);
        let taken =
            l2_normalize_rows(read_slice(&checkpoint, &piece(&[2, 2], TensorPart::Whole, false)).unwrap());
        let root = 13f32.sqrt();
        assert_eq!(taken.to_f32(), [0.0, 1.0, 2.0 / root, 3.0 / root]);
    }
}
