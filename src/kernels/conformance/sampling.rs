//! Tests of sampling and scoring, against the definition in [`mainstem_kernels::reference`].

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, StepLimits};
use mainstem_kernels::batch::{SampleMode, SampledToken, SamplingParams, SpanOutput, StepOutput};
use mainstem_kernels::random::philox;
use mainstem_kernels::reference::{logprobs, sample};
use std::fmt::Arguments;

/// Tests that tokens and log-probabilities are exactly those of `reference::params` and
/// `reference::logprobs`.
pub fn sample_tokens<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (vocab, steps) in [(1, 1), (5, 6), (1000, 8), (32_000, 1)] {
        let limits = StepLimits { vocab, rows: SAMPLED_ROWS, logit_rows: SAMPLED_ROWS, ..limits(32) };
        let mut rig = Rig::new(make(), limits);
        for step in 0..steps {
            assert_step(&mut rig, step, bounds);
        }
    }
}

/// Rows sampled in one step.
const SAMPLED_ROWS: usize = 64;

/// Tests one step.
fn assert_step<B: Backend>(rig: &mut Rig<B>, step: u32, bounds: &Bounds) {
    let vocab = rig.limits.vocab;
    let logits: Vec<Vec<f32>> = (0..SAMPLED_ROWS as u32).map(|row| logits_row(step, row, vocab)).collect();
    let mut samples: Vec<SamplingParams> =
        (0..SAMPLED_ROWS as u32).map(|row| sampling_params(step, row, vocab)).collect();
    let biases: Vec<Vec<(u32, f32)>> =
        (0..SAMPLED_ROWS as u32).map(|row| row_biases(step, row, vocab)).collect();
    let mut batch =
        build_batch(&[TestSpan::given(0, 0, SAMPLED_ROWS)], SpanOutput::All, &mut PageBook::scattered(32));
    for (params, biases) in samples.iter_mut().zip(&biases) {
        (params.bias_at, params.bias_len) = (batch.logit_biases.len() as u32, biases.len() as u32);
        batch.logit_biases.extend(biases);
    }
    batch.sampling = samples.clone();
    let mut out = StepOutput::with_capacity(&rig.limits);
    rig.begin(batch);
    for block in [0..1, 1..40, 40..SAMPLED_ROWS] {
        let buf = rig.input(&logits[block.clone()].concat());
        rig.backend.sample(block, &buf, &mut out);
    }
    assert_eq!(out.tokens.len(), SAMPLED_ROWS, "sampled rows, vocabulary {vocab}");
    let mut top_at = 0;
    for (row, ((result, logits), params)) in out.tokens.iter().zip(&logits).zip(&samples).enumerate() {
        let biases = &biases[row];
        let what = format_args!("sample, vocabulary {vocab}, step {step}, row {row}, {params:?}, {biases:?}");
        let expected = match params.mode {
            SampleMode::Sample => sample(logits, biases, params),
            SampleMode::Score(token) => token,
        };
        assert_eq!(result.token, expected, "{what}: token");
        assert_eq!(result.top_at, top_at, "{what}: start of the most likely tokens");
        top_at += result.top_len;
        assert_logprobs(what, &out, result, (logits, params), bounds);
    }
    assert_eq!(out.top_logprobs.len(), top_at as usize, "reported tokens, vocabulary {vocab}");
}

/// Checks the log-probabilities of one row.
fn assert_logprobs(
    what: Arguments,
    out: &StepOutput,
    result: &SampledToken,
    (logits, params): (&[f32], &SamplingParams),
    bounds: &Bounds,
) {
    let expected = logprobs(logits, params.top_logprobs.into());
    assert_eq!(result.top_len as usize, expected.top.len(), "{what}: number reported");
    let near = |name: Arguments, got: f32, logit: f32| {
        let want = expected.logprob(logit);
        let allowed = bounds.elementwise * (2.0 * logit.abs() + want.abs() + 1.0);
        // Log-probabilities without a distribution are unspecified.
        let ok = !want.is_finite() || (got - want).abs() <= allowed;
        assert!(ok, "{what}: {name}: got {got}, oracle {want}, allowed difference {allowed}");
    };
    if params.logprob {
        near(format_args!("log-probability"), result.logprob, logits[result.token as usize]);
    } else {
        assert!(result.logprob.is_nan(), "{what}: a log-probability that was not requested");
    }
    for (rank, (got, want)) in out.top_logprobs_of(result).iter().zip(&expected.top).enumerate() {
        if want.1.is_finite() {
            assert_eq!(got.0, want.0, "{what}: token at rank {rank}");
            near(format_args!("log-probability at rank {rank}"), got.1, logits[got.0 as usize]);
        }
    }
}

