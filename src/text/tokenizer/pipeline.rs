//! The encoding pipeline, of the `tokenizers` library: added tokens are found first, and the text between
//! them is normalized, pre-tokenized and encoded by a model of the library or of this module.
//!
//! Invariant: panics of the library, which assumes that the components of a file are consistent, are returned
//! as errors.

use super::library_guard;
use super::scored_bpe::{ScoredBpe, TextSpan};
use super::sentencepiece::normalizer::{self, SegmentPosition};
use super::unigram::Unigram;
use anyhow::{Result, anyhow};
use serde::Deserialize;
use std::cell::Cell;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, Model as _, ModelWrapper, NormalizedString, NormalizerWrapper,
    OffsetReferential, OffsetType, PostProcessor as _, PostProcessorWrapper, PreTokenizer,
    PreTokenizerWrapper, Token, TokenizerBuilder, TokenizerImpl,
};

/// Maximum number of words whose tokens each thread remembers. Words of at most 255 bytes are remembered, and
/// never forgotten, so whoever sends long ones takes as much of each thread as they can.
const CACHED_WORDS: usize = 1024;

/// Maximum bytes of a remembered word: its text, and 32 bytes for each of its characters.
const CACHED_WORD_BYTES: usize = 256 * 33 + 128;

/// Memory that the library takes at most per byte of text: it keeps the origin of each byte in several
/// copies, and each word and token on its own. Spaces that are written as three bytes, and decomposed
/// characters, take most.
pub const ENCODING_BYTES: usize = 512;

type Library = TokenizerImpl<Model, Normalizer, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Encodes text to token ids.
pub struct Pipeline(Library);

/// Model that encodes the text between added tokens.
pub enum Algorithm {
    /// One of the library's models.
    Library(Box<ModelWrapper>),
    /// One of this module's models.
    Pieces(PieceEncoder),
}

/// Encodes a text to the ids of its pieces.
pub struct PieceEncoder {
    pub algorithm: PieceAlgorithm,
    pub unknown: UnknownText,
}

/// Algorithm that splits a text into pieces.
pub enum PieceAlgorithm {
    Bpe(ScoredBpe),
    Unigram(Unigram),
}

/// Encoding of text that is not a piece.
pub enum UnknownText {
    /// One token per byte.
    Bytes(Box<[u32; 256]>),
    /// One unknown token per contiguous run.
    Token(u32),
}

/// Normalization of text before it is encoded.
#[derive(Deserialize)]
#[serde(from = "NormalizerWrapper")]
pub enum Normalizer {
    Library(NormalizerWrapper),
    SentencePiece(normalizer::Normalizer),
    /// One of the library, and then that of a model.
    Prepared(Box<NormalizerWrapper>, normalizer::Normalizer),
}

/// Components of a pipeline.
pub struct PipelineParts {
    pub algorithm: Algorithm,
    pub normalizer: Option<Normalizer>,
    pub pre_tokenizer: Option<PreTokenizerWrapper>,
    pub decoder: Option<DecoderWrapper>,
}

/// The ids of one text or of two.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TypedIds {
    pub ids: Vec<u32>,
    /// Index of the first token of the second type: where the second text begins, if the model tells them
    /// apart by types of tokens.
    pub second: Option<usize>,
}

/// Maximum numbers of tokens of one text or two, beyond which texts are truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimits {
    /// Maximum of the whole, with the tokens that are added.
    pub whole: usize,
    /// Maximum of the second text.
    pub second: usize,
}

impl TokenLimits {
    /// Returns limits of the whole only.
    pub fn whole(most: usize) -> TokenLimits {
        TokenLimits { whole: most, second: usize::MAX }
    }
}

impl Pipeline {
    /// Parses a `tokenizer.json`. Its truncation and padding are ignored: long prompts are rejected, never
    /// truncated.
    pub fn from_json(content: &[u8]) -> Result<Pipeline> {
        library_guard::check(content)?;
        let mut library: Library = catch_panics(|| Ok(serde_json::from_slice(content)?))?;
        library.with_truncation(None).map_err(|e| anyhow!(e))?;
        library.with_padding(None);
        Ok(Pipeline(library))
    }

