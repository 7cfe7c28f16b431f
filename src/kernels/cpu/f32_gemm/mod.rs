//! F32 GEMM: x · wᵀ, for x (m, k) in F32 and w (n, k) in any number format.
//!
//! Each output element is one sum in 16 lanes: lane i adds the products of columns i, i + 16, i + 32, ... in
//! this order, each with a fused multiply-add; then the lanes are added as `Simd::sum` does. Columns beyond
//! the last are zero. Everything else is loop order and data layout, and departs from a plain loop for these
//! reasons:
//!
//! 1. x is packed in tiles of R rows; within a tile, 16 columns of one row are followed by 16 of the next. A
//!    tile is read contiguously, whatever the stride of its rows, and needs no special case at its end.
//! 2. For few rows, the weights stream from memory into the multiply-adds, several outputs at a time, so that
//!    there are enough independent sums and enough open memory streams. A second tile finds the weights in
//!    the cache, and converting them again costs less than storing them converted.
//! 3. For more rows, an F32 panel of outputs is converted to F32 once, packed like x, and kept in the
//!    second-level cache while all tiles of x are multiplied with it. R x O sums stay in registers.
//! 4. If SIMD loads cannot decode a format, a range of outputs is first dequantized to F32, row by row.
//! 5. The columns are split into slices such that one tile of x and O rows of the panel fit the first-level
//!    cache. Sums of a later slice continue from those of the earlier ones, so the slices do not change the
//!    result.
//!
//! In reading order: `input` (x, and the scratch of each thread), `weight_slice` (the weights of a work
//! item), `tile_product` (the products of one step), `stream` (few rows), `panel` (more rows), `gemm` (work
//! items).
//! Invariant: R, O, the panels and the slices decide only when a product is added, never in which order.

#![allow(unsafe_code)]

mod gemm;
mod input;
mod panel;
mod stream;
mod tile_product;
mod weight_slice;

pub use input::F32Scratch;
