//! Integers with a scale, and perhaps a zero point, for every group of columns of a row.
//!
//! An element is (q - z) * s. Where the columns of a group follow each other in whole blocks of 32 and F16
//! represents every scale, a block format represents every element exactly:
//!
//! | bits | zero points | format | quant of the format |
//! |---|---|---|---|
//! | up to 4 | all in the middle, 2^(bits - 1) | Q4_0 | q - z + 8 |
//! | up to 4 | others | Q8_0 | q - z |
//! | 8 | all in the middle | Q8_0 | q - z |
//!
//! Everything else is F32: groups of columns in any order (`desc_act`), larger scales, 8 bits with other zero
//! points.
//! Invariant: an element is exact, or its product is rounded once to F32.

use super::packing::{Packing, TILE_ROWS};
use super::stored::{Module, StoredPart};
use super::{Encoded, Encoding};
use anyhow::{Context, Result, bail};
use half::{bf16, f16};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// Elements of a block of Q4_0 and Q8_0.
pub(super) const BLOCK_LEN: usize = 32;

/// The arrangement of integers, scales and zero points in the stored tensors of a matrix: those of the
/// integers, of the scales, and of the zero points.
#[derive(Debug)]
pub(super) struct Integers {
    /// Name of the encoding.
    pub(super) name: &'static str,
    pub(super) bits: u32,
    pub(super) quants: Packing,
    pub(super) scales: Scales,
    /// `None` if all zero points are in the middle, and not stored.
    pub(super) zeros: Option<ZeroPoints>,
    pub(super) groups: Groups,
}

/// The arrangement of the scales (rows, groups).
#[derive(Debug)]
pub(super) struct Scales {
    pub(super) ty: QuantType,
    /// Distances of the scales of consecutive rows and groups; 0 if they share one.
    pub(super) row_stride: usize,
    pub(super) group_stride: usize,
}

/// The arrangement of the zero points (rows, groups).
#[derive(Debug)]
pub(super) struct ZeroPoints {
    pub(super) packing: Packing,
    /// Added to each stored zero point, modulo 2^bits.
    pub(super) added: i16,
}

/// The group of each column.
#[derive(Debug)]
pub(super) enum Groups {
    /// Groups of so many consecutive columns, of which the last may be smaller.
    Consecutive(usize),
    /// The number of the group of each column.
    Listed(Vec<u32>),
}

/// Zero point and scale of a group.
type Group = (i16, f32);

impl Integers {
    /// Creates the encoding of a matrix (rows, columns), after reading what decides its type. The parts are
    /// the integers, the scales, and the zero points if there are any.
    pub(super) fn encoded(
        self,
        module: &Module,
        parts: Vec<StoredPart>,
        [rows, columns]: [usize; 2],
    ) -> Encoded {
        let data: Vec<&[u8]> = parts.iter().map(|part| module.data(part)).collect();
        let ty = self.exact_type(&data, [rows, columns]);
        let load_type = match (ty, self.scales.ty) {
            // The packages multiply in F16 or BF16 if the scales have that type. F32 products are rounded.
            (QuantType::F32, QuantType::F16) => QuantType::F16,
            (QuantType::F32, _) => QuantType::BF16,
            (ty, _) => ty,
        };
        let encoding = Encoding::Integers(self);
        Encoded { parts, rows, columns, encoding, ty, load_type, has_zero_bias: false }
    }

    fn exact_type(&self, parts: &[&[u8]], [rows, columns]: [usize; 2]) -> QuantType {
        let is_in_blocks = match self.groups {
            Groups::Consecutive(size) => size.is_multiple_of(BLOCK_LEN) || size >= columns,
            Groups::Listed(_) => false,
        };
        if !is_in_blocks || !columns.is_multiple_of(BLOCK_LEN) || !self.scales.fit_f16(parts[1]) {
            return QuantType::F32;
        }
        let groups = self.group_count(columns);
        match (self.bits, self.are_zeros_in_the_middle(parts, rows, groups)) {
            (..=4, true) => QuantType::Q4_0,
            (..=4, false) | (8, true) => QuantType::Q8_0,
            _ => QuantType::F32,
        }
    }

