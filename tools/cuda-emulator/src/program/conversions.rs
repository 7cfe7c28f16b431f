//! Lowering of `cvt`, `cvta` and `isspacep` (PTX ISA, 9.7.9).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{Op, Width};
use super::{LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW};
use crate::arith::convert::{self, Integral};
use crate::arith::rounding::Rounding;
use crate::arith::{WideFn, wide};
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// Lowers an instruction of this file; tells whether it is one.
    pub(super) fn conversion(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        match form.base {
            "cvt" => self.cvt(form, operands)?,
            "cvta" => self.cvta(form, operands)?,
            "isspacep" => {
                let window = match form.next() {
                    Some("global") => None,
                    Some("shared" | "shared::cta" | "shared::cluster") => Some(SHARED_WINDOW),
                    Some("local") => Some(LOCAL_WINDOW),
                    Some("param" | "param::entry") => Some(PARAM_WINDOW),
                    _ => return Err(form.unknown()),
                };
                let [d, a] = self.exactly(operands)?;
                let (d, a) = (self.predicate(d)?.index, self.source(a, Type::U64)?);
                self.emit(Op::IsSpace { d, a, window });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn cvt(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let rounding = form.rounding();
        let integral = form.one_of(&["rni", "rzi", "rmi", "rpi"]);
        let (ftz, sat) = (form.has("ftz"), form.has("sat"));
        let (satfinite, relu) = (form.has("satfinite"), form.has("relu"));
        let (to, from) = (form.ty()?, form.ty()?);
        let names = [
            rounding.map(name_of),
            integral,
            ftz.then_some("ftz"),
            sat.then_some("sat"),
            satfinite.then_some("satfinite"),
            relu.then_some("relu"),
        ];
        let modifiers = names.into_iter().flatten().collect::<Vec<_>>().join(".");
        if let Some(f) = convert::pairs(to, from, &modifiers) {
            return self.narrow(f, operands, &vec![from; operands.len().saturating_sub(1)]);
        }
        let narrow_target = matches!(operands, [d, _] if self.target(d)?.width != Width::W64);
        if narrow_target && let Some(f) = convert::narrow_form(to, from, &modifiers) {
            return self.narrow(f, operands, &[from]);
        }
        if satfinite || relu {
            return Err(form.unknown());
        }
        let integral = integral.and_then(Integral::named);
        let f = wide_form(to, from, rounding, integral, ftz, sat).ok_or_else(|| form.unknown())?;
        self.wide(f, operands, &[from])
    }

    fn cvta(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let back = form.has("to");
        let window = match form.next() {
            Some("global" | "const") => 0,
            Some("shared" | "shared::cta" | "shared::cluster") => SHARED_WINDOW,
            Some("local") => LOCAL_WINDOW,
            Some("param" | "param::entry") => PARAM_WINDOW,
            _ => return Err(form.unknown()),
        };
        let ty = form.ty()?;
        if ty.bytes() != 8 {
            return Err(form.unknown());
        }
        let [d, a] = self.exactly(operands)?;
        let (a, d) = (self.source(a, ty)?, self.target(d)?);
        if window == 0 {
            self.copy(d, a);
            return Ok(());
        }
        let f = if back { wide!(|a, b| a.wrapping_sub(b)) } else { wide!(|a, b| a.wrapping_add(b)) };
        let (window, zero) = (self.constant(window, true), self.zero());
        self.emit(Op::Wide { f, d, s: [a, window, zero, zero] });
        Ok(())
    }
}

fn name_of(rounding: Rounding) -> &'static str {
    match rounding {
        Rounding::Nearest => "rn",
        Rounding::Zero => "rz",
        Rounding::Down => "rm",
        Rounding::Up => "rp",
        Rounding::NearestAway => "rna",
    }
}

fn wide_form(
    to: Type,
    from: Type,
    rounding: Option<Rounding>,
    integral: Option<Integral>,
    ftz: bool,
    sat: bool,
) -> Option<WideFn> {
    match (to.integer(), from.integer()) {
        (true, true) if rounding.is_none() && integral.is_none() && !ftz => {
            convert::between_integers(to, from, sat)
        }
        (true, false) if rounding.is_none() => convert::to_integer(to, from, integral?, ftz),
        (false, true) if integral.is_none() && !ftz => convert::from_integer(to, from, rounding?, sat),
        (false, false) => {
            let rounding = rounding.unwrap_or(Rounding::Nearest);
            convert::between_floats(to, from, rounding, integral, ftz, sat)
        }
        _ => None,
    }
}
