//! Log-probabilities of a prompt's tokens, in vLLM's form: an object per token, by token id.
//!
//! Invariant: a prompt's first token has none. Of the others, the token itself comes first, then the most
//! likely tokens by rank, each id once.

use super::finite_logprob;
use crate::request::Token;
use crate::text::Tokenizer;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use std::sync::Arc;

/// Log-probabilities of the tokens of a prompt. Clones share them.
#[derive(Clone, Debug)]
pub struct PromptLogprobs(Arc<[Option<TokenLogprobs>]>);

/// Log-probabilities at the position of a token, by token id.
#[derive(Debug)]
struct TokenLogprobs(Vec<(u32, RankedLogprob)>);

/// A token's log-probability.
#[derive(Debug, Serialize)]
struct RankedLogprob {
    logprob: f32,
    /// 1 for the most likely token of the position.
    rank: u32,
    decoded_token: String,
}

impl PromptLogprobs {
    /// Builds the log-probabilities of the `tokens` of a prompt, with the `top` most likely ones of each.
    pub fn new(tokens: &[Token], top: u8, tokenizer: &Tokenizer) -> PromptLogprobs {
        PromptLogprobs(tokens.iter().map(|token| TokenLogprobs::new(token, top, tokenizer)).collect())
    }
}

impl TokenLogprobs {
    /// Builds the log-probabilities of a token; `None` if it has none.
    fn new(token: &Token, top: u8, tokenizer: &Tokenizer) -> Option<TokenLogprobs> {
        let (logprob, rank) = token.logprob.zip(token.rank)?;
        let entry = |id: u32, logprob: f32, rank: u32| {
            let logprob = finite_logprob(logprob);
            (id, RankedLogprob { logprob, rank, decoded_token: tokenizer.token_text(id) })
        };
        let likely = token.top.iter().zip(1..).take(top.into()).filter(|((id, _), _)| *id != token.id);
        let likely = likely.map(|((id, logprob), rank)| entry(*id, *logprob, rank));
        Some(TokenLogprobs([entry(token.id, logprob, rank)].into_iter().chain(likely).collect()))
    }
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter())
    }
}

impl Serialize for TokenLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (id, logprob) in &self.0 {
            map.serialize_entry(id, logprob)?;
        }
        map.end()
    }
}
