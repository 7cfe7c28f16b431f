//! BF16 weights, packed for dot products of BF16 pairs.
//!
//! Sixteen outputs form a panel, and 32 columns of a panel form a block. In a block, two neighbouring numbers
//! of an output follow those of the previous output, and there are 16 such rows: the layout that AMX loads as
//! a tile, and AVX-512 as 16 vectors. Outputs and columns beyond the last are zero. Inputs become BF16 too,
//! rounded to nearest even; products are exact, and are summed in F32.
//!
//! In reading order: `store` (packing and unpacking), `input` (the other operand), `kernel` (some rows with
//! some panels), `gemm`.
//! Invariant: the sums of an element run over its columns in one order, whatever the number of rows and
//! panels processed together. The order is that of the instruction, so AMX and AVX-512 give different bits.

#![allow(unsafe_code)]
// Only x86-64 has BF16 instructions here.
#![cfg_attr(not(target_arch = "x86_64"), allow(unused))]

mod gemm;
mod input;
mod kernel;
mod store;

pub use gemm::Bf16Scratch;
pub use kernel::Bf16Isa;
pub use store::{pack, packed_bytes, panel_bytes, read};

use super::simd::LANES;

/// Name of the arrangement, for stored weights.
pub const ARRANGEMENT: &str = "bf16-panels-16x32";
/// Version of the arrangement, which increases with every change of the packed bytes.
pub const VERSION: u32 = 1;

/// Outputs of a panel.
pub const PANEL_OUTPUTS: usize = LANES;
/// Columns of a block.
pub const BLOCK: usize = 32;
/// Bytes of one row's block, of an input or an output.
pub const BLOCK_BYTES: usize = 2 * BLOCK;
/// Bytes of a panel's block.
pub const PANEL_BLOCK_BYTES: usize = PANEL_OUTPUTS * BLOCK_BYTES;
