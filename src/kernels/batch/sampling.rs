//! Sampling parameters of an output row, token masks, and the results of a step.
//!
//! Invariant: as long as requests stay within the limits, a [`StepOutput`] never grows.

use super::Penalties;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Sampling parameters of one output row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// Whether to sample or to score a token.
    pub mode: SampleMode,
    /// Counter of the random number generator: the position of the token to be sampled.
    pub position: u32,
    /// Key of the random number generator.
    pub seed: u64,
    /// Divisor of the logits after biases and mask. Below [`Self::GREEDY_BELOW`], sampling is greedy.
    pub temperature: f32,
    /// Top-k: keeps the k largest logits; 0 keeps all.
    pub top_k: u32,
    /// Top-p: keeps the smallest set of most likely tokens with at least this total probability; 1 keeps all.
    pub top_p: f32,
    /// Min-p: drops tokens whose probability is below this fraction of the largest; 0 keeps all.
    pub min_p: f32,
    /// Penalties of the tokens that the sequence has, after the biases, by the counts of the slot. A slot has
    /// at most one row with penalties in a step; its token is counted. Used with [`SampleMode::Sample`] only.
    pub penalties: Penalties,
    /// Start of the entries of this row in [`super::StepBatch::logit_biases`]. A bias of negative infinity
    /// forbids its token. Biases and penalties that leave no logit above negative infinity are ignored, all
    /// of them.
    pub bias_at: u32,
    /// Number of these entries.
    pub bias_len: u32,
    /// Whether a mask ([`crate::late::LateInputs`]) restricts the sampled token, which it does whatever the
    /// logits and biases are; a mask that allows no token fails the row. Used with [`SampleMode::Sample`]
    /// only.
    pub masked: bool,
    /// Whether to report the log-probability of the token, computed from the raw logits.
    pub logprob: bool,
    /// Number of most likely tokens to report with their log-probabilities.
    pub top_logprobs: u8,
}

/// The operation on an output row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleMode {
    /// Sample a token, and store it as the last token of the slot.
    Sample,
    /// Let the host draw a token from the raw logits ([`crate::late::LateInputs`]), and store it as the last
    /// token of the slot. The host applies biases, mask, temperature and filters itself.
    Host,
    /// Score the given token: report its log-probability and rank only.
    Score(u32),
}

impl SamplingParams {
    /// Temperatures below this value are greedy, because dividing by them would overflow.
    pub const GREEDY_BELOW: f32 = 1e-5;

    /// Greedy sampling without log-probabilities.
    pub const GREEDY: SamplingParams = SamplingParams {
        mode: SampleMode::Sample,
        position: 0,
        seed: 0,
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        penalties: Penalties::NONE,
        bias_at: 0,
        bias_len: 0,
        masked: false,
        logprob: false,
        top_logprobs: 0,
    };

    /// Returns whether the token with the largest logit is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < SamplingParams::GREEDY_BELOW || self.top_k == 1
    }

    /// Returns whether the row is sampled with a mask.
    pub fn is_masked(&self) -> bool {
        self.masked && self.mode == SampleMode::Sample
    }

    /// Returns whether the row is sampled with penalties.
    pub fn is_penalized(&self) -> bool {
        !self.penalties.is_none() && self.mode == SampleMode::Sample
    }

    /// Returns the entries of this row in the logit biases of its batch.
    pub fn logit_biases<'a>(&self, biases: &'a [(u32, f32)]) -> &'a [(u32, f32)] {
        &biases[self.bias_at as usize..][..self.bias_len as usize]
    }
}

