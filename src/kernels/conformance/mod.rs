//! One suite for every backend: each operation against the oracle, and the properties no backend may lack.
//!
//! Inputs are pseudo-random but fixed. Every buffer an operation may write ends in a guard that must stay as
//! it is. A failure is a panic that names operation, sizes, element and both values. Whether a backend can
//! be made on this machine is the caller's to find out, and to report.
//! Invariant: the suite knows a backend by its trait only, never by the layout of its memory.

mod inputs;
mod rig;

mod attention;
mod operations;
mod sampling;

mod properties;

pub use attention::{attention, attention_long, copy_pages};
pub use inputs::noise;
pub use operations::{
    activate, add_and_reduce, buffers, embed, gather, matmul, matmul_company, norm, rope, slot_state,
};
pub use properties::{chunking, company, moves, paging, stale_pages};
pub use sampling::sample;

use crate::backend::Backend;
use crate::quant::QuantType;
use properties::{Tiny, mixed_load};

/// How far a backend may be from the oracle, relative to the magnitude of the terms it sums.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Of matrix products, by the weights' type.
    pub matmul: fn(QuantType) -> f32,
    /// Of attention, by the cache's type; errors of the scores are scaled by the scores' largest magnitude.
    pub attention: fn(QuantType) -> f32,
    /// Of norms, rotations, activations and log-probabilities.
    pub elementwise: f32,
    /// Between a backend's own results for one row in different company. 0 asks for the same bits.
    pub company: f32,
}

impl Bounds {
    /// F32 arithmetic throughout, weights and cache widened exactly, and a fixed order of summation.
    pub const F32_FIXED_ORDER: Bounds =
        Bounds { matmul: |_| 2e-6, attention: |_| 2e-6, elementwise: 1e-6, company: 0.0 };
}

/// Runs the whole suite.
pub fn run<B: Backend>(make: impl Fn() -> B, bounds: Bounds) {
    let (make, bounds) = (&make, &bounds);
    buffers(make);
    slot_state(make);
    embed(make);
    gather(make);
    add_and_reduce(make);
    activate(make, bounds);
    norm(make, bounds);
    rope(make, bounds);
    matmul(make, bounds);
    matmul_company(make, bounds);
    attention(make, bounds);
    attention_long(make, bounds);
    copy_pages(make, bounds);
    sample(make, bounds);
    company(make, bounds);
    chunking(make, bounds);
    moves(make, bounds);
    paging(make, bounds);
    stale_pages(make, bounds);
}

/// The bits of all rows' results of a small model under a mixed load, for every number format: what must not
/// differ between two backends that promise the same arithmetic, such as thread counts.
pub fn fingerprint<B: Backend>(make: &impl Fn() -> B) -> Vec<u32> {
    let mut bits = Vec::new();
    for ty in QuantType::all() {
        let answers = Tiny::new(make(), ty, 32).serve(&mixed_load());
        bits.extend(answers.values().flatten().map(|value| value.to_bits()));
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuBackend, CpuConfig, Isa};
    use crate::reference::Reference;
    use std::io::Write;

    #[test]
    fn the_oracle_conforms_to_itself() {
        run(Reference::new, Bounds { elementwise: 0.0, ..Bounds::F32_FIXED_ORDER });
    }

    /// The whole suite for every number of threads, whose bits must agree.
    fn cpu_conforms(isa: Isa) {
        let new = |threads| CpuBackend::new(CpuConfig { threads, isa });
        if let Err(error) = new(1) {
            // Straight to the terminal: the harness keeps what macros print of a test that passes.
            let _ = writeln!(std::io::stderr(), "skipped: {}: {error}", isa.name());
            return;
        }
        let make = |threads| move || new(threads).expect("this machine has the instruction set");
        let alone = fingerprint(&make(1));
        for threads in [1, 2, 3] {
            run(make(threads), Bounds::F32_FIXED_ORDER);
            assert!(fingerprint(&make(threads)) == alone, "{}: {threads} threads, other bits", isa.name());
        }
    }

    #[test]
    fn cpu_with_avx512_conforms() {
        cpu_conforms(Isa::Avx512);
    }

    #[test]
    fn cpu_with_avx2_conforms() {
        cpu_conforms(Isa::Avx2);
    }

    #[test]
    fn portable_cpu_conforms() {
        cpu_conforms(Isa::Portable);
    }
}
