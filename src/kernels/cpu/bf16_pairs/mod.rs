//! F16 weights, multiplied as pairs of BF16 by AMX, which has no products of F16.
//!
//! A number is the sum of the BF16 nearest to it and of the BF16 nearest to the rest. That is exact for an F16
//! weight, and within 2^-16 for an F32 input. Of the four products of two pairs, that of the two rests is at
//! most 2^-16 of the whole and is left out. So products are within 2^-15; with inputs that are rounded to F16,
//! as other programs do, they would be within 2^-11.
//!
//! Weights lie in memory as F16, in the panels of [`super::bf16`], and are split a slice at a time.
//!
//! In reading order: `split` (numbers to pairs), `input` (the other operand), `gemm`.
//! Invariant: the sums of an element run over its columns in one order, whatever the number of rows and
//! panels processed together.

#![allow(unsafe_code)]
// Only x86-64 has AMX.
#![cfg_attr(not(target_arch = "x86_64"), allow(unused))]

mod gemm;
mod input;
mod split;

pub use gemm::PairScratch;

/// Name of the arrangement, for stored weights.
pub const ARRANGEMENT: &str = "f16-panels-16x32";
/// Version of the arrangement, which increases with every change of the packed bytes.
pub const VERSION: u32 = 1;
