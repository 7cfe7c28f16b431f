//! The fewest tokens that a text can have, found without tokenizing it: a prompt far beyond the context is
//! refused after a part of it as long as the context has been read.
//!
//! Which bound is right depends on the tokenizer:
//! - If tokens are the bytes of the text in order, no tokenization has fewer than the fewest pieces of the
//!   vocabulary that cover the text ([`Cover`]). So every byte must be a token (a run of unknown text could
//!   be one token), nothing may be removed, and spaces may be written differently, but not merged.
//!   A character that Unicode normalization may change counts nothing, nor do pieces that it may be part of.
//! - If words are encoded one by one, each is at least one token.
//! - Other tokenizers have no bound.
//!
//! Invariant: a bound never exceeds the number of tokens, whatever the text.

mod cover;

use super::pipeline::{Algorithm, Normalizer, PieceAlgorithm, Pipeline, UnknownText};
use super::sentencepiece::normalizer::{SPACE, SpaceHandling};
use super::{DecodeMethod, Encoder, Tokenizer};
use cover::Cover;
use serde_json::Value;
use std::collections::HashSet;
use std::sync::LazyLock;
use tokenizers::{AddedToken, ModelWrapper, NormalizedString, Normalizer as _};

/// Character that stands for a space.
const MARK: &str = "\u{2581}";

/// Lower bound of the numbers of tokens of texts.
#[derive(Debug)]
pub enum FewestTokens {
    /// One token per byte.
    Bytes,
    /// Tokens are the bytes of the text.
    Pieces(Box<Pieces>),
    /// Each word between spaces is at least one token.
    Words,
    Unknown,
}

/// A vocabulary whose tokens are the bytes of the text.
#[derive(Debug)]
pub struct Pieces {
    /// Built of the pieces for the first text that needs it.
    cover: LazyLock<Cover, Box<dyn FnOnce() -> Cover + Send + Sync>>,
    longest: usize,
    written: Writing,
    /// Names of tokens that take the spaces beside them.
    greedy: Vec<String>,
}

impl FewestTokens {
    /// Determines the bound of a tokenizer.
    pub fn new(tokenizer: &Tokenizer) -> FewestTokens {
        let Encoder::Pipeline(pipeline) = &tokenizer.encoder else { return FewestTokens::Bytes };
        match Pieces::new(tokenizer, pipeline) {
            Some(pieces) => FewestTokens::Pieces(Box::new(pieces)),
            None if counts_words(tokenizer, pipeline) == Some(true) => FewestTokens::Words,
            None => FewestTokens::Unknown,
        }
    }

    /// Builds what the first text needs.
    pub fn build(&self) {
        if let FewestTokens::Pieces(pieces) = self {
            LazyLock::force(&pieces.cover);
        }
    }

    /// Returns a number of tokens, more than `most`, that a text has at least. `None` if it may have fewer.
    pub fn above(&self, text: &str, most: usize) -> Option<usize> {
        match self {
            FewestTokens::Bytes => Some(text.len()).filter(|tokens| *tokens > most),
            FewestTokens::Pieces(pieces) => pieces.above(text, most),
            // One less: the first word may be one with a token that is added before the text.
            FewestTokens::Words => {
                let words =
                    text.split(' ').filter(|word| word.bytes().any(|byte| byte.is_ascii_alphanumeric()));
                (words.take(most + 2).count() > most + 1).then_some(most + 1)
            }
            FewestTokens::Unknown => None,
        }
    }

    /// Returns the length in bytes beyond which no text has at most `most` tokens.
    pub fn longest_text(&self, most: usize) -> usize {
        match self {
            FewestTokens::Bytes => most,
            // A token that takes the spaces beside it takes any number.
            FewestTokens::Pieces(pieces) if pieces.greedy.is_empty() => {
                most.saturating_mul(pieces.longest_text())
            }
            _ => usize::MAX,
        }
    }
}

