//! Tokenizers: text to token ids and back, and the text of single tokens.
//!
//! Every kind of vocabulary becomes a pipeline of the `tokenizers` library, with one of its models or one of
//! this module's. Decoders that concatenate bytes, which are those of nearly all generative models, are
//! implemented here: a token's bytes then do not depend on its neighbours, and text can be output token by
//! token.
//!
//! Invariant: every encoded id is below `vocab_size` and has its bytes here, and ids outside the vocabulary
//! decode to nothing.

mod token_bytes;

mod fewest;

mod pipeline;

mod library_guard;

pub(super) mod spelling;

mod scored_bpe;

mod unigram;

mod prefix_set;

mod parts;

mod folder;

mod pair;

mod numbering;

mod settings;

mod class;

mod added;

mod json;

mod splits;

mod byte_level;

mod vocab_json;

mod word_piece;

mod tiktoken;

mod sentencepiece;

pub mod gguf;

mod llama2c;

use crate::formats::{Folder, read_bounded};
use anyhow::{Context, Result, bail, ensure};
use fewest::FewestTokens;
use numbering::Numbering;
use pipeline::{ENCODING_BYTES, Pipeline};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;
use token_bytes::TokenBytes;

pub use gguf::GgufVocabulary;
pub use pair::TokenizerFiles;
pub use pipeline::{TokenLimits, TypedIds};
#[cfg(test)]
pub(crate) use spelling::byte_of_character;

/// Exclusive upper limit of token ids, a hundred times the size of the largest vocabulary in use.
const VOCAB_MAX: u32 = 1 << 24;

/// Converts text to token ids and back.
pub struct Tokenizer {
    encoder: Encoder,
    joining: DecodeMethod,
    pieces: TokenBytes,
    special: BTreeSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    surrounding: SurroundingTokens,
    fewest: OnceLock<FewestTokens>,
    numbering: Option<Numbering>,
    /// The tokenizer of the encoder input, if that has one of its own.
    source: Option<Box<Tokenizer>>,
}

/// The ids of a text, or why it was not encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encoded {
    Ids(Vec<u32>),
    /// The text has at least this many tokens.
    TooMany(usize),
}

/// A text is read for a bound of its number of tokens if it has more bytes than this for each token that it
/// may have; shorter ones are encoded right away. Few texts have so long tokens on average.
const BYTES_PER_TOKEN: usize = 16;

/// Encoding a text stops at this multiple of the tokens that it may have; up to there, errors have its exact
/// number of tokens.
const COUNTED_TOKENS: usize = 4;

/// Method of converting text to token ids.
enum Encoder {
    Pipeline(Box<Pipeline>),
    /// One token per byte.
    Bytes,
}

/// Method of converting token ids to text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DecodeMethod {
    /// The tokens' bytes are concatenated; leading spaces of the whole text may be dropped.
    Bytes { leading_spaces: LeadingSpaces },
    /// The library's decoder is used.
    Library,
}

/// Handling of leading spaces of a decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LeadingSpaces {
    Keep,
    DropFirst,
    DropAll,
}

impl LeadingSpaces {
    /// Returns how many of `bytes`, at the beginning of the text, are dropped, and the handling of the bytes
    /// after them.
    pub(super) fn drop_from(self, bytes: &[u8]) -> (usize, LeadingSpaces) {
        let spaces = bytes.iter().take_while(|byte| **byte == b' ').count();
        match self {
            LeadingSpaces::Keep => (0, LeadingSpaces::Keep),
            _ if bytes.is_empty() => (0, self),
            LeadingSpaces::DropFirst => (spaces.min(1), LeadingSpaces::Keep),
            LeadingSpaces::DropAll if spaces == bytes.len() => (spaces, self),
            LeadingSpaces::DropAll => (spaces, LeadingSpaces::Keep),
        }
    }
}

/// Special tokens around a text, in addition to those that the pipeline adds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SurroundingTokens {
    before: Vec<u32>,
    after: Vec<u32>,
    /// Tokens between two texts, in addition to those after the first.
    between: Vec<u32>,
    /// Drop the first token, which the pipeline adds although the model's settings disable it.
    drop_first: bool,
    /// Drop the last token, which the pipeline adds although the model's settings disable it.
    drop_last: bool,
}

