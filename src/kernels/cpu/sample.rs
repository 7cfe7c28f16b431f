//! Token sampling as [`crate::reference::sample`] defines it, without sorting the whole vocabulary.
//!
//! Candidates are sorted on demand: the 64 most likely are selected and sorted, then four times as many, and
//! so on. Where the definition sums over more candidates than sampling needs to look at, the sum in id order
//! decides, with a bound on its rounding error; only if the threshold lies within that bound, the sum is
//! taken in candidate order.
//!
//! Invariant: the result equals the definition's, whatever was left unsorted. Nothing is allocated.

#![allow(unsafe_code)]

use super::pool::{SharedSlice, ThreadPool};
use crate::backend::{SamplingInputs, StepLimits};
use crate::batch::{RowFailure, SampleMode, SampledToken, SamplingParams, StepOutput, StepState};
use crate::random::uniform;
use std::ops::Range;

/// Number of candidates that are sorted first.
const FIRST_SORTED: usize = 64;

/// Buffers for sampling: logits and keys per thread, masks and results per row.
pub struct SampleScratch {
    vocab: usize,
    top_max: usize,
    mask_words: usize,
    /// Logits with their biases, (threads, vocab).
    biased: Vec<f32>,
    /// (threads, vocab).
    keys: Vec<u64>,
    /// (logit rows, mask words).
    masks: Vec<u32>,
    /// Rows to be computed at once, with their numbers in the block.
    ready: Vec<(usize, SamplingParams)>,
    results: Vec<SampledToken>,
    /// (rows, top_max).
    top: Vec<(u32, f32)>,
}

/// The late input that a row waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    Mask,
    Token,
}

impl SampleScratch {
    /// Allocates scratch for steps within `limits` on `threads` threads.
    pub fn new(limits: &StepLimits, threads: usize) -> SampleScratch {
        let rows = limits.rows.max(limits.logit_rows);
        SampleScratch {
            vocab: limits.vocab,
            top_max: limits.top_logprobs.min(limits.vocab),
            mask_words: limits.mask_words(),
            biased: vec![0.0; threads * limits.vocab],
            keys: vec![0; threads * limits.vocab],
            masks: vec![0; limits.logit_rows * limits.mask_words()],
            ready: Vec::with_capacity(rows),
            results: vec![SampledToken::new(0); rows],
            top: vec![(0, 0.0); rows * limits.top_logprobs.min(limits.vocab)],
        }
    }

