//! From a request body to the response, as JSON or as server-sent events: the shared part of the completions
//! and the chat API.
//!
//! Invariant: the reply streams are owned only by the handler's future or by the returned event stream, so
//! that dropping either cancels the request; every event stream ends with `[DONE]`, also after an error.

use super::error::ApiError;
use super::fields::{Fields, shorten};
use super::params::{Delivery, GenerationParams};
use super::prompt_ids::PromptIds;
use super::wire::{ChoiceOutput, Envelope};
use super::{App, OpenResponse, ServeParts};
use crate::actors::reply::{ChoiceStreams, ReplyDelta, ReplySpec, ReplyStream, Usage};
use crate::request::{Request, RequestError, Sampling};
use actix_web::web::{self, BufMut, Bytes, BytesMut};
use async_stream::stream;
use futures_util::{FutureExt, Stream};
use serde::Serialize;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep, timeout_at};

/// Bodies longer than this are parsed and tokenized off the event loop, a few at a time.
const INLINE_BODY_BYTES: usize = 8192;

/// Number of choices that one request may always ask for, even if the engine's limit is lower: the API's own
/// limit; some choices may need no slot.
const CHOICES_MAX: usize = 2048;

/// JSON responses with more tokens are serialized off the event loop: with log-probabilities that takes a
/// while.
const INLINE_TOKENS: usize = 1024;

/// Events that are ready at the same time are sent together, up to about this many bytes.
const BATCH_BYTES: usize = 16 << 10;

const KEEP_ALIVE_COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");
const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";

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
    pub format: W,
}

/// A text generation API: parsing of its request bodies.
pub trait GenerationApi {
    type Format: ResponseFormat + Send + 'static;

    /// Path of the endpoint.
    const PATH: &'static str;

    /// Parses a request body. Errors name the API's own parameters.
    fn parse_body(parts: &ServeParts, body: &[u8]) -> Result<PreparedRequest<Self::Format>, ApiError>;

    /// Name of the prompt parameter in this API.
    const PROMPT_PARAM: &'static str;
}

/// Response format of an API.
pub trait ResponseFormat {
    /// Prefix of response ids.
    const ID_PREFIX: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    type Choice: Serialize;
    type ChunkChoice: Serialize;

    /// Builds a choice of a JSON response.
    fn choice(&self, parts: &ServeParts, index: usize, part: ChoiceOutput) -> Self::Choice;

    /// Builds the chunk that precedes a choice's text in a stream, if the API has one.
    fn first_chunk(&self, index: usize) -> Option<Self::ChunkChoice>;

    /// Builds the next chunk of a choice. `first` is set for the first chunk with output.
    fn chunk(&self, parts: &ServeParts, index: usize, part: ChoiceOutput, first: bool) -> Self::ChunkChoice;
}

/// Handles a text generation request.
pub async fn respond<A: GenerationApi + 'static>(
    app: &Arc<App>,
    id: Arc<str>,
    body: Bytes,
) -> Result<ResponseBody, ApiError> {
    let arrived = Instant::now();
    let open = admit(app, A::PATH)?;
    let job = prepare::<A>(app, body).await?;
    let names = [("prompt", A::PROMPT_PARAM), ("max_tokens", job.generation.limit_name)];
    let own_names =
        |error: ApiError| names.iter().fold(error, |error, (from, to)| error.rename_param(from, to));
    let replies = submit(app, id.clone(), &job, arrived).await.map_err(own_names)?;
    let talk = ResponseWriter::<A::Format> {
        app: app.clone(),
        id: format!("{}{id}", A::Format::ID_PREFIX),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        choices: job.prompts.len() * job.generation.n as usize,
        format: job.format,
    };
    Ok(match job.generation.delivery {
        Delivery::Json => ResponseBody::Json(talk.write_json(replies).await?),
        Delivery::Stream { usage } => ResponseBody::Events(Box::pin(talk.event_stream(replies, usage, open))),
    })
}

/// Admits a request unless the server drains or the model does not serve `path`. Shutdown waits until the
/// returned value is dropped.
pub fn admit(app: &App, path: &'static str) -> Result<OpenResponse, ApiError> {
    let open = app.open_response();
    if app.parts.status.is_draining() {
        return Err(RequestError::Draining.into());
    }
    let model = &app.parts.model;
    match model.endpoints.contains(&path) {
        true => Ok(open),
        false => Err(ApiError::wrong_endpoint(path, model)),
    }
}

/// Parses and tokenizes a body. Few long bodies are parsed at a time, since parsing takes a multiple of their
/// memory.
async fn prepare<A: GenerationApi + 'static>(
    app: &Arc<App>,
    body: Bytes,
) -> Result<PreparedRequest<A::Format>, ApiError> {
    parse_off_loop(app, body, A::parse_body).await
}

/// Parses a body into its fields and checks that `model` names the served model.
pub fn parse_fields(parts: &ServeParts, body: &[u8]) -> Result<Fields, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&fields.take_string("model")?, &parts.model.name)?;
    Ok(fields)
}