    /// Creates a pipeline from its components and the added tokens with their ids.
    pub fn new(stages: PipelineParts, added: &[(u32, AddedToken)]) -> Result<Pipeline> {
        let names = added.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
        let builder = TokenizerBuilder::new()
            .with_model(Model { algorithm: stages.algorithm, names })
            .with_normalizer(stages.normalizer)
            .with_pre_tokenizer(stages.pre_tokenizer)
            .with_decoder(stages.decoder);
        catch_panics(|| {
            let mut library = builder.build()?;
            library.add_tokens(added.iter().map(|(_, token)| token.clone()))?;
            Ok(Pipeline(library))
        })
    }

    /// Encodes a text, with the tokens that the pipeline itself adds around it if `add_special` is set. Stops
    /// at more than `most` tokens of the text, and returns how many there are at least.
    pub fn encode(&self, text: &str, add_special: bool, most: usize) -> Result<Result<Vec<u32>, usize>> {
        catch_panics(|| {
            let ids = match self.encode_part(text, most)? {
                Ok(ids) => ids,
                Err(count) => return Ok(Err(count)),
            };
            Ok(Ok(self.0.post_process(bare_encoding(&ids, 0), None, add_special)?.get_ids().to_vec()))
        })
    }

    /// Encodes a text, or two that belong together, with the tokens that the pipeline itself adds if
    /// `add_special` is set. The second text, and then the longer one, lose tokens at their ends until the
    /// limits hold.
    pub fn encode_texts(
        &self,
        first: &str,
        second: Option<&str>,
        add_special: bool,
        most: TokenLimits,
    ) -> Result<TypedIds> {
        catch_panics(|| {
            let part = |text| -> tokenizers::Result<Vec<u32>> {
                let encoded = self.encode_part(text, usize::MAX)?;
                Ok(encoded.map_err(|count| format!("it has more than {count} tokens"))?)
            };
            let (first, second) = (part(first)?, second.map(part).transpose()?);
            let added = match self.0.get_post_processor() {
                Some(adding) if add_special => adding.added_tokens(second.is_some()),
                _ => 0,
            };
            let lengths = [first.len(), second.as_ref().map_or(0, Vec::len).min(most.second)];
            let kept = kept_lengths(lengths, most.whole.saturating_sub(added));
            // The library keeps all that it truncates, so it gets only what is left.
            let first = bare_encoding(&first[..kept[0]], 0);
            let second = second.map(|ids| bare_encoding(&ids[..kept[1]], 1));
            let encoding = self.0.post_process(first, second, add_special)?;
            let second = encoding.get_type_ids().iter().position(|kind| *kind == 1);
            Ok(TypedIds { ids: encoding.get_ids().to_vec(), second })
        })
    }