    /// Samples or scores the rows `wanted` from logits (wanted.len(), vocab), and appends their results to
    /// `out`.
    pub fn sample(
        &mut self,
        pool: &mut ThreadPool,
        step: &mut StepState,
        wanted: Range<usize>,
        (logits, inputs): (&[f32], SamplingInputs<'_>),
        out: &mut StepOutput,
    ) {
        let first = step.first_sample() + wanted.start;
        let rows = &step.samples()[wanted.clone()];
        for (i, _) in rows.iter().enumerate().filter(|(_, row)| awaited(row) == Awaited::Token) {
            inputs.begin_draw(first + i, &logits[i * self.vocab..][..self.vocab]);
        }
        for awaits in [Awaited::Nothing, Awaited::Mask, Awaited::Token] {
            self.ready.clear();
            for (i, row) in rows.iter().enumerate().filter(|(_, row)| awaited(row) == awaits) {
                match self.wait(first, i, row, inputs) {
                    Some(row) => self.ready.push((i, row)),
                    None => self.results[i] = SampledToken::failed(RowFailure::NoLateInput),
                }
            }
            self.compute(pool, logits, inputs.biases);
        }
        for (i, wanted) in wanted.enumerate() {
            let top_at = out.top_logprobs.len() as u32;
            let result = SampledToken { top_at, ..self.results[i] };
            out.top_logprobs.extend_from_slice(&self.top[i * self.top_max..][..result.top_len as usize]);
            let is_score = matches!(step.samples()[wanted].mode, SampleMode::Score(_));
            if !is_score && result.failure.is_none() {
                step.store_last_token(wanted, result.token);
            }
            out.tokens.push(result);
        }
    }

    /// Waits for the late input of row `i` of the block, if it has one. Returns the parameters with which the
    /// row is computed; `None` if the input does not come.
    fn wait(
        &mut self,
        first: usize,
        i: usize,
        row: &SamplingParams,
        inputs: SamplingInputs<'_>,
    ) -> Option<SamplingParams> {
        match awaited(row) {
            Awaited::Nothing => Some(*row),
            Awaited::Mask => {
                let mask = &mut self.masks[i * self.mask_words..][..self.mask_words];
                inputs.wait_mask(first + i, mask).then_some(*row)
            }
            Awaited::Token => {
                let token = inputs.wait_token(first + i, self.vocab)?;
                Some(SamplingParams { mode: SampleMode::Score(token), ..*row })
            }
        }
    }

    /// Computes the results of the rows that are ready.
    fn compute(&mut self, pool: &mut ThreadPool, logits: &[f32], biases: &[(u32, f32)]) {
        if self.ready.is_empty() {
            return;
        }
        let (vocab, top_max, mask_words) = (self.vocab, self.top_max, self.mask_words);
        let (biased, keys) = (SharedSlice::new(&mut self.biased), SharedSlice::new(&mut self.keys));
        let (results, top) = (SharedSlice::new(&mut self.results), SharedSlice::new(&mut self.top));
        let (ready, masks) = (&self.ready, &self.masks);
        pool.run(ready.len(), |worker, item| {
            let (i, row) = &ready[item];
            let own = worker * vocab..(worker + 1) * vocab;
            // SAFETY: logits and keys are the worker's own, and it is in one item at a time; results and top
            // tokens are those of the item's row, which no other item has.
            let (buffers, result, top) = unsafe {
                (
                    WorkerBuffers { biased: biased.slice_mut(own.clone()), keys: keys.slice_mut(own) },
                    &mut results.slice_mut(*i..i + 1)[0],
                    top.slice_mut(i * top_max..(i + 1) * top_max),
                )
            };
            let mask = row.is_masked().then(|| &masks[i * mask_words..][..mask_words]);
            let bans = (row.logit_biases(biases), mask);
            *result = sample_row(&logits[i * vocab..][..vocab], row, bans, buffers, top);
        });
    }
}

/// Returns what a row waits for before it is computed.
fn awaited(row: &SamplingParams) -> Awaited {
    match row.mode {
        SampleMode::Sample if row.masked => Awaited::Mask,
        SampleMode::Sample | SampleMode::Score(_) => Awaited::Nothing,
        SampleMode::Host => Awaited::Token,
    }
}

/// The buffers of one worker, each (vocab).
struct WorkerBuffers<'a> {
    biased: &'a mut [f32],
    keys: &'a mut [u64],
}

/// Computes the result of one row, and writes its most likely tokens to `top`. The caller sets where those
/// are in the output.
fn sample_row(
    logits: &[f32],
    row: &SamplingParams,
    (biases, mask): (&[(u32, f32)], Option<&[u32]>),
    WorkerBuffers { biased, keys }: WorkerBuffers,
    top: &mut [(u32, f32)],
) -> SampledToken {
    let token = match row.mode {
        SampleMode::Sample => sample_token(apply_biases(logits, biases, mask, biased), row, keys),
        SampleMode::Score(token) => token,
        SampleMode::Host => unreachable!("the token of the host is scored"),
    };
    let mut result = SampledToken::new(token);
    if !row.logprob && row.top_logprobs == 0 {
        return result;
    }
    let log_sum = log_sum_exp(logits);
    let logprob_of = |id: usize| (f64::from(nan_to_lowest(logits[id])) - log_sum) as f32;
    if row.logprob {
        result.logprob = logprob_of(token as usize);
    }
    let n = usize::from(row.top_logprobs).min(logits.len());
    assert!(n <= top.len(), "{n} top tokens are beyond the limits");
    if n > 0 {
        let mut ordered = SortedPrefix::new(logits.iter().map(|&logit| nan_to_lowest(logit)), keys);
        for (i, top) in top[..n].iter_mut().enumerate() {
            let id = ordered.id_at(i);
            *top = (id as u32, logprob_of(id));
        }
        result.top_len = n as u32;
    }
    result
}

