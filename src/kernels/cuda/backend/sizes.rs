//! The sizes of what a GPU allocates: they follow from the limits of a step and the shapes that it holds.
//!
//! Invariant: the device itself allocates by these sizes.

use super::{attention, mixture, products, sample, steps};
use crate::backend::{
    ActivationType, DeviceError, DeviceSizes, HeldShapes, KvLayout, PackedLayout, StepLimits,
};
use crate::cuda::Gpu;
use crate::quant::{ActivationPrecision, QuantType};

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
}
