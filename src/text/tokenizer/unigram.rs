//! Unigram segmentation, as in sentencepiece models such as T5's: of all segmentations of a text into pieces,
//! finds the one with the largest sum of scores.
//!
//! Scores are summed in single precision from left to right, as in the sentencepiece library, so that ties up
//! to rounding are resolved the same way.
//!
//! Invariant: the spans of a text are contiguous and cover it.

use super::prefix_set::PrefixSet;
use super::scored_bpe::{PieceFormation, ScoredPiece, TextSpan};

/// Difference between the worst piece's score and that of a character without a piece.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Score per byte, except for the first, of a user-defined piece. All other scores are negative or zero.
const USER_DEFINED_BYTE_SCORE: f32 = 0.1;

/// Unigram encoder: pieces with their log-probabilities.
#[derive(Debug)]
pub struct Unigram {
    /// Pieces; the value is the index into `entries`.
    pieces: PrefixSet,
    entries: Vec<UnigramPiece>,
    unknown_score: f32,
}

/// Id and score of a piece.
#[derive(Clone, Copy, Debug)]
struct UnigramPiece {
    id: u32,
    score: PieceScore,
}

/// Score of a piece.
#[derive(Clone, Copy, Debug)]
enum PieceScore {
    /// The vocabulary's score.
    Vocabulary(f32),
    /// Score of a user-defined piece, computed from its length.
    UserDefined,
}

/// The best segmentation of the text up to some byte.
#[derive(Clone, Copy)]
struct BestPath {
    score: f32,
    /// Beginning of the last span.
    begin: usize,
    /// Id of the last span; `None` if it is not a piece.
    id: Option<u32>,
}

impl Unigram {
    /// Creates an encoder. Unused pieces are ignored.
    pub fn new(pieces: &[ScoredPiece]) -> Unigram {
        let scored = pieces.iter().filter(|piece| piece.kind == PieceFormation::Merged);
        let worst = scored.map(|piece| piece.score).fold(f32::MAX, f32::min);
        let used: Vec<&ScoredPiece> =
            pieces.iter().filter(|piece| piece.kind != PieceFormation::Unused).collect();
        let entry = |piece: &&ScoredPiece| match piece.kind {
            PieceFormation::UserDefined => UnigramPiece { id: piece.id, score: PieceScore::UserDefined },
            _ => UnigramPiece { id: piece.id, score: PieceScore::Vocabulary(piece.score) },
        };
        Unigram {
            entries: used.iter().map(entry).collect(),
            pieces: PrefixSet::new(used.iter().map(|piece| piece.bytes).zip(0u32..)),
            unknown_score: worst - UNKNOWN_PENALTY,
        }
    }

    /// Splits a text into pieces and unknown spans. Each unknown span is a single character.
    pub fn encode(&self, text: &str) -> Vec<TextSpan> {
        let mut best: Vec<Option<BestPath>> = vec![None; text.len() + 1];
        for (begin, character) in text.char_indices() {
            self.extend(&mut best, begin, &text.as_bytes()[begin..], character.len_utf8());
        }
        spans(&best)
    }

    /// Extends the best segmentation up to `begin` by every piece that is a prefix of `rest`, the text from
    /// there.
    fn extend(&self, best: &mut [Option<BestPath>], begin: usize, rest: &[u8], character_len: usize) {
        let so_far = best[begin].map_or(0.0, |path| path.score);
        let mut has_character = false;
        for (len, entry) in self.pieces.matches(rest) {
            let entry = self.entries[entry as usize];
            has_character |= len == character_len;
            propose(&mut best[begin + len], so_far + entry.score.value(len), begin, Some(entry.id));
        }
        if !has_character {
            propose(&mut best[begin + character_len], so_far + self.unknown_score, begin, None);
        }
    }
}

impl PieceScore {
    /// Returns the score of a piece of `len` bytes.
    fn value(self, len: usize) -> f32 {
        match self {
            PieceScore::Vocabulary(score) => score,
            PieceScore::UserDefined => len as f32 * USER_DEFINED_BYTE_SCORE - USER_DEFINED_BYTE_SCORE,
        }
    }
}

