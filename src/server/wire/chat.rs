//! Choices of chat completions: a message, or a chunk's delta to it, and log-probabilities per token.
//!
//! Invariant: the concatenated deltas of a stream are the message.

use super::{ChoiceOutput, Finish, TokenIds, finite_logprob};
use crate::text::Tokenizer;
use serde::Serialize;

const ASSISTANT: &str = "assistant";

/// A choice of a JSON response.
#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: usize,
    pub message: ResponseMessage,
    pub logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
}

/// A choice of a stream's chunk.
#[derive(Debug, Serialize)]
pub struct ChatChunkChoice {
    pub index: usize,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
}

/// The generated message.
#[derive(Debug, Serialize)]
pub struct ResponseMessage {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

/// The part of the message that a chunk appends.
#[derive(Debug, Default, Serialize)]
pub struct ChatDelta {
    /// Set only in a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// Log-probabilities of the generated tokens.
#[derive(Debug, Serialize)]
pub struct ChatLogprobs {
    content: Vec<ScoredToken>,
    refusal: Option<String>,
}

/// A generated token with the most likely tokens at its position.
#[derive(Debug, Serialize)]
struct ScoredToken {
    #[serde(flatten)]
    token: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize)]
struct TokenLogprob {
    /// Text of the token, with U+FFFD in place of invalid UTF-8.
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ResponseMessage {
    /// Creates a message of the assistant.
    pub fn new(content: String) -> ResponseMessage {
        ResponseMessage { role: ASSISTANT, content, refusal: None }
    }
}

impl ChatDelta {
    /// Returns the first delta of a choice: the role, and empty text.
    pub fn with_role() -> ChatDelta {
        ChatDelta { role: Some(ASSISTANT), content: Some(String::new()) }
    }

    /// Returns a delta with more text; without content if `content` is empty.
    pub fn text(content: String) -> ChatDelta {
        ChatDelta { role: None, content: (!content.is_empty()).then_some(content) }
    }
}

impl ChatLogprobs {
    /// Builds the log-probabilities of the tokens of `part`.
    pub fn from_output(part: &ChoiceOutput, tokenizer: &Tokenizer) -> ChatLogprobs {
        let one = |id: u32, logprob: f32| TokenLogprob {
            token: tokenizer.token_text(id),
            logprob: finite_logprob(logprob),
            bytes: tokenizer.token_bytes(id).to_vec(),
        };
        let scored = part.tokens.iter().map(|placed| ScoredToken {
            token: one(placed.token.id, placed.token.logprob.unwrap_or(f32::NEG_INFINITY)),
            top_logprobs: placed.token.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect(),
        });
        ChatLogprobs { content: scored.collect(), refusal: None }
    }
}
