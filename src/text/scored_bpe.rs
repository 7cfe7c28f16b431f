//! The tokenizer of llama2.c: a file of scored pieces, and the encoding that merges, again and again, the two
//! neighbours whose joint piece has the best score, the leftmost of equals first.
//!
//! A rank per pair, as other byte-pair encoders use, cannot say "equal scores go from left to right", so this
//! one is our own.
//!
//! Invariant: text becomes pieces of text and single bytes only, never a control token.

use super::pieces::Pieces;
use anyhow::{Context, Result, ensure};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

pub const BOS: u32 = 1;
pub const EOS: u32 = 2;
/// The unknown token and the two above.
pub const CONTROLS: u32 = 3;
/// Pieces after the controls and the 256 single bytes are text.
const FIRST_TEXT: u32 = CONTROLS + 256;

/// Pieces scored no better than this are never merged into.
const SCORE_MIN: f32 = -1e10;

/// An id that no symbol has.
const GONE: u32 = u32::MAX;

/// Pieces of text and how they merge.
#[derive(Debug)]
pub struct ScoredBpe {
    ids: HashMap<Box<[u8]>, u32>,
    merges: HashMap<(u32, u32), Merge>,
}

/// Two neighbours become `id`. The best score has rank 0; equal scores have equal ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Merge {
    rank: u32,
    id: u32,
}

/// A symbol of the text being encoded, in a list linked by indices.
struct Symbol {
    id: u32,
    previous: Option<usize>,
    next: Option<usize>,
}

/// A merge that was possible when it was queued. Ordered by rank, then from left to right.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    at: usize,
    pair: (u32, u32),
    merged: u32,
}

impl ScoredBpe {
    /// Reads the content of a `tokenizer.bin` of exactly `vocab` pieces: the length of the longest, and then
    /// for each its score (f32), its length (i32) and its bytes. Returns the encoder and every token's own
    /// bytes.
    pub fn read(content: &[u8], vocab: usize) -> Result<(ScoredBpe, Pieces)> {
        ensure!(
            vocab >= FIRST_TEXT as usize,
            "a vocabulary of {vocab} has no room for three control tokens and 256 bytes"
        );
        let mut rest = content;
        let longest = i32::from_le_bytes(take(&mut rest)?);
        let mut scored = Vec::new();
        for id in 0..vocab {
            scored.push(read_piece(&mut rest, longest).with_context(|| format!("token {id} of {vocab}"))?);
        }
        ensure!(rest.is_empty(), "oversized: {} bytes follow the last of {vocab} tokens", rest.len());
        let mut pieces = Pieces::default();
        for (id, (_, piece)) in (0u32..).zip(&scored) {
            match id {
                // Controls are written with a newline on either side.
                0..CONTROLS => pieces.push(piece.trim_ascii()),
                CONTROLS..FIRST_TEXT => pieces.push(&[single_byte(id, piece)?]),
                FIRST_TEXT.. => pieces.push(piece),
            }
        }
        Ok((ScoredBpe::new(&scored), pieces))
    }

    /// The encoder of pieces in id order, (score, bytes) each, controls and bytes included.
    fn new(scored: &[(f32, &[u8])]) -> ScoredBpe {
        let text = || (0u32..).zip(scored).skip(FIRST_TEXT as usize);
        let mut ids = HashMap::<Box<[u8]>, u32>::new();
        for (id, (_, piece)) in text() {
            ids.entry((*piece).into()).or_insert(id);
        }
        let ranks = ranks(scored);
        let mut merges = HashMap::new();
        for (id, (score, piece)) in text().filter(|(_, (score, _))| *score > SCORE_MIN) {
            debug_assert!(score.is_finite());
            for (left, right) in (1..piece.len()).map(|middle| piece.split_at(middle)) {
                if let (Some(left), Some(right)) = (ids.get(left), ids.get(right)) {
                    merges.entry((*left, *right)).or_insert(Merge { rank: ranks[id as usize], id });
                }
            }
        }
        ScoredBpe { ids, merges }
    }

