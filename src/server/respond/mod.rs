//! From a request body to the response, as JSON or as server-sent events: the shared part of the completions
//! and the chat API.
//!
//! Invariant: the reply streams are owned only by the handler's future or by the returned event stream, so
//! that dropping either cancels the request; every event stream ends with `[DONE]`, also after an error.

mod parse;

mod writer;

pub use parse::{Turn, check_choices, parse_off_loop};

use super::body::RequestBody;
use super::error::ApiError;
use super::fields::{Fields, IgnoredFields};
use super::origin::{Origin, Urgency};
use super::params::{ConstraintParams, Delivery, GenerationParams};
use super::prompt_ids::PromptIds;
use super::wire::{ChoiceOutput, PromptLogprobs};
use super::{App, OpenResponse, ServeParts};
use crate::actors::reply::{ChoiceStreams, ReplySpec, ReplyStream};
use crate::decoding::Constraint;
use crate::request::client::ClientId;
use crate::request::{AcceptanceRule, BeamOptions, Client, Request, RequestError};
use crate::telemetry;
use actix_web::web::Bytes;
use futures_util::Stream;
use serde::Serialize;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::select;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use writer::{Clock, ResponseWriter};

/// Maximum number of prompt tokens and of most likely tokens for them in a response. With its
/// log-probability, each has about 65 bytes.
const PROMPT_ENTRIES_MAX: usize = 1 << 20;

/// A response, and what the client should know about its request.
pub struct ApiResponse {
    pub body: ResponseBody,
    pub ignored: IgnoredFields,
}

/// Body of a response.
pub enum ResponseBody {
    /// One JSON object.
    Json(Bytes),
    /// Server-sent events, one or several per item. Dropping the stream cancels the request in the engine.
    Events(Pin<Box<dyn Stream<Item = Bytes>>>),
}

/// A parsed and tokenized request.
pub struct PreparedRequest<W> {
    pub generation: GenerationParams,
    /// At least one.
    pub prompts: Vec<PromptIds>,
    /// Whether the response text starts with the prompt.
    pub echo: bool,
    pub logprobs: Option<u8>,
    pub constraint: Option<ConstraintParams>,
    /// Special tokens that the text includes in any case, because the format reads them.
    pub shown_tokens: Arc<[u32]>,
    pub format: W,
}

/// A text generation API: parsing of its request bodies.
pub trait GenerationApi {
    type Format: ResponseFormat + Send + 'static;

    /// Path of the endpoint.
    const PATH: &'static str;

    /// Parses the fields of a request, in its turn. Errors name the API's own parameters.
    fn parse(
        parts: &ServeParts,
        turn: &Turn,
        fields: Fields,
    ) -> Result<PreparedRequest<Self::Format>, ApiError>;

    /// Name of the prompt parameter in this API.
    const PROMPT_PARAM: &'static str;
}

/// Response format of an API.
pub trait ResponseFormat {
    /// Prefix of response ids.
    const ID_PREFIX: &'static str;
    /// Name of the operation in traces, by OpenTelemetry's conventions.
    const OPERATION: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    /// Whether each choice has the log-probabilities of its prompt; otherwise the response has them.
    const PROMPT_LOGPROBS_IN_CHOICES: bool;
    type Choice: Serialize;
    type ChunkChoice: Serialize;
    /// State of a choice while it is streamed.
    type ChoiceState;

    /// Returns the state of a choice before its first chunk.
    fn begin_choice(&self, index: usize) -> Self::ChoiceState;

    /// Builds a choice of a JSON response. `prompt` are the log-probabilities that it has of its prompt.
    fn choice(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        prompt: Option<PromptLogprobs>,
    ) -> Self::Choice;

    /// Builds the chunk that precedes a choice's text in a stream, if the API has one.
    fn first_chunk(&self, index: usize) -> Option<Self::ChunkChoice>;

    /// Builds the next chunk of a choice. `first` is set for the first chunk with output.
    fn chunk(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        first: bool,
        state: &mut Self::ChoiceState,
    ) -> Self::ChunkChoice;
}

