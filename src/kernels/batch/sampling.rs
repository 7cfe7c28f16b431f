//! Sampling parameters of an output row, and the results of a step.
//!
//! Invariant: as long as requests stay within the limits, a [`StepOutput`] never grows.

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
    /// Divisor of the logits. Below [`Self::GREEDY_BELOW`], sampling is greedy.
    pub temperature: f32,
    /// Top-k: keeps the k largest logits; 0 keeps all.
    pub top_k: u32,
    /// Top-p: keeps the smallest set of most likely tokens with at least this total probability; 1 keeps all.
    pub top_p: f32,
    /// Min-p: drops tokens whose probability is below this fraction of the largest; 0 keeps all.
    pub min_p: f32,
    /// Start of the entries of this row in [`super::StepBatch::logit_biases`]. A bias of negative infinity
    /// forbids its token.
    pub bias_at: u32,
    /// Number of these entries.
    pub bias_len: u32,
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
    /// Score the given token: report its log-probability only.
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
        bias_at: 0,
        bias_len: 0,
        logprob: false,
        top_logprobs: 0,
    };

    /// Returns whether the token with the largest logit is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature < SamplingParams::GREEDY_BELOW || self.top_k == 1
    }

    /// Returns the entries of this row in the logit biases of its batch.
    pub fn logit_biases<'a>(&self, biases: &'a [(u32, f32)]) -> &'a [(u32, f32)] {
        &biases[self.bias_at as usize..][..self.bias_len as usize]
    }
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
    /// Time that the step took.
    pub times: StepTimes,
}

/// The time that a step took on its device. The parts do not overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Forward pass: from the batch to the last logits.
    pub forward: Duration,
    /// Sampling: from logits to tokens and log-probabilities.
    pub sample: Duration,
}

/// The result of one output row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledToken {
    /// The sampled token, or the one that was scored.
    pub token: u32,
    /// Log-probability of the token; NaN if it was not requested.
    pub logprob: f32,
    /// Start of the entries of this row in [`StepOutput::top_logprobs`], most likely first.
    pub top_at: u32,
    /// Number of these entries.
    pub top_len: u32,
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
            times: StepTimes::default(),
        }
    }

    /// Clears every list and keeps its capacity.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.top_logprobs.clear();
        self.hidden.clear();
        self.logits.clear();
        self.times = StepTimes::default();
    }

    /// Returns the most likely tokens of one output row.
    pub fn top_logprobs_of(&self, row: &SampledToken) -> &[(u32, f32)] {
        &self.top_logprobs[row.top_at as usize..][..row.top_len as usize]
    }
}