    /// The ids of a text, without BOS. A text that is not empty is encoded with a space before it.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        if text.is_empty() {
            return Vec::new();
        }
        let mut symbols = Vec::with_capacity(text.len() + 1);
        for character in [' '].into_iter().chain(text.chars()) {
            self.push_character(character, &mut symbols);
        }
        self.merge(&mut symbols);
        symbols.iter().map(|symbol| symbol.id).filter(|id| *id != GONE).collect()
    }

    /// Appends the piece that is this character, or its bytes.
    fn push_character(&self, character: char, symbols: &mut Vec<Symbol>) {
        let mut buffer = [0; 4];
        let bytes = character.encode_utf8(&mut buffer).as_bytes();
        let mut push = |id| {
            let at = symbols.len();
            if let Some(last) = symbols.last_mut() {
                last.next = Some(at);
            }
            symbols.push(Symbol { id, previous: at.checked_sub(1), next: None });
        };
        match self.ids.get(bytes) {
            Some(id) => push(*id),
            None => bytes.iter().for_each(|byte| push(CONTROLS + u32::from(*byte))),
        }
    }

    /// Merges neighbours until no two have a joint piece.
    fn merge(&self, symbols: &mut [Symbol]) {
        let mut queue: BinaryHeap<_> =
            (0..symbols.len()).filter_map(|at| self.candidate(symbols, at)).map(Reverse).collect();
        while let Some(Reverse(best)) = queue.pop() {
            // A candidate whose symbols have merged with others meanwhile is no longer one.
            if self.candidate(symbols, best.at) != Some(best) {
                continue;
            }
            let right = symbols[best.at].next.expect("a candidate has a right neighbour; this is a bug");
            let next = symbols[right].next;
            symbols[right].id = GONE;
            symbols[best.at].id = best.merged;
            symbols[best.at].next = next;
            if let Some(next) = next {
                symbols[next].previous = Some(best.at);
            }
            let changed = [symbols[best.at].previous, Some(best.at)].into_iter().flatten();
            queue.extend(changed.filter_map(|at| self.candidate(symbols, at)).map(Reverse));
        }
    }

    /// The merge of the symbol at `at` with its right neighbour, if there is one.
    fn candidate(&self, symbols: &[Symbol], at: usize) -> Option<Candidate> {
        let pair = (symbols[at].id, symbols[symbols[at].next?].id);
        let Merge { rank, id } = *self.merges.get(&pair)?;
        Some(Candidate { rank, at, pair, merged: id })
    }
}

/// For each piece, how many different scores are better than its own.
fn ranks(scored: &[(f32, &[u8])]) -> Vec<u32> {
    let mut order: Vec<usize> = (0..scored.len()).collect();
    order.sort_unstable_by(|a, b| scored[*b].0.total_cmp(&scored[*a].0));
    let mut ranks = vec![0; scored.len()];
    for pair in order.windows(2) {
        // Compared as numbers: 0 and -0 are equal.
        ranks[pair[1]] = ranks[pair[0]] + u32::from(scored[pair[1]].0 != scored[pair[0]].0);
    }
    ranks
}

fn read_piece<'a>(rest: &mut &'a [u8], longest: i32) -> Result<(f32, &'a [u8])> {
    let score = f32::from_le_bytes(take(rest)?);
    ensure!(score.is_finite(), "its score is {score}");
    let len = i32::from_le_bytes(take(rest)?);
    ensure!(len > 0, "its length is {len}");
    ensure!(len <= longest, "its length is {len}, and the longest should have {longest} bytes");
    let piece = rest.split_off(..len as usize);
    let piece = piece.with_context(|| format!("truncated: {len} bytes expected, {} left", rest.len()))?;
    Ok((score, piece))
}

fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let Some((chunk, after)) = rest.split_first_chunk::<N>() else {
        anyhow::bail!("truncated: {N} bytes expected, {} left", rest.len());
    };
    *rest = after;
    Ok(*chunk)
}

