//! A device's scratch buffers, and the dimensions that they are made for.
//!
//! Invariant: sizes only grow, so a buffer that was large enough stays so.

use super::bf16::Bf16Isa;
use super::gemms::{GemmScratch, ScratchWidths};
use super::moe::{MoeScratch, MoeScratchSizes};
use super::scratch_memory::ScratchMemory;
use crate::backend::DeviceError;
use crate::host::HostBuf;
use crate::quant::ActivationPrecision;

/// All scratch buffers of a device.
pub struct CpuScratch<Buf = HostBuf> {
    pub gemm: Option<GemmScratch<Buf>>,
    pub attention: Option<Buf>,
    pub moe: Option<MoeScratch<Buf>>,
    pub sizes: ScratchSizes,
}

impl<Buf> Default for CpuScratch<Buf> {
    fn default() -> CpuScratch<Buf> {
        CpuScratch { gemm: None, attention: None, moe: None, sizes: ScratchSizes::default() }
    }
}

impl<Buf> CpuScratch<Buf> {
    /// Reallocates the buffers that are too small for `to`, for `threads` threads. As long as the number of
    /// rows is 0, only records the sizes.
    pub fn grow<M: ScratchMemory<Buf = Buf>>(
        &mut self,
        (threads, operands): (usize, (ActivationPrecision, Option<Bf16Isa>)),
        to: ScratchSizes,
        memory: &M,
    ) -> Result<(), DeviceError> {
        let from = self.sizes;
        let sizes = from.max(to);
        self.sizes = sizes;
        if sizes.rows == 0 {
            return Ok(());
        }
        let more_rows = sizes.rows > from.rows;
        if self.gemm.is_none() || more_rows || sizes.widths != from.widths {
            self.gemm = Some(GemmScratch::new(operands, sizes.rows, sizes.widths, threads, memory)?);
        }
        let attention = sizes.attention_len(threads);
        if self.attention.is_none() || attention > from.attention_len(threads) {
            self.attention = Some(memory.zeroed(attention * size_of::<f32>())?);
        }
        let has_moe = sizes.moe != MoeScratchSizes::default();
        if has_moe && (self.moe.is_none() || more_rows || sizes.moe != from.moe) {
            self.moe = Some(MoeScratch::new(sizes.rows, sizes.moe, memory)?);
        }
        Ok(())
    }
}

/// Dimensions that the scratch buffers are sized for: the rows of a step, the widest weights, the widest
/// attention heads and the largest mixture of experts.
#[derive(Clone, Copy, Default)]
pub struct ScratchSizes {
    pub rows: usize,
    pub widths: ScratchWidths,
    /// Attention scratch per thread, in F32 numbers: one part depends on the KV cache, one on the number of
    /// positions.
    pub attention_per_thread: usize,
    pub sparse_per_thread: usize,
    /// F32 numbers of one partial result of attention (depends on the cache), and the number of partial
    /// results (depends on the positions).
    pub partial_len: usize,
    pub partial_count: usize,
    pub moe: MoeScratchSizes,
}

impl ScratchSizes {
    /// Returns sizes that are large enough for both.
    pub fn max(self, other: ScratchSizes) -> ScratchSizes {
        ScratchSizes {
            rows: self.rows.max(other.rows),
            widths: self.widths.max(other.widths),
            attention_per_thread: self.attention_per_thread.max(other.attention_per_thread),
            sparse_per_thread: self.sparse_per_thread.max(other.sparse_per_thread),
            partial_len: self.partial_len.max(other.partial_len),
            partial_count: self.partial_count.max(other.partial_count),
            moe: self.moe.max(other.moe),
        }
    }

    /// Returns the length of the attention scratch, in F32 numbers.
    pub fn attention_len(&self, threads: usize) -> usize {
        threads * (self.attention_per_thread + self.sparse_per_thread) + self.partial_count * self.partial_len
    }
}
