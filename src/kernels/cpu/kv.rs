//! KV caches of the CPU backend, and attention over them.
//!
//! Invariant: scratch memory for a cache exists once the cache does.

use super::attention::{self, AttentionInputs};
use super::{CpuBackend, NOT_PREPARED};
use crate::backend::{DeviceError, DeviceSizes, KvLayer, KvLayout};
use crate::host::{HostBuf, HostMemory};

impl CpuBackend {
    /// Allocates a KV cache in `memory`, and what attention on it needs.
    pub(super) fn alloc_kv_in(
        &mut self,
        memory: &HostMemory,
        layout: KvLayout,
    ) -> Result<KvLayer<HostBuf>, DeviceError> {
        let [k, v] = self.sizes.kv_bytes(&layout)?;
        self.grow_scratch(self.sizes.kv_scratch(&layout))?;
        Ok(KvLayer { k: memory.zeroed(k)?, v: memory.zeroed(v)?, layout })
    }

    /// Computes attention.
    pub(super) fn attend(&mut self, inputs: AttentionInputs, out: &mut HostBuf) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        let scratch = self
            .scratch
            .attention
            .as_mut()
            .expect("attention scratch exists once alloc_kv has allocated a cache; this is a bug")
            .f32_mut();
        let scratch = (&mut self.span_items, scratch);
        attention::attention(&mut self.pool, self.level, step, inputs, out.f32_mut(), scratch);
    }
}
