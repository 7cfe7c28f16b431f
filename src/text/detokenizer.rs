//! Incremental detokenization: token ids to text, with the same result as decoding all ids at once.
//!
//! Invariant: only complete characters are output, and the state is bounded: a few bytes, or a few tokens.

use super::tokenizer::{DecodeMethod, LeadingSpaces, Tokenizer};
use std::sync::Arc;

/// Number of a prompt's last tokens that are considered. Each has at least one byte, and a character has at
/// most four.
const PROMPT_TOKENS: usize = 8;

/// Maximum number of tokens that are held back while their text ends in U+FFFD. A character has at most four
/// bytes, so U+FFFD is final after as many tokens.
const HELD_TOKENS: usize = 4;

/// Converts the token ids of one sequence to text, id by id.
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// Special tokens that are not skipped.
    kept: Arc<[u32]>,
    state: DecodeState,
}

/// State that the text of the next tokens depends on.
enum DecodeState {
    /// Tokens are concatenated as bytes: an incomplete character of at most three bytes, and the handling of
    /// leading spaces.
    Bytes { pending: Vec<u8>, leading_spaces: LeadingSpaces },
    /// Tokens are decoded by the library: `ids` are the `shown` tokens output last, then those held back.
    Tokens { ids: Vec<u32>, shown: usize },
}

impl Detokenizer {
    /// Creates a detokenizer at the beginning of a text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Detokenizer {
        let tail = match tokenizer.joining() {
            DecodeMethod::Bytes { leading_spaces } => {
                DecodeState::Bytes { pending: Vec::new(), leading_spaces }
            }
            DecodeMethod::Library => DecodeState::Tokens { ids: Vec::new(), shown: 0 },
        };
        Detokenizer { tokenizer, skip_special, kept: Arc::default(), state: tail }
    }

    /// Keeps the text of these special tokens, such as the markers of a call format, though others are
    /// skipped. The parser of the output reads them.
    pub fn with_kept(mut self, kept: Arc<[u32]>) -> Detokenizer {
        self.kept = kept;
        self
    }

    /// Continues after a prompt, whose text is not output. A character that starts in the prompt is output
    /// once it is complete.
    pub fn with_prompt(mut self, prompt: &[u32]) -> Detokenizer {
        if let DecodeState::Bytes { leading_spaces, .. } = &mut self.state
            && prompt.iter().any(|id| has_visible_text(&self.tokenizer, *id, self.skip_special))
        {
            *leading_spaces = LeadingSpaces::Keep;
        }
        let spoken = prompt.iter().rev().filter(|id| self.tokenizer.has_text(**id, self.skip_special));
        let last: Vec<u32> = spoken.take(PROMPT_TOKENS).copied().collect();
        for id in last.into_iter().rev() {
            self.push(id);
        }
        self
    }

    /// Adds the next id. Returns the text that is final now, which may be empty.
    pub fn push(&mut self, id: u32) -> String {
        if !self.tokenizer.has_text(id, self.skip_special && !self.kept.contains(&id)) {
            return String::new();
        }
        match &mut self.state {
            DecodeState::Bytes { pending, leading_spaces } => {
                let bytes = self.tokenizer.token_bytes(id);
                let (dropped, after) = leading_spaces.drop_from(bytes);
                *leading_spaces = after;
                pending.extend_from_slice(&bytes[dropped..]);
                take_complete(pending)
            }
            DecodeState::Tokens { ids, shown } => {
                ids.push(id);
                let text = held_text(&self.tokenizer, ids, *shown);
                if text.ends_with(char::REPLACEMENT_CHARACTER) && ids.len() - *shown < HELD_TOKENS {
                    return String::new();
                }
                ids.drain(..*shown);
                *shown = ids.len();
                text
            }
        }
    }

    /// Returns whether the text of all ids so far has been output.
    pub fn is_flushed(&self) -> bool {
        match &self.state {
            DecodeState::Bytes { pending, .. } => pending.is_empty(),
            DecodeState::Tokens { ids, shown } => *shown == ids.len(),
        }
    }

    /// Returns the text that is still held back, at the end of the ids.
    pub fn finish(&mut self) -> String {
        match &mut self.state {
            DecodeState::Bytes { pending, .. } => {
                String::from_utf8_lossy(&std::mem::take(pending)).into_owned()
            }
            DecodeState::Tokens { ids, shown } => {
                let text = held_text(&self.tokenizer, ids, *shown);
                *shown = ids.len();
                text
            }
        }
    }
}

/// Returns whether a token contributes text other than spaces.
fn has_visible_text(tokenizer: &Tokenizer, id: u32, skip_special: bool) -> bool {
    tokenizer.has_text(id, skip_special) && tokenizer.token_bytes(id).iter().any(|byte| *byte != b' ')
}

/// Returns the text that the tokens after the first `shown` add to the text of those.
fn held_text(tokenizer: &Tokenizer, ids: &[u32], shown: usize) -> String {
    // The library's decoders do not fail; if one did, its tokens would have no text.
    let join = |ids| tokenizer.decode_with_library(ids).unwrap_or_default();
    let (before, all) = (join(&ids[..shown]), join(ids));
    all.get(before.len()..).unwrap_or_default().to_owned()
}