    fn group_count(&self, columns: usize) -> usize {
        match &self.groups {
            Groups::Consecutive(size) => columns.div_ceil(*size),
            Groups::Listed(groups) => groups.iter().max().map_or(0, |last| *last as usize + 1),
        }
    }

    fn are_zeros_in_the_middle(&self, parts: &[&[u8]], rows: usize, groups: usize) -> bool {
        let all = || (0..rows).flat_map(|row| (0..groups).map(move |group| (row, group)));
        self.zeros.is_none() || all().all(|(row, group)| self.zero(parts, row, group) == self.middle())
    }

    fn middle(&self) -> i16 {
        1 << (self.bits - 1)
    }

    fn zero(&self, parts: &[&[u8]], row: usize, group: usize) -> i16 {
        match &self.zeros {
            None => self.middle(),
            Some(zeros) if zeros.added == 0 => zeros.packing.read(parts[2], row, group),
            Some(zeros) => (zeros.packing.read(parts[2], row, group) + zeros.added) & ((1 << self.bits) - 1),
        }
    }

    /// Appends rows of a matrix with so many columns in the format `ty`.
    pub(super) fn decode(
        &self,
        parts: &[&[u8]],
        (rows, columns): (Range<usize>, usize),
        ty: QuantType,
        out: &mut Vec<u8>,
    ) {
        let mut quants = vec![0i16; TILE_ROWS * columns];
        let mut groups: Vec<Group> = vec![(0, 0.0); self.group_count(columns)];
        for first in rows.clone().step_by(TILE_ROWS) {
            let tile = first..(first + TILE_ROWS).min(rows.end);
            self.quants.unpack(parts[0], tile.clone(), columns, &mut quants[..tile.len() * columns]);
            for (row, quants) in tile.zip(quants.chunks_exact(columns)) {
                for (number, group) in groups.iter_mut().enumerate() {
                    *group = (self.zero(parts, row, number), self.scales.read(parts[1], row, number));
                }
                self.append_row(ty, quants, &groups, out);
            }
        }
    }

    fn append_row(&self, ty: QuantType, quants: &[i16], groups: &[Group], out: &mut Vec<u8>) {
        match (&self.groups, ty) {
            (Groups::Consecutive(size), QuantType::Q4_0 | QuantType::Q8_0) => {
                for (at, block) in quants.chunks_exact(BLOCK_LEN).enumerate() {
                    let (zero, scale) = groups[at * BLOCK_LEN / size];
                    out.extend_from_slice(&f16::from_f32(scale).to_le_bytes());
                    match ty {
                        QuantType::Q8_0 => out.extend(block.iter().map(|q| (q - zero) as i8 as u8)),
                        _ => append_nibbles(block, zero - 8, out),
                    }
                }
            }
            (Groups::Consecutive(size), _) => {
                for (quants, (zero, scale)) in quants.chunks(*size).zip(groups) {
                    out.extend(quants.iter().flat_map(|q| (f32::from(q - zero) * scale).to_le_bytes()));
                }
            }
            (Groups::Listed(list), _) => {
                let groups = list.iter().map(|group| groups[*group as usize]);
                let values = quants.iter().zip(groups);
                out.extend(values.flat_map(|(q, (zero, scale))| (f32::from(q - zero) * scale).to_le_bytes()));
            }
        }
    }
}

/// Appends the quants of a block of Q4_0, from which `zero` is subtracted.
fn append_nibbles(block: &[i16], zero: i16, out: &mut Vec<u8>) {
    let (low, high) = block.split_at(BLOCK_LEN / 2);
    out.extend(low.iter().zip(high).map(|(low, high)| ((low - zero) | (high - zero) << 4) as u8));
}

impl Scales {
    fn read(&self, bytes: &[u8], row: usize, group: usize) -> f32 {
        self.at(bytes, row * self.row_stride + group * self.group_stride)
    }

