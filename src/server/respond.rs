//! From a request body to the response, as JSON or as server-sent events: the shared part of the completions
//! and the chat API.
//!
//! Invariant: the reply streams are owned only by the handler's future or by the returned event stream, so
//! that dropping either cancels the request; every event stream ends with `[DONE]`, also after an error.

use super::error::ApiError;
use super::fields::{Fields, shortened};
use super::params::{Delivery, Generation};
use super::wire::{Envelope, Part};
use super::{App, OpenResponse, ServeParts};
use crate::actors::reply::{Piece, Replies, ReplySpec, ReplyStream, Usage};
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

const COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Body of a response.
pub enum Answer {
    /// One JSON object.
    Whole(Bytes),
    /// Server-sent events, one or several per item. Dropping the stream cancels the request in the engine.
    Events(Pin<Box<dyn Stream<Item = Bytes>>>),
}

/// A parsed and tokenized request.
pub struct Job<W> {
    pub generation: Generation,
    /// At least one.
    pub prompts: Vec<Asked>,
    /// Whether the response text starts with the prompt.
    pub echo: bool,
    pub logprobs: Option<u8>,
    pub wording: W,
}

/// Token ids of a prompt.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Encoder input; empty for models without an encoder.
    pub source: Arc<[u32]>,
    /// Decoder tokens to continue: the prompt, or the decoder start tokens. Never empty.
    pub prompt: Arc<[u32]>,
}

impl Asked {
    /// Creates the ids of a prompt for a model without an encoder.
    pub fn plainly(prompt: Arc<[u32]>) -> Asked {
        Asked { source: Arc::default(), prompt }
    }

    /// Returns the number of tokens of encoder input and decoder prompt together.
    fn tokens(&self) -> usize {
        self.source.len() + self.prompt.len()
    }
}

/// A text generation API: parsing of its request bodies.
pub trait Api {
    type Wording: Wording + Send + 'static;

    /// Path of the endpoint.
    const PATH: &'static str;

    /// Parses a request body. Errors name the API's own parameters.
    fn read(parts: &ServeParts, body: &[u8]) -> Result<Job<Self::Wording>, ApiError>;

    /// Name of the prompt parameter in this API.
    const PROMPT: &'static str;
}

/// Response format of an API.
pub trait Wording {
    /// Prefix of response ids.
    const ID: &'static str;
    const OBJECT: &'static str;
    const CHUNK_OBJECT: &'static str;
    type Choice: Serialize;
    type ChunkChoice: Serialize;

    /// Builds a choice of a JSON response.
    fn choice(&self, parts: &ServeParts, index: usize, part: Part) -> Self::Choice;

    /// Builds the chunk that precedes a choice's text in a stream, if the API has one.
    fn opening(&self, index: usize) -> Option<Self::ChunkChoice>;

    /// Builds the next chunk of a choice. `first` is set for the first chunk with output.
    fn chunk(&self, parts: &ServeParts, index: usize, part: Part, first: bool) -> Self::ChunkChoice;
}

/// Handles a text generation request.
pub async fn respond<A: Api + 'static>(
    app: &Arc<App>,
    id: Arc<str>,
    body: Bytes,
) -> Result<Answer, ApiError> {
    let arrived = Instant::now();
    let open = enter(app, A::PATH)?;
    let job = prepare::<A>(app, body).await?;
    let names = [("prompt", A::PROMPT), ("max_tokens", job.generation.limit_name)];
    let own_names = |error: ApiError| names.iter().fold(error, |error, (from, to)| error.renamed(from, to));
    let replies = submit(app, id.clone(), &job, arrived).await.map_err(own_names)?;
    let talk = Talk::<A::Wording> {
        app: app.clone(),
        id: format!("{}{id}", A::Wording::ID),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
        choices: job.prompts.len() * job.generation.n as usize,
        wording: job.wording,
    };
    Ok(match job.generation.delivery {
        Delivery::Whole => Answer::Whole(talk.whole(replies).await?),
        Delivery::Stream { usage } => Answer::Events(Box::pin(talk.events(replies, usage, open))),
    })
}

/// Admits a request unless the server drains or the model does not serve `path`. Shutdown waits until the
/// returned value is dropped.
pub fn enter(app: &App, path: &'static str) -> Result<OpenResponse, ApiError> {
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
async fn prepare<A: Api + 'static>(app: &Arc<App>, body: Bytes) -> Result<Job<A::Wording>, ApiError> {
    off_the_loop(app, body, A::read).await
}

/// Parses a body into its fields and checks that `model` names the served model.
pub fn fields_of(parts: &ServeParts, body: &[u8]) -> Result<Fields, ApiError> {
    let mut fields = Fields::of_body(body)?;
    check_model(&fields.text("model")?, &parts.model.name)?;
    Ok(fields)
}

