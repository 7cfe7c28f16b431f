//! Lowering of branches, calls and barriers (PTX ISA, 9.7.12 and 9.7.13).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{Barrier, BarrierKind, Call, Callee, Op, Source};
use super::scope::Name;
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// Lowers an instruction of this file; tells whether it is one.
    pub(super) fn control(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        match form.base {
            "bra" => {
                form.has("uni");
                let [Operand::Word(label)] = operands else { return Err(form.error("has no label")) };
                self.emit_branch(Op::Branch { target: 0 }, label);
            }
            "brx" => {
                form.has("uni");
                if !form.has("idx") {
                    return Err(form.unknown());
                }
                let [index, Operand::Word(list)] = operands else { return Err(form.error("has no targets")) };
                let index = self.source(index, Type::U32)?.plane;
                self.emit_branch(Op::BranchIndexed { index, targets: Box::default() }, list);
            }
            "call" => self.call(form, operands)?,
            "ret" => {
                form.has("uni");
                self.emit(Op::Return);
            }
            "exit" => self.emit(Op::Exit),
            "trap" => self.emit(Op::Trap),
            "brkpt" | "nanosleep" | "pmevent" | "griddepcontrol" | "setmaxnreg" => {
                if form.base == "setmaxnreg" {
                    return Err(form.unknown());
                }
                form.drop_prefix("");
                self.emit(Op::Nop);
            }
            "bar" | "barrier" => self.barrier(form, operands)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// The frame's variables that stand for the parameters of a call.
    fn frame_variables(&self, list: &[Operand]) -> Result<Vec<(u32, u32)>> {
        let place = |operand: &Operand| match operand {
            Operand::Word(name) => match self.scope.find(name) {
                Some(Name::Local(at, bytes)) => Ok((at, bytes)),
                _ => Err(self.error(format!("'{name}' is not a .param variable"))),
            },
            _ => Err(self.error("a parameter of a call is not a .param variable")),
        };
        list.iter().map(place).collect()
    }

    fn call(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        form.has("uni");
        let (returns, rest) = match operands {
            [Operand::List(returns), rest @ ..] => (&returns[..], rest),
            rest => (&[][..], rest),
        };
        let (target, args) = match rest {
            [target, Operand::List(args), ..] => (target, &args[..]),
            [target, ..] => (target, &[][..]),
            [] => return Err(form.error("has no function")),
        };
        let Operand::Word(name) = target else { return Err(form.error("has no function")) };
        let callee = match (self.scope.find(name), self.function_index(name), name.as_str()) {
            (Some(Name::Register(..)), ..) => Callee::Indirect(self.source(target, Type::U64)?),
            (_, Some(index), _) => Callee::Function(index),
            (.., "vprintf") => Callee::Printf,
            (.., "__assertfail") => Callee::AssertFail,
            _ => return Err(form.error(format!("calls the unknown function '{name}'"))),
        };
        let (args, returns) = (self.frame_variables(args)?, self.frame_variables(returns)?);
        self.emit(Op::Call(Box::new(Call { callee, args, returns })));
        Ok(())
    }

    fn barrier(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        if form.has("warp") {
            form.has("sync");
            let [mask] = self.exactly(operands)?;
            let mask = self.source(mask, Type::B32)?;
            self.emit(Op::WarpBarrier { mask });
            return Ok(());
        }
        if form.has("cluster") {
            return Err(form.unknown());
        }
        let mut aligned = form.base == "bar";
        form.has("cta");
        let what = form.one_of(&["sync", "arrive", "red"]).ok_or_else(|| form.unknown())?;
        aligned |= form.has("aligned");
        let kind = match (what, if what == "red" { form.one_of(&["popc", "and", "or"]) } else { None }) {
            ("sync", _) => BarrierKind::Sync,
            ("arrive", _) => BarrierKind::Arrive,
            (_, Some("popc")) => BarrierKind::Popc,
            (_, Some("and")) => BarrierKind::And,
            (_, Some(_)) => BarrierKind::Or,
            (_, None) => return Err(form.unknown()),
        };
        let mut barrier = Barrier {
            kind,
            id: self.zero(),
            count: None,
            aligned,
            input: None,
            target: None,
            predicate: None,
        };
        let mut rest = operands;
        if what == "red" {
            form.ty()?;
            let [destination, inner @ .., input] = operands else { return Err(form.error("lacks operands")) };
            match kind {
                BarrierKind::Popc => barrier.target = self.maybe_target(destination)?,
                _ => barrier.predicate = self.predicate_target(destination)?,
            }
            barrier.input = Some(self.predicate(input)?);
            rest = inner;
        }
        let (id, count) = match rest {
            [id] => (id, None),
            [id, count] => (id, Some(count)),
            _ => return Err(form.error("has the wrong number of operands")),
        };
        barrier.id = self.source(id, Type::U32)?;
        barrier.count = count.map(|count| self.source(count, Type::U32)).transpose()?;
        let _: Source = barrier.id;
        self.emit(Op::Barrier(Box::new(barrier)));
        Ok(())
    }
}
