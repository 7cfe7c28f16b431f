//! Tokenizers of llama2.c, `tokenizer.bin`: a file of scored pieces.
//!
//! Invariant: text is encoded to text pieces and single bytes only, never to a control token.

use super::parts::TokenizerParts;
use super::pipeline::{self, Algorithm, PieceAlgorithm, PieceEncoder, PipelineParts, UnknownText};
use super::scored_bpe::{Atoms, PieceFormation, ScoredBpe, ScoredPiece};
use super::sentencepiece::normalizer::{Normalizer, SpacePrefix, SpaceSpelling};
use super::{DecodeMethod, LeadingSpaces, SurroundingTokens, Tokenizer};
use anyhow::{Context, Result, ensure};
use std::collections::BTreeMap;

const BOS: u32 = 1;
const EOS: u32 = 2;
/// Number of control tokens: the unknown token, BOS and EOS.
const CONTROL_TOKENS: u32 = 3;
/// Id of the first text piece, after the control tokens and the 256 bytes.
const FIRST_TEXT: u32 = CONTROL_TOKENS + 256;

/// Pieces with this score or a lower one are never the result of a merge.
const SCORE_MIN: f32 = -1e10;

/// Parses a `tokenizer.bin` of exactly `vocab` pieces: the length of the longest piece (i32), and then for
/// each piece its score (f32), its length (i32) and its bytes.
pub fn read(content: &[u8], vocab: usize) -> Result<Tokenizer> {
    let scored = read_pieces(content, vocab)?;
    let mut pieces = BTreeMap::new();
    for (id, (_, piece)) in (0u32..).zip(&scored) {
        let bytes = match id {
            // Control tokens are written with a newline on either side.
            0..CONTROL_TOKENS => piece.trim_ascii().to_vec(),
            CONTROL_TOKENS..FIRST_TEXT => vec![single_byte(id, piece)?],
            FIRST_TEXT.. => piece.to_vec(),
        };
        pieces.insert(id, bytes);
    }
    let mut tokenizer = TokenizerParts {
        stages: pipeline_parts(&scored),
        decode_method: DecodeMethod::Bytes { leading_spaces: LeadingSpaces::DropFirst },
        pieces,
        // The name of a control token in a text is encoded as text.
        added: Vec::new(),
        bos: Some(BOS),
        eos: Some(EOS),
        surrounding: SurroundingTokens::new(Some(BOS), None),
    }
    .build()?;
    tokenizer.special = (0..CONTROL_TOKENS).collect();
    Ok(tokenizer)
}

/// Builds the pipeline components.
fn pipeline_parts(scored: &[(f32, &[u8])]) -> PipelineParts {
    let kind = |score: f32| if score > SCORE_MIN { PieceFormation::Merged } else { PieceFormation::Unmerged };
    let text = (0u32..).zip(scored).skip(FIRST_TEXT as usize);
    let text: Vec<ScoredPiece> = text
        .map(|(id, (score, bytes))| ScoredPiece { id, bytes, score: *score, kind: kind(*score) })
        .collect();
    let bytes = Box::new(std::array::from_fn(|byte| CONTROL_TOKENS + byte as u32));
    let way = PieceAlgorithm::Bpe(ScoredBpe::new(&text, Atoms::KnownCharacters));
    let normalizer =
        Normalizer { prefix: SpacePrefix::Always, spelling: SpaceSpelling::Plain, ..Normalizer::default() };
    PipelineParts {
        algorithm: Algorithm::Pieces(PieceEncoder { algorithm: way, unknown: UnknownText::Bytes(bytes) }),
        normalizer: Some(pipeline::Normalizer::SentencePiece(normalizer)),
        pre_tokenizer: None,
        decoder: None,
    }
}

/// Parses the pieces. Returns (score, bytes) in the order of ids.
fn read_pieces(content: &[u8], vocab: usize) -> Result<Vec<(f32, &[u8])>> {
    ensure!(
        vocab >= FIRST_TEXT as usize,
        "a vocabulary of {vocab} is too small for three control tokens and 256 bytes"
    );
    let mut rest = content;
    let longest = i32::from_le_bytes(take(&mut rest)?);
    let mut scored = Vec::new();
    for id in 0..vocab {
        scored.push(read_piece(&mut rest, longest).with_context(|| format!("token {id} of {vocab}"))?);
    }
    ensure!(rest.is_empty(), "oversized: {} bytes follow the last of {vocab} tokens", rest.len());
    Ok(scored)
}

fn read_piece<'a>(rest: &mut &'a [u8], longest: i32) -> Result<(f32, &'a [u8])> {
    let score = f32::from_le_bytes(take(rest)?);
    ensure!(score.is_finite(), "its score is {score}");
    let len = i32::from_le_bytes(take(rest)?);
    ensure!(len > 0, "its length is {len}");
    ensure!(len <= longest, "its length is {len}, but the longest piece should have {longest} bytes");
    let piece = rest.split_off(..len as usize);
    let piece = piece.with_context(|| format!("truncated: {len} bytes expected, {} left", rest.len()))?;
    Ok((score, piece))
}

