//! Lowering of matrix instructions (PTX ISA, 9.7.14).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{MatrixMove, Op, Place};
use crate::mma::{Element, Mma, Shape};
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// Lowers an instruction of this file; tells whether it is one.
    pub(super) fn tensor(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        match form.base {
            "ldmatrix" => {
                let (count, transposed) = matrix_form(form)?;
                let [destination, address] = self.exactly(operands)?;
                let address = self.address(address, Place::Shared)?;
                let planes = self.planes(destination, count)?;
                self.emit(Op::LoadMatrix(Box::new(MatrixMove { address, transposed, planes })));
            }
            "stmatrix" => {
                let (count, transposed) = matrix_form(form)?;
                let [address, source] = self.exactly(operands)?;
                let address = self.address(address, Place::Shared)?;
                let planes = self.planes(source, count)?;
                self.emit(Op::StoreMatrix(Box::new(MatrixMove { address, transposed, planes })));
            }
            "mma" => self.mma(form, operands)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The planes of a vector of `count` registers of 32 bits.
    fn planes(&mut self, operand: &Operand, count: usize) -> Result<Vec<u32>> {
        let elements = self.elements(operand);
        if elements.len() != count {
            return Err(self.error(format!("{} registers; there must be {count}", elements.len())));
        }
        elements.iter().map(|it| Ok(self.source(it, Type::B32)?.plane)).collect()
    }

    fn mma(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        if !form.has("sync") || !form.has("aligned") {
            return Err(form.unknown());
        }
        let shape = form.one_of(&["m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32"]);
        if !form.has("row") || !form.has("col") {
            return Err(form.unknown());
        }
        let saturate = form.has("satfinite");
        let types = [form.ty(), form.ty(), form.ty(), form.ty()];
        let [Ok(d), Ok(a), Ok(b), Ok(c)] = types else { return Err(form.unknown()) };
        let float = |accumulator| matches!(accumulator, Type::F32 | Type::F16);
        let (element, other) = match (shape, a, b) {
            (Some("m16n8k8" | "m16n8k16"), Type::F16, Type::F16) => (Element::F16, Element::F16),
            (Some("m16n8k8" | "m16n8k16"), Type::Bf16, Type::Bf16) => (Element::Bf16, Element::Bf16),
            (Some("m16n8k4" | "m16n8k8"), Type::Tf32, Type::Tf32) => (Element::Tf32, Element::Tf32),
            (Some("m16n8k16" | "m16n8k32"), Type::S8 | Type::U8, Type::S8 | Type::U8) => {
                let element = |ty| if ty == Type::S8 { Element::S8 } else { Element::U8 };
                (element(a), element(b))
            }
            _ => return Err(form.unknown()),
        };
        let integers = matches!(element, Element::S8 | Element::U8);
        let fits = if integers {
            (d, c) == (Type::S32, Type::S32)
        } else {
            float(d) && d == c && (d == Type::F32 || element == Element::F16) && !saturate
        };
        if !fits {
            return Err(form.unknown());
        }
        let k = match shape {
            Some("m16n8k4") => 4,
            Some("m16n8k8") => 8,
            Some("m16n8k16") => 16,
            _ => 32,
        };
        let shape = Shape { k, a: element, b: other, half: d == Type::F16, saturate };
        let [d, a, b, c] = self.exactly(operands)?;
        let (registers, accumulators) = (shape.a_registers(), shape.accumulators());
        let mma = Mma {
            shape,
            d: self.planes(d, accumulators)?,
            a: self.planes(a, registers)?,
            b: self.planes(b, registers / 2)?,
            c: self.planes(c, accumulators)?,
        };
        self.emit(Op::Mma(Box::new(mma)));
        Ok(())
    }
}

/// The number of matrices, and whether they are transposed.
fn matrix_form(form: &mut Form) -> Result<(usize, bool)> {
    if !form.has("sync") || !form.has("aligned") || !form.has("m8n8") {
        return Err(form.unknown());
    }
    let count = match form.one_of(&["x1", "x2", "x4"]) {
        Some("x1") => 1,
        Some("x2") => 2,
        Some(_) => 4,
        None => return Err(form.unknown()),
    };
    let transposed = form.has("trans");
    if !(form.has("shared") || form.has("shared::cta")) || form.ty()? != Type::B16 {
        return Err(form.unknown());
    }
    Ok((count, transposed))
}
