//! Token sampling as [`crate::reference::sample`] defines it, without sorting the vocabulary: the filters
//! select the [`Candidates`], and only those of them that can win the draw get noise.
//!
//! Invariant: the result equals the definition's. Nothing is allocated.

#![allow(unsafe_code)]

use super::pool::{SharedSlice, ThreadPool};
use super::scratch_memory::ListMemory;
use super::simd::Level;
use crate::backend::{SamplingInputs, StepLimits};
use crate::batch::{
    Penalties, RowFailure, SampleMode, SampledToken, SamplingParams, StepBatch, StepOutput, StepState,
    TokenCounts,
};
use crate::candidates::{Buffers, Candidates, largest, nan_to_lowest};
use crate::host::HostLists;
use std::ops::Range;

/// Buffers for sampling: candidates per thread, masks and results per row.
pub struct SampleScratch<M = HostLists> {
    vocab: usize,
    top_max: usize,
    mask_words: usize,
    /// Candidates of the row of each thread.
    buffers: Vec<Buffers>,
    /// (logit rows, mask words).
    masks: Vec<u32>,
    /// Rows to be computed at once, with their numbers in the block, and the slots whose counts penalties
    /// use.
    ready: Vec<(usize, SamplingParams, Option<usize>)>,
    results: Vec<SampledToken>,
    /// (rows, top_max).
    top: Vec<(u32, f32)>,
    /// Kept logits of drafts, (slots, drafts, vocabulary).
    draft_logits: Vec<f32>,
    counts: TokenCounts,
    /// Counts the lists for as long as they live.
    _memory: M,
}

/// The logits of a block of rows, (rows, width), of which no more than the vocabulary are used.
#[derive(Clone, Copy)]
struct RowLogits<'a> {
    all: &'a [f32],
    width: usize,
    vocab: usize,
}

impl<'a> RowLogits<'a> {
    /// Returns the logits of row `i`.
    fn row(&self, i: usize) -> &'a [f32] {
        &self.all[i * self.width..][..self.width.min(self.vocab)]
    }
}

/// The late input that a row waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Awaited {
    Nothing,
    Mask,
    Token,
}

impl<M: ListMemory> SampleScratch<M> {
    /// Allocates scratch for steps within `limits` on `threads` threads with this instruction set.
    pub fn new(limits: &StepLimits, (threads, level): (usize, Level), mut memory: M) -> SampleScratch<M> {
        let rows = limits.rows_at_once().max(limits.logit_rows);
        let buffers =
            |memory: &mut M| Buffers::of_lists(memory.empty(limits.vocab), memory.empty(limits.vocab), level);
        SampleScratch {
            vocab: limits.vocab,
            top_max: limits.top_logprobs.min(limits.vocab),
            mask_words: limits.mask_words(),
            buffers: (0..threads).map(|_| buffers(&mut memory)).collect(),
            masks: memory.filled(limits.logit_rows * limits.mask_words(), 0),
            ready: memory.empty(rows),
            results: memory.filled(rows, SampledToken::new(0)),
            top: memory.filled(rows * limits.top_logprobs.min(limits.vocab), (0, 0.0)),
            draft_logits: memory.filled(limits.draft_logits_len(), 0.0),
            counts: TokenCounts::new(memory.filled(limits.token_counts_len(), 0), limits.vocab),
            _memory: memory,
        }
    }
}

impl SampleScratch {
    /// Begins a step: moves the counts of slots, and applies the changes of a batch.
    pub fn begin(&mut self, batch: &StepBatch) {
        self.counts.begin(batch);
    }

