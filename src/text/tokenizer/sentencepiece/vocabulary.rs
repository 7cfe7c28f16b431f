//! Vocabularies of scored pieces, from sentencepiece or GGUF files, and the pipeline components built from
//! them.
//!
//! Invariant: every id is below the limit, every score is finite, and no two text pieces are equal.

use super::charsmap::Charsmap;
use super::normalizer::{Normalizer, SPACE, SpaceHandling, SpacePrefix, SpaceSpelling};
use crate::text::tokenizer::pipeline::{
    self, Algorithm, PieceAlgorithm, PieceEncoder, PipelineParts, UnknownText,
};
use crate::text::tokenizer::prefix_set::PrefixSet;
use crate::text::tokenizer::scored_bpe::{Atoms, PieceFormation, ScoredBpe, ScoredPiece};
use crate::text::tokenizer::spelling::byte_of_name;
use crate::text::tokenizer::unigram::Unigram;
use crate::text::tokenizer::{LeadingSpaces, VOCAB_MAX};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, HashMap};
use tokenizers::AddedToken;

/// Exclusive upper limit of a piece's length in bytes, as in the sentencepiece library.
const PIECE_MAX: usize = 8000;

/// A piece of a vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct VocabularyPiece {
    pub id: u32,
    pub text: String,
    pub score: f32,
    pub kind: PieceKind,
}

/// Type of a piece, as numbered by sentencepiece and GGUF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    Normal,
    /// The token for text that no piece covers.
    Unknown,
    /// Control token; text never becomes it.
    Control,
    /// Used wherever it occurs in the text.
    UserDefined,
    Unused,
    Byte,
    /// A token of the model that text never becomes, such as one of the other language.
    Foreign,
}

/// Algorithm that splits texts into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitAlgorithm {
    Bpe,
    Unigram,
}

/// A vocabulary of pieces, and the normalization of texts.
#[derive(Clone, Debug)]
pub struct PieceVocabulary {
    pub pieces: Vec<VocabularyPiece>,
    pub algorithm: SplitAlgorithm,
    pub charsmap: Vec<u8>,
    pub prefix: SpacePrefix,
    pub spaces: SpaceHandling,
    pub spelling: SpaceSpelling,
}

impl PieceKind {
    /// Returns the type with this number.
    pub fn from_number(number: i64) -> Result<PieceKind> {
        Ok(match number {
            1 => PieceKind::Normal,
            2 => PieceKind::Unknown,
            3 => PieceKind::Control,
            4 => PieceKind::UserDefined,
            5 => PieceKind::Unused,
            6 => PieceKind::Byte,
            other => bail!("its type {other} is unknown"),
        })
    }

    /// Returns whether text can become the piece.
    fn is_text(self) -> bool {
        matches!(self, PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused)
    }
}

impl PieceVocabulary {
    /// Checks all pieces. An error names the first invalid one.
    pub fn check(&self) -> Result<()> {
        let mut texts = HashMap::new();
        for piece in &self.pieces {
            let check = || {
                ensure!(piece.id < VOCAB_MAX, "its id is {}: ids must be below {VOCAB_MAX}", piece.id);
                ensure!(!piece.text.is_empty(), "it is empty");
                ensure!(piece.text.len() < PIECE_MAX, "it has {} bytes", piece.text.len());
                ensure!(piece.score.is_finite(), "its score is {}", piece.score);
                Ok(())
            };
            check().with_context(|| format!("piece {}", piece.id))?;
            if piece.kind.is_text()
                && let Some(other) = texts.insert(&piece.text, piece.id)
            {
                bail!("pieces {other} and {} are both '{}'", piece.id, piece.text);
            }
        }
        Ok(())
    }

    /// Returns the bytes of each id; those of control tokens are their names.
    pub fn token_bytes(&self) -> BTreeMap<u32, Vec<u8>> {
        let spell = |piece: &VocabularyPiece| match (piece.kind, byte_of_name(&piece.text)) {
            (PieceKind::Byte, Some(byte)) => vec![byte],
            (PieceKind::Control | PieceKind::Unknown, _) => piece.text.clone().into_bytes(),
            _ => piece.text.replace(SPACE, " ").into_bytes(),
        };
        self.pieces.iter().map(|piece| (piece.id, spell(piece))).collect()
    }

