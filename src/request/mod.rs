//! Requests, token events and request errors: plain data that the server and the actors exchange, without
//! tensors or HTTP types; and what a request's sampling parameters and end conditions mean.
//!
//! Invariant: a `Request` that intake has admitted is valid; nothing behind intake checks it again.

pub mod client;

pub mod finish;

mod params;

pub mod sampling;

pub use crate::decoding::{AcceptanceRule, Pooling};
pub use client::{Class, Client};
pub use finish::{finish_reason, logit_biases};
pub use params::{ParamList, SamplingDefaults};
pub use sampling::{sample_row, validate};

use crate::decoding::beams::EarlyStopping;
use crate::decoding::{Constraint, SamplingPlan};
use mainstem_kernels::Penalties;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One sequence to compute, in token ids. Intake checks it against the model's limits.
#[derive(Clone, Debug)]
pub struct Request {
    /// Shown in logs and responses; not necessarily unique.
    pub id: Arc<str>,
    /// The result to compute.
    pub task: Task,
    /// Token ids of the encoder input: of the source text to generate from, or of the text to embed or to
    /// fill. Empty for models without an encoder.
    pub encoder_input: Arc<[u32]>,
    /// Position in the encoder input at which the second of two texts begins, whose tokens are of another
    /// type; `None` if there is only one text.
    pub second_text: Option<u32>,
    /// Token ids of the prompt; of an encoder-decoder model, the decoder's prompt. At least one for
    /// [`Task::Generate`].
    pub prompt: Arc<[u32]>,
    /// Maximum number of generated tokens; 0 only together with `prompt_logprobs` or echo.
    pub max_tokens: u32,
    /// Whether generation continues past the model's end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Additional tokens that end the sequence, regardless of `ignore_eos`.
    pub stop_ids: Arc<[u32]>,
    /// Minimum number of generated tokens: until then, no token that would end the sequence is sampled.
    pub min_tokens: u32,
    /// Biases added to the logits before sampling, as (token id, bias). Each id occurs once.
    pub logit_bias: Arc<[(u32, f32)]>,
    pub sampling: Sampling,
    /// The sampling plan, if the host draws the tokens. Of `sampling`, only the seed applies then, and the
    /// plan includes `min_tokens` and `logit_bias`.
    pub plan: Option<Arc<SamplingPlan>>,
    /// The grammar that the output must follow.
    pub constraint: Option<Arc<Constraint>>,
    /// The beam search to find the output with, instead of sampling tokens.
    pub beams: Option<BeamOptions>,
    /// Speculative decoding of the output; `None` decodes token by token.
    pub speculation: Option<Speculation>,
    /// Number of most likely tokens to report with each generated token. `Some(0)` reports the
    /// log-probability of the token alone; `None` reports nothing.
    pub logprobs: Option<u8>,
    /// Number of most likely tokens to report with each token of the prompt, except the first, as in
    /// `logprobs`.
    pub prompt_logprobs: Option<u8>,
    /// Text that separates the request in the prefix cache: only requests with an equal salt share K and V.
    /// `None` is a salt of its own.
    pub cache_salt: Option<Arc<str>>,
    /// Name of the adapter that changes K and V of the model. Requests with different ones share none. No
    /// API sets it yet.
    pub adapter: Option<Arc<str>>,
    /// The client that sent the request.
    pub client: Arc<Client>,
    /// Its class: that of the client, or a later one.
    pub class: Class,
    /// Its place among the requests of its class: lower ones go first.
    pub priority: i32,
    /// When the request arrived.
    pub arrived: Instant,
    /// Maximum duration of the request from its arrival; `None` for no limit.
    pub time_limit: Option<Duration>,
}

/// The result that a request computes from its tokens.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Tokens that continue the prompt.
    Generate,
    /// One vector for the encoder input, or the state of the prompt's last token in a model without encoder.
    Embed(Pooling),
    /// The hidden state of each token of the encoder input.
    EmbedTokens,
    /// The `top_k` most likely tokens at each of the `positions` of the encoder input. Positions ascend.
    FillMask { positions: Arc<[u32]>, top_k: u8 },
}

/// Speculative decoding of a request: drafts of tokens are verified together in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speculation {
    pub drafter: DraftSource,
    /// Maximum number of drafts in a step, at least 1.
    pub max_drafts: usize,
    /// The rule by which drafts are accepted. It applies where the host draws the tokens; where the device
    /// does, drafts are accepted by [`AcceptanceRule::Coupled`].
    pub rule: AcceptanceRule,
}

