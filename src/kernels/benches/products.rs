//! GEMM benchmark with weights of every format: how fast a step reads them, and how fast it multiplies.
//!
//! `cargo bench -p mainstem-kernels --bench products [-- NAME...]` measures the named formats, or the fast
//! ones. The weights exceed every cache, so one row measures memory bandwidth and many rows measure
//! arithmetic. Prints medians. `THREADS=n` sets the number of threads, `ROWS=1,32` the numbers of rows.
//! `OUT=1024 MIB=1` uses one matrix with that many outputs, which stays in a cache: it measures arithmetic
//! and the overhead of a GEMM.
//! Invariant: every format multiplies the same shapes.

use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::random::noise;
use mainstem_kernels::{ActivationPrecision, Backend, Fraction, HostBuf, QuantType, StepLimits, Weight};
use std::time::Instant;

/// (n, k) of the up projection of a Llama with 1.1B parameters.
const SHAPE: (usize, usize) = (5632, 2048);
/// Total MiB of the matrices of a format.
const MIB: usize = 400;
const ROWS: &str = "1,2,4,8,16,32,512";
const ROWS_MAX: usize = 512;
const TIMES: usize = 7;

fn main() {
    let named: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let types: Vec<QuantType> = match named.is_empty() {
        true => "f16 bf16 q8_0 q6_K q5_K q4_K q4_0 q4_b32t1a q4_b64t1 q3h_b64t1 g4_b64"
            .split(' ')
            .filter_map(QuantType::by_name)
            .collect(),
        false => named.iter().map(|name| QuantType::by_name(name).expect("a valid format name")).collect(),
    };
    let threads = number("THREADS").unwrap_or(2);
    let rows = std::env::var("ROWS").unwrap_or_else(|_| ROWS.into());
    let rows: Vec<usize> = rows.split(',').map(|rows| rows.parse().expect("a number of rows")).collect();
    assert!(rows.iter().all(|rows| *rows <= ROWS_MAX), "at most {ROWS_MAX} rows");
    let mut cpu = CpuBackend::new(CpuConfig {
        threads,
        isa: Isa::Auto,
        activation_precision: ActivationPrecision::Int8,
    })
    .expect("a CPU backend");
    cpu.prepare(&limits()).expect("memory for a step");
    println!("{}; {} x {} matrices", cpu.describe(), number("OUT").unwrap_or(SHAPE.0), SHAPE.1);
    let each = |column: &dyn Fn(&usize) -> String| rows.iter().map(column).collect::<String>();
    println!("{:<10} {:>9} {}", "", "1 row", each(&|rows| format!("{rows:>8}")));
    println!("{:<10} {:>9} {}", "", "GB/s", each(&|_| format!("{:>8}", "Gop/s")));
    for ty in types {
        measure(&mut cpu, ty, &rows);
    }
}

/// Returns the value of an environment variable.
fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok().map(|n| n.parse().expect("a number"))
}

fn limits() -> StepLimits {
    StepLimits {
        slots: 1,
        rows: ROWS_MAX,
        batch_rows: usize::MAX,
        logit_rows: 1,
        positions: 32,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 0,
        vocab: 8,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    }
}

/// Measures one format and prints a line.
fn measure(cpu: &mut CpuBackend, ty: QuantType, rows: &[usize]) {
    let (n, k) = (number("OUT").unwrap_or(SHAPE.0), SHAPE.1);
    let mut quantized = vec![0; ty.bytes(n * k).expect("whole blocks")];
    ty.quantize(&noise(1, n * k), &mut quantized);
    let count = ((number("MIB").unwrap_or(MIB) << 20) / quantized.len()).max(1);
    let weights: Vec<Weight<HostBuf>> =
        (0..count).map(|_| cpu.upload_weight(ty, n, k, &quantized).expect("memory for weights")).collect();
    let mut x = cpu.alloc(ROWS_MAX * k * 4).expect("memory for activations");
    x.f32_mut().copy_from_slice(&noise(2, ROWS_MAX * k));
    let mut y = cpu.alloc(ROWS_MAX * n * 4).expect("memory for activations");
    let mut line = String::new();
    let mut speed = 0.0;
    for &rows in rows {
        // As many matrices as take some tenths of a second, unless the environment overrides it.
        let some = if rows <= 32 { &weights[..] } else { &weights[..count.min(4)] };
        let mut times: Vec<f64> = (0..TIMES)
            .map(|_| {
                let start = Instant::now();
                some.iter().for_each(|w| cpu.matmul(rows, w, None, &x, &mut y));
                start.elapsed().as_secs_f64() / some.len() as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let median = times[TIMES / 2];
        if rows == 1 {
            speed = quantized.len() as f64 / median / 1e9;
        }
        line += &format!("{:>8.0}", 2.0 * (rows * n * k) as f64 / median / 1e9);
    }
    println!("{:<10} {speed:>9.1} {line}", ty.name());
}
