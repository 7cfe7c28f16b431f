//! The conformance suite over the CUDA backend, on an emulated GPU. Without NVRTC it is skipped, which is
//! printed; with `NVRTC_FOLDER`, the folder that has it, it is required. Arguments select the parts whose
//! names contain one of them. `CUDA_EMULATOR_SEED` is the order of warps.
//!
//! A program without a harness, so that what is skipped is seen.

use mainstem_conformance as suite;
use mainstem_conformance::Bounds;
use mainstem_kernels::cuda::{CudaBackend, Driver, Nvrtc, ProgramCache};
use mainstem_kernels::{ActivationPrecision, DeviceError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Bounds of F32 arithmetic in a fixed order, whose functions are within a few units in the last place.
const BOUNDS: Bounds =
    Bounds { matmul: |_| 2e-6, attention: |_| 2e-6, elementwise: 2e-6, batch_invariance: 0.0 };

/// A function that creates a backend: a single type, so that the suite is compiled once.
type Make<'a> = &'a (dyn Fn() -> CudaBackend + Sync);

/// A part of the suite.
type Part = fn(&Make, &Bounds);

fn main() {
    let folder = std::env::var_os("NVRTC_FOLDER").map(PathBuf::from);
    let nvrtc = match Nvrtc::open(folder.as_deref()) {
        Ok(nvrtc) => nvrtc,
        Err(error) if folder.is_none() => {
            println!("skipped: conformance of the CUDA backend ({error})");
            return;
        }
        Err(error) => panic!("NVRTC_FOLDER: {error}"),
    };
    let emulator = Emulator::load();
    let driver = Driver::open().unwrap();
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    let programs = ProgramCache::new(nvrtc, Some(kept), driver.version());
    let make = |precision| {
        let programs = &programs;
        move || CudaBackend::new(&driver, 0, programs.clone(), precision).unwrap()
    };
    let (int8, f32) = (make(ActivationPrecision::Int8), make(ActivationPrecision::F32));
    let names: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let mut failed = Vec::new();
    for (name, part) in PARTS {
        if !names.is_empty() && !names.iter().any(|wanted| name.contains(wanted.as_str())) {
            continue;
        }
        for (precision, make) in [("int8", &int8 as Make), ("f32", &f32 as Make)] {
            if precision == "f32" && WITHOUT_PRODUCTS.iter().any(|part| name.starts_with(part)) {
                continue;
            }
            let start = Instant::now();
            let outcome = catch_unwind(AssertUnwindSafe(|| part(&make, &BOUNDS)));
            if let Err(panic) = &outcome
                && let Some(error) = panic.downcast_ref::<DeviceError>()
            {
                println!("{name}: {error}");
            }
            let findings = emulator.findings();
            let is_good = outcome.is_ok() && findings.is_empty();
            println!(
                "{name} ({precision}): {}, {:.1} s",
                if is_good { "ok" } else { "FAILED" },
                start.elapsed().as_secs_f32()
            );
            if !is_good {
                println!("{findings}");
                failed.push(format!("{name} ({precision})"));
                emulator.reset();
            }
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}

/// Lists parts of the suite that take bounds, and those that do not.
macro_rules! parts {
    ($($bounded:ident),*; $($unbounded:ident),*) => {
        &[
            $((stringify!($unbounded), |make, _| suite::$unbounded(make)),)*
            $((stringify!($bounded), |make, bounds| suite::$bounded(make, bounds)),)*
        ]
    };
}

/// All parts: those of [`suite::run`].
const PARTS: &[(&str, Part)] = parts! {
    sums, caps_and_gates, activate, norm, angles, rope, matmul, matmul_batch_invariance, gemms, divided_gemms,
    moe, moe_batch_invariance, moe_preparation, moe_expert_subsets, moe_expert_source, attention,
    attention_options, attention_long, attention_over_splits, encoder_inputs_over_splits, masked_splits,
    negative_infinite_scores, top_k_attention, unselected_values, non_finite_values, extreme_groups,
    encoder_batch_invariance, copy_pages, window_tables, window_copies, sample_tokens, host_draws,
    verification, batch_invariance, chunking, moves, paging, stale_pages, output_selection;
    buffers, allocated_bytes, step_brackets, slot_state, row_tokens, visible_values, gather,
    samples_by_stack, hidden, embed, embed_positions, columns, stage_all_reduce, stage_all_gather,
    stage_abort, packed_weights, cache_types, fetched_values, drawn_frequencies, lost_late_inputs,
    late_abort, drafts
};

/// Beginnings of the names of parts without products, for which the precision of activations is the same to
/// the backend. They run once.
const WITHOUT_PRODUCTS: &[&str] = &[
    "attention",
    "encoder_",
    "masked_splits",
    "negative_infinite",
    "top_k",
    "unselected",
    "fetched",
    "non_finite",
    "extreme_groups",
    "copy_pages",
    "window_",
    "visible_values",
];

/// The emulator of GPUs.
struct Emulator(libloading::Library);

impl Emulator {
    /// Loads the emulator. It is then found under the name of the driver.
    fn load() -> Emulator {
        let library = std::env::current_exe().unwrap().with_file_name("libcuda.so");
        // Sound: the library has no initializers.
        Emulator(unsafe { libloading::Library::new(&library) }.unwrap())
    }

    /// Returns what the emulator found wrong with kernels and calls so far.
    fn findings(&self) -> String {
        type Findings = unsafe extern "C" fn(*mut u8, usize) -> usize;
        let mut text = vec![0; 4096];
        // Sound: the function has this signature, and writes no more than it is told.
        let len = unsafe {
            let findings = self.0.get::<Findings>(b"cudaEmulatorFindings").unwrap();
            findings(text.as_mut_ptr(), text.len())
        };
        text.truncate(len);
        String::from_utf8_lossy(&text).trim_end_matches('\0').into()
    }

    /// Forgets findings.
    fn reset(&self) {
        // Sound: the function has this signature.
        unsafe { self.0.get::<unsafe extern "C" fn()>(b"cudaEmulatorReset").unwrap()() }
    }
}
