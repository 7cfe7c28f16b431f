//! Sampling benchmark: the time in which the CPU backend samples a step's rows.
//!
//! `cargo bench -p mainstem-kernels --bench sampling` prints the fastest and the median time of all rows in
//! ms, for logits that fall by Zipf's law and for normally distributed ones. `THREADS=n`, `ROWS=n`, `VOCAB=n`
//! and `TIMES=n` set the numbers of threads, rows, tokens and repetitions.
//! Invariant: every case samples the same logits.

use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::random::noise;
use mainstem_kernels::{
    ActivationPrecision, Backend, Fraction, HostBuf, Penalties, SamplingInputs, SamplingParams, Span,
    SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput,
};
use std::time::Instant;

const PLAIN: SamplingParams = SamplingParams { temperature: 0.8, seed: 7, ..SamplingParams::GREEDY };

/// Distinct tokens of a sequence with penalties.
const HISTORY: u32 = 2048;

const PENALTIES: Penalties = Penalties { repetition: 1.1, presence: 0.2, frequency: 0.1 };

const CASES: [(&str, SamplingParams); 7] = [
    ("greedy", SamplingParams::GREEDY),
    ("temperature", PLAIN),
    ("top_p 0.95", SamplingParams { top_p: 0.95, ..PLAIN }),
    ("top_k 40, top_p 0.95", SamplingParams { top_k: 40, top_p: 0.95, ..PLAIN }),
    ("min_p 0.05", SamplingParams { min_p: 0.05, ..PLAIN }),
    ("penalties", SamplingParams { penalties: PENALTIES, ..SamplingParams::GREEDY }),
    ("penalties, top_p 0.95", SamplingParams { penalties: PENALTIES, top_p: 0.95, ..PLAIN }),
];

fn main() {
    let number = |name: &str, default: usize| {
        std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
    };
    let (rows, vocab) = (number("ROWS", 32), number("VOCAB", 128_256));
    let mut cpu = CpuBackend::new(CpuConfig {
        threads: number("THREADS", 2),
        isa: Isa::Auto,
        activation_precision: ActivationPrecision::Int8,
    })
    .expect("a CPU backend");
    let limits = StepLimits {
        slots: rows,
        rows,
        batch_rows: usize::MAX,
        logit_rows: rows,
        positions: 1,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 0,
        vocab,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: true,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    };
    cpu.prepare(&limits).expect("memory for a step");
    println!("{}; {rows} rows of {vocab} tokens", cpu.describe());
    for (kind, values) in [("zipf", zipf(rows, vocab)), ("normal", normal(rows, vocab))] {
        let mut logits = cpu.alloc(values.len() * 4).expect("memory for logits");
        logits.f32_mut().copy_from_slice(&values);
        for (name, params) in CASES {
            let times = measure(&mut cpu, &limits, &logits, params, number("TIMES", 15));
            println!("{kind:<8} {name:<22} {:>8.3} {:>8.3}", times[0], times[times.len() / 2]);
        }
    }
}

/// Returns logits of random tokens that fall by Zipf's law with exponent 1.2.
fn zipf(rows: usize, vocab: usize) -> Vec<f32> {
    let row = |row: usize| {
        let random = noise(row as u32, vocab);
        let mut ids: Vec<usize> = (0..vocab).collect();
        ids.sort_by(|a, b| random[*a].total_cmp(&random[*b]));
        let mut logits = vec![0.0; vocab];
        (1..).zip(ids).for_each(|(rank, id)| logits[id] = -1.2 * (rank as f32).ln());
        logits
    };
    (0..rows).flat_map(row).collect()
}

/// Returns logits with standard deviation 2.5, sums of twelve uniform numbers.
fn normal(rows: usize, vocab: usize) -> Vec<f32> {
    let uniform = noise(99, rows * vocab * 12);
    uniform.chunks_exact(12).map(|numbers| 1.25 * numbers.iter().sum::<f32>()).collect()
}

/// Returns the times of a case in ms, ascending.
fn measure(
    cpu: &mut CpuBackend,
    limits: &StepLimits,
    logits: &HostBuf,
    params: SamplingParams,
    times: usize,
) -> Vec<f64> {
    let rows = limits.rows as u32;
    let mut out = StepOutput::with_capacity(limits);
    let sampling = (0..rows).map(|position| SamplingParams { position, ..params }).collect();
    let span = |slot: u32| Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot,
        start: 0,
        tokens: SpanTokens::Given { at: 0, len: 1 },
        table: SpanTable::Own,
        reserved: 1,
        encoder_len: 0,
        output: SpanOutput::All,
    };
    let spans = (0..rows).map(span).collect();
    let mut batch = StepBatch { spans, tokens: vec![0], sampling, ..StepBatch::default() };
    let history: Vec<u32> = (0..HISTORY).map(|i| i * 31 % limits.vocab as u32).collect();
    (0..rows).for_each(|slot| batch.replace_counts(slot, (&history, &history), limits.vocab));
    let mut one = || {
        cpu.begin_step(&batch);
        cpu.select_stack(SpanStack::Decoder);
        out.clear();
        let start = Instant::now();
        cpu.sample(0..limits.rows, logits, SamplingInputs::default(), &mut out);
        let time = start.elapsed().as_secs_f64() * 1e3;
        cpu.end_step();
        batch.step += 1;
        batch.count_changes.clear();
        time
    };
    let mut times: Vec<f64> = (0..times).map(|_| one()).collect();
    times.sort_by(f64::total_cmp);
    times
}
