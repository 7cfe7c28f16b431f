//! How large a step can be.
//!
//! Invariant: whatever is as long as a step, a table or a list of results has its length from here.

use super::KvLayout;

/// The fixed bounds of every step: all buffers are made for these, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Sequences that can be live at once.
    pub slots: usize,
    /// Rows of one step.
    pub rows: usize,
    /// Rows whose logits exist at once; a step with more wanted rows is headed in blocks of this many.
    pub logit_rows: usize,
    /// Tokens of one sequence, prompt and answer.
    pub positions: usize,
    /// Tokens of one source, which an encoder reads in one step; 0 without an encoder. At most `rows`.
    pub source_positions: usize,
    pub page_positions: usize,
    /// Most likely tokens reported for one row.
    pub top_logprobs: usize,
    /// Biases of one sequence's logits.
    pub biases: usize,
    pub vocab: usize,
    /// Width of the hidden states that rows may want; 0 where none do.
    pub hidden: usize,
}

impl StepLimits {
    /// Entries of a slot's own page table.
    pub fn table_len(&self) -> usize {
        self.positions.div_ceil(self.page_positions)
    }

    /// Entries of a slot's cross table.
    pub fn cross_table_len(&self) -> usize {
        self.source_positions.div_ceil(self.page_positions)
    }

    /// Positions of a scratch cache: a step's encoder spans lie in it one after another, each from a block's begin on.
    pub fn scratch_positions(&self) -> usize {
        match self.source_positions {
            0 => 0,
            _ => (self.rows + self.slots * (KvLayout::BLOCK - 1)).next_multiple_of(self.page_positions),
        }
    }

    /// Biases of a step: each slot draws one token in it.
    pub fn bias_room(&self) -> usize {
        self.slots * self.biases
    }
}
