//! Lowering of arithmetic, comparisons, selection and logic (PTX ISA, 9.7.1 to 9.7.8).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{CarryFn, Combine, Op, Predicate, TestOutput, Width};
use super::scope::Name;
use crate::arith::half::Kind;
use crate::arith::rounding::Rounding;
use crate::arith::{NarrowFn, WideFn, approx, double, half, int, long, narrow, single};
use crate::ptx::{Operand, Type};

/// Modifiers of floating-point arithmetic.
struct Modifiers {
    rounding: Option<Rounding>,
    ftz: bool,
    sat: bool,
    relu: bool,
    nan: bool,
    xorsign: bool,
    approx: bool,
    full: bool,
}

impl Lowering<'_> {
    /// Lowers an instruction of this file; tells whether it is one.
    pub(super) fn alu(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        match form.base {
            "add" | "sub" | "mul" | "mad" | "fma" | "div" | "rem" | "min" | "max" | "abs" | "neg" | "sad"
            | "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "copysign" | "mul24"
            | "mad24" => {
                if form.has("cc") {
                    self.carry(form, operands, false, true)?;
                } else {
                    self.arithmetic(form, operands)?;
                }
            }
            "addc" | "subc" | "madc" => {
                let write = form.has("cc");
                self.carry(form, operands, true, write)?;
            }
            "and" | "or" | "xor" | "not" | "cnot" | "shl" | "shr" | "popc" | "clz" | "brev" | "bfind"
            | "bfe" | "bfi" | "bmsk" | "szext" | "fns" | "lop3" | "shf" | "prmt" => {
                self.bits(form, operands)?
            }
            "dp4a" | "dp2a" => self.dot(form, operands)?,
            "setp" => self.setp(form, operands)?,
            "set" => self.set(form, operands)?,
            "testp" => self.testp(form, operands)?,
            "selp" => self.selp(form, operands)?,
            "slct" => self.slct(form, operands)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Emits a narrow function over the sources behind the destination.
    pub(super) fn narrow(&mut self, f: NarrowFn, operands: &[Operand], types: &[Type]) -> Result<()> {
        let [destination, rest @ ..] = operands else { return Err(self.error("no operands")) };
        if rest.len() != types.len() {
            return Err(self.error(format!("{} sources; there must be {}", rest.len(), types.len())));
        }
        let mut s = [self.zero().plane; 4];
        for (at, (operand, ty)) in rest.iter().zip(types).enumerate() {
            let source = self.source(operand, *ty)?;
            if source.wide {
                return Err(self.error("a source has 64 bits; it must have 32 or 16"));
            }
            s[at] = source.plane;
        }
        let Some(target) = self.maybe_target(destination)? else { return Ok(()) };
        if target.width == Width::W64 {
            return Err(self.error("the destination has 64 bits; it must have 32 or 16"));
        }
        self.emit(Op::Narrow { f, d: target.plane, s });
        Ok(())
    }

    /// Emits a wide function over the sources behind the destination.
    pub(super) fn wide(&mut self, f: WideFn, operands: &[Operand], types: &[Type]) -> Result<()> {
        let [destination, rest @ ..] = operands else { return Err(self.error("no operands")) };
        if rest.len() != types.len() {
            return Err(self.error(format!("{} sources; there must be {}", rest.len(), types.len())));
        }
        let mut s = [self.zero(); 4];
        for (at, (operand, ty)) in rest.iter().zip(types).enumerate() {
            s[at] = self.source(operand, *ty)?;
        }
        let Some(d) = self.maybe_target(destination)? else { return Ok(()) };
        self.emit(Op::Wide { f, d, s });
        Ok(())
    }

    fn arithmetic(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let xorsign = form.has("xorsign") && form.has("abs");
        let m = Modifiers {
            rounding: form.rounding(),
            ftz: form.has("ftz"),
            sat: form.has("sat"),
            relu: form.has("relu"),
            nan: form.has("NaN"),
            xorsign,
            approx: form.has("approx"),
            full: form.has("full"),
        };
        let half = form.one_of(&["lo", "hi", "wide"]);
        let ty = form.ty()?;
        let sources = vec![ty; operands.len().saturating_sub(1)];
        match ty {
            Type::F32 => {
                let f = single_form(form.base, &m).ok_or_else(|| form.unknown())?;
                self.narrow(f, operands, &sources)
            }
            Type::F64 => {
                let f = double_form(form.base, &m).ok_or_else(|| form.unknown())?;
                self.wide(f, operands, &sources)
            }
            Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2 => {
                let f = half_form(form.base, ty, &m).ok_or_else(|| form.unknown())?;
                self.narrow(f, operands, &sources)
            }
            _ if m.rounding.is_some() || m.ftz || m.relu || m.nan || m.xorsign || m.approx || m.full => {
                Err(form.unknown())
            }
            _ => {
                let op = [Some(form.base), half, m.sat.then_some("sat")];
                let op: Vec<&str> = op.into_iter().flatten().collect();
                self.integer(form, &op.join("."), ty, operands)
            }
        }
    }

    fn integer(&mut self, form: &Form, op: &str, ty: Type, operands: &[Operand]) -> Result<()> {
        let mut sources = vec![ty; operands.len().saturating_sub(1)];
        if op == "mad.wide"
            && let Some(last) = sources.last_mut()
        {
            *last = if ty.bytes() == 2 { Type::U32 } else { Type::U64 };
        }
        if ty.bytes() == 8 || (ty.bytes() == 4 && op.ends_with(".wide")) {
            let f = long::arithmetic(op, ty.signed()).ok_or_else(|| form.unknown())?;
            return self.wide(f, operands, &sources);
        }
        let f = int::arithmetic(op, ty).ok_or_else(|| form.unknown())?;
        self.narrow(f, operands, &sources)
    }

    fn carry(&mut self, form: &mut Form, operands: &[Operand], read: bool, write: bool) -> Result<()> {
        let half = form.one_of(&["lo", "hi"]);
        let ty = form.ty()?;
        let f = carry_form(form.base.trim_end_matches('c'), half, ty).ok_or_else(|| form.unknown())?;
        let [destination, rest @ ..] = operands else { return Err(self.error("no operands")) };
        let mut s = [self.zero(); 3];
        if rest.len() > 3 {
            return Err(self.error("too many operands"));
        }
        for (at, operand) in rest.iter().enumerate() {
            s[at] = self.source(operand, ty)?;
        }
        let d = self.target(destination)?;
        self.emit(Op::Carry { f, d, s, read, write });
        Ok(())
    }

    fn bits(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let mode = form.one_of(&["wrap", "clamp"]);
        let more = form.one_of(&["l", "r", "shiftamt", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"]);
        let ty = form.ty()?;
        if ty == Type::Pred {
            return self.predicate_logic(form, operands);
        }
        if form.base == "lop3" && form.one_of(&["or", "and"]).is_some() {
            return Err(form.unknown());
        }
        let sign = if ty.signed() { "s" } else { "u" };
        let op = match (form.base, more) {
            ("shr", _) if ty.signed() => "shr.s".to_owned(),
            ("shf", Some(side)) => format!("shf.{side}.{}", mode.unwrap_or("clamp")),
            ("bfind", Some(_)) => format!("bfind.shiftamt.{sign}"),
            ("bfind" | "bfe", _) => format!("{}.{sign}", form.base),
            ("bmsk", _) => format!("bmsk.{}", mode.unwrap_or("clamp")),
            ("szext", _) => format!("szext.{}.{sign}", mode.unwrap_or("clamp")),
            (base, _) => base.to_owned(),
        };
        let mut sources = vec![ty; operands.len().saturating_sub(1)];
        // Amounts, positions and lengths have 32 bits whatever the type is.
        let first_amount = match form.base {
            "shl" | "shr" | "bfe" => 1,
            "bfi" | "shf" | "lop3" | "prmt" => 2,
            _ => sources.len(),
        };
        sources.iter_mut().skip(first_amount).for_each(|it| *it = Type::U32);
        if form.base == "prmt" {
            let f = int::permute(more.unwrap_or("")).ok_or_else(|| form.unknown())?;
            return self.narrow(f, operands, &sources);
        }
        if ty.bytes() == 8 {
            let f = long::bits(&op).ok_or_else(|| form.unknown())?;
            return self.wide(f, operands, &sources);
        }
        let f = if ty.bytes() == 2 { int::bits16(&op) } else { int::bits32(&op) };
        self.narrow(f.ok_or_else(|| form.unknown())?, operands, &sources)
    }

    fn dot(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let half = form.one_of(&["lo", "hi"]);
        let (a, b) = (form.ty()?, form.ty()?);
        let op = half.map_or(form.base.to_owned(), |half| format!("{}.{half}", form.base));
        let f = int::dot(&op, a.signed(), b.signed()).ok_or_else(|| form.unknown())?;
        self.narrow(f, operands, &[Type::U32; 3])
    }

    fn predicate_logic(&mut self, form: &Form, operands: &[Operand]) -> Result<()> {
        let f: fn(u32, u32) -> u32 = match form.base {
            "and" => |a, b| a & b,
            "or" => |a, b| a | b,
            "xor" => |a, b| a ^ b,
            "not" => |a, _| !a,
            _ => return Err(form.unknown()),
        };
        let d = self.predicate(operands.first().ok_or_else(|| form.error("has no operands"))?)?.index;
        let a = self.predicate(operands.get(1).ok_or_else(|| form.error("has one operand"))?)?;
        let b = operands.get(2).map_or(Ok(a), |operand| self.predicate(operand))?;
        self.emit(Op::Logic { f, d, a, b });
        Ok(())
    }

    fn setp(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let [destination, a, b, rest @ ..] = operands else { return Err(form.error("lacks operands")) };
        let (p, q) = match destination {
            Operand::Pair(p, q) => (self.predicate_target(p)?, self.predicate_target(q)?),
            single => (self.predicate_target(single)?, None),
        };
        let combine = self.combine(form, rest)?;
        self.test(form, a, b, TestOutput { p, q, combine })
    }

    fn combine(&mut self, form: &mut Form, rest: &[Operand]) -> Result<Option<(Combine, Predicate)>> {
        let how = match form.one_of(&["and", "or", "xor"]) {
            Some("and") => Combine::And,
            Some("or") => Combine::Or,
            Some(_) => Combine::Xor,
            None => return Ok(None),
        };
        let [operand] = rest else { return Err(form.error("has no predicate to combine with")) };
        Ok(Some((how, self.predicate(operand)?)))
    }

    fn test(&mut self, form: &mut Form, a: &Operand, b: &Operand, out: TestOutput) -> Result<()> {
        let relation = form.relation()?;
        let ftz = form.has("ftz");
        let ty = form.ty()?;
        let (a, b) = (self.source(a, ty)?, self.source(b, ty)?);
        if ty.bytes() == 8 {
            let f = if ty == Type::F64 {
                double::compare(relation)
            } else {
                long::compare(relation, ty.signed())
            };
            self.emit(Op::TestWide { f, a, b, out });
            return Ok(());
        }
        let f = match ty {
            Type::F32 => Some(single::compare(relation, ftz)),
            Type::F16 => Some(half::compare(relation, false, ftz)),
            Type::Bf16 => Some(half::compare(relation, true, false)),
            _ => int::compare(relation, ty),
        };
        let f = f.ok_or_else(|| form.unknown())?;
        self.emit(Op::Test { f, a: a.plane, b: b.plane, out });
        Ok(())
    }

    /// `set`: all ones, or 1.0, in place of a predicate.
    fn set(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let [destination, a, b, rest @ ..] = operands else { return Err(form.error("lacks operands")) };
        let combine = self.combine(form, rest)?;
        let result = form.ty()?;
        let p = self.scope.scratch_predicate();
        self.test(form, a, b, TestOutput { p: Some(p), q: None, combine })?;
        let yes = match result {
            Type::U32 | Type::S32 => u64::from(u32::MAX),
            Type::F32 => u64::from(1f32.to_bits()),
            Type::F16 => 0x3c00,
            Type::Bf16 => 0x3f80,
            Type::U16 | Type::S16 => 0xffff,
            _ => return Err(form.unknown()),
        };
        let (a, b, d) = (self.constant(yes, false), self.zero(), self.target(destination)?);
        let p = Predicate { index: p, negated: false };
        self.emit(Op::Select { d: d.plane, a, b, p, planes: 1 });
        Ok(())
    }

    fn testp(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let name = form.one_of(&["finite", "infinite", "number", "notanumber", "normal", "subnormal"]);
        let name = name.ok_or_else(|| form.error("has no property"))?;
        let ty = form.ty()?;
        let [destination, a] = self.exactly(operands)?;
        let out = TestOutput { p: self.predicate_target(destination)?, q: None, combine: None };
        let a = self.source(a, ty)?;
        if ty == Type::F64 {
            let f = double::property(name).ok_or_else(|| form.unknown())?;
            self.emit(Op::TestWide { f, a, b: a, out });
        } else {
            let f = single::property(name).ok_or_else(|| form.unknown())?;
            self.emit(Op::Test { f, a: a.plane, b: a.plane, out });
        }
        Ok(())
    }

    fn selp(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let ty = form.ty()?;
        let [destination, a, b, p] = self.exactly(operands)?;
        let (a, b) = (self.source(a, ty)?, self.source(b, ty)?);
        let (d, p) = (self.target(destination)?, self.predicate(p)?);
        let planes = if ty.bytes() == 8 { 2 } else { 1 };
        if (d.width == Width::W64) != (planes == 2) {
            return Err(form.error("has a destination of another size"));
        }
        self.emit(Op::Select { d: d.plane, a, b, p, planes });
        Ok(())
    }

    fn slct(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let ftz = form.has("ftz");
        let (ty, by) = (form.ty()?, form.ty()?);
        if ty.bytes() != 4 {
            return Err(form.unknown());
        }
        let f = match (by, ftz) {
            (Type::S32, false) => narrow!(|a, b, c| if (c as i32) >= 0 { a } else { b }),
            (Type::F32, false) => narrow!(|a, b, c| if f32::from_bits(c) >= 0.0 { a } else { b }),
            (Type::F32, true) => {
                narrow!(|a, b, c| if single::flush(f32::from_bits(c)) >= 0.0 { a } else { b })
            }
            _ => return Err(form.unknown()),
        };
        self.narrow(f, operands, &[ty, ty, by])
    }

    /// Whether an operand is a predicate register.
    pub(super) fn is_predicate(&self, operand: &Operand) -> bool {
        match operand {
            Operand::Word(name) => matches!(self.scope.find(name), Some(Name::Predicate(_))),
            Operand::Not(inner) => self.is_predicate(inner),
            _ => false,
        }
    }
}

fn single_form(op: &str, m: &Modifiers) -> Option<NarrowFn> {
    if m.relu || (m.full && op != "div") {
        return None;
    }
    match op {
        "min" | "max" if m.rounding.is_none() && !m.sat => {
            Some(single::extremum(op == "max", m.ftz, m.nan, m.xorsign))
        }
        "abs" | "neg" | "copysign" => single::sign(op, m.ftz),
        "div" if m.full => approx::function("div.full", m.ftz),
        _ if m.approx && !m.sat && m.rounding.is_none() => approx::function(op, m.ftz),
        "div" | "sqrt" | "rcp" | "fma" | "mad" => single::arithmetic(op, m.rounding?, m.ftz, m.sat),
        _ => single::arithmetic(op, m.rounding.unwrap_or(Rounding::Nearest), m.ftz, m.sat),
    }
}

fn double_form(op: &str, m: &Modifiers) -> Option<WideFn> {
    if m.sat || m.relu || m.nan || m.xorsign || m.full {
        return None;
    }
    match op {
        "rcp" if m.approx && m.ftz => double::other("rcp.approx"),
        "rsqrt" if m.approx => double::other("rsqrt.approx"),
        _ if m.approx || m.ftz => None,
        "min" | "max" | "abs" | "neg" | "copysign" => double::other(op),
        _ => double::arithmetic(op, m.rounding.unwrap_or(Rounding::Nearest)),
    }
}

fn half_form(op: &str, ty: Type, m: &Modifiers) -> Option<NarrowFn> {
    let kind = Kind {
        brain: matches!(ty, Type::Bf16 | Type::Bf16x2),
        pair: matches!(ty, Type::F16x2 | Type::Bf16x2),
    };
    if m.xorsign || m.full || !matches!(m.rounding, None | Some(Rounding::Nearest)) {
        return None;
    }
    let needs_approx = matches!(op, "ex2" | "tanh");
    if needs_approx != m.approx {
        return None;
    }
    let nan = if m.nan { ".NaN" } else { "" };
    half::arithmetic(&format!("{op}{nan}"), kind, m.ftz, m.sat, m.relu)
}

fn carry_form(op: &str, half: Option<&str>, ty: Type) -> Option<CarryFn> {
    fn add64(a: u64, b: u64, carry: bool) -> (u64, bool) {
        let (sum, first) = a.overflowing_add(b);
        let (sum, second) = sum.overflowing_add(u64::from(carry));
        (sum, first || second)
    }
    fn sub64(a: u64, b: u64, borrow: bool) -> (u64, bool) {
        let (rest, first) = a.overflowing_sub(b);
        let (rest, second) = rest.overflowing_sub(u64::from(borrow));
        (rest, first || second)
    }
    fn add32(a: u64, b: u64, carry: bool) -> (u64, bool) {
        let sum = u64::from(a as u32) + u64::from(b as u32) + u64::from(carry);
        (u64::from(sum as u32), sum >> 32 != 0)
    }
    fn high(a: u64, b: u64) -> u64 {
        ((u128::from(a) * u128::from(b)) >> 64) as u64
    }
    Some(match (op, half, ty) {
        ("add", None, Type::U64 | Type::S64 | Type::B64) => |a, b, _, c| add64(a, b, c),
        ("sub", None, Type::U64 | Type::S64 | Type::B64) => |a, b, _, c| sub64(a, b, c),
        ("add", None, Type::U32 | Type::S32 | Type::B32) => |a, b, _, c| add32(a, b, c),
        ("sub", None, Type::U32 | Type::S32 | Type::B32) => |a, b, _, c| {
            let rest = i64::from(a as u32) - i64::from(b as u32) - i64::from(c);
            (u64::from(rest as u32), rest < 0)
        },
        ("mad", Some("lo"), Type::U32 | Type::S32) => {
            |a, b, d, c| add32(u64::from((a as u32).wrapping_mul(b as u32)), d, c)
        }
        ("mad", Some("hi"), Type::U32) => {
            |a, b, d, c| add32((u64::from(a as u32) * u64::from(b as u32)) >> 32, d, c)
        }
        ("mad", Some("lo"), Type::U64 | Type::S64) => |a, b, d, c| add64(a.wrapping_mul(b), d, c),
        ("mad", Some("hi"), Type::U64) => |a, b, d, c| add64(high(a, b), d, c),
        _ => return None,
    })
}
