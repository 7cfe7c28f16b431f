//! The grammar of one answer: where it begins, and which tokens it allows next.
//!
//! Invariant: from the constraint's beginning on, every accepted token continues a text of the grammar.

use mainstem_grammar::{ConstraintStart, Grammar, GrammarError, Matcher};
use std::sync::Arc;

/// A grammar that the output of a request must follow.
#[derive(Clone, Debug)]
pub struct Constraint {
    pub grammar: Arc<Grammar>,
    pub start: ConstraintStart,
}

/// Follows the constraint of one sequence.
#[derive(Debug)]
pub struct ConstraintState {
    matcher: Matcher,
    phase: Phase,
    /// The last bytes of the free text, fewer than the marker that ends it has.
    tail: Vec<u8>,
    /// Tokens that would end the marker and begin the constrained text, each with the number of bytes of the
    /// marker that must precede it. They are forbidden, because the grammar sees whole tokens.
    spilling: Vec<(u32, usize)>,
}

#[derive(Debug)]
enum Phase {
    /// The grammar applies.
    Constrained,
    /// The grammar applies, but the next token may be `open` instead.
    MayOpen { open: u32, close: Arc<str> },
    /// Any text until this marker.
    Free(Arc<str>),
}

impl ConstraintState {
    /// Begins an output.
    pub fn new(constraint: &Constraint) -> ConstraintState {
        let phase = match constraint.start.clone() {
            ConstraintStart::Immediately => Phase::Constrained,
            ConstraintStart::After { marker } => Phase::Free(marker),
            ConstraintStart::UnlessOpened { open, close } => Phase::MayOpen { open, close },
        };
        let (tail, spilling) = (Vec::new(), Vec::new());
        let mut state = ConstraintState { matcher: constraint.grammar.matcher(), phase, tail, spilling };
        state.find_spilling_tokens();
        state
    }

    /// Writes the mask of the tokens that may come next, a bit for each, least significant bit first; at
    /// least one is set. Words beyond the vocabulary become 0 or have no meaning. Returns the token if the
    /// grammar allows only one. Fails if nothing continues the output or the grammar is too complex at this
    /// place.
    pub fn mask(&mut self, mask: &mut [u32]) -> Result<Option<u32>, GrammarError> {
        let mut only = None;
        match &self.phase {
            Phase::Constrained => only = self.matcher.mask(mask)?,
            Phase::MayOpen { open, .. } => {
                self.matcher.mask(mask)?;
                set_bit(mask, *open, true);
            }
            Phase::Free(marker) => {
                mask.fill(u32::MAX);
                self.matcher.vocabulary().eos().iter().for_each(|&id| set_bit(mask, id, false));
                let would_spill = |preceding: &usize| self.tail.ends_with(&marker.as_bytes()[..*preceding]);
                let spilling = self.spilling.iter().filter(|(_, preceding)| would_spill(preceding));
                spilling.for_each(|(id, _)| set_bit(mask, *id, false));
            }
        }
        match mask.iter().any(|&word| word != 0) {
            true => Ok(only),
            false => Err(GrammarError::Stuck("no token continues it, and the model has no end token".into())),
        }
    }

    /// Lists the tokens that would end the free text and begin the constrained one.
    fn find_spilling_tokens(&mut self) {
        let Phase::Free(marker) = &self.phase else { return };
        let (marker, vocabulary) = (marker.as_bytes(), self.matcher.vocabulary());
        let spills = |text: &[u8], preceding: usize| {
            let rest = text.strip_prefix(&marker[preceding..]);
            rest.is_some_and(|rest| !rest.trim_ascii().is_empty())
        };
        for id in 0..vocabulary.size() as u32 {
            let text = vocabulary.text(id);
            let within = (1..marker.len()).filter(|&preceding| spills(text, preceding));
            let whole = (0..text.len()).any(|at| spills(&text[at..], 0)).then_some(0);
            self.spilling.extend(within.chain(whole).map(|preceding| (id, preceding)));
        }
    }

    /// Accepts `first`, the only token that the grammar allows, and the tokens after it as long as it leaves
    /// no choice either, at most `limit` of these. Returns those after `first`; the end of the output is not
    /// among them. `None` if `first` ends the output. `scratch` is as long as a mask.
    pub fn force(
        &mut self,
        first: u32,
        limit: usize,
        scratch: &mut [u32],
    ) -> Result<Option<Vec<u32>>, GrammarError> {
        if self.matcher.vocabulary().eos().contains(&first) {
            return Ok(None);
        }
        self.matcher.accept(first)?;
        self.matcher.accept_forced(limit, scratch).map(Some)
    }

    /// Accepts the next token, which must be one that the mask allows.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        match &self.phase {
            Phase::MayOpen { open, close } if token == *open => {
                self.phase = Phase::Free(close.clone());
                self.find_spilling_tokens();
            }
            Phase::Constrained | Phase::MayOpen { .. } => {
                self.phase = Phase::Constrained;
                self.matcher.accept(token)?;
            }
            Phase::Free(marker) => {
                self.tail.extend_from_slice(self.matcher.vocabulary().text(token));
                let marker = marker.as_bytes();
                // White space that follows the marker within its token belongs to neither side.
                if self.tail.windows(marker.len()).any(|window| window == marker) {
                    self.phase = Phase::Constrained;
                    self.tail = Vec::new();
                } else {
                    let excess = self.tail.len().saturating_sub(marker.len().saturating_sub(1));
                    self.tail.drain(..excess);
                }
            }
        }
        Ok(())
    }
}

fn set_bit(mask: &mut [u32], id: u32, allowed: bool) {
    let Some(word) = mask.get_mut(id as usize / 32) else { return };
    let bit = 1 << (id % 32);
    *word = if allowed { *word | bit } else { *word & !bit };
}
