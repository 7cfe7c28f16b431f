//! Lowering of `mov`, with vectors that are packed and unpacked (PTX ISA, 9.7.9.3 and 9.7.9.4).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{Clock, Op, Source, Target, Width};
use crate::arith::{half, narrow};
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// Lowers `mov`.
    pub(super) fn mov(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let ty = form.ty()?;
        let [destination, source] = self.exactly(operands)?;
        match (destination, source) {
            (Operand::Vector(parts), whole) => self.unpack(ty, parts, whole),
            (whole, Operand::Vector(parts)) => self.pack(ty, whole, parts),
            _ if ty == Type::Pred => self.mov_predicate(destination, source),
            (_, Operand::Word(name)) if clock(name).is_some() => {
                let d = self.target(destination)?;
                let clock = clock(name).unwrap_or(Clock::Cycles);
                self.emit(Op::ReadClock { d, clock });
                Ok(())
            }
            _ => {
                let s = self.source(source, ty)?;
                let Some(d) = self.maybe_target(destination)? else { return Ok(()) };
                self.copy(d, s);
                Ok(())
            }
        }
    }

    /// Copies a value to a register, extended with zeros if that is wider.
    pub(super) fn copy(&mut self, d: Target, s: Source) {
        let planes = if d.width == Width::W64 { 2 } else { 1 };
        if planes == 2 && !s.wide {
            self.emit(Op::Copy { d: d.plane, s: s.plane, planes: 1 });
            self.emit(Op::Copy { d: d.plane + 1, s: self.zero().plane, planes: 1 });
        } else {
            self.emit(Op::Copy { d: d.plane, s: s.plane, planes });
        }
    }

    fn mov_predicate(&mut self, destination: &Operand, source: &Operand) -> Result<()> {
        let d = self.predicate(destination)?.index;
        if let Operand::Int(value) = source {
            self.emit(Op::SetPredicate { d, value: *value != 0 });
            return Ok(());
        }
        let a = self.predicate(source)?;
        self.emit(Op::Logic { f: |a, _| a, d, a, b: a });
        Ok(())
    }

    fn unpack(&mut self, ty: Type, parts: &[Operand], whole: &Operand) -> Result<()> {
        let s = self.source(whole, ty)?;
        let elements = parts.len() as u32;
        let bits = ty.bytes() * 8 / elements.max(1);
        // A part may be the register that is unpacked.
        let copy = self.scope.scratch(2);
        self.emit(Op::Copy { d: copy, s: s.plane, planes: if s.wide { 2 } else { 1 } });
        for (at, part) in parts.iter().enumerate() {
            let Some(d) = self.maybe_target(part)? else { continue };
            let first_bit = at as u32 * bits;
            let plane = copy + first_bit / 32;
            match (bits, first_bit % 32) {
                (32, _) => self.copy(d, Source { plane, wide: false }),
                (16, shift) => {
                    let f = half::half_of_pair(shift != 0);
                    let zero = self.zero().plane;
                    self.emit(Op::Narrow { f, d: d.plane, s: [plane, zero, zero, zero] });
                }
                (8, _) => {
                    let f = narrow!(|a, b| a >> b & 0xff);
                    let (zero, shift) = (self.zero().plane, self.constant(u64::from(first_bit % 32), false));
                    self.emit(Op::Narrow { f, d: d.plane, s: [plane, shift.plane, zero, zero] });
                }
                _ => return Err(self.error("a vector of that many elements is unknown")),
            }
        }
        Ok(())
    }

    fn pack(&mut self, ty: Type, whole: &Operand, parts: &[Operand]) -> Result<()> {
        let d = self.target(whole)?;
        let zero = self.zero().plane;
        let element = match ty.bytes() * 8 / (parts.len() as u32).max(1) {
            32 => Type::B32,
            16 => Type::B16,
            8 => Type::B8,
            _ => return Err(self.error("a vector of that many elements is unknown")),
        };
        let sources: Vec<u32> =
            parts.iter().map(|part| Ok(self.source(part, element)?.plane)).collect::<Result<_>>()?;
        // The result may be one of the parts.
        let out = self.scope.scratch(2);
        let per_plane = 4 / element.bytes() as usize;
        for (at, group) in sources.chunks(per_plane).enumerate() {
            let d = out + at as u32;
            match *group {
                [a] => self.emit(Op::Copy { d, s: a, planes: 1 }),
                [a, b] => {
                    let f = narrow!(|a, b| (a & 0xffff) | b << 16);
                    self.emit(Op::Narrow { f, d, s: [a, b, zero, zero] });
                }
                [a, b, c, e] => {
                    let f = narrow!(|a, b, c, d| (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | d << 24);
                    self.emit(Op::Narrow { f, d, s: [a, b, c, e] });
                }
                _ => return Err(self.error("a vector of that many elements is unknown")),
            }
        }
        self.copy(d, Source { plane: out, wide: ty.bytes() == 8 });
        Ok(())
    }
}

fn clock(name: &str) -> Option<Clock> {
    match name {
        "%clock" | "%clock64" | "%clock_hi" => Some(Clock::Cycles),
        "%globaltimer" | "%globaltimer_lo" | "%globaltimer_hi" => Some(Clock::Nanoseconds),
        _ => None,
    }
}