    /// Returns the control tokens and the unknown token, which are found by name in a text.
    pub fn special_tokens(&self) -> impl Iterator<Item = (u32, AddedToken)> {
        let special =
            |piece: &&VocabularyPiece| matches!(piece.kind, PieceKind::Control | PieceKind::Unknown);
        self.pieces.iter().filter(special).map(|piece| (piece.id, AddedToken::from(&piece.text, true)))
    }

    /// Returns how leading spaces of a decoded text are handled, according to how normalization adds or
    /// removes them.
    pub fn leading_spaces(&self) -> LeadingSpaces {
        match (self.spaces, self.prefix) {
            (SpaceHandling::Merge, _) => LeadingSpaces::DropAll,
            (SpaceHandling::Keep, SpacePrefix::Never) => LeadingSpaces::Keep,
            (SpaceHandling::Keep, _) => LeadingSpaces::DropFirst,
        }
    }

    /// Builds the pipeline components that encode texts to these pieces.
    pub fn pipeline_parts(&self) -> Result<PipelineParts> {
        let pieces: Vec<ScoredPiece> = self.pieces.iter().filter_map(scored_piece).collect();
        let way = match self.algorithm {
            SplitAlgorithm::Bpe => PieceAlgorithm::Bpe(ScoredBpe::new(&pieces, Atoms::Characters)),
            SplitAlgorithm::Unigram => PieceAlgorithm::Unigram(Unigram::new(&pieces)),
        };
        let whole = self.pieces.iter().filter(|piece| piece.kind == PieceKind::UserDefined);
        let normalizer = Normalizer {
            charsmap: Charsmap::read(&self.charsmap)?,
            user_defined: PrefixSet::new(whole.map(|piece| (piece.text.as_bytes(), piece.id))),
            prefix: self.prefix,
            spaces: self.spaces,
            spelling: self.spelling,
        };
        Ok(PipelineParts {
            algorithm: Algorithm::Pieces(PieceEncoder { algorithm: way, unknown: self.unknown_text()? }),
            normalizer: Some(pipeline::Normalizer::SentencePiece(normalizer)),
            pre_tokenizer: None,
            decoder: None,
        })
    }

    /// Returns how text without a piece is encoded: as bytes if there are pieces for all bytes, otherwise as
    /// the unknown token.
    fn unknown_text(&self) -> Result<UnknownText> {
        let mut bytes = Box::new([None; 256]);
        for piece in self.pieces.iter().filter(|piece| piece.kind == PieceKind::Byte) {
            let byte = byte_of_name(&piece.text);
            let byte = byte.with_context(|| format!("piece {}: '{}' is not a byte", piece.id, piece.text))?;
            bytes[usize::from(byte)] = Some(piece.id);
        }
        if let Some(missing) = bytes.iter().position(Option::is_none) {
            ensure!(
                bytes.iter().all(Option::is_none),
                "it has pieces for bytes, but none for {missing:#04x}"
            );
            let unknown = self.pieces.iter().find(|piece| piece.kind == PieceKind::Unknown);
            return Ok(UnknownText::Token(unknown.context("it has no unknown piece")?.id));
        }
        Ok(UnknownText::Bytes(Box::new(bytes.map(|id| id.expect("no byte is missing; this is a bug")))))
    }
}

/// Converts a piece for the encoders; `None` if text cannot become it.
fn scored_piece(piece: &VocabularyPiece) -> Option<ScoredPiece<'_>> {
    let kind = match piece.kind {
        PieceKind::Normal => PieceFormation::Merged,
        PieceKind::UserDefined => PieceFormation::UserDefined,
        PieceKind::Unused => PieceFormation::Unused,
        PieceKind::Unknown | PieceKind::Control | PieceKind::Byte | PieceKind::Foreign => return None,
    };
    Some(ScoredPiece { id: piece.id, bytes: piece.text.as_bytes(), score: piece.score, kind })
}