impl Pieces {
    /// Collects the pieces of a tokenizer; `None` if its tokens are not the bytes of the text.
    fn new(tokenizer: &Tokenizer, pipeline: &Pipeline) -> Option<Pieces> {
        let library = pipeline.library();
        let pre_tokenizer = serde_json::to_value(library.get_pre_tokenizer()).ok()?;
        let written =
            Writing::of_pre_tokenizer(&pre_tokenizer)?.and(Writing::of_normalizer(library.get_normalizer())?);
        if !encodes_bytes(pipeline.algorithm(), written.is_byte_level) {
            return None;
        }
        let ids = 0..tokenizer.vocab_size() as u32;
        let mut pieces: Vec<Vec<u8>> = ids.map(|id| tokenizer.token_bytes(id).to_vec()).collect();
        let single: HashSet<u8> =
            pieces.iter().filter(|piece| piece.len() == 1).map(|piece| piece[0]).collect();
        if !matches!(tokenizer.joining, DecodeMethod::Bytes { .. }) || single.len() < 256 {
            return None;
        }
        let added = library.get_added_tokens_decoder();
        let greedy = added.values().filter(|token| token.lstrip || token.rstrip);
        let greedy: Vec<String> = greedy.map(|token| token.content.clone()).collect();
        // Names are looked for in the text before it is normalized.
        let is_unclear = |name: &String| name.contains([' ', SPACE]) || written.composes && !name.is_ascii();
        if greedy.iter().any(is_unclear) {
            return None;
        }
        // Added tokens may be found with the space that is added before them.
        for token in added.values() {
            let names = names(token, library.get_normalizer())?.into_iter();
            pieces.extend(names.map(|name| format!(" {name}").into_bytes()));
        }
        if written.marks_spaces {
            pieces.iter_mut().for_each(|piece| *piece = unmarked(piece));
        }
        // The space that is added before a text is part of its first token.
        let bare: Vec<_> =
            pieces.iter().filter_map(|piece| piece.strip_prefix(b" ").map(<[u8]>::to_vec)).collect();
        pieces.extend(bare);
        let longest = pieces.iter().map(Vec::len).max().unwrap_or(0);
        Some(Pieces { cover: LazyLock::new(Box::new(|| Cover::new(pieces))), longest, written, greedy })
    }

    /// Returns the maximum length in bytes of text that becomes one token.
    fn longest_text(&self) -> usize {
        // U+2581 has three bytes, and a composed character up to a third of those that it is composed of.
        let Writing { marks_spaces, composes, .. } = self.written;
        self.longest * if marks_spaces || composes { 3 } else { 1 }
    }

    fn above(&self, text: &str, most: usize) -> Option<usize> {
        if self.greedy.iter().any(|name| text.contains(name.as_str())) {
            return None;
        }
        let least = text.len().div_ceil(self.longest_text());
        if least > most {
            return Some(least);
        }
        let mut reader = self.cover.reader();
        let mut buffer = [0; 4];
        for character in text.chars() {
            if self.written.composes && !is_unchanged(character) {
                reader.skip(character.len_utf8());
                continue;
            }
            let is_space = self.written.marks_spaces && character == SPACE;
            let character = if is_space { ' ' } else { character };
            for byte in character.encode_utf8(&mut buffer).bytes() {
                let fewest = reader.read(byte) as usize;
                if fewest > most {
                    return Some(fewest);
                }
            }
        }
        None
    }
}

/// Form in which text is passed to the model, without anything being removed from it.
#[derive(Clone, Copy, Debug, Default)]
struct Writing {
    /// Each byte is a character.
    is_byte_level: bool,
    /// A space is U+2581.
    marks_spaces: bool,
    /// Characters are composed (Unicode normalization form C).
    composes: bool,
}

impl Writing {
    fn and(self, other: Writing) -> Writing {
        Writing {
            is_byte_level: self.is_byte_level || other.is_byte_level,
            marks_spaces: self.marks_spaces || other.marks_spaces,
            composes: self.composes || other.composes,
        }
    }

    /// Returns what all stages of a sequence do together; `None` if one of them may do more.
    fn of_all(stages: &Value, one: fn(&Value) -> Option<Writing>) -> Option<Writing> {
        let mut stages = stages.as_array()?.iter();
        stages.try_fold(Writing::default(), |all, stage| Some(all.and(one(stage)?)))
    }

