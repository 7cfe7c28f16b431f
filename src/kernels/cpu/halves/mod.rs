//! BF16 weights, packed for products of BF16 pairs.
//!
//! Sixteen outs lie together, a strip; of 32 columns of a strip, a block, two neighbouring numbers of an out follow those of the
//! out before it, 16 such rows one after another: what AMX takes as a tile, and AVX-512 as 16 vectors. Outs and columns
//! beyond the last are zero. Inputs become BF16 too, rounded to nearest, halves to even; products are exact, and summed in F32.
//!
//! In reading order: `store` (there and back), `input` (the other operand), `product` (some rows with some strips), `matmul`.
//! Invariant: an element's sums run over its columns in one order, whatever the number of rows and strips at hand. The order
//! is the instruction's own, so AMX and AVX-512 give other bits.

#![allow(unsafe_code)]
// No other CPU has what multiplies them.
#![cfg_attr(not(target_arch = "x86_64"), allow(unused))]

mod input;
mod matmul;
mod product;
mod store;

pub use matmul::HalvesScratch;
pub use product::Dots;
pub use store::{pack, packed_bytes, read};

use super::simd::LANES;

/// Outs of a strip.
const STRIP: usize = LANES;
/// Columns of a block.
const BLOCK: usize = 32;
/// Bytes of a row's block, of an input or an out.
const BLOCK_BYTES: usize = 2 * BLOCK;
/// Bytes of a strip's block.
const STRIP_BYTES: usize = STRIP * BLOCK_BYTES;
