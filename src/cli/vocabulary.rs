//! Ordinary text tokens of a vocabulary, for uses where the meaning does not matter: benchmark prompts and
//! the output of the fake device.
//!
//! Invariant: no list is empty, and none contains a special or end token unless the vocabulary has no others.

use crate::model::ModelSource;
use crate::text::Tokenizer;

/// Returns the tokens that are neither special nor end tokens; all tokens if there are none.
pub fn ordinary_tokens(source: &ModelSource, tokenizer: &Tokenizer) -> Vec<u32> {
    let is_ordinary = |id: &u32| !tokenizer.is_special(*id) && !source.eos.contains(id);
    let ids = 0..source.spec.vocab as u32;
    or_else(ids.clone().filter(is_ordinary).collect(), || ids.collect())
}

/// Returns the ordinary tokens that are a space followed by ASCII letters; if there are none, those of
/// letters only; if there are none either, all ordinary tokens.
pub fn word_tokens(source: &ModelSource, tokenizer: &Tokenizer) -> Vec<u32> {
    let ordinary = ordinary_tokens(source, tokenizer);
    let chosen = |is_chosen: fn(&[u8]) -> bool| -> Vec<u32> {
        ordinary.iter().copied().filter(|id| is_chosen(tokenizer.token_bytes(*id))).collect()
    };
    or_else(chosen(is_word), || or_else(chosen(is_letters), || ordinary.clone()))
}

fn is_word(piece: &[u8]) -> bool {
    piece.strip_prefix(b" ").is_some_and(is_letters)
}

fn is_letters(piece: &[u8]) -> bool {
    !piece.is_empty() && piece.iter().all(u8::is_ascii_alphabetic)
}

fn or_else(list: Vec<u32>, other: impl FnOnce() -> Vec<u32>) -> Vec<u32> {
    if list.is_empty() { other() } else { list }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::start::open;
    use crate::model::ModelRef;

    #[test]
    fn words_are_letters_after_a_space_and_not_end_tokens() {
        let (source, tokenizer) = open(&ModelRef::Demo, None).unwrap();
        let words = word_tokens(&source, &tokenizer);
        assert!(words.len() > 20, "{}", words.len());
        for id in words {
            let text = tokenizer.token_text(id);
            assert!(text.starts_with(' ') && text[1..].chars().all(char::is_alphabetic), "{text:?}");
            assert!(text.len() > 1 && !tokenizer.is_special(id) && !source.eos.contains(&id));
        }
    }

    /// A byte vocabulary has no words, but letters.
    #[test]
    fn without_words_there_are_letters() {
        let (source, _) = open(&ModelRef::Demo, None).unwrap();
        let letters = word_tokens(&source, &Tokenizer::bytes(256).unwrap());
        assert_eq!(letters, (65..=90).chain(97..=122).collect::<Vec<u32>>());
    }
}
