//! Roofline measurement: how fast this machine reads memory and how fast it multiplies.
//!
//! Kernels can come close to these rates but hardly exceed them. (Reading can slightly, since kernels
//! prefetch and plain reading does not.) The rates are measured with the same threads and instructions as the
//! kernels use, so a kernel's fraction of them shows its efficiency even when the machine is otherwise
//! loaded.
//! Invariant: results are used and operands are unknown to the compiler, so no work is optimized away.

#![allow(unsafe_code)]

use super::CpuBackend;
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::bf16::Bf16Isa;
use super::simd::{BYTES, IntKernel, Ints, Kernel, LANES, Simd};
use crate::backend::DeviceError;
use crate::host::{HostBuf, HostMemory};
use std::hint::black_box;
use std::time::Instant;

/// Largest number of accumulators of any instruction set.
const MAX_ACCUMULATORS: usize = 12;
/// Multiplications of each accumulator per measurement.
const ITERATIONS: usize = 100_000;
/// Number of measurements, of which the best counts: a thread that wakes late lowers one, and nothing raises
/// one.
const ATTEMPTS: usize = 5;
/// Bytes that a work item reads.
const ITEM_BYTES: usize = 1 << 21;

/// Measured peak rates of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Roofline {
    /// Memory bandwidth: bytes read per second, sequentially, from huge pages where the system grants them.
    pub read: f64,
    /// F32 operations (multiplications and additions) per second.
    pub f32: f64,
    /// Int8 operations per second.
    pub int8: f64,
    /// BF16 operations per second; equal to `f32` where the CPU has no BF16 instructions.
    pub bf16: f64,
}

/// Measures the roofline. Owns the memory that is read, which should exceed every cache.
pub struct RooflineMeter {
    memory: HostBuf,
}

impl RooflineMeter {
    /// Creates a meter that reads `bytes` bytes of memory.
    pub fn new(bytes: usize) -> Result<RooflineMeter, DeviceError> {
        let mut memory = HostMemory::default().zeroed(bytes.next_multiple_of(ITEM_BYTES))?;
        memory.bytes_mut().fill(1);
        Ok(RooflineMeter { memory })
    }

    /// Measures once, which takes some hundredths of a second.
    pub fn measure(&self, cpu: &mut CpuBackend) -> Roofline {
        let threads = cpu.pool.threads();
        let level = cpu.level;
        let read = {
            let began = Instant::now();
            let bytes = self.memory.bytes();
            cpu.pool.run(bytes.len() / ITEM_BYTES, |_, item| {
                black_box(level.run_ints(ReadMemory { bytes: &bytes[item * ITEM_BYTES..][..ITEM_BYTES] }));
            });
            bytes.len() as f64 / began.elapsed().as_secs_f64()
        };
        let mut rate = |operations: usize, work: &(dyn Fn() + Sync)| {
            let rates = (0..ATTEMPTS).map(|_| {
                let began = Instant::now();
                cpu.pool.run(threads, |_, _| work());
                (operations * threads) as f64 / began.elapsed().as_secs_f64()
            });
            rates.fold(0.0, f64::max)
        };
        let sums = level.run(AccumulatorCount);
        let f32 = rate(ITERATIONS * sums * LANES * 2, &|| level.run(MultiplyAdd));
        let int8 = match cpu.sizes.bf16_isa {
            #[cfg(target_arch = "x86_64")]
            Some(Bf16Isa::Amx(amx)) => {
                rate(AMX_ITERATIONS * 4 * amx::ROWS * LANES * amx::ROW_BYTES * 2, &|| multiply_int8(amx))
            }
            _ => rate(ITERATIONS * sums * BYTES * 2, &|| level.run_ints(Int8Dot)),
        };
        let bf16 = match cpu.sizes.bf16_isa {
            None => f32,
            Some(isa) => rate(bf16_operations(isa), &|| multiply_bf16(isa)),
        };
        Roofline { read, f32, int8, bf16 }
    }
}

/// Kernel that reads all bytes.
struct ReadMemory<'a> {
    bytes: &'a [u8],
}

impl IntKernel for ReadMemory<'_> {
    type Out = [f32; LANES];

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) -> [f32; LANES] {
        let mut sums = [simd.zero_bytes(); 4];
        for four in self.bytes.chunks_exact(4 * BYTES) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `four` holds four times 64 bytes.
                let bytes = unsafe { simd.load_bytes(four.as_ptr().add(i * BYTES)) };
                *sum = simd.or_shifted(*sum, bytes, 0);
            }
        }
        let mut to = [0.0; LANES];
        let mut total = simd.zero();
        for sum in sums {
            total = simd.dot(total, sum, simd.zero());
        }
        simd.store(simd.to_float(total), &mut to);
        to
    }
}