/// Runs `read` on a body, on a thread of the blocking pool if the body is long.
pub async fn off_the_loop<T: Send + 'static>(
    app: &Arc<App>,
    body: Bytes,
    read: impl FnOnce(&ServeParts, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() <= INLINE_BODY_BYTES {
        return read(&app.parts, &body);
    }
    let turn = app.long_bodies.wait().await?;
    let app = app.clone();
    let read = web::block(move || {
        let _turn = turn;
        read(&app.parts, &body)
    });
    read.await.map_err(|error| ApiError::internal(format!("parsing the request body failed: {error}")))?
}

/// Returns an error if a request names another model than the served one.
pub fn check_model(requested: &Option<String>, served: &str) -> Result<(), ApiError> {
    match requested {
        Some(model) if model != served => {
            Err(RequestError::UnknownModel { model: shortened(model), served: served.to_owned() }.into())
        }
        _ => Ok(()),
    }
}

/// Tokenizes a text. Errors name the parameter `param`.
pub fn encode(parts: &ServeParts, text: &str, add_special: bool, param: &str) -> Result<Vec<u32>, ApiError> {
    let ids = parts.tokenizer.encode(text, add_special);
    ids.map_err(|error| ApiError::invalid(param, format!("'{param}' cannot be tokenized: {error}")))
}

/// Returns an error if a token is not in the model's vocabulary; a tokenizer may have more tokens than the
/// model. `what` is what the message calls the value of the parameter `param`.
pub fn check_known(parts: &ServeParts, param: &str, what: &str, ids: &[u32]) -> Result<(), ApiError> {
    let vocab = parts.model.vocab;
    let Some(id) = ids.iter().find(|id| **id as usize >= vocab) else { return Ok(()) };
    let name = shortened(&parts.tokenizer.token_text(*id)).escape_debug().to_string();
    let message = format!(
        "{what} has the token '{name}', whose id {id} is not in the model's vocabulary of {vocab} tokens"
    );
    Err(ApiError::invalid(param, message))
}

/// Returns an error for more choices than the server can ever accept at once, before anything is allocated
/// per choice. Intake checks the exact limits.
pub fn check_choices(parts: &ServeParts, prompts: usize, n: u32) -> Result<(), ApiError> {
    let (choices, most) = (prompts.saturating_mul(n as usize), parts.model.choices_max.max(CHOICES_MAX));
    if choices <= most {
        return Ok(());
    }
    let message = format!("{prompts} prompts with n = {n} make {choices} choices; the maximum is {most}");
    Err(ApiError::invalid(if n > 1 { "n" } else { "prompt" }, message))
}

/// Returns an error if an encoder input has more `tokens` than the encoder's context. `what` is what the
/// message calls the value of the parameter `param`.
pub fn check_source(parts: &ServeParts, param: &str, what: &str, tokens: usize) -> Result<(), ApiError> {
    let most = parts.model.source_context;
    if tokens <= most {
        return Ok(());
    }
    let message = format!("{what} has {tokens} tokens, more than the {most} that the encoder accepts");
    Err(ApiError::too_long(param, message))
}

/// Submits the requests of all choices to the engine at once.
async fn submit<W>(
    app: &Arc<App>,
    id: Arc<str>,
    job: &Job<W>,
    arrived: Instant,
) -> Result<Replies, ApiError> {
    let time_limit = app.config.request_timeout;
    let requests = job.requests(&id, app.parts.model.longest);
    let requests: Vec<Request> =
        requests.map(|request| Request { arrived: arrived.into(), time_limit, ..request }).collect();
    let events = app.parts.intake.submit(requests.clone()).await?;
    let spec = ReplySpec {
        echo: job.echo,
        stop: job.generation.stops.strings.clone(),
        keeps_stop: job.generation.keeps_stop,
        shows_special: job.generation.shows_special,
    };
    let tokenizer = &app.parts.tokenizer;
    let replies = events
        .into_iter()
        .zip(&requests)
        .map(|(events, request)| ReplyStream::new(events, tokenizer.clone(), request, &spec));
    let prompt_tokens = job.prompts.iter().map(Asked::tokens).sum();
    let interrupt = interrupt(time_limit.map(|limit| (arrived + limit, limit)), app.cut.subscribe());
    Ok(Replies::new(replies.collect(), prompt_tokens, Box::pin(interrupt)))
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
            RequestError::CutOff
        }
        Some((deadline, limit)) => match timeout_at(deadline, cut).await {
            Ok(()) => RequestError::CutOff,
            Err(_) => RequestError::TimedOut { limit_s: limit.as_secs() },
        },
    }
}

