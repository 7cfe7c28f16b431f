//! Writing of a response, as JSON or as an event stream.

use super::ResponseFormat;
use crate::actors::reply::{ChoiceStreams, DeltaOrigin, ReplyDelta};
use crate::actors::request_metrics::Usage;
use crate::actors::response_memory::{HeldBytes, token_bytes};
use crate::request::{RequestError, Token};
use crate::server::error::ApiError;
use crate::server::held_body::held_body;
use crate::server::params::{ChoiceSelection, StreamUsage};
use crate::server::wire::{ChoiceOutput, Envelope, PromptLogprobs, Timings};
use crate::server::{App, OpenResponse};
use actix_web::web::{self, BufMut, Bytes, BytesMut};
use async_stream::stream;
use futures_util::{FutureExt, Stream};
use serde::Serialize;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// JSON responses with more tokens, those with log-probabilities included, are serialized off the event loop.
const INLINE_TOKENS: usize = 1024;

/// Maximum memory that a token of a JSON response takes while it is written: its text, its bytes and its
/// log-probability, as values, as JSON, and again as JSON where the buffer of the response grows.
const JSON_TOKEN_BYTES: usize = 256;

/// As many bytes as a byte of text takes while it is written.
const JSON_TEXT_FACTOR: usize = 4;

/// Events that are ready at the same time are sent together, up to about this many bytes.
const BATCH_BYTES: usize = 16 << 10;

const KEEP_ALIVE_COMMENT: Bytes = Bytes::from_static(b": keep-alive\n\n");
const DONE_EVENT: &[u8] = b"data: [DONE]\n\n";

/// Writes the response of one request: the fields that all its chunks share, and their format.
pub(super) struct ResponseWriter<W> {
    pub(super) app: Arc<App>,
    pub(super) id: String,
    pub(super) created: u64,
    /// Number of computed choices.
    pub(super) choices: usize,
    pub(super) selection: Option<ChoiceSelection>,
    /// Number of most likely tokens to list for each token of a prompt, if those are to be listed.
    pub(super) prompt_logprobs: Option<u8>,
    /// The times of the request, if the response has them.
    pub(super) clock: Option<Clock>,
    /// Name of the rule by which drafts are accepted, if it changes the distribution of the answer.
    pub(super) acceptance: Option<&'static str>,
    pub(super) format: W,
}

/// The times of a request.
#[derive(Clone, Copy)]
pub(super) struct Clock {
    arrived: Instant,
    /// Time of the first generated token.
    first_token: Option<Instant>,
}

impl Clock {
    /// Starts the clock of a request.
    pub(super) fn new(arrived: Instant) -> Clock {
        Clock { arrived, first_token: None }
    }

    /// Notes that a part of the reply is there.
    fn see(&mut self, piece: &ReplyDelta) {
        if self.first_token.is_none() && piece.origin == DeltaOrigin::Answer {
            self.first_token = Some(Instant::now());
        }
    }

    /// Returns the times so far.
    fn timings(&self, usage: Usage) -> Timings {
        let now = Instant::now();
        let first = self.first_token.unwrap_or(now);
        Timings::new(usage, first - self.arrived, now - first)
    }
}

/// The token counts and times in a response or a chunk.
#[derive(Clone, Copy, Default)]
struct Measured {
    usage: Option<Usage>,
    timings: Option<Timings>,
}

