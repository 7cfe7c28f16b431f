//! One suite for every backend: each operation against the oracle, and the properties no backend may lack.
//!
//! Inputs are pseudo-random but fixed. Every buffer an operation may write ends in a guard that must stay as
//! it is. A failure is a panic that names operation, sizes, element and both values. Whether a backend can
//! be made on this machine is the caller's to find out, and to report.
//! Invariant: the suite knows a backend by its trait only, never by the layout of its memory.

mod inputs;
mod pieces;
mod rig;

mod answers;

mod elementwise;
mod matmul;
mod moe;
mod norm;
mod products;
mod rope;
mod stage;
mod state;

mod attention;
mod heads;
mod odd;
mod sparse;
mod splits;

mod sampling;

mod family;
mod properties;
mod tiny;

pub use attention::{attention, attention_long, attention_looks, cache_types, copy_pages, scratch_company};
pub use elementwise::{activate, caps_and_gates, embed, embed_positions, sums};
pub use inputs::{few_types, noise};
pub use matmul::{matmul, matmul_company};
pub use moe::{moe, moe_company, moe_parts, moe_preparation};
pub use norm::norm;
pub use odd::{groups_of_all_sizes, numbers_that_are_none};
pub use products::products;
pub use properties::{chunking, company, moves, paging, stale_pages, wants};
pub use rope::{angles, rope};
pub use sampling::sample;
pub use sparse::{attention_of_some, unchosen_values};
pub use splits::{
    attention_over_splits, infinitely_small_scores, sources_over_splits, split_bits, unseen_splits,
};
pub use stage::{columns, stage_gathers, stage_given_up, stage_sums};
pub use state::{buffers, gather, hidden, samples_by_stack, slot_state};

use crate::backend::Backend;
use crate::quant::QuantType;
use elementwise::{ACTIVATIONS, activate_on};
use family::Family;
use inputs::{limits, scaled};
use properties::mixed_load;
use rig::Rig;
use tiny::Tiny;

/// How far a backend may be from the oracle, relative to the magnitude of the terms it sums.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Of matrix products, by the weights' type.
    pub matmul: fn(QuantType) -> f32,
    /// Of attention, by the cache's type; errors of the scores are scaled by the scores' largest magnitude.
    pub attention: fn(QuantType) -> f32,
    /// Of norms, rotations, activations and log-probabilities. An activation that is made of a power of e is bounded
    /// relative to its result times what the power's exponent counts: its rounding is one of the result, as often as it
    /// is large.
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
pub fn run<B: Backend>(make: impl Fn() -> B + Sync, bounds: Bounds) {
    // One type for every way of making a backend: the suite is compiled once for each backend.
    let make: &(dyn Fn() -> B + Sync) = &make;
    let (make, bounds) = (&make, &bounds);
    buffers(make);
    slot_state(make);
    gather(make);
    samples_by_stack(make);
    hidden(make);
    embed(make);
    embed_positions(make);
    sums(make, bounds);
    columns(make);
    stage_sums(make);
    stage_gathers(make);
    stage_given_up(make);
    caps_and_gates(make, bounds);
    activate(make, bounds);
    norm(make, bounds);
    angles(make, bounds);
    rope(make, bounds);
    matmul(make, bounds);
    matmul_company(make, bounds);
    products(make, bounds);
    moe(make, bounds);
    moe_company(make, bounds);
    moe_preparation(make, bounds);
    moe_parts(make, bounds);
    attention(make, bounds);
    attention_looks(make, bounds);
    cache_types(make);
    attention_long(make, bounds);
    attention_over_splits(make, bounds);
    sources_over_splits(make, bounds);
    unseen_splits(make, bounds);
    infinitely_small_scores(make, bounds);
    attention_of_some(make, bounds);
    unchosen_values(make, bounds);
    numbers_that_are_none(make, bounds);
    groups_of_all_sizes(make, bounds);
    scratch_company(make, bounds);
    copy_pages(make, bounds);
    sample(make, bounds);
    company(make, bounds);
    chunking(make, bounds);
    moves(make, bounds);
    paging(make, bounds);
    stale_pages(make, bounds);
    wants(make, bounds);
}

