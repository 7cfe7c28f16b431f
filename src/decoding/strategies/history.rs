//! The tokens of a sequence, as strategies see them.

/// The tokens of a sequence so far: its prompt, then its generated tokens.
#[derive(Clone, Debug, Default)]
pub struct History {
    tokens: Vec<u32>,
    prompt_len: usize,
}

impl History {
    /// Creates a history with a prompt, and capacity for `max_tokens` generated tokens.
    pub fn new(prompt: &[u32], max_tokens: usize) -> History {
        let mut tokens = Vec::with_capacity(prompt.len() + max_tokens);
        tokens.extend_from_slice(prompt);
        History { tokens, prompt_len: prompt.len() }
    }

    /// Appends a token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Removes all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
    }

    /// Returns the number of tokens for which there is memory.
    pub fn capacity(&self) -> usize {
        self.tokens.capacity()
    }

    /// Returns all tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the generated tokens.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Returns the last `n` tokens, or all of them if `n` is negative; and how many of them are of the
    /// prompt.
    pub fn last(&self, n: i64) -> (&[u32], usize) {
        let len = usize::try_from(n).unwrap_or(usize::MAX).min(self.tokens.len());
        let start = self.tokens.len() - len;
        (&self.tokens[start..], self.prompt_len.saturating_sub(start))
    }
}
