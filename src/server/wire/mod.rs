//! The OpenAI wire types that leave: answers' envelope, models, and our small objects beside them.
//!
//! Invariant: what is `None` here is `null` on the wire where every choice of the API has the field, and absent
//! elsewhere.

pub mod chat;

pub mod completion;

pub mod embedding;

pub mod fill_mask;

use crate::actors::Kind;
use crate::actors::reply::{End, Origin, Piece, PlacedToken, Usage as Tokens};
use crate::request::FinishReason;
use serde::Serialize;

/// The logarithm written for a probability of zero, as JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

/// An answer, whole or one chunk of its stream.
#[derive(Debug, Serialize)]
pub struct Envelope<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    /// Seconds of Unix time.
    pub created: u64,
    pub model: &'a str,
    /// Empty in the chunk that carries the usage.
    pub choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// Tokens taken.
#[derive(Debug, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

/// Tokens taken where none are made.
#[derive(Debug, Serialize)]
pub struct InputUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl InputUsage {
    pub fn of(tokens: usize) -> InputUsage {
        InputUsage { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// What has come of one choice: one piece, or all of them.
#[derive(Debug, Default)]
pub struct Part {
    pub text: String,
    /// Tokens with their log-probabilities, those of an echoed prompt among them.
    pub tokens: Vec<PlacedToken>,
    /// How many of these are the prompt's; they come first.
    pub prompt_tokens: usize,
    pub end: Option<End>,
}

/// Why a choice is over, as both APIs have it.
#[derive(Debug, Default, Serialize)]
pub struct Finish {
    pub finish_reason: Option<&'static str>,
    /// The stop string or token that came; an extension.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
}

/// A stop that was asked for.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    String(String),
    Token(u32),
}

/// Token ids, if asked for.
#[derive(Debug, Default, Serialize)]
pub struct TokenIds {
    /// Of the generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Of the prompt; in a stream, in the choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Of what the decoder began with, where the prompt is read by an encoder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder_prompt_token_ids: Option<Vec<u32>>,
}

/// `GET /v1/models`.
#[derive(Debug, Serialize)]
pub struct ModelList<'a> {
    pub object: &'static str,
    pub data: [Model<'a>; 1],
}

/// What is served.
#[derive(Debug, Serialize)]
pub struct Model<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Tokens of prompt and answer together, or of an encoder's text, at most.
    pub max_model_len: usize,
    pub kind: Kind,
    /// What it can be asked for.
    pub endpoints: &'a [&'static str],
    /// Tokens of prompt and answer that it was made for, or that the configuration allows.
    pub context: usize,
    /// Tokens of the longest source that its encoder reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_context: Option<usize>,
    /// Numbers of an embedding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<usize>,
}

/// `POST /v1/tokenize`.
#[derive(Debug, Serialize)]
pub struct Tokenized {
    pub count: usize,
    /// Tokens of prompt and answer together, at most.
    pub max_model_len: usize,
    pub tokens: Vec<u32>,
    /// The tokens' texts, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_strs: Option<Vec<String>>,
}

/// `POST /v1/detokenize`.
#[derive(Debug, Serialize)]
pub struct Detokenized {
    pub prompt: String,
}

/// `GET /health`.
#[derive(Debug, Serialize)]
pub struct Health {
    pub status: &'static str,
}

/// `GET /version`.
#[derive(Debug, Serialize)]
pub struct Version {
    pub version: &'static str,
}

impl From<Tokens> for Usage {
    fn from(tokens: Tokens) -> Usage {
        let Tokens { prompt_tokens, completion_tokens } = tokens;
        Usage { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

impl From<Piece> for Part {
    fn from(piece: Piece) -> Part {
        let prompt_tokens = if piece.origin == Origin::Prompt { piece.tokens.len() } else { 0 };
        Part { text: piece.text, tokens: piece.tokens, prompt_tokens, end: piece.end }
    }
}

impl Part {
    /// Puts a piece behind what is there.
    pub fn append(&mut self, piece: Piece) {
        let Part { text, tokens, prompt_tokens, end } = piece.into();
        self.text += &text;
        self.tokens.extend(tokens);
        self.prompt_tokens += prompt_tokens;
        self.end = end;
    }

    /// Ids of the generated tokens.
    pub fn token_ids(&self) -> Vec<u32> {
        self.tokens[self.prompt_tokens..].iter().map(|placed| placed.token.id).collect()
    }
}

impl From<Option<&End>> for Finish {
    fn from(end: Option<&End>) -> Finish {
        let stop_reason = match end {
            Some(End::StopString(stop)) => Some(StopReason::String(stop.clone())),
            Some(End::Engine(FinishReason::StopToken(id))) => Some(StopReason::Token(*id)),
            Some(End::Engine(FinishReason::Stop | FinishReason::Length)) | None => None,
        };
        Finish { finish_reason: end.map(End::as_str), stop_reason }
    }
}

/// A log-probability that JSON can hold.
pub(super) fn writable(logprob: f32) -> f32 {
    logprob.max(LOGPROB_MIN)
}
