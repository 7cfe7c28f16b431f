//! The dimensions that a device's scratch buffers are made for.
//!
//! Invariant: sizes only grow, so a buffer that was large enough stays so.

use super::gemms::ScratchWidths;
use super::moe::MoeScratchSizes;

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