/// Runs `read` on a body, on a thread of the blocking pool if the body is long.
pub async fn parse_off_loop<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    read: impl FnOnce(&ServeParts, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() <= INLINE_BODY_BYTES {
        return read(&app.parts, &body);
    }
    let permit = app.long_bodies.acquire().await?;
    let app = app.clone();
    let read = web::block(move || {
        let _permit = permit;
        read(&app.parts, &body)
    });
    read.await.map_err(|error| ApiError::internal(format!("parsing the request body failed: {error}")))?
}

/// Returns an error if a request names another model than the served one.
pub fn check_model(requested: &Option<String>, served: &str) -> Result<(), ApiError> {
    match requested {
        Some(model) if model != served => {
            Err(RequestError::UnknownModel { model: shorten(model), served: served.to_owned() }.into())
        }
        _ => Ok(()),
    }
}

/// Returns an error for more choices than the server can ever accept at once, before anything is allocated
/// per choice. Intake checks the exact limits.
pub fn check_choices(parts: &ServeParts, prompts: usize, n: u32) -> Result<(), ApiError> {
    let (choices, most) = (prompts.saturating_mul(n as usize), parts.model.max_choices.max(CHOICES_MAX));
    if choices <= most {
        return Ok(());
    }
    let message = format!("{prompts} prompts with n = {n} make {choices} choices; the maximum is {most}");
    Err(ApiError::invalid(if n > 1 { "n" } else { "prompt" }, message))
}

/// Submits the requests of all choices to the engine at once.
async fn submit<W>(
    app: &Arc<App>,
    id: Arc<str>,
    job: &PreparedRequest<W>,
    arrived: Instant,
) -> Result<ChoiceStreams, ApiError> {
    let time_limit = app.config.request_timeout;
    let requests = job.engine_requests(&id, app.parts.model.max_sequence_tokens);
    let requests: Vec<Request> =
        requests.map(|request| Request { arrived: arrived.into(), time_limit, ..request }).collect();
    let events = app.parts.intake.submit(requests.clone()).await?;
    let spec = ReplySpec {
        echo: job.echo,
        stop: job.generation.stops.strings.clone(),
        include_stop: job.generation.include_stop,
        show_special: job.generation.show_special,
    };
    let tokenizer = &app.parts.tokenizer;
    let replies = events
        .into_iter()
        .zip(&requests)
        .map(|(events, request)| ReplyStream::new(events, tokenizer.clone(), request, &spec));
    let prompt_tokens = job.prompts.iter().map(PromptIds::token_count).sum();
    let interrupt = interrupt(time_limit.map(|limit| (arrived + limit, limit)), app.abort.subscribe());
    Ok(ChoiceStreams::new(replies.collect(), prompt_tokens, Box::pin(interrupt)))
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

impl<W> PreparedRequest<W> {
    /// Returns the engine requests of all choices, those of the first prompt first. `longest` is the maximum
    /// number of tokens of prompt and generated text together.
    fn engine_requests<'a>(&'a self, id: &'a Arc<str>, longest: usize) -> impl Iterator<Item = Request> + 'a {
        let generation = &self.generation;
        self.prompts.iter().flat_map(move |PromptIds { encoder_input, prompt }| {
            // If not even one token fits, intake reports it.
            let room = longest.saturating_sub(prompt.len()).max(1);
            (0..generation.n).map(move |choice| {
                let seed = generation.sampling.seed.wrapping_add(choice.into());
                Request {
                    encoder_input: encoder_input.clone(),
                    ignore_eos: generation.ignore_eos,
                    stop_ids: generation.stops.ids.clone(),
                    min_tokens: generation.min_tokens,
                    logit_bias: generation.logit_bias.clone(),
                    sampling: Sampling { seed, ..generation.sampling },
                    logprobs: self.logprobs,
                    prompt_logprobs: self.echo && self.logprobs.is_some(),
                    ..Request::greedy(
                        id.clone(),
                        prompt.clone(),
                        generation.max_tokens.unwrap_or(room as u32),
                    )
                }
            })
        })
    }
}

/// Writes the response of one request: the fields that all its chunks share, and their format.
struct ResponseWriter<W> {
    app: Arc<App>,
    id: String,
    created: u64,
    choices: usize,
    format: W,
}

impl<W: ResponseFormat + Send + 'static> ResponseWriter<W> {
    /// Waits for all choices and returns the JSON response.
    async fn write_json(self, mut replies: ChoiceStreams) -> Result<Bytes, ApiError> {
        let mut parts: Vec<ChoiceOutput> = (0..self.choices).map(|_| ChoiceOutput::default()).collect();
        while let Some(next) = replies.next().await {
            let (index, piece) = next?;
            parts[index].append(piece);
        }
        let usage = replies.usage();
        if usage.completion_tokens <= INLINE_TOKENS {
            return Ok(self.serialize_json(parts, usage));
        }
        let put_together = web::block(move || self.serialize_json(parts, usage));
        put_together
            .await
            .map_err(|error| ApiError::internal(format!("serializing the response failed: {error}")))
    }

    /// Serializes the JSON response with all its choices.
    fn serialize_json(&self, parts: Vec<ChoiceOutput>, usage: Usage) -> Bytes {
        let choices = parts.into_iter().enumerate();
        let choices: Vec<_> =
            choices.map(|(index, part)| self.format.choice(&self.app.parts, index, part)).collect();
        let answer = Envelope { usage: Some(usage.into()), ..self.envelope(W::OBJECT, &choices) };
        serde_json::to_vec(&answer).expect(SERIALIZE_BUG).into()
    }

    /// Returns the event stream: a chunk for each reply delta, comments when nothing was sent for a while,
    /// and `[DONE]` at the end, also after an error.
    fn event_stream(
        self,
        mut replies: ChoiceStreams,
        usage: bool,
        open: OpenResponse,
    ) -> impl Stream<Item = Bytes> {
        let mut silence = KeepAliveTimer::new(self.app.config.stream_comment_interval);
        let mut opened = vec![false; self.choices];
        let mut batch = BytesMut::new();
        stream! {
            let _open = open;
            loop {
                let Some(next) = silence.next_or_elapsed(&mut replies).await else {
                    yield KEEP_ALIVE_COMMENT;
                    continue;
                };
                let mut next = Some(next);
                // Deltas that are ready already are sent in the same batch.
                while let Some(Some(Ok((index, piece)))) = next {
                    self.append_delta(&mut batch, index, piece, &mut opened[index]);
                    let full = batch.len() >= BATCH_BYTES;
                    next = if full { None } else { replies.next().now_or_never() };
                }
                match next {
                    None => yield batch.split().freeze(),
                    Some(Some(Err(error))) => {
                        append_event(&mut batch, &ApiError::from(error).body());
                        break;
                    }
                    Some(_) => {
                        if usage {
                            let usage = Some(replies.usage().into());
                            append_event(&mut batch, &Envelope { usage, ..self.chunk(&[]) });
                        }
                        break;
                    }
                }
            }
            batch.extend_from_slice(DONE_EVENT);
            yield batch.freeze();
        }
    }

    /// Appends the event of a reply delta, preceded by the choice's opening chunk if it is the choice's
    /// first.
    fn append_delta(&self, batch: &mut BytesMut, index: usize, piece: ReplyDelta, opened: &mut bool) {
        let first = !std::mem::replace(opened, true);
        if let Some(choice) = first.then(|| self.format.first_chunk(index)).flatten() {
            append_event(batch, &self.chunk(&[choice]));
        }
        let choice = self.format.chunk(&self.app.parts, index, piece.into(), first);
        append_event(batch, &self.chunk(&[choice]));
    }

    fn chunk<'a>(&'a self, choices: &'a [W::ChunkChoice]) -> Envelope<'a, W::ChunkChoice> {
        self.envelope(W::CHUNK_OBJECT, choices)
    }

    fn envelope<'a, C>(&'a self, object: &'static str, choices: &'a [C]) -> Envelope<'a, C> {
        let model = &self.app.parts.model.name;
        Envelope { id: &self.id, object, created: self.created, model, choices, usage: None }
    }
}