impl SurroundingTokens {
    /// Creates the surrounding tokens from an optional token before and one after a text.
    fn new(before: Option<u32>, after: Option<u32>) -> SurroundingTokens {
        let [before, after] = [before, after].map(|token| token.into_iter().collect());
        SurroundingTokens { before, after, ..SurroundingTokens::default() }
    }
}

impl Tokenizer {
    /// Reads the tokenizer of a model folder, with the settings files beside it, from the first of these
    /// files that exists: `tokenizer.json`, a sentencepiece model, a tiktoken rank file, `vocab.json` with
    /// `merges.txt`, `vocab.txt`; and that of the encoder input, if there are two (pair.rs).
    pub fn from_folder(folder: &Folder) -> Result<Tokenizer> {
        Tokenizer::from_files(folder, &TokenizerFiles::default())
    }

    /// Reads the tokenizers of a model folder as [`Tokenizer::from_folder`] does, unless other files are
    /// given.
    pub fn from_files(folder: &Folder, files: &TokenizerFiles) -> Result<Tokenizer> {
        pair::read(folder, files)
    }

    /// Returns the tokenizer of the encoder input: this one, unless that has one of its own.
    pub fn source(&self) -> &Tokenizer {
        self.source.as_deref().unwrap_or(self)
    }

    /// Returns whether the encoder input has a tokenizer of its own.
    pub fn has_two_vocabularies(&self) -> bool {
        self.source.is_some()
    }

    /// Adds a tokenizer of the encoder input.
    pub fn with_source(self, source: Tokenizer) -> Tokenizer {
        Tokenizer { source: Some(Box::new(source)), ..self }
    }

    /// Returns both tokenizers, or the only one.
    fn all(&self) -> impl Iterator<Item = &Tokenizer> {
        std::iter::once(self).chain(self.source.as_deref())
    }

    /// Fails if the tokenizer has far more tokens than a model with `vocab` rows of embeddings could use. A
    /// few more are common: added tokens that a model was not trained with.
    pub fn check_vocab_size(&self, vocab: usize) -> Result<()> {
        let limit = vocab.saturating_mul(2).saturating_add(1 << 16);
        let size = self.vocab_size();
        ensure!(size <= limit, "the tokenizer has {size} tokens, but the model has embeddings for {vocab}");
        Ok(())
    }

    /// Reads the tokenizer of a llama2.c model with `vocab` tokens. BOS is 1 and precedes every text; EOS is
    /// 2, but models trained with llama2.c end a text with BOS.
    pub fn from_llama2c(file: &Path, vocab: usize) -> Result<Tokenizer> {
        let name = || file.display().to_string();
        let content = read_bounded(file).with_context(name)?;
        llama2c::read(&content, vocab).with_context(name)
    }

    /// Creates the tokenizer of a GGUF file from its vocabulary. Errors name `file`.
    pub fn from_gguf(file: &Path, vocabulary: &GgufVocabulary) -> Result<Tokenizer> {
        gguf::read(vocabulary).with_context(|| file.display().to_string())
    }

    /// Creates a substitute tokenizer for a model of `vocab` tokens without a tokenizer. The first 256 tokens
    /// are the bytes; the others are never encoded, and decode to a space and their id. Fails for fewer than
    /// 256 tokens.
    pub fn bytes(vocab: usize) -> Result<Tokenizer> {
        const BYTES: usize = 256;
        ensure!(
            vocab >= BYTES,
            "a vocabulary of {vocab} tokens is too small: one token per byte needs {BYTES}"
        );
        let mut pieces = TokenBytes::default();
        (0..=u8::MAX).for_each(|byte| pieces.push(&[byte]));
        (BYTES..vocab).for_each(|id| pieces.push(format!(" {id}").as_bytes()));
        let joining = DecodeMethod::Bytes { leading_spaces: LeadingSpaces::Keep };
        let around = SurroundingTokens::default();
        Ok(Tokenizer::new(Encoder::Bytes, joining, pieces, BTreeSet::new(), [None; 2], around))
    }

    fn new(
        encoder: Encoder,
        joining: DecodeMethod,
        pieces: TokenBytes,
        special: BTreeSet<u32>,
        [bos, eos]: [Option<u32>; 2],
        surrounding: SurroundingTokens,
    ) -> Tokenizer {
        let (fewest, numbering, source) = (OnceLock::new(), None, None);
        Tokenizer { encoder, joining, pieces, special, bos, eos, surrounding, fewest, numbering, source }
    }