    /// Encodes a text without added tokens. Stops at more than `most` tokens, and returns how many there are
    /// at least.
    fn encode_part(&self, text: &str, most: usize) -> tokenizers::Result<Result<Vec<u32>, usize>> {
        let mut parts = self.0.get_added_vocabulary().extract_and_normalize(self.0.get_normalizer(), text);
        if let Some(pre_tokenizer) = self.0.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut parts)?;
        }
        let count = Cell::new(0);
        let encoded = parts.tokenize(|part| {
            let tokens = self.0.get_model().tokenize(part.get())?;
            count.set(count.get() + tokens.len());
            match count.get() > most {
                true => Err("too many tokens".into()),
                // The text of a token is not used.
                false => Ok(tokens.into_iter().map(|token| bare_token(token.id)).collect()),
            }
        });
        if count.get() > most {
            return Ok(Err(count.get()));
        }
        encoded?;
        let tokens = parts.get_splits(OffsetReferential::Original, OffsetType::None).into_iter();
        Ok(Ok(tokens.flat_map(|(_, _, tokens)| tokens.iter().flatten()).map(|token| token.id).collect()))
    }

    /// Returns whether the pipeline itself adds tokens around texts.
    pub fn adds_tokens(&self) -> bool {
        self.0.get_post_processor().is_some_and(|adding| adding.added_tokens(false) > 0)
    }

    /// Returns the maximum bytes of the words that a thread remembers.
    pub fn cache_bytes(&self) -> usize {
        match self.algorithm() {
            Algorithm::Library(model) => match &**model {
                ModelWrapper::BPE(_) | ModelWrapper::Unigram(_) => CACHED_WORDS * CACHED_WORD_BYTES,
                ModelWrapper::WordPiece(_) | ModelWrapper::WordLevel(_) => 0,
            },
            Algorithm::Pieces(_) => 0,
        }
    }

    /// Returns the memory that encoding a text takes at most, in bytes per byte of it.
    pub fn memory_per_byte(&self) -> usize {
        ENCODING_BYTES * self.0.get_normalizer().map_or(1, Normalizer::growth)
    }

    /// Returns the algorithm that encodes the text between added tokens.
    pub fn algorithm(&self) -> &Algorithm {
        &self.0.get_model().algorithm
    }

    /// Decodes ids with the library's decoder; special tokens decode to their names.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        catch_panics(|| self.0.decode(ids, false))
    }

    /// Returns the library's pipeline.
    pub fn library(&self) -> &Library {
        &self.0
    }
}

/// Returns how many tokens of two texts are kept: the longer one loses some until both have at most `most`.
fn kept_lengths([first, second]: [usize; 2], most: usize) -> [usize; 2] {
    let [half, rest] = [most / 2, most - most / 2];
    match first <= second {
        true if first <= half => [first, second.min(most - first)],
        false if second <= half => [first.min(most - second), second],
        _ if first.saturating_add(second) <= most => [first, second],
        true => [half, rest],
        false => [rest, half],
    }
}

/// Returns an encoding of tokens of one type, without their texts.
fn bare_encoding(ids: &[u32], kind: u32) -> Encoding {
    Encoding::from_tokens(ids.iter().map(|id| bare_token(*id)).collect(), kind)
}

/// Returns a token without its text and offsets.
fn bare_token(id: u32) -> Token {
    Token::new(id, String::new(), (0, 0))
}

/// Runs `work`, and returns panics of the library as errors.
fn catch_panics<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|e| anyhow!(e)),
        Err(_) => Err(anyhow!("its components are inconsistent")),
    }
}

impl PieceEncoder {
    /// Encodes a text.
    fn encode(&self, text: &str) -> Vec<u32> {
        let spans = match &self.algorithm {
            PieceAlgorithm::Bpe(bpe) => bpe.encode(text),
            PieceAlgorithm::Unigram(unigram) => unigram.encode(text),
        };
        let mut ids = Vec::with_capacity(spans.len());
        let mut follows_unknown = false;
        for span in spans {
            let is_unknown = matches!(span, TextSpan::Unknown(_));
            match (span, &self.unknown) {
                (TextSpan::Piece(id), _) => ids.push(id),
                (TextSpan::Unknown(range), UnknownText::Bytes(bytes)) => {
                    ids.extend(text.as_bytes()[range].iter().map(|byte| bytes[usize::from(*byte)]));
                }
                (TextSpan::Unknown(_), UnknownText::Token(_)) if follows_unknown => {}
                (TextSpan::Unknown(_), UnknownText::Token(id)) => ids.push(*id),
            }
            follows_unknown = is_unknown;
        }
        ids
    }
}

/// Adapter of an [`Algorithm`] to the library's model interface.
#[derive(Deserialize)]
#[serde(from = "ModelWrapper")]
pub struct Model {
    algorithm: Algorithm,
    /// Ids of added tokens, which the algorithm may not know, or know by other ids.
    names: HashMap<String, u32>,
}

impl<M: Into<ModelWrapper>> From<M> for Algorithm {
    fn from(model: M) -> Algorithm {
        let mut model = model.into();
        model.resize_cache(CACHED_WORDS);
        Algorithm::Library(Box::new(model))
    }
}

