//! Ids to text as they come: what leaves is certain, and together it is what decoding all at once would give.
//!
//! Invariant: never half a character leaves, and the state is bounded: a few bytes, or a few tokens.

use super::tokenizer::{Joining, Opening, Tokenizer};
use std::sync::Arc;

/// How many of a prompt's last tokens are looked at. Each has at least a byte, and a character has at most
/// four.
const PROMPT_TOKENS: usize = 8;

/// Tokens that may be held back while their text ends in U+FFFD. A character has at most four bytes, so what
/// is still U+FFFD after as many tokens stays so.
const HELD_TOKENS: usize = 4;

/// Turns one sequence's ids into text.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    tail: Tail,
}

/// What of the text so far bears on the text to come.
enum Tail {
    /// Bytes joined side by side: the beginning of a character, at most three bytes.
    Bytes { pending: Vec<u8>, opening: Opening },
    /// Tokens joined by the library: those shown last, and after them those held back.
    Tokens { ids: Vec<u32>, shown: usize },
}

impl Detokenizer {
    /// A detokenizer at the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Detokenizer {
        let tail = match tokenizer.joining() {
            Joining::Bytes { opening } => Tail::Bytes { pending: Vec::new(), opening },
            Joining::Library => Tail::Tokens { ids: Vec::new(), shown: 0 },
        };
        Detokenizer { tokenizer, skip_special, tail }
    }

    /// Goes on after a prompt, whose text does not leave. A character that the prompt begins leaves whole
    /// once it is complete.
    pub fn with_prompt(mut self, prompt: &[u32]) -> Detokenizer {
        if let Tail::Bytes { opening, .. } = &mut self.tail
            && prompt.iter().any(|id| is_text(&self.tokenizer, *id, self.skip_special))
        {
            *opening = Opening::Kept;
        }
        let spoken = prompt.iter().rev().filter(|id| self.tokenizer.is_spoken(**id, self.skip_special));
        let last: Vec<u32> = spoken.take(PROMPT_TOKENS).copied().collect();
        for id in last.into_iter().rev() {
            self.push(id);
        }
        self
    }

    /// Takes the next id and returns the text that is certain now.
    pub fn push(&mut self, id: u32) -> String {
        if !self.tokenizer.is_spoken(id, self.skip_special) {
            return String::new();
        }
        match &mut self.tail {
            Tail::Bytes { pending, opening } => {
                let bytes = self.tokenizer.token_bytes(id);
                let (dropped, after) = opening.dropped(bytes);
                *opening = after;
                pending.extend_from_slice(&bytes[dropped..]);
                take_certain(pending)
            }
            Tail::Tokens { ids, shown } => {
                ids.push(id);
                let text = text_of_held(&self.tokenizer, ids, *shown);
                if text.ends_with(char::REPLACEMENT_CHARACTER) && ids.len() - *shown < HELD_TOKENS {
                    return String::new();
                }
                ids.drain(..*shown);
                *shown = ids.len();
                text
            }
        }
    }

    /// Whether the text of every id so far has left.
    pub fn holds_nothing(&self) -> bool {
        match &self.tail {
            Tail::Bytes { pending, .. } => pending.is_empty(),
            Tail::Tokens { ids, shown } => *shown == ids.len(),
        }
    }

    /// The text of what is held back still, when no more ids come.
    pub fn finish(&mut self) -> String {
        match &mut self.tail {
            Tail::Bytes { pending, .. } => String::from_utf8_lossy(&std::mem::take(pending)).into_owned(),
            Tail::Tokens { ids, shown } => {
                let text = text_of_held(&self.tokenizer, ids, *shown);
                *shown = ids.len();
                text
            }
        }
    }
}

/// Whether a token has a part in the text that is not all spaces.
fn is_text(tokenizer: &Tokenizer, id: u32, skip_special: bool) -> bool {
    tokenizer.is_spoken(id, skip_special) && tokenizer.token_bytes(id).iter().any(|byte| *byte != b' ')
}

/// What the tokens after the first `shown` add to the text of these.
fn text_of_held(tokenizer: &Tokenizer, ids: &[u32], shown: usize) -> String {
    // The library's decoders do not fail; if one did, its tokens would have no text.
    let join = |ids| tokenizer.join(ids).unwrap_or_default();
    let (before, all) = (join(&ids[..shown]), join(ids));
    all.get(before.len()..).unwrap_or_default().to_owned()
}

/// Takes from `pending` all but a character that may yet be completed.
fn take_certain(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in pending.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let is_last = taken + invalid.len() == pending.len();
        if invalid.is_empty() || (is_last && is_beginning(invalid)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += invalid.len();
    }
    pending.drain(..taken);
    text
}

