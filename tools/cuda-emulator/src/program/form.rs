//! An opcode taken apart: every modifier must be known to the code that lowers the instruction.

use crate::arith::rounding::Rounding;
use crate::ptx::{PtxError, Type};

/// An opcode with modifiers that are still to be read.
pub(crate) struct Form<'a> {
    pub(crate) opcode: &'a str,
    pub(crate) base: &'a str,
    mods: Vec<&'a str>,
    pub(crate) line: u32,
}

impl<'a> Form<'a> {
    /// Splits an opcode.
    pub(crate) fn new(opcode: &'a str, line: u32) -> Form<'a> {
        let mut parts = opcode.split('.');
        let base = parts.next().unwrap_or("");
        Form { opcode, base, mods: parts.collect(), line }
    }

    /// Takes a modifier; tells whether it was there.
    pub(crate) fn has(&mut self, name: &str) -> bool {
        match self.mods.iter().position(|it| *it == name) {
            Some(at) => {
                self.mods.remove(at);
                true
            }
            None => false,
        }
    }

    /// Takes the first of the modifiers named.
    pub(crate) fn one_of(&mut self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.has(name))
    }

    /// Takes all modifiers that begin with `prefix`.
    pub(crate) fn drop_prefix(&mut self, prefix: &str) {
        self.mods.retain(|it| !it.starts_with(prefix));
    }

    /// Takes the next type, if there is one.
    pub(crate) fn maybe_type(&mut self) -> Option<Type> {
        let at = self.mods.iter().position(|it| Type::named(it).is_some())?;
        Type::named(self.mods.remove(at))
    }

    /// Takes the next type.
    pub(crate) fn ty(&mut self) -> Result<Type, PtxError> {
        self.maybe_type().ok_or_else(|| self.error("has no type"))
    }

    /// Takes a rounding mode.
    pub(crate) fn rounding(&mut self) -> Option<Rounding> {
        self.one_of(&["rn", "rz", "rm", "rp", "rna"]).and_then(Rounding::named)
    }

    /// Takes a comparison.
    pub(crate) fn relation(&mut self) -> Result<crate::arith::Relation, PtxError> {
        let at = self.mods.iter().position(|it| crate::arith::Relation::named(it).is_some());
        let at = at.ok_or_else(|| self.error("has no comparison"))?;
        crate::arith::Relation::named(self.mods.remove(at)).ok_or_else(|| self.error("has no comparison"))
    }

    /// Takes a scope of memory order.
    pub(crate) fn scope(&mut self) -> Option<&'static str> {
        self.one_of(&["cta", "cluster", "gpu", "sys", "gl"])
    }

    /// The first modifier that is left.
    pub(crate) fn next(&mut self) -> Option<&'a str> {
        if self.mods.is_empty() { None } else { Some(self.mods.remove(0)) }
    }

    /// Refuses modifiers that nobody has taken.
    pub(crate) fn finish(&self) -> Result<(), PtxError> {
        match self.mods.first() {
            None => Ok(()),
            Some(name) => Err(self.error(format!("has the unknown modifier '.{name}'"))),
        }
    }

    /// An error about this instruction.
    pub(crate) fn error(&self, problem: impl std::fmt::Display) -> PtxError {
        PtxError::new(self.line, format!("'{}' {problem}", self.opcode))
    }

    /// The error of a form that the emulator does not have.
    pub(crate) fn unknown(&self) -> PtxError {
        PtxError::new(self.line, format!("unknown form '{}'", self.opcode))
    }
}
