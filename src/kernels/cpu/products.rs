//! Products with weights, however these are stored.
//!
//! Invariant: a weight's format and the device's [`Inputs`] decide how it is stored and multiplied, nothing else.

use super::halves::{self, Dots, HalvesScratch};
use super::matmul::{MatmulScratch, matmul};
use super::packed::{self, PackedScratch};
use super::pool::Pool;
use super::simd::Level;
use crate::backend::{DeviceError, Weight};
use crate::host::HostBuf;
use crate::quant::{Inputs, Operand, QuantType};

/// The widest weights, by what their products need room for: columns.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Widths {
    /// Of those whose inputs stay F32.
    pub plain: usize,
    /// Of those among them that are written out.
    pub written: usize,
    /// Of those that are packed, as codes and as BF16.
    pub packed: usize,
    pub halves: usize,
}

impl Widths {
    /// Of one weight of `ty` with `inp` columns.
    pub fn of(inputs: Inputs, ty: QuantType, inp: usize) -> Widths {
        let none = Widths::default();
        match (ty.operand(inputs), ty.is_blocked()) {
            (Operand::Codes, _) => Widths { packed: inp, ..none },
            (Operand::Bf16, _) => Widths { halves: inp, ..none },
            (Operand::F32, false) => Widths { plain: inp, ..none },
            (Operand::F32, true) => Widths { plain: inp, written: inp, ..none },
        }
    }

    /// Enough for both.
    pub fn max(self, other: Widths) -> Widths {
        Widths {
            plain: self.plain.max(other.plain),
            written: self.written.max(other.written),
            packed: self.packed.max(other.packed),
            halves: self.halves.max(other.halves),
        }
    }
}

/// What products need beside their operands.
pub struct Products {
    inputs: Inputs,
    plain: MatmulScratch,
    packed: PackedScratch,
    halves: HalvesScratch,
    dots: Option<Dots>,
}

impl Products {
    /// Room for `rows` rows on `threads` threads.
    pub fn new(
        (inputs, dots): (Inputs, Option<Dots>),
        rows: usize,
        widths: Widths,
        threads: usize,
    ) -> Result<Products, DeviceError> {
        Ok(Products {
            inputs,
            dots,
            plain: MatmulScratch::new(rows, widths.plain, widths.written, threads)?,
            packed: PackedScratch::new(rows, widths.packed, threads)?,
            halves: HalvesScratch::new(rows, widths.halves, threads)?,
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
        match w.ty.operand(self.inputs) {
            Operand::F32 => matmul(pool, level, &mut self.plain, w, bias, x, y),
            Operand::Codes => packed::matmul(pool, level, &mut self.packed, w, bias, (x, y)),
            Operand::Bf16 => {
                let dots = self.dots.expect("a device without them takes F32; this is a bug");
                halves::matmul(pool, dots, &mut self.halves, w, bias, (x, y));
            }
        }
    }
}
