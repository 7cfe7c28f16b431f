//! Configuration of a CPU device: threads, instruction set and activation precision.
//!
//! Invariant: plain data. Whether this CPU supports the instruction set is checked when the device is
//! created.

use crate::quant::ActivationPrecision;

/// Configuration of a [`CpuBackend`](super::CpuBackend).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Number of threads that work on a step, including the calling thread; at least 1.
    pub threads: usize,
    pub isa: Isa,
    pub activation_precision: ActivationPrecision,
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// The best instruction set that this CPU supports.
    Auto,
    /// Everything of `Avx512`, and AMX for int8 and BF16 GEMMs.
    Amx,
    /// AVX-512 F and BW and everything of `Avx2`; also VNNI, VBMI and BF16 where the CPU has them.
    Avx512,
    /// `Avx512` without VNNI, VBMI and BF16, as on the first CPUs with AVX-512.
    Avx512F,
    /// AVX2, FMA and F16C.
    Avx2,
    /// No particular instruction set. It has no fused multiply-add, so its results differ in bits from those
    /// of the others.
    Portable,
}

impl Isa {
    /// All instruction sets: `Auto`, then from best to worst.
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
