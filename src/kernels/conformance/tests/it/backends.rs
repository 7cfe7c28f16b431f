//! The conformance suite over the reference backend, and over the CPU backend with every instruction set.

use mainstem_conformance::{
    Bounds, batch_invariance, divided_gemms, embed, embed_positions, fingerprint, gemms, matmul,
    matmul_batch_invariance, matmul_heads, moe, moe_batch_invariance, packed_weights, run,
};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{ActivationPrecision, DeviceError, QuantType};
use std::io::Write;

#[test]
fn the_oracle_conforms_to_itself() {
    run(Reference::new, Bounds { elementwise: 0.0, ..Bounds::F32_FIXED_ORDER });
}

/// A function that creates a backend: a single type, so that the suite is compiled once.
type Make<'a> = &'a (dyn Fn() -> CpuBackend + Sync);

fn new(isa: Isa, threads: usize) -> Result<CpuBackend, DeviceError> {
    CpuBackend::new(CpuConfig { threads, isa, activation_precision: ActivationPrecision::Int8 })
}

/// Returns whether this machine has the instruction set, and prints a note if not.
fn is_supported(isa: Isa) -> bool {
    let backend = new(isa, 1);
    if let Err(error) = &backend {
        // Written directly to stderr: the test harness captures the output of macros in passing tests.
        let _ = writeln!(std::io::stderr(), "skipped: {}: {error}", isa.name());
    }
    backend.is_ok()
}

/// Tests only operations with GEMMs, for an instruction set that differs from another one in nothing
/// else.
fn gemms_conform(isa: Isa) {
    if !is_supported(isa) {
        return;
    }
    // With AMX, inputs of F16 weights are pairs of BF16, whose products are within 2^-15.
    let pairs: fn(QuantType) -> f32 = |ty| if ty == QuantType::F16 { 3.1e-5 } else { 2e-6 };
    let exact = Bounds::F32_FIXED_ORDER;
    let bounds = if isa == Isa::Amx { Bounds { matmul: pairs, ..exact } } else { exact };
    for threads in [1, 2] {
        let make: Make = &|| new(isa, threads).expect("this machine has the instruction set");
        embed(&make);
        embed_positions(&make);
        matmul(&make, &bounds);
        matmul_batch_invariance(&make, &bounds);
        gemms(&make, &bounds);
        divided_gemms(&make, &bounds);
        matmul_heads(&make, &bounds);
        packed_weights(&make);
        moe(&make, &bounds);
        moe_batch_invariance(&make, &Bounds::F32_FIXED_ORDER);
        batch_invariance(&make, &Bounds::F32_FIXED_ORDER);
    }
}

/// Runs the whole suite with several numbers of threads, whose bits must be equal.
fn cpu_conforms(isa: Isa) {
    if !is_supported(isa) {
        return;
    }
    let mut first: Option<Vec<u32>> = None;
    for threads in [1, 2, 3] {
        let make: Make = &|| new(isa, threads).expect("this machine has the instruction set");
        run(make, Bounds::F32_FIXED_ORDER);
        let bits = fingerprint(&make);
        assert!(
            bits == *first.get_or_insert(bits.clone()),
            "{}: different bits with {threads} threads",
            isa.name()
        );
    }
    let config = CpuConfig { threads: 2, isa, activation_precision: ActivationPrecision::F32 };
    let plain: Make = &|| CpuBackend::new(config).expect("this machine has the instruction set");
    matmul(&plain, &Bounds::F32_FIXED_ORDER);
    packed_weights(&plain);
    matmul_batch_invariance(&plain, &Bounds::F32_FIXED_ORDER);
    moe(&plain, &Bounds::F32_FIXED_ORDER);
}

#[test]
fn cpu_with_amx_conforms() {
    gemms_conform(Isa::Amx);
}

#[test]
fn cpu_with_avx512_conforms() {
    cpu_conforms(Isa::Avx512);
}

#[test]
fn cpu_with_the_first_avx512_conforms() {
    gemms_conform(Isa::Avx512F);
}

#[test]
fn cpu_with_avx2_conforms() {
    cpu_conforms(Isa::Avx2);
}

#[test]
fn portable_cpu_conforms() {
    cpu_conforms(Isa::Portable);
}
