//! A chat's choice: a message, or the difference a chunk makes to it, and log-probabilities token by token.
//!
//! Invariant: the deltas of a stream, put together, are the message.

use super::{Finish, Part, TokenIds, writable};
use crate::text::Tokenizer;
use serde::Serialize;

const ASSISTANT: &str = "assistant";

/// A choice of a whole answer.
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

/// A choice of a chunk.
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

/// What the model said.
#[derive(Debug, Serialize)]
pub struct Message {
    role: &'static str,
    content: String,
    refusal: Option<String>,
}

/// What a chunk adds to the message.
#[derive(Debug, Default, Serialize)]
pub struct Delta {
    /// In a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// Log-probabilities of the answer's tokens.
#[derive(Debug, Serialize)]
pub struct Logprobs {
    content: Vec<ScoredToken>,
    refusal: Option<String>,
}

#[derive(Debug, Serialize)]
struct ScoredToken {
    #[serde(flatten)]
    token: OneToken,
    top_logprobs: Vec<OneToken>,
}

#[derive(Debug, Serialize)]
struct OneToken {
    /// Bytes that are no UTF-8 are U+FFFD here.
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
    /// What opens a choice.
    pub fn opening() -> Delta {
        Delta { role: Some(ASSISTANT), content: Some(String::new()) }
    }

    /// More text, if there is any.
    pub fn text(content: String) -> Delta {
        Delta { role: None, content: (!content.is_empty()).then_some(content) }
    }
}

impl Logprobs {
    /// Those of a part's tokens.
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