/// Returns logits of many kinds: spread, tied, equal, flat, masked, with NaN and infinities.
fn logits_row(step: u32, row: u32, vocab: usize) -> Vec<f32> {
    let values = scaled(200 + step * 1000 + row, vocab, 10.0);
    let every = |n: usize, fill: f32| move |(i, v): (usize, f32)| if i % n == n - 1 { fill } else { v };
    let indexed = values.iter().copied().enumerate();
    match row % 12 {
        0..=2 => values,
        3 => values.iter().map(|v| v.round()).collect(),
        4 => vec![1.5; vocab],
        5 => values.iter().map(|v| v * 1e-3).collect(),
        6 => indexed.map(every(3, f32::NAN)).collect(),
        7 => indexed.map(|(i, v)| if i % 7 == 0 { v } else { f32::NEG_INFINITY }).collect(),
        8 => indexed.map(every(5, f32::INFINITY)).collect(),
        9 => vec![[f32::NAN, f32::NEG_INFINITY][row as usize % 24 / 12]; vocab],
        10 => values.iter().map(|v| v * 1e3).collect(),
        _ => values.iter().map(|v| v.abs().sqrt() * [0.0, -0.0, 1.0][v.to_bits() as usize % 3]).collect(),
    }
}

/// Returns varied sampling parameters.
fn sampling_params(step: u32, row: u32, vocab: usize) -> SamplingParams {
    let [a, b, c, d] = philox([row, step, 5, 0], [77, 0]);
    let pick = |word: u32, shift: u32, n: usize| (word >> shift) as usize % n;
    let logprob = pick(d, 0, 2) == 0;
    let score = pick(d, 4, 6) == 0;
    SamplingParams {
        mode: if score { SampleMode::Score(a % vocab as u32) } else { SampleMode::Sample },
        position: row + step,
        seed: u64::from(a) << 32 | u64::from(b),
        temperature: [1.0, 0.7, 1.8, 0.2, 0.0, 1e-4, 100.0][pick(b, 3, 7)],
        top_k: [0, 0, 0, 1, 2, 40, vocab as u32, vocab as u32 + 5][pick(c, 0, 8)],
        top_p: [1.0, 1.0, 0.95, 0.5, 1e-6, 0.999_999][pick(c, 8, 6)],
        min_p: [0.0, 0.0, 0.02, 0.5, 1.0][pick(c, 16, 5)],
        logprob,
        top_logprobs: if logprob { pick(d, 8, 9) as u8 } else { 0 },
        ..SamplingParams::GREEDY
    }
}

/// Largest number of biases of a row.
const MAX_BIASES: usize = 8;

/// Returns biases of many kinds: none, small, decisive, forbidding some tokens, all but one, or all of a
/// small vocabulary; some tokens have two biases.
fn row_biases(step: u32, row: u32, vocab: usize) -> Vec<(u32, f32)> {
    let tag = 700 + step * 1000 + row;
    let [kind, count, first, _] = philox([row, step, 6, 0], [77, 0]).map(|word| word as usize);
    let values = noise(tag, MAX_BIASES);
    let some = |bias: &dyn Fn(usize) -> f32| -> Vec<(u32, f32)> {
        let id = |i: usize| ((first + i * i * 31) % vocab) as u32;
        (0..1 + count % MAX_BIASES).map(|i| (id(i), bias(i))).collect()
    };
    let forbidden = |ids: std::ops::Range<usize>| ids.map(|id| (id as u32, f32::NEG_INFINITY)).collect();
    match kind % 8 {
        0..=2 => Vec::new(),
        3 => some(&|i| values[i] * 3.0),
        4 => some(&|i| values[i] * 100.0),
        5 => some(&|_| f32::NEG_INFINITY),
        6 => some(&|i| if i % 2 == 0 { f32::NEG_INFINITY } else { values[i] * 10.0 }),
        _ => forbidden(count % 2..vocab.min(MAX_BIASES)),
    }
}
