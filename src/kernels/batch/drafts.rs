//! The work of a draft model in a step.
//!
//! Invariant: the pages of a sequence hold the K and V of both models, at the same positions.

use super::{SamplingParams, Slot, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens};
use crate::batch::Span;
use serde::{Deserialize, Serialize};

/// A span of the draft model: known tokens of one sequence, and the number of drafts to make after them. The
/// draft model stores K and V of these tokens, and of all drafts but the last, in the pages of the sequence.
/// A slot has at most one span that makes drafts, which is its last one in the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct DraftSpan {
    /// The slot of the sequence, which holds its page table.
    pub slot: Slot,
    /// Position of the first token in its sequence.
    pub start: u32,
    /// The known tokens that the draft model has not computed yet, [`SpanTokens::Given`] or
    /// [`SpanTokens::Generated`]: a prompt chunk, or the last tokens after a verification.
    pub tokens: SpanTokens,
    /// Maximum number of tokens of the sequence; see [`Span::reserved`].
    pub reserved: u32,
    /// Number of drafts to make, at most [`crate::StepLimits::drafts`]; 0 to compute K and V only.
    pub count: u32,
    /// Sampling parameters of the first draft. Those of the others differ in the position, which increases
    /// by one from draft to draft. Drafts are sampled on the device without mask and penalties, whatever
    /// `mode` and the others are, and no log-probabilities are reported.
    pub sampling: SamplingParams,
}

impl DraftSpan {
    /// Returns the span of pass number `pass` of the draft model, without rows to sample: the known tokens in
    /// the first pass, and in every further one the last draft.
    pub fn pass_span(&self, pass: u32) -> Span {
        let len = self.tokens.len() as u32;
        let (start, tokens) = match pass {
            0 => (self.start, self.tokens),
            pass => (self.start + len + pass - 1, SpanTokens::Last),
        };
        Span {
            model: SpanModel::Draft,
            stack: SpanStack::Decoder,
            slot: self.slot,
            start,
            tokens,
            table: SpanTable::Own,
            reserved: self.reserved,
            encoder_len: 0,
            output: if self.count > pass { SpanOutput::Last } else { SpanOutput::None },
        }
    }
}
