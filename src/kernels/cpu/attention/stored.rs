//! How numbers are stored in a cache, and how attention reads them: one implementation for those that stand alone, one for
//! groups.
//!
//! Invariant: nothing is widened but in registers, within a pass over a block.

use super::cache::BLOCK;
use super::grouped::{Bytes, Grouped, HalfBytes};
use super::plain::Plain;
use super::query::Seen;
use crate::cpu::simd::{Bf16, F16, F32, Simd};
use crate::host::HostBuf;
use crate::quant::QuantType;

/// A way of storing blocks: the keys, or the values, of 32 positions of one KV head.
pub trait Stored: Send + Sync + 'static {
    /// What a buffer is made of.
    type Unit: Copy + Send + Sync + 'static;
    /// Numbers of a key that share a scale and a least number, where there are any: a query's sum over each of these groups is
    /// needed. 0 where there are none.
    const SUMMED: usize;

    fn of(buf: &HostBuf) -> &[Self::Unit];
    fn of_mut(buf: &mut HostBuf) -> &mut [Self::Unit];

    /// Units of a block of keys of `k_dim` numbers.
    fn k_len(k_dim: usize) -> usize;
    /// Units of a block of values of `v_dim` numbers.
    fn v_len(v_dim: usize) -> usize;

    /// Writes a key (k_dim) to position `at` of a block.
    fn put_key(key: &[f32], at: usize, block: &mut [Self::Unit]);
    /// Writes a value (v_dim) to position `at` of a block.
    fn put_value(value: &[f32], at: usize, block: &mut [Self::Unit]);
    /// Reads the value (v_dim) at position `at` of a block.
    fn value(block: &[Self::Unit], at: usize, out: &mut [f32]);

    /// The products of T query vectors (k_dim), whose sums over groups are given, with the 32 keys of a block.
    fn scores<S: Simd, const T: usize>(
        simd: S,
        q: [&[f32]; T],
        sums: [&[f32]; T],
        k: &[Self::Unit],
    ) -> [[S::V; 2]; T];

    /// sums (T, v_dim padded to 16) += p (T, those seen of 32) · v (those seen of 32).
    fn add_values<S: Simd, const T: usize>(
        simd: S,
        seen: Seen,
        p: &[[f32; BLOCK]; T],
        v: &[Self::Unit],
        sums: &mut [f32],
    );
}

/// Something to be done for the way of storing that belongs to a type known at run time.
pub trait ForStored {
    type Out;
    fn run<C: Stored>(self) -> Self::Out;
}

/// Calls `op` with how `ty` is stored, which is one of [`QuantType::cached`].
pub fn with_stored<O: ForStored>(ty: QuantType, op: O) -> O::Out {
    match ty {
        QuantType::F32 => op.run::<Plain<F32>>(),
        QuantType::F16 => op.run::<Plain<F16>>(),
        QuantType::BF16 => op.run::<Plain<Bf16>>(),
        QuantType::Q8_0 => op.run::<Grouped<Bytes>>(),
        QuantType::G4_B64 => op.run::<Grouped<HalfBytes>>(),
        _ => unreachable!("no cache of {ty} is made; this is a bug"),
    }
}