/// The source of drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftSource {
    /// The draft model.
    Model,
    /// The text so far: what followed its last `shortest` to `longest` tokens where they occurred before.
    PromptLookup { shortest: usize, longest: usize },
}

impl DraftSource {
    /// Returns its name in the configuration and in requests.
    pub fn name(self) -> &'static str {
        match self {
            DraftSource::Model => "draft",
            DraftSource::PromptLookup { .. } => "prompt_lookup",
        }
    }
}

/// A beam search, whose parameters [`crate::decoding::beams::BeamParams`] explains.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamOptions {
    /// Number of beams, each of which takes a slot.
    pub width: usize,
    pub length_penalty: f64,
    pub early_stopping: EarlyStopping,
    /// Number of the last prompt tokens that count as generated ones.
    pub forced_tokens: u32,
    /// The place of the request's answer among the results, from 0 for the best one. Requests for further
    /// results of the same search directly follow the first one in their group, and are otherwise equal to
    /// it.
    pub answer: usize,
}

/// Sampling parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy sampling.
    pub temperature: f32,
    /// 0 keeps all tokens.
    pub top_k: u32,
    /// 1 keeps all tokens.
    pub top_p: f32,
    /// 0 keeps all tokens.
    pub min_p: f32,
    /// Penalties of the tokens of the prompt and the output. With them, no drafts are made.
    pub penalties: Penalties,
    /// Seed of the random numbers. The same seed gives the same tokens, whatever else is in the batch.
    pub seed: u64,
}

/// One token with its reported log-probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Log-probability under the raw logits; `None` when not requested, and for a prompt's first token.
    pub logprob: Option<f32>,
    /// Rank among all tokens under the raw logits, 1 for the most likely; of a prompt's tokens only, with
    /// their log-probabilities.
    pub rank: Option<u32>,
    /// Most likely tokens at the token's position, most likely first: (id, log-probability).
    pub top: Vec<(u32, f32)>,
}

/// An event of a sequence's channel. The order is: the start, prompt tokens (only with `prompt_logprobs`),
/// generated tokens, and then exactly one [`Finished`](TokenEvent::Finished) or
/// [`Failed`](TokenEvent::Failed).
#[derive(Clone, Debug, PartialEq)]
pub enum TokenEvent {
    /// The prompt is computed, of which K and V of the first `cached_tokens` tokens were in the prefix cache.
    /// Sent once, before the first token.
    Started { cached_tokens: usize },
    /// A run of the prompt's tokens with their log-probabilities.
    Prompt(Vec<Token>),
    /// A generated token.
    Token(Token),
    /// The vector of the text, not normalized ([`Task::Embed`]), or the vectors of its tokens, one after
    /// another ([`Task::EmbedTokens`]).
    Embedding(Vec<f32>),
    /// The most likely token at one of the requested positions, in their order ([`Task::FillMask`]).
    MaskFilled(Token),
    /// The end-of-sequence or stop token that ends the sequence: generated, but not part of the text.
    EndToken(Token),
    /// The score of the output, which a beam search found; sent after its last token.
    BeamScore(f32),
    /// The numbers of drafts that were made and accepted for the sequence so far; sent when they change,
    /// before the token that a step gave together with them.
    Speculated { drafted: usize, accepted: usize },
    /// The sequence ended regularly.
    Finished(FinishReason),
    /// The sequence ended with an error.
    Failed(RequestError),
}

/// The reason for which a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// One of the model's end-of-sequence tokens.
    Stop,
    /// One of the request's own stop tokens.
    StopToken(u32),
    /// The maximum number of tokens.
    Length,
}

impl Request {
    /// A greedy request for up to `max_tokens` tokens after `prompt`, with every other option off.
    pub fn greedy(id: impl Into<Arc<str>>, prompt: impl Into<Arc<[u32]>>, max_tokens: u32) -> Request {
        Request {
            id: id.into(),
            task: Task::Generate,
            encoder_input: Arc::default(),
            second_text: None,
            prompt: prompt.into(),
            max_tokens,
            ignore_eos: false,
            stop_ids: Arc::default(),
            min_tokens: 0,
            logit_bias: Arc::default(),
            sampling: Sampling::GREEDY,
            plan: None,
            constraint: None,
            beams: None,
            speculation: None,
            logprobs: None,
            prompt_logprobs: None,
            cache_salt: None,
            adapter: None,
            client: Client::local(),
            class: Class::Interactive,
            priority: 0,
            arrived: Instant::now(),
            time_limit: None,
        }
    }

