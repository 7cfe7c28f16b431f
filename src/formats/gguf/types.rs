//! The number formats of ggml: the id, name and block size of each, and which of them have compute support.
//!
//! Invariant: the size of a tensor is known if its type is in the table; a type of another id is called by
//! its id, and its size is unknown.

use crate::formats::{Dtype, elements};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::QuantType;

/// Id of a type, its name in ggml, and elements and bytes per block.
type TypeRow = (u32, &'static str, usize, usize);

/// Missing ids were removed from ggml and are in no file.
const TYPES: [TypeRow; 34] = [
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 40),
    (10, "q2_K", 256, 84),
    (11, "q3_K", 256, 110),
    (12, "q4_K", 256, 144),
    (13, "q5_K", 256, 176),
    (14, "q6_K", 256, 210),
    (15, "q8_K", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
];

/// Returns the ggml id of a number format, if it has one.
pub(in crate::formats) fn ggml_id(ty: QuantType) -> Option<u32> {
    TYPES.iter().find(|row| row.1 == ty.name()).map(|row| row.0)
}

/// A number format of ggml.
#[derive(Clone, Copy, Debug)]
pub(super) struct GgmlType {
    id: u32,
    row: Option<&'static TypeRow>,
}

impl GgmlType {
    /// Returns the type with this id, which may be unknown.
    pub(super) fn from_id(id: u32) -> GgmlType {
        GgmlType { id, row: TYPES.iter().find(|row| row.0 == id) }
    }

    /// Returns the checkpoint data type; types are matched by name.
    pub(super) fn dtype(self) -> Dtype {
        match self.row {
            None => Dtype::Unsupported(format!("type {}", self.id)),
            Some((_, name, ..)) => match QuantType::by_name(name) {
                Some(ty) => Dtype::Known(ty),
                None => Dtype::Unsupported((*name).to_owned()),
            },
        }
    }

    /// Bytes of a tensor of shape `shape`, outermost dimension first; `None` for an unknown type. Fails if
    /// rows are not whole blocks.
    pub(super) fn bytes(self, shape: &[usize]) -> Result<Option<usize>> {
        let Some((_, name, numbers, bytes)) = self.row else { return Ok(None) };
        let width = shape.last().copied().unwrap_or(1);
        ensure!(
            width.is_multiple_of(*numbers),
            "rows of {width} elements are not a whole number of {name} blocks of {numbers} elements"
        );
        let needed = elements(shape).and_then(|count| (count / numbers).checked_mul(*bytes));
        needed.map(Some).with_context(|| format!("shape {shape:?} of {name} is too large"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_be_computed_with_has_the_bytes_that_kernels_read() {
        let known = TYPES.iter().filter_map(|row| Some((row, QuantType::by_name(row.1)?)));
        let mut names = Vec::new();
        for ((id, name, numbers, bytes), ty) in known {
            assert_eq!((*numbers, *bytes), (ty.row().block_elements, ty.row().block_bytes), "{ty}");
            assert_eq!(GgmlType::from_id(*id).dtype(), Dtype::Known(ty));
            assert_eq!(*name, ty.name(), "ggml has no other names");
            names.push(*name);
        }
        let expected =
            "f32 f16 q4_0 q4_1 q5_0 q5_1 q8_0 q2_K q3_K q4_K q5_K q6_K iq4_nl iq4_xs bf16 tq1_0 tq2_0 mxfp4";
        assert_eq!(names.join(" "), expected);
        assert!(TYPES.windows(2).all(|pair| pair[0].0 < pair[1].0), "ids must be strictly ascending");
    }

    #[test]
    fn bytes_are_those_of_whole_rows() {
        assert_eq!(GgmlType::from_id(12).bytes(&[3, 512]).unwrap(), Some(3 * 2 * 144));
        assert_eq!(GgmlType::from_id(0).bytes(&[]).unwrap(), Some(4));
        assert_eq!(GgmlType::from_id(8).bytes(&[0, 32]).unwrap(), Some(0));
        assert_eq!(GgmlType::from_id(99).bytes(&[7]).unwrap(), None);
        assert_eq!(GgmlType::from_id(99).dtype(), Dtype::Unsupported("type 99".to_owned()));
        // 96 elements are three blocks, but rows of 48 are not whole blocks.
        let error = GgmlType::from_id(2).bytes(&[2, 48]).unwrap_err().to_string();
        assert!(error.contains("rows of 48") && error.contains("q4_0"), "{error}");
        assert!(GgmlType::from_id(1).bytes(&[1 << 40, 1 << 40]).is_err());
    }
}