/// Returns the logits with biases and mask applied, computed in `buffer`; the logits unchanged if that leaves
/// no candidate.
fn apply_biases<'a>(
    logits: &'a [f32],
    biases: &[(u32, f32)],
    mask: Option<&[u32]>,
    buffer: &'a mut [f32],
) -> &'a [f32] {
    if biases.is_empty() && mask.is_none() {
        return logits;
    }
    buffer.copy_from_slice(logits);
    for &(id, bias) in biases {
        buffer[id as usize] += bias;
    }
    for (logits, allowed) in buffer.chunks_mut(32).zip(mask.unwrap_or_default()) {
        for (bit, logit) in logits.iter_mut().enumerate() {
            *logit = if allowed >> bit & 1 == 1 { *logit } else { f32::NEG_INFINITY };
        }
    }
    if max_value(buffer, |logit| logit) == f32::NEG_INFINITY { logits } else { buffer }
}

/// Returns ln Σ e^logit; NaN counts as negative infinity.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = max_value(logits, |logit| logit);
    let sum: f64 = logits.iter().map(|&logit| f64::from((nan_to_lowest(logit) - largest).exp())).sum();
    f64::from(largest) + sum.ln()
}

/// Samples a token id from the (biased) logits.
fn sample_token(logits: &[f32], row: &SamplingParams, keys: &mut [u64]) -> u32 {
    if row.is_greedy() {
        return greedy_token(logits);
    }
    let scaled = |id: usize| nan_to_lowest(logits[id] / row.temperature);
    let largest = max_value(logits, |logit| logit / row.temperature);
    if !largest.is_finite() {
        return greedy_token(logits);
    }
    let ordered = SortedPrefix::new((0..logits.len()).map(scaled), keys);
    let weight = |id: usize| f64::from((scaled(id) - largest).exp());
    Candidates { vocab: logits.len(), ordered, weight }.sample(row)
}

/// The candidates of one row; `weight` returns the weight of a token id.
struct Candidates<'a, W> {
    vocab: usize,
    ordered: SortedPrefix<'a>,
    weight: W,
}

impl<W: Fn(usize) -> f64> Candidates<'_, W> {
    fn sample(mut self, row: &SamplingParams) -> u32 {
        let mut kept = self.vocab;
        if row.top_k > 0 {
            kept = kept.min(row.top_k as usize);
        }
        if row.top_p < 1.0 {
            let total = if row.top_k > 0 { self.sum_in_order(kept) } else { self.count_and_sum_by_id(0.0).1 };
            let enough = f64::from(row.top_p) * total;
            kept = self.shortest_prefix(kept, |sum| sum >= enough);
        }
        // Weights are F32 numbers, so the smallest one kept is rounded to F32 too.
        let min = f64::from(row.min_p * self.weight_at(0) as f32);
        let uniform = uniform(row.seed, row.position.into());
        let sampled = if kept == self.vocab {
            let (kept, sum) = self.count_and_sum_by_id(min);
            self.sample_with_bounds(kept.max(1), uniform, sum)
        } else {
            let kept = self.count_in_order(kept, min).max(1);
            self.sample_exactly(kept, uniform)
        };
        self.ordered.id_at(sampled) as u32
    }

    /// Returns the rank of the sampled candidate, using the sum in candidate order.
    fn sample_exactly(&mut self, kept: usize, uniform: f32) -> usize {
        let threshold = f64::from(uniform) * self.sum_in_order(kept);
        self.shortest_prefix(kept, |sum| sum > threshold) - 1
    }

    /// Returns the rank of the sampled candidate, given the sum of the kept weights in another order. The two
    /// sums differ by less than two units in the last place per term, so a running sum outside these bounds
    /// is on the same side of both thresholds.
    fn sample_with_bounds(&mut self, kept: usize, uniform: f32, sum: f64) -> usize {
        let threshold = f64::from(uniform) * sum;
        let slack = threshold * (self.vocab + 8) as f64 * 4.0 * f64::EPSILON;
        let (low, high) = (threshold - slack, threshold + slack);
        let below = self.shortest_prefix(kept, |sum| sum > low);
        let above = self.shortest_prefix(kept, |sum| sum > high);
        if below == above { above - 1 } else { self.sample_exactly(kept, uniform) }
    }

    fn weight_at(&mut self, rank: usize) -> f64 {
        (self.weight)(self.ordered.id_at(rank))
    }

    /// Returns the sum of the first `kept` weights, in candidate order.
    fn sum_in_order(&mut self, kept: usize) -> f64 {
        (0..kept).map(|rank| self.weight_at(rank)).sum()
    }

    /// Returns the number and the sum, in id order, of the weights of at least `min`.
    fn count_and_sum_by_id(&self, min: f64) -> (usize, f64) {
        let kept = (0..self.vocab).map(&self.weight).filter(|&weight| weight >= min);
        kept.fold((0, 0.0), |(count, sum), weight| (count + 1, sum + weight))
    }

    /// Returns the number of the first `kept` candidates whose weight is at least `min`.
    fn count_in_order(&mut self, kept: usize, min: f64) -> usize {
        if min <= 0.0 {
            return kept;
        }
        (0..kept).filter(|&rank| self.weight_at(rank) >= min).count()
    }

    /// Returns the length of the shortest prefix, at least 1, whose sum of weights satisfies `enough`; `kept`
    /// if there is none.
    fn shortest_prefix(&mut self, kept: usize, enough: impl Fn(f64) -> bool) -> usize {
        let mut sum = 0.0;
        for rank in 0..kept {
            sum += self.weight_at(rank);
            if enough(sum) {
                return rank + 1;
            }
        }
        kept
    }
}

