//! Vocabularies of scored pieces, from sentencepiece or GGUF files, and the pipeline components built from
//! them.
//!
//! Invariant: every id is below the limit, every score is finite, and no two text pieces are equal.

use super::charsmap::Charsmap;
use super::normalizer::{Normalizer, Prefix, SPACE, SpaceSpelling, Spaces};
use crate::text::tokenizer::pipeline::{self, Algorithm, Cutter, Stages, Unknown, Way};
use crate::text::tokenizer::prefixes::Prefixes;
use crate::text::tokenizer::scored_bpe::{Atoms, Kind, ScoredBpe, ScoredPiece};
use crate::text::tokenizer::spelling::byte_of_name;
use crate::text::tokenizer::unigram::Unigram;
use crate::text::tokenizer::{Opening, VOCAB_MAX};
use anyhow::{Context, Result, bail, ensure};
use std::collections::{BTreeMap, HashMap};
use tokenizers::AddedToken;

/// Exclusive upper limit of a piece's length in bytes, as in the sentencepiece library.
const PIECE_MAX: usize = 8000;

/// A piece of a vocabulary.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
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
}

/// Algorithm that splits texts into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cutting {
    Bpe,
    Unigram,
}

/// A vocabulary of pieces, and the normalization of texts.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    pub pieces: Vec<Piece>,
    pub cutting: Cutting,
    pub charsmap: Vec<u8>,
    pub prefix: Prefix,
    pub spaces: Spaces,
    pub spelling: SpaceSpelling,
}

impl PieceKind {
    /// Returns the type with this number.
    pub fn of(number: i64) -> Result<PieceKind> {
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

impl Vocabulary {
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
    pub fn spelled(&self) -> BTreeMap<u32, Vec<u8>> {
        let spell = |piece: &Piece| match (piece.kind, byte_of_name(&piece.text)) {
            (PieceKind::Byte, Some(byte)) => vec![byte],
            (PieceKind::Control | PieceKind::Unknown, _) => piece.text.clone().into_bytes(),
            _ => piece.text.replace(SPACE, " ").into_bytes(),
        };
        self.pieces.iter().map(|piece| (piece.id, spell(piece))).collect()
    }

    /// Returns the control tokens and the unknown token, which are found by name in a text.
    pub fn specials(&self) -> impl Iterator<Item = (u32, AddedToken)> {
        let special = |piece: &&Piece| matches!(piece.kind, PieceKind::Control | PieceKind::Unknown);
        self.pieces.iter().filter(special).map(|piece| (piece.id, AddedToken::from(&piece.text, true)))
    }

    /// Returns how leading spaces of a decoded text are handled, according to how normalization adds or
    /// removes them.
    pub fn opening(&self) -> Opening {
        match (self.spaces, self.prefix) {
            (Spaces::Merged, _) => Opening::AllDropped,
            (Spaces::Kept, Prefix::Never) => Opening::Kept,
            (Spaces::Kept, _) => Opening::FirstDropped,
        }
    }

    /// Builds the pipeline components that encode texts to these pieces.
    pub fn stages(&self) -> Result<Stages> {
        let pieces: Vec<ScoredPiece> = self.pieces.iter().filter_map(scored).collect();
        let way = match self.cutting {
            Cutting::Bpe => Way::Bpe(ScoredBpe::new(&pieces, Atoms::Characters)),
            Cutting::Unigram => Way::Unigram(Unigram::new(&pieces)),
        };
        let whole = self.pieces.iter().filter(|piece| piece.kind == PieceKind::UserDefined);
        let normalizer = Normalizer {
            charsmap: Charsmap::read(&self.charsmap)?,
            whole: Prefixes::new(whole.map(|piece| (piece.text.as_bytes(), piece.id))),
            prefix: self.prefix,
            spaces: self.spaces,
            spelling: self.spelling,
        };
        Ok(Stages {
            algorithm: Algorithm::Pieces(Cutter { way, unknown: self.unknown()? }),
            normalizer: Some(pipeline::Normalizer::SentencePiece(normalizer)),
            pre_tokenizer: None,
            decoder: None,
        })
    }

    /// Returns how text without a piece is encoded: as bytes if there are pieces for all bytes, otherwise as
    /// the unknown token.
    fn unknown(&self) -> Result<Unknown> {
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
            return Ok(Unknown::Token(unknown.context("it has no unknown piece")?.id));
        }
        Ok(Unknown::Bytes(Box::new(bytes.map(|id| id.expect("no byte is missing; this is a bug")))))
    }
}

/// Converts a piece for the encoders; `None` if text cannot become it.
fn scored(piece: &Piece) -> Option<ScoredPiece<'_>> {
    let kind = match piece.kind {
        PieceKind::Normal => Kind::Merged,
        PieceKind::UserDefined => Kind::Whole,
        PieceKind::Unused => Kind::Unused,
        PieceKind::Unknown | PieceKind::Control | PieceKind::Byte => return None,
    };
    Some(ScoredPiece { id: piece.id, bytes: piece.text.as_bytes(), score: piece.score, kind })
}
