//! Lowering of loads, stores, atomics, asynchronous copies and fences (PTX ISA, 9.7.9 and 9.7.13).

use super::form::Form;
use super::lower::{Lowering, Result};
use super::op::{Access, Address, AsyncCopy, Atomic, AtomicOp, AtomicType, Op, Order, Place, Source, Target};
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// Lowers an instruction of this file; tells whether it is one.
    pub(super) fn memory(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        match form.base {
            "ld" | "ldu" => self.load(form, operands)?,
            "st" => self.store(form, operands)?,
            "atom" | "red" => self.atomic(form, operands)?,
            "cp" => return self.copy_async(form, operands),
            "membar" | "fence" => self.fence(form)?,
            "prefetch" | "prefetchu" | "applypriority" | "discard" => form.drop_prefix(""),
            "createpolicy" => {
                form.drop_prefix("");
                if let Some(Ok(d)) = operands.first().map(|it| self.target(it)) {
                    let zero = self.constant(0, true);
                    self.copy(d, zero);
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Takes the state space.
    fn place(&self, form: &mut Form) -> Result<Place> {
        let names = [
            ("global", Place::Global),
            ("const", Place::Global),
            ("shared", Place::Shared),
            ("shared::cta", Place::Shared),
            ("local", Place::Local),
            ("param", Place::Param),
            ("param::entry", Place::Param),
            ("param::func", Place::Param),
        ];
        for (name, place) in names {
            if form.has(name) {
                return Ok(place);
            }
        }
        if form.has("shared::cluster") {
            return Err(form.error("uses memory of a cluster, which the emulator does not have"));
        }
        Ok(Place::Generic)
    }

    /// Takes hints, which change no result.
    fn hints(&self, form: &mut Form) {
        form.drop_prefix("L1::");
        form.drop_prefix("L2::");
        while form.one_of(&["ca", "cg", "cs", "lu", "cv", "wb", "wt", "unified", "noftz"]).is_some() {}
    }

    /// Takes the order and scope of an access.
    fn order(&self, form: &mut Form) -> Order {
        let name = form.one_of(&["weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"]);
        Order {
            strong: !matches!(name, None | Some("weak")),
            acquire: matches!(name, Some("acquire" | "acq_rel")),
            release: matches!(name, Some("release" | "acq_rel")),
            wide: form.scope() != Some("cta"),
            constant: form.has("nc"),
        }
    }

    fn load(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let (order, place) = (self.order(form), self.place(form)?);
        self.hints(form);
        let lanes = vector(form);
        let ty = form.ty()?;
        let [destination, address, ..] = operands else { return Err(form.error("lacks operands")) };
        let address = self.address(address, place)?;
        let targets = self.elements(destination);
        if targets.len() != lanes {
            return Err(form.error("has a vector of another size"));
        }
        let targets: Vec<Option<Target>> =
            targets.iter().map(|it| self.maybe_target(it)).collect::<Result<_>>()?;
        let (bytes, signed) = (ty.bytes(), ty.signed());
        if address.place == Place::Param && constant_base(&address) {
            for (at, target) in targets.iter().enumerate() {
                let Some(d) = *target else { continue };
                let offset = self.param_offset(&address) + at as u32 * bytes;
                self.emit(Op::LoadParam { d, offset, bytes, signed });
            }
            return Ok(());
        }
        let sources = Vec::new();
        self.emit(Op::Load(Box::new(Access { address, bytes, signed, order, targets, sources })));
        Ok(())
    }

    fn param_offset(&self, address: &Address) -> u32 {
        let low = self.constant_value(address.base);
        low.wrapping_add(address.offset as u32)
    }

    fn store(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let (order, place) = (self.order(form), self.place(form)?);
        self.hints(form);
        let lanes = vector(form);
        let ty = form.ty()?;
        let [address, source, ..] = operands else { return Err(form.error("lacks operands")) };
        let address = self.address(address, place)?;
        if address.place == Place::Param {
            return Err(form.error("writes to the kernel's parameters"));
        }
        let sources = self.elements(source);
        if sources.len() != lanes {
            return Err(form.error("has a vector of another size"));
        }
        let sources: Vec<Source> = sources.iter().map(|it| self.source(it, ty)).collect::<Result<_>>()?;
        let targets = Vec::new();
        let access = Access { address, bytes: ty.bytes(), signed: false, order, targets, sources };
        self.emit(Op::Store(Box::new(access)));
        Ok(())
    }

    fn atomic(&mut self, form: &mut Form, operands: &[Operand]) -> Result<()> {
        let mut order = self.order(form);
        order.strong = true;
        let place = self.place(form)?;
        self.hints(form);
        let op = form.one_of(&["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"]);
        let op = match op.ok_or_else(|| form.unknown())? {
            "add" => AtomicOp::Add,
            "min" => AtomicOp::Min,
            "max" => AtomicOp::Max,
            "and" => AtomicOp::And,
            "or" => AtomicOp::Or,
            "xor" => AtomicOp::Xor,
            "exch" => AtomicOp::Exch,
            "cas" => AtomicOp::Cas,
            "inc" => AtomicOp::Inc,
            _ => AtomicOp::Dec,
        };
        let lanes = vector(form);
        let ty = form.ty()?;
        let kind = atomic_type(op, ty).ok_or_else(|| form.unknown())?;
        let is_red = form.base == "red";
        let rest = if is_red { operands } else { operands.get(1..).unwrap_or(&[]) };
        let [address, source, more @ ..] = rest else { return Err(form.error("lacks operands")) };
        let targets = match operands {
            [first, ..] if !is_red => {
                self.elements(first).iter().map(|it| self.maybe_target(it)).collect::<Result<_>>()?
            }
            _ => vec![None; lanes],
        };
        let address = self.address(address, place)?;
        if address.place == Place::Local || address.place == Place::Param {
            return Err(form.error("is not on global or shared memory"));
        }
        let sources =
            self.elements(source).iter().map(|it| self.source(it, ty)).collect::<Result<Vec<_>>>()?;
        if sources.len() != lanes || targets.len() != lanes {
            return Err(form.error("has a vector of another size"));
        }
        let swap = match (op, more) {
            (AtomicOp::Cas, [swap, ..]) => Some(self.source(swap, ty)?),
            (AtomicOp::Cas, []) => return Err(form.error("lacks the value to store")),
            _ => None,
        };
        let bytes = ty.bytes();
        let atomic = Atomic { address, op, ty: kind, bytes, order, targets, sources, swap };
        self.emit(Op::Atomic(Box::new(atomic)));
        Ok(())
    }

    fn copy_async(&mut self, form: &mut Form, operands: &[Operand]) -> Result<bool> {
        if !form.has("async") {
            return Ok(false);
        }
        if form.has("commit_group") {
            self.emit(Op::CommitCopies);
            return Ok(true);
        }
        if form.has("wait_all") {
            self.emit(Op::CommitCopies);
            self.emit(Op::WaitCopies(0));
            return Ok(true);
        }
        if form.has("wait_group") {
            let [Operand::Int(groups)] = operands else { return Err(form.error("has no count")) };
            self.emit(Op::WaitCopies(*groups as u32));
            return Ok(true);
        }
        let full = form.has("cg");
        if !full && !form.has("ca") {
            return Err(form.unknown());
        }
        if !(form.has("shared") || form.has("shared::cta")) || !form.has("global") {
            return Err(form.unknown());
        }
        self.hints(form);
        let [to, from, Operand::Int(bytes), more @ ..] = operands else {
            return Err(form.error("lacks operands"));
        };
        if !matches!((full, bytes), (true, 16) | (false, 4 | 8 | 16)) {
            return Err(form.error(format!("copies {bytes} bytes")));
        }
        let (to, from) = (self.address(to, Place::Shared)?, self.address(from, Place::Global)?);
        let (mut source_bytes, mut ignore) = (None, None);
        match more.first() {
            Some(operand) if self.is_predicate(operand) => ignore = Some(self.predicate(operand)?),
            Some(operand) => {
                let source = self.source(operand, Type::U32)?;
                source_bytes = (!source.wide).then_some(source);
            }
            None => {}
        }
        let copy = AsyncCopy { to, from, bytes: *bytes as u32, source_bytes, ignore };
        self.emit(Op::CopyAsync(Box::new(copy)));
        Ok(true)
    }

    fn fence(&mut self, form: &mut Form) -> Result<()> {
        if form.has("proxy") || form.has("mbarrier_init") {
            return Err(form.unknown());
        }
        form.one_of(&["sc", "acq_rel", "acquire", "release"]);
        let wide = form.scope() != Some("cta");
        self.emit(Op::Fence { wide });
        Ok(())
    }
}

fn constant_base(address: &Address) -> bool {
    address.base.plane & super::POOL != 0
}

/// Takes the size of a vector.
fn vector(form: &mut Form) -> usize {
    match form.one_of(&["v2", "v4", "v8"]) {
        Some("v2") => 2,
        Some("v4") => 4,
        Some(_) => 8,
        None => 1,
    }
}

fn atomic_type(op: AtomicOp, ty: Type) -> Option<AtomicType> {
    use AtomicOp::{Add, And, Cas, Dec, Exch, Inc, Max, Min, Or, Xor};
    Some(match (op, ty) {
        (Add | Min | Max, Type::U32 | Type::U64) | (Inc | Dec, Type::U32) => AtomicType::Unsigned,
        (And | Or | Xor, Type::B32 | Type::B64) => AtomicType::Unsigned,
        (Exch | Cas, Type::B16 | Type::B32 | Type::B64 | Type::U32 | Type::U64 | Type::S32) => {
            AtomicType::Unsigned
        }
        (Add | Min | Max, Type::S32 | Type::S64) => AtomicType::Signed,
        (Add, Type::F32) => AtomicType::F32,
        (Add, Type::F64) => AtomicType::F64,
        (Add | Min | Max, Type::F16) => AtomicType::F16,
        (Add | Min | Max, Type::F16x2) => AtomicType::F16x2,
        (Add | Min | Max, Type::Bf16) => AtomicType::Bf16,
        (Add | Min | Max, Type::Bf16x2) => AtomicType::Bf16x2,
        _ => return None,
    })
}