/// The byte that token `id` stands for, which its piece must spell.
fn single_byte(id: u32, piece: &[u8]) -> Result<u8> {
    let byte = (id - CONTROLS) as u8;
    let spelled = format!("<0x{byte:02X}>");
    let found = piece.escape_ascii();
    ensure!(piece == spelled.as_bytes(), "token {id} should be the byte '{spelled}', and is '{found}'");
    Ok(byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::samples::{Dice, scored_file, scored_pieces};

    /// What llama2.c does, as plainly as it can be said: look at all neighbours, join the best, begin again.
    fn oracle(pieces: &[(f32, Vec<u8>)], text: &str) -> Vec<u32> {
        let find = |wanted: &[u8]| pieces.iter().position(|(_, piece)| piece == wanted);
        let mut ids: Vec<usize> = Vec::new();
        let prefix = if text.is_empty() { "" } else { " " };
        for character in prefix.chars().chain(text.chars()) {
            let bytes = character.to_string().into_bytes();
            match find(&bytes) {
                Some(id) => ids.push(id),
                None => ids.extend(bytes.iter().map(|byte| usize::from(*byte) + 3)),
            }
        }
        loop {
            let mut best: Option<(f32, usize, usize)> = None;
            for at in 1..ids.len() {
                let joint = [&pieces[ids[at - 1]].1[..], &pieces[ids[at]].1].concat();
                if let Some(id) = find(&joint)
                    && pieces[id].0 > best.map_or(-1e10, |(score, ..)| score)
                {
                    best = Some((pieces[id].0, at, id));
                }
            }
            let Some((_, at, id)) = best else { break };
            ids.splice(at - 1..=at, [id]);
        }
        ids.into_iter().map(|id| id as u32).collect()
    }

    #[test]
    fn ids_are_those_of_the_plain_algorithm() {
        let mut dice = Dice::new(11);
        for _ in 0..60 {
            // Few letters and few scores: long chains of merges and many ties.
            let pieces = scored_pieces(&mut dice, &["a", "b", " ", "é"], 40);
            let (bpe, _) = ScoredBpe::read(&scored_file(&pieces), pieces.len()).unwrap();
            for _ in 0..40 {
                let text: String = (0..dice.below(30))
                    .map(|_| *dice.pick(&["a", "b", "ab", "  ", "é", "日", "\n"]))
                    .collect();
                assert_eq!(bpe.encode(&text), oracle(&pieces, &text), "{text:?} with {:?}", &pieces[259..]);
            }
        }
    }

    #[test]
    fn equal_scores_merge_from_left_to_right_and_scores_of_the_floor_never() {
        let mut pieces = scored_pieces(&mut Dice::new(0), &["a", "b", " "], 0);
        let first = pieces.len() as u32;
        for (score, piece) in [(0.0, "ba"), (-0.0, "ab"), (-1e10, "aa")] {
            pieces.push((score, piece.as_bytes().to_vec()));
        }
        let (bpe, _) = ScoredBpe::read(&scored_file(&pieces), pieces.len()).unwrap();
        let [a, b, space] = [FIRST_TEXT, FIRST_TEXT + 1, FIRST_TEXT + 2];
        assert_eq!(bpe.encode("aba"), [space, first + 1, a]);
        assert_eq!(bpe.encode("bab"), [space, first, b]);
        assert_eq!(bpe.encode("aa"), [space, a, a]);
    }

    #[test]
    fn text_that_spells_a_control_or_a_byte_stays_text() {
        let mut pieces = scored_pieces(&mut Dice::new(0), &["\n", "<", "s", ">", "0", "x", "4", "1", " "], 0);
        for piece in ["\n<", "s>", "s>\n", "\n<s>", "<0", "x4", "1>", "<0x4", "x41>"] {
            pieces.push((0.0, piece.as_bytes().to_vec()));
        }
        let (bpe, own) = ScoredBpe::read(&scored_file(&pieces), pieces.len()).unwrap();
        for text in ["\n<s>\n", "<0x41>"] {
            let ids = bpe.encode(text);
            assert!(ids.iter().all(|id| *id >= FIRST_TEXT), "{ids:?}");
            let bytes: Vec<u8> = ids.iter().flat_map(|id| own.get(*id)).copied().collect();
            assert_eq!(bytes, format!(" {text}").into_bytes());
        }
    }

    #[test]
    fn damaged_files_are_refused_by_name() {
        let pieces = scored_pieces(&mut Dice::new(5), &["a", " "], 6);
        let (whole, vocab) = (scored_file(&pieces), pieces.len());
        let refusal = |content: &[u8], vocab| format!("{:#}", ScoredBpe::read(content, vocab).unwrap_err());
        for end in 0..whole.len() {
            assert!(refusal(&whole[..end], vocab).contains("truncated"), "{end}");
        }
        assert!(refusal(&[&whole[..], b"\0"].concat(), vocab).contains("oversized: 1 bytes follow"));
        assert!(refusal(&whole, vocab - 1).contains("oversized"));
        assert!(refusal(&whole, vocab + 1).contains(&format!("token {vocab} of {}: truncated", vocab + 1)));
        assert!(refusal(&whole, 258).contains("a vocabulary of 258 has no room"));
        let cases: [(usize, [u8; 4], &str); 7] = [
            (0, 2i32.to_le_bytes(), "token 0 of 267: its length is 5, and the longest should have 2 bytes"),
            (0, (-1i32).to_le_bytes(), "token 0 of 267: its length is 5"),
            (4, f32::NAN.to_le_bytes(), "token 0 of 267: its score is NaN"),
            (4, f32::INFINITY.to_le_bytes(), "token 0 of 267: its score is inf"),
            (8, 0i32.to_le_bytes(), "token 0 of 267: its length is 0"),
            (8, i32::MIN.to_le_bytes(), "token 0 of 267: its length is -"),
            (8, i32::MAX.to_le_bytes(), "token 0 of 267: its length is 2147483647, and the longest"),
        ];
        for (at, word, reason) in cases {
            let mut content = whole.clone();
            content[at..at + 4].copy_from_slice(&word);
            assert!(refusal(&content, vocab).contains(reason), "{}", refusal(&content, vocab));
        }
        let mut unspelled = pieces.clone();
        unspelled[3 + 0x41].1 = b"<0x42>".to_vec();
        let reason = "token 68 should be the byte '<0x41>', and is '<0x42>'";
        assert!(refusal(&scored_file(&unspelled), vocab).contains(reason));
    }

    #[test]
    fn no_random_damage_makes_it_panic() {
        let pieces = scored_pieces(&mut Dice::new(6), &["a", "b", " "], 12);
        let whole = scored_file(&pieces);
        let mut dice = Dice::new(7);
        for _ in 0..2_000 {
            let mut content = whole.clone();
            for _ in 0..2 {
                content[dice.below(whole.len())] = dice.below(256) as u8;
            }
            if let Ok((bpe, _)) = ScoredBpe::read(&content, pieces.len()) {
                assert!(!bpe.encode("ab ba").is_empty());
            }
        }
    }
}
