//! The conformance suite over the CUDA backend, on an emulated GPU, or with `MAINSTEM_GPU` set on GPU 0 of
//! this machine. Without NVRTC it is skipped, which is printed; with `NVRTC_FOLDER`, the folder that has it,
//! it is required. Arguments select the parts whose names contain one of them. `--coverage` fails if a line
//! of a kernel is not executed ([`coverage`]). `CUDA_EMULATOR_SEED` is the order of warps.
//!
//! A program without a harness, so that what is skipped is seen.

mod coverage;

use cuda::Emulator;
use mainstem_conformance::*;
use mainstem_kernels::batch::{
    SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepOutput,
};
use mainstem_kernels::cuda::{CudaBackend, Driver, Nvrtc, ProgramCache, Version};
use mainstem_kernels::late::LateInputs;
use mainstem_kernels::random::noise;
use mainstem_kernels::reference::sample;
use mainstem_kernels::{ActivationPrecision, Backend, DeviceError, Fraction, SamplingInputs, StepLimits};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Bounds of F32 arithmetic in a fixed order, whose functions are within a few units in the last place.
const BOUNDS: Bounds =
    Bounds { matmul: |_| 2e-6, attention: |_| 2e-6, elementwise: 2e-6, batch_invariance: 0.0 };

/// A function that creates a backend: a single type, so that the suite is compiled once.
type Make<'a> = &'a (dyn Fn() -> CudaBackend + Sync);

/// A part of the suite. It returns false if it does not apply to the backend.
type Part = fn(&Make, &Bounds) -> bool;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, precision] = &arguments[..]
        && flag == "--part"
    {
        return run_part(name, precision);
    }
    let folder = nvrtc_folder();
    let nvrtc = match Nvrtc::open(folder.as_deref()) {
        Ok(nvrtc) => nvrtc,
        Err(error) if folder.is_none() => {
            return println!("skipped: conformance of the CUDA backend ({error})");
        }
        Err(error) => panic!("NVRTC_FOLDER: {error}"),
    };
    let names: Vec<&String> = arguments.iter().filter(|name| !name.starts_with('-')).collect();
    let is_long_run = arguments.iter().any(|argument| argument == "--ignored");
    let is_wanted = |part: &str| match names.is_empty() {
        true => is_long_run || !LONG.contains(&part),
        false => names.iter().any(|name| part.contains(name.as_str())),
    };
    let parts = PARTS.iter().chain(OWN_PARTS).map(|(name, _)| *name).filter(|name| is_wanted(name));
    let jobs: Vec<(&str, &str)> = parts
        .flat_map(|name| {
            let precisions: &[&str] = if MULTIPLYING.contains(&name) { &["int8", "f32"] } else { &["int8"] };
            precisions.iter().map(move |precision| (name, *precision))
        })
        .collect();
    let executed = arguments.iter().any(|argument| argument == "--coverage").then(coverage::begin);
    let failed = run_jobs(&jobs, is_long_run, executed.as_deref());
    assert!(failed.is_empty(), "failed: {failed:?}");
    println!("{} parts passed", jobs.len());
    if let Some(executed) = executed {
        let left = coverage::unexecuted(&program_cache(nvrtc.version(), true), &executed);
        assert!(left.is_empty(), "lines of kernels that the suite does not execute:\n{}", left.join("\n"));
    }
}

