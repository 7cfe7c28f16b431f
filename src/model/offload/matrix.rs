//! The matrices of layers: their names and layouts.
//!
//! Invariant: matrices of the same files whose bytes may differ have different names, parts or layouts.

use crate::model::spec::{SliceBounds, TensorSlice};
use mainstem_kernels::PackedLayout;

/// A matrix of a layer.
#[derive(Clone, Debug)]
pub struct LayerMatrix {
    /// Name of the tensor.
    pub name: String,
    /// The part of the tensor, by which it differs from all others of the same name.
    pub part: String,
    /// Its layout on the device.
    pub layout: PackedLayout,
    /// The expert that it is a part of, by its index among those of the layer on the device.
    pub expert: Option<usize>,
}

impl LayerMatrix {
    /// Creates the matrix of a slice of a tensor, which may be a part of an expert.
    pub fn new(piece: &TensorSlice, layout: PackedLayout, expert: Option<usize>) -> LayerMatrix {
        let TensorSlice { name, shape, part, bounds: SliceBounds { rows, columns }, transposed, .. } = piece;
        let part = format!("{shape:?} {part:?} {rows:?} {columns:?} {transposed}");
        LayerMatrix { name: name.to_string(), part, layout, expert }
    }
}