    /// `None` if the pre-tokenizer may remove text.
    fn of_pre_tokenizer(it: &Value) -> Option<Writing> {
        let plain = Writing::default();
        if it.is_null() {
            return Some(plain);
        }
        match it["type"].as_str()? {
            "ByteLevel" => Some(Writing { is_byte_level: true, ..plain }),
            "Metaspace" => (it["replacement"] == MARK).then_some(Writing { marks_spaces: true, ..plain }),
            "Split" | "Punctuation" => (it["behavior"] != "Removed").then_some(plain),
            "Digits" => Some(plain),
            "Sequence" => Writing::of_all(&it["pretokenizers"], Writing::of_pre_tokenizer),
            _ => None,
        }
    }

    /// `None` if the normalizer may change a text in other ways.
    fn of_normalizer(normalizer: Option<&Normalizer>) -> Option<Writing> {
        match normalizer {
            None => Some(Writing::default()),
            Some(Normalizer::SentencePiece(it)) => {
                let keeps = it.charsmap.is_none() && it.spaces == SpaceHandling::Keep;
                keeps.then_some(Writing { marks_spaces: true, ..Writing::default() })
            }
            Some(Normalizer::Prepared(..)) => None,
            Some(Normalizer::Library(it)) => Writing::of_library(&serde_json::to_value(it).ok()?),
        }
    }

    fn of_library(it: &Value) -> Option<Writing> {
        let marked = Writing { marks_spaces: true, ..Writing::default() };
        match it["type"].as_str()? {
            "NFC" => Some(Writing { composes: true, ..Writing::default() }),
            "Prepend" => (it["prepend"] == MARK).then_some(marked),
            "Replace" => (it["pattern"]["String"] == " " && it["content"] == MARK).then_some(marked),
            "Sequence" => Writing::of_all(&it["normalizers"], Writing::of_library),
            _ => None,
        }
    }
}

/// Returns whether text that is not a token is encoded byte by byte.
fn encodes_bytes(algorithm: &Algorithm, is_byte_level: bool) -> bool {
    match algorithm {
        Algorithm::Library(model) => match &**model {
            ModelWrapper::BPE(bpe) => {
                let affixes = [&bpe.continuing_subword_prefix, &bpe.end_of_word_suffix];
                let is_bare = affixes.into_iter().flatten().all(String::is_empty);
                is_bare && (is_byte_level || bpe.byte_fallback)
            }
            _ => false,
        },
        Algorithm::Pieces(encoder) => matches!(encoder.unknown, UnknownText::Bytes(_)),
    }
}

/// Returns a piece with spaces in the place of U+2581.
fn unmarked(piece: &[u8]) -> Vec<u8> {
    match std::str::from_utf8(piece) {
        Ok(text) => text.replace(SPACE, " ").into_bytes(),
        Err(_) => piece.to_vec(),
    }
}

/// Returns whether Unicode's form C never changes a character, unless another one that it may change follows:
/// the common ones that are composed already, and compose with nothing before them.
fn is_unchanged(character: char) -> bool {
    matches!(
        character,
        '\0'..='\u{7f}'
            | '\u{a0}'..='\u{24f}'
            | '\u{400}'..='\u{481}'
            | '\u{2010}'..='\u{2027}'
            | '\u{3001}'..='\u{3003}'
            | '\u{3041}'..='\u{3096}'
            | '\u{30a1}'..='\u{30fa}'
            | '\u{4e00}'..='\u{9fff}'
            | '\u{ac00}'..='\u{d7a3}'
            | '\u{ff01}'..='\u{ff5e}'
    )
}

/// Returns whether each word between spaces is at least one token; `None` if that is not known.
fn counts_words(tokenizer: &Tokenizer, pipeline: &Pipeline) -> Option<bool> {
    let library = pipeline.library();
    let normalizer = library.get_normalizer();
    let spans_words = |name: &str| name.trim_matches([' ', SPACE]).contains([' ', SPACE]);
    for token in library.get_added_tokens_decoder().values() {
        if names(token, normalizer)?.iter().any(|name| spans_words(name)) {
            return Some(false);
        }
    }
    let pre_tokenizer = serde_json::to_value(library.get_pre_tokenizer()).ok()?;
    let splits = match pipeline.algorithm() {
        Algorithm::Library(model) => {
            let always_encodes = matches!(
                **model,
                ModelWrapper::WordPiece(_) | ModelWrapper::Unigram(_) | ModelWrapper::WordLevel(_)
            );
            always_encodes && splits_words(&pre_tokenizer)?
        }
        Algorithm::Pieces(encoder) => {
            let mut tokens = (0..tokenizer.vocab_size() as u32).map(|id| tokenizer.token_text(id));
            // Then unknown words have a token for the space between them.
            let has_space = tokens.clone().any(|token| token == " ");
            let is_unigram = matches!(encoder.algorithm, PieceAlgorithm::Unigram(_));
            is_unigram && pre_tokenizer.is_null() && has_space && !tokens.any(|token| spans_words(&token))
        }
    };
    Some(splits && keeps_words(normalizer))
}