/// Runs each part in a process of its own, as many at a time as there are cores, and prints what they print.
/// Executed lines of kernels are added to a file, if it is given. Returns those that failed.
fn run_jobs(jobs: &[(&str, &str)], is_long_run: bool, executed: Option<&Path>) -> Vec<String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let program = std::env::current_exe().unwrap();
    let work = || {
        while let Some((name, precision)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut part = Command::new(&program);
            if executed.is_some() || WITHOUT_RACES.contains(name) && !is_long_run {
                part.env("CUDA_EMULATOR_RACES", "0");
            }
            part.envs(
                SPARSE.iter().filter(|(part, ..)| part == name).map(|(_, variable, value)| (variable, value)),
            );
            part.envs(executed.map(|file| (coverage::VARIABLE, file)));
            let output = part.args(["--part", name, precision]).output().unwrap();
            let mut failed = failed.lock().unwrap();
            print!("{}", String::from_utf8_lossy(&output.stdout));
            if !output.status.success() {
                print!("{}", String::from_utf8_lossy(&output.stderr));
                failed.push(format!("{name} ({precision})"));
            }
        }
    };
    std::thread::scope(|scope| {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        // Each takes memory of a GPU for itself.
        let cores = if is_gpu() { cores.min(2) } else { cores };
        (0..cores).for_each(|_| _ = scope.spawn(work));
    });
    failed.into_inner().unwrap()
}

/// Returns whether the GPU of this machine is used, rather than an emulated one.
fn is_gpu() -> bool {
    std::env::var_os("MAINSTEM_GPU").is_some()
}

/// Returns the folder that `NVRTC_FOLDER` names.
fn nvrtc_folder() -> Option<PathBuf> {
    std::env::var_os("NVRTC_FOLDER").map(PathBuf::from)
}

/// Returns the compiler of kernels for a driver, which says of each instruction which line it is from if
/// executed lines are recorded.
fn program_cache(driver: Version, is_recording: bool) -> ProgramCache {
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let kept = Some(if is_gpu() { std::env::temp_dir() } else { kept.to_owned() }.join("kernels"));
    let folder = nvrtc_folder();
    if is_recording {
        let nvrtc = Nvrtc::open(folder.as_deref()).unwrap();
        return ProgramCache::new(nvrtc.with_line_info(), kept, driver);
    }
    ProgramCache::open(folder.as_deref(), kept, driver).unwrap()
}

/// Runs a part, and exits with a failure if it fails or the emulator finds something.
fn run_part(name: &str, precision: &str) {
    let emulator = (!is_gpu()).then(Emulator::load);
    let driver = Driver::open().unwrap();
    let programs = program_cache(driver.version(), std::env::var_os(coverage::VARIABLE).is_some());
    let activations = if precision == "int8" { ActivationPrecision::Int8 } else { ActivationPrecision::F32 };
    let make = || CudaBackend::new(&driver, 0, programs.clone(), activations).unwrap();
    let (_, part) = PARTS.iter().chain(OWN_PARTS).find(|(part, _)| *part == name).unwrap();
    let start = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| part(&(&make as Make), &BOUNDS)));
    // Errors of the device unwind without a message.
    if let Err(panic) = &outcome
        && let Some(error) = panic.downcast_ref::<DeviceError>()
    {
        println!("{name}: {error}");
    }
    let findings = emulator.as_ref().map_or_else(String::new, Emulator::findings);
    let is_good = outcome.is_ok() && findings.is_empty();
    let verdict = match outcome {
        Ok(false) if is_good => "not applicable",
        _ if is_good => "ok",
        _ => "FAILED",
    };
    println!("{name} ({precision}): {verdict}, {:.1} s", start.elapsed().as_secs_f32());
    if !is_good {
        println!("{findings}");
        std::process::exit(1);
    }
}

/// Lists parts of the suite that take bounds, those that do not, and those that may not apply.
macro_rules! parts {
    ($($bounded:ident),*; $($unbounded:ident),*; $($optional:ident),*) => {
        &[
            $((stringify!($optional), |make, _| $optional(make)),)*
            $((stringify!($unbounded), |make, _| {
                $unbounded(make);
                true
            }),)*
            $((stringify!($bounded), |make, bounds| {
                $bounded(make, bounds);
                true
            }),)*
        ]
    };
}