    fn at(&self, bytes: &[u8], index: usize) -> f32 {
        let size = self.ty.row().block_bytes;
        match bytes[index * size..][..size] {
            [a, b] if self.ty == QuantType::F16 => f16::from_le_bytes([a, b]).to_f32(),
            [a, b] => bf16::from_le_bytes([a, b]).to_f32(),
            [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
            _ => unreachable!("scales have two or four bytes; this is a bug"),
        }
    }

    /// Whether F16 represents every scale.
    fn fit_f16(&self, bytes: &[u8]) -> bool {
        let count = bytes.len() / self.ty.row().block_bytes;
        let fits = |scale: f32| f16::from_f32(scale).to_f32() == scale;
        self.ty == QuantType::F16 || (0..count).all(|index| fits(self.at(bytes, index)))
    }
}

impl Groups {
    /// Returns the groups of columns that are listed by their numbers: consecutive columns if all groups but
    /// the last are as large as the first. Fails if a number is not less than `count`, or one less than it
    /// does not occur; the error names `list`.
    pub(super) fn listed(module: &Module, list: &StoredPart, count: usize) -> Result<Groups> {
        let name = &list.name;
        let list = module.integers(list);
        let groups: Option<Vec<u32>> = list.iter().map(|group| u32::try_from(*group).ok()).collect();
        let groups = groups
            .filter(|groups| groups.iter().all(|group| (*group as usize) < count))
            .with_context(|| format!("'{name}' has a number that is not one of {count} groups"))?;
        let mut occurs = vec![false; count];
        groups.iter().for_each(|group| occurs[*group as usize] = true);
        if let Some(missing) = occurs.iter().position(|occurs| !occurs) {
            bail!("'{name}' has no column of group {missing}, but there are scales of {count} groups");
        }
        let size = groups.iter().take_while(|group| **group == 0).count().max(1);
        let is_in_order = groups.iter().enumerate().all(|(at, group)| at / size == *group as usize);
        Ok(if is_in_order { Groups::Consecutive(size) } else { Groups::Listed(groups) })
    }
}

#[cfg(test)]
mod tests {
    use crate::formats::{Checkpoint, Folder};
    use anyhow::Result;
    use mainstem_kernels::QuantType;
    use serde_json::{Map, json};

    type Stored<'a> = (&'a str, &'a str, &'a [usize], Vec<u8>);

    /// Returns type, default type and numbers of the matrix "w.weight" that these tensors of
    /// compressed-tensors store, in groups of 16 or 32 columns if they are grouped.
    fn decoded(tensors: &[Stored]) -> (QuantType, QuantType, Vec<f32>) {
        let checkpoint = opened(tensors).unwrap();
        let tensor = checkpoint.tensor("w.weight").unwrap();
        let (ty, mut numbers) = (tensor.quant_type().unwrap(), vec![0.0; tensor.shape.iter().product()]);
        ty.dequantize(&tensor.bytes(), &mut numbers);
        (ty, tensor.default_load_type().unwrap(), numbers)
    }

    fn opened(tensors: &[Stored]) -> Result<Checkpoint> {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in tensors {
            let place = [data.len(), data.len() + bytes.len()];
            header
                .insert((*name).to_owned(), json!({ "dtype": dtype, "shape": shape, "data_offsets": place }));
            data.extend_from_slice(bytes);
        }
        let header = json!(header).to_string();
        let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
        let groups = [16, 32].map(|size| json!({ "weights": { "group_size": size } }));
        let config = json!({ "quantization_config": {
            "quant_method": "compressed-tensors", "config_groups": { "a": groups[0], "b": groups[1] },
        }});
        let files = [("model.safetensors", weights), ("config.json", config.to_string().into_bytes())];
        let folder = Folder::memory("t", files.map(|(name, content)| (name.to_owned(), content)));
        Checkpoint::open_folder(&folder)
    }