/// Returns whether a pre-tokenizer splits at each space; `None` if it may remove more than spaces.
fn splits_words(pre_tokenizer: &Value) -> Option<bool> {
    match pre_tokenizer["type"].as_str()? {
        "BertPreTokenizer" | "Whitespace" | "WhitespaceSplit" => Some(true),
        "Metaspace" => Some(pre_tokenizer["split"] != false),
        "Punctuation" => (pre_tokenizer["behavior"] != "Removed").then_some(false),
        "Digits" => Some(false),
        "Sequence" => {
            let stages: Option<Vec<bool>> =
                pre_tokenizer["pretokenizers"].as_array()?.iter().map(splits_words).collect();
            Some(stages?.contains(&true))
        }
        _ => None,
    }
}

/// Returns the names by which an added token is found in texts; `None` if they are not known.
fn names(token: &AddedToken, normalizer: Option<&Normalizer>) -> Option<Vec<String>> {
    let mut names = vec![token.content.clone()];
    if let Some(normalizer) = normalizer.filter(|_| token.normalized) {
        let mut name = NormalizedString::from(token.content.as_str());
        normalizer.normalize(&mut name).ok()?;
        names.push(name.get().to_owned());
    }
    Some(names)
}

/// Returns whether a normalizer keeps words of ASCII letters and digits apart, and none of them vanishes: it
/// is of a kind that reads single characters, and changes no pair of letters or digits, except for upper
/// case.
fn keeps_words(normalizer: Option<&Normalizer>) -> bool {
    let Some(normalizer) = normalizer else { return true };
    let is_known = match normalizer {
        Normalizer::SentencePiece(_) => true,
        Normalizer::Library(it) => serde_json::to_value(it).is_ok_and(|it| may_keep_words(&it)),
        Normalizer::Prepared(it, _) => serde_json::to_value(it).is_ok_and(|it| may_keep_words(&it)),
    };
    if !is_known {
        return false;
    }
    let characters = || (b'0'..=b'z').filter(u8::is_ascii_alphanumeric).map(char::from);
    let pairs = characters().flat_map(|first| characters().map(move |second| format!("{first}{second}")));
    let pairs: Vec<String> = pairs.collect();
    let mut text = NormalizedString::from(pairs.join(" "));
    if normalizer.normalize(&mut text).is_err() {
        return false;
    }
    let words = text.get().split([' ', SPACE]).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).eq(pairs.iter().map(|pair| pair.to_ascii_lowercase()))
}

/// Returns whether a normalizer of the library is of a kind that may keep words. One that replaces what a
/// pattern finds may change long words only, unless it is one of the usual patterns of spaces.
fn may_keep_words(it: &Value) -> bool {
    const SPACES: [&str; 4] = [" {2,}", " +", r"\s{2,}", r"\s+"];
    match it["type"].as_str().unwrap_or_default() {
        "BertNormalizer" | "Lowercase" | "NFC" | "NFD" | "NFKC" | "NFKD" | "Nmt" | "Precompiled"
        | "Prepend" | "Strip" | "StripAccents" => true,
        "Replace" => {
            let keeps_space = it["content"].as_str().is_some_and(|content| content.contains([' ', SPACE]));
            let is_short = |text: &str| text.chars().count() <= 2 && (keeps_space || !text.contains(' '));
            let is_spaces = |regex: &str| keeps_space && SPACES.contains(&regex);
            let pattern = &it["pattern"];
            pattern["String"].as_str().is_some_and(is_short)
                || pattern["Regex"].as_str().is_some_and(is_spaces)
        }
        "Sequence" => it["normalizers"].as_array().is_some_and(|stages| stages.iter().all(may_keep_words)),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
