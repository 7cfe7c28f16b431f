//! What the server asks of the actors and what they answer: plain data, no tensors, no HTTP.
//!
//! Invariant: a [`Request`] that intake has admitted is valid; nothing behind it checks again.

use std::sync::Arc;

/// A client's wish, in token ids, checked against the model's limits by intake.
#[derive(Clone, Debug)]
pub struct Request {
    /// Shown in logs and answers; not necessarily unique.
    pub id: Arc<str>,
    /// Token ids of the prompt; at least one.
    pub prompt: Arc<[u32]>,
    /// Tokens to generate at most; 0 only together with `prompt_logprobs` or echo.
    pub max_tokens: u32,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    pub sampling: Sampling,
    /// Most likely tokens wanted beside each generated one: `Some(0)` is the log-probability of the token
    /// alone; `None` is nothing.
    pub logprobs: Option<u8>,
    /// Log-probabilities of the prompt's tokens are wanted too (the first has none).
    pub prompt_logprobs: bool,
}

/// How tokens are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: u32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub min_p: f32,
    /// The same seed gives the same tokens, whatever else runs.
    pub seed: u64,
}

/// One token with what was asked for beside it.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Log-probability under the raw logits; `None` when not asked for, or for a prompt's first token.
    pub logprob: Option<f32>,
    /// Most likely tokens at its place, most likely first: (id, log-probability).
    pub top: Vec<(u32, f32)>,
}

/// What a sequence's channel carries, in order: prompt tokens (only with `prompt_logprobs`), generated
/// tokens, and then exactly one end.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// A run of the prompt's tokens with their log-probabilities.
    Prompt(Vec<Token>),
    /// A generated token. An end-of-sequence token that ends the sequence is not sent.
    Token(Token),
    /// The sequence is over.
    Finished(FinishReason),
    /// The sequence could not go on.
    Failed(RequestError),
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end-of-sequence token or a stop string.
    Stop,
    /// The limit of tokens was reached.
    Length,
}

impl FinishReason {
    /// The word of the OpenAI API.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Everything a request can be refused or ended with. One HTTP status each.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// 400: a parameter is wrong.
    #[error("{message}")]
    Invalid { param: &'static str, message: String },
    /// 400: prompt and answer do not fit into the model's context.
    #[error(
        "the prompt has {prompt_tokens} tokens and max_tokens is {max_tokens}: together more than the context of {context} tokens"
    )]
    TooLong { prompt_tokens: usize, max_tokens: usize, context: usize },
    /// 400: the pages the request may come to need are more than there are.
    #[error("prompt and max_tokens need {needed} KV pages, but the whole pool has {pages}")]
    TooLarge { needed: usize, pages: usize },
    /// 404: no such model.
    #[error("the model '{model}' does not exist; this server serves '{served}'")]
    UnknownModel { model: String, served: String },
    /// 429: the waiting room is full.
    #[error("the server is busy: {waiting} requests are waiting and the limit is {limit}")]
    Busy { waiting: usize, limit: usize },
    /// 503: the server is shutting down.
    #[error("the server is shutting down and takes no new requests")]
    Draining,
    /// 500: the engine is gone.
    #[error("the engine is gone; this is a bug")]
    EngineGone,
    /// 500: the device failed while the request was in flight.
    #[error("the device failed while the request was in flight: {0}")]
    DeviceFailed(String),
}
