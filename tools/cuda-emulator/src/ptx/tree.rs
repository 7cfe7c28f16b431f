//! The syntax tree of a PTX module.

/// A type of PTX (PTX ISA, section 5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Type {
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
    Tf32,
    F32,
    F64,
    E4m3x2,
    E5m2x2,
    Pred,
}

impl Type {
    /// The type of that name, without its dot.
    pub(crate) fn named(name: &str) -> Option<Type> {
        Some(match name {
            "b8" => Type::B8,
            "b16" => Type::B16,
            "b32" => Type::B32,
            "b64" => Type::B64,
            "u8" => Type::U8,
            "u16" => Type::U16,
            "u32" => Type::U32,
            "u64" => Type::U64,
            "s8" => Type::S8,
            "s16" => Type::S16,
            "s32" => Type::S32,
            "s64" => Type::S64,
            "f16" => Type::F16,
            "f16x2" => Type::F16x2,
            "bf16" => Type::Bf16,
            "bf16x2" => Type::Bf16x2,
            "tf32" => Type::Tf32,
            "f32" => Type::F32,
            "f64" => Type::F64,
            "e4m3x2" => Type::E4m3x2,
            "e5m2x2" => Type::E5m2x2,
            "pred" => Type::Pred,
            _ => return None,
        })
    }

    /// Size in bytes; that of a predicate is 1.
    pub(crate) fn bytes(self) -> u32 {
        match self {
            Type::B8 | Type::U8 | Type::S8 | Type::Pred => 1,
            Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::Bf16 | Type::E4m3x2 | Type::E5m2x2 => 2,
            Type::B64 | Type::U64 | Type::S64 | Type::F64 => 8,
            _ => 4,
        }
    }

    /// Whether values are signed integers.
    pub(crate) fn signed(self) -> bool {
        matches!(self, Type::S8 | Type::S16 | Type::S32 | Type::S64)
    }

    /// Whether values are integers with or without sign, or bits.
    pub(crate) fn integer(self) -> bool {
        use Type::*;
        matches!(self, B8 | B16 | B32 | B64 | U8 | U16 | U32 | U64 | S8 | S16 | S32 | S64)
    }
}

/// A state space that variables are declared in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// An element of an initializer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// Bits, truncated to the element's size.
    Bits(u64),
    /// The address of a variable or function, plus an offset, in its own space or generic.
    Address { name: String, offset: i64, generic: bool },
}

/// A variable or a parameter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Variable {
    pub(crate) space: Space,
    pub(crate) ty: Type,
    pub(crate) align: u32,
    pub(crate) name: String,
    /// Size in bytes; none for arrays whose size the launch gives.
    pub(crate) bytes: Option<u32>,
    pub(crate) init: Vec<Value>,
    pub(crate) external: bool,
    pub(crate) line: u32,
}

/// An operand as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// A register, variable, label, function or special register.
    Word(String),
    Int(u64),
    Single(u32),
    Double(u64),
    /// A variable plus an offset.
    Sum(String, i64),
    /// `[base + offset]`.
    Address(Box<Operand>, i64),
    /// `{a, b}`.
    Vector(Vec<Operand>),
    /// `!p`.
    Not(Box<Operand>),
    /// `d|p`.
    Pair(Box<Operand>, Box<Operand>),
    /// `(a, b)`: parameters of a call.
    List(Vec<Operand>),
}

/// An instruction as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Instruction {
    /// The guard: a predicate register, and whether it is negated.
    pub(crate) guard: Option<(String, bool)>,
    /// Opcode with modifiers.
    pub(crate) opcode: String,
    pub(crate) operands: Vec<Operand>,
    pub(crate) line: u32,
}

/// A statement of a function's body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Statement {
    Instruction(Instruction),
    Label(String),
    /// Registers `name`, or `name0` to `name(count - 1)`.
    Registers {
        ty: Type,
        name: String,
        count: Option<u32>,
    },
    Variable(Variable),
    /// Labels of an indirect branch.
    Targets {
        name: String,
        labels: Vec<String>,
    },
    /// The beginning of a block.
    Open,
    /// The end of a block.
    Close,
}

/// A kernel or a device function.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) entry: bool,
    pub(crate) returns: Vec<Variable>,
    pub(crate) params: Vec<Variable>,
    /// None for a declaration.
    pub(crate) body: Option<Vec<Statement>>,
    /// Product of `.maxntid`, or of `.reqntid`.
    pub(crate) max_threads: Option<u32>,
    /// Dimensions of `.reqntid`.
    pub(crate) required_threads: Option<[u32; 3]>,
    pub(crate) line: u32,
}

/// A module.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Module {
    /// Version of the language, as 10 * major + minor.
    pub(crate) version: u32,
    /// Architecture, as `80` for `sm_80`.
    pub(crate) target: u32,
    pub(crate) variables: Vec<Variable>,
    pub(crate) functions: Vec<Function>,
}
