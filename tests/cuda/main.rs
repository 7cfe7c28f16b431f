//! Whole engines on emulated GPUs, through the actors of serving: every partition against the CPU, GPUs
//! against GPUs in any company, devices that fail, and what is missing or too small. Without NVRTC the checks
//! are skipped, which is printed; with `NVRTC_FOLDER`, the folder that has it, they are required. Arguments
//! select the checks whose names contain one of them. `CUDA_EMULATOR_SEED` is the order of warps.
//!
//! A program without a harness, so that what is skipped is seen. It starts itself again for each check,
//! because the emulator reads its settings once.
//! Invariant: a check fails if the emulator finds anything wrong with a kernel or a call that the check does
//! not ask for.

#[allow(dead_code, unused_imports)] // Shared with tests/it, which uses all of it.
#[path = "../it/common.rs"]
mod common;

mod failures;

mod numbers;

#[allow(dead_code)] // As above.
#[path = "../it/program.rs"]
mod program;

use cuda::Emulator;
use mainstem_kernels::cuda::Nvrtc;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

/// A check: its name, settings of the emulator, what it does, and whether the emulator shall find something.
struct Check {
    name: &'static str,
    emulator: &'static [(&'static str, &'static str)],
    run: fn(),
    has_findings: bool,
}

/// Names a check that has settings of the emulator, and expects findings or not.
const fn with(
    name: &'static str,
    run: fn(),
    emulator: &'static [(&'static str, &'static str)],
    has_findings: bool,
) -> Check {
    Check { name, emulator, run, has_findings }
}

/// Names a check on two GPUs.
const fn on_two(name: &'static str, run: fn()) -> Check {
    with(name, run, &[("DEVICES", "2")], false)
}

const CHECKS: [Check; 15] = [
    on_two("partitions", numbers::partitions),
    on_two("company", numbers::company),
    on_two("decoders", numbers::decoders),
    on_two("openings", numbers::openings),
    on_two("encoders", numbers::encoders),
    on_two("formats", numbers::formats),
    with("demo", numbers::demo, &[("RACES", "0")], false),
    with("stories", numbers::stories, &[("RACES", "0")], false),
    with("a_failed_launch", failures::a_failed_launch, &[("INJECT", "launch=400 error=719")], true),
    with(
        "a_failed_rank",
        failures::a_failed_rank,
        &[("DEVICES", "2"), ("INJECT", "device=1 launch=300 error=700")],
        true,
    ),
    with("a_hang", failures::a_hang, &[("INJECT", "launch=400 hang")], true),
    with("no_memory", failures::no_memory, &[("INJECT", "alloc=20 error=2")], false),
    with("memory", failures::memory, &[("DEVICES", "2"), ("MEMORY", "50331648")], false),
    with("small_memory", failures::small_memory, &[("MEMORY", "2097152")], false),
    on_two("what_is_missing", failures::what_is_missing),
];

/// The check that this process is to run.
const VARIABLE: &str = "CUDA_CHECK";

fn main() -> ExitCode {
    if let Ok(name) = std::env::var(VARIABLE) {
        run(CHECKS.iter().find(|check| check.name == name).expect("the check exists"));
        return ExitCode::SUCCESS;
    }
    let folder = std::env::var_os("NVRTC_FOLDER").map(PathBuf::from);
    match Nvrtc::open(folder.as_deref()) {
        Ok(_) => {}
        Err(error) if folder.is_none() => {
            println!("skipped: engines on emulated GPUs ({error})");
            return ExitCode::SUCCESS;
        }
        Err(error) => panic!("NVRTC_FOLDER: {error}"),
    }
    let names: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    let is_wanted = |check: &&Check| names.is_empty() || names.iter().any(|name| check.name.contains(name));
    let mut failed = Vec::new();
    for check in CHECKS.iter().filter(is_wanted) {
        let began = Instant::now();
        let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
        command.env(VARIABLE, check.name);
        let variables = check.emulator.iter().map(|(name, value)| (format!("CUDA_EMULATOR_{name}"), value));
        let ended = command.envs(variables).status().expect("this program starts");
        let outcome = if ended.success() { "ok" } else { "FAILED" };
        println!("{}: {outcome}, {:.1} s", check.name, began.elapsed().as_secs_f32());
        if !ended.success() {
            failed.push(check.name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
    ExitCode::SUCCESS
}

fn run(check: &Check) {
    let emulator = Emulator::load();
    (check.run)();
    let findings = emulator.findings();
    assert_eq!(!findings.is_empty(), check.has_findings, "what the emulator found: {findings}");
}
