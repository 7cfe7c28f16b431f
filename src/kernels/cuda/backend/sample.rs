//! Sampling of output rows.
//!
//! Invariant: the token is that of [`crate::reference::sample`].

use super::CudaBackend;
use crate::backend::{DeviceError, SamplingInputs, StepLimits};
use crate::batch::StepOutput;
use crate::cuda::CudaBuf;
use std::ops::Range;

/// Number of scratch buffers.
pub(super) const BUFFERS: usize = 0;

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(limits: &StepLimits) -> [usize; BUFFERS] {
    let _ = limits;
    []
}

impl CudaBackend {
    /// Computes [`crate::Backend::sample`].
    pub(super) fn sample_rows(
        &mut self,
        outputs: Range<usize>,
        logits: &CudaBuf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let _ = (outputs, logits, inputs, out);
        todo!()
    }
}
