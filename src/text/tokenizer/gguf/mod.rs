//! Tokenizers of GGUF files: the `tokenizer.json` that a file has, or else one of the kinds that
//! `tokenizer.ggml.model` names: "llama", "gpt2", "bert" and "t5".
//!
//! Invariant: texts are encoded to the same ids as in llama.cpp, except where it departs from the tokenizer
//! that the model was trained with.

mod pre_tokenizer;

mod keys;

mod from_json;

mod adjacent_spaces;

use super::added::{AddedTokenSpec, resolve};
use super::byte_level::ByteLevelVocabulary;
use super::json::FILE;
use super::parts::TokenizerParts;
use super::sentencepiece::normalizer::{SpaceHandling, SpacePrefix, SpaceSpelling};
use super::sentencepiece::vocabulary::{PieceKind, PieceVocabulary, SplitAlgorithm, VocabularyPiece};
use super::spelling::byte_of_name;
use super::word_piece::{self, CONTINUED, WordPieceNormalization};
use super::{DecodeMethod, LeadingSpaces, SurroundingTokens, Tokenizer, splits};
use crate::formats::Folder;
use crate::formats::chat::TOKENIZER_CONFIG;
use anyhow::{Context, Result, bail, ensure};
use keys::PREFIX;
use pre_tokenizer::PreTokenizerSpec;
use serde_json::json;
use std::collections::{BTreeSet, HashMap};
use tokenizers::AddedToken;
use tracing::warn;

/// Number of the token type "byte".
const BYTE: i32 = 6;

/// The vocabulary of a GGUF file. Fields are named as the keys after `tokenizer.ggml.`, `architecture` and
/// `name` as those after `general.`. Missing keys are `None` or empty.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary {
    pub architecture: Option<String>,
    pub name: Option<String>,
    pub model: String,
    pub pre: Option<String>,
    pub tokens: Vec<String>,
    pub scores: Vec<f32>,
    pub token_type: Vec<i32>,
    pub merges: Vec<String>,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<u32>,
    pub unknown_token_id: Option<u32>,
    /// The key is spelled `seperator_token_id`.
    pub separator_token_id: Option<u32>,
    pub cls_token_id: Option<u32>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    pub add_space_prefix: Option<bool>,
    pub remove_extra_whitespaces: Option<bool>,
    pub precompiled_charsmap: Vec<u8>,
    /// The keys are `normalizer.lowercase` and `normalizer.strip_accents`.
    pub lowercase: Option<bool>,
    pub strip_accents: Option<bool>,
    /// The whole tokenizer.json of the model that the file was made from. The key is
    /// `tokenizer.huggingface.json`.
    pub huggingface_json: Option<String>,
}

/// Builds the tokenizer of a file.
pub fn read(file: &GgufVocabulary) -> Result<Tokenizer> {
    file.check()?;
    if let Some(json) = &file.huggingface_json {
        return Tokenizer::from_folder(&file.as_folder(json));
    }
    let draft = match file.model.as_str() {
        "llama" => scored_pieces(file, SplitAlgorithm::Bpe),
        "t5" => scored_pieces(file, SplitAlgorithm::Unigram),
        "gpt2" => byte_level(file),
        "bert" => word_pieces(file),
        "none" | "no_vocab" => bail!("it has no tokenizer"),
        other => bail!("its tokenizer '{other}' is not supported (supported: llama, gpt2, bert, t5)"),
    };
    draft?.build()
}

impl GgufVocabulary {
    /// Returns the files of a model folder that have the same tokenizer.
    fn as_folder(&self, json: &str) -> Folder {
        let token = |id: Option<u32>| id.and_then(|id| self.tokens.get(id as usize));
        let settings = json!({
            "bos_token": token(self.bos_token_id),
            "eos_token": token(self.eos_token_id),
            "add_bos_token": self.add_bos_token,
            "add_eos_token": self.add_eos_token,
        });
        let files = [(FILE, json.to_owned()), (TOKENIZER_CONFIG, settings.to_string())];
        Folder::memory("gguf", files.map(|(name, text)| (name.to_owned(), text.into_bytes())))
    }

