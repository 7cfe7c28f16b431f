//! The sizes of what a GPU allocates: they follow from the limits of a step and the shapes that it holds.
//!
//! Invariant: the device itself allocates by these sizes.

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

/// Bytes of the scratch buffers of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ScratchBytes {
    /// The rows of a step.
    pub rows: usize,
    /// The numbers of wanted rows.
    pub wanted: usize,
    /// Page tables: own, window and cross.
    pub tables: [usize; 3],
    /// Changes of page tables.
    pub changes: usize,
}

impl CudaSizes {
    /// Type of the activations of GPUs.
    pub const ACTIVATION_TYPE: ActivationType = ActivationType::F32;

    /// Changes of page tables that are copied at a time.
    pub(super) const CHANGES: usize = 4096;

    /// Returns the sizes of a GPU with this precision of activations.
    pub fn new(gpu: &Gpu, precision: ActivationPrecision) -> CudaSizes {
        let name = format!("cuda:{} ({}, {})", gpu.number, gpu.name, gpu.architecture);
        CudaSizes { name, precision }
    }

    /// Returns the bytes of scratch buffers.
    pub(super) fn scratch(&self, limits: &StepLimits, _shapes: &HeldShapes) -> ScratchBytes {
        let table = |len: usize| limits.slots * len * size_of::<u32>();
        ScratchBytes {
            rows: limits.rows * super::steps::ROW_BYTES,
            wanted: limits.rows * size_of::<u32>(),
            tables: [
                table(limits.table_len()),
                table(limits.window_table_len()),
                table(limits.cross_table_len()),
            ],
            changes: CudaSizes::CHANGES * 2 * size_of::<u32>(),
        }
    }
}

impl ScratchBytes {
    /// Returns the bytes of all buffers.
    pub fn total(&self) -> usize {
        let ScratchBytes { rows, wanted, tables, changes } = self;
        [*rows, *wanted, *changes].iter().chain(tables).sum()
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
        let head_bytes = |width: usize| {
            let unsupported = || format!("heads of width {width} in a {} cache", layout.ty);
            layout.ty.run_bytes(width).ok_or_else(|| DeviceError::Unsupported(unsupported()))
        };
        layout.cache_bytes([head_bytes(layout.k_dim)?, head_bytes(layout.v_dim)?])
    }

    fn step_bytes(&self, limits: &StepLimits, shapes: &HeldShapes) -> usize {
        self.scratch(limits, shapes).total()
    }
}
