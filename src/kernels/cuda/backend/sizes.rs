//! The sizes of what a GPU allocates: they follow from the limits of a step and the shapes that it holds.
//!
//! Invariant: the device itself allocates by these sizes.

use super::{attention, mixture, products, sample, steps};
use crate::backend::{
    ActivationType, DeviceError, DeviceSizes, HeldShapes, KvLayout, PackedLayout, StepLimits,
};
use crate::cuda::Gpu;
use crate::quant::{ActivationPrecision, QuantType};
use std::collections::HashSet;

/// Bytes of a piece of memory that the driver maps.
const PIECE: usize = 2 << 20;

/// The sizes of a GPU's buffers.
#[derive(Clone, Debug)]
pub struct CudaSizes {
    pub(super) name: String,
    pub(super) precision: ActivationPrecision,
}

impl CudaSizes {
    /// Type of the activations of GPUs.
    pub const ACTIVATION_TYPE: ActivationType = ActivationType::F32;

    /// Returns the sizes of a GPU with this precision of activations.
    pub fn new(gpu: &Gpu, precision: ActivationPrecision) -> CudaSizes {
        let name = format!("cuda:{} ({}, {})", gpu.number, gpu.name, gpu.architecture);
        CudaSizes { name, precision }
    }
}

impl DeviceSizes for CudaSizes {
    fn describe(&self) -> String {
        self.name.clone()
    }

    fn activation_type(&self) -> ActivationType {
        CudaSizes::ACTIVATION_TYPE
    }

    fn packed_layout(&self, ty: QuantType, n: usize, k: usize) -> PackedLayout {
        PackedLayout::rows(ty, n, k)
    }

    fn kv_bytes(&self, layout: &KvLayout) -> Result<[usize; 2], DeviceError> {
        layout.check_type()?;
        attention::check_heads(layout)?;
        let head_bytes = |width: usize| {
            let unsupported = || format!("heads of width {width} in a {} cache", layout.ty);
            layout.ty.run_bytes(width).ok_or_else(|| DeviceError::Unsupported(unsupported()))
        };
        layout.cache_bytes([head_bytes(layout.k_dim)?, head_bytes(layout.stored_v_dim())?])
    }

    fn step_bytes(&self, limits: &StepLimits, shapes: &HeldShapes) -> usize {
        let parts: [&[usize]; 5] = [
            &steps::bytes(limits),
            &products::scratch_bytes(limits, shapes, self.precision),
            &attention::scratch_bytes(limits, shapes),
            &mixture::scratch_bytes(limits, shapes),
            &sample::scratch_bytes(limits),
        ];
        parts.into_iter().flatten().sum()
    }

    /// The driver maps memory in pieces of 2 MiB. Smaller buffers share one.
    fn buffer_bytes(&self, bytes: usize) -> usize {
        let alignment = if bytes >= PIECE / 2 { PIECE } else { 512 };
        bytes.checked_next_multiple_of(alignment).unwrap_or(bytes)
    }

    /// A program takes a piece at most. There is one for rows, one for sampling, and one for each format.
    fn code_bytes(&self, shapes: &HeldShapes) -> usize {
        let weights: HashSet<QuantType> = shapes.weights.iter().map(|(ty, _)| *ty).collect();
        let caches: HashSet<QuantType> = shapes.caches.iter().map(|layout| layout.ty).collect();
        (2 + weights.len() + caches.len()) * PIECE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_take_whole_pieces_and_each_format_has_code() {
        let sizes = CudaSizes { name: String::new(), precision: ActivationPrecision::Int8 };
        let taken = [0, 1, 512, 513, PIECE / 2, PIECE, PIECE + 1].map(|bytes| sizes.buffer_bytes(bytes));
        assert_eq!(taken, [0, 512, 512, 1024, PIECE, PIECE, 2 * PIECE]);
        let mut shapes = HeldShapes::default();
        assert_eq!(sizes.code_bytes(&shapes), 2 * PIECE);
        for (ty, k) in [(QuantType::F32, 8), (QuantType::F32, 16), (QuantType::BF16, 8)] {
            shapes.add_weight(ty, k);
        }
        assert_eq!(sizes.code_bytes(&shapes), 4 * PIECE);
    }
}
