//! The state of one sequence under a grammar.

use crate::{GrammarError, Vocabulary};
use std::sync::Arc;

/// Bits of a word of a mask.
const WORD: usize = u32::BITS as usize;

/// Follows the tokens of one sequence and computes which tokens may come next. All results depend on the
/// grammar and the accepted tokens alone. Errors other than [`GrammarError::Token`] are final.
pub struct Matcher {
    inner: llguidance::Matcher,
    vocabulary: Arc<Vocabulary>,
    /// EOS tokens accepted: a matcher that has one has ended.
    ended: usize,
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher, vocabulary: Arc<Vocabulary>) -> Matcher {
        Matcher { inner, vocabulary, ended: 0 }
    }

    /// Writes the mask of the tokens that may come next: bit `id % 32` of word `id / 32`. EOS is set where
    /// the text may end, and alone where it must. Words after the vocabulary, for padded logits, become 0.
    /// Returns the token if only one is allowed, which may be generated without asking the model; `None`
    /// otherwise. The mask is empty only if the text is complete and the vocabulary has no EOS. Takes tens of
    /// microseconds typically, and milliseconds at times. Fails if nothing continues the text or a limit is
    /// exceeded. Panics if `mask` is shorter than [`Vocabulary::mask_words`].
    pub fn mask(&mut self, mask: &mut [u32]) -> Result<Option<u32>, GrammarError> {
        mask.fill(0);
        if self.is_complete() {
            for id in self.vocabulary.eos() {
                mask[*id as usize / WORD] |= 1 << (*id as usize % WORD);
            }
        } else {
            let allowed = self.inner.compute_mask().map_err(|error| GrammarError::stuck(&error))?;
            let words = self.vocabulary.mask_words();
            mask[..words].copy_from_slice(&allowed.as_slice()[..words]);
            self.remove_early_eos(mask)?;
        }
        Ok(only_token(mask))
    }

    /// Removes EOS where the text may not end: a user's grammar can name its token, which would end the
    /// answer.
    fn remove_early_eos(&mut self, mask: &mut [u32]) -> Result<(), GrammarError> {
        let bit = |id: &u32| (*id as usize / WORD, 1u32 << (*id as usize % WORD));
        let is_set = |id: &u32| mask[bit(id).0] & bit(id).1 != 0;
        if !self.vocabulary.eos().iter().any(is_set) || self.is_accepting()? {
            return Ok(());
        }
        for (word, bit) in self.vocabulary.eos().iter().map(bit) {
            mask[word] &= !bit;
        }
        match mask.iter().all(|word| *word == 0) {
            true => {
                Err(GrammarError::Stuck("only the end is allowed, where the text may not end".to_owned()))
            }
            false => Ok(()),
        }
    }

    /// Accepts the next token. Fails with [`GrammarError::Token`], and changes nothing, if the grammar does
    /// not allow it. Every token of the mask is allowed; of text that leaves no choice, other tokenizations
    /// are too.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.vocabulary.eos().contains(&token) {
            if !self.is_accepting()? {
                return Err(GrammarError::Token(token));
            }
            self.ended += 1;
            return Ok(());
        }
        if self.is_complete() || token as usize >= self.vocabulary.size() {
            return Err(GrammarError::Token(token));
        }
        let stuck = |error| GrammarError::stuck(&error);
        if self.inner.validate_tokens(&[token]).map_err(stuck)? == 0 {
            return Err(GrammarError::Token(token));
        }
        self.inner.consume_token(token).map_err(stuck)
    }

    /// Takes back the last `count` accepted tokens. The state is the one before them. Fails if fewer were
    /// accepted.
    pub fn rollback(&mut self, count: usize) -> Result<(), GrammarError> {
        let eos = count.min(self.ended);
        self.inner.rollback(count - eos).map_err(|error| GrammarError::stuck(&error))?;
        self.ended -= eos;
        Ok(())
    }

    /// Accepts tokens as long as only one is allowed, at most `limit`, and returns them. EOS is not among
    /// them. `mask` is as in [`Matcher::mask`]; its content afterwards is unspecified.
    pub fn accept_forced(&mut self, limit: usize, mask: &mut [u32]) -> Result<Vec<u32>, GrammarError> {
        let mut forced = Vec::new();
        while forced.len() < limit && !self.is_complete() {
            match self.mask(mask)? {
                Some(token) if !self.vocabulary.eos().contains(&token) => {
                    self.accept(token)?;
                    forced.push(token);
                }
                _ => break,
            }
        }
        Ok(forced)
    }

    /// Returns whether the text may end here, so that EOS is allowed.
    pub fn is_accepting(&mut self) -> Result<bool, GrammarError> {
        if self.is_complete() {
            return Ok(true);
        }
        self.inner.is_accepting().map_err(|error| GrammarError::stuck(&error))
    }

    /// Returns whether the text is complete: EOS was accepted, or nothing but EOS may follow.
    pub fn is_complete(&self) -> bool {
        self.ended > 0 || (self.inner.is_stopped() && !self.inner.is_error())
    }

    /// Returns the vocabulary that tokens are of.
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// Returns a matcher with the same state, which shares nothing with this one.
    pub fn fork(&self) -> Matcher {
        Matcher { inner: self.inner.deep_clone(), vocabulary: self.vocabulary.clone(), ended: self.ended }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matcher({:?})", self.inner.stop_reason())
    }
}

/// Returns the token of a mask that has exactly one.
fn only_token(mask: &[u32]) -> Option<u32> {
    let mut found = None;
    for (at, word) in mask.iter().enumerate().filter(|(_, word)| **word != 0) {
        if found.is_some() || !word.is_power_of_two() {
            return None;
        }
        found = Some(at as u32 * u32::BITS + word.trailing_zeros());
    }
    found
}