/// Kernel that returns the number of accumulators of the instruction set.
struct AccumulatorCount;

impl Kernel for AccumulatorCount {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::ACCUMULATORS
    }
}

/// Kernel that multiplies and adds F32 numbers without reading memory.
struct MultiplyAdd;

impl Kernel for MultiplyAdd {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut sums = [simd.splat(black_box(0.0)); MAX_ACCUMULATORS];
        let (a, b) = (simd.splat(black_box(0.5)), simd.splat(black_box(1.0)));
        for _ in 0..ITERATIONS {
            for sum in &mut sums[..S::ACCUMULATORS] {
                *sum = simd.mul_add(*sum, a, b);
            }
        }
        let mut total = simd.splat(0.0);
        for sum in sums {
            total = simd.add(total, sum);
        }
        black_box(simd.sum(total));
    }
}

/// Kernel that computes int8 dot products without reading memory.
struct Int8Dot;

impl IntKernel for Int8Dot {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let bytes = black_box([1u8; BYTES]);
        // SAFETY: `bytes` holds 64 bytes, of which `word` reads four.
        let (w, x) = unsafe { (simd.load_bytes(bytes.as_ptr()), simd.broadcast_word(bytes.as_ptr())) };
        let mut sums = [simd.zero(); MAX_ACCUMULATORS];
        for _ in 0..ITERATIONS {
            for sum in &mut sums[..S::ACCUMULATORS] {
                *sum = simd.dot(*sum, w, x);
            }
        }
        let mut total = simd.splat(0.0);
        for sum in sums {
            total = simd.add(total, simd.to_float(sum));
        }
        black_box(simd.sum(total));
    }
}

/// Returns the number of operations of [`multiply_bf16`].
fn bf16_operations(isa: Bf16Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Bf16Isa::Amx(_) => AMX_ITERATIONS * 4 * amx::ROWS * LANES * 32 * 2,
        #[cfg(target_arch = "x86_64")]
        Bf16Isa::Avx512(_) => ITERATIONS * MAX_ACCUMULATORS * LANES * 2 * 2,
    }
}

/// Iterations with AMX, which multiplies so much at once that fewer are enough.
#[cfg(target_arch = "x86_64")]
const AMX_ITERATIONS: usize = ITERATIONS / 16;

fn multiply_bf16(isa: Bf16Isa) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Bf16Isa::Amx(amx) => {
            // SAFETY: no other tiles are set up on this thread.
            let mut registers = unsafe { amx::Bf16Tiles::new(amx, [amx::ROWS; 2]) };
            for _ in 0..AMX_ITERATIONS {
                registers.multiply::<0, 0>();
                registers.multiply::<0, 1>();
                registers.multiply::<1, 0>();
                registers.multiply::<1, 1>();
            }
        }
        #[cfg(target_arch = "x86_64")]
        Bf16Isa::Avx512(simd) => {
            black_box(simd.peak::<MAX_ACCUMULATORS>(ITERATIONS));
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn multiply_int8(amx: amx::Amx) {
    // SAFETY: no other tiles are set up on this thread.
    let mut registers = unsafe { amx::Int8Tiles::new(amx, amx::ROWS, amx::ROW_BYTES) };
    for _ in 0..AMX_ITERATIONS {
        registers.add_loaded::<0>();
        registers.add_loaded::<1>();
        registers.add_loaded::<2>();
        registers.add_loaded::<3>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuConfig, Isa};
    use crate::quant::ActivationPrecision;

    #[test]
    fn every_instruction_set_has_a_roofline() {
        let meter = RooflineMeter::new(ITEM_BYTES).unwrap();
        for isa in Isa::ALL {
            let Ok(mut cpu) = CpuBackend::new(CpuConfig {
                threads: 2,
                isa,
                activation_precision: ActivationPrecision::Int8,
            }) else {
                continue;
            };
            let Roofline { read, f32, int8, bf16 } = meter.measure(&mut cpu);
            assert!([read, f32, int8, bf16].iter().all(|rate| rate.is_finite() && *rate > 0.0), "{isa:?}");
        }
    }
}
