//! F16 weights, multiplied as pairs of BF16 by AMX, which has no products of F16.
//!
//! A number is the sum of a BF16 and of the BF16 nearest to the rest. That is exact for an F16 weight, and
//! within 2^-16 for an F32 input. Of the four products of two pairs, that of the two rests is at
//! most 2^-16 of the whole and is left out. So products are within 2^-15; with inputs that are rounded to
//! F16, as other programs do, they would be within 2^-11.
//!
//! Weights lie in memory as F16, and are split a slice at a time for tiles of AMX. A single row is multiplied
//! by AVX-512 in the order of AMX, because weights would arrive faster than they are split for tiles.
//!
//! In reading order: `store` (packing and unpacking), `split` (numbers to pairs), `input` (the other
//! operand), `one_row`, `gemm`. Invariant: the sums of an element run over its columns in one order, whatever
//! the number of rows and panels processed together.

#![allow(unsafe_code)]
// Only x86-64 has AMX.
#![cfg_attr(not(target_arch = "x86_64"), allow(unused))]

mod gemm;
mod input;
mod one_row;
mod split;
mod store;

pub use gemm::PairScratch;
pub use store::{pack, read};

/// Name of the arrangement, for stored weights.
pub const ARRANGEMENT: &str = "f16-panels-16x32";
/// Version of the arrangement, which increases with every change of the packed bytes.
pub const VERSION: u32 = 1;
