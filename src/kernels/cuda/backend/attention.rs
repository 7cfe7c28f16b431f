//! The KV cache and attention.
//!
//! Invariant: the sum of an output runs in an order that follows from the positions that its row sees.

use super::CudaBackend;
use super::launch::Device;
use super::steps::Steps;
use crate::backend::{AttentionShape, DeviceError, HeldShapes, KvLayer, KvTable, StepLimits};
use crate::batch::PageCopy;
use crate::cuda::CudaBuf;

/// Number of scratch buffers.
pub(super) const BUFFERS: usize = 0;

/// Returns the bytes of the scratch buffers.
pub(super) fn scratch_bytes(limits: &StepLimits, shapes: &HeldShapes) -> [usize; BUFFERS] {
    let _ = (limits, shapes);
    []
}

/// Computes [`crate::Backend::copy_pages`].
pub(super) fn copy_pages(
    device: &mut Device,
    table: KvTable,
    copies: &[PageCopy],
    cache: &mut KvLayer<CudaBuf>,
) -> Result<(), DeviceError> {
    for buf in [&mut cache.k, &mut cache.v] {
        let page_bytes = buf.len() / cache.layout.pages;
        for copy in copies.iter().filter(|copy| copy.table == table && copy.from != copy.to) {
            let [from, to] = [copy.from, copy.to].map(|page| page as usize * page_bytes);
            device.context.copy_within(buf, from, to, page_bytes)?;
        }
    }
    Ok(())
}

/// Computes [`crate::Backend::store_kv`].
pub(super) fn store_kv(
    device: &mut Device,
    steps: &Steps,
    table: KvTable,
    (k, v): (&CudaBuf, &CudaBuf),
    cache: &mut KvLayer<CudaBuf>,
) -> Result<(), DeviceError> {
    let _ = (device, steps, table, k, v, cache);
    todo!()
}

impl CudaBackend {
    /// Computes [`crate::Backend::attention`].
    pub(super) fn attend(
        &mut self,
        shape: &AttentionShape<CudaBuf>,
        cache: &KvLayer<CudaBuf>,
        (q, out): (&CudaBuf, &mut CudaBuf),
    ) -> Result<(), DeviceError> {
        let _ = (shape, cache, q, out);
        todo!()
    }
}
