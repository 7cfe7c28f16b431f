//! PTX text to a syntax tree: statements, declarations and operands, each with its line. Meaning is given
//! to them by [`crate::program`].

mod lexer;
mod parser;
mod tree;

pub(crate) use parser::parse;
pub(crate) use tree::{Function, Instruction, Module, Operand, Space, Statement, Type, Value, Variable};

/// An error in PTX text, or a form that the emulator does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("PTX line {line}: {problem}")]
pub struct PtxError {
    /// Line, counted from 1.
    pub line: u32,
    /// The problem; unknown opcodes, modifiers and directives are named.
    pub problem: String,
}

impl PtxError {
    /// An error at `line`.
    pub(crate) fn new(line: u32, problem: impl Into<String>) -> PtxError {
        PtxError { line, problem: problem.into() }
    }
}