    #[test]
    fn zero_points_in_bytes_are_within_their_bits() {
        for (zero, fits) in [(7i8, true), (-8, true), (8, false), (-9, false)] {
            let found = opened(&[
                ("w.weight_packed", "I32", &[2, 4], words(&[0; 8])),
                ("w.weight_shape", "I32", &[2], words(&[2, 32])),
                ("w.weight_scale", "F32", &[2, 1], floats(&[1.0, 1.0])),
                ("w.weight_zero_point", "I8", &[2, 1], vec![0, zero as u8]),
            ]);
            let error = found.map_or_else(|error| format!("{error:#}"), |_| String::new());
            let named = format!("'w.weight_zero_point' has the zero point {zero}, which 4 bits lack");
            assert!(if fits { error.is_empty() } else { error.contains(&named) }, "{zero}: {error}");
        }
    }

    /// Two rows of signed bytes: 0, 1, 2, ... and 0, -1, -2, ...
    fn bytes(columns: usize) -> Stored<'static> {
        let rows = [1i8, -1].into_iter().flat_map(|sign| (0..columns as i8).map(move |at| (sign * at) as u8));
        ("w.weight", "I8", if columns == 32 { &[2, 32] } else { &[2, 40] }, rows.collect())
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn words(values: &[i32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn a_block_format_is_chosen_only_if_it_has_every_number() {
        let scale = |values: &[f32]| ("w.weight_scale", "F32", &[2, 1][..], floats(values));
        let zeros = ("w.weight_zero_point", "I8", &[2, 1][..], vec![1, 0xff]);
        let middle = ("w.weight_zero_point", "I8", &[2, 1][..], vec![0, 0]);
        for (name, tensors, ty, third) in [
            ("exact", vec![bytes(32), scale(&[0.5, 2.0])], QuantType::Q8_0, [1.0, -4.0]),
            ("a scale that F16 lacks", vec![bytes(32), scale(&[0.5, 0.1])], QuantType::F32, [1.0, -0.2]),
            ("a large scale", vec![bytes(32), scale(&[0.5, 1e6])], QuantType::F32, [1.0, -2e6]),
            ("rows of 40", vec![bytes(40), scale(&[0.5, 2.0])], QuantType::F32, [1.0, -4.0]),
            ("zero points", vec![bytes(32), scale(&[0.5, 2.0]), zeros], QuantType::F32, [0.5, -2.0]),
            ("those of 0", vec![bytes(32), scale(&[0.5, 2.0]), middle], QuantType::Q8_0, [1.0, -4.0]),
        ] {
            let (found, loaded, numbers) = decoded(&tensors);
            assert_eq!((found, [numbers[2], numbers[numbers.len() / 2 + 2]]), (ty, third), "{name}");
            assert_eq!(loaded, if ty == QuantType::F32 { QuantType::BF16 } else { ty }, "{name}");
        }
    }

    #[test]
    fn columns_of_a_group_follow_each_other_or_are_listed() {
        // All integers of row 0 are 1, and of row 1 they are -1.
        let packed: Vec<i32> =
            [0x9999_9999u32, 0x7777_7777].into_iter().flat_map(|word| [word as i32; 8]).collect();
        let matrix = |groups: Option<Vec<i32>>| {
            let mut tensors = vec![
                ("w.weight_packed", "I32", &[2, 8][..], words(&packed)),
                ("w.weight_shape", "I32", &[2][..], words(&[2, 64])),
                ("w.weight_scale", "F32", &[2, 2][..], floats(&[1.0, 2.0, 4.0, 8.0])),
            ];
            tensors.extend(groups.map(|groups| ("w.weight_g_idx", "I32", &[64][..], words(&groups))));
            let (ty, _, numbers) = decoded(&tensors);
            (ty, [0, 31, 32, 63, 64, 96].map(|at| numbers[at]))
        };
        let in_order = [1.0, 1.0, 2.0, 2.0, -4.0, -8.0];
        assert_eq!(matrix(None), (QuantType::Q4_0, in_order));
        assert_eq!(matrix(Some(vec![-1; 64])), (QuantType::Q4_0, in_order));
        assert_eq!(matrix(Some((0..64).map(|at| at / 32).collect())), (QuantType::Q4_0, in_order));
        let alternating = matrix(Some((0..64).map(|at| at % 2).collect()));
        assert_eq!(alternating, (QuantType::F32, [1.0, 2.0, 1.0, 2.0, -4.0, -4.0]));
    }
}
