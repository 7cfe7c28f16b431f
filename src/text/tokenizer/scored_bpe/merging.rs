//! The merge process of one text.
//!
//! Invariant: the symbols are contiguous and cover the text; a candidate whose symbols have since merged with
//! others is skipped.

use super::{ScoredBpe, TextSpan};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::ops::Range;

/// A text and its symbols, which merge.
pub struct Merging<'a> {
    bpe: &'a ScoredBpe,
    text: &'a [u8],
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Reverse<MergeCandidate>>,
    /// For unused pieces: the length of the left symbol of the pair that forms the piece.
    left_halves: HashMap<&'a [u8], usize>,
}

/// A part of the text, in a list linked by indices. A symbol that has merged into its left neighbour is
/// empty.
struct Symbol {
    begin: usize,
    end: usize,
    is_frozen: bool,
    previous: Option<usize>,
    next: Option<usize>,
}

/// A possible merge at the time it was queued. Ordered by rank, then from left to right.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    rank: u32,
    at: usize,
    end: usize,
}

impl<'a> Merging<'a> {
    /// Splits a text into atoms and merges them as far as possible.
    pub fn new(bpe: &'a ScoredBpe, text: &'a str) -> Merging<'a> {
        let text = text.as_bytes();
        let (symbols, queue) = (symbols(bpe, text), BinaryHeap::new());
        let mut merging = Merging { bpe, text, symbols, queue, left_halves: HashMap::new() };
        merging.merge();
        merging
    }

    /// Merges neighbours until no two form a piece.
    fn merge(&mut self) {
        (0..self.symbols.len()).for_each(|at| self.queue_merge(at));
        while let Some(Reverse(best)) = self.queue.pop() {
            let Some(right) = self.valid_right_symbol(best) else { continue };
            let next = self.symbols[right].next;
            self.symbols[right].end = self.symbols[right].begin;
            self.symbols[best.at].end = best.end;
            self.symbols[best.at].next = next;
            if let Some(next) = next {
                self.symbols[next].previous = Some(best.at);
            }
            if let Some(previous) = self.symbols[best.at].previous {
                self.queue_merge(previous);
            }
            self.queue_merge(best.at);
        }
    }

    /// Queues the merge of the symbol `at` with its right neighbour, if they form a piece.
    fn queue_merge(&mut self, at: usize) {
        let left = &self.symbols[at];
        let Some(right) = left.next.map(|next| &self.symbols[next]) else { return };
        let bytes = &self.text[left.begin..right.end];
        let Some(piece) = self.bpe.pieces.get(bytes).filter(|_| !left.is_frozen && !right.is_frozen) else {
            return;
        };
        if piece.unused {
            self.left_halves.insert(bytes, left.end - left.begin);
        }
        if let Some(rank) = piece.rank {
            self.queue.push(Reverse(MergeCandidate { rank, at, end: right.end }));
        }
    }

    /// Returns the right symbol of a candidate, unless one of its symbols has since merged with another.
    fn valid_right_symbol(&self, candidate: MergeCandidate) -> Option<usize> {
        let left = &self.symbols[candidate.at];
        let right = left.next.filter(|_| left.begin < left.end)?;
        (self.symbols[right].end == candidate.end).then_some(right)
    }

    /// Returns the remaining symbols. Unused pieces are split again.
    pub fn spans(&self) -> Vec<TextSpan> {
        let mut spans = Vec::new();
        let mut uncut: Vec<Range<usize>> = Vec::new();
        for symbol in self.symbols.iter().filter(|symbol| symbol.begin < symbol.end) {
            uncut.push(symbol.begin..symbol.end);
            while let Some(range) = uncut.pop() {
                let bytes = &self.text[range.clone()];
                let piece = self.bpe.pieces.get(bytes);
                match (piece, self.left_halves.get(bytes)) {
                    (Some(piece), Some(left)) if piece.unused => {
                        let middle = range.start + left;
                        uncut.extend([middle..range.end, range.start..middle]);
                    }
                    (Some(piece), _) => spans.push(TextSpan::Piece(piece.id)),
                    (None, _) => spans.push(TextSpan::Unknown(range)),
                }
            }
        }
        spans
    }
}

/// Splits a text into a list of atoms.
fn symbols(bpe: &ScoredBpe, text: &[u8]) -> Vec<Symbol> {
    let mut symbols: Vec<Symbol> = Vec::with_capacity(text.len());
    let mut begin = 0;
    while begin < text.len() {
        let (len, is_frozen) = bpe.atom(&text[begin..]);
        let at = symbols.len();
        if let Some(last) = symbols.last_mut() {
            last.next = Some(at);
        }
        let end = begin + len;
        symbols.push(Symbol { begin, end, is_frozen, previous: at.checked_sub(1), next: None });
        begin = end;
    }
    symbols
}
