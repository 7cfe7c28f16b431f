//! Products with weights, however these are stored.
//!
//! Invariant: a weight's format and the device's [`Inputs`] decide how it is stored and multiplied, nothing else.

use super::matmul::{MatmulScratch, matmul};
use super::packed::{self, PackedScratch};
use super::pool::Pool;
use super::simd::{Level, is_direct};
use crate::backend::{DeviceError, Weight};
use crate::host::HostBuf;
use crate::quant::{Inputs, QuantType};

/// The widest weights, by what their products need room for: columns.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Widths {
    /// Of those whose inputs stay F32.
    pub plain: usize,
    /// Of those among them that are written out.
    pub written: usize,
    /// Of those that are packed.
    pub packed: usize,
}

impl Widths {
    /// Of one weight of `ty` with `inp` columns.
    pub fn of(inputs: Inputs, ty: QuantType, inp: usize) -> Widths {
        match (ty.takes_codes(inputs), is_direct(ty)) {
            (true, _) => Widths { packed: inp, ..Widths::default() },
            (_, true) => Widths { plain: inp, ..Widths::default() },
            (_, false) => Widths { plain: inp, written: inp, packed: 0 },
        }
    }

    /// Enough for both.
    pub fn max(self, other: Widths) -> Widths {
        Widths {
            plain: self.plain.max(other.plain),
            written: self.written.max(other.written),
            packed: self.packed.max(other.packed),
        }
    }
}

/// What products need beside their operands.
pub struct Products {
    inputs: Inputs,
    plain: MatmulScratch,
    packed: PackedScratch,
}

impl Products {
    /// Room for `rows` rows on `threads` threads.
    pub fn new(inputs: Inputs, rows: usize, widths: Widths, threads: usize) -> Result<Products, DeviceError> {
        Ok(Products {
            inputs,
            plain: MatmulScratch::new(rows, widths.plain, widths.written, threads)?,
            packed: PackedScratch::new(rows, widths.packed, threads)?,
        })
    }

    /// y (rows, out) = x (rows, inp) · wᵀ, + bias if given.
    pub fn matmul(
        &mut self,
        pool: &mut Pool,
        level: Level,
        w: &Weight<HostBuf>,
        bias: Option<&[f32]>,
        (x, y): (&[f32], &mut [f32]),
    ) {
        match w.ty.takes_codes(self.inputs) {
            true => packed::matmul(pool, level, &mut self.packed, w, bias, (x, y)),
            false => matmul(pool, level, &mut self.plain, w, bias, x, y),
        }
    }
}
