//! Tests of sampling with biases and masks, and of scoring, against the definition in
//! [`mainstem_kernels::reference`], and of how often tokens are drawn.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, SamplingInputs, StepLimits};
use mainstem_kernels::batch::{
    RowFailure, SampleMode, SampledToken, SamplingParams, SpanOutput, StepOutput, is_allowed,
};
use mainstem_kernels::late::{LateInputs, MaskSender};
use mainstem_kernels::random::philox;
use mainstem_kernels::reference::{is_finite_row, logprobs, rank, sample};
use std::fmt::Arguments;
use std::sync::Arc;
use std::thread;

/// Tests that tokens, log-probabilities and ranks are exactly those of `reference::sample`,
/// `reference::logprobs` and `reference::rank`.
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

/// The rows of a step: their logits, and how to sample each.
struct SampledRows {
    logits: Vec<Vec<f32>>,
    params: Vec<SamplingParams>,
    biases: Vec<Vec<(u32, f32)>>,
    masks: Vec<Vec<u32>>,
}

impl SampledRows {
    fn new(step: u32, vocab: usize) -> SampledRows {
        let rows = || 0..SAMPLED_ROWS as u32;
        SampledRows {
            logits: rows().map(|row| logits_row(step, row, vocab)).collect(),
            params: rows().map(|row| sampling_params(step, row, vocab)).collect(),
            biases: rows().map(|row| row_biases(step, row, vocab)).collect(),
            masks: rows().map(|row| row_mask(step, row, vocab)).collect(),
        }
    }

    /// Returns the mask of a row, if it is sampled with one.
    fn mask(&self, row: usize) -> Option<&[u32]> {
        self.params[row].is_masked().then_some(&self.masks[row])
    }

    /// Replaces the masks by biases that forbid the same tokens, where mask and biases leave a candidate: a
    /// mask is never ignored.
    fn replace_masks_by_biases(&mut self) {
        for row in 0..SAMPLED_ROWS {
            let ids = 0..self.logits[row].len() as u32;
            if let Some(mask) = self.mask(row) {
                let mut biased = self.logits[row].clone();
                self.biases[row].iter().for_each(|&(id, bias)| biased[id as usize] += bias);
                if !ids.clone().any(|id| is_allowed(mask, id) && biased[id as usize] > f32::NEG_INFINITY) {
                    continue;
                }
                let forbidden: Vec<u32> = ids.filter(|id| !is_allowed(mask, *id)).collect();
                self.biases[row].extend(forbidden.iter().map(|id| (*id, f32::NEG_INFINITY)));
                self.params[row].masked = false;
            }
        }
    }

    /// Samples the rows in blocks. The masks come from another thread, the last one first.
    fn sample<B: Backend>(&mut self, rig: &mut Rig<B>) -> StepOutput {
        let piece = TestSpan::given(0, 0, SAMPLED_ROWS);
        let mut batch = build_batch(&[piece], SpanOutput::All, &mut PageBook::scattered(32));
        for (params, biases) in self.params.iter_mut().zip(&self.biases) {
            (params.bias_at, params.bias_len) = (batch.logit_biases.len() as u32, biases.len() as u32);
            batch.logit_biases.extend(biases);
        }
        batch.sampling = self.params.clone();
        let late = Arc::new(LateInputs::default());
        let masked = (0..SAMPLED_ROWS).filter(|row| self.mask(*row).is_some());
        let masked = masked.map(|row| (late.mask_sender(row), Arc::from(&self.masks[row][..])));
        let masks: Vec<(MaskSender, Arc<[u32]>)> = masked.collect();
        let mut out = StepOutput::with_capacity(&rig.limits);
        rig.begin(batch.clone());
        thread::scope(|scope| {
            scope.spawn(|| masks.into_iter().rev().for_each(|(sender, mask)| sender.send(mask)));
            for block in [0..1, 1..40, 40..SAMPLED_ROWS] {
                let buf = rig.input(&self.logits[block.clone()].concat());
                let inputs = SamplingInputs { biases: &batch.logit_biases, late: Some(&late), width: None };
                rig.backend.sample(block, &buf, inputs, &mut out);
            }
        });
        out
    }
}

