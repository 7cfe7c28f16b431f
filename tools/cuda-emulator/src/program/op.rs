//! Instructions of the typed program.

use crate::arith::{NarrowFn, NarrowTest, Plane, WideFn, WideTest};
use crate::mma::Mma;

/// Marks the index of a plane as one of the pool of constants.
pub(crate) const POOL: u32 = 1 << 31;

/// A source: a register of the frame, or a constant (index with [`POOL`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    /// Index of its plane, or of the first of two.
    pub(crate) plane: u32,
    /// Whether it has 64 bits: two planes, the lower half first.
    pub(crate) wide: bool,
}

/// The width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    W16,
    W32,
    W64,
}

/// A destination register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) plane: u32,
    pub(crate) width: Width,
}

/// A predicate as an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Predicate {
    pub(crate) index: u32,
    pub(crate) negated: bool,
}

/// The combination of a comparison's result with a predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    And,
    Or,
    Xor,
}

/// Values that the hardware provides (PTX ISA, section 10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    /// Dimensions: 0 to 2.
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    Laneid,
    Warpid,
    Nwarpid,
    Smid,
    Nsmid,
    Gridid,
    LanemaskEq,
    LanemaskLt,
    LanemaskLe,
    LanemaskGt,
    LanemaskGe,
    DynamicShared,
    TotalShared,
    Zero,
    One,
}

/// Values that differ at each reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clock {
    Cycles,
    Nanoseconds,
}

/// A state space of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Generic,
    Global,
    Shared,
    /// Local memory; the offset counts from the function's frame if `framed`.
    Local,
    /// Parameters of the kernel.
    Param,
}

/// The part of an access in the order of memory (PTX ISA, section 8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Order {
    /// Whether the access is strong: volatile, relaxed, acquire, release, or atomic.
    pub(crate) strong: bool,
    pub(crate) acquire: bool,
    pub(crate) release: bool,
    /// Whether it is so for other CTAs as well: not with `.cta`.
    pub(crate) wide: bool,
    /// Whether the memory is taken to be constant for the whole launch (`.nc`).
    pub(crate) constant: bool,
}

/// An address operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) place: Place,
    pub(crate) base: Source,
    pub(crate) offset: i64,
    /// Whether the frame's first local address is added.
    pub(crate) framed: bool,
}

/// A load or store of up to 8 elements.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub(crate) address: Address,
    /// Bytes of an element.
    pub(crate) bytes: u32,
    /// Whether loaded elements are extended with their sign.
    pub(crate) signed: bool,
    pub(crate) order: Order,
    /// Destinations of a load; `_` gives none.
    pub(crate) targets: Vec<Option<Target>>,
    /// Sources of a store.
    pub(crate) sources: Vec<Source>,
}

/// The operation of an atomic (PTX ISA, 9.7.13.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    And,
    Or,
    Xor,
    Exch,
    Cas,
    Inc,
    Dec,
}

/// The type of an atomic operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AtomicType {
    Unsigned,
    Signed,
    F32,
    F64,
    F16,
    F16x2,
    Bf16,
    Bf16x2,
}

/// An atomic operation, or a reduction, which has no target.
#[derive(Clone, Debug)]
pub(crate) struct Atomic {
    pub(crate) address: Address,
    pub(crate) op: AtomicOp,
    pub(crate) ty: AtomicType,
    pub(crate) bytes: u32,
    pub(crate) order: Order,
    pub(crate) targets: Vec<Option<Target>>,
    pub(crate) sources: Vec<Source>,
    /// The value to store if `cas` finds the first source.
    pub(crate) swap: Option<Source>,
}

/// The mode of an exchange between lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

/// The result of `vote.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
    Ballot,
}

/// The reduction of `redux.sync`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReduxOp {
    Add,
    MinU,
    MaxU,
    MinS,
    MaxS,
    And,
    Or,
    Xor,
}

/// The kind of a CTA barrier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarrierKind {
    Sync,
    /// Does not wait.
    Arrive,
    Popc,
    And,
    Or,
}

/// A CTA barrier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Barrier {
    pub(crate) kind: BarrierKind,
    pub(crate) id: Source,
    /// Threads that take part; none is all.
    pub(crate) count: Option<Source>,
    /// Whether all threads of a warp must execute it together.
    pub(crate) aligned: bool,
    pub(crate) input: Option<Predicate>,
    pub(crate) target: Option<Target>,
    pub(crate) predicate: Option<u32>,
}

/// The function that is called.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Callee {
    /// A function of the module, by index.
    Function(u32),
    /// A function's address.
    Indirect(Source),
    Printf,
    AssertFail,
}

/// A call. Parameters are offsets and sizes in the caller's frame of local memory.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) callee: Callee,
    pub(crate) args: Vec<(u32, u32)>,
    pub(crate) returns: Vec<(u32, u32)>,
}

/// A copy from global to shared memory that lands later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AsyncCopy {
    pub(crate) to: Address,
    pub(crate) from: Address,
    pub(crate) bytes: u32,
    /// Bytes to read; the rest becomes zeros.
    pub(crate) source_bytes: Option<Source>,
    /// A predicate that, if true, makes all bytes zeros.
    pub(crate) ignore: Option<Predicate>,
}

/// A transfer of 8x8 matrices of 16-bit elements between shared memory and registers.
#[derive(Clone, Debug)]
pub(crate) struct MatrixMove {
    pub(crate) address: Address,
    pub(crate) transposed: bool,
    /// A plane for each matrix.
    pub(crate) planes: Vec<u32>,
}

