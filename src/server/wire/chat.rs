//! Choices of chat completions: a message, or a chunk's delta to it, and log-probabilities per token.
//!
//! Invariant: the concatenated deltas of a stream are the message.

use super::{Finish, Part, TokenIds, writable};
use crate::text::Tokenizer;
use serde::Serialize;

const ASSISTANT: &str = "assistant";

/// A choice of a JSON response.
#[derive(Debug, Serialize)]
pub struct Choice {
    pub index: usize,
    pub message: Message,
    pub logprobs: Option<Logprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
}

/// A choice of a stream's chunk.
#[derive(Debug, Serialize)]
pub struct ChunkChoice {
    pub index: usize,
    pub delta: Delta,
    pub logprobs: Option<Logprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
}

/// The generated message.
#[derive(Debug, Serialize)]
pub struct Message {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

/// What a chunk appends to the message.
#[derive(Debug, Default, Serialize)]
pub struct Delta {
    /// Set only in a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// Log-probabilities of the generated tokens.
#[derive(Debug, Serialize)]
pub struct Logprobs {
    content: Vec<ScoredToken>,
    refusal: Option<String>,
}

/// A generated token with the most likely tokens at its position.
#[derive(Debug, Serialize)]
struct ScoredToken {
    #[serde(flatten)]
    token: OneToken,
    top_logprobs: Vec<OneToken>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize)]
struct OneToken {
    /// Text of the token, with U+FFFD in place of invalid UTF-8.
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl Message {
    pub fn new(content: String) -> Message {
        Message { role: ASSISTANT, content, refusal: None }
    }
}

impl Delta {
    /// Returns the first delta of a choice: the role, and empty text.
    pub fn opening() -> Delta {
        Delta { role: Some(ASSISTANT), content: Some(String::new()) }
    }

    /// Returns a delta with more text; without content if `content` is empty.
    pub fn text(content: String) -> Delta {
        Delta { role: None, content: (!content.is_empty()).then_some(content) }
    }
}

impl Logprobs {
    /// Builds the log-probabilities of the tokens of `part`.
    pub fn of(part: &Part, tokenizer: &Tokenizer) -> Logprobs {
        let one = |id: u32, logprob: f32| OneToken {
            token: tokenizer.token_text(id),
            logprob: writable(logprob),
            bytes: tokenizer.token_bytes(id).to_vec(),
        };
        let scored = part.tokens.iter().map(|placed| ScoredToken {
            token: one(placed.token.id, placed.token.logprob.unwrap_or(f32::NEG_INFINITY)),
            top_logprobs: placed.token.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect(),
        });
        Logprobs { content: scored.collect(), refusal: None }
    }
}
