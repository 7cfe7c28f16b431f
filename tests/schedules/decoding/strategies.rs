//! A strategy that draws the number of the tokens so far, so that the order of draws shows.

use super::speculation::{AcceptanceRule, Proposal};
use std::panic::resume_unwind;

/// A plan without parameters.
#[derive(Debug)]
pub struct SamplingPlan;

/// The kind of log-probabilities that are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobsMode {
    Raw,
    Processed,
}

/// The number of tokens so far.
pub struct SequenceState(u32);

/// A row to draw from.
pub struct Row<'a> {
    pub logits: &'a [f32],
    pub seed: u64,
    pub position: u64,
    pub mask: Option<&'a [u32]>,
    pub logprobs: Option<usize>,
}

/// The result of a draw.
pub struct Draw {
    pub token: u32,
    pub logprob: f32,
}

/// Draws tokens. It unwinds if the first logit is negative.
pub struct HostSampler;

/// The mask allows no token.
#[derive(Debug, thiserror::Error)]
#[error("the grammar allows no token")]
pub struct EmptyMask;

impl SamplingPlan {
    /// Returns the mode.
    pub fn logprobs_mode(&self) -> LogprobsMode {
        LogprobsMode::Raw
    }

    /// Returns the rule.
    pub fn acceptance(&self, rule: AcceptanceRule) -> AcceptanceRule {
        rule
    }
}

impl SequenceState {
    /// Begins after the prompt.
    pub fn new(_: &SamplingPlan, prompt: &[u32], _: usize) -> SequenceState {
        SequenceState(prompt.len() as u32)
    }

    /// Counts a token.
    pub fn accept(&mut self, draw: &Draw) {
        self.0 = draw.token + 1;
    }
}

impl HostSampler {
    /// Creates a sampler.
    #[expect(clippy::new_without_default)]
    pub fn new() -> HostSampler {
        HostSampler
    }

    /// Returns the number of the tokens so far.
    pub fn verify(
        &mut self,
        _: &SamplingPlan,
        state: &SequenceState,
        row: &Row<'_>,
        _: Option<Proposal<'_>>,
        _: AcceptanceRule,
    ) -> Result<Draw, EmptyMask> {
        if row.logits[0] < 0.0 {
            resume_unwind(Box::new(()));
        }
        Ok(Draw { token: state.0, logprob: 0.0 })
    }

    /// Returns no token.
    pub fn top(&self) -> &[(u32, f32)] {
        &[]
    }
}
