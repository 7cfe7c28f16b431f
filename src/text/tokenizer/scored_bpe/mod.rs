//! Byte-pair encoding by scores, the algorithm of llama2.c, sentencepiece and tiktoken: repeatedly merges the
//! two neighbours that form the piece with the best score, the leftmost pair first on ties.
//!
//! Encoders with one rank per pair, such as the library's, cannot merge pairs of equal score from left to
//! right.
//!
//! Invariant: the spans of a text are contiguous and cover it.

mod merging;

use super::prefix_set::PrefixSet;
use merging::Merging;
use std::collections::HashMap;
use std::ops::Range;

/// Byte-pair encoder of scored pieces.
#[derive(Debug)]
pub struct ScoredBpe {
    pieces: HashMap<Box<[u8]>, PieceEntry>,
    user_defined: PrefixSet,
    atoms: Atoms,
}

/// Units into which a text is split before merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Atoms {
    /// Characters. A character that is not a piece can still merge with its neighbours.
    Characters,
    /// Characters. A character that is not a piece does not merge.
    KnownCharacters,
    /// Bytes. A text that is a piece as a whole is not split.
    Bytes,
}

/// A piece of the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct ScoredPiece<'a> {
    pub id: u32,
    pub bytes: &'a [u8],
    /// Score; larger is better. Not NaN.
    pub score: f32,
    pub kind: PieceFormation,
}

/// Formation of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceFormation {
    /// By merging neighbours.
    Merged,
    /// Only as an atom, never by merging.
    Unmerged,
    /// Wherever it occurs in the text, the longest such piece first; it does not merge.
    UserDefined,
    /// By merging, as an intermediate step; if it remains, it is split again.
    Unused,
}

/// A part of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextSpan {
    Piece(u32),
    /// Byte range of text that is not a piece.
    Unknown(Range<usize>),
}

/// Id and rank of a piece.
#[derive(Clone, Copy, Debug)]
struct PieceEntry {
    id: u32,
    /// Rank of the score, 0 for the best; equal scores have equal ranks. `None` if the piece is not formed by
    /// merging.
    rank: Option<u32>,
    unused: bool,
}

impl ScoredBpe {
    /// Creates an encoder. Of equal pieces the first is used; empty ones are ignored.
    pub fn new(pieces: &[ScoredPiece], atoms: Atoms) -> ScoredBpe {
        let ranks = ranks(pieces);
        let mut by_bytes = HashMap::<Box<[u8]>, PieceEntry>::with_capacity(pieces.len());
        for (piece, rank) in pieces.iter().zip(ranks).filter(|(piece, _)| !piece.bytes.is_empty()) {
            let rank = (piece.kind != PieceFormation::Unmerged).then_some(rank);
            let unused = piece.kind == PieceFormation::Unused;
            by_bytes.entry(piece.bytes.into()).or_insert(PieceEntry { id: piece.id, rank, unused });
        }
        let whole = pieces.iter().filter(|piece| piece.kind == PieceFormation::UserDefined);
        let whole = PrefixSet::new(whole.map(|piece| (piece.bytes, piece.id)));
        ScoredBpe { pieces: by_bytes, user_defined: whole, atoms }
    }

    /// Splits a text into pieces and unknown spans.
    pub fn encode(&self, text: &str) -> Vec<TextSpan> {
        let whole = self.pieces.get(text.as_bytes()).filter(|_| self.atoms == Atoms::Bytes);
        if let Some(piece) = whole {
            return vec![TextSpan::Piece(piece.id)];
        }
        Merging::new(self, text).spans()
    }

    /// Returns the length of the first atom of a text, and whether it is excluded from merging.
    fn atom(&self, text: &[u8]) -> (usize, bool) {
        if self.atoms == Atoms::Bytes {
            return (1, false);
        }
        if let Some(len) = self.user_defined.longest(text) {
            return (len, true);
        }
        // The text starts within a character only if a user-defined piece ended there; its rest is split into
        // bytes.
        let len = character_len(text);
        let is_alone = self.atoms == Atoms::KnownCharacters && !self.pieces.contains_key(&text[..len]);
        (len, is_alone)
    }
}

