//! The tokens of a model as a trie, which masks are computed with.
//!
//! Invariant: a mask never has a special token that the grammar does not name, and EOS only where the text
//! may end.

use crate::GrammarError;
use llguidance::toktrie::{InferenceCapabilities, TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{ParserFactory, earley::SlicedBiasComputer, toktrie};
use std::sync::Arc;

/// Longest token in bytes that a grammar can produce; the trie cannot hold longer ones.
const TOKEN_BYTES: usize = 1000;

/// Most bytes of all tokens together; the trie has at most as many nodes.
const VOCABULARY_BYTES: usize = 4_000_000;

/// Begins the trie's names of special tokens. No UTF-8 text has this byte.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Character that a tokenizer does not merge with others. Text is encoded behind it if the tokenizer puts a
/// space before texts.
const SEPARATOR: &str = "\u{2}";

/// A token as a grammar sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// Text, as bytes; a part of a character is allowed.
    Text(&'a [u8]),
    /// A control token with this name, which only a grammar that names it produces.
    Special(&'a str),
    /// A token that is never produced.
    Unused,
}

/// Encodes a text without special tokens around it.
pub type Tokenize = Box<dyn Fn(&str) -> Vec<u32> + Send + Sync>;

/// The vocabulary of a model: a trie of the bytes of all tokens, and its EOS tokens.
pub struct Vocabulary {
    factory: ParserFactory,
}

impl Vocabulary {
    /// Creates the vocabulary of `size` tokens. `eos` are the tokens that end a sequence; they are never
    /// text, and ids beyond the vocabulary are ignored. With `tokenize`, text that a grammar leaves no choice
    /// about is tokenized as the model's own tokenizer does, and masks there have a single token; without it,
    /// any tokens that spell the text are allowed. Takes time and memory in proportion to the vocabulary: for
    /// 128k tokens about half a second and 55 MB. Fails for vocabularies that the trie cannot hold.
    pub fn new<'a>(
        size: usize,
        token: impl Fn(u32) -> Token<'a>,
        eos: &[u32],
        tokenize: Option<Tokenize>,
    ) -> Result<Vocabulary, GrammarError> {
        let refused = |reason: String| GrammarError::refused("vocabulary", reason);
        let count = u32::try_from(size).ok().filter(|count| (1..1 << 24).contains(count));
        let count = count.ok_or_else(|| refused(format!("{size} tokens: not between 1 and {}", 1 << 24)))?;
        let eos: Vec<u32> = eos.iter().copied().filter(|id| *id < count).collect();
        let name = |id| if eos.contains(&id) { special_name(id, token(id)) } else { trie_name(token(id)) };
        let names: Vec<Vec<u8>> = (0..count).map(name).collect();
        let bytes: usize = names.iter().map(Vec::len).sum();
        if bytes > VOCABULARY_BYTES {
            return Err(refused(format!("{bytes} bytes of tokens: at most {VOCABULARY_BYTES}")));
        }
        let first_eos = eos.first().copied().unwrap_or(toktrie::INVALID_TOKEN);
        let mut trie = TokTrie::from(&TokRxInfo::new(count, first_eos), &names);
        if eos.len() > 1 {
            trie = trie.with_eos_tokens(&eos);
        }
        let env: TokEnv = Arc::new(Environment { trie, tokenize });
        let slices = SlicedBiasComputer::general_slices();
        let factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|error| refused(error.to_string()))?;
        factory.quiet();
        Ok(Vocabulary { factory })
    }

    /// Returns the number of tokens.
    pub fn size(&self) -> usize {
        self.trie().vocab_size()
    }

    /// Returns the number of words of 32 bits that a mask of all tokens needs.
    pub fn mask_words(&self) -> usize {
        self.size().div_ceil(32)
    }

    /// Returns the tokens that end a sequence; none if the model has none.
    pub fn eos(&self) -> &[u32] {
        match self.trie().eos_tokens() {
            [toktrie::INVALID_TOKEN] => &[],
            tokens => tokens,
        }
    }

    /// Returns the bytes of a token's text, of a special token those of its name; empty for a token that is
    /// never produced and for an id beyond the vocabulary.
    pub fn text(&self, token: u32) -> &[u8] {
        let bytes = if (token as usize) < self.size() { self.trie().token(token) } else { &[] };
        bytes.strip_prefix(&[SPECIAL]).unwrap_or(bytes)
    }

    pub(crate) fn factory(&self) -> &ParserFactory {
        &self.factory
    }

    fn trie(&self) -> &TokTrie {
        self.factory.tok_env().tok_trie()
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vocabulary({} tokens)", self.size())
    }
}

/// Returns the bytes that the trie stores for a token; none for tokens that no grammar can produce.
fn trie_name(token: Token<'_>) -> Vec<u8> {
    match token {
        Token::Text(bytes) if bytes.len() <= TOKEN_BYTES && bytes.first() != Some(&SPECIAL) => bytes.to_vec(),
        Token::Special(name) if !name.is_empty() && name.len() < TOKEN_BYTES => {
            [&[SPECIAL], name.as_bytes()].concat()
        }
        Token::Text(_) | Token::Special(_) | Token::Unused => Vec::new(),
    }
}

/// Returns the trie's name of a token that is special although the tokenizer may say that it is text.
fn special_name(id: u32, token: Token<'_>) -> Vec<u8> {
    match token {
        Token::Special(_) => trie_name(token),
        Token::Text(_) | Token::Unused => [&[SPECIAL], format!("<eos {id}>").as_bytes()].concat(),
    }
}

/// The trie and the tokenizer, as llguidance takes them.
struct Environment {
    trie: TokTrie,
    tokenize: Option<Tokenize>,
}

impl Environment {
    /// Returns whether the tokens are text that concatenates to `text`.
    fn spells(&self, ids: &[u32], text: &str) -> bool {
        self.trie.decode_raw(ids) == text.as_bytes()
    }

    /// Encodes a text within a text. Falls back to the longest tokens if the tokenizer changes the text or
    /// finds special tokens in it.
    fn encode(&self, text: &str) -> Vec<u32> {
        let Some(tokenize) = &self.tokenize else { return self.trie.greedy_tokenize(text.as_bytes()) };
        let ids = tokenize(text);
        if self.spells(&ids, text) {
            return ids;
        }
        let separated = tokenize(&format!("{SEPARATOR}{text}"));
        match separated.strip_prefix(&tokenize(SEPARATOR)[..]) {
            Some(ids) if self.spells(ids, text) => ids.to_vec(),
            _ => self.trie.greedy_tokenize(text.as_bytes()),
        }
    }
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| self.encode(text))
    }

    fn tokenize_is_canonical(&self) -> bool {
        self.tokenize.is_some()
    }
}
