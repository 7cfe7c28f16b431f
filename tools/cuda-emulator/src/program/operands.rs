//! Operands as sources, destinations, predicates and addresses.

use super::FUNCTION_WINDOW;
use super::lower::{DYNAMIC_ALIGN, Lowering, Result};
use super::op::{Address, Op, POOL, Place, Predicate, Source, Special, Target, Width};
use super::scope::Name;
use crate::ptx::{Operand, Type};

impl Lowering<'_> {
    /// A constant of 64 bits; as one of 32 bits, its lower half.
    pub(crate) fn constant(&mut self, bits: u64, wide: bool) -> Source {
        let at = *self.constants.entry(bits).or_insert_with(|| {
            self.program.pool.push([bits as u32; 32]);
            self.program.pool.push([(bits >> 32) as u32; 32]);
            self.program.pool.len() as u32 - 2
        });
        Source { plane: at | POOL, wide }
    }

    /// The lower half of a constant.
    pub(crate) fn constant_value(&self, source: Source) -> u32 {
        self.program.pool[(source.plane & !POOL) as usize][0]
    }

    /// The plane of zeros.
    pub(crate) fn zero(&self) -> Source {
        Source { plane: POOL, wide: false }
    }

    pub(super) fn predicate_register(&self, name: &str) -> Result<u32> {
        match self.scope.find(name) {
            Some(Name::Predicate(index)) => Ok(index),
            _ => Err(self.error(format!("'{name}' is not a predicate register"))),
        }
    }

    /// A predicate as a source, perhaps negated.
    pub(crate) fn predicate(&self, operand: &Operand) -> Result<Predicate> {
        match operand {
            Operand::Word(name) => Ok(Predicate { index: self.predicate_register(name)?, negated: false }),
            Operand::Not(inner) => {
                let inner = self.predicate(inner)?;
                Ok(Predicate { negated: !inner.negated, ..inner })
            }
            _ => Err(self.error("an operand is not a predicate")),
        }
    }

    /// A predicate as a destination; none for `_`.
    pub(crate) fn predicate_target(&self, operand: &Operand) -> Result<Option<u32>> {
        match operand {
            Operand::Word(name) if name == "_" => Ok(None),
            _ => Ok(Some(self.predicate(operand)?.index)),
        }
    }

    /// A source of a type, which decides how wide constants are.
    pub(crate) fn source(&mut self, operand: &Operand, ty: Type) -> Result<Source> {
        let wide = ty.bytes() == 8;
        match operand {
            Operand::Int(bits) => {
                let bits = match ty.bytes() {
                    8 => *bits,
                    2 => *bits & 0xffff,
                    _ => u64::from(*bits as u32),
                };
                Ok(self.constant(bits, wide))
            }
            Operand::Single(bits) if ty == Type::F64 => {
                Ok(self.constant(f64::from(f32::from_bits(*bits)).to_bits(), true))
            }
            Operand::Single(bits) => Ok(self.constant(u64::from(*bits), false)),
            Operand::Double(bits) if ty == Type::F32 => {
                Ok(self.constant(u64::from((f64::from_bits(*bits) as f32).to_bits()), false))
            }
            Operand::Double(bits) => Ok(self.constant(*bits, true)),
            Operand::Word(name) => self.named_source(name, 0, wide),
            Operand::Sum(name, offset) => self.named_source(name, *offset, wide),
            _ => Err(self.error("an operand is not a value")),
        }
    }

    fn named_source(&mut self, name: &str, offset: i64, wide: bool) -> Result<Source> {
        if let Some(Name::Register(ty, plane)) = self.scope.find(name) {
            return Ok(Source { plane, wide: ty.bytes() == 8 });
        }
        if let Some(special) = special(name) {
            return Ok(Source { plane: self.scope.special(special), wide: false });
        }
        let address = match self.variable(name) {
            Some(Name::Shared(at)) => u64::from(at),
            Some(Name::Global(at)) => at,
            Some(Name::KernelParam(at, _)) => u64::from(at),
            Some(Name::Local(at, _)) => {
                let width = if wide { Width::W64 } else { Width::W32 };
                let plane = self.scope.scratch(2);
                let offset = (i64::from(at) + offset) as u32;
                self.emit(Op::LocalAddress { d: Target { plane, width }, offset });
                return Ok(Source { plane, wide });
            }
            _ => match self.functions.get(name) {
                Some(index) => FUNCTION_WINDOW + u64::from(*index),
                None => return Err(self.error(format!("unknown name '{name}'"))),
            },
        };
        Ok(self.constant(address.wrapping_add_signed(offset), wide))
    }

    /// The meaning of a variable's name, in the function or in the module.
    pub(crate) fn variable(&self, name: &str) -> Option<Name> {
        if let Some(found) = self.scope.find(name) {
            return Some(found);
        }
        if let Some(at) = self.common.offsets.get(name) {
            return Some(Name::Shared(*at));
        }
        if self.common.external.iter().any(|it| it == name) {
            return Some(Name::Shared(self.shared.next_multiple_of(DYNAMIC_ALIGN)));
        }
        self.addresses.get(name).map(|at| Name::Global(*at))
    }

    /// A destination register; none for `_`.
    pub(crate) fn maybe_target(&self, operand: &Operand) -> Result<Option<Target>> {
        match operand {
            Operand::Word(name) if name == "_" => Ok(None),
            _ => self.target(operand).map(Some),
        }
    }

    /// A destination register.
    pub(crate) fn target(&self, operand: &Operand) -> Result<Target> {
        let Operand::Word(name) = operand else { return Err(self.error("a destination is not a register")) };
        match self.scope.find(name) {
            Some(Name::Register(ty, plane)) => Ok(Target {
                plane,
                width: match ty.bytes() {
                    8 => Width::W64,
                    4 => Width::W32,
                    _ => Width::W16,
                },
            }),
            _ => Err(self.error(format!("'{name}' is not a register"))),
        }
    }

    /// An address operand of a place.
    pub(crate) fn address(&mut self, operand: &Operand, place: Place) -> Result<Address> {
        let Operand::Address(base, offset) = operand else {
            return Err(self.error("an operand is not an address"));
        };
        if let Operand::Word(name) = &**base
            && let Some(meaning) = self.variable(name)
        {
            let (place, at, framed) = match meaning {
                Name::KernelParam(at, _) => (Place::Param, u64::from(at), false),
                Name::Local(at, _) => (Place::Local, u64::from(at), true),
                Name::Shared(at) => (Place::Shared, u64::from(at), false),
                Name::Global(at) => (Place::Global, at, false),
                Name::Register(ty, plane) => {
                    let base = Source { plane, wide: ty.bytes() == 8 };
                    return Ok(Address { place, base, offset: *offset, framed: false });
                }
                Name::Predicate(_) => return Err(self.error(format!("'{name}' is not an address"))),
            };
            let base = self.constant(at, true);
            return Ok(Address { place, base, offset: *offset, framed });
        }
        let base = self.source(base, Type::U64)?;
        Ok(Address { place, base, offset: *offset, framed: false })
    }

    /// The operands, if there are `N`.
    pub(crate) fn exactly<'o, const N: usize>(&self, operands: &'o [Operand]) -> Result<&'o [Operand; N]> {
        operands.try_into().map_err(|_| self.error(format!("{} operands; there must be {N}", operands.len())))
    }

    /// The elements of a vector operand, or the operand itself.
    pub(crate) fn elements<'o>(&self, operand: &'o Operand) -> &'o [Operand] {
        match operand {
            Operand::Vector(list) => list,
            other => std::slice::from_ref(other),
        }
    }
}