/// Handles a text generation request of a client.
pub async fn respond<A: GenerationApi + 'static>(
    app: &Arc<App>,
    id: Arc<str>,
    client: Arc<Client>,
    body: RequestBody,
) -> Result<ApiResponse, ApiError> {
    let arrived = Instant::now();
    let open = admit(app, A::PATH, client.id)?;
    let held = app.parts.status.responses.hold(client.id);
    let parse = |parts: &ServeParts, turn: &Turn, mut fields: Fields| {
        let urgency = Urgency::parse(&mut fields)?;
        Ok((urgency, A::parse(parts, turn, fields)?))
    };
    let ((urgency, job), ignored) = parse_off_loop(app, body, app.parts.longest_text, parse).await?;
    let origin = Origin::new(client, urgency)?;
    job.check_prompt_tokens()?;
    let replies = submit(app, (id.clone(), origin), &job, arrived, A::PROMPT_PARAM).await?;
    let talk = ResponseWriter::<A::Format> {
        app: app.clone(),
        id: format!("{}{id}", A::Format::ID_PREFIX),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        choices: job.prompts.len() * job.generation.computed_choices() as usize,
        selection: job.generation.selection(),
        prompt_logprobs: job.generation.prompt_logprobs,
        clock: job.generation.timings.then(|| Clock::new(arrived)),
        acceptance: job.generation.lossy_acceptance().map(AcceptanceRule::name),
        format: job.format,
    };
    let body = match job.generation.delivery {
        Delivery::Json => ResponseBody::Json(talk.write_json(replies, held).await?),
        Delivery::Stream { usage } => ResponseBody::Events(Box::pin(talk.event_stream(replies, usage, open))),
    };
    Ok(ApiResponse { body, ignored })
}

/// Admits a request of `client`, unless the server drains, the client holds too much memory of responses, or
/// the model does not serve `path`. Shutdown waits until the returned value is dropped.
pub fn admit(app: &App, path: &'static str, client: ClientId) -> Result<OpenResponse, ApiError> {
    let open = admit_any(app, client)?;
    let model = &app.parts.model;
    match model.endpoints.contains(&path) {
        true => Ok(open),
        false => Err(ApiError::wrong_endpoint(path, model)),
    }
}

/// Admits a request that every model serves, like [`admit`].
pub fn admit_any(app: &App, client: ClientId) -> Result<OpenResponse, ApiError> {
    let open = app.open_response();
    if app.parts.status.is_draining() {
        return Err(RequestError::Draining.into());
    }
    app.parts.status.responses.check_new(client)?;
    Ok(open)
}

/// Submits the requests of all choices to the engine at once. Errors name the parameters as the client did,
/// and the prompt `prompt_param`.
async fn submit<W: ResponseFormat>(
    app: &Arc<App>,
    (id, origin): (Arc<str>, Origin),
    job: &PreparedRequest<W>,
    arrived: Instant,
    prompt_param: &str,
) -> Result<ChoiceStreams, ApiError> {
    let time_limit = app.config.request_timeout;
    let interrupt = interrupt(time_limit.map(|limit| (arrived + limit, limit)), app.abort.subscribe());
    let mut interrupt = Box::pin(interrupt);
    let constraint = match &job.constraint {
        Some(params) => Some(select! {
            constraint = app.grammars.constraint(params) => constraint?,
            error = &mut interrupt => return Err(error.into()),
        }),
        None => None,
    };
    let requests = job.engine_requests(&id, app.parts.model.max_sequence_tokens, constraint);
    let requests: Vec<Request> = requests
        .map(|request| origin.of(Request { arrived: arrived.into(), time_limit, ..request }))
        .collect();
    let own_names = |error: RequestError| job.generation.with_own_names(error.into(), prompt_param);
    let events = app.parts.intake.submit(requests.clone()).await.map_err(own_names)?;
    job.generation.sampling.count();
    telemetry::REQUEST_PARAMS_N.record(f64::from(job.generation.n));
    if let Some(most) = job.generation.max_tokens {
        telemetry::REQUEST_PARAMS_MAX_TOKENS.record(f64::from(most));
    }
    let spec = ReplySpec {
        echo: job.echo,
        echo_scores: job.logprobs.is_some(),
        keep_prompt: job.generation.prompt_logprobs.is_some(),
        stop: job.generation.stops.strings.clone(),
        include_stop: job.generation.include_stop,
        show_special: job.generation.show_special,
        shown_tokens: job.shown_tokens.clone(),
        operation: W::OPERATION,
    };
    let tokenizer = &app.parts.tokenizer;
    let replies = events
        .into_iter()
        .zip(&requests)
        .map(|(events, request)| ReplyStream::new(events, tokenizer.clone(), request, &spec));
    let prompt_tokens = job.prompts.iter().map(PromptIds::token_count).sum();
    let per_prompt = job.generation.computed_choices() as usize;
    Ok(ChoiceStreams::new(replies.collect(), per_prompt, prompt_tokens, interrupt))
}