/// Token ids by descending value, ties by id, sorted as far as needed.
struct SortedPrefix<'a> {
    /// The value, mapped so that the largest comes first, << 32 | id.
    keys: &'a mut [u64],
    sorted: usize,
}

impl<'a> SortedPrefix<'a> {
    /// Creates the keys of `values`, none of which may be NaN.
    fn new(values: impl Iterator<Item = f32>, keys: &'a mut [u64]) -> SortedPrefix<'a> {
        for (id, (key, value)) in keys.iter_mut().zip(values).enumerate() {
            *key = u64::from(descending(value)) << 32 | id as u64;
        }
        SortedPrefix { keys, sorted: 0 }
    }

    /// Returns the id at a rank.
    fn id_at(&mut self, rank: usize) -> usize {
        if rank >= self.sorted {
            self.sort_beyond(rank);
        }
        self.keys[rank] as u32 as usize
    }

    /// Extends the sorted prefix beyond `rank`.
    fn sort_beyond(&mut self, rank: usize) {
        let end = FIRST_SORTED.max(4 * self.sorted).max(rank + 1).min(self.keys.len());
        let unsorted = &mut self.keys[self.sorted..];
        let count = end - self.sorted;
        if count < unsorted.len() {
            unsorted.select_nth_unstable(count - 1);
        }
        unsorted[..count].sort_unstable();
        self.sorted = end;
    }
}

/// Returns bits that ascend as values descend; 0.0 and -0.0 map to the same bits.
fn descending(value: f32) -> u32 {
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 1 { bits } else { !bits & (u32::MAX >> 1) }
}

/// Returns the id of the largest logit; the lowest id on ties; 0 when no logit is above negative infinity.
fn greedy_token(logits: &[f32]) -> u32 {
    let largest = max_value(logits, |logit| logit);
    if largest == f32::NEG_INFINITY {
        return 0;
    }
    let id = logits.iter().position(|&logit| logit == largest);
    id.expect("the largest logit is one of the logits; this is a bug") as u32
}

/// Returns the largest `value` of the logits; NaN counts as negative infinity. Computed in lanes, so that it
/// vectorizes.
#[inline(always)]
fn max_value(logits: &[f32], value: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            let value = value(logit);
            *lane = if value > *lane { value } else { *lane };
        }
    }
    rest.iter().map(|&logit| value(logit)).chain(lanes).fold(f32::NEG_INFINITY, f32::max)
}

/// Replaces NaN by negative infinity.
fn nan_to_lowest(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}
