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
    /// Role of the tensor: a key of the specification's `tensors` table.
    pub role: &'static str,
    /// The part of the tensor, by which it differs from all others of the same name.
    pub part: String,
    /// Its layout on the device.
    pub layout: PackedLayout,
    /// The expert that it is a part of, by its index among those of the layer on the device.
    pub expert: Option<usize>,
    /// Whether only openings ([`mainstem_kernels::Span::is_opening`]) use it.
    pub is_for_openings: bool,
}

impl LayerMatrix {
    /// Creates the matrix of a slice of a tensor, which may be a part of an expert.
    pub fn new(piece: &TensorSlice, layout: PackedLayout, expert: Option<usize>) -> LayerMatrix {
        let TensorSlice {
            role,
            name,
            shape,
            plane,
            part,
            bounds: SliceBounds { rows, columns },
            transposed,
            ..
        } = piece;
        let plane = plane.map(|plane| format!("Plane({plane}) ")).unwrap_or_default();
        let part = format!("{shape:?} {plane}{part:?} {rows:?} {columns:?} {transposed}");
        LayerMatrix { name: name.to_string(), role, part, layout, expert, is_for_openings: false }
    }

    /// Returns the number of the layer's block that the matrix belongs to: 0 for attention, 1 for
    /// cross-attention, 2 for the MLP or the mixture.
    pub fn block(&self) -> usize {
        match self.role {
            "q" | "k" | "v" | "qkv" | "o" => 0,
            "cross_q" | "cross_k" | "cross_v" | "cross_o" => 1,
            _ => 2,
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use mainstem_kernels::QuantType;

    /// Returns a matrix in F16 for tests.
    pub fn matrix(name: &str, role: &'static str, n: usize, k: usize) -> LayerMatrix {
        let (ty, bytes) = (QuantType::F16, 2 * n * k);
        let layout = PackedLayout { arrangement: "rows", version: 1, ty, n, k, bytes };
        let (name, part) = (name.into(), String::new());
        LayerMatrix { name, role, part, layout, expert: None, is_for_openings: false }
    }
}