impl<W: ResponseFormat + Send + 'static> ResponseWriter<W> {
    /// Waits for all choices and returns the JSON response, whose memory `held` counts.
    pub(super) async fn write_json(
        mut self,
        mut replies: ChoiceStreams,
        held: HeldBytes,
    ) -> Result<Bytes, ApiError> {
        let mut parts: Vec<ChoiceOutput> = (0..self.choices).map(|_| ChoiceOutput::default()).collect();
        while let Some(next) = replies.next().await {
            let (index, piece) = next?;
            held.grow(delta_bytes(&piece))?;
            self.clock.iter_mut().for_each(|clock| clock.see(&piece));
            parts[index].append(piece);
        }
        let (usage, prompts) = (replies.usage(), replies.take_prompts());
        if let Some(selection) = self.selection {
            parts = selection.apply(parts);
        }
        let tokens = self.count_tokens(&parts, &prompts);
        let text: usize = parts.iter().map(|part| part.text.len()).sum();
        held.grow(tokens * JSON_TOKEN_BYTES + text * JSON_TEXT_FACTOR)?;
        if tokens <= INLINE_TOKENS {
            return Ok(held_body(held, self.serialize_json(parts, &prompts, usage)));
        }
        let put_together = web::block(move || held_body(held, self.serialize_json(parts, &prompts, usage)));
        put_together
            .await
            .map_err(|error| ApiError::internal(format!("serializing the response failed: {error}")))
    }

    /// Counts the tokens in a JSON response, those that are listed with their log-probabilities included.
    fn count_tokens(&self, parts: &[ChoiceOutput], prompts: &[Vec<Token>]) -> usize {
        let generated = parts.iter().flat_map(|part| &part.tokens).map(|placed| 1 + placed.token.top.len());
        let copies = if W::PROMPT_LOGPROBS_IN_CHOICES { parts.len() / prompts.len().max(1) } else { 1 };
        let per_token = self.prompt_logprobs.map_or(0, |top| copies * (1 + usize::from(top)));
        generated.sum::<usize>() + prompts.iter().map(Vec::len).sum::<usize>() * per_token
    }

    /// Serializes the JSON response with all its choices. `prompts` are the scored tokens of each prompt, if
    /// they are to be listed.
    fn serialize_json(&self, parts: Vec<ChoiceOutput>, prompts: &[Vec<Token>], usage: Usage) -> Vec<u8> {
        let tokenizer = &self.app.parts.tokenizer;
        let scores = |top| prompts.iter().map(move |tokens| PromptLogprobs::new(tokens, top, tokenizer));
        let scores: Vec<PromptLogprobs> = self.prompt_logprobs.into_iter().flat_map(scores).collect();
        let per_prompt = parts.len() / prompts.len().max(1);
        let choice = |(index, part)| {
            let own = scores.get(index / per_prompt).filter(|_| W::PROMPT_LOGPROBS_IN_CHOICES);
            self.format.choice(&self.app.parts, index, part, own.cloned())
        };
        let choices: Vec<_> = parts.into_iter().enumerate().map(choice).collect();
        let answer = Envelope {
            usage: Some(usage.into()),
            timings: self.clock.map(|clock| clock.timings(usage)),
            prompt_logprobs: scores.into_iter().next().filter(|_| !W::PROMPT_LOGPROBS_IN_CHOICES),
            ..self.envelope(W::OBJECT, &choices)
        };
        serde_json::to_vec(&answer).expect(SERIALIZE_BUG)
    }

    /// Returns the event stream: a chunk for each reply delta, comments when nothing was sent for a while,
    /// and `[DONE]` at the end, also after an error.
    pub(super) fn event_stream(
        mut self,
        mut replies: ChoiceStreams,
        usage: StreamUsage,
        open: OpenResponse,
    ) -> impl Stream<Item = Bytes> {
        let mut silence = KeepAliveTimer::new(self.app.config.stream_comment_interval);
        let mut states: Vec<Option<W::ChoiceState>> = (0..self.choices).map(|_| None).collect();
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
                    self.clock.iter_mut().for_each(|clock| clock.see(&piece));
                    let so_far = Measured {
                        usage: (usage == StreamUsage::EveryChunk).then(|| replies.usage()),
                        timings: self.clock.map(|clock| clock.timings(replies.usage())),
                    };
                    self.append_delta(&mut batch, index, piece, &mut states[index], so_far);
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
                        if usage != StreamUsage::None {
                            let usage = replies.usage();
                            let timings = self.clock.map(|clock| clock.timings(usage));
                            let measured = Measured { usage: Some(usage), timings };
                            append_event(&mut batch, &self.chunk(&[], measured));
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
    /// first. `so_far` is included in each chunk.
    fn append_delta(
        &self,
        batch: &mut BytesMut,
        index: usize,
        piece: ReplyDelta,
        state: &mut Option<W::ChoiceState>,
        so_far: Measured,
    ) {
        let first = state.is_none();
        let state = state.get_or_insert_with(|| self.format.begin_choice(index));
        if let Some(choice) = first.then(|| self.format.first_chunk(index)).flatten() {
            append_event(batch, &self.chunk(&[choice], so_far));
        }
        let choice = self.format.chunk(&self.app.parts, index, piece.into(), first, state);
        append_event(batch, &self.chunk(&[choice], so_far));
    }

    fn chunk<'a>(
        &'a self,
        choices: &'a [W::ChunkChoice],
        Measured { usage, timings }: Measured,
    ) -> Envelope<'a, W::ChunkChoice> {
        Envelope { usage: usage.map(Into::into), timings, ..self.envelope(W::CHUNK_OBJECT, choices) }
    }

    fn envelope<'a, C>(&'a self, object: &'static str, choices: &'a [C]) -> Envelope<'a, C> {
        let model = &self.app.parts.model.name;
        let (id, created, acceptance) = (&self.id, self.created, self.acceptance);
        Envelope {
            id,
            object,
            created,
            model,
            choices,
            acceptance,
            usage: None,
            timings: None,
            prompt_logprobs: None,
        }
    }
}

/// Returns the bytes that a reply delta takes where an answer is collected.
fn delta_bytes(piece: &ReplyDelta) -> usize {
    let placed = piece.tokens.iter().map(|placed| token_bytes(&placed.token) + size_of::<usize>());
    // The buffers of an answer grow by doubling.
    2 * (piece.text.len() + placed.sum::<usize>())
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
