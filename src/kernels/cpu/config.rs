//! What a CPU device is made of: threads and an instruction set.
//!
//! Invariant: plain data; whether this CPU has the set is found out when the device is made.

use crate::quant::Inputs;

/// How to make a [`CpuBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that work on a step, the driving one counted; at least 1.
    pub threads: usize,
    pub isa: Isa,
    pub inputs: Inputs,
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// The best this CPU has.
    Auto,
    /// AVX-512F, with what AVX2 needs.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Nothing in particular. Its products are not fused, so its bits differ from the others'.
    Portable,
}

impl Isa {
    /// The name used in configuration and logs.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Auto => "auto",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }
}
