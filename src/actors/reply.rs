//! The reply stream: converts a sequence's events to text. It detokenizes without splitting characters, ends
//! the text at stop strings, tracks each token's offset in the text, and measures the request as the client
//! sees it. [`ChoiceStreams`] are the reply streams of one request.
//!
//! Owned by the HTTP task; dropping it cancels the sequence.
//! Invariant: the concatenated texts of all deltas are the reply, every token is emitted exactly once, and
//! the last item is an end or an error, once.

use super::stream::TokenStream;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use crate::telemetry;
use crate::text::stop::{Searched, StopMatcher};
use crate::text::{Detokenizer, Tokenizer};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tracing::info;

/// Options for converting a sequence's events to text.
#[derive(Clone, Debug, Default)]
pub struct ReplySpec {
    /// Whether the reply starts with the prompt's text.
    pub echo: bool,
    /// Strings that end the reply; none is empty.
    pub stop: Arc<[String]>,
    /// Whether the reply includes the stop string or token that ends it.
    pub keeps_stop: bool,
    /// Whether the text includes special tokens.
    pub shows_special: bool,
}

/// A part of the reply: text, and the tokens whose text is complete with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Piece {
    /// Whole characters; empty if the tokens have no text.
    pub text: String,
    pub tokens: Vec<PlacedToken>,
    pub origin: Origin,
    /// Why the reply ended; set in the last delta only.
    pub end: Option<End>,
}

/// Why a reply ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The engine ended the sequence.
    Engine(FinishReason),
    /// The reply contains this stop string.
    StopString(String),
}

impl End {
    /// Returns the `finish_reason` of the OpenAI API.
    pub fn as_str(&self) -> &'static str {
        match self {
            End::Engine(reason) => reason.as_str(),
            End::StopString(_) => FinishReason::Stop.as_str(),
        }
    }
}

/// Whether a delta's tokens are from the prompt or generated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Prompt,
    Answer,
}

/// A token and the offset of its text in the reply.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedToken {
    pub token: Token,
    /// Number of characters (Unicode scalar values) of the reply before the first one that the token
    /// contributes to.
    pub offset: usize,
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
}

/// Converts a sequence's events to text deltas.
pub struct ReplyStream {
    events: TokenStream,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stop: Arc<[String]>,
    /// Whether the reply includes the stop string or token that ends it.
    keeps_stop: bool,
    /// Number of leading generated tokens whose text is not searched for stop strings (`min_tokens`).
    unsearched: usize,
    /// The prompt's tokens while they are still to be echoed from here: without log-probabilities, the engine
    /// does not send them.
    unsent_prompt: Option<Arc<[u32]>>,
    /// Tokens whose text is not emitted completely, each with the reply's length in characters up to the
    /// token's end.
    held: VecDeque<(PlacedToken, usize)>,
    /// Characters decoded from tokens.
    /// Characters emitted so far.
    chars: usize,
    left: usize,
    measure: Measure,
}

impl ReplyStream {
    /// Creates the reply stream of `request`, which was just accepted, from its `events`.
    pub fn new(
        events: TokenStream,
        tokenizer: Arc<Tokenizer>,
        request: &Request,
        spec: &ReplySpec,
    ) -> ReplyStream {
        let fresh = Detokenizer::new(tokenizer, !spec.shows_special);
        let (detokenizer, unsent_prompt) = match spec.echo {
            false => (fresh.with_prompt(&request.prompt), None),
            true if request.prompt_logprobs => (fresh, None),
            true => (fresh, Some(request.prompt.clone())),
        };
        ReplyStream {
            events,
            detokenizer,
            matcher: StopMatcher::new(spec.stop.clone(), spec.keeps_stop),
            stop: spec.stop.clone(),
            keeps_stop: spec.keeps_stop,
            unsearched: request.min_tokens as usize,
            unsent_prompt,
            held: VecDeque::new(),
            chars: 0,
            left: 0,
            measure: Measure::new(request),
        }
    }

