//! The choice of a storage format at run time.
//!
//! Invariant: every type of [`QuantType::kv_cache_types`] has a [`KvFormat`].

use super::float_blocks::FloatBlocks;
use super::group_formats::{Q4Groups, Q8Groups};
use super::kv_format::KvFormat;
use super::quantized_blocks::QuantizedBlocks;
use crate::cpu::simd::{Bf16, F16, F32};
use crate::quant::QuantType;

/// An operation that is generic over the [`KvFormat`], which is known only at run time.
pub trait KvFormatOp {
    type Out;
    /// Runs the operation with one format.
    fn run<C: KvFormat>(self) -> Self::Out;
}

/// Calls `op` with the [`KvFormat`] for `ty`, which must be one of [`QuantType::kv_cache_types`].
pub fn dispatch_kv_format<O: KvFormatOp>(ty: QuantType, op: O) -> O::Out {
    match ty {
        QuantType::F32 => op.run::<FloatBlocks<F32>>(),
        QuantType::F16 => op.run::<FloatBlocks<F16>>(),
        QuantType::BF16 => op.run::<FloatBlocks<Bf16>>(),
        QuantType::Q8_0 => op.run::<QuantizedBlocks<Q8Groups>>(),
        QuantType::G4_B64 => op.run::<QuantizedBlocks<Q4Groups>>(),
        _ => unreachable!("{ty} is not a KV cache format; this is a bug"),
    }
}