    /// Checks that lengths and ids are consistent and that tokens are unique.
    fn check(&self) -> Result<()> {
        let count = self.tokens.len();
        ensure!(count > 0, "its vocabulary is empty");
        for (what, len) in [("scores", self.scores.len()), ("types", self.token_type.len())] {
            ensure!(len == 0 || len >= count, "it has {count} tokens, but {what} for {len} of them");
        }
        let named = [
            ("bos", self.bos_token_id),
            ("eos", self.eos_token_id),
            ("unknown", self.unknown_token_id),
            ("seperator", self.separator_token_id),
            ("cls", self.cls_token_id),
        ];
        for (what, id) in named {
            let id = id.unwrap_or(0);
            ensure!(
                (id as usize) < count,
                "key '{PREFIX}{what}_token_id': {id} is not one of its {count} tokens"
            );
        }
        let mut ids = HashMap::new();
        for (id, token) in self.tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(other) = ids.insert(token, id) {
                bail!("its tokens {other} and {id} are both '{token}'");
            }
        }
        Ok(())
    }

    /// Returns the type of each token.
    fn piece_kinds(&self) -> Result<Vec<PieceKind>> {
        let hides_bytes = self.has_undeclared_bytes();
        let kind = |(id, _)| match self.piece_kind(id)? {
            PieceKind::Normal if hides_bytes && byte_of_name(&self.tokens[id as usize]).is_some() => {
                Ok(PieceKind::Byte)
            }
            kind => Ok(kind),
        };
        (0u32..).zip(&self.tokens).map(kind).collect()
    }

    /// Returns whether there are pieces for all bytes, but none has the type "byte": some files declare every
    /// token normal.
    fn has_undeclared_bytes(&self) -> bool {
        let bytes: BTreeSet<u8> = self.tokens.iter().filter_map(|token| byte_of_name(token)).collect();
        bytes.len() == 256 && !self.token_type.contains(&BYTE)
    }

    /// Returns the type of a token: that of the file, or else the one that follows from its name and role.
    fn piece_kind(&self, id: u32) -> Result<PieceKind> {
        let token = &self.tokens[id as usize];
        let ends = [self.bos_token_id, self.eos_token_id, self.cls_token_id, self.separator_token_id];
        let usual = match byte_of_name(token) {
            _ if token.is_empty() || ends.contains(&Some(id)) => PieceKind::Control,
            _ if self.unknown_token_id == Some(id) => PieceKind::Unknown,
            Some(_) => PieceKind::Byte,
            None => PieceKind::Normal,
        };
        let declared = self.token_type.get(id as usize).copied().filter(|_| !token.is_empty());
        // Some files declare every token normal; 0 is "undefined".
        match (declared, usual) {
            (None | Some(0), _) | (Some(1), PieceKind::Control) => Ok(usual),
            (Some(number), _) => {
                PieceKind::from_number(i64::from(number)).with_context(|| format!("token {id}"))
            }
        }
    }

    /// Returns the id that the file gives, or else the default of its kind of vocabulary.
    fn id_or_default(&self, given: Option<u32>, usual: u32) -> Option<u32> {
        Some(given.unwrap_or(usual)).filter(|id| (*id as usize) < self.tokens.len())
    }

    /// Returns the tokens that are found in a text before it is encoded.
    fn added(&self) -> Result<Vec<(u32, AddedToken)>> {
        let mut added = Vec::new();
        for ((id, token), kind) in (0u32..).zip(&self.tokens).zip(self.piece_kinds()?) {
            let is_special = match kind {
                PieceKind::Control | PieceKind::Unknown => true,
                PieceKind::UserDefined => false,
                _ => continue,
            };
            if !token.is_empty() {
                let token = AddedToken::from(token, is_special).normalized(false);
                added.push(AddedTokenSpec::with_id(id, self.with_adjacent_spaces(token)));
            }
        }
        resolve(added, self.tokens.len() as u32, |_| None)
    }
}