    /// Encodes a text, with the special tokens that the model expects around it if `add_special` is set.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        match self.encode_counted(text, add_special, usize::MAX)? {
            Encoded::Ids(ids) => Ok(ids),
            Encoded::TooMany(tokens) => bail!("it has more than {tokens} tokens"),
        }
    }

    /// Encodes a text as [`Tokenizer::encode`] does, unless it has far more than `most` tokens: then it stops
    /// as soon as this is certain. A text of a few more tokens is encoded.
    pub fn encode_at_most(&self, text: &str, add_special: bool, most: usize) -> Result<Encoded> {
        if text.len() > most.saturating_mul(BYTES_PER_TOKEN)
            && let Some(tokens) = self.fewest_above(text, most)
        {
            return Ok(Encoded::TooMany(tokens));
        }
        self.encode_counted(text, add_special, most.saturating_mul(COUNTED_TOKENS))
    }

    /// Returns a number of tokens, more than `most`, that a text has at least; `None` if it may have fewer.
    /// This takes time in proportion to `most`, except for repetitive texts.
    pub fn fewest_above(&self, text: &str, most: usize) -> Option<usize> {
        self.fewest().above(text, most)
    }

    /// Returns the length in bytes beyond which [`Tokenizer::encode_at_most`] encodes no text.
    pub fn longest_text(&self, most: usize) -> usize {
        let longest = self.all().map(|tokenizer| tokenizer.fewest().longest_text(most)).max();
        longest.unwrap_or_default().max(most.saturating_mul(BYTES_PER_TOKEN))
    }

    /// Returns the memory that encoding a text takes at most, in bytes per byte of it.
    pub fn memory_per_byte(&self) -> usize {
        let of_one = |tokenizer: &Tokenizer| match &tokenizer.encoder {
            Encoder::Pipeline(pipeline) => pipeline.memory_per_byte(),
            Encoder::Bytes => ENCODING_BYTES,
        };
        self.all().map(of_one).max().unwrap_or_default()
    }

    /// Builds what the first long text needs, so that its memory can be measured.
    pub fn build_tables(&self) {
        self.all().for_each(|tokenizer| tokenizer.fewest().build());
    }

    /// Returns the maximum bytes that each thread that encodes keeps for further texts.
    pub fn thread_bytes(&self) -> usize {
        let of_one = |tokenizer: &Tokenizer| match &tokenizer.encoder {
            Encoder::Pipeline(pipeline) => pipeline.cache_bytes(),
            Encoder::Bytes => 0,
        };
        self.all().map(of_one).sum()
    }

    fn fewest(&self) -> &FewestTokens {
        self.fewest.get_or_init(|| FewestTokens::new(self))
    }

    /// Encodes a text unless it has more than `most` tokens.
    fn encode_counted(&self, text: &str, add_special: bool, most: usize) -> Result<Encoded> {
        let ids = match &self.encoder {
            Encoder::Pipeline(pipeline) => match pipeline.encode(text, add_special, most)? {
                Ok(ids) => match &self.numbering {
                    Some(numbering) => numbering.model_ids(ids),
                    None => ids,
                },
                Err(tokens) => return Ok(Encoded::TooMany(tokens)),
            },
            Encoder::Bytes if text.len() > most => return Ok(Encoded::TooMany(text.len())),
            Encoder::Bytes => text.bytes().map(u32::from).collect(),
        };
        if !add_special {
            return Ok(Encoded::Ids(ids));
        }
        let SurroundingTokens { before, after, drop_first: drops_first, drop_last: drops_last, .. } =
            &self.surrounding;
        let kept = usize::from(*drops_first)..ids.len().saturating_sub(usize::from(*drops_last));
        Ok(Encoded::Ids([before, ids.get(kept).unwrap_or_default(), after].concat()))
    }

    /// Encodes a text, or two that belong together, with the special tokens that the model expects around
    /// them if `add_special` is set. The second text, and then the longer one, lose tokens at their ends
    /// until the limits hold.
    pub fn encode_texts(
        &self,
        first: &str,
        second: Option<&str>,
        add_special: bool,
        most: TokenLimits,
    ) -> Result<TypedIds> {
        let none = SurroundingTokens::default();
        let around = if add_special { &self.surrounding } else { &none };
        let dropped = usize::from(around.drop_first) + usize::from(around.drop_last);
        let added = around.before.len() + around.after.len();
        let room = most.whole.saturating_sub(added).saturating_add(dropped);
        let room = TokenLimits { whole: room, ..most };
        let pipeline = match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline,
            Encoder::Bytes => {
                let second = second.unwrap_or_default().bytes().take(most.second);
                let ids = first.bytes().chain(second).take(most.whole).map(u32::from).collect();
                return Ok(TypedIds { ids, second: None });
            }
        };
        // Without a template, each text has its own end, and the second one is of another type.
        let is_bare = second.is_some() && add_special && !pipeline.adds_tokens() && !around.after.is_empty();
        if is_bare {
            let added = around.after.len() + around.between.len();
            let room = TokenLimits { whole: room.whole.saturating_sub(added), ..room };
            let texts = pipeline.encode_texts(first, second, false, room)?;
            let split = texts.second.unwrap_or(texts.ids.len());
            let (first, second) = texts.ids.split_at(split);
            let first = [&around.before, first, &around.after, &around.between].concat();
            let second = [second, &around.after].concat();
            return Ok(TypedIds { second: Some(first.len()), ids: [first, second].concat() });
        }
        let TypedIds { ids, second } = pipeline.encode_texts(first, second, add_special, room)?;
        let kept = usize::from(around.drop_first)..ids.len().saturating_sub(usize::from(around.drop_last));
        let ids = [&around.before, ids.get(kept).unwrap_or_default(), &around.after].concat();
        let second = second.map(|at| at + around.before.len() - usize::from(around.drop_first));
        Ok(TypedIds { ids, second })
    }

    /// Decodes token ids. Invalid UTF-8 becomes U+FFFD; ids outside the vocabulary are ignored.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let spoken = ids.iter().copied().filter(|id| self.has_text(*id, skip_special));
        let DecodeMethod::Bytes { leading_spaces } = self.joining else {
            return self.decode_with_library(&spoken.collect::<Vec<_>>());
        };
        let bytes: Vec<u8> = spoken.flat_map(|id| self.pieces.get(id)).copied().collect();
        let (dropped, _) = leading_spaces.drop_from(&bytes);
        Ok(String::from_utf8_lossy(&bytes[dropped..]).into_owned())
    }

    /// Returns the largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the bytes of a token within a text; a special token's are its name.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// Returns the tokens whose bytes contain `text`, which must not be empty, in order.
    pub fn tokens_containing(&self, text: &str) -> Vec<u32> {
        self.pieces.containing(text.as_bytes())
    }

    /// Returns the text of a single token, as within a text. Invalid UTF-8 becomes U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.pieces.get(id)).into_owned()
    }

    /// Returns the id of the token with this name, such as `<mask>`, or with this text.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        match self.encode(name, false).ok()?[..] {
            // Other texts are split into several tokens, or become the unknown token.
            [id] if self.token_text(id).trim_start() == name.trim_start() => Some(id),
            _ => None,
        }
    }

    /// Returns the BOS token.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the EOS token of the tokenizer's files; a model's own settings may name others.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// Returns whether a token is special: a control token rather than text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Returns the first token id that has different meanings in the two tokenizers: other bytes, or special
    /// in only one of them. Ids without bytes in one of them are padding.
    pub fn first_difference(&self, other: &Tokenizer) -> Option<u32> {
        let differs = |id: &u32| {
            let (bytes, others) = (self.token_bytes(*id), other.token_bytes(*id));
            let is_in_both = !bytes.is_empty() && !others.is_empty();
            is_in_both && (bytes != others || self.is_special(*id) != other.is_special(*id))
        };
        (0..self.vocab_size().min(other.vocab_size()) as u32).find(differs)
    }

    /// Returns whether a token contributes to the decoded text: it has bytes and is not skipped.
    pub(super) fn has_text(&self, id: u32, skip_special: bool) -> bool {
        let skipped = skip_special && self.is_special(id);
        !skipped && !self.pieces.get(id).is_empty()
    }

    /// Returns how token ids become text.
    pub(super) fn joining(&self) -> DecodeMethod {
        self.joining
    }

    /// Decodes tokens that all contribute text, with the library's decoder.
    pub(super) fn decode_with_library(&self, ids: &[u32]) -> Result<String> {
        match &self.encoder {
            Encoder::Pipeline(pipeline) => match &self.numbering {
                Some(numbering) => pipeline.decode(&numbering.own_ids(ids)),
                None => pipeline.decode(ids),
            },
            Encoder::Bytes => unreachable!("byte tokenizers are not decoded by the library; this is a bug"),
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.vocab_size())
    }
}

#[cfg(test)]
pub(super) mod tests;
