//! Settings of the emulator, from environment variables.

use crate::coverage::Coverage;
use std::env;
use std::path::Path;
use std::sync::Arc;

/// A failure that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Injection {
    /// The device; none for any.
    pub(super) device: Option<usize>,
    /// The launch, counted from 1 on its device; 0 if none.
    pub(super) launch: u64,
    /// The allocation, counted from 1 on its device; 0 if none.
    pub(super) alloc: u64,
    /// Whether all questions about the device's properties fail.
    pub(super) properties: bool,
    /// The error; 0 to hang.
    pub(super) error: u32,
}

/// Settings.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// `CUDA_EMULATOR_DEVICES`: number of devices.
    pub(super) devices: usize,
    /// `CUDA_EMULATOR_COMPUTE`: compute capability, as `8.0`; kept as 80.
    pub(super) arch: u32,
    /// `CUDA_EMULATOR_MEMORY`: bytes of each device.
    pub(super) memory: u64,
    /// `CUDA_EMULATOR_SEED`: seed of the order of warps, and of the moments at which queued work runs.
    pub(super) seed: u64,
    /// `CUDA_EMULATOR_EAGER`: percentage of calls after which some queued work runs.
    pub(super) eager: u64,
    /// `CUDA_EMULATOR_DRIVER`: version, as 13000.
    pub(super) driver: i32,
    /// `CUDA_EMULATOR_FINDINGS`: `record` to go on after a finding that hardware would not notice.
    pub(super) record_only: bool,
    /// `CUDA_EMULATOR_POOLS`: 0 for devices without stream-ordered allocation.
    pub(super) pools: bool,
    /// `CUDA_EMULATOR_RACES`: 0 to look for no races in global memory.
    pub(super) global_races: bool,
    /// `CUDA_EMULATOR_CORNERS`: 1 to run only the CTAs at the corners of grids.
    pub(super) corners: bool,
    /// `CUDA_EMULATOR_COVERAGE`: a file that executed lines are appended to.
    pub(super) coverage: Option<Arc<Coverage>>,
    /// `CUDA_EMULATOR_INSTRUCTIONS`: most instructions of warps in a launch.
    pub(super) instructions: u64,
    /// `CUDA_EMULATOR_INJECT`: failures, as `device=1 launch=17 error=719; alloc=3 error=2; launch=5 hang`.
    pub(super) injections: Vec<Injection>,
}

fn number(name: &str, default: u64) -> u64 {
    env::var(name).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

fn coverage(path: &Path) -> Option<Arc<Coverage>> {
    let opened = Coverage::open(path);
    let opened = opened.inspect_err(|error| eprintln!("cuda-emulator: CUDA_EMULATOR_COVERAGE: {error}"));
    opened.ok().map(Arc::new)
}

impl Settings {
    /// Reads the environment.
    pub(super) fn read() -> Settings {
        let compute = env::var("CUDA_EMULATOR_COMPUTE").unwrap_or_else(|_| "8.0".to_owned());
        let (major, minor) = compute.split_once('.').unwrap_or((&compute, "0"));
        let digits = |text: &str, default| text.trim().parse::<u32>().unwrap_or(default);
        Settings {
            devices: number("CUDA_EMULATOR_DEVICES", 1) as usize,
            arch: digits(major, 8) * 10 + digits(minor, 0),
            memory: number("CUDA_EMULATOR_MEMORY", 4 << 30),
            seed: number("CUDA_EMULATOR_SEED", 0),
            eager: number("CUDA_EMULATOR_EAGER", 10),
            driver: number("CUDA_EMULATOR_DRIVER", 13_000) as i32,
            record_only: env::var("CUDA_EMULATOR_FINDINGS").is_ok_and(|text| text.trim() == "record"),
            pools: number("CUDA_EMULATOR_POOLS", 1) != 0,
            global_races: number("CUDA_EMULATOR_RACES", 1) != 0,
            corners: number("CUDA_EMULATOR_CORNERS", 0) != 0,
            coverage: env::var_os("CUDA_EMULATOR_COVERAGE").and_then(|path| coverage(Path::new(&path))),
            instructions: number("CUDA_EMULATOR_INSTRUCTIONS", 1 << 32),
            injections: injections(&env::var("CUDA_EMULATOR_INJECT").unwrap_or_default()),
        }
    }

    /// The newest PTX that the driver takes, as 88 for 8.8.
    pub(super) fn newest_ptx(&self) -> u32 {
        match self.driver {
            ..12_000 => 78,
            12_000..12_060 => 80 + (self.driver as u32 - 12_000) / 10,
            12_060..12_080 => 85,
            12_080..12_090 => 87,
            12_090..13_000 => 88,
            _ => 90 + (self.driver as u32 - 13_000) / 10 + 9,
        }
    }
}

/// Reads failures, which are divided by semicolons; what is not understood is left out.
fn injections(text: &str) -> Vec<Injection> {
    let mut found = Vec::new();
    for part in text.split(';').filter(|part| !part.trim().is_empty()) {
        let mut injection = Injection { device: None, launch: 0, alloc: 0, properties: false, error: 719 };
        for word in part.split_whitespace() {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let value = value.parse::<u64>().unwrap_or(0);
            match key {
                "device" => injection.device = Some(value as usize),
                "launch" => injection.launch = value,
                "alloc" => injection.alloc = value,
                "error" => injection.error = value as u32,
                "properties" => injection.properties = true,
                "hang" => injection.error = 0,
                _ => {}
            }
        }
        found.push(injection);
    }
    found
}
