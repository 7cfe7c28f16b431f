//! Drafts without a model: what followed the last tokens where they occurred before (prompt lookup decoding,
//! Saxena 2023).
//!
//! Invariant: a proposal depends on the tokens, and on how much of the prompt has been indexed.

use mainstem_kernels::random::philox;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// Finds the last n tokens of a sequence among its tokens before. Prompt and generated tokens have an index
/// of all n-grams of some lengths each, so that a token costs the same time after any number of others: a few
/// entries of a hash map. That of the prompt is built by and by, and may be shared by its answers.
#[derive(Clone, Debug)]
pub struct PromptLookup {
    text: Text,
    prompt_index: Arc<Mutex<PromptIndex>>,
    index: NgramIndex,
}

/// The n-grams of the first tokens of a prompt.
#[derive(Debug)]
struct PromptIndex {
    index: NgramIndex,
    /// Number of leading tokens whose preceding n-grams are in the index.
    tokens: usize,
}

/// The tokens of a sequence.
#[derive(Clone, Debug)]
struct Text {
    prompt: Arc<[u32]>,
    generated: Vec<u32>,
}

/// The positions of n-grams that are followed by a token.
#[derive(Clone, Debug)]
struct NgramIndex {
    lengths: RangeInclusive<usize>,
    /// For the hash of each n-gram, the position of the token after its last occurrence.
    after: HashMap<u64, u32>,
    /// The bits of a hash that count: all, except in tests, in which n-grams have equal hashes.
    hash_bits: u64,
}

impl PromptLookup {
    /// Creates the lookup of a sequence that begins with `prompt`, of which nothing is indexed. `lengths` are
    /// those of the n-grams to find, from 1 on.
    pub fn new(lengths: RangeInclusive<usize>, prompt: Arc<[u32]>) -> PromptLookup {
        PromptLookup::with_hash_bits(lengths, prompt, u64::MAX)
    }

    /// Creates a lookup whose hashes have these bits only.
    pub(super) fn with_hash_bits(
        lengths: RangeInclusive<usize>,
        prompt: Arc<[u32]>,
        hash_bits: u64,
    ) -> PromptLookup {
        let lengths = (*lengths.start()).max(1)..=*lengths.end();
        let index = NgramIndex { lengths, after: HashMap::new(), hash_bits };
        let prompt_index = Arc::new(Mutex::new(PromptIndex { index: index.clone(), tokens: 0 }));
        PromptLookup { text: Text { prompt, generated: Vec::new() }, prompt_index, index }
    }

    /// Uses the index of another sequence's prompt if both have the same prompt.
    pub fn share_prompt(&mut self, other: &PromptLookup) {
        if Arc::ptr_eq(&self.text.prompt, &other.text.prompt) && self.index.lengths == other.index.lengths {
            self.prompt_index = other.prompt_index.clone();
        }
    }

    /// Adds up to `limit` tokens of the prompt to its index. Returns their number, which is 0 once the index
    /// is complete.
    pub fn index_prompt(&self, limit: usize) -> usize {
        let PromptIndex { index, tokens } =
            &mut *self.prompt_index.lock().unwrap_or_else(PoisonError::into_inner);
        let (begin, len) = (*tokens, self.text.prompt.len());
        if begin == 0 {
            // Each enlargement would move all entries at once.
            let lengths = index.lengths.clone().count();
            index.after.reserve(len.saturating_mul(lengths));
        }
        *tokens = len.min(begin.saturating_add(limit));
        (begin..*tokens).for_each(|position| index.add(&self.text, position));
        *tokens - begin
    }

    /// Appends a generated token.
    pub fn push(&mut self, token: u32) {
        self.index.add(&self.text, self.text.len());
        self.text.generated.push(token);
    }

    /// Appends up to `count` drafts to `drafts`, and returns their number. The longest n-gram at the end of
    /// the sequence counts that is indexed, and its last occurrence; the drafts are the tokens after it.
    /// Where they reach the end of the sequence, they continue with themselves, so that a repetition goes on.
    pub fn propose(&self, count: usize, drafts: &mut Vec<u32>) -> usize {
        let prompt_index = self.prompt_index.lock().unwrap_or_else(PoisonError::into_inner);
        let (text, len) = (&self.text, self.text.len());
        let NgramIndex { lengths, hash_bits, .. } = &self.index;
        let found = suffixes(text, len, lengths, *hash_bits).filter_map(|(n, hash)| {
            // Generated tokens follow those of the prompt.
            let positions = [&self.index, &prompt_index.index].map(|index| index.after.get(&hash));
            let mut positions = positions.into_iter().flatten().map(|&at| at as usize);
            positions.find(|&at| text.repeats(at, n))
        });
        let Some(at) = found.last() else { return 0 };
        let begin = drafts.len();
        for i in at..at + count {
            let copied = text.get(i).unwrap_or_else(|| drafts[begin + i - len]);
            drafts.push(copied);
        }
        count
    }
}

impl Text {
    fn len(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    fn get(&self, at: usize) -> Option<u32> {
        match at.checked_sub(self.prompt.len()) {
            None => self.prompt.get(at).copied(),
            Some(at) => self.generated.get(at).copied(),
        }
    }

    /// Whether the last n tokens are also those before this position. An n-gram with the same hash need not
    /// be equal, nor be as long.
    fn repeats(&self, at: usize, n: usize) -> bool {
        let (begin, last) = (at.checked_sub(n), self.len() - n);
        begin.is_some_and(|begin| (0..n).all(|i| self.get(begin + i) == self.get(last + i)))
    }
}

impl NgramIndex {
    /// Adds the n-grams before a position.
    fn add(&mut self, text: &Text, position: usize) {
        let NgramIndex { lengths, after, hash_bits } = self;
        after.extend(suffixes(text, position, lengths, *hash_bits).map(|(_, hash)| (hash, position as u32)));
    }
}

/// Returns the lengths and hashes of the n-grams before a position, the shortest first.
fn suffixes(
    text: &Text,
    position: usize,
    lengths: &RangeInclusive<usize>,
    hash_bits: u64,
) -> impl Iterator<Item = (usize, u64)> {
    let longest = position.min(*lengths.end());
    let hashes = (1..=longest).scan(0u64, move |hash, n| {
        let token = text.get(position - n)?;
        let words = philox([*hash as u32, (*hash >> 32) as u32, token, n as u32], *KEY);
        *hash = u64::from(words[0]) | u64::from(words[1]) << 32;
        Some((n, *hash & hash_bits))
    });
    hashes.filter(|(n, _)| lengths.contains(n))
}

/// A random key, so that nobody can write a prompt whose n-grams have equal hashes.
static KEY: LazyLock<[u32; 2]> = LazyLock::new(|| {
    let random = RandomState::new().hash_one(0);
    [random as u32, (random >> 32) as u32]
});
