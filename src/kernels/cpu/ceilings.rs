//! What this machine can do at most: how fast its memory is read, and how fast it multiplies.
//!
//! Kernels can come near these figures and hardly above them: of reading a little, for they ask for memory ahead, and plain
//! reading does not. They are measured with the same threads and instructions, so a share of them says how well a kernel does,
//! whatever else the machine is doing.
//! Invariant: sums are used, and their operands unknown to the compiler, so nothing is left out.

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

/// The most sums of any instruction set.
const SUMS_MAX: usize = 12;
/// Multiplications of each sum, each time.
const TIMES: usize = 100_000;
/// Of so many measurements the best counts: a thread that wakes late makes one too low, and nothing too high.
const TRIES: usize = 5;
/// Bytes that an item reads.
const ITEM: usize = 1 << 21;

/// What was measured, of all threads together.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Ceilings {
    /// Bytes of memory read in a second, one after another, from huge pages where the system grants them.
    pub read: f64,
    /// Operations (multiplications and additions) in a second of F32.
    pub f32: f64,
    /// Of codes of 8 bits.
    pub codes: f64,
    /// Of BF16; those of F32 where there are no instructions for it.
    pub bf16: f64,
}

/// Memory to read: more than any cache holds.
pub struct Meter {
    memory: HostBuf,
}

impl Meter {
    /// Of `bytes` bytes of memory.
    pub fn new(bytes: usize) -> Result<Meter, DeviceError> {
        let mut memory = HostBuf::zeroed(bytes.next_multiple_of(ITEM))?;
        memory.bytes_mut().fill(1);
        Ok(Meter { memory })
    }

    /// Measures once: some hundredths of a second.
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
        let codes = match cpu.dots {
            #[cfg(target_arch = "x86_64")]
            Some(Dots::Amx(amx)) => {
                rate(AMX_TIMES * 4 * amx::ROWS * LANES * amx::ROW_BYTES * 2, &|| multiply_codes(amx))
            }
            _ => rate(TIMES * sums * BYTES * 2, &|| level.run_ints(Dot)),
        };
        let bf16 = match cpu.dots {
            None => f32,
            Some(dots) => rate(operations_of(dots), &|| multiply_halves(dots)),
        };
        Ceilings { read, f32, codes, bf16 }
    }
}

/// Reads all bytes.
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
                // SAFETY: 64 bytes of the four times 64.
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

/// How many sums an instruction set has.
struct Sums;

impl Kernel for Sums {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        S::SUMS
    }
}

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

struct Dot;

impl IntKernel for Dot {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let bytes = black_box([1u8; BYTES]);
        // SAFETY: 64 bytes, and four of them.
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

/// Operations of [`multiply_halves`].
fn operations_of(dots: Dots) -> usize {
    match dots {
        #[cfg(target_arch = "x86_64")]
        Dots::Amx(_) => AMX_TIMES * 4 * amx::ROWS * LANES * 32 * 2,
        #[cfg(target_arch = "x86_64")]
        Dots::Avx512(_) => TIMES * SUMS_MAX * LANES * 2 * 2,
    }
}

/// Tiles multiply so much at once that fewer times will do.
#[cfg(target_arch = "x86_64")]
const AMX_TIMES: usize = TIMES / 16;

fn multiply_halves(dots: Dots) {
    match dots {
        #[cfg(target_arch = "x86_64")]
        Dots::Amx(amx) => {
            // SAFETY: nothing else on this thread has tiles now.
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
    // SAFETY: nothing else on this thread has tiles now.
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
