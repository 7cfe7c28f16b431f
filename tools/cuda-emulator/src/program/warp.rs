//! Lowering of exchanges between the lanes of a warp (PTX ISA, 9.7.9.6 and 9.7.13).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{Op, ReduxOp, Shuffle, ShuffleMode, VoteMode};
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// Lowers an instruction of this file; tells whether it is one.
    pub(super) fn warp(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        match form.base {
            "shfl" => self.shuffle(form, operands)?,
            "vote" => self.vote(form, operands)?,
            "match" => self.match_sync(form, operands)?,
            "redux" => self.redux(form, operands)?,
            "activemask" => {
                form.ty()?;
                let [d] = self.exactly(operands)?;
                let d = self.target(d)?;
                self.emit(Op::ActiveMask { d });
            }
            "elect" => {
                self.needs_sync(form)?;
                let [pair, mask] = self.exactly(operands)?;
                let Operand::Pair(d, p) = pair else { return Err(form.error("has no predicate")) };
                let (d, p) = (self.maybe_target(d)?, self.predicate(p)?.index);
                let mask = self.source(mask, Type::U32)?;
                self.emit(Op::Elect { d, p, mask });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Refuses the forms of before Volta, whose lanes are not named.
    fn needs_sync(&self, form: &mut Form) -> Result<()> {
        if form.has("sync") { Ok(()) } else { Err(form.unknown()) }
    }

    fn shuffle(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        self.needs_sync(form)?;
        let mode = match form.one_of(&["up", "down", "bfly", "idx"]) {
            Some("up") => ShuffleMode::Up,
            Some("down") => ShuffleMode::Down,
            Some("bfly") => ShuffleMode::Butterfly,
            Some(_) => ShuffleMode::Index,
            None => return Err(form.unknown()),
        };
        form.ty()?;
        let [destination, value, lane, clamp, mask] = self.exactly(operands)?;
        let (d, p) = match destination {
            Operand::Pair(d, p) => (self.target(d)?, self.predicate_target(p)?),
            single => (self.target(single)?, None),
        };
        let value = self.source(value, Type::B32)?;
        let (lane, clamp) = (self.source(lane, Type::B32)?, self.source(clamp, Type::B32)?);
        let mask = self.source(mask, Type::B32)?;
        self.emit(Op::Shuffle(Box::new(Shuffle { mode, d, p, value, lane, clamp, mask })));
        Ok(())
    }

    fn vote(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        self.needs_sync(form)?;
        let mode = match form.one_of(&["all", "any", "uni", "ballot"]) {
            Some("all") => VoteMode::All,
            Some("any") => VoteMode::Any,
            Some("uni") => VoteMode::Uniform,
            Some(_) => VoteMode::Ballot,
            None => return Err(form.unknown()),
        };
        form.ty()?;
        let [destination, input, mask] = self.exactly(operands)?;
        let (d, p) = match mode {
            VoteMode::Ballot => (self.maybe_target(destination)?, None),
            _ => (None, self.predicate_target(destination)?),
        };
        let (input, mask) = (self.predicate(input)?, self.source(mask, Type::B32)?);
        self.emit(Op::Vote { mode, d, p, input, mask });
        Ok(())
    }

    fn match_sync(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let any = form.has("any");
        if !any && !form.has("all") {
            return Err(form.unknown());
        }
        self.needs_sync(form)?;
        let ty = form.ty()?;
        let [destination, value, mask] = self.exactly(operands)?;
        let (value, mask) = (self.source(value, ty)?, self.source(mask, Type::B32)?);
        if any {
            let d = self.target(destination)?;
            self.emit(Op::MatchAny { d, value, mask });
            return Ok(());
        }
        let (d, p) = match destination {
            Operand::Pair(d, p) => (self.target(d)?, self.predicate_target(p)?),
            single => (self.target(single)?, None),
        };
        self.emit(Op::MatchAll { d, p, value, mask });
        Ok(())
    }

    fn redux(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        self.needs_sync(form)?;
        let name = form.one_of(&["add", "min", "max", "and", "or", "xor"]);
        let op = match (name, form.ty()?) {
            (Some("add"), Type::U32 | Type::S32) => ReduxOp::Add,
            (Some("min"), Type::U32) => ReduxOp::MinU,
            (Some("max"), Type::U32) => ReduxOp::MaxU,
            (Some("min"), Type::S32) => ReduxOp::MinS,
            (Some("max"), Type::S32) => ReduxOp::MaxS,
            (Some("and"), Type::B32) => ReduxOp::And,
            (Some("or"), Type::B32) => ReduxOp::Or,
            (Some("xor"), Type::B32) => ReduxOp::Xor,
            _ => return Err(form.unknown()),
        };
        let [d, value, mask] = self.exactly(operands)?;
        let (d, value) = (self.target(d)?, self.source(value, Type::B32)?);
        let mask = self.source(mask, Type::B32)?;
        self.emit(Op::Redux { op, d, value, mask });
        Ok(())
    }
}