/// The bits of all rows' results of small models of every family under a mixed load, in every number format, and of
/// every activation: what must not differ between two backends that promise the same arithmetic, such as thread counts.
pub fn fingerprint<B: Backend>(make: &impl Fn() -> B) -> Vec<u32> {
    let mut bits = Vec::new();
    for case in Family::cases() {
        let answers = Tiny::new(make(), case, 32).serve(&mixed_load(case.0));
        bits.extend(answers.values().flatten().map(|value| value.to_bits()));
    }
    let mut rig = Rig::new(make(), limits(32));
    for act in ACTIVATIONS {
        let activated = activate_on(&mut rig, 64, act, &scaled(21, 64 * 300, 6.0), None);
        bits.extend(activated.iter().map(|value| value.to_bits()));
    }
    bits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::DeviceError;
    use crate::cpu::{CpuBackend, CpuConfig, Isa};
    use crate::quant::Inputs;
    use crate::reference::Reference;
    use std::io::Write;

    #[test]
    fn the_oracle_conforms_to_itself() {
        run(Reference::new, Bounds { elementwise: 0.0, ..Bounds::F32_FIXED_ORDER });
    }

    /// A way of making a backend. There is one type of it, so that the suite is compiled once.
    type Make<'a> = &'a (dyn Fn() -> CpuBackend + Sync);

    fn new(isa: Isa, threads: usize) -> Result<CpuBackend, DeviceError> {
        CpuBackend::new(CpuConfig { threads, isa, inputs: Inputs::Coded })
    }

    /// Whether this machine has the instruction set; says so where it has not.
    fn is_here(isa: Isa) -> bool {
        let made = new(isa, 1);
        if let Err(error) = &made {
            // Straight to the terminal: the harness keeps what macros print of a test that passes.
            let _ = writeln!(std::io::stderr(), "skipped: {}: {error}", isa.name());
        }
        made.is_ok()
    }

    /// What is made of products alone, for a set that differs from another one in nothing else.
    fn products_conform(isa: Isa) {
        if !is_here(isa) {
            return;
        }
        for threads in [1, 2] {
            let make: Make = &|| new(isa, threads).expect("this machine has the instruction set");
            embed(&make);
            embed_positions(&make);
            matmul(&make, &Bounds::F32_FIXED_ORDER);
            matmul_company(&make, &Bounds::F32_FIXED_ORDER);
            products(&make, &Bounds::F32_FIXED_ORDER);
            moe(&make, &Bounds::F32_FIXED_ORDER);
            moe_company(&make, &Bounds::F32_FIXED_ORDER);
            company(&make, &Bounds::F32_FIXED_ORDER);
        }
    }

    /// The whole suite for every number of threads, whose bits must agree.
    fn cpu_conforms(isa: Isa) {
        if !is_here(isa) {
            return;
        }
        let mut alone: Option<Vec<u32>> = None;
        for threads in [1, 2, 3] {
            let make: Make = &|| new(isa, threads).expect("this machine has the instruction set");
            run(make, Bounds::F32_FIXED_ORDER);
            let bits = fingerprint(&make);
            assert!(
                bits == *alone.get_or_insert(bits.clone()),
                "{}: {threads} threads, other bits",
                isa.name()
            );
        }
        let config = CpuConfig { threads: 2, isa, inputs: Inputs::Plain };
        let plain: Make = &|| CpuBackend::new(config).expect("this machine has the instruction set");
        matmul(&plain, &Bounds::F32_FIXED_ORDER);
        matmul_company(&plain, &Bounds::F32_FIXED_ORDER);
        moe(&plain, &Bounds::F32_FIXED_ORDER);
    }

    #[test]
    fn cpu_with_amx_conforms() {
        products_conform(Isa::Amx);
    }

    #[test]
    fn cpu_with_avx512_conforms() {
        cpu_conforms(Isa::Avx512);
    }

    #[test]
    fn cpu_with_the_first_avx512_conforms() {
        products_conform(Isa::Avx512F);
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
