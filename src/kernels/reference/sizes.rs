//! The sizes of the reference backend.
//!
//! Invariant: they count what the backend allocates.

use super::Reference;
use crate::backend::{
    ActivationType, DeviceError, DeviceSizes, HeldShapes, KvLayout, PackedLayout, StepLimits,
};
use crate::quant::QuantType;

/// The sizes of the reference backend: everything has the size of its elements, and there is no scratch
/// memory besides kept logits and counts of tokens.
#[derive(Clone, Copy, Debug)]
pub struct ReferenceSizes;

impl DeviceSizes for ReferenceSizes {
    fn describe(&self) -> String {
        "reference (scalar F64, 1 thread)".into()
    }

    fn activation_type(&self) -> ActivationType {
        Reference::ACTIVATION_TYPE
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
        layout.cache_bytes([head_bytes(layout.k_dim)?, head_bytes(layout.stored_v_dim())?])
    }

    fn step_bytes(&self, limits: &StepLimits, _: &HeldShapes) -> usize {
        limits.draft_logits_len() * size_of::<f32>() + limits.token_counts_len() * size_of::<u16>()
    }
}