impl<W> Job<W> {
    /// Returns the engine requests of all choices, those of the first prompt first. `longest` is the maximum
    /// number of tokens of prompt and generated text together.
    fn requests<'a>(&'a self, id: &'a Arc<str>, longest: usize) -> impl Iterator<Item = Request> + 'a {
        let generation = &self.generation;
        self.prompts.iter().flat_map(move |Asked { source, prompt }| {
            // If not even one token fits, intake reports it.
            let room = longest.saturating_sub(prompt.len()).max(1);
            (0..generation.n).map(move |choice| {
                let seed = generation.sampling.seed.wrapping_add(choice.into());
                Request {
                    source: source.clone(),
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
struct Talk<W> {
    app: Arc<App>,
    id: String,
    created: u64,
    choices: usize,
    wording: W,
}

impl<W: Wording + Send + 'static> Talk<W> {
    /// Waits for all choices and returns the JSON response.
    async fn whole(self, mut replies: Replies) -> Result<Bytes, ApiError> {
        let mut parts: Vec<Part> = (0..self.choices).map(|_| Part::default()).collect();
        while let Some(next) = replies.next().await {
            let (index, piece) = next?;
            parts[index].append(piece);
        }
        let usage = replies.usage();
        if usage.completion_tokens <= INLINE_TOKENS {
            return Ok(self.put_together(parts, usage));
        }
        let put_together = web::block(move || self.put_together(parts, usage));
        put_together
            .await
            .map_err(|error| ApiError::internal(format!("serializing the response failed: {error}")))
    }

    /// Serializes the JSON response with all its choices.
    fn put_together(&self, parts: Vec<Part>, usage: Usage) -> Bytes {
        let choices = parts.into_iter().enumerate();
        let choices: Vec<_> =
            choices.map(|(index, part)| self.wording.choice(&self.app.parts, index, part)).collect();
        let answer = Envelope { usage: Some(usage.into()), ..self.envelope(W::OBJECT, &choices) };
        serde_json::to_vec(&answer).expect(PLAIN).into()
    }

    /// Returns the event stream: a chunk for each reply delta, comments when nothing was sent for a while,
    /// and `[DONE]` at the end, also after an error.
    fn events(self, mut replies: Replies, usage: bool, open: OpenResponse) -> impl Stream<Item = Bytes> {
        let mut silence = Silence::new(self.app.config.stream_comment_interval);
        let mut opened = vec![false; self.choices];
        let mut batch = BytesMut::new();
        stream! {
            let _open = open;
            loop {
                let Some(next) = silence.or(&mut replies).await else {
                    yield COMMENT;
                    continue;
                };
                let mut next = Some(next);
                // Deltas that are ready already are sent in the same batch.
                while let Some(Some(Ok((index, piece)))) = next {
                    self.add_piece(&mut batch, index, piece, &mut opened[index]);
                    let full = batch.len() >= BATCH_BYTES;
                    next = if full { None } else { replies.next().now_or_never() };
                }
                match next {
                    None => yield batch.split().freeze(),
                    Some(Some(Err(error))) => {
                        add_event(&mut batch, &ApiError::from(error).body());
                        break;
                    }
                    Some(_) => {
                        if usage {
                            let usage = Some(replies.usage().into());
                            add_event(&mut batch, &Envelope { usage, ..self.chunk(&[]) });
                        }
                        break;
                    }
                }
            }
            batch.extend_from_slice(DONE);
            yield batch.freeze();
        }
    }

    /// Appends the event of a reply delta, preceded by the choice's opening chunk if it is the choice's
    /// first.
    fn add_piece(&self, batch: &mut BytesMut, index: usize, piece: Piece, opened: &mut bool) {
        let first = !std::mem::replace(opened, true);
        if let Some(opening) = first.then(|| self.wording.opening(index)).flatten() {
            add_event(batch, &self.chunk(&[opening]));
        }
        let choice = self.wording.chunk(&self.app.parts, index, piece.into(), first);
        add_event(batch, &self.chunk(&[choice]));
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
struct Silence {
    interval: Duration,
    since: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Silence {
    fn new(interval: Duration) -> Silence {
        Silence { interval, since: Instant::now(), timer: Box::pin(sleep(interval)) }
    }

    /// Returns the next item of `replies`, or `None` if the interval elapses first.
    async fn or(&mut self, replies: &mut Replies) -> Option<Option<Result<(usize, Piece), RequestError>>> {
        let next = poll_fn(|cx| {
            if let Poll::Ready(next) = replies.poll_next(cx) {
                return Poll::Ready(Some(next));
            }
            // The timer is reset only when it fires, not with every token.
            while self.timer.as_mut().poll(cx).is_ready() {
                let due = self.since + self.interval;
                if due <= Instant::now() {
                    self.timer.as_mut().reset(Instant::now() + self.interval);
                    return Poll::Ready(None);
                }
                self.timer.as_mut().reset(due);
            }
            Poll::Pending
        })
        .await;
        self.since = Instant::now();
        next
    }
}

const PLAIN: &str = "wire types always serialize; this is a bug";

/// Appends an event: a `data:` line and the empty line that ends it.
fn add_event(batch: &mut BytesMut, value: &impl Serialize) {
    batch.extend_from_slice(b"data: ");
    serde_json::to_writer((&mut *batch).writer(), value).expect(PLAIN);
    batch.extend_from_slice(b"\n\n");
}
