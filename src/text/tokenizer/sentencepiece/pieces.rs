//! A vocabulary of scored pieces, whichever file it came from, and the stages it makes.
//!
//! Invariant: every id is below the limit, every score finite, and no two pieces that text can become are
//! alike.

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

/// Longer pieces are no text; sentencepiece refuses them too. In bytes.
const PIECE_MAX: usize = 8000;

/// A piece with its id.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    pub id: u32,
    pub text: String,
    pub score: f32,
    pub kind: PieceKind,
}

/// The part that a piece plays, by the numbers that sentencepiece and GGUF give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceKind {
    Normal,
    /// What stands for text that no piece is.
    Unknown,
    /// Never text.
    Control,
    /// Taken wherever the text has it.
    UserDefined,
    Unused,
    Byte,
}

/// How texts are cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cutting {
    Bpe,
    Unigram,
}

/// A vocabulary, and what is done to a text before it is cut.
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
    /// The kind of that number.
    pub fn of(number: i64) -> Result<PieceKind> {
        Ok(match number {
            1 => PieceKind::Normal,
            2 => PieceKind::Unknown,
            3 => PieceKind::Control,
            4 => PieceKind::UserDefined,
            5 => PieceKind::Unused,
            6 => PieceKind::Byte,
            other => bail!("its type {other} is not known"),
        })
    }

    fn is_text(self) -> bool {
        matches!(self, PieceKind::Normal | PieceKind::UserDefined | PieceKind::Unused)
    }
}

impl Vocabulary {
    /// An error that names the first piece that cannot be.
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

    /// What each id spells; controls spell their names.
    pub fn spelled(&self) -> BTreeMap<u32, Vec<u8>> {
        let spell = |piece: &Piece| match (piece.kind, byte_of_name(&piece.text)) {
            (PieceKind::Byte, Some(byte)) => vec![byte],
            (PieceKind::Control | PieceKind::Unknown, _) => piece.text.clone().into_bytes(),
            _ => piece.text.replace(SPACE, " ").into_bytes(),
        };
        self.pieces.iter().map(|piece| (piece.id, spell(piece))).collect()
    }

    /// Controls and the unknown piece: a text with their names means them.
    pub fn specials(&self) -> impl Iterator<Item = (u32, AddedToken)> {
        let special = |piece: &&Piece| matches!(piece.kind, PieceKind::Control | PieceKind::Unknown);
        self.pieces.iter().filter(special).map(|piece| (piece.id, AddedToken::from(&piece.text, true)))
    }

    /// What becomes of spaces that open a text, which the model put there or would not have left there.
    pub fn opening(&self) -> Opening {
        match (self.spaces, self.prefix) {
            (Spaces::Merged, _) => Opening::AllDropped,
            (Spaces::Kept, Prefix::Never) => Opening::Kept,
            (Spaces::Kept, _) => Opening::FirstDropped,
        }
    }

    /// The stages that cut texts into these pieces.
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

    /// What becomes of text that is no piece: its bytes if there are pieces for all, else the unknown piece.
    fn unknown(&self) -> Result<Unknown> {
        let mut bytes = Box::new([None; 256]);
        for piece in self.pieces.iter().filter(|piece| piece.kind == PieceKind::Byte) {
            let byte = byte_of_name(&piece.text);
            let byte = byte.with_context(|| format!("piece {}: '{}' is no byte", piece.id, piece.text))?;
            bytes[usize::from(byte)] = Some(piece.id);
        }
        if let Some(missing) = bytes.iter().position(Option::is_none) {
            ensure!(
                bytes.iter().all(Option::is_none),
                "it has pieces for bytes, and none for {missing:#04x}"
            );
            let unknown = self.pieces.iter().find(|piece| piece.kind == PieceKind::Unknown);
            return Ok(Unknown::Token(unknown.context("it has no unknown piece")?.id));
        }
        Ok(Unknown::Bytes(Box::new(bytes.map(|id| id.expect("none is missing; this is a bug")))))
    }
}

/// The piece as text is cut into it, if it can be.
fn scored(piece: &Piece) -> Option<ScoredPiece<'_>> {
    let kind = match piece.kind {
        PieceKind::Normal => Kind::Merged,
        PieceKind::UserDefined => Kind::Whole,
        PieceKind::Unused => Kind::Unused,
        PieceKind::Unknown | PieceKind::Control | PieceKind::Byte => return None,
    };
    Some(ScoredPiece { id: piece.id, bytes: piece.text.as_bytes(), score: piece.score, kind })
}
