//! Response types of the HTTP API: the OpenAI types, and this server's own small objects.
//!
//! Invariant: `None` is serialized as `null` if the OpenAI API always has the field, and omitted otherwise.

pub mod chat;

pub mod completion;

pub mod embedding;

pub mod fill_mask;

pub mod scoring;

mod prompt_logprobs;

pub use prompt_logprobs::PromptLogprobs;

use crate::actors::Kind;
use crate::actors::reply::{DeltaOrigin, PlacedToken, ReplyDelta, ReplyEnd};
use crate::actors::request_metrics::Usage as Tokens;
use crate::request::FinishReason;
use crate::text::Tokenizer;
use serde::Serialize;
use std::time::Duration;
use utoipa::ToSchema;

/// Log-probability written for a probability of zero: JSON has no infinity.
const LOGPROB_MIN: f32 = -9999.0;

/// A JSON response, or one chunk of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub struct Envelope<'a, C> {
    pub id: &'a str,
    pub object: &'static str,
    /// Creation time, in seconds of Unix time.
    pub created: u64,
    pub model: &'a str,
    /// Choices; empty in the chunk with the usage.
    #[schema(value_type = Vec<C>)]
    pub choices: &'a [C],
    /// The rule by which drafts were accepted, if it changes the distribution of the answer; an extension of
    /// the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub acceptance: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// The times of the request, if it asks for them; llama.cpp's extension of the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<Timings>,
    /// Log-probabilities of the prompt, if the request asks for them and the API has them here.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Value>>)]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// Token counts of a generation request.
#[derive(Debug, Serialize, ToSchema)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Present if the request speculated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
}

/// Details of the prompt tokens of a request.
#[derive(Debug, Serialize, ToSchema)]
pub struct PromptTokensDetails {
    /// Number of prompt tokens that were in the prefix cache.
    pub cached_tokens: usize,
}

/// Details of the generated tokens of a request.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompletionTokensDetails {
    /// Number of drafts that are part of the answer.
    pub accepted_prediction_tokens: usize,
    /// Number of drafts that are not.
    pub rejected_prediction_tokens: usize,
}

/// The times that a request took so far, in milliseconds, as llama.cpp's server reports them.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub struct Timings {
    /// Number of prompt tokens that were in the prefix cache.
    cache_n: usize,
    /// Number of the other prompt tokens.
    prompt_n: usize,
    /// Time to the first generated token, with that in the queue.
    prompt_ms: f64,
    prompt_per_token_ms: f64,
    prompt_per_second: f64,
    /// Number of generated tokens.
    predicted_n: usize,
    /// Time since the first of them.
    predicted_ms: f64,
    predicted_per_token_ms: f64,
    predicted_per_second: f64,
}

impl Timings {
    /// Creates the times of a request with this usage: those to its first token, and since then.
    pub fn new(usage: Tokens, prompt: Duration, predicted: Duration) -> Timings {
        let ms = |time: Duration| time.as_micros() as f64 / 1000.0;
        // JSON has no infinity.
        let ratio = |amount: f64, of: f64| if of > 0.0 { amount / of } else { 0.0 };
        let (cache_n, predicted_n) = (usage.cached_tokens, usage.completion_tokens);
        let prompt_n = usage.prompt_tokens.saturating_sub(cache_n);
        let (prompt_ms, predicted_ms) = (ms(prompt), ms(predicted));
        Timings {
            cache_n,
            prompt_n,
            prompt_ms,
            prompt_per_token_ms: ratio(prompt_ms, prompt_n as f64),
            prompt_per_second: ratio(1000.0 * prompt_n as f64, prompt_ms),
            predicted_n,
            predicted_ms,
            predicted_per_token_ms: ratio(predicted_ms, predicted_n as f64),
            predicted_per_second: ratio(1000.0 * predicted_n as f64, predicted_ms),
        }
    }
}

/// The names of tokens in log-probabilities.
pub struct TokenNames<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Whether they are `token_id:ID`, as in vLLM, in place of the tokens' texts.
    pub are_ids: bool,
}

impl TokenNames<'_> {
    /// Returns the name of a token; a text has U+FFFD in place of invalid UTF-8.
    fn name(&self, id: u32) -> String {
        if self.are_ids { format!("{TOKEN_ID_PREFIX}{id}") } else { self.tokenizer.token_text(id) }
    }
}

/// Prefix of the names of tokens that are ids.
pub const TOKEN_ID_PREFIX: &str = "token_id:";

/// Token counts of a request that generates no tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct InputUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl InputUsage {
    /// Creates the usage of a request with `tokens` input tokens.
    pub fn new(tokens: usize) -> InputUsage {
        InputUsage { prompt_tokens: tokens, total_tokens: tokens }
    }
}

/// Output of one choice: of one reply delta, or of all together.
#[derive(Debug, Default)]
pub struct ChoiceOutput {
    pub text: String,
    /// Tokens with their log-probabilities, including those of an echoed prompt.
    pub tokens: Vec<PlacedToken>,
    /// Number of prompt tokens among `tokens`; they come first.
    pub prompt_tokens: usize,
    pub end: Option<ReplyEnd>,
    pub beam_score: Option<f32>,
}

/// The reason for which a choice ended, as in both APIs.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Finish {
    pub finish_reason: Option<&'static str>,
    /// The stop string or token that ended the choice; an extension of the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    /// The score of a choice that a beam search found; an extension of the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beam_score: Option<f32>,
}

/// A stop condition of the request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub enum StopReason {
    String(String),
    Token(u32),
}

