//! Products of rows with weights.
//!
//! Invariant: the sum of an output runs in an order that follows from the format and the columns of the
//! weight.

use super::CudaBackend;
use crate::backend::{DeviceError, HeldShapes, OutputColumns, StepLimits, Weight};
use crate::cuda::CudaBuf;

/// Number of scratch buffers.
pub(super) const BUFFERS: usize = 0;

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(limits: &StepLimits, shapes: &HeldShapes) -> [usize; BUFFERS] {
    let _ = (limits, shapes);
    []
}

impl CudaBackend {
    /// Computes [`crate::Backend::matmul_to`].
    pub(super) fn product(
        &mut self,
        rows: usize,
        (w, columns): (&Weight<CudaBuf>, OutputColumns),
        bias: Option<&CudaBuf>,
        (x, y): (&CudaBuf, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        let _ = (rows, w, columns, bias, x, y);
        todo!()
    }
}
