//! Penalties of the tokens that a sequence has, and the counts of the tokens of all slots.
//!
//! Invariant: the counts of a slot are those of its sequence once a batch has replaced them; before that they
//! have no meaning, and no row of the slot has penalties.

use super::{Slot, StepBatch};
use serde::{Deserialize, Serialize};

/// Bit of a token's count that is set if the token is in the prompt. The other bits are the number of times
/// that it was generated, which stays at its largest value.
pub const IN_PROMPT: u16 = 1 << 15;

/// Penalties of the tokens that a sequence has.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Penalties {
    /// Divisor of the positive logits and factor of the others, of tokens of the prompt and of generated
    /// ones; 1: none.
    pub repetition: f32,
    /// Subtracted from the logits of generated tokens.
    pub presence: f32,
    /// Subtracted as often as a token was generated.
    pub frequency: f32,
}

impl Penalties {
    /// No penalties.
    pub const NONE: Penalties = Penalties { repetition: 1.0, presence: 0.0, frequency: 0.0 };

    /// Returns whether no logit changes.
    pub fn is_none(&self) -> bool {
        *self == Penalties::NONE
    }

    /// Returns the logit of a token with this count. The operations are F32, in this order.
    #[inline(always)]
    pub fn apply(&self, logit: f32, count: u16) -> f32 {
        if count == 0 {
            return logit;
        }
        let logit = if logit > 0.0 { logit / self.repetition } else { logit * self.repetition };
        match count & !IN_PROMPT {
            0 => logit,
            generated => logit - self.frequency * f32::from(generated) - self.presence,
        }
    }
}

/// Returns the count of a token that was generated once more.
#[inline(always)]
pub fn with_generated(count: u16) -> u16 {
    if count & !IN_PROMPT == !IN_PROMPT { count } else { count + 1 }
}

/// Replaces the counts of a slot: those of `len` tokens are in [`StepBatch::token_counts`], from index `at`
/// on, and all others are 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountChange {
    /// Slot of the sequence.
    pub slot: Slot,
    /// Index of the first token.
    pub at: u32,
    /// Number of tokens, each of which occurs once.
    pub len: u32,
}

impl CountChange {
    /// Returns the tokens of the change, with their counts.
    pub fn counts(self, batch: &StepBatch) -> &[(u32, u16)] {
        &batch.token_counts[self.at as usize..][..self.len as usize]
    }
}

impl StepBatch {
    /// Replaces the counts of a slot by those of a prompt and the generated tokens after it, as far as they
    /// are in a vocabulary of this size.
    pub fn replace_counts(&mut self, slot: Slot, (prompt, generated): (&[u32], &[u32]), vocab: usize) {
        let counts = &mut self.token_counts;
        let at = counts.len();
        let prompt = prompt.iter().map(|token| (*token, IN_PROMPT));
        let all = prompt.chain(generated.iter().map(|token| (*token, 1)));
        counts.extend(all.filter(|(token, _)| (*token as usize) < vocab));
        counts[at..].sort_unstable();
        let mut end = at;
        for i in at..counts.len() {
            let (token, count) = counts[i];
            match counts[at..end].last_mut() {
                Some((last, sum)) if *last == token => {
                    *sum = if count == IN_PROMPT { *sum | IN_PROMPT } else { with_generated(*sum) };
                }
                _ => {
                    counts[end] = (token, count);
                    end += 1;
                }
            }
        }
        counts.truncate(end);
        self.count_changes.push(CountChange { slot, at: at as u32, len: (end - at) as u32 });
    }
}

/// The counts of the tokens of all slots, (slots, vocabulary), in host memory; or no counts.
#[derive(Debug, Default)]
pub struct TokenCounts {
    counts: Vec<u16>,
    vocab: usize,
}

impl TokenCounts {
    /// Creates counts in this memory, of [`crate::StepLimits::token_counts_len`] zeros.
    pub fn new(counts: Vec<u16>, vocab: usize) -> TokenCounts {
        TokenCounts { counts, vocab }
    }

    /// Moves the counts of slots, and applies the changes of a batch, if there are counts. Allocates nothing.
    pub fn begin(&mut self, batch: &StepBatch) {
        if self.counts.is_empty() {
            return;
        }
        for moved in &batch.moves {
            let [from, to] = [moved.from, moved.to].map(|slot| slot as usize * self.vocab);
            self.counts.copy_within(from..from + self.vocab, to);
        }
        for change in &batch.count_changes {
            let counts = &mut self.counts[change.slot as usize * self.vocab..][..self.vocab];
            counts.fill(0);
            change.counts(batch).iter().for_each(|(token, count)| counts[*token as usize] = *count);
        }
    }

    /// Returns the counts of a slot.
    pub fn of(&self, slot: usize) -> &[u16] {
        &self.counts[slot * self.vocab..][..self.vocab]
    }

    /// Counts a generated token.
    pub fn add(&mut self, slot: usize, token: u32) {
        let count = &mut self.counts[slot * self.vocab + token as usize];
        *count = with_generated(*count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn penalties_are_those_of_the_formulas() {
        let of = |penalties: Penalties, counts: [u16; 3]| {
            [-2.0, 0.0, 3.0].map(|logit| counts.map(|count| penalties.apply(logit, count)))
        };
        let repetition = Penalties { repetition: 2.0, ..Penalties::NONE };
        let expected = [[-2.0, -4.0, -4.0], [0.0; 3], [3.0, 1.5, 1.5]];
        assert_eq!(of(repetition, [0, IN_PROMPT, 7]), expected);
        let others = Penalties { presence: 0.5, frequency: 0.25, ..Penalties::NONE };
        assert_eq!(of(others, [IN_PROMPT, 1, IN_PROMPT | 4])[1], [0.0, -0.75, -1.5]);
        let all = Penalties { repetition: 2.0, ..others };
        assert_eq!(all.apply(3.0, IN_PROMPT | 2), 0.5);
        assert_eq!(all.apply(f32::NEG_INFINITY, 5), f32::NEG_INFINITY);
        assert!(Penalties::NONE.is_none() && !all.is_none());
        assert_eq!(
            [0, IN_PROMPT, u16::MAX, !IN_PROMPT].map(with_generated),
            [1, IN_PROMPT | 1, u16::MAX, !IN_PROMPT]
        );
    }

    /// Tokens beyond the vocabulary have no count.
    #[test]
    fn a_batch_has_the_counts_of_each_token_once() {
        let mut batch = StepBatch::default();
        batch.replace_counts(3, (&[4, 8, 4, 9], &[8, 2, 2, 70]), 9);
        batch.replace_counts(1, (&[4], &[]), 9);
        let counts = |number: usize| batch.count_changes[number].counts(&batch);
        assert_eq!(counts(0), [(2, 2), (4, IN_PROMPT), (8, IN_PROMPT | 1)]);
        assert_eq!((counts(1), batch.count_changes[1].slot), (&[(4, IN_PROMPT)][..], 1));
        batch.replace_counts(0, (&[], &[5; 40_000]), 9);
        assert_eq!(batch.count_changes[2].counts(&batch), [(5, !IN_PROMPT)]);
    }
}