    /// Samples or scores the rows `wanted` from logits (wanted.len(), width), and appends their results to
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
        let logits = RowLogits { all: logits, width: inputs.width.unwrap_or(self.vocab), vocab: self.vocab };
        self.keep_draft_logits(step, wanted.clone(), logits);
        for (i, _) in rows.iter().enumerate().filter(|(_, row)| awaited(row) == Awaited::Token) {
            let row = step.host_row(wanted.start + i, logits.row(i), &self.draft_logits);
            inputs.begin_draw(first + i, row);
        }
        for awaits in [Awaited::Nothing, Awaited::Mask, Awaited::Token] {
            self.ready.clear();
            for (i, row) in rows.iter().enumerate().filter(|(_, row)| awaited(row) == awaits) {
                match self.wait(first, i, row, inputs) {
                    Some(row) => self.ready.push((i, row, counted_slot(step, wanted.start + i))),
                    None => self.results[i] = SampledToken::failed(RowFailure::NoLateInput),
                }
            }
            self.compute(pool, logits, inputs.biases);
        }
        for (i, wanted) in wanted.enumerate() {
            let top_at = out.top_logprobs.len() as u32;
            let is_score = matches!(step.samples()[wanted].mode, SampleMode::Score(_));
            // A token of the host is scored as well, but has no rank.
            let rank = if is_score { self.results[i].rank } else { 0 };
            let result = SampledToken { top_at, rank, ..self.results[i] };
            out.top_logprobs.extend_from_slice(&self.top[i * self.top_max..][..result.top_len as usize]);
            if !is_score && result.failure.is_none() {
                let counted = counted_slot(step, wanted);
                step.store_token(wanted, result.token);
                counted.into_iter().for_each(|slot| self.counts.add(slot, result.token));
            }
            out.tokens.push(result);
        }
    }

    /// Keeps the logits of the rows that sample drafts, if the step says so.
    fn keep_draft_logits(&mut self, step: &StepState, wanted: Range<usize>, logits: RowLogits) {
        for (i, wanted) in wanted.enumerate() {
            if let Some(kept) = step.kept_row(wanted) {
                let kept = &mut self.draft_logits[kept * self.vocab..][..self.vocab];
                let row = logits.row(i);
                kept[..row.len()].copy_from_slice(row);
                kept[row.len()..].fill(f32::NEG_INFINITY);
            }
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
    fn compute(&mut self, pool: &mut ThreadPool, logits: RowLogits, biases: &[(u32, f32)]) {
        if self.ready.is_empty() {
            return;
        }
        let (top_max, mask_words) = (self.top_max, self.mask_words);
        let buffers = SharedSlice::new(&mut self.buffers);
        let (results, top) = (SharedSlice::new(&mut self.results), SharedSlice::new(&mut self.top));
        let (ready, masks, counts) = (&self.ready, &self.masks, &self.counts);
        pool.run(ready.len(), |worker, item| {
            let (i, row, counted) = &ready[item];
            // SAFETY: the buffers are the worker's own, and it is in one item at a time; results and top
            // tokens are those of the item's row, which no other item has.
            let (buffers, result, top) = unsafe {
                (
                    &mut buffers.slice_mut(worker..worker + 1)[0],
                    &mut results.slice_mut(*i..i + 1)[0],
                    top.slice_mut(i * top_max..(i + 1) * top_max),
                )
            };
            let mask = row.is_masked().then(|| &masks[i * mask_words..][..mask_words]);
            let counts = counted.map_or(&[][..], |slot| counts.of(slot));
            let edits = Edits { biases: row.logit_biases(biases), counts, mask };
            *result = sample_row(logits.row(*i), row, edits, buffers, top);
        });
    }
}

/// Returns the slot whose counts the penalties of a wanted row use, and that counts its token; `None` if the
/// row has no penalties.
fn counted_slot(step: &StepState, wanted: usize) -> Option<usize> {
    step.token_slot(wanted).filter(|_| step.samples()[wanted].is_penalized())
}

/// The changes of a row's logits.
#[derive(Clone, Copy)]
struct Edits<'a> {
    biases: &'a [(u32, f32)],
    /// The counts that the row's penalties use; none without penalties.
    counts: &'a [u16],
    mask: Option<&'a [u32]>,
}