/// Maximum number of bytes of a character.
const CHARACTER_MAX: usize = 4;

/// Returns the length of the first character of a text; 1 if it is not valid UTF-8.
fn character_len(text: &[u8]) -> usize {
    // Without the limit, each call would scan the whole text.
    let first = &text[..text.len().min(CHARACTER_MAX)];
    let valid = first.utf8_chunks().next().map_or("", |chunk| chunk.valid());
    valid.chars().next().map_or(1, char::len_utf8)
}

/// Returns the rank of each piece: the number of distinct better scores.
fn ranks(pieces: &[ScoredPiece]) -> Vec<u32> {
    let score = |at: usize| pieces[at].score;
    let mut order: Vec<usize> = (0..pieces.len()).collect();
    order.sort_unstable_by(|a, b| score(*b).total_cmp(&score(*a)));
    let mut ranks = vec![0; pieces.len()];
    for pair in order.windows(2) {
        // Compared as numbers: 0 and -0 are equal.
        ranks[pair[1]] = ranks[pair[0]] + u32::from(score(pair[1]) != score(pair[0]));
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::{Dice, run_with_timeout};
    use std::collections::BTreeSet;

    /// Straightforward implementation of the algorithm: merge the best pair of neighbours, and repeat.
    fn oracle(pieces: &[ScoredPiece], atoms: Atoms, text: &str) -> Vec<String> {
        let find = |bytes: &str| pieces.iter().find(|piece| piece.bytes == bytes.as_bytes());
        let whole = |text: &str| {
            let whole = pieces.iter().filter(|piece| piece.kind == PieceFormation::UserDefined);
            whole
                .map(|piece| piece.bytes)
                .filter(|bytes| text.as_bytes().starts_with(bytes))
                .map(<[u8]>::len)
                .max()
        };
        let mut parts: Vec<(String, bool)> = Vec::new();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let found = whole(rest);
            let (part, after) = rest.split_at(found.unwrap_or(first.len_utf8()));
            let alone = atoms == Atoms::KnownCharacters && find(part).is_none();
            parts.push((part.to_owned(), found.is_some() || alone));
            rest = after;
        }
        loop {
            let mut best: Option<(f32, usize)> = None;
            for at in 1..parts.len() {
                let joint = find(&format!("{}{}", parts[at - 1].0, parts[at].0));
                if let Some(piece) = joint
                    && piece.kind != PieceFormation::Unmerged
                    && !parts[at - 1].1
                    && !parts[at].1
                    && best.is_none_or(|(score, _)| piece.score > score)
                {
                    best = Some((piece.score, at));
                }
            }
            let Some((_, at)) = best else { break };
            let right = parts.remove(at);
            parts[at - 1].0.push_str(&right.0);
        }
        parts.into_iter().map(|(part, _)| part).collect()
    }

    /// Encodes a text to the texts of its spans. A piece's id is its index in `pieces`.
    fn parts(bpe: &ScoredBpe, pieces: &[ScoredPiece], text: &str) -> Vec<String> {
        let part = |span| match span {
            TextSpan::Piece(id) => String::from_utf8(pieces[id as usize].bytes.to_vec()).unwrap(),
            TextSpan::Unknown(range) => text[range].to_owned(),
        };
        bpe.encode(text).into_iter().map(part).collect()
    }

    fn piece(id: usize, word: &str, score: f32, kind: PieceFormation) -> ScoredPiece<'_> {
        ScoredPiece { id: id as u32, bytes: word.as_bytes(), score, kind }
    }

    #[test]
    fn texts_are_cut_as_by_the_plain_algorithm() {
        let mut dice = Dice::new(42);
        let kinds = [
            PieceFormation::Merged,
            PieceFormation::Merged,
            PieceFormation::Merged,
            PieceFormation::Unmerged,
            PieceFormation::UserDefined,
        ];
        for _ in 0..400 {
            let word = |dice: &mut Dice, most| -> String {
                (0..dice.below(most)).map(|_| *dice.pick(&['a', 'b', '日'])).collect()
            };
            let words: BTreeSet<String> =
                (0..5 + dice.below(25)).map(|_| word(&mut dice, 5)).filter(|word| !word.is_empty()).collect();
            // Few scores give many ties.
            let pieces: Vec<ScoredPiece> = words
                .iter()
                .enumerate()
                .map(|(id, word)| piece(id, word, -(dice.below(4) as f32), *dice.pick(&kinds)))
                .collect();
            for atoms in [Atoms::Characters, Atoms::KnownCharacters] {
                let bpe = ScoredBpe::new(&pieces, atoms);
                for _ in 0..8 {
                    let text = word(&mut dice, 16);
                    let expected = oracle(&pieces, atoms, &text);
                    assert_eq!(parts(&bpe, &pieces, &text), expected, "{atoms:?} {pieces:?} {text}");
                }
            }
        }
    }

    #[test]
    fn the_time_is_not_quadratic_in_the_length() {
        let pieces =
            [piece(0, "ab", -1.0, PieceFormation::Merged), piece(1, "<w>", 0.0, PieceFormation::UserDefined)];
        let half = 400_000;
        for atoms in [Atoms::Characters, Atoms::KnownCharacters, Atoms::Bytes] {
            let bpe = ScoredBpe::new(&pieces, atoms);
            let expected = if atoms == Atoms::KnownCharacters { 2 * half } else { half };
            assert_eq!(run_with_timeout(move || bpe.encode(&"ab".repeat(half)).len()), expected, "{atoms:?}");
        }
    }

    #[test]
    fn equal_scores_merge_from_left_to_right() {
        let pieces =
            [piece(0, "ba", 0.0, PieceFormation::Merged), piece(1, "ab", -0.0, PieceFormation::Merged)];
        let bpe = ScoredBpe::new(&pieces, Atoms::Characters);
        assert_eq!(parts(&bpe, &pieces, "aba"), ["ab", "a"]);
        assert_eq!(parts(&bpe, &pieces, "bab"), ["ba", "b"]);
    }

    #[test]
    fn a_character_that_is_no_piece_merges_into_one_or_stays_alone() {
        let pieces = [piece(0, "日a", 0.0, PieceFormation::Merged)];
        let spans = |atoms| ScoredBpe::new(&pieces, atoms).encode("日a");
        assert_eq!(spans(Atoms::Characters), [TextSpan::Piece(0)]);
        assert_eq!(spans(Atoms::KnownCharacters), [TextSpan::Unknown(0..3), TextSpan::Unknown(3..4)]);
    }

    #[test]
    fn unused_pieces_are_steps_and_are_cut_again() {
        let pieces = [
            piece(0, "ab", 0.0, PieceFormation::Unused),
            piece(1, "abc", -1.0, PieceFormation::Merged),
            piece(2, "dab", -2.0, PieceFormation::Unused),
            piece(3, "z", -3.0, PieceFormation::Unused),
        ];
        let bpe = ScoredBpe::new(&pieces, Atoms::Characters);
        assert_eq!(parts(&bpe, &pieces, "abc"), ["abc"]);
        assert_eq!(parts(&bpe, &pieces, "dab"), ["d", "a", "b"]);
        // An atom cannot be split.
        assert_eq!(parts(&bpe, &pieces, "z"), ["z"]);
    }

    #[test]
    fn bytes_merge_across_characters_and_a_whole_piece_is_not_cut() {
        let [first, second]: [&[u8]; 2] = [b"\xe6", b"\x97\xa5a"];
        let pieces: Vec<ScoredPiece> = [first, b"\x97", b"\xa5", b"a", b"\xa5a", second, b"aaa"]
            .into_iter()
            .zip(0u32..)
            .map(|(bytes, id)| ScoredPiece { id, bytes, score: -(id as f32), kind: PieceFormation::Merged })
            .collect();
        let bpe = ScoredBpe::new(&pieces, Atoms::Bytes);
        assert_eq!(bpe.encode("日a"), [TextSpan::Piece(0), TextSpan::Piece(5)]);
        // No merge forms "aa", so "aaa" is found only as a whole text.
        assert_eq!(bpe.encode("aaa"), [TextSpan::Piece(6)]);
        assert_eq!(bpe.encode("aaaa"), [3; 4].map(TextSpan::Piece));
        assert_eq!(bpe.encode(""), []);
    }
}