/// Takes `N` bytes from the front of `rest`.
fn take<const N: usize>(rest: &mut &[u8]) -> Result<[u8; N]> {
    let Some((chunk, after)) = rest.split_first_chunk::<N>() else {
        anyhow::bail!("truncated: {N} bytes expected, {} left", rest.len());
    };
    *rest = after;
    Ok(*chunk)
}

/// Returns the byte of token `id`. Fails if its piece is not the name of that byte.
fn single_byte(id: u32, piece: &[u8]) -> Result<u8> {
    let byte = (id - CONTROL_TOKENS) as u8;
    let spelled = format!("<0x{byte:02X}>");
    let found = piece.escape_ascii();
    ensure!(piece == spelled.as_bytes(), "token {id} should be the byte '{spelled}', but is '{found}'");
    Ok(byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::{Dice, scored_file, scored_pieces};

    /// The tokenizer of these pieces, each (score, bytes).
    fn tokenizer(pieces: &[(f32, Vec<u8>)]) -> Tokenizer {
        read(&scored_file(pieces), pieces.len()).unwrap()
    }

    fn encode(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false).unwrap()
    }

    /// Straightforward implementation of llama2.c's algorithm: merge the best pair of neighbours, and repeat.
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
            // Few letters and few scores give long chains of merges and many ties.
            let pieces = scored_pieces(&mut dice, &["a", "b", " ", "é"], 40);
            let tokenizer = tokenizer(&pieces);
            for _ in 0..40 {
                let text: String = (0..dice.below(30))
                    .map(|_| *dice.pick(&["a", "b", "ab", "  ", "é", "日", "\n"]))
                    .collect();
                assert_eq!(
                    encode(&tokenizer, &text),
                    oracle(&pieces, &text),
                    "{text:?} with {:?}",
                    &pieces[259..]
                );
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
        let tokenizer = tokenizer(&pieces);
        let [a, b, space] = [FIRST_TEXT, FIRST_TEXT + 1, FIRST_TEXT + 2];
        assert_eq!(encode(&tokenizer, "aba"), [space, first + 1, a]);
        assert_eq!(encode(&tokenizer, "bab"), [space, first, b]);
        assert_eq!(encode(&tokenizer, "aa"), [space, a, a]);
    }

    #[test]
    fn text_that_spells_a_control_or_a_byte_stays_text() {
        let mut pieces = scored_pieces(&mut Dice::new(0), &["\n", "<", "s", ">", "0", "x", "4", "1", " "], 0);
        for piece in ["\n<", "s>", "s>\n", "\n<s>", "<0", "x4", "1>", "<0x4", "x41>"] {
            pieces.push((0.0, piece.as_bytes().to_vec()));
        }
        let tokenizer = tokenizer(&pieces);
        for text in ["\n<s>\n", "<0x41>"] {
            let ids = encode(&tokenizer, text);
            assert!(ids.iter().all(|id| *id >= FIRST_TEXT), "{ids:?}");
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).copied().collect();
            assert_eq!(bytes, format!(" {text}").into_bytes());
        }
    }

    #[test]
    fn damaged_files_are_refused_by_name() {
        let pieces = scored_pieces(&mut Dice::new(5), &["a", " "], 6);
        let (whole, vocab) = (scored_file(&pieces), pieces.len());
        let refusal = |content: &[u8], vocab| format!("{:#}", read(content, vocab).unwrap_err());
        for end in 0..whole.len() {
            assert!(refusal(&whole[..end], vocab).contains("truncated"), "{end}");
        }
        assert!(refusal(&[&whole[..], b"\0"].concat(), vocab).contains("oversized: 1 bytes follow"));
        assert!(refusal(&whole, vocab - 1).contains("oversized"));
        assert!(refusal(&whole, vocab + 1).contains(&format!("token {vocab} of {}: truncated", vocab + 1)));
        assert!(refusal(&whole, 258).contains("a vocabulary of 258 is too small"));
        let cases: [(usize, [u8; 4], &str); 7] = [
            (
                0,
                2i32.to_le_bytes(),
                "token 0 of 267: its length is 5, but the longest piece should have 2 bytes",
            ),
            (0, (-1i32).to_le_bytes(), "token 0 of 267: its length is 5"),
            (4, f32::NAN.to_le_bytes(), "token 0 of 267: its score is NaN"),
            (4, f32::INFINITY.to_le_bytes(), "token 0 of 267: its score is inf"),
            (8, 0i32.to_le_bytes(), "token 0 of 267: its length is 0"),
            (8, i32::MIN.to_le_bytes(), "token 0 of 267: its length is -"),
            (8, i32::MAX.to_le_bytes(), "token 0 of 267: its length is 2147483647, but the longest"),
        ];
        for (at, word, reason) in cases {
            let mut content = whole.clone();
            content[at..at + 4].copy_from_slice(&word);
            assert!(refusal(&content, vocab).contains(reason), "{}", refusal(&content, vocab));
        }
        let mut unspelled = pieces.clone();
        unspelled[3 + 0x41].1 = b"<0x42>".to_vec();
        let reason = "token 68 should be the byte '<0x41>', but is '<0x42>'";
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
            if let Ok(tokenizer) = read(&content, pieces.len()) {
                assert!(!encode(&tokenizer, "ab ba").is_empty());
            }
        }
    }
}