/// Token ids, if the request asks for them.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct TokenIds {
    /// Ids of the generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<u32>>,
    /// Ids of the prompt; in a stream only in the choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Vec<u32>>,
    /// Decoder start ids, if the prompt is the input of an encoder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder_prompt_token_ids: Option<Vec<u32>>,
}

/// Response of `GET /v1/models`.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList<'a> {
    pub object: &'static str,
    /// A card for each name of the served model.
    pub data: Vec<ModelCard<'a>>,
}

/// The served model, under one of its names.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelCard<'a> {
    pub id: &'a str,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    /// Maximum number of tokens of prompt and generated text together, or of an encoder-only model's text.
    pub max_model_len: usize,
    #[schema(value_type = String)]
    pub kind: Kind,
    /// Paths of the endpoints that the model supports.
    #[schema(value_type = Vec<String>)]
    pub endpoints: &'a [&'static str],
    /// Context length in tokens: the model's own, or the configured one.
    pub context: usize,
    /// Maximum number of tokens of the encoder input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_context: Option<usize>,
    /// Length of an embedding.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dimensions: Option<usize>,
    /// Speculative decoding, if requests can choose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationCard<'a>>,
}

/// The speculative decoding of requests that choose nothing else.
#[derive(Debug, Serialize, ToSchema)]
pub struct SpeculationCard<'a> {
    /// Source of drafts; "off" if requests have to choose one.
    pub method: &'static str,
    /// Name of the draft model; null without one.
    pub draft_model: Option<&'a str>,
    pub max_drafts: usize,
    pub acceptance: &'static str,
}

/// Response of `POST /v1/tokenize`.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizeResponse {
    pub count: usize,
    /// Maximum number of tokens of prompt and generated text together, or of the encoder input.
    pub max_model_len: usize,
    pub tokens: Vec<u32>,
    /// Texts of the tokens, if the request asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_strs: Option<Vec<String>>,
}

/// Response of `POST /v1/detokenize`.
#[derive(Debug, Serialize, ToSchema)]
pub struct DetokenizeResponse {
    pub prompt: String,
}

/// Response of `GET /health`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    pub status: &'static str,
    /// Number of lines of the log that could not be written; omitted if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_lines_dropped: Option<u64>,
}

/// Response of `GET /version`.
#[derive(Debug, Serialize, ToSchema)]
pub struct Version {
    pub version: &'static str,
}

impl From<Tokens> for Usage {
    fn from(tokens: Tokens) -> Usage {
        let Tokens { prompt_tokens, completion_tokens, cached_tokens, drafts } = tokens;
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
            completion_tokens_details: drafts.map(|drafts| CompletionTokensDetails {
                accepted_prediction_tokens: drafts.accepted,
                rejected_prediction_tokens: drafts.drafted.saturating_sub(drafts.accepted),
            }),
        }
    }
}

impl From<ReplyDelta> for ChoiceOutput {
    fn from(piece: ReplyDelta) -> ChoiceOutput {
        let prompt_tokens = if piece.origin == DeltaOrigin::Prompt { piece.tokens.len() } else { 0 };
        let ReplyDelta { text, tokens, end, beam_score, .. } = piece;
        ChoiceOutput { text, tokens, prompt_tokens, end, beam_score }
    }
}

impl ChoiceOutput {
    /// Appends a reply delta.
    pub fn append(&mut self, piece: ReplyDelta) {
        let ChoiceOutput { text, tokens, prompt_tokens, end, beam_score } = piece.into();
        self.text += &text;
        self.tokens.extend(tokens);
        self.prompt_tokens += prompt_tokens;
        self.end = end;
        self.beam_score = beam_score;
    }

    /// Returns the mean log-probability of the generated tokens; negative infinity if there are none, or
    /// none is known.
    pub fn mean_logprob(&self) -> f64 {
        let generated = &self.tokens[self.prompt_tokens..];
        let known = generated.iter().filter_map(|placed| placed.token.logprob).map(f64::from);
        let (count, sum) = known.fold((0.0, 0.0), |(count, sum), logprob| (count + 1.0, sum + logprob));
        if count > 0.0 && !f64::is_nan(sum) { sum / count } else { f64::NEG_INFINITY }
    }

    /// Returns the ids of the generated tokens.
    pub fn token_ids(&self) -> Vec<u32> {
        self.tokens[self.prompt_tokens..].iter().map(|placed| placed.token.id).collect()
    }
}

impl Finish {
    /// Changes the reason of an output that the model ended to "tool_calls" if the output has calls.
    pub fn with_calls(self, has_calls: bool) -> Finish {
        match self.finish_reason {
            Some("stop") if has_calls => Finish { finish_reason: Some("tool_calls"), ..self },
            _ => self,
        }
    }
}

impl From<&ChoiceOutput> for Finish {
    fn from(part: &ChoiceOutput) -> Finish {
        let end = part.end.as_ref();
        let stop_reason = match end {
            Some(ReplyEnd::StopString(stop)) => Some(StopReason::String(stop.clone())),
            Some(ReplyEnd::Engine(FinishReason::StopToken(id))) => Some(StopReason::Token(*id)),
            Some(ReplyEnd::Engine(FinishReason::Stop | FinishReason::Length)) | None => None,
        };
        // JSON has no infinity.
        let beam_score = part.beam_score.map(|score| score.max(f32::MIN));
        Finish { finish_reason: end.map(ReplyEnd::as_str), stop_reason, beam_score }
    }
}

/// Limits a log-probability to a value that JSON can represent.
pub(super) fn finite_logprob(logprob: f32) -> f32 {
    logprob.max(LOGPROB_MIN)
}
