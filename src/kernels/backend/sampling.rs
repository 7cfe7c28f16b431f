//! The inputs of sampling.
//!
//! Invariant: only the rows of a late input wait for it.

use crate::late::{HostRow, LateInputs};
use crate::stage::unwind_if_aborted;
use std::sync::Arc;

/// Inputs of [`Backend::sample`](super::Backend::sample) besides logits and sampling parameters. Rows are
/// numbered as in [`crate::batch::StepBatch::sampling`].
#[derive(Clone, Copy, Debug, Default)]
pub struct SamplingInputs<'a> {
    /// The logit biases of the batch.
    pub biases: &'a [(u32, f32)],
    /// Masks of rows, and tokens that the host draws. Without them, rows that need one fail.
    pub late: Option<&'a Arc<LateInputs>>,
    /// Number of logits of a row; `None` if it is the vocabulary of the limits. A draft model may have more
    /// or fewer than the target: those beyond the vocabulary are ignored, and missing ones are not sampled.
    pub width: Option<usize>,
}

impl SamplingInputs<'_> {
    /// Waits for the mask of a row, and copies it to `mask`. Returns false if there is none. Unwinds with
    /// [`crate::Aborted`] if the step is aborted.
    pub fn wait_mask(&self, row: usize, mask: &mut [u32]) -> bool {
        self.late.is_some_and(|late| unwind_if_aborted(late.wait_mask(row, mask)))
    }

    /// Hands row number `row` to the host, which draws its token.
    pub fn begin_draw(&self, row: usize, given: HostRow<'_>) {
        if let Some(late) = self.late {
            late.begin_draw(row, given);
        }
    }

    /// Waits for the token of a row whose draw has begun. Returns `None` if there is none in the vocabulary
    /// of `vocab` tokens. Unwinds with [`crate::Aborted`] if the step is aborted.
    pub fn wait_token(&self, row: usize, vocab: usize) -> Option<u32> {
        let token = unwind_if_aborted(self.late?.wait_token(row));
        token.filter(|token| (*token as usize) < vocab)
    }
}
