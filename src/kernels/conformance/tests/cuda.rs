//! The conformance suite over the CUDA backend, on an emulated GPU, or with `MAINSTEM_GPU` set on GPU 0 of
//! this machine. Without NVRTC it is skipped, which is printed; with `NVRTC_FOLDER`, the folder that has it,
//! it is required. Arguments select the parts whose names contain one of them. `CUDA_EMULATOR_SEED` is the
//! order of warps.
//!
//! A program without a harness, so that what is skipped is seen.

use mainstem_conformance as suite;
use mainstem_conformance::Bounds;
use mainstem_kernels::batch::{
    SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepOutput,
};
use mainstem_kernels::cuda::{CudaBackend, Driver, Nvrtc, ProgramCache};
use mainstem_kernels::random::noise;
use mainstem_kernels::reference::sample;
use mainstem_kernels::{ActivationPrecision, Backend, DeviceError, Fraction, SamplingInputs, StepLimits};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Bounds of F32 arithmetic in a fixed order, whose functions are within a few units in the last place.
const BOUNDS: Bounds =
    Bounds { matmul: |_| 2e-6, attention: |_| 2e-6, elementwise: 2e-6, batch_invariance: 0.0 };

/// A function that creates a backend: a single type, so that the suite is compiled once.
type Make<'a> = &'a (dyn Fn() -> CudaBackend + Sync);

/// A part of the suite.
type Part = fn(&Make, &Bounds);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, precision] = &arguments[..]
        && flag == "--part"
    {
        return run_part(name, precision);
    }
    let folder = nvrtc_folder();
    if let Err(error) = Nvrtc::open(folder.as_deref()) {
        assert!(folder.is_none(), "NVRTC_FOLDER: {error}");
        return println!("skipped: conformance of the CUDA backend ({error})");
    }
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
    let failed = run_jobs(&jobs, is_long_run);
    assert!(failed.is_empty(), "failed: {failed:?}");
    println!("{} parts passed", jobs.len());
}

/// Runs each part in a process of its own, as many at a time as there are cores, and prints what they print.
/// Returns those that failed.
fn run_jobs(jobs: &[(&str, &str)], is_long_run: bool) -> Vec<String> {
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let program = std::env::current_exe().unwrap();
    let work = || {
        while let Some((name, precision)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut part = Command::new(&program);
            if WITHOUT_RACES.contains(name) && !is_long_run {
                part.env("CUDA_EMULATOR_RACES", "0");
            }
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

/// Runs a part, and exits with a failure if it fails or the emulator finds something.
fn run_part(name: &str, precision: &str) {
    let emulator = (!is_gpu()).then(Emulator::load);
    let driver = Driver::open().unwrap();
    let kept = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let kept = if is_gpu() { std::env::temp_dir() } else { kept.to_owned() }.join("kernels");
    let programs = ProgramCache::open(nvrtc_folder().as_deref(), Some(kept), driver.version()).unwrap();
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
    let verdict = if is_good { "ok" } else { "FAILED" };
    println!("{name} ({precision}): {verdict}, {:.1} s", start.elapsed().as_secs_f32());
    if !is_good {
        println!("{findings}");
        std::process::exit(1);
    }
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
    matmul_heads, latent_attention, moe, moe_batch_invariance, moe_preparation, moe_expert_subsets, moe_expert_source, attention,
    attention_options, attention_long, attention_over_splits, encoder_inputs_over_splits, masked_splits,
    negative_infinite_scores, top_k_attention, unselected_values, non_finite_values, extreme_groups,
    encoder_batch_invariance, copy_pages, window_tables, window_copies, sample_tokens, host_draws,
    verification, batch_invariance, chunking, moves, paging, stale_pages, output_selection;
    buffers, allocated_bytes, step_brackets, slot_state, row_tokens, visible_values, gather,
    samples_by_stack, hidden, embed, embed_positions, columns, stage_all_reduce, stage_all_gather,
    stage_abort, packed_weights, cache_types, fetched_values, drawn_frequencies, lost_late_inputs,
    late_abort, drafts, quantized_inputs
};

/// The parts that depend on the precision of activations. The others run with one.
const MULTIPLYING: [&str; 11] = [
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
const LONG: [&str; 2] = ["drawn_frequencies", "attention_long"];

/// Parts that take long, too. They run without the search for races in global memory, unless with
/// `--ignored`: the same kernels run in others.
const WITHOUT_RACES: [&str; 5] =
    ["attention", "attention_options", "attention_over_splits", "window_tables", "matmul"];

/// Parts for the CUDA backend only.
const OWN_PARTS: &[(&str, Part)] = &[("flat_and_steep_logits", |make, _| flat_and_steep_logits(make))];

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
}
