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
use super::halves::Dots;
use super::simd::{BYTES, IntKernel, Ints, Kernel, LANES, Simd};
use crate::backend::DeviceError;
use crate::host::HostBuf;
use std::hint::black_box;
use std::time::Instant;

/// Largest number of accumulators of any instruction set.
const SUMS_MAX: usize = 12;
/// Multiplications of each accumulator per measurement.
const TIMES: usize = 100_000;
/// Number of measurements, of which the best counts: a thread that wakes late lowers one, and nothing raises
/// one.
const TRIES: usize = 5;
/// Bytes that a work item reads.
const ITEM: usize = 1 << 21;

/// Measured peak rates of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Ceilings {
    /// Memory bandwidth: bytes read per second, sequentially, from huge pages where the system grants them.
    pub read: f64,
    /// F32 operations (multiplications and additions) per second.
    pub f32: f64,
    /// Int8 operations per second.
    #[serde(rename = "codes")]
    pub codes: f64,
    /// BF16 operations per second; equal to `f32` where the CPU has no BF16 instructions.
    pub bf16: f64,
}

/// Measures the roofline. Owns the memory that is read, which should exceed every cache.
pub struct Meter {
    memory: HostBuf,
}

impl Meter {
    /// Creates a meter that reads `bytes` bytes of memory.
    pub fn new(bytes: usize) -> Result<Meter, DeviceError> {
        let mut memory = HostBuf::zeroed(bytes.next_multiple_of(ITEM))?;
        memory.bytes_mut().fill(1);
        Ok(Meter { memory })
    }

    /// Measures once, which takes some hundredths of a second.
    pub fn measure(&self, cpu: &mut CpuBackend) -> Ceilings {
        let threads = cpu.pool.threads();
        let level = cpu.level;
        let read = {
            let began = Instant::now();
            let bytes = self.memory.bytes();
            cpu.pool.run(bytes.len() / ITEM, |_, item| {
                black_box(level.run_ints(Read { bytes: &bytes[item * ITEM..][..ITEM] }));
            });
            bytes.len() as f64 / began.elapsed().as_secs_f64()
        };
        let mut rate = |operations: usize, work: &(dyn Fn() + Sync)| {
            let rates = (0..TRIES).map(|_| {
                let began = Instant::now();
                cpu.pool.run(threads, |_, _| work());
                (operations * threads) as f64 / began.elapsed().as_secs_f64()
            });
            rates.fold(0.0, f64::max)
        };
        let sums = level.run(Sums);
        let f32 = rate(TIMES * sums * LANES * 2, &|| level.run(MultiplyAdd));
        let int8 = match cpu.dots {
            #[cfg(target_arch = "x86_64")]
            Some(Dots::Amx(amx)) => {
                rate(AMX_TIMES * 4 * amx::ROWS * LANES * amx::ROW_BYTES * 2, &|| multiply_codes(amx))
            }
            _ => rate(TIMES * sums * BYTES * 2, &|| level.run_ints(Dot)),
        };
        let bf16 = match cpu.dots {
            None => f32,
            Some(isa) => rate(operations_of(isa), &|| multiply_halves(isa)),
        };
        Ceilings { read, f32, codes: int8, bf16 }
    }
}

/// Kernel that reads all bytes.
struct Read<'a> {
    bytes: &'a [u8],
}

impl IntKernel for Read<'_> {
    type Out = [f32; LANES];

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) -> [f32; LANES] {
        let mut sums = [simd.no_bytes(); 4];
        for four in self.bytes.chunks_exact(4 * BYTES) {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `four` holds four times 64 bytes.
                let bytes = unsafe { simd.bytes(four.as_ptr().add(i * BYTES)) };
                *sum = simd.over(*sum, bytes, 0);
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
struct Sums;

impl Kernel for Sums {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::SUMS
    }
}

/// Kernel that multiplies and adds F32 numbers without reading memory.
struct MultiplyAdd;

impl Kernel for MultiplyAdd {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut sums = [simd.splat(black_box(0.0)); SUMS_MAX];
        let (a, b) = (simd.splat(black_box(0.5)), simd.splat(black_box(1.0)));
        for _ in 0..TIMES {
            for sum in &mut sums[..S::SUMS] {
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
struct Dot;

impl IntKernel for Dot {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let bytes = black_box([1u8; BYTES]);
        // SAFETY: `bytes` holds 64 bytes, of which `word` reads four.
        let (w, x) = unsafe { (simd.bytes(bytes.as_ptr()), simd.word(bytes.as_ptr())) };
        let mut sums = [simd.zero(); SUMS_MAX];
        for _ in 0..TIMES {
            for sum in &mut sums[..S::SUMS] {
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
fn operations_of(isa: Dots) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Dots::Amx(_) => AMX_TIMES * 4 * amx::ROWS * LANES * 32 * 2,
        #[cfg(target_arch = "x86_64")]
        Dots::Avx512(_) => TIMES * SUMS_MAX * LANES * 2 * 2,
    }
}

/// Iterations with AMX, which multiplies so much at once that fewer are enough.
#[cfg(target_arch = "x86_64")]
const AMX_TIMES: usize = TIMES / 16;

fn multiply_halves(isa: Dots) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Dots::Amx(amx) => {
            // SAFETY: no other tiles are set up on this thread.
            let mut registers = unsafe { amx::Tiles::new(amx, [amx::ROWS; 2]) };
            for _ in 0..AMX_TIMES {
                registers.multiply::<0, 0>();
                registers.multiply::<0, 1>();
                registers.multiply::<1, 0>();
                registers.multiply::<1, 1>();
            }
        }
        #[cfg(target_arch = "x86_64")]
        Dots::Avx512(simd) => {
            black_box(simd.most::<SUMS_MAX>(TIMES));
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn multiply_codes(amx: amx::Amx) {
    // SAFETY: no other tiles are set up on this thread.
    let mut registers = unsafe { amx::CodeTiles::new(amx, amx::ROWS, amx::ROW_BYTES) };
    for _ in 0..AMX_TIMES {
        registers.add::<0>();
        registers.add::<1>();
        registers.add::<2>();
        registers.add::<3>();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuConfig, Isa};
    use crate::quant::Inputs;

    #[test]
    fn every_instruction_set_has_its_ceilings() {
        let meter = Meter::new(ITEM).unwrap();
        for isa in Isa::ALL {
            let Ok(mut cpu) = CpuBackend::new(CpuConfig { threads: 2, isa, inputs: Inputs::Coded }) else {
                continue;
            };
            let Ceilings { read, f32, codes, bf16 } = meter.measure(&mut cpu);
            assert!([read, f32, codes, bf16].iter().all(|rate| rate.is_finite() && *rate > 0.0), "{isa:?}");
        }
    }
}
