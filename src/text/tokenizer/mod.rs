//! A model's vocabulary: text to ids, ids to text, and what each id is alone.
//!
//! Every kind of vocabulary becomes one pipeline of the `tokenizers` library, its models or our own within.
//! Decoding is ours for the decoders that put bytes side by side, which are those of nearly every generating
//! model: a token's bytes then do not depend on its neighbours, and text can leave token by token.
//!
//! Invariant: every id that encoding gives is below `vocab_size` and has its bytes here, and an id that the
//! vocabulary lacks is decoded to nothing.

mod pieces;

mod pipeline;

mod library_guard;

pub(super) mod spelling;

mod scored_bpe;

mod unigram;

mod prefixes;

mod draft;

mod folder;

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

use crate::formats::Folder;
use anyhow::{Context, Result, ensure};
use pieces::Pieces;
use pipeline::Pipeline;
use std::collections::BTreeSet;
use std::path::Path;

pub use gguf::GgufVocabulary;
#[cfg(test)]
pub(crate) use spelling::byte_of_character;

/// Ids must be below this: a vocabulary a hundred times the largest in use.
const VOCAB_MAX: u32 = 1 << 24;

/// Text to ids and back.
pub struct Tokenizer {
    encoder: Encoder,
    joining: Joining,
    pieces: Pieces,
    special: BTreeSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    around: Around,
}

enum Encoder {
    Pipeline(Box<Pipeline>),
    /// A token for each byte.
    Bytes,
}

/// How tokens become text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// Their bytes side by side, but for spaces that open the whole text.
    Bytes { opening: Opening },
    /// As only the library knows.
    Library,
}

/// What becomes of spaces that open a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opening {
    Kept,
    FirstDropped,
    AllDropped,
}

impl Opening {
    /// How many of these bytes, with which the text opens or goes on opening, are dropped, and what holds for
    /// those after them.
    pub(super) fn dropped(self, bytes: &[u8]) -> (usize, Opening) {
        let spaces = bytes.iter().take_while(|byte| **byte == b' ').count();
        match self {
            Opening::Kept => (0, Opening::Kept),
            _ if bytes.is_empty() => (0, self),
            Opening::FirstDropped => (spaces.min(1), Opening::Kept),
            Opening::AllDropped if spaces == bytes.len() => (spaces, self),
            Opening::AllDropped => (spaces, Opening::Kept),
        }
    }
}

/// What the model expects around a text, beyond what the pipeline puts there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Around {
    before: Vec<u32>,
    after: Vec<u32>,
    /// The pipeline puts a token before every text, and the model's settings say not to.
    drops_first: bool,
    /// The same at the end.
    drops_last: bool,
}

impl Around {
    /// These tokens, if there are any.
    fn of(before: Option<u32>, after: Option<u32>) -> Around {
        let [before, after] = [before, after].map(|token| token.into_iter().collect());
        Around { before, after, ..Around::default() }
    }
}

impl Tokenizer {
    /// The tokenizer in a model's folder, from the first of these that is there, with the settings beside it:
    /// `tokenizer.json`, a sentencepiece model, a file of ranks, `vocab.json` with `merges.txt`, `vocab.txt`.
    pub fn from_folder(folder: &Folder) -> Result<Tokenizer> {
        folder::read(folder)
    }

    /// The tokenizer of a llama2.c model with `vocab` tokens. BOS is 1, before every text; EOS is 2, but
    /// models trained with llama2.c end a text with BOS.
    pub fn from_llama2c(file: &Path, vocab: usize) -> Result<Tokenizer> {
        let name = || file.display().to_string();
        let content = std::fs::read(file).with_context(name)?;
        llama2c::read(&content, vocab).with_context(name)
    }

    /// The tokenizer within a GGUF file, which is named in errors.
    pub fn from_gguf(file: &Path, vocabulary: &GgufVocabulary) -> Result<Tokenizer> {
        gguf::read(vocabulary).with_context(|| file.display().to_string())
    }

    /// A stand-in for a model of `vocab` tokens, at least 256, that has no tokenizer: the first 256 are the
    /// bytes, and each of the others, which encoding never gives, reads as a space and its id.
    pub fn bytes(vocab: usize) -> Result<Tokenizer> {
        const BYTES: usize = 256;
        ensure!(vocab >= BYTES, "a vocabulary of {vocab} tokens has none for each byte: {BYTES} are needed");
        let mut pieces = Pieces::default();
        (0..=u8::MAX).for_each(|byte| pieces.push(&[byte]));
        (BYTES..vocab).for_each(|id| pieces.push(format!(" {id}").as_bytes()));
        Ok(Tokenizer {
            encoder: Encoder::Bytes,
            joining: Joining::Bytes { opening: Opening::Kept },
            pieces,
            special: BTreeSet::new(),
            bos: None,
            eos: None,
            around: Around::default(),
        })
    }

    /// The ids of a text; with the tokens the model expects around it if `add_special`.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let ids = match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline.ids(text, add_special)?,
            Encoder::Bytes => text.bytes().map(u32::from).collect(),
        };
        if !add_special {
            return Ok(ids);
        }
        let Around { before, after, drops_first, drops_last } = &self.around;
        let kept = usize::from(*drops_first)..ids.len().saturating_sub(usize::from(*drops_last));
        Ok([before, ids.get(kept).unwrap_or_default(), after].concat())
    }

    /// The text of ids. Bytes that are no UTF-8 become U+FFFD; ids the vocabulary does not have are left out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        let spoken = ids.iter().copied().filter(|id| self.is_spoken(*id, skip_special));
        let Joining::Bytes { opening } = self.joining else {
            return self.join(&spoken.collect::<Vec<_>>());
        };
        let bytes: Vec<u8> = spoken.flat_map(|id| self.pieces.get(id)).copied().collect();
        let (dropped, _) = opening.dropped(&bytes);
        Ok(String::from_utf8_lossy(&bytes[dropped..]).into_owned())
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The bytes of a token, as it stands amid others; a special token's are its name.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// The token alone, as it stands amid others; bytes that are no UTF-8 become U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.pieces.get(id)).into_owned()
    }

    /// The token of that name, such as `<mask>`, or of that text.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        match self.encode(name, false).ok()?[..] {
            // A name that is none is cut to pieces, or unknown.
            [id] if self.token_text(id).trim_start() == name.trim_start() => Some(id),
            _ => None,
        }
    }

    /// The token that opens a text.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text, as the tokenizer's files say; a model's own settings may name others.
    pub fn eos_id(&self) -> Option<u32> {
        self.eos
    }

    /// Whether a token steers the model and is no text.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }

    /// Whether a token has a part in the text: it has bytes, and is not skipped.
    pub(super) fn is_spoken(&self, id: u32, skip_special: bool) -> bool {
        let skipped = skip_special && self.is_special(id);
        !skipped && !self.pieces.get(id).is_empty()
    }

    pub(super) fn joining(&self) -> Joining {
        self.joining
    }

    /// The text of tokens that are all spoken, by the library's decoder.
    pub(super) fn join(&self, ids: &[u32]) -> Result<String> {
        match &self.encoder {
            Encoder::Pipeline(pipeline) => pipeline.text(ids),
            Encoder::Bytes => unreachable!("its pieces are joined as bytes; this is a bug"),
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