    /// Polls for the next delta. There is nothing after the delta with `end`, or after an error.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Piece, RequestError>>> {
        if self.is_over() {
            return Poll::Ready(None);
        }
        if let Some(prompt) = self.unsent_prompt.take() {
            let bare = |id: &u32| Token { id: *id, logprob: None, top: Vec::new() };
            return Poll::Ready(Some(Ok(self.prompt_piece(prompt.iter().map(bare)))));
        }
        loop {
            let delta = match ready!(self.events.poll_next(cx)) {
                Some(TokenEvent::Prompt(tokens)) => Ok(self.prompt_piece(tokens.into_iter())),
                Some(TokenEvent::Token(token)) => match self.answer_piece(token) {
                    Some(delta) => Ok(delta),
                    None => continue,
                },
                Some(TokenEvent::Last(token)) => match self.ending_piece(token) {
                    Some(delta) => Ok(delta),
                    None => continue,
                },
                // These events are not text.
                Some(TokenEvent::Embedding(_) | TokenEvent::Filled(_)) => continue,
                Some(TokenEvent::Finished(reason)) => Ok(self.last_piece(reason)),
                Some(TokenEvent::Failed(error)) => Err(self.fail(error)),
                None => {
                    let error = self.measure.why_gone();
                    Err(self.fail(error))
                }
            };
            return Poll::Ready(Some(delta));
        }
    }

    /// Returns the next delta; the polling form is [`ReplyStream::poll_next`]. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<Piece, RequestError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Whether the end, or an error, has been returned.
    pub fn is_over(&self) -> bool {
        self.measure.is_over()
    }

    /// Ends the reply with `error`, unless it has ended, and returns the error.
    fn fail(&mut self, error: RequestError) -> RequestError {
        if !self.is_over() {
            self.measure.fail(&error);
            self.events.close();
        }
        error
    }

    /// Processes a generated token. Returns `None` if neither text nor tokens can be emitted yet.
    fn answer_piece(&mut self, token: Token) -> Option<Piece> {
        self.measure.token(self.events.made_at());
        let decoded = self.push(token);
        let Searched { text, hit } = self.search(decoded);
        if let Some(index) = hit {
            return Some(self.stopped(text, index));
        }
        let delta = self.piece(text, Origin::Answer);
        (!delta.text.is_empty() || !delta.tokens.is_empty()).then_some(delta)
    }

    /// Searches the next text of the answer for stop strings, once `min_tokens` are generated.
    fn search(&mut self, text: String) -> Searched {
        if self.measure.usage.completion_tokens > self.unsearched {
            self.matcher.push(text)
        } else {
            Searched { text, hit: None }
        }
    }

    /// Processes the token that ended the sequence. Its text is omitted, unless stops are included.
    fn ending_piece(&mut self, token: Token) -> Option<Piece> {
        if self.keeps_stop {
            return self.answer_piece(token);
        }
        self.measure.token(self.events.made_at());
        // The token is emitted with the last delta.
        self.held.push_back((PlacedToken { token, offset: self.chars }, usize::MAX));
        None
    }

    /// Decodes a token, and returns the text that is final with it.
    fn push(&mut self, token: Token) -> String {
        let offset = self.chars;
        let text = self.detokenizer.push(token.id);
        self.chars += text.chars().count();
        // A token that begins an incomplete character takes part in that character.
        let end = self.chars + usize::from(!self.detokenizer.holds_nothing());
        self.held.push_back((PlacedToken { token, offset }, end));
        text
    }

    /// Builds a delta of `text`, with the tokens whose text is complete with it.
    fn piece(&mut self, text: String, origin: Origin) -> Piece {
        self.left += text.chars().count();
        let complete = self.held.iter().take_while(|(_, end)| *end <= self.left).count();
        let tokens = self.held.drain(..complete).map(|(token, _)| token).collect();
        Piece { text, tokens, origin, end: None }
    }

    /// Builds the delta of the prompt. It contains all prompt tokens; a character that the prompt leaves
    /// incomplete is emitted with the token that completes it.
    fn prompt_piece(&mut self, tokens: impl Iterator<Item = Token>) -> Piece {
        let text: String = tokens.map(|token| self.push(token)).collect();
        let rest = self.piece(text, Origin::Prompt);
        let tokens = rest.tokens.into_iter().chain(self.take_held()).collect();
        Piece { tokens, ..rest }
    }

    /// Builds the last delta: flushes the detokenizer and the stop matcher.
    fn last_piece(&mut self, reason: FinishReason) -> Piece {
        let rest = self.detokenizer.finish();
        self.chars += rest.chars().count();
        // The text of an incomplete character may complete a stop string, too.
        let (text, end) = match self.search(rest) {
            Searched { text, hit: Some(index) } => (text, End::StopString(self.stop[index].clone())),
            Searched { text, hit: None } => (text + &self.matcher.finish(), End::Engine(reason)),
        };
        self.measure.end(end.as_str());
        let tokens = self.take_held().collect();
        Piece { text, tokens, origin: Origin::Answer, end: Some(end) }
    }

    /// Builds the last delta after a stop string was found, and cancels the sequence.
    fn stopped(&mut self, text: String, index: usize) -> Piece {
        let end = End::StopString(self.stop[index].clone());
        self.measure.end(end.as_str());
        self.events.close();
        Piece { text, tokens: self.take_held().collect(), origin: Origin::Answer, end: Some(end) }
    }

    /// Takes all tokens that are not emitted yet.
    fn take_held(&mut self) -> impl Iterator<Item = PlacedToken> + use<> {
        std::mem::take(&mut self.held).into_iter().map(|(token, _)| token)
    }
}

/// A future that completes when the request must end early, with the reason.
pub type Interrupt = Pin<Box<dyn Future<Output = RequestError>>>;

/// The reply streams of one request, one per choice.
pub struct Replies {
    choices: Vec<ReplyStream>,
    /// Number of prompt tokens, each prompt counted once.
    prompt_tokens: usize,
    /// Index of the choice that is polled first, so that polling is fair.
    turn: usize,
    over: bool,
    interrupt: Interrupt,
}

