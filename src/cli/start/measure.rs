//! Speed measurement of this machine's devices, for the planner.
//!
//! A GEMM of a large matrix with one row is bound by memory bandwidth, with many rows by arithmetic, and one
//! of a small matrix by the overhead of an operation. Each is repeated for a short time, and the fastest run
//! counts.
//! Invariant: everything that is allocated here is freed when the measurement ends.

use super::devices::cpu_backend;
use super::gpus;
use crate::actors::engine::available_memory;
use crate::config::{DeviceConfig, DeviceKind, DeviceName};
use crate::planner::{Device, Hardware, Link, SharedMemory};
use anyhow::{Context, Result, bail};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{Backend, Fraction, QuantType, StepLimits};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// Width of the square F32 matrix: 64 MiB, more than most caches hold. With many devices each has a smaller
/// matrix, and the measured bandwidth is an upper bound.
const WIDTH: usize = 4096;

/// Maximum number of full matrices at once: 512 MiB. With more devices, each has a part of the rows.
const FULL_MATRICES_MAX: usize = 8;

const SQUARE: (usize, usize) = (WIDTH, WIDTH);

/// Width of a matrix that fits any cache.
const SMALL: usize = 64;

/// Rows of the GEMM that is bound by arithmetic.
const ROWS: usize = 64;

/// Duration of each measurement.
const MEASURE_TIME: Duration = Duration::from_millis(80);

/// Least number of runs of a measurement, so that other work does not disturb all of them.
const RUNS_MIN: u32 = 4;

/// Number of round trips between two threads.
const ROUND_TRIPS: u32 = 500;

/// Measures the weight bytes per second that a device reads alone.
pub fn bandwidth(config: &DeviceConfig, device: DeviceName) -> Result<f64> {
    Ok(row_bytes(WIDTH) / min_seconds(gemm(config, device, SQUARE, 1)?))
}

/// Returns the bytes of `rows` rows of the large matrix.
fn row_bytes(rows: usize) -> f64 {
    (rows * WIDTH * size_of::<f32>()) as f64
}

/// Measures this machine with the configured devices. One device of each kind is measured for all of them.
pub fn measure_machine(config: &DeviceConfig) -> Result<Hardware> {
    let mut kinds: Vec<(DeviceKind, Device)> = Vec::new();
    for device in config.devices() {
        if !kinds.iter().any(|(kind, _)| *kind == device.kind) {
            kinds.push((device.kind, measure_device(config, *device)?));
        }
    }
    let of_kind = |device: &DeviceName| kinds.iter().find(|(kind, _)| *kind == device.kind).map(|it| it.1);
    let link = Link { latency: thread_latency()?, bandwidth: copy_bandwidth() };
    Ok(Hardware {
        name: "this machine".to_owned(),
        devices: config.devices().filter_map(of_kind).collect(),
        shared_memory: SharedMemory {
            bandwidth: combined_bandwidth(config)?,
            memory: gpus::free_memory(config)? as f64,
        },
        intra_stage_link: link,
        inter_stage_link: link,
        overhead_seconds: 0.0,
    })
}

/// Measures a device alone.
fn measure_device(config: &DeviceConfig, device: DeviceName) -> Result<Device> {
    let rows = match device.kind {
        DeviceKind::Cpu | DeviceKind::Cuda => ROWS,
        // The reference backend reads the matrix again for each row.
        DeviceKind::Reference | DeviceKind::Fake { .. } => 1,
    };
    Ok(Device {
        bandwidth: bandwidth(config, device)?,
        flops: 2.0 * (rows * WIDTH * WIDTH) as f64 / min_seconds(gemm(config, device, SQUARE, rows)?),
        memory: gpus::own_memory(device)?.unwrap_or_else(available_memory) as f64,
        op_seconds: operation_seconds(config, device)?,
    })
}

/// Measures the bytes per second that all devices read together when they run at the same time.
fn combined_bandwidth(config: &DeviceConfig) -> Result<f64> {
    let devices = config.devices().count();
    let (begin, out) = (Arc::new(Barrier::new(devices)), rows_per_device(devices));
    let start_reading = |device: &DeviceName| {
        let (config, begin, device) = (config.clone(), begin.clone(), *device);
        thread::spawn(move || -> Result<f64> {
            let product = gemm(&config, device, (out, WIDTH), 1);
            begin.wait();
            Ok(row_bytes(out) / mean_seconds(product?))
        })
    };
    let threads: Vec<_> = config.devices().map(start_reading).collect();
    let each =
        threads.into_iter().map(|thread| thread.join().ok().context("a measurement thread has panicked")?);
    each.sum()
}

/// Returns the matrix rows per device when `devices` run at once: all rows for up to [`FULL_MATRICES_MAX`]
/// devices.
fn rows_per_device(devices: usize) -> usize {
    (WIDTH * FULL_MATRICES_MAX / devices).clamp(1, WIDTH)
}