/// Completes when the request's time limit is exceeded, or when the server aborts the requests in flight.
pub async fn interrupt(limit: Option<(Instant, Duration)>, mut cut: watch::Receiver<bool>) -> RequestError {
    // The sender lives as long as the server; without it nothing is aborted.
    let cut = async {
        if cut.wait_for(|cut| *cut).await.is_err() {
            pending::<()>().await;
        }
    };
    match limit {
        None => {
            cut.await;
            RequestError::Interrupted
        }
        Some((deadline, limit)) => match timeout_at(deadline, cut).await {
            Ok(()) => RequestError::Interrupted,
            Err(_) => RequestError::TimedOut { limit_s: limit.as_secs() },
        },
    }
}

impl<W: ResponseFormat> PreparedRequest<W> {
    /// Returns an error if the response would repeat or score too many prompt tokens. A prompt is computed
    /// once, so its further choices need nothing of the engine that would limit them.
    fn check_prompt_tokens(&self) -> Result<(), ApiError> {
        let generation = &self.generation;
        let with_scores = |top: Option<u8>| 1 + usize::from(top.unwrap_or(0));
        let copies = if W::PROMPT_LOGPROBS_IN_CHOICES { generation.n as usize } else { 1 };
        let listed = generation.prompt_logprobs.map_or(0, |top| copies * with_scores(Some(top)));
        let echoes = if self.echo { generation.computed_choices() as usize } else { 0 };
        let echoed = echoes * with_scores(self.logprobs);
        let tokens: usize = self.prompts.iter().map(|ids| ids.prompt.len()).sum();
        let entries = tokens.saturating_mul(listed + echoed);
        if entries <= PROMPT_ENTRIES_MAX {
            return Ok(());
        }
        let param = if listed >= echoed { "prompt_logprobs" } else { "echo" };
        let message = format!(
            "the response would have {entries} prompt tokens and log-probabilities, in all choices together, \
             mostly because of '{param}'; the maximum is {PROMPT_ENTRIES_MAX}"
        );
        Err(ApiError::invalid(param, message))
    }

    /// Returns the engine requests of all choices, those of the first prompt first. `longest` is the maximum
    /// number of tokens of prompt and generated text together.
    fn engine_requests<'a>(
        &'a self,
        id: &'a Arc<str>,
        longest: usize,
        constraint: Option<Arc<Constraint>>,
    ) -> impl Iterator<Item = Request> + 'a {
        let generation = &self.generation;
        let scored = self.logprobs.filter(|_| self.echo).max(generation.prompt_logprobs);
        self.prompts.iter().flat_map(move |PromptIds { encoder_input, prompt, forced_tokens }| {
            // If not even one token fits, intake reports it.
            let room = longest.saturating_sub(prompt.len()).max(1);
            let constraint = constraint.clone();
            (0..generation.computed_choices()).map(move |choice| {
                let request = Request {
                    encoder_input: encoder_input.clone(),
                    ignore_eos: generation.ignore_eos,
                    stop_ids: generation.stops.ids.clone(),
                    constraint: constraint.clone(),
                    beams: generation.beams.map(|beams| BeamOptions {
                        width: beams.width,
                        length_penalty: beams.length_penalty,
                        early_stopping: beams.early_stopping,
                        forced_tokens: *forced_tokens,
                        answer: choice as usize,
                    }),
                    speculation: generation.speculation,
                    // Choices are compared by their log-probabilities.
                    logprobs: self.logprobs.or(generation.selection().map(|_| 0)),
                    // The choices of a prompt have the same ones: the first reports them for all.
                    prompt_logprobs: scored.filter(|_| choice == 0),
                    cache_salt: generation.cache_salt.clone(),
                    ..Request::greedy(
                        id.clone(),
                        prompt.clone(),
                        generation.max_tokens.unwrap_or(room as u32),
                    )
                };
                generation.sampling.apply(choice, request)
            })
        })
    }
}