/// All parts: those of [`mainstem_conformance::run`].
const PARTS: &[(&str, Part)] = parts! {
    sums, caps_and_gates, activate, norm, angles, rope, matmul, matmul_batch_invariance, gemms, divided_gemms,
    matmul_heads, latent_attention, latent_attention_long, moe, moe_batch_invariance, moe_preparation,
    moe_expert_subsets, moe_expert_source, attention, attention_options, attention_long,
    attention_over_splits, encoder_inputs_over_splits, masked_splits, negative_infinite_scores,
    top_k_attention, unselected_values, non_finite_values, extreme_groups, encoder_batch_invariance,
    copy_pages, window_tables, window_copies, sample_tokens, host_draws, verification,
    batch_invariance, chunking, moves, paging, stale_pages, output_selection;
    buffers, allocated_bytes, step_brackets, slot_state, row_tokens, visible_values, gather,
    samples_by_stack, hidden, embed, embed_positions, columns, stage_all_reduce, stage_all_gather,
    stage_abort, packed_weights, cache_types, drawn_frequencies, lost_late_inputs,
    late_abort, drafts, penalties, quantized_inputs;
    fetched_values
};

/// The parts that depend on the precision of activations. The others run with one.
const MULTIPLYING: [&str; 12] = [
    "long_matrices",
    "matmul",
    "matmul_batch_invariance",
    "gemms",
    "divided_gemms",
    "packed_weights",
    "moe",
    "moe_batch_invariance",
    "moe_preparation",
    "moe_expert_subsets",
    "moe_expert_source",
    "quantized_inputs",
];

/// Parts that take long on the emulator, and run only if they are named or with `--ignored`. Others show that
/// tokens are those of the reference, whose frequencies are known, and attend over several splits.
const LONG: [&str; 3] = ["drawn_frequencies", "attention_long", "latent_attention_long"];

/// Parts that take long, too. They run without the search for races in global memory, unless with
/// `--ignored`: the same kernels run in others, those of whole models in `batch_invariance`.
const WITHOUT_RACES: [&str; 10] = [
    "attention",
    "attention_options",
    "attention_over_splits",
    "window_tables",
    "matmul",
    "chunking",
    "moves",
    "paging",
    "stale_pages",
    "output_selection",
];

/// Settings of the emulator for parts with buffers of which only the ends are accessed.
const SPARSE: [(&str, &str, &str); 3] = [
    ("long_caches", "CUDA_EMULATOR_MEMORY", "68719476736"),
    ("long_matrices", "CUDA_EMULATOR_MEMORY", "68719476736"),
    ("long_matrices", "CUDA_EMULATOR_CORNERS", "1"),
];

/// Parts for the CUDA backend only.
const OWN_PARTS: &[(&str, Part)] = parts! {
    ;
    flat_and_steep_logits, copied_masks, long_caches, long_matrices;
};

/// Tests that of masks only what changed since the step before is copied, and that rows have their own masks
/// nevertheless, whichever they had before.
fn copied_masks(make: &Make) {
    const ROWS: usize = 5;
    let limits = sampling_limits(ROWS, 70_000);
    let words = limits.mask_words();
    let mut backend = make();
    backend.prepare(&limits).unwrap();
    let mut buf = backend.alloc(limits.logit_rows * limits.vocab * 4).unwrap();
    let logits: Vec<f32> = (0..limits.vocab).map(|id| -(id as f32)).collect();
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
    backend.upload(&mut buf, 0, &bytes.repeat(ROWS));
    // The lowest id that each row's mask allows, and the words that are copied.
    let both = [[40, 69_999, 5, 33_000, 7], [69_998, 3, 5, 33_000, 64]];
    let steps = [(both[0], None), (both[0], Some(0)), (both[1], None), (both[0], None), ([40; ROWS], None)];
    let (last, one) = ([40, 40, 72, 40, 40], Some(2));
    let mut without = 0;
    for (step, (allowed, copied)) in steps.into_iter().chain([(last, one), (last, Some(0))]).enumerate() {
        let late = Arc::new(LateInputs::default());
        for (row, id) in allowed.into_iter().enumerate() {
            let mask: Vec<u32> = (0..words).map(|word| u32::from(word == id / 32) << (id % 32)).collect();
            late.mask_sender(row).send(mask.into());
        }
        let batch = StepBatch {
            step: step as u64,
            spans: vec![sampled_span(ROWS)],
            tokens: vec![0; ROWS],
            sampling: vec![SamplingParams { masked: true, ..SamplingParams::GREEDY }; ROWS],
            ..StepBatch::default()
        };
        let mut out = StepOutput::with_capacity(&limits);
        backend.begin_step(&batch);
        let before = backend.uploaded_bytes();
        backend.sample(0..ROWS, &buf, SamplingInputs { late: Some(&late), ..Default::default() }, &mut out);
        let uploaded = (backend.uploaded_bytes() - before) as usize;
        backend.end_step();
        let tokens: Vec<usize> = out.tokens.iter().map(|row| row.token as usize).collect();
        assert_eq!(tokens, allowed, "step {step}");
        match copied {
            Some(0) if without == 0 => without = uploaded,
            Some(words) => assert_eq!(uploaded, without + words * 4, "step {step}"),
            None => {}
        }
    }
}

