//! Findings: structured records of what goes wrong while kernels run.

use std::fmt;

/// A kind of finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// An access outside of every allocation, or past the end of shared or local memory.
    OutOfBounds,
    /// An access to memory that was freed.
    UseAfterFree,
    /// An address that is not a multiple of the access's size.
    Misaligned,
    /// A read of bytes that were never written.
    Uninitialised,
    /// Two accesses, at least one of them a write, that nothing orders.
    Race,
    /// An access to bytes that an asynchronous copy has not delivered.
    PendingCopy,
    /// An instruction for several lanes that not all named lanes reach.
    Divergence,
    /// A barrier that not all threads reach.
    Barrier,
    /// `trap`, or an address that is no function's.
    Trap,
    /// A failed `assert`.
    Assert,
    /// A launch that runs for longer than its limit of instructions.
    Hang,
    /// Memory of a context that is left when the context ends.
    Leak,
    /// A failure that was asked for.
    Injected,
    /// PTX that the emulator cannot execute.
    Unsupported,
}

impl Kind {
    /// The kind's name, as it is written in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kind::OutOfBounds => "out-of-bounds",
            Kind::UseAfterFree => "use-after-free",
            Kind::Misaligned => "misaligned",
            Kind::Uninitialised => "uninitialised",
            Kind::Race => "race",
            Kind::PendingCopy => "pending-copy",
            Kind::Divergence => "divergence",
            Kind::Barrier => "barrier",
            Kind::Trap => "trap",
            Kind::Assert => "assert",
            Kind::Hang => "hang",
            Kind::Leak => "leak",
            Kind::Injected => "injected",
            Kind::Unsupported => "unsupported",
        }
    }

    /// The driver's error code for it.
    pub fn error(self) -> u32 {
        match self {
            Kind::OutOfBounds | Kind::UseAfterFree => 700,
            Kind::Misaligned => 716,
            Kind::Trap => 715,
            Kind::Assert => 710,
            Kind::Hang => 702,
            Kind::Unsupported => 218,
            _ => 719,
        }
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind of error.
    pub kind: Kind,
    /// Name of the kernel; empty outside of launches.
    pub kernel: String,
    /// Line of the PTX text; 0 if there is none.
    pub line: u32,
    /// Index of the CTA.
    pub cta: [u32; 3],
    /// Index of the thread in its CTA, all dimensions as one number.
    pub thread: u32,
    /// The address; 0 if there is none.
    pub address: u64,
    /// The circumstances.
    pub what: String,
    /// Number of times that it was found at this line.
    pub count: u64,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { kind, kernel, line, cta: [x, y, z], thread, address, what, count } = self;
        write!(f, "{}: kernel '{kernel}' line {line} CTA ({x}, {y}, {z}) thread {thread}", kind.name())?;
        write!(f, " address {address:#x}: {what} ({count} times)")
    }
}

/// Findings of a launch: one for each kind and line.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) list: Vec<Finding>,
}

/// Most findings that are kept of one launch.
const MOST: usize = 100;

impl Findings {
    /// Records a finding.
    pub(crate) fn add(&mut self, finding: Finding) {
        let same = |it: &&mut Finding| it.kind == finding.kind && it.line == finding.line;
        if let Some(known) = self.list.iter_mut().find(same) {
            known.count += 1;
        } else if self.list.len() < MOST {
            self.list.push(finding);
        }
    }
}
