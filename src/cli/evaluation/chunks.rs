//! Division of a text into chunks, and the choice of the tokens that are scored.
//!
//! Chunks of `context` tokens begin every `stride` tokens; each is evaluated independently, from position 0.
//! In the first chunk all tokens but the first are scored, since nothing predicts that one; in each later
//! chunk, those that no earlier chunk scored. The last chunk ends with the text and may be shorter.
//! Invariant: no token is scored twice. With a stride below the context, every token but the text's first is
//! scored once; with a stride equal to the context, every token but the first of each chunk.

use std::ops::Range;

/// Chunk length and stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunking {
    /// Tokens per chunk; at least 2.
    pub context: usize,
    /// Tokens between the beginnings of successive chunks; from 1 to `context`.
    pub stride: usize,
}

/// A chunk: tokens that are evaluated as one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk<'a> {
    /// The tokens; at least two.
    pub tokens: &'a [u32],
    /// Index of the first scored token; all tokens from there on are scored. At least 1.
    pub scored_from: usize,
}

impl Chunking {
    /// Iterates over the chunks of a text, in order. A chunk without a token to score is omitted, such as a
    /// single last token.
    pub fn chunks<'a>(&self, text: &'a [u32]) -> impl Iterator<Item = Chunk<'a>> + use<'a> {
        let Chunking { context, stride } = *self;
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
    /// Iterates over the steps that evaluate the chunk, as row ranges of at most `rows` rows: first the rows
    /// whose logits are not needed, then the rows that predict scored tokens. The last token is not
    /// evaluated, since it predicts a token outside the chunk.
    pub fn steps(&self, rows: usize) -> impl Iterator<Item = (Range<usize>, RowOutput)> + use<> {
        let (first, end) = (self.scored_from - 1, self.tokens.len() - 1);
        let parts = move |from: usize, to: usize| {
            (from..to).step_by(rows).map(move |begin| begin..to.min(begin + rows))
        };
        let unwanted = parts(0, first).map(|rows| (rows, RowOutput::None));
        unwanted.chain(parts(first, end).map(|rows| (rows, RowOutput::Logits)))
    }
}

/// The output of a step's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOutput {
    None,
    Logits,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loop of the transformers documentation page on the perplexity of fixed-length models, which
    /// returns the scored tokens instead of their number: (begin, end, scored tokens).
    fn reference_chunks(len: usize, context: usize, stride: usize) -> Vec<(usize, usize, Vec<usize>)> {
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
                    let cut = Chunking { context, stride };
                    let mut expected = reference_chunks(len, context, stride);
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

    /// Every scored token is predicted by exactly one row with logits, the one before it, and all rows before
    /// that are evaluated.
    #[test]
    fn steps_read_each_row_once_and_in_order() {
        let tokens = [7; 11];
        for scored_from in 1..11 {
            for rows in 1..13 {
                let chunk = Chunk { tokens: &tokens, scored_from };
                let steps: Vec<_> = chunk.steps(rows).collect();
                let read: Vec<usize> = steps.iter().flat_map(|(range, _)| range.clone()).collect();
                assert_eq!(read, (0..10).collect::<Vec<_>>());
                let wanted = steps.iter().filter(|(_, wanted)| *wanted == RowOutput::Logits);
                let wanted: Vec<usize> = wanted.flat_map(|(range, _)| range.clone()).collect();
                assert_eq!(wanted, (scored_from - 1..10).collect::<Vec<_>>());
                assert!(steps.iter().all(|(range, _)| (1..=rows).contains(&range.len())));
            }
        }
    }
}