impl From<ModelWrapper> for Model {
    fn from(model: ModelWrapper) -> Model {
        Model { algorithm: model.into(), names: HashMap::new() }
    }
}

impl Normalizer {
    /// Returns how many times as much memory as others it takes for a text that grows most. Compatibility
    /// normalization writes a few characters as whole words, such as U+FDFA.
    fn growth(&self) -> usize {
        match self {
            Normalizer::Library(normalizer) => library_growth(normalizer),
            Normalizer::SentencePiece(normalizer) => 1 + 3 * usize::from(normalizer.charsmap.is_some()),
            Normalizer::Prepared(preparation, normalizer) => {
                library_growth(preparation) * (1 + 3 * usize::from(normalizer.charsmap.is_some()))
            }
        }
    }

    /// Returns the normalizer with a preparation before it, which only a model's own can have.
    pub fn after(self, preparation: NormalizerWrapper) -> Normalizer {
        match self {
            Normalizer::SentencePiece(own) => Normalizer::Prepared(Box::new(preparation), own),
            other => other,
        }
    }
}

fn library_growth(normalizer: &NormalizerWrapper) -> usize {
    match normalizer {
        NormalizerWrapper::NFKC(_) | NormalizerWrapper::NFKD(_) | NormalizerWrapper::Precompiled(_) => 4,
        NormalizerWrapper::NFD(_) => 2,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().map(library_growth).max().unwrap_or(1),
        _ => 1,
    }
}

impl From<NormalizerWrapper> for Normalizer {
    fn from(normalizer: NormalizerWrapper) -> Normalizer {
        Normalizer::Library(normalizer)
    }
}

impl tokenizers::Normalizer for Normalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        let position = match text.offsets_original().0 {
            0 => SegmentPosition::Start,
            _ => SegmentPosition::AfterSpecial,
        };
        match self {
            Normalizer::Library(normalizer) => normalizer.normalize(text),
            Normalizer::Prepared(preparation, normalizer) => {
                preparation.normalize(text)?;
                *text = NormalizedString::from(normalizer.normalize(text.get(), position));
                Ok(())
            }
            Normalizer::SentencePiece(normalizer) => {
                // Token offsets are not used, so the alignment with the original text is not kept.
                *text = NormalizedString::from(normalizer.normalize(text.get(), position));
                Ok(())
            }
        }
    }
}

impl tokenizers::Model for Model {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        match &self.algorithm {
            Algorithm::Library(model) => model.tokenize(text),
            Algorithm::Pieces(cutter) => Ok(cutter.encode(text).into_iter().map(bare_token).collect()),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        let known = match &self.algorithm {
            Algorithm::Library(model) => model.token_to_id(token),
            Algorithm::Pieces(_) => None,
        };
        self.names.get(token).copied().or(known)
    }

    /// Returns `None` for this module's models: their pieces are decoded as bytes, never by the library.
    fn id_to_token(&self, id: u32) -> Option<String> {
        match &self.algorithm {
            Algorithm::Library(model) => model.id_to_token(id),
            Algorithm::Pieces(_) => None,
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match &self.algorithm {
            Algorithm::Library(model) => model.get_vocab(),
            Algorithm::Pieces(_) => HashMap::new(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match &self.algorithm {
            Algorithm::Library(model) => model.get_vocab_size(),
            Algorithm::Pieces(_) => 0,
        }
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("saving a tokenizer is not supported".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        BpeTrainer::default().into()
    }
}

#[cfg(test)]
mod tests {
    use super::kept_lengths;

    #[test]
    fn the_longer_text_loses_tokens_until_both_fit() {
        for (lengths, most, kept) in [
            ([2, 3], 5, [2, 3]),
            ([2, 9], 7, [2, 5]),
            ([9, 2], 7, [5, 2]),
            ([9, 8], 7, [4, 3]),
            ([8, 9], 7, [3, 4]),
            ([9, 0], 7, [7, 0]),
            ([9, 9], 0, [0, 0]),
        ] {
            assert_eq!(kept_lengths(lengths, most), kept, "{lengths:?} {most}");
        }
    }
}
