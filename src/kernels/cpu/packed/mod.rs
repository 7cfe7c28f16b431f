//! Coded weights, packed for products of codes.
//!
//! Sixteen outs lie together, a strip. Of each block of a strip's rows the codes are one run of bytes, in which four
//! neighbouring codes of an out follow those of the out before it, as dot products of bytes want them; scales, bases and what
//! else is no code are another, the same field of sixteen outs side by side. First come the codes of all strips, then all
//! fields, so that codes begin where cache lines do. Outs beyond the last are zero.
//!
//! In reading order: `codes` and `fields` (how these lie), `formats` (which format is which), `store` (there and back),
//! `input` (the other operand), `ahead` (what is asked for early), `product` (one tile), `tiles` (the same by AMX), `panel`
//! (several), `matmul` (all of them).
//! Invariant: packed weights take the bytes of the blocks, and give them back one for one.

#![allow(unsafe_code)]

mod ahead;
mod codes;
mod fields;
mod formats;
mod input;
mod matmul;
mod panel;
mod product;
mod store;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use matmul::PackedScratch;
pub use store::{pack, packed_bytes, read};

/// Outs of a strip.
const STRIP: usize = super::simd::LANES;
