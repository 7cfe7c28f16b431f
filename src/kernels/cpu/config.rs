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
    /// What AVX-512 has, and AMX for products of BF16.
    Amx,
    /// AVX-512F and BW, with what AVX2 needs; VNNI, VBMI and BF16 where they are there.
    Avx512,
    /// The same without what is newer, as the first CPUs have it.
    Avx512F,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Nothing in particular. Its products are not fused, so its bits differ from the others'.
    Portable,
}

impl Isa {
    /// All of them, the best first behind `Auto`.
    pub const ALL: [Isa; 6] = [Isa::Auto, Isa::Amx, Isa::Avx512, Isa::Avx512F, Isa::Avx2, Isa::Portable];

    /// The name used in configuration and logs.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Auto => "auto",
            Isa::Amx => "amx",
            Isa::Avx512 => "avx512",
            Isa::Avx512F => "avx512f",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }
}