/// Tests one step, and that biases have the effect of masks.
fn assert_step<B: Backend>(rig: &mut Rig<B>, step: u32, bounds: &Bounds) {
    let vocab = rig.limits.vocab;
    let mut rows = SampledRows::new(step, vocab);
    let out = rows.sample(rig);
    assert_eq!(out.tokens.len(), SAMPLED_ROWS, "sampled rows, vocabulary {vocab}");
    let mut top_at = 0;
    for (row, (result, params)) in out.tokens.iter().zip(&rows.params).enumerate() {
        let (logits, biases, mask) = (&rows.logits[row], &rows.biases[row], rows.mask(row));
        let what = format_args!("sample, vocabulary {vocab}, step {step}, row {row}, {params:?}");
        let expected = match params.mode {
            _ if !is_finite_row(logits) => Err(RowFailure::NotFinite),
            SampleMode::Score(token) => Ok(token),
            _ => sample(logits, biases, mask, params),
        };
        assert_eq!(result.failure.map_or(Ok(result.token), Err), expected, "{what}: token");
        assert_eq!(result.top_at, top_at, "{what}: start of the most likely tokens");
        top_at += result.top_len;
        match result.failure {
            None => assert_logprobs(what, &out, result, (logits, params), bounds),
            Some(_) => assert!(result.logprob.is_nan() && result.top_len == 0, "{what}: {result:?}"),
        }
        let expected = match params.mode {
            SampleMode::Score(token) if params.logprob && result.failure.is_none() => rank(logits, token),
            _ => 0,
        };
        assert_eq!(result.rank, expected, "{what}: rank");
    }
    assert_eq!(out.top_logprobs.len(), top_at as usize, "reported tokens, vocabulary {vocab}");
    rows.replace_masks_by_biases();
    let tokens = |out: &StepOutput| out.tokens.iter().map(|row| row.token).collect::<Vec<_>>();
    assert_eq!(tokens(&rows.sample(rig)), tokens(&out), "biases in the place of masks, vocabulary {vocab}");
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

/// Tests that tokens are drawn with their probabilities, by Pearson's chi-square test of 50,000 draws at
/// p = 0.001. Seeds are fixed, so the outcome is too.
pub fn drawn_frequencies<B: Backend>(make: &impl Fn() -> B) {
    const STEPS: usize = 500;
    let (vocab, rows) = (70, 100);
    let mut rig = Rig::new(make(), StepLimits { vocab, rows, logit_rows: rows, ..limits(32) });
    let logits = scaled(77, vocab, 2.0);
    let buf = rig.input(&logits.repeat(rows));
    let plain = SamplingParams { temperature: 0.9, seed: 12, ..SamplingParams::GREEDY };
    for params in [
        plain,
        SamplingParams { temperature: 1.7, seed: 1 << 40, ..plain },
        SamplingParams { top_p: 0.8, ..plain },
        SamplingParams { top_k: 40, top_p: 0.95, ..plain },
        SamplingParams { min_p: 0.3, ..plain },
    ] {
        let mut counts = vec![0u32; vocab];
        for step in 0..STEPS {
            let piece = TestSpan::given(0, 0, rows);
            let mut batch = build_batch(&[piece], SpanOutput::All, &mut PageBook::scattered(32));
            let positions = (step * rows) as u32..((step + 1) * rows) as u32;
            batch.sampling = positions.map(|position| SamplingParams { position, ..params }).collect();
            rig.begin(batch);
            let mut out = StepOutput::with_capacity(&rig.limits);
            rig.backend.sample(0..rows, &buf, SamplingInputs::default(), &mut out);
            out.tokens.iter().for_each(|row| counts[row.token as usize] += 1);
        }
        assert_frequencies(&counts, &probabilities(&logits, &params), &params);
    }
}

/// Returns the probability of each token.
fn probabilities(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let weights = logits.iter().map(|&logit| f64::from(logit / params.temperature).exp()).enumerate();
    let mut kept: Vec<(usize, f64)> = weights.collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1));
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    let sum = |kept: &[(usize, f64)]| kept.iter().map(|(_, weight)| weight).sum::<f64>();
    let enough = f64::from(params.top_p) * sum(&kept);
    let prefix = (1..kept.len()).find(|&len| sum(&kept[..len]) >= enough);
    kept.truncate(prefix.unwrap_or(kept.len()));
    let least = f64::from(params.min_p) * kept[0].1;
    kept.retain(|(_, weight)| *weight >= least);
    let mut probabilities = vec![0.0; logits.len()];
    kept.iter().for_each(|(id, weight)| probabilities[*id] = weight / sum(&kept));
    probabilities
}

