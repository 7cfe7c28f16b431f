//! Tests of sampling and scoring, against the definition in [`crate::reference`].

use super::Bounds;
use super::inputs::*;
use super::pieces::*;
use super::rig::*;
use crate::backend::{Backend, StepLimits};
use crate::batch::{SampleMode, SampleRow, SampledRow, StepOutput, Want};
use crate::random::philox;
use crate::reference::{draw, logprobs};
use std::fmt::Arguments;

/// Tests that tokens and log-probabilities are exactly those of `reference::params` and
/// `reference::logprobs`.
pub fn sample<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (vocab, steps) in [(1, 1), (5, 6), (1000, 8), (32_000, 1)] {
        let limits = StepLimits { vocab, rows: SAMPLED, logit_rows: SAMPLED, ..limits(32) };
        let mut rig = Rig::new(make(), limits);
        for step in 0..steps {
            sample_step(&mut rig, step, bounds);
        }
    }
}

/// Rows sampled in one step.
const SAMPLED: usize = 64;

/// Tests one step.
fn sample_step<B: Backend>(rig: &mut Rig<B>, step: u32, bounds: &Bounds) {
    let vocab = rig.limits.vocab;
    let logits: Vec<Vec<f32>> = (0..SAMPLED as u32).map(|row| logits_row(step, row, vocab)).collect();
    let mut samples: Vec<SampleRow> = (0..SAMPLED as u32).map(|row| sample_row(step, row, vocab)).collect();
    let biases: Vec<Vec<(u32, f32)>> = (0..SAMPLED as u32).map(|row| bias_row(step, row, vocab)).collect();
    let mut batch = batch_of(&[Piece::given(0, 0, SAMPLED)], Want::All, &mut Book::scattered(32));
    for (params, biases) in samples.iter_mut().zip(&biases) {
        (params.bias_at, params.bias_len) = (batch.biases.len() as u32, biases.len() as u32);
        batch.biases.extend(biases);
    }
    batch.samples = samples.clone();
    let mut out = StepOutput::with_capacity(&rig.limits);
    rig.begin(batch);
    for block in [0..1, 1..40, 40..SAMPLED] {
        let buf = rig.put(&logits[block.clone()].concat());
        rig.backend.sample(block, &buf, &mut out);
    }
    assert_eq!(out.rows.len(), SAMPLED, "sampled rows, vocabulary {vocab}");
    let mut top_at = 0;
    for (row, ((result, logits), params)) in out.rows.iter().zip(&logits).zip(&samples).enumerate() {
        let biases = &biases[row];
        let what = format_args!("sample, vocabulary {vocab}, step {step}, row {row}, {params:?}, {biases:?}");
        let expected = match params.mode {
            SampleMode::Draw => draw(logits, biases, params),
            SampleMode::Score(token) => token,
        };
        assert_eq!(result.token, expected, "{what}: token");
        assert_eq!(result.top_at, top_at, "{what}: start of the most likely tokens");
        top_at += result.top_len;
        check_logprobs(what, &out, result, (logits, params), bounds);
    }
    assert_eq!(out.top.len(), top_at as usize, "reported tokens, vocabulary {vocab}");
}

/// Checks the log-probabilities of one row.
fn check_logprobs(
    what: Arguments,
    out: &StepOutput,
    result: &SampledRow,
    (logits, params): (&[f32], &SampleRow),
    bounds: &Bounds,
) {
    let expected = logprobs(logits, params.top_logprobs.into());
    assert_eq!(result.top_len as usize, expected.top.len(), "{what}: number reported");
    let near = |name: Arguments, got: f32, logit: f32| {
        let want = expected.of(logit);
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
    for (rank, (got, want)) in out.top_of(result).iter().zip(&expected.top).enumerate() {
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
fn sample_row(step: u32, row: u32, vocab: usize) -> SampleRow {
    let [a, b, c, d] = philox([row, step, 5, 0], [77, 0]);
    let pick = |word: u32, shift: u32, n: usize| (word >> shift) as usize % n;
    let logprob = pick(d, 0, 2) == 0;
    let score = pick(d, 4, 6) == 0;
    SampleRow {
        mode: if score { SampleMode::Score(a % vocab as u32) } else { SampleMode::Draw },
        position: row + step,
        seed: u64::from(a) << 32 | u64::from(b),
        temperature: [1.0, 0.7, 1.8, 0.2, 0.0, 1e-4, 100.0][pick(b, 3, 7)],
        top_k: [0, 0, 0, 1, 2, 40, vocab as u32, vocab as u32 + 5][pick(c, 0, 8)],
        top_p: [1.0, 1.0, 0.95, 0.5, 1e-6, 0.999_999][pick(c, 8, 6)],
        min_p: [0.0, 0.0, 0.02, 0.5, 1.0][pick(c, 16, 5)],
        logprob,
        top_logprobs: if logprob { pick(d, 8, 9) as u8 } else { 0 },
        ..SampleRow::GREEDY
    }
}

/// Largest number of biases of a row.
const BIASED: usize = 8;

/// Returns biases of many kinds: none, small, decisive, forbidding some tokens, all but one, or all of a
/// small vocabulary; some tokens have two biases.
fn bias_row(step: u32, row: u32, vocab: usize) -> Vec<(u32, f32)> {
    let tag = 700 + step * 1000 + row;
    let [kind, count, first, _] = philox([row, step, 6, 0], [77, 0]).map(|word| word as usize);
    let values = noise(tag, BIASED);
    let some = |bias: &dyn Fn(usize) -> f32| -> Vec<(u32, f32)> {
        let id = |i: usize| ((first + i * i * 31) % vocab) as u32;
        (0..1 + count % BIASED).map(|i| (id(i), bias(i))).collect()
    };
    let forbidden = |ids: std::ops::Range<usize>| ids.map(|id| (id as u32, f32::NEG_INFINITY)).collect();
    match kind % 8 {
        0..=2 => Vec::new(),
        3 => some(&|i| values[i] * 3.0),
        4 => some(&|i| values[i] * 100.0),
        5 => some(&|_| f32::NEG_INFINITY),
        6 => some(&|i| if i % 2 == 0 { f32::NEG_INFINITY } else { values[i] * 10.0 }),
        _ => forbidden(count % 2..vocab.min(BIASED)),
    }
}