/// Whether more bytes could make a character of these.
fn is_beginning(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::{
        Dice, byte_fallback, byte_level, hub, llama2c, metaspace, word_piece,
    };
    use crate::text::tokenizer::tests::fixtures;

    fn samples() -> Vec<Arc<Tokenizer>> {
        let hubs = [byte_level(), byte_fallback(), word_piece(), metaspace()]
            .map(|sample| hub(&sample, None).unwrap());
        let small = hubs.into_iter().chain([llama2c()]);
        let fixtures = fixtures::folders().into_iter().chain(fixtures::ggufs()).map(|case| case.tokenizer);
        small.chain(fixtures).map(Arc::new).collect()
    }

    /// What leaves for `answer` after `prompt`, piece by piece, the rest last.
    fn pieces(tokenizer: &Arc<Tokenizer>, skip: bool, prompt: &[u32], answer: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip).with_prompt(prompt);
        let mut pieces: Vec<String> = answer.iter().map(|id| detokenizer.push(*id)).collect();
        pieces.push(detokenizer.finish());
        assert_eq!(detokenizer.finish(), "", "what has left does not leave again");
        pieces
    }

    #[test]
    fn pieces_together_are_the_text_decoded_at_once() {
        let mut dice = Dice::new(31);
        for tokenizer in samples() {
            // Half of all ids from the end of the vocabulary, where text is; a few beyond it.
            let vocab = tokenizer.vocab_size();
            let mut compared = 0;
            for _ in 0..1_000 {
                let ids: Vec<u32> = (0..dice.below(30))
                    .map(|_| if dice.below(2) == 0 { dice.below(vocab + 2) } else { vocab - 1 - dice.below(8) } as u32)
                    .collect();
                let skip = dice.below(2) == 0;
                let (prompt, answer) = ids.split_at(dice.below(ids.len() + 1));
                let [before, all] = [prompt, &ids].map(|ids| tokenizer.decode(ids, skip).unwrap());
                let pieces = pieces(&tokenizer, skip, prompt, answer).concat();
                if before.ends_with(char::REPLACEMENT_CHARACTER) {
                    // The prompt may end within a character; that one then leaves whole.
                    assert!(all.ends_with(&pieces), "{tokenizer:?} {prompt:?} {answer:?}");
                    continue;
                }
                compared += 1;
                assert_eq!(pieces, all[before.len()..], "{tokenizer:?} {skip} {prompt:?} {answer:?}");
            }
            assert!(compared > 250, "{compared}");
        }
    }

    #[test]
    fn a_character_leaves_with_its_last_byte_and_not_before() {
        let bytes =
            |first: u32, text: &[u8]| text.iter().map(|byte| first + u32::from(*byte)).collect::<Vec<_>>();
        for (tokenizer, first) in [(hub(&byte_level(), None).unwrap(), 2), (llama2c(), 3)] {
            let tokenizer = Arc::new(tokenizer);
            let smile = bytes(first, "a\u{1f600}b".as_bytes());
            assert_eq!(pieces(&tokenizer, true, &[], &smile), ["a", "", "", "", "\u{1f600}", "b", ""]);
            let cut = bytes(first, b"\xe5\x8fa\xff\xf0\x9f");
            assert_eq!(
                pieces(&tokenizer, true, &[], &cut),
                ["", "", "\u{fffd}a", "\u{fffd}", "", "", "\u{fffd}"]
            );
            // Begun by the prompt, completed by the answer.
            assert_eq!(pieces(&tokenizer, true, &smile[..3], &smile[3..]), ["", "\u{1f600}", "b", ""]);
        }
    }

    #[test]
    fn the_first_space_goes_only_where_the_text_begins() {
        let the = 266;
        let tokenizer = Arc::new(hub(&byte_fallback(), None).unwrap());
        assert_eq!(pieces(&tokenizer, true, &[], &[1, the, the]), ["", "the", " the", ""]);
        assert_eq!(pieces(&tokenizer, true, &[1], &[the, the]), ["the", " the", ""]);
        assert_eq!(pieces(&tokenizer, true, &[1, the], &[the, 2, the]), [" the", "", " the", ""]);
        assert_eq!(pieces(&tokenizer, false, &[1], &[the, 2]), [" the", "</s>", ""]);
        // Special tokens at the prompt's end, more than are looked at, do not hide the text before them.
        let prompt = [&[the][..], &[2; 3 * PROMPT_TOKENS]].concat();
        assert_eq!(pieces(&tokenizer, true, &prompt, &[the]), [" the", ""]);
    }

    #[test]
    fn the_state_stays_small_however_long_the_text() {
        let mut dice = Dice::new(32);
        for tokenizer in samples() {
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), true);
            for _ in 0..5_000 {
                detokenizer.push(dice.below(tokenizer.vocab_size()) as u32);
                match &detokenizer.tail {
                    Tail::Bytes { pending, .. } => assert!(pending.len() < 4),
                    Tail::Tokens { ids, .. } => assert!(ids.len() <= 2 * HELD_TOKENS),
                }
            }
        }
    }
}