/// Tests that the counts of sampled tokens follow the probabilities.
fn assert_frequencies(counts: &[u32], probabilities: &[f64], params: &SamplingParams) {
    let draws = f64::from(counts.iter().sum::<u32>());
    let (mut statistic, mut possible) = (0.0, 0.0);
    for (token, (&count, probability)) in counts.iter().zip(probabilities).enumerate() {
        let expected = draws * probability;
        if expected > 0.0 {
            statistic += (f64::from(count) - expected).powi(2) / expected;
            possible += 1.0;
        } else {
            assert_eq!(count, 0, "{params:?}: token {token} is impossible");
        }
    }
    // Wilson and Hilferty's approximation of the value that is exceeded once in 1,000 times.
    let part = 2.0 / (9.0 * (possible - 1.0));
    let critical = (possible - 1.0) * (1.0 - part + 3.0902 * f64::sqrt(part)).powi(3);
    assert!(statistic < critical, "{params:?}: {statistic} above {critical} for {possible} tokens");
}

/// Returns logits of many kinds: spread, tied, equal, flat, masked, with NaN and infinities.
pub(super) fn logits_row(step: u32, row: u32, vocab: usize) -> Vec<f32> {
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
pub(super) fn sampling_params(step: u32, row: u32, vocab: usize) -> SamplingParams {
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
        masked: pick(d, 20, 3) == 0,
        logprob,
        top_logprobs: if logprob { pick(d, 8, 9) as u8 } else { 0 },
        ..SamplingParams::GREEDY
    }
}

/// Largest number of biases of a row that has none for every token.
const MAX_BIASES: usize = 8;

/// Returns biases of many kinds: none, of every token, small, decisive, forbidding some tokens, all but one,
/// or all of a small vocabulary; some tokens have two biases.
pub(super) fn row_biases(step: u32, row: u32, vocab: usize) -> Vec<(u32, f32)> {
    let tag = 700 + step * 1000 + row;
    let [kind, count, first, _] = philox([row, step, 6, 0], [77, 0]).map(|word| word as usize);
    let values = noise(tag, MAX_BIASES);
    let some = |bias: &dyn Fn(usize) -> f32| -> Vec<(u32, f32)> {
        let id = |i: usize| ((first + i * i * 31) % vocab) as u32;
        (0..1 + count % MAX_BIASES).map(|i| (id(i), bias(i))).collect()
    };
    let forbidden = |ids: std::ops::Range<usize>| ids.map(|id| (id as u32, f32::NEG_INFINITY)).collect();
    match kind % 9 {
        0..=2 => Vec::new(),
        8 => noise(tag, vocab).into_iter().enumerate().map(|(id, bias)| (id as u32, bias * 5.0)).collect(),
        3 => some(&|i| values[i] * 3.0),
        4 => some(&|i| values[i] * 100.0),
        5 => some(&|_| f32::NEG_INFINITY),
        6 => some(&|i| if i % 2 == 0 { f32::NEG_INFINITY } else { values[i] * 10.0 }),
        _ => forbidden(count % 2..vocab.min(MAX_BIASES)),
    }
}

/// Returns masks of many kinds: of every token, of none, beyond the vocabulary only, of one, of a few and of
/// many. Other bits beyond the vocabulary are arbitrary.
pub(super) fn row_mask(step: u32, row: u32, vocab: usize) -> Vec<u32> {
    let [kind, token, ..] = philox([row, step, 7, 0], [77, 0]);
    let random =
        |round: u32| (0..vocab.div_ceil(32) as u32).map(move |i| philox([row, step, 8, i], [77, round])[0]);
    match kind % 7 {
        0 => random(0).map(|_| u32::MAX).collect(),
        1 => random(0).map(|_| 0).collect(),
        6 => (0..vocab.div_ceil(32))
            .map(|word| if word == vocab / 32 { u32::MAX << (vocab % 32) } else { 0 })
            .collect(),
        2 => {
            let token = token as usize % vocab;
            (0..vocab.div_ceil(32))
                .map(|word| if word == token / 32 { 1 << (token % 32) } else { 0 })
                .collect()
        }
        3 => random(0).zip(random(1)).zip(random(2)).map(|((a, b), c)| a & b & c).collect(),
        4 => random(0).zip(random(1)).map(|(a, b)| a | b).collect(),
        _ => random(0).collect(),
    }
}
