//! Mixtures of experts.
//!
//! Invariant: results of experts are added in the order of experts.

use super::CudaBackend;
use crate::backend::{DeviceError, Experts, MoeShape};
use crate::cuda::CudaBuf;

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
