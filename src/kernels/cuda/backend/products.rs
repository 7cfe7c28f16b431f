//! Products of rows with weights.
//!
//! Invariant: the sum of an output runs in an order that follows from the format and the columns of the
//! weight.

use super::CudaBackend;
use crate::backend::{DeviceError, OutputColumns, Weight};
use crate::cuda::CudaBuf;

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