/// Timer for keep-alive comments: expires when nothing was sent for an interval.
struct KeepAliveTimer {
    interval: Duration,
    last_sent: Instant,
    timer: Pin<Box<Sleep>>,
}

impl KeepAliveTimer {
    fn new(interval: Duration) -> KeepAliveTimer {
        KeepAliveTimer { interval, last_sent: Instant::now(), timer: Box::pin(sleep(interval)) }
    }

    /// Returns the next item of `replies`, or `None` if the interval elapses first.
    async fn next_or_elapsed(
        &mut self,
        replies: &mut ChoiceStreams,
    ) -> Option<Option<Result<(usize, ReplyDelta), RequestError>>> {
        let next = poll_fn(|cx| {
            if let Poll::Ready(next) = replies.poll_next(cx) {
                return Poll::Ready(Some(next));
            }
            // The timer is reset only when it fires, not with every token.
            while self.timer.as_mut().poll(cx).is_ready() {
                let due = self.last_sent + self.interval;
                if due <= Instant::now() {
                    self.timer.as_mut().reset(Instant::now() + self.interval);
                    return Poll::Ready(None);
                }
                self.timer.as_mut().reset(due);
            }
            Poll::Pending
        })
        .await;
        self.last_sent = Instant::now();
        next
    }
}

const SERIALIZE_BUG: &str = "wire types always serialize; this is a bug";

/// Appends an event: a `data:` line and the empty line that ends it.
fn append_event(batch: &mut BytesMut, value: &impl Serialize) {
    batch.extend_from_slice(b"data: ");
    serde_json::to_writer((&mut *batch).writer(), value).expect(SERIALIZE_BUG);
    batch.extend_from_slice(b"\n\n");
}
