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
    /// Of the positions that a drawn token sees before its own, how many give it their values.
    pub attended: Share,
}

/// A share of some positions, more than none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    millionths: u32,
}

impl Share {
    /// All of them.
    pub const ALL: Share = Share { millionths: Share::WHOLE };
    const WHOLE: u32 = 1_000_000;

    /// The share, to the nearest millionth; `None` where that is none, or more than all.
    pub fn new(share: f64) -> Option<Share> {
        let millionths = (share * f64::from(Share::WHOLE)).round();
        let is_some = (1.0..=f64::from(Share::WHOLE)).contains(&millionths);
        is_some.then_some(Share { millionths: millionths as u32 })
    }

    pub fn is_all(self) -> bool {
        self == Share::ALL
    }

    /// As many of `positions`, rounded down.
    pub fn of(self, positions: usize) -> usize {
        (positions as u128 * u128::from(self.millionths) / u128::from(Share::WHOLE)) as usize
    }
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

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", f64::from(self.millionths) / f64::from(Share::WHOLE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_down_and_exact() {
        let of = |share, positions| Share::new(share).map(|share| share.of(positions));
        assert_eq!(of(0.1, 20), Some(2));
        assert_eq!([9, 10, 19, 0].map(|past| of(0.1, past)), [0, 1, 1, 0].map(Some));
        // In floating point these come to 28.999999999999996 and 57.99999999999999.
        assert_eq!([of(0.29, 100), of(0.58, 100)], [Some(29), Some(58)]);
        assert_eq!(of(1.0, usize::MAX), Some(usize::MAX));
        assert_eq!(Share::new(1.0), Some(Share::ALL));
        assert_eq!(Share::new(0.29).map(|share| share.to_string()).as_deref(), Some("0.29"));
        for wrong in [0.0, -0.1, 1e-7, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(Share::new(wrong), None, "{wrong}");
        }
    }
}
