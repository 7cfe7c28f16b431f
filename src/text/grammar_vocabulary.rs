//! The vocabulary of a tokenizer for constrained output.
//!
//! Invariant: a text that a grammar allows is the concatenation of its tokens' bytes, as the detokenizer
//! outputs it behind a prompt.

use super::tokenizer::{DecodeMethod, Tokenizer};
use anyhow::{Result, ensure};
use mainstem_grammar::{Token, Vocabulary};
use std::sync::Arc;

/// Creates the vocabulary of a model with logits for `size` tokens, which `eos` end. Takes about half a
/// second for 128k tokens, so it belongs into the background of the start. Fails for tokenizers whose tokens'
/// texts depend on their neighbours.
pub fn grammar_vocabulary(tokenizer: &Arc<Tokenizer>, size: usize, eos: &[u32]) -> Result<Vocabulary> {
    let is_concatenated = tokenizer.joining() != DecodeMethod::Library;
    ensure!(is_concatenated, "constrained output needs a tokenizer whose tokens are concatenated");
    let names: Vec<Option<String>> =
        (0..size as u32).map(|id| tokenizer.is_special(id).then(|| tokenizer.token_text(id))).collect();
    let token = |id: u32| match (&names[id as usize], tokenizer.token_bytes(id)) {
        (_, []) => Token::Unused,
        (Some(name), _) => Token::Special(name),
        (None, bytes) => Token::Text(bytes),
    };
    let encoder = tokenizer.clone();
    // Text that cannot be encoded is spelled by the vocabulary itself.
    let tokenize = move |text: &str| encoder.encode(text, false).unwrap_or_default();
    Ok(Vocabulary::new(size, token, eos, Some(Box::new(tokenize)))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::tests::fixtures::{folders, ggufs};
    use mainstem_grammar::{Form, Grammar, GrammarError, Limits, Spec};

    /// The texts of the first tokens that are letters alone.
    fn words(tokenizer: &Tokenizer) -> Vec<String> {
        let text = |id: u32| String::from_utf8(tokenizer.token_bytes(id).to_vec()).ok();
        let is_word = |word: &String| !word.is_empty() && word.chars().all(char::is_alphabetic);
        let ids = (0..tokenizer.vocab_size() as u32).filter(|id| !tokenizer.is_special(*id));
        ids.filter_map(text).filter(is_word).take(3).collect()
    }

    #[test]
    fn forced_text_is_spelled_by_tokenizers_of_every_kind() {
        let mut spelled = 0;
        for case in folders().into_iter().chain(ggufs()) {
            let tokenizer = Arc::new(case.tokenizer);
            let size = tokenizer.vocab_size() + 5;
            let vocabulary = grammar_vocabulary(&tokenizer, size, &[size as u32 - 1]);
            assert_eq!(vocabulary.is_ok(), tokenizer.joining() != DecodeMethod::Library, "{}", case.name);
            let Ok(vocabulary) = vocabulary.map(Arc::new) else { continue };
            let text = words(&tokenizer).concat();
            if text.is_empty() {
                continue;
            }
            let spec = Spec::new(Form::Choice([text.clone()].into()));
            let mut matcher = Grammar::compile(&spec, &vocabulary, &Limits::default()).unwrap().matcher();
            let mut mask = vec![0; vocabulary.mask_words()];
            let mut bytes = Vec::new();
            while !matcher.is_complete() {
                let only = matcher.mask(&mut mask).unwrap();
                let allowed = (0..size as u32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
                // Small vocabularies lack letters, so that a short token may lead nowhere.
                let token = only.or(allowed.max_by_key(|id| tokenizer.token_bytes(*id).len())).unwrap();
                assert!(!tokenizer.is_special(token));
                matcher.accept(token).unwrap();
                bytes.extend_from_slice(tokenizer.token_bytes(token));
            }
            assert_eq!(String::from_utf8(bytes).unwrap(), text, "{}", case.name);
            assert_eq!(matcher.accept(0), Err(GrammarError::Token(0)));
            spelled += 1;
        }
        assert!(spelled > 5, "{spelled}");
    }
}
