//! Slices of stored tensors, and names of tensors that may be unused.
//!
//! Invariant: a slice says all that decides its numbers: the tensor, the part of it, and the range of that.

use crate::quantize::{MatrixNames, Rounding, RoundingPolicy};
use crate::tensor_names::matches;
use mainstem_kernels::MatrixId;
use std::ops::Range;
use std::sync::Arc;

/// A slice of a stored tensor: the whole tensor, or a part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlice {
    /// Its role: the key of the specification's `tensors` table.
    pub role: &'static str,
    /// Name of the tensor in the file.
    pub name: String,
    /// Name pattern, the same for all layers and experts: with `{i}` and `{e}` in place of their numbers.
    pub pattern: Arc<str>,
    pub layer: Option<usize>,
    /// Shape of the stored tensor.
    pub shape: Vec<usize>,
    /// Index of the matrix or vector among those stacked in the tensor, (planes, …); `None` if it is one.
    pub plane: Option<usize>,
    pub part: TensorPart,
    /// Range of the part that is used.
    pub bounds: SliceBounds,
    /// Whether the part is stored as (in, out).
    pub transposed: bool,
}

impl TensorSlice {
    /// Returns the names that weight rules may match.
    pub fn names(&self) -> MatrixNames<'_> {
        MatrixNames { role: self.role, name: &self.name, pattern: &self.pattern }
    }

    /// Identifies the stored matrix that contains the slice.
    pub fn matrix_id(&self) -> MatrixId {
        // Transposed rows are another matrix than that of the stored tensor.
        let turned = usize::from(matches!(self.part, TensorPart::TurnedRows { .. }));
        MatrixId::new(&self.name, self.plane.unwrap_or(turned))
    }

    /// Returns the rounding of this slice's columns under a policy.
    pub fn rounding<'p>(&self, policy: &'p RoundingPolicy) -> Rounding<'p> {
        policy.rounding(&self.matrix_id(), self.bounds.columns.clone())
    }
}

/// Ranges of the rows and columns of a matrix (out, in); the values of a vector are rows. `None` is the whole
/// range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SliceBounds {
    pub rows: Option<Range<usize>>,
    pub columns: Option<Range<usize>>,
}

/// Selects a part of a stored tensor, or of one of those stacked in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorPart {
    Whole,
    /// Rows in groups: `count` rows from `first` on, of each `stride` rows.
    Rows {
        groups: usize,
        stride: usize,
        first: usize,
        count: usize,
    },
    /// Rows in groups, as above, of each of which the matrix (count, columns) is transposed to (columns,
    /// count).
    TurnedRows {
        groups: usize,
        stride: usize,
        first: usize,
        count: usize,
    },
}

/// Name patterns of tensors that a file may have although they are unused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IgnoredTensors {
    pub patterns: Vec<String>,
    pub prefixes: Vec<String>,
}

impl TensorPart {
    /// Returns the number of rows of the part, for a tensor with `all` rows.
    pub fn rows(self, all: usize) -> usize {
        match self {
            TensorPart::Whole => all,
            TensorPart::Rows { groups, count, .. } | TensorPart::TurnedRows { groups, count, .. } => {
                groups * count
            }
        }
    }
}

impl IgnoredTensors {
    /// Returns whether a tensor with that name may be unused.
    pub fn covers(&self, name: &str) -> bool {
        let without = self.prefixes.iter().filter_map(|prefix| name.strip_prefix(prefix.as_str()));
        std::iter::once(name)
            .chain(without)
            .any(|name| self.patterns.iter().any(|pattern| matches(pattern, name)))
    }
}
