//! What is asked of a wanted row's logits, and what a step gives back.
//!
//! Invariant: as long as nothing beyond the limits is asked for, an output never grows.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What to do with one wanted row's logits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleRow {
    pub mode: SampleMode,
    /// Counter of the generator: the position the drawn token will have.
    pub position: u32,
    /// Key of the generator.
    pub seed: u64,
    /// Logits are divided by it; below [`SampleRow::GREEDY_BELOW`] the row is greedy.
    pub temperature: f32,
    /// Keep the k largest logits; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens that holds this share; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the likeliest; 0 keeps all.
    pub min_p: f32,
    /// The row's entries of `StepBatch::biases`: `bias_len` from `bias_at` on. A bias of negative infinity
    /// forbids its token.
    pub bias_at: u32,
    pub bias_len: u32,
    /// Whether the log-probability of the token is wanted (raw logits, before temperature).
    pub logprob: bool,
    /// How many most likely tokens are reported beside it.
    pub top_logprobs: u8,
}

/// How a wanted row's token comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleMode {
    /// Draw it and remember it as the slot's last token.
    Draw,
    /// It is given; only its log-probability is wanted.
    Score(u32),
}

impl SampleRow {
    /// Temperatures below this are greedy: dividing by them would only overflow.
    pub const GREEDY_BELOW: f32 = 1e-5;

    /// Greedy choice, nothing reported.
    pub const GREEDY: SampleRow = SampleRow {
        mode: SampleMode::Draw,
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

    /// Whether the largest logit is taken as it is.
    pub fn is_greedy(&self) -> bool {
        self.temperature < SampleRow::GREEDY_BELOW || self.top_k == 1
    }

    /// Its entries of the batch's `biases`.
    pub fn biases<'a>(&self, biases: &'a [(u32, f32)]) -> &'a [(u32, f32)] {
        &biases[self.bias_at as usize..][..self.bias_len as usize]
    }
}

/// The results of a step, one row for each entry of `StepBatch::samples`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StepOutput {
    /// The step these results belong to.
    pub step: u64,
    pub rows: Vec<SampledRow>,
    /// The most likely tokens of all rows, one row's after another's: (id, log-probability).
    pub top: Vec<(u32, f32)>,
    /// Hidden states of the rows that want them, one row's after another's.
    pub hidden: Vec<f32>,
    /// Raw logits of the wanted rows where the batch wants them, F32, little-endian, (rows, vocab). No room is kept for them.
    pub logits: Vec<u8>,
    pub times: StepTimes,
}

/// What a step took on its device. The parts do not overlap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTimes {
    /// From the batch to the last logits.
    pub forward: Duration,
    /// From logits to tokens and what is reported of them.
    pub sample: Duration,
}

/// One wanted row's result.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampledRow {
    /// The token drawn, or the one that was scored.
    pub token: u32,
    /// Its log-probability; NaN when it was not asked for.
    pub logprob: f32,
    /// The row's entries of `StepOutput::top`: `top_len` from `top_at` on, most likely first.
    pub top_at: u32,
    pub top_len: u32,
}

impl StepOutput {
    /// Room for the results of any batch within `limits`.
    pub fn with_capacity(limits: &crate::StepLimits) -> StepOutput {
        StepOutput {
            step: 0,
            rows: Vec::with_capacity(limits.rows),
            top: Vec::with_capacity(limits.rows * limits.top_logprobs),
            hidden: Vec::with_capacity(limits.rows * limits.hidden),
            logits: Vec::new(),
            times: StepTimes::default(),
        }
    }

    /// Empties every list and keeps its room.
    pub fn clear(&mut self) {
        self.rows.clear();
        self.top.clear();
        self.hidden.clear();
        self.logits.clear();
        self.times = StepTimes::default();
    }

    /// The most likely tokens of one row.
    pub fn top_of(&self, row: &SampledRow) -> &[(u32, f32)] {
        &self.top[row.top_at as usize..][..row.top_len as usize]
    }
}