/// Returns whether a mask allows a token. Bit `token % 32` of word `token / 32` is set if it does.
pub fn is_allowed(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// Returns the lowest token of the vocabulary that a mask allows, if there is one.
pub fn lowest_allowed(mask: &[u32], vocab: usize) -> Option<u32> {
    let word = mask.iter().position(|&word| word != 0)?;
    let token = word * 32 + mask[word].trailing_zeros() as usize;
    (token < vocab).then_some(token as u32)
}

/// The results of a step.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepOutput {
    /// The step these results belong to.
    pub step: u64,
    /// One result for each output row, in row order.
    pub tokens: Vec<SampledToken>,
    /// The most likely tokens (id, log-probability) of all output rows, one row after another.
    pub top_logprobs: Vec<(u32, f32)>,
    /// Hidden states (rows, hidden) of the spans that return them, one span after another.
    pub hidden: Vec<f32>,
    /// Raw logits (output rows, vocab) if [`super::StepBatch::return_logits`] is set, F32, little-endian. No
    /// capacity is reserved for them.
    pub logits: Vec<u8>,
    /// The drafts that were made, one span of [`super::StepBatch::drafts`] after another.
    pub drafts: Vec<u32>,
    /// Time that the step took.
    pub times: StepTimes,
}

/// The time that a step took on its device: forward pass and sampling do not overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Forward pass: from the batch to the last logits, with the passes of a draft model.
    pub forward: Duration,
    /// Sampling: from logits to tokens, drafts and log-probabilities, including the wait for late inputs.
    pub sample: Duration,
    /// The part of both in which the drafts were made, as the host sees it; 0 without drafts.
    pub draft: Duration,
}

/// The result of one output row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The sampled token, or the one that was scored; 0 if the row failed.
    pub token: u32,
    /// The reason for which there is no token; `None` if there is one.
    pub failure: Option<RowFailure>,
    /// Log-probability of the token; NaN if it was not requested.
    pub logprob: f32,
    /// Rank of a scored token ([`SampleMode::Score`]) among all tokens by raw logit, ties by id: 1 is the
    /// most likely. 0 if the token was not scored, or its log-probability was not requested.
    pub rank: u32,
    /// Start of the entries of this row in [`StepOutput::top_logprobs`], most likely first.
    pub top_at: u32,
    /// Number of these entries.
    pub top_len: u32,
}

/// The reason for which a row has no token. The last token of its slot is unchanged, and no other row is
/// affected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum RowFailure {
    /// The host gave up the late input of the row, or supplied an invalid one.
    #[error("the host supplied no valid mask or token")]
    NoLateInput,
    /// The mask of the row allows no token of the vocabulary.
    #[error("the mask allows no token")]
    EmptyMask,
    /// The largest logit of the row is infinite, or none of its logits is a number above negative infinity:
    /// weights or activations are not finite.
    #[error("the model computed no finite logits")]
    NotFinite,
}

impl SampledToken {
    /// Creates the result of a row without log-probabilities.
    pub fn new(token: u32) -> SampledToken {
        SampledToken { token, failure: None, logprob: f32::NAN, rank: 0, top_at: 0, top_len: 0 }
    }

    /// Creates the result of a row that failed.
    pub fn failed(failure: RowFailure) -> SampledToken {
        SampledToken { failure: Some(failure), ..SampledToken::new(0) }
    }
}

impl StepOutput {
    /// Allocates an output with capacity for the results of any batch within `limits`.
    pub fn with_capacity(limits: &crate::StepLimits) -> StepOutput {
        StepOutput {
            step: 0,
            tokens: Vec::with_capacity(limits.rows),
            top_logprobs: Vec::with_capacity(limits.rows * limits.top_logprobs),
            hidden: Vec::with_capacity(limits.rows * limits.hidden),
            logits: Vec::new(),
            drafts: Vec::with_capacity(limits.all_drafts()),
            times: StepTimes::default(),
        }
    }

    /// Clears every list and keeps its capacity.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.top_logprobs.clear();
        self.hidden.clear();
        self.logits.clear();
        self.drafts.clear();
        self.times = StepTimes::default();
    }

    /// Returns the most likely tokens of one output row.
    pub fn top_logprobs_of(&self, row: &SampledToken) -> &[(u32, f32)] {
        &self.top_logprobs[row.top_at as usize..][..row.top_len as usize]
    }
}