    /// Returns the number of input tokens: encoder input plus prompt.
    pub fn input_tokens(&self) -> usize {
        self.encoder_input.len() + self.prompt.len()
    }

    /// Returns the time at which the request times out, if it has a limit.
    pub fn deadline(&self) -> Option<Instant> {
        self.time_limit.map(|limit| self.arrived + limit)
    }
}

impl Sampling {
    /// Greedy sampling: always the most likely token.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, penalties: Penalties::NONE, seed: 0 };
}

impl FinishReason {
    /// Returns the `finish_reason` of the OpenAI API.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop | FinishReason::StopToken(_) => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Errors that refuse or end a request. Each maps to one HTTP status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// 400: a parameter is invalid.
    #[error("{message}")]
    Invalid { param: &'static str, message: String },
    /// 400: prompt and generated tokens exceed the model's context. `prompt` is the name of the prompt's
    /// parameter.
    #[error(
        "the {prompt} has {prompt_tokens} tokens and max_tokens is {max_tokens}; together they exceed the \
         context of {context} tokens"
    )]
    TooLong { prompt: &'static str, prompt_tokens: usize, max_tokens: usize, context: usize },
    /// 400: the prompt alone fills the model's context. `prompt` is the name of the prompt's parameter.
    #[error(
        "the {prompt} has {prompt_tokens} tokens, which leaves no room for generated tokens in the \
         context of {context} tokens"
    )]
    PromptTooLong { prompt: &'static str, prompt_tokens: usize, context: usize },
    /// 400: the request may need more KV pages than the pool has. `what` names the parameters that need them;
    /// reducing `param` helps.
    #[error("{what} need {needed} KV pages, but the pool has only {pages}")]
    TooLarge { param: &'static str, what: &'static str, needed: usize, pages: usize },
    /// 404: no such model.
    #[error("the model '{model}' does not exist; this server serves '{served}'")]
    UnknownModel { model: String, served: String },
    /// 429: the queue has no space for the `coming` sequences of the request. It may have in `retry_after_s`
    /// seconds; 0 if nothing is known.
    #[error(
        "the server is busy: {waiting} sequences are queued, the limit is {limit}, and {coming} more do not \
         fit"
    )]
    Busy { coming: usize, waiting: usize, limit: usize, retry_after_s: u64 },
    /// 429: the client has used up the `limit` of its requests or tokens per minute.
    #[error(
        "the limit of {limit} {what} per minute is used up; a request is accepted again in {retry_after_s} s"
    )]
    RateLimited { what: &'static str, limit: u64, retry_after_s: u64 },
    /// 429: `limit` long request bodies wait already, of this client and size, or altogether.
    #[error("the server is busy: {limit} long request bodies wait for their turn, which is the limit")]
    TooManyLongBodies { limit: usize },
    /// 429: no memory is left for a request body whose length is not known before, or for the text that it is
    /// rendered to, or none was for too long.
    #[error(
        "the server is busy: no memory is left for the request body or the text that it is rendered to; if \
         its Content-Length is announced, it waits for memory, up to a minute"
    )]
    NoBodyMemory,
    /// 429: `limit` requests wait for their grammars to be compiled already.
    #[error(
        "the server is busy: {limit} requests wait for their grammars to be compiled, which is the limit"
    )]
    TooManyGrammars { limit: usize },
    /// 429: the responses to all clients, or to this one, do not fit into their part of `limit` bytes.
    #[error(
        "the server is busy: responses to this client take all that they may of {limit} bytes \
         (server.response_memory)"
    )]
    ResponsesTooLarge { limit: usize },
    /// 400: one response takes more than half of `limit` bytes, so that no server with this limit gives it.
    #[error(
        "the response takes more than half of the {limit} bytes for all responses (server.response_memory); \
         ask for less at once"
    )]
    ResponseTooLarge { limit: usize },
    /// 504: the request took longer than the server allows.
    #[error("the request took longer than the {limit_s} s this server allows")]
    TimedOut { limit_s: u64 },
    /// 503: the server shut down before the response was complete.
    #[error("the server shut down before the response was complete")]
    Interrupted,
    /// 503: the server is shutting down.
    #[error("the server is shutting down and accepts no new requests")]
    Draining,
    /// 500: the engine stopped running.
    #[error("the engine is not running; this is a bug")]
    EngineStopped,
    /// 500: the device failed while the request was in flight.
    #[error("the device failed while the request was in flight: {0}")]
    DeviceFailed(String),
    /// 500: no token could be sampled; other requests are not affected.
    #[error("the next token could not be sampled: {0}")]
    SamplingFailed(String),
}