/// Measures the seconds that a message takes to reach a sleeping thread.
fn thread_latency() -> Result<f64> {
    let (there, at_work) = mpsc::channel();
    let (back, answers) = mpsc::channel();
    let echo = thread::spawn(move || at_work.into_iter().try_for_each(|()| back.send(())));
    let began = Instant::now();
    for _ in 0..ROUND_TRIPS {
        there.send(()).context("a measurement thread has panicked")?;
        answers.recv().context("a measurement thread has panicked")?;
    }
    let seconds = began.elapsed().as_secs_f64() / f64::from(2 * ROUND_TRIPS);
    drop(there);
    let _ = echo.join();
    Ok(seconds)
}

/// Measures the bytes per second that a thread copies.
fn copy_bandwidth() -> f64 {
    let (from, mut to) = (vec![1u8; 4 << 20], vec![0u8; 4 << 20]);
    let seconds = min_seconds(|| {
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
    });
    from.len() as f64 / seconds
}

/// A GEMM that runs at each call.
type GemmFn = Box<dyn FnMut()>;

/// Prepares a GEMM of `rows` rows with a zero matrix (N, K) on a device.
fn gemm(config: &DeviceConfig, device: DeviceName, matrix: (usize, usize), rows: usize) -> Result<GemmFn> {
    match device.kind {
        DeviceKind::Cpu => gemm_on(cpu_backend(0, config)?, matrix, rows),
        DeviceKind::Reference => gemm_on(Reference::new(), matrix, rows),
        DeviceKind::Cuda => gemm_on(gpus::backend(device, config)?, matrix, rows),
        DeviceKind::Fake { .. } => bail!("fake devices compute nothing, so their speed cannot be measured"),
    }
}

fn gemm_on<B: Backend + 'static>(mut backend: B, (n, k): (usize, usize), rows: usize) -> Result<GemmFn> {
    let bytes = vec![0; n * k * size_of::<f32>()];
    let weight = backend.upload_weight(QuantType::F32, n, k, &bytes)?;
    let x = backend.alloc(rows * k * size_of::<f32>())?;
    let mut y = backend.alloc(rows * n * size_of::<f32>())?;
    backend.prepare(&limits(1, rows, 1))?;
    Ok(Box::new(move || {
        backend.matmul(rows, &weight, None, &x, &mut y);
        // A GPU computes when its results are waited for.
        backend.download(&y, 0, &mut [0; size_of::<f32>()]);
    }))
}

/// Returns the limits of steps that compute no logits.
pub(super) fn limits(slots: usize, rows: usize, positions: usize) -> StepLimits {
    StepLimits {
        slots,
        rows,
        batch_rows: usize::MAX,
        logit_rows: 1,
        positions,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 0,
        vocab: 1,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    }
}

/// Measures the seconds of an operation that computes next to nothing.
pub(super) fn operation_seconds(config: &DeviceConfig, device: DeviceName) -> Result<f64> {
    Ok(min_seconds(gemm(config, device, (SMALL, SMALL), 1)?))
}

/// Returns the seconds of the fastest run, after a warm-up run. Runs repeat for [`MEASURE_TIME`], at least
/// [`RUNS_MIN`] times.
pub(super) fn min_seconds(mut run: impl FnMut()) -> f64 {
    run();
    let (began, mut shortest, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < RUNS_MIN || began.elapsed() < MEASURE_TIME {
        let started = Instant::now();
        run();
        shortest = shortest.min(started.elapsed().as_secs_f64());
        runs += 1;
    }
    shortest.max(1e-9)
}

/// Returns the mean seconds of a run, for devices that run at the same time.
fn mean_seconds(mut run: impl FnMut()) -> f64 {
    let (began, mut runs) = (Instant::now(), 0.0);
    while began.elapsed() < MEASURE_TIME {
        run();
        runs += 1.0;
    }
    began.elapsed().as_secs_f64() / runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};

    fn devices(groups: &str) -> DeviceConfig {
        let mut flags = Overrides::default();
        flags.set("device.groups", Some(groups));
        flags.set("device.threads", Some(1));
        Config::load(None, flags).unwrap().device
    }

    /// The reference backend computes in double precision, many times slower than the CPU kernels under any
    /// load.
    #[test]
    fn each_device_has_the_speed_of_its_kind() {
        // Other work can disturb a measurement, though not every time.
        let mut measured =
            std::iter::repeat_with(|| measure_machine(&devices("reference:0;0;1")).unwrap()).take(6);
        let is_faster = |machine: Hardware| {
            let [slow, fast, _] = machine.devices[..] else { panic!("{:?}", machine.devices) };
            fast.bandwidth > 2.0 * slow.bandwidth && fast.flops > 2.0 * slow.flops
        };
        assert!(measured.any(is_faster));
    }

    /// Up to the maximum of 256, devices read at most 512 MiB together, and each of them something.
    #[test]
    fn many_devices_take_no_more_memory_than_some() {
        for devices in 1..=256 {
            let all = devices as f64 * row_bytes(rows_per_device(devices));
            assert!(all > 0.0 && all <= 512.0 * f64::from(1 << 20), "{devices}: {all}");
        }
        assert_eq!([1, 8, 256].map(rows_per_device), [WIDTH, WIDTH, 128]);
    }

    #[test]
    fn devices_that_compute_nothing_have_no_speed() {
        let error = measure_machine(&devices("fake:0;fake:1")).unwrap_err().to_string();
        assert!(error.contains("fake devices compute nothing"), "{error}");
    }
}