fn special(name: &str) -> Option<Special> {
    let dimension = |name: &str| match name.as_bytes().last() {
        Some(b'x') => Some(0),
        Some(b'y') => Some(1),
        Some(b'z') => Some(2),
        _ => None,
    };
    Some(match name {
        "%laneid" => Special::Laneid,
        "%warpid" => Special::Warpid,
        "%nwarpid" => Special::Nwarpid,
        "%smid" => Special::Smid,
        "%nsmid" => Special::Nsmid,
        "%gridid" => Special::Gridid,
        "%lanemask_eq" => Special::LanemaskEq,
        "%lanemask_lt" => Special::LanemaskLt,
        "%lanemask_le" => Special::LanemaskLe,
        "%lanemask_gt" => Special::LanemaskGt,
        "%lanemask_ge" => Special::LanemaskGe,
        "%dynamic_smem_size" => Special::DynamicShared,
        "%total_smem_size" => Special::TotalShared,
        "%cluster_ctarank" | "%cluster_ctaid.x" | "%cluster_ctaid.y" | "%cluster_ctaid.z" => Special::Zero,
        "%cluster_nctaid.x" | "%cluster_nctaid.y" | "%cluster_nctaid.z" | "%cluster_nctarank" => Special::One,
        _ if name.starts_with("%tid.") => Special::Tid(dimension(name)?),
        _ if name.starts_with("%ntid.") => Special::Ntid(dimension(name)?),
        _ if name.starts_with("%ctaid.") => Special::Ctaid(dimension(name)?),
        _ if name.starts_with("%nctaid.") => Special::Nctaid(dimension(name)?),
        _ => return None,
    })
}