/// One instruction.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Nop,
    Narrow {
        f: NarrowFn,
        d: u32,
        s: [u32; 4],
    },
    Wide {
        f: WideFn,
        d: Target,
        s: [Source; 4],
    },
    /// Copies planes.
    Copy {
        d: u32,
        s: u32,
        planes: u32,
    },
    Test {
        f: NarrowTest,
        a: u32,
        b: u32,
        out: TestOutput,
    },
    TestWide {
        f: WideTest,
        a: Source,
        b: Source,
        out: TestOutput,
    },
    Select {
        d: u32,
        a: Source,
        b: Source,
        p: Predicate,
        planes: u32,
    },
    /// Predicates: `d = f(a, b)`, bit by bit.
    Logic {
        f: fn(u32, u32) -> u32,
        d: u32,
        a: Predicate,
        b: Predicate,
    },
    /// A constant predicate.
    SetPredicate {
        d: u32,
        value: bool,
    },
    Carry {
        f: CarryFn,
        d: Target,
        s: [Source; 3],
        read: bool,
        write: bool,
    },
    ReadClock {
        d: Target,
        clock: Clock,
    },
    /// The address of a variable in the frame.
    LocalAddress {
        d: Target,
        offset: u32,
    },
    /// A value of the kernel's parameters, the same for all threads.
    LoadParam {
        d: Target,
        offset: u32,
        bytes: u32,
        signed: bool,
    },
    Load(Box<Access>),
    Store(Box<Access>),
    Atomic(Box<Atomic>),
    CopyAsync(Box<AsyncCopy>),
    CommitCopies,
    /// Waits until at most so many groups are pending.
    WaitCopies(u32),
    LoadMatrix(Box<MatrixMove>),
    StoreMatrix(Box<MatrixMove>),
    Mma(Box<Mma>),
    /// Whether generic addresses lie in a window.
    IsSpace {
        d: u32,
        a: Source,
        window: Option<u64>,
    },
    Branch {
        target: u32,
    },
    BranchIndexed {
        index: u32,
        targets: Box<[u32]>,
    },
    Call(Box<Call>),
    Return,
    Exit,
    Trap,
    Fence {
        wide: bool,
    },
    Barrier(Box<Barrier>),
    WarpBarrier {
        mask: Source,
    },
    Shuffle(Box<Shuffle>),
    Vote {
        mode: VoteMode,
        d: Option<Target>,
        p: Option<u32>,
        input: Predicate,
        mask: Source,
    },
    MatchAny {
        d: Target,
        value: Source,
        mask: Source,
    },
    MatchAll {
        d: Target,
        p: Option<u32>,
        value: Source,
        mask: Source,
    },
    Redux {
        op: ReduxOp,
        d: Target,
        value: Source,
        mask: Source,
    },
    ActiveMask {
        d: Target,
    },
    Elect {
        d: Option<Target>,
        p: u32,
        mask: Source,
    },
}

/// Sums with carry: `a`, `b`, `c`, the carry in; the result and the carry out.
pub(crate) type CarryFn = fn(u64, u64, u64, bool) -> (u64, bool);

/// The destinations of a comparison.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TestOutput {
    pub(crate) p: Option<u32>,
    /// Takes the negated result.
    pub(crate) q: Option<u32>,
    pub(crate) combine: Option<(Combine, Predicate)>,
}

/// An exchange of values between lanes.
#[derive(Clone, Debug)]
pub(crate) struct Shuffle {
    pub(crate) mode: ShuffleMode,
    pub(crate) d: Target,
    pub(crate) p: Option<u32>,
    pub(crate) value: Source,
    pub(crate) lane: Source,
    pub(crate) clamp: Source,
    pub(crate) mask: Source,
}

/// An instruction with its guard and line.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    pub(crate) op: Op,
    pub(crate) guard: Option<Predicate>,
    pub(crate) line: u32,
}

/// A function of the program.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) entry: bool,
    /// Index of its first instruction.
    pub(crate) start: u32,
    /// Planes of its frame.
    pub(crate) planes: u32,
    /// Predicates of its frame.
    pub(crate) predicates: u32,
    /// Bytes of its frame of local memory.
    pub(crate) local: u32,
    /// Special registers that it reads, with their planes.
    pub(crate) specials: Vec<(Special, u32)>,
    /// Offset and size of each parameter: in the parameter space of a kernel, or in the frame.
    pub(crate) params: Vec<(u32, u32)>,
    pub(crate) returns: Vec<(u32, u32)>,
    /// Bytes of static shared memory.
    pub(crate) shared: u32,
    pub(crate) max_threads: Option<u32>,
    pub(crate) required_threads: Option<[u32; 3]>,
}

impl Function {
    /// Bytes of the kernel's parameters.
    pub(crate) fn param_bytes(&self) -> u32 {
        self.params.iter().map(|(at, bytes)| at + bytes).max().unwrap_or(0)
    }
}

/// A module that can be executed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    pub(crate) code: Vec<Inst>,
    pub(crate) pool: Vec<Plane>,
    pub(crate) functions: Vec<Function>,
    /// Architecture that the module was compiled for.
    pub(crate) target: u32,
    /// Version of its PTX, as 88 for 8.8.
    pub(crate) version: u32,
    /// Hash of the module's text, if its executed lines are recorded.
    pub(crate) text_hash: u64,
}

impl Program {
    /// The kernel of that name.
    pub(crate) fn kernel(&self, name: &str) -> Option<usize> {
        self.functions.iter().position(|function| function.entry && function.name == name)
    }
}