/// Tests that the tokens of rows with flat, tied and steep logits are those of the reference, with every
/// filter and many seeds.
fn flat_and_steep_logits(make: &Make) {
    const FILTERS: [(u32, f32, f32); 7] = [
        (0, 1.0, 0.0),
        (0, 0.9, 0.0),
        (0, 1.0, 0.05),
        (300, 0.99, 0.0),
        (5000, 1.0, 0.01),
        (9000, 0.5, 0.1),
        (700, 0.0, 1.0),
    ];
    let params: Vec<SamplingParams> = (0..FILTERS.len() * 8)
        .map(|row| {
            let ((top_k, top_p, min_p), temperature) = (FILTERS[row / 8], 0.7);
            let (position, seed) = (row as u32, row as u64 * 0x1_2345_6789);
            SamplingParams { position, seed, temperature, top_k, top_p, min_p, ..SamplingParams::GREEDY }
        })
        .collect();
    let limits = sampling_limits(params.len(), 5003);
    let mut backend = make();
    backend.prepare(&limits).unwrap();
    let mut buf = backend.alloc(limits.logit_rows * limits.vocab * 4).unwrap();
    for (step, (tag, steepness)) in
        [(1, 0.0), (2, 1e-3), (3, 1.0), (4, 4.0), (5, 60.0)].into_iter().enumerate()
    {
        let logits: Vec<f32> = noise(tag, limits.vocab).iter().map(|x| x * steepness).collect();
        let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_le_bytes()).collect();
        backend.upload(&mut buf, 0, &bytes.repeat(params.len()));
        let spans = vec![sampled_span(params.len())];
        let (tokens, sampling) = (vec![0; params.len()], params.clone());
        let batch = StepBatch { step: step as u64, spans, tokens, sampling, ..StepBatch::default() };
        let mut out = StepOutput::with_capacity(&limits);
        backend.begin_step(&batch);
        backend.sample(0..params.len(), &buf, SamplingInputs::default(), &mut out);
        backend.end_step();
        for (row, result) in params.iter().zip(&out.tokens) {
            let expected = sample(&logits, &[], None, row);
            assert_eq!(Ok(result.token), expected, "steepness {steepness}, {row:?}");
        }
    }
}

/// Returns the limits of steps whose rows are all sampled.
fn sampling_limits(rows: usize, vocab: usize) -> StepLimits {
    StepLimits {
        slots: 1,
        rows,
        batch_rows: usize::MAX,
        logit_rows: rows,
        positions: rows,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 0,
        vocab,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    }
}

/// Returns a span of which all rows are sampled.
fn sampled_span(rows: usize) -> Span {
    Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: 0,
        start: 0,
        tokens: SpanTokens::Given { at: 0, len: rows as u32 },
        table: SpanTable::Own,
        reserved: rows as u32,
        encoder_len: 0,
        output: SpanOutput::All,
    }
}
