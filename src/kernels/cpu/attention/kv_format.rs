//! The interface of a storage format of the KV cache: how attention writes and reads its blocks. There is one
//! implementation for floating-point formats, and one for quantized groups.
//!
//! Invariant: numbers are widened only in registers, within a pass over a block.

use super::BLOCK;
use super::query::VisibleRange;
use crate::cpu::simd::Simd;
use crate::host::HostBuf;

/// A storage format of cache blocks. A block holds the keys, or the values, of 32 positions of one KV head.
pub trait KvFormat: Send + Sync + 'static {
    /// Element type of a buffer.
    type Unit: Copy + Send + Sync + 'static;
    /// Numbers of a key that share a scale and a minimum, if the format has minimums: then the sum of a query
    /// over each such group is needed. Otherwise 0.
    const SUMMED_GROUP: usize;

    /// Returns a buffer's elements.
    fn units(buf: &HostBuf) -> &[Self::Unit];
    /// Returns a buffer's elements for writing.
    fn units_mut(buf: &mut HostBuf) -> &mut [Self::Unit];

    /// Returns the units of a block of keys of `k_dim` numbers.
    fn k_len(k_dim: usize) -> usize;
    /// Returns the units of a block of values of `v_dim` numbers.
    fn v_len(v_dim: usize) -> usize;

    /// Returns the number of bytes that begin a block of values and are for all of its positions, and
    /// that of each position after them, in order.
    fn v_parts(v_dim: usize) -> (usize, usize);

    /// Writes a key (k_dim) to position `at` of a block.
    fn write_key(key: &[f32], at: usize, block: &mut [Self::Unit]);
    /// Writes a value (v_dim) to position `at` of a block.
    fn write_value(value: &[f32], at: usize, block: &mut [Self::Unit]);
    /// Reads the first numbers of the value at position `at` of a block of values of `width` numbers.
    fn read_value(block: &[Self::Unit], at: usize, width: usize, out: &mut [f32]);

    /// Returns the dot products of T query vectors (k_dim), whose sums over groups are given, with the 32
    /// keys of a block.
    fn scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        sums: [&[f32]; T],
        k: &[Self::Unit],
    ) -> [[S::V; 2]; T];

    /// Returns the dot products as [`KvFormat::scores`] does, with the 32 keys of a block that is stored like
    /// one of values of `k_dim` numbers.
    fn row_scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        sums: [&[f32]; T],
        k: &[Self::Unit],
    ) -> [[S::V; 2]; T];

    /// Adds p (T, visible positions of 32) · v (visible positions of 32) to sums (T, v_dim padded to 16). Of
    /// each value, `width` numbers are stored; those from v_dim on have no effect on the first v_dim sums.
    fn add_values<S: Simd, const T: usize>(
        simd: S,
        seen: VisibleRange,
        p: &[[f32; BLOCK]; T],
        v: (&[Self::Unit], usize),
        sums: &mut [f32],
    );
}
