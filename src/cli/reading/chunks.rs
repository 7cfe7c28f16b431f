//! How a text is cut into chunks, and which of their tokens are scored.
//!
//! Chunks of `context` tokens begin every `stride` tokens; each is read by itself, from position 0 on. The first one's tokens are
//! scored but for the very first, which nothing foretells; of each other one only those that no chunk before it scored. The
//! last chunk ends with the text and may be shorter.
//! Invariant: no token is scored twice; with a stride below the context every token but the text's first is scored once, and
//! with one as long as the context every token but the first of each chunk.

use std::ops::Range;

/// How a text is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Tokens of a chunk; at least 2.
    pub context: usize,
    /// Tokens from one chunk's first to the next one's; from 1 to `context`.
    pub stride: usize,
}

/// Tokens that are read together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// At least two.
    pub tokens: &'a [u32],
    /// The first that is scored; it and all behind it are. At least 1.
    pub scored_from: usize,
}

impl Cut {
    /// The chunks of a text, in order. One without a token to score is left out: the single last token of a text.
    pub fn chunks<'a>(&self, text: &'a [u32]) -> impl Iterator<Item = Chunk<'a>> + use<'a> {
        let Cut { context, stride } = *self;
        let count = 1 + text.len().saturating_sub(context).div_ceil(stride);
        let chunk = move |number: usize| {
            let begin = number * stride;
            let seen = if number == 0 { 0 } else { begin - stride + context };
            let tokens = &text[begin..text.len().min(begin + context)];
            Chunk { tokens, scored_from: (seen - begin).max(1) }
        };
        (0..count).map(chunk).filter(|chunk| chunk.scored_from < chunk.tokens.len())
    }
}

impl Chunk<'_> {
    /// The rows that are read, in steps of at most `rows`: those whose logits nobody wants, then those that foretell the tokens
    /// that are scored. What the last token foretells is beyond the chunk.
    pub fn steps(&self, rows: usize) -> impl Iterator<Item = (Range<usize>, Wanted)> + use<> {
        let (first, end) = (self.scored_from - 1, self.tokens.len() - 1);
        let parts = move |from: usize, to: usize| {
            (from..to).step_by(rows).map(move |begin| begin..to.min(begin + rows))
        };
        let unwanted = parts(0, first).map(|rows| (rows, Wanted::Nothing));
        unwanted.chain(parts(first, end).map(|rows| (rows, Wanted::Logits)))
    }
}

/// What is wanted of a step's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Nothing,
    Logits,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loop in transformers' page on the perplexity of models of fixed length, with the tokens themselves in the place of
    /// their number: (begin, end, those scored).
    fn of_the_page(len: usize, context: usize, stride: usize) -> Vec<(usize, usize, Vec<usize>)> {
        let (mut chunks, mut seen) = (Vec::new(), 0);
        for begin in (0..len).step_by(stride) {
            let end = len.min(begin + context);
            // The first token of a chunk has nothing before it.
            chunks.push((begin, end, (seen.max(begin + 1)..end).collect()));
            seen = end;
            if end == len {
                break;
            }
        }
        chunks
    }

    #[test]
    fn chunks_are_those_of_the_page() {
        for len in 2..40 {
            let text: Vec<u32> = (0..len as u32).collect();
            for context in 2..12 {
                for stride in 1..=context {
                    let cut = Cut { context, stride };
                    let mut expected = of_the_page(len, context, stride);
                    expected.retain(|(_, _, scored)| !scored.is_empty());
                    let numbers = |ids: &[u32]| ids.iter().map(|id| *id as usize).collect::<Vec<_>>();
                    let got = cut.chunks(&text).map(|chunk| {
                        let begin = chunk.tokens[0] as usize;
                        (begin, begin + chunk.tokens.len(), numbers(&chunk.tokens[chunk.scored_from..]))
                    });
                    assert_eq!(got.collect::<Vec<_>>(), expected, "{len} tokens, {cut:?}");
                }
            }
        }
    }

    /// Every scored token is foretold by exactly one wanted row, the one before it, and all rows before that are read.
    #[test]
    fn steps_read_each_row_once_and_in_order() {
        let tokens = [7; 11];
        for scored_from in 1..11 {
            for rows in 1..13 {
                let chunk = Chunk { tokens: &tokens, scored_from };
                let steps: Vec<_> = chunk.steps(rows).collect();
                let read: Vec<usize> = steps.iter().flat_map(|(range, _)| range.clone()).collect();
                assert_eq!(read, (0..10).collect::<Vec<_>>());
                let wanted = steps.iter().filter(|(_, wanted)| *wanted == Wanted::Logits);
                let wanted: Vec<usize> = wanted.flat_map(|(range, _)| range.clone()).collect();
                assert_eq!(wanted, (scored_from - 1..10).collect::<Vec<_>>());
                assert!(steps.iter().all(|(range, _)| (1..=rows).contains(&range.len())));
            }
        }
    }
}