impl Edits<'_> {
    /// Returns whether no logit changes.
    fn is_empty(&self) -> bool {
        self.biases.is_empty() && self.counts.is_empty() && self.mask.is_none()
    }

    /// Applies biases and penalties to the values of the tokens that the mask allows, unless that leaves no
    /// candidate.
    fn apply(&self, logits: &[f32], penalties: &Penalties, buffers: &mut Buffers) {
        if self.biases.is_empty() && self.counts.is_empty() {
            return;
        }
        for &(id, bias) in self.biases {
            // A draft model may have fewer tokens than the target.
            if let Some(value) = buffers.values.get_mut(id as usize) {
                *value = nan_to_lowest(*value + bias);
            }
        }
        // Most tokens do not occur, so that all counts of most chunks are 0.
        const CHUNK: usize = 32;
        for (values, counts) in buffers.values.chunks_mut(CHUNK).zip(self.counts.chunks(CHUNK)) {
            if counts.iter().fold(0, |all, count| all | count) != 0 {
                let penalized = |(value, count): (&mut f32, &u16)| {
                    *value = nan_to_lowest(penalties.apply(*value, *count));
                };
                values.iter_mut().zip(counts).for_each(penalized);
            }
        }
        if largest(&buffers.values) == f32::NEG_INFINITY {
            buffers.load(logits, self.mask);
        }
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

/// Computes the result of one row, and writes its most likely tokens to `top`. The caller sets where those
/// are in the output.
fn sample_row(
    logits: &[f32],
    row: &SamplingParams,
    edits: Edits,
    buffers: &mut Buffers,
    top: &mut [(u32, f32)],
) -> SampledToken {
    let largest = largest(logits);
    if !largest.is_finite() {
        return SampledToken::failed(RowFailure::NotFinite);
    }
    let token = match row.mode {
        SampleMode::Sample if row.is_greedy() && edits.is_empty() => Ok(first_of(logits, largest)),
        SampleMode::Sample => sample_token(logits, row, edits, buffers),
        SampleMode::Score(token) => Ok(token),
        SampleMode::Host => unreachable!("the token of the host is scored"),
    };
    let token = match token {
        Ok(token) => token,
        Err(failure) => return SampledToken::failed(failure),
    };
    let mut result = SampledToken::new(token);
    if !row.logprob && row.top_logprobs == 0 {
        return result;
    }
    let log_sum = log_sum_exp(logits);
    let logprob_of = |logit: f32| (f64::from(nan_to_lowest(logit)) - log_sum) as f32;
    if row.logprob {
        result.logprob = logprob_of(logits[token as usize]);
        if let SampleMode::Score(token) = row.mode {
            result.rank = rank(logits, token);
        }
    }
    let n = usize::from(row.top_logprobs).min(logits.len());
    assert!(n <= top.len(), "{n} top tokens are beyond the limits");
    if n > 0 {
        buffers.load(logits, None);
        let mut candidates = Candidates::new(buffers);
        candidates.keep_first(n);
        let first = candidates.first(n).map(|(id, logit)| (id, logprob_of(logit)));
        top.iter_mut().zip(first).for_each(|(top, first)| *top = first);
        result.top_len = n as u32;
    }
    result
}

/// Samples a token.
fn sample_token(
    logits: &[f32],
    row: &SamplingParams,
    edits: Edits,
    buffers: &mut Buffers,
) -> Result<u32, RowFailure> {
    let lowest = buffers.load(logits, edits.mask).ok_or(RowFailure::EmptyMask)?;
    edits.apply(logits, &row.penalties, buffers);
    let mut candidates = Candidates::new(buffers);
    if candidates.largest() == f32::NEG_INFINITY {
        return Ok(lowest);
    }
    if row.is_greedy() || candidates.largest() == f32::INFINITY {
        return Ok(candidates.most_likely());
    }
    candidates.divide_by(row.temperature);
    if row.top_k > 0 {
        candidates.keep_first(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        candidates.keep_fraction(row.top_p);
    }
    if row.min_p > 0.0 {
        candidates.keep_likely(row.min_p);
    }
    Ok(candidates.draw(row.seed, row.position.into()))
}

/// Returns ln Σ e^logit; NaN counts as negative infinity.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = largest(logits);
    let sum: f64 = logits.iter().map(|&logit| f64::from((nan_to_lowest(logit) - largest).exp())).sum();
    f64::from(largest) + sum.ln()
}

/// Returns the rank of a token by its logit: 1 for the largest, ties by id. NaN counts as negative infinity.
fn rank(logits: &[f32], token: u32) -> u32 {
    let own = nan_to_lowest(logits[token as usize]);
    let (before, after) = logits.split_at(token as usize);
    // Sums of conditions, which the compiler vectorizes.
    let equal_or_larger: u32 = before.iter().map(|&logit| u32::from(nan_to_lowest(logit) >= own)).sum();
    let larger: u32 = after.iter().map(|&logit| u32::from(nan_to_lowest(logit) > own)).sum();
    1 + equal_or_larger + larger
}

/// Returns the lowest id of the logits that are `largest`.
fn first_of(logits: &[f32], largest: f32) -> u32 {
    logits.iter().position(|&logit| logit == largest).unwrap_or(0) as u32
}
