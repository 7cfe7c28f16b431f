//! WordPiece tokenizers, as used by BERT: words are split into the longest possible tokens, and tokens that
//! continue a word are marked. Folders have a `vocab.txt` with one token per line.
//!
//! Invariant: a word that cannot be split into tokens becomes one unknown token.

use super::added::{AddedTokenSpec, resolve};
use super::class::TokenizerClass;
use super::parts::{TokenizerParts, find_token_id};
use super::pipeline::{Normalizer, PipelineParts};
use super::settings::TokenizerSettings;
use super::{DecodeMethod, SurroundingTokens, Tokenizer, VOCAB_MAX, json};
use crate::formats::Folder;
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::collections::HashMap;
use tokenizers::decoders::wordpiece::WordPiece as Decoder;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper};

/// Name of the vocabulary file.
pub const FILE: &str = "vocab.txt";

/// Prefix of tokens that continue a word.
pub const CONTINUED: &str = "##";

/// Maximum number of characters of a word; longer ones become unknown tokens.
const WORD_CHARACTERS_MAX: usize = 100;

/// Normalization of characters before words are split.
#[derive(Clone, Copy, Debug)]
pub struct WordPieceNormalization {
    pub lowercase: bool,
    /// Default: the value of `lowercase`.
    pub strip_accents: Option<bool>,
    pub separate_chinese: bool,
}

/// Reads the tokenizer of a folder with a `vocab.txt`, whose content is given.
pub fn read(folder: &Folder, content: &[u8], mut settings: TokenizerSettings) -> Result<Tokenizer> {
    let name = || folder.file(FILE).display().to_string();
    let class = settings.class_or(TokenizerClass::Bert);
    if class != TokenizerClass::Bert {
        bail!("{}: {class} cannot be built from this file: it needs a {}", name(), json::FILE);
    }
    let text = std::str::from_utf8(content).with_context(name)?;
    // Of equal lines the last one determines the id.
    let vocabulary: HashMap<String, u32> = text.lines().map(str::to_owned).zip(0..).collect();
    tokenizer_parts(&settings, vocabulary).and_then(TokenizerParts::build).with_context(name)
}

fn tokenizer_parts(settings: &TokenizerSettings, vocabulary: HashMap<String, u32>) -> Result<TokenizerParts> {
    let find = |token: &str| vocabulary.get(token).copied();
    let len = vocabulary.values().max().map_or(0, |largest| largest.saturating_add(1));
    ensure!(len <= VOCAB_MAX, "it has {len} lines: ids must be below {VOCAB_MAX}");
    let unsplit = settings.names("never_split")?.into_iter().map(|name| {
        AddedTokenSpec::if_in_vocabulary(AddedToken::from(name, false).normalized(false).single_word(true))
    });
    let added = resolve(settings.added()?.into_iter().chain(unsplit).collect(), len, find)?;
    let id = |role| settings.token_id(role, FILE, |token| find_token_id(&added, find, token));
    let unknown = id("unk_token")?.context("it has no token '[UNK]'")?;
    let unknown = vocabulary.iter().find(|(_, id)| **id == unknown).map(|(token, _)| token.clone());
    let around = SurroundingTokens::new(id("cls_token")?, id("sep_token")?);
    let (bos, eos) = (id("bos_token")?, id("eos_token")?);
    let cleaning = WordPieceNormalization {
        lowercase: settings.flag("do_lower_case")?.unwrap_or(true),
        strip_accents: settings.flag("strip_accents")?,
        separate_chinese: settings.flag("tokenize_chinese_chars")?.unwrap_or(true),
    };
    ensure!(settings.flag("do_basic_tokenize")? != Some(false), "do_basic_tokenize = false is not supported");
    let stages =
        pipeline_parts(vocabulary, &unknown.context("its unknown token is an added token")?, cleaning)?;
    Ok(TokenizerParts {
        stages,
        decode_method: DecodeMethod::Library,
        pieces: (0..len).map(|id| (id, Vec::new())).collect(),
        added,
        bos,
        eos,
        surrounding: around,
    })
}

/// Builds the pipeline components of a vocabulary. `unknown` is the name of the unknown token.
pub fn pipeline_parts(
    vocabulary: HashMap<String, u32>,
    unknown: &str,
    cleaning: WordPieceNormalization,
) -> Result<PipelineParts> {
    ensure!(vocabulary.contains_key(unknown), "its unknown token has no name");
    let vocabulary: Vocab = vocabulary.into_iter().collect();
    let model = WordPiece::builder()
        .vocab(vocabulary)
        .unk_token(unknown.to_owned())
        .continuing_subword_prefix(CONTINUED.to_owned())
        .max_input_chars_per_word(WORD_CHARACTERS_MAX)
        .build();
    let WordPieceNormalization { lowercase, strip_accents, separate_chinese } = cleaning;
    let normalizer = BertNormalizer::new(true, separate_chinese, strip_accents, lowercase);
    Ok(PipelineParts {
        algorithm: model.map_err(|e| anyhow!(e))?.into(),
        normalizer: Some(Normalizer::Library(NormalizerWrapper::BertNormalizer(normalizer))),
        pre_tokenizer: Some(PreTokenizerWrapper::BertPreTokenizer(BertPreTokenizer)),
        decoder: Some(DecoderWrapper::WordPiece(Decoder::new(CONTINUED.to_owned(), true))),
    })
}