/// Builds a tokenizer of scored pieces, as in sentencepiece.
fn scored_pieces(file: &GgufVocabulary, cutting: SplitAlgorithm) -> Result<TokenizerParts> {
    let is_bpe = cutting == SplitAlgorithm::Bpe;
    let has_prefix = file.add_space_prefix.unwrap_or(is_bpe);
    let vocabulary = PieceVocabulary {
        pieces: pieces(file, if is_bpe { 0 } else { 2 })?,
        algorithm: cutting,
        charsmap: file.precompiled_charsmap.clone(),
        prefix: if has_prefix { SpacePrefix::Always } else { SpacePrefix::Never },
        spaces: if file.remove_extra_whitespaces == Some(true) {
            SpaceHandling::Merge
        } else {
            SpaceHandling::Keep
        },
        spelling: SpaceSpelling::Symbol,
    };
    vocabulary.check()?;
    let bos = if is_bpe { file.id_or_default(file.bos_token_id, 1) } else { file.bos_token_id };
    let eos = file.id_or_default(file.eos_token_id, if is_bpe { 2 } else { 1 });
    let add_bos = file.add_bos_token.unwrap_or(is_bpe);
    let add_eos = file.add_eos_token.unwrap_or(!is_bpe);
    Ok(TokenizerParts {
        stages: vocabulary.pipeline_parts()?,
        decode_method: DecodeMethod::Bytes { leading_spaces: vocabulary.leading_spaces() },
        pieces: vocabulary.token_bytes(),
        added: added_pieces(file, &vocabulary),
        bos,
        eos,
        surrounding: SurroundingTokens::new(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
    })
}

/// Returns the tokens that are found in a text before it is encoded: special tokens, and user-defined ones
/// that include adjacent spaces. Other user-defined tokens are found by the normalizer.
fn added_pieces(file: &GgufVocabulary, vocabulary: &PieceVocabulary) -> Vec<(u32, AddedToken)> {
    let user_defined = vocabulary.pieces.iter().filter(|piece| piece.kind == PieceKind::UserDefined);
    let user_defined = user_defined.map(|piece| (piece.id, AddedToken::from(&piece.text, false)));
    let user_defined =
        user_defined.map(|(id, token)| (id, file.with_adjacent_spaces(token.normalized(false))));
    let specials = vocabulary.special_tokens().map(|(id, token)| (id, file.with_adjacent_spaces(token)));
    let mut added: Vec<_> =
        user_defined.filter(|(_, token)| token.lstrip || token.rstrip).chain(specials).collect();
    added.sort_unstable_by_key(|(id, _)| *id);
    added
}

/// Returns the pieces of a file. `usual_unknown` is the default id of the unknown token.
fn pieces(file: &GgufVocabulary, usual_unknown: u32) -> Result<Vec<VocabularyPiece>> {
    let mut pieces = Vec::with_capacity(file.tokens.len());
    for ((id, token), kind) in (0u32..).zip(&file.tokens).zip(file.piece_kinds()?) {
        let score = file.scores.get(id as usize).copied().unwrap_or(0.0);
        let text = if token.is_empty() { format!("[EMPTY_{id}]") } else { token.clone() };
        pieces.push(VocabularyPiece { id, text, score, kind });
    }
    let has_unknown = pieces.iter().any(|piece| piece.kind == PieceKind::Unknown);
    if let Some(unknown) = file.id_or_default(file.unknown_token_id, usual_unknown).filter(|_| !has_unknown) {
        pieces[unknown as usize].kind = PieceKind::Unknown;
    }
    Ok(pieces)
}

/// Builds a byte-level BPE tokenizer, as in GPT-2.
fn byte_level(file: &GgufVocabulary) -> Result<TokenizerParts> {
    if file.pre.as_ref().is_none_or(String::is_empty) {
        warn!(
            "the file does not name its pre-tokenizer ('tokenizer.ggml.pre'): texts are split as for \
             'default', which may not be how the model was trained"
        );
    }
    let pre = PreTokenizerSpec::from_name(file.pre.as_deref())?;
    ensure!(!file.merges.is_empty(), "it has no merges");
    let named = file.tokens.iter().cloned().zip(0..).filter(|(token, _)| !token.is_empty());
    let mut vocabulary = ByteLevelVocabulary::new(named.collect())?;
    for (line, at) in file.merges.iter().zip(0..) {
        vocabulary.push_merge(line).with_context(|| format!("merge {at}"))?;
    }
    let (bos, eos) = (file.bos_token_id, file.eos_token_id);
    let add_bos = file.add_bos_token.unwrap_or(pre.adds_bos);
    let add_eos = file.add_eos_token.unwrap_or(false);
    Ok(TokenizerParts {
        pieces: vocabulary.pieces(),
        stages: vocabulary.pipeline_parts(
            pre.normalization,
            splits::byte_level(pre.patterns),
            pre.whole_word_lookup,
        )?,
        decode_method: DecodeMethod::Bytes { leading_spaces: LeadingSpaces::Keep },
        added: file.added()?,
        bos,
        eos,
        surrounding: SurroundingTokens::new(bos.filter(|_| add_bos), eos.filter(|_| add_eos)),
    })
}

/// Builds a WordPiece tokenizer. The file marks tokens that begin a word instead of those that continue one.
fn word_pieces(file: &GgufVocabulary) -> Result<TokenizerParts> {
    let added = file.added()?;
    let is_added = |id: u32| added.binary_search_by_key(&id, |(id, _)| *id).is_ok();
    let name = |id: u32, token: &str| match token.strip_prefix('\u{2581}') {
        _ if is_added(id) => token.to_owned(),
        Some(begins) => begins.to_owned(),
        None => format!("{CONTINUED}{token}"),
    };
    let unknown = file.id_or_default(file.unknown_token_id, 100).context("it has no unknown token")?;
    let named = (0..).zip(&file.tokens).filter(|(_, token)| !token.is_empty());
    let vocabulary: HashMap<String, u32> = named.map(|(id, token)| (name(id, token), id)).collect();
    let lowercase = file.lowercase.unwrap_or(true);
    let cleaning =
        WordPieceNormalization { lowercase, strip_accents: file.strip_accents, separate_chinese: true };
    let unknown = name(unknown, &file.tokens[unknown as usize]);
    let first = file.id_or_default(file.bos_token_id.or(file.cls_token_id), 101);
    let last = file.id_or_default(file.separator_token_id, 102);
    Ok(TokenizerParts {
        pieces: (0u32..).zip(&file.tokens).map(|(id, _)| (id, Vec::new())).collect(),
        stages: word_piece::pipeline_parts(vocabulary, &unknown, cleaning)?,
        decode_method: DecodeMethod::Library,
        added,
        bos: file.bos_token_id,
        eos: file.eos_token_id,
        surrounding: SurroundingTokens::new(first, last),
    })
}

#[cfg(test)]
mod tests;