/// Replaces the best segmentation if the proposed one has a better score.
fn propose(best: &mut Option<BestPath>, score: f32, begin: usize, id: Option<u32>) {
    if best.is_none_or(|known| score > known.score) {
        *best = Some(BestPath { score, begin, id });
    }
}

/// Returns the spans of the best segmentation.
fn spans(best: &[Option<BestPath>]) -> Vec<TextSpan> {
    let mut spans = Vec::new();
    let mut end = best.len() - 1;
    while let Some(path) = best[end].filter(|_| end > 0) {
        spans.push(path.id.map_or(TextSpan::Unknown(path.begin..end), TextSpan::Piece));
        end = path.begin;
    }
    spans.reverse();
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;

    /// Returns the largest sum of scores over all segmentations of a text.
    fn best_sum(pieces: &[ScoredPiece], unknown: f64, text: &str) -> f64 {
        if text.is_empty() {
            return 0.0;
        }
        let first = text.chars().next().map_or(0, char::len_utf8);
        let is_piece = |len: usize| pieces.iter().find(|piece| piece.bytes == &text.as_bytes()[..len]);
        (1..=text.len())
            .filter(|len| text.is_char_boundary(*len))
            .filter_map(|len| match is_piece(len) {
                Some(piece) => Some((len, f64::from(piece.score))),
                None => (len == first).then_some((len, unknown)),
            })
            .map(|(len, score)| score + best_sum(pieces, unknown, &text[len..]))
            .fold(f64::NEG_INFINITY, f64::max)
    }

    #[test]
    fn no_other_way_to_cut_is_better() {
        let mut dice = Dice::new(43);
        for _ in 0..200 {
            let word = |dice: &mut Dice, most| -> String {
                (0..1 + dice.below(most)).map(|_| *dice.pick(&['a', 'b', '日'])).collect()
            };
            let mut words: Vec<String> = (0..8).map(|_| word(&mut dice, 4)).collect();
            words.sort();
            words.dedup();
            let pieces: Vec<ScoredPiece> = words
                .iter()
                .zip(0u32..)
                .map(|(word, id)| {
                    // Sums of eighths are exact.
                    let score = -(1.0 + dice.below(64) as f32 / 8.0);
                    ScoredPiece { id, bytes: word.as_bytes(), score, kind: PieceFormation::Merged }
                })
                .collect();
            let unknown = pieces.iter().map(|piece| f64::from(piece.score)).fold(0.0, f64::min) - 10.0;
            let unigram = Unigram::new(&pieces);
            for _ in 0..10 {
                let text = word(&mut dice, 9);
                let spans = unigram.encode(&text);
                let sum: f64 = spans
                    .iter()
                    .map(|span| match span {
                        TextSpan::Piece(id) => f64::from(pieces[*id as usize].score),
                        TextSpan::Unknown(_) => unknown,
                    })
                    .sum();
                assert_eq!(sum, best_sum(&pieces, unknown, &text), "{text} {spans:?} {pieces:?}");
                let joined: String = spans
                    .into_iter()
                    .map(|span| match span {
                        TextSpan::Piece(id) => &words[id as usize],
                        TextSpan::Unknown(range) => &text[range],
                    })
                    .collect();
                assert_eq!(joined, text);
            }
        }
    }

    #[test]
    fn a_whole_piece_is_taken_wherever_it_stands_and_an_unused_one_nowhere() {
        let piece =
            |id, word: &'static str, score, kind| ScoredPiece { id, bytes: word.as_bytes(), score, kind };
        let pieces = [
            piece(0, "a", -1.0, PieceFormation::Merged),
            piece(1, "b", -1.0, PieceFormation::Merged),
            piece(2, "ab", -0.5, PieceFormation::Unused),
            piece(3, "ba", -1000.0, PieceFormation::UserDefined),
        ];
        let unigram = Unigram::new(&pieces);
        assert_eq!(unigram.encode("abab"), [0, 3, 1].map(TextSpan::Piece));
        assert_eq!(unigram.encode("ab"), [0, 1].map(TextSpan::Piece));
        assert_eq!(unigram.encode("aé"), [TextSpan::Piece(0), TextSpan::Unknown(1..3)]);
        assert_eq!(unigram.encode(""), []);
    }
}
