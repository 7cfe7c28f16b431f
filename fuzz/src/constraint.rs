//! Constraints of requests, compiled and followed for a while.

use mainstem_grammar::{Form, Grammar, Limits, Spec, Token, Vocabulary};
use std::sync::{Arc, LazyLock};

/// Most tokens of an answer.
const TOKENS: usize = 64;

/// EOS, after the tokens of single bytes.
const EOS: u32 = 256;

static VOCABULARY: LazyLock<Arc<Vocabulary>> = LazyLock::new(|| {
    let bytes: Vec<u8> = (0..=u8::MAX).collect();
    let token = |id: u32| match bytes.get(id as usize..id as usize + 1) {
        Some(byte) => Token::Text(byte),
        None => Token::Special("<end>"),
    };
    let vocabulary = Vocabulary::new(EOS as usize + 1, token, &[EOS], None);
    Arc::new(vocabulary.expect("a vocabulary of bytes must be valid"))
});

/// Compiles a form. If that succeeds, draws an answer, and checks that the masks and the accepted tokens
/// agree. The limits of an answer may end it early.
pub fn check(form: Form) {
    let Ok(grammar) = Grammar::compile(&Spec::new(form), &VOCABULARY, &Limits::default()) else { return };
    let mut matcher = grammar.matcher();
    let mut mask = vec![0u32; VOCABULARY.mask_words()];
    for step in 0..TOKENS {
        if matcher.is_complete() || matcher.mask(&mut mask).is_err() {
            return;
        }
        let allowed: Vec<u32> =
            (0..=EOS).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        assert!(!allowed.is_empty(), "an answer that is not complete must go on");
        let token = allowed[step * 31 % allowed.len()];
        matcher.accept(token).expect("a token of the mask must be accepted");
    }
}
