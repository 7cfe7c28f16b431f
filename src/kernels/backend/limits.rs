//! The limits of a step.
//!
//! Invariant: the length of every buffer that grows with a step, a page table or a list of results follows
//! from these limits.

use super::{KvLayout, KvTable, Mask};

/// The upper bounds of every step. All buffers are allocated once, for these sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Sequences that can run at the same time.
    pub slots: usize,
    /// Rows of one step, of both stacks together.
    pub rows: usize,
    /// Rows that are computed at once; `usize::MAX` for all. A step with more rows of a stack is divided into
    /// row batches, see [`StepLimits::rows_at_once`].
    pub batch_rows: usize,
    /// Rows whose logits exist at the same time. A step with more output rows computes their logits in blocks
    /// of this many.
    pub logit_rows: usize,
    /// Tokens of one sequence: prompt and generated tokens.
    pub positions: usize,
    /// Tokens of one encoder input, which an encoder processes in a single step; 0 without an encoder. At
    /// most `rows`.
    pub encoder_positions: usize,
    /// KV page size in tokens.
    pub page_positions: usize,
    /// The largest window of the decoder layers that have a page table of their own ([`KvTable::Window`]);
    /// `None` if all layers share one.
    pub window: Option<usize>,
    /// Most likely tokens that can be reported for one row.
    pub top_logprobs: usize,
    /// Entries of the vocabulary.
    pub vocab: usize,
    /// Width of the hidden states that spans may return; 0 if none do.
    pub hidden: usize,
    /// Drafts that the draft model makes for one slot in a step; 0 without a draft model.
    pub drafts: usize,
    /// Whether the logits of the drafts may be kept for draws of the host, which takes memory for
    /// `slots * drafts` rows of logits.
    pub draft_logits: bool,
    /// Whether the tokens of sequences are counted, so that rows may have penalties, which takes memory for
    /// `slots * vocab` counts.
    pub counts_tokens: bool,
    /// Rows of the longest opening, a chunk that begins a prompt and is computed in a row batch of openings
    /// only, within which its positions are in the scratch cache, too; 0 if there are no openings. At most
    /// [`StepLimits::rows_at_once`].
    pub opening_rows: usize,
    /// Fraction of the earlier visible positions whose values a generated token attends to (top-k sparse
    /// attention).
    pub attended_fraction: Fraction,
}

/// A fraction of a number of positions, in (0, 1], stored in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fraction {
    millionths: u32,
}

impl Fraction {
    /// The fraction 1.
    pub const ONE: Fraction = Fraction { millionths: Fraction::MILLION };
    const MILLION: u32 = 1_000_000;

    /// Rounds to the nearest millionth. Returns `None` if the result is 0, greater than 1 or NaN.
    pub fn new(fraction: f64) -> Option<Fraction> {
        let millionths = (fraction * f64::from(Fraction::MILLION)).round();
        let is_valid = (1.0..=f64::from(Fraction::MILLION)).contains(&millionths);
        is_valid.then_some(Fraction { millionths: millionths as u32 })
    }

    /// Returns whether the fraction is 1.
    pub fn is_one(self) -> bool {
        self == Fraction::ONE
    }

    /// Returns the fraction in millionths.
    pub fn millionths(self) -> u32 {
        self.millionths
    }

    /// Returns the fraction of `positions`, rounded down.
    pub fn floor_of(self, positions: usize) -> usize {
        (positions as u128 * u128::from(self.millionths) / u128::from(Fraction::MILLION)) as usize
    }
}

impl StepLimits {
    /// Returns the maximum number of rows of a row batch: those that are computed at once. An encoder input
    /// is never divided.
    pub fn rows_at_once(&self) -> usize {
        self.batch_rows.max(self.encoder_positions).min(self.rows)
    }

    /// Returns the maximum number of row batches of the decoder in one step: those of openings come last, and
    /// all others but the last one are full.
    pub fn decoder_batches(&self) -> usize {
        if self.opening_rows == 0 {
            return self.full_batches();
        }
        // Let a batch have at most m rows, and rows / m be q, rounded down. Two successive batches of
        // openings have more than m rows, so 2 p or 2 p + 1 of them leave rows for at most q + 1 - p others,
        // and p is at most q.
        2 * (self.rows / self.rows_at_once().max(1)) + 2
    }

    /// Returns the maximum number of rows of a row batch of the decoder, by its number: all batches before it
    /// have rows, too, and are full, or any two of them in succession have more rows than one may have. Only
    /// a first batch of openings after another may have fewer with that one.
    pub fn rows_of_decoder_batch(&self, batch: usize) -> usize {
        let most = self.rows_at_once();
        let full_before = if self.opening_rows == 0 { batch } else { batch.saturating_sub(1) / 2 };
        most.min(self.rows - full_before * most)
    }

