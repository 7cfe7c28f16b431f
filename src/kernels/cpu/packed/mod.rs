//! Quantized weights, packed for int8 dot products.
//!
//! Sixteen outputs form a panel. For each quantized block of a panel's rows, the quants are one run of bytes,
//! in which four neighbouring quants of an output follow those of the previous output, as byte dot products
//! need them. The scales, minimums and other fields are another run of bytes, with the same field of the
//! sixteen outputs side by side. A weight holds the quants of all panels, then the scales of all panels, so
//! that quants begin at cache lines. Outputs beyond the last are zero.
//!
//! In reading order: `quants` and `scales` (layouts), `formats` (the packed formats), `store` (packing and
//! unpacking), `input` (the other operand), `prefetch`, `kernel` (one tile), `amx_kernel` (one tile with
//! AMX), `panel_group` (several panels), `gemm` (all of them).
//! Invariant: packed weights take exactly the bytes of the blocks, and unpack to them byte for byte.

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
mod amx_kernel;
mod formats;
mod gemm;
mod input;
mod kernel;
mod panel_group;
mod prefetch;
mod quants;
mod scales;
mod store;

pub use gemm::Int8Scratch;
pub use store::{pack, packed_bytes, read};

/// Name of the arrangement, for stored weights.
pub const ARRANGEMENT: &str = "int8-panels-16";
/// Version of the arrangement, which increases with every change of the packed bytes.
pub const VERSION: u32 = 1;

/// Outputs of a panel.
const PANEL_OUTPUTS: usize = super::simd::LANES;
