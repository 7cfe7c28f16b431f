//! The parts of an answer's text that its tokens are of, for APIs that have an object for each token.
//!
//! Invariant: the texts of all tokens together are the text of the answer.

use crate::server::wire::TOKEN_ID_PREFIX;
use serde_json::Value;
use std::collections::VecDeque;

/// Text that is divided among the tokens that it is of.
#[derive(Default)]
pub struct TokenText {
    rest: VecDeque<char>,
    /// Number of characters before the rest.
    taken: usize,
}

/// A token of an answer.
pub struct AnswerToken<'a> {
    pub id: u32,
    pub text: String,
    /// Log-probability; null if it is not known.
    pub logprob: &'a Value,
    /// The most likely tokens at its position, as the native API lists them.
    top: &'a Value,
}

impl TokenText {
    /// Appends the text and the tokens of a choice, whose log-probabilities name tokens by their ids. Calls
    /// `each` with the tokens. What is left of the text belongs to the last one.
    pub fn divide(&mut self, choice: &Value, mut each: impl FnMut(AnswerToken<'_>)) {
        self.rest.extend(choice["text"].as_str().unwrap_or_default().chars());
        let logprobs = &choice["logprobs"];
        let list = |name: &str| logprobs[name].as_array().map_or(&[][..], Vec::as_slice);
        let offset = |at: usize| list("text_offset").get(at)?.as_u64();
        for (at, name) in list("tokens").iter().enumerate() {
            each(AnswerToken {
                id: token_id(name.as_str().unwrap_or_default()),
                text: self.take_until(offset(at + 1).map(|end| end as usize)),
                logprob: &logprobs["token_logprobs"][at],
                top: &logprobs["top_logprobs"][at],
            });
        }
    }

    /// Takes the text up to the character at `end` out, or all of it.
    fn take_until(&mut self, end: Option<usize>) -> String {
        let most = self.rest.len();
        let count = end.map_or(most, |end| end.saturating_sub(self.taken).min(most));
        self.taken += count;
        self.rest.drain(..count).collect()
    }
}

impl AnswerToken<'_> {
    /// Returns the ids and log-probabilities of the `most` most likely tokens at the position.
    pub fn top(&self, most: usize) -> impl Iterator<Item = (u32, &Value)> {
        let entries = self.top.as_object().into_iter().flatten().take(most);
        entries.map(|(name, logprob)| (token_id(name), logprob))
    }
}

/// Returns the id in the name of a token.
fn token_id(name: &str) -> u32 {
    name.strip_prefix(TOKEN_ID_PREFIX).and_then(|id| id.parse().ok()).unwrap_or_default()
}