    /// Returns the maximum number of row batches of the encoder in one step.
    pub fn encoder_batches(&self) -> usize {
        self.undivided_batches()
    }

    fn full_batches(&self) -> usize {
        self.rows.div_ceil(self.rows_at_once().max(1))
    }

    /// Returns the maximum number of row batches of spans that are not divided: any two in succession have
    /// more rows than one may have.
    fn undivided_batches(&self) -> usize {
        (2 * self.full_batches()).saturating_sub(1)
    }

    /// Returns whether a chunk of so many rows that begins a prompt is an opening: at least
    /// [`KvLayout::BLOCK_POSITIONS`] and at most [`StepLimits::opening_rows`].
    pub fn opens_with(&self, rows: usize) -> bool {
        (KvLayout::BLOCK_POSITIONS..=self.opening_rows).contains(&rows)
    }

    /// Returns the number of entries of a slot's own page table.
    pub fn table_len(&self) -> usize {
        self.positions.div_ceil(self.page_positions)
    }

    /// Returns the number of entries of a slot's page table for windowed layers.
    pub fn window_table_len(&self) -> usize {
        self.window.map_or(0, |_| self.table_len())
    }

    /// Returns the page table of a decoder layer with this mask.
    pub fn table_of(&self, mask: Mask) -> KvTable {
        match (mask.causal_window(), self.window) {
            (Some(own), Some(largest)) if own <= largest => KvTable::Window,
            _ => KvTable::Own,
        }
    }

    /// Returns the maximum number of pages that hold the positions which the rows of one step compute or see
    /// through a window of `window` positions.
    pub fn pages_of_window(&self, window: usize) -> usize {
        let seen = window.saturating_add(self.rows).div_ceil(self.page_positions) + 1;
        seen.min(self.table_len())
    }

    /// Returns the number of entries of a slot's cross-attention page table.
    pub fn cross_table_len(&self) -> usize {
        self.encoder_positions.div_ceil(self.page_positions)
    }

    /// Returns the positions of the scratch cache. The encoder spans or openings of a row batch lie in it one
    /// after another, each starting at a multiple of [`KvLayout::BLOCK_POSITIONS`].
    pub fn scratch_positions(&self) -> usize {
        let rows = self.rows_at_once();
        let spans = match (self.encoder_positions, self.opening_rows) {
            (0, 0) => return 0,
            (0, _) => self.slots.min(rows / KvLayout::BLOCK_POSITIONS),
            _ => self.slots,
        };
        (rows + spans * (KvLayout::BLOCK_POSITIONS - 1)).next_multiple_of(self.page_positions)
    }

    /// Returns the drafts of all slots in a step.
    pub fn all_drafts(&self) -> usize {
        self.slots * self.drafts
    }

    /// Returns the number of logits of drafts that are kept in a step.
    pub fn draft_logits_len(&self) -> usize {
        if self.draft_logits { self.all_drafts() * self.vocab } else { 0 }
    }

    /// Returns the number of counts of tokens.
    pub fn token_counts_len(&self) -> usize {
        if self.counts_tokens { self.slots * self.vocab } else { 0 }
    }

    /// Returns the number of words of a mask over the vocabulary.
    pub fn mask_words(&self) -> usize {
        self.vocab.div_ceil(u32::BITS as usize)
    }
}

impl std::fmt::Display for Fraction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", f64::from(self.millionths) / f64::from(Fraction::MILLION))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_are_rounded_down_exactly() {
        let of = |fraction, positions| Fraction::new(fraction).map(|fraction| fraction.floor_of(positions));
        assert_eq!(of(0.1, 20), Some(2));
        assert_eq!([9, 10, 19, 0].map(|past| of(0.1, past)), [0, 1, 1, 0].map(Some));
        // In floating point these are 28.999999999999996 and 57.99999999999999.
        assert_eq!([of(0.29, 100), of(0.58, 100)], [Some(29), Some(58)]);
        assert_eq!(of(1.0, usize::MAX), Some(usize::MAX));
        assert_eq!(Fraction::new(1.0), Some(Fraction::ONE));
        assert_eq!(Fraction::new(0.29).map(|fraction| fraction.to_string()).as_deref(), Some("0.29"));
        for wrong in [0.0, -0.1, 1e-7, 1.1, f64::NAN, f64::INFINITY] {
            assert_eq!(Fraction::new(wrong), None, "{wrong}");
        }
    }
}
