//! Mixtures of experts.
//!
//! Invariant: results of experts are added in the order of experts.

use super::CudaBackend;
use crate::backend::{DeviceError, Experts, HeldShapes, MoeShape, StepLimits};
use crate::cuda::CudaBuf;

/// Number of scratch buffers.
pub(super) const BUFFERS: usize = 0;

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(limits: &StepLimits, shapes: &HeldShapes) -> [usize; BUFFERS] {
    let _ = (limits, shapes);
    []
}

impl CudaBackend {
    /// Computes [`crate::Backend::moe`].
    pub(super) fn mixture(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        (router, experts): (&CudaBuf, Experts<CudaBuf>),
        (x, y): (&CudaBuf, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        let _ = (rows, shape, router, experts, x, y);
        todo!()
    }
}