impl Replies {
    /// Creates the streams of a request from its `choices`, whose prompts have `prompt_tokens` tokens in
    /// total.
    pub fn new(choices: Vec<ReplyStream>, prompt_tokens: usize, interrupt: Interrupt) -> Replies {
        Replies { choices, prompt_tokens, turn: 0, over: false, interrupt }
    }

    /// Polls for the next delta and the index of its choice. There is nothing after the end of every choice,
    /// or after an error, which ends all choices.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(usize, Piece), RequestError>>> {
        if self.over {
            return Poll::Ready(None);
        }
        let choices = self.choices.len();
        for index in (0..choices).map(|ahead| (self.turn + ahead) % choices) {
            match self.choices[index].poll_next(cx) {
                Poll::Ready(Some(Ok(delta))) => {
                    self.turn = index + 1;
                    return Poll::Ready(Some(Ok((index, delta))));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(self.fail(error)))),
                Poll::Ready(None) | Poll::Pending => {}
            }
        }
        if self.choices.iter().all(ReplyStream::is_over) {
            self.over = true;
            return Poll::Ready(None);
        }
        let error = ready!(self.interrupt.as_mut().poll(cx));
        Poll::Ready(Some(Err(self.fail(error))))
    }

    /// Returns the next delta; the polling form is [`ChoiceStreams::poll_next`]. Cancel-safe.
    pub async fn next(&mut self) -> Option<Result<(usize, Piece), RequestError>> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Ends every choice with `error`, and returns it.
    fn fail(&mut self, error: RequestError) -> RequestError {
        self.over = true;
        self.choices.iter_mut().fold(error, |error, choice| choice.fail(error))
    }

    /// Returns the token counts so far.
    pub fn usage(&self) -> Usage {
        let completion_tokens = self.choices.iter().map(|reply| reply.measure.usage.completion_tokens).sum();
        Usage { prompt_tokens: self.prompt_tokens, completion_tokens }
    }
}

/// Times and token counts of a request: recorded as metrics, and logged in one line at the end. Dropping it
/// before the end counts as a disconnected client.
pub struct Measure {
    id: Arc<str>,
    began: Instant,
    first_token_after: Option<Duration>,
    last_token: Instant,
    usage: Usage,
    over: bool,
    between_tokens: metrics::Histogram,
    time_limit: Option<Duration>,
}

impl Measure {
    /// Starts measuring a request that was just accepted.
    pub fn new(request: &Request) -> Measure {
        Measure {
            id: request.id.clone(),
            began: request.arrived,
            first_token_after: None,
            last_token: request.arrived,
            usage: Usage { prompt_tokens: request.given_tokens(), completion_tokens: 0 },
            over: false,
            between_tokens: telemetry::INTER_TOKEN_LATENCY.histogram(),
            time_limit: request.time_limit,
        }
    }

    /// Sets the number of prompt tokens, for a request of several inputs.
    pub fn of_tokens(mut self, prompt_tokens: usize) -> Measure {
        self.usage.prompt_tokens = prompt_tokens;
        self
    }

    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Records a generated token. `now` is when it was produced, so that a client that reads late does not
    /// count.
    fn token(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.last_token);
        match self.first_token_after {
            None => {
                self.first_token_after = Some(since);
                telemetry::TIME_TO_FIRST_TOKEN.record(since.as_secs_f64());
            }
            Some(_) => self.between_tokens.record(since.as_secs_f64()),
        }
        self.last_token = now;
        self.usage.completion_tokens += 1;
    }

    /// Returns the error for an event channel that the engine closed without an end: the engine may notice a
    /// timeout first.
    pub fn why_gone(&self) -> RequestError {
        match self.time_limit {
            Some(limit) if self.began.elapsed() >= limit => {
                RequestError::TimedOut { limit_s: limit.as_secs() }
            }
            _ => RequestError::EngineGone,
        }
    }

    /// Ends the request with an error, unless it has ended.
    pub fn fail(&mut self, error: &RequestError) {
        if !self.over {
            self.end(match error {
                RequestError::TimedOut { .. } => "timeout",
                _ => "error",
            });
        }
    }

    /// Ends the request, and records and logs its metrics. `reason` is a value of the label
    /// `finished_reason`.
    pub fn end(&mut self, reason: &'static str) {
        self.over = true;
        let took = self.began.elapsed();
        let Usage { prompt_tokens, completion_tokens } = self.usage;
        telemetry::REQUEST_SUCCESS.count([reason]);
        telemetry::E2E_LATENCY.record(took.as_secs_f64());
        telemetry::REQUEST_PROMPT_TOKENS.record(prompt_tokens as f64);
        telemetry::REQUEST_GENERATION_TOKENS.record(completion_tokens as f64);
        let first_token_ms = self.first_token_after.map(|after| after.as_secs_f64() * 1e3);
        info!(
            request = &*self.id,
            reason,
            prompt_tokens,
            completion_tokens,
            first_token_ms,
            took_ms = took.as_secs_f64() * 1e3,
            "request finished"
        );
    }
}

impl Drop for Measure {
    fn drop(&mut self) {
        if !self.over {
            telemetry::CLIENTS_GONE.add(1);
            self.end("abort");
        }
    }
}
