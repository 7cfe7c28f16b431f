//! Drafts without a model: what followed the last tokens where they occurred before (prompt lookup decoding,
//! Saxena 2023).
//!
//! Invariant: a proposal depends on the tokens only.

use mainstem_kernels::random::philox;
use std::collections::HashMap;
use std::ops::RangeInclusive;

/// Finds the last n tokens of a sequence among its tokens before. It has an index of all n-grams of some
/// lengths, so that a token costs the same time after any number of others: a few entries of a hash map.
#[derive(Clone, Debug)]
pub struct PromptLookup {
    lengths: RangeInclusive<usize>,
    tokens: Vec<u32>,
    /// For the hash of each n-gram that is followed by a token, the position of the token after its last
    /// occurrence.
    after: HashMap<u64, u32>,
}

impl PromptLookup {
    /// Creates the lookup of an empty sequence. `lengths` are those of the n-grams to find, from 1 on.
    pub fn new(lengths: RangeInclusive<usize>) -> PromptLookup {
        let lengths = (*lengths.start()).max(1)..=*lengths.end();
        PromptLookup { lengths, tokens: Vec::new(), after: HashMap::new() }
    }

    /// Appends tokens of the prompt, or generated ones.
    pub fn extend(&mut self, tokens: &[u32]) {
        for &token in tokens {
            let position = self.tokens.len() as u32;
            for (_, hash) in suffixes(&self.tokens, &self.lengths) {
                self.after.insert(hash, position);
            }
            self.tokens.push(token);
        }
    }

    /// Appends up to `count` drafts to `drafts`, and returns their number. The longest n-gram at the end of
    /// the sequence counts that occurred before, and its last occurrence; the drafts are the tokens after
    /// it. Where they reach the end of the sequence, they continue with themselves, so that a repetition goes
    /// on.
    pub fn propose(&self, count: usize, drafts: &mut Vec<u32>) -> usize {
        let found = suffixes(&self.tokens, &self.lengths)
            .filter_map(|(n, hash)| {
                let at = *self.after.get(&hash)? as usize;
                // Two n-grams may have the same hash.
                let is_equal = self.tokens[at - n..at] == self.tokens[self.tokens.len() - n..];
                is_equal.then_some(at)
            })
            .last();
        let Some(at) = found else { return 0 };
        let begin = drafts.len();
        for i in at..at + count {
            let copied = self.tokens.get(i).copied().unwrap_or_else(|| drafts[begin + i - self.tokens.len()]);
            drafts.push(copied);
        }
        count
    }

    /// Returns the tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }
}

/// Returns the lengths and hashes of the last n-grams, the shortest first.
fn suffixes<'a>(
    tokens: &'a [u32],
    lengths: &'a RangeInclusive<usize>,
) -> impl Iterator<Item = (usize, u64)> + 'a {
    let backward = tokens.iter().rev().take(*lengths.end());
    let hashes = backward.scan(0u64, |hash, &token| {
        let words = philox([*hash as u32, (*hash >> 32) as u32, token, 0], [0, 0]);
        *hash = u64::from(words[0]) | u64::from(words[1]) << 32;
        Some(*hash)
    });
    (1..).zip(hashes).filter(|(n, _)| lengths.contains(n))
}