/// Takes all text from `pending` except for a last character that may still be completed.
fn take_complete(pending: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    for chunk in pending.utf8_chunks() {
        text.push_str(chunk.valid());
        taken += chunk.valid().len();
        let invalid = chunk.invalid();
        let is_last = taken + invalid.len() == pending.len();
        if invalid.is_empty() || (is_last && is_incomplete_character(invalid)) {
            break;
        }
        text.push(char::REPLACEMENT_CHARACTER);
        taken += invalid.len();
    }
    pending.drain(..taken);
    text
}

/// Returns whether the bytes are the beginning of a valid character.
fn is_incomplete_character(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::{
        Dice, byte_fallback, byte_level, from_tokenizer_json, llama2c, metaspace, word_piece,
    };
    use crate::text::tokenizer::tests::fixtures;

    fn samples() -> Vec<Arc<Tokenizer>> {
        let hubs = [byte_level(), byte_fallback(), word_piece(), metaspace()]
            .map(|sample| from_tokenizer_json(&sample, None).unwrap());
        let small = hubs.into_iter().chain([llama2c()]);
        let fixtures = fixtures::folders().into_iter().chain(fixtures::ggufs()).map(|case| case.tokenizer);
        small.chain(fixtures).map(Arc::new).collect()
    }

    /// Detokenizes `answer` after `prompt`. Returns the output for each id, then that of `finish`.
    fn pieces(tokenizer: &Arc<Tokenizer>, skip: bool, prompt: &[u32], answer: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip).with_prompt(prompt);
        let mut pieces: Vec<String> = answer.iter().map(|id| detokenizer.push(*id)).collect();
        pieces.push(detokenizer.finish());
        assert_eq!(detokenizer.finish(), "", "text is output only once");
        pieces
    }

    #[test]
    fn pieces_together_are_the_text_decoded_at_once() {
        let mut dice = Dice::new(31);
        for tokenizer in samples() {
            // Half of the ids are from the end of the vocabulary, where text tokens are; a few are beyond it.
            let vocab = tokenizer.vocab_size();
            let mut compared = 0;
            for _ in 0..1_000 {
                let ids: Vec<u32> = (0..dice.below(30))
                    .map(|_| match dice.below(2) {
                        0 => dice.below(vocab + 2) as u32,
                        _ => (vocab - 1 - dice.below(8)) as u32,
                    })
                    .collect();
                let skip = dice.below(2) == 0;
                let (prompt, answer) = ids.split_at(dice.below(ids.len() + 1));
                let [before, all] = [prompt, &ids].map(|ids| tokenizer.decode(ids, skip).unwrap());
                let pieces = pieces(&tokenizer, skip, prompt, answer).concat();
                if before.ends_with(char::REPLACEMENT_CHARACTER) {
                    // A character that starts in the prompt is output as a whole.
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
        for (tokenizer, first) in [(from_tokenizer_json(&byte_level(), None).unwrap(), 2), (llama2c(), 3)] {
            let tokenizer = Arc::new(tokenizer);
            let smile = bytes(first, "a\u{1f600}b".as_bytes());
            assert_eq!(pieces(&tokenizer, true, &[], &smile), ["a", "", "", "", "\u{1f600}", "b", ""]);
            let cut = bytes(first, b"\xe5\x8fa\xff\xf0\x9f");
            assert_eq!(
                pieces(&tokenizer, true, &[], &cut),
                ["", "", "\u{fffd}a", "\u{fffd}", "", "", "\u{fffd}"]
            );
            // The character starts in the prompt and is completed afterwards.
            assert_eq!(pieces(&tokenizer, true, &smile[..3], &smile[3..]), ["", "\u{1f600}", "b", ""]);
        }
    }

    #[test]
    fn the_first_space_goes_only_where_the_text_begins() {
        let the = 266;
        let tokenizer = Arc::new(from_tokenizer_json(&byte_fallback(), None).unwrap());
        assert_eq!(pieces(&tokenizer, true, &[], &[1, the, the]), ["", "the", " the", ""]);
        assert_eq!(pieces(&tokenizer, true, &[1], &[the, the]), ["the", " the", ""]);
        assert_eq!(pieces(&tokenizer, true, &[1, the], &[the, 2, the]), [" the", "", " the", ""]);
        assert_eq!(pieces(&tokenizer, false, &[1], &[the, 2]), [" the", "</s>", ""]);
        let mut keeping = Detokenizer::new(tokenizer.clone(), true).with_kept([2].into());
        assert_eq!([1, the, 2, the].map(|id| keeping.push(id)), ["", "the", "</s>", " the"]);
        // More special tokens at the prompt's end than are considered do not hide the text before them.
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
                match &detokenizer.state {
                    DecodeState::Bytes { pending, .. } => assert!(pending.len() < 4),
                    DecodeState::Tokens { ids, .. } => assert!(ids.len() <= 2 * HELD_TOKENS),
                }
            }
        }
    }
}
